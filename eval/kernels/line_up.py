"""The committed tokens that an autoregressive draft runs after a cycle: kernels on CUDA, with their eager twins.

Shape legend: B batch, J committed rows of a cycle, W rows of the draft's pass, D levels of a chain, H head hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.bookkeeping import contiguous_rows
from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.heads.kernels.device import wants_kernel


@dataclass(frozen=True)
class Lined:
    """Committed tokens as rows of the draft's pass.

    Attributes:
        tokens_BW: int64, the token that each row consumes: the next committed one, in the last row the new root.
        position_BW, write_BW: int64, rope position and KV slot; rows beyond the count write to the bin.
        last_B1: int64, the last row that counts. length_B: int64, the draft's rows, these included.
        ahead_DB: int64, positions of the rows that a chain of D levels drafts after them.
    """

    tokens_BW: Tensor
    position_BW: Tensor
    write_BW: Tensor
    last_B1: Tensor
    length_B: Tensor
    ahead_DB: Tensor


def line_up_eager(
    tokens_BW: Tensor, count_B: Tensor, roots_B: Tensor, length_B: Tensor, bin: int, levels: int
) -> Lined:
    column_W = torch.arange(tokens_BW.shape[1], device=tokens_BW.device)
    last_B1 = (count_B - 1).clamp(min=0)[:, None]
    shifted_BW = torch.cat([tokens_BW[:, 1:], tokens_BW[:, :1]], 1).scatter(1, last_B1, roots_B[:, None])
    position_BW = length_B[:, None] + column_W
    write_BW = torch.where(column_W < count_B[:, None], position_BW, bin)
    length_B = length_B + count_B
    ahead_DB = torch.arange(levels, device=tokens_BW.device)[:, None] + length_B
    return Lined(shifted_BW, position_BW, write_BW, last_B1, length_B, ahead_DB)


def line_up(tokens_BW: Tensor, count_B: Tensor, roots_B: Tensor, length_B: Tensor, bin: int, levels: int) -> Lined:
    """The rows of the draft's pass after a cycle.

    Args:
        tokens_BW: int64, committed tokens; the first `count_B` of each sequence count.
        roots_B: int64, the token after them. length_B: int64, rows that the draft has already.
        bin: slot that padding is written to. levels: of the chain.
    """
    run = line_up_kernel if wants_kernel(roots_B) else line_up_eager
    return run(tokens_BW, count_B, roots_B, length_B, bin, levels)


def line_up_kernel(
    tokens_BW: Tensor, count_B: Tensor, roots_B: Tensor, length_B: Tensor, bin: int, levels: int
) -> Lined:
    batch, width = tokens_BW.shape
    tokens_BW = contiguous_rows(tokens_BW)
    shifted_BW, position_BW, write_BW = (roots_B.new_empty((batch, width)) for _ in range(3))
    last_B1, after_B, ahead_DB = (roots_B.new_empty(shape) for shape in ((batch, 1), (batch,), (levels, batch)))
    launch(_line_up_kernel, (batch,),
        tokens_BW, count_B, roots_B, length_B, shifted_BW, position_BW, write_BW, last_B1, after_B, ahead_DB,
        width, levels, batch, bin, tokens_BW.stride(0),
        BW=triton.next_power_of_2(max(width, levels)), num_warps=1, **launch_options(roots_B.device),
    )  # fmt: skip
    return Lined(shifted_BW, position_BW, write_BW, last_B1, after_B, ahead_DB)


def hold_eager(tokens_BJ: Tensor, g_BJH: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Tokens and features in `width` columns, at least J. Those behind the J columns are not to be read."""
    column_W = torch.arange(width, device=g_BJH.device).clamp(max=g_BJH.shape[1] - 1)
    return tokens_BJ[:, column_W], g_BJH[:, column_W]


def hold(tokens_BJ: Tensor, g_BJH: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As hold_eager."""
    if g_BJH.shape[1] == width:
        return tokens_BJ, g_BJH
    return (hold_kernel if wants_kernel(g_BJH) else hold_eager)(tokens_BJ, g_BJH, width)


def hold_kernel(tokens_BJ: Tensor, g_BJH: Tensor, width: int) -> tuple[Tensor, Tensor]:
    (batch, count, hidden), block = g_BJH.shape, min(1024, triton.next_power_of_2(g_BJH.shape[2]))
    tokens_BJ, g_BJH = tokens_BJ.contiguous(), g_BJH.contiguous()
    held, held_g = tokens_BJ.new_empty((batch, width)), g_BJH.new_empty((batch, width, hidden))
    launch(_hold_kernel, (batch * width, triton.cdiv(hidden, block)),
        tokens_BJ, g_BJH, held, held_g, count, width, hidden,
        BLOCK=block, num_warps=max(1, block // 256), **launch_options(g_BJH.device),
    )  # fmt: skip
    return held, held_g


if triton is not None:

    @triton.jit(do_not_specialize=["count", "width"])
    def _hold_kernel(
        tokens, g, tokens_out, g_out, count, width, hidden, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
    ):  # fmt: skip
        """One program per place and block of channels."""
        await_previous(OVERLAP)
        place = tl.program_id(0).to(tl.int64)
        source = place // width * count + tl.minimum(place % width, count - 1)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(g + source * hidden + channel, mask=channel < hidden)
        tl.store(g_out + place * hidden + channel, value, mask=channel < hidden)
        tl.store(tokens_out + place, tl.load(tokens + source), mask=tl.program_id(1) == 0)

    @triton.jit(do_not_specialize=["width", "levels", "batches", "bin", "stride_t"])
    def _line_up_kernel(
        tokens, count, roots, length, tokens_out, position, write, last_out, length_out, ahead, width, levels, batches,
        bin, stride_t, BW: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BW)
        inside = column < width
        new = tl.load(count + batch)
        base = tl.load(length + batch)
        last = tl.maximum(new - 1, 0)
        next_column = tl.where(column + 1 < width, column + 1, 0)
        following = tl.load(tokens + batch * stride_t + next_column, mask=inside, other=0)
        token = tl.where(column == last, tl.load(roots + batch), following)
        place = batch * width + column
        tl.store(tokens_out + place, token, mask=inside)
        tl.store(position + place, base + column, mask=inside)
        tl.store(write + place, tl.where(column < new, base + column, bin), mask=inside)
        tl.store(last_out + batch, last)
        tl.store(length_out + batch, base + new)
        tl.store(ahead + column * batches + batch, base + new + column, mask=column < levels)
