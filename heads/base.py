"""What a draft head is to the rest of the house: its inputs, its loss, its interface.

Shape legend (methods §0): B batch, T tokens, R rows of a pack, A anchors (supervised rows), D target hidden,
H head hidden, V target vocabulary, U draft vocabulary, K draft depths, k feature streams, N tree nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher


@dataclass
class HeadConfig:
    """Fields every family shares; each family's file subclasses this."""

    #: Family of the head; see below.
    type: str = "???"
    #: Draft depths trained (K).
    depth: int = 1
    #: Weight of the loss of depth d, as a power: depth_decay ** (d - 1).
    depth_decay: float = 1.0


@dataclass
class HeadLoss:
    """Sums per depth over one pack, to be normalised by global counts (methods §0).

    Attributes:
        loss_K: float32 [K], S_d, differentiable.
        count_K: float32 [K], positions that carry a loss at depth d (N_d's share; no subsampling).
        correct_K: float32 [K], teacher-forced hits: head argmax == target argmax. This and the next are weighted by
            importance where rows are subsampled.
        total_K: float32 [K], positions the accuracy is over (out-of-vocabulary ones count as misses).
        run_A: int64 [A], depths 1 … run that were hits one after the other: what a chain from that row gets accepted
            (acceptance.walk).
    """

    loss_K: Tensor
    count_K: Tensor
    correct_K: Tensor
    total_K: Tensor
    run_A: Tensor

    @classmethod
    def of(
        cls,
        loss_K: Tensor,
        weight: list[Tensor],
        hit: list[Tensor],
        rows: list[Tensor],
        count_K: Tensor | None = None,
    ) -> HeadLoss:
        """Sum what each depth's rows say.

        Args:
            weight: float, what a row counts for in the loss.
            hit: bool, False where a row is not active.
            rows: float, what a row counts for in the other sums (Anchors.weights).
            count_K: None = the sums of `weight`.
        """
        run = hit[0]
        run_A = run.to(torch.int64)
        for hits in hit[1:]:
            run = run[: hits.shape[0]] & hits
            run_A[: run.shape[0]] += run

        def total(x: list[Tensor]) -> Tensor:
            return torch.stack([r.sum(dtype=loss_K.dtype) for r in x])

        def weighted(x: list[Tensor]) -> Tensor:
            return total([flag * row for flag, row in zip(x, rows, strict=True)])

        return cls(loss_K, total(weight) if count_K is None else count_K, weighted(hit), total(rows), run_A)


class Head(nn.Module, ABC):
    """A draft head. Subclasses live one per file and are registered in `FAMILIES`."""

    family: ClassVar[str]

    def __init__(self, config: HeadConfig, dims: HeadDims):
        super().__init__()
        self.config, self.dims = config, dims

    @property
    def depth(self) -> int:
        """K, the depths that are trained."""
        return self.config.depth

    @property
    def longest_chain(self) -> int | None:
        """Most tokens a chain of its drafts can have, None = any number."""
        return self.depth

    @property
    def spec(self) -> FeatureSpec:
        """Which target features the head reads."""
        return FeatureSpec()

    @property
    def keep_K(self) -> tuple[float, ...] | None:
        """Fraction of the supervised rows of every depth that training runs, None = all."""
        return None

    def depth_weights(self) -> Tensor:
        """λ_d, float32 [K]."""
        return self.config.depth_decay ** torch.arange(self.depth, dtype=torch.float32)

    @abstractmethod
    def init_from_target(self, embed_VD: Tensor, teacher: Teacher, draft_ids_U: Tensor | None = None) -> None:
        """Bind the frozen ends of the target and initialise what starts from them."""

    @abstractmethod
    def depth_counts(self, batch: FeatureBatch) -> Tensor:
        """count_K of `loss` without running the head: float32 [K] (for the global normalisation)."""

    @abstractmethod
    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_K: Tensor | None = None) -> HeadLoss:
        """Per-depth loss sums over one pack. Gradients flow to trainable parameters only.

        Args:
            scale_K: float32 [K]. The caller's promise that what it differentiates is a multiple of
                `(loss_K * scale_K).sum()`: a head may form gradients with it. None = any combination of depths.
        """
