"""The block drafter on disk: no engine serves it."""

from __future__ import annotations

from headstart.heads.checkpoints.head_files import HeadFiles
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="DFlash in miniature",
    title="DFlash: Block Diffusion for Flash Speculative Decoding",
    authors="Chen, Jian and Liang, Yesheng and Liu, Zhijian",
    arxiv="2602.06036",
)


class MiniBlockFiles(HeadFiles):
    facts = {"method": "blocks of tokens from one feature"}
