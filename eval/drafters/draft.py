"""One decoding pass of an autoregressive head on explicit KV buffers, with the kernels that the target runs on.

It computes what AutoregressiveHead.step computes. It copies the weights in the dtype that decoding runs in, because the
head may still be in training. A head has one layer, so the copy is small.
Shape legend: B batch, N rows of a pass, R = B · N, f rows of `g`, H head hidden, I input of a product, U draft
vocabulary, g kv heads, d head dim, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.eval.kernels.attention import AttendShape, Visibility, attend
from headstart.eval.kernels.draft_input import DraftInput, draft_input
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.norm import NormWeights
from headstart.eval.kernels.rope_store import RopeStore, rope_store
from headstart.eval.kernels.rows import pick, take_rows
from headstart.heads.families.autoregressive import AutoregressiveHead
from headstart.heads.families.eagle.head import EagleHead
from headstart.heads.families.eagle3.head import Eagle3Head
from headstart.heads.kernels.elementwise import gated_eager
from headstart.heads.layers import RMSNorm
from headstart.heads.numerics import compute_dtype


def norm_of(norm: RMSNorm) -> NormWeights:
    return NormWeights(norm.weight.detach().float(), norm.eps)


def computes_as(head: AutoregressiveHead, family: type[AutoregressiveHead], piece: str) -> bool:
    """Whether the head's method `piece` (`fuse`, `mix` or `logits`) is the family's: a subclass may replace it."""
    return getattr(type(head), piece) is getattr(family, piece)


class DraftStep:
    """A copy of a head that is bound to its target.

    Args: positions: length of the rotary tables.
    """

    def __init__(self, head: AutoregressiveHead, positions: int):
        self.head, layer = head, head.layer
        self.dtype = compute_dtype(head.fc.weight)
        device = head.fc.weight.device
        attention, mlp = layer.self_attn, layer.mlp

        def copied(*weights: Tensor) -> Tensor:
            return torch.cat([weight.detach().to(self.dtype) for weight in weights])

        # EAGLE-3's fc makes g from the target's features; EAGLE-1's fc stands in `mix` and needs no copy
        self.fc = Linear(copied(head.fc.weight)) if computes_as(head, Eagle3Head, "fuse") else None
        self.qkv = Linear(copied(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        self.out = Linear(copied(attention.o_proj.weight), residual=True)
        self.activation = mlp.act
        # an activation that the kernels do not know is applied between two plain products
        known = "silu" if mlp.act is None else None
        self.gate_up = Linear(copied(mlp.gate_proj.weight, mlp.up_proj.weight), activation=known)
        self.down = Linear(copied(mlp.down_proj.weight), residual=True)
        norm = layer.post_attention_layernorm
        self.mlp_norm = norm_of(norm)
        self.input = self._input()
        dims = head.dims
        self.shape = RopeStore(dims.num_heads, dims.num_kv_heads, dims.head_dim)
        self.attend_shape = AttendShape(dims.head_dim**-0.5)
        self.tables = head.rope(torch.arange(positions, device=device))
        self.norm, self.output = self._output()

    def _input(self) -> DraftInput | None:
        """For the kernel that gathers the rows' inputs (EAGLE-1's fc follows it); None = the head's own `mix` runs."""
        head: Any = self.head
        if head.embed_VD is None:
            raise RuntimeError("the head is not bound to a target: call bind(target.ends) first")
        if computes_as(head, Eagle3Head, "mix"):
            embed_VD = head.embed_VD if head.embed_tokens is None else head.embed_tokens.weight.detach()
            return DraftInput(embed_VD, (norm_of(head.midlayer.input_layernorm), norm_of(head.midlayer.hidden_norm)))
        return DraftInput(head.embed_VD, None) if computes_as(head, EagleHead, "mix") else None

    def _inputs(self, tokens_BN: Tensor, g_BfH: Tensor, under_BN: Tensor | None) -> tuple[Tensor, Tensor]:
        """(attention input of the layer [R, I], start of its residual stream [R, H])."""
        head = self.head
        if self.input is None:
            g_RH = (g_BfH if under_BN is None else take_rows(g_BfH, under_BN)).flatten(0, 1)
            x_RI = head.mix(head.embed(tokens_BN).flatten(0, 1).to(self.dtype), g_RH)
            return x_RI, head.residual(x_RI, g_RH)
        x_RI, g_RH = draft_input(tokens_BN, g_BfH, self.input, under_BN)
        if self.input.norms is None:
            x_RI = head.fc(x_RI)
        return x_RI, head.residual(x_RI, g_RH)

    def _output(self) -> tuple[NormWeights | None, Linear | None]:
        """(norm before the product that makes logits, that product). Without a product, the head's `logits` runs."""
        head: Any = self.head
        if computes_as(head, Eagle3Head, "logits"):
            return norm_of(head.norm), Linear(head.lm_head.weight.detach().to(self.dtype))
        teacher = head.teacher if computes_as(head, EagleHead, "logits") else None
        if teacher is not None and teacher.plain and teacher.weight_VD.dtype == self.dtype:
            return None, Linear(teacher.weight_VD)
        return None, None

    def linears(self) -> list[Linear]:
        own = (self.fc, self.qkv, self.out, self.gate_up, self.down, self.output)
        return [linear for linear in own if linear is not None]

    def fuse(self, hidden_BJD: Tensor, streams_BJkD: Tensor | None) -> Tensor:
        """As AutoregressiveHead.fuse: [B, J, H]."""
        if self.fc is None or streams_BJkD is None:
            return self.head.fuse(hidden_BJD, streams_BJkD)
        batch, count = streams_BJkD.shape[:2]
        return self.fc(streams_BJkD.reshape(batch * count, -1).to(self.dtype)).view(batch, count, -1)

    def __call__(
        self,
        tokens_BN: Tensor,
        g_BfH: Tensor,
        visibility: Visibility,
        keys: Tensor,
        values: Tensor,
        only_B1: Tensor | None = None,
        under_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values and draft.

        Args:
            tokens_BN, g_BfH: as `tokens_BN`, `g_BNH` of AutoregressiveHead.step.
            visibility: rope positions, slots written, slots seen.
            keys, values: [B, g, S, d].
            only_B1: int64, the one row of each sequence that is wanted; None = all. Not with a tree mask.
            under_BN: int64, the row of `g_BfH` that each token reads; None = row n for token n (f = N).
        Returns: (g for the next step [B, N or 1, H], logits [B, N or 1, U]).
        """
        batch, count = tokens_BN.shape
        x_RI, residual_RH = self._inputs(tokens_BN, g_BfH.to(self.dtype), under_BN)
        position_BN, write_BN = visibility.position_BM, visibility.write_BM
        cos_TW, sin_TW = self.tables
        q_Rhd = rope_store(self.qkv(x_RI), cos_TW, sin_TW, self.shape, keys, values, write_BN, position_BN)
        if only_B1 is not None:
            picked = pick(q_Rhd.flatten(1), residual_RH, position_BN, write_BN, only_B1)
            q_Rhd, residual_RH, count = picked.q_BC.view(batch, *q_Rhd.shape[1:]), picked.residual_BD, 1
            visibility = Visibility(picked.position_B1, picked.write_B1, visibility.base_B)
        context_RC = attend(q_Rhd, keys, values, visibility, self.attend_shape).flatten(1)
        x_RH, normed_RH = self.out.with_norm(context_RC, residual_RH, self.mlp_norm)
        y_RI = self.gate_up(normed_RH)
        if self.activation is not None:
            gate, up = y_RI.chunk(2, -1)
            y_RI = gated_eager(gate, up, self.activation)
        if self.norm is None:
            g_RH = last_RH = self.down(y_RI, x_RH)
        else:
            g_RH, last_RH = self.down.with_norm(y_RI, x_RH, self.norm)
        logits_RU = self.head.logits(g_RH) if self.output is None else self.output(last_RH)
        return g_RH.view(batch, count, -1), logits_RU.view(batch, count, -1)
