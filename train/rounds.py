"""On-policy rounds: the head drafts along the training answers, and the drafts that failed count more from then on.

A run of `train.rounds` rounds has as many parts of equal budget. Before each part but the first, the loop of decoding
is walked over all training answers (heads/acceptance.py): where the answers are the target's own greedy ones, the
cycles are those that decoding makes. In each cycle, the first wrong draft is the one that failed. In the part that
follows it counts `train.failed_weight` times. Drafts that no cycle asks for, and right ones, count as before.

Worked example: an answer a … f, chains of 2, right drafts as in heads/acceptance.py

    row              .   a   b   c   d   e   f
    right drafts     2   0   0   1   0
    a cycle begins   x           x
    failed draft                 2                of the cycle at row c: it drafts e (right), then f (wrong)

The cycle at the first row has two right drafts of two: nothing failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from headstart.data.features import FeatureSource
from headstart.heads.acceptance import answer_rows, find_cycles
from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.counting import counted
from headstart.heads.ends import Teacher
from headstart.heads.errors import ConfigError, StorageError
from headstart.heads.files import write_safetensors
from headstart.train.config import TrainConfig
from headstart.train.optim import Budget
from headstart.train.standing import Standing
from headstart.train.step import LossModule
from headstart.train.stream import naming_samples

#: folder of a run that holds what each round found
FOLDER = "rounds"


def check_rounds(config: TrainConfig, head: Head) -> None:
    """Raise ConfigError where the head's loss cannot weigh single drafts."""
    if config.rounds > 1 and not head.weighs_drafts:
        raise ConfigError(
            f"train.rounds: found {config.rounds} with a {head.family} head, whose loss does not weigh single drafts, "
            "expected 1: set train.rounds=1"
        )


def round_of(budget: Budget, rounds: int, step: int, elapsed: float) -> int:
    """The round that the step after `step` steps belongs to, 0 … rounds - 1."""
    return min(int(budget.fraction(step, elapsed) * rounds + 1e-9), rounds - 1)


def failed_drafts(run_A: Tensor, batch: FeatureBatch, chain: int) -> tuple[Tensor, Tensor]:
    """(uint8 [R]: the depth of the draft that failed in the cycle that begins at each row, 0 where none begins or none
    failed; int64 [2]: tokens and cycles of the walk).

    Args: run_A: see Loss. chain: drafts of a cycle.
    """
    anchors = batch.anchors
    chain = min(chain, len(anchors.count_K))
    hits_R = torch.zeros_like(batch.tokens_R).index_copy_(0, anchors.row_A, run_A.clamp(max=chain))
    left_R, first_R = answer_rows(batch.turn_R if batch.answer_R is None else batch.answer_R, batch.doc_R)
    kept_R, starts_R = find_cycles(hits_R, left_R, first_R)
    failed_R = starts_R & (hits_R < chain) & (hits_R < left_R)
    counts = torch.stack([(kept_R * starts_R).sum(), starts_R.sum()])
    return torch.where(failed_R, hits_R + 1, 0).to(torch.uint8), counts


def emphasise(batch: FeatureBatch, failed_R: Tensor, weight: float) -> FeatureBatch:
    """The same batch, in whose loss failed drafts count `weight` times."""
    anchors = batch.anchors
    depth_K = torch.arange(1, len(anchors.count_K) + 1, device=failed_R.device)
    failed_AK = failed_R[anchors.row_A][:, None] == depth_K
    emphasis_AK = torch.where(failed_AK, weight, 1.0).to(torch.float32)
    return replace(batch, anchors=replace(anchors, emphasis_AK=emphasis_AK))


