"""DFlash: drafts a block at once from the target's features (arXiv 2602.06036). The backbone is block/head.py."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.heads.families.block.head import BlockConfig, BlockHead


@dataclass
class DFlashConfig(BlockConfig):
    """Recipe node `head` for DFlash."""

    type: str = "dflash"


class DFlashHead(BlockHead):
    """The backbone alone: every slot drafts on its own."""

    family = "dflash"
    config: DFlashConfig
