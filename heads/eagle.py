"""EAGLE-1: one decoder layer that predicts the next feature (arXiv 2401.15077; methods §3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.attention import TrainAttention
from headstart.heads.autoregressive import AutoregressiveHead, compute_dtype
from headstart.heads.base import FeatureBatch, HeadConfig, HeadDims, HeadLoss, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.layers import DraftLayer
from headstart.heads.losses import fused
from headstart.heads.numerics import wide


@dataclass
class EagleConfig(HeadConfig):
    """Recipe node `head` for EAGLE-1."""

    type: str = "eagle"
    depth: int = 1
    #: weight of SmoothL1(g_t, f_{t+1}), mean over D
    hidden_loss_weight: float = 1.0
    #: weight of the soft cross-entropy through the target's frozen lm_head
    logit_loss_weight: float = 0.1
    #: amplitude a of the input noise U(-a, a) · 512 / T in training
    feature_noise: float = 0.1
    #: MLP width; null: the target's
    intermediate_size: int | None = None


class EagleHead(AutoregressiveHead):
    """fc(cat(emb(x_{t+1}), f_t)) through one decoder layer without input norm; its output predicts f_{t+1}."""

    family = "eagle"
    config: EagleConfig
    draft_ids_U = None

    def __init__(self, config: EagleConfig, dims: HeadDims):
        if config.depth != 1:
            raise ConfigError(f"head.depth: EAGLE-1 trains depth 1, found {config.depth}; set head.depth=1")
        super().__init__(config, dims)
        hidden = dims.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(
            [DraftLayer(hidden, hidden, config.intermediate_size or dims.intermediate_size, dims)]
        )

    @property
    def layer(self) -> DraftLayer:
        return self.layers[0]

    def init_from_target(self, embed_VD: Tensor, teacher: Teacher, draft_ids_U: Tensor | None = None) -> None:
        self.bind(embed_VD, teacher)

    def fuse(self, hidden: Tensor, streams: Tensor | None) -> Tensor:
        return hidden

    def mix(self, embedding: Tensor, g: Tensor) -> Tensor:
        return self.fc(torch.cat((embedding, g.to(embedding.dtype)), dim=-1))

    def residual(self, x: Tensor, g: Tensor) -> Tensor:
        return x

    def logits(self, g: Tensor) -> Tensor:
        return self.teacher.logits(g)

    def depth_counts(self, batch: FeatureBatch) -> Tensor:
        return batch.anchors.active_counts()

    def noisy(self, batch: FeatureBatch) -> Tensor:
        """Input features with the training noise of the reference code: U(-a, a) · 512 / document length."""
        hidden_RD = batch.hidden_RD.to(compute_dtype(self.fc.weight))
        if not self.training or self.config.feature_noise == 0:
            return hidden_RD
        length_R = batch.edges_E.diff()[batch.doc_R.clamp(min=0)]
        scale_R = self.config.feature_noise * 512.0 / length_R
        return hidden_RD + (torch.rand_like(hidden_RD) * 2 - 1) * scale_R[:, None].to(hidden_RD.dtype)

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_K: Tensor | None = None) -> HeadLoss:
        row_A = batch.anchors.row_A
        attention = self.layer.self_attn
        x_RH = self.mix(self.embed(self.next_tokens(batch)), self.noisy(batch))
        cos, sin = self.rope(batch.position_R)
        k_RgD, v_RgD = attention.keys_values(x_RH, cos, sin)
        q = attention.queries(x_RH[row_A], cos[row_A], sin[row_A])
        g_AH = self.layer.finish(TrainAttention(batch).attend(q, k_RgD, v_RgD), x_RH[row_A])
        feature_AD = batch.teacher_hidden()
        active_A = batch.anchors.depths_A > 0
        distance_A = F.smooth_l1_loss(wide(g_AH), wide(feature_AD), reduction="none").mean(-1)
        feature_loss = (distance_A * active_A).sum()
        logit_loss, argmax_A = self._logit_loss(g_AH, feature_AD, active_A.float(), teacher)
        loss = self.config.hidden_loss_weight * feature_loss + self.config.logit_loss_weight * logit_loss
        hit_A = (argmax_A == batch.teacher_argmax_A) & active_A
        return HeadLoss.of(loss[None], [active_A.float()], [hit_A], [active_A])

    def _logit_loss(
        self, g_AH: Tensor, feature_AD: Tensor, weight_A: Tensor, teacher: Teacher
    ) -> tuple[Tensor, Tensor]:
        """Σ softCE(lm_head(g_t), lm_head(f_{t+1})) and the argmax, through the frozen head."""
        with torch.no_grad():
            teacher_AV = teacher.logits(feature_AD)
        if teacher.bias_V is None and teacher.softcap is None and teacher.scale == 1.0:
            row_A = torch.arange(g_AH.shape[0], device=g_AH.device)
            teacher_AV = teacher_AV.to(g_AH.dtype)
            return fused.soft_ce(g_AH, teacher.weight_VD, teacher_AV, row_A, weight_A)
        logits_AV = teacher.logits(g_AH)
        loss_A = -(teacher_AV.softmax(-1) * logits_AV.log_softmax(-1)).sum(-1)
        return (loss_A * weight_A).sum(), logits_AV.detach().argmax(-1)
