"""The features of training and of the decode loop are the same, and a difference is found and named."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.decoding import engine as engine_module
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import TargetError
from headstart.heads.targets.target import Target
from headstart.serving_check import compare_features, require_parity

SPEC = FeatureSpec((1, 2, 3))
SEQUENCES = [[(7 * n + 3) % 61 for n in range(23)], [(5 * n) % 61 for n in range(14)]]


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return Target.from_model(LlamaForCausalLM(config))


def test_features_agree_token_by_token(target: Target) -> None:
    found = compare_features(target, SPEC, SEQUENCES)
    # prompts of 11 and 7 tokens, then whole groups of four: all 23, and 11 of 14
    assert found.rows == 23 + 11
    assert found.passed and found.worst < 1e-4
    require_parity(found)


def test_heads_that_read_the_last_state_only(target: Target) -> None:
    assert compare_features(target, FeatureSpec(), SEQUENCES, levels=2).passed


def test_a_shifted_feature_is_found_and_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic fault: serving hands layer k + 1 where training read layer k."""
    engine, other = engine_module.Engine, FeatureSpec((1, 2, 4))
    prefill, verify = engine.prefill, engine.verify
    monkeypatch.setattr(engine, "prefill", lambda self, contexts, spec: prefill(self, contexts, other))
    monkeypatch.setattr(engine, "verify", lambda self, roots, tree, spec, end: verify(self, roots, tree, other, end))
    found = compare_features(target, SPEC, SEQUENCES)
    assert not found.passed and found.where.endswith("hidden_states[3]")
    with pytest.raises(TargetError, match=r"hidden_states\[3\].*export.force=true"):
        require_parity(found)
    require_parity(found, force=True)


def test_a_wrong_position_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine_module.Engine.verify

    def late(self, roots_B, tree, *rest):  # type: ignore[no-untyped-def]
        return original(self, roots_B, replace(tree, depth_BN=tree.depth_BN + 1), *rest)

    monkeypatch.setattr(engine_module.Engine, "verify", late)
    assert not compare_features(target, SPEC, SEQUENCES).passed


def test_a_small_shift_of_every_row_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the worst row may be far off; a fault that moves all of them a little must not hide behind it."""
    import headstart.serving_check as module

    half = Target.from_model(copy.deepcopy(target.model).to(torch.bfloat16))
    rounded = compare_features(half, SPEC, SEQUENCES)
    assert rounded.passed and rounded.median < 0.02
    original = module._serving_features
    monkeypatch.setattr(module, "_serving_features", lambda *args: {k: v * 1.1 for k, v in original(*args).items()})
    found = compare_features(half, SPEC, SEQUENCES)
    assert found.worst < found.tolerance and not found.passed
    with pytest.raises(TargetError, match=r"in the median row, rounding explains 0.05"):
        require_parity(found)
