"""The draft vocabulary: the most frequent tokens, sorted, and its tables."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.heads import vocab
from headstart.heads.errors import ConfigError
from headstart.heads.vocab import (
    check_vocab_size,
    choose_draft_vocab,
    coverage,
    from_offsets,
    membership,
    most_tokens,
    offsets,
    size_for_share,
)

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


def test_a_share_takes_the_fewest_tokens_that_hold_it(monkeypatch: pytest.MonkeyPatch):
    """COUNT by falling count: 9, 7, 5, 2, 2, 2 of 27."""
    monkeypatch.setattr(vocab, "MULTIPLE", 1)
    assert [size_for_share(COUNT, k / 27) for k in (1, 9, 10, 16, 17, 21, 22, 26)] == [1, 1, 2, 2, 3, 3, 4, 6]
    assert size_for_share(COUNT, 16 / 27, always=(6,)) == 3  # the token that is forced in holds nothing
    assert size_for_share(COUNT, 1 / 27, always=(1, 6, 6)) == 3
    assert size_for_share(COUNT, 1 / 27, always=(1, 4, 6)) == 3  # 0, 2 and 0 of 27: token 4 alone reaches it


def test_a_size_by_share_is_a_multiple_below_the_whole():
    count_V = torch.arange(1000, 0, -1)
    assert size_for_share(count_V, 0.001) == 64 and size_for_share(count_V, 0.99) == 960
    assert coverage(count_V, choose_draft_vocab(count_V, 960)) >= 0.99
    assert [most_tokens(size) for size in (40, 64, 65, 128, 129, 1000)] == [40, 64, 64, 64, 128, 960]
    assert size_for_share(torch.ones(65, dtype=torch.int64), 0.999) == 64


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=30).filter(any), st.integers(1, 99), st.data())
def test_a_size_by_share_against_a_loop(counts: list[int], percent: int, data: st.DataObject):
    always = tuple(data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=3, unique=True)))
    rest = sorted((i for i in range(len(counts)) if i not in always), key=lambda i: (-counts[i], i))
    order = sorted(always) + rest
    fewest = next(
        n for n in range(1, len(counts) + 1)
        if Fraction(sum(counts[i] for i in order[:n])) >= Fraction(percent, 100) * sum(counts)
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab, "MULTIPLE", 2)
        rounded = 2 * math.ceil(max(fewest, len(always)) / 2)
        expected = min(rounded, most_tokens(len(counts)))
        assert size_for_share(torch.tensor(counts), percent / 100, always) == expected


@pytest.mark.parametrize("size", [1.0, 0.0, 1.5, -0.5, math.nan, math.inf, -1, True])
def test_what_is_neither_a_size_nor_a_share_is_refused(size: float):
    with pytest.raises(ConfigError, match=r"head.draft_vocab_size: found .*, expected a whole number.*0\.99"):
        check_vocab_size(size)


def test_sizes_and_shares_are_taken_and_nothing_is_refused_too_little():
    for size in (0, 1, 32000, 0.99, 0.5):
        check_vocab_size(size)
    with pytest.raises(ConfigError, match="no supervised row"):
        size_for_share(torch.zeros(8, dtype=torch.int64), 0.9)
    with pytest.raises(ConfigError, match="found 2, expected at least 3"):
        choose_draft_vocab(COUNT, 2, always=(1, 4, 6))