class Rounds:
    """The rounds of one run, in one process.

    Args:
        source: of the training features. packs: of all its samples, each once.
        module: the head's loss. chain: drafts of a cycle; None = the head's depth.
        run_dir: keeps what a round found, so that a resumed run goes on with it.
    """

    def __init__(
        self, config: TrainConfig, head: Head, source: FeatureSource, packs: Callable[[], Sequence[Sequence[int]]],
        teacher: Teacher, module: LossModule, chain: int | None, run_dir: Path, device: torch.device,
    ):  # fmt: skip
        check_rounds(config, head)
        self._config, self._head, self._source, self._packs = config, head, source, packs
        self._teacher, self._module, self._chain, self._device = teacher, module, chain or head.depth, device
        self._folder = run_dir / FOLDER
        #: uint8 [rows of the sample] of every sample; None in the first round
        self._failed: list[Tensor] | None = None

    def resume(self, number: int) -> None:
        """Go on in this round with what its walk found. Raises: StorageError where that is gone."""
        if self._config.rounds == 1 or number == 0:
            return
        path = self._path(number)
        if not path.is_file():
            raise StorageError(
                f"{path}: it is gone, and the checkpoint belongs to round {number + 1}: put it back, or start anew "
                "with train.resume=false"
            )
        self._keep(load_file(path)["failed"])

    def begin_due(self, standing: Standing, forget: Callable[[], None]) -> None:
        """Walk the training answers where a round begins. Args: forget: drops captured graphs."""
        state, config = standing.state, self._config
        number = round_of(standing.budget, config.rounds, state.step, standing.agreed.elapsed)
        if number <= state.round:
            return
        began = time.perf_counter()
        with standing.screen.phase("drafting along the training answers", said=False):
            failed_N, tokens, cycles = self._walk()
        write_safetensors(self._path(number), {"failed": failed_N})
        self._keep(failed_N)
        state.round = number
        forget()
        failed, seconds = int((failed_N > 0).sum()), time.perf_counter() - began
        standing.reporter.say(
            f"round {number + 1} of {config.rounds}: along the training answers, the accepted length is "
            f"{tokens / max(cycles, 1):.3f}; {counted(failed, 'drafts')} failed and will count "
            f"{config.failed_weight:g} times ({seconds:.1f} s)"
        )

    def weigh(self, batch: FeatureBatch, samples: Sequence[int]) -> FeatureBatch:
        """A training pack with its failed drafts emphasised; as it is in the first round."""
        if self._failed is None:
            return batch
        failed_R = torch.cat([self._failed[i] for i in samples])
        padding = batch.tokens_R.shape[0] - len(failed_R)
        return emphasise(batch, torch.nn.functional.pad(failed_R, (0, padding)), self._config.failed_weight)

    def _path(self, number: int) -> Path:
        return self._folder / f"failed-{number}.safetensors"

    def _keep(self, failed_N: Tensor) -> None:
        self._failed = list(failed_N.to(self._device).split([int(length) for length in self._source.lengths]))

    @torch.no_grad()
    def _walk(self) -> tuple[Tensor, int, int]:
        """(uint8 [N]: failed_drafts of all samples laid end to end, on the host; tokens and cycles of the walk)."""
        lengths = [int(length) for length in self._source.lengths]
        found: dict[int, Tensor] = {}
        total = torch.zeros(2, dtype=torch.int64, device=self._device)
        was_training = self._head.training
        self._head.eval()
        try:
            for number, pack in enumerate(self._packs()):
                with naming_samples(self._source, pack, f"round, pack {number}", alone=True):
                    batch = self._source.get(list(pack)).to(self._device)
                with self._module.autocast():
                    run_A = self._head.loss(batch, self._teacher).run_A
                assert run_A is not None, "a head that weighs drafts walks chains"
                failed_R, counts = failed_drafts(run_A, batch, self._chain)
                total += counts
                rows = [lengths[i] for i in pack]
                found |= dict(zip(pack, failed_R[: sum(rows)].split(rows), strict=True))
        finally:
            self._head.train(was_training)
        tokens, cycles = total.tolist()
        failed = [found.get(i, torch.zeros(length, dtype=torch.uint8)).cpu() for i, length in enumerate(lengths)]
        return torch.cat(failed), tokens, cycles
