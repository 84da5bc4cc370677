"""Checkpoints are written while training goes on: tensors are copied into host memory, then one thread writes them.

On a GPU the copies go into pinned memory on a stream of their own, while the next forward and backward passes run. Only
the optimiser's step, which changes what is copied, waits for them, and it waits on the device.
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
    """Stands for a write that was not tried because an earlier one had failed."""


class HostCopies:
    """Copies tensors into host memory, each time into the same pinned buffers.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._done: torch.cuda.Event | None = None

    def prepare(self, sizes: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        """Allocate the buffers now. Pinning gigabytes takes seconds, and no step should wait for it."""
        for name, shape, dtype in sizes if self._cuda else ():
            self._buffer(name, shape, dtype)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
            buffer = torch.empty(shape, dtype=dtype, pin_memory=self._cuda)
            self._buffers[name] = buffer
        return buffer

    def take(self, group: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Begin to copy the tensors. Returns the copies by name; on a GPU they are complete when `ready` says so."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if self._stream is None or tensor.device.type != "cuda":
                copies[name] = tensor.detach().clone()
                continue
            copies[name] = buffer = self._buffer(f"{group}/{name}", tuple(tensor.shape), tensor.dtype)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                buffer.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream)  # a gathered tensor is freed here before its copy is made
        if self._stream is not None:
            self._done = self._stream.record_event()
        return copies

    def protect(self) -> None:
        """Make the device finish the copies before its next work. Call it before anything changes the tensors."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def ready(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


class CheckpointWriter:
    """Writes what rank 0 saves, in the order in which it was saved.

    At any time at most one checkpoint is being written, and at most one best head, while a newer best head may wait.
    The thread never calls the GPU: a capture of a CUDA graph on the main thread would fail.

    Attributes:
        copies: the host copies that a checkpoint is made of.
        best_copies: those of two best heads: one that is being written, one that waits.
    """

    def __init__(self, store: CheckpointStore, device: torch.device):
        self.store, self.copies = store, HostCopies(device)
        self.best_copies = HostCopies(device), HostCopies(device)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        #: what waits for its copies, in the order of writing; None = the best head that waits. The order matters: a
        #: checkpoint names the best head that was saved before it
        self._pending: list[tuple[HostCopies, Callable[[], object]] | None] = []
        self._best_waiting: tuple[HostCopies, Callable[[], object]] | None = None
        #: the copies that the thread is writing as best head
        self._best_written: HostCopies | None = None
        self._writing: list[tuple[Callable[[], object], Future[Any]]] = []
        self._error: BaseException | None = None
        #: the write that failed and those that were to come after it, in order
        self._undone: list[Callable[[], object]] = []
        self._stuck = False

    def save(self, checkpoint: Checkpoint) -> None:
        """Write `checkpoint`, whose tensors are in `copies`, as soon as they are complete."""
        self._pending.append((self.copies, lambda: self.store.save(checkpoint)))
        self.poll()

    def save_best(self, tensors: Iterable[tuple[str, Tensor]], state: dict[str, Any]) -> None:
        """Write the best head as soon as its copies are complete. It takes the place of one that still waits."""
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
        """Replace the JSON state of the checkpoint that was saved last, once that and the best head are written."""
        self._pending.append((self.copies, lambda: self.store.rewrite_state(state)))
        self.poll()

    def protect(self) -> None:
        """HostCopies.protect, for all copies."""
        for copies in (self.copies, *self.best_copies):
            copies.protect()

    def _submit(self, write: Callable[[], object]) -> None:
        """Write after what is under way, and only if that succeeds."""

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
        """Give the thread what has complete copies, and notice failures. Waits for nothing."""
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
        """Wait at most `seconds`; whether everything is written then."""
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
        """Wait at most `seconds` for files that are being written. Returns whether there were any. Thread-safe."""
        under_way = [future for _, future in list(self._writing) if not future.done()]
        wait(under_way, timeout=seconds)
        return bool(under_way)

    def free(self) -> bool:
        """Whether a checkpoint may be taken now. Waits for nothing."""
        return self.idle(0.0)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        """Wait until everything is written, or a write has failed."""
        while True:
            for copies in (self.copies, *self.best_copies):
                copies.wait()
            self.poll()
            if not self._writing:
                return
            wait([future for _, future in self._writing])

    def last_checkpoint(self, diverged: bool) -> Path | None:
        """Wait for what is being written. Returns the newest checkpoint, or the newest before any skipped step.

        Args: diverged: whether checkpoints that were taken between skipped steps do not count.
        """
        self.wait()
        return self.store.before_skips() if diverged else next(iter(self.store.paths()), None)

    def finish(self) -> None:
        """Wait until everything is written. Raises what a write raised (DiskFullError when there is no room)."""
        self.wait()
        if self._error is not None:
            error, self._error, self._undone, self._stuck = self._error, None, [], False
            raise error

    def retry(self) -> bool:
        """Wait for the writes, repeat those that found the disk full, and return whether everything is written.

        Raises: what a write raised, unless that was a full disk.
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
        """Let a write under way end, and end the thread. No failure is raised: a run that ends well has none left."""
        self.wait()
        self._pool.shutdown(wait=True)


def write_all(
    writer: CheckpointWriter, longest: float, stopped: Callable[[], bool], say: Callable[[str], None]
) -> float:
    """Wait on all ranks until everything that rank 0 saves is on disk. A full disk pauses them until there is room.

    Args:
        longest: seconds that a pause may last.
        stopped: whether this rank was asked to end, which ends a pause too.
        say: tells the user.
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
