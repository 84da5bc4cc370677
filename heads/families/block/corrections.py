"""What a family may add to a block head's backbone: a correction of the logits, and terms of the loss.

Shape legend: A anchors, B batch, K drafts of a block, D target hidden, r rank of a correction, V target vocabulary,
U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headstart.heads.families.block.costs import BlockCosts
from headstart.heads.losses.block import BlockLabels, BlockLosses

#: metrics that a family adds: (numerator, denominator) of each
Metrics = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Drafts:
    """Arguments and result of `BlockHead.corrections` for all drafts of a step."""

    hidden_AKD: Tensor
    previous_AK: Tensor
    low_AKr: Tensor | None


class Corrected(BlockCosts):
    """The hooks that families override. Here, nothing is added."""

    @property
    def correction_Ur(self) -> Tensor | None:
        """`up`, [U, r]; None where the base logits are not corrected."""
        return None

    @property
    def correction_table_Vr(self) -> Tensor | None:
        """`low` of a draft by the token before it, [V, r], for a faster walk; None where it depends on more."""
        return None

    def corrections(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor | None:
        """`low` of all drafts, given the tokens before them (teacher forcing): [A, K, r].

        Args:
            hidden_AKD: outputs of the slots (`slots`). previous_AK: int64, x_{t+k}, target ids.
        """
        return None

    def walk_step(self, hidden_BD: Tensor, previous_B: Tensor, state: Any) -> tuple[Tensor, Any]:
        """`low` of one draft of each sequence, [B, r], and the next state.

        Args:
            hidden_BD: output of the slot. previous_B: int64, target ids. state: of the draft before; None at the first.
        """
        raise NotImplementedError

    @property
    def has_confidence(self) -> bool:
        """Whether a confidence head says how sure the draft is of itself (`confidence_logits`)."""
        return False

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """logit(p) of every draft [...], p the probability that it is accepted if all before it are.

        Args: hidden: outputs of the slots [..., D]. previous: int64 [...], the token before each draft.
        """
        raise NotImplementedError

    @property
    def confidence_parts(self) -> tuple[Tensor, Tensor] | None:
        """(w [D], table [V]), float32, where `confidence_logits` are w · hidden + table[previous], for faster drafting;
        None where they depend on more.
        """
        return None

    @property
    def selects(self) -> int:
        """Drafts are chosen by the corrected logits among so many tokens that are most likely without the correction.
        0 = among all.
        """
        return 0

    @property
    def select_weight(self) -> float:
        """Weight of the cross-entropy over these tokens."""
        return 0.0

    @property
    def reads_overlap(self) -> bool:
        """Whether `more_terms` reads the drafts' overlap with the target's distribution."""
        return False

    @property
    def teaches_base(self) -> bool:  # type: ignore[override]
        """Whether the logits without the correction carry a loss too: the same terms, behind those of the corrected."""
        return False

    def more_terms(self, drafts: Drafts, labels: BlockLabels, losses: BlockLosses) -> tuple[list[Tensor], Metrics]:
        """What the family adds: (sums of the terms behind those of the weights, float32 scalars, by `self.terms`;
        both sides of the metrics behind the base class's, by `self.metrics`).
        """
        return [], []
