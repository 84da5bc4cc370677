"""Records what drafts say of themselves while chains are decoded, without a question to the host, and fits it.

Shape legend: T cycles of a batch, B batch, K positions, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.drafter import ConfidentDrafter, Drafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.scheduler import Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.tree import Tree
from headstart.eval.tuning.calibration import Outcomes, calibrate, joined
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.formats.calibration import Calibration

#: cycles that a batch may run beyond its longest answer: one more is under way when the host reads the last one
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

    All rows of the batch must begin together, as many contexts as rows: cycle t of an answer is cycle t of the batch.

    Args: rows: of a batch. cycles: most of an answer (its tokens). positions: drafts of a cycle.
    """

    captures = True

    def __init__(self, rows: int, cycles: int, positions: int, device: torch.device | str = "cpu"):
        self.logit_TBK = torch.zeros((cycles + SPARE, rows, positions), device=device)
        # the number of the cycle, the same in all rows
        self.turn_B = torch.zeros(rows, dtype=torch.int64, device=device)

    @property
    def state(self) -> list[tuple[object, str]]:
        return [(self, "turn_B")]

    def start(self, context: Rows) -> None:
        self.turn_B = torch.zeros_like(context.count_B)

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        # in place: the record outlives the batch, and a capture's trial cycles write where the first real one will
        self.logit_TBK.index_copy_(0, self.turn_B[:1], said(tree).to(self.logit_TBK.dtype)[None])
        self.turn_B = (self.turn_B + 1).clamp(max=len(self.logit_TBK) - 1)
        return None

    def outcomes(self, answers: list[Answer]) -> Outcomes:
        """The cycles of the latest batch, after it is decoded.

        Args: answers: of all its rows.
        Raises: ValueError where a row took a second context: its answers' rows are not known.
        """
        if len(answers) > self.logit_TBK.shape[1] or any(answer.before for answer in answers):
            raise ValueError(
                f"recorded cycles: found {len(answers)} answers of a batch of {self.logit_TBK.shape[1]} rows, expected "
                "one of each row: decode as many contexts at a time as there are rows"
            )
        rows, turns, accepted, judged = [], [], [], []
        for row, answer in enumerate(answers):
            for turn, cycle in enumerate(answer.cycles):
                # where an answer ended among its accepted drafts, nobody knows of those behind
                cut = cycle.committed == cycle.accepted
                rows.append(row)
                turns.append(turn)
                accepted.append(cycle.accepted)
                judged.append(cycle.accepted if cut else cycle.drafted)
        logit_SK = self.logit_TBK.cpu()[torch.tensor(turns, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)]
        return Outcomes(logit_SK, torch.tensor(accepted, dtype=torch.int64), torch.tensor(judged, dtype=torch.int64))


def record(decoder: Decoder, drafter: Drafter, contexts: list[list[int]], rows: int, seed: int) -> Outcomes:
    """Decode contexts, `rows` at a time and all of these together, and return their cycles.

    The drafter must have been asked for confidence (`asked_for_confidence`).
    """
    recorders: dict[int, ConfidenceRecorder] = {}  # the last contexts may be fewer
    parts, limits = [], decoder.limits(contexts)
    for begin in range(0, len(contexts), rows):
        some, most = contexts[begin : begin + rows], limits[begin : begin + rows]
        if len(some) not in recorders:
            recorders[len(some)] = ConfidenceRecorder(len(some), max(limits), drafter.max_nodes, decoder.target.device)
        recorder = recorders[len(some)]
        decoded = decoder.run(some, drafter, most, seed + begin, scheduler=recorder)
        parts.append(recorder.outcomes(decoded.answers))
    return joined(parts)


def calibrate_drafter(
    decoder: Decoder,
    drafter: Drafter,
    contexts: list[list[int]],
    dataset: str,
    kind: str | None = None,
    rows: int = 16,
    seed: int = 0,
) -> Calibration:
    """Fit on every other context, and measure the errors on the contexts between them.

    Args:
        contexts: held out: none was trained on.
        dataset: their name.
        kind: see Calibration; None = temperature for a confidence head, logistic for a draft's own probability.
        rows: contexts decoded at a time.
    Raises: ConfigError for a drafter that says nothing of its drafts. DataError for too few contexts or cycles.
    """
    if decoder.sampling.lossy:
        raise ConfigError(
            "calibration: found lossy acceptance, expected the target's own: set eval.acceptance=lossless"
        )
    if len(contexts) < 2:
        raise DataError(
            f"calibration: found {len(contexts)} prompts, expected 2 or more: one to fit on, one to measure on"
        )
    with asked_for_confidence(drafter) as source:
        fitted_on, measured_on = (
            record(decoder, drafter, part, rows, seed) for part in (contexts[::2], contexts[1::2])
        )
    chosen = kind or ("temperature" if source == "confidence" else "logistic")
    return calibrate(fitted_on, measured_on, chosen, source, dataset)
