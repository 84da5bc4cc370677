"""Attention of training-time test (methods §4): step-1 keys of the document's rows ≤ p, and the row's own later keys.

Two backends compute the same function:
    eager  a loop over documents with explicit scores; any device and dtype; the twin that tests compare with.
    flash  the fused kernel over all documents at once, joined with the own-row part through the log-sum-exp;
           CUDA, bf16/fp16; nothing of size rows × rows is ever held and nothing is compiled per length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads import own_rows
from headstart.heads.base import FeatureBatch
from headstart.heads.numerics import wide


@dataclass(frozen=True)
class DocumentRows:
    """One document of a pack for the eager backend: its rows `[start, stop)` and its anchors (indices and rows)."""

    start: int
    stop: int
    anchor: Tensor
    row: Tensor


def own_scores(q_AhD: Tensor, own_k: Sequence[Tensor], scale: float) -> Tensor:
    """Scores of each row against its own keys of steps 2 … i: float32 [A, h, i-1]."""
    repeat = q_AhD.shape[1] // own_k[0].shape[1]
    return (
        torch.stack([(wide(q_AhD) * wide(k.repeat_interleave(repeat, dim=1))).sum(-1) for k in own_k], dim=-1) * scale
    )


class TrainAttention:
    """The attention of one pack, shared by all steps: `attend(q, k, v, own_k, own_v)`.

    Args of `attend`: q [n, h, d] of the first n anchors (deepest first, Anchors); k, v [R, g, d] of every row at
        step 1; own_k, own_v: lists of [≥ n, g, d], the anchors' keys and values of steps 2 … i.
    Returns: context [n, h, d].
    """

    def __init__(self, batch: FeatureBatch, backend: str = "auto"):
        self.batch = batch
        device = batch.tokens_R.device
        self.backend = backend if backend != "auto" else ("flash" if device.type == "cuda" else "eager")
        self._documents: list[DocumentRows] | None = None

    def attend(
        self, q_AhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k: Sequence[Tensor] = (), own_v: Sequence[Tensor] = ()
    ) -> Tensor:
        count = q_AhD.shape[0]
        own_k, own_v = [k[:count] for k in own_k], [v[:count] for v in own_v]
        if self.backend == "flash" and q_AhD.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q_AhD, k_RgD, v_RgD, own_k, own_v)
        return self._eager(q_AhD, k_RgD, v_RgD, own_k, own_v)

    # --- eager -------------------------------------------------------------------------------------------------

    def documents(self) -> list[DocumentRows]:
        if self._documents is None:
            anchor_row = self.batch.anchors.row_A.cpu()
            self._documents, start = [], 0
            for length in self.batch.doc_lengths:
                inside = torch.nonzero((anchor_row >= start) & (anchor_row < start + length)).squeeze(1)
                if len(inside):
                    row = anchor_row[inside] - start
                    device = self.batch.tokens_R.device
                    self._documents.append(DocumentRows(start, start + length, inside.to(device), row.to(device)))
                start += length
        return self._documents

    def _eager(self, q_AhD, k_RgD, v_RgD, own_k, own_v) -> Tensor:
        count, heads, width = q_AhD.shape
        scale, repeat = width**-0.5, heads // k_RgD.shape[1]
        pieces, order = [], []
        for document in self.documents():
            # anchors are deepest first: those of this step are the document's anchors with an index below `count`
            keep = int((document.anchor < count).sum())
            if keep == 0:
                continue
            anchor, row = document.anchor[:keep], document.row[:keep]
            q_hAD = wide(q_AhD[anchor].transpose(0, 1))
            k_hTD = wide(k_RgD[document.start : document.stop].repeat_interleave(repeat, dim=1).transpose(0, 1))
            v_hTD = wide(v_RgD[document.start : document.stop].repeat_interleave(repeat, dim=1).transpose(0, 1))
            scores = q_hAD @ k_hTD.transpose(1, 2) * scale
            later = torch.arange(k_hTD.shape[1], device=row.device) > row[:, None]
            scores = scores.masked_fill(later, float("-inf"))
            if own_k:
                own = own_scores(q_AhD[anchor], [k[anchor] for k in own_k], scale).transpose(0, 1)
                weights = torch.cat((scores, own), dim=-1).softmax(-1)
                shared, own = weights.split((scores.shape[-1], own.shape[-1]), dim=-1)
                own_v_hAjD = torch.stack([v[anchor].repeat_interleave(repeat, dim=1) for v in own_v], 2).transpose(0, 1)
                context = shared @ v_hTD + (own[..., None] * wide(own_v_hAjD)).sum(2)
            else:
                context = scores.softmax(-1) @ v_hTD
            pieces.append(context.transpose(0, 1))
            order.append(anchor)
        if not pieces:
            return torch.zeros_like(q_AhD)
        context = torch.cat(pieces)
        return context.new_zeros(q_AhD.shape).index_copy(0, torch.cat(order), context).to(q_AhD.dtype)

    # --- flash -------------------------------------------------------------------------------------------------

    def _flash(self, q_AhD, k_RgD, v_RgD, own_k, own_v) -> Tensor:
        row_A = self.batch.anchors.row_A[: q_AhD.shape[0]]
        # The kernel's causal mask wants a query at every row; rows without an anchor get zeros and are dropped.
        q_RhD = q_AhD.new_zeros(k_RgD.shape[0], *q_AhD.shape[1:]).index_copy(0, row_A, q_AhD)
        own_k_JAgD, own_v_JAgD = (torch.stack(own_k), torch.stack(own_v)) if own_k else (None, None)
        return _FlashJoined.apply(
            q_RhD, k_RgD, v_RgD, self.batch.edges_E, self.batch.longest, row_A, own_k_JAgD, own_v_JAgD
        )


class _FlashJoined(torch.autograd.Function):
    """softmax over [step-1 keys ; own keys] from the fused kernel's output and log-sum-exp.

    With L the log-sum-exp over both parts and O the joint output, the flash backward applied to (O, L) gives the exact
    gradients of the step-1 part: it recomputes exp(s - L) and uses Δ = rowsum(dO · O). The own part is per row.
    """

    @staticmethod
    def forward(ctx, q_RhD, k_RgD, v_RgD, edges, longest, row_A, own_k_JAgD, own_v_JAgD):
        scale = q_RhD.shape[-1] ** -0.5
        out_RhD, lse_hR, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q_RhD, k_RgD, v_RgD, edges, edges, longest, longest, 0.0, True, False, scale=scale
        )
        out_AhD = out_RhD[row_A]
        if own_k_JAgD is not None:
            lse_Ah = lse_hR[:, row_A].t().contiguous()
            out_AhD, lse_Ah = own_rows.join(q_RhD[row_A], own_k_JAgD, own_v_JAgD, out_AhD, lse_Ah, scale)
            out_RhD = out_RhD.index_copy(0, row_A, out_AhD)
            lse_hR = lse_hR.index_copy(1, row_A, lse_Ah.t())
        ctx.save_for_backward(q_RhD, k_RgD, v_RgD, edges, row_A, out_RhD, lse_hR, seed, offset, own_k_JAgD, own_v_JAgD)
        ctx.longest, ctx.scale = longest, scale
        return out_AhD

    @staticmethod
    def backward(ctx, grad_AhD):
        q_RhD, k_RgD, v_RgD, edges, row_A, out_RhD, lse_hR, seed, offset, own_k_JAgD, own_v_JAgD = ctx.saved_tensors
        grad_AhD = grad_AhD.to(out_RhD.dtype).contiguous()
        grad_RhD = torch.zeros_like(out_RhD).index_copy(0, row_A, grad_AhD)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_RhD,
            q_RhD,
            k_RgD,
            v_RgD,
            out_RhD,
            lse_hR,
            edges,
            edges,
            ctx.longest,
            ctx.longest,
            0.0,
            True,
            seed,
            offset,
            scale=ctx.scale,
        )
        d_own_k = d_own_v = None
        if own_k_JAgD is not None:
            lse_Ah = lse_hR[:, row_A].t().contiguous()
            own_dq, d_own_k, d_own_v = own_rows.join_backward(
                q_RhD[row_A], own_k_JAgD, own_v_JAgD, out_RhD[row_A], lse_Ah, grad_AhD, ctx.scale
            )
            dq = dq.index_add(0, row_A, own_dq)
        return dq, dk, dv, None, None, None, d_own_k, d_own_v
