"""Records from files and datasets. Errors name the file and the line."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from headstart.data.config import SourceConfig
from headstart.data.records.columns import map_columns
from headstart.data.records.conversation import Conversation, parse_record
from headstart.data.records.messages import Where, checked_json, kind
from headstart.data.sources.hub import load_rows
from headstart.data.sources.json_lists import stream_list
from headstart.data.sources.rejects import Bad, Rejects, stop
from headstart.data.sources.tables import (
    SEPARATORS,
    UNPACKING,
    broken_data,
    kind_of_file,
    open_unpacked,
    read_csv,
    read_parquet,
)
from headstart.heads.errors import DataError
from headstart.heads.files import explain_read, is_file, parse_json, require_regular, short_path

T = TypeVar("T")
#: what is read of folders and patterns, each also packed (.gz, .zst)
TEXT = (".txt", ".text")
KINDS = (".jsonl", ".ndjson", ".json", ".parquet", *SEPARATORS, *TEXT)

#: most bytes of one record, and of a .json file that is read whole
MAX_LINE, WHOLE_JSON = 1 << 27, 1 << 24


def load_conversations(
    sources: Sequence[SourceConfig], rejects: Rejects | None = None, skipped: Counter[int] | None = None
) -> Iterator[Conversation]:
    """Every record of every source, in order.

    Args:
        rejects: takes the bad rows of sources with `on_bad: skip`.
        skipped: takes the number of these rows by source.
    Raises: DataError "FILE:LINE: …" at the first malformed record of other sources; ConfigError for a source that names
        no input.
    """
    return load_as(sources, rejects, lambda conversation: conversation, skipped)


def load_as(
    sources: Sequence[SourceConfig],
    rejects: Rejects | None,
    make: Callable[[Conversation], T],
    skipped: Counter[int] | None = None,
) -> Iterator[T]:
    """What `make` makes of every record; a DataError of `make` counts as one of the record. Else as
    `load_conversations`."""
    rejects = Rejects() if rejects is None else rejects
    skipped = Counter() if skipped is None else skipped
    seen: dict[str, int] = {}

    def skip(error: DataError, where: Where, row: int) -> None:
        rejects.add(error, where, row)
        skipped[index] += 1

    def stop_here(error: DataError, where: Where, row: int) -> None:
        remedy = "to leave out records that cannot be read, set on_bad: skip beside the source's path or dataset"
        raise DataError(f"{error}; {remedy}") from error

    for index, source in enumerate(sources):
        source.check(f"data.sources[{index}]")
        bad = skip if source.on_bad == "skip" else stop_here
        for where, fallback, record in islice(read_records(source, bad), source.limit):
            try:
                if source.columns:
                    record = map_columns(record, source.columns, where)
                parsed = _unique(parse_record(record, where, fallback, source.format), seen)
                made = make(replace(parsed, source=index) if index else parsed)
            except DataError as error:
                bad(error, where, int(fallback.rpartition(":")[2]))
                continue
            yield made


def _unique(conversation: Conversation, seen: dict[str, int]) -> Conversation:
    """The conversation with an id that no earlier one has: a repeated id gets `~2`, `~3`, …."""
    name = conversation.id
    while name in seen:
        seen[conversation.id] += 1
        name = f"{conversation.id}~{seen[conversation.id]}"
    seen[name] = 1
    return conversation if name == conversation.id else replace(conversation, id=name)


def workload_path(name: str) -> Path:
    """File of a workload that comes with the package. Raises DataError listing the names there are."""
    folder = Path(str(resources.files("headstart.data"))) / "workloads"
    path = folder / f"{name}.jsonl"
    if "/" in name or not is_file(path):
        names = sorted(p.stem for p in folder.glob("*.jsonl"))
        raise DataError(
            f"workload:{short_path(name)}: no such workload, expected one of {', '.join(names) or '(none installed)'}"
        )
    return path


def source_path(name: str) -> Path:
    """The file that a source's `path` names: `workload:NAME`, or a path; `~` is the home directory."""
    if name.startswith("workload:"):
        return workload_path(name.removeprefix("workload:"))
    return Path(os.path.expanduser(name))


def source_files(name: str) -> list[Path]:
    """The files that a source's `path` names: one file, those in a folder and its folders, or those that a pattern
    (`*`, `?`, `[…]`; `**` for folders of any depth) matches; by name. Of folders and patterns, only files of a known
    kind count, and none that is hidden.

    Raises: DataError, where a folder or a pattern has none.
    """
    path = source_path(name)
    with explain_read(path):
        folder = path.is_dir()
        if not folder and (path.exists() or not any(letter in name for letter in "*?[")):
            return [path]
    found = path.rglob("*") if folder else map(Path, glob.glob(str(path), recursive=True))
    kept = sorted(file for file in found if kind_of_file(file) in KINDS and is_file(file) and not _hidden(file, path))
    if not kept:
        what = "it is a directory, expected a regular file, or a folder with" if folder else "no such file, expected"
        raise DataError(f"{short_path(path)}: {what} files of these kinds: {', '.join(KINDS)}")
    return kept


def _hidden(file: Path, above: Path) -> bool:
    parts = file.relative_to(above).parts if file.is_relative_to(above) else (file.name,)
    return any(part.startswith(".") for part in parts)


