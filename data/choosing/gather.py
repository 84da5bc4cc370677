"""Conversations of several sources: without duplicates, within the caps, with counts of what became of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from headstart.data.choosing.duplicates import Originals, content_key, near_duplicates, require_minhash
from headstart.data.choosing.mixing import (
    BY_WEIGHT,
    OVER_CAP,
    SourceCount,
    as_dicts,
    by_source,
    capped,
    counts_of,
    lines_of,
    weighted,
)
from headstart.data.choosing.shingles import ShingleStore, of_messages, shingles
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prompts import prompt_of
from headstart.data.records.conversation import Conversation, opening
from headstart.data.samples import Sample
from headstart.data.sources.rejects import Rejects
from headstart.data.sources.sources import load_conversations
from headstart.heads.errors import first_names

#: reasons for which conversations are not used, as the report has them
EXACT, NEAR = "exact duplicates", "near duplicates"
HELD_OUT_COPY, HELD_OUT_TEXT = "near copies of held-out conversations", "repeat held-out text"
BAD, EXCLUDED = "bad rows", "begin with a prompt of data.exclude"


class Gathered:
    """The conversations of some sources, and what is known of them.

    Args:
        sources: in the order in which they are read. Of duplicates, the first that was read stays.
        config: says what becomes of duplicates.
        excluded: prompts with which no conversation may begin, as sets of hashes.
        watched: other prompts; conversations that begin with one are counted.
    Attributes:
        counts: by source.
        exact, near: duplicate → the conversation that stays, by id.
        begin_watched: number of conversations that begin with a watched prompt or a near copy of it.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        config: DataConfig,
        seed: int,
        excluded: Sequence[np.ndarray] = (),
        watched: Sequence[np.ndarray] = (),
    ):
        self.sources, self.config, self.seed = sources, config, seed
        self._excluded, self._watched = (Originals(sets, config.near_threshold) for sets in (excluded, watched))
        self.begin_watched = 0
        self.counts: list[SourceCount] = counts_of(sources)
        self.exact: dict[str, str] = {}
        self.near: dict[str, str] = {}
        self._mode = config.duplicates or "exact"
        if self._mode == "near":
            require_minhash()
        self._rows: dict[str, int] = {}
        self._keys: list[bytes] = []
        self._said = ShingleStore()

    def conversations(self, rejects: Rejects) -> Iterator[Conversation]:
        """Those that stay, in the order of reading. They are read while they are taken."""
        used: dict[bytes, str] = {}
        bad: Counter[int] = Counter()
        found = load_conversations(self.sources, rejects, bad)
        for source, rows in by_source((conversation.source, conversation) for conversation in found):
            count = self.counts[source]
            kept, left = capped(self._unique(rows, count, used), count.cap, self.seed)
            count.leave(OVER_CAP.format(count.cap), left)
            for conversation, key in kept:
                used[key] = conversation.id
                self._rows[conversation.id] = len(self._keys)
                self._keys.append(key)
                if self._mode != "keep":
                    self._said.add(shingles(conversation))
                self.begin_watched += self._begins(conversation, self._watched)
                yield conversation
        for source, number in bad.items():
            self.counts[source].dropped[BAD] = number
            self.counts[source].read += number

    def _unique(
        self, conversations: Iterable[Conversation], count: SourceCount, used: dict[bytes, str]
    ) -> Iterator[tuple[Conversation, bytes]]:
        """Conversations with their keys, without those that one before them equals.

        Args: used: key → id of the conversations of earlier sources that stay.
        """
        here: dict[bytes, str] = {}
        for conversation in conversations:
            count.read += 1
            if conversation.media is not None:  # its text is not all of it
                yield conversation, hashlib.blake2b(conversation.id.encode(), digest_size=16).digest()
                continue
            if self._begins(conversation, self._excluded):
                count.dropped[EXCLUDED] += 1
                continue
            key = content_key(conversation)
            first = used.get(key, here.get(key))
            if first is not None and self._mode != "keep":
                self.exact[conversation.id] = first
                count.dropped[EXACT] += 1
                continue
            here[key] = conversation.id
            yield conversation, key

    @staticmethod
    def _begins(conversation: Conversation, prompts: Originals) -> bool:
        return bool(prompts.sets) and prompts.copied_by(of_messages(opening(conversation.messages))) is not None

    def add_lost(self, lost: Counter[tuple[int, str]]) -> None:
        """Count conversations that could not be tokenised: (source, reason) → number."""
        for (source, reason), number in lost.items():
            self.counts[source].dropped[reason] += number

    def without_near(self, samples: list[Sample]) -> list[Sample]:
        """The samples of conversations that are no near duplicate of one that stays (`data.duplicates=near`)."""
        if self._mode != "near":
            return samples
        names = list(dict.fromkeys(map(conversation_of, samples)))
        copies = near_duplicates(lambda i: self.said(names[i]), len(names), self.config.near_threshold)
        self.near = {names[one]: names[other] for one, other in copies.items()}
        return self.left_out(samples, self.near.keys(), NEAR)

    def left_out(self, samples: Sequence[Sample], names: Iterable[str], reason: str) -> list[Sample]:
        """The samples without those of the conversations `names`, which are counted."""
        names = set(names)
        sources = {conversation_of(s): s.meta["source"] for s in samples if conversation_of(s) in names}
        for source in sources.values():
            self.counts[source].dropped[reason] += 1
        return [sample for sample in samples if conversation_of(sample) not in names]

    def said(self, name: str) -> np.ndarray:
        """The set of hashes of a conversation: uint32 [S]."""
        return self._said[self._rows[name]]

    def near_copies(self, train: Sequence[Sample], held_out: Sequence[Sample], other: Gathered) -> dict[str, str]:
        """Training conversation → the held-out one that it is a near copy of, by id.

        Args: other: has gathered the held-out conversations.
        """
        if self._mode == "keep" or not held_out:
            return {}
        held = list(dict.fromkeys(map(conversation_of, held_out)))
        originals = Originals([other.said(name) for name in held], self.config.near_threshold)
        found = {name: originals.copied_by(self.said(name)) for name in dict.fromkeys(map(conversation_of, train))}
        return {name: held[number] for name, number in found.items() if number is not None}

    def mixed(self, samples: list[Sample], most_repeats: int = 1) -> list[Sample]:
        """The samples of the conversations that the weights choose, then their repeats, round by round."""
        place = lambda s: (s.meta["source"], conversation_of(s), self._keys[self._rows[conversation_of(s)]])  # noqa: E731
        weights = [source.weight for source in self.sources]
        used = weighted(samples, place, weights, self.seed, most_repeats)
        kept = self.left_out(samples, (name for name, number in used.items() if not number), BY_WEIGHT)
        for name, source in {conversation_of(sample): sample.meta["source"] for sample in kept}.items():
            self.counts[source].repeated += used[name] - 1
        again = [
            sample.renamed(f"{sample.id}#{number}")
            for number in range(2, max(used.values(), default=0) + 1)
            for sample in kept
            if used[conversation_of(sample)] >= number
        ]
        return kept + again

    def lines(self) -> list[str]:
        """In words: duplicates by kind, and what became of each source."""
        lines = []
        for kind, copies in ((EXACT, self.exact), (NEAR, self.near)):
            if copies:
                named = first_names([f"{name} of {first}" for name, first in copies.items()])
                lines.append(f"left out {len(copies)} {kind} ({named})")
        return lines + lines_of(self.counts)

    def as_dict(self) -> dict[str, Any]:
        """For the data report."""
        return {
            "duplicates": {"mode": self._mode, "exact": self.exact, "near": self.near},
            "sources": as_dicts(self.counts),
        }

    def count_trained(self, samples: Sequence[Sample]) -> None:
        """Count what trains in the end."""
        for source in {conversation_of(sample): sample.meta["source"] for sample in samples}.values():
            self.counts[source].trained += 1
        for sample in samples:
            self.counts[sample.meta["source"]].tokens += len(sample)

    def count_held_out(self, samples: Sequence[Sample]) -> None:
        """Count what is held out in the end."""
        for source in {conversation_of(sample): sample.meta["source"] for sample in samples}.values():
            self.counts[source].held_out += 1


def first_prompts(sources: Sequence[SourceConfig], rejects: Rejects) -> list[np.ndarray]:
    """What the conversations or prompts of some sources begin with, as sets of hashes: uint32 [S] each."""
    return [
        of_messages(prompt_of(conversation).first if conversation.asks == "each" else opening(conversation.messages))
        for conversation in load_conversations(sources, rejects)
    ]


def conversation_of(sample: Sample) -> str:
    return str(sample.meta["conversation"])
