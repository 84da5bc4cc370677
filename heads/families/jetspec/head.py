"""JetSpec: DFlash's backbone with a causal block (arXiv 2606.18394). The backbone is block/head.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headstart.heads.families.block.head import BlockConfig, BlockHead


@dataclass
class JetSpecConfig(BlockConfig):
    """Recipe node `head` for JetSpec."""

    type: str = "jetspec"
    #: All drafts of a block weigh the same (paper).
    depth_decay: float = 1.0
    ce_weight: float = 0.0
    kl_weight: float = 1.0


class JetSpecHead(BlockHead):
    """The backbone alone, where a slot sees only the slots up to itself."""

    family = "jetspec"
    config: JetSpecConfig
    causal: ClassVar[bool] = True
