"""Attention of training-time test (methods §4): to the step-1 keys of rows ≤ p and to the row's own later keys.

Two backends compute the same function:
    eager  a loop over documents with explicit scores; any device and dtype; the twin that tests compare with.
    flash  the fused kernel over all documents at once, whose result is joined with the own keys through the
           log-sum-exp. CUDA, bf16 or fp16. It holds nothing of size rows × rows, and compiles nothing per length. A
           pack of one document, or of documents of one length, takes cuDNN's kernel: it knows no document edges, but
           is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.batch import FeatureBatch
from headstart.heads.kernels import own_rows
from headstart.heads.kernels.rows import put_rows
from headstart.heads.numerics import wide


@dataclass(frozen=True)
class DocumentRows:
    """One document of a pack, for the eager backend: rows [start, stop) of the pack, the indices of its anchors, and
    their rows counted from `start`."""

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
    """The attention of one pack, shared by all steps.

    Args of the constructor: row_A: int64, the rows that attend; None = the pack's anchors.

    Args of `attend` and `forward`: q [n, h, d] of the first n anchors (those with most depths come first); k, v
        [R, g, d] of every row at step 1; own_k, own_v [J, n, g, d], the anchors' keys and values of steps 2 … J + 1.
        J may be 0, and the last three axes are contiguous. `attend` takes own_k, own_v as lists of [≥ n, g, d].
    Returns: context [n, h, d].
    """

    def __init__(self, batch: FeatureBatch, backend: str = "auto", row_A: Tensor | None = None):
        self.batch = batch
        self.row_A = batch.anchors.row_A if row_A is None else row_A
        device = batch.tokens_R.device
        self.backend = backend if backend != "auto" else ("flash" if device.type == "cuda" else "eager")
        self._documents: list[DocumentRows] | None = None

    def attend(
        self, q_AhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k: Sequence[Tensor] = (), own_v: Sequence[Tensor] = ()
    ) -> Tensor:
        """Differentiable in all arguments."""
        count = q_AhD.shape[0]
        if not own_k:
            none = k_RgD.new_empty(0, count, *k_RgD.shape[1:])
            return _Attend.apply(self, q_AhD, k_RgD, v_RgD, none, none)
        own_k_JAgD, own_v_JAgD = (torch.stack([x[:count] for x in own]) for own in (own_k, own_v))
        return _Attend.apply(self, q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD)

    def forward(
        self, q_AhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_JAgD: Tensor, own_v_JAgD: Tensor
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """(context [n, h, d], what `backward` needs besides the arguments), without autograd."""
        if self._fused(q_AhD):
            return self._flash(q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD)
        return self._eager(q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD), ()

    def backward(
        self,
        grad_AhD: Tensor,
        q_AhD: Tensor,
        k_RgD: Tensor,
        v_RgD: Tensor,
        own_k_JAgD: Tensor,
        own_v_JAgD: Tensor,
        saved: tuple[Any, ...],
        d_own_k_JAgD: Tensor,
        d_own_v_JAgD: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of (q, k, v). Those of own keys and values are *added* to d_own_k, d_own_v (at least float32)."""
        if self._fused(q_AhD):
            return self._flash_backward(
                grad_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD, saved, d_own_k_JAgD, d_own_v_JAgD
            )
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in (q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD)]
            dq, dk, dv, d_own_k, d_own_v = torch.autograd.grad(
                self._eager(*leaves), leaves, grad_AhD, materialize_grads=True
            )
        d_own_k_JAgD += d_own_k
        d_own_v_JAgD += d_own_v
        return dq, dk, dv

    def _fused(self, q_AhD: Tensor) -> bool:
        return self.backend == "flash" and q_AhD.dtype in (torch.bfloat16, torch.float16)

    # --- eager -------------------------------------------------------------------------------------------------

    def documents(self) -> list[DocumentRows]:
        if self._documents is None:
            anchor_row = self.row_A.cpu()
            self._documents, start = [], 0
            for length in self.batch.doc_lengths:
                inside = torch.nonzero((anchor_row >= start) & (anchor_row < start + length)).squeeze(1)
                if len(inside):
                    row = anchor_row[inside] - start
                    device = self.batch.tokens_R.device
                    self._documents.append(DocumentRows(start, start + length, inside.to(device), row.to(device)))
                start += length
        return self._documents

    def _eager(self, q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD) -> Tensor:
        count, heads, width = q_AhD.shape
        scale, repeat = width**-0.5, heads // k_RgD.shape[1]
        own_k, own_v = own_k_JAgD.unbind(0), own_v_JAgD.unbind(0)
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
            return q_AhD * 0  # no anchor: empty, but part of the graph
        context = torch.cat(pieces)
        return context.new_zeros(q_AhD.shape).index_copy(0, torch.cat(order), context).to(q_AhD.dtype)

    # --- flash -------------------------------------------------------------------------------------------------
    #
    # softmax over [step-1 keys ; own keys] from the fused kernel's output and log-sum-exp: with L the log-sum-exp over
    # both parts and O the joint output, the flash backward applied to (O, L) gives the exact gradients of the step-1
    # part, since it recomputes exp(s - L) and uses Δ = rowsum(dO · O). The own part is per row.

    def _flash(self, q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD) -> tuple[Tensor, tuple[Any, ...]]:
        row_A = self.row_A[: q_AhD.shape[0]]
        # the kernel's causal mask needs a query at every row: rows without an anchor get zeros, and are dropped later
        q_RhD = q_AhD.new_zeros(k_RgD.shape[0], *q_AhD.shape[1:])
        put_rows(q_RhD, row_A, q_AhD)
        scale = q_AhD.shape[-1] ** -0.5
        shape = self._rectangle(q_RhD)
        if shape is not None:
            attended = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *(_heads_first(x, shape) for x in (q_RhD, k_RgD, v_RgD)), None, True, 0.0, True, False, scale=scale
            )
            out_RhD = _rows_first(attended[0], len(q_RhD))
            lse_hR = F.pad(attended[1].squeeze(3).transpose(0, 1).flatten(1), (0, len(q_RhD) - shape[0] * shape[1]))
            state = attended[6:8]
        else:
            edges, longest = self.batch.edges_E, self.batch.longest
            out_RhD, lse_hR, *state = torch.ops.aten._flash_attention_forward(
                q_RhD, k_RgD, v_RgD, edges, edges, longest, longest, 0.0, True, False, scale=scale
            )[:4]
        if len(own_k_JAgD):
            own_rows.join_(q_RhD, own_k_JAgD, own_v_JAgD, out_RhD, lse_hR, row_A, scale)
        return out_RhD[row_A], (q_RhD, out_RhD, lse_hR, *state)

    def _flash_backward(self, grad_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD, saved, d_own_k_JAgD, d_own_v_JAgD):
        q_RhD, out_RhD, lse_hR, *state = saved
        row_A = self.row_A[: grad_AhD.shape[0]]
        scale = q_RhD.shape[-1] ** -0.5
        grad_RhD = torch.zeros_like(out_RhD)
        put_rows(grad_RhD, row_A, grad_AhD.to(out_RhD.dtype).contiguous())
        shape = self._rectangle(q_RhD)
        if shape is not None:
            docs, length = shape
            inputs = [_heads_first(x, shape) for x in (grad_RhD, q_RhD, k_RgD, v_RgD, out_RhD)]
            lse_BhT = lse_hR[:, : docs * length].unflatten(1, shape).transpose(0, 1).contiguous()
            gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *inputs, lse_BhT[..., None], *state, None, None, None, length, length, 0.0, True, scale=scale
            )
            dq_RhD, dk, dv = (_rows_first(x, len(q_RhD)) for x in gradients)
        else:
            edges, longest = self.batch.edges_E, self.batch.longest
            dq_RhD, dk, dv = torch.ops.aten._flash_attention_backward(
                grad_RhD, q_RhD, k_RgD, v_RgD, out_RhD, lse_hR, edges, edges, longest, longest, 0.0, True, *state,
                scale=scale,
            )  # fmt: skip
        if len(own_k_JAgD):
            own_rows.join_backward_(
                q_RhD, own_k_JAgD, own_v_JAgD, out_RhD, lse_hR, grad_RhD, row_A, scale, dq_RhD, d_own_k_JAgD,
                d_own_v_JAgD,
            )  # fmt: skip
        return dq_RhD[row_A], dk, dv

    def _rectangle(self, q_RhD: Tensor) -> tuple[int, int] | None:
        """(documents, rows of each) where cuDNN's kernel can run the pack as causal sequences of one length."""
        fits = q_RhD.shape[-1] <= 128 and q_RhD.shape[-1] % 8 == 0 and torch.backends.cuda.cudnn_sdp_enabled()
        length = same_length(self.batch)
        if not fits or length is None:
            return None
        # after a single document there is only padding, which no row of the document attends to
        docs = len(self.batch.doc_lengths)
        return (docs, length) if docs > 1 else (1, len(q_RhD))


