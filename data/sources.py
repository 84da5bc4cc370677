"""Conversations and prompts from files and datasets, whatever the layout; a bad record is named by file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.data.config import SourceConfig
from headstart.heads.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
    "tool": "tool",
}  # fmt: skip
#: finish reasons of serving engines, by whether the answer has its end-of-turn token
FINISH = {"stop": "stop", "eos": "stop", "tool_calls": "stop", "length": "length", "content_filter": "length"}
LAYOUTS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "turns": "turns",
    "prompt_response": "response",
    "prompt": "prompt",
}
Where = str


@dataclass(frozen=True)
class TokenTurn:
    """One generated answer as token ids: the exact prompt it was generated from, and what was generated.

    `response_ids` ends with the stop token when `finish_reason` is "stop".
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Conversation:
    """One record.

    Attributes:
        id: the record's `id`, `question_id` or `conversation_id`, else `STEM:LINE`; a repeat gets `~2`, `~3`, ….
        messages: dicts with `role` and `content` (and `reasoning_content` where given), in chat-template form.
        finish_reason: of the last answer: "stop" or "length".
        turns: token ids of the answers, where the record carries them (they win over the text); else empty.
        task: the record's `task` or `category`, or None.
        where: `FILE:LINE`, for messages.
        meta: every other field of the record.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    finish_reason: str = "stop"
    turns: tuple[TokenTurn, ...] = ()
    task: str | None = None
    where: Where = ""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: `turns` are the user's messages, answered one after another.

    Attributes:
        prompt_token_ids: the first prompt as token ids where the record carries them, else None.
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    task: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    where: Where = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The chat up to the user turn that follows `answers`."""
        chat = [{"role": "system", "content": self.system}] if self.system is not None else []
        for index in range(len(answers) + 1):
            chat.append({"role": "user", "content": self.turns[index]})
            if index < len(answers):
                chat.append({"role": "assistant", "content": answers[index]})
        return chat


def load_conversations(sources: Sequence[SourceConfig]) -> Iterator[Conversation]:
    """Every record of every source, in order.

    Raises: DataError "FILE:LINE: …" at the first malformed record; ConfigError for a source that names no input.
    """
    seen: dict[str, int] = {}
    for index, source in enumerate(sources):
        source.validate(f"data.sources[{index}]")
        for where, fallback, record in islice(_records(source), source.limit):
            conversation = parse_record(record, where, fallback, source.format)
            repeats = seen[conversation.id] = seen.get(conversation.id, 0) + 1
            if repeats > 1:
                conversation = Conversation(**{**vars(conversation), "id": f"{conversation.id}~{repeats}"})
            yield conversation


def read_prompts(sources: Sequence[SourceConfig], limit: int | None = None) -> list[Prompt]:
    """Prompts for distillation and evaluation: all user turns of every record. Answers in the file are not used.

    Raises: DataError for a malformed record, or one without a user turn.
    """
    prompts = []
    for conversation in islice(load_conversations(sources), limit):
        turns = tuple(m["content"] for m in conversation.messages if m["role"] == "user")
        if not turns:
            raise DataError(f"{conversation.where}: found no user message, expected at least one: remove the record")
        system = next((m["content"] for m in conversation.messages if m["role"] in ("system", "developer")), None)
        # with several user turns a record's own prompt_token_ids may belong to the last one
        ids = conversation.meta.get("prompt_token_ids") if len(turns) == 1 else None
        if conversation.turns:
            ids = conversation.turns[0].prompt_ids
        prompts.append(
            Prompt(conversation.id, turns, system, conversation.task, tuple(ids) if ids else None, conversation.where,
                   conversation.meta)
        )  # fmt: skip
    return prompts


def workload_path(name: str) -> Path:
    """File of a workload that comes with the package. Raises DataError listing the names there are."""
    folder = Path(str(resources.files("headstart.data"))) / "workloads"
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        names = sorted(p.stem for p in folder.glob("*.jsonl"))
        raise DataError(f"workload:{name}: no such workload, expected one of {', '.join(names) or '(none installed)'}")
    return path


