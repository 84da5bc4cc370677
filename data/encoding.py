"""Conversations → token ids and turns: many at once, on one process or divided among the ranks of a launch."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from headstart.data.chat.chat import ChatFormat, Encoded, Masked, Part, answers_of
from headstart.data.chat.cutting import BATCH, Cutter, Tokens
from headstart.data.chat.rendering import RefusedError
from headstart.data.config import DataConfig
from headstart.data.prompts import Chats
from headstart.data.ranks import Ranks, portable
from headstart.data.records.conversation import Conversation, TokenTurn
from headstart.data.records.media import dropped_for
from headstart.heads.errors import DataError

#: conversations that each rank encodes before the ranks exchange their results
BLOCK = 256
#: most conversations whose texts are tokenised together
ROWS = 1024
#: reason for dropping a distillation's conversation whose first answer has no end
CUT = "its answer was cut (data.distill.cut_answers=drop)"
#: values of TOKENIZERS_PARALLELISM with which the tokenizers use one thread
ONE_THREAD = frozenset({"", "off", "false", "f", "no", "n", "0"})
#: a conversation with its samples, or with the reason why it cannot be trained on
Result = tuple[Conversation, "list[Masked] | str"]


class _Row(NamedTuple):
    """A conversation whose texts are to be tokenised; or one that is done."""

    conversation: Conversation
    made: list[Masked] | str = ""
    chat: ChatFormat | None = None
    parts: Sequence[Part | Masked] = ()


class Encoder:
    """Encodes conversations: while the tokenizer works on some, the texts of the next ones are rendered.

    With TOKENIZERS_PARALLELISM=false, one thread does both.

    Args: config: its max_length, turns, template_kwargs and distill.cut_answers are used.
    Raises: TemplateError when the tokenizer has no chat template, or one that cannot be masked, and text needs it.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], config: DataConfig):
        self.config, self.stop_token_ids = config, stop_token_ids
        self._chats = Chats(tokenizer, stop_token_ids, dict(config.template_kwargs))
        self._cutter = Cutter(tokenizer)

    @property
    def notes(self) -> list[str]:
        """Lines about the template for the data report."""
        return self._chats.notes

    def __call__(self, conversations: Iterable[Conversation]) -> Iterator[Result]:
        """Every conversation with its samples or the reason why it has none, in order."""
        ahead: deque[tuple[list[_Row], Iterator[Tokens]]] = deque()
        with ExitStack() as stack:
            pool = None
            if os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in ONE_THREAD:
                pool = stack.enter_context(ThreadPoolExecutor(1))
            for rows in self._groups(conversations):
                texts = [part.text for row in rows for part in row.parts if isinstance(part, Part)]
                ahead.append((rows, self._cutter.tokens(texts, pool)))
                if len(ahead) > (pool is not None):
                    yield from self._finished(*ahead.popleft())
            while ahead:
                yield from self._finished(*ahead.popleft())

    def _groups(self, conversations: Iterable[Conversation]) -> Iterator[list[_Row]]:
        """Conversations whose texts are tokenised together."""
        rows: list[_Row] = []
        size = 0
        for conversation in conversations:
            rows.append(row := self._row(conversation))
            size += sum(len(part.text) for part in row.parts if isinstance(part, Part))
            if size >= BATCH or len(rows) >= ROWS:
                yield rows
                rows, size = [], 0
        if rows:
            yield rows

    def _row(self, conversation: Conversation) -> _Row:
        if conversation.media is not None:
            return _Row(conversation, dropped_for(conversation.media))
        if conversation.turns:
            turns = conversation.turns
            if self.config.distill.cut_answers != "keep":
                turns = _whole_turns(conversation)
            encoded = encode_token_turns(turns, self.stop_token_ids, self.config.turns)
            return _Row(conversation, list(map(_arrays, encoded)) if turns else CUT)
        answers = answers_of(conversation.messages)
        if not answers:
            return _Row(conversation, "no assistant answer")
        chat, config = self._chats.of(conversation), self.config
        messages, tools = conversation.messages, conversation.tools
        try:
            finish = conversation.finish_reason
            parts = chat.parts(messages, finish, config.turns, tools, config.max_length, answers)
        except RefusedError as error:
            return _Row(conversation, error.reason)
        return _Row(conversation, chat=chat, parts=parts)

    def _finished(self, rows: Sequence[_Row], tokens: Iterator[Tokens]) -> Iterator[Result]:
        for row in rows:
            made = row.made
            if row.chat is not None:
                own = list(islice(tokens, sum(isinstance(part, Part) for part in row.parts)))
                try:
                    made = row.chat.finish(row.parts, own)
                except RefusedError as error:
                    made = error.reason
            yield row.conversation, made


