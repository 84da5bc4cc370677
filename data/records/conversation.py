"""One record → one `Conversation`: the parser of training, distillation and every evaluation.

Layouts: `messages` (OpenAI), `conversations` (ShareGPT), `turns` (Spec-Bench), `prompt` as a list (MT-bench), `prompt`
with `response` or `completion`, `instruction` with `input` and `output` (Alpaca), `input` with `output`, a request with
its response (`request`, or `body` of OpenAI's batch files: see `requests.py`), a question alone (`prompt`,
`question`, `problem`, `instruction`; HumanEval's `prompt` with `entry_point`), and token ids alone
(`prompt_token_ids`). Beside any of them: `system`, `tools` (or OpenAI's older `functions`) and `chat_template_kwargs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.data.records.harmony import from_harmony, is_harmony
from headstart.data.records.media import media_of
from headstart.data.records.messages import (
    EMPTY,
    Message,
    Where,
    checked_json,
    kind,
    quote,
    read_message,
    read_text,
    read_tools,
    unread_fields,
)
from headstart.data.records.requests import REQUEST, read_request
from headstart.heads.errors import DataError
from headstart.heads.files import parse_json

#: finish reasons of serving engines, by whether the answer has its end-of-turn token
FINISH = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "end_turn": "stop", "tool_calls": "stop",
    "function_call": "stop", "length": "length", "max_tokens": "length", "content_filter": "length",
}  # fmt: skip
#: layout → the field by which it is recognised; a record with several of them has the first of these layouts
LAYOUTS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "turns": "turns",
    "prompt_response": "response",
    "prompt": "prompt",
    "question": "question",
    "problem": "problem",
    "instruction": "instruction",
    "input_output": "output",
    "request": "request",
    "batch": "body",
}
IDS = ("id", "question_id", "conversation_id", "task_id", "prompt_id", "unique_id")
#: fields in which records of other projects hold more text for the model. They are not read here, but reported
ELSEWHERE = (
    "system_prompt", "system_message", "instructions", "history", "context", "documents", "input", "tool_calls",
    "reasoning_content", "reasoning", "thinking", "enable_thinking", "response.choices",
)  # fmt: skip
#: what to do with the lines that a batch wrote, which hold no questions
BATCH_OUTPUT = ", or, for the output of a batch, join each line with the line of its input (body) with its custom_id"
#: the question that is made of a HumanEval record, whose prompt is the head of a function
COMPLETE = "Complete the following Python function. Return the whole function.\n\n```python\n{}\n```"
#: largest token id, because they are kept as int32
MOST_ID = 2**31 - 1


@dataclass(frozen=True)
class TokenTurn:
    """One generated answer as token ids, with the exact prompt that it was generated from.

    `response_ids` ends with the stop token when `finish_reason` is "stop".
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Conversation:
    """One record.

    Attributes:
        id: the record's `id`, `question_id`, `conversation_id`, …, else `STEM:LINE`; a repeat gets `~2`, `~3`, ….
        messages: dicts in chat-template form: `role`, `content` (text) and, where given, `reasoning_content`,
            `tool_calls` (OpenAI's form, `arguments` as an object where they are one), `name`, `tool_call_id`.
        finish_reason: of the last answer: "stop" or "length".
        turns: token ids of the answers where the record has them, else empty. They are used before the text.
        task: the record's `task` or `category`, or None.
        where: `FILE:LINE`, for error messages.
        meta: every other field of the record.
        tools: functions that the model may call, in OpenAI's form, as the template gets them.
        template_kwargs: the record's own variables for the template (`chat_template_kwargs`).
        prompt_token_ids: token ids of a prompt without an answer where the record has them, else None.
        asks: "each" if every user message is a question of its own (`turns`), "last" if the messages belong together.
        unread: names of fields that are given but do not reach the template: of messages (such as `weight`), and of the
            record (ELSEWHERE).
        media: what the record holds beside text, "images", "video" or "audio"; its messages are then not whole, and
            whoever reads it must drop it. None for text.
        source: number of the source that it was read from.
    """

    id: str
    messages: tuple[Message, ...]
    finish_reason: str = "stop"
    turns: tuple[TokenTurn, ...] = ()
    task: str | None = None
    where: Where = ""
    meta: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_token_ids: tuple[int, ...] | None = None
    asks: str = "last"
    unread: tuple[str, ...] = ()
    media: str | None = None
    source: int = 0


def opening(messages: Sequence[Message]) -> list[Message]:
    """The messages before the first answer. A greeting before the first user message belongs to them."""
    first: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and any(m["role"] == "user" for m in first):
            break
        first.append(message)
    return first


def unread_note(counts: Mapping[str, int]) -> str | None:
    """A sentence about the `unread` fields of conversations or prompts, from the count of each name; None for none."""
    if not counts:
        return None
    named = ", ".join(f"{quote(name)} ({count})" for name, count in sorted(counts.items())[:10])
    return f"fields that are not read and reach no prompt, by conversations: {named}"


