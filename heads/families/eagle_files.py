"""What heads with draft layers share on disk: EAGLE-1 and EAGLE-3 (methods §3, §4), and block heads.

The authors' code, SpecForge, the speculators library and the engines write it in different layouts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstart.heads import vocab
from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.geometry import (
    LLAMA_DEFAULTS,
    integer,
    legacy_rope,
    require_plain,
    rope_parameters,
)
from headstart.heads.checkpoints.head_files import Contents, HeadFiles, Spelling
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, draft_map_problem, require_equal
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.rope import same_rope

#: tensors of a llama draft layer → shape in symbols (eagle_rules.llama_sizes); X is the width of the attention's input
LAYER = {
    "self_attn.q_proj.weight": ("A", "X"),
    "self_attn.k_proj.weight": ("G", "X"),
    "self_attn.v_proj.weight": ("G", "X"),
    "self_attn.o_proj.weight": ("H", "A"),
    "mlp.gate_proj.weight": ("I", "H"),
    "mlp.up_proj.weight": ("I", "H"),
    "mlp.down_proj.weight": ("H", "I"),
    "post_attention_layernorm.weight": ("H",),
}
#: which target layers an EAGLE-3 head reads: at top level of config.json (vLLM's) and inside eagle_config (SGLang's)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
#: P-EAGLE: where config.json names the mask token, in the order in which vLLM looks for it, and the masked feature
MASK_TOKENS, MASK_HIDDEN = ("mask_token_id", "pard_token", "ptd_token_id"), "mask_hidden"
#: fields of the draft layer's geometry, by the names that HeadDims has for them
GEOMETRY = ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings")


class LlamaDraftFiles(HeadFiles):
    """Files of a family whose head is one Llama layer, or several, behind an input projection `fc`.

    Attributes:
        title: the family's name in messages.
        architecture: `architectures` of config.json, as vLLM reads it.
        layer: prefix of the first draft layer's tensors.
    """

    has_rope = True
    title: ClassVar[str]
    architecture: ClassVar[str]
    layer: ClassVar[str]
    #: fields of config.json that change what a llama layer computes, and that the family reads
    variants: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def read_flat(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, layout: str
    ) -> TensorMap:
        """As `read`, for a config that is one flat Llama config.

        Args:
            names: short name (no `model.`) → name in the file.
            layout: what the result calls the layout.
        """

    @abstractmethod
    def from_speculators(
        self, outer: dict[str, Any], flat: dict[str, Any], tensors: Iterable[str], where: str
    ) -> dict[str, str]:
        """Short name → name in a file of the speculators library.

        Args:
            outer: config.json.
            flat: the layer's part of it; this function adds the fields of `outer` that concern the layer.
        """

    def read(self, raw: RawCheckpoint, target: HeadDims | None) -> TensorMap:
        config, where = raw.config, str(raw.directory / "config.json")
        if "speculators_model_type" not in config:
            return self.read_flat(raw, unnest(config), short_names(raw), target, self.title)
        kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
        if kind != self.speculators:
            raise FormatError(f"{where}: speculators_model_type is {kind!r} and the tensors are {self.title}'s")
        if not isinstance(layer, dict):
            raise FormatError(f"{where}: transformer_layer_config is {type(layer).__name__}, expected an object")
        require_plain(config, where, self.variants)
        flat = {**LLAMA_DEFAULTS, **layer}
        names = self.from_speculators(config, flat, raw.tensors, where)
        return self.read_flat(raw, flat, names, target, f"speculators {self.title}")

    def spell(self, raw: RawCheckpoint) -> Spelling:
        names = {name.removeprefix("model."): name for name in raw.tensors}
        return Spelling(unnest(raw.config), names, [])

    def settings(self, config: HeadConfig, dims: HeadDims) -> dict[str, Any]:
        ours = {**{name: getattr(dims, name) for name in GEOMETRY}, **asdict(config)}
        named = {"hidden_act": dims.hidden_act, "intermediate_size": dims.intermediate_size}
        for name, value in (named | {"num_key_value_heads": dims.num_kv_heads}).items():
            ours[name] = ours.get(name) or value
        return ours

    def stated(self, mapped: TensorMap) -> dict[str, Any]:
        return {**mapped.fields, **{name: getattr(mapped.dims, name) for name in GEOMETRY}}

    def differences(self, mapped: TensorMap, config: HeadConfig, dims: HeadDims) -> Iterator[tuple[str, Any, Any]]:
        if not same_rope(mapped.dims.rope_parameters, dims.rope_parameters):
            yield "rope_parameters", dims.rope_parameters, mapped.dims.rope_parameters
        yield from super().differences(mapped, config, dims)

    def config_json(self, head: Head) -> dict[str, Any]:
        dims = head.dims
        shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        rope = rope_parameters({"rope_parameters": dims.rope_parameters}, "the target's rope")
        theta, scaling = legacy_rope(rope)
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "llama",
            "hidden_size": shapes["fc.weight"][0],
            "intermediate_size": shapes[f"{self.layer}mlp.gate_proj.weight"][0],
            "num_hidden_layers": 1,
            "num_attention_heads": dims.num_heads,
            "num_key_value_heads": dims.num_kv_heads,
            "head_dim": dims.head_dim,
            "hidden_act": head.hidden_act,
            "rms_norm_eps": dims.rms_norm_eps,
            "max_position_embeddings": dims.max_position_embeddings,
            "rope_parameters": rope,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": dims.vocab_size,
            "bos_token_id": dims.bos_token_id,
            "eos_token_id": dims.eos_token_id,
        }
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        return config

    def contents(self, head: Head) -> Contents:
        return self.portable(head)

    def portable(self, head: Head) -> Contents:
        return Contents("portable", self.config_json(head), self.tensors(head))

    def drafted_tokens(self, depth: int, chain: int | None) -> int:
        """`chain` if given, as a draft layer can draft any length; else the trained depth, at most 4."""
        return min(depth, 4) if chain is None else chain


def shifted(ids: Any, by: int) -> list[int]:
    """Layer ids as another engine counts them: SGLang's are one less than vLLM's."""
    return [k + by for k in ids if type(k) is int] if isinstance(ids, list) else []


def short_names(raw: RawCheckpoint) -> dict[str, str]:
    """Name without `model.` → name in the file. Raises: FormatError where both names of a tensor occur."""
    names = {name.removeprefix("model."): name for name in raw.tensors}
    if len(names) != len(raw.tensors):
        raise FormatError(
            f"{raw.directory}: tensors appear both with and without the prefix 'model.'; keep one of each"
        )
    return names


def is_block_draft(raw: RawCheckpoint) -> bool:
    """Whether a checkpoint is a head that drafts blocks (families/block), whose tensors resemble an EAGLE head's."""
    named, kind = raw.config.get("architectures"), raw.config.get("speculators_model_type")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    by_name = any(method in name for name in names for method in ("DFlash", "DSpark"))
    by_tensors = bool({"hidden_norm.weight", "model.hidden_norm.weight"} & set(raw.tensors))
    return by_name or by_tensors or "dflash_config" in raw.config or kind in ("dflash", "dspark")


