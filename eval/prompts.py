"""Prompts to evaluate on: JSONL files and Hub datasets of token ids, chat messages, turns, or questions.

Spec-Bench, MT-bench, HumanEval, GSM8K, MATH and Alpaca are read in the layouts in which they are published.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.data.config import SourceConfig
from headstart.data.hub import load_rows
from headstart.data.sources import workload_path
from headstart.heads.errors import ConfigError, DataError, TemplateError
from headstart.heads.files import sha256_file

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
#: fields of published benchmarks that hold a question as plain text (GSM8K, MATH, Alpaca, …)
QUESTIONS = ("prompt", "question", "problem", "instruction")
#: what HumanEval's function heads are asked with
COMPLETE = "Complete the following Python function. Return the whole function.\n\n```python\n{}\n```"
#: categories of MT-bench, which Spec-Bench's files list one by one: one of its six tasks
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}
SUFFIXES = (".jsonl", ".json", ".jsonl.gz")


@dataclass
class EvalPrompt:
    """One record of an evaluation file.

    Attributes:
        id, task: names for the report (the task is "all" where the record names none).
        prompt_token_ids: taken verbatim when the file has them.
        messages: conversation before the first decoded turn.
        turns: user turns to decode one after another; each answer goes into the context of the next.
    """

    id: str
    task: str
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EvalSource:
    """One file or one Hub dataset of prompts; `name` stands for it in reports."""

    name: str
    path: Path | None = None
    dataset: SourceConfig | None = None

    def records(self, limit: int | None = None) -> Iterator[tuple[str, int, Any]]:
        """(where, number from 1, record). Raises DataError naming file and line, or dataset and cause."""
        if self.path is None:
            assert self.dataset is not None
            rows = load_rows(SourceConfig(**{**asdict(self.dataset), "limit": self.dataset.limit or limit}))
            for number, row in enumerate(islice(rows, self.dataset.limit), start=1):
                yield f"{self.dataset.dataset}[{number - 1}]", number, row
            return
        opened = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opened(self.path, "rt", encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{self.path}:{number}", number, _parsed(line, f"{self.path}:{number}")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        except (gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{self.path}: not a whole gzip file ({error})") from error


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg})") from error


def eval_sources(data: Any) -> list[EvalSource]:
    """What `eval.data` names.

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
        known = {f.name for f in fields(SourceConfig)} - {"format"}
        if unknown := sorted(set(item) - known):
            raise ConfigError(f"{where}: unknown key {unknown[0]!r}, expected some of {', '.join(sorted(known))}")
        config = SourceConfig(**{"split": "test", **item})
        config.validate(where)
        if config.dataset is not None:
            name = "/".join(part for part in (config.dataset.split("/")[-1], config.subset) if part)
            return EvalSource(name, dataset=config)
        if config.limit is not None:
            raise ConfigError(f"{where}.limit: found {config.limit}; files are cut by eval.limit, datasets by limit")
        item = config.path
    if not isinstance(item, str | Path):
        raise ConfigError(f"{where}: found {item!r}, expected a JSONL file, a dataset user/name, or a mapping")
    text = str(item)
    path = workload_path(text.partition(":")[2]) if text.startswith("workload:") else Path(text).expanduser()
    if path.is_file():
        return EvalSource(path.name.split(".")[0], path=path)
    named = text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith(SUFFIXES)
    if not named or path.exists():
        raise DataError(
            f"{text}: no such file; eval.data expects a JSONL file of prompts, or a dataset of the Hub as user/name"
        )
    config = SourceConfig(dataset=text, split="test")
    config.validate(where)
    return EvalSource(text.split("/")[-1], dataset=config)


def describe_data(data: Any) -> dict[str, Any]:
    """{"path", "sha256"} for reports and for telling whether inputs changed; a dataset counts by its name and split."""
    sources = eval_sources(data)
    if len(sources) == 1 and sources[0].path is not None:
        return {"path": str(sources[0].path), "sha256": sha256_file(sources[0].path)}
    parts = []
    for source in sources:
        if source.path is not None:
            parts.append({"path": str(source.path), "sha256": sha256_file(source.path)})
        else:
            assert source.dataset is not None
            parts.append({k: v for k, v in asdict(source.dataset).items() if v is not None and k != "format"})
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return {"path": ", ".join(part.get("path") or part["dataset"] for part in parts), "sha256": digest, "parts": parts}


def data_label(data: Any) -> str:
    """A short name for folders: the names of the sources."""
    return "+".join(source.name.replace("/", "-") for source in eval_sources(data))[:80]


