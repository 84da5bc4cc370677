"""`-m headstart.train` as users launch it: torchrun agrees with one process, accelerate's CPU trap is caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.train.__main__ import main

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a> {% generation %}{{ m.content }} <e>{% endgeneration %}"
    "{% else %}<u> {{ m.content }} <e> {% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A tiny target directory and twenty conversations."""
    place = tmp_path_factory.mktemp("launch")
    words = ["<unk>", "<e>", "<u>", "<a>", *(f"w{i}" for i in range(60))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="<e>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(words), max_position_embeddings=256, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(place / "target")
    tokenizer.save_pretrained(place / "target")
    with open(place / "data.jsonl", "w") as file:
        for i in range(20):
            answer = " ".join(f"w{(i + j * j) % 60}" for j in range(8 + i % 5))
            messages = [{"role": "user", "content": f"w{i} w{i + 1}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    (place / "recipe.yaml").write_text(
        f"name: tiny\ntarget: {{name: {place / 'target'}, device: cpu}}\n"
        "head: {type: eagle3, depth: 2, draft_vocab_size: 40}\n"
        f"data: {{sources: [{{path: {place / 'data.jsonl'}}}], pack_tokens: 48, held_out_fraction: 0.2}}\n"
        "train: {steps: 4, accumulation: 3, lr: 1.0e-3, log_every: 1, tau_prompts: 1, tau_tokens: 4}\n"
    )
    return place


def launch(command: list[str], place: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = ["-m", "headstart.train", str(place / "recipe.yaml"), f"run_dir={place / name}", *overrides]
    return subprocess.run(
        [*command, *arguments], cwd=place, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


@pytest.mark.slow
def test_torchrun_on_two_ranks_trains_what_one_process_trains(place):
    assert main([str(place / "recipe.yaml"), f"run_dir={place / 'one'}"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    two = launch(torchrun, place, "two")
    assert two.returncode == 0, two.stderr
    assert len(losses(place / "one")) == 4
    assert losses(place / "two") == pytest.approx(losses(place / "one"), rel=1e-5)
    for name in ("one", "two"):
        assert (place / name / "head" / "config.json").is_file()
        assert json.loads((place / name / "steps" / "train.json").read_text())["status"] == "done"
    before = losses(place / "one")
    assert main([str(place / "recipe.yaml"), f"run_dir={place / 'one'}"]) == 0
    assert losses(place / "one") == before  # a finished run is not trained again


@pytest.mark.slow
def test_accelerate_on_cpus_is_refused_before_anything_is_trained(place):
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    found = launch(accelerate, place, "trap")
    assert found.returncode != 0
    assert "independent" in found.stderr and "torchrun" in found.stderr
    assert not (place / "trap").exists()


def test_wrong_override_exits_with_2_and_names_the_key(place, capsys):
    assert main([str(place / "recipe.yaml"), "train.learning_rate=1"]) == 2
    assert "train.learning_rate" in capsys.readouterr().err
