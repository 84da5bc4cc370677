"""When a run is saved: periodic checkpoints, the best head, the end.

A checkpoint is taken between two steps and written by a thread while the next steps run (writer.py). The loop waits for
a write only at the end of the run, and where the disk is full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headstart.train.checkpoints.resume import make_checkpoint, state_values
from headstart.train.checkpoints.writer import CheckpointWriter, write_all
from headstart.train.health import Health
from headstart.train.sharing.distributed import from_main, on_main
from headstart.train.sharing.parallel import Parallel
from headstart.train.standing import Standing

#: values that the best head is chosen by (`train.choose_by`): the first of them that is measured
CHOSEN_BY = {"tau": ("valid/tau", "valid/walked_tau"), "walked_tau": ("valid/walked_tau",)}


class Saving:
    """Decides when to save, and gathers from all ranks what rank 0 writes.

    Args:
        provenance: saved in every checkpoint.
    Attributes:
        saved_step: step of the newest checkpoint, None without one.
        blocked: longest time that saving kept a step from starting, seconds.
    """

    def __init__(
        self,
        standing: Standing,
        health: Health,
        parallel: Parallel,
        writer: CheckpointWriter,
        provenance: dict[str, Any],
    ):
        self.standing, self.health, self.parallel, self.writer = standing, health, parallel, writer
        self.provenance = provenance
        self.saved_step: int | None = None
        self.blocked = 0.0
        #: whether a periodic checkpoint is due and not taken yet
        self._due = False
        #: whether it waits because the checkpoint before it is still being written
        self._put_off = False
        #: seconds that ranks took to agree whether it may be taken
        self._asked = 0.0

    def prepare(self, checkpoints: bool, best: bool) -> None:
        """Rank 0: allocate host memory for what will be saved now, because later a step would wait for it."""
        if checkpoints:
            self.writer.copies.prepare(self._saved_sizes())
        if best:
            for copies in self.writer.best_copies:
                copies.prepare((f"best/{name}", *size) for name, *size in self.parallel.head_sizes())

    def _saved_sizes(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of what a checkpoint will hold. The optimiser cannot tell: it has no moments yet."""
        for name, *size in self.parallel.head_sizes():
            yield f"head/{name}", *size  # type: ignore[misc]
        for name, *size in self.parallel.optimizer_sizes():
            yield f"optimizer/{name}", *size  # type: ignore[misc]

    def note_due(self, step: int) -> bool:
        """Whether `train.save_every` asks for a checkpoint after `step`. It then stays due until it is taken."""
        every = self.standing.config.save_every
        due = bool(every) and step % every == 0
        self._due = self._due or due
        return due

    def may_begin(self) -> bool:
        """Whether a checkpoint is due and can be taken now; one still being written puts it off to a later step."""
        if not self._due or self.standing.state.skipped:
            return False  # weights between skipped steps may have diverged: they must not push a good checkpoint out
        began = time.perf_counter()
        if self._put_off and self.standing.size > 1:
            free = self.standing.agreed.may_save  # came with the step: to ask again would wait for the device
        else:
            free = from_main(self.writer.free())
        self._asked = time.perf_counter() - began
        self._put_off = not free
        if self._put_off:
            self.blocked = max(self.blocked, self._asked)
        return not self._put_off

    def begin(self) -> None:
        """Take the checkpoint that is due; it is written while training goes on."""
        self.health.examine_all()
        self.standing.state.elapsed = self.standing.elapsed()
        began = time.perf_counter()  # until here the host only waited for the device, which went on working
        self._take()
        self.blocked = max(self.blocked, self._asked + time.perf_counter() - began)

    def save_now(self) -> Path:
        """Take a checkpoint and wait until it is written."""
        self.write_all()
        self.health.examine_all()
        self.standing.state.elapsed = self.standing.elapsed()
        self._take()
        self.write_all()
        return on_main(lambda: self.writer.store.paths()[0])

    def save_at_signal(self) -> Path | None:
        """Save what there is, and say how to go on. Returns the last checkpoint."""
        checkpoint, unsaved = None, ""
        if self.health.weights_finite():
            checkpoint = self.save_now()
        else:
            checkpoint = on_main(lambda: self.writer.last_checkpoint(diverged=True))
            unsaved = "; the head's weights are not finite and were not saved"
        onwards = "starts at step 0" if checkpoint is None else f"continues from {checkpoint}"
        step = self.standing.state.step
        self.standing.reporter.say(f"stopped by a signal at step {step}{unsaved}; the same command {onwards}")
        return checkpoint

    def _take(self) -> None:
        checkpoint = make_checkpoint(self.standing, self.parallel, self.writer.copies, self.provenance)
        if checkpoint is not None:
            self.writer.save(checkpoint)
        self._due, self.saved_step = False, self.standing.state.step

    def rewrite_state(self) -> None:
        """Write this moment's state into the checkpoint of this step, after all that is under way."""
        if self.standing.rank == 0:
            self.writer.rewrite_state(state_values(self.standing, [], self.provenance))

    def poll(self) -> tuple[bool, bool]:
        """(whether a write failed, whether the checkpoint that was put off may be taken); waits for nothing."""
        self.writer.poll()
        free = self._put_off and self.standing.rank == 0 and self.writer.free()
        return self.writer.failed, free

    def write_all(self) -> None:
        """Wait until everything is on disk. A full disk pauses the run (writer.write_all)."""
        standing = self.standing
        with standing.screen.phase("saving", said=False):
            paused = write_all(
                self.writer, standing.config.disk_wait, lambda: standing.signal.received is not None,
                standing.reporter.say,
            )  # fmt: skip
        standing.leave_out(paused)

    def keep_if_best(self, values: dict[str, float]) -> None:
        """Save the head where the validation `values` are the best so far; all ranks take part."""
        state = self.standing.state
        best, names = state.best, CHOSEN_BY[self.standing.config.choose_by]
        if best is not None and best["name"] not in names:  # an older version's, or chosen by something else
            best = None
        name = best["name"] if best else next((name for name in names if name in values), "")
        if name in values and (best is None or values[name] > best["value"]):
            state.best = {"name": name, "value": values[name], "step": state.step}
            self._save_best(dict(state.best))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While open, the parameters hold the averages, if there are any. They change when what is being copied of them
        has been: a checkpoint of the weights before, the best head of the averages after.
        """
        self.writer.protect()
        with self.parallel.averages.swapped():
            try:
                yield
            finally:
                self.writer.protect()

    def _save_best(self, best: dict[str, Any]) -> None:
        began = time.perf_counter()
        with self.averaged():
            tensors = self.parallel.head_tensors()  # gathered by all ranks
            if self.standing.rank == 0:
                self.writer.save_best(tensors, best)
            else:
                for _ in tensors:
                    pass
        self.blocked = max(self.blocked, time.perf_counter() - began)

    def load_best(self, best: dict[str, Any]) -> None:
        """End with the weights of the best validation. Where they cannot be read, warn and keep the last ones."""
        store = self.writer.store
        fault = on_main(store.best_damage)
        if fault is None:
            self.parallel.load_head(store.load_best())
            return
        self.standing.reporter.say(
            f"WARNING: {store.directory / 'best'}: the best head (step {best['step']}) cannot be used: {fault}. "
            f"The run ends with the weights of its last step, {self.standing.state.step}"
        )
