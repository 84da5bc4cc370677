"""Small targets for the parity gates: an architecture of `bench.architectures` that was taught a toy language.

    bash scripts/parity/vllm.sh --target random:Qwen3

A random model's answers are noise, of which a head foresees next to nothing: all faults of an engine would look alike.
So the model is trained for some seconds on sentences of a toy language. Within a word the next letter is nearly
certain, and the next word follows a rule with exceptions. A head drafts such answers rightly half of the time, as long
as it reads the right layers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.bench.architectures import config_of, randomise
from headstart.heads.targets.load import with_attention

PREFIX = "random:"
#: sizes that vLLM's kernels for CPUs accept; rows of the vocabulary beyond the tokenizer's are never said
SERVED = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 2048, "moe_intermediate_size": 64,
}  # fmt: skip
#: window of a target whose layers all have the same one. vLLM 0.32 gives such a window to the head's layer, too, so
#: that texts beyond it are drafted worse than here: with Phi-3 and a window of 12, tau was 1.98 there and 3.03 here
UNREACHED_WINDOW = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Language:
    """Words, and for each the one that mostly follows it."""

    words: list[str]
    follower: dict[str, str]

    @classmethod
    def of(cls, seed: int, size: int = 24) -> Language:
        chance = random.Random(seed)
        words: list[str] = []
        while len(words) < size:
            word = "".join(chance.choice("bdfklmnprstvz") + chance.choice("aeiou") for _ in range(chance.randint(1, 3)))
            if word not in words:
                words.append(word)
        return cls(words, dict(zip(words, chance.sample(words, size), strict=True)))

    def sentence(self, chance: random.Random, length: int) -> str:
        """A sentence of `length` words: three in four are the follower of the word before."""
        said = [chance.choice(self.words)]
        while len(said) < length:
            said.append(self.follower[said[-1]] if chance.random() < 0.75 else chance.choice(self.words))
        return " ".join(said)

    def talks(self, seed: int) -> Iterator[tuple[str, str]]:
        """Endless prompts and answers; an answer goes on where its prompt ended."""
        chance = random.Random(seed)
        while True:
            asked = self.sentence(chance, chance.randint(2, 4))
            yield asked, self.follower[asked.rsplit(" ", 1)[-1]] + " " + self.sentence(chance, chance.randint(8, 12))


def byte_tokenizer() -> Any:
    """A tokenizer of 259 tokens: one for each byte, and ChatML's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: index for index, token in enumerate([*SPECIAL, *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[2], unk_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL[1]]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def untaught_model(name: str) -> Any:
    """The architecture at sizes that serving engines accept, in float32, with random weights that all matter.

    Args: name: of bench.architectures.ARCHITECTURES.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(name, "tiny")
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        known = part.to_dict()
        for key, value in SERVED.items():
            if known.get(key) is not None:
                setattr(part, key, value)
        if known.get("sliding_window") and not known.get("layer_types"):
            part.sliding_window = UNREACHED_WINDOW
    torch.manual_seed(0)
    model, _ = with_attention(
        lambda attention: AutoModelForCausalLM.from_config(config, attn_implementation=attention), "sdpa"
    )
    randomise(model)
    return model


def teach(model: nn.Module, tokenizer: Any, language: Language, steps: int, seed: int = 0) -> float:
    """Train the model on the language. Returns: the last loss, in nats per letter."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    talks, loss_value = language.talks(seed), float("nan")
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 10, 2 * (1 - step / steps))
        texts = [chat(tokenizer, *next(talks)) for _ in range(8)]
        length = min(map(len, texts))
        ids_BT = torch.tensor([text[:length] for text in texts])
        loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        loss_value = float(loss.detach())
    return loss_value


def chat(tokenizer: Any, asked: str, answer: str) -> list[int]:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class SmallTarget:
    """Files of a taught target.

    Attributes:
        target: its directory. prompts: that it answers, for training a head. held_out: others, for comparing.
    """

    target: Path
    prompts: Path
    held_out: Path


def small_target(name: str, directory: Path, steps: int = 150, prompts: int = 96) -> SmallTarget:
    """Make the files of `random:NAME` in `directory`; those that are there already are kept.

    Raises: ConfigError for an unknown architecture.
    """
    from transformers import GenerationConfig

    files = SmallTarget(directory / "target", directory / "prompts.jsonl", directory / "toy_language.jsonl")
    language = Language.of(0)
    if not (files.target / "config.json").is_file():
        model, tokenizer = untaught_model(name), byte_tokenizer()
        loss = teach(model.train(), tokenizer, language, steps)
        model.generation_config = GenerationConfig(eos_token_id=2, bos_token_id=1, pad_token_id=0)
        model.eval().save_pretrained(files.target)
        tokenizer.save_pretrained(files.target)
        (directory / "taught.json").write_text(json.dumps({"architecture": name, "steps": steps, "loss": loss}))
    for path, seed, count in ((files.prompts, 1, prompts), (files.held_out, 2, 16)):
        talks = language.talks(seed)
        path.write_text("".join(json.dumps({"prompt": next(talks)[0]}) + "\n" for _ in range(count)))
    return files
