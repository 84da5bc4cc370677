"""The training loop: windows of packs in, a trained head and its checkpoints out.

    result = train(head, source, teacher, lengths, config, run_dir, validate=Validator(…))

Every rank calls `train` with the same arguments (its own device). The host waits for the device only where a record
is written, at a validation and at a checkpoint; what ranks must agree on (counts, clock, signals, non-finite losses)
travels in one all-reduce per step whose result the host reads one step later.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headstart.data.packing import plan_packs
from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.heads.errors import TrainingError
from headstart.heads.provenance import provenance as make_provenance
from headstart.heads.transfer import to_device
from headstart.train.captured import CapturedPacks
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.checkpoints.resume import RunState, capture, restore, state_values
from headstart.train.checkpoints.saver import Saver, write_all
from headstart.train.config import TrainConfig
from headstart.train.coverage import untrained
from headstart.train.flops import matmul_flops, step_flops
from headstart.train.launching.setup import captures, make_accelerator, make_parallel, recompute_activations
from headstart.train.launching.watch import Watch
from headstart.train.nonfinite import Window, bad_weights, dump
from headstart.train.optim import Budget, lr_factor, set_rate
from headstart.train.sharing.distributed import (
    Agreement,
    StopSignal,
    from_main,
    gather_objects,
    on_main,
    sum_over_ranks,
)
from headstart.train.sharing.parallel import Parallel, resolve_kind
from headstart.train.step import LossModule, SumNames, accumulate_window, autocast_dtype, window_counts
from headstart.train.stream import FeatureSource, Fetcher, Pack, PackPlan, PackStream, choose_rows, idle_note
from headstart.train.tracking.meters import Meters
from headstart.train.tracking.track import Reporter, Tracker, open_tracker

#: values that ride with the counts of a step: clock, stop requests, an unwritten save, room for the next one
RIDERS = 4
#: steps in a row that `train.nonfinite=skip` leaves out before the run ends
MOST_SKIPPED = 10
#: supervised rows after which a run in which none of them trained ends: it would learn nothing
UNTRAINED_ROWS = 4096
#: values that the best head is chosen by, the first that is measured
CHOSEN_BY = ("valid/tau", "valid/walked_tau")
#: (head, step, final) → values; see validate.Validator
Validate = Callable[[Head, int, bool], dict[str, float]]


@dataclass
class TrainResult:
    """How a run ended.

    Attributes:
        step: optimiser steps made in all.
        tokens, supervised_tokens: rows trained on, and positions supervised at depth 1, repeats counted.
        seconds: wall-clock of the loop, earlier parts of a resumed run included.
        stopped: steps | epochs | seconds | signal.
        metrics: the last validation.
        best: {"name", "value", "step"} of the best validation, or None.
        checkpoint: the final checkpoint directory.
        resumed_from: step the run continued from, 0 = started anew.
        interrupted: whether the signal was Ctrl-C's here, not a scheduler's SIGTERM.
        save_blocked_ms: longest time that a periodic checkpoint, due or taken, or a best head kept the next step from
            starting; the wait for work that the device had been given before is not in it.
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
    source: FeatureSource,
    teacher: Teacher,
    lengths: Sequence[int],
    config: TrainConfig,
    run_dir: Path,
    validate: Validate | None = None,
    tracker: Tracker | None = None,
    provenance: dict[str, Any] | None = None,
    *,
    pack_tokens: int = 4096,
    plan: PackPlan = plan_packs,
    supervised: Sequence[int] | None = None,
    accelerator: Accelerator | None = None,
    watch: Watch | None = None,
    progress: bool = True,
    final_checkpoint: bool = True,
    chain: int | None = None,
) -> TrainResult:
    """Train `head` in place until a budget is spent, resuming from `run_dir/checkpoints` where there are any.

    Args:
        head: initialised (`Head.initialise`), float32 parameters.
        source: features of pack [sample indices] → FeatureBatch; a window's packs of one rank are held together
            (2 bytes × rows × D × (streams + 1) each in bfloat16).
        lengths: tokens of every training sample; with `pack_tokens` it fixes the packs.
        tracker: receives records besides metrics.jsonl; None = what config.tracker names. Closed at the end.
        provenance: saved in every checkpoint (recipe, revision, versions); None = revision, versions, hardware.
        plan: (lengths, budget, seed, epoch) → packs.
        supervised: supervised tokens of every training sample: packs then hold equally many of them, so that ranks
            finish together; None = balance tokens alone.
        watch: of the ranks, which then does not end this one while it writes a checkpoint.
        chain: drafts of the chain whose acceptance is walked: the evaluation's, or the head's depth where that is less
            (None).
        final_checkpoint: False leaves nothing behind at the end (measurements); the result then names no checkpoint.
    Raises:
        ConfigError: bad configuration or launch. DataError: nothing to train on. StorageError: disk full, or every
        checkpoint damaged. TrainingError: non-finite loss (sample ids named) or no supervised position.
    """
    config.check()
    accelerator = accelerator or make_accelerator(teacher.weight_VD.device)
    stream = PackStream(lengths, pack_tokens, config.seed, plan, supervised)
    trainer = _Trainer(head, source, teacher, stream, config, Path(run_dir), validate, accelerator, chain)
    trainer.final_checkpoint = final_checkpoint
    if watch is not None:
        watch.outlast = trainer.saver.outlast
    return trainer.run(tracker, provenance, progress)


