"""Tiny random targets, briefly trained heads, and the plain answers that speculation must reproduce."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
from eval_help import CONTEXTS, VOCAB, Trained, run, train_briefly
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
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with CONTEXTS as prompts."""
    path = tmp_path_factory.mktemp("prompts") / "ids.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": context}) + "\n" for context in CONTEXTS))
    return str(path)


@pytest.fixture(scope="session")
def plain(target: Target) -> list[Answer]:
    return run(target, None)


@pytest.fixture(scope="session")
def trained(target: Target, plain: list[Answer]) -> Callable[[str], Trained]:
    """family → a head that was trained briefly on the plain answers, the same one whenever it is asked for."""
    return cache(partial(train_briefly, target, plain))


@pytest.fixture(scope="session")
def eagle3(trained: Callable[[str], Trained]) -> Trained:
    return trained("eagle3")


@pytest.fixture(scope="session")
def eagle(trained: Callable[[str], Trained]) -> Trained:
    return trained("eagle")


@pytest.fixture(scope="session")
def medusa(trained: Callable[[str], Trained]) -> Trained:
    return trained("medusa")
