"""A target without weights, and a distillation through a server in a process that may be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from chat_templates import TEMPLATES, word_tokenizer
from serving_help import FAST, digits
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data.config import DistillConfig, ServerConfig
from headstart.data.distilling.distill import distill
from headstart.data.prompts import Prompt
from headstart.data.serving.answerer import ServerAnswerer
from headstart.data.serving.connect import connect
from headstart.heads.targets.target import Target, TargetConfig


def weightless(tokenizer: Any) -> Target:
    """A target without weights: servers answer for it."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return Target(model, tokenizer, TargetConfig(name="tiny"))


def prompts_of(count: int) -> list[Prompt]:
    """Every third prompt has two questions."""
    return [Prompt.ask(f"p{n}", digits(n), *([digits(1000 + n)] if n % 3 == 0 else [])) for n in range(count)]


def distil_in_child(url: str, out: str, prompts: int, concurrency: int) -> None:
    target = weightless(word_tokenizer(TEMPLATES["chatml"], "<|im_end|>"))
    config = DistillConfig(servers=[ServerConfig(url, concurrency=concurrency)], max_new_tokens=32)
    answerer = ServerAnswerer(target, config, connect(target, config), patience=FAST)
    distill(target, prompts_of(prompts), config, Path(out), answerer=answerer)
