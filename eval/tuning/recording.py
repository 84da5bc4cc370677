"""Records what drafts say of themselves while chains are decoded, without a question to the host, and fits it.

Shape legend: T cycles of a batch, B batch, K positions, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.drafter import ConfidentDrafter, Drafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.scheduler import Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.tree import Tree
from headstart.eval.tuning.calibration import Outcomes, calibrate
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.formats.calibration import Calibration

Item = TypeVar("Item")

#: cycles of a record beyond those of its batch: one more is under way when the host reads the last one
SPARE = 2


@contextmanager
def asked_for_confidence(drafter: Drafter) -> Iterator[str]:
    """Have a drafter say how sure it is while a `ConfidenceRecorder` listens; gives Calibration.source.

    Captured cycles that were made before do not say it: a scheduler of its own, as the recorder is, gives new ones.
    """
    if not isinstance(drafter, ConfidentDrafter):
        yield "draft_probability"  # it says nothing: `said` refuses its drafts
        return
    before, drafter.says_confidence = drafter.says_confidence, True
    try:
        yield drafter.confidence_source
    finally:
        drafter.says_confidence = before


def said(tree: Tree) -> Tensor:
    """What the drafts of a chain say of themselves: logits, float32 [B, N].

    Raises: ConfigError for trees, and for drafts without confidence.
    """
    if not tree.linear:
        raise ConfigError("eval.tree: found a tree, expected a chain: calibrations are fitted on chains (kind: chain)")
    if tree.confidence_BN is None:
        raise ConfigError(
            "calibration: the drafter does not say how sure it is of its drafts, expected one that was asked and can: "
            "calibrate a head (eval.drafter=auto)"
        )
    return tree.confidence_BN


class ConfidenceRecorder(Scheduler):
    """A scheduler that keeps all drafts and writes down what they say. One recorder serves one batch at a time.

    A row that ended may take another context.

    Args: rows: of a batch. cycles: most of a batch (`most_cycles`). positions: drafts of a cycle.
    """

    captures = True

    def __init__(self, rows: int, cycles: int, positions: int, device: torch.device | str = "cpu"):
        self.logit_TBK = torch.zeros((cycles + SPARE, rows, positions), device=device)
        # the number of the batch's cycle, int64 [1]
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def state(self) -> list[tuple[object, str]]:
        return [(self, "turn")]

    @property
    def row_state(self) -> list[tuple[object, str]]:
        return []  # the batch goes on counting when a row takes another context

    def start(self, context: Rows) -> None:
        self.turn = torch.zeros_like(context.count_B[:1])

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        # in place: the record outlives the batch, and a capture's trial cycles write where the first real one will
        self.logit_TBK.index_copy_(0, self.turn, said(tree).to(self.logit_TBK.dtype)[None])
        self.turn = (self.turn + 1).clamp(max=len(self.logit_TBK) - 1)
        return None

    def outcomes(self, answers: list[Answer]) -> Outcomes:
        """The cycles of the latest batch, after it is decoded.

        Raises: ValueError for more cycles than are recorded.
        """
        rows, turns, accepted, judged = [], [], [], []
        for answer in answers:
            for turn, cycle in enumerate(answer.cycles, start=answer.before):
                # where an answer ended among its accepted drafts, nobody knows of those behind
                cut = cycle.committed == cycle.accepted
                rows.append(answer.row)
                turns.append(turn)
                accepted.append(cycle.accepted)
                judged.append(cycle.accepted if cut else cycle.drafted)
        if turns and max(turns) >= len(self.logit_TBK) - 1:
            raise ValueError(
                f"recorded cycles: found {max(turns) + 1} in the batch, {len(self.logit_TBK) - SPARE} are recorded"
            )
        logit_SK = self.logit_TBK.cpu()[torch.tensor(turns, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)]
        return Outcomes(logit_SK, torch.tensor(accepted, dtype=torch.int64), torch.tensor(judged, dtype=torch.int64))


def most_cycles(limits: list[int], rows: int) -> int:
    """Cycles that a batch may take, where a row that ended takes the next context.

    While contexts wait, no row stays empty for more than the one cycle that runs when its answer ends. An answer of n
    tokens takes at most n - 1 cycles, so n with that one.

    Args: limits: most tokens of every answer.

    >>> most_cycles([10, 10, 4], rows=2)
    22
    """
    return -(-sum(limits) // rows) + max(limits)


def record(decoder: Decoder, drafter: Drafter, contexts: list[list[int]], rows: int, seed: int) -> Outcomes:
    """Decode contexts, `rows` at a time, and return their cycles.

    The drafter must have been asked for confidence (`asked_for_confidence`).
    """
    return record_each(decoder, drafter, contexts, rows, seed)[0]


def record_each(
    decoder: Decoder, drafter: Drafter, contexts: list[list[int]], rows: int, seed: int
) -> tuple[Outcomes, list[int]]:
    """As `record`, and how many cycles each context has: their cycles stand in the contexts' order."""
    limits, rows = decoder.limits(contexts), min(rows, len(contexts))
    recorder = ConfidenceRecorder(rows, most_cycles(limits, rows), drafter.max_nodes, decoder.target.device)
    decoded = decoder.run(contexts, drafter, limits, seed, rows=rows, scheduler=recorder)
    return recorder.outcomes(decoded.answers), [len(answer.cycles) for answer in decoded.answers]


def task_after_task(contexts: Sequence[Item], tasks: Sequence[str | None]) -> list[Item]:
    """The contexts in an order in which those of a task follow each other: then every other context is of all tasks.

    Where six tasks take turns, every other context is of three of them.

    >>> task_after_task([1, 2, 3, 4], ["a", "b", "a", "b"])
    [1, 3, 2, 4]
    """
    first = {task: place for place, task in reversed(list(enumerate(tasks)))}
    return [contexts[n] for n in sorted(range(len(contexts)), key=lambda place: first[tasks[place]])]


def calibrate_drafter(
    decoder: Decoder,
    drafter: Drafter,
    contexts: list[list[int]],
    dataset: str,
    kind: str = "logistic",
    rows: int = 16,
    seed: int = 0,
) -> Calibration:
    """Fit on every other context, and measure the errors on the contexts between them.

    Args:
        contexts: held out: none was trained on. Those of a task follow each other (`task_after_task`).
        dataset: their name.
        kind: see Calibration. Temperatures cannot move a probability across ½, which a biased confidence needs.
        rows: contexts decoded at a time.
    Raises: ConfigError for a drafter that says nothing of its drafts. DataError for too few contexts or cycles.
    """
    if decoder.sampling.lossy:
        raise ConfigError(
            "calibration: found lossy acceptance, expected the target's own: set eval.acceptance=lossless"
        )
    if len(contexts) < 2:
        raise DataError(
            f"calibration: found {counted(len(contexts), 'prompts')}, expected 2 or more: one to fit on, one to "
            "measure on"
        )
    with asked_for_confidence(drafter) as source:
        fitted_on, measured_on = (
            record(decoder, drafter, part, rows, seed) for part in (contexts[::2], contexts[1::2])
        )
    return calibrate(fitted_on, measured_on, kind, source, dataset)
