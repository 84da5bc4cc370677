"""Triton kernel of the losses of drafted blocks: one program per slot, the gradient written over the logits.

Its twin is the tensor operations of losses/block.py. Shape legend: C slots of a chunk, U tokens, T teacher rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.kernels.device import tl, triton

#: Columns that a program holds at once, and its warps. A row of 50,000 tokens and its teacher's stay in the L2 cache
#: between the sweeps only while few programs run at a time: large ones.
BLOCK, WARPS = 8192, 16

#: Neighbouring columns that are summed up first. A thread loads as many at once, so that sums over a row need nothing
#: of other threads until the row's end.
GROUP = 8

#: rows of the table of statistics: float32 [STATS, C]
LSE, CE, OVERLAP, BELOW, KL = range(5)
STATS = 5

if triton is not None:

    @triton.jit
    def _grouped(x, GROUP: tl.constexpr):
        """Sums of neighbouring columns."""
        return tl.sum(tl.reshape(x, (x.shape[0] // GROUP, GROUP)), 1)

    @triton.jit
    def _softmax_sweep(logits, tokens, BLOCK: tl.constexpr, GROUP: tl.constexpr):
        """(log-sum-exp, index of the largest) of a row. Every group of columns keeps a maximum and a sum of its own."""
        column = tl.arange(0, BLOCK)
        first = tl.arange(0, BLOCK // GROUP) * GROUP
        top = tl.full((BLOCK // GROUP,), -1.0e30, tl.float32)
        total = tl.zeros((BLOCK // GROUP,), tl.float32)
        place = tl.zeros((BLOCK // GROUP,), tl.int32)  # where the group's columns were when the largest was found
        for start in range(0, tokens, BLOCK):
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            z = tl.reshape(z, (BLOCK // GROUP, GROUP))
            largest = tl.max(z, 1)
            place = tl.where(largest > top, start + first, place)
            new_top = tl.maximum(top, largest)
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top[:, None]), 1)
            top = new_top
        z_max = tl.max(top, 0)
        z_lse = z_max + tl.log(tl.sum(total * tl.exp(top - z_max), 0))
        # of equal ones, the first
        base = tl.min(tl.where(top == z_max, place, 2147483647), 0)
        near = base + tl.arange(0, GROUP)
        z = tl.load(logits + near, mask=near < tokens, other=float("-inf")).to(tl.float32)
        return z_lse, tl.min(tl.where(z == z_max, near, 2147483647), 0)

    @triton.jit
    def _teacher_sweep(
        logits, teacher, z_lse, t_lse, tokens, KL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
    ):
        """(Σ min(p, q), Σ of q where q < p, Σ p log(p / q) or 0). From the row's end: that is still in the cache."""
        column = tl.arange(0, BLOCK)
        end = (tokens - 1) // BLOCK * BLOCK
        overlap = tl.zeros((BLOCK // GROUP,), tl.float32)
        below = tl.zeros((BLOCK // GROUP,), tl.float32)
        kl = tl.zeros((BLOCK // GROUP,), tl.float32)
        for done in range(0, tokens, BLOCK):
            start = end - done
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            logq, logp = z - z_lse, t - t_lse
            q, p = tl.exp(logq), tl.exp(logp)
            overlap += _grouped(tl.minimum(p, q), GROUP)
            below += _grouped(tl.where(logq < logp, q, 0.0), GROUP)
            if KL:
                kl += _grouped(tl.where(p > 0.0, p * (logp - logq), 0.0), GROUP)
        return tl.sum(overlap, 0), tl.sum(below, 0), tl.sum(kl, 0)

    @triton.jit
    def _slot_kernel(
        logits, teacher, teacher_lse, teacher_row, label, on, weight, scale, stats, argmax,
        tokens, stride, teacher_stride, stats_stride, floor,
        MEASURES: tl.constexpr, DIFFERENTIATES: tl.constexpr, TEACHER: tl.constexpr, KL: tl.constexpr,
        BLOCK: tl.constexpr, GROUP: tl.constexpr,
    ):  # fmt: skip
        """Statistics of a slot (MEASURES), and its gradient over the logits (DIFFERENTIATES).

        Sweeps over the row: 1. the log-sum-exp and argmax; 2. sums against the teacher; 3. the gradient.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        stats += row
        column = tl.arange(0, BLOCK)
        runs = tl.load(on + row) != 0
        source = tl.load(teacher_row + row).to(tl.int64) if TEACHER else row
        teacher += source * teacher_stride
        t_lse = tl.load(teacher_lse + source) if TEACHER else 0.0
        z_lse, ce, overlap, below, kl, best = 0.0, 0.0, 0.0, 0.0, 0.0, 0
        if MEASURES:
            if runs:
                at_label = tl.load(logits + tl.load(label + row)).to(tl.float32)
                z_lse, best = _softmax_sweep(logits, tokens, BLOCK, GROUP)
                ce = z_lse - at_label
                if TEACHER:
                    overlap, below, kl = _teacher_sweep(logits, teacher, z_lse, t_lse, tokens, KL, BLOCK, GROUP)
            tl.store(stats, z_lse)
            tl.store(stats + stats_stride, ce)
            tl.store(argmax + row, best)
            if TEACHER:
                tl.store(stats + 2 * stats_stride, overlap)
                tl.store(stats + 3 * stats_stride, below)
                tl.store(stats + 4 * stats_stride, kl)
            if DIFFERENTIATES:
                tl.debug_barrier()  # every thread has read what the gradient overwrites
        if DIFFERENTIATES:
            by = tl.load(weight + row).to(tl.float32)
            if not MEASURES:
                z_lse = tl.load(stats)
                if TEACHER:
                    overlap = tl.load(stats + 2 * stats_stride)
                    below = tl.load(stats + 3 * stats_stride)
            if by != 0.0:
                # the gradient is q · factor - p · by_kl - [label] · by_ce; the factor depends on whether q < p
                by_ce = by * tl.load(scale)
                factor_above, factor_below, by_kl = by_ce, by_ce, 0.0
                if TEACHER:
                    by_l1, by_kl = by * tl.load(scale + 1), by * tl.load(scale + 2)
                    by_lk = by * tl.load(scale + 3) / (overlap + floor)
                    factor_above = by_ce + by_kl + 2.0 * by_l1 * below + by_lk * below
                    factor_below = factor_above - 2.0 * by_l1 - by_lk
                wanted = tl.load(label + row).to(tl.int32)
                for start in range(0, tokens, BLOCK):
                    inside = start + column < tokens
                    z = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
                    q = tl.exp(z - z_lse)
                    if TEACHER:
                        t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
                        grad = q * tl.where(z - z_lse < t - t_lse, factor_below, factor_above)
                        if KL:
                            grad -= tl.exp(t - t_lse) * by_kl
                    else:
                        grad = q * factor_above
                    grad -= tl.where(start + column == wanted, by_ce, 0.0)
                    tl.store(logits + start + column, grad.to(logits.dtype.element_ty), mask=inside)
            else:
                for start in range(0, tokens, BLOCK):
                    zero = tl.zeros((BLOCK,), logits.dtype.element_ty)
                    tl.store(logits + start + column, zero, mask=start + column < tokens)


def slots(
    logits_CU: Tensor,
    teacher: tuple[Tensor, Tensor, Tensor] | None,
    label_C: Tensor,
    on_C: Tensor,
    stats_5C: Tensor,
    argmax_C: Tensor,
    *,
    weight_C: Tensor | None,
    scale_4: Tensor,
    floor: float,
    measures: bool,
    kl: bool,
) -> None:
    """Write the slots' statistics, where `measures`, and their gradients over the logits, where there are weights.

    Args:
        teacher: (logits [T, U], their log-sum-exp [T] in float32, each slot's row int64 [C]).
        label_C: int64. on_C: bool; slots that are off have statistics 0 and need the weight 0.
        stats_5C: float32, read where not `measures`; its last axis is contiguous. argmax_C: int64.
        weight_C: float32, factor of the slot's gradient. scale_4: float32, factors of ce, l1, kl and lk.
        floor: eager.LK_FLOOR. kl: whether kl is measured, and may have a factor.
    """
    rows, tokens = logits_CU.shape
    if not rows:
        return
    teacher_TU, lse_T, row_C = teacher if teacher is not None else (logits_CU, scale_4, label_C)
    block = max(GROUP, min(BLOCK, triton.next_power_of_2(tokens)))
    _slot_kernel[(rows,)](
        logits_CU, teacher_TU, lse_T, row_C, label_C, on_C.to(torch.int8), scale_4 if weight_C is None else weight_C,
        scale_4, stats_5C, argmax_C, tokens, logits_CU.stride(0), teacher_TU.stride(0), stats_5C.stride(0), floor,
        MEASURES=measures, DIFFERENTIATES=weight_C is not None, TEACHER=teacher is not None,
        KL=kl and teacher is not None, BLOCK=block, GROUP=GROUP, num_warps=WARPS,
    )  # fmt: skip
