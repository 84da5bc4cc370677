"""Triton kernels of the losses on draft logits: one program per row, the gradient written over the logits.

Their twins are the tensor operations of losses/fused.py. Shape legend: C rows of a chunk, U tokens, T teacher rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.kernels.device import tl, triton

#: columns that a kernel holds at once; elements that one program of the scaling kernel takes
BLOCK = 4096
SCALE_BLOCK = 8192

if triton is not None:

    @triton.jit
    def _scale_kernel(x, by, count, BLOCK: tl.constexpr):
        """x *= by; a factor of 1 reads and writes nothing."""
        factor = tl.load(by).to(tl.float32)
        if factor != 1.0:
            index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32) * factor
            tl.store(x + index, value.to(x.dtype.element_ty), mask=index < count)

    @triton.jit
    def _lse_kernel(x, out, tokens, stride, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        top, total = float("-inf"), 0.0
        for start in range(0, tokens, BLOCK):
            value = tl.load(x + row * stride + start + column, mask=start + column < tokens, other=float("-inf"))
            value = value.to(tl.float32)
            new_top = tl.maximum(top, tl.max(value, 0))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(value - new_top), 0)
            top = new_top
        tl.store(out + row, top + tl.log(total))

    @triton.jit
    def _soft_kernel(
        logits, teacher, teacher_lse, teacher_row, row_weight, loss, argmax, tokens, stride, teacher_stride, floor,
        lk, l1, KIND: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program per row: the log-sum-exp, then loss and gradient, the gradient over the logits.

        KIND: 0 soft_ce, 1 kl, 2 lk (eager.SOFT_LOSSES). MIXED: whether lk · LK + l1 · L1 is added to kinds 0 and 1.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        source = tl.load(teacher_row + row)
        teacher += source * teacher_stride
        t_lse = tl.load(teacher_lse + source)
        weight = tl.load(row_weight + row)
        column = tl.arange(0, BLOCK)
        z_max, z_sum, best = float("-inf"), 0.0, 0
        for start in range(0, tokens, BLOCK):
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            block_max = tl.max(z, 0)
            best = tl.where(block_max > z_max, start + tl.argmax(z, 0), best)
            new_max = tl.maximum(z_max, block_max)
            z_sum = z_sum * tl.exp(z_max - new_max) + tl.sum(tl.exp(z - new_max), 0)
            z_max = new_max
        z_lse = z_max + tl.log(z_sum)
        total = 0.0  # Σ p z or Σ p log(p / q)
        overlap = 0.0  # Σ min(p, q)
        below = 0.0  # Σ of q where q < p
        if KIND == 2 or MIXED:
            for start in range(0, tokens, BLOCK):
                inside = start + column < tokens
                z = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
                t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
                p, q = tl.exp(t - t_lse), tl.exp(z - z_lse)
                overlap += tl.sum(tl.minimum(p, q), 0)
                below += tl.sum(tl.where(q < p, q, 0.0), 0)
            overlap += floor
        for start in range(0, tokens, BLOCK):
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
            t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            p, q = tl.exp(t - t_lse), tl.exp(z - z_lse)
            if KIND == 0:
                total += tl.sum(p * z, 0)
                grad = q - p
            elif KIND == 1:
                total += tl.sum(tl.where(p > 0.0, p * ((t - t_lse) - (z - z_lse)), 0.0), 0)
                grad = q - p
            else:
                grad = (q * below - tl.where(q < p, q, 0.0)) / overlap
            if MIXED:
                grad += (lk / overlap + 2.0 * l1) * (q * below - tl.where(q < p, q, 0.0))
            grad = grad * weight
            tl.store(logits + start + column, grad.to(logits.dtype.element_ty), mask=inside)
        if KIND == 0:
            total = z_lse - total
        elif KIND == 2:
            total = -tl.log(overlap)
        if MIXED:
            total += l1 * 2.0 * (1.0 - overlap) - lk * tl.log(overlap)
        tl.store(loss + row, total)
        tl.store(argmax + row, best)

    @triton.jit
    def _hard_kernel(
        logits, label, row_weight, grad_weight, loss, argmax, tokens, stride, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program per row: cross-entropy with the label, and the gradient over the logits."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        wanted = tl.load(label + row).to(tl.int32)
        weight = tl.load(grad_weight + row)
        column = tl.arange(0, BLOCK)
        z_max, z_sum, best, at_label = float("-inf"), 0.0, 0, 0.0
        for start in range(0, tokens, BLOCK):
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            block_max = tl.max(z, 0)
            best = tl.where(block_max > z_max, start + tl.argmax(z, 0), best)
            new_max = tl.maximum(z_max, block_max)
            z_sum = z_sum * tl.exp(z_max - new_max) + tl.sum(tl.exp(z - new_max), 0)
            z_max = new_max
            at_label += tl.sum(tl.where(start + column == wanted, z, 0.0), 0)
        z_lse = z_max + tl.log(z_sum)
        for start in range(0, tokens, BLOCK):
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
            grad = (tl.exp(z - z_lse) - tl.where(start + column == wanted, 1.0, 0.0)) * weight
            tl.store(logits + start + column, grad.to(logits.dtype.element_ty), mask=inside)
        tl.store(loss + row, (z_lse - at_label) * tl.load(row_weight + row))
        tl.store(argmax + row, best)


def logsumexp(x_TU: Tensor) -> Tensor:
    """log Σ exp of every row, float32 [T]."""
    rows, tokens = x_TU.shape
    lse_T = torch.empty(rows, dtype=torch.float32, device=x_TU.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(tokens))
        _lse_kernel[(rows,)](x_TU, lse_T, tokens, x_TU.stride(0), BLOCK=block, num_warps=8)
    return lse_T


def soft_rows(
    kind: int,
    floor: float,
    logits_CU: Tensor,
    teacher_TU: Tensor,
    teacher_lse_T: Tensor,
    teacher_row_C: Tensor,
    weight_C: Tensor,
    mix: tuple[float, float] = (0.0, 0.0),
) -> tuple[Tensor, Tensor, Tensor]:
    """(unweighted loss float32 [C], argmax int64 [C], gradient times `weight_C`, written over the logits).

    Args:
        kind, floor: place in eager.SOFT_LOSSES and eager.LK_FLOOR.
        teacher_lse_T: `logsumexp` of the teacher's rows.
        mix: see eager.divergence.
    """
    rows, tokens = logits_CU.shape
    loss_C = torch.empty(rows, dtype=torch.float32, device=logits_CU.device)
    argmax_C = torch.empty(rows, dtype=torch.int64, device=logits_CU.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(tokens))
        _soft_kernel[(rows,)](
            logits_CU, teacher_TU, teacher_lse_T, teacher_row_C.contiguous(), weight_C.float().contiguous(), loss_C,
            argmax_C, tokens, logits_CU.stride(0), teacher_TU.stride(0), floor,
            float(mix[0]), float(mix[1]), KIND=kind, MIXED=int(any(mix)), BLOCK=block, num_warps=8,
        )  # fmt: skip
    return loss_C, argmax_C, logits_CU


def hard_rows(
    logits_CU: Tensor, label_C: Tensor, row_weight_C: Tensor, grad_weight_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted cross-entropy float32 [C], argmax int64 [C], gradient, written over the logits).

    Args: row_weight_C, grad_weight_C: factors of each row's loss and of its gradient.
    """
    rows, tokens = logits_CU.shape
    loss_C = torch.empty(rows, dtype=torch.float32, device=logits_CU.device)
    argmax_C = torch.empty(rows, dtype=torch.int64, device=logits_CU.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(tokens))
        _hard_kernel[(rows,)](
            logits_CU, label_C.contiguous(), row_weight_C.float().contiguous(), grad_weight_C.float().contiguous(),
            loss_C, argmax_C, tokens, logits_CU.stride(0), BLOCK=block, num_warps=8,
        )  # fmt: skip
    return loss_C, argmax_C, logits_CU


def scale_(x: Tensor, by: Tensor) -> None:
    """x *= by, in place; a factor of 1 reads and writes nothing. Args: by: scalar tensor on the device of x."""
    if x.numel():
        _scale_kernel[(triton.cdiv(x.numel(), SCALE_BLOCK),)](x, by, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)
