"""What a conversation says, as a set of runs of words: how alike two conversations are.

Likeness is the Jaccard index of the two sets: what both hold, divided by what either holds. System prompts and lists of
tools do not count, because one of them often stands before all conversations of a log.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile

import numpy as np

from headstart.data.records.conversation import Conversation
from headstart.data.records.messages import Message

#: words of a run. One changed word changes as many runs
WORDS = 3
#: roles that do not count
APART = ("system", "developer")
#: scripts that put no space between words (Thai, Lao, Burmese, Khmer, kana, Han): each letter counts as a word
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
#: ASCII letters in lower case, digits and _; all else is a space
PLAIN = bytes(ord(chr(i).lower()) if chr(i).isascii() and (chr(i).isalnum() or i == 95) else 32 for i in range(256))
#: odd constants of a multiplicative hash (splitmix64's)
FACTOR, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
HALF = np.uint64(32)


def shingles(conversation: Conversation) -> np.ndarray:
    """The set of runs of WORDS words, as sorted hashes: uint32 [S]. Less text than that is one run; none gives S = 0.

    A record without messages counts by its token ids.
    """
    if conversation.messages:
        return of_messages(conversation.messages)
    turn = conversation.turns[-1] if conversation.turns else None
    ids = (*turn.prompt_ids, *turn.response_ids) if turn else conversation.prompt_token_ids or ()
    return of_words(np.array(ids, np.uint64))


def of_messages(messages: Sequence[Message]) -> np.ndarray:
    """The set of runs of what the messages say: uint32 [S], sorted."""
    said = words("\n".join(_texts(messages)))
    return of_words(np.fromiter(map(zlib.crc32, said), np.uint64, len(said)))


def of_words(words_W: np.ndarray) -> np.ndarray:
    """The set of runs of the words: uint64 [W] → uint32 [S], sorted."""
    count = max(len(words_W) - WORDS + 1, min(len(words_W), 1))
    runs = words_W[:count] + np.uint64(1)
    for after in range(1, min(WORDS, len(words_W))):
        runs = runs * FACTOR + words_W[after : after + count]
    runs = (runs ^ (runs >> HALF)) * MIX
    values = np.sort((runs >> HALF).astype(np.uint32))
    return values[np.diff(values, prepend=~values[:1]) != 0]  # as np.unique, four times as fast


def words(text: str) -> list[bytes]:
    """The words of a text, in lower case and without punctuation."""
    if text.isascii():
        return text.encode().translate(PLAIN).split()
    return [word.encode("utf-8", "surrogatepass") for word in WORD.findall(text.lower())]


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if message["role"] in APART:
            continue
        for name in ("reasoning_content", "content"):
            if isinstance(text := message.get(name), str):
                yield text
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False, sort_keys=True, default=str)


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """The Jaccard index of two sets of hashes, each sorted and without repeats. Of two empty sets it is 0."""
    small, large = (one, other) if len(one) <= len(other) else (other, one)
    if not len(small):
        return 0.0
    at = np.searchsorted(large, small)
    both = int((large[np.minimum(at, len(large) - 1)] == small).sum())
    return both / (len(one) + len(other) - both)


class ShingleStore:
    """Sets of hashes by row number, in a temporary file. Memory holds eight bytes a row."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115
        self._ends, self._written = array("q", [0]), True

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, values: np.ndarray) -> int:
        """Append a set; returns its row."""
        self._file.write(values.astype("<u4").tobytes())
        self._ends.append(self._ends[-1] + 4 * len(values))
        self._written = False
        return len(self) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not self._written:
            self._file.flush()
            self._written = True
        start, stop = self._ends[row], self._ends[row + 1]
        return np.frombuffer(os.pread(self._file.fileno(), stop - start, start), "<u4")
