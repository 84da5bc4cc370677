"""Modules of a transformers decoder that run fused kernels on the engine's own KV buffers.

A layer can be fused if it holds q/k/v/o projections and RMSNorms. A gated MLP is fused as well; any other MLP runs as
it is. The fused layer shares the parameters: the weights of q, k, v become views of one matrix, as do gate and up.
Shape legend: B batch, M tokens of a forward, R = B · M rows, D hidden, h query heads, g kv heads, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.fused_experts import fuse_experts
from headstart.eval.kernels.attention import Ahead, AttendShape, Visibility, attend
from headstart.eval.kernels.linear import ACTIVATIONS, MAX_ROWS, Linear, row_bucket
from headstart.eval.kernels.norm import NormWeights, rms_norm
from headstart.eval.kernels.rope_store import RopeStore, rope_store
from headstart.eval.kernels.rows import take_rows_kernel
from headstart.heads.kernels.device import wants_kernel


class Unfusable(Exception):
    """The model has a structure that the fused layers do not cover; the message names it."""


@dataclass
class Pass:
    """What the layers of one forward share.

    Attributes:
        stream_BMD: output of the latest layer.
        made: (norm, its result [R, D] on `stream_BMD`), where the latest layer computed the next layer's norm as well.
    """

    visibility: Visibility
    buffers: Buffers
    stream_BMD: Tensor | None = None
    made: tuple[NormWeights, Tensor] | None = None

    def norm(self, x_BMD: Tensor, norm: NormWeights) -> Tensor:
        """[R, D]: the input norm of a layer, or the final norm. Nothing may change a layer's output in place."""
        if self.made is not None and x_BMD is self.stream_BMD and self.made[0] is norm:
            return self.made[1]
        return rms_norm(x_BMD.flatten(0, -2), norm)


class PassHolder:
    """Holds the Pass of the running forward for the layers: transformers' top-level code cannot hand it to them."""

    current: Pass | None = None
    #: whether rotary tables hold each angle once (gpt-oss) instead of twice; the first forward finds out
    half_tables: bool | None = None


def norm_weights(norm: nn.Module) -> NormWeights:
    """Factor and eps of an RMSNorm module, found by running it on a vector of ones.

    Raises: Unfusable when the module is something else.
    """
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or eps is None or getattr(norm, "bias", None) is not None:
        raise Unfusable(f"{type(norm).__name__} is no RMSNorm")
    with torch.no_grad():
        # the factor is the weight or 1 + the weight
        shown = norm(torch.ones_like(weight)).float()
        plain, shifted = weight.float(), weight.float() + 1
        factor = min((plain, shifted), key=lambda guess: float((guess - shown).abs().max()))
        if not torch.allclose(factor, shown, rtol=1e-2, atol=1e-2):
            raise Unfusable(f"{type(norm).__name__} multiplies by neither its weight nor 1 + its weight")
    return NormWeights(factor.contiguous(), float(eps))


