"""Checks that the rendered text holds everything that a record says, and names what it lacks.

A template may silently leave out what it does not know: tools, a system message, reasoning, tool calls. The head would
then train on another conversation than the record's. A template may change white space, escape characters, write JSON
with other spaces or as tags, move the system message and the tools, and drop the thoughts of earlier turns.
"""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from headstart.data.chat.rendering import RefusedError, call_arguments
from headstart.data.chat.turns import Turn
from headstart.data.records.messages import Message

#: beginning of the reason for which a conversation or a prompt is refused, and what helps
LEFT_OUT = "the chat template leaves out"
WHAT_HELPS = (
    "to {} what the chat template leaves out, give one that writes it (target.chat_template=FILE, served likewise); "
    "to {} without, take it out of the records"
)
SPACE = re.compile(r"\s+")
THOUGHT = re.compile(r"</?think>")
#: what a message of a role is called in a reason
NAMES = {"system": "the system message", "developer": "the developer message", "user": "a user message",
         "tool": "a tool's result"}  # fmt: skip


def require_pieces(messages: Sequence[Message], turns: Sequence[Turn], tools: Sequence[dict[str, Any]] = ()) -> None:
    """Check that the text of `turns` holds every piece of their messages and of the messages before them.

    Args: turns: turns that share the last one's text. Messages before a turn must stand between the end of the turn
        before it and the end of its prompt; its own answer must stand after its prompt.
    Raises: RefusedError naming the first piece that the template leaves out.
    """
    last = turns[-1]
    whole = _Text(last.text[: last.end])
    _require_tools(tools, whole)
    place, message = 0, 0
    for turn in turns:
        before = _Text(last.text[place : turn.begin])
        for earlier in messages[message : turn.index]:
            _require_history(earlier, before, whole)
        _require_answer(messages[turn.index], _Text(last.text[turn.begin : turn.end]))
        place, message = turn.end, turn.index + 1


def require_prompt(messages: Sequence[Message], text: str, tools: Sequence[dict[str, Any]] = ()) -> None:
    """Check that a prompt's text holds every piece of its messages.

    Raises: RefusedError naming the first piece that the template leaves out.
    """
    whole = _Text(text)
    _require_tools(tools, whole)
    for message in messages:
        _require_history(message, whole, whole)


def _require_tools(tools: Sequence[dict[str, Any]], whole: _Text) -> None:
    for tool in tools:
        function = tool.get("function", tool)
        for piece in (function.get("name"), function.get("description")):
            # some templates write a description as a comment, line by line
            line = piece.strip().split("\n")[0] if isinstance(piece, str) else ""
            if not whole.holds(line):
                raise _left_out("the tools", line)


def thoughts_stand(content: str, text: str) -> bool:
    """Whether the text holds the thoughts and then the answer of a message's content."""
    searched = _Text(text)
    return all(searched.find(piece) for piece in THOUGHT.split(content))


def _require_history(message: Message, before: _Text, whole: _Text) -> None:
    role, content = message["role"], message.get("content") or ""
    if role in ("system", "developer"):  # some templates put it into the first or last question
        if not whole.holds(content):
            raise _left_out(NAMES[role], content)
    elif role != "assistant":
        if not before.find(content):
            raise _left_out(NAMES.get(role, f"a message of role {role}"), content)
    else:
        said = content.split("</think>")[-1]  # the template may drop the thoughts of an earlier answer
        place = before.place
        if not before.find(said):
            raise _left_out("an earlier answer", said)
        _require_calls(message, before, "an earlier answer")
        if message.get("tool_calls"):
            before.place = place  # Gemma 4 writes the calls, their results, then the content


def _require_answer(message: Message, text: _Text) -> None:
    reasoning, content = message.get("reasoning_content") or "", message.get("content") or ""
    if not text.find(reasoning):
        raise _left_out("the reasoning of an answer", reasoning)
    pieces = THOUGHT.split(content)
    for piece in pieces:
        if not text.find(piece):
            raise _left_out("an answer" if piece is pieces[-1] else "the thoughts of an answer", piece)
    _require_calls(message, text, "an answer")


def _require_calls(message: Message, text: _Text, of: str) -> None:
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        name, arguments = str(function.get("name", "")), call_arguments(function)
        if not text.holds(name):
            raise _left_out(f"the tool calls of {of}", name)
        if not _holds_value(text, arguments):
            raise _left_out(f"the tool calls of {of}", json.dumps(arguments, ensure_ascii=False))


def _holds_value(text: _Text, value: Any) -> bool:
    """Whether the text holds a value: as text, as JSON in any order of keys, or its names and values one by one.

    Gemma 4 writes names without quotes and texts in quotes of its own; other templates write XML elements.
    """
    dumps = [json.dumps(value, ensure_ascii=ascii, sort_keys=ordered) for ascii in (False, True)
             for ordered in (False, True)]  # fmt: skip
    if any(text.holds(form) for form in {str(value), *dumps}):
        return True
    if isinstance(value, dict):
        given = {str(key): inside for key, inside in value.items() if inside is not None}  # null may be left out
        return all(text.holds(key) and _holds_value(text, inside) for key, inside in given.items())
    return isinstance(value, list) and all(inside is None or _holds_value(text, inside) for inside in value)


def _left_out(what: str, piece: str) -> RefusedError:
    shown = SPACE.sub(" ", piece.strip())[:60]
    return RefusedError(f"{LEFT_OUT} {what}", f" ({shown!r})")


class _Text:
    """A part of the rendered text; `find` looks for pieces in their order."""

    def __init__(self, text: str):
        self.text = text
        self.place = 0

    def find(self, piece: str) -> bool:
        """Whether `piece` comes after everything found before; if so, the next search begins after it."""
        piece = piece.strip()
        at = self.text.find(piece, self.place)
        if at >= 0:
            self.place = at + len(piece)
            return True
        start = bisect_left(self.places, self.place)
        for form in _forms(piece):
            at = self.folded.find(SPACE.sub("", form), start)
            if at >= 0:
                self.place = self.places[at + len(SPACE.sub("", form)) - 1] + 1
                return True
        return False

    def holds(self, piece: str) -> bool:
        """Whether `piece` is anywhere in the text."""
        piece = piece.strip()
        return piece in self.text or any(SPACE.sub("", form) in self.folded for form in _forms(piece))

    @cached_property
    def places(self) -> list[int]:
        """Positions of the characters that are not white space."""
        return [at for at, character in enumerate(self.text) if not character.isspace()]

    @cached_property
    def folded(self) -> str:
        """The text without white space."""
        return "".join(self.text[at] for at in self.places)


def _forms(piece: str) -> Iterator[str]:
    """A piece as templates may write it: as it is, in JSON, in HTML, or (JSON itself) with other spaces."""
    yield piece
    yield json.dumps(piece, ensure_ascii=False)[1:-1]
    yield json.dumps(piece)[1:-1]
    escaped = html.escape(piece)
    yield escaped
    yield escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")  # as Jinja's filter writes quotes
    if piece[:1] in "{[":
        try:
            yield json.dumps(json.loads(piece), ensure_ascii=False)
        except ValueError:
            pass
