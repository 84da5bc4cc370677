"""EAGLE-3 on disk: fc [H, 3D], a layer that reads 2H, norm, lm_head [U, H], the draft vocabulary d2t (methods §4).

Layers above the first are `layers.1`, `layers.2`, … . What norms their input is called `input_layernorm` in vLLM and
`hidden_norm` in SGLang and TensorRT-LLM. We write it under both names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from headstart.heads.base import MAX_LAYERS, Head, HeadConfig
from headstart.heads.checkpoints.geometry import are_integers, flag, integer, llama_dims, require_plain
from headstart.heads.checkpoints.head_files import Spelling
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import Piece, TensorMap, map_tensors
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle3.head import Eagle3Config, default_feature_layers
from headstart.heads.families.eagle_files import (
    LAYER,
    LAYER_IDS,
    LlamaDraftFiles,
    has_draft_layer,
    is_eagle3,
    is_parallel,
    read_draft_ids,
    require_kind,
    shifted,
    target_embedding,
    with_target,
    write_draft_ids,
)
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="EAGLE-3",
    title="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    authors="Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang",
    arxiv="2503.01840",
)
#: `architectures` of a head with q/k norms, as vLLM reads it
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
#: what an earlier SGLang called fc_norm.{0, 1, 2}
LEGACY_NORMS = {f"aux_norm_{part}.weight": f"fc_norm.{n}.weight" for n, part in enumerate(("low", "mid", "high"))}
VARIANTS = ("norm_output", "norm_before_fc", "fc_norm", "layer_types")
LAYER_WITH_NORMS = (*LAYER, "input_layernorm.weight", "hidden_norm.weight")
#: tensors of the target that some trainers leave in the file
VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")


class Eagle3Files(LlamaDraftFiles):
    facts = {
        "feature": "hidden_states[k] at feature_layers (inputs of decoder layers k, before any norm)",
        "residual": "un-normed g (norm_before_residual = false)",
        "recycled": "pre-norm output",
        "method": f"{PAPER.method}, arXiv {PAPER.arxiv}",
    }
    layouts: ClassVar[tuple[str, ...]] = ("EAGLE-3", "SpecForge")
    speculators = "eagle3"
    title = "EAGLE-3"
    #: name in FAMILIES
    family: ClassVar[str] = "eagle3"
    architecture = "LlamaForCausalLMEagle3"
    layer = "midlayer."
    variants: ClassVar[tuple[str, ...]] = VARIANTS
    #: what a file of the speculators library means that does not give norm_before_residual
    normed_residual: ClassVar[bool] = True

    def facts_of(self, config: HeadConfig) -> dict[str, str]:
        normed = cast(Eagle3Config, config).norm_output
        return {**self.facts, "recycled": "normed output"} if normed else self.facts

    def recognise(self, raw: RawCheckpoint) -> bool:
        return has_draft_layer(raw) and is_eagle3(raw.tensors) and not is_parallel(raw)

    def spell(self, raw: RawCheckpoint) -> Spelling:
        spelling = super().spell(raw)
        names = {re.sub(r"^layers\.0\.", self.layer, name): full for name, full in spelling.names.items()}
        return replace(spelling, names={LEGACY_NORMS.get(name, name): full for name, full in names.items()})

    def read_flat(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, layout: str
    ) -> TensorMap:
        where = str(raw.directory / "config.json")
        layer_ids = _read_layers(config, target, where, self.variants)
        draft = llama_dims(config, where, target.num_layers if target else max(layer_ids or (0,)) + 1)
        hidden = draft.hidden_size
        width = integer(config, "target_hidden_size", where, default=target.hidden_size if target else hidden)
        dims = with_target(replace(draft, hidden_size=width), target, where)
        size = integer(config, "draft_vocab_size", where, default=dims.vocab_size)
        fields = {
            "feature_layers": layer_ids,
            "draft_vocab_size": size,
            "hidden_size": None if hidden == width else hidden,
            "intermediate_size": draft.intermediate_size,
            "num_key_value_heads": draft.num_kv_heads,
            **_variant(config, where),
            **self.more_fields(config, dims, where),
        }
        expected = {name: name for name in ("fc.weight", "norm.weight", "lm_head.weight")}
        expected |= _fc_norms(fields["fc_norm"], names)
        layers, unused = _layer_names(raw, names, fields["layers"], fields["qk_norm"])
        expected |= layers
        if self.shares_embeddings(fields):
            unused |= self.shared_embeddings(raw, names, dims)
        else:
            expected["embed_tokens.weight"] = "embed_tokens.weight"
        unused |= {name: "the target's own, used in training only" for name in VERIFIER if name in names}
        if "lm_head.weight" not in names:
            rows = f", of {dims.vocab_size} rows where the draft vocabulary has {size}: wrong"
            raise FormatError(
                f"{raw.directory}: lm_head.weight is missing, so engines put the target's in its place"
                f"{'' if size == dims.vocab_size else rows}. Add the head's own [draft_vocab_size, hidden_size] matrix."
            )
        ids_U = read_draft_ids(raw, names, size, dims.vocab_size, where)
        unused |= {name: "turned into the draft ids" for name in ("d2t", "t2d") if name in names}
        pieces = self.pieces(raw, names, fields, dims)
        mapped = map_tensors(raw, layout, self.family, fields, dims, names, expected, unused, pieces)
        return replace(mapped, draft_ids_U=ids_U)

    def shares_embeddings(self, fields: dict[str, Any]) -> bool:
        """Whether a head with these fields uses the target's embeddings."""
        return fields["hidden_size"] is None

    def more_fields(self, config: dict[str, Any], dims: HeadDims, where: str) -> dict[str, Any]:
        """Fields of the head's config that config.json gives beside those of every EAGLE-3 head."""
        return {}

    def pieces(
        self, raw: RawCheckpoint, names: dict[str, str], fields: dict[str, Any], dims: HeadDims
    ) -> dict[str, Piece]:
        """Our name → the part of a tensor of the file that it is."""
        return {}

    def shared_embeddings(self, raw: RawCheckpoint, names: dict[str, str], dims: HeadDims) -> dict[str, str]:
        """{name: why it is not used} for embeddings in the file of a head that uses the target's."""
        return target_embedding(raw, names, dims)

    def from_speculators(
        self, outer: dict[str, Any], flat: dict[str, Any], tensors: Iterable[str], where: str
    ) -> dict[str, str]:
        keys = ("draft_vocab_size", "target_hidden_size", LAYER_IDS)
        flat |= {"draft_vocab_size": 32000} | {key: outer[key] for key in keys if outer.get(key) is not None}
        flat |= {key: outer[key] for key in ("norm_before_fc", "fc_norm", "norm_output") if outer.get(key) is not None}
        flat["norm_before_residual"] = flag(outer, "norm_before_residual", where, self.normed_residual)
        return {name: name for name in tensors}

    def settings(self, config: HeadConfig, dims: HeadDims) -> dict[str, Any]:
        ours, given = super().settings(config, dims), cast(Eagle3Config, config)
        ours["feature_layers"] = given.feature_layers or default_feature_layers(dims.num_layers)
        ours["draft_vocab_size"] = given.draft_vocab_size or dims.vocab_size
        ours["hidden_size"] = None if given.hidden_size == dims.hidden_size else given.hidden_size
        return ours

    def tensors(self, head: Head) -> dict[str, Tensor]:
        """The state dict, with d2t (int64 offsets) and t2d (bool) in the place of `draft_ids_U`.

        With several layers, the first one is `layers.0`: TensorRT-LLM knows `midlayer` for a single layer alone.
        """
        tensors = super().tensors(head)
        write_draft_ids(tensors, head.dims.vocab_size)
        config = cast(Eagle3Config, head.config)
        if config.layers > 1:
            tensors = {name.replace(self.layer, "layers.0."): tensor for name, tensor in tensors.items()}
        for n in range(1, config.layers):
            tensors[f"layers.{n}.hidden_norm.weight"] = tensors[f"layers.{n}.input_layernorm.weight"].clone()
        return tensors

    def config_json(self, head: Head) -> dict[str, Any]:
        ids, given = list(head.spec.layer_ids), cast(Eagle3Config, head.config)
        nested: dict[str, Any] = {"use_aux_hidden_state": True, LAYER_IDS: shifted(ids, -1)}
        variant: dict[str, Any] = {"num_hidden_layers": given.layers}
        if given.qk_norm:
            variant |= {"architectures": [QWEN3_ARCHITECTURE], "model_type": "qwen3"}
        if given.fc_norm == "stream":
            variant["fc_norm"] = True
        if given.fc_norm == "concat":  # TensorRT-LLM reads the nested one alone
            variant["norm_before_fc"] = nested["norm_before_fc"] = True
        if given.norm_output:
            variant["norm_output"] = True
        return super().config_json(head) | {
            "draft_vocab_size": head.state_dict()["lm_head.weight"].shape[0],
            "target_hidden_size": head.dims.hidden_size,
            "norm_before_residual": False,
            LAYER_IDS: ids,
            "eagle_config": nested,
            **variant,
        }


