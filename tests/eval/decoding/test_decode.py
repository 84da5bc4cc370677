"""The decode loop: speculation commits exactly what plain decoding does, whatever the drafter says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, NEW_TOKENS, VOCAB, check_cycles, gaps_of, run, tokens_of
from torch import Tensor

from headstart.eval.decoding.decode import Answer, decode
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters.ngram import NgramDrafter
from headstart.eval.tree import Tree, chain
from headstart.heads.targets.target import Target


class Scripted:
    """Test drafters that know each row's future: `kind` says what they make of it."""

    name, spec, prepare_s = "scripted", None, 0.0

    def __init__(self, kind: str, futures: list[list[int]], depth: int = 4):
        self.kind, self.futures, self.depth = kind, futures, depth
        self.max_nodes = depth if kind in ("right", "wrong", "ragged") else 3 * depth
        self.noise = torch.Generator().manual_seed(5)

    def start(self, context: Rows, capacity: int) -> None:
        self.at = [0] * len(self.futures)

    def commit(self, accepted: Rows) -> None:
        self.at = [at + count for at, count in zip(self.at, accepted.count_B.tolist(), strict=True)]

    def future(self, row: int) -> list[int]:
        # the root is futures[row][at]; what follows is to be drafted
        future = self.futures[row][self.at[row] + 1 :][: self.depth]
        return future + [0] * (self.depth - len(future))

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        right = torch.tensor([self.future(row) for row in range(len(self.futures))])
        batch, depth = right.shape
        if self.kind == "right":
            return chain(right)
        if self.kind == "wrong":
            return chain((right + 1) % VOCAB)
        if self.kind == "ragged":
            lengths = torch.randint(0, depth + 1, (batch, 1), generator=self.noise)
            return chain(right, torch.arange(depth) < lengths)
        # three siblings per level under the right node of the level above, in random order; "random" has no right ones
        tokens = torch.randint(0, VOCAB, (batch, depth, 3), generator=self.noise)
        lucky = torch.randint(0, 3, (batch, depth, 1), generator=self.noise)
        if self.kind == "tree":
            tokens = tokens.scatter(2, lucky, right[:, :, None])
        above = torch.cat([torch.full((batch, 1, 1), -1), (torch.arange(depth) * 3)[:, None] + lucky], 1)[:, :depth]
        parent = above.expand(batch, depth, 3)
        level = torch.arange(1, depth + 1)[:, None].expand(batch, depth, 3)
        flat = lambda x: x.reshape(batch, -1)  # noqa: E731
        return Tree(flat(tokens), flat(parent), flat(level), torch.ones((batch, 3 * depth), dtype=torch.bool), depth)


KINDS = ("right", "wrong", "ragged", "tree", "random")


@pytest.mark.parametrize(("limit", "cycles"), [(1, 0), (6, 5)])
def test_decoding_takes_until_the_last_token_is_there(target: Target, limit: int, cycles: int) -> None:
    engine = Engine(target.model, 3, 60, bucket=8)
    decoded = decode(engine, CONTEXTS, None, Sampling(), limit, set())
    assert len(decoded.cycle_s) == cycles and all(seconds > 0 for seconds in decoded.cycle_s)
    assert decoded.decode_s == pytest.approx(sum(decoded.cycle_s)) and decoded.prefill_s > 0


@torch.no_grad()
def test_plain_decoding_equals_repeated_full_forwards(target: Target, plain: list[Answer]) -> None:
    for context, answer in zip(CONTEXTS, plain, strict=True):
        tokens = list(context)
        for token in answer.tokens[:12]:
            assert int(target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()) == token
            tokens.append(token)
        assert [cycle.committed for cycle in answer.cycles] == [1] * (NEW_TOKENS - 1)
    # the fixture is only worth something if the answers vary and no two logits nearly tie
    assert len({token for answer in plain for token in answer.tokens}) > 10
    pairs = zip(CONTEXTS, plain, strict=True)
    assert min(gap for context, answer in pairs for gap in gaps_of(target, context, answer)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_drafters(target: Target, plain: list[Answer], kind: str) -> None:
    answers = run(target, Scripted(kind, tokens_of(plain)))
    assert tokens_of(answers) == tokens_of(plain)
    check_cycles(answers)
    forwards = [len(answer.cycles) for answer in answers]
    if kind in ("right", "tree"):
        assert forwards == [math.ceil((NEW_TOKENS - 1) / 5)] * 3
    if kind == "wrong":
        assert forwards == [NEW_TOKENS - 1] * 3


@pytest.mark.parametrize("kind", ["right", "tree", "ragged"])
def test_stop_token_inside_an_accepted_path(target: Target, plain: list[Answer], kind: str) -> None:
    """Different stops per row; rows end in different cycles, one at its very first token, one never."""
    stops = [{plain[0].tokens[7]}, {plain[1].tokens[0]}, {VOCAB - 1} - set(plain[2].tokens)]
    expected = run(target, None, stops=stops)
    assert len(expected[1].tokens) == 1 and expected[1].finish_reason == "stop"
    assert expected[0].tokens[-1] in stops[0] and len(expected[0].tokens) <= 8
    assert expected[2].finish_reason == "length"
    answers = run(target, Scripted(kind, tokens_of(plain)), stops=stops)
    assert tokens_of(answers) == tokens_of(expected)
    assert [a.finish_reason for a in answers] == [a.finish_reason for a in expected]
    check_cycles(answers)


@pytest.mark.parametrize("kind", ["right", "tree"])
def test_length_limits_cut_inside_an_accepted_path(target: Target, plain: list[Answer], kind: str) -> None:
    limits = [1, 9, 13]
    answers = run(target, Scripted(kind, tokens_of(plain)), max_new_tokens=limits)
    for answer, full, limit in zip(answers, plain, limits, strict=True):
        assert answer.tokens == full.tokens[:limit]
    check_cycles(answers)
    # 12 tokens after the first: 5, 5, and 2 of the last 5
    assert [(c.accepted, c.committed) for c in answers[2].cycles] == [(4, 5), (4, 5), (2, 2)]


@pytest.mark.parametrize(
    ("contexts", "limits", "stops"),
    [
        ([[5]], 0, set()),
        ([[5], [6]], [3, 0], set()),
        ([[5], [6]], [3], set()),
        ([[5], [6]], 3, [set()]),
        ([], 3, set()),
    ],
)
def test_limits_that_no_row_can_keep(target: Target, contexts: Any, limits: Any, stops: Any) -> None:
    engine = Engine(target.model, len(contexts), 16)
    with pytest.raises(ValueError, match=f"decode: found {len(contexts)} contexts"):
        decode(engine, contexts, None, Sampling(), limits, stops)


def test_a_row_does_not_depend_on_its_neighbours(target: Target, plain: list[Answer]) -> None:
    for context, answer in zip(CONTEXTS, plain, strict=True):
        alone = run(target, None, contexts=[context], max_new_tokens=10)
        assert alone[0].tokens == answer.tokens[:10]


def test_ngram(target: Target, plain: list[Answer]) -> None:
    answers = run(target, NgramDrafter(4, shortest=1, longest=3))
    assert tokens_of(answers) == tokens_of(plain)
    check_cycles(answers)
    assert any(cycle.accepted for answer in answers for cycle in answer.cycles)
    assert any(cycle.drafted == 0 for answer in answers for cycle in answer.cycles)
