"""One command at a time in a directory that it writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from headstart.heads.errors import StorageError
from headstart.heads.files import explain_disk


@contextmanager
def locked(directory: Path, another: str, wait: bool = False) -> Iterator[None]:
    """Keep other commands out of a directory that this one writes to. Makes the directory where it is missing.

    Args:
        another: the options that name another directory, for messages.
        wait: wait for the other command to end, instead of raising.
    Raises: StorageError when another command works there, or the directory cannot be made.
    """
    if "\0" in str(directory):
        raise StorageError(f"{str(directory)!r}: cannot be a path. Choose another place with {another}")
    with explain_disk(directory, another):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / ".lock")
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            raise StorageError(
                f"{directory}: another headstart command is working there; wait for it, or choose another place with "
                f"{another}"
            ) from None
    try:
        yield
    finally:
        lock.release()
