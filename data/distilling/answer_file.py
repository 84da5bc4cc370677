"""The file of a distillation's answers: written answer by answer, continued after a kill, shared by several processes.

An answer is handed to the operating system as soon as it is finished, so that a killed process loses none. The disk is
made to hold it within a second (`SYNC_S`), in case the machine loses power. Several processes write a part file each,
in `OUT.parts/`. The first process moves what the parts hold into `OUT` at the end, or when the next run begins, which
may have another number of processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headstart.data.features import Progress
from headstart.data.prompts import Prompt
from headstart.data.ranks import Ranks, on_first
from headstart.data.records.conversation import Conversation, parse_record
from headstart.data.sources.sources import read_jsonl
from headstart.heads.errors import DataError
from headstart.heads.files import atomic_write, delete, explain_disk

#: seconds after which the disk is made to hold what was written
SYNC_S = 1.0
#: bytes that are read at once in search of the last whole line
BLOCK = 1 << 16
#: field of a record: why the later questions of its prompt were not asked
NOT_ASKED = "not_asked"


class AnswerFile:
    """What a distillation writes. All processes must call `resume` and `finish`.

    Args: out: the file. ranks: the processes that answer together.
    Attributes:
        parts: directory of the part files.
        added: records that this process has written.
    """

    def __init__(self, out: Path, ranks: Ranks):
        self.out, self.ranks = out, ranks
        self.parts = parts_of(out)
        self.added = 0
        alone = ranks.size == 1
        self._place = out if alone else self.parts / f"rank-{ranks.rank:05}.jsonl"
        self._file: BinaryIO | None = None
        self._synced = 0.0

    def resume(self, prompts: Sequence[Prompt], settings: dict[str, Any], progress: Progress) -> dict[str, str | None]:
        """Ids that are answered already → why later questions of theirs were not asked, or None.

        A last line that a kill left incomplete is removed and reported, and what an earlier run left in parts is moved
        into the file.

        Raises: DataError when a record was made with other settings or for another prompt of the same id.
        """

        def read() -> dict[str, str | None]:
            finished = finished_in(self.out, prompts, settings, progress)
            for part in sorted(self.parts.glob("rank-*.jsonl")):
                found = finished_in(part, prompts, settings, progress)
                _move(part, self.out, finished)
                finished = {**found, **finished}
            delete(self.parts)
            return finished

        return on_first(self.ranks, read)

    def add(self, record: dict[str, Any]) -> None:
        """Write a record. Raises: StorageError on a full disk."""
        with explain_disk(self._place):
            if self._file is None:
                self._place.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._place, "ab", buffering=0)  # noqa: SIM115 - closed by `finish`
                self._synced = time.monotonic()
            line = memoryview(record_line(record))
            while line:  # a disk that is nearly full takes a part
                line = line[self._file.write(line) :]
            self.added += 1
            if time.monotonic() - self._synced >= SYNC_S:
                self._sync()

    def _sync(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Make the disk hold what was written."""
        if self._file is not None:
            with explain_disk(self._place):
                self._sync()
                self._file.close()
            self._file = None

    def finish(self, order: Sequence[str]) -> int:
        """Bring the records of all processes into the file, in this order of ids; others stay before them.

        Returns: how many records all processes have added.
        """
        self.close()
        added = sum(self.ranks.gather(self.added))

        def merge() -> None:
            parts = sorted(self.parts.glob("rank-*.jsonl"))
            there = {name for name, *_ in _places(self.out)} if parts and self.out.exists() else set()
            for part in parts:
                _move(part, self.out, there)
                there |= {name for name, *_ in _places(part)}
            delete(self.parts)
            with explain_disk(self.out):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                self.out.touch()
            # a kill may have come after the last answer, so this is not for new answers alone
            _arrange(self.out, {name: number for number, name in enumerate(order)})

        on_first(self.ranks, merge)
        return added


def parts_of(out: Path) -> Path:
    """Where several processes write the answers of `out`."""
    return out.with_name(out.name + ".parts")


