"""Heads that draft blocks, on disk: layers of Qwen3's type over the target's features (families DFlash and DSpark).

Trainers agree on the tensors' names and differ in config.json (published.py). The target's embeddings and its output
matrix are frozen in training: neither is in our file, but for the rows of a draft vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor

from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.geometry import integer, llama_dims, with_defaults
from headstart.heads.checkpoints.head_files import Spelling
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, map_tensors
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.block.head import BlockConfig, BlockHead, default_feature_layers
from headstart.heads.families.block.published import MASK_EMBEDDING, PublishedBlock, first_by_default, read_block
from headstart.heads.families.eagle3.files import QK_NORMS, VERIFIER
from headstart.heads.families.eagle_files import (
    LAYER,
    LlamaDraftFiles,
    read_draft_ids,
    require_kind,
    shifted,
    short_names,
    target_embedding,
    with_target,
    write_draft_ids,
)

#: tensors of one layer
BLOCK_LAYER = (*LAYER, *QK_NORMS, "input_layernorm.weight")
#: tensors outside the layers
BACKBONE = ("fc.weight", "hidden_norm.weight", "norm.weight")
#: most layers of a target
MAX_DEPTH = 1024
#: fields of the speculators library's config that concern the block and what corrects its drafts
BESIDE_LAYER = (
    "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor", "draft_vocab_size",
    "target_hidden_size", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip


class BlockFiles(LlamaDraftFiles):
    """What all block heads share on disk. A family adds its tensors by `added`, its settings by `block_json`.

    Attributes:
        family: its name in FAMILIES.
        own_fields: fields of config.json that change what a block head computes and that this family computes
            (published.PLAIN has them all).
    """

    family: ClassVar[str]
    own_fields: ClassVar[tuple[str, ...]] = ()

    facts = {
        "feature": "hidden_states[k] at feature_layers (inputs of decoder layers k, before any norm)",
        "context": "hidden_norm(fc(features)) of every committed token, keys and values of all layers",
        "attention": "not causal: every slot sees the whole block and the features before it",
        "logits": "product with the target's output matrix, without its bias, soft-cap or scale",
    }
    layer = "layers.0."

    def added(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], where: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """(fields of the family's config, our name → short name in the file) beside those of the backbone."""
        return {}, {}

    def block_json(self, head: BlockHead) -> dict[str, Any]:
        """Fields of config.json beside the layers', in the place where engines read them."""
        raise NotImplementedError

    # reading

    def read(self, raw: RawCheckpoint, target: HeadDims | None) -> TensorMap:
        config, where = raw.config, str(raw.directory / "config.json")
        if os.path.lexists(raw.directory / MASK_EMBEDDING):
            raise FormatError(
                f"{raw.directory / MASK_EMBEDDING}: an embedding of the mask token beside the target's. Headstart's "
                "heads embed it by the target's row, and would draft otherwise than this head was trained. Serve it "
                "with vLLM or SGLang, which read the file"
            )
        names = short_names(raw)
        if "speculators_model_type" not in config:
            return self.read_flat(raw, with_defaults(config), names, target, self.title)
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise FormatError(f"{where}: transformer_layer_config is {type(layer).__name__}, expected an object")
        flat = self.from_speculators(config, layer)
        return self.read_flat(raw, flat, names, target, f"speculators {self.title}")

    @staticmethod
    def from_speculators(outer: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """One flat config. Args: outer: config.json. layer: its `transformer_layer_config`."""
        beside = {name: outer[name] for name in BESIDE_LAYER if outer.get(name) is not None}
        return {**with_defaults(layer), "draft_vocab_size": 32000, **beside}

    def read_flat(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, layout: str
    ) -> TensorMap:
        where = str(raw.directory / "config.json")
        require_kind(config, where, "Llama's or Qwen3's", ("qwen3", "dspark"))
        depth = target.num_layers if target else MAX_DEPTH
        if config.get("num_target_layers") is not None:
            said = integer(config, "num_target_layers", where, bounds=(1, MAX_DEPTH))
            if target is not None and said != depth:
                raise FormatError(
                    f"{where}: num_target_layers is {said} and the target has {depth}: the head was trained for "
                    "another target"
                )
            depth = said
        draft = llama_dims(config, where, depth)
        if (width := config.get("target_hidden_size")) not in (None, draft.hidden_size):
            raise FormatError(
                f"{where}: target_hidden_size is {width!r} and hidden_size {draft.hidden_size}: a block head is as "
                "wide as its target, whose embeddings and output matrix it uses"
            )
        dims = with_target(draft, target, where)
        block = read_block(config, where, depth, dims.vocab_size, first_by_default(raw), self.own_fields)
        if depth == MAX_DEPTH:  # neither the file nor a target says more
            dims = replace(dims, num_layers=block.feature_layers[-1] + 1)
        size = integer(config, "draft_vocab_size", where, default=dims.vocab_size)
        more, added = self.added(raw, config, names, where)
        expected = {name: name for name in _backbone(block.layers)} | added
        unused = target_embedding(raw, names, dims)
        unused |= {name: "the target's own, used in training only" for name in VERIFIER if name in names}
        ids_U = read_draft_ids(raw, names, size, dims.vocab_size, where)
        unused |= {name: "turned into the draft ids" for name in ("d2t", "t2d") if name in names}
        expected, unused = self._output(raw, config, names, expected, unused, reduced=ids_U is not None)
        sizes = {"intermediate_size": dims.intermediate_size, "num_key_value_heads": dims.num_kv_heads}
        fields = {**_fields(block), **sizes, "draft_vocab_size": size, **more}
        mapped = map_tensors(raw, layout, self.family, fields, dims, names, expected, unused)
        return replace(mapped, draft_ids_U=ids_U)

    @staticmethod
    def _output(
        raw: RawCheckpoint,
        config: dict[str, Any],
        names: dict[str, str],
        expected: dict[str, str],
        unused: dict[str, str],
        reduced: bool,
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The output matrix is the file's where the draft vocabulary is reduced, and else the target's."""
        name = "lm_head.weight"
        if not reduced:
            why = "the target's output matrix, which is frozen in training (compare with formats.check_embeddings)"
            return expected, unused | ({name: why} if name in names else {})
        if config.get("tie_word_embeddings"):
            raise FormatError(
                f"{raw.directory / 'config.json'}: tie_word_embeddings is true and the draft vocabulary is reduced: "
                "the embeddings have other rows than lm_head.weight. Write false"
            )
        if name not in names:
            raise FormatError(
                f"{raw.directory}: {name} is missing, so engines put the target's in its place, whose rows are not "
                "those of the draft vocabulary. Add the head's own [draft_vocab_size, hidden_size] matrix."
            )
        return expected | {name: name}, unused

    def spell(self, raw: RawCheckpoint) -> Spelling:
        return Spelling(raw.config, {name.removeprefix("model."): name for name in raw.tensors}, [])

    def settings(self, config: HeadConfig, dims: HeadDims) -> dict[str, Any]:
        ours, given = super().settings(config, dims), cast(BlockConfig, config)
        ours["feature_layers"] = given.feature_layers or default_feature_layers(dims.num_layers, max(given.layers, 3))
        ours["draft_vocab_size"] = given.draft_vocab_size or dims.vocab_size
        return ours

    # writing

    def tensors(self, head: Head) -> dict[str, Tensor]:
        tensors = super().tensors(head)
        write_draft_ids(tensors, head.dims.vocab_size)
        return tensors

    def config_json(self, head: Head) -> dict[str, Any]:
        block = cast(BlockHead, head)
        layers = block.config.layers
        return super().config_json(head) | {
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "is_causal": block.causal,  # the first place where vLLM looks, and the only one of SGLang
            "block_size": block.block_size,
            "sample_from_anchor": block.config.sample_from_anchor,
            "num_target_layers": head.dims.num_layers,
            "draft_vocab_size": head.draft_vocab_size or head.dims.vocab_size,
            **self.block_json(block),
        }

    @staticmethod
    def inputs_json(head: BlockHead) -> dict[str, Any]:
        """Fields that every layout has, in one place or another: the mask token, and the layers of the features."""
        return {"mask_token_id": head.mask_token, "target_layer_ids": shifted(list(head.spec.layer_ids), -1)}

    def facts_of(self, config: HeadConfig) -> dict[str, str]:
        given = cast(BlockConfig, config)
        token = f"mask token {given.mask_token_id}"
        if given.sample_from_anchor:
            block = f"{given.depth} slots (the last committed token, then {token}), each drafts"
        else:
            block = f"{given.depth + 1} slots (the last committed token, then {token}), all but the first draft"
        facts = {"block": block, **self.facts}
        method = facts.pop("method")
        return {**facts, **self.added_facts(config), "method": method}

    def added_facts(self, config: HeadConfig) -> dict[str, str]:
        """`facts_of` what the family adds to the backbone."""
        return {}

    # serving

    def drafted_tokens(self, depth: int, chain: int | None) -> int:
        """All: a block of another length is another input than the head was trained on."""
        return depth


def _backbone(layers: int) -> Iterable[str]:
    return (*BACKBONE, *(f"layers.{n}.{name}" for n in range(layers) for name in BLOCK_LAYER))


def _fields(block: PublishedBlock) -> dict[str, Any]:
    return {
        "depth": block.drafts,
        "layers": block.layers,
        "feature_layers": block.feature_layers,
        "mask_token_id": block.mask_token_id,
        "sample_from_anchor": block.anchor_first,
    }
