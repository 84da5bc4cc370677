"""Samples whose tokens lie in a temporary file, so that memory does not grow with the tokens.

The first MEMORY bytes of tokens stay in memory. The file has no name: it goes with the process, however that ends.
Processes that are forked share it.
"""

from __future__ import annotations

import errno
import os
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np

from headstart.data.samples import Sample, all_as_one_turn
from headstart.heads.errors import StorageError

#: bytes of tokens and turns that are kept in memory
MEMORY = 64 << 20


class Spool:
    """Makes samples. Args: memory: bytes of tokens and turns after which the file is used."""

    def __init__(self, memory: int = MEMORY):
        self._left, self._end = memory, 0
        self._file: Any = None

    def sample(
        self, id: str, token_ids: np.ndarray, turn_ids: np.ndarray, finish_reason: str, meta: dict[str, Any]
    ) -> Sample:
        """A sample of int32 arrays [T]. Raises: StorageError where the disk is full."""
        self._left -= token_ids.nbytes + turn_ids.nbytes
        if self._left >= 0:
            return Sample(id, token_ids, turn_ids, finish_reason, meta)
        return StoredSample(id, finish_reason, meta, (self, self._write(token_ids, turn_ids), len(token_ids)))

    def _write(self, *arrays: np.ndarray) -> int:
        """Where the arrays begin in the file."""
        if self._file is None:
            self._file = TemporaryFile(buffering=0)  # noqa: SIM115
        place, content = self._end, memoryview(b"".join(array.tobytes() for array in arrays))
        try:
            while content:
                written = os.pwrite(self._file.fileno(), content, self._end)
                content, self._end = content[written:], self._end + written
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageError(
                f"{gettempdir()}: found no room for the tokens of samples ({self._end / 2**30:.1f} GiB so far): set "
                "TMPDIR to a folder with more room"
            ) from error
        return place

    def read(self, place: int, count: int) -> np.ndarray:
        """`count` ints, int32 [count], which the caller may change."""
        content = bytearray()
        while len(content) < 4 * count:
            part = os.pread(self._file.fileno(), 4 * count - len(content), place + len(content))
            if not part:
                raise StorageError(f"{gettempdir()}: the tokens of the samples are gone: run the same command again")
            content += part
        return np.frombuffer(content, np.int32)


class StoredSample(Sample):
    """A sample that reads its tokens and turns from the file whenever they are asked for."""

    _stored: tuple[Spool, int, int]
    _turns: np.ndarray | None
    _everything: bool

    def __init__(
        self,
        id: str,
        finish_reason: str,
        meta: dict[str, Any],
        stored: tuple[Spool, int, int],
        turns: np.ndarray | None = None,
        everything: bool = False,
    ):
        own = {"id": id, "finish_reason": finish_reason, "meta": meta}
        self.__dict__.update(own, _stored=stored, _turns=turns, _everything=everything)

    def __len__(self) -> int:
        return self._stored[2]

    @property
    def token_ids(self) -> np.ndarray:  # type: ignore[override]
        spool, place, count = self._stored
        return spool.read(place, count)

    @property
    def turn_ids(self) -> np.ndarray:  # type: ignore[override]
        return all_as_one_turn(self._own_turns()) if self._everything else self._own_turns()

    @property
    def answer_ids(self) -> np.ndarray | None:  # type: ignore[override]
        return self._own_turns() if self._everything else None

    def renamed(self, id: str) -> Sample:
        return StoredSample(id, self.finish_reason, self.meta, self._stored, self._turns, self._everything)

    def with_turns(self, turn_ids: np.ndarray) -> Sample:
        return StoredSample(self.id, self.finish_reason, self.meta, self._stored, turn_ids)

    def with_all_supervised(self) -> Sample:
        return StoredSample(self.id, self.finish_reason, self.meta, self._stored, self._turns, everything=True)

    def _own_turns(self) -> np.ndarray:
        spool, place, count = self._stored
        return spool.read(place + 4 * count, count) if self._turns is None else self._turns

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get the arrays."""
        return Sample, (self.id, self.token_ids, self.turn_ids, self.finish_reason, self.meta, self.answer_ids)
