"""Training-time test of one decoder layer, forward and backward written out (methods §4; arXiv 2503.01840, §3).

    step 1  every row p of the pack makes keys and values; every anchor runs the whole layer
    step s  every anchor at p reads the embedding of x_{p+s} and its own previous output g; it attends to the step-1
            keys of rows ≤ p and to its own keys of steps 2 … s. g is the layer's output, or that output normed
            (EAGLE-3.1, `head.norm_output`).

Why not autograd over K calls of a layer:
- The attention input is cat(norm(embedding), norm(g)). The embedding an anchor reads at step s is the one row p + s - 1
  reads at step 1, so W · embedding is one product over the rows of the pack instead of one per step, and so is its
  gradient. The steps' own products take the g half alone.
- A weight is used K times. What its gradient needs is kept end to end for all steps, so each weight gradient is one
  product over Σ count_d rows, accumulated in the matrix unit in float32, instead of K products and K - 1 sums.
- Gradients of activations are formed in place over what they are the gradient of.

Shape legend: R rows, A anchors, M = Σ_d count_d, H hidden, I MLP width, W = (h + 2 g) · d packed projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.batch import FeatureBatch
from headstart.heads.kernels.attention import TrainAttention
from headstart.heads.kernels.rows import (
    add_rows,
    collect_steps,
    gated,
    gated_backward,
    rms_norm,
    rms_norm_backward,
    rotate_heads,
)
from headstart.heads.layers import DraftLayer, RMSNorm, Rope
from headstart.heads.numerics import weight_grad, wide


@dataclass(frozen=True)
class Setup:
    """The pack and the layer's settings of one rollout: everything but tensors that need gradients."""

    batch: FeatureBatch
    attention: TrainAttention
    rope: Rope
    heads: int
    groups: int
    width: int
    eps: float
    out_eps: float
    act: Callable[[Tensor], Tensor] | None
    recompute: bool


def rollout(
    batch: FeatureBatch,
    layer: DraftLayer,
    hidden_norm: RMSNorm,
    rope: Rope,
    e_RH: Tensor,
    g_RH: Tensor,
    out_norm: RMSNorm | None = None,
) -> Tensor:
    """All steps' outputs.

    Args:
        layer: its attention input is cat(e, hidden_norm(g)), 2H wide; its residual stream starts from g.
        e_RH: normed embeddings that each row reads at step 1 (of its next token), in the compute dtype.
        g_RH: features of each row at step 1, in the compute dtype.
        out_norm: norm of an output before the next step reads it; None leaves it as it is.
    Returns: [M, H], the outputs of every depth's anchors laid end to end (`anchors.count_K` rows each).
    """
    attention = layer.self_attn
    setup = Setup(
        batch, TrainAttention(batch), rope, attention.heads, attention.kv_heads, attention.head_dim, hidden_norm.eps,
        hidden_norm.eps if out_norm is None else out_norm.eps, layer.mlp.act, layer.recompute,
    )  # fmt: skip
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    weights = [linear.weight for linear in (*projections, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)]
    with torch.autocast(g_RH.device.type, enabled=False):
        out_weight = None if out_norm is None else out_norm.weight
        norms = (hidden_norm.weight, layer.post_attention_layernorm.weight, out_weight)
        return _Rollout.apply(setup, e_RH, g_RH, *norms, *weights)


