"""The processes of a launch: how they share work, and how all of them learn that one has failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headstart.heads.errors import DataError, HeadstartError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes of a launch, among which work is divided.

    Attributes:
        rank, size: number of this process, and of all.
        gather: takes a value of each process and returns the list of all, by rank. All processes must call it. Values
            must be picklable.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]


ALONE = Ranks()


def on_first(ranks: Ranks, work: Callable[[], T], kind: type[HeadstartError] = DataError) -> T:
    """Do `work` in the first process and give its result to all. If it fails, all raise.

    Without this a full disk of the first process would leave the others waiting in their next collective.

    Args: kind: see `portable`.
    """
    if ranks.size == 1:
        return work()
    made: Any = None
    failed: Exception | None = None
    if ranks.rank == 0:
        try:
            made = work()
        except Exception as error:
            failed = error
    made, told = ranks.gather((made, failed and portable(failed, 0, kind)))[0]
    if told is not None:
        raise failed or told
    return made


def portable(error: Exception, rank: int, kind: type[HeadstartError] = DataError) -> HeadstartError:
    """A failure of one process as others raise it. Errors of our own stay as they are. Others become a `kind`: another
    process might not be able to unpickle them."""
    if isinstance(error, HeadstartError):
        return error
    return kind(f"rank {rank} failed: {type(error).__name__}: {error}")
