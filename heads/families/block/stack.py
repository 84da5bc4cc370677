"""All layers of a block head, forward and backward written out: what training runs.

    context   c = norm(fc · features); keys and values of all layers are one product of it
    layer     as a decoder layer of Qwen3's type, on the slots alone; they attend to the context and to their block
    end       the final norm, of the slots that draft

Why not autograd over the modules:
- Norms, rotations and the product of the gated MLP are computed again in the backward pass. A slot keeps, for every
  layer, its input, its packed projections, its attention's result, what the MLP reads, and gate and up.
- Weight gradients come from the matrix unit in float32. Where the step allows it (heads/gradients.py), they are added
  to `.grad` at once: none of the weights' size waits in memory.
- What a layer kept is freed as soon as its backward pass is done.

Shape legend: R rows, A blocks, B slots of a block, M = A · B slots, N slots that draft, H hidden, I MLP width,
W = (h + 2 g) · d packed projections, C = h · d, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headstart.heads.kernels.block_attention import BlockAttention
from headstart.heads.kernels.head_norms import HeadNorms, norm_rotate, norm_rotate_backward
from headstart.heads.kernels.rows import gated, gated_backward, rms_norm, rms_norm_backward
from headstart.heads.layers import LaterLayer, RMSNorm
from headstart.heads.numerics import add_weight_grad, weight_grad

#: parameters of a layer, in the order of `layer_parameters`
WQ, WK, WV, WO, GATE, UP, DOWN, INPUT_NORM, POST_NORM, Q_NORM, K_NORM = range(11)
PER_LAYER = K_NORM + 1
#: largest gradient of several matrices together that is made as one product
ONE_PRODUCT = 1 << 22
#: parameters before those of the layers
FC, HIDDEN_NORM, NORM = range(3)


def first_of(layer: int) -> int:
    """Index of a layer's first parameter in `Stack.parameters`."""
    return NORM + 1 + layer * PER_LAYER


@dataclass(frozen=True)
class ContextRows:
    """What keys and values of the context are made of: streams_RF, the target's features in the compute dtype, and
    turn_R, cos and sin of their positions, float32 [R, rotary]."""

    streams_RF: Tensor
    turn_R: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Slots:
    """Slots of all blocks of a pack, or of a part of them.

    Attributes:
        z_MH: embeddings. turn_M: cos and sin of their positions, float32 [M, rotary].
        attention: of these blocks.
        drafting_N: int64, the slots that draft, in the order in which the result has them.
    """

    z_MH: Tensor
    turn_M: tuple[Tensor, Tensor]
    attention: BlockAttention
    drafting_N: Tensor


@dataclass(frozen=True)
class Stack:
    """The modules of the backbone.

    Attributes:
        adds: whether the backward pass adds gradients to `.grad` itself (heads/gradients.py).
    """

    fc: nn.Linear
    hidden_norm: RMSNorm
    layers: Sequence[LaterLayer]
    norm: RMSNorm
    adds: bool = False

    @property
    def parameters(self) -> list[Tensor]:
        """In the order of FC … and WQ …."""
        first = [self.fc.weight, self.hidden_norm.weight, self.norm.weight]
        return [*first, *(p for layer in self.layers for p in layer_parameters(layer))]

    def run(self, rows: ContextRows, slots: Slots) -> Tensor:
        """Normed outputs of the slots that draft, [N, H]; differentiable in the parameters."""
        with torch.autocast(slots.z_MH.device.type, enabled=False):
            result: Tensor = _Run.apply(self, rows, slots, *self.parameters)
        return result

    @torch.no_grad()
    def evaluate(self, rows: ContextRows, parts: Iterable[Slots]) -> Tensor:
        """As `run` without gradients, one part of the slots after the other; the results end to end."""
        dtype, kind, found = rows.streams_RF.dtype, rows.streams_RF.device.type, []
        with torch.autocast(kind, enabled=False):
            context = Context.of(self, rows)
            weights = [LayerWeights(layer, dtype, self.sizes) for layer in self.layers]
        for slots in parts:  # they are made here one by one, under the caller's autocast
            with torch.autocast(kind, enabled=False):
                z_MH = slots.z_MH
                for number, layer_weights in enumerate(weights):
                    z_MH, _ = layer_forward(layer_weights, slots, z_MH, context.keys_values(number))
                found.append(rms_norm(z_MH[slots.drafting_N], self.norm.weight.to(dtype), self.norm.eps))
        return torch.cat(found)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """h, g, d."""
        attention = self.layers[0].self_attn
        return attention.heads, attention.kv_heads, attention.head_dim


