"""What a draft vocabulary is chosen from: one vote per row, counted against a loop over positions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from headstart.data import teacher_choices
from headstart.data.features import OnlineFeatures
from headstart.data.memory import MemoryFeatures
from headstart.data.ranks import Ranks
from headstart.data.samples import COPIED, Sample
from headstart.data.teacher_choices import count_votes
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import DataError
from headstart.heads.targets.target import Target


def naive(target: Target, samples: list[Sample], asked: set[int]) -> Counter[int]:
    votes: Counter[int] = Counter()
    for number, sample in enumerate(samples):
        turns = sample.turn_ids if sample.answer_ids is None else sample.answer_ids
        with torch.no_grad():
            logits_TV = target.model(torch.tensor([sample.token_ids.tolist()])).logits[0]
        for p in range(1, len(sample)):
            if turns[p] >= 0 and turns[p] == turns[p - 1]:
                votes[int(logits_TV[p - 1].argmax()) if number in asked else int(sample.token_ids[p])] += 1
    return votes


def as_counter(count_V: torch.Tensor) -> Counter[int]:
    return Counter({token: int(count) for token, count in enumerate(count_V) if count})


@pytest.mark.parametrize("everything", [False, True], ids=["answers", "supervise=all"])
@pytest.mark.parametrize("made", [OnlineFeatures, MemoryFeatures])
def test_every_row_votes_for_the_target_s_choice(target: Target, random_samples, made, everything: bool):
    samples = random_samples([20, 9, 33, 14], target.dims.vocab_size)
    if everything:
        samples = [sample.with_all_supervised() for sample in samples]
    source = made(target, samples, FeatureSpec(), 3)
    votes = count_votes(samples, source, made is OnlineFeatures, target.dims.vocab_size, seed=0)
    assert as_counter(votes.count_V) == naive(target, samples, {0, 1, 2, 3})
    assert votes.asked == votes.rows == int(votes.count_V.sum()) > 40
    assert as_counter(votes.count_V) != naive(target, samples, set())


@pytest.mark.parametrize("everything", [False, True], ids=["answers", "supervise=all"])
def test_held_choices_are_counted_as_packs_count_them(target: Target, random_samples, monkeypatch, everything: bool):
    """With an answer from the first token on, one that must not train, and documents of one and two tokens."""
    samples = random_samples([20, 9, 33, 2, 1, 14], target.dims.vocab_size)
    samples[1].turn_ids[:4] = 0
    samples[2].turn_ids[8:16] = COPIED
    samples[3].turn_ids[:] = 0
    if everything:
        samples = [sample.with_all_supervised() for sample in samples]
    source = MemoryFeatures(target, samples, FeatureSpec(), 3)
    held = count_votes(samples, source, False, target.dims.vocab_size, 0)
    monkeypatch.setattr(MemoryFeatures, "choices", lambda self: None)
    packed = count_votes(samples, source, False, target.dims.vocab_size, 0)
    assert torch.equal(held.count_V, packed.count_V) and held.asked == packed.asked == held.rows > 30


def test_live_features_are_made_of_a_part_which_the_seed_chooses(
    target: Target, random_samples, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(teacher_choices, "LEAST", 30)
    samples, size = random_samples([20] * 12, target.dims.vocab_size), target.dims.vocab_size
    read: list[int] = []

    class Noted(OnlineFeatures):
        def get(self, pack):
            read.extend(pack)
            return super().get(pack)

    source = Noted(target, samples, FeatureSpec(), 2)
    votes = count_votes(samples, source, True, size, seed=5)
    assert len(read) == 2 and read == sorted(read)  # 30 tokens of samples of 20
    assert as_counter(votes.count_V) == naive(target, samples, set(read)) and 0 < votes.asked < votes.rows
    again = count_votes(samples, source, True, size, seed=5)
    assert torch.equal(again.count_V, votes.count_V) and read[2:] == read[:2]
    count_votes(samples, source, True, size, seed=6)
    assert read[4:] != read[:2]


def test_the_data_votes_where_the_target_cannot_be_asked(target: Target, random_samples):
    samples = random_samples([20, 15], target.dims.vocab_size)
    votes = count_votes(samples, None, True, target.dims.vocab_size, seed=0)
    assert as_counter(votes.count_V) == naive(target, samples, set()) and votes.asked == 0
    with pytest.raises(DataError, match="found token id"):
        count_votes(samples, None, True, 3, seed=0)


def test_ranks_share_the_work_and_find_the_same(target: Target, random_samples, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(teacher_choices, "PACK_TOKENS", 24)
    samples, size = random_samples([20, 9, 33, 14, 12], target.dims.vocab_size), target.dims.vocab_size
    source = OnlineFeatures(target, samples, FeatureSpec(), 2)
    alone, parts = count_votes(samples, source, True, size, 0), []

    def gather(part):  # the first round collects what each rank found, the second gives it to all
        parts.append(part)
        return parts[:3]

    for rank in range(3):
        count_votes(samples, source, True, size, 0, Ranks(rank, 3, gather))
    assert [int(part.sum()) > 0 for part in parts] == [True, True, True]
    for rank in range(3):
        votes = count_votes(samples, source, True, size, 0, Ranks(rank, 3, gather))
        assert torch.equal(votes.count_V, alone.count_V) and votes.asked == alone.asked == alone.rows