def load_prompts(
    data: Any,
    limit: int | None = None,
    limit_per_task: int | None = None,
    max_turns: int | None = None,
    task_field: str = "auto",
) -> list[EvalPrompt]:
    """Prompts of every source that `eval.data` names.

    Of several sources, records that name no task get the source's name as task, and ids start with it. Spec-Bench's
    files get its six tasks: MT-bench's eight categories count as `mt_bench` (unless `task_field` is set).

    Args: limit: first prompts of each source; limit_per_task: first prompts of each task.
    Raises: DataError naming file, line and field.
    """
    sources = eval_sources(data)
    prompts: list[EvalPrompt] = []
    for source in sources:
        # a limit per task needs the whole of a source
        needed = limit if limit_per_task is None else None
        records = islice(source.records(needed), limit)
        read = [parse_prompt(record, where, number, task_field) for where, number, record in records]
        if not read:
            raise DataError(f"{source.path or source.name}: holds no prompts; expected one JSON object per line")
        if task_field == "auto" and SPEC_BENCH <= {prompt.task for prompt in read}:
            for prompt in read:
                prompt.task = "mt_bench" if prompt.task in MT_BENCH else prompt.task
        for prompt in read if len(sources) > 1 else []:
            prompt.task = source.name if prompt.task == "all" else prompt.task
            prompt.id = f"{source.name}/{prompt.id}"
        prompts += read
    if len({prompt.task for prompt in prompts}) > 1:
        for prompt in prompts:  # "all" is the name of the total
            prompt.task = "other" if prompt.task == "all" else prompt.task
    kept: list[EvalPrompt] = []
    per_task: dict[str, int] = {}
    for prompt in prompts:
        per_task[prompt.task] = per_task.get(prompt.task, 0) + 1
        if limit_per_task is None or per_task[prompt.task] <= limit_per_task:
            prompt.turns = prompt.turns[:max_turns]
            kept.append(prompt)
    return kept


def parse_prompt(record: Any, where: str, number: int, task_field: str = "auto") -> EvalPrompt:
    """Recognise one record by its fields. Raises DataError naming what was found and what is understood."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {type(record).__name__}, expected a JSON object")
    names = (record.get(key) for key in ("id", "question_id", "task_id", "prompt_id", "unique_id"))
    name = next((found for found in names if found is not None), number)
    task = record.get(task_field) if task_field != "auto" else record.get("task") or record.get("category")
    prompt = EvalPrompt(str(name), str(task or "all"))
    if record.get("prompt_token_ids"):
        ids = record["prompt_token_ids"]
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise DataError(f"{where}: prompt_token_ids: expected a list of integers, 0 or more")
        prompt.prompt_token_ids = ids
    elif "turns" in record:
        prompt.turns = _turns(record["turns"], f"{where}: turns")
    elif "messages" in record or "conversations" in record:
        messages = _messages(record.get("messages") or record.get("conversations"), where)
        asked = [n for n, message in enumerate(messages) if message["role"] == "user"]
        if not asked:
            raise DataError(f"{where}: no user message to answer")
        # answers that follow the last question are what the target is to say itself
        prompt.messages, prompt.turns = messages[: asked[-1]], [messages[asked[-1]]["content"]]
    elif isinstance(record.get("prompt"), list):
        # MT-bench's dataset keeps its turns under that name
        prompt.turns = _turns(record["prompt"], f"{where}: prompt")
    else:
        prompt.turns = [_question(record, where)]
    return prompt


def _turns(found: Any, where: str) -> list[str]:
    if not isinstance(found, list) or not found or not all(isinstance(turn, str) for turn in found):
        raise DataError(f"{where}: found {found!r}, expected a non-empty list of strings")
    return list(found)


def _question(record: dict[str, Any], where: str) -> str:
    key = next((key for key in QUESTIONS if isinstance(record.get(key), str)), None)
    if key is None:
        raise DataError(
            f"{where}: found fields {sorted(record)}, expected one of "
            f"prompt_token_ids, turns, messages, conversations, {', '.join(QUESTIONS)}"
        )
    text = record[key]
    if key == "prompt" and "entry_point" in record:
        return COMPLETE.format(text.strip("\n"))
    if key == "instruction" and record.get("input"):
        return f"{text}\n\n{record['input']}"
    return text


def _messages(found: Any, where: str) -> list[dict[str, str]]:
    messages = []
    for message in found if isinstance(found, list) else [None]:
        if not isinstance(message, dict):
            raise DataError(f"{where}: messages: expected a list of objects with role and content")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"{where}: messages: found role {role!r}, expected one of {sorted(set(ROLES))} with text content"
            )
        messages.append({"role": ROLES[role], "content": content})
    return messages


def render(messages: list[dict[str, str]], tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> list[int]:
    """Token ids of a conversation that waits for the assistant, by the target's own chat template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the target's tokenizer has no chat template; set target.chat_template, "
            "or give prompt_token_ids in the data"
        )
    given = template_kwargs or {}
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **given)
    )
