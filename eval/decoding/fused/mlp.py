"""MLPs of fused layers. A layer's MLP is whatever has the methods of `MLP`.

Shape legend: R rows, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from headstart.eval.decoding.fused.experts import fuse_experts
from headstart.eval.decoding.fused.weights import merged
from headstart.eval.kernels.linear import Ending, Linear, end_sublayer
from headstart.eval.kernels.norm import NormWeights


class MLP(Protocol):
    """What a layer does after its attention."""

    def end(
        self, x_RD: Tensor, residual_RD: Tensor, ending: Ending, norm: NormWeights | None
    ) -> tuple[Tensor, Tensor | None]:
        """(residual + the MLP's result of x after its `ending`, the norm of that or None without `norm`)."""

    def linears(self) -> list[Linear]:
        """Products whose kernels are to be chosen."""


@dataclass(frozen=True)
class MLPFacts:
    """An MLP of two products: names of its projections inside the module.

    Attributes:
        first: (gate, up), or one projection: of gate and up together, or, with `alone`, without a gate.
        down: the second product.
        activation: a key of kernels.linear.ACTIVATIONS.
        alone: the activation is of the whole first product.
    """

    first: tuple[str, ...]
    down: str
    activation: str
    alone: bool


class FusedMLP:
    """down(act(gate(x)) · up(x)), or down(act(first(x)))."""

    def __init__(self, mlp: nn.Module, facts: MLPFacts):
        first = [mlp.get_submodule(name) for name in facts.first]
        self.first = Linear(*merged(first), facts.activation, alone=facts.alone)
        self.down = Linear(*merged([mlp.get_submodule(facts.down)]), residual=True)

    def end(
        self, x_RD: Tensor, residual_RD: Tensor, ending: Ending, norm: NormWeights | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.down.end(self.first(x_RD), residual_RD, ending, norm)

    def linears(self) -> list[Linear]:
        return [self.first, self.down]


class OtherMLP:
    """An MLP that runs as it is, but for its experts (experts.py)."""

    def __init__(self, mlp: nn.Module):
        self.mlp = fuse_experts(mlp)

    def end(
        self, x_RD: Tensor, residual_RD: Tensor, ending: Ending, norm: NormWeights | None
    ) -> tuple[Tensor, Tensor | None]:
        result = self.mlp(x_RD[None])
        # a mixture of experts may also return its router's scores
        y_RD = (result[0] if isinstance(result, tuple) else result).reshape(x_RD.shape)
        return end_sublayer(y_RD, residual_RD, ending, norm)

    def linears(self) -> list[Linear]:
        return []


def make_mlp(mlp: nn.Module, facts: MLPFacts | None) -> MLP:
    """The fastest form of an MLP. Args: facts: None where it is not one of two products."""
    return OtherMLP(mlp) if facts is None else FusedMLP(mlp, facts)