def has_draft_layer(raw: RawCheckpoint) -> bool:
    """Whether a checkpoint looks like an EAGLE head: an input projection, or most of a draft layer."""
    if is_block_draft(raw):
        return False
    short = [name.removeprefix("model.") for name in raw.tensors]
    projection = any(name == "fc.weight" or name.startswith("fusion_fc.") for name in short)
    return projection or sum(name.endswith(tuple(LAYER)) for name in short) > len(LAYER) // 2


def unnest(config: dict[str, Any]) -> dict[str, Any]:
    """`{"model_type": "eagle", "model": {llama config}}` → one flat config."""
    inner = config.get("model")
    if not isinstance(inner, dict):
        return config
    return {
        **inner,
        **{key: value for key, value in config.items() if key not in ("model", "model_type", "architectures")},
    }


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensor names are an EAGLE-3 head's rather than an EAGLE-1's."""
    short = [name.removeprefix("model.") for name in names]
    return any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in short)


def is_parallel(raw: RawCheckpoint) -> bool:
    """Whether an EAGLE-3 checkpoint drafts from masked places (P-EAGLE), even if something of that is missing."""
    named = any(raw.config.get(name) is not None for name in MASK_TOKENS)
    held = any(name.removeprefix("model.") == MASK_HIDDEN for name in raw.tensors)
    return named or held or raw.config.get("speculators_model_type") == "peagle"


def require_llama(config: dict[str, Any], where: str) -> None:
    """Raises: FormatError for a draft of several layers, or of layers that are not Llama's."""
    require_kind(config, where, "Llama's (Qwen3's has q/k norms, Qwen2's biases)")
    layers = integer(config, "num_hidden_layers", where, default=1)
    if layers != 1:
        raise FormatError(f"{where}: num_hidden_layers is {layers}; an EAGLE-1 draft has one layer")


