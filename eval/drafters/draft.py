"""One decoding pass of an autoregressive head on explicit KV buffers, with the kernels that the target runs on.

It computes what AutoregressiveHead.step computes, with copies of the weights (layer.py).
Shape legend: B batch, N rows of a pass, R = B · N, f rows of `g`, H head hidden, I input of a product, U draft
vocabulary, g kv heads, d head dim, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.eval.drafters.layer import LayerPass, norm_of, rope_tables
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.draft_input import DraftInput, draft_input
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.norm import NormWeights, apply_norm
from headstart.eval.kernels.rows import take_rows
from headstart.heads.families.autoregressive import AutoregressiveHead
from headstart.heads.families.eagle.head import EagleHead
from headstart.heads.families.eagle3.head import Eagle3Head
from headstart.heads.layers import RMSNorm
from headstart.heads.numerics import compute_dtype


def computes_as(head: AutoregressiveHead, family: type[AutoregressiveHead], piece: str) -> bool:
    """Whether the head's method `piece` (`fuse`, `mix` or `logits`) is the family's: a subclass may replace it."""
    return getattr(type(head), piece) is getattr(family, piece)


class DraftStep:
    """A copy of a head that is bound to its target.

    Args: positions: length of the rotary tables.
    """

    def __init__(self, head: AutoregressiveHead, positions: int):
        self.head = head
        self.dtype = compute_dtype(head.fc.weight)
        # EAGLE-3's fc makes g from the target's features; EAGLE-1's fc stands in `mix` and needs no copy
        fuses = computes_as(head, Eagle3Head, "fuse")
        self.fc = Linear(head.fc.weight.detach().to(self.dtype, copy=True)) if fuses else None
        self.fc_norms = self._fc_norms() if fuses else []
        self.input = self._input()
        self.replaced = self._replaced()
        norm, self.output = self._output()
        # each layer but the last ends in the norm that the next one begins with: one kernel computes both
        norms = [*(layer.input_layernorm for layer in head.later_layers), norm]
        self.tables = rope_tables(head.rope, positions, head.fc.weight.device)
        self.layers = [
            LayerPass(layer, head.dims, self.dtype, self.tables, behind)
            for layer, behind in zip(head.draft_layers, norms, strict=True)
        ]
        # whether the normed output, which the last layer gives, is the next step's feature
        self.gives_norm = self.output is not None and head.recycles_norm

    def _fc_norms(self) -> list[NormWeights]:
        """Norms before fc: one for each stream, one over all of them, or none."""
        head: Any = self.head
        return [norm_of(norm) for norm in (head.fc_norm if head.input_norm is None else [head.input_norm])]

    def _input(self) -> DraftInput | None:
        """For the kernel that gathers the rows' inputs (EAGLE-1's fc follows it); None = the head's own `mix` runs."""
        head: Any = self.head
        embed_VD = head.bound_ends().embed_VD
        if computes_as(head, Eagle3Head, "mix"):
            embed_VD = embed_VD if head.embed_tokens is None else head.embed_tokens.weight.detach()
            return DraftInput(embed_VD, (norm_of(head.midlayer.input_layernorm), norm_of(head.midlayer.hidden_norm)))
        return DraftInput(embed_VD, None) if computes_as(head, EagleHead, "mix") else None

    def _replaced(self) -> tuple[int, Tensor, Tensor] | None:
        """Where the head has an embedding of its own: (its token, what a row that reads it has in the embedding's
        channels of the attention input [I], which channels these are, bool [I])."""
        if self.input is None or self.head.replaced is None:
            return None
        token, own_H = self.head.replaced
        own_H = own_H.detach().to(self.dtype)
        if self.input.norms is not None:
            own_H = apply_norm(own_H[None], self.input.norms[0])[0]
        channel_I = torch.arange(2 * len(own_H), device=own_H.device)
        return token, torch.cat((own_H, torch.zeros_like(own_H))), channel_I < len(own_H)

    def _inputs(self, tokens_BN: Tensor, g_BfH: Tensor, under_BN: Tensor | None) -> tuple[Tensor, Tensor]:
        """(attention input of the layer [R, I], start of its residual stream [R, H])."""
        head = self.head
        if self.input is None:
            g_RH = (g_BfH if under_BN is None else take_rows(g_BfH, under_BN)).flatten(0, 1)
            x_RI = head.mix(head.embed(tokens_BN).flatten(0, 1).to(self.dtype), g_RH)
            return x_RI, head.residual(x_RI, g_RH)
        x_RI, g_RH = draft_input(tokens_BN, g_BfH, self.input, under_BN)
        if self.replaced is not None:
            token, own_I, embedding_I = self.replaced
            x_RI = torch.where((tokens_BN.reshape(-1, 1) == token) & embedding_I, own_I, x_RI)
        if self.input.norms is None:
            x_RI = head.fc(x_RI)
        return x_RI, head.residual(x_RI, g_RH)

    def _output(self) -> tuple[RMSNorm | None, Linear | None]:
        """(norm before the product that makes logits, that product). Without a product, the head's `logits` runs."""
        head: Any = self.head
        if computes_as(head, Eagle3Head, "logits"):
            return head.norm, Linear(head.lm_head.weight.detach().to(self.dtype))
        teacher = head.teacher if computes_as(head, EagleHead, "logits") else None
        if teacher is not None and teacher.plain and teacher.weight_VD.dtype == self.dtype:
            return None, Linear(teacher.weight_VD)
        return None, None

    def linears(self) -> list[Linear]:
        own = (self.fc, *(linear for layer in self.layers for linear in layer.linears()), self.output)
        return [linear for linear in own if linear is not None]

    def fuse(self, hidden_BJD: Tensor, streams_BJkD: Tensor | None) -> Tensor:
        """As AutoregressiveHead.fuse: [B, J, H]."""
        if self.fc is None or streams_BJkD is None:
            return self.head.fuse(hidden_BJD, streams_BJkD)
        batch, count = streams_BJkD.shape[:2]
        streams = streams_BJkD.to(self.dtype)
        if len(self.fc_norms) > 1:
            parts = streams.unbind(2)
            streams = torch.stack([apply_norm(part, norm) for part, norm in zip(parts, self.fc_norms, strict=True)], 2)
        x_RC = streams.reshape(batch * count, -1)
        if len(self.fc_norms) == 1:
            x_RC = apply_norm(x_RC, self.fc_norms[0])
        return self.fc(x_RC).view(batch, count, -1)

    def __call__(
        self,
        tokens_BN: Tensor,
        g_BfH: Tensor,
        visibility: Visibility,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        only_Bn: Tensor | None = None,
        under_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values and draft.

        Args:
            tokens_BN, g_BfH: as `tokens_BN`, `g_BNH` of AutoregressiveHead.step.
            visibility: rope positions, slots written, slots seen.
            keys, values: [B, g, S, d] of every layer.
            only_Bn: int64, the rows of each sequence that are wanted; None = all. One row alone: not with a tree mask.
            under_BN: int64, the row of `g_BfH` that each token reads; None = row n for token n (f = N).
        Returns: (g for the next step [B, N or n, H], logits [B, N or n, U]).
        """
        batch, count = tokens_BN.shape
        x_RI, residual_RH = self._inputs(tokens_BN, g_BfH.to(self.dtype), under_BN)
        last, one = len(self.layers) - 1, only_Bn is not None and only_Bn.shape[1] == 1
        for n, layer in enumerate(self.layers):
            # all rows need keys and values in every layer, so only the last one may leave rows out
            only_B1 = only_Bn if one and n == last else None
            residual_RH, x_RI = layer(x_RI, residual_RH, visibility, keys[n], values[n], only_B1)
        if only_Bn is not None:
            if not one:
                residual_RH, x_RI = (
                    take_rows(x.view(batch, count, -1), only_Bn).flatten(0, 1) for x in (residual_RH, x_RI)
                )
            count = only_Bn.shape[1]
        logits_RU = self.head.logits(residual_RH) if self.output is None else self.output(x_RI)
        g_RH = x_RI if self.gives_norm else self.head.recycled(residual_RH)
        return g_RH.view(batch, count, -1), logits_RU.view(batch, count, -1)
