"""Chooses the held-out conversations, and keeps their answers out of training.

The first prompt of a conversation decides. So everything that begins alike is on one side: a conversation that was
logged twice, several answers to one prompt, a conversation that was logged again after it grew, the samples that a
template made of one conversation. The choice depends on (seed, prompt) alone: more data does not move a conversation to
the other side. Prompts that begin too many conversations are the exception; they are not held out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart.data.records.conversation import Conversation, opening
from headstart.data.records.messages import folded
from headstart.data.samples import COPIED, Sample
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, first_names

#: name of the rule below. Change it with the rule: runs that an older rule split are then made again, because the new
#: rule might evaluate them on conversations that they were trained on
SPLIT_RULE = "first prompt, without near copies"
#: the rule with `data.duplicates=keep`, and that of earlier versions
KEEPING_RULE = "first prompt, without copied answers"
#: a warning is shown for fewer held-out prompts than this, which do not tell two heads apart
FEWEST_HELD_OUT = 20
#: the largest share of the prompts that it advises to hold out
LARGEST_FRACTION = 0.3
#: a prompt that begins too many conversations is not held out, because most of the data could go with it. Too many is
#: more than this times the larger of two numbers: conversations to hold out in all, and conversations per prompt
LARGEST = 1.5
#: an answer that is also held out counts as a copy in any context if it has at least so many tokens. Shorter ones
#: ("Yes.", a number, a label) answer unrelated prompts; they count as copies only in the same context
SHORTEST_COPY = 16


#: made once: json.dumps would make an encoder for every prompt
_as_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=str).encode


def prompt_key(conversation: Conversation) -> str:
    """Hash of all messages before the first answer, with white space folded.

    An assistant's greeting before the first user message belongs to the prompt. For a record without messages, it is
    the hash of the token ids of its first prompt.
    """
    if not conversation.messages:
        ids = conversation.turns[0].prompt_ids if conversation.turns else conversation.prompt_token_ids
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:32]
    prompt: list[dict[str, Any]] = []
    for message in opening(conversation.messages):
        prompt.append({**message, "content": folded(message.get("content"))})
    return hashlib.sha256(_as_json(prompt).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass
class Split:
    """Samples of both sides, and counts for the report.

    Attributes:
        prompts, held_out_prompts: number of different first prompts, and of those held out. If the held-out
            conversations have files of their own, `prompts` counts the training files only.
        copied_answers: answers that do not train because they repeat held-out text.
        copies: ids of samples that were removed with them, because they have no other answer.
        large_prompts: first prompts that were not held out because they begin too many conversations.
        shared_prompts: first prompts that are on both sides (held-out files of their own only).
        near_copies: training conversations that were removed → the held-out ones that they are near copies of, by id.
        alike: number of near copies that were left in training, because most of it is such copies.
        rule: name of the rule.
        given: whether the held-out conversations have files of their own.
        wanted: whether the recipe asks for held-out conversations.
    """

    train: list[Sample]
    held_out: list[Sample]
    prompts: int = 0
    held_out_prompts: int = 0
    copied_answers: int = 0
    copies: list[str] = field(default_factory=list)
    large_prompts: int = 0
    shared_prompts: int = 0
    near_copies: dict[str, str] = field(default_factory=dict)
    alike: int = 0
    given: bool = False
    wanted: bool = True
    rule: str = SPLIT_RULE

    def lines(self) -> list[str]:
        """In words, one fact a line."""
        lines = []
        if self.copied_answers:
            lines.append(f"{counted(self.copied_answers, 'answers')} left training for repeating held-out text")
        if self.copies:
            named = first_names(self.copies)
            gone = counted(len(self.copies), "samples")
            lines.append(f"{gone} left training because of it, having no other answer ({named})")
        if self.near_copies:
            gone = counted(len(self.near_copies), "conversations")
            lines.append(f"{gone} left training as near copies of held-out ones")
        if self.alike:
            lines.append(
                f"WARNING: {self.alike} conversations, most of those that train, are near copies of held-out ones, so "
                "none of them left. Numbers on held-out conversations say little about other text: set data.held_out "
                "to other conversations, or data.duplicates=near to remove near copies everywhere"
            )
        if self.large_prompts:
            large = counted(self.large_prompts, "first prompts")
            lines.append(f"{large} not held out: too many conversations begin so")
        if self.shared_prompts:
            lines.append(f"{counted(self.shared_prompts, 'held-out prompts')} in training too, with other answers")
        if warning := self._warning():
            lines.append(f"WARNING: {warning}")
        return lines

    def _warning(self) -> str | None:
        found = self.held_out_prompts
        if found >= FEWEST_HELD_OUT or not self.wanted:
            return None
        if self.prompts == 1 and not self.given:
            return (
                "all conversations begin with the same prompt, so none is held out: set data.held_out to files of "
                "other conversations"
            )
        if self.given and not found:
            return (
                "nothing is held out, because data.held_out gives no conversation that can be used: correct it, or "
                "leave it empty to split off data.held_out_fraction"
            )
        what = f"fewer than {FEWEST_HELD_OUT} different held-out prompts ({found}): numbers on so few vary by chance"
        if self.given:
            return f"{what}; add conversations to data.held_out"
        fraction = math.ceil(100 * 1.2 * FEWEST_HELD_OUT / self.prompts) / 100
        if fraction <= LARGEST_FRACTION:
            return f"{what}; set data.held_out_fraction={fraction:g} or data.held_out"
        remedy, most = "give more conversations, or data.held_out", int(LARGEST_FRACTION * self.prompts)
        if most > found:
            return f"{what}; data.held_out_fraction={LARGEST_FRACTION:g} holds out about {most}; for more, {remedy}"
        return f"{what}; of {counted(self.prompts, 'prompts')} more cannot be spared: {remedy}"

    def as_dict(self) -> dict[str, Any]:
        facts = (
            "rule", "prompts", "held_out_prompts", "shared_prompts", "large_prompts", "copied_answers", "copies",
            "near_copies", "alike",
        )  # fmt: skip
        return {name: getattr(self, name) for name in facts}


def split_held_out(samples: Sequence[Sample], fraction: float, seed: int = 0) -> Split:
    """Hold out about `fraction` of the first prompts with all their conversations.

    Prompts that begin too many conversations (LARGEST) stay in training. If there are so few prompts that the fraction
    selects none, one is held out; a single prompt stays in training.
    Raises: ConfigError when a positive fraction leaves the training side empty.
    """
    keys = [_key(sample) for sample in samples]
    pairs = zip(keys, samples, strict=True)
    conversations = {(key, sample.meta.get("conversation", sample.id)) for key, sample in pairs}
    counts, wanted = Counter(key for key, _ in conversations), fraction > 0
    most = LARGEST * max(fraction, 1 / max(len(counts), 1)) * len(conversations)
    large = sum(count > most for count in counts.values())
    shares = {key: _share(key, seed) for key, count in counts.items() if count <= most}
    least = min(shares.values(), default=0.0)
    if 0.0 < fraction <= least and len(counts) > 1:
        fraction = math.nextafter(least, 1.0)
    elif len(counts) == 1:
        fraction = 0.0
    held_keys = {key for key, share in shares.items() if share < fraction}
    held = [sample for sample, key in zip(samples, keys, strict=True) if key in held_keys]
    train = [sample for sample, key in zip(samples, keys, strict=True) if key not in held_keys]
    if samples and not train:
        raise ConfigError(
            f"data.held_out_fraction: {fraction} of {counted(len(counts), 'prompts')} leaves none to train on: lower it"
        )
    kept, answers, copies = without_copies(train, held)
    return Split(kept, held, len(counts), len(held_keys), answers, copies, large if wanted else 0, wanted=wanted)


def _share(key: str, seed: int) -> float:
    """A number in [0, 1) that the key and the seed decide."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8], "big") / 2**64


