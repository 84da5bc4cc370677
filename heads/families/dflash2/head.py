"""DFlash 2 (inco.ai, August 2026): DFlash with convolutions round each sublayer, and a selector of drafts.

Shape legend: A anchors, B batch, K drafts of a block, D target hidden, r rank, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_SIZE
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families.block.head import BlockConfig, BlockHead

PARTS = ("conv_taps", "conv_group", "selector_rank", "selector_candidates")


@dataclass
class DFlash2Config(BlockConfig):
    """Recipe node `head` for DFlash 2."""

    structure: ClassVar[tuple[str, ...]] = (*BlockConfig.structure, "conv_taps", "conv_group", "selector_rank")
    behaviour: ClassVar[tuple[str, ...]] = (*BlockConfig.behaviour, "selector_candidates")
    weights: ClassVar[tuple[str, ...]] = (*BlockConfig.weights, "select_weight")
    limits: ClassVar[dict[str, int]] = {**BlockConfig.limits, **dict.fromkeys(PARTS, MAX_SIZE)}

    type: str = "dflash2"
    #: Slots that a convolution reads: its own and those before it.
    conv_taps: int = 2
    #: Channels of a convolution that share the part of its kernel that depends on the slot.
    conv_group: int = 16
    #: Rank of the selector's product (r).
    selector_rank: int = 256
    #: Most likely tokens by the backbone's logits that the selector chooses each draft among.
    selector_candidates: int = 16
    #: Weight of the selector's cross-entropy over the candidates.
    select_weight: float = 1.0

    @property
    def learns_text(self) -> tuple[str, str] | None:
        """The selector learns to choose the text's token, which no other loss does in its place."""
        return (f"head.select_weight={self.select_weight:g}", "") if self.select_weight else super().learns_text


class Selector(nn.Module):
    """Scores of a draft b behind the token a: ⟨A[a] ⊙ H h, B[b]⟩, added to the backbone's logit of b."""

    def __init__(self, config: DFlash2Config, dims: HeadDims):
        super().__init__()
        rank, size = config.selector_rank, config.draft_tokens(dims.vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.empty(dims.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(size, rank))  # training starts from the base logits
        self.hidden_projection = nn.Linear(dims.hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        projected = self.hidden_projection(hidden)
        return F.embedding(previous, self.predecessor_codebook).to(projected.dtype) * projected


class DFlash2Head(BlockHead):
    """The backbone with convolutions, and a selector that chooses each draft among the most likely tokens, given the
    one before it. The loss is that of the backbone's logits and the selector's.
    """

    family = "dflash2"
    config: DFlash2Config

    def __init__(self, config: DFlash2Config, dims: HeadDims):
        if dims.hidden_size % config.conv_group:
            raise ConfigError(
                f"head.conv_group: found {config.conv_group}, expected a divisor of the {dims.hidden_size} channels"
            )
        super().__init__(config, dims)
        if not 1 <= config.conv_taps <= self.block_size:
            raise ConfigError(f"head.conv_taps: found {config.conv_taps}, expected 1 to {self.block_size} (the block)")
        if not 1 < config.selector_candidates <= config.draft_tokens(dims.vocab_size):
            raise ConfigError(
                f"head.selector_candidates: found {config.selector_candidates}, expected 2 or more of the tokens that "
                "the head can draft"
            )
        for layer in self.layers:
            layer.convolve(config.conv_taps, config.conv_group)  # type: ignore[operator, union-attr]
        self.candidate_selector = Selector(config, dims)

    def _corrections(self) -> int:
        """As the base class's; of the codebooks, the candidates' rows alone are read."""
        hidden, config = self.dims.hidden_size, self.config
        return config.selector_rank * hidden + config.selector_candidates * (hidden + config.selector_rank)

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """As the base class's. Autograd over the modules also keeps, per slot and layer, the inputs and kernels of four
        convolutions, and what norms, rotations and the MLP give; the selector keeps its candidates' rows.
        """
        hidden, config, layer = self.dims.hidden_size, self.config, self._layer()
        inner = 0 if recompute else 2 * layer.mlp.gate_proj.out_features
        per_layer = 4 * hidden + 4 * 2 * config.conv_taps * hidden + inner
        candidates = (config.selector_candidates + 1) * (hidden + config.selector_rank)
        more = anchors * (self.block_size * config.layers * per_layer + self.depth * candidates)
        return super().kept_numbers(rows, anchors, recompute) + more

    @property
    def selects(self) -> int:
        return self.config.selector_candidates

    @property
    def select_weight(self) -> float:
        return self.config.select_weight

    @property
    def correction_Ur(self) -> Tensor:
        return self.candidate_selector.successor_codebook

    def corrections(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor:
        return self.candidate_selector(hidden_AKD, previous_AK)

    def walk_step(self, hidden_BD: Tensor, previous_B: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.candidate_selector(hidden_BD, previous_B), None
