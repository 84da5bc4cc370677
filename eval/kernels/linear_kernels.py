"""Triton kernels of matrix products for a handful of rows; linear.py launches them and says what they compute.

Shape legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headstart.eval.kernels.launch import await_previous, prefetch
from headstart.eval.kernels.norm import normalised


@triton.jit
def _activate(x, ACT: tl.constexpr):
    """ACT: a key of linear.ACTIVATIONS."""
    if ACT == "silu":
        result = x * tl.sigmoid(x)
    elif ACT == "gelu_tanh":
        result = x * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    elif ACT == "gelu":
        result = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_quick":
        result = x * tl.sigmoid(1.702 * x)
    elif ACT == "relu":
        result = tl.maximum(x, 0.0)
    else:  # relu2
        result = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return result


@triton.jit
def _finish(
    sums, ups, bias, added, out, place, weight_row, outputs, kept,
    PAIRED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What comes after the product of a tile [outputs, rows], and the store. `added`: the residual's tile."""
    if BIAS:
        sums += tl.load(bias + weight_row).to(tl.float32)[:, None]
        if PAIRED:
            ups += tl.load(bias + outputs + weight_row).to(tl.float32)[:, None]
    if ACT != "":
        sums = _activate(sums, ACT)
        if PAIRED:
            sums *= ups
    if RESIDUAL:
        # the product is rounded before the sum, as a separate addition would find it
        sums = sums.to(out.dtype.element_ty).to(tl.float32)
        sums += added.to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def tiled_product(
    x, weight, bias, residual, out, rows, outputs, inputs,
    PAIRED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    LINE: tl.constexpr, OVERLAP: tl.constexpr, SPLITS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """BN outputs of all rows, or where there are MANY, of BR rows. PAIRED: output n comes from weight rows n (gate) and
    `outputs` + n (up).

    Programs are numbered by tile of outputs and, where SPLITS > 1, part of the inputs; `out` is then float32 [SPLITS,
    rows, outputs]. MANY: they are numbered by tile of rows first, so that neighbours read the same weights.
    """
    # the axis of the grid that numbers the outputs; whether weights that were read may leave the cache at once
    AXIS: tl.constexpr = 1 if MANY else 0
    POLICY: tl.constexpr = "" if MANY else "evict_first"
    begin, end = 0, inputs
    if SPLITS > 1:
        begin = tl.program_id(AXIS + 1) * (inputs // SPLITS)
        end = begin + inputs // SPLITS
    output = tl.program_id(AXIS) * BN + tl.arange(0, BN)
    inside = output < outputs
    # a clamped index keeps loads free of masks; what it computes is not stored
    weight_row = tl.minimum(output, outputs - 1).to(tl.int64)
    row = tl.arange(0, BR)
    if MANY:
        row += tl.program_id(0) * BR
    real = row < rows
    channel = tl.arange(0, BK)
    weight_at = weight + weight_row[:, None] * inputs + channel[None, :]
    up_at = weight_at
    if PAIRED:
        up_at = weight_at + tl.cast(outputs, tl.int64) * inputs
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        # weights do not depend on the previous kernel: fetch the first tiles while it drains
        line = tl.arange(0, BK // LINE) * LINE
        for ahead in range(0, AHEAD):
            at = tl.minimum(begin + ahead * BK + line, inputs - 1)
            prefetch(weight + weight_row[:, None] * inputs + at[None, :])
            if PAIRED:
                prefetch(weight + (outputs + weight_row)[:, None] * inputs + at[None, :])
        tl.extra.cuda.gdc_wait()
    x_at = x + row[None, :] * inputs + channel[:, None]
    place = row[None, :] * outputs + output[:, None]
    kept = inside[:, None] & real[None, :]
    added = 0.0
    if RESIDUAL:
        added = tl.load(residual + place, mask=kept, other=0.0)
    sums = tl.zeros((BN, BR), tl.float32)
    ups = tl.zeros((BN, BR), tl.float32)
    for first in range(begin, end, BK):
        if EVEN:
            part = tl.load(x_at + first, mask=real[None, :], other=0.0)
            tile = tl.load(weight_at + first, eviction_policy=POLICY)
        else:
            here = channel < inputs - first
            part = tl.load(x_at + first, mask=real[None, :] & here[:, None], other=0.0)
            tile = tl.load(weight_at + first, mask=here[None, :], other=0.0)
        sums = tl.dot(tile, part, sums, input_precision="ieee")
        if PAIRED:
            if EVEN:
                tile = tl.load(up_at + first, eviction_policy=POLICY)
            else:
                tile = tl.load(up_at + first, mask=(channel < inputs - first)[None, :], other=0.0)
            ups = tl.dot(tile, part, ups, input_precision="ieee")
    if SPLITS > 1:
        place += tl.program_id(AXIS + 1) * rows * outputs
    _finish(sums, ups, bias, added, out, place, weight_row, outputs, kept, PAIRED, ACT, BIAS, RESIDUAL)


@triton.jit(do_not_specialize=["rows"])
def whole_product(
    x, weight, bias, residual, out, rows, outputs, inputs, length,
    PAIRED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """BN outputs of all rows from `length` inputs: a tile of BK and, where BL > 0, one that holds the rest.

    MANY, SPLITS > 1: as in tiled_product.
    """
    AXIS: tl.constexpr = 1 if MANY else 0
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    begin = 0
    if SPLITS > 1:
        begin = tl.program_id(AXIS + 1) * length
    output = tl.program_id(AXIS) * BN + tl.arange(0, BN)
    weight_row = tl.minimum(output, outputs - 1).to(tl.int64)
    row = tl.arange(0, BR)
    if MANY:
        row += tl.program_id(0) * BR
    real = (row < rows)[None, :]
    channel = tl.arange(0, BK)
    weight_at = weight + weight_row[:, None] * inputs + begin
    up_at = weight_at
    if PAIRED:
        up_at = weight_at + tl.cast(outputs, tl.int64) * inputs
    tile = tl.load(weight_at + channel[None, :])
    if PAIRED:
        up_tile = tl.load(up_at + channel[None, :])
    if BL > 0:
        rest = BK + tl.arange(0, BL)
        here = rest < length
        tail = tl.load(weight_at + rest[None, :], mask=here[None, :], other=0.0)
        if PAIRED:
            up_tail = tl.load(up_at + rest[None, :], mask=here[None, :], other=0.0)
    if OVERLAP:
        # the weights are here before the previous kernel's results are needed
        tl.extra.cuda.gdc_wait()
    x_at = x + row[None, :] * inputs + begin
    part = tl.load(x_at + channel[:, None], mask=real)
    if BL > 0:
        last = tl.load(x_at + rest[:, None], mask=real & here[:, None])
    place = row[None, :] * outputs + output[:, None]
    kept = (output < outputs)[:, None] & real
    added = 0.0
    if RESIDUAL:
        added = tl.load(residual + place, mask=kept, other=0.0)
    # masked here: a load that is a product's operand would be waited for before the next one starts
    part = tl.where(real, part, 0.0)
    if BL > 0:
        last = tl.where(real & here[:, None], last, 0.0)
    sums = tl.dot(tile, part, input_precision="ieee")
    ups = sums
    if PAIRED:
        ups = tl.dot(up_tile, part, input_precision="ieee")
    if BL > 0:
        sums = tl.dot(tail, last, sums, input_precision="ieee")
        if PAIRED:
            ups = tl.dot(up_tail, last, ups, input_precision="ieee")
    if SPLITS > 1:
        place += tl.program_id(AXIS + 1) * rows * outputs
    _finish(sums, ups, bias, added, out, place, weight_row, outputs, kept, PAIRED, ACT, BIAS, RESIDUAL)


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    sums, bias, residual, after_factor, after_bias, factor, norm_bias, out, normed, rows, outputs, after_eps, share,
    eps,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, AFTER: tl.constexpr, AFTER_BIAS: tl.constexpr,
    AFTER_CENTRED: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr,
    CENTRED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row: add up the parts and what comes after them: a norm of its own (AFTER), a factor (SCALED), the residual,
    and the next norm (NORM)."""
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < outputs
    if BIAS:
        shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    after_by = 0.0
    after_shift = 0.0
    if AFTER:
        after_by = tl.load(after_factor + channel, mask=inside, other=0.0)
        if AFTER_BIAS:
            after_shift = tl.load(after_bias + channel, mask=inside, other=0.0)
    by = 0.0
    norm_shift = 0.0
    if NORM:
        by = tl.load(factor + channel, mask=inside, other=0.0)
        if NORM_BIAS:
            norm_shift = tl.load(norm_bias + channel, mask=inside, other=0.0)
    await_previous(OVERLAP)
    if RESIDUAL:
        added = tl.load(residual + row * outputs + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * rows + row) * outputs + channel, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += shift
    # rounded where separate operations would round
    if AFTER:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total = normalised(total, after_by, after_shift, inside, outputs, after_eps, AFTER_CENTRED, AFTER_BIAS)
    if SCALED:
        total = total.to(out.dtype.element_ty).to(tl.float32) * share
    if RESIDUAL:
        total = total.to(out.dtype.element_ty).to(tl.float32) + added
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + row * outputs + channel, rounded, mask=inside)
    if NORM:
        result = normalised(rounded.to(tl.float32), by, norm_shift, inside, outputs, eps, CENTRED, NORM_BIAS)
        tl.store(normed + row * outputs + channel, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def activate_rows(
    y, out, outputs, PAIRED: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """A part of one row of a product: act(y), or PAIRED, where gate stands before up, act(gate) · up."""
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < outputs
    start = y + row * outputs
    if PAIRED:
        start = y + row * (2 * outputs)
    value = tl.load(start + channel, mask=inside, other=0.0).to(tl.float32)
    if PAIRED:
        up = tl.load(start + outputs + channel, mask=inside, other=0.0).to(tl.float32)
    value = _activate(value, ACT)
    if PAIRED:
        # rounded where separate operations would round
        value = value.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * outputs + channel, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def vector_product(
    x, weight, bias, residual, out, outputs, inputs,
    PAIRED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row: sums are kept per input channel of a tile and added up once at the end."""
    output = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = tl.minimum(output, outputs - 1).to(tl.int64)
    channel = tl.arange(0, BK)
    weight_at = weight + weight_row[:, None] * inputs + channel[None, :]
    up_at = weight_at
    if PAIRED:
        up_at = weight_at + tl.cast(outputs, tl.int64) * inputs
    here = channel < inputs
    tile = tl.load(weight_at, mask=here[None, :], other=0.0)
    up_tile = tile
    if PAIRED:
        up_tile = tl.load(up_at, mask=here[None, :], other=0.0)
    if OVERLAP:
        # the first tiles are on their way before the previous kernel's results are needed
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kept = output < outputs
    if RESIDUAL:
        added = tl.load(residual + output, mask=kept, other=0.0).to(tl.float32)
    part = tl.load(x + channel, mask=here, other=0.0).to(tl.float32)[None, :]
    sums = tile.to(tl.float32) * part
    ups = sums
    if PAIRED:
        ups = up_tile.to(tl.float32) * part
    for first in range(BK, inputs, BK):
        if EVEN:
            part = tl.load(x + first + channel).to(tl.float32)[None, :]
            tile = tl.load(weight_at + first)
        else:
            here = channel < inputs - first
            part = tl.load(x + first + channel, mask=here, other=0.0).to(tl.float32)[None, :]
            tile = tl.load(weight_at + first, mask=here[None, :], other=0.0)
        sums += tile.to(tl.float32) * part
        if PAIRED:
            if EVEN:
                up_tile = tl.load(up_at + first)
            else:
                up_tile = tl.load(up_at + first, mask=(channel < inputs - first)[None, :], other=0.0)
            ups += up_tile.to(tl.float32) * part
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + weight_row).to(tl.float32)
    if ACT != "":
        result = _activate(result, ACT)
    if PAIRED:
        up = tl.sum(ups, 1)
        if BIAS:
            up += tl.load(bias + outputs + weight_row).to(tl.float32)
        result *= up
    if RESIDUAL:
        result = result.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + output, result.to(out.dtype.element_ty), mask=kept)