def _arrays(encoded: Encoded) -> Masked:
    ids, turns = np.array(encoded.token_ids, np.int32), np.array(encoded.turn_ids, np.int32)
    return Masked(ids, turns, encoded.finish_reason, encoded.broken)


def encode_on_ranks(
    conversations: Iterable[Conversation], encode: Callable[[Iterable[Conversation]], Iterator[Result]], ranks: Ranks
) -> Iterator[Result]:
    """Every conversation with its result of `encode`, in order. Each rank encodes a part of every block.

    Where ranks fail, all raise the error that one process alone would have met first.
    Raises: DataError when the ranks do not read the same conversations.
    """
    if ranks.size == 1:
        yield from encode(conversations)
        return
    rows = iter(conversations)
    while True:
        block: list[Conversation] = []
        failed: tuple[int, Exception] | None = None  # number of the conversation, error
        try:
            block.extend(islice(rows, BLOCK * ranks.size))  # keeps those before one that cannot be read
        except Exception as error:
            failed = len(block), error
        made, wrong = _encode_block(encode, block[ranks.rank :: ranks.size])
        if wrong is not None:
            failed = ranks.rank + len(made) * ranks.size, wrong
        # without `where`: the file may have another path on another machine
        read = zlib.crc32(repr([replace(row, where="") for row in block]).encode("utf-8", "replace"))
        shown = None if failed is None else (failed[0], ranks.rank, portable(failed[1], ranks.rank))
        parts = ranks.gather((made, shown, len(block), read))
        failures = [part[1] for part in parts if part[1] is not None]
        if failures:
            _, rank, told = min(failures, key=lambda failure: failure[:2])
            raise failed[1] if failed is not None and rank == ranks.rank else told
        if len({part[2:] for part in parts}) > 1:
            raise DataError(
                f"data.sources: found other conversations on some ranks than on others ({[p[2] for p in parts]} of a "
                "block), expected the same files and datasets on every machine"
            )
        if not block:
            return
        for number, conversation in enumerate(block):
            yield conversation, parts[number % ranks.size][0][number // ranks.size]


def _encode_block(
    encode: Callable[[Iterable[Conversation]], Iterator[Result]], block: Sequence[Conversation]
) -> tuple[list[list[Masked] | str], Exception | None]:
    """The results of a block; where that fails, those before the first conversation that fails alone, and its error."""
    try:
        return [made for _, made in encode(block)], None
    except Exception:
        results: list[list[Masked] | str] = []
        for conversation in block:
            try:
                results += [made for _, made in encode([conversation])]
            except Exception as error:
                return results, error
        return results, None


def _whole_turns(conversation: Conversation) -> tuple[TokenTurn, ...]:
    """The answers of a distillation before the first that was cut; all of any other conversation."""
    turns = conversation.turns
    cut = next((number for number, turn in enumerate(turns) if turn.finish_reason == "length"), len(turns))
    return turns[:cut] if "sampling" in conversation.meta else turns


def encode_token_turns(turns: Sequence[TokenTurn], stop_token_ids: Sequence[int], which: str = "all") -> list[Encoded]:
    """Samples made of the token ids themselves. A turn shares a sample with the next one if that one's prompt begins
    with it.

    Nothing after the first stop token of an answer is supervised.
    """
    stops = frozenset(stop_token_ids)
    groups: list[list[TokenTurn]] = []
    for turn in turns if which == "all" else turns[-1:]:
        previous = groups[-1][-1] if groups else None
        whole = previous.prompt_ids + previous.response_ids if previous else ()
        if previous and turn.prompt_ids[: len(whole)] == whole:
            groups[-1].append(turn)
        else:
            groups.append([turn])
    encoded = []
    for group in groups:
        ids = [*group[-1].prompt_ids, *group[-1].response_ids]
        turn_ids = [-1] * len(ids)
        for number, turn in enumerate(group):
            first = len(turn.prompt_ids)
            length = next((i + 1 for i, x in enumerate(turn.response_ids) if x in stops), len(turn.response_ids))
            turn_ids[first : first + length] = [number] * length
        encoded.append(Encoded(ids, turn_ids, group[-1].finish_reason))
    return encoded
