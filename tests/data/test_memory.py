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
