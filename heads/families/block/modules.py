"""The layers of a block head, one module after the other: what runs where a family adds to them.

stack.py computes the same for layers without additions, faster and in less memory.

Shape legend: R rows, M slots, N slots that draft, H hidden, h query heads, g key heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.heads.dims import HeadDims
from headstart.heads.families.block.convolutions import BlockConvolution
from headstart.heads.families.block.stack import ContextRows, Slots
from headstart.heads.kernels.block_attention import BlockAttention
from headstart.heads.layers import LaterLayer, RMSNorm


class BlockLayer(LaterLayer):
    """A decoder layer of Qwen3's type over the slots of blocks.

    Attributes:
        attention_conv, mlp_conv: convolutions round its sublayers; None without.
    """

    attention_conv: BlockConvolution | None
    mlp_conv: BlockConvolution | None

    def __init__(self, hidden_size: int, intermediate_size: int, dims: HeadDims):
        super().__init__(hidden_size, intermediate_size, dims, dims.hidden_act, qk_norm=True)
        self.register_module("attention_conv", None)
        self.register_module("mlp_conv", None)

    def convolve(self, taps: int, group: int) -> None:
        """Put convolutions round both sublayers."""
        self.attention_conv = BlockConvolution(self.hidden_size, taps, group)
        self.mlp_conv = BlockConvolution(self.hidden_size, taps, group)

    def run(
        self, z_MH: Tensor, keys_values: tuple[Tensor, Tensor], turn: tuple[Tensor, Tensor], attention: BlockAttention
    ) -> Tensor:
        """Output [M, H] of the slots.

        Args: keys_values: of the context rows, [R, g, d]. turn: cos and sin of the slots' positions.
        """
        size, u_MH = attention.blocks.size, self.input_layernorm(z_MH)
        taps = None
        if self.attention_conv is not None:
            u_MH, taps = self.attention_conv.before(u_MH, size)
        own = self.self_attn.keys_values(u_MH, *turn)
        context = attention.attend(self.self_attn.queries(u_MH, *turn), *keys_values, *own)
        if self.attention_conv is None or taps is None:
            return self.finish(context, z_MH)
        x_MH = z_MH + self.attention_conv.after(self.self_attn.o_proj(context.flatten(-2)), taps, size)
        if self.recompute and torch.is_grad_enabled():
            # as in DraftLayer.finish
            return x_MH + checkpoint(self._convolved_mlp, x_MH, size, use_reentrant=False, preserve_rng_state=False)
        return x_MH + self._convolved_mlp(x_MH, size)

    def _convolved_mlp(self, x_MH: Tensor, size: int) -> Tensor:
        assert self.mlp_conv is not None
        u_MH, taps = self.mlp_conv.before(self.post_attention_layernorm(x_MH), size)
        return self.mlp_conv.after(self.mlp(u_MH), taps, size)


@dataclass(frozen=True)
class ModuleStack:
    """As stack.Stack, by autograd over the modules."""

    fc: nn.Linear
    hidden_norm: RMSNorm
    layers: Sequence[BlockLayer]
    norm: RMSNorm

    def run(self, rows: ContextRows, slots: Slots) -> Tensor:
        """Normed outputs of the slots that draft, [N, H]; differentiable in the parameters."""
        return self._run(self._context(rows), slots)

    @torch.no_grad()
    def evaluate(self, rows: ContextRows, parts: Iterable[Slots]) -> Tensor:
        """As `run` without gradients, one part of the slots after the other; the results end to end."""
        context = self._context(rows)
        return torch.cat([self._run(context, slots) for slots in parts])

    def _context(self, rows: ContextRows) -> list[tuple[Tensor, Tensor]]:
        c_RH = self.hidden_norm(self.fc(rows.streams_RF.detach()))  # as stack.Stack: no gradient
        return [layer.self_attn.keys_values(c_RH, *rows.turn_R) for layer in self.layers]

    def _run(self, context: list[tuple[Tensor, Tensor]], slots: Slots) -> Tensor:
        z_MH = slots.z_MH
        for layer, keys_values in zip(self.layers, context, strict=True):
            z_MH = layer.run(z_MH, keys_values, slots.turn_M, slots.attention)
        return self.norm(z_MH[slots.drafting_N])
