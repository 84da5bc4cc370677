"""Sampling through the whole decode loop: thousands of rows against the target's exact distribution, by enumeration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from eval_help import DRAFTING_HEADS, FAMILY_TREES, run, tokens_of
from reference.families import REFERENCES
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.sampling import Sampling, probabilities
from headstart.eval.drafters import build_drafter
from headstart.heads.base import Head
from headstart.heads.families import build_head
from headstart.heads.targets.target import Target

WORDS = 12
ROWS = 2000
#: tokens compared: later ones follow KV that accepted paths were moved into
TOKENS = 4
CONTEXT = [3, 7, 1, 7, 1]
Joint = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def small() -> Target:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None, bos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    return Target.from_model(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def heads(small: Target) -> dict[str, Head]:
    """Untrained: what they draft does not matter to the distribution, and by chance some of it is accepted."""
    made: dict[str, Head] = {}
    for name, family in DRAFTING_HEADS.items():
        torch.manual_seed(5)
        config: Any = REFERENCES[family].small(WORDS)
        fields = REFERENCES[family].variants.get(name.removeprefix(f"{family}, "), {})
        if "draft_vocab_size" in fields:
            fields = {**fields, "draft_vocab_size": min(fields["draft_vocab_size"], WORDS - 2)}
        head = build_head(replace(config, **fields), small.dims)
        size = head.draft_vocab_size
        # words 4 and 9 are never drafted
        draft_ids = None if size is None else torch.tensor([n for n in range(WORDS) if n % 5 != 4][:size])
        head.initialise(small.ends, draft_ids)
        made[name] = head.eval()
    return made


PROCESSORS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.15},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.03, "repetition_penalty": 1.2},
    "token by token": {"temperature": 1.0, "verification": "token"},
}
#: kinds of trees that hold what a head finds most likely, level by level: an untrained one is rarely right twice
LIKELIEST = ("ddtree",)
#: head (None = n-gram), tree, whether two drafts of a cycle are right now and then: drawn ones are, and most trees'
WAYS: list[tuple[str | None, str, bool]] = [(family, kind, kind not in LIKELIEST) for family, kind in FAMILY_TREES]
WAYS += [(family, kind, False) for family, kind in FAMILY_TREES if kind == "chain"]
WAYS += [(None, "chain", False)]
#: drafters of the same families that compute q otherwise
VARIANTS = [(name, "chain", True) for name, family in DRAFTING_HEADS.items() if name != family]


@pytest.fixture(scope="module")
def exact_joint(small: Target) -> Callable[[Sampling], Joint]:
    """The probability of every answer of `TOKENS` tokens, by enumeration."""
    return cache(partial(enumerated, small))


@torch.no_grad()
def enumerated(target: Target, sampling: Sampling) -> Joint:
    joint: Joint = {(): 1.0}
    for _ in range(TOKENS):
        paths = list(joint)
        tokens = torch.tensor([[*CONTEXT, *path] for path in paths])
        logits = target.model(input_ids=tokens, use_cache=False).logits[:, -1]
        seen = torch.zeros((len(paths), WORDS), dtype=torch.bool).scatter_(1, tokens, True)
        p = probabilities(logits, sampling, seen)
        joint = {
            (*path, token): joint[path] * p[row, token].item()
            for row, path in enumerate(paths)
            for token in torch.nonzero(p[row])[:, 0].tolist()
        }
    return joint


def deviation(answers: list[Answer], joint: Joint) -> float:
    """Pearson's χ² as a standard normal deviate (Wilson and Hilferty's cube root); rare outcomes count as one.

    Infinite when something was said that the target never says.
    """
    counts = Counter(tuple(answer.tokens) for answer in answers)
    if not set(counts) <= set(joint):
        return math.inf
    total = len(answers)
    cells = [(counts[path], p * total) for path, p in joint.items() if p * total >= 5]
    left = total - sum(count for count, _ in cells), total - sum(expected for _, expected in cells)
    if left[1] >= 5:
        cells.append(left)
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    assert freedom > 20
    scale = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - scale)) / math.sqrt(scale)


def sample(
    target: Target, head: Head | None, kind: str, drawn: bool, settings: dict[str, Any], rows: int = ROWS
) -> list[Answer]:
    paths = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]] if kind == "static" else None
    tree = TreeConfig(kind=kind, depth=3, k=2, total_tokens=7, sample=drawn, paths=paths)
    config = EvalConfig(tree=tree, drafter="auto" if head is not None else "ngram", **settings)
    return run(
        target, build_drafter(head, config), [CONTEXT] * rows, TOKENS, sampling=Sampling.from_config(config), seed=17,
        bucket=16, prefill_chunk=16,
    )  # fmt: skip


#: every drafter with none and with all of them; one drafter of each verification rule with each
CASES = [(*drafter, name) for drafter in WAYS + VARIANTS for name in ("temperature 1", "all")]
CASES += [(*one, name) for one in {kind: (head, kind, drawn) for head, kind, drawn in WAYS if head and drawn}.values()
          for name in ("top-k", "top-p", "min-p")]  # fmt: skip
#: the other lossless rule of drawn chains
CASES += [("eagle3", "chain", True, "token by token")]


@pytest.mark.parametrize(("family", "kind", "drawn", "processors"), CASES)
def test_output_has_the_targets_distribution(
    small: Target, heads: dict[str, Head], exact_joint: Callable[[Sampling], Joint], family: str | None, kind: str,
    drawn: bool, processors: str,
) -> None:  # fmt: skip
    settings = PROCESSORS[processors]
    answers = sample(small, heads[family] if family else None, kind, drawn, settings)
    # beyond 5 a right loop comes once in three million seeds
    assert deviation(answers, exact_joint(Sampling(**settings))) < 5
    accepted = [cycle.accepted for answer in answers for cycle in answer.cycles if cycle.drafted]
    # what an untrained head says most is rarely right; tokens that are drawn are right by chance
    assert min(accepted) == 0 and max(accepted) >= (2 if drawn else 1)


def test_a_wrong_distribution_is_noticed(
    small: Target, heads: dict[str, Head], exact_joint: Callable[[Sampling], Joint]
) -> None:
    """Typical acceptance, a temperature off by a tenth, and verification that forgets min-p all deviate."""
    plain = {"temperature": 1.0}
    joint = exact_joint(Sampling(**plain))
    lossy = sample(small, heads["medusa"], "static", True, {**plain, "acceptance": "typical"})
    assert deviation(lossy, joint) > 5
    assert deviation(sample(small, heads["eagle3"], "chain", True, {"temperature": 0.9}), joint) > 5
    filtered = exact_joint(Sampling(temperature=1.0, min_p=0.15))
    assert deviation(sample(small, heads["eagle3"], "chain", True, plain), filtered) == math.inf


@pytest.mark.parametrize(("family", "kind", "drawn"), WAYS)
def test_seeds_reproduce(small: Target, heads: dict[str, Head], family: str | None, kind: str, drawn: bool) -> None:
    head = heads[family] if family else None
    first, again = (sample(small, head, kind, drawn, {"temperature": 1.0}, rows=8) for _ in range(2))
    assert tokens_of(first) == tokens_of(again)
    assert len({tuple(answer.tokens) for answer in first}) > 1
