"""One decoding pass of a draft layer with convolutions round its sublayers.

Shape legend: B batch, N slots of a block, R = B · N, H head hidden, C attention context, h query heads, d head dim.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headstart.eval.drafters.layer import LayerPass
from headstart.eval.kernels.attention import Visibility, attend
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.norm import apply_norm
from headstart.eval.kernels.rope_store import rope_store
from headstart.heads.dims import HeadDims
from headstart.heads.families.block.convolutions import BlockConvolution
from headstart.heads.families.block.modules import BlockLayer
from headstart.heads.kernels.elementwise import gated_eager
from headstart.heads.layers import RMSNorm


class ConvolvedPass(LayerPass):
    """As LayerPass. What is added to the residual stream passes a convolution, so it is not fused with a product."""

    def __init__(
        self,
        layer: BlockLayer,
        dims: HeadDims,
        dtype: torch.dtype,
        tables: tuple[Tensor, Tensor],
        norm: RMSNorm | None,
    ):
        super().__init__(layer, dims, dtype, tables, norm)
        self.out, self.down = Linear(self.out.weight_NK), Linear(self.down.weight_NK)

        def copied(convolution: BlockConvolution | None) -> BlockConvolution:
            return copy.deepcopy(convolution).to(dtype).requires_grad_(False)  # type: ignore[union-attr]

        self.attention_conv, self.mlp_conv = copied(layer.attention_conv), copied(layer.mlp_conv)

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
        """As LayerPass's; all rows are wanted."""
        assert only_B1 is None
        position_BN, write_BN = visibility.position_BM, visibility.write_BM
        size = position_BN.shape[1]
        cos_TW, sin_TW = self.tables
        u_RH, taps = self.attention_conv.before(x_RI, size)
        q_Rhd = rope_store(self.qkv(u_RH), cos_TW, sin_TW, self.shape, keys, values, write_BN, position_BN)
        context_RC = attend(q_Rhd, keys, values, seen or visibility, self.attend_shape).flatten(1)
        x_RH = residual_RH + self.attention_conv.after(self.out(context_RC), taps, size)
        u_RH, taps = self.mlp_conv.before(apply_norm(x_RH, self.mlp_norm), size)
        y_RI = self.gate_up(u_RH)
        if self.activation is not None:
            gate, up = y_RI.chunk(2, -1)
            y_RI = gated_eager(gate, up, self.activation)
        out_RH = x_RH + self.mlp_conv.after(self.down(y_RI), taps, size)
        return out_RH, out_RH if self.norm is None else apply_norm(out_RH, self.norm)
