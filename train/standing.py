"""Where a run stands: what it has done, how much of its budget is left, what its ranks agree on, what it has told.

All ranks must do the same after a step: go on, or end. What decides (rank 0's clock, a signal that one of them got, a
failed write) therefore travels in the one all-reduce that a step makes anyway:

    counts_T = standing.exchange(counts_T, flags, …)   step n: summed on the device, nobody waits
    …                                                  the device computes step n
    flags = standing.read_agreement(…)                 before step n + 1: the sums are there, all ranks read the same
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.transfer import to_device
from headstart.train.config import TrainConfig
from headstart.train.launching.signals import StopSignal
from headstart.train.optim import Budget
from headstart.train.patience import Patience
from headstart.train.sharing.distributed import Agreement
from headstart.train.stream import PackStream
from headstart.train.tracking.meters import Meters
from headstart.train.tracking.screen import Screen
from headstart.train.tracking.track import Reporter, RunTracker, open_tracker

#: numbers of `Agreed`, which travel between the counts and the flags of an exchange
AGREED = 4


@dataclass
class RunState:
    """What a run has done so far; all of it is in every checkpoint (JSON values).

    Attributes:
        step: optimiser steps made. packs: packs consumed, which is the position in the data.
        elapsed: wall-clock seconds of the loop. tokens, supervised: rows and depth-1 positions trained on.
        trained: positions of any depth that carried a loss; None = an older version did not count them.
        metrics: last validation. best: {"name", "value", "step"}.
        finished: [step, reason] once the final validation and checkpoint are done.
        unvalidated: whether a validation was due at this step and is not in `metrics` and `best` yet.
        skipped: steps skipped in a row until here (`train.nonfinite=skip`).
        patience: what train/patience.py knows. round: number of the round (train/rounds.py).
        stage: number of the stage (stages.py). stage_step, stage_elapsed: `step` and seconds at which it began.
    """

    step: int = 0
    packs: int = 0
    elapsed: float = 0.0
    tokens: int = 0
    supervised: int = 0
    trained: int | None = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    finished: list[Any] | None = None
    unvalidated: bool = False
    skipped: int = 0
    patience: dict[str, Any] = field(default_factory=dict)
    round: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_elapsed: float = 0.0


@dataclass(frozen=True)
class Agreed:
    """What every rank knows alike when a step begins.

    Attributes:
        elapsed: rank 0's clock, seconds.
        stop: whether any rank was asked to end.
        write_failed: whether rank 0 has something that could not be written.
        may_save: whether rank 0 can begin the checkpoint that was put off (several ranks only).
    """

    elapsed: float = 0.0
    stop: bool = False
    write_failed: bool = False
    may_save: bool = False


class Standing:
    """The state of a run, its clock and its records.

    Args:
        screen: shows how far the run is.
    Attributes:
        state: replaced when a run resumes.
        agreed: what the ranks agreed on last.
        tracker: receives every record; rank 0 alone has one.
    """

    def __init__(
        self, config: TrainConfig, run_dir: Path, stream: PackStream, budget: Budget, meters: Meters, rank: int,
        size: int, screen: Screen,
    ):  # fmt: skip
        self.config, self.run_dir, self.stream, self.budget, self.meters = config, run_dir, stream, budget, meters
        self.rank, self.size = rank, size
        total, unit = (budget.seconds, "s") if budget.seconds else (float(budget.steps or 1), "steps")
        first = "the first step may compile kernels:" if torch.cuda.is_available() else None
        self.screen, self.reporter = screen, Reporter(screen, total, unit, first)
        self.tracker: RunTracker | None = None
        self.patience = Patience(config.patience, self.reporter.say)
        self.signal = StopSignal(self._say_stop)
        self.state = RunState()
        self.agreed = Agreed()
        self._agreement = Agreement()
        self._counts = 0
        self._started = time.perf_counter()

    def _say_stop(self, number: int) -> None:
        """Say at once what a signal does; the loop acts on it when the step is over."""
        doing = self.screen.doing()
        again = "; Ctrl-C again to stop now" if number == signal.SIGINT else ""
        self.screen.ask(f"stopping after this step{f' ({doing})' if doing else ''}, then saving{again}")

    def open_tracker(self) -> None:
        """Rank 0: begin to write records, after those of the checkpoint that the run resumes from."""
        self.tracker = open_tracker(self.config, self.run_dir, self.state.step, self.state.unvalidated)

    def read_meters(self) -> dict[str, float]:
        """The averages since the last record. The host waits for the device here, and nowhere else between saves."""
        values, supervised, trained = self.meters.read()
        state = self.state
        state.supervised += supervised
        state.trained = None if state.trained is None else state.trained + trained
        return values

    def log_step(self, values: dict[str, float]) -> None:
        """Write the record of a training step: `values`, and how far the run is."""
        if "train/loss" in values:  # not so where all steps were skipped
            self.patience.note_loss(values["train/loss"])
        epoch = self.stream.locate(max(self.state.packs - 1, 0)).epoch
        self.log({**values, "epoch": epoch, "seconds": self.elapsed(), "supervised_tokens": self.state.supervised})

    def log_validation(self, values: dict[str, float]) -> None:
        """Keep and write what a validation found."""
        state = self.state
        state.metrics, state.unvalidated = values, False
        state.patience = self.patience.note(state.patience, state.step, values)
        self.log(values)

    def validation_due(self, step: int) -> bool:
        """Whether `train.eval_every` asks for a validation after `step`."""
        every = self.config.eval_every
        return bool(every) and step % every == 0

    def log(self, values: dict[str, float]) -> None:
        self.reporter.record(self.state.step, values, self._done())
        if self.tracker is not None:
            self.tracker.log(self.state.step, values)

    def advance(self) -> None:
        """Show the step that was just made."""
        self.reporter.advance(self._done())

    def _done(self) -> float:
        return self.elapsed() if self.budget.seconds else float(self.state.step)

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.close()
        self.reporter.close()

    def start_clock(self) -> None:
        """Go on from the seconds that the state remembers."""
        self._started = time.perf_counter() - self.state.elapsed
        self.meters.restart_clock()
        self.reporter.start()
        self.agreed = Agreed(elapsed=self.state.elapsed)

    def elapsed(self) -> float:
        """Seconds of the loop, earlier parts of a resumed run included, pauses left out."""
        return time.perf_counter() - self._started

    def leave_out(self, seconds: float) -> None:
        """Leave a pause out of the clock and the rates."""
        self._started += seconds
        self.meters.leave_out(seconds)

    def ended(self) -> str | None:
        """Why no further step may be made (signal | patience | steps | epochs | seconds), None while one may."""
        if self.agreed.stop:
            return "signal"
        if self.patience.spent(self.state.patience):
            self.reporter.say(self.patience.ending(self.state.patience))
            return "patience"
        return self.budget.finished(self.state.step, self.agreed.elapsed)

    def is_last(self, step: int) -> bool:
        """Whether `step` is the last of the steps or epochs of the budget. A limit of time is not looked at."""
        return self.budget.finished(step, 0.0) is not None

    def exchange(self, counts_T: Tensor, flags: Tensor, write_failed: bool, may_save: bool) -> Tensor:
        """Sum over the ranks what a step counts, and with it what they must agree on. All ranks take part.

        Args:
            counts_T: this rank's positions with a loss.
            flags: see Health; those of the window before.
            write_failed, may_save: rank 0's part of `Agreed`; False elsewhere.
        Returns: the sums of `counts_T`, on the device.
        """
        clock = self.elapsed() if self.rank == 0 else 0.0
        told = torch.tensor([clock, self.signal.received is not None, write_failed, may_save], dtype=torch.float32)
        told = to_device(told, counts_T.device, non_blocking=True)
        self._counts = len(counts_T)
        return self._agreement.exchange(torch.cat([counts_T, told, flags]))[: self._counts]

    def read_agreement(self, write_failed: bool) -> list[float] | None:
        """Read into `agreed` what the last step's exchange said. Returns its flags, None before the first step.

        Args: write_failed: whether a write has failed by now. One rank alone acts on this, not on the older answer.
        """
        if self.size == 1:
            self.agreed = Agreed(self.elapsed(), self.signal.received is not None, write_failed)
        values = self._agreement.read()
        if values is None:
            return None
        if self.size > 1:
            clock, stop, failed, may_save = values[self._counts : self._counts + AGREED]
            self.agreed = Agreed(clock, stop > 0, failed > 0, may_save > 0)
        return values[self._counts + AGREED :]

    def exchanged_flags(self) -> list[float] | None:
        """The flags of the last exchange, None before the first. Waits until the exchange is over."""
        values = self._agreement.read()
        return None if values is None else values[self._counts + AGREED :]
