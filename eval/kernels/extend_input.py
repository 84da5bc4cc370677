"""The input of a head that reads all tokens drafted before: its parent's input and one more embedding. One kernel on
CUDA, with its eager twin.

Shape legend: B batch, f nodes of the level before, N nodes, R = B · N, C width of their inputs, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.rows import take_rows
from headstart.heads.kernels.device import wants_kernel


def extend_input_eager(x_BfC: Tensor, tokens_BN: Tensor, embed_VD: Tensor, under_BN: Tensor | None = None) -> Tensor:
    """cat(input of the parent, embedding of the own token): [B, N, C + D] in the dtype of `x_BfC`.

    Args:
        tokens_BN: int64. under_BN: int64, row of `x_BfC` that is the parent's; None: the row of the same index (f = N).
    """
    up_BNC = x_BfC if under_BN is None else take_rows(x_BfC, under_BN)
    return torch.cat((up_BNC, embed_VD[tokens_BN].to(x_BfC.dtype)), -1)


def extend_input(x_BfC: Tensor, tokens_BN: Tensor, embed_VD: Tensor, under_BN: Tensor | None = None) -> Tensor:
    """As extend_input_eager."""
    run = extend_input_kernel if wants_kernel(x_BfC) else extend_input_eager
    return run(x_BfC, tokens_BN, embed_VD, under_BN)


def extend_input_kernel(x_BfC: Tensor, tokens_BN: Tensor, embed_VD: Tensor, under_BN: Tensor | None = None) -> Tensor:
    x_BfC = x_BfC.contiguous()
    (batch, count), (before, inputs), width = tokens_BN.shape, x_BfC.shape[1:], embed_VD.shape[1]
    if under_BN is None and before != count:
        raise ValueError(f"{count} tokens and {before} inputs per sequence: give under_BN, the parent of each token")
    out_BNC = x_BfC.new_empty((batch, count, inputs + width))
    if batch * count:
        block = min(1024, triton.next_power_of_2(inputs + width))
        launch(_extend_input_kernel, (batch * count, triton.cdiv(inputs + width, block)),
            x_BfC, tokens_BN.contiguous(), tokens_BN if under_BN is None else under_BN.contiguous(), embed_VD, out_BNC,
            count, before, inputs, width, embed_VD.stride(0), UNDER=under_BN is not None, BLOCK=block,
            num_warps=max(1, block // 256), **launch_options(x_BfC.device),
        )  # fmt: skip
    return out_BNC


if triton is not None:

    @triton.jit(do_not_specialize=["count", "before"])
    def _extend_input_kernel(
        x, tokens, under, embedding, out, count, before, inputs, width, stride_e,
        UNDER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """A part of one row."""
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        of = row
        if UNDER:
            of = row // count * before + tl.load(under + row)
        given = tl.load(x + of * inputs + channel, mask=channel < inputs, other=0.0)
        token = tl.load(tokens + row)
        new = (channel >= inputs) & (channel < inputs + width)
        own = tl.load(embedding + token * stride_e + channel - inputs, mask=new, other=0.0)
        value = tl.where(channel < inputs, given, own.to(out.dtype.element_ty))
        tl.store(out + row * (inputs + width) + channel, value, mask=channel < inputs + width)
