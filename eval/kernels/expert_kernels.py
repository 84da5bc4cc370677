"""Triton kernels of a mixture of experts; experts.py launches them and says what they compute.

Shape legend: P pairs of a row and an expert, N outputs, K inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headstart.eval.kernels.launch import await_previous


@triton.jit
def _weight_rows(outputs, PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr, BN: tl.constexpr, FULL: tl.constexpr):
    """(rows of the matrix that a program reads, rows of the up projections).

    INTERLEAVED: an output's gate and up rows are neighbours, and the first rows hold both: 2 BN of them. Without FULL,
    indices are clamped, which keeps loads free of masks; what is computed of them is not stored.
    """
    if INTERLEAVED:
        first = tl.program_id(1) * 2 * BN + tl.arange(0, 2 * BN)
        if not FULL:
            first = tl.minimum(first, 2 * outputs - 1)
    else:
        first = tl.program_id(1) * BN + tl.arange(0, BN)
        if not FULL:
            first = tl.minimum(first, outputs - 1)
    second = first
    if PAIRED:
        second = first + outputs
    return first, second


@triton.jit
def _gated(gate, up, slope, cubic, limit, shift):
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(slope * (gate + cubic * gate * gate * gate)) * (up + shift)


@triton.jit
def pair_vectors(
    x, weight, bias, expert, out, experts, outputs, inputs, stride_e, stride_n, stride_k, stride_b,
    slope, cubic, limit, shift,
    PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, PER_ROW: tl.constexpr, OVERLAP: tl.constexpr,
    EVEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """BN outputs of one pair, from ROWS rows of the matrix.

    Pairs of one expert run at the same time, so that its weights come from the cache.
    """
    await_previous(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    chosen = tl.load(expert + pair).to(tl.int64)
    if (chosen < 0) | (chosen >= experts):
        return
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = output < outputs
    gate_row, up_row = _weight_rows(outputs, PAIRED, INTERLEAVED, BN, FULL)
    channel = tl.arange(0, BK)
    gate_at = weight + chosen * stride_e + gate_row[:, None] * stride_n + channel[None, :] * stride_k
    up_at = weight + chosen * stride_e + up_row[:, None] * stride_n + channel[None, :] * stride_k
    x_at = x + (pair // PER_ROW) * inputs + channel
    sums = tl.zeros((ROWS, BK), tl.float32)
    ups = tl.zeros((ROWS, BK), tl.float32)
    for first in range(0, inputs, BK):
        if EVEN:
            part = tl.load(x_at + first).to(tl.float32)
            sums += tl.load(gate_at + first * stride_k).to(tl.float32) * part[None, :]
            if PAIRED:
                ups += tl.load(up_at + first * stride_k).to(tl.float32) * part[None, :]
        else:
            here = channel < inputs - first
            part = tl.load(x_at + first, mask=here, other=0.0).to(tl.float32)
            sums += tl.load(gate_at + first * stride_k, mask=here[None, :], other=0.0).to(tl.float32) * part[None, :]
            if PAIRED:
                ups += tl.load(up_at + first * stride_k, mask=here[None, :], other=0.0).to(tl.float32) * part[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + chosen * stride_b + gate_row).to(tl.float32)
    if PAIRED:
        up = tl.sum(ups, 1)
        if BIAS:
            up += tl.load(bias + chosen * stride_b + up_row).to(tl.float32)
        total = _gated(total, up, slope, cubic, limit, shift)
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(total, (BN, 2)))
        total = _gated(gate, up, slope, cubic, limit, shift)
    tl.store(out + pair * outputs + output, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def pair_tiles(
    x, weight, bias, expert, out, experts, outputs, inputs, stride_e, stride_n, stride_k, stride_b,
    slope, cubic, limit, shift, order, tile_expert, tile_first, tile_count, pairs,
    PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, PER_ROW: tl.constexpr, OVERLAP: tl.constexpr,
    SORTED: tl.constexpr, EVEN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """BN outputs of up to BR pairs of one expert, from ROWS rows of the matrix.

    PAIRED: output n comes from row n (gate) and row `outputs` + n (up); INTERLEAVED: from rows 2 n and 2 n + 1.

    SORTED: the tables say which pairs. Otherwise program_id(0) is a pair, and it looks through all BP pairs: it works
    for itself and the next BR - 1 pairs of its expert if a multiple of BR of them stand before it, else it ends.
    """
    await_previous(OVERLAP)
    program = tl.program_id(0)
    place = tl.arange(0, BR)
    if SORTED:
        count = tl.load(tile_count + program)
        if count == 0:
            return
        chosen = tl.load(tile_expert + program).to(tl.int64)
        real = place < count
        member = tl.load(order + tl.load(tile_first + program) + place, mask=real, other=0).to(tl.int64)
    else:
        chosen = tl.load(expert + program).to(tl.int64)
        other = tl.arange(0, BP)
        same = (tl.load(expert + other, mask=other < pairs, other=-1).to(tl.int64) == chosen) & (other < pairs)
        ones = same.to(tl.int32)
        before = tl.sum(tl.where(other < program, ones, 0), 0)
        if (chosen < 0) | (chosen >= experts) | (before % BR != 0):
            return
        rank = tl.cumsum(ones, 0) - 1 - before
        found = (same[None, :] & (rank[None, :] == place[:, None])).to(tl.int32)
        real = tl.sum(found, 1) > 0
        member = tl.sum(found * other[None, :], 1).to(tl.int64)
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = output < outputs
    gate_row, up_row = _weight_rows(outputs, PAIRED, INTERLEAVED, BN, FULL)
    channel = tl.arange(0, BK)
    gate_at = weight + chosen * stride_e + gate_row[:, None] * stride_n + channel[None, :] * stride_k
    up_at = weight + chosen * stride_e + up_row[:, None] * stride_n + channel[None, :] * stride_k
    x_at = x + (member // PER_ROW)[None, :] * inputs + channel[:, None]
    sums = tl.zeros((ROWS, BR), tl.float32)
    ups = tl.zeros((ROWS, BR), tl.float32)
    for first in range(0, inputs, BK):
        if EVEN:
            part = tl.load(x_at + first, mask=real[None, :], other=0.0)
            tile = tl.load(gate_at + first * stride_k)
        else:
            here = channel < inputs - first
            part = tl.load(x_at + first, mask=real[None, :] & here[:, None], other=0.0)
            tile = tl.load(gate_at + first * stride_k, mask=here[None, :], other=0.0)
        sums = tl.dot(tile, part, sums, input_precision="ieee")
        if PAIRED:
            if EVEN:
                tile = tl.load(up_at + first * stride_k)
            else:
                tile = tl.load(up_at + first * stride_k, mask=(channel < inputs - first)[None, :], other=0.0)
            ups = tl.dot(tile, part, ups, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + chosen * stride_b + gate_row).to(tl.float32)[:, None]
        if PAIRED:
            ups += tl.load(bias + chosen * stride_b + up_row).to(tl.float32)[:, None]
    if PAIRED:
        sums = _gated(sums, ups, slope, cubic, limit, shift)
    if INTERLEAVED:
        gates, ups = tl.split(tl.permute(tl.reshape(sums, (BN, 2, BR)), (0, 2, 1)))
        sums = _gated(gates, ups, slope, cubic, limit, shift)
    at = out + member[None, :] * outputs + output[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def mix_pairs(
    pairs, expert, weight, out, width, experts, PER_ROW: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """A part of one row: the sum of its pairs' results, each times its weight."""
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(PER_ROW):
        pair = row * PER_ROW + n
        chosen = tl.load(expert + pair)
        # what a pair without an expert holds was never written
        kept = (chosen >= 0) & (chosen < experts)
        part = tl.load(pairs + pair * width + channel, mask=inside & kept, other=0.0)
        total += part * tl.load(weight + pair).to(tl.float32)
    tl.store(out + row * width + channel, total.to(out.dtype.element_ty), mask=inside)
