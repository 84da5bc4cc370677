"""A tiny random target on disk, conversations for it, a recipe, and a way to call the command line in process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama (8 layers, hidden 32) with a byte-level tokenizer and a ChatML template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("targets") / "tiny"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", unk_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "talk.jsonl"
    records = [
        {"id": f"c{n}", "messages": [{"role": "user", "content": f"Say {n}"}, said(f"{n} {n} ok")]} for n in range(24)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two prompts to measure on."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "Hello"}\n{"prompt": "Bye"}\n')
    return path


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path, conversations: Path) -> Path:
    """A run of seconds: 24 conversations and two prompts to distil, two epochs of a small EAGLE-3 head."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "p0", "prompt": "Hello"}\n{"id": "p1", "prompt": "Bye"}\n')
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
run_dir: {tmp_path}/run
target: {{name: {tiny_target}}}
head: {{type: eagle3, depth: 2, draft_vocab_size: 64, intermediate_size: 32}}
data:
  sources: [{{path: {conversations}}}]
  distill: {{prompts: [{{path: {prompts}}}], max_new_tokens: 8}}
  held_out_fraction: 0.2
  pack_tokens: 128
train: {{epochs: 2, lr: 1e-3, save_every: 2, tau_prompts: 2, tau_tokens: 8, log_every: 1}}
eval: {{limit: 2, max_new_tokens: 8, warmup_tokens: 0, tree: {{depth: 2}}}}
""")
    return path


@pytest.fixture
def comparison(tmp_path: Path, recipe: Path) -> Path:
    """Two cells × two seeds of the tiny recipe, three steps each."""
    path = tmp_path / "sides.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "base": recipe.name,
                "folder": str(tmp_path / "sides"),
                "settings": {
                    "train.save_every": 1, "train.log_every": 1, "train.tau_prompts": 0, "data.distill.prompts": [],
                },  # fmt: skip
                "budget": {"steps": 3},
                "seeds": [0, 1],
                "cells": [{"name": "plain", "baseline": True}, {"name": "rate", "grid": {"train.lr": [0.01]}}],
                "measure": {
                    "eval": {"max_new_tokens": 8, "batch_size": 2, "warmup_tokens": 0},
                    "sets": {"held_out": {"limit": 2}},
                    "speed": {"batch_sizes": [1, 2], "prompts": 1, "eval": {"sweep_prompts": 1}},
                },
            }
        )
    )
    return path


@pytest.fixture
def real_figures() -> None:
    """Asked for by a test of a command that wants its plots drawn."""


@pytest.fixture(autouse=True)
def blank_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots of reports are composed and saved without being drawn: drawing takes as long as all else here."""

    def save(_: Any, place: Path) -> None:
        Path(place).write_bytes(b"\x89PNG\r\n\x1a\n")

    if "real_figures" not in request.fixturenames:
        monkeypatch.setattr("headstart.heads.formats.plots.save_figure", save)
        monkeypatch.setattr("headstart.eval.measuring.page.page.svg_of", lambda figure, name: "<svg></svg>")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are split by thread: equal bits need an equal number of them, and a forked process has one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def checkpoints_when_due(patient_writer: None) -> None:
    """Tests that stop a run count on every checkpoint that `train.save_every` asks for."""


@pytest.fixture
def headstart(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Result]:
    """Call the command line in this process, from an empty directory."""
    from headstart.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call
