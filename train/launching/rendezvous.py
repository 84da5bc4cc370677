"""How the processes of a launch meet: a launch is what its environment promises, or it ends with an error."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from headstart.heads.errors import ConfigError, Terminated, first_line
from headstart.train.sharing.distributed import is_distributed

REMEDY = (
    "Start CPU ranks with `torchrun --nproc_per_node N -m headstart.train RECIPE`, "
    "GPU ranks with `accelerate launch --multi_gpu --num_processes N -m headstart.train RECIPE`."
)

#: seconds within which the last rank of a launch must have come
RENDEZVOUS_S = 300.0
#: seconds between two looks at who has come
MEET_POLL_S = 0.1
#: seconds that rank 0 stays when the meeting fails and it hosts the store: the others still look there
HOST_LAST_S = 2.0

#: where launchers say how many processes they started
PROMISES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    """A launcher's variable as a number; None when it is not set. Raises ConfigError when it is no number."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"launch: {name}: found {text!r}, expected a whole number of 0 or more. {REMEDY}")
    return int(text)


def check_variables(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that torchrun's variables promise; 1 without them. To be called before anything uses them.

    Raises: ConfigError naming the variable that is missing, no number or out of range.
    """
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    numbers = {name: _number(name, environment) for name in names}
    size = numbers["WORLD_SIZE"] or 1
    if size == 1:
        return 1
    if numbers["LOCAL_RANK"] is None:  # not torchrun: the process group would have this process alone
        check_launch(1, environment)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name, "").strip()]
    if missing:
        raise ConfigError(
            f"launch: found WORLD_SIZE={size} without {', '.join(missing)}, which every rank needs. {REMEDY}"
        )
    if not (numbers["RANK"] or 0) < size:
        raise ConfigError(f"launch: found RANK={numbers['RANK']}, expected less than WORLD_SIZE={size}. {REMEDY}")
    if not 0 < (numbers["MASTER_PORT"] or 0) < 65536:
        raise ConfigError(f"launch: found MASTER_PORT={numbers['MASTER_PORT']}, expected 1 to 65535. {REMEDY}")
    return size


class StartupSignals(Protocol):
    """What takes SIGTERM while a process starts; see headstart.sigterm."""

    @property
    def received(self) -> bool: ...

    def hold(self) -> None: ...

    def over(self) -> None: ...


def _meeting_store(rank: int, size: int, wait_s: float, environment: Mapping[str, str], agent: bool) -> dist.Store:
    """torchrun's own store, or one that rank 0 hosts. Making the latter waits for nobody: no signal could end that."""
    if agent:
        store: dist.Store = next(dist.rendezvous("env://", timeout=timedelta(seconds=wait_s)))[0]
        return store
    return dist.TCPStore(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), size, rank == 0, timedelta(seconds=wait_s),
        wait_for_workers=False, multi_tenant=True,  # the process group's own will live in the same server
    )  # fmt: skip


def _barrier(
    name: str, store: dist.Store, size: int, deadline: float, stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until all ranks are here. Returns False when `deadline` (of time.monotonic) comes first.

    Raises: Terminated when this rank is `stopping`, or another is.
    """
    store.add(name, 1)
    while store.add(name, 0) < size:
        if stopping():
            store.set("stopped", "")
        if store.check(["stopped"]):
            raise Terminated
        if time.monotonic() >= deadline:
            return False
        time.sleep(MEET_POLL_S)
    return True


def meet(
    wait_s: float = RENDEZVOUS_S, environment: Mapping[str, str] = os.environ, startup: StartupSignals | None = None
) -> dist.Store | None:
    """Wait until every rank of this launch has come. One rank alone does nothing.

    The process group has a timeout of hours, because its collectives need it. With a wrong address, joining it would
    hang for those hours without a message. So the ranks meet here first, with a shorter timeout.

    SIGTERM may come meanwhile. Once a rank is here, the others count on it, so `startup` holds the signal back. At a
    first barrier, a rank that got the signal tells the others, and all end. A second barrier makes sure that no rank
    goes on while another ends: past the first, a signal waits until training handles it.

    Args:
        wait_s: seconds to wait for the last rank.
        startup: what takes SIGTERM; None = nothing does.
    Returns: the store. Hold it until the process group is there, because rank 0 may host it for the others.
    Raises: ConfigError on every rank that came, naming the missing ones and the address, after `wait_s` seconds.
        Terminated where this rank or another got SIGTERM meanwhile.
    """
    size = check_variables(environment)
    if size == 1 or is_distributed():
        return None
    rank = int(environment["RANK"])
    place = f"MASTER_ADDR={environment['MASTER_ADDR']} MASTER_PORT={environment['MASTER_PORT']}"
    remedy = (
        "Give every machine the same address (rank 0's machine, a port that is free there and open to the others) and "
        "number of machines, and its own machine rank"
    )
    deadline = time.monotonic() + wait_s
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _meeting_store(rank, size, wait_s, environment, agent)
        ranks = dist.PrefixStore("headstart/meet", store)
        if startup is not None:
            startup.hold()
        ranks.set(str(rank), "")
        stopping = (lambda: startup.received) if startup is not None else (lambda: False)
        if not (_barrier("came", ranks, size, deadline, stopping) and _barrier("goes on", ranks, size, deadline)):
            gone = [str(r) for r in range(size) if not ranks.check([str(r)])]
            raise ConfigError(
                f"launch: rank {rank} waited {wait_s:.0f} s at {place}, and of {size} ranks these did not "
                f"{'come' if gone else 'go on'}: {', '.join(gone) or 'unknown'}. {remedy}."
            )
    except (ConfigError, Terminated):
        time.sleep(HOST_LAST_S if rank == 0 and not agent else 0.0)
        raise
    except (dist.DistError, ValueError, OSError) as error:
        raise ConfigError(
            f"launch: rank {rank} of {size} did not meet the others at {place} (waits {wait_s:.0f} s): "
            f"{first_line(error).rstrip('.')}. {remedy}."
        ) from error
    return store


def check_launch(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when the environment (torchrun, mpirun, srun) promises more ranks than the process group has.

    `accelerate launch --cpu --num_processes 2` (and `--num_machines 2`) of accelerate 1.x starts processes that each
    take themselves for rank 0 of 1. It sets MASTER_ADDR and MASTER_PORT for them, and no WORLD_SIZE; for a single
    process it sets neither.
    """
    for name in PROMISES:
        promised = _number(name, environment) or 1
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


#: verbs that train; several ranks train with another command (REMEDY)
TRAINING_VERBS = ("train", "run")


def refuse_ranks(verb: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when a launcher started `headstart <verb>` as several ranks. It is made for one process.

    Several would do the same work side by side, or find the run directory locked and take the first of them for another
    user's command.
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
