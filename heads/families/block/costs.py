"""What training a block head costs: multiply-adds and memory, for plans and for MFU.

Shape legend: R rows of a pack, A anchors, K drafts of a block, B slots of a block, H hidden, I MLP width, W packed
projections, C channels of the queries, U draft vocabulary, r rank of a correction.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from headstart.heads.base import Head, counted_adds
from headstart.heads.layers import LaterLayer
from headstart.heads.losses.block import TEACHER_ELEMENTS
from headstart.heads.losses.fused import CHUNK_ELEMENTS


class BlockCosts(Head):
    """The costs of a head whose slots pass through layers, and whose context rows pass through fc, keys and values."""

    fc: nn.Linear
    layers: nn.ModuleList
    block_size: int
    output_UD: Tensor
    needs_teacher: bool
    teaches_base: bool

    def _layer(self) -> LaterLayer:
        layer = self.layers[0]
        assert isinstance(layer, LaterLayer)
        return layer

    def _context_matrices(self) -> int:
        """Numbers of the matrices that the pack's rows pass through."""
        attention = self._layer().self_attn
        return self.fc.weight.numel() + len(self.layers) * 2 * attention.k_proj.weight.numel()

    def _corrections(self) -> float:
        """Multiply-adds of a draft through the matrices besides the output matrix."""
        backbone = {self.fc, *self.layers.modules(), getattr(self, "lm_head", None)}
        more = [m for m in self.modules() if m not in backbone and not isinstance(m, nn.Embedding)]
        return sum(counted_adds(p) for m in more for p in m.parameters(recurse=False) if p.dim() == 2)

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        """As the base class's, so that a step computes 6 times as many FLOPs.

        The frozen output matrix has no gradient of its own: it counts two thirds. The teacher's logits, made once for
        each row that teaches, have no gradient at all: they count one third. Where the logits without the correction
        carry a loss too, both are made once more.
        """
        drafts, output = counts[0] * self.depth, self.output_UD.numel() * (2 if self.teaches_base else 1)
        layers = sum(m.weight.numel() for m in self.layers.modules() if isinstance(m, nn.Linear))
        slots = counts[0] * self.block_size * layers + drafts * (output * 2 / 3 + self._corrections())
        taught = min(rows, drafts) if self.needs_teacher else 0
        return rows * self._context_matrices() + slots + taught * output / 3

    def copied_numbers(self) -> int:
        """All weights, keys' and values' once more (stacked for the context), and the output matrix with `up`."""
        matrix = self.output_UD
        output = matrix.numel() if self.draft_ids_U is not None or self._corrections() else 0
        own = sum(p.numel() for p in self.parameters() if p is not matrix)
        return own + self._context_matrices() - self.fc.weight.numel() + output

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """What a pack keeps for its backward pass, and the most that stands beside it for a while (stack.py).

        Per slot and layer: 2 H + W + C, and the MLP's 2 I unless it is recomputed. Beside it: in the forward pass the
        loss's chunk of logits and the teacher's logits, in the backward pass one layer's gradients.
        """
        attention, mlp = self._layer().self_attn, self._layer().mlp
        hidden, inner = self.fc.out_features, mlp.gate_proj.out_features
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        slots, drafts, size = anchors * self.block_size, anchors * self.depth, len(self.output_UD)
        per_layer = 2 * hidden + 2 * queries + 2 * keys + (0 if recompute else 2 * inner)
        context = rows * (2 * hidden + 6 * len(self.layers) * keys)
        ends = slots * (hidden + 4 * attention.head_dim) + drafts * 3 * hidden
        logits = min(rows, drafts) * size if self.needs_teacher else 0
        loss = self.chunk_numbers(anchors) + (logits if logits <= TEACHER_ELEMENTS else 0)
        layer = slots * ((3 if recompute else 1) * inner + 3 * hidden + 2 * (queries + 2 * keys))
        return slots * len(self.layers) * per_layer + context + ends + max(loss, layer)

    def chunk_numbers(self, anchors: float) -> float:
        return min(anchors * self.depth * len(self.output_UD), CHUNK_ELEMENTS)
