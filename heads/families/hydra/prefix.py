"""The prefix layer of Hydra++: a decoder layer over the features of the whole context (arXiv 2402.05109, §4).

Shape legend: R rows of a pack, A anchors, B batch, N new rows, D target hidden, g kv heads, h query heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headstart.heads.dims import HeadDims
from headstart.heads.layers import Attend, DraftLayer, RMSNorm, Rope

#: (q [A, h, d] of the anchors, k, v [R, g, d] of all rows) → context [A, h, d]
AttendRows = Callable[[Tensor, Tensor, Tensor], Tensor]


class PrefixLayer(nn.Module):
    """norm(layer(f)): one decoder layer of the target's kind with an input norm and a final norm of its own.

    It starts as nearly nothing. With o_proj and down_proj zero, the layer passes its input through; only the final norm
    remains. That brings every feature to one length: the length that the target's final norm gives a row on average, so
    a new head says what the target's own says, in the same order, a little more or less sure of it. The authors start
    the layer at random, as a new model's.

    Attributes:
        layer: attention and MLP. It reads `input_layernorm` of the features; its residual stream is the features.
        norm: the final norm.
    """

    def __init__(self, dims: HeadDims):
        super().__init__()
        size = dims.hidden_size
        self.input_layernorm = RMSNorm(size, dims.rms_norm_eps)
        self.layer = DraftLayer(size, size, dims.intermediate_size, dims, dims.hidden_act)
        self.norm = RMSNorm(size, dims.rms_norm_eps)
        self.rope = Rope(dims)
        for projection in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(projection.weight)

    def initialise(self, norm_D: Tensor | None) -> None:
        """Args: norm_D: factor of the target's final norm, None for a target without one."""
        if norm_D is not None:
            with torch.no_grad():
                self.norm.weight.copy_(norm_D.float().square().mean().sqrt())

    def rows(self, hidden_RD: Tensor, position_R: Tensor, row_A: Tensor, attend: AttendRows) -> Tensor:
        """The outputs [A, D] of the rows `row_A`, which see their document's rows up to their own."""
        attention, x_RD = self.layer.self_attn, self.input_layernorm(hidden_RD)
        cos, sin = self.rope(position_R)
        k_Rgd, v_Rgd = attention.keys_values(x_RD, cos, sin)
        q_Ahd = attention.queries(x_RD[row_A], cos[row_A], sin[row_A])
        return self.norm(self.layer.finish(attend(q_Ahd, k_Rgd, v_Rgd), hidden_RD[row_A]))

    def decode(self, hidden_BND: Tensor, position_BN: Tensor, attend: Attend) -> Tensor:
        """The outputs [B, N, D] of N new rows, with the caller's attention over its cache."""
        cos, sin = self.rope(position_BN)
        return self.norm(self.layer.decode(self.input_layernorm(hidden_BND), hidden_BND, cos, sin, attend))

    def multiply_adds(self, rows: float, anchors: float) -> float:
        """Of a pack with R rows and A anchors: keys and values of all rows, the rest of the anchors alone."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        every = (attention.k_proj, attention.v_proj)
        needed = (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return rows * sum(p.weight.numel() for p in every) + anchors * sum(p.weight.numel() for p in needed)

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """Numbers that training keeps for the backward pass: normed features, keys and values of every row, and the
        layer's own numbers of every anchor."""
        attention = self.layer.self_attn
        keys_values = 2 * attention.kv_heads * attention.head_dim
        return rows * (self.layer.hidden_size + keys_values) + anchors * self.layer.kept_numbers(recompute)
