"""Which conversations are held out, and that nothing of theirs stays in training.

Sides are chosen by the content of the first prompt, so that what repeats it goes with it: the same conversation logged
again, several answers to one prompt, a log of a conversation that grew, the samples that a rewriting template makes of
one conversation. The choice depends on (seed, prompt) alone: more data moves no conversation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart.data.records import Conversation
from headstart.data.samples import Sample
from headstart.heads.errors import ConfigError

#: changes with the rule below: a run that an older rule split is made again, because the new one would evaluate it on
#: what it was trained on
SPLIT_RULE = "first prompt, without copies"
#: fewer held-out prompts than this do not tell two heads apart: told
FEWEST_HELD_OUT = 20
#: tokens of an answer that counts as a copy whatever it answers. Shorter ones ("Yes.", a number, a label) are given to
#: unrelated prompts; they count as copies after the same context only
SHORTEST_COPY = 16


def prompt_key(conversation: Conversation) -> str:
    """Hash of what the first answer answers: all messages before it, white space aside; later turns do not matter.

    An assistant's greeting before the first user message belongs to the prompt. Of a record without messages it is the
    token ids of its first prompt.
    """
    if not conversation.messages:
        ids = conversation.turns[0].prompt_ids if conversation.turns else conversation.prompt_token_ids
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:32]
    prompt: list[dict[str, Any]] = []
    for message in conversation.messages:
        if message["role"] == "assistant" and any(m["role"] == "user" for m in prompt):
            break
        content = message.get("content")
        prompt.append({**message, "content": " ".join(content.split()) if isinstance(content, str) else content})
    text = json.dumps(prompt, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass
class Split:
    """Samples of both sides, and what was done to part them.

    Attributes:
        prompts, held_out_prompts: different first prompts in all, and held out; where the held-out conversations have
            files of their own, `prompts` are those of the training files.
        copies: ids of samples that left training because they repeat held-out text.
        shared_prompts: first prompts that are on both sides (held-out files of their own only).
        given: whether the held-out conversations have files of their own.
        wanted: whether any are to be held out.
    """

    train: list[Sample]
    held_out: list[Sample]
    prompts: int = 0
    held_out_prompts: int = 0
    copies: list[str] = field(default_factory=list)
    shared_prompts: int = 0
    given: bool = False
    wanted: bool = True

    def lines(self) -> list[str]:
        """In words, one fact a line."""
        lines = []
        if self.copies:
            named = ", ".join(self.copies[:3]) + (", …" if len(self.copies) > 3 else "")
            lines.append(f"{len(self.copies)} samples left training, they repeat held-out text ({named})")
        if self.shared_prompts:
            lines.append(f"{self.shared_prompts} held-out prompts are in training too, with other answers")
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
        what = f"{found} different held-out prompts, fewer than {FEWEST_HELD_OUT}: numbers on them vary by chance"
        if self.given:
            return f"{what}; add conversations to data.held_out"
        fraction = math.ceil(100 * 1.2 * FEWEST_HELD_OUT / self.prompts) / 100
        if fraction > 0.3:
            return f"{what}; of {self.prompts} prompts more cannot be spared: give more conversations, or data.held_out"
        return f"{what}; set data.held_out_fraction={fraction:g} or data.held_out"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rule": SPLIT_RULE,
            "prompts": self.prompts,
            "held_out_prompts": self.held_out_prompts,
            "shared_prompts": self.shared_prompts,
            "copies": self.copies,
        }


def split_held_out(samples: Sequence[Sample], fraction: float, seed: int = 0) -> Split:
    """Part off about `fraction` of the first prompts with all their conversations.

    Where a positive fraction of few prompts is none, the one that comes first by its hash is held out; of one prompt
    none is.
    Raises: ConfigError when a positive fraction leaves the training side empty.
    """
    keys = [_key(sample) for sample in samples]
    shares = {key: int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8], "big") / 2**64 for key in keys}
    wanted = fraction > 0
    least = min(shares.values(), default=0.0)
    if 0.0 < fraction <= least and len(shares) > 1:
        fraction = math.nextafter(least, 1.0)
    elif len(shares) == 1:
        fraction = 0.0
    held = [sample for sample, key in zip(samples, keys, strict=True) if shares[key] < fraction]
    train = [sample for sample, key in zip(samples, keys, strict=True) if shares[key] >= fraction]
    if samples and not train:
        raise ConfigError(
            f"data.held_out_fraction: {fraction} of {len(shares)} prompts leaves none to train on: lower it"
        )
    kept, copies = without_copies(train, held)
    count = sum(share < fraction for share in shares.values())
    return Split(kept, held, len(shares), count, copies, wanted=wanted)


def given_held_out(train: Sequence[Sample], held_out: Sequence[Sample]) -> Split:
    """The split where the held-out conversations have files of their own (`data.held_out`)."""
    kept, copies = without_copies(train, held_out)
    held_keys = {_key(sample) for sample in held_out}
    keys = {_key(sample) for sample in train}
    shared = len(held_keys & {_key(sample) for sample in kept})
    return Split(kept, list(held_out), len(keys), len(held_keys), copies, shared, given=True)


def _key(sample: Sample) -> str:
    return str(sample.meta.get("prompt_key", sample.id))


def without_copies(train: Sequence[Sample], held_out: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Training samples none of whose answers is one of the held-out samples', and the ids of the others.

    An answer is a copy when it is equal token by token and follows the same context, or has SHORTEST_COPY tokens.
    """
    known = {text for sample in held_out for text in _answers(sample)}
    kept: list[Sample] = []
    copies: list[str] = []
    for sample in train:
        if known and not known.isdisjoint(_answers(sample)):
            copies.append(sample.id)
        else:
            kept.append(sample)
    return kept, copies


def _answers(sample: Sample) -> Iterator[bytes]:
    """Hash of every answer with all that is before it, and of those long enough by themselves."""
    tokens, turns = sample.token_ids.astype("<i4"), sample.turn_ids
    edges = np.flatnonzero(np.diff(turns, prepend=-1, append=-1))
    context, done = hashlib.blake2b(b"context", digest_size=16), 0
    for start, stop in zip(edges, edges[1:], strict=False):
        if turns[start] < 0:
            continue
        context.update(tokens[done:stop].tobytes())
        done = stop
        yield context.digest()
        if stop - start >= SHORTEST_COPY:
            yield hashlib.blake2b(tokens[start:stop].tobytes(), digest_size=16).digest()
