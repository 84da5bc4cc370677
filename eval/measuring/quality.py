"""How far a tuned target is from the original: perplexity of both on held-out text, and greedy answers of both.

Shapes: A scored rows, D target hidden, V target vocabulary; B documents, T tokens of the longest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.session import Decoder
from headstart.heads.counting import counted
from headstart.heads.ends import Teacher
from headstart.heads.targets.target import Target, length_groups

#: most bytes of float32 logits that exist at once
LOGIT_BYTES = 256 << 20
#: prompts that are answered at once
BATCH = 16

#: a document: its token ids, and whether each token is scored. The first token never is: nothing stands before it.
Scored = tuple[Sequence[int], Sequence[bool]]


@dataclass(frozen=True)
class Perplexity:
    """Cross-entropy of scored tokens.

    Attributes:
        nats: summed over the tokens.
    """

    nats: float
    tokens: int

    @property
    def value(self) -> float:
        """exp of the mean; infinite where it is too large for a float, NaN without tokens."""
        mean = self.nats / self.tokens if self.tokens else math.nan
        return math.inf if mean > 700 else math.exp(mean)


@dataclass(frozen=True)
class Agreement:
    """Greedy answers of both targets to the same prompts.

    Attributes:
        prompts: how many were answered. identical: how many answers are the same.
        common_prefix: mean number of tokens in which both answers agree from the start.
        length_original, length_tuned: mean lengths of the answers in tokens.
        perplexity_own, perplexity_tuned: the original's perplexity over its own answers, and over the tuned target's.
    """

    prompts: int
    identical: int
    common_prefix: float
    length_original: float
    length_tuned: float
    perplexity_own: float
    perplexity_tuned: float


@dataclass(frozen=True)
class Change:
    """Perplexity of both targets on one text.

    Attributes:
        tokens: that were scored.
        perplexity_original, perplexity_tuned: over these tokens.
    """

    tokens: int
    perplexity_original: float
    perplexity_tuned: float

    @property
    def rise(self) -> float:
        """Relative rise of the perplexity; negative where the tuned target predicts better."""
        return self.perplexity_tuned / self.perplexity_original - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rise": self.rise}


@dataclass(frozen=True)
class Quality(Change):
    """What the adapter cost the target. The change itself is that on held-out answers.

    Attributes:
        conversations: how many were held out and scored.
        dtype: of both targets.
        on_prompts: the change on the prompts of the same conversations. Answers alone do not show it where a target
            grows surer of its own answers and worse at everything else. None where no such token was given.
        answers: None where no prompt was answered.
    """

    conversations: int
    dtype: str
    on_prompts: Change | None
    answers: Agreement | None

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "on_prompts": self.on_prompts.to_json() if self.on_prompts else None}


@torch.no_grad()
def perplexity(target: Target, documents: Sequence[Scored], max_tokens: int = 4096) -> Perplexity:
    """Cross-entropy of the scored tokens, each given all tokens before it.

    Args: max_tokens: of one forward over several documents, padding included. A longer document runs alone.
    """
    nats, tokens = 0.0, 0
    for group in length_groups(tuple(len(ids) for ids, _ in documents), max_tokens):
        nats_of_group, tokens_of_group = _score(target, [documents[index] for index in group])
        nats, tokens = nats + nats_of_group, tokens + tokens_of_group
    return Perplexity(nats, tokens)


def _score(target: Target, documents: Sequence[Scored]) -> tuple[float, int]:
    """(Summed cross-entropy, scored tokens) of documents that run in one forward."""
    longest = max(len(ids) for ids, _ in documents)
    tokens_BT = torch.zeros(len(documents), longest, dtype=torch.int64)
    scored_BT = torch.zeros(len(documents), longest, dtype=torch.bool)
    for row, (ids, scored) in enumerate(documents):
        tokens_BT[row, : len(ids)] = torch.as_tensor(ids)
        scored_BT[row, : len(ids)] = torch.as_tensor(scored)
    scored_BT[:, 0] = False
    label_A = tokens_BT[scored_BT].to(target.device)
    if not len(label_A):
        return 0.0, 0
    hidden_BTD, _ = target.forward_documents(tokens_BT.to(target.device), ())
    # the logits of a token are those of the row before it
    before_BT = torch.zeros_like(scored_BT)
    before_BT[:, :-1] = scored_BT[:, 1:]
    hidden_AD = hidden_BTD[before_BT.to(hidden_BTD.device)]
    return cross_entropy(target.teacher, hidden_AD, label_A), len(label_A)


def cross_entropy(teacher: Teacher, hidden_AD: Tensor, label_A: Tensor) -> float:
    """Summed cross-entropy of rows, in nats. The logits of all rows never exist at once."""
    rows = max(LOGIT_BYTES // (4 * teacher.weight_VD.shape[0]), 1)
    total = torch.zeros((), dtype=torch.float64, device=hidden_AD.device)
    for part in torch.arange(len(label_A), device=hidden_AD.device).split(rows):
        logits_PV = teacher.logits(hidden_AD[part]).float()
        total += torch.nn.functional.cross_entropy(logits_PV, label_A[part], reduction="none").double().sum()
    return float(total)


def greedy_answers(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The target's greedy answer to each prompt, by the decode engine; prompts of similar length run together."""
    decoder = Decoder(target, EvalConfig(drafter="none"))
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: list[list[int]] = [[] for _ in prompts]
    for batch in (order[first : first + BATCH] for first in range(0, len(order), BATCH)):
        # a short batch is filled up with one-token answers: another batch size would need other graphs
        missing = min(BATCH, len(prompts)) - len(batch)
        contexts = [list(prompts[index]) for index in batch] + [[prompts[0][0]]] * missing
        room = [max(min(new_tokens, target.positions - len(context)), 1) for context in contexts]
        limits = room[: len(batch)] + [1] * missing
        decoded = decoder.run(contexts, None, limits, 0)
        for index, answer in zip(batch, decoded.answers, strict=False):
            answers[index] = list(answer.tokens)
    return answers


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens in which two answers agree from the start."""
    return len(os.path.commonprefix([list(one), list(other)]))


def measure_quality(
    original: Target,
    tuned: Callable[[], AbstractContextManager[Target]],
    documents: Sequence[Scored],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    say: Callable[[str], None] = lambda line: None,
    prompt_documents: Sequence[Scored] = (),
) -> Quality:
    """Compare a tuned target with the original.

    Args:
        tuned: opens the tuned target; `original` may be unusable meanwhile, because both may share their memory.
        documents: held-out conversations, in which the answers are scored.
        prompts: token ids that both answer greedily, with up to `new_tokens` tokens. None: nothing is answered.
        prompt_documents: the same conversations, in which the text of the prompts is scored.
    """
    asked = counted(len(prompts), "prompts")
    say(f"perplexity of {counted(len(documents), 'held-out conversations')}, greedy answers to {asked}")
    texts = (documents, prompt_documents)
    before, own = [perplexity(original, text) for text in texts], greedy_answers(original, prompts, new_tokens)
    with tuned() as target:
        after, theirs = [perplexity(target, text) for text in texts], greedy_answers(target, prompts, new_tokens)
    answers = None
    if prompts:
        pairs = list(zip(own, theirs, strict=True))
        answers = Agreement(
            prompts=len(prompts),
            identical=sum(one == other for one, other in pairs),
            common_prefix=_mean(common_prefix(one, other) for one, other in pairs),
            length_original=_mean(len(one) for one, _ in pairs),
            length_tuned=_mean(len(other) for _, other in pairs),
            perplexity_own=perplexity(original, _answered(prompts, own)).value,
            perplexity_tuned=perplexity(original, _answered(prompts, theirs)).value,
        )
    dtype = str(original.dtype).removeprefix("torch.")
    on_answers, on_prompts = (
        Change(one.tokens, one.value, other.value) for one, other in zip(before, after, strict=True)
    )
    return Quality(
        tokens=on_answers.tokens,
        perplexity_original=on_answers.perplexity_original,
        perplexity_tuned=on_answers.perplexity_tuned,
        conversations=len(documents),
        dtype=dtype,
        on_prompts=on_prompts if on_prompts.tokens else None,
        answers=answers,
    )


def _answered(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Scored]:
    """Prompts with their answers; the answers are scored."""
    return [
        ([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _mean(values: Iterator[int]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