def _merged(projections: list[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """The projections' rows in one matrix (and bias). The projections' own weights become views of it."""
    for projection in projections:
        if type(projection) is not nn.Linear:
            raise Unfusable(f"a projection is {type(projection).__name__}, expected nn.Linear")
    with_bias = [projection for projection in projections if projection.bias is not None]
    if with_bias and len(with_bias) != len(projections):
        raise Unfusable("some projections of a group have a bias and others none")

    def merge(parameters: list[nn.Parameter]) -> Tensor:
        sizes = [parameter.shape[0] for parameter in parameters]
        whole = _as_one(parameters)
        for parameter, part in zip(parameters, whole.split(sizes), strict=True):
            parameter.data = part
        return whole

    weight = merge([projection.weight for projection in projections])
    return weight, merge([projection.bias for projection in projections]) if with_bias else None


def _as_one(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters end to end, without a copy where an earlier fusion has made them consecutive views."""
    first = parameters[0].data
    expected = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != expected or not parameter.is_contiguous():
            return torch.cat([parameter.data for parameter in parameters])
        expected += parameter.numel() * parameter.element_size()
    if len(parameters) == 1:
        return first
    rows = sum(parameter.shape[0] for parameter in parameters)
    inside = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if inside < rows * (first.numel() // first.shape[0]):
        return torch.cat([parameter.data for parameter in parameters])
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _activation(module: nn.Module) -> str | None:
    """Name of an MLP's activation, found by running it; None for one that the kernels do not know."""
    act = getattr(module, "act_fn", None)
    if act is None:
        return None
    probe = torch.linspace(-4, 4, 33)
    with torch.no_grad():
        shown = act(probe)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(shown, known(probe), atol=1e-6):
            return name
    return None


class FusedMLP(nn.Module):
    """down(act(gate(x)) · up(x)). With `adds`, the last product also adds the residual."""

    def __init__(self, mlp: nn.Module, activation: str, adds: bool):
        super().__init__()
        gate_up, bias = _merged([mlp.gate_proj, mlp.up_proj])
        self.gate_up = Linear(gate_up, bias, activation)
        self.down = Linear(*_merged([mlp.down_proj]), residual=adds)

    def forward(self, x_RD: Tensor, residual_RD: Tensor | None) -> Tensor:
        return self.down(self.gate_up(x_RD), residual_RD)

    def with_norm(self, x_RD: Tensor, residual_RD: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """(the result of `forward`, its norm)."""
        return self.down.with_norm(self.gate_up(x_RD), residual_RD, norm)


class FusedLayer(nn.Module):
    """A pre-norm decoder layer: attention on the engine's buffers, an MLP, two or four RMSNorms."""

    def __init__(self, layer: nn.Module, index: int, holder: PassHolder, window: int | None):
        super().__init__()
        self.index, self.holder = index, holder
        attention = getattr(layer, "self_attn", None)
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
        missing = [name for name in names if not hasattr(attention, name)]
        if attention is None or missing:
            raise Unfusable(f"attention of {type(layer).__name__} lacks {missing}")
        self.qkv = Linear(*_merged([attention.q_proj, attention.k_proj, attention.v_proj]))
        four = hasattr(layer, "pre_feedforward_layernorm")
        self.out = Linear(*_merged([attention.o_proj]), residual=not four)
        d = attention.head_dim
        heads, kv_heads = attention.q_proj.out_features // d, attention.k_proj.out_features // d
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        normed = q_norm is not None and k_norm is not None
        self.rope = RopeStore(heads, kv_heads, d, (norm_weights(q_norm), norm_weights(k_norm)) if normed else None)
        self.shape = AttendShape(
            float(attention.scaling), window, getattr(attention, "attn_logit_softcapping", None),
            getattr(attention, "sinks", None),
        )  # fmt: skip
        #: row bucket → bytes of the output projection that attention prefetches while it leaves the memory idle
        self.prefetch_bytes: dict[int, int] = {}
        self.input_norm = norm_weights(layer.input_layernorm)
        #: the input norm of the next layer, or the final norm
        self.next_norm: NormWeights | None = None
        self.mlp_norm = norm_weights(layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm)
        self.after_attention = norm_weights(layer.post_attention_layernorm) if four else None
        self.after_mlp = norm_weights(layer.post_feedforward_layernorm) if four else None
        mlp = layer.mlp
        gated = all(type(getattr(mlp, name, None)) is nn.Linear for name in ("gate_proj", "up_proj", "down_proj"))
        activation = _activation(mlp) if gated else None
        self.mlp = FusedMLP(mlp, activation, not four) if activation is not None else fuse_experts(mlp)

    def linears(self) -> list[Linear]:
        own = [self.qkv, self.out]
        return [*own, self.mlp.gate_up, self.mlp.down] if isinstance(self.mlp, FusedMLP) else own

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        run = self.holder.current
        if run is None:
            raise RuntimeError("a fused layer runs only inside FusedModel.forward")
        batch, count, width = hidden_states.shape
        x_RD = hidden_states.reshape(-1, width)
        if self.holder.half_tables is None:
            first, second = position_embeddings[1].chunk(2, -1)
            self.holder.half_tables = not torch.equal(first, second)
        cos_RW, sin_RW = (self._table(table, batch, count) for table in position_embeddings)
        keys, values = run.buffers.keys[self.index], run.buffers.values[self.index]
        qkv_RC = self.qkv(run.norm(hidden_states, self.input_norm))
        q_Rhd = rope_store(qkv_RC, cos_RW, sin_RW, self.rope, keys, values, run.visibility.write_BM)
        context_RC = self.attend(q_Rhd, keys, values, run.visibility)
        if self.after_attention is None:
            x_RD, normed_RD = self.out.with_norm(context_RC, x_RD, self.mlp_norm)
        else:
            x_RD = x_RD + rms_norm(self.out(context_RC), self.after_attention)
            normed_RD = rms_norm(x_RD, self.mlp_norm)
        if isinstance(self.mlp, FusedMLP) and self.after_mlp is None and self.next_norm is not None:
            x_RD, next_RD = self.mlp.with_norm(normed_RD, x_RD, self.next_norm)
            run.made = (self.next_norm, next_RD)
        else:
            x_RD, run.made = self._add(x_RD, normed_RD, batch), None
        run.stream_BMD = x_RD.view(batch, count, width)
        return run.stream_BMD

    def attend(self, q_Rhd: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
        rows = q_Rhd.shape[0]
        prefetch = self.prefetch_bytes.get(row_bucket(rows), 0) if rows <= MAX_ROWS else 0
        return attend(q_Rhd, keys, values, visibility, self.shape, Ahead(self.out.weight_NK, prefetch)).flatten(1)

    def _table(self, table: Tensor, batch: int, count: int) -> Tensor:
        table_RW = table.expand(batch, count, -1).reshape(batch * count, -1)
        return torch.cat((table_RW, table_RW), -1) if self.holder.half_tables else table_RW

    def _add(self, x_RD: Tensor, normed_RD: Tensor, batch: int) -> Tensor:
        if self.after_mlp is None:
            return self._mlp(normed_RD, x_RD, batch)
        return x_RD + rms_norm(self._mlp(normed_RD, None, batch), self.after_mlp)

    def _mlp(self, x_RD: Tensor, residual_RD: Tensor | None, batch: int) -> Tensor:
        if isinstance(self.mlp, FusedMLP):
            return self.mlp(x_RD, residual_RD)
        # a mixture of experts also returns its router's scores
        result = self.mlp(x_RD.view(batch, -1, x_RD.shape[-1]))
        y_RD = (result[0] if isinstance(result, tuple) else result).reshape(x_RD.shape)
        return y_RD if residual_RD is None else residual_RD + y_RD


class FusedNorm(nn.Module):
    """The final norm. It keeps its latest output, the feature of every row."""

    def __init__(self, norm: nn.Module, holder: PassHolder):
        super().__init__()
        self.norm, self.holder, self.last = norm_weights(norm), holder, None

    def forward(self, x: Tensor) -> Tensor:
        run = self.holder.current
        self.last = (rms_norm(x, self.norm) if run is None else run.norm(x, self.norm)).view_as(x)
        return self.last


class FusedHead(nn.Module):
    """The output matrix."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.linear = Linear(*_merged([head]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class FusedEmbedding(nn.Module):
    """A table of token embeddings. For a few rows, torch's own gather takes longer than a layer's product."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, tokens_BM: Tensor) -> Tensor:
        if not wants_kernel(self.weight):
            return nn.functional.embedding(tokens_BM, self.weight)
        rows_1RD = take_rows_kernel(self.weight.detach()[None], tokens_BM.reshape(1, -1))
        return rows_1RD.view(*tokens_BM.shape, -1)
