"""The committed tokens that an autoregressive draft runs after a cycle: one kernel on CUDA, with its eager twin.

Shape legend: B batch, W rows of the draft's pass, D levels of a chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    tokens_BW = tokens_BW.contiguous()
    shifted_BW, position_BW, write_BW = (torch.empty_like(tokens_BW) for _ in range(3))
    last_B1, after_B, ahead_DB = (roots_B.new_empty(shape) for shape in ((batch, 1), (batch,), (levels, batch)))
    launch(_line_up_kernel, (batch,),
        tokens_BW, count_B, roots_B, length_B, shifted_BW, position_BW, write_BW, last_B1, after_B, ahead_DB,
        width, levels, batch, bin,
        BW=triton.next_power_of_2(max(width, levels)), num_warps=1, **launch_options(roots_B.device),
    )  # fmt: skip
    return Lined(shifted_BW, position_BW, write_BW, last_B1, after_B, ahead_DB)


if triton is not None:

    @triton.jit(do_not_specialize=["width", "levels", "batches", "bin"])
    def _line_up_kernel(
        tokens, count, roots, length, tokens_out, position, write, last_out, length_out, ahead, width, levels, batches,
        bin, BW: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BW)
        inside = column < width
        new = tl.load(count + batch)
        base = tl.load(length + batch)
        last = tl.maximum(new - 1, 0)
        following = tl.load(tokens + batch * width + tl.where(column + 1 < width, column + 1, 0), mask=inside, other=0)
        token = tl.where(column == last, tl.load(roots + batch), following)
        place = batch * width + column
        tl.store(tokens_out + place, token, mask=inside)
        tl.store(position + place, base + column, mask=inside)
        tl.store(write + place, tl.where(column < new, base + column, bin), mask=inside)
        tl.store(last_out + batch, last)
        tl.store(length_out + batch, base + new)
        tl.store(ahead + column * batches + batch, base + new + column, mask=column < levels)
