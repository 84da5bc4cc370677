"""Domino: DFlash's backbone, anchor first, whose drafts a recurrent network over their tokens corrects
(arXiv 2605.29707).

Shape legend: A anchors, B batch, K drafts of a block, D target hidden, G state of the network, r rank, U draft
vocabulary, T loss terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_SIZE
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families.block.head import BlockConfig, BlockHead


@dataclass
class DominoConfig(BlockConfig):
    """Recipe node `head` for Domino."""

    structure: ClassVar[tuple[str, ...]] = (*BlockConfig.structure, "gru_size", "correction_rank")
    behaviour: ClassVar[tuple[str, ...]] = (*BlockConfig.behaviour, "uncorrected")
    limits: ClassVar[dict[str, int]] = {**BlockConfig.limits, "gru_size": MAX_SIZE, "correction_rank": MAX_SIZE}

    type: str = "domino"
    sample_from_anchor: bool = True
    #: Width of the state that a recurrent network (GRU) keeps of the tokens drafted so far.
    gru_size: int = 1024
    #: Rank of the correction (r).
    correction_rank: int = 256
    #: First drafts of a block that are not corrected.
    uncorrected: int = 1
    #: Share of the loss that the logits without the correction carry when training begins. It falls linearly to 0; the
    #: corrected logits carry the rest. 0 leaves it out.
    base_weight: float = 1.0


class PrefixGRU(nn.Module):
    """A gated recurrent unit without biases, with the names and the layout of torch.nn.GRU's weights:
    [reset ; update ; new], each of G rows. Its steps are plain products, which CUDA graphs capture.
    """

    def __init__(self, inputs: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in self.parameters():
            nn.init.uniform_(weight, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def known(self, x: Tensor) -> Tensor:
        """What inputs [..., D] add to the gates, [..., 3 G]."""
        return F.linear(x, self.weight_ih_l0)

    def step(self, known_B3G: Tensor, state_BG: Tensor) -> Tensor:
        """The next state [B, G]."""
        reset, update, new = known_B3G.chunk(3, -1)
        of_reset, of_update, of_new = F.linear(state_BG, self.weight_hh_l0).chunk(3, -1)
        z_BG = torch.sigmoid(update + of_update)
        n_BG = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        return n_BG + z_BG * (state_BG - n_BG)


class DominoHead(BlockHead):
    """The backbone, and logits_k += W2 SiLU(W1 [h_k ; g_k]), g_k the state after the tokens from the root to the one
    before draft k.

    Attributes:
        prefix_gru: over the target's embeddings of these tokens. embed_proj: W1, SiLU, W2.
    """

    family = "domino"
    config: DominoConfig

    def __init__(self, config: DominoConfig, dims: HeadDims):
        super().__init__(config, dims)
        if not 0 <= config.uncorrected < config.depth:
            raise ConfigError(
                f"head.uncorrected: found {config.uncorrected}, expected 0 or more, below head.depth {config.depth}"
            )
        if not 0 <= config.base_weight <= 1:
            raise ConfigError(f"head.base_weight: found {config.base_weight}, expected a share from 0 to 1")
        rank, size = config.correction_rank, config.draft_tokens(dims.vocab_size)
        self.prefix_gru = PrefixGRU(dims.hidden_size, config.gru_size)
        down = nn.Linear(dims.hidden_size + config.gru_size, rank, bias=False)
        self.embed_proj = nn.Sequential(down, nn.SiLU(), nn.Linear(rank, size, bias=False))
        nn.init.zeros_(self.correction_Ur)  # training starts from the base logits

    @property
    def teaches_base(self) -> bool:  # type: ignore[override]
        return self.config.base_weight > 0

    @property
    def weights_vary(self) -> bool:
        return self.teaches_base

    def term_weights(self, part: float = 1.0) -> Tensor:
        """1 - λ times the weights of the corrected logits' terms, λ times those of the others; λ falls to 0."""
        weight_T = super().term_weights(part)
        if not self.teaches_base:
            return weight_T
        share = self.config.base_weight * (1 - part)
        factor_T = torch.tensor([1 - share] * len(self.kinds) + [share] * len(self.kinds))
        return weight_T * factor_T

    @property
    def correction_Ur(self) -> Tensor:
        return self.embed_proj[2].weight  # type: ignore[return-value]

    def _low(self, hidden: Tensor, state: Tensor) -> Tensor:
        return self.embed_proj[1](self.embed_proj[0](torch.cat((hidden, state.to(hidden.dtype)), -1)))

    def corrections(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor:
        # one product for all inputs; the state follows draft by draft
        known_AK3G = self.prefix_gru.known(self.embed(previous_AK))
        state_AG, states = known_AK3G.new_zeros(len(known_AK3G), self.config.gru_size), []
        for known_A3G in known_AK3G.unbind(1):
            state_AG = self.prefix_gru.step(known_A3G, state_AG)
            states.append(state_AG)
        low_AKr, first = self._low(hidden_AKD, torch.stack(states, 1)), self.config.uncorrected
        return F.pad(low_AKr[:, first:], (0, 0, first, 0))

    def walk_step(self, hidden_BD: Tensor, previous_B: Tensor, state: Any) -> tuple[Tensor, Any]:
        """As the base class's. The state is (drafts so far, g)."""
        known_B3G = self.prefix_gru.known(self.embed(previous_B))
        count, state_BG = (0, known_B3G.new_zeros(len(known_B3G), self.config.gru_size)) if state is None else state
        state_BG = self.prefix_gru.step(known_B3G, state_BG)
        low_Br = self._low(hidden_BD, state_BG)
        return low_Br if count >= self.config.uncorrected else torch.zeros_like(low_Br), (count + 1, state_BG)
