"""The K output matrices, [V, D] each, of a head with one per depth: losses in training, logits in drafting.

Three kinds (`head.lm_head`): own, a trained matrix per depth that starts as a copy of the target's; shared, the
target's for all depths, frozen; lowrank, the target's plus a trained update up · down per depth, which starts at zero.

Training never holds the logits of all rows: a chunk of rows of one depth is turned into its loss and its gradient, and
is freed before the next (heads/losses/fused.py). No low-rank sum and no copy of the target's matrix is made.

Depths are counted from 0 here: depth d drafts x_{t+2+d}.
Shape legend: A rows of a depth, B rows of a decoding pass, D target hidden, V target vocabulary, r rank, K depths,
S rows of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_SIZE, Head, HeadConfig, Loss, counted_adds
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.gradients import AddsGradients
from headstart.heads.losses import fused
from headstart.heads.numerics import compute_dtype

LM_HEADS = ("own", "shared", "lowrank")
LOSSES = ("kl", "ce")


@dataclass
class OutputConfig(HeadConfig):
    """Fields of a head with one output matrix per depth."""

    limits: ClassVar[dict[str, int]] = {**HeadConfig.limits, "rank": MAX_SIZE}

    #: Output matrix: own (one per depth, V × D, started from the target's), shared (the target's, frozen) or lowrank
    #: (the target's plus a trained low-rank update per depth).
    lm_head: str = "own"
    #: Rank of the update under head.lm_head=lowrank.
    rank: int = 64
    #: What a head learns: kl (the target's distribution, for answers of the target itself) or ce (the tokens of the
    #: data).
    loss: str = "kl"

    @property
    def learns_text(self) -> tuple[str, str] | None:
        return ("head.loss=ce", "head.loss=kl") if self.loss == "ce" else None


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's logits of S rows, made once for the losses of all depths.

    Attributes:
        logits_SV: in the compute dtype; constants.
        logsumexp_S: of every row, float32, where a kernel needs it.
    """

    logits_SV: Tensor
    logsumexp_S: Tensor | None

    @classmethod
    def of(cls, teacher: Teacher, hidden_SD: Tensor, dtype: torch.dtype) -> TeacherRows:
        """Logits of post-norm hidden states [S, D], without a float32 tensor of their size."""
        with torch.no_grad():
            if teacher.plain:
                logits_SV = teacher.logits(hidden_SD, dtype=dtype)
            else:  # a scale or a soft-cap is applied in float32
                rows, vocab = hidden_SD.shape[0], teacher.weight_VD.shape[0]
                logits_SV = hidden_SD.new_empty(rows, vocab, dtype=dtype)
                size = fused.chunk_rows(max(rows, 1), vocab, hidden_SD.device)
                for into, part in zip(logits_SV.split(size), hidden_SD.split(size), strict=True):
                    into.copy_(teacher.logits(part, dtype=dtype))
            return cls(logits_SV, fused.teacher_logsumexp(logits_SV))