class _Trainer:
    """State of one call of `train`."""

    def __init__(
        self,
        head: Head,
        source: FeatureSource,
        teacher: Teacher,
        stream: PackStream,
        config: TrainConfig,
        run_dir: Path,
        validate: Validate | None,
        accelerator: Accelerator,
        chain: int | None,
    ):
        self.config, self.run_dir, self.validate, self.accelerator = config, run_dir, validate, accelerator
        self.rank, self.size, self.device = accelerator.process_index, accelerator.num_processes, accelerator.device
        self.stream = stream
        packs = None if config.epochs is None else self.stream.count(config.epochs)
        self.budget = Budget.of(config, packs)
        self.fetcher = Fetcher(source, config.prefetch)
        self.store = CheckpointStore(run_dir / "checkpoints", config.keep)
        self.head = head.to(self.device).train()
        #: features of the next window, fetched while the gradients of this one travel
        self.early: list[FeatureBatch] | None = None
        #: time of this step's fetches in which the device ran dry, seconds
        self.waited = 0.0
        if config.activation_checkpointing:
            recompute_activations(self.head)
        module = LossModule(head, teacher, autocast_dtype(config.mixed_precision, self.device), chain)
        captured = captures(config, accelerator)
        self.captured = CapturedPacks(module, len(head.terms)) if captured else None
        kind = resolve_kind(config, accelerator)
        self.parallel: Parallel = make_parallel(kind, head, module, config, accelerator, captured)
        self.saver = Saver(self.store, self.device)
        self.save_due = False
        #: whether the checkpoint that is due found the one before still being written
        self.put_off = False
        #: longest time that saving kept a step from starting, seconds
        self.blocked = 0.0
        self.weights_T = head.term_weights().to(self.device)
        self.state = RunState()
        self.agreement = Agreement()
        self.signal = StopSignal()
        #: non-finite flags of the last window, not yet shared: one per pack, one for the gradient
        self.flags = torch.zeros(config.accumulation + 1, device=self.device)
        #: windows whose flags are still under way
        self.recent: deque[Window] = deque(maxlen=2)
        self.agreed_elapsed, self.agreed_stop, self.agreed_free = 0.0, False, False
        compute = autocast_dtype(config.mixed_precision, self.device) or torch.float32
        self.meters = Meters(SumNames.of(head), self.device, matmul_flops(self.device, compute))
        self.target_parameters = int(getattr(source, "target_parameters", 0))
        #: step of the newest checkpoint
        self.saved_step: int | None = None
        self.final_checkpoint = True

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self, tracker: Tracker | None, provenance: dict[str, Any] | None, progress: bool) -> TrainResult:
        main = self.rank == 0
        total, unit = (self.budget.seconds, "s") if self.budget.seconds else (float(self.budget.steps or 1), "steps")
        self.reporter = Reporter(progress and main, total, unit)
        self.provenance = make_provenance(self.device) if provenance is None else provenance
        self.tracker: Tracker | None = None
        with self.signal:  # outermost: a launcher that lost a rank signals the others while they clean up
            try:
                resumed_from = restore(self)
                self.saved_step = resumed_from or None
                if note := idle_note(self.config.accumulation, self.size):
                    self.reporter.say(f"NOTE: {note}")
                if main:
                    self.tracker = open_tracker(
                        self.config, self.run_dir, resumed_from, asdict(self.config), tracker, self.state.unvalidated
                    )
                    if self.config.save_every or self.final_checkpoint:
                        self.saver.copies.prepare(self._saved_sizes())
                    if self.validate is not None:
                        for copies in self.saver.best_copies:
                            copies.prepare((f"best/{name}", *size) for name, *size in self.parallel.head_sizes())
                self.started = time.perf_counter() - self.state.elapsed
                self.meters.restart_clock()
                self.agreed_elapsed = self.state.elapsed
                reason = self._loop()
                checkpoint = self._finish(reason)
            finally:
                self.saver.close()
                self.fetcher.close()
                if self.tracker is not None:
                    self.tracker.close()
                self.reporter.close()
        s = self.state
        if self.config.select == "best" and s.best is not None and reason != "signal":
            self._load_best(s.best)
        self.parallel.finish()
        return TrainResult(
            s.step, s.tokens, s.supervised, s.elapsed, reason, str(checkpoint or ""), s.metrics, s.best, resumed_from,
            self.signal.received == signal.SIGINT, self.blocked * 1e3,
        )  # fmt: skip

    def _load_best(self, best: dict[str, Any]) -> None:
        """End with the weights of the best validation; with the last ones, loudly, where those cannot be read."""
        fault = on_main(self.store.best_damage)
        if fault is None:
            self.parallel.load_head(self.store.load_best())
            return
        self.reporter.say(
            f"WARNING: {self.store.directory / 'best'}: the best head (step {best['step']}) cannot be used: {fault}. "
            f"The run ends with the weights of its last step, {self.state.step}"
        )

    def _loop(self) -> str:
        config = self.config
        while True:
            self._take_agreement()
            if self.agreed_stop:
                return "signal"
            reason = self.budget.finished(self.state.step, self.agreed_elapsed)
            if reason is not None:
                return reason
            if self.state.unvalidated:  # its checkpoint was written, and the run ended in the validation
                self._evaluate(final=False)
            self._step()
            step = self.state.step
            self.reporter.advance(self._elapsed() if self.budget.seconds else step)
            evaluate = self.validate is not None and bool(config.eval_every) and step % config.eval_every == 0
            save = config.save_every and step % config.save_every == 0
            if step % config.log_every == 0 or save:
                self._record()
            last = self.budget.finished(step, 0.0) is not None  # _finish evaluates and saves this one
            self.state.unvalidated = evaluate and not last
            self.save_due = self.save_due or bool(save)
            if self.save_due and not last:
                self._save_soon()  # before the validation, whose failure must not cost the trained weights
            if self.state.unvalidated:
                self._evaluate(final=False)

    def _finish(self, reason: str) -> Path | None:
        """Final record, checkpoint and validation; nothing at all for a run that had finished before."""
        if self.state.finished is not None and self.state.finished[0] == self.state.step and reason != "signal":
            return self.store.paths()[0]
        if self.meters.steps:
            self._record()
        if reason != "signal":
            self._require_trained()
        if not self.final_checkpoint and reason != "signal":
            self._write_all()
            self._settle()
            self.state.elapsed = self._elapsed()
            return None
        if self.validate is not None and reason != "signal":
            self.state.unvalidated = True
        # skipped steps left the weights as they were, which may be what made them bad
        finite = not (self.state.skipped and any(gather_objects(bool(bad_weights(self.head)))))
        if reason != "signal":
            if not finite:
                raise TrainingError(
                    f"the run ended at step {self.state.step} between skipped steps, and the head's weights are not "
                    f"finite. {self._way_back(diverged=True)}."
                )
            self.state.skipped = 0
        # before the validation, as in the loop
        checkpoint = self._save_now() if finite else on_main(lambda: self._last_checkpoint(diverged=True))
        if reason == "signal":
            unsaved = "" if finite else "; the head's weights are not finite and were not saved"
            onwards = "starts at step 0" if checkpoint is None else f"continues from {checkpoint}"
            self.reporter.say(f"stopped by a signal at step {self.state.step}{unsaved}; the same command {onwards}")
            return checkpoint
        if self.validate is not None:
            self._evaluate(final=True)
        self.state.finished, self.state.elapsed = [self.state.step, reason], self._elapsed()
        self._restate()
        self._write_all()
        return checkpoint

    def _elapsed(self) -> float:
        return time.perf_counter() - self.started

    # -- one step --------------------------------------------------------------------------------------------------

    def _share(self, start: int) -> tuple[list[Pack], list[int]]:
        """Packs of the window that begins at global pack `start`, and the places of this rank's."""
        count = self.config.accumulation
        if self.budget.packs is not None:
            count = max(min(count, self.budget.packs - start), 0)
        return self.stream.window(start, count), list(range(self.rank, count, self.size))

    def _fetch(self, packs: list[Pack], places: list[int]) -> list[FeatureBatch]:
        began = time.perf_counter()
        fetched = self.fetcher.window(packs, self.rank, self.size)
        batches = [batch.to(self.device, non_blocking=True) for batch in fetched]
        mine = [packs[place] for place in places]
        seed = self.config.seed
        batches = [choose_rows(self.head, batch, seed, pack) for batch, pack in zip(batches, mine, strict=True)]
        # fetching costs nothing while the device still works on what came before
        self.waited += time.perf_counter() - began if self.meters.device_idle() else 0.0
        return batches

    def _sum_gradients(self) -> None:
        """Sum over the ranks, where the backward pass did not; the next window's features are made meanwhile."""
        finish = self.parallel.sum_gradients()
        if finish is None:
            return
        state = self.state
        last = self.budget.finished(state.step + 1, self.agreed_elapsed) is not None
        self.meters.mark()
        if not last and not self.fetcher.lockstep:  # a sharded target's layers would travel the same wires
            self.early = self._fetch(*self._share(state.packs + self.config.accumulation))
        finish()

    def _step(self) -> None:
        config, state = self.config, self.state
        packs, places = self._share(state.packs)
        mine = [packs[place] for place in places]
        batches, self.early = self.early, None
        if batches is None:
            batches = self._fetch(packs, places)
        for ahead in range(1, config.prefetch + 1):
            later, later_places = self._share(state.packs + ahead * config.accumulation)
            self.fetcher.prefetch([later[place] for place in later_places])

        # elapsed is the clock that all ranks act on, stop asks every rank to end: all of it rides with the counts
        clock = self._elapsed() if self.rank == 0 else 0.0
        self.saver.poll()
        free = self.put_off and self.rank == 0 and self.saver.free()
        control = torch.tensor([clock, self.signal.received is not None, self.saver.failed, free], dtype=torch.float32)
        control = to_device(control, self.device, non_blocking=True)
        counts_T = window_counts(self.head, batches, self.device)
        counts_T = self.agreement.exchange(torch.cat([counts_T, control, self.flags]))[: len(self.head.terms)]
        self.meters.rate = config.lr * lr_factor(config, self.budget, state.step, self.agreed_elapsed)
        set_rate(self.parallel.optimizer, self.meters.rate)
        sums = accumulate_window(
            self.parallel.module, mine, batches, places, counts_T, self.weights_T, self.size, config.accumulation,
            config.seed, self.parallel.backward, self.parallel.no_sync, self.captured,
            self.parallel.rounds(len(packs), self.size),
        )  # fmt: skip
        self._sum_gradients()
        norm = self.parallel.clip()
        bad_norm = (~torch.isfinite(norm)).float() / self.size
        self.flags = torch.cat([sums.bad_P, bad_norm[None]])
        ids = {place: batch.sample_ids for place, batch in zip(places, batches, strict=True)}
        self.recent.append((state.step, packs, ids))
        skipped = config.nonfinite == "skip" and self._skip()
        self.saver.protect()
        if not skipped:
            norm = self.parallel.step(norm)
            self.flags[-1:] = (~torch.isfinite(norm)).float() / self.size
            self.meters.add(sums, norm)
        self.parallel.zero_grad()
        state.step += 1
        state.packs += len(packs)
        rows = sum(int(self.stream.lengths[i]) for pack in packs for i in pack.samples)
        state.tokens += rows
        flops = sum(
            step_flops(self.head, len(batch.tokens_R), batch.anchors.count_K, self.target_parameters)
            for batch in batches
        )
        self.meters.add_host(rows, self.waited, flops)
        self.waited = 0.0

    # -- agreement and non-finite losses ---------------------------------------------------------------------------

    def _take_agreement(self) -> None:
        """Act on the exchange of the step before: its clock, its stop requests, the flags of the window before it."""
        if self.size == 1:
            self.agreed_elapsed, self.agreed_stop = self._elapsed(), self.signal.received is not None
            if self.saver.failed:
                self._write_all()
        values = self.agreement.read()
        if values is not None:
            clock, stop, unsaved, free = values[len(self.head.terms) :][:RIDERS]
            if self.size > 1:
                self.agreed_elapsed, self.agreed_stop, self.agreed_free = clock, stop > 0, free > 0
                if unsaved:
                    self._write_all()
            self._examine_previous(values)

    def _examine_previous(self, values: list[float]) -> None:
        """An exchange made in step n carries the flags of window n - 1."""
        if len(self.recent) >= 2:
            self._examine(values[len(self.head.terms) + RIDERS :], self.recent[-2])

    def _settle(self) -> None:
        """Examine what is still under way now (the host waits): before anything is saved or reported as final."""
        values = self.agreement.read()
        if values is None:
            return
        self._examine_previous(values)  # first, so that the window where it began is the one that is named
        shared = sum_over_ranks(self.flags.clone()).tolist()
        self._examine(shared, self.recent[-1])

    def _examine(self, flags: list[float], window: Window) -> None:
        if any(flags) and self.config.nonfinite == "stop":
            message = self._describe_bad(flags, window)
            raise TrainingError(f"{message} {self._way_back()}, or set train.nonfinite=skip.")

    def _last_checkpoint(self, diverged: bool) -> Path | None:
        """The newest one, after what is being written, rank 0's; of a head that diverged, from before its skips."""
        self.saver.settle()
        return self.store.before_skips() if diverged else next(iter(self.store.paths()), None)

    def _way_back(self, diverged: bool = False) -> str:
        """What a run that met non-finite numbers can go on from, and how; all ranks wait for what is being written."""
        saved = on_main(lambda: self._last_checkpoint(diverged))
        kept = f"The same command continues from {saved}" if saved else "There is no checkpoint to continue from"
        return f"{kept}. Look at these samples, lower train.lr, clip gradients (train.clip_norm)"

    def _describe_bad(self, flags: list[float], window: Window) -> str:
        return dump(flags, window, self.meters.rate, self.head, self.rank, self.run_dir, self.fetcher.again)

    def _skip(self) -> bool:
        """Policy `skip`: wait for this window's flags; True when the step must not be made."""
        shared = sum_over_ranks(self.flags.clone()).tolist()
        self.flags = torch.zeros_like(self.flags)
        if not any(shared):
            self.state.skipped = 0
            return False
        self.state.skipped += 1
        message = self._describe_bad(shared, self.recent[-1])
        if self.state.skipped >= MOST_SKIPPED:
            raise TrainingError(
                f"{message} {MOST_SKIPPED} steps in a row were skipped: training has diverged. "
                f"{self._way_back(diverged=True)}."
            )
        self.reporter.say(f"WARNING: {message} Step skipped (train.nonfinite=skip).")
        return True

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Write the averages since the last record: the place where the host waits for the device."""
        values, supervised, trained = self.meters.read()
        state = self.state
        state.supervised += supervised
        state.trained = None if state.trained is None else state.trained + trained
        if state.packs >= self.stream.count(1) or state.supervised >= UNTRAINED_ROWS:
            self._require_trained()
        epoch = self.stream.locate(max(state.packs - 1, 0)).epoch
        if self.captured is not None:
            values["captures"], values["capture_s"] = self.captured.captures, self.captured.seconds
        self._log({**values, "epoch": epoch, "seconds": self._elapsed(), "supervised_tokens": state.supervised})

    def _require_trained(self) -> None:
        """Refuse to go on where no row has trained so far."""
        state = self.state
        if state.skipped or state.trained or state.trained is None or not state.packs:
            return
        if state.supervised == 0:
            raise TrainingError(
                f"no position is supervised in the first {state.packs} packs; `headstart inspect` shows the masks"
            )
        raise untrained(self.head, state.supervised)

    def _log(self, values: dict[str, float]) -> None:
        done = self._elapsed() if self.budget.seconds else float(self.state.step)
        self.reporter.record(self.state.step, values, done)
        if self.tracker is not None:
            self.tracker.log(self.state.step, values)

    def _evaluate(self, final: bool) -> None:
        self._settle()
        assert self.validate is not None
        with self.parallel.whole_head():
            values = self.validate(self.head, self.state.step, final)
        values = from_main(values)  # rank 0 alone measures τ
        self.state.metrics, self.state.unvalidated = values, False
        self._log(values)
        best = self.state.best
        if best is not None and best["name"] not in CHOSEN_BY:  # an older version's, which nothing measures any more
            best = None
        name = best["name"] if best else next((name for name in CHOSEN_BY if name in values), "")
        if name in values and (best is None or values[name] > best["value"]):
            self.state.best = {"name": name, "value": values[name], "step": self.state.step}
            self._save_best(dict(self.state.best))
        if not final and self.saved_step == self.state.step:
            self._restate()

    def _save_best(self, best: dict[str, Any]) -> None:
        began = time.perf_counter()
        tensors = self.parallel.head_tensors()  # gathered by all ranks
        if self.rank == 0:
            self.saver.save_best(tensors, best)
        else:
            for _ in tensors:
                pass
        self.blocked = max(self.blocked, time.perf_counter() - began)

    def _restate(self) -> None:
        """Write this moment's state into the checkpoint of this step, after all that is under way."""
        if self.rank == 0:
            self.saver.restate(state_values(self, []))

    def _saved_sizes(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """What a checkpoint will hold, before the optimiser has moments."""
        trained = {name for name, parameter in self.head.named_parameters() if parameter.requires_grad}
        for name, shape, dtype in self.parallel.head_sizes():
            yield f"head/{name}", shape, dtype
            if name in trained:
                yield f"optimizer/exp_avg/{name}", shape, dtype
                yield f"optimizer/exp_avg_sq/{name}", shape, dtype

    def _save_soon(self) -> None:
        """Begin a periodic checkpoint, or put it off to a later step while the one before is still being written."""
        if self.state.skipped:
            return  # these weights may have diverged: they must not push a good checkpoint out
        began = time.perf_counter()
        # once put off, rank 0's answer rides with the steps: asking for it at each would wait for the device
        free = self.agreed_free if self.put_off and self.size > 1 else from_main(self.saver.free())
        asked = time.perf_counter() - began
        self.put_off = not free
        if self.put_off:
            self.blocked = max(self.blocked, asked)
            return
        if self.meters.steps:
            self._record()
        self._settle()
        self.state.elapsed = self._elapsed()
        settled = time.perf_counter()  # until here the host only waited for the device, which went on working
        self._save()
        self.blocked = max(self.blocked, asked + time.perf_counter() - settled)

    def _save(self) -> None:
        checkpoint = capture(self)
        if checkpoint is not None:
            self.saver.save(checkpoint)
        self.save_due, self.saved_step = False, self.state.step

    def _save_now(self) -> Path:
        """Write a checkpoint and wait for it."""
        self._write_all()
        self._settle()
        self.state.elapsed = self._elapsed()
        self._save()
        self._write_all()
        return on_main(lambda: self.store.paths()[0])

    def _write_all(self) -> None:
        """Wait until everything is on disk; a full one pauses the run (saver.write_all)."""
        wait = self.config.disk_wait
        paused = write_all(self.saver, wait, lambda: self.signal.received is not None, self.reporter.say)
        self.started += paused
        self.meters.leave_out(paused)
