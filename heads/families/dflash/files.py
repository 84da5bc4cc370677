"""DFlash on disk: the backbone's tensors alone; most settings stand inside `dflash_config` (families §1).

Engines serve DFlash in one layout: the first slot drafts nothing. The other layout they serve as DSpark alone, so there
an export is a DSpark head whose Markov head is all zeros, which drafts the same tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from headstart.heads.base import Head
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.families.block.files import BlockFiles
from headstart.heads.families.block.head import BlockHead
from headstart.heads.families.block.published import NESTED, addition
from headstart.heads.families.dspark.files import MARKOV_TENSORS, DSparkFiles
from headstart.heads.families.dspark.head import DSparkConfig, DSparkHead
from headstart.heads.families.eagle_files import is_block_draft
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="DFlash",
    title="DFlash: Block Diffusion for Flash Speculative Decoding",
    authors="Chen, Jian and Liang, Yesheng and Liu, Zhijian",
    arxiv="2602.06036",
)
#: rank of the Markov head of zeros: small, and a width that kernels know
ZERO_RANK = 16


class DFlashFiles(BlockFiles):
    """Read are files of z-lab and SpecForge, of the speculators library, and of DeepSpec, which names them DSpark's."""

    facts = {**BlockFiles.facts, "method": f"{PAPER.method}, arXiv {PAPER.arxiv}"}
    layouts = ("DFlash",)
    speculators = "dflash"
    title = "DFlash"
    architecture = "DFlashDraftModel"
    family = "dflash"

    def recognise(self, raw: RawCheckpoint) -> bool:
        return is_block_draft(raw) and addition(raw) is None

    def block_json(self, head: BlockHead) -> dict[str, Any]:
        nested = {
            **self.inputs_json(head),
            "causal": head.causal,
            "sample_from_anchor": head.config.sample_from_anchor,
        }
        return {NESTED: nested}

    def contents(self, head: Head) -> Contents:
        return Contents("portable", self.config_json(head), self.tensors(head))

    def portable(self, head: Head) -> Contents:
        """What is saved; a head whose first slot drafts, as a DSpark head with a Markov head of zeros."""
        held = self.contents(head)
        if not held.config["sample_from_anchor"]:
            return held
        fields = {**asdict(head.config), "type": "dspark", "markov_rank": ZERO_RANK, "confidence_weight": 0.0}
        settings = DSparkConfig(**fields)
        with torch.device("meta"):
            twin = DSparkHead(settings, head.dims)
        rows, dtype = twin.state_dict(), held.tensors["fc.weight"].dtype
        zeros = {name: torch.zeros(rows[name].shape, dtype=dtype, device="cpu") for name in MARKOV_TENSORS["vanilla"]}
        return Contents("portable", DSparkFiles().config_json(twin), {**held.tensors, **zeros}, settings=settings)
