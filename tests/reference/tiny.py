"""Small random documents, weights and comparisons for tests against the naive implementations."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.heads.base import Head, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import TargetEnds, Teacher
from reference.documents import Document, Ends, Sums
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


#: what the config of a small target says, whatever its architecture
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: tokens that the random targets, and the random heads, say most of the time: so that heads are sometimes right
FAVOURITES = (3, 21, 80)


def favour(weight_VD: Tensor, rows: Iterable[int], factor: float = 5.0) -> None:
    """Stretch some rows of an output matrix, so that the argmax is mostly one of them."""
    with torch.no_grad():
        weight_VD[list(rows)] *= factor


def random_ends(vocab: int, width: int, seed: int, dtype: torch.dtype = torch.float32, **kwargs: object) -> Ends:
    """Embeddings of unit size and an output head whose logits spread by about 1, those of the favourites by 5."""
    noise = torch.Generator().manual_seed(seed)
    embed = torch.randn(vocab, width, generator=noise, dtype=dtype)
    lm_head = torch.randn(vocab, width, generator=noise, dtype=dtype) / width**0.5
    favour(lm_head, FAVOURITES)
    return Ends(embed, lm_head, **kwargs)  # type: ignore[arg-type]


def randomise(module: nn.Module, seed: int) -> None:
    """Give every parameter values that make each path matter: norms near 1, biases near 0, matrices N(0, 1.4 / in)."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            value = torch.randn(parameter.shape, generator=noise)
            if parameter.dim() == 1:
                value = value * 0.3 + (0.0 if name.endswith("bias") else 1.0)
            else:
                value = value * 1.2 / parameter.shape[1] ** 0.5
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
    It is also what rope costs a float64 module: its angles are float32, 40 rad carry 2e-6.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = (actual - expected).abs().max().item()
    size = expected.abs().max().item()
    assert error <= tolerance * size + 1e-7, f"{what}: off by {error:.3g} where the largest value is {size:.3g}"


def feature_batch(
    documents: list[Document], ends: Ends, depth: int, pad_to: int = 0, noise_seed: int = 9
) -> FeatureBatch:
    """The documents as a head sees them. Padding rows hold loud noise: whatever reads them shows."""
    pairs = [(torch.tensor(x.tokens), torch.tensor(x.turns, dtype=torch.int64)) for x in documents]
    batch = FeatureBatch.pack(pairs, depth, pad_to, tuple(f"sample-{i}" for i in range(len(documents))))
    hidden_RD = torch.cat([x.hidden_TD for x in documents])
    streams_RkD = torch.cat([x.streams_TkD for x in documents])
    choice_R = torch.stack([ends.logits(hidden).argmax() for hidden in hidden_RD])
    padding = batch.tokens_R.shape[0] - hidden_RD.shape[0]
    noise = torch.Generator().manual_seed(noise_seed)
    loud = lambda x: torch.cat([x, 50 * torch.randn(padding, *x.shape[1:], generator=noise).to(x.dtype)])  # noqa: E731
    if padding:
        batch.tokens_R[-padding:] = torch.randint(0, ends.embed_VD.shape[0], (padding,), generator=noise)
    return replace(
        batch,
        hidden_RD=loud(hidden_RD),
        streams_RkD=loud(streams_RkD),
        teacher_argmax_A=choice_R[batch.anchors.row_A + 1],
    )


def teacher_of(ends: Ends) -> Teacher:
    return Teacher(ends.lm_head_VD, ends.bias_V, ends.softcap, ends.scale)


def ends_of(ends: Ends) -> TargetEnds:
    return TargetEnds(ends.embed_VD, teacher_of(ends))


def prefixes(loss: Loss, depth: int) -> list[int]:
    """Rows whose depths 1 … d were all hits, for d = 1 … `depth`."""
    return [int((loss.run_A >= d).sum()) for d in range(1, depth + 1)]


def check_against(
    head: Head, batch: FeatureBatch, teacher: Teacher, expected: Sums, weights: Weights, tolerance: float = 2e-5
) -> None:
    """Sums, counts and every parameter's gradient, of each depth by itself and of the normalised loss."""
    loss = head.loss(batch, teacher)
    check_counts(head.loss_counts(batch), expected)
    check_sums(head, loss, expected)
    assert_near(loss.sum_T, torch.stack(expected.loss), "sum_T", tolerance)
    gradients_T = [naive_gradients(total, weights) for total in expected.loss]
    for t, (term, wanted, count) in enumerate(zip(head.terms, gradients_T, expected.count, strict=True)):
        if count > 0:
            check_gradients(head, head.loss(batch, teacher).sum_T[t], wanted, f"term {term.name}", tolerance)
    # L = Σ_t weight_t · S_t / N_t; a term without positions adds nothing
    scales = [w / n if n > 0 else 0.0 for w, n in zip(head.term_weights().tolist(), expected.count, strict=True)]
    total = sum(scale * s for scale, s in zip(scales, head.loss(batch, teacher).sum_T, strict=True))
    normalised = {name: sum(k * g[name] for k, g in zip(scales, gradients_T, strict=True)) for name in weights}
    check_gradients(head, total, normalised, "normalised loss", tolerance)

    # the training loop's promise: what is differentiated is a multiple of (sum_T * scale_T).sum(), here three times it
    scale_T = torch.tensor(scales)
    scaled = head.loss(batch, teacher, scale_T)
    check_sums(head, scaled, expected)
    assert_near(scaled.sum_T, torch.stack(expected.loss), "sum_T, scaled", tolerance)
    # float32 scales round at 6e-8
    total = 3 * (scaled.sum_T * scale_T).sum()
    tripled = {name: 3 * gradient for name, gradient in normalised.items()}
    check_gradients(head, total, tripled, "normalised loss, scaled", max(tolerance, 1e-6))


def check_sums(head: Head, loss: Loss, expected: Sums) -> None:
    """Counts of the terms, both sides of every metric, and runs of hits where the head walks chains."""
    check_counts(loss.count_T, expected)
    assert head.metrics(head.depth) == expected.metrics
    check_metrics(loss, expected)
    assert (None if loss.run_A is None else prefixes(loss, head.depth)) == expected.prefix


def check_counts(count_T: Tensor, expected: Sums) -> None:
    """Divisors of the terms: equal where they are whole numbers; sums of weights round."""
    assert count_T.tolist() == [count if count == int(count) else pytest.approx(count) for count in expected.count]


def check_metrics(loss: Loss, expected: Sums) -> None:
    """Both sides of every metric. Counts are whole numbers below 10^4, which 1e-5 tells apart."""
    for sides, wanted in ((loss.numerator_M, expected.numerators), (loss.denominator_M, expected.denominators)):
        assert sides.tolist() == pytest.approx(wanted, rel=1e-5)


def naive_gradients(total: Tensor, weights: Weights) -> Weights:
    """Gradient of one of a naive twin's sums, zeros where it does not reach."""
    if not total.requires_grad:
        return {name: torch.zeros_like(weight) for name, weight in weights.items()}
    found = torch.autograd.grad(total, list(weights.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def check_gradients(head: Head, actual: Tensor, expected: Weights, what: str, tolerance: float = 2e-5) -> None:
    found = gradients(head, actual)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(found[name], gradient, f"{what}: gradient of {name}", tolerance)


def gradients(head: Head, loss: Tensor) -> dict[str, Tensor]:
    """Every trainable parameter's gradient of `loss` (zeros where it does not reach)."""
    head.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in head.named_parameters()
        if p.requires_grad
    }
