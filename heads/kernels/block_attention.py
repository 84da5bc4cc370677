"""Attention of drafted blocks: every slot sees a stretch of the pack's rows and the slots of its own block, all of
them or those up to itself.

On CUDA it runs as Triton kernels (block_attention_kernels.py), elsewhere with explicit scores.

Shape legend: R rows of the pack, A blocks, B slots of a block, M = A · B slots, h query heads, g key heads, D head
width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.kernels.block_attention_kernels import MAX_WIDTH, KeyReaders, attend, attend_backward
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.numerics import wide


@dataclass(frozen=True)
class BlockRows:
    """What the slots of each block see.

    Attributes:
        start_A, stop_A: int64 [A], the context rows [start, stop) of the pack that each block sees; none where both are
            equal. Neither ever falls from one block to the next: `ascending` puts blocks in that order.
        size: B.
        causal: whether a slot sees none of the slots behind it.
    """

    start_A: Tensor
    stop_A: Tensor
    size: int
    causal: bool = False

    def ascending(self) -> tuple[BlockRows, Tensor]:
        """(the blocks in the order of their last row, that order: int64 [A])."""
        order_A = torch.argsort(self.stop_A, stable=True)
        return replace(self, start_A=self.start_A[order_A], stop_A=self.stop_A[order_A]), order_A

    @classmethod
    def behind(cls, row_A: Tensor, real_A: Tensor, position_R: Tensor, size: int, causal: bool = False) -> BlockRows:
        """Blocks that see their document's rows up to their anchor's, in the order of the anchors.

        Args:
            row_A: the anchors' rows. real_A: bool, False for anchors that train nothing: they see no row.
            position_R: of every row in its document.
        """
        start_A = row_A + 1 - torch.where(real_A, position_R[row_A] + 1, 0)
        return cls(start_A, row_A + 1, size, causal)

    def part(self, first: int, last: int) -> BlockRows:
        """Blocks first … last - 1."""
        return replace(self, start_A=self.start_A[first:last], stop_A=self.stop_A[first:last])


class BlockAttention:
    """The attention over one pack. Every layer of a head uses the same one.

    Args: rows: R.
    """

    def __init__(self, blocks: BlockRows, rows: int):
        self.blocks, self._rows = blocks, rows
        self._readers: KeyReaders | None = None

    def attend(
        self, q_MhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_MgD: Tensor, own_v_MgD: Tensor
    ) -> Tensor:
        """Context [M, h, D], differentiable in all arguments."""
        return _Attend.apply(self, q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD)

    def _indexed(self) -> KeyReaders:
        if self._readers is None:
            blocks = self.blocks
            self._readers = KeyReaders.of(blocks.start_A, blocks.stop_A, blocks.size, self._rows, blocks.causal)
        return self._readers

    @staticmethod
    def _fused(q_MhD: Tensor) -> bool:
        return wants_kernel(q_MhD) and q_MhD.shape[-1] <= MAX_WIDTH

    def forward(
        self, q_MhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_MgD: Tensor, own_v_MgD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(context [M, h, D], what `backward` needs besides). The heads of a row are contiguous, rows may be strided"""
        if self._fused(q_MhD):
            return attend(q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD, self._indexed())
        return block_attention_eager(q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD, self.blocks), None

    def backward(
        self,
        grad_MhD: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        context_MhD: Tensor,
        saved: Tensor | None,
        into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """Write the gradients of q, k, v, own_k, own_v to `into`.

        Args: inputs: q, k, v, own_k, own_v. context, saved: what `forward` returned.
        """
        if saved is not None:
            return attend_backward(grad_MhD, inputs, context_MhD, saved, into, self._indexed())
        with torch.enable_grad():
            q, k, v, own_k, own_v = leaves = [x.detach().requires_grad_() for x in inputs]
            context = block_attention_eager(q, k, v, own_k, own_v, self.blocks)
            gradients = torch.autograd.grad(context, leaves, grad_MhD)
        for place, gradient in zip(into, gradients, strict=True):
            place.copy_(gradient)


def block_attention(
    q_MhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_MgD: Tensor, own_v_MgD: Tensor, blocks: BlockRows
) -> Tensor:
    """Context [M, h, D] of every slot, differentiable in q, k, v and the slots' own keys and values.

    Args: k, v: of the pack's rows. own_k, own_v: of the slots. blocks: ascending.
    """
    return BlockAttention(blocks, k_RgD.shape[0]).attend(q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD)


class _Attend(torch.autograd.Function):
    """BlockAttention.forward and backward as one differentiable operation."""

    @staticmethod
    def forward(ctx, attention: BlockAttention, *inputs: Tensor):
        inputs = tuple(x.contiguous() for x in inputs)
        context_MhD, saved = attention.forward(*inputs)
        ctx.attention = attention
        ctx.save_for_backward(*inputs, context_MhD, saved)
        return context_MhD

    @staticmethod
    def backward(ctx, grad_MhD):
        *inputs, context_MhD, saved = ctx.saved_tensors
        into = tuple(torch.empty_like(x) for x in inputs)
        ctx.attention.backward(grad_MhD.contiguous(), tuple(inputs), context_MhD, saved, into)
        return None, *into


def block_attention_eager(
    q_MhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_MgD: Tensor, own_v_MgD: Tensor, blocks: BlockRows
) -> Tensor:
    """As `block_attention`, with explicit scores; any device and dtype, and blocks in any order."""
    size, repeat, scale = blocks.size, q_MhD.shape[1] // k_RgD.shape[1], q_MhD.shape[2] ** -0.5
    q, k, v, own_k, own_v = (wide(x) for x in (q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD))
    k, v, own_k, own_v = (x.repeat_interleave(repeat, dim=1) for x in (k, v, own_k, own_v))
    row_R = torch.arange(k.shape[0], device=k.device)
    seen_AR = (row_R >= blocks.start_A[:, None]) & (row_R < blocks.stop_A[:, None])
    scores_MhR = torch.einsum("mhd,rhd->mhr", q, k) * scale
    scores_MhR = scores_MhR.masked_fill(~seen_AR.repeat_interleave(size, dim=0)[:, None], -torch.inf)
    q_ABhD, own_k_ABhD, own_v_ABhD = (x.unflatten(0, (-1, size)) for x in (q, own_k, own_v))
    own_ABhB = torch.einsum("abhd,achd->abhc", q_ABhD, own_k_ABhD) * scale
    if blocks.causal:
        behind_BB = torch.ones((size, size), dtype=torch.bool, device=k.device).triu(1)
        own_ABhB = own_ABhB.masked_fill(behind_BB[:, None], -torch.inf)
    own_MhB = own_ABhB.flatten(0, 1)
    weights, own_weights = torch.cat((scores_MhR, own_MhB), -1).softmax(-1).split((k.shape[0], size), -1)
    context = torch.einsum("mhr,rhd->mhd", weights, v)
    own = torch.einsum("abhc,achd->abhd", own_weights.unflatten(0, (-1, size)), own_v_ABhD)
    return (context + own.flatten(0, 1)).to(q_MhD.dtype)
