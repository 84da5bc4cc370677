"""Reads one message of a record, and the tools beside it, into the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from headstart.data.records.media import media_of_part
from headstart.heads.errors import DataError, HeadstartError
from headstart.heads.files import parse_json

#: one message: role, content, and what chat templates read beside them
Message = dict[str, Any]
Where = str
ROLES = ("system", "developer", "user", "assistant", "tool")
#: other names of roles in ShareGPT's `from`; those that no template uses otherwise are also taken in `role`
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
    "developer": "developer", "tool": "tool", "function": "tool", "observation": "tool",
    "tool_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "function": "tool"}
#: roles of ShareGPT whose text is the calls of an answer: an object with name and arguments, or a list of them
CALLS = ("function_call", "tool_call")
#: values of a field that mean it is not given; tables with many layouts fill unused columns with them
EMPTY: tuple[Any, ...] = (None, "", [], {})
#: names of the field with the model's thoughts before its answer
REASONING = ("reasoning_content", "reasoning", "thinking")
READ = {"role", "from", "content", "value", "tool_calls", "function_call", "name", "tool_call_id", *REASONING}
#: deepest nesting of objects and lists; a tool's schema has about ten levels
MAX_DEPTH = 64


def read_message(message: Any, where: Where) -> dict[str, Any]:
    """A message in OpenAI's form (`role`, `content`) or ShareGPT's (`from`, `value`).

    Returns: `role`, `content` (text; its parts joined, without images, video and audio: see `media.py`) and, where
        given, `reasoning_content`, `tool_calls` with their `arguments` as an object where they are one, `name` and
        `tool_call_id`.
    Raises: DataError naming the field, what was found and what is expected.
    """
    if not isinstance(message, dict):
        raise DataError(f"{where}: found {kind(message)}, expected an object with role and content, or from and value")
    role = _role(message, where)
    given = {key: message[key] for key in READ if message.get(key) not in (None, [], {})}
    reasoning = _reasoning(given, where)
    if "role" not in message and str(message.get("from")).lower() in CALLS:
        given["tool_calls"] = _calls_of_text(given.pop("value", None), f"{where}.value")
    calls = _tool_calls(given, where)
    key = "content" if "content" in given or "value" not in given else "value"
    content = given.get(key)
    if content is None and (calls or reasoning is not None):
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.{key}") for part in content)
    elif content is None and message.get(key) == []:
        content = ""
    made: dict[str, Any] = {"role": role, "content": read_text(content, f"{where}.{key}")}
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = calls
    return made | {key: read_text(given[key], f"{where}.{key}") for key in ("name", "tool_call_id") if key in given}


def folded(value: Any) -> Any:
    """A text with every run of white space as one space; another value as it is."""
    return " ".join(value.split()) if isinstance(value, str) else value


def unread_fields(message: dict[str, Any]) -> list[str]:
    """Fields of a message that are given but that `read_message` does not read."""
    return [str(key) for key, value in message.items() if key not in READ and value not in EMPTY]


def read_tools(record: dict[str, Any], where: Where) -> tuple[dict[str, Any], ...]:
    """The record's `tools`, or its `functions` (OpenAI's older form), in OpenAI's form; either may be JSON text.

    Raises: DataError naming field and entry.
    """
    given = {key: record[key] for key in ("tools", "functions") if record.get(key) not in EMPTY}
    if len(given) == 2:
        raise DataError(f"{where}: found both tools and functions, expected one of them: remove one")
    made: list[dict[str, Any]] = []
    for key, value in given.items():
        if isinstance(value, str):
            value = parse_json(value, f"{where}: {key}")
        if not isinstance(value, list):
            raise DataError(f"{where}: {key}: found {kind(value)}, expected a list of tools (JSON schemas)")
        for index, tool in enumerate(value):
            here = f"{where}: {key}[{index}]"
            if not isinstance(tool, dict) or not tool:
                raise DataError(f"{here}: found {kind(tool)}, expected an object with a function's name and parameters")
            bare = "function" not in tool and "name" in tool and tool.get("type", "function") == "function"
            if bare:
                tool = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            function = tool.get("function", {"name": ""})
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise DataError(f"{here}.function: found {kind(function)}, expected an object with a name that is text")
            made.append(checked_json(tool, here))
    return tuple(made)


def _role(message: dict[str, Any], where: Where) -> str:
    if "role" in message or "from" not in message:
        role = message.get("role")
        role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
        if role not in ROLES:
            raise DataError(f"{where}.role: found {quote(role)}, expected one of {', '.join(ROLES)}")
        return str(role)
    said = message.get("from")
    role = SHAREGPT_ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise DataError(f"{where}.from: found {quote(said)}, expected one of {', '.join(SHAREGPT_ROLES)}")
    return role


def _reasoning(given: dict[str, Any], where: Where) -> str | None:
    texts = {key: read_text(given[key], f"{where}.{key}") for key in REASONING if key in given}
    if len(set(texts.values())) > 1:
        raise DataError(f"{where}: found different texts in {' and '.join(texts)}, expected one: remove the others")
    return next(iter(texts.values()), None)


def _part(part: Any, where: Where) -> str:
    if isinstance(part, str):
        return read_text(part, where)
    if media_of_part(part) is not None:
        return ""  # whoever reads the record drops it
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        return read_text(part.get("text"), f"{where}: text of a part")
    found = f" ({quote(part['type'])})" if isinstance(part, dict) and "type" in part else ""
    raise DataError(f"{where}: found a part that is not text{found}, expected text only: remove the record")


def _tool_calls(given: dict[str, Any], where: Where) -> list[dict[str, Any]]:
    calls = given.get("tool_calls")
    key = "tool_calls"
    if calls is None and "function_call" in given:
        calls, key = [given["function_call"]], "function_call"
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise DataError(f"{where}.{key}: found {kind(calls)}, expected a list of calls")
    return [_tool_call(call, f"{where}.{key}[{index}]") for index, call in enumerate(calls)]


def _calls_of_text(text: Any, where: Where) -> list[Any]:
    value = parse_json(text, where) if isinstance(text, str) else text
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{where}: found {kind(value)}, expected calls as JSON: an object with name and arguments")
    return calls


def _tool_call(call: Any, where: Where) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: found {kind(call)}, expected an object with function.name and function.arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    elif not isinstance(arguments, dict):
        raise DataError(f"{where}: arguments: found {kind(arguments)}, expected an object, or one as JSON text")
    beside = {k: v for k, v in call.items() if k in ("id", "index") and v is not None}
    return checked_json({**beside, "type": "function", "function": {**function, "arguments": arguments}}, where)


def _object(text: str) -> Any:
    """The JSON object in `text`; else the text itself, because a model may have written anything there."""
    try:
        value = parse_json(text, "") if text.strip() else {}
    except HeadstartError:
        return text
    return value if isinstance(value, dict) else text


def wire_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message as an OpenAI-compatible server takes it: `arguments` of tool calls as JSON text.

    Thoughts have two names: vLLM reads `reasoning` since 0.12, older versions and SGLang read `reasoning_content`.
    """
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    thoughts = {"reasoning": message["reasoning_content"]} if "reasoning_content" in message else {}
    return message | thoughts | ({"tool_calls": calls} if calls else {})


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def checked_json(value: Any, where: Where) -> Any:
    """`value` itself, after a check that it can be rendered and written as JSON.

    Raises: DataError naming `where`: nested too deeply, text that UTF-8 cannot hold, a value that JSON does not have.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise DataError(f"{where}: nested more than {MAX_DEPTH} deep, expected a flat object")
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += [read_text(key, f"{where}: a key") for key in item]
                inside += item.values()
            elif isinstance(item, list):
                inside += item
            elif isinstance(item, str):
                read_text(item, where)
            elif item is not None and not isinstance(item, bool | int | float):
                raise DataError(f"{where}: found {kind(item)}, expected plain JSON values")
        level = inside
    return value


def read_text(value: Any, where: Where) -> str:
    """`value` itself, after a check that it is text that UTF-8 can hold. Raises DataError naming `where`."""
    if not isinstance(value, str):
        raise DataError(f"{where}: found {kind(value)}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: found half of a surrogate pair, expected valid Unicode text: repair or remove it"
        ) from None
    return value


def kind(value: Any) -> str:
    """What kind of value was found, in words for an error message."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "nothing"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value)) or f"{type(value).__name__} {quote(value)}"


def quote(value: Any, most: int = 60) -> str:
    """A value as error messages show it: cut where it is long; an object or a list is named by its kind."""
    if isinstance(value, dict | list):
        return kind(value)
    text = ascii(value[: most + 1]) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
