"""EAGLE-3: fused low/mid/high features, training-time test, a draft vocabulary (arXiv 2503.01840; methods §4).

Shape legend: R rows of a pack, A anchors, M = Σ_d count_d, K depths, D target hidden, H head hidden, U draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.base import MAX_SIZE, HeadConfig, Loss
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families.autoregressive import AutoregressiveConfig, AutoregressiveHead
from headstart.heads.families.eagle3 import ttt
from headstart.heads.layers import DraftLayer, RMSNorm
from headstart.heads.losses import check_loss, fused
from headstart.heads.numerics import compute_dtype
from headstart.heads.vocab import membership


@dataclass
class Eagle3Config(AutoregressiveConfig):
    """Recipe node `head` for EAGLE-3."""

    structure: ClassVar[tuple[str, ...]] = ("draft_vocab_size", "hidden_size", "intermediate_size")
    reading: ClassVar[tuple[str, ...]] = ("feature_layers",)
    limits: ClassVar[dict[str, int]] = {**HeadConfig.limits, "hidden_size": MAX_SIZE, "intermediate_size": MAX_SIZE}

    type: str = "eagle3"
    #: Steps of training-time test (K).
    depth: int = 7
    depth_decay: float = 0.8
    #: Loss of every step against the target's distribution: soft_ce, kl or lk (acceptance rate).
    loss: str = "soft_ce"
    #: Three layers whose inputs the head reads, as indices of hidden_states; null takes [2, L//2, L-3] of L layers.
    feature_layers: list[int] | None = None
    #: Tokens that the head can draft (U). 0 or the target's vocabulary size lets it draft all.
    draft_vocab_size: int = 32000
    #: Hidden size of the head (H); null takes the target's. Any other size needs embeddings of its own.
    hidden_size: int | None = None
    #: Width of the MLP; null takes the target's.
    intermediate_size: int | None = None


def default_feature_layers(num_layers: int) -> list[int]:
    """Published choice: inputs of layers 2, L//2 and L-3."""
    return [2, num_layers // 2, num_layers - 3]


class Eagle3Layer(DraftLayer):
    """The decoder layer: attention reads cat(input_layernorm(emb), hidden_norm(g)), 2H wide."""

    def __init__(self, hidden_size: int, intermediate_size: int, dims: HeadDims, activation: str):
        super().__init__(2 * hidden_size, hidden_size, intermediate_size, dims, activation)
        self.input_layernorm = RMSNorm(hidden_size, dims.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden_size, dims.rms_norm_eps)


class Eagle3Head(AutoregressiveHead):
    """One decoder layer that reads the target's features at step 1 and its own pre-norm output at later steps."""

    family = "eagle3"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, dims: HeadDims):
        check_loss(config.loss)
        super().__init__(config, dims)
        self.feature_layers = self._feature_layers()
        hidden = config.hidden_size or dims.hidden_size
        size = config.draft_vocab_size or dims.vocab_size
        if not 0 < size <= dims.vocab_size:
            raise ConfigError(
                f"head.draft_vocab_size: found {size}, expected at most the target's vocabulary of {dims.vocab_size}"
            )
        self.fc = nn.Linear(3 * dims.hidden_size, hidden, bias=False)
        width = config.intermediate_size or dims.intermediate_size
        self.midlayer = Eagle3Layer(hidden, width, dims, self.hidden_act)
        self.norm = RMSNorm(hidden, dims.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, size, bias=False)
        self.embed_tokens = nn.Embedding(dims.vocab_size, hidden) if hidden != dims.hidden_size else None
        self.register_buffer(
            "draft_ids_U", torch.arange(size, device="cpu") if size < dims.vocab_size else None, persistent=True
        )

    def _feature_layers(self) -> list[int]:
        layers, found = self.dims.num_layers, self.config.feature_layers
        ids = list(found) if found is not None else default_feature_layers(layers)
        if len(ids) != 3 or ids != sorted(set(ids)) or not all(0 < k < layers for k in ids):
            origin = "the recipe gives" if found is not None else f"the default for {layers} layers is"
            raise ConfigError(
                f"head.feature_layers: eagle3 needs 3 distinct ascending ids in 1 … {layers - 1}, {origin} {ids}; "
                "set head.feature_layers"
            )
        return ids

    @property
    def layer(self) -> DraftLayer:
        return self.midlayer

    @property
    def spec(self) -> FeatureSpec:
        return FeatureSpec(tuple(self.feature_layers))

    @property
    def own_embeddings(self) -> bool:
        return self.embed_tokens is not None

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As the base class's; lm_head starts from the target's rows of the draft vocabulary, norm from its final norm.

        A head of another width than the target's keeps random weights.
        """
        super().initialise(ends, draft_ids_U)
        teacher = ends.teacher
        if self.lm_head.in_features == teacher.weight_VD.shape[1]:
            weight_VD = teacher.weight_VD
            ids_U = slice(None) if self.draft_ids_U is None else self.draft_ids_U.to(weight_VD.device)
            with torch.no_grad():
                self.lm_head.weight.copy_(weight_VD[ids_U])
                if teacher.norm_D is not None:
                    self.norm.weight.copy_(teacher.norm_D)

    def sharpen(self) -> None:
        self.norm.weight.data.mul_(8)

    def embed(self, tokens: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens).to(compute_dtype(self.fc.weight))
        return super().embed(tokens)

    def fuse(self, hidden: Tensor, streams: Tensor | None) -> Tensor:
        return self.fc(streams.flatten(-2).to(compute_dtype(self.fc.weight)))

    def mix(self, embedding: Tensor, g: Tensor) -> Tensor:
        return torch.cat((self.midlayer.input_layernorm(embedding), self.midlayer.hidden_norm(g)), dim=-1)

    def residual(self, x: Tensor, g: Tensor) -> Tensor:
        return g

    def logits(self, g: Tensor) -> Tensor:
        return self.lm_head(self.norm(g))

    def in_vocab(self, batch: FeatureBatch) -> Tensor:
        """bool [A]: whether the target's greedy token after row_A + 1 is in the draft vocabulary."""
        if self.draft_ids_U is None:
            # a pack whose features are yet to be made has no choices of the target
            return torch.ones_like(batch.anchors.row_A, dtype=torch.bool)
        return membership(self.draft_ids_U, self.dims.vocab_size)[batch.teacher_argmax_A]

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        return self._counts(batch)[: len(self.terms)]

    def _counts(self, batch: FeatureBatch) -> Tensor:
        """float32 [K]: at each of the anchors' depths, supervised positions whose target choice can be drafted."""
        anchors = batch.anchors
        return (self.in_vocab(batch)[anchors.teacher_AK] & anchors.supervised_AK()).sum(0, dtype=torch.float32)

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        packed = sum(linear.weight.numel() for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
        key_value = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
        per_row = (
            attention.o_proj.weight.numel() + self.lm_head.weight.numel() + sum(p.numel() for p in mlp.parameters())
        )
        # every row: fc, the embedding half of the projections, the feature half of keys and values (ttt.py)
        shared = (self.fc.weight.numel() + packed / 2 + key_value / 2) * rows
        return shared + (packed - key_value) / 2 * counts[0] + packed / 2 * sum(counts[1:]) + per_row * sum(counts)

    def rollout(self, batch: FeatureBatch) -> Tensor:
        """Training-time test: the normed outputs [M, H] of every depth's anchors, laid end to end.

        The head reads the true tokens. Rows that are not supervised run fc, the input norms and step-1 keys and values
        alone.
        """
        g_RH = self.fuse(batch.hidden_RD, batch.streams_RkD)
        e_RH = self.midlayer.input_layernorm(self.embed(self.next_tokens(batch)))
        return self.norm(ttt.rollout(batch, self.midlayer, self.midlayer.hidden_norm, self.rope, e_RH, g_RH))

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors = batch.anchors
        with torch.no_grad():
            inside_A = self.in_vocab(batch)
            teacher_AU = teacher.logits(batch.teacher_hidden(), self.draft_ids_U, compute_dtype(self.fc.weight))
        rows = anchors.weights()
        teacher_row = [anchors.teacher_AK[:count, d] for d, count in enumerate(anchors.count_K)]
        weight = [inside_A[source] * on for source, on in zip(teacher_row, rows, strict=True)]
        output_MH, matrix, kind = self.rollout(batch), self.lm_head.weight, self.config.loss
        if scale_T is None:
            pairs = [
                fused.soft_loss(h, matrix, teacher_AU, row, w, kind)
                for h, row, w in zip(output_MH.split(anchors.count_K), teacher_row, weight, strict=True)
            ]
            loss_K, argmax = torch.stack([loss for loss, _ in pairs]), [best for _, best in pairs]
        else:
            loss_K, argmax = fused.soft_loss_depths(output_MH, matrix, teacher_AU, teacher_row, weight, scale_T, kind)
        hits = [
            (self.target_ids(best) == batch.teacher_argmax_A[source]) & (on > 0)
            for best, source, on in zip(argmax, teacher_row, rows, strict=True)
        ]
        counts = None if anchors.weight_AK is None else self._counts(batch)
        return Loss.per_depth(loss_K, weight, hits, rows, len(self.terms), counts)
