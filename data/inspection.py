"""What `headstart inspect` shows of a sample: its text token by token, and what each token is to the head.

A supervised token is *drafted* at the depths at which it is a label of some row (heads/positions.py). The first token
of an answer is supervised and never drafted: the target gives it. A token outside the draft vocabulary is not drafted
either, because the head cannot propose it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from headstart.data.prepare import PreparedData
from headstart.data.samples import COPIED, Sample
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.positions import drafted_depths

#: what a token is to the head
PROMPT, COPY, ROOT, DRAFTED, OUTSIDE = "prompt", "copy", "supervised", "drafted", "outside"
#: marks, the hardest to draft last
HARDNESS = (DRAFTED, ROOT, OUTSIDE, PROMPT, COPY)
#: tokens that a character may be made of; what has no text by then is shown as it is
LONGEST_CHARACTER = 8


@dataclass(frozen=True)
class ShownToken:
    """One token of a sample.

    Attributes:
        id: token id.
        text: what the token adds to the text. A character of several tokens belongs to the last of them.
        turn: number of the assistant turn, -1 outside of answers, COPIED in one that repeats held-out text.
        supervised: whether the token is supervised.
        depths: number of depths at which it is a label, 0 … K.
        in_draft_vocabulary: whether the head can propose it.
    """

    id: int
    text: str
    turn: int
    supervised: bool
    depths: int
    in_draft_vocabulary: bool = True

    @property
    def mark(self) -> str:
        """PROMPT: not supervised. COPY: would be, but repeats held-out text. ROOT: supervised, the label of no row.
        OUTSIDE: a label that is not in the draft vocabulary. DRAFTED: a label that the head can propose."""
        if not self.supervised:
            return COPY if self.turn == COPIED else PROMPT
        if not self.depths:
            return ROOT
        return DRAFTED if self.in_draft_vocabulary else OUTSIDE

    def as_json(self) -> dict[str, Any]:
        """Its fields as JSON values. `drafted`, the depths at which the head learns to draft it, replaces `depths`."""
        drafted = self.depths if self.mark == DRAFTED else 0
        values: dict[str, Any] = {"id": self.id, "text": self.text, "turn": self.turn, "supervised": self.supervised}
        return {**values, "drafted": drafted, "in_draft_vocabulary": self.in_draft_vocabulary, "mark": self.mark}


def shown_tokens(sample: Sample, tokenizer: Any, depth: int, draftable_V: Tensor | None = None) -> list[ShownToken]:
    """The tokens of a sample, for a head of K = `depth`.

    Args: draftable_V: bool [V], the draft vocabulary (heads.vocab.membership); None = all tokens.
    """
    tokens_T, turn_T = sample.tensors()
    drafted_T = drafted_depths(turn_T, torch.zeros_like(turn_T), depth)
    inside_T = torch.ones_like(turn_T, dtype=torch.bool) if draftable_V is None else draftable_V[tokens_T]
    turns = sample.turn_ids if sample.answer_ids is None else sample.answer_ids
    ids = tokens_T.tolist()
    texts, supervised = token_texts(ids, tokenizer), (turn_T >= 0).tolist()
    rows = zip(ids, texts, turns.tolist(), supervised, drafted_T.tolist(), inside_T.tolist(), strict=True)
    return [ShownToken(*row) for row in rows]


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """What each token adds to the text; together they are the whole text. Special tokens are shown.

    A token is decoded behind the ones before it, because some tokenizers drop the space in front of a first word.
    """

    def decoded(first: int, past: int) -> str:
        return tokenizer.decode(ids[first:past], clean_up_tokenization_spaces=False)

    texts: list[str] = []
    context = done = 0  # first token of the last text that was whole, and the first token after it
    for past in range(1, len(ids) + 1):
        before, now = decoded(context, done), decoded(context, past)
        whole = not now.endswith("\ufffd") or past == len(ids) or past - done >= LONGEST_CHARACTER
        texts.append(now[len(before) :] if whole else "")
        if whole:
            context, done = done, past
    return texts


def characters(tokens: Iterable[ShownToken]) -> Iterator[ShownToken]:
    """The tokens; those that make one character together become one, with the mark of the hardest to draft of them."""
    parts: list[ShownToken] = []
    for token in tokens:
        parts.append(token)
        if token.text:
            hardest = max(parts, key=lambda part: (HARDNESS.index(part.mark), -part.depths))
            yield replace(hardest, text=token.text)
            parts = []


def pieces(tokens: Iterable[ShownToken]) -> Iterator[tuple[str, bool]]:
    """Consecutive `(text, supervised)` pieces; a new piece also starts where one assistant turn follows another."""
    for (supervised, _), group in groupby(tokens, key=lambda t: (t.supervised, t.turn if t.supervised else -1)):
        yield "".join(token.text for token in group), supervised


def as_json(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """`pieces` [{text, supervised}] and `tokens` [ShownToken.as_json] as JSON values."""
    return {
        "pieces": [{"text": text, "supervised": supervised} for text, supervised in pieces(tokens)],
        "tokens": [token.as_json() for token in tokens],
    }


def find_samples(data: PreparedData, name: str) -> list[Sample]:
    """The samples of the conversation `name`, or the one sample of that id, from both sides of the split.

    Raises: DataError for a conversation that was dropped, with the reason; ConfigError for an unknown id, with the
    nearest ones.
    """
    samples = [*data.train, *data.held_out]
    found = [sample for sample in samples if name in (sample.id, sample.meta.get("conversation"))]
    if found:
        # what a weight repeats has the same tokens
        return list({id(sample.token_ids): sample for sample in reversed(found)}.values())[::-1]
    if (reason := _why_dropped(data, name)) is not None:
        raise DataError(f"--id: {name} was dropped: {reason}")
    known = dict.fromkeys(str(sample.meta.get("conversation", sample.id)) for sample in samples)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    some = f"the nearest are {', '.join(near)}" if near else f"the first are {', '.join(list(known)[:3])}"
    raise ConfigError(f"--id: found {name!r}, expected the id of one of {counted(len(known), 'conversations')}; {some}")


def _why_dropped(data: PreparedData, name: str) -> str | None:
    for gathered in (data.gathered, data.held_out_gathered):
        for kind, copies in (("an exact", gathered.exact), ("a near", gathered.near)) if gathered else ():
            if name in copies:
                return f"it is {kind} duplicate of {copies[name]}"
    if name in data.split.near_copies:
        return f"it is a near copy of {data.split.near_copies[name]}, which is held out"
    dropped = {"repeats held-out text and has no other answer": data.split.copies}
    for report in (data.report, data.held_out_report):
        dropped |= {} if report is None else report.dropped
    return next((reason for reason, names in dropped.items() if name in names), None)
