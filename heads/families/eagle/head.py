"""EAGLE-1: one decoder layer that predicts the next feature (arXiv 2401.15077; methods §3).

Shape legend: R rows of a pack, A anchors, D target hidden = H head hidden, g kv heads, h query heads, V target
vocabulary, K passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_SIZE, HeadConfig, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families.autoregressive import AutoregressiveConfig, AutoregressiveHead
from headstart.heads.kernels.attention import TrainAttention
from headstart.heads.layers import DraftLayer
from headstart.heads.losses import check_loss, eager, fused
from headstart.heads.numerics import compute_dtype, wide


@dataclass
class EagleConfig(AutoregressiveConfig):
    """Recipe node `head` for EAGLE-1."""

    structure: ClassVar[tuple[str, ...]] = ("intermediate_size", "fc_bias")
    limits: ClassVar[dict[str, int]] = {**HeadConfig.limits, "intermediate_size": MAX_SIZE}

    type: str = "eagle"
    #: Passes of harmonised training (HASS, arXiv 2408.15766): 1 is EAGLE-1 as published, 3 is HASS.
    depth: int = 1
    #: Weight of the loss on features: SmoothL1(g_t, f_{t+1}), mean over the hidden size.
    hidden_loss_weight: float = 1.0
    #: Weight of head.loss, the loss on logits, through the target's frozen output matrix.
    logit_loss_weight: float = 0.1
    #: Loss of the logits against the target's distribution: soft_ce, kl or lk (acceptance rate).
    loss: str = "soft_ce"
    #: Weight of HASS's ranking distillation: -Σ p log q over the target's head.top_tokens most likely tokens alone. Set
    #: 1 in a second stage that goes on from a head of the first (start_from). 0 is off; anything else needs
    #: head.loss=soft_ce.
    top_tokens_loss_weight: float = 0.0
    #: Tokens in the loss that head.top_tokens_loss_weight weighs.
    top_tokens: int = 10
    #: Amplitude a of the noise U(-a, a) · 512 / T that training adds to the features of T tokens.
    feature_noise: float = 0.1
    #: Width of the MLP; null takes the target's.
    intermediate_size: int | None = None
    #: Give the input projection a bias, as some published heads have it. SGLang reads it, vLLM drops it in silence.
    fc_bias: bool = False


class EagleHead(AutoregressiveHead):
    """fc(cat(emb(x_{t+1}), f_t)) goes through one decoder layer without input norm. The output predicts f_{t+1}."""

    family = "eagle"
    config: EagleConfig

    def __init__(self, config: EagleConfig, dims: HeadDims):
        if config.depth < 1:
            raise ConfigError(
                f"head.depth: found {config.depth}, expected 1 (EAGLE-1) or more passes of harmonised training"
            )
        check_loss(config.loss)
        _check_top_tokens(config)
        super().__init__(config, dims)
        hidden = dims.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            [DraftLayer(hidden, hidden, config.intermediate_size or dims.intermediate_size, dims, self.hidden_act)]
        )

    @property
    def layer(self) -> DraftLayer:
        return self.layers[0]

    def fuse(self, hidden: Tensor, streams: Tensor | None) -> Tensor:
        return hidden

    def mix(self, embedding: Tensor, g: Tensor) -> Tensor:
        return self.fc(torch.cat((embedding, g.to(embedding.dtype)), dim=-1))

    def residual(self, x: Tensor, g: Tensor) -> Tensor:
        return x

    def logits(self, g: Tensor) -> Tensor:
        return self.teacher.logits(g)

    def metrics(self, depths: int) -> tuple[str, ...]:
        """As the base class's, and the two weighted parts of the loss, as means over all trained passes.

        With one pass, feature_loss + logit_loss is the loss.
        """
        return (*super().metrics(depths), "feature_loss", "logit_loss")

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        own = sum(p.numel() for p in self.parameters())
        output = self.teacher.weight_VD.numel()
        # in every pass, all rows go through the layer and the supervised ones through the target's output head
        return self.depth * (own * rows + output * counts[0])

    def noisy(self, batch: FeatureBatch) -> Tensor:
        """Input features with the training noise of the reference code: U(-a, a) · 512 / document length."""
        hidden_RD = batch.hidden_RD.to(compute_dtype(self.fc.weight))
        if not self.training or self.config.feature_noise == 0:
            return hidden_RD
        length_R = batch.edges_E.diff()[batch.doc_R.clamp(min=0)]
        scale_R = self.config.feature_noise * 512.0 / length_R
        return hidden_RD + (torch.rand_like(hidden_RD) * 2 - 1) * scale_R[:, None].to(hidden_RD.dtype)

    def rollout(self, batch: FeatureBatch) -> list[Tensor]:
        """Outputs of every pass, [count_K[d], D] each for d = 0 … K-1: predictions of f_{t+d+1}.

        At d = 0, the anchor at t reads x_{t+1} and the target's f_t. At d > 0 it reads x_{t+d+1} and its own prediction
        of f_{t+d}, detached, as in decoding. It attends to the keys of rows ≤ t, made from the target's features, and
        to its own keys of passes 1 … d (HASS, arXiv 2408.15766, §3.2).
        """
        anchors, attention = batch.anchors, self.layer.self_attn
        tokens_R, attend = self.next_tokens(batch), TrainAttention(batch).attend
        x_RH = self.mix(self.embed(tokens_R), self.noisy(batch))
        k_RgD, v_RgD = attention.keys_values(x_RH, *self.rope(batch.position_R))
        position_A = batch.position_R[anchors.row_A]
        outputs: list[Tensor] = []
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        for step, count in enumerate(anchors.count_K):
            row_A = anchors.row_A[:count]
            cos, sin = self.rope(position_A[:count] + step)
            if step == 0:
                x_AH = x_RH.index_select(0, row_A)
            else:
                # clamped only where the pass is not supervised
                token_A = tokens_R[(row_A + step).clamp(max=tokens_R.shape[0] - 1)]
                x_AH = self.mix(self.embed(token_A), outputs[-1][:count].detach())
                k_AgD, v_AgD = attention.keys_values(x_AH, cos, sin)
                own_k.append(k_AgD)
                own_v.append(v_AgD)
            q_AhD = attention.queries(x_AH, cos, sin)
            own = ([k[:count] for k in own_k], [v[:count] for v in own_v])
            outputs.append(self.layer.finish(attend(q_AhD, k_RgD, v_RgD, *own), x_AH))
        return outputs

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors, config = batch.anchors, self.config
        feature_AD = batch.teacher_hidden()
        with torch.no_grad():
            teacher_AV = teacher.logits(feature_AD, dtype=compute_dtype(self.fc.weight))
            logit_weight_A = self._logit_weights(teacher_AV)
        feature_losses, logit_losses, hits, weights = [], [], [], anchors.weights()
        for d, (g_AH, weight_A) in enumerate(zip(self.rollout(batch), weights, strict=True)):
            row_A = anchors.teacher_AK[: anchors.count_K[d], d]
            distance_A = F.smooth_l1_loss(wide(g_AH), wide(feature_AD[row_A]), reduction="none").mean(-1)
            scaled_A = weight_A if logit_weight_A is None else weight_A * logit_weight_A[row_A]
            logit_loss, argmax_A = self._logit_loss(g_AH, teacher_AV, row_A, scaled_A, teacher)
            logit_weight = config.logit_loss_weight if logit_weight_A is None else 1.0
            feature_losses.append(config.hidden_loss_weight * (distance_A * weight_A).sum())
            logit_losses.append(logit_weight * logit_loss)
            hits.append((argmax_A == batch.teacher_argmax_A[row_A]) & (weight_A > 0))
        terms = len(self.terms)
        loss_K = torch.stack([a + b for a, b in zip(feature_losses, logit_losses, strict=True)])
        loss = Loss.per_depth(loss_K, weights, hits, weights, terms)
        parts = [torch.stack(part[:terms]).sum() for part in (feature_losses, logit_losses)]
        return loss.with_metrics(parts, [loss.count_T.sum()] * 2)

    def _logit_weights(self, teacher_AV: Tensor) -> Tensor | None:
        """Fold the loss of the top tokens into the teacher, in place. Returns: weights [A] of its rows, if it is on.

        With Ω the top tokens, m = Σ_Ω p, a = logit_loss_weight and b = top_tokens_loss_weight,

            -a Σ p log q - b Σ_Ω p log q = -(a + b m) Σ p̃ log q,    p̃ ∝ p on other tokens, p (1 + b / a) on Ω.

        So both losses are one soft cross-entropy, with weight a + b m and log(1 + b / a) added to the teacher's logits
        on Ω.
        """
        config = self.config
        if config.top_tokens_loss_weight == 0:
            return None
        top_Ak = teacher_AV.topk(min(config.top_tokens, teacher_AV.shape[-1]), dim=-1)
        mass_A = (wide(top_Ak.values) - fused.row_logsumexp(teacher_AV)[:, None]).exp().sum(-1)
        boost = math.log1p(config.top_tokens_loss_weight / config.logit_loss_weight)
        teacher_AV.scatter_(1, top_Ak.indices, (wide(top_Ak.values) + boost).to(teacher_AV.dtype))
        return config.logit_loss_weight + config.top_tokens_loss_weight * mass_A

    def _logit_loss(
        self, g_AH: Tensor, teacher_AV: Tensor, row_A: Tensor, weight_A: Tensor, teacher: Teacher
    ) -> tuple[Tensor, Tensor]:
        """(Σ of `head.loss` between logits and teacher_AV[row_A], argmax), logits = the target's lm_head on g."""
        if teacher.plain:
            return fused.soft_loss(g_AH, teacher.weight_VD, teacher_AV, row_A, weight_A, self.config.loss)
        logits_AV = teacher.logits(g_AH)
        loss_A = eager.divergence(logits_AV, teacher_AV[row_A], self.config.loss)
        return (loss_A * weight_A).sum(), logits_AV.detach().argmax(-1)


def _check_top_tokens(config: EagleConfig) -> None:
    """Raises: ConfigError unless the loss of the top tokens is off, or fits the other fields."""
    weight = config.top_tokens_loss_weight
    if not 0 <= weight < math.inf:
        raise ConfigError(f"head.top_tokens_loss_weight: found {weight}, expected 0 (off) or more")
    if config.top_tokens < 1:
        raise ConfigError(f"head.top_tokens: found {config.top_tokens}, expected at least 1")
    if weight and (config.loss != "soft_ce" or not config.logit_loss_weight > 0):
        raise ConfigError(
            f"head.top_tokens_loss_weight: found {weight} with head.loss={config.loss} and "
            f"head.logit_loss_weight={config.logit_loss_weight}; it adds to a soft cross-entropy: set "
            "head.loss=soft_ce and head.logit_loss_weight above 0"
        )