def skipped_of(out: Path) -> Path:
    """Where the prompts and questions stand that `out` has no answer to, with their reasons."""
    return out.with_name(out.name + ".skipped.json")


def record_line(record: dict[str, Any]) -> bytes:
    """A record as a line of the file."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
    return text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes a JSON escape


def finished_in(
    place: Path, prompts: Sequence[Prompt], settings: dict[str, Any], progress: Progress
) -> dict[str, str | None]:
    """See AnswerFile.resume; of one file."""
    if not place.exists():
        return {}
    _drop_torn_line(place, progress)
    planned = {prompt.id: prompt for prompt in prompts}
    finished: dict[str, str | None] = {}
    remedy = "give another output file, or remove this one to start again"
    for number, record in read_jsonl(place):
        conversation = parse_record(record, f"{place}:{number}", str(number))
        made = conversation.meta.get("sampling")
        if not isinstance(made, dict) or not conversation.turns:
            raise DataError(f"{place}:{number}: found no answer of a distillation: {remedy}")
        for key in sorted({*settings, *made} - {"target"}):  # the hash of the weights tells targets apart
            if made.get(key) != settings.get(key):
                raise DataError(
                    f"{place}:{number}: sampling.{key}: found {made.get(key)!r}, this run has "
                    f"{settings.get(key)!r}: {remedy}"
                )
        name = conversation.id
        prompt = planned.get(name.rsplit("/sample", 1)[0], planned.get(name))
        if prompt is not None and not belongs_to(conversation, prompt):
            raise DataError(f"{place}:{number}: found another prompt under the id {name!r}: {remedy}")
        finished[name] = conversation.meta.get(NOT_ASKED)
    return finished


def belongs_to(made: Conversation, prompt: Prompt) -> bool:
    """Whether a finished record answers this prompt, or at least its first questions."""
    first = prompt.prompt_token_ids
    if len(made.turns) > prompt.answers or (first is not None and made.turns[0].prompt_ids != first):
        return False
    if (made.tools, made.template_kwargs) != (prompt.tools, prompt.template_kwargs):
        return False
    place = 0
    for group in (prompt.first, *prompt.later)[: len(made.turns)]:
        if made.messages[place : place + len(group)] != group:
            return False
        place += len(group) + 1
    return len(made.messages) == place


def _drop_torn_line(place: Path, progress: Progress) -> None:
    with explain_disk(place), open(place, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        keep = _end_of_lines(file, size)
        if keep == size:
            return
        file.truncate(keep)
        os.fsync(file.fileno())
    progress(0, 0, f"{place}: dropped a last line of {size - keep} bytes that a killed run left incomplete")


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """Bytes up to the last line feed, which is read block by block from the end."""
    stop = size
    while stop:
        start = max(stop - BLOCK, 0)
        file.seek(start)
        found = file.read(stop - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0


def _places(place: Path) -> Iterator[tuple[Any, int, int]]:
    """(id, first byte, bytes) of every record of a file."""
    offset = 0
    with open(place, "rb") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line).get("id"), offset, len(line)
            offset += len(line)


def _move(part: Path, out: Path, there: Mapping[str, Any] | set[str]) -> None:
    """Append a part's records to `out`, but those that are there: a kill may have come in between."""
    with explain_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "rb") as lines, open(out, "ab") as file:
            for name, offset, count in _places(part):
                if name not in there:
                    lines.seek(offset)
                    file.write(lines.read(count))
            file.flush()
            os.fsync(file.fileno())


def _arrange(out: Path, order: Mapping[str, int]) -> None:
    """Put the records into this order, atomically. Those of other ids come first."""
    places = [(order.get(name, -1), offset, count) for name, offset, count in _places(out)]
    wanted = sorted(places)
    if wanted == places:
        return

    def write(place: Path) -> None:
        with open(out, "rb") as lines, open(place, "wb") as file:
            for _, offset, count in wanted:
                lines.seek(offset)
                file.write(lines.read(count))

    atomic_write(out, write)
