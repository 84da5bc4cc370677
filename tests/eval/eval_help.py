"""Helpers of the evaluation tests: decode with small buckets, train a head for a moment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference.families import REFERENCES

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.decode import Answer, decode, slots_needed
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import DRAFTERS, Drafter
from headstart.heads.base import Head, HeadConfig
from headstart.heads.batch import FeatureBatch
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.target import Target

#: where kernels run: on a GPU, or in Triton's interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS_RUN = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="needs a GPU or TRITON_INTERPRET=1")
KERNEL_DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]

VOCAB = 61
CONTEXTS = [[5, 6, 7, 8, 9, 10, 11], [11, 12], [13] * 9 + [20, 21, 22]]
NEW_TOKENS = 30


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """A kernel's result is finite and its eager twin's but for rounding."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    distance = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert torch.isfinite(actual).all() and float(distance) < tolerance


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise).to(DEVICE, dtype)


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """While open, tensors that are made empty hold NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(
    target: Target,
    drafter: Drafter | None,
    contexts: list[list[int]] = CONTEXTS,
    max_new_tokens: int | list[int] = NEW_TOKENS,
    stops: set[int] | list[set[int]] = frozenset(),  # type: ignore[assignment]
    sampling: Sampling | None = None,
    seed: int = 0,
    scheduler: Scheduler = KEEP_ALL,
    **options: Any,
) -> list[Answer]:
    """Decode with small buckets and chunks, so that their edges are crossed."""
    longest_answer = max_new_tokens if isinstance(max_new_tokens, int) else max(max_new_tokens)
    capacity = slots_needed(max(map(len, contexts)), longest_answer, drafter)
    engine = Engine(target.model, len(contexts), capacity, **{"bucket": 8, "prefill_chunk": 4, **options})
    generator = torch.Generator().manual_seed(seed)
    stop_ids = stops if isinstance(stops, list) else set(stops)
    sampling = sampling or Sampling()
    decoded = decode(engine, contexts, drafter, sampling, max_new_tokens, stop_ids, generator, scheduler=scheduler)
    return decoded.answers


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@torch.no_grad()
def gaps_of(target: Target, context: list[int], answer: Answer) -> list[float]:
    """The target's top-1 minus top-2 logit at every token of an answer, from one forward over all of it."""
    tokens = torch.tensor([[*context, *answer.tokens]])
    logits_TV = target.model(input_ids=tokens, use_cache=False).logits[0, len(context) - 1 : -1]
    top_T2 = logits_TV.topk(2).values
    return (top_T2[:, 0] - top_T2[:, 1]).tolist()


def check_cycles(answers: list[Answer]) -> None:
    """What every cycle must say of itself, and that they add up to the answers."""
    for answer in answers:
        assert sum(cycle.committed for cycle in answer.cycles) == len(answer.tokens) - 1
        for cycle in answer.cycles[:-1]:
            assert cycle.committed == cycle.accepted + 1
        for cycle in answer.cycles:
            assert 0 <= cycle.accepted <= cycle.drafted
            assert 0 <= cycle.committed - cycle.accepted <= 1


def word_tokenizer(special: Sequence[str] = ()) -> Any:
    """One token per word "w<number>"; roles are tokens 1 (user) and 2 (assistant), 3 ends a message."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('w1 ' if m.role == 'user' else 'w2 ') + m.content + ' w3 ' }}{% endfor %}"
        "{% if add_generation_prompt %}w2{% endif %}"
    )
    return tokenizer


def memory_for_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger batches run out of memory."""
    original = Decoder.run

    def run(self: Decoder, contexts: list[list[int]], *rest: Any, **options: Any) -> Any:
        if (options.get("rows") or len(contexts)) > 2:
            raise torch.OutOfMemoryError("no more")
        return original(self, contexts, *rest, **options)

    monkeypatch.setattr(Decoder, "run", run)


@dataclass(frozen=True)
class Trained:
    """A head and the pack it was trained on: contexts with their greedy answers as the one supervised turn."""

    head: Head
    batch: FeatureBatch


@torch.enable_grad()
def train_briefly(target: Target, answers: list[Answer], family: str, config: HeadConfig | None = None) -> Trained:
    """Fit a small head to the greedy answers, so that drafts are sometimes right and sometimes wrong.

    Args:
        family: a name of DRAFTING_HEADS.
        config: of the head; None takes the family's small one, or the variant that `family` names.
    """
    torch.manual_seed(1)
    family, _, variant = family.partition(", ")
    reference = REFERENCES[family]
    fields = reference.variants[variant] if variant else {}
    head = build_head(config or replace(reference.small(VOCAB), **fields), target.dims)
    size, draft_ids = head.draft_vocab_size, None
    if size is not None:
        # some tokens that are said cannot be drafted
        said = sorted({token for answer in answers for token in answer.tokens})
        others = [token for token in range(VOCAB) if token not in said]
        draft_ids = torch.tensor(sorted((said[1:] + others)[:size]))
    head.initialise(target.ends, draft_ids)
    documents = []
    for context, answer in zip(CONTEXTS, answers, strict=True):
        turn = torch.tensor([-1] * len(context) + [0] * len(answer.tokens))
        documents.append((torch.tensor([*context, *answer.tokens]), turn))
    batch = target.extract(FeatureBatch.pack(documents, head.depth), head.spec)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(reference.steps * (2 if variant else 1)):
        result = head.loss(batch, target.teacher)
        (result.sum_T / result.count_T.clamp(min=1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(head.eval(), batch)


#: names of heads that decode differently → their family: the families themselves, and "family, variant"
DRAFTING_HEADS = {family: family for family in FAMILIES} | {
    f"{family}, {variant}": family for family in FAMILIES for variant in REFERENCES[family].variants
}
#: (name in DRAFTING_HEADS, tree kind) of everything that they draft
HEAD_TREES = [(name, kind) for name, family in DRAFTING_HEADS.items() for kind in DRAFTERS[family].kinds]
#: (family, tree kind) of every head family that evaluation drafts with
FAMILY_TREES = [(family, kind) for family in FAMILIES if family in DRAFTERS for kind in DRAFTERS[family].kinds]


def tree_of(kind: str) -> TreeConfig:
    return TreeConfig(kind=kind, depth=4, k=3, total_tokens=12)