def parse_record(record: Any, where: Where, fallback_id: str, layout: str = "auto") -> Conversation:
    """One record of any layout. Raises DataError naming `where`, the field, what was found and what is expected."""
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: found {_kind(record)}, expected a JSON object with one of {', '.join(LAYOUTS.values())}"
        )
    if layout == "auto":
        layout = next((name for name, key in LAYOUTS.items() if record.get(key) is not None), "")
        if layout == "prompt" and record.get("completion") is not None:
            layout = "prompt_response"
        if layout == "":
            raise DataError(
                f"{where}: found fields {', '.join(map(repr, record)) or '(none)'}, expected one of "
                "messages, conversations, turns, prompt + response, prompt: rename the field"
            )
    messages, used = _messages(record, layout, where)
    finish = record.get("finish_reason")
    if finish is not None and finish not in FINISH:
        raise DataError(f"{where}: finish_reason: found {finish!r}, expected one of {', '.join(FINISH)}")
    identity = next(
        (record[k] for k in ("id", "question_id", "conversation_id") if record.get(k) is not None), fallback_id
    )
    task = record.get("task") if record.get("task") is not None else record.get("category")
    turns = _token_turns(record, where)
    taken = {*used, "id", "conversation_id", "task", "finish_reason", "response_token_ids", "earlier_turns"}
    if turns:
        taken.add("prompt_token_ids")
    return Conversation(
        id=str(identity),
        messages=tuple(messages),
        finish_reason=FINISH[finish] if finish is not None else "stop",
        turns=turns,
        task=None if task is None else str(task),
        where=where,
        meta={k: v for k, v in record.items() if k not in taken},
    )


