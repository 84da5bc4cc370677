"""JetSpec on disk: DFlash's file, whose config.json says that the block is causal (families §1b).

Engines serve it by their DFlash method, as a chain. There the first slot drafts nothing.
"""

from __future__ import annotations

from typing import Any

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import flag
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.errors import FormatError
from headstart.heads.families.block.published import CAUSAL, addition, stated
from headstart.heads.families.dflash.files import DFlashFiles
from headstart.heads.families.eagle_files import is_block_draft
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="JetSpec",
    title="JetSpec: Breaking the Scaling Ceiling of Speculative Decoding with Parallel Tree Drafting",
    authors="Hu, Lanxiang and Feng, Zhaoxiang and others",
    arxiv="2606.18394",
)


class JetSpecFiles(DFlashFiles):
    """Read are DFlash's layouts that say `is_causal` or `dflash_config.causal`."""

    facts = {
        **DFlashFiles.facts,
        "attention": "causal: a slot sees the slots of its block up to itself, and the features before the block",
        "method": f"{PAPER.method}, arXiv {PAPER.arxiv}",
    }
    layouts = ("JetSpec",)
    speculators = None
    title = "JetSpec"
    family = "jetspec"
    own_fields = CAUSAL

    def recognise(self, raw: RawCheckpoint) -> bool:
        return is_block_draft(raw) and addition(raw) == CAUSAL[0]

    def added(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], where: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        said = {name: value for name in CAUSAL if (value := stated(config, name, where)) is not None}
        if not all(flag(said, name, where, True) for name in said):
            raise FormatError(
                f"{where}: {said} contradict each other: both say whether a slot sees the slots behind it. Write both "
                "as the head was trained"
            )
        return {}, {}

    def portable(self, head: Head) -> Contents:
        return self.contents(head)
