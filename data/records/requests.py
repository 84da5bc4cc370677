"""Request logs of servers and lines of OpenAI's batch files, as messages: chat completions and the Responses API."""

from __future__ import annotations

from typing import Any

from headstart.data.records.harmony import Raw, merge_answers
from headstart.data.records.messages import EMPTY, Where, kind, quote
from headstart.heads.errors import DataError
from headstart.heads.files import parse_json

#: field of the record that holds the request, by layout
REQUEST = {"request": "request", "batch": "body"}
#: fields of a request that reach the chat template beside the messages
KEPT = ("tools", "functions", "chat_template_kwargs")


def read_request(record: dict[str, Any], layout: str, where: Where) -> tuple[dict[str, Any], list[Raw]]:
    """A record with a request and, where it is there, the response.

    Args:
        layout: "request" (fields `request`, `response`) or "batch" (fields `body`, `response`, as in a line of a batch
            file that was joined with its result).
    Returns: the record without the two, with what the request holds beside its messages (`tools`, `system`, …) and
        the answer's `finish_reason`; and the messages, the answer last.
    Raises: DataError naming the field, what was found and what is expected.
    """
    key = REQUEST[layout]
    request, place = _unwrapped(_object(record.get(key), f"{where}: {key}"), f"{where}: {key}")
    messages = _asked(request, place)
    answers, finish, unread = _answer(record.get("response"), f"{where}: response")
    made = {name: value for name, value in record.items() if name not in (key, "response")}
    made |= {name: request[name] for name in KEPT if request.get(name) not in EMPTY}
    if request.get("instructions") not in EMPTY:
        made["system"] = request["instructions"]
    if finish is not None:
        made["finish_reason"] = finish
    if unread:  # other answers to the same request
        made["response.choices"] = unread
    if record.get("id") is None and record.get("custom_id") is not None:
        made["id"] = record["custom_id"]
    return made, messages + answers


def _object(value: Any, where: Where) -> dict[str, Any]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value, where)
    if not isinstance(value, dict) or not value:
        raise DataError(f"{where}: found {kind(value)}, expected an object in OpenAI's form")
    return value


def _unwrapped(value: dict[str, Any], where: Where) -> tuple[dict[str, Any], Where]:
    """What `value` holds in `body`, as logs of HTTP have it; else `value`."""
    if value.get("body") in EMPTY:
        return value, where
    return _object(value["body"], f"{where}.body"), f"{where}.body"


def _asked(request: dict[str, Any], where: Where) -> list[Raw]:
    if request.get("messages") is not None:
        messages = request["messages"]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{where}.messages: found {kind(messages)}, expected a list with at least one entry")
        return [(message, f"{where}.messages[{n}]") for n, message in enumerate(messages)]
    if isinstance(request.get("input"), str):
        return [({"role": "user", "content": request["input"]}, f"{where}.input")]
    if request.get("input") not in EMPTY:
        return _items(request["input"], f"{where}.input")
    if request.get("prompt") is not None:
        raise DataError(
            f"{where}.prompt: found a prompt that no chat template writes (/v1/completions), expected messages or "
            "input: if it is a question, give columns={prompt: FIELD, response: FIELD}"
        )
    names = ", ".join(quote(name) for name in list(request)[:20])
    raise DataError(f"{where}: found fields {names}, expected messages or input")


def _answer(response: Any, where: Where) -> tuple[list[Raw], Any, list[Any]]:
    """Answer messages, the finish reason, and the choices that are not read."""
    if response in EMPTY:
        return [], None, []
    if isinstance(response, str) and not response.lstrip().startswith("{"):
        return [({"role": "assistant", "content": response}, where)], None, []
    outer = _object(response, where)
    status = outer.get("status_code")
    body, where = _unwrapped(outer, where)
    failed = type(status) is int and not 200 <= status < 300
    if failed or any(each.get("error") not in EMPTY for each in (outer, body)):
        found = f"an error (status {status})" if failed else "an error"
        raise DataError(f"{where}: found {found}, expected an answer: remove the record")
    if isinstance(body.get("choices"), list) and body["choices"]:
        first = body["choices"][0]
        place = f"{where}.choices[0]"
        if not isinstance(first, dict):
            raise DataError(f"{place}: found {kind(first)}, expected an object with message")
        finish = first.get("finish_reason")
        if first.get("message") is None and isinstance(first.get("text"), str):
            return [({"role": "assistant", "content": first["text"]}, f"{place}.text")], finish, body["choices"][1:]
        return [(first.get("message"), f"{place}.message")], finish, body["choices"][1:]
    if body.get("output") not in EMPTY:
        return _items(body["output"], f"{where}.output"), "length" if body.get("status") == "incomplete" else None, []
    if body.get("role") == "assistant":
        return [(body, where)], body.get("finish_reason"), []
    names = ", ".join(quote(name) for name in list(body)[:20])
    raise DataError(f"{where}: found fields {names}, expected choices or output")


def _items(items: Any, where: Where) -> list[Raw]:
    """Items of the Responses API. Thoughts, calls and text of one answer become one assistant message."""
    if not isinstance(items, list):
        raise DataError(f"{where}: found {kind(items)}, expected text or a list of items")
    made: list[Raw] = []
    for number, item in enumerate(items):
        place = f"{where}[{number}]"
        if not isinstance(item, dict):
            raise DataError(f"{place}: found {kind(item)}, expected an object")
        made.append((_item(item, place), place))
    return merge_answers(made)


def _item(item: dict[str, Any], where: Where) -> dict[str, Any]:
    what = item.get("type", "message")
    if what == "message":
        return {name: value for name, value in item.items() if name in ("role", "content")}
    if what == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        listed = parts if isinstance(parts, list) else [parts]
        texts = [part.get("text") if isinstance(part, dict) else None for part in listed]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: found thoughts that are not text, expected content or summary with text")
        return {"role": "assistant"} | ({"reasoning_content": "".join(map(str, texts))} if texts else {})
    if what == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    if what == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    raise DataError(
        f"{where}.type: found {quote(what)}, expected message, reasoning, function_call or function_call_output"
    )
