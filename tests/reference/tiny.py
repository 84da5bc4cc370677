"""Small random documents, weights and comparisons for tests against the naive implementations."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from reference.documents import Document, Ends
from reference.llama import Weights


def turns_of(pattern: str) -> list[int]:
    """Readable turns: "..AAA..BB" → prompt, turn 0, prompt, turn 1. A change of letter starts another turn."""
    letters = sorted(set(pattern) - {"."})
    return [-1 if c == "." else letters.index(c) for c in pattern]


def random_document(
    pattern: str, vocab: int, width: int, streams: int, seed: int, dtype: torch.dtype = torch.float32
) -> Document:
    """A document with random tokens and features; the turn lengths are the pattern's."""
    rng = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    rows = len(pattern)
    return Document(
        [rng.randrange(vocab) for _ in range(rows)],
        turns_of(pattern),
        torch.randn(rows, width, generator=noise, dtype=dtype),
        torch.randn(rows, streams, width, generator=noise, dtype=dtype),
    )


def random_ends(vocab: int, width: int, seed: int, dtype: torch.dtype = torch.float32, **kwargs: object) -> Ends:
    """Embeddings of unit size and an output head whose logits spread by about 2."""
    noise = torch.Generator().manual_seed(seed)
    embed = torch.randn(vocab, width, generator=noise, dtype=dtype)
    lm_head = torch.randn(vocab, width, generator=noise, dtype=dtype) * 2 / width**0.5
    return Ends(embed, lm_head, **kwargs)  # type: ignore[arg-type]


def randomise(module: nn.Module, seed: int, names: Iterable[str] | None = None) -> None:
    """Give every parameter (or those named) values that make each path matter: norms near 1, biases near 0, the rest N(0, 1/in)."""
    noise = torch.Generator().manual_seed(seed)
    wanted = None if names is None else set(names)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            value = torch.randn(parameter.shape, generator=noise)
            if parameter.dim() == 1:
                value = value * 0.3 + (0.0 if name.endswith("bias") else 1.0)
            else:
                value = value * 1.2 / parameter.shape[1] ** 0.5
            if wanted is None or name in wanted:
                parameter.copy_(value)


def double_weights(module: nn.Module) -> Weights:
    """The module's trainable parameters as float64 leaves."""
    return {
        name: parameter.detach().double().requires_grad_(True)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def double_document(document: Document) -> Document:
    return Document(document.tokens, document.turns, document.hidden_TD.double(), document.streams_TkD.double())


def double_ends(ends: Ends) -> Ends:
    bias = None if ends.bias_V is None else ends.bias_V.double()
    return Ends(ends.embed_VD.double(), ends.lm_head_VD.double(), bias, ends.softcap, ends.scale)


def assert_near(actual: Tensor, expected: Tensor, what: str, tolerance: float = 2e-5) -> None:
    """Largest error relative to the largest expected value.

    2e-5 is about 170 float32 roundings (1.2e-7): sums over a few hundred terms through one layer, K steps deep.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = (actual - expected).abs().max().item()
    size = expected.abs().max().item()
    assert error <= tolerance * size + 1e-7, f"{what}: off by {error:.3g} where the largest value is {size:.3g}"
