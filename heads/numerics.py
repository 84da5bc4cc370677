"""Precision rules shared by heads and losses."""

from __future__ import annotations

import torch
from torch import Tensor

#: names of dtypes in a recipe
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def wide(x: Tensor) -> Tensor:
    """At least float32: float64 stays (reference tests), everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """[R]: how far each row [R, …] of `found` is from the expected one (L2), relative to the expected row's size.

    Rows of almost nothing count as a millionth of the largest row.
    """
    found, expected = wide(found).flatten(1), wide(expected).flatten(1)
    size_R = expected.norm(dim=1)
    return (found - expected).norm(dim=1) / size_R.clamp(min=1e-6 * float(size_R.max()) + 1e-30)


def weight_grad(grad_nO: Tensor, x_nI: Tensor, dtype: torch.dtype) -> Tensor:
    """gradᵀ x in the parameter's dtype. For float32 on CUDA, the matrix unit's float32 sums are returned unrounded."""
    if grad_nO.is_cuda and grad_nO.dtype != dtype == torch.float32:
        return torch.mm(grad_nO.t(), x_nI, out_dtype=torch.float32)
    return (grad_nO.t() @ x_nI).to(dtype)


def add_weight_grad(sum_OI: Tensor, grad_nO: Tensor, x_nI: Tensor) -> None:
    """sum += gradᵀ x, in place. On CUDA the matrix unit adds in float32, and no tensor of the sum's size is made."""
    if grad_nO.dtype == sum_OI.dtype:
        sum_OI.addmm_(grad_nO.t(), x_nI)
    elif grad_nO.is_cuda and sum_OI.dtype == torch.float32:
        torch.addmm(sum_OI, grad_nO.t(), x_nI, out_dtype=torch.float32, out=sum_OI)
    else:
        sum_OI.add_(grad_nO.t() @ x_nI)


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype activations run in: autocast's where it is on, else the parameter's."""
    kind = parameter.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
