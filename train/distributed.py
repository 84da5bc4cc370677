"""Ranks: a launch that is what it promises, and values on which all ranks agree without stopping the device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headstart.heads.errors import ConfigError, HeadstartError, TrainingError

T = TypeVar("T")

REMEDY = (
    "Start CPU ranks with `torchrun --nproc_per_node N -m headstart.train RECIPE`, "
    "GPU ranks with `accelerate launch --multi_gpu --num_processes N -m headstart.train RECIPE`."
)


#: where launchers say how many processes they started
PROMISES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def check_launch(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when the environment (torchrun, mpirun, srun) promises more ranks than the process group has.

    `accelerate launch --cpu --num_processes 2` (and `--num_machines 2`) of accelerate 1.x starts processes that each
    believe to be rank 0 of 1. It sets MASTER_ADDR/MASTER_PORT (only for more than one process) but no WORLD_SIZE.
    """
    for name in PROMISES:
        promised = int(environment.get(name, "1") or 1)
        if promised > size:
            raise ConfigError(
                f"launch: {name} promises {promised} ranks and the process group has {size}; every process would train "
                f"on its own. {REMEDY} Slurm: scripts/launch/slurm.sh. If one process is meant, unset {name}."
            )
    by_accelerate = "ACCELERATE_USE_CPU" in environment and "WORLD_SIZE" not in environment
    if by_accelerate and size == 1 and "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        raise ConfigError(
            "launch: accelerate was asked for more than one process but started independent ones (this one believes to "
            f"be rank 0 of 1), and each would train alone. {REMEDY} "
            "If one process is meant, unset MASTER_ADDR and MASTER_PORT."
        )


#: verbs that train, for which several ranks have a command of their own
TRAINING_VERBS = ("train", "run")


def refuse_ranks(verb: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when a launcher started `headstart <verb>`, which is one process, as several ranks.

    They would meet at the lock of the run directory, where all but one take the first for somebody else's command, or
    do the same work side by side.
    """
    try:
        check_launch(1, environment)
    except ConfigError as error:
        if verb in TRAINING_VERBS:
            raise ConfigError(f"`headstart {verb}` is one process. {error}") from None
        found = ", ".join(f"{name}={environment[name]}" for name in (*PROMISES, "MASTER_ADDR") if name in environment)
        raise ConfigError(
            f"launch: `headstart {verb}` is one process, found a launch of several ({found}), which would all do the "
            "same work; start it without a launcher. If one process is meant, unset these variables."
        ) from None


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """All-reduced sum (in place); the tensor itself on one rank."""
    if is_distributed():
        dist.all_reduce(values)
    return values


def gather_objects(value: Any) -> list[Any]:
    """One picklable Python object per rank, in memory only."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def from_main(value: Any) -> Any:
    """Rank 0's value on every rank."""
    return gather_objects(value)[0]


def on_main(work: Callable[[], T]) -> T:
    """Do `work` on rank 0 and give its result to every rank; when it fails, every rank raises.

    Without this a full disk on rank 0 would leave the other ranks waiting in their next collective. A HeadstartError
    is raised alike on all ranks; any other error is raised as it is on rank 0 and as a TrainingError elsewhere.
    """
    if not is_distributed():
        return work()
    main = dist.get_rank() == 0
    result: Any = None
    error: Exception | None = None
    if main:
        try:
            result = work()
        except Exception as caught:
            error = caught
    known = error if isinstance(error, HeadstartError) else None
    other = f"{type(error).__name__}: {error}" if error is not None and known is None else None
    result, known, other = from_main((result, known, other))
    if known is not None:
        raise known
    if other is not None:
        raise error or TrainingError(f"rank 0 failed: {other}")
    return result


class Agreement:
    """A vector summed over ranks whose result the host reads later, when it is there anyway.

    `exchange` sums on the device and starts a copy to the host; `read` waits for that copy only. Reading the exchange
    of the previous step costs no idle device time, and because all ranks read the same sums they take the same turn.
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


class StopSignal:
    """While open, SIGTERM and a first SIGINT only set `received`; a second SIGINT interrupts at once.

    Handlers can be set in the main thread only; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
