"""Acceptance walked over known answers, against a cycle-by-cycle loop."""

from __future__ import annotations

import random

import pytest
import torch
from reference.tiny import turns_of
from torch import Tensor

from headstart.heads.acceptance import answer_rows, find_cycles, walk
from headstart.heads.batch import FeatureBatch

PATTERNS = ["..AAAAAA.BCCC", ".", "AAAA", "...AABBBBB", ".A", "....AAA", "AB", "....AAAAAAAAAAAAAAAA.BB"]


def turns(pattern: str) -> Tensor:
    return torch.tensor(turns_of(pattern))


def pack(patterns: list[str], depth: int, pad_to: int = 0, answers: list[Tensor] | None = None) -> FeatureBatch:
    documents = [(torch.zeros(len(p), dtype=torch.int64), turns(p)) for p in patterns]
    return FeatureBatch.pack(documents, depth, pad_to, answers=answers)


def naive(patterns: list[str], run_of: dict[tuple[int, int], int], depth: int) -> tuple[int, int]:
    """(tokens, cycles), answer by answer; `run_of` maps (document, row) to right drafts in a row."""
    tokens = cycles = 0
    for document, pattern in enumerate(patterns):
        for letter in "ABC":
            rows = [t for t, found in enumerate(pattern) if found == letter]
            if not rows:
                continue
            # the row whose root is the answer's first token; one without a prompt starts from its second
            at, last = max(rows[0] - 1, 0), rows[-1] - 1
            while at < last:
                kept = min(min(run_of[document, at], depth) + 1, last - at)
                tokens, cycles, at = tokens + kept, cycles + 1, at + kept
    return tokens, cycles


def test_the_worked_example():
    hits = torch.tensor([2, 0, 0, 1, 0, 0, 0])
    left, first = answer_rows(turns(".AAAAAA"), torch.zeros(7, dtype=torch.int64))
    assert left.tolist() == [5, 4, 3, 2, 1, 0, 0] and first.tolist() == [True] + [False] * 6
    kept, starts = find_cycles(hits, left, first)
    assert kept.tolist() == [3, 1, 1, 2, 1, 0, 0]
    assert starts.nonzero()[:, 0].tolist() == [0, 3]


@pytest.mark.parametrize("seed", range(8))
def test_equals_a_loop_over_answers_whatever_is_packed_and_padded(seed: int):
    rng = random.Random(seed)
    patterns = rng.sample(PATTERNS, len(PATTERNS))
    depth, chain = rng.choice([(1, 1), (3, 3), (4, 2), (5, 9)])
    batch = pack(patterns, depth, pad_to=80)
    anchors = batch.anchors
    # what a head's loss says is never deeper than the row is supervised
    run_A = torch.tensor([rng.randint(0, int(depths)) for depths in anchors.depths_A])
    places = zip(batch.doc_R[anchors.row_A].tolist(), batch.position_R[anchors.row_A].tolist(), strict=True)
    expected = naive(patterns, dict(zip(places, run_A.tolist(), strict=True)), chain)
    assert expected[1] > 10
    assert walk(run_A, batch, chain).tolist() == list(expected)
    # fixed shapes: padding anchors say nothing
    padded = batch.padded(90, len(anchors) + 7, 12)
    run_A = torch.cat([run_A, torch.zeros(7, dtype=torch.int64)])
    assert walk(run_A, padded, chain).tolist() == list(expected)


def test_answers_alone_are_walked_where_prompts_train_as_well():
    """`data.supervise=all`: a run may go on beyond the answer's end, which ends the cycle."""
    patterns = ["..AAAA..BBB", ".AA"]
    answers = [turns(pattern) for pattern in patterns]
    documents = [(torch.zeros_like(answer), torch.zeros_like(answer)) for answer in answers]
    batch = FeatureBatch.pack(documents, 3, answers=answers)
    run_A = batch.anchors.depths_A.clone()
    # 3 + 2 + 1 tokens after the answers' first ones, one cycle each
    assert walk(run_A, batch, 3).tolist() == [6.0, 3.0]
    assert walk(torch.zeros_like(run_A), batch, 3).tolist() == [6.0, 6.0]
    padded = batch.padded(20, len(run_A) + 2, 4)
    assert walk(torch.cat([run_A, run_A.new_zeros(2)]), padded, 3).tolist() == [6.0, 3.0]


def test_subsampled_rows_are_not_walked():
    batch = pack(PATTERNS, 3).subsampled((1.0, 0.5, 0.3), seed=0)
    assert walk(batch.anchors.depths_A, batch, 3).tolist() == [0.0, 0.0]