def parse_record(
    record: Any, where: Where, fallback_id: str, layout: str = "auto", task_field: str = "auto"
) -> Conversation:
    """One record of any layout.

    Args:
        layout: a key of LAYOUTS; auto = by the fields that are there.
        task_field: the field that names the task; auto = `task`, else `category`.
    Raises: DataError naming `where`, the field, what was found and what is expected.
    """
    if not isinstance(record, dict):
        expected = ", ".join([*LAYOUTS.values(), "prompt_token_ids"])
        remedy = ": a file that holds one list is named .json" if isinstance(record, list) else ""
        raise DataError(f"{where}: found {kind(record)}, expected a JSON object with one of {expected}{remedy}")
    layout = layout_of(record, where) if layout == "auto" else layout
    if layout in REQUEST:
        record, raw = read_request(record, layout, where)
        used: tuple[str, ...] = ()
        asks = "last"
    else:
        raw, used, asks = _messages(record, layout, where)
    messages = _with_system([read_message(m, place) for m, place in raw], record, where)
    finish = _finish(record.get("finish_reason"), where)
    turns = _token_turns(record, where)
    ids = None
    if layout == "token_ids" and record["prompt_token_ids"] == []:
        raise DataError(f"{where}: prompt_token_ids: found an empty list, expected token ids")
    if not turns and record.get("prompt_token_ids") not in (None, []):
        ids = _ids(record["prompt_token_ids"], f"{where}: prompt_token_ids")
    name = next((record[key] for key in IDS if record.get(key) is not None), fallback_id)
    task = record.get(task_field) if task_field != "auto" else _first(record, ("task", "category"))
    unread = {name for message, _ in raw for name in unread_fields(message)}
    unread |= {name for name in ELSEWHERE if name not in used and record.get(name) not in EMPTY}
    taken = {
        *used, "id", "conversation_id", "task", "finish_reason", "prompt_token_ids", "response_token_ids",
        "earlier_turns", "system", "tools", "functions", "chat_template_kwargs",
    }  # fmt: skip
    return Conversation(
        id=_label(name, f"{where}: id"),
        messages=tuple(messages),
        finish_reason=finish,
        turns=turns,
        task=None if task is None else _label(task, f"{where}: task"),
        where=where,
        meta={k: v for k, v in record.items() if k not in taken},
        tools=read_tools(record, where),
        template_kwargs=_template_kwargs(record, where),
        prompt_token_ids=ids,
        asks=asks,
        unread=tuple(sorted(unread)),
        media=media_of(record, [message for message, _ in raw] + [{"content": record.get("system")}]),
    )


def layout_of(record: dict[str, Any], where: Where) -> str:
    """The key of LAYOUTS whose fields the record has, or token_ids. Raises: DataError naming the fields that it has."""
    there = [name for name, key in LAYOUTS.items() if record.get(key) is not None]
    if isinstance(record.get("prompt"), str) and record.get("completion") is not None:
        there.append("prompt_response")
    # a response needs a prompt that is text; a prompt that is a list holds questions
    fits = {
        "prompt_response": isinstance(record.get("prompt"), str),
        "input_output": record.get("input") is not None,
        "request": isinstance(record.get("request"), dict | str),
        "batch": isinstance(record.get("body"), dict | str),
    }
    layout = next((name for name in LAYOUTS if name in there and fits.get(name, True)), "")
    if layout or record.get("prompt_token_ids") is not None:
        return layout or "token_ids"
    names = ", ".join(quote(name) for name in list(record)[:20]) or "(none)"
    raise DataError(
        f"{where}: found fields {names}, expected one of messages, conversations, turns, prompt + response, prompt, "
        "question, problem, instruction, input + output, request, body, prompt_token_ids: name its fields in columns "
        "of the source" + (BATCH_OUTPUT if "custom_id" in record else "")
    )