def layer_parameters(layer: LaterLayer) -> list[Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    assert attention.q_norm is not None and attention.k_norm is not None
    return [
        attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight,
        mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight, attention.q_norm.weight, attention.k_norm.weight,
    ]  # fmt: skip


def packed(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[Σ out, in] in the compute dtype."""
    whole = torch.empty(sum(w.shape[0] for w in weights), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    for into, weight in zip(whole.split([w.shape[0] for w in weights]), weights, strict=True):
        into.copy_(weight)
    return whole


class LayerWeights:
    """One layer's weights in the compute dtype: copies that last from the forward pass to the backward pass."""

    def __init__(self, layer: LaterLayer, dtype: torch.dtype, sizes: tuple[int, int, int]):
        heads, groups, _ = sizes
        weights = [p.detach() for p in layer_parameters(layer)]
        self.qkv_WH = packed((weights[WQ], weights[WK], weights[WV]), dtype)
        self.out_HC = weights[WO].to(dtype)
        self.gated_UH = packed((weights[GATE], weights[UP]), dtype)
        self.down_HI = weights[DOWN].to(dtype)
        self.input_norm_H, self.post_norm_H = weights[INPUT_NORM].to(dtype), weights[POST_NORM].to(dtype)
        eps = layer.self_attn.q_norm.eps  # type: ignore[union-attr]
        self.norms = HeadNorms(torch.stack((weights[Q_NORM], weights[K_NORM]))[None], heads, groups, eps)
        self.eps, self.act, self.recompute = layer.input_layernorm.eps, layer.mlp.act, layer.recompute


@dataclass
class Context:
    """Keys and values of the pack's rows, of all layers.

    Attributes:
        c_RH: fc's product, before the norm of weight norm_H. raw_RL2gd: projections, keys before values. k_RLgd: keys,
            rotated.
        weight: the stacked projections. norms: of the keys.
    """

    c_RH: Tensor
    norm_H: Tensor
    eps: float
    raw_RL2gd: Tensor
    k_RLgd: Tensor
    weight: Tensor
    norms: HeadNorms

    @classmethod
    def of(cls, stack: Stack, rows: ContextRows) -> Context:
        dtype, (_, groups, width) = rows.streams_RF.dtype, stack.sizes
        weights = [[p.detach() for p in layer_parameters(layer)] for layer in stack.layers]
        weight = packed([w for layer in weights for w in (layer[WK], layer[WV])], dtype)
        norm_L2D = torch.stack([layer[K_NORM] for layer in weights])[:, None].expand(-1, 2, -1).contiguous()
        norms = HeadNorms(norm_L2D, 0, groups, stack.layers[0].self_attn.k_norm.eps)  # type: ignore[union-attr]
        c_RH = rows.streams_RF @ stack.fc.weight.detach().to(dtype).t()
        norm_H, eps = stack.hidden_norm.weight.detach().to(dtype), stack.hidden_norm.eps
        raw_RW = rms_norm(c_RH, norm_H, eps, torch.empty_like(c_RH)) @ weight.t()
        raw_RL2gd = raw_RW.unflatten(1, (len(weights), 2 * groups, width))
        return cls(c_RH, norm_H, eps, raw_RL2gd, norm_rotate(raw_RL2gd, norms, *rows.turn_R), weight, norms)

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """k, v [R, g, d] of one layer; rows are strided."""
        return self.k_RLgd[:, layer], self.raw_RL2gd[:, layer, self.norms.keys :]


@dataclass
class Kept:
    """What a layer keeps for its backward pass."""

    z_MH: Tensor
    qkv_MW: Tensor
    context_MC: Tensor
    saved: Tensor | None
    x_MH: Tensor
    packed_MU: Tensor | None


class GradientSums:
    """The gradients of the parameters, either returned or added to `.grad`."""

    def __init__(self, parameters: Sequence[Tensor], adds: bool):
        self._parameters = parameters
        self._adds = [adds and p.grad is not None for p in parameters]
        self._sums = [p.grad if a else None for p, a in zip(parameters, self._adds, strict=True)]

    def product(self, index: int, grad_nO: Tensor, x_nI: Tensor) -> None:
        """Add gradᵀ x."""
        parameter, into = self._parameters[index], self._sums[index]
        if into is not None:
            add_weight_grad(into, grad_nO, x_nI)
        elif parameter.requires_grad:
            self._sums[index] = weight_grad(grad_nO, x_nI, parameter.dtype)

    def products(self, indices: Sequence[int], grad_nO: Tensor, x_nI: Tensor) -> None:
        """As `product`, for parameters whose outputs lie side by side in `grad`.

        Small ones are one product: each alone would leave most of the device idle. Of large ones, no copy is made.
        """
        sizes = [self._parameters[index].shape[0] for index in indices]
        if grad_nO.shape[1] * x_nI.shape[1] > ONE_PRODUCT:
            for index, part_nO in zip(indices, grad_nO.split(sizes, dim=1), strict=True):
                self.product(index, part_nO, x_nI)
            return
        whole = weight_grad(grad_nO, x_nI, self._parameters[indices[0]].dtype)
        for index, part in zip(indices, whole.split(sizes), strict=True):
            self.vector(index, part)

    def vector(self, index: int, gradient: Tensor) -> None:
        parameter, into = self._parameters[index], self._sums[index]
        if into is not None:
            into.add_(gradient)
        elif parameter.requires_grad:
            self._sums[index] = gradient.to(parameter.dtype)

    def returned(self) -> list[Tensor | None]:
        """What autograd has to add to `.grad`."""
        return [None if added else total for total, added in zip(self._sums, self._adds, strict=True)]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stack: Stack, rows: ContextRows, slots: Slots, *parameters: Tensor):
        dtype, z_MH = slots.z_MH.dtype, slots.z_MH
        context = Context.of(stack, rows)
        weights = [LayerWeights(layer, dtype, stack.sizes) for layer in stack.layers]
        kept = []
        for number, layer_weights in enumerate(weights):
            z_MH, keep = layer_forward(layer_weights, slots, z_MH, context.keys_values(number))
            kept.append(keep)
        z_NH, norm_H = z_MH[slots.drafting_N], stack.norm.weight.detach().to(dtype)
        ctx.adds, ctx.parameters, ctx.rows, ctx.slots = stack.adds, parameters, rows, slots
        ctx.context, ctx.weights, ctx.kept, ctx.end = context, weights, kept, (z_NH, norm_H, stack.norm.eps)
        return rms_norm(z_NH, norm_H, stack.norm.eps, torch.empty_like(z_NH))

    @staticmethod
    def backward(ctx, grad_NH):
        slots, context, sums = ctx.slots, ctx.context, GradientSums(ctx.parameters, ctx.adds)
        z_NH, norm_H, eps = ctx.end
        d_z_NH = torch.empty_like(z_NH)
        sums.vector(NORM, rms_norm_backward(grad_NH.contiguous(), z_NH, norm_H, eps, d_z_NH))
        dz_MH = torch.zeros_like(slots.z_MH).index_copy_(0, slots.drafting_N, d_z_NH)
        del ctx.end, z_NH, d_z_NH, grad_NH
        d_raw_RL2gd, d_k_RLgd = torch.empty_like(context.raw_RL2gd), torch.empty_like(context.k_RLgd)
        for number in reversed(range(len(ctx.weights))):
            into = d_k_RLgd[:, number], d_raw_RL2gd[:, number, context.norms.keys :]
            dz_MH = layer_backward(
                ctx.weights.pop(), slots, ctx.kept.pop(), dz_MH, context.keys_values(number), into, sums,
                first_of(number),
            )  # fmt: skip
        del ctx.context
        context_backward(ctx.rows, context, d_k_RLgd, d_raw_RL2gd, sums)
        return None, None, None, *sums.returned()


def _projections(weights: LayerWeights, qkv_MW: Tensor) -> tuple[Tensor, Tensor]:
    """(packed projections by heads [M, 1, h + 2 g, d], own values [M, g, d])."""
    norms = weights.norms
    split = qkv_MW.unflatten(1, (1, norms.heads + norms.keys, norms.weight_L2D.shape[-1]))
    return split, split[:, 0, norms.heads :]


def layer_forward(
    weights: LayerWeights, slots: Slots, z_MH: Tensor, keys_values: tuple[Tensor, Tensor]
) -> tuple[Tensor, Kept]:
    """(output [M, H], what the backward pass needs)."""
    buffer_MH, queries = torch.empty_like(z_MH), weights.norms.queries
    qkv_MW = rms_norm(z_MH, weights.input_norm_H, weights.eps, buffer_MH) @ weights.qkv_WH.t()
    split, own_v = _projections(weights, qkv_MW)
    turned = norm_rotate(split, weights.norms, *slots.turn_M)[:, 0]
    context, saved = slots.attention.forward(turned[:, :queries], *keys_values, turned[:, queries:], own_v)
    del turned
    context_MC = context.flatten(1)
    x_MH = torch.addmm(z_MH, context_MC, weights.out_HC.t())
    packed_MU = rms_norm(x_MH, weights.post_norm_H, weights.eps, buffer_MH) @ weights.gated_UH.t()
    act_MI = _activated(packed_MU, weights.act)
    z_next_MH = torch.addmm(x_MH, act_MI, weights.down_HI.t())
    return z_next_MH, Kept(z_MH, qkv_MW, context_MC, saved, x_MH, None if weights.recompute else packed_MU)


def _activated(packed_MU: Tensor, act: Callable[[Tensor], Tensor] | None) -> Tensor:
    act_MI = packed_MU.new_empty(packed_MU.shape[0], packed_MU.shape[1] // 2)
    gated(packed_MU, act_MI, act)
    return act_MI


def layer_backward(
    weights: LayerWeights,
    slots: Slots,
    kept: Kept,
    dz_MH: Tensor,
    keys_values: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor],
    sums: GradientSums,
    base: int,
) -> Tensor:
    """The gradient of the layer's input [M, H].

    Args:
        into: takes the gradients of `keys_values`. base: index of the layer's first parameter in `sums`.
    """
    x_MH, z_MH, norms = kept.x_MH, kept.z_MH, weights.norms
    # the MLP
    normed_MH = rms_norm(x_MH, weights.post_norm_H, weights.eps, torch.empty_like(x_MH))
    packed_MU = normed_MH @ weights.gated_UH.t() if kept.packed_MU is None else kept.packed_MU
    kept.packed_MU = None
    act_MI = _activated(packed_MU, weights.act)
    sums.product(base + DOWN, dz_MH, act_MI)
    gated_backward(packed_MU, torch.mm(dz_MH, weights.down_HI, out=act_MI), weights.act)
    del act_MI
    sums.products((base + GATE, base + UP), packed_MU, normed_MH)
    dx_MH = torch.empty_like(x_MH)
    d_norm_H = rms_norm_backward(
        torch.mm(packed_MU, weights.gated_UH, out=normed_MH), x_MH, weights.post_norm_H, weights.eps, dx_MH, dz_MH
    )
    sums.vector(base + POST_NORM, d_norm_H)
    del packed_MU
    # the attention
    sums.product(base + WO, dx_MH, kept.context_MC)
    split, own_v = _projections(weights, kept.qkv_MW)
    turned = norm_rotate(split, norms, *slots.turn_M)[:, 0]
    d_qkv_MW, d_turned = torch.empty_like(kept.qkv_MW), torch.empty_like(turned)
    d_split, d_own_v = _projections(weights, d_qkv_MW)
    queries, width = norms.queries, turned.shape[2]
    slots.attention.backward(
        (dx_MH @ weights.out_HC).unflatten(1, (queries, width)),
        (turned[:, :queries], *keys_values, turned[:, queries:], own_v), kept.context_MC.unflatten(1, (queries, width)),
        kept.saved, (d_turned[:, :queries], *into, d_turned[:, queries:], d_own_v),
    )  # fmt: skip
    d_norms_2D = norm_rotate_backward(d_turned[:, None], split, norms, *slots.turn_M, d_split)[0]
    sums.vector(base + Q_NORM, d_norms_2D[0])
    sums.vector(base + K_NORM, d_norms_2D[1])
    del turned, d_turned
    rms_norm(z_MH, weights.input_norm_H, weights.eps, normed_MH)
    sums.products((base + WQ, base + WK, base + WV), d_qkv_MW, normed_MH)
    d_input_MH = torch.mm(d_qkv_MW, weights.qkv_WH, out=normed_MH)
    d_z_MH = torch.empty_like(z_MH)
    sums.vector(
        base + INPUT_NORM, rms_norm_backward(d_input_MH, z_MH, weights.input_norm_H, weights.eps, d_z_MH, dx_MH)
    )
    return d_z_MH


def context_backward(
    rows: ContextRows, context: Context, d_k_RLgd: Tensor, d_raw_RL2gd: Tensor, sums: GradientSums
) -> None:
    """Gradients of fc, hidden_norm, and the layers' key and value projections, through the context.

    Args: d_k: of the rotated keys. d_raw: [R, L, 2 g, d], of which the values' half is filled.
    """
    d_norms_L2D = norm_rotate_backward(d_k_RLgd, context.raw_RL2gd, context.norms, *rows.turn_R, d_raw_RL2gd)
    normed_RH = rms_norm(context.c_RH, context.norm_H, context.eps, torch.empty_like(context.c_RH))
    indices = [first_of(number) + index for number in range(len(d_norms_L2D)) for index in (WK, WV)]
    sums.products(indices, d_raw_RL2gd.flatten(1), normed_RH)
    for number, d_norm_2D in enumerate(d_norms_L2D):
        sums.vector(first_of(number) + K_NORM, d_norm_2D[1])
    d_normed_RH = torch.mm(d_raw_RL2gd.flatten(1), context.weight, out=normed_RH)
    d_c_RH = torch.empty_like(context.c_RH)
    sums.vector(HIDDEN_NORM, rms_norm_backward(d_normed_RH, context.c_RH, context.norm_H, context.eps, d_c_RH))
    sums.product(FC, d_c_RH, rows.streams_RF)
