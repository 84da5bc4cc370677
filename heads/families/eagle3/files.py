"""EAGLE-3 on disk: fc [H, 3D], a layer that reads 2H, norm, lm_head [U, H], the draft vocabulary d2t (methods §4)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from headstart.heads import vocab
from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.geometry import are_integers, flag, integer, llama_dims, require_plain
from headstart.heads.checkpoints.head_files import Spelling
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, draft_map_problem, map_tensors
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle3.head import Eagle3Config, default_feature_layers
from headstart.heads.families.eagle_files import (
    LAYER,
    LAYER_IDS,
    LlamaDraftFiles,
    has_draft_layer,
    is_eagle3,
    require_llama,
    shifted,
    target_embedding,
    with_target,
)
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="EAGLE-3",
    title="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    authors="Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang",
    arxiv="2503.01840",
)
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
    layouts = ("EAGLE-3", "SpecForge")
    speculators = "eagle3"
    title = "EAGLE-3"
    architecture = "LlamaForCausalLMEagle3"
    layer = "midlayer."

    def recognise(self, raw: RawCheckpoint) -> bool:
        return has_draft_layer(raw.tensors) and is_eagle3(raw.tensors)

    def spell(self, raw: RawCheckpoint) -> Spelling:
        spelling = super().spell(raw)
        names = {re.sub(r"^layers\.0\.", self.layer, name): full for name, full in spelling.names.items()}
        return replace(spelling, names=names)

    def read_flat(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, layout: str
    ) -> TensorMap:
        where = str(raw.directory / "config.json")
        layer_ids = _read_layers(config, target, where)
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
        }
        prefix = self.layer if any(name.startswith(self.layer) for name in names) else "layers.0."
        expected = {name: name for name in ("fc.weight", "norm.weight", "lm_head.weight")}
        expected |= {f"{self.layer}{name}": f"{prefix}{name}" for name in LAYER_WITH_NORMS}
        unused = {}
        if hidden == width:
            unused = target_embedding(raw, names, dims)
        else:
            expected["embed_tokens.weight"] = "embed_tokens.weight"
        unused |= {name: "the target's own, used in training only" for name in VERIFIER if name in names}
        if "lm_head.weight" not in names:
            rows = f", of {dims.vocab_size} rows where the draft vocabulary has {size}: wrong"
            raise FormatError(
                f"{raw.directory}: lm_head.weight is missing, so engines put the target's in its place"
                f"{'' if size == dims.vocab_size else rows}. Add the head's own [draft_vocab_size, hidden_size] matrix."
            )
        ids_U = _draft_ids(raw, names, size, dims.vocab_size, where)
        unused |= {name: "turned into the draft ids" for name in ("d2t", "t2d") if name in names}
        mapped = map_tensors(raw, layout, "eagle3", fields, dims, names, expected, unused)
        return replace(mapped, draft_ids_U=ids_U)

    def from_speculators(
        self, outer: dict[str, Any], flat: dict[str, Any], tensors: Iterable[str], where: str
    ) -> dict[str, str]:
        keys = ("draft_vocab_size", "target_hidden_size", LAYER_IDS)
        flat |= {"draft_vocab_size": 32000} | {key: outer[key] for key in keys if outer.get(key) is not None}
        flat["norm_before_residual"] = flag(outer, "norm_before_residual", where, True)
        return {name: name for name in tensors}

    def settings(self, config: HeadConfig, dims: HeadDims) -> dict[str, Any]:
        ours, given = super().settings(config, dims), cast(Eagle3Config, config)
        ours["feature_layers"] = given.feature_layers or default_feature_layers(dims.num_layers)
        ours["draft_vocab_size"] = given.draft_vocab_size or dims.vocab_size
        ours["hidden_size"] = None if given.hidden_size == dims.hidden_size else given.hidden_size
        return ours

    def tensors(self, head: Head) -> dict[str, Tensor]:
        """The state dict, with d2t (int64 offsets) and t2d (bool) in the place of `draft_ids_U`."""
        tensors = super().tensors(head)
        ids_U = tensors.pop("draft_ids_U", None)
        if ids_U is not None:
            if not vocab.is_draft_vocab(ids_U, head.dims.vocab_size):
                raise FormatError(
                    f"draft_ids_U: expected ascending distinct ids below {head.dims.vocab_size}; was initialise called?"
                )
            tensors["d2t"] = vocab.offsets(ids_U)
            tensors["t2d"] = vocab.membership(ids_U, head.dims.vocab_size)
        return tensors

    def config_json(self, head: Head) -> dict[str, Any]:
        ids = list(head.spec.layer_ids)
        return super().config_json(head) | {
            "draft_vocab_size": head.state_dict()["lm_head.weight"].shape[0],
            "target_hidden_size": head.dims.hidden_size,
            "norm_before_residual": False,
            LAYER_IDS: ids,
            "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: shifted(ids, -1)},
        }


def _read_layers(config: dict[str, Any], target: HeadDims | None, where: str) -> list[int] | None:
    """HF `hidden_states` indices that a head reads; None where the file leaves the usual three to the engine.

    Raises: FormatError for a variant that Headstart does not run, for wrong layers, and where neither the file nor a
        target tells them.
    """
    require_plain(config, where)
    require_llama(config, where)
    if flag(config, "norm_before_residual", where, False):
        raise FormatError(
            f"{where}: norm_before_residual is true: the residual is taken after hidden_norm. Headstart trains "
            "and runs the variant that every engine runs (false); serve this head with vLLM or train a new one."
        )
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise FormatError(f"{where}: eagle_config is {nested!r}, expected an object")
    require_plain(nested, f"{where}: eagle_config")
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


def _draft_ids(raw: RawCheckpoint, names: dict[str, str], size: int, vocab_size: int, where: str) -> Tensor | None:
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