def _messages(
    record: dict[str, Any], layout: str, where: Where
) -> tuple[list[tuple[Any, Where]], tuple[str, ...], str]:
    """Raw messages with their places, the fields they were read from, and `Conversation.asks`."""
    if layout == "token_ids":
        return [], (), "last"
    if layout in ("messages", "sharegpt"):
        key = LAYOUTS[layout]
        raw = [(m, f"{where}: {key}[{i}]") for i, m in enumerate(_list(record, key, where))]
        return from_harmony(raw) if is_harmony([m for m, _ in raw]) else raw, (key,), "last"
    # MT-bench's dataset keeps its turns under the name prompt
    if layout == "turns" or (layout == "prompt" and isinstance(record.get("prompt"), list)):
        places = [(turn, f"{where}: {layout}[{i}]") for i, turn in enumerate(_list(record, layout, where))]
        return [({"role": "user", "content": read_text(t, place)}, place) for t, place in places], (layout,), "each"
    if layout == "instruction":
        answered = [name for name in ("output", "response") if record.get(name) not in EMPTY][:1]
        said = [("user", _question(record, layout, where))]
        said += [("assistant", read_text(record[name], f"{where}: {name}")) for name in answered]
        return [({"role": r, "content": text}, where) for r, text in said], (layout, "input", *answered), "last"
    if layout not in ("prompt_response", "input_output"):
        return [({"role": "user", "content": _question(record, layout, where)}, where)], (layout,), "last"
    first = "prompt" if layout == "prompt_response" else "input"
    prompt = {"role": "user", "content": read_text(record.get(first), f"{where}: {first}")}
    key = "output" if layout == "input_output" else "response" if record.get("response") is not None else "completion"
    beside = {k: record[k] for k in ("reasoning_content", "tool_calls") if record.get(k) is not None}
    text = record.get(key)
    answer = {"role": "assistant", "content": read_text(text, f"{where}: {key}"), **beside}
    return [(prompt, where), (answer, where)], (first, key, *beside), "last"


def _question(record: dict[str, Any], key: str, where: Where) -> str:
    text = read_text(record.get(key), f"{where}: {key}")
    if key == "prompt" and "entry_point" in record:
        return COMPLETE.format(text.strip("\n"))
    if key == "instruction" and record.get("input"):
        return f"{text}\n\n{read_text(record['input'], f'{where}: input')}"
    return text


def _with_system(messages: list[Message], record: dict[str, Any], where: Where) -> list[Message]:
    """The messages, after the record's `system` text if there is one. Raises DataError if they begin with another."""
    system = record.get("system")
    if not messages or system in (None, "", []):
        return messages
    text = read_message({"role": "system", "content": system}, f"{where}: system")["content"]
    if messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != text:
            raise DataError(
                f"{where}: system: found {quote(text)} beside a first message {quote(messages[0]['content'])} of role "
                f"{messages[0]['role']}, expected one system prompt: remove one of them"
            )
        return messages
    return [{"role": "system", "content": text}, *messages]


def _template_kwargs(record: dict[str, Any], where: Where) -> dict[str, Any]:
    found = record.get("chat_template_kwargs")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise DataError(f"{where}: chat_template_kwargs: found {kind(found)}, expected an object of template variables")
    taken = sorted({"messages", "tools", "add_generation_prompt"} & set(found))
    if taken:
        raise DataError(f"{where}: chat_template_kwargs: found {taken[0]!r}, which the record gives itself: remove it")
    return checked_json(found, f"{where}: chat_template_kwargs")


def _token_turns(record: dict[str, Any], where: Where) -> tuple[TokenTurn, ...]:
    """Answers as token ids, oldest first; empty when the record has no `response_token_ids`."""
    if record.get("response_token_ids") is None:
        return ()
    earlier = record.get("earlier_turns") or []
    if not isinstance(earlier, list):
        raise DataError(f"{where}: earlier_turns: found {kind(earlier)}, expected a list of objects")
    turns = []
    for index, turn in enumerate([*earlier, record]):
        here = f"{where}: earlier_turns[{index}]" if index < len(earlier) else where
        if not isinstance(turn, dict):
            raise DataError(
                f"{here}: found {kind(turn)}, expected an object with prompt_token_ids and response_token_ids"
            )
        ids = [_ids(turn.get(key), f"{here}: {key}") for key in ("prompt_token_ids", "response_token_ids")]
        turns.append(TokenTurn(ids[0], ids[1], _finish(turn.get("finish_reason"), here)))
    return tuple(turns)


def _finish(value: Any, where: Where) -> str:
    if value is None or value == "":
        return "stop"
    if not isinstance(value, str) or value not in FINISH:
        raise DataError(f"{where}: finish_reason: found {quote(value)}, expected one of {', '.join(FINISH)}")
    return FINISH[value]


def _ids(value: Any, where: Where) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: found {kind(value)}, expected a list of token ids (integers ≥ 0)")
    wrong = next((x for x in value if type(x) is not int or not 0 <= x <= MOST_ID), None)
    if wrong is not None or None in value:
        raise DataError(f"{where}: found {kind(wrong)} in it, expected a list of token ids (integers ≥ 0)")
    return tuple(value)


def _list(record: dict[str, Any], key: str, where: Where) -> list[Any]:
    value = record.get(key)
    if key in ("messages", "conversations") and isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, f"{where}: {key}")  # a table's column can hold it only as text
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key}: found {kind(value)}, expected a list with at least one entry")
    return value


def _first(record: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((record[key] for key in keys if record.get(key) not in (None, "")), None)


def _label(value: Any, where: Where) -> str:
    """An id or a task as text. Raises DataError for text that UTF-8 cannot hold."""
    return read_text(value, where) if isinstance(value, str) else json.dumps(checked_json(value, where))[:200]
