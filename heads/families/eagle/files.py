"""EAGLE-1 on disk: fc [D, 2D], embedding first, and one Llama layer without input norm (methods §3)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from headstart.heads.checkpoints.geometry import flag, llama_dims, require_plain
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, map_tensors
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle_files import (
    LAYER,
    LlamaDraftFiles,
    has_draft_layer,
    is_eagle3,
    require_llama,
    target_embedding,
    with_target,
)
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="EAGLE-1",
    title="EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
    authors="Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang",
    arxiv="2401.15077",
)


class EagleFiles(LlamaDraftFiles):
    facts = {
        "feature": "last hidden state after the final norm",
        "input": "fc(cat(embedding, feature)), embedding first, no input_layernorm, no final norm",
        "method": f"EAGLE, arXiv {PAPER.arxiv}",
    }
    layouts = ("EAGLE-1/2",)
    speculators = "eagle"
    title = "EAGLE-1"
    architecture = "EagleLlamaForCausalLM"
    layer = "layers.0."

    def recognise(self, raw: RawCheckpoint) -> bool:
        return has_draft_layer(raw) and not is_eagle3(raw.tensors)

    def read_flat(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, layout: str
    ) -> TensorMap:
        where = str(raw.directory / "config.json")
        require_plain(config, where, allowed=("bias",))
        require_llama(config, where)
        dims = with_target(llama_dims(config, where, target.num_layers if target else 1), target, where)
        expected = {name: name for name in ("fc.weight", *(f"{self.layer}{name}" for name in LAYER))}
        sealed, has_bias = (raw.sidecar or {}).get("config"), "fc.bias" in names
        trained = isinstance(sealed, dict) and sealed.get("fc_bias") is True
        biased = has_bias and (trained or bool(raw.read(names["fc.bias"]).any()))
        expected |= {"fc.bias": "fc.bias"} if biased else {}
        unused = {"fc.bias": "all zero"} if has_bias and not biased else {}
        unused |= target_embedding(raw, names, dims)
        fields = {"intermediate_size": dims.intermediate_size, "fc_bias": biased}
        return map_tensors(raw, layout, "eagle", fields, dims, names, expected, unused)

    def from_speculators(
        self, outer: dict[str, Any], flat: dict[str, Any], tensors: Iterable[str], where: str
    ) -> dict[str, str]:
        if flag(outer, "layernorms", where, False):
            raise FormatError(
                f"{where}: layernorms is true: norms that Headstart's EAGLE-1 does not have; it would draft wrongly"
            )
        flat["num_hidden_layers"] = 1
        return {re.sub(r"^transformer\.", self.layer, re.sub(r"^fusion_fc\.", "fc.", name)): name for name in tensors}

    def drafted_tokens(self, depth: int, chain: int | None) -> int:
        """3 unless a chain is given: the trained passes (`depth`) do not tell how far the head drafts well."""
        return 3 if chain is None else chain
