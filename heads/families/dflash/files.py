"""DFlash on disk: the backbone's tensors alone; most settings stand inside `dflash_config` (families §1)."""

from __future__ import annotations

from typing import Any

from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.families.block.files import BlockFiles
from headstart.heads.families.block.head import BlockHead
from headstart.heads.families.block.published import NESTED, is_corrected
from headstart.heads.families.eagle_files import is_block_draft, shifted
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="DFlash",
    title="DFlash: Block Diffusion for Flash Speculative Decoding",
    authors="Chen, Jian and Liang, Yesheng and Liu, Zhijian",
    arxiv="2602.06036",
)


class DFlashFiles(BlockFiles):
    """Read are files of z-lab and SpecForge, of the speculators library, and of DeepSpec, which names them DSpark's."""

    facts = {**BlockFiles.facts, "method": f"{PAPER.method}, arXiv {PAPER.arxiv}"}
    layouts = ("DFlash",)
    speculators = "dflash"
    title = "DFlash"
    architecture = "DFlashDraftModel"
    family = "dflash"

    def recognise(self, raw: RawCheckpoint) -> bool:
        return is_block_draft(raw) and not is_corrected(raw)

    def block_json(self, head: BlockHead) -> dict[str, Any]:
        nested = {
            "mask_token_id": head.mask_token,
            "target_layer_ids": shifted(list(head.spec.layer_ids), -1),
            "causal": False,
            "sample_from_anchor": head.config.sample_from_anchor,
        }
        return {NESTED: nested}
