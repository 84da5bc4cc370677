"""Pieces of a Llama decoder layer, for one row at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the draft layer that its weights do not show."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    act: str = "silu"
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def inverse_frequencies(shape: Shape) -> list[float]:
    """One angle per rotated pair, per unit of position: default, linear and llama3 rope, partial or not."""
    rotated = int(shape.head_dim * shape.rope.get("partial_rotary_factor", 1.0))
    plain = [shape.rope["rope_theta"] ** (-2 * i / rotated) for i in range(rotated // 2)]
    kind = shape.rope.get("rope_type", "default")
    if kind == "default":
        return plain
    if kind == "linear":
        return [w / shape.rope["factor"] for w in plain]
    if kind == "llama3":
        return [_llama3_frequency(w, shape.rope) for w in plain]
    raise NotImplementedError(kind)


def _llama3_frequency(w: float, rope: dict[str, Any]) -> float:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    turns = rope["original_max_position_embeddings"] * w / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if turns < low:
        return w / rope["factor"]
    if turns > high:
        return w
    keep = (turns - low) / (high - low)
    return (1 - keep) * w / rope["factor"] + keep * w


def rotate(x_d: Tensor, position: int, shape: Shape) -> Tensor:
    """Rotary embedding of one head's vector: pair (i, i + rotated/2) turns by position · w_i; the rest passes."""
    angles = position * torch.tensor(inverse_frequencies(shape), dtype=torch.float64)
    cos, sin = angles.cos().to(x_d.dtype), angles.sin().to(x_d.dtype)
    half = len(angles)
    first, second, rest = x_d[:half], x_d[half : 2 * half], x_d[2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest])


@dataclass
class Row:
    """Query, key and value of one row: lists over heads of vectors [d], rotated."""

    query: list[Tensor]
    key: list[Tensor]
    value: list[Tensor]


def project(weights: Weights, prefix: str, x: Tensor, position: int, shape: Shape) -> Row:
    """q, k and v of one row at one rope position. `prefix` ends before `q_proj`. Norms of q and k are optional."""
    d = shape.head_dim
    query, key, value = (weights[f"{prefix}{name}_proj.weight"] @ x for name in ("q", "k", "v"))

    def turned(x: Tensor, i: int, norm: str) -> Tensor:
        part = x[i * d : (i + 1) * d]
        weight = weights.get(f"{prefix}{norm}.weight")
        return rotate(part if weight is None else rms_norm(part, weight, shape.eps), position, shape)

    return Row(
        [turned(query, i, "q_norm") for i in range(shape.num_heads)],
        [turned(key, i, "k_norm") for i in range(shape.num_kv_heads)],
        [value[i * d : (i + 1) * d] for i in range(shape.num_kv_heads)],
    )


def attend(weights: Weights, prefix: str, row: Row, seen: list[Row], shape: Shape) -> Tensor:
    """Attention output of `row` over the rows it may see, projected back to the hidden width."""
    share = shape.num_heads // shape.num_kv_heads
    heads = []
    for i in range(shape.num_heads):
        scores = torch.stack([row.query[i] @ other.key[i // share] for other in seen]) / math.sqrt(shape.head_dim)
        p = torch.softmax(scores, dim=0)
        heads.append(sum(p[j] * other.value[i // share] for j, other in enumerate(seen)))
    return weights[f"{prefix}o_proj.weight"] @ torch.cat(heads)


def mlp(weights: Weights, prefix: str, x: Tensor, shape: Shape) -> Tensor:
    """Gated MLP. `prefix` ends before `gate_proj`."""
    gate = weights[f"{prefix}gate_proj.weight"] @ x
    gate = {"silu": torch.nn.functional.silu, "gelu_pytorch_tanh": _gelu_tanh}[shape.act](gate)
    return weights[f"{prefix}down_proj.weight"] @ (gate * (weights[f"{prefix}up_proj.weight"] @ x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")
