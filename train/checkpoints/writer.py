"""Checkpoints written behind the training loop: a snapshot into host memory, then one thread that writes it.

On a GPU the snapshot is a queue of copies into pinned memory on a stream of its own. The next forward and backward run
beside them; only the optimiser's step, which changes what is copied, waits for them on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.errors import DiskFullError
from headstart.train.checkpoints.checkpoint import Checkpoint, CheckpointStore
from headstart.train.sharing.distributed import from_main, gather_objects, on_main

#: seconds between two looks at a disk that was full
PAUSE_S = 5.0


class _BehindError(Exception):
    """A write that was not tried, because one before it failed."""


class HostCopies:
    """Copies of tensors in host memory, into the same pinned buffers every time.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._done: torch.cuda.Event | None = None

    def prepare(self, sizes: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        """Allocate the buffers now: pinning gigabytes takes seconds that no step should wait for."""
        for name, shape, dtype in sizes if self._cuda else ():
            self._buffer(name, shape, dtype)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self._buffers.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            found = torch.empty(shape, dtype=dtype, pin_memory=self._cuda)
            self._buffers[name] = found
        return found

    def take(self, group: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Host copies by name; on CUDA they are complete only when `ready` says so."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if self._stream is None or tensor.device.type != "cuda":
                copies[name] = tensor.detach().clone()
                continue
            copies[name] = buffer = self._buffer(f"{group}/{name}", tuple(tensor.shape), tensor.dtype)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                buffer.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream)  # a gathered one is freed before its copy is made
        if self._stream is not None:
            self._done = self._stream.record_event()
        return copies

    def protect(self) -> None:
        """Work queued from here on starts only after the copies: call it before anything that changes the tensors."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def ready(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


class CheckpointWriter:
    """Rank 0's writer; one checkpoint is under way at most, one best head is being written and one waits.

    The thread never calls the GPU, which a capture on the main thread would not tolerate.

    Attributes:
        copies: of what a checkpoint is made of.
        best_copies: of the best head that is being written and of the one that waits, whichever is which.
    """

    def __init__(self, store: CheckpointStore, device: torch.device):
        self.store, self.copies = store, HostCopies(device)
        self.best_copies = HostCopies(device), HostCopies(device)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        #: in the order in which they are to be written: a checkpoint names the best head before it (None: that one)
        self._pending: list[tuple[HostCopies, Callable[[], object]] | None] = []
        self._best_waiting: tuple[HostCopies, Callable[[], object]] | None = None
        #: whose content the thread has
        self._best_written: HostCopies | None = None
        self._writing: list[tuple[Callable[[], object], Future[Any]]] = []
        self._error: BaseException | None = None
        #: what failed and what was to come after it, in order
        self._undone: list[Callable[[], object]] = []
        self._stuck = False

    def save(self, checkpoint: Checkpoint) -> None:
        """Write `checkpoint` (made of `copies`) as soon as its copies are complete."""
        self._pending.append((self.copies, lambda: self.store.save(checkpoint)))
        self.poll()

    def save_best(self, tensors: Iterable[tuple[str, Tensor]], state: dict[str, Any]) -> None:
        """Write the best head likewise. It takes the place of one that still waits: no step waits for the disk."""
        copies = next(c for c in self.best_copies if c is not self._best_written)
        head = copies.take("best", tensors)

        def write() -> None:
            self.store.save_best(head, state)
            self._best_written = None

        if self._best_waiting is None:
            self._pending.append(None)
        self._best_waiting = copies, write
        self.poll()

    def rewrite_state(self, state: dict[str, Any]) -> None:
        """Replace the JSON state of the checkpoint saved last, after it and the best head."""
        self._pending.append((self.copies, lambda: self.store.rewrite_state(state)))
        self.poll()

    def protect(self) -> None:
        """HostCopies.protect, of all of them."""
        for copies in (self.copies, *self.best_copies):
            copies.protect()

    def _submit(self, write: Callable[[], object]) -> None:
        """Write after what is under way, if that succeeds: what comes later builds upon it."""

        def in_order() -> None:
            if self._stuck:
                raise _BehindError("an earlier write failed")
            try:
                write()
            except BaseException:
                self._stuck = True
                raise

        self._writing.append((write, self._pool.submit(in_order)))

    def poll(self) -> None:
        """Hand completed snapshots to the thread, and notice failures; waits for nothing."""
        while self._pending:
            best, entry = self._pending[0] is None, self._pending[0] or self._best_waiting
            assert entry is not None
            copies, write = entry
            if not copies.ready() or (best and self._best_written is not None):
                break
            if best:
                self._best_written, self._best_waiting = copies, None
            self._pending.pop(0)
            self._submit(write)
        for write, future in [(w, f) for w, f in self._writing if f.done()]:
            self._writing.remove((write, future))
            if future.exception() is not None:
                self._undone.append(write)
                if not isinstance(future.exception(), _BehindError):
                    self._error = future.exception()

    def idle(self, seconds: float) -> bool:
        """Whether nothing is under way or unwritten, after waiting at most `seconds` for the disk."""
        deadline = time.monotonic() + seconds
        self.poll()
        while self._writing:
            left = max(deadline - time.monotonic(), 0.0)
            wait([future for _, future in self._writing], timeout=left)
            self.poll()
            if left == 0.0:
                break
        return not self._pending and not self._writing and not self.failed

    def wait_for_writes(self, seconds: float) -> bool:
        """Wait at most `seconds` for files being written, and say whether there were any. Any thread may ask."""
        under_way = [future for _, future in list(self._writing) if not future.done()]
        wait(under_way, timeout=seconds)
        return bool(under_way)

    def free(self) -> bool:
        """Whether the next checkpoint may be taken now; waits for nothing."""
        return self.idle(0.0)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        """Wait for everything under way, or until a write fails."""
        while True:
            for copies in (self.copies, *self.best_copies):
                copies.wait()
            self.poll()
            if not self._writing:
                return
            wait([future for _, future in self._writing])

    def last_checkpoint(self, diverged: bool) -> Path | None:
        """The newest checkpoint, after what is being written; of a run that diverged, the newest before its skips."""
        self.wait()
        return self.store.before_skips() if diverged else next(iter(self.store.paths()), None)

    def finish(self) -> None:
        """Wait for everything under way. Raises what a write raised (DiskFullError when there is no room)."""
        self.wait()
        if self._error is not None:
            error, self._error, self._undone, self._stuck = self._error, None, [], False
            raise error

    def retry(self) -> bool:
        """Wait for everything under way, write again what found no room, and say whether all is written.

        Raises: what a write raised, when it was not a full disk.
        """
        self.wait()
        if isinstance(self._error, DiskFullError):
            undone, self._error, self._undone, self._stuck = self._undone, None, [], False
            for write in undone:
                self._submit(write)
            self.wait()
        if self._error is not None and not isinstance(self._error, DiskFullError):
            self.finish()
        return self._error is None

    def close(self) -> None:
        """Let a write under way end; its failure no longer matters to a run that is already ending with an error."""
        self.wait()
        self._pool.shutdown(wait=True)


def write_all(
    writer: CheckpointWriter, longest: float, stopped: Callable[[], bool], say: Callable[[str], None]
) -> float:
    """Wait, on all ranks, until everything that rank 0 saves is on disk; a full one pauses them until there is room.

    Args:
        longest: seconds a pause may last.
        stopped: whether this rank was asked to end, which ends a pause as well.
        say: receives what a user must know (rank 0's prints).
    Returns: seconds paused, 0.0 when there was room.
    Raises: what a write raised, on all ranks; DiskFullError when a pause ends without room.
    """
    began, paused = time.perf_counter(), False
    while not on_main(writer.retry):
        over = from_main(time.perf_counter() - began >= longest)
        if over or any(gather_objects(stopped())):
            on_main(writer.finish)
        if not paused:
            say(
                f"WARNING: {writer.store.directory}: the disk is full and a checkpoint waits to be written. Training "
                f"is paused and goes on as soon as there is room; without room it ends in {longest:.0f} s "
                "(train.disk_wait). The last good checkpoint stays."
            )
            paused = True
        time.sleep(min(PAUSE_S, longest))
    if not paused:
        return 0.0
    say("there is room again, the checkpoint is written: training goes on")
    return time.perf_counter() - began
