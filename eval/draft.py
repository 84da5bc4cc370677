"""One decoding pass of an autoregressive head on explicit KV buffers, with the kernels that the target runs on.

Equals AutoregressiveHead.step; weights are copied in the dtype that decoding runs in (a head is one layer), so that a
head which is still being trained keeps its parameters.
Shape legend: B batch, N rows of a pass, R = B · N, H head hidden, U draft vocabulary, g kv heads, d head dim, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.attention import AttendShape, Visibility, attend
from headstart.eval.linear import Linear, tune
from headstart.eval.pointwise import NormWeights, RopeStore, rms_norm, rope_store
from headstart.heads.autoregressive import AutoregressiveHead, compute_dtype
from headstart.heads.eagle3 import Eagle3Head


class DraftStep:
    """A head as it stands, bound to its target, ready to draft.

    Args: positions: rotary tables reach to this many.
    """

    def __init__(self, head: AutoregressiveHead, positions: int):
        self.head, layer = head, head.layer
        self.dtype = compute_dtype(head.fc.weight)
        device = head.fc.weight.device
        attention, mlp = layer.self_attn, layer.mlp

        def copied(*weights: Tensor) -> Tensor:
            return torch.cat([weight.detach().to(self.dtype) for weight in weights])

        self.qkv = Linear(copied(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        self.out = Linear(copied(attention.o_proj.weight), residual=True)
        self.activation = mlp.act
        # an activation that the kernels do not know is applied between two plain products
        known = "silu" if mlp.act is None else None
        self.gate_up = Linear(copied(mlp.gate_proj.weight, mlp.up_proj.weight), activation=known)
        self.down = Linear(copied(mlp.down_proj.weight), residual=True)
        norm = layer.post_attention_layernorm
        self.mlp_norm = NormWeights(norm.weight.detach().float(), norm.eps)
        self.shape = RopeStore(head.num_heads, head.num_kv_heads, head.head_dim)
        self.attend_shape = AttendShape(head.head_dim**-0.5)
        self.tables = head.rope(torch.arange(positions, device=device))
        self.output = self._output()

    def _output(self) -> Linear | None:
        """The product that makes logits; None = whatever the head does."""
        head, teacher = self.head, self.head.teacher
        if isinstance(head, Eagle3Head):
            return Linear(head.lm_head.weight.detach().to(self.dtype))
        if teacher is None or teacher.bias_V is not None or teacher.softcap is not None or teacher.scale != 1.0:
            return None
        return Linear(teacher.weight_VD) if teacher.weight_VD.dtype == self.dtype else None

    def linears(self) -> list[Linear]:
        return [linear for linear in (self.qkv, self.out, self.gate_up, self.down, self.output) if linear is not None]

    def tune(self, rows: int) -> dict[str, float]:
        """As FusedModel.tune."""
        return tune(self.linears(), rows)

    def __call__(
        self,
        tokens_BN: Tensor,
        g_BNH: Tensor,
        visibility: Visibility,
        keys: Tensor,
        values: Tensor,
        only_B1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values and draft.

        Args:
            tokens_BN, g_BNH: as AutoregressiveHead.step's.
            visibility: rope positions, slots written, slots seen.
            keys, values: [B, g, S, d].
            only_B1: int64, the one row of each sequence whose result is wanted; None = all. Without tree masks only.
        Returns: (g for the next step [B, N or 1, H], logits [B, N or 1, U]).
        """
        head = self.head
        g_BNH = g_BNH.to(self.dtype)
        x_BNI = head.mix(head.embed(tokens_BN).to(self.dtype), g_BNH)
        residual_BNH = head.residual(x_BNI, g_BNH)
        batch, count = tokens_BN.shape
        position_BN = visibility.position_BM
        cos_RW, sin_RW = (table[position_BN.clamp(min=0).flatten()] for table in self.tables)
        qkv_RC = self.qkv(x_BNI.flatten(0, 1))
        q_Rhd = rope_store(qkv_RC, cos_RW, sin_RW, self.shape, keys, values, visibility.write_BM)
        if only_B1 is not None:
            rows = torch.arange(batch, device=q_Rhd.device)
            q_Rhd = q_Rhd.unflatten(0, (batch, count))[rows, only_B1[:, 0]]
            residual_BNH = residual_BNH[rows, only_B1[:, 0]][:, None]
            visibility = Visibility(
                position_BN.gather(1, only_B1), visibility.write_BM.gather(1, only_B1), visibility.base_B
            )
            count = 1
        context_RC = attend(q_Rhd, keys, values, visibility, self.attend_shape).flatten(1)
        x_RH, normed_RH = self.out.with_norm(context_RC, residual_BNH.flatten(0, 1), self.mlp_norm)
        y_RI = self.gate_up(normed_RH)
        if self.activation is not None:
            gate, up = y_RI.chunk(2, -1)
            y_RI = self.activation(gate) * up
        g_RH = self.down(y_RI, x_RH)
        return g_RH.view(batch, count, -1), self._logits(g_RH).view(batch, count, -1)

    def _logits(self, g_RH: Tensor) -> Tensor:
        if self.output is None:
            return self.head.logits(g_RH)
        if isinstance(self.head, Eagle3Head):
            g_RH = rms_norm(g_RH, NormWeights(self.head.norm.weight, self.head.norm.eps))
        return self.output(g_RH)