def _messages(record: dict[str, Any], layout: str, where: Where) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Chat-template messages and the fields they were read from."""
    system = record.get("system")
    head = (
        [{"role": "system", "content": _text(system, f"{where}: system")}] if isinstance(system, str) and system else []
    )
    if layout == "messages":
        items = _list(record, "messages", where)
        return [_message(m, f"{where}: messages[{i}]") for i, m in enumerate(items)], ("messages",)
    if layout == "sharegpt":
        items = _list(record, "conversations", where)
        messages = [_sharegpt(m, f"{where}: conversations[{i}]") for i, m in enumerate(items)]
        return (messages if messages[0]["role"] == "system" else head + messages), ("conversations", "system")
    if layout == "turns":
        items = _list(record, "turns", where)
        turns = [{"role": "user", "content": _text(t, f"{where}: turns[{i}]")} for i, t in enumerate(items)]
        return head + turns, ("turns", "system")
    prompt = {"role": "user", "content": _text(record.get("prompt"), f"{where}: prompt")}
    if layout == "prompt":
        return [*head, prompt], ("prompt", "system")
    key = "response" if record.get("response") is not None else "completion"
    answer = {"role": "assistant", "content": _text(record.get(key), f"{where}: {key}")}
    return [*head, prompt, answer], ("prompt", key, "system")


def _message(message: Any, where: Where) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(f"{where}: found {_kind(message)}, expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where}.role: found {role!r}, expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if any(part is None for part in parts):
            raise DataError(f"{where}.content: found a part that is not text, expected text only: remove the record")
        content = "".join(str(part) for part in parts)
    if content is None and message.get("tool_calls"):
        content = ""
    extra = {k: message[k] for k in ("tool_calls", "name", "tool_call_id") if message.get(k) is not None}
    if message.get("reasoning_content") is not None:
        extra["reasoning_content"] = _text(message["reasoning_content"], f"{where}.reasoning_content")
    return {"role": role, "content": _text(content, f"{where}.content"), **extra}


def _sharegpt(message: Any, where: Where) -> dict[str, Any]:
    if isinstance(message, dict) and "from" not in message and "role" in message:
        return _message(message, where)
    if not isinstance(message, dict):
        raise DataError(f"{where}: found {_kind(message)}, expected an object with from and value")
    role = SHAREGPT_ROLES.get(str(message.get("from")).lower())
    if role is None:
        raise DataError(f"{where}.from: found {message.get('from')!r}, expected one of {', '.join(SHAREGPT_ROLES)}")
    return {"role": role, "content": _text(message.get("value"), f"{where}.value")}


def _token_turns(record: dict[str, Any], where: Where) -> tuple[TokenTurn, ...]:
    """Answers as token ids, oldest first; empty when the record has no `response_token_ids`."""
    if record.get("response_token_ids") is None:
        return ()
    earlier = record.get("earlier_turns") or []
    turns = []
    for index, turn in enumerate([*earlier, record]):
        here = f"{where}: earlier_turns[{index}]" if index < len(earlier) else where
        if not isinstance(turn, dict):
            raise DataError(
                f"{here}: found {_kind(turn)}, expected an object with prompt_token_ids and response_token_ids"
            )
        finish = turn.get("finish_reason", "stop") or "stop"
        if finish not in FINISH:
            raise DataError(f"{here}: finish_reason: found {finish!r}, expected one of {', '.join(FINISH)}")
        ids = [_ids(turn.get(key), f"{here}: {key}") for key in ("prompt_token_ids", "response_token_ids")]
        turns.append(TokenTurn(ids[0], ids[1], FINISH[finish]))
    return tuple(turns)


def _ids(value: Any, where: Where) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(x) is not int or x < 0 for x in value):
        raise DataError(f"{where}: found {_kind(value)}, expected a list of token ids (integers ≥ 0)")
    return tuple(value)


def _list(record: dict[str, Any], key: str, where: Where) -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key}: found {_kind(value)}, expected a list with at least one entry")
    return value


def _text(value: Any, where: Where) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: found {_kind(value)}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: found half of a surrogate pair, expected valid Unicode text: repair or remove it"
        ) from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "nothing"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), f"{type(value).__name__} {value!r}"[:60])


def _records(source: SourceConfig) -> Iterator[tuple[Where, str, Any]]:
    """`(where, fallback id, record)` of one source."""
    if source.dataset is not None:
        for index, record in enumerate(_dataset(source)):
            yield f"{source.dataset}[{source.split}]:{index}", f"{source.dataset}:{index}", record
        return
    name = str(source.path)
    path = workload_path(name.removeprefix("workload:")) if name.startswith("workload:") else Path(name)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {found}, expected a .jsonl, .jsonl.gz or .json file: check the path of the source")
    stem = path.name.split(".")[0]
    if path.suffix == ".json":
        yield from ((f"{path}: record {i + 1}", f"{stem}:{i + 1}", record) for i, record in enumerate(_json_list(path)))
    else:
        yield from ((f"{path}:{n}", f"{stem}:{n}", record) for n, record in read_jsonl(path))


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """`(line number from 1, value)` of a JSONL or .jsonl.gz file; blank lines are skipped.

    Raises: DataError "FILE:LINE: …".
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                line = _decode(raw, f"{path}:{number}").strip()
                if line:
                    yield number, _parse_line(line, f"{path}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}:{number + 1}: broken gzip data ({error}): copy the file again") from error


def _decode(raw: bytes, where: Where) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}): save the file as UTF-8"
        ) from error


def _parse_line(line: str, where: Where) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}), expected one object per line"
        ) from error
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply, expected one flat record per line") from None


def _json_list(path: Path) -> list[Any]:
    text = _decode(path.read_bytes(), str(path))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}); one record per line belongs in .jsonl"
        ) from error
    if not isinstance(value, list):
        raise DataError(
            f"{path}: found {_kind(value)}, expected a JSON list of records (one object per line belongs in .jsonl)"
        )
    return value


def _dataset(source: SourceConfig) -> Iterator[Any]:
    """Rows of a `datasets` name. Raises DataError when the Hub cannot be reached or has no such dataset."""
    from headstart.data.hub import load_rows

    return load_rows(source)
