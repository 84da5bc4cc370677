"""Logits → probabilities: the processors that the target's p and the draft's q both go through (methods §10)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.config import EvalConfig, synthetic_rates
from headstart.eval.kernels.argmax import argmax, argmax_with_logit
from headstart.heads.numerics import wide
from headstart.heads.sampling import distribution, logit_of


@dataclass(frozen=True)
class Sampling:
    """Processors in the order they apply: repetition penalty, temperature, top-k, top-p, min-p."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    #: (ε, δ) of Medusa's typical acceptance, which is lossy at temperature > 0; None = lossless acceptance
    typical: tuple[float, float] | None = None
    #: probability of acceptance at each level, whatever the target says (lossy); None = the target decides
    synthetic: tuple[float, ...] | None = None
    #: lossless rule for chains that were drawn: block or token
    verification: str = "block"

    @classmethod
    def from_config(cls, config: EvalConfig) -> Sampling:
        typical = (config.typical_epsilon, config.typical_delta) if config.acceptance == "typical" else None
        return cls(
            config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty, typical,
            synthetic_rates(config), config.verification,
        )  # fmt: skip

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def lossy(self) -> bool:
        return self.synthetic is not None or (self.typical is not None and not self.greedy)


def penalise(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Repetition penalty, in float32 (float64 stays).

    Args: logits: […, V]; seen: bool, broadcastable, the tokens to penalise; None leaves the logits unchanged.
    """
    if seen is None:
        return logits
    logits, penalty = wide(logits), sampling.repetition_penalty
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def best(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Most likely token after the repetition penalty, the lower id where two tie: […, V] → int64 […]."""
    return most_likely(logits, sampling, seen)[0]


def most_likely(
    logits: Tensor, sampling: Sampling, seen: Tensor | None, ids_V: Tensor | None = None, says: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As `best`, and with `says` the logit of each token's probability at temperature 1, float32 […]; else None.

    Args: ids_V: int64, id of each column (None: its index).
    """
    penalised = penalise(logits, sampling, seen)
    return argmax_with_logit(penalised, ids_V) if says else (argmax(penalised, ids_V), None)


def probabilities(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Distribution after all processors, […, V], float32 (float64 stays): see heads.sampling.distribution."""
    penalised = penalise(logits, sampling, seen)
    return distribution(penalised, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def logit_of_largest(q: Tensor) -> Tensor:
    """Logit of the largest probability of distributions […, V], float32 […]: it does not tell what was drawn."""
    return logit_of(q.amax(-1)).float()


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample token ids from distributions […, V] → int64 […].

    A race of exponential clocks: of clocks that ring after Exp(1) / p(x), that of token x rings first with
    probability p(x).
    """
    clock = torch.empty_like(p).exponential_(generator=generator)
    return (p / clock.clamp(min=torch.finfo(p.dtype).tiny)).argmax(-1)


def add_seen(seen_BV: Tensor | None, tokens_BJ: Tensor, count_B: Tensor | None = None) -> Tensor | None:
    """`seen_BV` (bool [B, V]) with the first `count_B` tokens of each row added; count None = all tokens.

    Without a repetition penalty nothing is kept: None stays None.
    """
    if seen_BV is None:
        return None
    if count_B is None:
        return seen_BV.scatter(1, tokens_BJ, True)
    inside_BJ = torch.arange(tokens_BJ.shape[1], device=tokens_BJ.device) < count_B[:, None]
    return seen_BV.int().scatter_add_(1, tokens_BJ, inside_BJ.int()) > 0


def context_seen(sampling: Sampling, tokens_BJ: Tensor, count_B: Tensor, vocab: int) -> Tensor | None:
    """bool [B, V]: the first `count_B` tokens of each row, where `sampling` has a repetition penalty; else None."""
    if not sampling.penalises:
        return None
    return add_seen(torch.zeros((len(tokens_BJ), vocab), dtype=torch.bool, device=tokens_BJ.device), tokens_BJ, count_B)
