"""The token that no text holds: which one is chosen from what a tokenizer says, and which ones are refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from headstart.data.placeholder import Vocabulary, check, choose, settle
from headstart.data.samples import Sample, used_tokens
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
FIELD = "head.mask_token_id"


def tokenizer_of(special: dict[int, str], words: int, template: str = CHATML, **named: str) -> Any:
    """A tokenizer of `words` words, w0 …, with special tokens at the given ids, which need not be consecutive."""
    free = iter(id for id in range(words + len(special)) if id not in special)
    vocab = {f"w{n}": next(free) for n in range(words)} | {text: id for id, text in special.items()}
    core = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    core.add_special_tokens([AddedToken(text, normalized=False) for text in special.values()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    tokenizer.chat_template = template
    return tokenizer


SMOLLM2 = dict(enumerate(
    "<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep> <filename> <gh_stars> <issue_start> "
    "<issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <jupyter_script> "
    "<empty_output>".split()
))  # fmt: skip
SMOLLM2_NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
SMOLLM2_NAMES |= {"pad_token": "<|im_end|>"}
#: of a vocabulary of 28 words; Llama-3.1's real ids are 128000 …
LLAMA = {28: "<|begin_of_text|>", 29: "<|end_of_text|>", 30: "<|reserved_special_token_0|>"}
LLAMA |= {31: "<|reserved_special_token_1|>", 32: "<|finetune_right_pad_id|>", 33: "<|eot_id|>"}
LLAMA_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"


def test_targets_as_they_are() -> None:
    # SmolLM2: every id has a token, none is reserved: the first special token that chats never write
    smol = tokenizer_of(SMOLLM2, 20, **SMOLLM2_NAMES)
    assert choose(Vocabulary.of(smol, 37, [2, 0]), None, FIELD)[0] == 3
    # Qwen3: the output matrix has more rows than the tokenizer has tokens (151,669 of 151,936 there)
    qwen = tokenizer_of({30: "<|endoftext|>", 31: "<|im_start|>", 32: "<|im_end|>"}, 30, eos_token="<|im_end|>")
    token, why = choose(Vocabulary.of(qwen, 40, [32, 30]), None, FIELD)
    assert (token, why) == (33, "the first id that the tokenizer has no token for")
    # Llama-3.1: a reserved token
    llama = tokenizer_of(LLAMA, 28, LLAMA_TEMPLATE, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    assert choose(Vocabulary.of(llama, 34, [33, 29]), None, FIELD) == (30, "a reserved special token")


@pytest.mark.parametrize("text", ["<|MASK|>", "<mask>", "[MASK]", "<|mask_token|>"])
def test_a_token_named_for_masking_is_preferred(text: str) -> None:
    tokenizer = tokenizer_of(SMOLLM2 | {17: "<unused0>", 18: text}, 20, **SMOLLM2_NAMES)
    assert choose(Vocabulary.of(tokenizer, 39, [2]), None, FIELD)[0] == 18


def test_what_the_data_holds_is_not_taken() -> None:
    """Tokens of prompts count as well as tokens of answers."""
    tokenizer = tokenizer_of(LLAMA, 28, LLAMA_TEMPLATE, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    prompt = Sample("a", np.array([28, 30, 4, 33], np.int32), np.array([-1, -1, 0, 0], np.int32))
    used_V = used_tokens([prompt], 34)
    assert used_V.nonzero().flatten().tolist() == [4, 28, 30, 33]
    vocabulary = Vocabulary.of(tokenizer, 34, [33])
    assert choose(vocabulary, used_V, FIELD)[0] == 31
    # an id without a token, which pretokenised data may hold
    used_V = used_tokens([Sample("b", np.array([34]), np.array([0]))], 36)
    assert choose(Vocabulary.of(tokenizer, 36, [33]), used_V, FIELD)[0] == 35


def test_none_can_be_found() -> None:
    special = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    tokenizer = tokenizer_of(special, 20, unk_token="<|endoftext|>", eos_token="<|im_end|>")
    with pytest.raises(ConfigError, match=r"head.mask_token_id: found null, .*all 23 ids.* 3 special .*set head.m"):
        choose(Vocabulary.of(tokenizer, 23, [2]), None, FIELD)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (2, r"found 2 \('<\|im_end\|>'\), which is the tokenizer's pad token"),
        (1, "which is the tokenizer's bos token"),
        (5, r"found 5 \('<file_sep>'\), which is a token that ends answers"),
        (25, "which occurs in the training data"),
        (37, r"found 37, expected an id of the target, 0 … 36"),
        (-1, "found -1, expected an id"),
    ],
)
def test_a_given_token_is_checked(token: int, words: str) -> None:
    tokenizer = tokenizer_of(SMOLLM2, 20, **SMOLLM2_NAMES)
    vocabulary = Vocabulary.of(tokenizer, 37, [2, 5])
    used_V = torch.zeros(37, dtype=torch.bool)
    used_V[25] = True
    with pytest.raises(ConfigError, match=words):
        check(token, vocabulary, used_V, FIELD)
    check(3, vocabulary, used_V, FIELD)


def test_every_family_with_such_a_token_has_it_filled_in() -> None:
    tokenizer = tokenizer_of(SMOLLM2, 20, **SMOLLM2_NAMES)
    asked = 0
    for family in FAMILIES.values():
        config = family.config()
        settled, said = settle(config, tokenizer, 37, [2])
        if "mask_token_id" not in {field.name for field in fields(config)}:
            assert settled is config and said is None
            continue
        asked += 1
        assert settled.placeholder_token == 3 and said is not None and "head.mask_token_id: 3 ('<repo_name>')" in said
        assert settle(settled, tokenizer, 37, [2]) == (settled, None)
        assert config.adopting(settled) == settled
        assert settled.with_placeholder(7).adopting(settled).placeholder_token == 7
    assert asked >= 2