def require_kind(config: dict[str, Any], where: str, whose: str, more: tuple[str, ...] = ()) -> None:
    """Raises: FormatError for layers of an architecture that the family does not know.

    Args: whose: its draft layers, for the message. more: `model_type`s besides Llama's.
    """
    kind = config.get("model_type", "llama")
    if kind not in ("llama", "eagle", "eagle3", *more):
        raise FormatError(f"{where}: model_type is {kind!r}; Headstart's draft layer is {whose}")


def with_target(dims: HeadDims, target: HeadDims | None, where: str) -> HeadDims:
    """The draft's dimensions, completed by the target's. Raises: FormatError where sizes differ that must agree."""
    if target is None:
        return dims
    require_equal(where, "hidden_size", dims.hidden_size, target.hidden_size)
    require_equal(where, "vocab_size", dims.vocab_size, target.vocab_size)
    return replace(
        dims, num_layers=target.num_layers, tie_word_embeddings=target.tie_word_embeddings, model_type=target.model_type
    )


def target_embedding(raw: RawCheckpoint, names: dict[str, str], dims: HeadDims) -> dict[str, str]:
    """{name: why it is not used} for embeddings in the file, which the target's replace; {} without any.

    Raises: FormatError where their shape is not that of the target's.
    """
    if "embed_tokens.weight" not in names:
        return {}
    shape = raw.tensors[names["embed_tokens.weight"]].shape
    if shape != (dims.vocab_size, dims.hidden_size):
        raise FormatError(
            f"{raw.directory}: embed_tokens.weight has shape {list(shape)}, expected the target's "
            f"[{dims.vocab_size}, {dims.hidden_size}]"
        )
    return {"embed_tokens.weight": "the target's embeddings (compare with formats.check_embeddings)"}


def read_draft_ids(raw: RawCheckpoint, names: dict[str, str], size: int, vocab_size: int, where: str) -> Tensor | None:
    """Ids of the draft vocabulary [U]; None where it is the target's.

    Raises: FormatError where d2t is missing or is no list of ascending offsets, or t2d contradicts it.
    """
    if size > vocab_size:
        raise FormatError(f"{where}: draft_vocab_size {size} exceeds vocab_size {vocab_size}")
    if "d2t" not in names:
        if size < vocab_size:
            raise FormatError(
                f"{raw.directory}: draft_vocab_size is {size} of {vocab_size} and d2t is missing: drafted ids would be "
                "taken for target ids. Copy d2t (int64 offsets) from where the head was trained."
            )
        return None
    for name, length in (("d2t", size), ("t2d", vocab_size)):
        if name in names and (shape := raw.tensors[names[name]].shape) != (length,):
            raise FormatError(f"{raw.directory}: {name} has shape {list(shape)}, expected [{length}]")
    if "t2d" in names and (kind := raw.tensors[names["t2d"]].dtype) != torch.bool:
        raise FormatError(f"{raw.directory}: t2d is {kind}, expected one boolean for each target token")
    if problem := draft_map_problem(raw, names, vocab_size):
        raise FormatError(f"{raw.directory}: {problem}")
    return None if size == vocab_size else vocab.from_offsets(raw.read(names["d2t"]))


def write_draft_ids(tensors: dict[str, Tensor], vocab_size: int) -> None:
    """Put d2t (int64 offsets) and t2d (bool) in the place of `draft_ids_U`, where a head has a draft vocabulary.

    Raises: FormatError for ids that are no draft vocabulary.
    """
    ids_U = tensors.pop("draft_ids_U", None)
    if ids_U is None:
        return
    if not vocab.is_draft_vocab(ids_U, vocab_size):
        raise FormatError(f"draft_ids_U: expected ascending distinct ids below {vocab_size}; was initialise called?")
    tensors["d2t"] = vocab.offsets(ids_U)
    tensors["t2d"] = vocab.membership(ids_U, vocab_size)
