"""Messages of gpt-oss's harmony form: thoughts, calls and text of an answer are messages of their own, by channel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headstart.data.records.messages import EMPTY, Where, kind, quote
from headstart.heads.errors import DataError

#: a message as it stands in the record, and its place for error messages
Raw = tuple[Any, Where]
CHANNELS = ("analysis", "commentary", "final")
#: before the name of a function that the record defines
FUNCTIONS = "functions."
#: of a generated answer: what stands between its parts; in the header of a part, its channel and whom it calls
NEXT_PART = re.compile(r"<\|end\|>(?:<\|start\|>assistant)?")
CHANNEL = re.compile(r"<\|channel\|>(\w+)")
RECIPIENT = re.compile(r" to=functions\.([^\s<]+)")


def is_harmony(messages: Sequence[Any]) -> bool:
    """Whether a message names a channel or a recipient."""
    return any(
        isinstance(message, dict) and any(message.get(key) not in EMPTY for key in ("channel", "recipient"))
        for message in messages
    )


def from_harmony(raw: Sequence[Raw]) -> list[Raw]:
    """The same messages in OpenAI's form: `analysis` becomes `reasoning_content`, a message to `functions.NAME` a tool
    call, and those of one answer one message.

    Raises: DataError naming the message, for another channel or recipient, or a part that only harmony's own renderer
        reads (`system_content`, `developer_content`).
    """
    return merge_answers([(_message(message, place), place) for message, place in raw])


def _message(message: Any, where: Where) -> Any:
    if not isinstance(message, dict):
        return message
    author = message.get("author")
    if "role" not in message and isinstance(author, dict):
        message = {**author, **{name: value for name, value in message.items() if name != "author"}}
    role, channel, recipient = (message.get(name) for name in ("role", "channel", "recipient"))
    kept = {name: value for name, value in message.items() if name not in ("channel", "recipient", "content_type")}
    for part in message["content"] if isinstance(message.get("content"), list) else ():
        if isinstance(part, dict) and part.get("type") in ("system_content", "developer_content"):
            raise DataError(
                f"{where}.content: found a part of type {part['type']}, expected text: give instructions as text of a "
                "developer message, and functions in the record's tools"
            )
    if role == "tool":
        name = kept.get("name")
        return {**kept, "name": name.removeprefix(FUNCTIONS)} if isinstance(name, str) else kept
    if role != "assistant":
        return kept
    if channel not in EMPTY and channel not in CHANNELS:
        raise DataError(f"{where}.channel: found {quote(channel)}, expected one of {', '.join(CHANNELS)}")
    if recipient not in EMPTY and recipient != "all":
        if not isinstance(recipient, str) or not recipient.startswith(FUNCTIONS):
            raise DataError(f"{where}.recipient: found {quote(recipient)}, expected functions.NAME: remove the record")
        call = {"name": recipient.removeprefix(FUNCTIONS), "arguments": _text(kept.pop("content", ""), where)}
        return {**kept, "tool_calls": [{"function": call}]}
    if channel == "analysis":
        thoughts = _text(kept.pop("content", ""), where)
        return {**kept, "reasoning_content": thoughts}
    return kept


def _text(content: Any, where: Where) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"{where}.content: found {kind(text)}, expected text")
    return "".join(map(str, texts))


def read_answer(text: str) -> dict[str, Any] | None:
    """The message that a generated answer of harmony's channels stands for; None if it is not in this form, or cut.

    Thoughts come first, then the text or a call: `<|channel|>analysis<|message|>…<|end|><|start|>assistant` and
    `<|channel|>final<|message|>…`.

    Args: text: without its stop token.
    """
    said: dict[str, list[str]] = {channel: [] for channel in CHANNELS}
    calls = []
    for part in NEXT_PART.split(text):
        header, mark, body = part.partition("<|message|>")
        channel, call = CHANNEL.search(header), RECIPIENT.search(header)
        if not mark or (call is None and (channel is None or channel[1] not in CHANNELS)):
            return None
        if call is not None:
            calls.append({"type": "function", "function": {"name": call[1], "arguments": body}})
        elif channel is not None:
            said[channel[1]].append(body)
    if not calls and not said["final"]:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said["commentary"] + said["final"])}
    if said["analysis"]:
        message["reasoning_content"] = "".join(said["analysis"])
    return message | ({"tool_calls": calls} if calls else {})


def merge_answers(raw: Sequence[Raw]) -> list[Raw]:
    """Assistant messages in a row become one where none of their fields is in both; lists of calls are joined."""
    made: list[Raw] = []
    for message, place in raw:
        joined = _joined(made[-1][0], message) if made else None
        if joined is None:
            made.append((message, place))
        else:
            made[-1] = (joined, made[-1][1])
    return made


def _joined(before: Any, message: Any) -> dict[str, Any] | None:
    """The two as one message, or None where they are not two parts of one answer."""
    if not isinstance(before, dict) or not isinstance(message, dict):
        return None
    if before.get("role") != "assistant" or message.get("role") != "assistant":
        return None
    if not (_given(message) & _given(before)):
        return {**before, **message}
    calls = before.get("tool_calls"), message.get("tool_calls")
    if _given(message) == {"tool_calls"} and isinstance(calls[0], list) and isinstance(calls[1], list):
        return {**before, "tool_calls": [*calls[0], *calls[1]]}
    return None


def _given(message: dict[str, Any]) -> set[str]:
    return {name for name in message if name != "role"}