def _packed(weights: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """[Σ out, in] in the compute dtype."""
    if len(weights) == 1:
        return weights[0].to(dtype)
    packed = torch.empty(sum(w.shape[0] for w in weights), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    for into, weight in zip(packed.split([w.shape[0] for w in weights]), weights, strict=True):
        into.copy_(weight)
    return packed


class _Rollout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, setup: Setup, e_RH, g_RH, hidden_weight, post_weight, out_weight, wq, wk, wv, wo, w_gate, w_up, w_down
    ):
        dtype, hidden = g_RH.dtype, g_RH.shape[1]
        anchors, rows = setup.batch.anchors, g_RH.shape[0]
        counts, row_A = anchors.count_K, anchors.row_A[: anchors.count_K[0]]
        queries = setup.heads * setup.width
        w_qkv, w_out = _packed((wq, wk, wv), dtype), wo.to(dtype)
        w_gated, w_back = _packed((w_gate, w_up), dtype), w_down.to(dtype)
        norm_1, norm_2 = hidden_weight.to(dtype), post_weight.to(dtype)
        norm_3 = None if out_weight is None else out_weight.to(dtype)
        w_e, w_g = w_qkv[:, :hidden], w_qkv[:, hidden:]
        e_RW = e_RH @ w_e.t()

        def make(count: int, width: int) -> Tensor:
            return g_RH.new_empty(count, width)

        total, most = sum(counts), counts[0]
        n1_RH = rms_norm(g_RH, norm_1, setup.eps)
        n1_MH, x_MH, n2_MH, g_MH = (make(total, hidden) for _ in range(4))
        context_MC, packed_MI, act_MI = (
            make(total, queries),
            make(total, w_gated.shape[0]),
            make(total, w_back.shape[1]),
        )
        # what later steps read: the outputs themselves (None), or the normed ones
        r_MH = None if norm_3 is None else make(total - most, hidden)
        later = max(len(counts) - 1, 0)
        own_k, own_v = (g_RH.new_empty(later, most, setup.groups, setup.width) for _ in range(2))

        cos_R, sin_R = setup.rope(setup.batch.position_R)
        kv_RW = torch.addmm(e_RW[:, queries:], n1_RH, w_g[queries:].t())
        kv_RW = rotate_heads(kv_RW, cos_R, sin_R, setup.groups, setup.width)
        k_RgD, v_RgD = (x.unflatten(1, (setup.groups, setup.width)).contiguous() for x in kv_RW.chunk(2, dim=1))
        position_A = setup.batch.position_R[row_A]
        g_AH, attended, start = g_RH[row_A], [], 0
        for step, count in enumerate(counts):
            part = slice(start, start + count)
            start += count
            cos, sin = setup.rope(position_A[:count] + step)
            n1 = n1_MH[part]
            if step == 0:
                torch.index_select(n1_RH, 0, row_A, out=n1)
                q_AW = e_RW[row_A, :queries].addmm_(n1, w_g[:queries].t())
                q = rotate_heads(q_AW, cos, sin, setup.heads, setup.width).unflatten(1, (setup.heads, setup.width))
            else:
                g_AH = g_AH[:count]
                if norm_3 is not None:
                    g_AH = rms_norm(g_AH, norm_3, setup.out_eps, r_MH[part.start - most : part.stop - most])
                rms_norm(g_AH, norm_1, setup.eps, n1)
                qkv_AW = e_RW[_ahead(row_A[:count], step, rows)].addmm_(n1, w_g.t())
                turned = rotate_heads(qkv_AW, cos, sin, setup.heads + setup.groups, setup.width)
                q, k, v = turned.unflatten(1, (-1, setup.width)).split((setup.heads, setup.groups, setup.groups), dim=1)
                own_k[step - 1, :count], own_v[step - 1, :count] = k, v
            context, saved = setup.attention.forward(q, k_RgD, v_RgD, own_k[:step, :count], own_v[:step, :count])
            # a fused backward finds the queries in `saved`
            attended.append((None if saved else q, saved))
            context_MC[part] = context.flatten(1)
            x = torch.addmm(g_AH, context_MC[part], w_out.t(), out=x_MH[part])
            inner = slice(0, count) if setup.recompute else part
            torch.mm(rms_norm(x, norm_2, setup.eps, n2_MH[inner]), w_gated.t(), out=packed_MI[inner])
            gated(packed_MI[inner], act_MI[inner], setup.act)
            g_AH = torch.addmm(x, act_MI[inner], w_back.t(), out=g_MH[part])
        if setup.recompute:
            n2_MH = act_MI = packed_MI = None
        ctx.setup, ctx.attended = setup, attended
        ctx.save_for_backward(
            e_RH, g_RH, hidden_weight, post_weight, out_weight, wq, wk, wv, wo, w_gate, w_up, w_down, w_qkv, w_out,
            w_gated, w_back, n1_RH, n1_MH, x_MH, n2_MH, g_MH, r_MH, context_MC, packed_MI, act_MI, k_RgD, v_RgD, own_k,
            own_v,
        )  # fmt: skip
        return g_MH

    @staticmethod
    def backward(ctx, grad_MH):
        setup, attended = ctx.setup, ctx.attended
        (
            e_RH, g_RH, hidden_weight, post_weight, out_weight, wq, wk, wv, wo, w_gate, w_up, w_down, w_qkv, w_out,
            w_gated, w_back, n1_RH, n1_MH, x_MH, n2_MH, g_MH, r_MH, context_MC, packed_MI, act_MI, k_RgD, v_RgD, own_k,
            own_v,
        ) = ctx.saved_tensors  # fmt: skip
        dtype, hidden = g_RH.dtype, g_RH.shape[1]
        anchors, rows = setup.batch.anchors, g_RH.shape[0]
        counts, row_A = anchors.count_K, anchors.row_A[: anchors.count_K[0]]
        queries, heads, groups, width = setup.heads * setup.width, setup.heads, setup.groups, setup.width
        w_g = w_qkv[:, hidden:]
        norm_1, norm_2 = hidden_weight.to(dtype), post_weight.to(dtype)
        norm_3 = None if out_weight is None else out_weight.to(dtype)
        dg_MH = grad_MH.clone(memory_format=torch.contiguous_format)
        dx_MH = torch.empty_like(x_MH)
        dqkv_MW = grad_MH.new_empty(sum(counts[1:]), w_qkv.shape[0])
        d_own_k, d_own_v = (torch.zeros_like(x, dtype=wide(x[:0]).dtype) for x in (own_k, own_v))
        dk_RgD, dv_RgD = (torch.zeros_like(x, dtype=wide(x[:0]).dtype) for x in (k_RgD, v_RgD))
        d_norm_1, d_norm_2 = (torch.zeros_like(hidden_weight, dtype=wide(g_RH[:0]).dtype) for _ in range(2))
        d_norm_3 = None if norm_3 is None else torch.zeros_like(d_norm_1)
        d_gated = d_down = None
        if setup.recompute:
            d_gated = torch.zeros(w_gated.shape, dtype=w_gate.dtype, device=w_gate.device)
            d_down = torch.zeros_like(w_down)
        position_A = setup.batch.position_R[row_A]
        starts = [sum(counts[:step]) for step in range(len(counts) + 1)]
        for step in reversed(range(len(counts))):
            count, part = counts[step], slice(starts[step], starts[step + 1])
            dg = dg_MH[part]
            if setup.recompute:
                n2_AH = rms_norm(x_MH[part], norm_2, setup.eps)
                packed_AI = n2_AH @ w_gated.t()
                act_AI = packed_AI.new_empty(count, w_back.shape[1])
                gated(packed_AI, act_AI, setup.act)
                d_down += weight_grad(dg, act_AI, w_down.dtype)
            else:
                packed_AI = packed_MI[part]
            gated_backward(packed_AI, dg @ w_back, setup.act)
            if setup.recompute:
                d_gated += weight_grad(packed_AI, n2_AH, w_gate.dtype)
            dx = dx_MH[part]
            d_norm_2 += rms_norm_backward(packed_AI @ w_gated, x_MH[part], norm_2, setup.eps, dx, dg)
            d_context = (dx @ w_out).unflatten(1, (heads, width))
            q, saved = attended[step]
            own = (own_k[:step, :count], own_v[:step, :count])
            dq, dk, dv = setup.attention.backward(
                d_context, d_context if q is None else q, k_RgD, v_RgD, *own, saved, d_own_k[:step, :count],
                d_own_v[:step, :count],
            )  # fmt: skip
            attended[step] = None
            dk_RgD += dk
            dv_RgD += dv
            cos, sin = setup.rope(position_A[:count] + step)
            if step == 0:
                dq_AW = rotate_heads(dq.flatten(1), cos, -sin, heads, width)
                break
            dqkv = dqkv_MW[starts[step] - counts[0] : starts[step + 1] - counts[0]]
            dq_part, dk_part, dv_part = dqkv.split((queries, groups * width, groups * width), dim=1)
            rotate_heads(dq.flatten(1), cos, -sin, heads, width, dq_part)
            rotate_heads(d_own_k[step - 1, :count].flatten(1), cos, -sin, groups, width, dk_part)
            dv_part.copy_(d_own_v[step - 1, :count].flatten(1))
            before = slice(starts[step - 1], starts[step - 1] + count)
            if norm_3 is None:
                d_norm_1 += rms_norm_backward(
                    dqkv @ w_g, g_MH[before], norm_1, setup.eps, dg_MH[before], dx, accumulate=True
                )
                continue
            r_AH, dr_AH = r_MH[starts[step] - counts[0] : starts[step + 1] - counts[0]], torch.empty_like(dx)
            d_norm_1 += rms_norm_backward(dqkv @ w_g, r_AH, norm_1, setup.eps, dr_AH, dx)
            d_norm_3 += rms_norm_backward(
                dr_AH, g_MH[before], norm_3, setup.out_eps, dg_MH[before], accumulate=True
            )

        cos_R, sin_R = setup.rope(setup.batch.position_R)
        dkv_RW = torch.cat((dk_RgD, dv_RgD), dim=1).to(dtype).flatten(1)
        dkv_RW = rotate_heads(dkv_RW, cos_R, -sin_R, groups, width)
        dn_RH = dkv_RW @ w_g[queries:]
        add_rows(dn_RH, row_A, dq_AW @ w_g[:queries])
        dg_RH = torch.empty_like(g_RH)
        d_norm_1 += rms_norm_backward(dn_RH, g_RH, norm_1, setup.eps, dg_RH)
        add_rows(dg_RH, row_A, dx_MH[: counts[0]])

        de_RW = collect_steps(dqkv_MW, row_A, counts[1:], rows, first=1)
        de_RW[:, queries:] += dkv_RW
        add_rows(de_RW[:, :queries], row_A, dq_AW)
        de_RH = de_RW @ w_qkv[:, :hidden]
        d_qkv = torch.empty(w_qkv.shape, dtype=wq.dtype, device=wq.device)
        d_qkv[:, :hidden] = weight_grad(de_RW, e_RH, wq.dtype)
        d_qkv[:, hidden:] = weight_grad(dqkv_MW, n1_MH[counts[0] :], wq.dtype)
        d_qkv[:queries, hidden:] += weight_grad(dq_AW, n1_MH[: counts[0]], wq.dtype)
        d_qkv[queries:, hidden:] += weight_grad(dkv_RW, n1_RH, wq.dtype)
        d_out = weight_grad(dx_MH, context_MC, wo.dtype)
        if not setup.recompute:
            d_gated = weight_grad(packed_MI, n2_MH, w_gate.dtype)
            d_down = weight_grad(dg_MH, act_MI, w_down.dtype)
        return (
            None, de_RH, dg_RH, d_norm_1.to(hidden_weight.dtype), d_norm_2.to(post_weight.dtype),
            None if d_norm_3 is None else d_norm_3.to(out_weight.dtype),
            *d_qkv.split((wq.shape[0], wk.shape[0], wv.shape[0])), d_out,
            *d_gated.split((w_gate.shape[0], w_up.shape[0])), d_down,
        )  # fmt: skip


def _ahead(row_A: Tensor, step: int, rows: int) -> Tensor:
    """The row whose step-1 embedding each anchor reads at `step` (0-based). Only rows without a loss are clamped."""
    return (row_A + step).clamp(max=rows - 1)