def read_records(source: SourceConfig, bad: Bad = stop) -> Iterator[tuple[str, str, Any]]:
    """`(where, fallback id, record)` of one source, a few at a time.

    Args: bad: what is done with a row that cannot be read.
    Raises: DataError naming file and line, or dataset and cause; whatever `bad` raises.
    """
    if source.dataset is not None:
        for index, record in enumerate(load_rows(source)):
            yield f"{source.dataset}[{source.split}]:{index}", f"{source.dataset}:{index}", record
        return
    for path in source_files(str(source.path)):
        stem = path.name.split(".")[0]
        _require_file(path)
        place, rows = _rows(path, bad)
        yield from ((f"{path}{place}{n}", f"{stem}:{n}", record) for n, record in rows)


def _rows(path: Path, bad: Bad) -> tuple[str, Iterator[tuple[int, Any]]]:
    """What stands before a row's number in messages, and the rows: `(number from 1, record)`."""
    kind = kind_of_file(path)
    if kind == ".parquet":
        return ": record ", read_parquet(path, bad)
    if kind in SEPARATORS:
        return ": record ", read_csv(path, bad)
    if kind in TEXT:
        return ":", ((number, {"prompt": line}) for number, line, _ in _lines(path, bad))
    if kind == ".json" and (path.suffix == ".json" or _begins_a_list(path)):
        return ": record ", _json_list(path, bad)
    return ":", read_jsonl(path, bad)


def _require_file(path: Path) -> None:
    try:
        with explain_read(path):
            require_regular(path)
    except DataError as error:
        expected = "expected a .jsonl, .json, .parquet, .csv or .txt file: check the path of the source"
        raise DataError(f"{error}, {expected}") from error


def read_jsonl(path: Path, bad: Bad = stop) -> Iterator[tuple[int, Any]]:
    """`(line number from 1, value)` of a JSONL file, also .gz or .zst; blank lines are skipped.

    Raises: DataError "FILE:LINE: …"; whatever `bad` raises.
    """
    for number, line, where in _lines(path, bad):
        try:
            value = _valid(parse_json(line, where, ", expected one object per line"), line, where)
        except DataError as error:
            bad(error, where, number)
            continue
        yield number, value


def _lines(path: Path, bad: Bad) -> Iterator[tuple[int, str, str]]:
    """`(number from 1, text, place)` of every line that is not blank."""
    _require_file(path)
    number = 0
    with explain_read(path), open_unpacked(path) as lines:

        def read(most: int) -> bytes:
            try:
                return lines.readline(most)
            except UNPACKING as error:
                raise broken_data(path, f"{path}:{number}", error) from error

        while True:
            number += 1
            raw = read(MAX_LINE + 1)
            if not raw:
                return
            where = f"{path}:{number}"
            if len(raw) > MAX_LINE:
                found = f"found a line of more than {MAX_LINE} bytes, expected one record per line"
                bad(DataError(f"{where}: {found}"), where, number)
                while raw and not raw.endswith(b"\n"):
                    raw = read(MAX_LINE)
                continue
            try:
                line = _decode(raw, where).strip()
            except DataError as error:
                bad(error, where, number)
                continue
            if line:
                yield number, line, where


def _begins_a_list(path: Path) -> bool:
    """Whether a packed .json file holds one list. Most hold lines."""
    try:
        with open_unpacked(path) as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except UNPACKING:
        return False  # the reader of lines says what is broken


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}): save the file as UTF-8"
        ) from error


def _valid(value: Any, text: str, where: str) -> Any:
    """`value` itself, after a check that its text can be written: JSON escapes may hold half of a surrogate pair."""
    if "\\ud" in text or "\\uD" in text:
        for key, item in value.items() if isinstance(value, dict) else ():
            checked_json({key: item}, f"{where}: {ascii(key)[1:-1]}")
    return value


def _json_list(path: Path, bad: Bad) -> Iterator[tuple[int, Any]]:
    """`(number from 1, record)` of a file that holds one list. Large ones are read a record at a time."""
    with explain_read(path):
        with open_unpacked(path) as file:
            raw = _whole(file, path)
        if raw is None:
            with open_unpacked(path) as file:
                yield from _valid_records(path, stream_list(file, str(path), MAX_LINE), bad)
            return
    text = _decode(raw, str(path))
    if not text.strip():
        return
    value = parse_json(text, str(path), "; one record per line belongs in .jsonl", lines=True)
    if not isinstance(value, list):
        raise DataError(
            f"{path}: found {kind(value)}, expected a JSON list of records (one object per line belongs in .jsonl)"
        )
    yield from _valid_records(path, ((record, text) for record in value), bad)


def _whole(file: IO[bytes], path: Path) -> bytes | None:
    """The content, or None where it is longer than WHOLE_JSON."""
    try:
        raw = file.read(WHOLE_JSON + 1)
    except UNPACKING as error:
        raise broken_data(path, str(path), error) from error
    return raw if len(raw) <= WHOLE_JSON else None


def _valid_records(path: Path, records: Iterable[tuple[Any, str]], bad: Bad) -> Iterator[tuple[int, Any]]:
    for number, (record, text) in enumerate(records, 1):
        where = f"{path}: record {number}"
        try:
            checked = _valid(record, text, where)
        except DataError as error:
            bad(error, where, number)
            continue
        yield number, checked
