"""Mixtures of experts inside fused layers. Routers, shared experts and gates stay the model's own; experts are ours.

In transformers, every mixture has an experts module with one interface: (hidden_states, chosen experts, their weights)
→ mixed rows, with the weights of all experts in two parameters. `fuse_experts` replaces it by FusedExperts where both
give the same in float32. Other experts stay as they are.
Shape legend: see eval/kernels/experts.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headstart.eval.kernels.experts import GELU_TANH, SILU, Experts, GatedActivation, experts_eager, mix_experts

#: largest relative distance (L2) from the module's own forward, in float32, that passes as rounding
TOLERANCE = 1e-5
#: experts and rows of that comparison
TRIED_EXPERTS, TRIED_ROWS = 2, 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedExperts(nn.Module):
    """An experts module whose products run in our kernels. It shares the module's parameters."""

    def __init__(self, own: nn.Module, experts: Experts):
        super().__init__()
        self.own, self.experts = own, experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mix_experts(hidden_states, top_k_index, top_k_weights, self.experts)


def fuse_experts(module: nn.Module) -> nn.Module:
    """Replace the experts inside `module`, a copy that shares its parameters with the model's. Returns `module`."""
    for parent, name, child in list(_children(module)):
        experts = experts_of(child)
        if experts is not None:
            parent._modules[name] = FusedExperts(child, experts)
    return module


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of every module inside."""
    for parent in module.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def experts_of(own: nn.Module) -> Experts | None:
    """The weights of an experts module and its activation; None where our experts compute something else.

    Raises: out of memory as it is.
    """
    facts = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
    if any(not hasattr(own, name) for name in facts):
        return None
    try:
        experts = _read(own)
        small = _first_experts(own)
        return experts if _mixes_alike(small, _read(small, experts.activation)) else None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - a module of another structure keeps its own forward
        return None


def _read(own: Any, activation: Any = None) -> Experts:
    """The weights of an experts module, as views. Args: activation: None = find it.

    Raises: ValueError, or whatever the module's own activation raises, for a module of another structure.
    """
    first, second = (own.gate_up_proj if own.has_gate else own.up_proj), own.down_proj
    biases: list[Tensor | None] = [None, None]
    if own.has_bias:
        biases = [own.gate_up_proj_bias if own.has_gate else own.up_proj_bias, own.down_proj_bias]
    for weight in (first, second):
        if weight.dim() != 3 or weight.dtype not in DTYPES or weight.shape[0] != own.num_experts:
            raise ValueError(f"found weights {tuple(weight.shape)} in {weight.dtype}")
    if activation is None:
        activation = (_gated_activation(own, first.device) or own._apply_gate) if own.has_gate else own.act_fn
    weights = [weight.detach().transpose(1, 2) if own.is_transposed else weight.detach() for weight in (first, second)]
    first_bias, second_bias = (None if bias is None else bias.detach() for bias in biases)
    return Experts(weights[0], weights[1], first_bias, second_bias, activation)


def _gated_activation(own: Any, device: torch.device) -> GatedActivation | None:
    """Our form of the module's activation, compared on numbers within and beyond its limits; None = we have none."""
    limit = getattr(own, "limit", None)
    plain = [SILU, GELU_TANH]
    clamped = [replace(gate, limit=float(limit)) for gate in plain] if limit is not None else []
    if limit is not None and hasattr(own, "alpha"):
        clamped.append(GatedActivation(slope=float(own.alpha), limit=float(limit), shift=1.0))
    noise = torch.Generator().manual_seed(0)
    scale = 8.0 if limit is None else max(8.0, 2 * float(limit))
    probe = (scale * torch.randn((64, 16), generator=noise)).to(device)
    expected = own._apply_gate(probe)
    for gate in plain + clamped:
        for gate in (gate, replace(gate, interleaved=True)):  # noqa: PLW2901, B020
            if torch.allclose(gate(probe), expected, rtol=1e-5, atol=1e-5):
                return gate
    return None


def _first_experts(own: Any) -> Any:
    """A float32 copy of the module with its first experts only, which runs transformers' loop over experts."""
    count = min(TRIED_EXPERTS, own.num_experts)
    few = copy.copy(own)
    few.__dict__["_parameters"] = {
        name: None if value is None else nn.Parameter(value.detach()[:count].float(), requires_grad=False)
        for name, value in own._parameters.items()
    }
    few.num_experts = count
    few.config = copy.copy(own.config)
    # the public setter would also change configs inside this one, which the copy shares
    few.config._experts_implementation_internal = "eager"
    return few


@torch.no_grad()
def _mixes_alike(own: Any, experts: Experts) -> bool:
    """Whether our experts mix random rows as the module's own forward does."""
    noise = torch.Generator().manual_seed(1)
    device, width = experts.first_ECD.device, experts.first_ECD.shape[2]
    x_RD = torch.randn((TRIED_ROWS, width), generator=noise).to(device)
    index_Rk = torch.stack([torch.randperm(own.num_experts, generator=noise) for _ in range(TRIED_ROWS)]).to(device)
    weight_Rk = torch.rand(index_Rk.shape, generator=noise).to(device)
    theirs = own(x_RD, index_Rk, weight_Rk)
    distance = (experts_eager(x_RD, index_Rk, weight_Rk, experts) - theirs).norm() / theirs.norm()
    return bool(distance <= TOLERANCE)
