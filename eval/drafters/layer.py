"""One decoding pass of a draft's decoder layer on explicit KV buffers, with the kernels that the target runs on.

It copies the weights in the dtype that decoding runs in, because the head may still be in training. A layer is small.
Shape legend: B batch, N rows of a pass, R = B · N, H head hidden, I input of the attention, C attention context, g kv
heads, d head dim, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.kernels.attention import AttendShape, Visibility, attend
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.norm import NormWeights
from headstart.eval.kernels.rope_store import RopeStore, rope_store
from headstart.eval.kernels.rows import pick
from headstart.heads.dims import HeadDims
from headstart.heads.kernels.elementwise import gated_eager
from headstart.heads.layers import DraftLayer, RMSNorm, Rope

#: context rows per pass when a batch starts: whole chunks, and a power of two for the rest
START_CHUNK, NARROWEST_START = 256, 32


def norm_of(norm: RMSNorm) -> NormWeights:
    """A copy of a norm for the kernels, in float32."""
    return NormWeights(norm.weight.detach().float(), norm.eps)


def start_widths(columns: int) -> list[int]:
    """Widths of the passes over `columns` columns. They are few, because kernels are compiled for each width.

    >>> start_widths(600), start_widths(3)
    ([256, 256, 128], [32])
    """
    whole, rest = divmod(columns, START_CHUNK)
    return [START_CHUNK] * whole + ([max(1 << (rest - 1).bit_length(), NARROWEST_START)] if rest else [])


def all_start_widths() -> list[int]:
    """Every width that `start_widths` may give.

    >>> all_start_widths()
    [32, 64, 128, 256]
    """
    return [NARROWEST_START << n for n in range((START_CHUNK // NARROWEST_START).bit_length())]


def appended(count_B: Tensor, columns: int, length_B: Tensor, bin: int) -> Visibility:
    """Where `columns` new rows of each sequence stand: the first `count_B` behind `length_B`, the rest is padding."""
    column_J = torch.arange(columns, device=count_B.device)
    real_BJ = column_J < count_B[:, None]
    write_BJ = torch.where(real_BJ, length_B[:, None] + column_J, bin)
    return Visibility(torch.where(real_BJ, write_BJ, -1), write_BJ, length_B)


def rope_tables(rope: Rope, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin of the first `positions` positions, float32 [T, rotary]. All layers of a draft share them."""
    cos_TW, sin_TW = rope(torch.arange(positions, device=device))
    return cos_TW, sin_TW


class LayerPass:
    """A copy of a draft layer.

    Args:
        layer: gets its attention input and the start of its residual stream from the caller.
        tables: rotary tables (`rope_tables`).
        norm: RMSNorm behind the layer, or None.
    """

    def __init__(
        self,
        layer: DraftLayer,
        dims: HeadDims,
        dtype: torch.dtype,
        tables: tuple[Tensor, Tensor],
        norm: RMSNorm | None,
    ):
        attention, mlp = layer.self_attn, layer.mlp

        def copied(*weights: Tensor) -> Tensor:
            return torch.cat([weight.detach().to(dtype) for weight in weights])

        self.qkv = Linear(copied(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        self.out = Linear(copied(attention.o_proj.weight), residual=True)
        self.activation = mlp.act
        # an activation that the kernels do not know is applied between two plain products
        known = "silu" if mlp.act is None else None
        self.gate_up = Linear(copied(mlp.gate_proj.weight, mlp.up_proj.weight), activation=known)
        self.down = Linear(copied(mlp.down_proj.weight), residual=True)
        self.mlp_norm = norm_of(layer.post_attention_layernorm)
        self.norm = None if norm is None else norm_of(norm)
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = norm_of(attention.q_norm), norm_of(attention.k_norm)
        self.shape = RopeStore(dims.num_heads, dims.num_kv_heads, dims.head_dim, norms)
        self.attend_shape = AttendShape(dims.head_dim**-0.5)
        self.tables = tables

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out, self.gate_up, self.down]

    def __call__(
        self,
        x_RI: Tensor,
        residual_RH: Tensor,
        visibility: Visibility,
        keys: Tensor,
        values: Tensor,
        only_B1: Tensor | None = None,
        seen: Visibility | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values and run the layer.

        Args:
            x_RI: input of the attention. residual_RH: start of the residual stream.
            visibility: rope positions, slots written, slots seen.
            keys, values: [B, g, S, d].
            only_B1: int64, the one row of each sequence that is wanted; None = all. Not with a tree mask.
            seen: slots seen, where they are others than those of `visibility`; not with `only_B1`.
        Returns: (output [R or B, H], its norm; without a norm the output again).
        """
        position_BN, write_BN = visibility.position_BM, visibility.write_BM
        cos_TW, sin_TW = self.tables
        q_Rhd = rope_store(self.qkv(x_RI), cos_TW, sin_TW, self.shape, keys, values, write_BN, position_BN)
        if only_B1 is not None:
            picked = pick(q_Rhd.flatten(1), residual_RH, position_BN, write_BN, only_B1)
            q_Rhd, residual_RH = picked.q_BC.view(len(position_BN), *q_Rhd.shape[1:]), picked.residual_BD
            visibility = Visibility(picked.position_B1, picked.write_B1, visibility.base_B)
        context_RC = attend(q_Rhd, keys, values, seen or visibility, self.attend_shape).flatten(1)
        x_RH, normed_RH = self.out.with_norm(context_RC, residual_RH, self.mlp_norm)
        y_RI = self.gate_up(normed_RH)
        if self.activation is not None:
            gate, up = y_RI.chunk(2, -1)
            y_RI = gated_eager(gate, up, self.activation)
        if self.norm is None:
            out_RH = self.down(y_RI, x_RH)
            return out_RH, out_RH
        return self.down.with_norm(y_RI, x_RH, self.norm)