def same_length(batch: FeatureBatch) -> int | None:
    """The rows of each document where all have equally many (0 for a single document of any length), else None.

    Packs must agree in it to share a captured graph. It is None for documents below 1,024 rows too: the kernel with
    document edges serves them.
    """
    lengths = batch.doc_lengths
    if len(lengths) == 1:
        return 0
    return lengths[0] if lengths and min(lengths) == max(lengths) >= 1024 else None


def _heads_first(x_RhD: Tensor, shape: tuple[int, int]) -> Tensor:
    """The first B · T rows, [≥ B · T, h, D] → [B, h, T, D]. Args: shape: (B, T)."""
    return x_RhD[: shape[0] * shape[1]].unflatten(0, shape).transpose(1, 2)


def _rows_first(x_BhTD: Tensor, rows: int) -> Tensor:
    """[B, h, T, D] → [rows, h, D], padded with zeros."""
    flat = x_BhTD.transpose(1, 2).flatten(0, 1)
    return flat.contiguous() if len(flat) == rows else F.pad(flat, (0, 0, 0, 0, 0, rows - len(flat)))


class _Attend(torch.autograd.Function):
    """TrainAttention.forward and backward as one differentiable operation."""

    @staticmethod
    def forward(ctx, attention: TrainAttention, q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD):
        q_AhD, k_RgD, v_RgD = (x.contiguous() for x in (q_AhD, k_RgD, v_RgD))
        out_AhD, saved = attention.forward(q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD)
        ctx.attention = attention
        ctx.save_for_backward(q_AhD, k_RgD, v_RgD, own_k_JAgD, own_v_JAgD, *saved)
        return out_AhD

    @staticmethod
    def backward(ctx, grad_AhD):
        *inputs, own_k_JAgD, own_v_JAgD = ctx.saved_tensors[:5]
        d_own = [torch.zeros_like(x, dtype=wide(x[:0]).dtype) for x in (own_k_JAgD, own_v_JAgD)]
        dq, dk, dv = ctx.attention.backward(
            grad_AhD, *inputs, own_k_JAgD, own_v_JAgD, ctx.saved_tensors[5:], d_own[0], d_own[1]
        )
        return None, dq, dk, dv, d_own[0].to(own_k_JAgD.dtype), d_own[1].to(own_v_JAgD.dtype)
