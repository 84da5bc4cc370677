"""What the target is asked, made of a `Conversation`: for distillation, evaluation and a served evaluation alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.data.chat import ChatFormat
from headstart.data.records import Conversation, Message
from headstart.heads.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A chat that waits for an answer, and what is said after each answer.

    Attributes:
        id, task, where, meta, tools, template_kwargs, unread: as in Conversation.
        first: the messages that the first answer follows; empty when `prompt_token_ids` stand for them.
        later: the messages between an answer and the next one.
        prompt_token_ids: `first` as token ids, taken verbatim, where the record carries them, else None.
    """

    id: str
    first: tuple[Message, ...]
    later: tuple[tuple[Message, ...], ...] = ()
    task: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @classmethod
    def ask(cls, id: str, *turns: str, system: str | None = None, **more: Any) -> Prompt:
        """The user's `turns`, asked one after another."""
        head = ({"role": "system", "content": system},) if system is not None else ()
        first, *later = [{"role": "user", "content": turn} for turn in turns]
        return cls(id, (*head, first), tuple((message,) for message in later), **more)

    @property
    def answers(self) -> int:
        """How many answers are asked for."""
        return 1 + len(self.later)

    def messages(self, answers: Sequence[Message] = ()) -> list[Message]:
        """The chat up to what follows the last of `answers` (assistant messages)."""
        chat = list(self.first)
        for answer, following in zip(answers, self.later[: len(answers)], strict=True):
            chat += [answer, *following]
        return chat


def prompt_of(conversation: Conversation, asked: str = "each") -> Prompt:
    """Where the target answers a conversation.

    What stands after the last question, a `user` or `tool` message, the target is to say itself. Up to there:

    - `turns` (and MT-bench's list of prompts): every user message is a question, asked one after another.
    - asked="last" (evaluation): one question, the last, behind the recorded messages: the context in which training
      sees the recorded answer.
    - asked="each" (distillation): the target answers wherever an assistant message stood behind a user's; its answers
      take the place of the recorded ones. User messages in a row stay in a row, and what an assistant says before the
      first user message is history. A conversation in which tools were called is asked at its last question only: the
      results of the recorded calls are no reply to calls that the target might make instead, or not make.

    The record's token ids are those of the first question where they can belong to no other: with as many answers as
    token turns, or one question. Else the text is rendered.

    Raises: DataError naming the record, when it asks nothing.
    """
    messages = conversation.messages
    last = max((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), default=-1)
    groups: list[list[Message]] = [list(messages[: last + 1])]
    if conversation.asks == "each":
        start = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
        groups = [list(messages[: start + 1]), *([m] for m in messages[start + 1 : last + 1])]
    elif asked == "each" and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages[: last + 1]):
        groups = _split(messages[: last + 1])
    ids = _first_ids(conversation, len(groups))
    if last < 0 and (messages or ids is None):
        raise DataError(f"{conversation.where}: found no user message, expected at least one: remove the record")
    return Prompt(
        id=conversation.id,
        first=tuple(groups[0]),
        later=tuple(map(tuple, groups[1:])),
        task=conversation.task,
        prompt_token_ids=ids,
        tools=conversation.tools,
        template_kwargs=conversation.template_kwargs,
        where=conversation.where,
        meta=conversation.meta,
        unread=conversation.unread,
    )


def _split(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages between answers; an answer counts behind a user message."""
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif any(m["role"] == "user" for m in groups[-1]):
            groups.append([])
        elif len(groups) == 1:
            groups[0].append(message)
    return groups


def _first_ids(conversation: Conversation, questions: int) -> tuple[int, ...] | None:
    turns = conversation.turns
    if turns:
        first = turns[0] if len(turns) == questions else turns[-1]
        return first.prompt_ids or None if questions in (1, len(turns)) else None
    return conversation.prompt_token_ids if questions == 1 else None


class Chats:
    """A target's chat template, with the variables that records bring along (`chat_template_kwargs`).

    Made when the first text is rendered, so that prompts of token ids need no template.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], template_kwargs: dict[str, Any] | None = None):
        self.tokenizer, self.stop_token_ids = tokenizer, tuple(stop_token_ids)
        self.template_kwargs = dict(template_kwargs or {})
        self._made: dict[str, ChatFormat] = {}

    @property
    def notes(self) -> list[str]:
        """What reports say about how the template is used."""
        return list(dict.fromkeys(note for chat in self._made.values() for note in chat.notes))

    def of(self, record: Conversation | Prompt) -> ChatFormat:
        """The format for a record. Raises TemplateError when the tokenizer has no template."""
        key = json.dumps(record.template_kwargs, sort_keys=True)
        if key not in self._made:
            if len(self._made) >= 64:  # a variable that differs from record to record, such as a date
                self._made.clear()
            kwargs = {**self.template_kwargs, **record.template_kwargs}
            self._made[key] = ChatFormat(self.tokenizer, self.stop_token_ids, kwargs)
        return self._made[key]

    def prompt_ids(self, prompt: Prompt, answers: Sequence[Message] = ()) -> list[int]:
        """Token ids of the chat that the next answer follows. Raises TemplateError when it cannot be rendered."""
        if prompt.prompt_token_ids is not None and not answers:
            return list(prompt.prompt_token_ids)
        return self.of(prompt).prompt_ids(prompt.messages(answers), tools=prompt.tools)