class OutputMatrices(Head, AddsGradients):
    """A head with one output matrix per depth. A family subclasses it, and gives the input x of each depth's matrix.

    The family's `__init__` calls `make_matrices` where the matrices belong in the order of its parameters. In the state
    dict they are `lm_heads.{d}.weight` (own), or `down.{d}.weight` and `up.{d}.weight` (lowrank); a shared one is not
    there. `Head.loss` is a call of `loss_over_depths`; a family with other terms calls `soft_loss` and `hard_loss`
    itself. Drafting calls `logits` or `depth_logits`.
    """

    config: OutputConfig

    def __init__(self, config: OutputConfig, dims: HeadDims):
        super().__init__(config, dims)
        for name, value, allowed in (("lm_head", config.lm_head, LM_HEADS), ("loss", config.loss, LOSSES)):
            if value not in allowed:
                raise ConfigError(f"head.{name}: found {value!r}, expected one of {list(allowed)}")

    def make_matrices(self) -> None:
        """Make the trained matrices. Updates of a low-rank one start at zero, own ones wait for `initialise`."""
        config, size, vocab = self.config, self.dims.hidden_size, self.dims.vocab_size
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(config.depth))
        elif config.lm_head == "lowrank":
            self.down = nn.ModuleList(nn.Linear(size, config.rank, bias=False) for _ in range(config.depth))
            self.up = nn.ModuleList(nn.Linear(config.rank, vocab, bias=False) for _ in range(config.depth))
            for up in self.up:
                nn.init.zeros_(up.weight)

    def bind(self, ends: TargetEnds) -> None:
        """As the base class's. Raises: ConfigError for a target with a bias or a soft-cap on its logits."""
        if (more := ends.teacher.more_than_matrix) is not None:
            raise ConfigError(
                f"head.type: {self.family} needs a target whose lm_head is a plain matrix, this one has {more}; "
                "use head.type=eagle3"
            )
        super().bind(ends)

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As the base class's. Own matrices start as copies of the target's."""
        super().initialise(ends, draft_ids_U)
        if self.config.lm_head == "own":
            with torch.no_grad():
                for lm_head in self.lm_heads:
                    lm_head.weight.copy_(self.target_weight())

    def target_weight(self) -> Tensor:
        """The target's output matrix [V, D], times the scale of its logits."""
        teacher = self.bound_ends().teacher
        return teacher.weight_VD if teacher.scale == 1.0 else teacher.weight_VD * teacher.scale

    def output_weight(self, d: int) -> Tensor:
        """The whole output matrix of depth d [V, D], for export. A low-rank one is the sum, in the target's dtype."""
        if self.config.lm_head == "own":
            return self.lm_heads[d].weight
        weight_VD = self.target_weight()
        if self.config.lm_head == "shared":
            return weight_VD
        return weight_VD + (self.up[d].weight @ self.down[d].weight).to(weight_VD.dtype)

    def logits(self, inputs: Sequence[Tensor]) -> Tensor:
        """Logits of all depths, [B, K, V]. Args: inputs: x_BD of each depth."""
        if self.config.lm_head == "own":
            return torch.stack([self.depth_logits(d, x_BD) for d, x_BD in enumerate(inputs)], dim=1)
        # one product with the target's matrix for all depths; low-rank updates are added to the logits
        logits_BKV = self._target_logits(torch.stack(list(inputs), dim=1))
        if self.config.lm_head == "lowrank":
            updates = [self._update_logits(d, x_BD) for d, x_BD in enumerate(inputs)]
            logits_BKV = logits_BKV + torch.stack(updates, dim=1).to(logits_BKV.dtype)
        return logits_BKV

    def depth_logits(self, d: int, x_BD: Tensor) -> Tensor:
        """Logits of depth d, [B, V], for a head that drafts depth after depth."""
        if self.config.lm_head == "own":
            weight_VD = self.lm_heads[d].weight
            return F.linear(x_BD.to(weight_VD.dtype), weight_VD)
        logits_BV = self._target_logits(x_BD)
        if self.config.lm_head == "lowrank":
            logits_BV = logits_BV + self._update_logits(d, x_BD).to(logits_BV.dtype)
        return logits_BV

    def loss_over_depths(
        self, batch: FeatureBatch, teacher: Teacher, input_of: Callable[[int, int], Tensor], scale_T: Tensor | None
    ) -> Loss:
        """The loss of a head with one term per depth, as `head.loss` says: against the teacher or the labels.

        Args:
            input_of: (d, n) → x_AD [n, D], the input of depth d's matrix for the first n anchors. It is called depth
                after depth, and its results are not held longer than their depth.
            teacher, scale_T: see `Head.loss`.
        """
        anchors, last = batch.anchors, batch.tokens_R.shape[0] - 1
        soft = None
        if self.config.loss == "kl":
            soft = TeacherRows.of(teacher, batch.teacher_hidden(), self.compute_dtype())
        losses, hits, weights = [], [], anchors.weights()
        for d, count in enumerate(anchors.count_K):
            teacher_row_A, weight_A = anchors.teacher_AK[:count, d], weights[d]
            if soft is not None:
                loss, argmax_A = self.soft_loss(d, input_of(d, count), soft, teacher_row_A, weight_A, scale_T)
            else:
                label_A = batch.tokens_R[(anchors.row_A[:count] + d + 2).clamp(max=last)]
                loss, argmax_A = self.hard_loss(d, input_of(d, count), label_A, weight_A, scale_T)
            losses.append(loss)
            hits.append((argmax_A == batch.teacher_argmax_A[teacher_row_A]) & (weight_A > 0))
        return Loss.per_depth(torch.stack(losses), weights, hits, weights, len(self.terms))

    def soft_loss(
        self,
        d: int,
        x_AD: Tensor,
        teacher: TeacherRows,
        teacher_row_A: Tensor,
        row_weight_A: Tensor,
        scale_T: Tensor | None = None,
        kind: str = "kl",
    ) -> tuple[Tensor, Tensor]:
        """Divergence of depth d's distribution from the teacher's, summed over weighted rows.

        Args:
            x_AD: input of the matrix, in the compute dtype. It may require a gradient.
            teacher_row_A: int64 [A], each row's row of the teacher.
            row_weight_A: float32 [A]; 0 leaves a row out (padding).
            scale_T: of `Head.loss`; term d of the loss must be this sum.
            kind: a name in losses.eager.SOFT_LOSSES.
        Returns: (loss sum, float32 scalar; argmax over V, int64 [A]).
        """
        x_AD, weight_VD, update = self._products(d, x_AD)
        return fused.soft_loss(
            x_AD, weight_VD, teacher.logits_SV, teacher_row_A, row_weight_A, kind, update,
            self._adds_scale(d, scale_T), teacher.logsumexp_S,
        )  # fmt: skip

    def hard_loss(
        self, d: int, x_AD: Tensor, label_A: Tensor, row_weight_A: Tensor, scale_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of depth d against token ids (int64 [A]). Other arguments and results as `soft_loss`'s."""
        x_AD, weight_VD, update = self._products(d, x_AD)
        return fused.hard_ce(x_AD, weight_VD, label_A, row_weight_A, update, self._adds_scale(d, scale_T))

    def copied_numbers(self) -> int:
        """As the base class's. Own matrices are copied one after the other."""
        once = (self.depth - 1) * self.dims.vocab_size * self.dims.hidden_size if self.config.lm_head == "own" else 0
        return super().copied_numbers() - once

    def output_numbers(self, anchors: float) -> float:
        """What the matrices add to `Head.kept_numbers`: one chunk of logits, and those of the teacher if there is one.

        Inputs and their gradients are the family's to count. Gradients of own matrices are not counted: captured steps
        keep none (heads/gradients.py).
        """
        taught = anchors * self.dims.vocab_size if self.config.loss == "kl" else 0
        return self.chunk_numbers(anchors) + taught

    def chunk_numbers(self, anchors: float) -> float:
        vocab = self.dims.vocab_size
        return fused.chunk_rows(max(int(anchors), 1), vocab) * vocab

    def output_multiply_adds(self) -> float:
        """Multiply-adds of one row at one depth: the average, as all depths cost the same."""
        if self.config.lm_head == "own":
            return counted_adds(self.output_weight(0))
        factors = (self.down[0], self.up[0]) if self.config.lm_head == "lowrank" else ()
        return self.dims.hidden_size * self.dims.vocab_size + sum(counted_adds(f.weight) for f in factors)

    def _target_logits(self, x: Tensor) -> Tensor:
        """x [..., D] → [..., V] by the target's matrix and scale."""
        teacher = self.bound_ends().teacher
        logits = F.linear(x.to(teacher.weight_VD.dtype), teacher.weight_VD)
        return logits if teacher.scale == 1.0 else logits * teacher.scale

    def _update_logits(self, d: int, x_BD: Tensor) -> Tensor:
        low: Tensor = self.down[d](x_BD)
        update: Tensor = self.up[d](low)
        return update

    def _products(self, d: int, x_AD: Tensor) -> tuple[Tensor, Tensor, fused.Update | None]:
        """(input, matrix, low-rank update) whose products add up to the logits of depth d.

        The scale of the target's logits is applied to the input, which is far smaller than matrix and logits.
        """
        if self.config.lm_head == "own":
            return x_AD, self.lm_heads[d].weight, None
        teacher = self.bound_ends().teacher
        scaled_AD = x_AD if teacher.scale == 1.0 else x_AD * teacher.scale
        update = (self.down[d](x_AD), self.up[d].weight) if self.config.lm_head == "lowrank" else None
        return scaled_AD, teacher.weight_VD, update

    def _adds_scale(self, d: int, scale_T: Tensor | None) -> Tensor | None:
        return scale_T[d] if self.adds_gradients and scale_T is not None else None

    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations: autocast's where it is on, else that of the head's first parameter."""
        return compute_dtype(next(self.parameters()))
