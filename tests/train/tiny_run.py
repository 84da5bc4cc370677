"""A target, data and a recipe small enough to launch several processes on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a> {% generation %}{{ m.content }} <e>{% endgeneration %}"
    "{% else %}<u> {{ m.content }} <e> {% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)


def make_place(place: Path, device: str = "cpu", hidden: int = 32) -> Path:
    """A tiny target directory, twenty conversations and a recipe in `place`, which is returned."""
    words = ["<unk>", "<e>", "<u>", "<a>", *(f"w{i}" for i in range(60))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="<e>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=hidden, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(words), max_position_embeddings=2048, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(place / "target")
    tokenizer.save_pretrained(place / "target")
    with open(place / "data.jsonl", "w") as file:
        for i in range(20):
            answer = " ".join(f"w{(i + j * j) % 60}" for j in range(8 + i % 5))
            messages = [{"role": "user", "content": f"w{i} w{i + 1}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    (place / "recipe.yaml").write_text(
        f"name: tiny\ntarget: {{name: {place / 'target'}, device: {device}}}\n"
        "head: {type: eagle3, depth: 2, draft_vocab_size: 40}\n"
        f"data: {{sources: [{{path: {place / 'data.jsonl'}}}], pack_tokens: 48, held_out_fraction: 0.2}}\n"
        "train: {steps: 4, accumulation: 3, lr: 1.0e-3, log_every: 1, tau_prompts: 1, tau_tokens: 4}\n"
    )
    return place


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]
