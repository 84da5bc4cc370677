"""One conversation, what the target says about it, and the sums that every head's loss is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Document:
    """Tokens x_0 … x_{T-1} of one conversation with the target's features.

    turns: assistant turn of every token, -1 = not supervised.
    hidden_TD: f_t, the target's last hidden state **after** its final norm.
    streams_TkD: the residual streams read by EAGLE-3, before any norm.
    """

    tokens: list[int]
    turns: list[int]
    hidden_TD: Tensor
    streams_TkD: Tensor


@dataclass
class Ends:
    """The frozen ends of the target: its embedding table and its output head."""

    embed_VD: Tensor
    lm_head_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden_D: Tensor) -> Tensor:
        """Next-token logits [V] of one post-norm hidden state."""
        z_V = self.lm_head_VD @ hidden_D
        if self.bias_V is not None:
            z_V = z_V + self.bias_V
        z_V = z_V * self.scale
        if self.softcap is not None:
            z_V = self.softcap * torch.tanh(z_V / self.softcap)
        return z_V


@dataclass
class Sums:
    """What a head's loss says of all documents given, for a head with one term per depth d = 1 … K (index d - 1).

    A family with other terms or metrics gives an object of its own with `loss`, `count`, `metrics`, `numerators`,
    `denominators` and `prefix` (None where it walks no chains).
    """

    loss: list[Tensor]
    count: list[int]
    correct: list[int]
    total: list[int]
    prefix: list[int] | None
    #: metrics of the family's own: name → (numerator, denominator)
    more: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*(f"acc_{d}" for d in range(1, len(self.correct) + 1)), "coverage", *self.more)

    @property
    def numerators(self) -> list[float]:
        """Of the metrics: hits of every depth, and rows that carry a loss at depth 1."""
        return [*self.correct, self.count[0], *(numerator for numerator, _ in self.more.values())]

    @property
    def denominators(self) -> list[float]:
        return [*self.total, self.total[0], *(denominator for _, denominator in self.more.values())]


def is_supervised(turns: list[int], t: int, d: int) -> bool:
    """Whether position t trains at depth d: x_{t+1}, …, x_{t+1+d} all exist and belong to one assistant turn."""
    needed = [t + 1 + i for i in range(d + 1)]
    if t < 0 or needed[-1] >= len(turns):
        return False
    turn = turns[needed[0]]
    return turn >= 0 and all(turns[position] == turn for position in needed)


def greedy_choice(ends: Ends, document: Document, t: int, d: int) -> int:
    """The target's own token for x_{t+1+d}: argmax at index t + d."""
    return int(ends.logits(document.hidden_TD[t + d]).argmax())


def soft_cross_entropy(p: Tensor, logits: Tensor) -> Tensor:
    """-Σ p log softmax(logits)."""
    return -(p * (logits - torch.logsumexp(logits, dim=0))).sum()


def kl_divergence(p: Tensor, logits: Tensor) -> Tensor:
    """Σ p log(p / softmax(logits))."""
    q = torch.softmax(logits, dim=0)
    return sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True))


def minus_log_acceptance(p: Tensor, logits: Tensor) -> Tensor:
    """-log of the rate at which a draft sampled from softmax(logits) passes min(1, p / q): -log Σ q min(1, p / q)."""
    q = torch.softmax(logits, dim=0)
    return -torch.log(sum(b * torch.clamp(a / b, max=1.0) for a, b in zip(p, q, strict=True)))


#: by the name a recipe gives it
DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_ce": soft_cross_entropy,
    "kl": kl_divergence,
    "lk": minus_log_acceptance,
}

def mixed(
    kind: str, p: Tensor, logits: Tensor, lk_weight: float = 0.0, l1_weight: float = 0.0
) -> Tensor:
    """The divergence `kind`, and with these weights minus the log of the acceptance rate and Σ |p - q|."""
    total = DIVERGENCES[kind](p, logits)
    if lk_weight:
        total = total + lk_weight * minus_log_acceptance(p, logits)
    if l1_weight:
        q = torch.softmax(logits, dim=0)
        total = total + l1_weight * sum(torch.abs(a - b) for a, b in zip(p, q, strict=True))
    return total


PositionLoss = Callable[[Document, int, int, Tensor], Tensor | None]


def sum_over_positions(
    documents: list[Document],
    depth: int,
    draft_logits: Callable[[Document, int], list[Tensor]],
    position_loss: PositionLoss,
    ends: Ends,
    draft_ids: list[int] | None = None,
) -> Sums:
    """Run a head over every supervised position.

    draft_logits(document, t): logits of depths 1 … as many as t is supervised at.
    position_loss(document, t, d, logits): loss at one position, None where it carries none.
    draft_ids: target id of every logit, None = the target's vocabulary itself.
    """
    zero = torch.zeros((), dtype=ends.lm_head_VD.dtype)
    sums = Sums([zero] * depth, [0] * depth, [0] * depth, [0] * depth, [0] * depth)
    for document in documents:
        for t in range(len(document.tokens)):
            if not is_supervised(document.turns, t, 1):
                continue
            all_hit = True
            for index, logits in enumerate(draft_logits(document, t)):
                d = index + 1
                loss = position_loss(document, t, d, logits)
                if loss is not None:
                    sums.loss[index] = sums.loss[index] + loss
                    sums.count[index] += 1
                choice = int(logits.argmax())
                drafted = choice if draft_ids is None else draft_ids[choice]
                hit = drafted == greedy_choice(ends, document, t, d)
                all_hit = all_hit and hit
                sums.correct[index] += hit
                sums.total[index] += 1
                sums.prefix[index] += all_hit
    return sums


def supervised_depth(document: Document, t: int, depth: int) -> int:
    """How many of the depths 1 … depth position t is supervised at (they are always the first ones)."""
    return sum(is_supervised(document.turns, t, d) for d in range(1, depth + 1))
