"""Tokenizers whose tokens can be read, chat templates of several families, and a random two-layer target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import ENDS, TEMPLATES, word_tokenizer

from headstart.data.samples import Sample
from headstart.heads.targets.target import Target, TargetConfig


@pytest.fixture
def make_chat():
    """make_chat(family, pad=…, template=…, **template_kwargs) → ChatFormat over a readable tokenizer."""
    from headstart.data.chat.chat import ChatFormat

    def make(family: str, pad: str | None = None, template: str | None = None, **kwargs) -> ChatFormat:
        eos, bos, stops = ENDS[family]
        tokenizer = word_tokenizer(template or TEMPLATES[family], eos, pad, bos)
        return ChatFormat(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)), kwargs)

    return make


@pytest.fixture
def tokenizer():
    """ChatML, no pad token."""
    return word_tokenizer(TEMPLATES["chatml"], "<|im_end|>")


def tiny_model(vocab: int, seed: int = 0, context: int = 128):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).float()


@pytest.fixture
def target(tokenizer):
    """A random target with the ChatML tokenizer."""
    return Target.from_model(
        tiny_model(len(tokenizer)), tokenizer, TargetConfig(name="tiny", device="cpu", dtype="float32")
    )


@pytest.fixture
def other_target(tokenizer):
    """The same architecture with other weights."""
    return Target.from_model(
        tiny_model(len(tokenizer), seed=1), tokenizer, TargetConfig(name="tiny", device="cpu", dtype="float32")
    )


@pytest.fixture
def write_jsonl(tmp_path):
    def write(records: list, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def random_samples():
    """random_samples(lengths, vocab) → samples with one or two assistant turns each."""

    def make(lengths: list[int], vocab: int = 50, seed: int = 0) -> list[Sample]:
        rng = np.random.default_rng(seed)
        samples = []
        for number, length in enumerate(lengths):
            turns = np.full(length, -1, dtype=np.int32)
            turns[length // 4 : length // 2] = 0
            turns[length // 2 + 1 :] = 1
            tokens = rng.integers(0, vocab, length).astype(np.int32)
            samples.append(Sample(f"s{number}", tokens, turns, "stop", {"conversation": f"s{number}", "task": None}))
        return samples

    return make
