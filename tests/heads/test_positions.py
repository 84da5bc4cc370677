"""Which rows train at which depth (methods §0), against the sentence itself."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.documents import is_supervised
from reference.tiny import turns_of

from headstart.heads.batch import FeatureBatch
from headstart.heads.positions import drafted_depths, find_anchors, supervised_depths


def pack(patterns: list[str], depth: int, pad_to: int = 0) -> FeatureBatch:
    documents = [
        (torch.arange(len(pattern), dtype=torch.int64), torch.tensor(turns_of(pattern), dtype=torch.int64))
        for pattern in patterns
    ]
    return FeatureBatch.pack(documents, depth, pad_to)


def expected_depths(patterns: list[str], depth: int, padding: int = 0) -> list[int]:
    out = []
    for pattern in patterns:
        turns = turns_of(pattern)
        out += [sum(is_supervised(turns, t, d) for d in range(1, depth + 1)) for t in range(len(turns))]
    return out + [0] * padding


def depths(batch: FeatureBatch, depth: int) -> list[int]:
    return supervised_depths(batch.turn_R, batch.doc_R, depth).tolist()


def test_worked_example():
    # last prompt token drafts A1 A2; the answer's end is never a root's successor of something else
    assert depths(pack(["..AAA..BB"], 3), 3) == [0, 2, 1, 0, 0, 0, 1, 0, 0]


def test_first_draft_of_every_turn_is_trained():
    assert depths(pack(["..AA..BBB"], 1), 1) == [0, 1, 0, 0, 0, 1, 1, 0, 0]


def test_one_token_turn_trains_nothing():
    assert depths(pack(["..A.BB"], 4), 4) == [0, 0, 0, 1, 0, 0]


def test_adjacent_turns_do_not_run_into_each_other():
    # row 2 (the last token of turn A) is the row from which turn B's root is predicted
    assert depths(pack([".AABBB"], 4), 4) == [1, 0, 2, 1, 0, 0]


def test_document_that_begins_with_an_answer_has_no_row_before_it():
    assert depths(pack(["AAAA"], 4), 4) == [2, 1, 0, 0]


def test_same_turn_number_in_neighbouring_documents():
    # both documents call their turn 0; the last row of the first must not draft into the second
    assert depths(pack([".AA", "AAA"], 4, pad_to=8), 4) == [1, 0, 0, 1, 0, 0, 0, 0]


def test_single_row_documents_and_padding():
    assert depths(pack(["A", ".", "AA"], 2, pad_to=6), 2) == [0] * 6


documents_strategy = st.lists(st.text("..AAABB", min_size=1, max_size=14), min_size=1, max_size=5)


@settings(deadline=None, max_examples=80)
@given(documents_strategy, st.integers(1, 6), st.integers(0, 4))
def test_depths_are_the_definition(patterns: list[str], depth: int, padding: int):
    total = sum(map(len, patterns)) + padding
    batch = pack(patterns, depth, total)
    assert depths(batch, depth) == expected_depths(patterns, depth, padding)


def test_worked_example_seen_from_the_tokens():
    batch = pack(["..AAA..BB"], 3)
    assert drafted_depths(batch.turn_R, batch.doc_R, 3).tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 1]
    assert drafted_depths(batch.turn_R[:0], batch.doc_R[:0], 3).tolist() == []


@settings(deadline=None, max_examples=80)
@given(documents_strategy, st.integers(1, 6), st.integers(0, 4))
def test_drafted_depths_count_the_rows_that_have_the_token_as_label(patterns: list[str], depth: int, padding: int):
    expected = []
    for pattern in patterns:
        turns = turns_of(pattern)
        for label in range(len(turns)):
            rows = [(label - 1 - d, d) for d in range(1, depth + 1) if label - 1 - d >= 0]
            expected.append(sum(is_supervised(turns, t, d) for t, d in rows))
    batch = pack(patterns, depth, sum(map(len, patterns)) + padding)
    found = drafted_depths(batch.turn_R, batch.doc_R, depth)
    assert found.tolist() == expected + [0] * padding
    # a label of any depth is one at depth 1 as well
    assert torch.equal(found > 0, drafted_depths(batch.turn_R, batch.doc_R, 1) > 0)


@settings(deadline=None, max_examples=80)
@given(documents_strategy, st.integers(1, 6))
def test_anchors_are_the_supervised_rows_deepest_first(patterns: list[str], depth: int):
    batch = pack(patterns, depth)
    expected = expected_depths(patterns, depth)
    anchors = find_anchors(batch.turn_R, batch.doc_R, depth)
    rows = anchors.row_A.tolist()
    assert sorted(rows) == [row for row, n in enumerate(expected) if n > 0]
    assert anchors.depths_A.tolist() == [expected[row] for row in rows]
    assert rows == sorted(rows, key=lambda row: (-expected[row], row))
    assert list(anchors.count_K) == [sum(n >= d for n in expected) for d in range(1, depth + 1)]
    for d in range(1, depth + 1):
        assert all(expected[row] >= d for row in rows[: anchors.count_K[d - 1]])


@settings(deadline=None, max_examples=80)
@given(documents_strategy, st.integers(1, 6))
def test_teacher_of_depth_d_sits_at_row_t_plus_d(patterns: list[str], depth: int):
    """`teacher_AK` points at the anchor whose own depth-1 teacher (its row + 1) is row t + d."""
    batch = pack(patterns, depth)
    anchors = batch.anchors
    for index, (row, reach) in enumerate(zip(anchors.row_A.tolist(), anchors.depths_A.tolist(), strict=True)):
        for d in range(1, reach + 1):
            owner = int(anchors.teacher_AK[index, d - 1])
            assert int(anchors.row_A[owner]) + 1 == row + d


def test_pack_restarts_positions_and_marks_padding():
    batch = pack(["..AA", ".A", "..A"], 2, pad_to=12)
    assert batch.position_R.tolist()[:9] == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.doc_R.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, -1, -1, -1]
    assert batch.doc_lengths == (4, 2, 3)
    assert batch.turn_R.tolist() == [-1, -1, 0, 0, -1, 0, -1, -1, 0, -1, -1, -1]


def test_pack_without_supervision_has_no_anchors():
    batch = pack(["....", "."], 3, pad_to=8)
    assert len(batch.anchors) == 0 and batch.anchors.count_K == (0, 0, 0)
