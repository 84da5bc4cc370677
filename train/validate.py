"""Validation on held-out packs: the loss, the head's metrics, walked and measured accepted length."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headstart.data.features import FeatureSource
from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.train.sharing.distributed import sum_over_ranks
from headstart.train.step import LossModule, SumNames
from headstart.train.stream import naming_samples


class Validator:
    """Validates a head: `(head, step, final) -> {"valid/…": value}`.

    Args:
        source: features of the held-out samples. Anchors have the head's depths, or `chain` depths if that is more.
        packs: held-out packs (sample indices), divided among the ranks.
        probe: measures τ by decoding a few prompts, on rank 0. None = τ is not measured.
        tau_every: steps between two probes; 0 = a probe at every validation. The final validation always probes.
        autocast: see step.autocast_dtype.
        chain: length of the evaluation's chains, whose acceptance is walked; None = the anchors' depths.
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
        chain: int | None = None,
    ):
        self._source, self._packs, self._teacher = source, packs, teacher
        self._probe, self._tau_every, self._autocast = probe, tau_every, autocast
        self._rank, self._size, self._chain = rank, size, chain

    @torch.no_grad()
    def __call__(self, head: Head, step: int, final: bool = False) -> dict[str, float]:
        """All ranks must call it. All get the same teacher-forced numbers, and rank 0 gets `valid/tau` as well."""
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
        module = LossModule(head, self._teacher, self._autocast, self._chain)
        depths = max(head.depth, self._chain or 0)  # of the anchors
        terms, names = len(head.terms), SumNames.of(head, depths)
        sums = torch.zeros(terms + len(names), device=device)
        for first in range(0, len(self._packs), self._size):
            batch = self._fetch(first, self._packs[first : first + self._size])
            if batch is not None:
                sums += torch.cat(module(batch.to(device)))
        sums = sum_over_ranks(sums).cpu()
        sum_T, sums_S = sums.split((terms, len(names)))
        count_T = names.counts(sums_S)
        mean_T = sum_T / count_T.clamp(min=1)
        values = {}
        if count_T.any():
            values["valid/loss"] = float((head.term_weights() * mean_T).sum())
        losses = zip(names.terms, mean_T.tolist(), count_T.tolist(), strict=True)
        values |= {f"valid/loss_{name}": loss for name, loss, count in losses if count}
        return values | names.ratios(sums_S, "valid")

    def _fetch(self, first: int, packs: list[list[int]]) -> FeatureBatch | None:
        """This rank's batch of a round: each rank takes one of `packs`. Args: first: number of packs before them."""
        mine = packs[self._rank] if self._rank < len(packs) else None
        together = self._source.lockstep
        with naming_samples(self._source, mine, f"held out, pack {first + self._rank}", alone=not together):
            if together:
                return self._source.get_together(packs, self._rank)
            return None if mine is None else self._source.get(mine)
