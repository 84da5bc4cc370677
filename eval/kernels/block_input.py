"""The input of a block of drafts: a root, then mask tokens. One kernel on CUDA, with its eager twin.

Shape legend: B batch, N slots of a block, R = B · N, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.norm import NormWeights, norm_eager
from headstart.heads.kernels.device import wants_kernel


@dataclass(frozen=True)
class BlockInput:
    """What makes a block's input.

    Attributes:
        embed_VD: embeddings of the target's tokens.
        mask_token: id of the token in all slots but the first.
        slots: N.
        norm: RMSNorm before the first layer.
        dtype: that the block runs in.
    """

    embed_VD: Tensor
    mask_token: int
    slots: int
    norm: NormWeights
    dtype: torch.dtype


@dataclass(frozen=True)
class BlockRoots:
    """The slots of the blocks behind their contexts.

    Attributes:
        e_RD: embeddings. normed_RD: their norm.
        position_BN: int64, rope position of each slot, which is its KV slot too. end_BN: int64, that of the last slot.
    """

    e_RD: Tensor
    normed_RD: Tensor
    position_BN: Tensor
    end_BN: Tensor


def block_input_eager(roots_B: Tensor, length_B: Tensor, source: BlockInput) -> BlockRoots:
    """Args: roots_B: int64, tokens of the first slots. length_B: int64, positions of the roots."""
    slot_N = torch.arange(source.slots, device=roots_B.device)
    tokens_BN = torch.where(slot_N == 0, roots_B[:, None], source.mask_token)
    e_RD = source.embed_VD[tokens_BN.flatten()].to(source.dtype)
    position_BN = length_B[:, None] + slot_N
    end_BN = (length_B[:, None] + source.slots - 1).expand_as(position_BN).contiguous()
    return BlockRoots(e_RD, norm_eager(e_RD, source.norm), position_BN, end_BN)


def block_input(roots_B: Tensor, length_B: Tensor, source: BlockInput) -> BlockRoots:
    """As block_input_eager."""
    run = block_input_kernel if wants_kernel(source.embed_VD) else block_input_eager
    return run(roots_B, length_B, source)


def block_input_kernel(roots_B: Tensor, length_B: Tensor, source: BlockInput) -> BlockRoots:
    batch, width = len(roots_B), source.embed_VD.shape[1]
    e_RD = torch.empty((batch * source.slots, width), dtype=source.dtype, device=roots_B.device)
    normed_RD = torch.empty_like(e_RD)
    position_BN, end_BN = (roots_B.new_empty((batch, source.slots)) for _ in range(2))
    block = triton.next_power_of_2(width)
    launch(_block_input_kernel, (batch * source.slots,),
        roots_B, length_B, source.embed_VD, source.norm.factor_D, e_RD, normed_RD, position_BN, end_BN,
        source.slots, source.mask_token, width, source.embed_VD.stride(0), source.norm.eps,
        BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(roots_B.device),
    )  # fmt: skip
    return BlockRoots(e_RD, normed_RD, position_BN, end_BN)


if triton is not None:

    @triton.jit(do_not_specialize=["slots", "mask_token"])
    def _block_input_kernel(
        roots, length, embedding, factor, e_out, normed_out, position_out, end_out,
        slots, mask_token, width, stride_e, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per slot."""
        row = tl.program_id(0).to(tl.int64)
        channel = tl.arange(0, BLOCK)
        inside = channel < width
        by = tl.load(factor + channel, mask=inside, other=0.0)
        await_previous(OVERLAP)
        batch = row // slots
        slot = row % slots
        token = tl.where(slot == 0, tl.load(roots + batch), mask_token)
        value = tl.load(embedding + token * stride_e + channel, mask=inside, other=0.0).to(e_out.dtype.element_ty)
        tl.store(e_out + row * width + channel, value, mask=inside)
        # as the eager twin: rounded before the norm
        value = value.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * by
        tl.store(normed_out + row * width + channel, value.to(normed_out.dtype.element_ty), mask=inside)
        base = tl.load(length + batch)
        tl.store(position_out + row, base + slot)
        tl.store(end_out + row, base + slots - 1)
