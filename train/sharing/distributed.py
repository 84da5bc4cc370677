"""The ranks of a run: work that one of them does for all, and values on which all agree without stopping the device."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headstart.data.ranks import Ranks, on_first
from headstart.heads.errors import StorageError, TrainingError
from headstart.heads.files import explain_disk

T = TypeVar("T")

SHARED = "run_dir must lie on storage that all machines share: choose such a place with run_dir=…"
#: seconds within which every rank must see a file that rank 0 writes
SHARED_WAIT_S = 45.0


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values`, summed over the ranks in place."""
    if is_distributed():
        dist.all_reduce(values)
    return values


def gather_objects(value: Any) -> list[Any]:
    """The `value` of every rank, in the order of ranks. Values must be picklable."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_ranks() -> Ranks:
    """The ranks of this launch, for data preparation, which shares its work among them."""
    return Ranks(dist.get_rank(), dist.get_world_size(), gather_objects) if is_distributed() else Ranks()


def from_main(value: Any) -> Any:
    """Rank 0's value on every rank."""
    return gather_objects(value)[0]


def on_main(work: Callable[[], T]) -> T:
    """Do `work` on rank 0 and give its result to every rank; when it fails, every rank raises.

    A HeadstartError is raised alike on all ranks; any other error is raised as it is on rank 0 and as a TrainingError
    elsewhere.
    """
    return on_first(all_ranks(), work, TrainingError)


def require_shared(run_dir: Path, wait_s: float = SHARED_WAIT_S) -> None:
    """Raise StorageError on all ranks when one does not see what rank 0 writes into `run_dir`.

    Args:
        wait_s: seconds that a network file system may take to show a new file.
    """
    if not is_distributed():
        return

    def write() -> Path:
        with explain_disk(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            token = run_dir / f".ranks-{secrets.token_hex(8)}"  # a new name: no machine remembers that it was missing
            token.touch()
        return token

    token = run_dir / on_main(write).name
    deadline = time.monotonic() + wait_s
    while not (seen := token.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    views = gather_objects((seen, socket.gethostname()))
    on_main(lambda: token.unlink(missing_ok=True))
    blind = [f"{rank} ({host})" for rank, (seen, host) in enumerate(views) if not seen]
    if blind:
        raise StorageError(
            f"{run_dir}: found a directory that ranks {', '.join(blind)} do not share with rank 0 ({views[0][1]}). "
            f"{SHARED}"
        )


class Agreement:
    """A vector that is summed over the ranks on the device, and that the host reads a step later.

    `exchange` sums on the device and starts a copy to the host. `read` waits for that copy alone. It
    arrived long before a later step asks for it, so the device never idles. All ranks read the same and decide alike.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def exchange(self, values: Tensor) -> Tensor:
        """Sum float32 `values` [n] over ranks in place; returns them, on their device."""
        sum_over_ranks(values)
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._host, self._ready = values.clone(), None
        return values

    def read(self) -> list[float] | None:
        """The sums of the last exchange, None before the first."""
        if self._host is None:
            return None
        if self._ready is not None:
            self._ready.synchronize()
        return self._host.tolist()