def _read_layers(
    config: dict[str, Any], target: HeadDims | None, where: str, variants: tuple[str, ...]
) -> list[int] | None:
    """HF `hidden_states` indices that a head reads; None where the file leaves the usual three to the engine.

    Args: variants: fields that change what a layer computes, and that the family reads.
    Raises: FormatError for a variant that Headstart does not run, for wrong layers, and where neither the file nor a
        target tells them.
    """
    require_plain(config, where, variants)
    require_kind(config, where, "Llama's or Qwen3's (Qwen2's has biases)", ("qwen3",))
    if flag(config, "norm_before_residual", where, False):
        raise FormatError(
            f"{where}: norm_before_residual is true: the residual is taken after hidden_norm. Headstart trains "
            "and runs the variant that every engine runs (false); serve this head with vLLM or train a new one."
        )
    nested = _nested(config, where)
    require_plain(nested, f"{where}: eagle_config", ("norm_before_fc",))
    if nested.get("use_aux_hidden_state", True) is not True:
        raise FormatError(
            f"{where}: eagle_config.use_aux_hidden_state is false: the head does not read three target layers"
        )
    layers = _layers(config.get(LAYER_IDS), nested.get(LAYER_IDS), where)
    if layers is None and target is None:
        raise FormatError(
            f"{where}: does not say which target layers it reads ({LAYER_IDS}); the usual ones depend on the target's "
            "depth: name the target as well (--target, or load_head(directory, dims))"
        )
    limit = 1 << 16 if target is None else target.num_layers
    if layers is not None and (
        len(layers) != 3 or sorted(set(layers)) != layers or layers[0] < 1 or layers[-1] >= limit
    ):
        below = (
            "from 1" if target is None else f"below {limit}, the target's depth (its last hidden state is post-norm)"
        )
        raise FormatError(
            f"{where}: feature layers {layers}; expected three distinct ascending ids {below}: engines sort and "
            "de-duplicate them"
        )
    return layers


