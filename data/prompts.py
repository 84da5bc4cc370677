"""A `Conversation` as a prompt for the target: the same for distillation, evaluation and evaluation of a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headstart.data.chat.chat import ChatFormat
from headstart.data.records.conversation import Conversation
from headstart.data.records.messages import Message
from headstart.heads.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """Messages to answer, and the messages that follow each answer.

    Attributes:
        id, task, where, meta, tools, template_kwargs, unread, media: as in Conversation.
        first: the messages before the first answer; empty if the record has only their token ids.
        later: for each further answer, the messages between it and the one before.
        prompt_token_ids: token ids of `first` where the record has them, else None. They are used as they are.
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
    media: str | None = None

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
        """The messages before the next answer, when `answers` (assistant messages) have been given."""
        chat = list(self.first)
        for answer, following in zip(answers, self.later[: len(answers)], strict=True):
            chat += [answer, *following]
        return chat


def prompt_of(conversation: Conversation, asked: str = "each") -> Prompt:
    """The prompt that asks the target what a conversation asks.

    Messages after the last question (a `user` or `tool` message) are left out: the target answers in their place. Which
    questions are asked:

    - `turns` (and MT-bench's list of prompts): every user message is a question; they are asked one after another.
    - asked="last" (evaluation): the last question only, after the recorded messages. Training sees the recorded answer
      in the same context.
    - asked="each" (distillation): the target answers wherever an assistant message followed a user message, and its
      answers replace the recorded ones. User messages in a row stay together. An assistant message before the first
      user message is history. If tools were called, only the last question is asked: the recorded results do not fit
      other calls that the target might make.

    The record's token ids are used where they are certain to belong to the first question: there is one question, or
    there are as many questions as token turns. Otherwise the text is rendered.

    Raises: DataError naming the record, if it asks nothing.
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
        media=conversation.media,
    )


def _split(messages: Sequence[Message]) -> list[list[Message]]:
    """Groups of messages, split at the assistant messages that follow a user message."""
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


class Templated(Protocol):
    """What may have variables of its own for the chat template."""

    @property
    def template_kwargs(self) -> Mapping[str, Any]: ...


class Chats:
    """A target's chat template, for records with variables of their own (`chat_template_kwargs`).

    It is read when the first text is rendered: prompts of token ids need no template.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], template_kwargs: dict[str, Any] | None = None):
        self.tokenizer, self.stop_token_ids = tokenizer, tuple(stop_token_ids)
        self.template_kwargs = dict(template_kwargs or {})
        self._made: dict[str, ChatFormat] = {}

    @property
    def notes(self) -> list[str]:
        """Lines for reports about how the template is used."""
        return list(dict.fromkeys(note for chat in self._made.values() for note in chat.notes))

    def of(self, record: Templated) -> ChatFormat:
        """The format for a record. Raises TemplateError when the tokenizer has no template."""
        key = json.dumps(record.template_kwargs, sort_keys=True) if record.template_kwargs else ""
        if key not in self._made:
            if len(self._made) >= 64:  # some variable, such as a date, differs from record to record
                self._made.clear()
            kwargs = {**self.template_kwargs, **record.template_kwargs}
            self._made[key] = ChatFormat(self.tokenizer, self.stop_token_ids, kwargs)
        return self._made[key]

    def prompt_ids(self, prompt: Prompt, answers: Sequence[Message] = ()) -> list[int]:
        """Token ids of the chat that the next answer follows. Raises TemplateError when it cannot be rendered."""
        if prompt.prompt_token_ids is not None and not answers:
            return list(prompt.prompt_token_ids)
        return self.of(prompt).prompt_ids(prompt.messages(answers), tools=prompt.tools)
