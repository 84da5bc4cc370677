"""The draft vocabulary: the most frequent tokens, sorted, and its tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.heads.errors import ConfigError
from headstart.heads.vocab import choose_draft_vocab, coverage, from_offsets, membership, offsets

COUNT = torch.tensor([5, 0, 9, 2, 2, 7, 0, 2])


def test_most_frequent_ascending_and_ties_to_the_lower_id():
    assert choose_draft_vocab(COUNT, 3).tolist() == [0, 2, 5]
    assert choose_draft_vocab(COUNT, 5).tolist() == [0, 2, 3, 4, 5]
    assert choose_draft_vocab(COUNT, 8).tolist() == list(range(8))


def test_kept_ids_displace_the_rarest():
    assert choose_draft_vocab(COUNT, 4, always=(6,)).tolist() == [0, 2, 5, 6]
    assert choose_draft_vocab(COUNT, 3, always=(2,)).tolist() == [0, 2, 5]


def test_counts_are_not_changed():
    before = COUNT.clone()
    choose_draft_vocab(COUNT, 2, always=(1,))
    assert torch.equal(COUNT, before)


@pytest.mark.parametrize("size", [0, -1, 9])
def test_impossible_sizes_are_refused(size: int):
    with pytest.raises(ConfigError, match="head.draft_vocab_size"):
        choose_draft_vocab(COUNT, size)


def test_offsets_are_target_minus_draft():
    ids = torch.tensor([0, 2, 5, 6])
    assert offsets(ids).tolist() == [0, 1, 3, 3] and offsets(ids).dtype == torch.int64
    assert from_offsets(offsets(ids)).tolist() == ids.tolist()
    assert from_offsets(offsets(ids).to(torch.int32)).tolist() == ids.tolist()


def test_membership_and_coverage():
    ids = choose_draft_vocab(COUNT, 3)
    assert membership(ids, 8).tolist() == [True, False, True, False, False, True, False, False]
    assert coverage(COUNT, ids) == pytest.approx(21 / 27)
    assert coverage(torch.zeros(8), ids) == 0.0


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_no_token_left_out_is_more_frequent_than_one_taken(counts: list[int], data: st.DataObject):
    size = data.draw(st.integers(1, len(counts)))
    ids = choose_draft_vocab(torch.tensor(counts), size).tolist()
    assert ids == sorted(set(ids)) and len(ids) == size
    out = [i for i in range(len(counts)) if i not in ids]
    assert all((counts[i], -i) > (counts[j], -j) for i in ids for j in out), "frequency first, then the lower id"
