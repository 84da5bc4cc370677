"""Modules of a transformers decoder that run fused kernels on the engine's own KV buffers.

structure.py finds what a layer consists of, and proof.py proves it. The fused layer shares the parameters: the weights
of q, k, v become views of one matrix, as do gate and up.
Shape legend: B batch, M tokens of a forward, R = B · M rows, D hidden, h query heads, g kv heads, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.mlp import MLPFacts, make_mlp
from headstart.eval.decoding.fused.weights import merged, norm_weights
from headstart.eval.kernels.attention import Ahead, AttendShape, Visibility, attend
from headstart.eval.kernels.flat import FlatRows
from headstart.eval.kernels.linear import MAX_ROWS, Ending, Linear, row_bucket
from headstart.eval.kernels.norm import NormWeights, apply_norm
from headstart.eval.kernels.rope_store import RopeStore, rope_store
from headstart.eval.kernels.rows import take_rows_kernel
from headstart.heads.kernels.device import wants_kernel


@dataclass(frozen=True)
class AttentionFacts:
    """What an attention consists of, by the names inside its module.

    Attributes:
        projections: q, k, v; or one of all three.
        out: the output projection.
        heads, kv_heads, head_dim: sizes.
        norms: of q and of k, or None.
        norm_last, rotation, by_angle, rotary, grouped: as in RopeStore.
        scale, softcap: of the scores. sinks: the module has a parameter `sinks`.
    """

    projections: tuple[str, ...]
    out: str
    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[str, str] | None
    scale: float
    softcap: float | None
    sinks: bool
    norm_last: bool = False
    rotation: str = "halves"
    by_angle: bool = False
    rotary: int | None = None
    grouped: bool = False

    def rope(self, attention: nn.Module, device: torch.device) -> RopeStore:
        return RopeStore(
            self.heads, self.kv_heads, self.head_dim, self._norms(attention, device), self.norm_last, self.rotation,
            self.by_angle, self.rotary, self.grouped,
        )  # fmt: skip

    def _norms(self, attention: nn.Module, device: torch.device) -> tuple[NormWeights, NormWeights] | None:
        if self.norms is None:
            return None
        q, k = (attention.get_submodule(name) for name in self.norms)
        width = q.weight.numel() if isinstance(getattr(q, "weight", None), Tensor) else self.head_dim
        widths = (width, width) if width == self.head_dim else (width, self.kv_heads * self.head_dim)
        found = norm_weights(q, widths[0], device), norm_weights(k, widths[1], device)
        if any(norm.centred or norm.bias_D is not None for norm in found):
            raise Unfusable("queries and keys go through a LayerNorm; expected an RMSNorm")
        return found

    def shape(self, attention: nn.Module, window: int | None) -> AttendShape:
        return AttendShape(self.scale, window, self.softcap, attention.sinks if self.sinks else None)


@dataclass(frozen=True)
class LayerFacts:
    """What a decoder layer consists of, by the names of its children.

    Attributes:
        attention, mlp: the two sublayers.
        before_attention, after_attention, before_mlp, after_mlp: norms of a sublayer's input and result, or None.
        parallel: both sublayers read the layer's input; the MLP does so through `before_mlp`, or, without one, reads
            what the attention reads.
        scales: factors of the sublayers' results (Granite).
        attention_facts: what the attention consists of.
        mlp_facts: what the MLP consists of; None = something else, which runs as it is.
    """

    attention: str
    mlp: str
    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    parallel: bool
    scales: tuple[float, float]
    attention_facts: AttentionFacts
    mlp_facts: MLPFacts | None


@dataclass
class Pass:
    """What the layers of one forward share.

    Attributes:
        stream_BMD: output of the latest layer.
        made: (norm, its result [R, D] on `stream_BMD`), where the latest layer computed the next layer's norm as well.
        flat: the rows that the layers run on, where these are not all places of `visibility`.
    """

    visibility: Visibility
    buffers: Buffers
    stream_BMD: Tensor | None = None
    made: tuple[NormWeights, Tensor] | None = None
    flat: FlatRows | None = None

    def table(self, table: Tensor) -> Tensor:
        """A rotary table [B or 1, M, W], or [1, F, W] of flat rows, as one row per row of the layers."""
        if self.flat is not None:
            return table.expand(1, len(self.flat.place_F), -1)[0]
        batch, count = self.visibility.position_BM.shape
        return table.expand(batch, count, -1).reshape(batch * count, -1)

    def norm(self, x_BMD: Tensor, norm: NormWeights) -> Tensor:
        """[R, D]: the input norm of a layer, or the final norm. Nothing may change a layer's output in place."""
        if self.made is not None and x_BMD is self.stream_BMD and self.made[0] is norm:
            return self.made[1]
        return apply_norm(x_BMD.flatten(0, -2), norm)