def given_held_out(train: Sequence[Sample], held_out: Sequence[Sample]) -> Split:
    """The split where the held-out conversations have files of their own (`data.held_out`)."""
    kept, answers, copies = without_copies(train, held_out)
    held_keys = {_key(sample) for sample in held_out}
    keys = {_key(sample) for sample in train}
    shared = len(held_keys & {_key(sample) for sample in kept})
    return Split(kept, list(held_out), len(keys), len(held_keys), answers, copies, shared_prompts=shared, given=True)


def rule_of(duplicates: str | None) -> str:
    """The rule's name for a value of `data.duplicates`."""
    if duplicates == "near":
        return f"{SPLIT_RULE}, without near duplicates"
    return KEEPING_RULE if duplicates == "keep" else SPLIT_RULE


def prompts_of(samples: Sequence[Sample]) -> set[str]:
    """The different first prompts."""
    return set(map(_key, samples))


def _key(sample: Sample) -> str:
    return str(sample.meta.get("prompt_key", sample.id))


def without_copies(train: Sequence[Sample], held_out: Sequence[Sample]) -> tuple[list[Sample], int, list[str]]:
    """Training samples in which answers that are also held out are not supervised.

    An answer is a copy if its tokens equal those of a held-out answer and it follows the same context or has at least
    SHORTEST_COPY tokens. Other answers of its conversation still train: many conversations end with the same thanks.
    Returns: the samples, the number of copied answers, and the ids of samples that were removed because they have no
        other answer.
    """
    known = {digest for sample in held_out for _, _, digests in _answer_spans(sample) for digest in digests}
    kept: list[Sample] = []
    copies: list[str] = []
    answers = 0
    for sample in train:
        copied = [(start, stop) for start, stop, digests in _answer_spans(sample) if not known.isdisjoint(digests)]
        if copied:
            answers += len(copied)
            turn_ids = sample.turn_ids.copy()
            for start, stop in copied:
                turn_ids[start:stop] = COPIED
            sample = sample.with_turns(turn_ids)
            if not sample.supervised:
                copies.append(sample.id)
                continue
        kept.append(sample)
    return kept, answers, copies


def _answer_spans(sample: Sample) -> Iterator[tuple[int, int, list[bytes]]]:
    """(first token, token after the last, digests) of every answer.

    The digests are that of the answer with everything before it and, if it is long enough, that of the answer alone.
    """
    tokens, turns = sample.token_ids.astype("<i4"), sample.turn_ids
    edges = np.flatnonzero(np.diff(turns, prepend=-1, append=-1)).tolist()
    context, done = hashlib.blake2b(b"context", digest_size=16), 0
    for start, stop in zip(edges, edges[1:], strict=False):
        if turns[start] < 0:
            continue
        context.update(tokens[done:stop].tobytes())
        done = stop
        digests = [context.digest()]
        if stop - start >= SHORTEST_COPY:
            digests.append(hashlib.blake2b(tokens[start:stop].tobytes(), digest_size=16).digest())
        yield start, stop, digests
