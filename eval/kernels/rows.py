"""Copies of rows and KV slots by index: one kernel each on CUDA, with their eager twins.

Shape legend: R rows (B · M), B batch, M tokens of a forward, D hidden, d head dim, S slots of a KV buffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.heads.kernels.device import wants_kernel


def take_rows_eager(x: Tensor, row_Bn: Tensor) -> Tensor:
    """Rows `row_Bn` (int64, from 0) of each sequence of `x` [B, N, …]: [B, n, …]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], row_Bn]


def take_rows(x: Tensor, row_Bn: Tensor) -> Tensor:
    """As take_rows_eager."""
    return (take_rows_kernel if wants_kernel(x) else take_rows_eager)(x, row_Bn)


def take_rows_kernel(x: Tensor, row_Bn: Tensor) -> Tensor:
    x = x.contiguous()
    (batch, before, *rest), count = x.shape, row_Bn.shape[1]
    taken, width = x.new_empty((batch, count, *rest)), math.prod(rest)
    if taken.numel():
        source, out = (part.view(torch.uint8) if part.dtype == torch.bool else part for part in (x, taken))
        block = min(1024, triton.next_power_of_2(width))
        launch(_take_rows_kernel, (batch * count, triton.cdiv(width, block)),
            source, row_Bn.contiguous(), out, count, before, width, BLOCK=block, num_warps=max(1, block // 256),
            **launch_options(x.device),
        )  # fmt: skip
    return taken


def move_slots_eager(whole: Tensor, source_BJ: Tensor, target_BJ: Tensor) -> None:
    """Copy slots `source` onto slots `target`. All are read before any is written: they may overlap.

    Args:
        whole: [layers, 2, B, g, S, d], changed in place.
        source_BJ, target_BJ: int64, slots of each row.
    """
    rows_B1 = torch.arange(whole.shape[2], device=whole.device)[:, None]
    # indexing on the right makes a copy first
    whole[:, :, rows_B1, :, target_BJ] = whole[:, :, rows_B1, :, source_BJ]


def move_slots(whole: Tensor, source_BJ: Tensor, target_BJ: Tensor) -> None:
    """As move_slots_eager."""
    (move_slots_kernel if wants_kernel(whole) else move_slots_eager)(whole, source_BJ, target_BJ)


def move_slots_kernel(whole: Tensor, source_BJ: Tensor, target_BJ: Tensor) -> None:
    layers, two, batch, kv_heads, slots, d = whole.shape
    count = source_BJ.shape[1]
    launch(_move_slots_kernel, (layers * two * kv_heads, batch),
        whole, source_BJ.contiguous(), target_BJ.contiguous(), batch, kv_heads, slots, count,
        D=d, BD=triton.next_power_of_2(d), BJ=triton.next_power_of_2(count), num_warps=1,
        **launch_options(whole.device),
    )  # fmt: skip


@dataclass(frozen=True)
class Picked:
    """One row of every sequence: queries [B, C], residual stream [B, D], position and slot int64 [B, 1]."""

    q_BC: Tensor
    residual_BD: Tensor
    position_B1: Tensor
    write_B1: Tensor


def pick_eager(q_RC: Tensor, residual_RD: Tensor, position_BM: Tensor, write_BM: Tensor, only_B1: Tensor) -> Picked:
    batch, count = position_BM.shape
    rows = torch.arange(batch, device=only_B1.device)
    q, residual = (x.unflatten(0, (batch, count))[rows, only_B1[:, 0]] for x in (q_RC, residual_RD))
    return Picked(q, residual, position_BM.gather(1, only_B1), write_BM.gather(1, only_B1))


def pick(q_RC: Tensor, residual_RD: Tensor, position_BM: Tensor, write_BM: Tensor, only_B1: Tensor) -> Picked:
    """Row `only_B1` (int64) of each sequence of M rows."""
    run = pick_kernel if wants_kernel(q_RC) else pick_eager
    return run(q_RC, residual_RD, position_BM, write_BM, only_B1)


def pick_kernel(q_RC: Tensor, residual_RD: Tensor, position_BM: Tensor, write_BM: Tensor, only_B1: Tensor) -> Picked:
    q_RC, residual_RD = q_RC.contiguous(), residual_RD.contiguous()
    batch, count = position_BM.shape
    picked = Picked(
        q_RC.new_empty((batch, q_RC.shape[1])), residual_RD.new_empty((batch, residual_RD.shape[1])),
        torch.empty_like(only_B1), torch.empty_like(only_B1),
    )  # fmt: skip
    widest = max(q_RC.shape[1], residual_RD.shape[1])
    launch(_pick_kernel, (batch, triton.cdiv(widest, 1024)),
        q_RC, residual_RD, position_BM.contiguous(), write_BM.contiguous(), only_B1.contiguous(), picked.q_BC,
        picked.residual_BD, picked.position_B1, picked.write_B1, count, q_RC.shape[1], residual_RD.shape[1],
        BLOCK=1024, num_warps=4, **launch_options(q_RC.device),
    )  # fmt: skip
    return picked


if triton is not None:

    @triton.jit(do_not_specialize=["count", "before"])
    def _take_rows_kernel(x, at, out, count, before, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        source = (row // count) * before + tl.load(at + row)
        tl.store(out + row * width + channel, tl.load(x + source * width + channel, mask=inside), mask=inside)

    @triton.jit(do_not_specialize=["batch", "slots", "count"])
    def _move_slots_kernel(
        whole, source, target, batch, kv_heads, slots, count,
        D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One head's keys or values of one row: all slots are read before the first one is written."""
        await_previous(OVERLAP)
        row = tl.program_id(1).to(tl.int64)
        part = tl.program_id(0) // kv_heads
        first = ((part * batch + row) * kv_heads + tl.program_id(0) % kv_heads) * slots
        move = tl.arange(0, BJ)
        channel = tl.arange(0, BD)[None, :]
        there = move < count
        inside = there[:, None] & (channel < D)
        taken = tl.load(source + row * count + move, mask=there, other=0)
        put = tl.load(target + row * count + move, mask=there, other=0)
        value = tl.load(whole + (first + taken)[:, None] * D + channel, mask=inside)
        tl.debug_barrier()
        tl.store(whole + (first + put)[:, None] * D + channel, value, mask=inside)

    @triton.jit(do_not_specialize=["count"])
    def _pick_kernel(
        q, residual, position, write, only, q_out, residual_out, position_out, write_out,
        count, q_width, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        row = batch * count + tl.load(only + batch)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(q + row * q_width + channel, mask=channel < q_width, other=0.0)
        tl.store(q_out + batch * q_width + channel, own, mask=channel < q_width)
        stream = tl.load(residual + row * width + channel, mask=channel < width, other=0.0)
        tl.store(residual_out + batch * width + channel, stream, mask=channel < width)
        if tl.program_id(1) == 0:
            tl.store(position_out + batch, tl.load(position + row))
            tl.store(write_out + batch, tl.load(write + row))
