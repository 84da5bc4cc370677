"""Samples whose tokens lie in a temporary file, so that memory does not grow with the tokens.

The first MEMORY bytes of tokens stay in memory. The file has no name: it goes with the process, however that ends.
Processes that are forked share it.
"""

from __future__ import annotations

import errno
import os
from copy import copy
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
        return StoredSample(id, finish_reason, meta, self, self.write(token_ids), self.write(turn_ids), len(token_ids))

    def write(self, values: np.ndarray) -> int:
        """Append int32 values. Returns: where they begin in the file. Raises: StorageError where the disk is full."""
        if self._file is None:
            self._file = TemporaryFile(buffering=0)  # noqa: SIM115
        place, content = self._end, memoryview(values.astype(np.int32, copy=False).tobytes())
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

    _spool: Spool
    #: where tokens and turns begin in the file, and how many there are
    _tokens: int
    _turns: int
    _count: int
    _everything: bool

    def __init__(
        self,
        id: str,
        finish_reason: str,
        meta: dict[str, Any],
        spool: Spool,
        tokens: int,
        turns: int,
        count: int,
        everything: bool = False,
    ):
        own = {"id": id, "finish_reason": finish_reason, "meta": meta}
        stored = {"_spool": spool, "_tokens": tokens, "_turns": turns, "_count": count, "_everything": everything}
        self.__dict__.update(own, **stored)

    def __len__(self) -> int:
        return self._count

    @property
    def token_ids(self) -> np.ndarray:  # type: ignore[override]
        return self._spool.read(self._tokens, self._count)

    @property
    def turn_ids(self) -> np.ndarray:  # type: ignore[override]
        turn_ids = self._spool.read(self._turns, self._count)
        return all_as_one_turn(turn_ids) if self._everything else turn_ids

    @property
    def answer_ids(self) -> np.ndarray | None:  # type: ignore[override]
        return self._spool.read(self._turns, self._count) if self._everything else None

    def renamed(self, id: str) -> Sample:
        return self._changed(id=id)

    def with_turns(self, turn_ids: np.ndarray) -> Sample:
        return self._changed(_turns=self._spool.write(turn_ids))

    def with_all_supervised(self) -> Sample:
        return self._changed(_everything=True)

    def _changed(self, **fields: Any) -> Sample:
        made = copy(self)
        made.__dict__.update(fields)
        return made

    def __copy__(self) -> StoredSample:
        made = object.__new__(StoredSample)
        made.__dict__.update(self.__dict__)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get the arrays."""
        return Sample, (self.id, self.token_ids, self.turn_ids, self.finish_reason, self.meta, self.answer_ids)
