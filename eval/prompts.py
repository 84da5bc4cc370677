"""Reads the prompts of `eval.data`: JSONL files and Hub datasets, in every layout of `data/records/conversation.py`.

Spec-Bench, MT-bench, HumanEval, GSM8K, MATH and Alpaca are read as they are published.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.data.config import SourceConfig
from headstart.data.prompts import Prompt, prompt_of
from headstart.data.records.conversation import parse_record
from headstart.data.records.media import dropped_lines
from headstart.data.sources.hub import load_rows
from headstart.data.sources.sources import read_records, source_path
from headstart.eval.config import HALVES, EvalConfig
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.files import explain_read, is_file, require_regular, sha256_file

#: categories of MT-bench. Spec-Bench's files name these eight instead of its task MT-bench
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
#: Spec-Bench's other five tasks
SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}
SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".parquet", ".csv", ".tsv", ".txt")


class Prompts(list[Prompt]):
    """Prompts of an evaluation.

    Attributes: dropped: of each record that was left out for its media, what it holds and its `where`.
    """

    dropped: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class EvalSource:
    """One file or one Hub dataset of prompts; `name` stands for it in reports."""

    name: str
    path: Path | None = None
    dataset: SourceConfig | None = None

    def records(self, limit: int | None = None) -> Iterator[tuple[str, str, Any]]:
        """(where, number from 1, record). Raises DataError naming file and line, or dataset and cause."""
        if self.path is None:
            assert self.dataset is not None
            rows = load_rows(SourceConfig(**{**asdict(self.dataset), "limit": self.dataset.limit or limit}))
            for number, row in enumerate(islice(rows, self.dataset.limit), start=1):
                yield f"{self.dataset.dataset}[{number - 1}]", str(number), row
            return
        for where, name, record in read_records(SourceConfig(path=str(self.path))):
            yield where, name.rpartition(":")[2], record


def eval_sources(data: Any) -> list[EvalSource]:
    """The sources that `eval.data` names.

    Args:
        data: one of, or a list of: a JSONL file (also .gz), `workload:NAME`, a Hub dataset `user/name` (its split
            "test"), or a mapping with `path`, or `dataset`, `subset`, `split` and `limit`.
    Raises: DataError for a file that is missing or named twice, ConfigError for anything else.
    """
    items = list(data) if isinstance(data, list | tuple) else [data]
    if not items:
        raise ConfigError("eval.data: found an empty list, expected a JSONL file of prompts or a list of them")
    sources = [_source(item, f"eval.data[{n}]" if len(items) > 1 else "eval.data") for n, item in enumerate(items)]
    names = [source.name for source in sources]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"eval.data: {repeated[0]} is given more than once: name each source once")
    return sources


def _source(item: Any, where: str) -> EvalSource:
    if isinstance(item, dict):
        known = {f.name for f in fields(SourceConfig)} - {"format", "columns", "on_bad", "cap", "weight"}
        if unknown := sorted(set(item) - known):
            raise ConfigError(f"{where}: unknown key {unknown[0]!r}, expected some of {', '.join(sorted(known))}")
        config = SourceConfig(**{"split": "test", **item})
        config.check(where)
        if config.dataset is not None:
            name = "/".join(part for part in (config.dataset.split("/")[-1], config.subset) if part)
            return EvalSource(name, dataset=config)
        if config.limit is not None:
            raise ConfigError(f"{where}.limit: found {config.limit} for a file; limit is for datasets: set eval.limit")
        item = config.path
    if not isinstance(item, str | Path):
        raise ConfigError(f"{where}: found {item!r}, expected a JSONL file, a dataset user/name, or a mapping")
    text = str(item)
    path = source_path(text)
    if is_file(path):
        return EvalSource(path.name.split(".")[0], path=path)
    named = text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith(SUFFIXES)
    if not named or os.path.lexists(path):
        try:
            with explain_read(path):
                require_regular(path)
        except DataError as error:
            expected = "eval.data expects a JSONL file of prompts, or a dataset of the Hub as user/name"
            raise DataError(f"{error}; {expected}") from error
    config = SourceConfig(dataset=text, split="test")
    config.check(where)
    return EvalSource(text.split("/")[-1], dataset=config)


def describe_data(data: Any) -> dict[str, Any]:
    """{"path", "sha256"} for reports, and to see whether inputs changed. A dataset is hashed by its settings."""
    parts = []
    for source in eval_sources(data):
        if source.path is not None:
            parts.append({"path": str(source.path), "sha256": sha256_file(source.path)})
        else:
            assert source.dataset is not None
            settings = asdict(source.dataset).items()
            parts.append({k: v for k, v in settings if v is not None and k not in ("format", "on_bad")})
    if len(parts) == 1 and "sha256" in parts[0]:
        return parts[0]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return {"path": ", ".join(part.get("path") or part["dataset"] for part in parts), "sha256": digest, "parts": parts}


def data_label(data: Any) -> str:
    """A short name for folders: the names of the sources."""
    return "+".join(source.name.replace("/", "-") for source in eval_sources(data))[:80]


def eval_prompts(config: EvalConfig) -> Prompts:
    """The prompts of an evaluation. Raises: ConfigError where `eval.data` is not set; as `load_prompts`."""
    if config.data is None:
        raise ConfigError("eval.data is not set: give --data FILE.jsonl or eval.data=FILE.jsonl, a file of prompts")
    kept = (config.limit, config.limit_per_task, config.max_turns)
    return load_prompts(config.data, *kept, config.task_field, config.half)


def load_prompts(
    data: Any,
    limit: int | None = None,
    limit_per_task: int | None = None,
    max_turns: int | None = None,
    task_field: str = "auto",
    half: str | None = None,
) -> Prompts:
    """Prompts of every source that `eval.data` names; of a conversation the last question is asked (`prompt_of`).

    With several sources, ids start with the source's name, and a record without a task gets that name as its task. In
    Spec-Bench's files MT-bench's eight categories become one task `mt_bench`, unless `task_field` is set. Records with
    images, video or audio are dropped.

    Args:
        limit: first records of each source.
        limit_per_task: first prompts of each task, of the half that is taken.
        max_turns: first turns.
        half: "odd" takes the first, the third, … prompt of each task, "even" the others, None all.
    Raises: DataError naming file, line and field, or saying that no task has two prompts to take the even half of.
    """
    sources = eval_sources(data)
    prompts: list[Prompt] = []
    held: list[tuple[str, str]] = []
    for source in sources:
        # a limit per task needs the whole of a source
        needed = limit if limit_per_task is None else None
        records = islice(source.records(needed), limit)
        parsed = [parse_record(record, where, number, task_field=task_field) for where, number, record in records]
        with_media = [(row.media, row.where) for row in parsed if row.media is not None]
        parsed, held = [row for row in parsed if row.media is None], held + with_media
        asked = [prompt_of(conversation, "last") for conversation in parsed]
        read = [replace(prompt, task=prompt.task or "all") for prompt in asked]
        if not read:
            expected = "expected one JSON object per line"
            found = "; ".join(["holds no prompts", *dropped_lines(with_media)])
            raise DataError(f"{source.path or source.name}: {found}; {'expected text' if with_media else expected}")
        if task_field == "auto" and SPEC_BENCH <= {prompt.task for prompt in read}:
            read = [replace(p, task="mt_bench") if p.task in MT_BENCH else p for p in read]
        if len(sources) > 1:
            read = [replace(p, id=f"{source.name}/{p.id}", task=_other(p.task, source.name)) for p in read]
        prompts += read
    if len({prompt.task for prompt in prompts}) > 1:
        prompts = [replace(p, task=_other(p.task, "other")) for p in prompts]
    kept = Prompts()
    kept.dropped = held
    per_task: dict[str | None, int] = {}
    for prompt in prompts:
        place = per_task.get(prompt.task, 0)
        per_task[prompt.task] = place + 1
        if half is not None:
            if place % 2 != HALVES.index(half):
                continue
            place //= 2
        if limit_per_task is None or place < limit_per_task:
            kept.append(replace(prompt, later=prompt.later[: None if max_turns is None else max_turns - 1]))
    if not kept:
        raise DataError("eval.half: found 'even', but every task has one prompt only: take the odd half, or null")
    return kept


def _other(task: str | None, name: str) -> str:
    """`name` for the task "all", which is the name of the total."""
    return name if task in (None, "all") else str(task)
