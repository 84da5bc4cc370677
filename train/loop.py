"""The training loop: windows of packs in, a trained head and its checkpoints out.

    result = train(head, TrainData(source), teacher, config, run_dir, Observers(validate=Validator(…)))

Every rank calls `train` with the same arguments (its own device). `TrainingLoop.run_steps` and `step` read like a
page: count, forward and backward, clip, step, log, save. Where the run stands is in standing.py, what may go wrong with
the numbers in health.py, what is written in saving.py.

The host waits for the device only where a record is written, at a validation and at a checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headstart.heads.base import Head
from headstart.heads.ends import Teacher
from headstart.heads.provenance import provenance as make_provenance
from headstart.heads.transfer import to_device
from headstart.train.captured import CapturedPacks
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.checkpoints.resume import restore
from headstart.train.checkpoints.writer import CheckpointWriter
from headstart.train.config import TrainConfig
from headstart.train.flops import peak_flops, step_flops
from headstart.train.health import Health
from headstart.train.launching.setup import captures, make_accelerator, make_parallel, recompute_activations
from headstart.train.launching.watch import Watch
from headstart.train.nonfinite import WindowSamples
from headstart.train.optim import Budget, freeze_still_matrices, lr_factor, set_rate
from headstart.train.patience import check_patience
from headstart.train.rounds import Rounds
from headstart.train.saving import Saving
from headstart.train.sharing.distributed import from_main
from headstart.train.sharing.parallel import Parallel, resolve_kind
from headstart.train.short_runs import check_steps
from headstart.train.stages import Stages
from headstart.train.standing import Standing
from headstart.train.step import LossModule, SumNames, WindowSums, accumulate_window, autocast_dtype, window_counts
from headstart.train.stream import Fetcher, PackStream, TrainData, Window, WindowFeed, idle_note
from headstart.train.tracking.meters import Meters
from headstart.train.tracking.screen import Screen

#: (head, step, final) → values; see validate.Validator
Validate = Callable[[Head, int, bool], dict[str, float]]


@dataclass(frozen=True)
class Observers:
    """Who looks at a run while it trains.

    Attributes:
        validate: measures the head on held-out data.
        watch: watches the other ranks. It lets this rank finish writing a checkpoint before it ends it.
        progress: whether rank 0 shows how far the run is.
        screen: where it shows that, if other steps of the command share it.
        late: called once training is over with the number of a signal that came after the last step. It ended nothing.
    """

    validate: Validate | None = None
    watch: Watch | None = None
    progress: bool = True
    screen: Screen | None = None
    late: Callable[[int], None] = lambda number: None

    def screen_of(self, rank: int) -> Screen:
        """Where this rank shows how far the run is."""
        return self.screen if self.screen is not None and rank == 0 else Screen(self.progress and rank == 0)


@dataclass
class TrainResult:
    """How a run ended.

    Attributes:
        step: optimiser steps made in all.
        tokens, supervised_tokens: rows trained on, and positions supervised at depth 1, repeats counted.
        seconds: wall-clock of the loop, earlier parts of a resumed run included.
        stopped: what ended the run: steps | epochs | seconds | patience | signal.
        metrics: the last validation.
        best: {"name", "value", "step"} of the best validation, or None.
        checkpoint: the final checkpoint directory.
        resumed_from: step the run continued from, 0 = started anew.
        interrupted: whether that signal was SIGINT (Ctrl-C) on this rank, not a scheduler's SIGTERM.
        save_blocked_ms: longest time that saving (a periodic checkpoint or a best head) delayed the next step. Waiting
            for work that the device had queued before is not counted.
    """

    step: int
    tokens: int
    supervised_tokens: int
    seconds: float
    stopped: str
    checkpoint: str
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    resumed_from: int = 0
    interrupted: bool = False
    save_blocked_ms: float = 0.0


def train(
    head: Head,
    data: TrainData,
    teacher: Teacher,
    config: TrainConfig,
    run_dir: Path,
    observers: Observers = Observers(),  # noqa: B008  frozen
    *,
    provenance: dict[str, Any] | None = None,
    accelerator: Accelerator | None = None,
    final_checkpoint: bool = True,
    chain: int | None = None,
) -> TrainResult:
    """Train `head` in place until a budget is spent, resuming from `run_dir/checkpoints` where there are any.

    Args:
        head: initialised (`Head.initialise`), float32 parameters.
        data: see TrainData. A rank holds all its packs of a window at the same time (each takes 2 bytes × rows × D ×
            (streams + 1) in bfloat16).
        provenance: saved in every checkpoint (recipe, revision, versions); None = revision, versions, hardware.
        final_checkpoint: False writes no checkpoint at the end (for measurements); the result then names none.
        chain: length of the drafted chain whose acceptance is walked (acceptance.walk); None = the head's depth.
    Raises:
        ConfigError: bad configuration or launch. DataError: nothing to train on. StorageError: disk full, or every
        checkpoint damaged. TrainingError: non-finite loss (sample ids named) or no supervised position.
    """
    config.check()
    check_patience(config, observers.validate is not None)
    accelerator = accelerator or make_accelerator(teacher.weight_VD.device)
    provenance = make_provenance(accelerator.device) if provenance is None else provenance
    return TrainingLoop(
        head, data, teacher, config, Path(run_dir), observers, accelerator, chain, provenance, final_checkpoint
    ).run()


class TrainingLoop:
    """One call of `train`: its parts, and the order in which they act."""

    def __init__(
        self, head: Head, data: TrainData, teacher: Teacher, config: TrainConfig, run_dir: Path, observers: Observers,
        accelerator: Accelerator, chain: int | None, provenance: dict[str, Any], final_checkpoint: bool,
    ):  # fmt: skip
        self.config, self.observers, self.final_checkpoint = config, observers, final_checkpoint
        rank, size = accelerator.process_index, accelerator.num_processes
        device = self.device = accelerator.device
        stream = PackStream(data.source.lengths, data.pack_tokens, config.seed, data.make_packs, data.supervised)
        budget = Budget.of(config, None if config.epochs is None else stream.count(config.epochs))
        fetcher = Fetcher(data.source, config.prefetch)
        self.head = head.to(device).train()
        freeze_still_matrices(head, config)
        if config.activation_checkpointing:
            recompute_activations(head)
        compute = autocast_dtype(config.mixed_precision, device)
        module = LossModule(head, teacher, compute, chain)
        kind = resolve_kind(config, accelerator)
        captured = captures(kind, config, device, head.capture_obstacle)
        self.captured = CapturedPacks(module, len(head.terms)) if captured else None
        self.parallel: Parallel = make_parallel(kind, head, module, config, accelerator, captured)
        self.stages = Stages(head.stages, budget)
        check_steps(config, self.stages)
        self.target_parameters = data.source.target_parameters
        self.meters = Meters(SumNames.of(head), device, peak_flops(device, compute or torch.float32))
        self.feed = WindowFeed(stream, fetcher, config, budget.packs, head, rank, size, device, self.meters.device_idle)

        self.rounds = Rounds(
            config, head, data.source, lambda: data.make_packs(data.source.lengths, data.pack_tokens, 0, 0), teacher,
            module, chain, run_dir, device,
        )  # fmt: skip
        self.feed.weigh = self.rounds.weigh
        writer = CheckpointWriter(CheckpointStore(run_dir / "checkpoints", config.keep), device)
        if observers.watch is not None:
            observers.watch.wait_for_writes = writer.wait_for_writes
        self.standing = Standing(config, run_dir, stream, budget, self.meters, rank, size, observers.screen_of(rank))
        if self.captured is not None:
            self.captured.during = lambda: self.standing.screen.phase("capturing", said=False)
        self.health = Health(self.standing, head, writer, fetcher.again, device)
        self.saving = Saving(self.standing, self.health, self.parallel, writer, provenance)

    def run(self) -> TrainResult:
        """Resume, train, end; whatever happens, close what is open."""
        standing, saving = self.standing, self.saving
        with standing.signal:  # outermost: a launcher that lost a rank signals the others while they clean up
            try:
                resumed_from = self._start()
                reason = self.run_steps()
                checkpoint = self._finish(reason)
            finally:
                saving.writer.close()
                self.feed.fetcher.close()
                standing.close()
        state = standing.state
        self.parallel.averages.keep()
        if self.config.select == "best" and state.best is not None and reason != "signal":
            saving.load_best(state.best)
        self.parallel.finish()
        if reason != "signal" and standing.signal.received is not None:
            self.observers.late(standing.signal.received)
        return TrainResult(
            state.step, state.tokens, state.supervised, state.elapsed, reason, str(checkpoint or ""), state.metrics,
            state.best, resumed_from, standing.signal.received == signal.SIGINT, saving.blocked * 1e3,
        )  # fmt: skip

    def _start(self) -> int:
        """Resume where there is a checkpoint, and open the records. Returns the step to go on from."""
        standing, saving = self.standing, self.saving
        resumed_from = restore(standing, self.parallel, saving.writer.store)
        self.rounds.resume(standing.state.round)
        saving.saved_step = resumed_from or None
        self._enter_stage()
        if note := idle_note(self.config.accumulation, standing.size):
            standing.reporter.say(f"NOTE: {note}")
        if standing.rank == 0:
            standing.open_tracker()
            checkpoints = bool(self.config.save_every) or self.final_checkpoint
            saving.prepare(checkpoints, best=self.observers.validate is not None)
        standing.start_clock()
        return resumed_from

    def run_steps(self) -> str:
        """Make steps until a budget is spent or a signal came. Returns TrainResult.stopped."""
        standing, saving = self.standing, self.saving
        while True:
            self._act_on_agreement()
            if (reason := standing.ended()) is not None:
                return reason
            if standing.state.unvalidated:  # resumed from a checkpoint whose validation did not finish
                self._evaluate(final=False)
            if (number := self.stages.due(standing.state, standing.agreed.elapsed)) is not None:
                self._enter_stage(number)
            self.rounds.begin_due(standing, self._forget_graphs)
            self.step()
            step = standing.state.step
            save_due = saving.note_due(step)
            if step % self.config.log_every == 0 or save_due:  # a checkpoint holds what was counted until its step
                self._record()
            last = standing.is_last(step)  # _finish saves and validates this one
            validates = self.observers.validate is not None
            standing.state.unvalidated = validates and standing.validation_due(step) and not last
            if not last and saving.may_begin():  # before the validation, whose failure must not cost the weights
                if self.meters.steps:  # it was due at an earlier step
                    self._record()
                saving.begin()
            if standing.state.unvalidated:
                self._evaluate(final=False)

    def _enter_stage(self, number: int | None = None) -> None:
        """Train as the stage of the run's state does. Args: number: of a stage that begins, with fresh moments."""
        standing, state = self.standing, self.standing.state
        if number is not None:
            if self.meters.steps:
                self._record()  # the averages of one stage
            self.stages.begin(number, state, standing.agreed.elapsed)
            self.parallel.restart_optimizer()
        self.head.enter_stage(state.stage)
        self.weights_T = self.head.term_weights().to(self.device)
        self._forget_graphs()
        self.stages.say(state.stage, standing.reporter.say)

    def _forget_graphs(self) -> None:
        if self.captured is not None:
            self.captured.drop()

    def _act_on_agreement(self) -> None:
        """Act on what the last step's exchange said: a write failed, or an earlier window was not finite."""
        flags = self.standing.read_agreement(self.saving.writer.failed)
        if self.standing.agreed.write_failed:
            self.saving.write_all()
        if flags is not None:
            self.health.examine_previous(flags)

    def step(self) -> None:
        """One window of packs, one optimiser step. The host waits for the device only where it may skip the step."""
        window = self.feed.take(self.standing.state.packs)
        counts_T = self._count(window)
        sums = self._forward_backward(window, counts_T)
        self._clip_and_update(window, sums)
        self._note_step(window)

    def _count(self, window: Window) -> torch.Tensor:
        """N_t: the positions that carry each term's loss in this window, summed over the ranks: float32 [T]."""
        write_failed, may_save = self.saving.poll()
        counts_T = window_counts(self.head, window.batches, self.device)
        return self.standing.exchange(counts_T, self.health.flags, write_failed, may_save)

    def _forward_backward(self, window: Window, counts_T: torch.Tensor) -> WindowSums:
        """Gradients of the window, summed over the ranks."""
        config, parallel, standing = self.config, self.parallel, self.standing
        now = self.stages.progress(standing.state, standing.agreed.elapsed)
        self.meters.rate = config.lr * lr_factor(config, now.budget, now.step, now.elapsed)
        set_rate(parallel.optimizer, self.meters.rate, standing.state.stage)
        if self.head.weights_vary:
            self.weights_T = to_device(self.head.term_weights(now.part), self.device, non_blocking=True)
        sums = accumulate_window(
            parallel.module, window, counts_T, self.weights_T, standing.size, config.accumulation, config.seed,
            parallel.backward, parallel.no_sync, self.captured,
        )  # fmt: skip
        finish = parallel.sum_gradients()
        if finish is not None:
            self._fetch_next()
            finish()
        return sums

    def _fetch_next(self) -> None:
        """Make the next window's features while gradients are summed. A sharded target would need the same network."""
        standing = self.standing
        self.meters.mark()
        more = standing.budget.finished(standing.state.step + 1, standing.agreed.elapsed) is None
        if more and not self.feed.fetcher.lockstep:
            self.feed.fetch_next(standing.state.packs + self.config.accumulation)

    def _clip_and_update(self, window: Window, sums: WindowSums) -> None:
        """The optimiser's step, unless it must be skipped (`train.nonfinite`)."""
        parallel, health = self.parallel, self.health
        norm = parallel.clip()
        ids = {place: batch.sample_ids for place, batch in zip(window.places, window.batches, strict=True)}
        health.note_window(sums.bad_P, norm, WindowSamples(self.standing.state.step, window.packs, ids))
        skipped = health.must_skip()
        self.saving.writer.protect()  # the step below changes what a checkpoint may still be copying
        if not skipped:
            norm = parallel.step(norm)
            health.note_norm(norm)
            parallel.averages.update(self.standing.state.step + 1)
            self.meters.add(sums, norm)
        parallel.zero_grad()

    def _note_step(self, window: Window) -> None:
        """Count what the step was trained on."""
        state = self.standing.state
        state.step += 1
        state.packs += len(window.packs)
        rows = sum(int(self.feed.stream.lengths[i]) for pack in window.packs for i in pack.samples)
        state.tokens += rows
        flops = sum(
            step_flops(self.head, len(batch.tokens_R), batch.anchors.count_K, self.target_parameters)
            for batch in window.batches
        )
        self.meters.add_host(rows, self.feed.take_waited(), flops)
        self.standing.advance()

    def _record(self) -> None:
        """Write the averages since the last record."""
        values = self.standing.read_meters()
        self.health.check_trained()
        if self.captured is not None:
            values["captures"], values["capture_s"] = self.captured.captures, self.captured.seconds
        self.standing.log_step(values)

    def _evaluate(self, final: bool) -> None:
        """Validate, record it, and save the head where it is the best so far."""
        standing, saving = self.standing, self.saving
        self.health.examine_all()
        assert self.observers.validate is not None
        with standing.screen.phase("validating", said=False), saving.averaged(), self.parallel.whole_head():
            values = self.observers.validate(self.head, standing.state.step, final)
        values = from_main(values)  # rank 0 alone measures τ
        standing.log_validation(values)
        saving.keep_if_best(values)
        if not final and saving.saved_step == standing.state.step:
            saving.rewrite_state()

    def _finish(self, reason: str) -> Path | None:
        """Final record, checkpoint and validation. Returns the last checkpoint."""
        standing, saving, state = self.standing, self.saving, self.standing.state
        if state.finished is not None and state.finished[0] == state.step and reason != "signal":
            return saving.writer.store.paths()[0]  # an earlier process finished this run
        if self.meters.steps:
            self._record()
        if reason == "signal":
            return saving.save_at_signal()
        self.health.require_trained()
        if not self.final_checkpoint:
            saving.write_all()
            self.health.examine_all()
            state.elapsed = standing.elapsed()
            return None
        state.unvalidated = self.observers.validate is not None or state.unvalidated
        self.health.require_finite_weights()
        checkpoint = saving.save_now()  # before the validation, as in the loop
        if self.observers.validate is not None:
            self._evaluate(final=True)
        state.finished, state.elapsed = [state.step, reason], standing.elapsed()
        saving.rewrite_state()
        saving.write_all()
        return checkpoint
