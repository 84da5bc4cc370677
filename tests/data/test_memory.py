"""Features held in memory equal those computed live, whatever the pack."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data import memory
from headstart.data.features import OnlineFeatures
from headstart.data.memory import MemoryFeatures, SharedFeatures
from headstart.data.samples import Sample
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import StorageError
from headstart.heads.targets.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Target.from_model(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    made = []
    for number, (prompt, answer) in enumerate([(3, 5), (1, 9), (6, 2), (2, 1), (4, 7)]):
        turns = np.array([-1] * prompt + [0] * answer, dtype=np.int32)
        made.append(Sample(f"s{number}", rng.integers(0, 61, prompt + answer).astype(np.int32), turns))
    return made


@pytest.mark.parametrize("layers", [(), (2, 4, 5)])
def test_equals_online(target, samples, layers, monkeypatch):
    spec = FeatureSpec(layers)
    monkeypatch.setattr(target, "max_forward_tokens", 12)
    online = OnlineFeatures(target, samples, spec, 3)
    held = MemoryFeatures(target, samples, spec, 3)
    for pack in ([0], [4, 1], [3, 2, 0], [3]):
        a, b = online.get(pack), held.get(pack)
        torch.testing.assert_close(a.hidden_RD, b.hidden_RD)
        assert torch.equal(a.teacher_argmax_A, b.teacher_argmax_A)
        assert torch.equal(a.tokens_R, b.tokens_R) and a.sample_ids == b.sample_ids
        if layers:
            torch.testing.assert_close(a.streams_RkD, b.streams_RkD)
        assert a.answer_R is None and b.answer_R is None


def test_answers_stay_known_where_everything_is_supervised(target, samples):
    everything = [sample.with_all_supervised() for sample in samples]
    spec = FeatureSpec()
    for source in (OnlineFeatures(target, everything, spec, 3), MemoryFeatures(target, everything, spec, 3)):
        batch = source.get([4, 1])
        assert batch.answer_R.tolist() == [*samples[4].turn_ids, *samples[1].turn_ids]
        assert not batch.turn_R.any()


def test_refuses_what_cannot_fit(target, samples, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY_SHARE", 0.0)
    with pytest.raises(StorageError, match="data.features=memory: .* expected at most"):
        MemoryFeatures(target, samples, FeatureSpec(), 3)


def test_one_pass_holds_documents_of_similar_length(target, monkeypatch):
    """Long and short documents by turns: two passes of two long ones each, and one of all short ones."""
    tokens = np.arange(20, dtype=np.int32)
    mixed = [Sample(f"s{n}", tokens[:length], np.zeros(length, np.int32)) for n, length in enumerate([20, 2] * 4)]
    passes: list[tuple[int, ...]] = []
    forward = target.forward_documents

    def counted(ids_BT, layers):
        passes.append(tuple(ids_BT.shape))
        return forward(ids_BT, layers)

    monkeypatch.setattr(target, "forward_documents", counted)
    monkeypatch.setattr(target, "max_forward_tokens", 44)
    held = MemoryFeatures(target, mixed, FeatureSpec((2,)), 1)
    assert passes == [(2, 20), (2, 20), (4, 2)]
    monkeypatch.undo()
    online = OnlineFeatures(target, mixed, FeatureSpec((2,)), 1)
    for pack in ([1, 0, 7], [6]):
        torch.testing.assert_close(held.get(pack).streams_RkD, online.get(pack).streams_RkD)


def test_a_pass_is_small_on_a_cpu_and_progress_is_told_from_the_start(target):
    """4 documents of 900 tokens: two at a time."""
    tokens = np.arange(900, dtype=np.int32) % 61
    many = [Sample(f"s{n}", tokens, np.zeros(900, np.int32)) for n in range(4)]
    told: list[tuple[int, int]] = []
    MemoryFeatures(target, many, FeatureSpec((2,)), 1, progress=lambda done, total, _: told.append((done, total)))
    assert told == [(0, 3600), (1800, 3600), (3600, 3600)]


def test_runs_that_read_the_same_share_what_is_held(target, samples, monkeypatch):
    asked: list[FeatureSpec] = []
    extract = memory.extract
    monkeypatch.setattr(memory, "extract", lambda t, s, spec: asked.append(spec) or extract(t, s, spec))
    shared, low, high = SharedFeatures(), FeatureSpec((2,)), FeatureSpec((5,))
    first = shared.give("train", target, samples, low, 3)
    passes = len(asked)
    again = shared.give("train", target, list(samples), low, 2)
    assert len(asked) == passes and again.max_depth == 2 and first.max_depth == 3
    for depth, source in ((3, first), (2, again)):
        a, b = OnlineFeatures(target, samples, low, depth).get([3, 2, 0]), source.get([3, 2, 0])
        torch.testing.assert_close(a.streams_RkD, b.streams_RkD)
        assert torch.equal(a.anchors.row_A, b.anchors.row_A)
    shared.give("held_out", target, samples[:2], low, 3)
    assert shared.give("train", target, samples, low, 3).lengths == first.lengths and asked[passes:] == [low]
    everything = [sample.with_all_supervised() for sample in samples]
    for spec, other in ((high, samples), (high, everything), (low, everything), (low, samples[1:])):
        before = len(asked)
        held = shared.give("train", target, other, spec, 3)
        assert len(asked) > before and held.spec == spec
        wanted = OnlineFeatures(target, other, spec, 3).get([1, 0])
        torch.testing.assert_close(held.get([1, 0]).streams_RkD, wanted.streams_RkD)
        assert torch.equal(held.get([1, 0]).anchors.row_A, wanted.anchors.row_A)
    # the same tokens and turns, of which fewer are answers
    marked = [replace(sample, answer_ids=np.full_like(sample.turn_ids, -1)) for sample in samples[1:]]
    before = len(asked)
    assert not (shared.give("train", target, marked, low, 3).get([1, 0]).answer_R >= 0).any()
    assert held.get([1, 0]).answer_R is None and len(asked) == before


def test_what_is_replaced_is_gone_before_its_successor_is_made(target, samples, monkeypatch):
    shared = SharedFeatures()
    first = weakref.ref(shared.give("train", target, samples, FeatureSpec((2,)), 3)._hidden_RD)
    alive: list[bool] = []
    monkeypatch.setattr(memory, "require_memory", lambda *_: alive.append(first() is not None))
    shared.give("train", target, samples, FeatureSpec((5,)), 3)
    assert alive == [False]
