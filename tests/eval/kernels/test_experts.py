"""Chosen experts: the eager twin against a naive loop, the kernels against the twin (GPU or Triton's interpreter)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eval_help import KERNEL_DTYPES, close, needs_kernels, random
from reference.experts import clamped_swiglu, mixture, swiglu
from torch import Tensor

from headstart.eval.kernels import experts as experts_module
from headstart.eval.kernels.experts import (
    GELU_TANH,
    SILU,
    Experts,
    GatedActivation,
    experts_eager,
    experts_kernel,
    sorted_tiles,
)

CLAMPED = GatedActivation(slope=1.702, limit=7.0, shift=1.0, interleaved=True)


def made(
    activation: object, experts: int = 5, width: int = 24, hidden: int = 40, bias: bool = False, across: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Experts:  # fmt: skip
    """Args: across: outputs are neighbours in memory."""
    channels = 2 * width if isinstance(activation, GatedActivation) else width
    shapes = [(experts, channels, hidden), (experts, hidden, width)]
    weights = []
    for seed, (count, out, into) in enumerate(shapes):
        if across:
            weights.append(random(count, into, out, dtype=dtype, seed=seed).transpose(1, 2))
        else:
            weights.append(random(count, out, into, dtype=dtype, seed=seed))
    biases = [random(*shape[:2], dtype=dtype, seed=7 + n) if bias else None for n, shape in enumerate(shapes)]
    return Experts(*weights, *biases, activation)  # type: ignore[arg-type]


def routed(rows: int, per_row: int, experts: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(experts, generator=noise)[:per_row] for _ in range(rows)])
    return chosen.to(random(1).device), random(rows, per_row, seed=seed).softmax(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("gate", "naive"), [(SILU, swiglu), (CLAMPED, clamped_swiglu)])
def test_the_eager_twin_is_the_naive_mixture(gate: GatedActivation, naive: object, bias: bool) -> None:
    experts, (chosen, weight) = made(gate, bias=bias), routed(4, 2, 5)
    chosen[1, 0] = 5  # no such expert
    x = 3 * random(4, 40, seed=9)
    found = experts_eager(x, chosen, weight, experts)
    tensors = (x, chosen, weight, experts.first_ECD, experts.second_EDN)
    biases = [None if b is None else b.tolist() for b in (experts.first_bias_EC, experts.second_bias_ED)]
    expected = mixture(*(t.tolist() for t in tensors), *biases, naive, gate.interleaved)  # type: ignore[arg-type]
    close(found, torch.tensor(expected, device=found.device))


def test_a_limit_holds_gates_from_above_and_factors_from_both_sides() -> None:
    gate, factor = torch.tensor([[-3.0, 3.0, -0.5]]), torch.tensor([[5.0, -5.0, 0.5]])
    held = torch.tensor([[-3.0, 1.0, -0.5]]) * torch.sigmoid(torch.tensor([[-3.0, 1.0, -0.5]]))
    close(replace(SILU, limit=1.0)(torch.cat([gate, factor], -1)), held * torch.tensor([[1.0, -1.0, 0.5]]))


def test_tiles_hold_every_pair_once_and_one_expert_each() -> None:
    noise = torch.Generator().manual_seed(0)
    expert = torch.randint(0, 6, (50,), generator=noise)
    expert[expert == 4] = 2  # one expert is not chosen
    expert[7] = 6  # and one does not exist
    order, tile_expert, first, count = sorted_tiles(expert, 6, 16)
    held = []
    for e, start, length in zip(tile_expert.tolist(), first.tolist(), count.tolist(), strict=True):
        pairs = order[start : start + length].tolist()
        assert length <= 16 and all(int(expert[pair]) == e for pair in pairs)
        held += pairs
    assert sorted(held) == [pair for pair in range(50) if pair != 7]


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("rows", "per_row"), [(1, 3), (4, 2), (23, 4)])
@pytest.mark.parametrize("way", ["single", "tiles", "sorted"])
def test_kernels_equal_their_twin(
    rows: int, per_row: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(experts_module, "SORTED_PAIRS", 0 if way == "sorted" else 256)
    chosen, weight = routed(rows, per_row, 5)
    chosen[0, 0] = 5  # no such expert
    x = random(rows, 40, dtype=dtype, seed=9)
    for activation, bias, across in (
        (SILU, False, False), (GELU_TANH, True, False), (CLAMPED, True, True), (torch.relu, False, True),
    ):  # fmt: skip
        experts = made(activation, bias=bias, across=across, dtype=dtype)
        close(experts_kernel(x, chosen, weight, experts, way == "single"), experts_eager(x, chosen, weight, experts))


@needs_kernels
def test_many_pairs_of_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    experts = made(SILU, experts=3, width=64, hidden=64)
    chosen, weight = routed(40, 2, 3)
    chosen[:, 0] = 1
    chosen[:, 1] = torch.where(chosen[:, 1] == 1, 2, chosen[:, 1])
    x = random(40, 64, seed=9)
    expected = experts_eager(x, chosen, weight, experts)
    close(experts_kernel(x, chosen, weight, experts, single=False), expected)
    monkeypatch.setattr(experts_module, "SORTED_PAIRS", 0)
    close(experts_kernel(x, chosen, weight, experts, single=False), expected)


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "dtype", "single"),
    [(1, torch.float32, True), (20, torch.float32, True), (21, torch.float32, False), (1, torch.float16, False)],
)
def test_when_pairs_are_multiplied_one_by_one(
    rows: int, dtype: torch.dtype, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to SINGLE_PAIRS (8) for each of five experts, in float32 only."""
    pytest.importorskip("triton")
    taken: list[bool] = []
    product = experts_module._product

    def watched(*given: Any) -> None:
        taken.append(given[-1] is None)
        product(*given)

    monkeypatch.setattr(experts_module, "_product", watched)
    experts, (chosen, weight), x = made(SILU, dtype=dtype), routed(rows, 2, 5), random(rows, 40, dtype=dtype, seed=9)
    close(experts_kernel(x, chosen, weight, experts), experts_eager(x, chosen, weight, experts))
    assert taken == [single, single]
