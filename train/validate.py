"""Validation on held-out packs: teacher-forced loss and accuracy per depth, walked and real acceptance length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.train.sharing.distributed import sum_over_ranks
from headstart.train.step import LossModule
from headstart.train.stream import FeatureSource, explained


def shares(count_K: Tensor, correct_K: Tensor, total_K: Tensor, walked_2: Tensor, prefix: str) -> dict[str, float]:
    """What sums over packs say of a head; a value that nothing tells is absent.

    acc_d: share of the rows supervised at depth d whose draft was the target's choice, fed with the true tokens.
    coverage: share of the supervised rows that carry a loss: where the target's choice is in the draft vocabulary.
    walked_tau: acceptance length τ of a greedy chain, walked over the answers (acceptance.walk): as many tokens per
    cycle as decoding commits where the answers are the target's own greedy ones.

    Example: hits (6, 2) of totals (10, 5), losses on 8 of the 10, 30 tokens in 12 cycles → acc_1 0.6, acc_2 0.4,
    coverage 0.8, walked_tau 2.5.

    Args: host tensors; see step.WindowSums.
    """
    values = {
        f"{prefix}/acc_{d}": float(correct / total)
        for d, (correct, total) in enumerate(zip(correct_K, total_K, strict=True), start=1)
        if total > 0
    }
    if total_K[0] > 0:
        values[f"{prefix}/coverage"] = float(count_K[0] / total_K[0])
    if walked_2[1] > 0:
        values[f"{prefix}/walked_tau"] = float(walked_2[0] / walked_2[1])
    return values


class Validator:
    """Callable that the loop asks for numbers: `(head, step, final) -> {"valid/…": value}`.

    Args:
        source: features of the held-out samples; its anchors may be deeper than the head trains, as deep as `chain`.
        packs: held-out packs (sample indices), shared out among the ranks.
        probe: real greedy draft-verify τ of the head on a few prompts (rank 0 runs it), or None.
        tau_every: steps between two probes, 0 = at every validation; the final validation always probes.
        autocast: see step.autocast_dtype.
        chain: drafts of the chain whose acceptance is walked: the evaluation's; None = the anchors' depths.
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
        module = LossModule(head, self._teacher, self._autocast, self._chain)
        depth = max(head.depth, self._chain or 0)  # the anchors' depths
        sums = torch.zeros(4 * depth + 2, device=device)
        for first in range(0, len(self._packs), self._size):
            batch = self._fetch(first, self._packs[first : first + self._size])
            if batch is not None:
                sums += torch.cat(module(batch.to(device)))
        sums = sum_over_ranks(sums).cpu()
        loss_K, count_K, correct_K, total_K = sums[:-2].view(4, depth)
        values = {}
        trained_K, count_T = loss_K[: head.depth], count_K[: head.depth]  # depths beyond carry no loss
        mean_T = trained_K / count_T.clamp(min=1)
        if count_T.any():
            values["valid/loss"] = float((head.depth_weights() * mean_T).sum())
        losses = zip(mean_T.tolist(), count_T.tolist(), strict=True)
        values |= {f"valid/loss_{d}": loss for d, (loss, count) in enumerate(losses, start=1) if count}
        return values | shares(count_K, correct_K, total_K, sums[-2:], "valid")

    def _fetch(self, first: int, packs: list[list[int]]) -> FeatureBatch | None:
        """This rank's of one pack per rank, the first of them number `first`."""
        mine = packs[self._rank] if self._rank < len(packs) else None
        together = bool(getattr(self._source, "lockstep", False))
        with explained(self._source, mine, f"held out, pack {first + self._rank}", alone=not together):
            if together:
                return self._source.get_together(packs, self._rank)  # type: ignore[attr-defined]
            return None if mine is None else self._source.get(mine)
