"""Records from files and datasets. Errors name the file and the line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.data.columns import map_columns
from headstart.data.config import SourceConfig
from headstart.data.hub import load_rows
from headstart.data.messages import checked_json, kind
from headstart.data.prompts import Prompt, prompt_of
from headstart.data.records import Conversation, parse_record
from headstart.heads.errors import DataError
from headstart.heads.files import explain_read, is_file, open_regular, parse_json, require_regular, short_path

#: most bytes of one line, and of a .json file (which is read whole)
MAX_LINE, MAX_JSON = 1 << 27, 1 << 32


def load_conversations(sources: Sequence[SourceConfig]) -> Iterator[Conversation]:
    """Every record of every source, in order.

    Raises: DataError "FILE:LINE: …" at the first malformed record; ConfigError for a source that names no input.
    """
    seen: dict[str, int] = {}
    for index, source in enumerate(sources):
        source.check(f"data.sources[{index}]")
        for where, fallback, record in islice(read_records(source), source.limit):
            if source.columns:
                record = map_columns(record, source.columns, where)
            yield _unique(parse_record(record, where, fallback, source.format), seen)


def _unique(conversation: Conversation, seen: dict[str, int]) -> Conversation:
    """The conversation with an id that no earlier one has: a repeated id gets `~2`, `~3`, …."""
    name = conversation.id
    while name in seen:
        seen[conversation.id] += 1
        name = f"{conversation.id}~{seen[conversation.id]}"
    seen[name] = 1
    return conversation if name == conversation.id else replace(conversation, id=name)


def read_prompts(sources: Sequence[SourceConfig], limit: int | None = None) -> list[Prompt]:
    """Prompts for distillation, by the rules of `prompt_of`.

    Raises: DataError for a malformed record, or one without a user turn.
    """
    return [prompt_of(conversation) for conversation in islice(load_conversations(sources), limit)]


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


def read_records(source: SourceConfig) -> Iterator[tuple[str, str, Any]]:
    """`(where, fallback id, record)` of one source. Raises DataError naming file and line, or dataset and cause."""
    if source.dataset is not None:
        for index, record in enumerate(load_rows(source)):
            yield f"{source.dataset}[{source.split}]:{index}", f"{source.dataset}:{index}", record
        return
    path = source_path(str(source.path))
    stem = path.name.split(".")[0]
    if path.suffix == ".json":
        listed = enumerate(_json_list(path), 1)
        yield from ((f"{path}: record {n}", f"{stem}:{n}", record) for n, record in listed)
    else:
        yield from ((f"{path}:{n}", f"{stem}:{n}", record) for n, record in read_jsonl(path))


def _require_file(path: Path) -> None:
    try:
        with explain_read(path):
            require_regular(path)
    except DataError as error:
        raise DataError(f"{error}, expected a .jsonl, .jsonl.gz or .json file: check the path of the source") from error


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """`(line number from 1, value)` of a JSONL or .jsonl.gz file; blank lines are skipped.

    Raises: DataError "FILE:LINE: …".
    """
    _require_file(path)
    number = 0
    with explain_read(path), open_regular(path) as file:
        lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        while True:
            number += 1
            try:
                raw = lines.readline(MAX_LINE + 1)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{path}:{number}: broken gzip data ({error}): copy the file again") from error
            if not raw:
                return
            where = f"{path}:{number}"
            if len(raw) > MAX_LINE:
                raise DataError(f"{where}: found a line of more than {MAX_LINE} bytes, expected one record per line")
            line = _decode(raw, where).strip()
            if line:
                yield number, _valid(parse_json(line, where, ", expected one object per line"), line, where)


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


def _json_list(path: Path) -> Iterable[Any]:
    _require_file(path)
    with explain_read(path), open_regular(path) as file:
        raw = file.read(MAX_JSON + 1)
    if len(raw) > MAX_JSON:
        raise DataError(f"{path}: holds more than {MAX_JSON} bytes, expected one record per line in a .jsonl file")
    text = _decode(raw, str(path))
    value = parse_json(text, str(path), "; one record per line belongs in .jsonl", lines=True)
    if not isinstance(value, list):
        raise DataError(
            f"{path}: found {kind(value)}, expected a JSON list of records (one object per line belongs in .jsonl)"
        )
    return (_valid(record, text, f"{path}: record {n}") for n, record in enumerate(value, 1))
