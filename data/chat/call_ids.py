"""Ids of tool calls in the form that some templates demand: nine letters and digits (Mistral's)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from headstart.data.records.messages import Message

NINE = re.compile(r"[A-Za-z0-9]{9}")
OTHER = re.compile(r"[^A-Za-z0-9]")


def nine_characters(messages: Sequence[Message]) -> list[Message]:
    """The messages with an id of nine characters on every tool call, and the same id on its result.

    An id is cut to its last nine letters and digits, as vLLM does it for Mistral. Calls without an id are numbered;
    results without one belong to the calls before them, in order.
    """
    made: list[Message] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = [
                {**call, "id": _nine(str(call.get("id") or f"{number}/{place}"))}
                for place, call in enumerate(message["tool_calls"])
            ]
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            found = _nine(given) if given else waiting[0] if waiting else _nine(str(number))
            waiting = [each for each in waiting if each != found]
            message = {**message, "tool_call_id": found}
        made.append(message)
    return made


def _nine(text: str) -> str:
    if NINE.fullmatch(text):
        return text
    plain = OTHER.sub("", text)
    return plain[-9:] if len(plain) >= 9 else hashlib.sha256(text.encode()).hexdigest()[:9]
