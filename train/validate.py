"""Validation on held-out packs: teacher-forced loss and accuracy per depth, simulated and real acceptance length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.heads.base import FeatureBatch, Head, Teacher
from headstart.train.distributed import sum_over_ranks
from headstart.train.step import LossModule
from headstart.train.stream import FeatureSource, explained


def acceptance(correct_K: Tensor, total_K: Tensor, prefix_K: Tensor, prefix: str) -> dict[str, float]:
    """Accuracy per depth and simulated acceptance length τ = 1 + Σ_d P(depths 1 … d all hit), from sums.

    Example: totals (10, 5), prefix hits (6, 2) → τ = 1 + 0.6 + 0.4 = 2.
    Host tensors; a depth without positions has accuracy 0 and adds nothing.
    """
    total_K = total_K.clamp(min=1)
    values = {f"{prefix}/acc_{d}": value for d, value in enumerate((correct_K / total_K).tolist(), start=1)}
    return values | {f"{prefix}/sim_tau": 1.0 + float((prefix_K / total_K).sum())}


class Validator:
    """Callable that the loop asks for numbers: `(head, step, final) -> {"valid/…": value}`.

    Args:
        source: features of the held-out samples.
        packs: held-out packs (sample indices), shared out among the ranks.
        probe: real greedy draft-verify τ of the head on a few prompts (rank 0 runs it), or None.
        tau_every: steps between two probes, 0 = at every validation; the final validation always probes.
        autocast: see step.autocast_dtype.
    """

    def __init__(
        self,
        source: FeatureSource,
        packs: list[list[int]],
        teacher: Teacher,
        probe: Callable[[Head], float] | None = None,
        tau_every: int = 0,
        autocast: torch.dtype | None = None,
        rank: int = 0,
        size: int = 1,
    ):
        self._source, self._packs, self._teacher = source, packs, teacher
        self._probe, self._tau_every, self._autocast = probe, tau_every, autocast
        self._rank, self._size = rank, size

    @torch.no_grad()
    def __call__(self, head: Head, step: int, final: bool = False) -> dict[str, float]:
        """All ranks call it; every rank gets the same teacher-forced numbers, rank 0 also `valid/tau`."""
        was_training = head.training
        head.eval()
        try:
            values = self._teacher_forced(head)
            due = final or not self._tau_every or step % self._tau_every == 0
            if self._probe is not None and due and self._rank == 0:
                values["valid/tau"] = float(self._probe(head))
            return values
        finally:
            head.train(was_training)

    def _teacher_forced(self, head: Head) -> dict[str, float]:
        if not self._packs:
            return {}
        device = next(head.parameters()).device
        module = LossModule(head, self._teacher, self._autocast)
        sums_5K = torch.zeros(5, head.depth, device=device)
        for first in range(0, len(self._packs), self._size):
            batch = self._fetch(first, self._packs[first : first + self._size])
            if batch is not None:
                sums_5K += torch.stack(module(batch.to(device)))
        loss_K, count_K, correct_K, total_K, prefix_K = sum_over_ranks(sums_5K).cpu()
        mean_K = loss_K / count_K.clamp(min=1)
        values = {"valid/loss": float((head.depth_weights() * mean_K).sum())}
        values |= {f"valid/loss_{d}": value for d, value in enumerate(mean_K.tolist(), start=1)}
        return values | acceptance(correct_K, total_K, prefix_K, "valid")

    def _fetch(self, first: int, packs: list[list[int]]) -> FeatureBatch | None:
        """This rank's of one pack per rank, the first of them number `first`."""
        mine = packs[self._rank] if self._rank < len(packs) else None
        together = bool(getattr(self._source, "lockstep", False))
        with explained(self._source, mine, f"held out, pack {first + self._rank}", alone=not together):
            if together:
                return self._source.get_together(packs, self._rank)  # type: ignore[attr-defined]
            return None if mine is None else self._source.get(mine)
