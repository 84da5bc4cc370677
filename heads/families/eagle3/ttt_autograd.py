"""Training-time test of any number of layers, through autograd (methods §4).

    step 1  every row of the pack passes through all layers but the last. There, every row makes keys and values, and
            the anchors alone run the whole layer.
    step s  every anchor at p reads the embedding of x_{p+s} and its own previous output g. In each layer, it attends to
            that layer's step-1 keys of rows ≤ p and to its own keys of steps 2 … s.

One layer without q/k norms runs faster in ttt.py.

Shape legend: R rows, A anchors, M = Σ_d count_d, H hidden, W = (h + 2 g) · d packed projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.batch import FeatureBatch
from headstart.heads.kernels.attention import TrainAttention
from headstart.heads.kernels.rows import collect_steps
from headstart.heads.layers import DraftLayer, LaterLayer, RMSNorm, Rope


@dataclass
class LayerRun:
    """One layer in one rollout.

    Attributes:
        weight_WH: packed q, k and v projections in the compute dtype. Of the first layer, the half that reads g.
        k_RgD, v_RgD: keys and values of every row at step 1.
        own_k, own_v: the anchors' keys and values of later steps.
    """

    layer: DraftLayer
    weight_WH: Tensor
    k_RgD: Tensor | None = None
    v_RgD: Tensor | None = None
    own_k: list[Tensor] = field(default_factory=list)
    own_v: list[Tensor] = field(default_factory=list)

    @property
    def queries(self) -> int:
        """Channels of the queries, which come first in W."""
        attention = self.layer.self_attn
        return attention.heads * attention.head_dim

    def keys_values(self, kv_RW: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Projected keys and values → rotated keys and values, [R, g, d] each."""
        attention = self.layer.self_attn
        k, v = (x.unflatten(1, (attention.kv_heads, attention.head_dim)) for x in kv_RW.chunk(2, dim=1))
        return attention.rotated_keys(k, cos, sin), v

    def rotated_queries(self, q_AW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Projected queries → rotated queries [A, h, d]."""
        attention = self.layer.self_attn
        return attention.rotated_queries(q_AW.unflatten(1, (attention.heads, attention.head_dim)), cos, sin)


def rollout(
    batch: FeatureBatch,
    layers: Sequence[DraftLayer],
    hidden_norm: RMSNorm,
    rope: Rope,
    e_RH: Tensor,
    g_RH: Tensor,
    recycled: Callable[[Tensor], Tensor],
) -> Tensor:
    """All steps' outputs.

    Args:
        layers: the first one's attention input is cat(e, hidden_norm(g)), and its residual stream starts from g. The
            others are `LaterLayer`s.
        e_RH: normed embeddings that each row reads at step 1 (of its next token), in the compute dtype.
        g_RH: features of each row at step 1, in the compute dtype.
        recycled: output of the last layer → g of the next step.
    Returns: [M, H], the last layer's outputs for every depth's anchors, laid end to end (`anchors.count_K` rows each).
    """
    anchors, hidden = batch.anchors, g_RH.shape[1]
    counts, position_A = anchors.count_K, batch.position_R[anchors.row_A]
    runs = [LayerRun(layer, packed(layer, g_RH.dtype)) for layer in layers]
    # W · embedding is one product over the pack: at step s, an anchor reads what row p + s - 1 read at step 1
    e_RW = F.linear(e_RH, runs[0].weight_WH[:, :hidden])
    runs[0].weight_WH = runs[0].weight_WH[:, hidden:]
    attend = TrainAttention(batch).attend
    outputs = [first_step(batch, attend, runs, hidden_norm, rope, e_RW, g_RH)]
    ahead = _Ahead.apply(e_RW, anchors.row_A, counts[1:]).split(counts[1:]) if len(counts) > 1 else ()
    for step, e_AW in enumerate(ahead, start=1):
        count = counts[step]
        cos, sin = rope(position_A[:count] + step)
        out_AH = recycled(outputs[-1][:count])
        packed_AW = e_AW + F.linear(hidden_norm(out_AH), runs[0].weight_WH)
        for n, run in enumerate(runs):
            if n > 0:
                packed_AW = F.linear(input_norm(run)(out_AH), run.weight_WH)
            k_AgD, v_AgD = run.keys_values(packed_AW[:, run.queries :], cos, sin)
            run.own_k.append(k_AgD)
            run.own_v.append(v_AgD)
            q_AhD = run.rotated_queries(packed_AW[:, : run.queries], cos, sin)
            assert run.k_RgD is not None and run.v_RgD is not None
            out_AH = run.layer.finish(attend(q_AhD, run.k_RgD, run.v_RgD, run.own_k, run.own_v), out_AH)
        outputs.append(out_AH)
    return torch.cat(outputs)


def first_step(
    batch: FeatureBatch,
    attend: Callable[..., Tensor],
    runs: list[LayerRun],
    hidden_norm: RMSNorm,
    rope: Rope,
    e_RW: Tensor,
    g_RH: Tensor,
) -> Tensor:
    """Step 1 of every layer, which fills the runs' keys and values.

    Returns: the last layer's output of the anchors that run at depth 1, [count, H].
    """
    row_A, rows = batch.anchors.row_A[: batch.anchors.count_K[0]], g_RH.shape[0]
    cos, sin = rope(batch.position_R)
    every_row = TrainAttention(batch, row_A=torch.arange(rows, device=row_A.device))
    for n, run in enumerate(runs):
        x_RH = hidden_norm(g_RH) if n == 0 else input_norm(run)(g_RH)
        last, queries = n == len(runs) - 1, run.queries
        if not last:
            packed_RW = F.linear(x_RH, run.weight_WH)
            packed_RW = packed_RW + e_RW if n == 0 else packed_RW
            run.k_RgD, run.v_RgD = run.keys_values(packed_RW[:, queries:], cos, sin)
            q_RhD = run.rotated_queries(packed_RW[:, :queries], cos, sin)
            g_RH = run.layer.finish(every_row.attend(q_RhD, run.k_RgD, run.v_RgD), g_RH)
            continue
        kv_RW = F.linear(x_RH, run.weight_WH[queries:])
        q_AW = F.linear(x_RH.index_select(0, row_A), run.weight_WH[:queries])
        if n == 0:
            kv_RW, q_AW = kv_RW + e_RW[:, queries:], q_AW + e_RW[:, :queries].index_select(0, row_A)
        run.k_RgD, run.v_RgD = run.keys_values(kv_RW, cos, sin)
        q_AhD = run.rotated_queries(q_AW, cos[row_A], sin[row_A])
        g_RH = run.layer.finish(attend(q_AhD, run.k_RgD, run.v_RgD), g_RH.index_select(0, row_A))
    return g_RH


def packed(layer: DraftLayer, dtype: torch.dtype) -> Tensor:
    """The q, k and v projections of a layer as one matrix [W, in]."""
    attention = layer.self_attn
    return torch.cat([linear.weight for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]).to(dtype)


def input_norm(run: LayerRun) -> RMSNorm:
    assert isinstance(run.layer, LaterLayer)
    return run.layer.input_layernorm


class _Ahead(torch.autograd.Function):
    """Rows row_A + s of `e` for the steps s = 1, 2, …, of the first counts[s - 1] anchors each, laid end to end.

    The gradient of a row is the sum over the anchors and steps that read it, in one pass (kernels/rows.py). Only rows
    without a loss are clamped to the last one.
    """

    @staticmethod
    def forward(ctx, e_RW: Tensor, row_A: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(row_A)
        ctx.counts, ctx.rows = counts, e_RW.shape[0]
        ahead = [row_A[:count] + step for step, count in enumerate(counts, start=1)]
        return e_RW.index_select(0, torch.cat(ahead).clamp(max=ctx.rows - 1))

    @staticmethod
    def backward(ctx, grad_MW: Tensor):
        (row_A,) = ctx.saved_tensors
        return collect_steps(grad_MW.contiguous(), row_A, ctx.counts, ctx.rows, first=1), None, None