class PassHolder:
    """Holds the Pass of the running forward for the layers: transformers' top-level code cannot hand it to them."""

    current: Pass | None = None


class FusedAttention:
    """Attention on the engine's buffers, up to its output projection, which the layer runs."""

    def __init__(self, attention: nn.Module, facts: AttentionFacts, window: int | None):
        self.qkv = Linear(*merged([attention.get_submodule(name) for name in facts.projections]))
        self.out = Linear(*merged([attention.get_submodule(facts.out)]), residual=True)
        self.rope = facts.rope(attention, self.qkv.weight_NK.device)
        self.shape = facts.shape(attention, window)
        #: row bucket → bytes of the output projection that attention prefetches while it leaves the memory idle
        self.prefetch_bytes: dict[int, int] = {}

    def __call__(self, x_RD: Tensor, tables: tuple[Tensor, Tensor], run: Pass, index: int) -> Tensor:
        """Rows [R, D] → what each sees [R, h · d]. Args: tables: cos and sin, [B or 1, M, W]."""
        visibility, keys, values = run.visibility, run.buffers.keys[index], run.buffers.values[index]
        rows, flat = x_RD.shape[0], run.flat
        qkv_RC = self.qkv(x_RD)
        cos_RW, sin_RW = (run.table(table) for table in tables)
        q_Rhd = rope_store(qkv_RC, cos_RW, sin_RW, self.rope, keys, values, visibility.write_BM, flat=flat)
        prefetch = self.prefetch_bytes.get(row_bucket(rows), 0) if rows <= MAX_ROWS else 0
        ahead = Ahead(self.out.weight_NK, prefetch)
        return attend(q_Rhd, keys, values, visibility, self.shape, ahead, flat).flatten(1)


class FusedLayer(nn.Module):
    """A decoder layer as its facts say. It shares the weights of the layer that it is made of."""

    def __init__(self, layer: nn.Module, facts: LayerFacts, index: int, holder: PassHolder, window: int | None):
        super().__init__()
        # top-level code of transformers may ask a layer for its kind
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, (str, int, float))}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})
        self.index, self.holder, self.parallel = index, holder, facts.parallel
        self.attention = FusedAttention(layer.get_submodule(facts.attention), facts.attention_facts, window)
        out_ND = self.attention.out.weight_NK
        names = (facts.before_attention, facts.after_attention, facts.before_mlp, facts.after_mlp)
        self.input_norm, after_attention, self.mlp_norm, after_mlp = (
            None if name is None else norm_weights(layer.get_submodule(name), out_ND.shape[0], out_ND.device)
            for name in names
        )
        self.endings = Ending(after_attention, facts.scales[0]), Ending(after_mlp, facts.scales[1])
        #: the input norm of the next layer, or the final norm; None where the next layer has none
        self.next_norm: NormWeights | None = None
        self.mlp = make_mlp(layer.get_submodule(facts.mlp), facts.mlp_facts)

    def linears(self) -> list[Linear]:
        return [self.attention.qkv, self.attention.out, *self.mlp.linears()]

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        run = self.holder.current
        if run is None:
            raise RuntimeError("a fused layer runs only inside FusedModel.forward")
        x_RD = hidden_states.reshape(-1, hidden_states.shape[-1])
        read_RD = x_RD if self.input_norm is None else run.norm(hidden_states, self.input_norm)
        context_RC = self.attention(read_RD, position_embeddings, run, self.index)
        of_attention, of_mlp = self.endings
        if self.parallel:
            if self.mlp_norm is not None:
                read_RD = apply_norm(x_RD, self.mlp_norm)
            x_RD, _ = self.attention.out.end(context_RC, x_RD, of_attention, None)
        else:
            x_RD, normed_RD = self.attention.out.end(context_RC, x_RD, of_attention, self.mlp_norm)
            read_RD = x_RD if normed_RD is None else normed_RD
        x_RD, next_RD = self.mlp.end(read_RD, x_RD, of_mlp, self.next_norm)
        run.made = None if self.next_norm is None or next_RD is None else (self.next_norm, next_RD)
        run.stream_BMD = x_RD.view(hidden_states.shape)
        return run.stream_BMD


class FusedNorm(nn.Module):
    """The final norm. It keeps its latest output, the feature of every row."""

    def __init__(self, norm: nn.Module, width: int, holder: PassHolder, device: torch.device):
        super().__init__()
        self.norm, self.holder, self.last = norm_weights(norm, width, device), holder, None

    def forward(self, x: Tensor) -> Tensor:
        run = self.holder.current
        self.last = (apply_norm(x, self.norm) if run is None else run.norm(x, self.norm)).view_as(x)
        return self.last


class FusedHead(nn.Module):
    """The output matrix."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.linear = Linear(*merged([head]))

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
