"""Features held in memory equal those computed live, whatever the pack."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data import memory
from headstart.data.features import OnlineFeatures
from headstart.data.memory import MemoryFeatures
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
def test_equals_online(target, samples, layers):
    spec = FeatureSpec(layers)
    online = OnlineFeatures(target, samples, spec, 3)
    held = MemoryFeatures(target, samples, spec, 3, forward_tokens=12)
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
    held = MemoryFeatures(target, mixed, FeatureSpec((2,)), 1, forward_tokens=44)
    assert passes == [(2, 20), (2, 20), (4, 2)]
    monkeypatch.undo()
    online = OnlineFeatures(target, mixed, FeatureSpec((2,)), 1)
    for pack in ([1, 0, 7], [6]):
        torch.testing.assert_close(held.get(pack).streams_RkD, online.get(pack).streams_RkD)
