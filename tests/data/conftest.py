"""Tokenizers whose tokens can be read, chat templates of five families, and a random two-layer target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headstart.data.samples import Sample
from headstart.heads.target import Target, TargetConfig

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "<think>", "</think>",
)  # fmt: skip
WORDS = (
    "system user assistant model Hi Hello there Bye bye now again Be brief be kind One two three think fast "
    "Question Answer How are you fine thanks done more"
).split()
#: a token is a run of newlines, a word with the space before it, or one other character
PIECES = r"\n+|[ ]?\w+|[^\w]"


def word_tokenizer(template: str | None = None, eos: str | None = None, pad: str | None = None, bos: str | None = None):
    """A fast tokenizer with one token per readable piece, so that expected masks can be written by hand."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "\n",
        "\n\n",
        "\n\n\n",
        *" .,:!?#'-\"()",
        *WORDS,
        *(" " + w for w in WORDS),
        *map(str, range(10)),
    ]
    core = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    names = {k: v for k, v in (("eos_token", eos), ("pad_token", pad), ("bos_token", bos)) if v is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **names)
    tokenizer.chat_template = template
    return tokenizer


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>"
        "\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # keeps the reasoning of answers after the last question, drops it from earlier ones
    "qwen3": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}"
        "{% set content = m.content %}{% set reason = m.reasoning_content or '' %}"
        "{% if '</think>' in content %}{% set reason = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if loop.index0 > ns.last and (loop.last or reason) %}"
        "{{ '<|im_start|>assistant\n<think>\n' + reason.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% set role = 'model' if message.role == 'assistant' else message.role %}"
        "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
    ),
    # the template says which part is the assistant's; the tag leaves the end of the turn outside
    "tagged": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}"
        "{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # the tag is drawn too wide at both ends
    "tagged_wide": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + message.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # no token ends a turn
    "plain": (
        "{% for message in messages %}{{ message.role + ':' + message.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    ),
    # the prompt opens a thought that the rendered answer does not have
    "thinking_prompt": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
}
#: eos, bos and the tokens that stop generation
ENDS = {
    "chatml": ("<|im_end|>", None, ("<|im_end|>",)),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", ("<|eot_id|>",)),
    "qwen3": ("<|im_end|>", None, ("<|im_end|>",)),
    "gemma": ("<bos>", "<bos>", ("<end_of_turn>",)),
    "mistral": ("</s>", "<s>", ("</s>",)),
    "tagged": ("<|im_end|>", None, ("<|im_end|>",)),
    "tagged_wide": ("<|im_end|>", None, ("<|im_end|>",)),
    "plain": (None, None, ()),
    "thinking_prompt": ("<|im_end|>", None, ("<|im_end|>",)),
}


@pytest.fixture
def make_chat():
    """make_chat(family, pad=…, **template_kwargs) → ChatFormat over a readable tokenizer."""
    from headstart.data.chat import ChatFormat

    def make(family: str, pad: str | None = None, **kwargs) -> ChatFormat:
        eos, bos, stops = ENDS[family]
        tokenizer = word_tokenizer(TEMPLATES[family], eos, pad, bos)
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
