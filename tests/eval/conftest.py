"""Tiny random targets, briefly trained heads, and the plain answers that speculation must reproduce."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from eval_help import VOCAB, Trained, run, train_briefly
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.decoding.decode import Answer
from headstart.heads.targets.target import Target


@pytest.fixture(scope="session")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        # larger weights than a fresh model's, so that logits are apart and answers vary
        initializer_range=0.25,
    )
    return Target.from_model(LlamaForCausalLM(config))


@pytest.fixture(scope="session", autouse=True)
def narrow_reads() -> Iterator[None]:
    """Without fused kernels, attention reads the buffers in steps of 8 slots: answers of a few tokens cross several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.eval.decoding.session.KV_BUCKET", 8)
        yield


@pytest.fixture(scope="session")
def plain(target: Target) -> list[Answer]:
    return run(target, None)


@pytest.fixture(scope="session")
def eagle3(target: Target, plain: list[Answer]) -> Trained:
    return train_briefly(target, plain, "eagle3", 12, depth=4, draft_vocab_size=50, feature_layers=[1, 2, 3])


@pytest.fixture(scope="session")
def eagle(target: Target, plain: list[Answer]) -> Trained:
    return train_briefly(target, plain, "eagle", 25, logit_loss_weight=1.0, feature_noise=0.0)


@pytest.fixture(scope="session")
def medusa(target: Target, plain: list[Answer]) -> Trained:
    return train_briefly(target, plain, "medusa", 12, depth=3)
