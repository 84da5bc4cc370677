"""Copies of samples with redrawn tokens: which change, from which distribution, and that grouping does not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstart.data.config import DataConfig, SourceConfig
from headstart.data.resampling import resampled
from headstart.data.row_random import draw_at, draws_at
from headstart.data.samples import COPIED, Sample
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.targets.target import Target


def texts(samples: list[Sample]) -> list[tuple[str, list[int]]]:
    return [(sample.id, sample.token_ids.tolist()) for sample in samples]


def marks(target: Target) -> set[int]:
    tokenizer = target.tokenizer
    return {*target.stop_token_ids, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def test_the_originals_come_first_and_copies_keep_all_but_tokens(target: Target, random_samples):
    samples = random_samples([20, 9, 33], target.dims.vocab_size)
    samples[1] = samples[1].with_all_supervised()
    made = resampled(samples, target, 2, 0.5, 0)
    assert all(a is b for a, b in zip(made.samples[:3], samples, strict=True))
    names = [f"s{n}/resampled{copy}" for copy in (1, 2) for n in range(3)]
    assert [sample.id for sample in made.samples[3:]] == names
    for copy, original in zip(made.samples[3:], samples * 2, strict=True):
        assert copy.turn_ids.tolist() == original.turn_ids.tolist()
        assert (copy.answer_ids is None) == (original.answer_ids is None)
        assert (copy.meta, copy.finish_reason, copy.supervised) == (original.meta, "stop", original.supervised)
        assert copy.token_ids.dtype == np.int32 and copy.digest() != original.digest()


@pytest.mark.parametrize("everything", [False, True], ids=["answers", "supervise=all"])
def test_only_plain_tokens_of_answers_change(target: Target, random_samples, everything: bool):
    samples = random_samples([60, 40, 90, 1, 2], target.dims.vocab_size)
    samples[0].turn_ids[:4] = 0  # an answer from the first token on
    samples[2].turn_ids[50:70] = COPIED
    answers = [sample.turn_ids.copy() for sample in samples]
    if everything:
        samples = [sample.with_all_supervised() for sample in samples]
    special = marks(target)
    assert special & {int(t) for sample in samples for t in sample.token_ids}, "the texts must hold some"
    made = resampled(samples, target, 5, 1.0, 3)
    changed = could = 0
    for copy, original, turns in zip(made.samples[5:], samples * 5, answers * 5, strict=True):
        was, now = original.token_ids, copy.token_ids
        free = (turns >= 0) & ~np.isin(was, list(special))
        free[0] = False
        assert (was == now)[~free].all()
        assert not np.isin(now[was != now], list(special)).any()
        changed, could = changed + int((was != now).sum()), could + int(free.sum())
    assert (made.tokens, made.redrawn, made.changed) == (could, could, changed)
    assert changed > could // 2, "a random target hardly draws the token that stands there"


def test_further_tokens_can_be_kept(target: Target, random_samples):
    samples = random_samples([60], target.dims.vocab_size)
    token = int(samples[0].token_ids[20])
    plain = resampled(samples, target, 40, 1.0, 0)
    kept = resampled(samples, target, 40, 1.0, 0, kept=[token])
    was = samples[0].token_ids == token
    assert any((copy.token_ids == token)[~was].any() for copy in plain.samples[1:])
    assert all(((copy.token_ids == token) == was).all() for copy in kept.samples[1:])


def test_the_share_of_redrawn_tokens_is_the_setting(target: Target, random_samples):
    made = resampled(random_samples([100] * 30, target.dims.vocab_size), target, 4, 0.15, 0)
    assert made.tokens > 5000
    assert abs(made.redrawn / made.tokens - 0.15) < 4 * (0.15 * 0.85 / made.tokens) ** 0.5
    assert 0.5 * made.redrawn < made.changed <= made.redrawn
    assert "120 resampled copies, 4 of each training sample" in made.line()
    assert f"{made.redrawn:,} tokens redrawn, {made.changed:,} of them differ" in made.line()


def test_grouping_and_the_other_samples_do_not_matter(target: Target, random_samples):
    samples = random_samples([20, 9, 33, 14, 27], target.dims.vocab_size)
    whole = dict(texts(resampled(samples, target, 3, 0.4, 7).samples))
    target.max_forward_tokens = 1  # each alone
    assert dict(texts(resampled(samples[::-1], target, 3, 0.4, 7).samples)) == whole
    some = dict(texts(resampled(samples[1:3], target, 2, 0.4, 7).samples))
    assert some.items() <= whole.items()
    assert dict(texts(resampled(samples, target, 3, 0.4, 8).samples)) != whole


def test_tokens_are_drawn_from_the_target_s_distribution(target: Target, random_samples):
    """At one place, over 4,000 copies: every frequency lies within five standard deviations of its probability."""
    with torch.no_grad():  # a random target is nearly uniform: make it choose
        target.model.lm_head.weight.mul_(25)
    target = Target.from_model(target.model, target.tokenizer)
    (sample,) = random_samples([24], target.dims.vocab_size)
    with torch.no_grad():
        logits_TV = target.model(torch.tensor([sample.token_ids.tolist()])).logits[0]
    special = marks(target)
    place = next(t for t in range(14, 24) if int(sample.token_ids[t]) not in special)
    p_V = logits_TV[place - 1].softmax(-1).double().numpy()
    assert 0.05 < p_V.max() < 0.98
    copies = 4000
    drawn = [int(copy.token_ids[place]) for copy in resampled([sample], target, copies, 1.0, 0).samples[1:]]
    for token in special:  # not taken: the original stays
        p_V[sample.token_ids[place]] += p_V[token]
        p_V[token] = 0
    found_V = np.bincount(drawn, minlength=len(p_V)) / copies
    assert (abs(found_V - p_V) <= 5 * np.sqrt(p_V * (1 - p_V) / copies) + 1e-3).all()
    assert 0.5 * abs(found_V - 1 / len(p_V)).sum() > 0.2, "far from uniform draws"


def test_several_draws_are_those_of_one():
    torch.manual_seed(0)
    p_BV = torch.randn(6, 40).mul(3).softmax(-1)
    p_BV[0, :5] = 0
    p_BV[1] = torch.eye(40)[7]
    uniform_BC = torch.cat([torch.rand(6, 30, dtype=torch.float64), torch.zeros(6, 1), torch.ones(6, 1)], 1).double()
    expected_BC = torch.stack([draw_at(p_BV, uniform_B) for uniform_B in uniform_BC.T], 1)
    assert draws_at(p_BV, uniform_BC).equal(expected_BC)
    assert (draws_at(p_BV, uniform_BC)[1] == 7).all()


def test_no_copies_and_tokens_of_another_target(target: Target, random_samples):
    samples = random_samples([8], target.dims.vocab_size)
    assert resampled(samples, target, 0, 0.5, 0).samples == samples
    samples[0].token_ids[3] = target.dims.vocab_size
    with pytest.raises(DataError, match="tokenised for another target"):
        resampled(samples, target, 1, 0.5, 0)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("resampled_copies", -1, "0 \\(none\\) or more"),
        ("resampled_share", 0.0, "a number in \\(0, 1\\]"),
        ("resampled_share", 1.5, "a number in \\(0, 1\\]"),
    ],
)
def test_settings_that_cannot_work(name: str, value: float, expected: str):
    config = DataConfig(sources=[SourceConfig(path="a.jsonl")], **{name: value})
    with pytest.raises(ConfigError, match=f"data.{name}: found {value}, expected {expected}"):
        config.check()


def test_chunks_of_logits_do_not_matter(target: Target, random_samples, monkeypatch: pytest.MonkeyPatch):
    samples = random_samples([60, 40], target.dims.vocab_size)
    whole = texts(resampled(samples, target, 3, 0.4, 7).samples)
    monkeypatch.setattr("headstart.data.resampling.CHUNK_LOGITS", 3 * target.dims.vocab_size)  # three rows
    assert texts(resampled(samples, target, 3, 0.4, 7).samples) == whole


def test_repeats_of_a_sample_have_other_copies(target: Target, random_samples):
    """`data.most_repeats` trains the same sample several times; its copies count on."""
    one, other = random_samples([40, 30], target.dims.vocab_size)
    copies = resampled([one, other, one], target, 2, 0.5, 0).samples[3:]
    numbers = [sample.id.split("/resampled") for sample in copies]
    assert numbers == [["s0", "1"], ["s1", "1"], ["s0", "3"], ["s0", "2"], ["s1", "2"], ["s0", "4"]]
    assert len({tuple(sample.token_ids.tolist()) for sample in copies}) == 6
    alone = dict(texts(resampled([one], target, 4, 0.5, 0).samples))
    assert all(alone[name] == ids for name, ids in texts([copies[n] for n in (0, 2, 3, 5)]))
