"""A tokenizer of words "w0", "w1", … beside a small model."""

from __future__ import annotations

from pathlib import Path


def save_word_tokenizer(directory: Path, vocabulary: int = 61) -> None:
    """Write a tokenizer with one token for each word "w<number>"; "w2" ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{n}": n for n in range(vocabulary)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w2").save_pretrained(directory)
