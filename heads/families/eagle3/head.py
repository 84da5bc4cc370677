"""EAGLE-3: fused low/mid/high features, training-time test, a draft vocabulary (arXiv 2503.01840; methods §4).

Variants (families §11): several layers, q/k norms as in Qwen3, norms before fc, and a normed output (EAGLE-3.1).

Shape legend: R rows of a pack, A anchors, M = Σ_d count_d, S rows that teach, K depths, D target hidden, H head hidden,
U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_LAYERS, MAX_SIZE, HeadConfig, Loss, counted_adds
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families.autoregressive import AutoregressiveConfig, AutoregressiveHead
from headstart.heads.families.eagle3 import ttt, ttt_autograd
from headstart.heads.layers import DraftLayer, LaterLayer, RMSNorm
from headstart.heads.losses import check_loss, fused
from headstart.heads.numerics import compute_dtype, wide
from headstart.heads.targets.layer_weights import start
from headstart.heads.vocab import membership

FC_NORMS = ("none", "stream", "concat")


@dataclass
class Eagle3Config(AutoregressiveConfig):
    """Recipe node `head` for EAGLE-3."""

    structure: ClassVar[tuple[str, ...]] = (
        "draft_vocab_size", "hidden_size", "intermediate_size", "layers", "qk_norm", "fc_norm", "num_key_value_heads",
    )  # fmt: skip
    behaviour: ClassVar[tuple[str, ...]] = ("norm_output",)
    reading: ClassVar[tuple[str, ...]] = ("feature_layers",)
    added: ClassVar[tuple[str, ...]] = (
        *AutoregressiveConfig.added, "layers", "qk_norm", "fc_norm", "norm_output", "num_key_value_heads",
        "start_layers", "lk_weight", "l1_weight", "teacher_temperature", "feature_dropout", "feature_noise",
    )  # fmt: skip
    limits: ClassVar[dict[str, int]] = {
        **HeadConfig.limits, "hidden_size": MAX_SIZE, "intermediate_size": MAX_SIZE, "layers": MAX_LAYERS,
        "num_key_value_heads": MAX_SIZE,
    }  # fmt: skip

    type: str = "eagle3"
    #: Steps of training-time test (K).
    depth: int = 7
    depth_decay: float = 0.8
    #: Loss of every step against the target's distribution: soft_ce, kl or lk (acceptance rate).
    loss: str = "soft_ce"
    #: Weight of the LK loss (minus the log of the acceptance rate), which is added to head.loss.
    lk_weight: float = 0.0
    #: Weight of the L1 distance of both distributions (twice the total variation), which is added to head.loss.
    l1_weight: float = 0.0
    #: The target's logits are divided by it before the loss: below 1, the target's choice counts more than the rest.
    teacher_temperature: float = 1.0
    #: Share of the features' numbers that training sets to zero, each on its own; the others grow by 1 / (1 - share).
    feature_dropout: float = 0.0
    #: Standard deviation of the Gaussian noise that training adds to the features, as a part of each row's root mean
    #: square.
    feature_noise: float = 0.0
    #: Three layers whose inputs the head reads, as indices of hidden_states; null takes [2, L//2, L-3] of L layers.
    feature_layers: list[int] | None = None
    #: Tokens that the head can draft (U): a whole number, or a share of the target's choices that the smallest
    #: vocabulary must hold (0.99). 0 or the target's vocabulary size lets it draft all.
    draft_vocab_size: int | float = 32000
    #: Hidden size of the head (H); null takes the target's. Any other size needs embeddings of its own.
    hidden_size: int | None = None
    #: Width of the MLP; null takes the target's.
    intermediate_size: int | None = None
    #: Key and value heads of each layer; null takes the target's. What a row learns of the context passes through the
    #: values, so a target with few and narrow ones is drafted better with more.
    num_key_value_heads: int | None = None
    #: Decoder layers. With more than one, training computes the lower ones for every row, not only for supervised ones.
    layers: int = 1
    #: Layers of the target (from 0; -1 is the last) whose weights the draft layers start from, one for each of them. fc
    #: then starts by passing on the stream nearest to the first. null starts from random weights; start_from goes
    #: before it.
    start_layers: list[int] | None = None
    #: Norm each head's queries and keys before the rotation, as Qwen3 does. Only vLLM serves such a head.
    qk_norm: bool = False
    #: RMSNorm of the features before fc (EAGLE-3.1): none, stream (one for each layer that is read) or concat (one over
    #: all of them together, which engines call norm_before_fc).
    fc_norm: str = "none"
    #: Feed the normed output back as the next step's feature (EAGLE-3.1), instead of the output before the norm.
    norm_output: bool = False

    def check(self) -> None:
        super().check()
        for name in ("lk_weight", "l1_weight", "feature_noise"):
            if not 0 <= (found := getattr(self, name)) < math.inf:
                raise ConfigError(f"head.{name}: found {found}, expected a finite number, 0 or more")
        if self.loss == "lk" and self.lk_weight + self.l1_weight > 0:
            raise ConfigError(
                "head.loss: found lk with head.lk_weight or head.l1_weight, which are added to soft_ce or kl: set "
                "head.loss=kl, or both weights to 0"
            )
        if not 0 < self.teacher_temperature < math.inf:
            raise ConfigError(
                f"head.teacher_temperature: found {self.teacher_temperature}, expected a finite number above 0"
            )
        if not 0 <= self.feature_dropout < 1:
            raise ConfigError(
                f"head.feature_dropout: found {self.feature_dropout}, expected a share: 0 (off) or more, less than 1"
            )


def default_feature_layers(num_layers: int) -> list[int]:
    """Published choice: inputs of layers 2, L//2 and L-3."""
    return [2, num_layers // 2, num_layers - 3]


class Eagle3Layer(DraftLayer):
    """The decoder layer: attention reads cat(input_layernorm(emb), hidden_norm(g)), 2H wide."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dims: HeadDims, activation: str, qk_norm: bool = False
    ):
        super().__init__(2 * hidden_size, hidden_size, intermediate_size, dims, activation, qk_norm)
        self.input_layernorm = RMSNorm(hidden_size, dims.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden_size, dims.rms_norm_eps)


class Eagle3Head(AutoregressiveHead):
    """Decoder layers that read the target's features at step 1 and their own output at later steps.

    Attributes:
        midlayer: the first layer, which reads embeddings and features. layers: those above it, by their number.
    """

    family = "eagle3"
    weighs_drafts = True
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, dims: HeadDims):
        check_loss(config.loss)
        if config.fc_norm not in FC_NORMS:
            raise ConfigError(f"head.fc_norm: found {config.fc_norm!r}, expected one of {', '.join(FC_NORMS)}")
        dims = dims.with_key_heads(config.num_key_value_heads)
        super().__init__(config, dims)
        self.feature_layers = self._feature_layers()
        hidden = config.hidden_size or dims.hidden_size
        size = config.draft_tokens(dims.vocab_size)
        if not 0 < size <= dims.vocab_size:
            raise ConfigError(
                f"head.draft_vocab_size: found {size}, expected at most the target's vocabulary of {dims.vocab_size}"
            )
        self.fc = nn.Linear(3 * dims.hidden_size, hidden, bias=False)
        width = config.intermediate_size or dims.intermediate_size
        self.midlayer = Eagle3Layer(hidden, width, dims, self.hidden_act, config.qk_norm)
        later = {
            str(n): LaterLayer(hidden, width, dims, self.hidden_act, config.qk_norm) for n in range(1, config.layers)
        }
        self.layers = nn.ModuleDict(later)
        self.norm = RMSNorm(hidden, dims.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, size, bias=False)
        eps, streams = dims.rms_norm_eps, range(3 if config.fc_norm == "stream" else 0)
        self.fc_norm = nn.ModuleList(RMSNorm(dims.hidden_size, eps) for _ in streams)
        self.input_norm = RMSNorm(3 * dims.hidden_size, eps) if config.fc_norm == "concat" else None
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
    def later_layers(self) -> Sequence[LaterLayer]:
        return [cast(LaterLayer, layer) for layer in self.layers.values()]

    @property
    def spec(self) -> FeatureSpec:
        return FeatureSpec(tuple(self.feature_layers))

    @property
    def own_embeddings(self) -> bool:
        return self.embed_tokens is not None

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As the base class's; lm_head starts from the target's rows of the draft vocabulary, norm from its final norm.

        A head of another width than the target's keeps random weights. Draft layers start as `start_layers` says.
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
        if (numbers := self.config.start_layers) is not None:
            start(self, numbers, ends, self.midlayer.hidden_norm, self.config.fc_norm)

    def sharpen(self) -> None:
        self.norm.weight.data.mul_(8)

    def embed(self, tokens: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens).to(compute_dtype(self.fc.weight))
        return super().embed(tokens)

    def fuse(self, hidden: Tensor, streams: Tensor | None) -> Tensor:
        streams = streams.to(compute_dtype(self.fc.weight))
        if self.config.fc_norm == "stream":
            parts = streams.unbind(-2)
            streams = torch.stack([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -2)
        features = streams.flatten(-2)
        return self.fc(features if self.input_norm is None else self.input_norm(features))

    def training_features(self, batch: FeatureBatch) -> Tensor:
        """g of every row [R, H], with the dropout and the noise of training."""
        streams_RkD, config = batch.streams_RkD, self.config
        if not self.training or (config.feature_dropout == 0 and config.feature_noise == 0):
            return self.fuse(batch.hidden_RD, streams_RkD)
        streams_RkD = streams_RkD.to(compute_dtype(self.fc.weight))
        if config.feature_noise:
            size_Rk1 = wide(streams_RkD).square().mean(-1, keepdim=True).sqrt().to(streams_RkD.dtype)
            streams_RkD = streams_RkD + config.feature_noise * size_Rk1 * torch.randn_like(streams_RkD)
        if config.feature_dropout:
            streams_RkD = F.dropout(streams_RkD, config.feature_dropout)
        return self.fuse(batch.hidden_RD, streams_RkD)

    def mix(self, embedding: Tensor, g: Tensor) -> Tensor:
        return torch.cat((self.midlayer.input_layernorm(embedding), self.midlayer.hidden_norm(g)), dim=-1)

    def residual(self, x: Tensor, g: Tensor) -> Tensor:
        return g

    @property
    def recycles_norm(self) -> bool:
        return self.config.norm_output

    def recycled(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.config.norm_output else out

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
        """As the base class's. At step 1, every row runs all layers but the last, and the last one's keys and values.

        In the first layer, the embedding half of the projections runs on every row once, and serves all steps.
        """
        first, later, total = counts[0], sum(counts[1:]), self.fc.weight.numel() * rows
        for n, layer in enumerate(self.draft_layers):
            attention = layer.self_attn
            packed = sum(linear.weight.numel() for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
            key_value = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
            rest = attention.o_proj.weight.numel() + sum(p.numel() for p in layer.mlp.parameters())
            if n == 0:
                total += packed / 2 * rows
                packed, key_value = packed / 2, key_value / 2
            whole = rows if n < len(self.layers) else first
            total += key_value * rows + (packed - key_value) * whole + packed * later + rest * (whole + later)
        return total + counted_adds(self.lm_head.weight) * sum(counts)

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """As the base class's. At step 1, the layers below the last keep numbers for every row.

        Autograd also keeps, at each step, the earlier steps' keys and values side by side, and two more outputs.
        """
        layers, hidden, steps = self.draft_layers, self.midlayer.hidden_size, self.depth
        below = sum(layer.kept_numbers(recompute) for layer in layers[:-1])
        kept = super().kept_numbers(rows, anchors, recompute) + (rows - anchors) * below
        kept += (self.teacher_rows(anchors) - anchors) * self.lm_head.out_features
        kept += self.copied_features(rows)
        kept += anchors * (steps - 1) * hidden * self.config.norm_output
        if not self.by_autograd:
            return kept
        attention = self.midlayer.self_attn
        own = len(layers) * attention.kv_heads * attention.head_dim * steps * (steps - 1)
        return kept + anchors * (2 * steps * hidden + own)

    def copied_features(self, rows: float) -> float:
        """Numbers of the features' copies that noise and dropout make, for fc's gradient."""
        return rows * self.fc.in_features * ((self.config.feature_dropout > 0) + (self.config.feature_noise > 0))

    def drawn_parts(self) -> tuple[float, ...]:
        """The rows of depths 1 … K, as parts of those of depth 1."""
        return (1.0,) * self.depth if self.keep_K is None else tuple(keep / self.keep_K[0] for keep in self.keep_K)

    def teacher_rows(self, anchors: float) -> float:
        """Rows of the teacher's logits (`loss`). Args: anchors: those that are drawn."""
        return anchors * min(1 / self.config.row_fraction_first, sum(self.drawn_parts()))

    @property
    def by_autograd(self) -> bool:
        """Whether ttt_autograd.py trains it, rather than ttt.py, whose backward is written out."""
        return bool(self.layers) or self.config.qk_norm

    def rollout(self, batch: FeatureBatch) -> Tensor:
        """Training-time test: the normed outputs [M, H] of every depth's anchors, laid end to end.

        The head reads the true tokens. Rows that are not supervised run fc, the input norms, the layers below the last,
        and the last one's keys and values of step 1.
        """
        g_RH = self.training_features(batch)
        e_RH = self.midlayer.input_layernorm(self.embed(self.next_tokens(batch)))
        norm = self.midlayer.hidden_norm
        if self.by_autograd:
            return self.norm(ttt_autograd.rollout(batch, self.draft_layers, norm, self.rope, e_RH, g_RH, self.recycled))
        out_norm = self.norm if self.config.norm_output else None
        return self.norm(ttt.rollout(batch, self.midlayer, norm, self.rope, e_RH, g_RH, out_norm))

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors = batch.anchors
        rows = anchors.weights()
        teacher_row = [anchors.teacher_AK[:count, d] for d, count in enumerate(anchors.count_K)]
        with torch.no_grad():
            inside_A = self.in_vocab(batch)
            hidden_SD, source = batch.teacher_hidden(), teacher_row
            if sum(anchors.count_K) < len(hidden_SD):  # fewer drafts are trained than there are rows that teach
                hidden_SD = hidden_SD[torch.cat(teacher_row)]
                source = list(torch.arange(len(hidden_SD), device=hidden_SD.device).split(anchors.count_K))
            teacher_SU = teacher.logits(hidden_SD, self.draft_ids_U, compute_dtype(self.fc.weight))
            if self.config.teacher_temperature != 1:
                teacher_SU.div_(self.config.teacher_temperature)
        weight = anchors.emphasised([inside_A[row] * on for row, on in zip(teacher_row, rows, strict=True)])
        output_MH, matrix, kind = self.rollout(batch), self.lm_head.weight, self.config.loss
        mix = (self.config.lk_weight, self.config.l1_weight)
        if scale_T is None:
            pairs = [
                fused.soft_loss(h, matrix, teacher_SU, row, w, kind, mix=mix)
                for h, row, w in zip(output_MH.split(anchors.count_K), source, weight, strict=True)
            ]
            loss_K, argmax = torch.stack([loss for loss, _ in pairs]), [best for _, best in pairs]
        else:
            loss_K, argmax = fused.soft_loss_depths(output_MH, matrix, teacher_SU, source, weight, scale_T, kind, mix)
        hits = [
            (self.target_ids(best) == batch.teacher_argmax_A[row]) & (on > 0)
            for best, row, on in zip(argmax, teacher_row, rows, strict=True)
        ]
        plain = anchors.weight_AK is None and anchors.emphasis_AK is None
        counts = None if plain else self._counts(batch)
        return Loss.per_depth(loss_K, weight, hits, rows, len(self.terms), counts)