def names_qwen3(config: dict[str, Any]) -> bool:
    """Whether `architectures` names the class whose layers have q/k norms."""
    named = config.get("architectures")
    return isinstance(named, list) and QWEN3_ARCHITECTURE in named


def _nested(config: dict[str, Any], where: str) -> dict[str, Any]:
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise FormatError(f"{where}: eagle_config is {nested!r}, expected an object")
    return nested


def _variant(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of Eagle3Config that say how many layers there are, and what is normed.

    Raises: FormatError for settings that contradict each other, or that engines read differently.
    """
    nested = _nested(config, where)
    layers = integer(config, "num_hidden_layers", where, default=1, bounds=(1, MAX_LAYERS))
    if (kinds := config.get("layer_types")) not in (None, ["full_attention"] * layers):
        raise FormatError(f"{where}: layer_types is {kinds!r}, expected full_attention for each of {layers} layers")
    concat = flag(config, "norm_before_fc", where, False)
    inner = flag(nested, "norm_before_fc", f"{where}: eagle_config", concat)
    if "norm_before_fc" in config and inner != concat:
        raise FormatError(
            f"{where}: norm_before_fc is {concat} at top level and {inner} inside eagle_config, which engines read "
            "first. Write both alike."
        )
    stream = flag(config, "fc_norm", where, False) or flag(config, "use_aux_norm", where, False)
    if inner and stream:
        raise FormatError(f"{where}: norm_before_fc and fc_norm are both set: a head has one kind of norm before fc")
    normed = flag(config, "norm_output", where, False)
    if flag(nested, "return_hidden_post_norm", f"{where}: eagle_config", normed) != normed:
        raise FormatError(
            f"{where}: eagle_config.return_hidden_post_norm, which TensorRT-LLM alone reads, is not norm_output "
            f"({normed}), which all engines read. Write norm_output at top level as the head was trained."
        )
    return {
        "layers": layers,
        "qk_norm": config.get("model_type") == "qwen3" or names_qwen3(config),
        "fc_norm": "concat" if inner else "stream" if stream else "none",
        "norm_output": normed,
    }


def _fc_norms(kind: str, names: dict[str, str]) -> dict[str, str]:
    """Our name → short name in the file, of the norms before fc."""
    if kind == "concat":
        return {"input_norm.weight": "input_norm.weight"}
    if kind == "stream":
        return {ours: old if old in names else ours for old, ours in LEGACY_NORMS.items()}
    return {}


def _layer_names(
    raw: RawCheckpoint, names: dict[str, str], layers: int, qk_norm: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """(our name → short name, short name → why it is not needed) of the layers' tensors.

    Raises: FormatError where the two names for the input norm of a layer have different values, and for a later layer
        that reads embeddings.
    """
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    norms = QK_NORMS if qk_norm else ()
    expected, unused = {f"midlayer.{name}": f"{prefix}{name}" for name in (*LAYER_WITH_NORMS, *norms)}, {}
    for n in range(1, layers):
        expected |= {f"layers.{n}.{name}": f"layers.{n}.{name}" for name in (*LAYER, *norms)}
        _require_narrow(raw, names, prefix, n)
        ours, other = (f"layers.{n}.{name}.weight" for name in ("input_layernorm", "hidden_norm"))
        expected[ours] = other if ours not in names and other in names else ours
        if ours in names and other in names:
            one, two = raw.read(names[ours]), raw.read(names[other])
            if one.shape != two.shape or not torch.equal(one, two):
                raise FormatError(
                    f"{raw.directory}: {ours} and {other} differ. vLLM norms the layer's input with the first, SGLang "
                    "and TensorRT-LLM with the second. Write the one that the head was trained with under both names."
                )
            unused[other] = f"the same values as {ours}"
    return expected, unused


def _require_narrow(raw: RawCheckpoint, names: dict[str, str], prefix: str, n: int) -> None:
    """Raises: FormatError where layer n is as wide as the first one, so that it reads embeddings again."""
    first, later = (names.get(f"{where}self_attn.q_proj.weight") for where in (prefix, f"layers.{n}."))
    if first is not None and later is not None and raw.tensors[first].shape == raw.tensors[later].shape:
        raise FormatError(
            f"{raw.directory}: {later} is {list(raw.tensors[later].shape)}, as wide as the first layer's: layer {n} "
            "reads embeddings again, as some trainers' layers do. Headstart and engines run later layers on the hidden "
            "state alone; train a new head."
        )


def _layers(top: Any, inner: Any, where: str) -> list[int] | None:
    """The layers as vLLM counts them (k = hidden_states index), from its key at top level or SGLang's in eagle_config.

    Raises: FormatError where one is no list of integers, or the two name different layers.
    """
    for name, ids in ((LAYER_IDS, top), (f"eagle_config.{LAYER_IDS}", inner)):
        if ids is not None and not are_integers(ids):
            raise FormatError(f"{where}: {name} is {ids!r}, expected a list of integers")
    if top is not None and inner is not None and shifted(inner, 1) != top:
        raise FormatError(
            f"{where}: {LAYER_IDS} {top} (read by vLLM) and the ones inside eagle_config {inner} (SGLang adds 1) name "
            f"different layers. Write {shifted(top, -1)} inside eagle_config."
        )
    return top if top is not None or inner is None else shifted(inner, 1)
