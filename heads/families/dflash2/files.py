"""DFlash 2 on disk: DFlash's file with convolutions and a selector; settings stand in `dflash_config` (families §1b).

vLLM serves it by its method dflash from 0.33 on (`DFlash2DraftModel`), where its rules were read and nothing was run.
"""

from __future__ import annotations

from typing import Any, cast

from headstart.heads.base import MAX_SIZE, HeadConfig
from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.families.block.files import BlockFiles
from headstart.heads.families.block.head import BlockHead
from headstart.heads.families.block.published import NESTED, SELECTOR, addition, stated
from headstart.heads.families.dflash2.head import DFlash2Config
from headstart.heads.families.eagle_files import is_block_draft
from headstart.heads.families.paper import Paper

PAPER = Paper(method="DFlash 2", title="DFlash 2", authors="inco.ai", arxiv="", where="inco.ai, August 2026")
KERNELS = ("base_kernel", "kernel_projection.weight")
CONVOLUTION = tuple(f"{part}_conv.{name}" for part in ("attention", "mlp") for name in KERNELS)
CODEBOOKS = tuple(
    f"{SELECTOR}{name}" for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
)
#: our field → the published one
NAMES = {
    "conv_taps": "conv_kernel_size", "conv_group": "conv_group_size", "selector_rank": "selector_rank",
    "selector_candidates": "selector_top_k",
}  # fmt: skip


class DFlash2Files(BlockFiles):
    """Read are files with the names that engines load."""

    facts = {**BlockFiles.facts, "method": PAPER.method}
    layouts = ("DFlash 2",)
    title = "DFlash 2"
    architecture = "DFlash2DraftModel"
    family = "dflash2"
    own_fields = tuple(NAMES.values())
    zero_at_start = {
        f"{SELECTOR}successor_codebook": "every value is zero, as before training: the backbone alone chooses",
    }

    def recognise(self, raw: RawCheckpoint) -> bool:
        return is_block_draft(raw) and addition(raw) == SELECTOR

    def added(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], where: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        given = {name: stated(config, name, where) for name in NAMES.values()}
        fields = {ours: integer(given, name, where, bounds=(1, MAX_SIZE)) for ours, name in NAMES.items()}
        layers = integer(config, "num_hidden_layers", where)
        tensors = [*CODEBOOKS, *(f"layers.{n}.{name}" for n in range(layers) for name in CONVOLUTION)]
        return fields, {name: name for name in tensors}

    def block_json(self, head: BlockHead) -> dict[str, Any]:
        nested = {
            **self.inputs_json(head),
            "causal": head.causal,
            "sample_from_anchor": head.config.sample_from_anchor,
            **{name: getattr(head.config, ours) for ours, name in NAMES.items()},
        }
        return {NESTED: nested}

    def added_facts(self, config: HeadConfig) -> dict[str, str]:
        given = cast(DFlash2Config, config)
        selector = (
            f"among the {given.selector_candidates} most likely tokens, by logit + "
            f"<A[token before] · H output, B[token]>, rank {given.selector_rank}"
        )
        taps = f"{given.conv_taps} taps over the slots, before and after attention and MLP"
        return {"convolutions": taps, "selector": selector}
