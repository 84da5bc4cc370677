"""Which conversations of each source are used, how often, and what became of the others.

The order of choice: duplicates leave, then `cap` bounds a source, then `weight` gives sources their shares. All choices
depend on the seed and on what a conversation says, not on its place in a file.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

from headstart.data.config import SourceConfig
from headstart.heads.counting import counted
from headstart.heads.files import short_path

T = TypeVar("T")
#: reasons for which a cap and a weight leave conversations out
OVER_CAP, BY_WEIGHT = "over the cap of {}", "not chosen by weight"


@dataclass
class SourceCount:
    """What became of the conversations of one source.

    Attributes:
        read: records that were read, without those that `on_bad: skip` left out.
        dropped: reason → number of conversations that neither train nor are held out.
        trained, held_out: conversations on each side.
        repeated: how many more times conversations train, because the weight asks for more than there are.
        tokens: of the training samples, repeats included.
    """

    name: str
    weight: float | None = None
    cap: int | None = None
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    repeated: int = 0
    held_out: int = 0
    tokens: int = 0

    @property
    def used(self) -> int:
        """Conversations that train in one epoch, repeats included."""
        return self.trained + self.repeated

    def leave(self, reason: str, number: int) -> None:
        """Count conversations that are left out."""
        if number:
            self.dropped[reason] += number

    def left_out(self) -> str:
        """In words, each reason after a comma."""
        return "".join(f", {number} {reason}" for reason, number in self.dropped.most_common())

    def asked(self, bad: int) -> str:
        """In words, for prompts. Args: bad: number of bad rows."""
        if not self.read:
            return self.no_records()
        rows = f", {counted(bad, 'bad rows')}" if bad else ""
        asked = self.read - bad - sum(self.dropped.values())
        return f"{self.name}: {counted(self.read, 'prompts')} read{self.left_out()}{rows}; {asked} asked"

    def no_records(self) -> str:
        return f"{self.name}: found no records, expected at least one: is this the right source?"


def counts_of(sources: Sequence[SourceConfig]) -> list[SourceCount]:
    return [SourceCount(short_path(s.path or f"{s.dataset}[{s.split}]"), s.weight, s.cap) for s in sources]


def as_dicts(counts: Sequence[SourceCount]) -> list[dict[str, Any]]:
    """For the data report: the counts, and each source's share of the conversations and tokens that train."""
    used, tokens = sum(c.used for c in counts), sum(c.tokens for c in counts)
    return [
        {
            **vars(count),
            "dropped": dict(count.dropped),
            "conversation_share": round(count.used / used, 4) if used else 0.0,
            "token_share": round(count.tokens / tokens, 4) if tokens else 0.0,
        }
        for count in counts
    ]


def lines_of(counts: Sequence[SourceCount]) -> list[str]:
    """In words, one source a line; nothing for a single source of which all was used."""
    if len(counts) < 2 and not any(count.dropped or not count.read for count in counts):
        return []
    lines = []
    for count, facts in zip(counts, as_dicts(counts), strict=True):
        if not count.read:
            lines.append(count.no_records())
            continue
        again = f" and {counted(count.repeated, 'repeats')}" if count.repeated else ""
        read = counted(count.read, "conversations")
        lines.append(
            f"{count.name}: {read} read{count.left_out()}; {count.trained} in training{again}, "
            f"{count.held_out} held out; {facts['conversation_share']:.1%} of conversations, "
            f"{facts['token_share']:.1%} of tokens"
        )
    return lines


def random_place(key: bytes, seed: int) -> bytes:
    """Where a conversation stands in the random order of a seed."""
    return hashlib.blake2b(key, digest_size=16, key=str(seed).encode()).digest()


def capped(rows: Iterable[tuple[T, bytes]], cap: int | None, seed: int) -> tuple[Iterable[tuple[T, bytes]], int]:
    """At most `cap` of the rows `(row, key)`, in their order, and how many were left out. At most `cap` are in memory.

    A later cap that is larger keeps what a smaller one chose.
    """
    if cap is None:
        return rows, 0
    # the heap's first is the one that leaves next; ties leave from the end
    heap: list[tuple[int, int, T, bytes]] = []
    seen = 0
    for number, (row, key) in enumerate(rows):
        seen += 1
        item = (-int.from_bytes(random_place(key, seed), "big"), -number, row, key)
        if len(heap) < cap:
            heapq.heappush(heap, item)
        elif item[:2] > heap[0][:2]:
            heapq.heapreplace(heap, item)
    kept = sorted(heap, key=lambda item: -item[1])
    return [(row, key) for _, _, row, key in kept], seen - len(kept)


def by_source(rows: Iterable[tuple[int, T]]) -> Iterator[tuple[int, Iterator[T]]]:
    """Rows `(source, row)`, which come source by source, as one iterator a source."""
    for source, group in groupby(rows, key=lambda row: row[0]):
        yield source, (row for _, row in group)


def wanted(counts: Sequence[int], weights: Sequence[float], most_repeats: int = 1) -> list[int]:
    """How many conversations of each source give the weights' shares: at most `most_repeats` times what it has.

    If nothing may repeat, the mix is the largest that the scarcest source allows. Otherwise it grows until every
    conversation of every source is used, or until a source has reached `most_repeats`. Sources without conversations
    leave their share to the others.
    """
    there = [(count, weight) for count, weight in zip(counts, weights, strict=True) if count]
    if not there:
        return [0] * len(counts)
    total = min(max(count / weight for count, weight in there), min(most_repeats * c / w for c, w in there))
    return [
        min(max(round(total * weight), 1), most_repeats * count) if count else 0
        for count, weight in zip(counts, weights, strict=True)
    ]


def times(keys: Sequence[bytes], number: int, seed: int) -> list[int]:
    """How often each conversation of a source is used when `number` of them are wanted: all equally often, or some once
    more, chosen by the seed."""
    whole, rest = divmod(number, len(keys)) if keys else (0, 0)
    order = sorted(range(len(keys)), key=lambda i: (random_place(keys[i], seed), i))
    used = [whole] * len(keys)
    for i in order[:rest]:
        used[i] += 1
    return used


def weighted(
    rows: Sequence[T],
    place: Callable[[T], tuple[int, str, bytes]],
    weights: Sequence[float | None],
    seed: int,
    most_repeats: int = 1,
) -> dict[str, int]:
    """How often each conversation is used: id → times, 0 for one that is not.

    Args: place: the source, the id of the conversation and its key; several rows may be of one conversation.
    """
    ids: list[dict[str, bytes]] = [{} for _ in weights]
    for row in rows:
        source, name, key = place(row)
        ids[source].setdefault(name, key)
    if any(weight is None for weight in weights):
        return {name: 1 for names in ids for name in names}
    numbers = wanted([len(names) for names in ids], [float(weight or 0) for weight in weights], most_repeats)
    used: dict[str, int] = {}
    for names, number in zip(ids, numbers, strict=True):
        used.update(zip(names, times(list(names.values()), number, seed), strict=True))
    return used
