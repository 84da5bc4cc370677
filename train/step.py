"""One optimiser step's gradient: L = Σ_t weight_t · S_t / N_t over a window of packs and all ranks (methods §0).

Shape legend: T terms of the loss, M metrics, S sums that are logged (SumNames), P packs of the window over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headstart.heads.acceptance import walk
from headstart.heads.base import Head, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.heads.numerics import wide
from headstart.train.captured import CapturedPacks
from headstart.train.stream import Window, seed_pack


@dataclass(frozen=True)
class SumNames:
    """Names of the S numbers that training sums over packs and ranks besides the loss.

    They are each term's count, then every metric's numerator, then every metric's denominator. The head declares its
    terms and metrics, so the layout is known without running the head: a rank without a pack needs it.

    Example: terms ("1",), metrics ("acc_1", "walked_tau"), sums (9, 6, 30, 10, 12) → 9 positions carry a loss,
    acc_1 = 6 / 10, walked_tau = 30 / 12.
    """

    terms: tuple[str, ...]
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, head: Head, depths: int | None = None) -> SumNames:
        """Args: depths: of the packs' anchors; None = the depths that the head trains."""
        metrics = head.metrics(head.depth if depths is None else depths)
        return cls(tuple(term.name for term in head.terms), (*metrics, "walked_tau"))

    def __len__(self) -> int:
        return len(self.terms) + 2 * len(self.metrics)

    def counts(self, sums_S: Tensor) -> Tensor:
        """[T]: positions that carry each term's loss."""
        return sums_S[: len(self.terms)]

    def fractions(self, sums_S: Tensor) -> tuple[Tensor, Tensor]:
        """(numerator_M, denominator_M) of the metrics."""
        numerator_M, denominator_M = sums_S[len(self.terms) :].view(2, len(self.metrics))
        return numerator_M, denominator_M

    def ratios(self, sums_S: Tensor, prefix: str) -> dict[str, float]:
        """Logged name → value of every metric whose denominator is not 0. Args: sums_S: on the host."""
        parts = zip(self.metrics, *self.fractions(sums_S), strict=True)
        return {f"{prefix}/{name}": float(part / whole) for name, part, whole in parts if whole > 0}


class LossModule(nn.Module):
    """The head's loss as the forward pass of a module, which DDP and FSDP can wrap. It turns autocast on.

    A rank without a pack in this window calls `forward(None)`: a zero loss that still depends on every parameter,
    because the other ranks wait for this rank's gradients.

    Args:
        chain: length of the chains whose acceptance is walked; None = as many drafts as the anchors have depths.
    """

    def __init__(self, head: Head, teacher: Teacher, autocast: torch.dtype | None, chain: int | None = None):
        super().__init__()
        self.head, self._autocast = head, autocast
        self._teacher, self._chain = teacher, chain

    def forward(
        self, batch: FeatureBatch | None, scale_T: Tensor | None = None, touch: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(sum_T, sums_S), float32: the terms' sums, differentiable, and the other numbers in the order of SumNames.

        Args:
            scale_T: see Head.loss.
            touch: make the loss depend on every trainable parameter, with gradient zero. Ranks must agree on which
                gradients exist, and a term without positions would leave some out.
        """
        if batch is None:
            device = next(self.head.parameters()).device
            sum_T = torch.zeros(len(self.head.terms), device=device)
            sums_S = torch.zeros(len(SumNames.of(self.head)), device=device)
        else:
            with self.autocast():
                loss: Loss = self.head.loss(batch, self._teacher, scale_T)
            chain = len(batch.anchors.count_K) if self._chain is None else self._chain
            walked_2 = loss.count_T.new_zeros(2) if loss.run_A is None else walk(loss.run_A, batch, chain)
            parts = (loss.count_T, loss.numerator_M, walked_2[:1], loss.denominator_M, walked_2[1:])
            sum_T, sums_S = wide(loss.sum_T), wide(torch.cat(parts)).detach()
        if touch or (torch.is_grad_enabled() and not sum_T.requires_grad):  # not so: a pack without anchors
            nothing = sum(p.reshape(-1)[:0].sum() for p in self.head.parameters() if p.requires_grad)
            sum_T = sum_T + nothing
        return sum_T, sums_S

    def autocast(self) -> AbstractContextManager[object]:
        device = next(self.head.parameters()).device.type
        return nullcontext() if self._autocast is None else torch.autocast(device, self._autocast)


@dataclass
class WindowSums:
    """Sums over one rank's packs of a window. They are device tensors, so the host does not wait.

    Attributes:
        loss: float32 scalar, this rank's part of L.
        sums_S: float32 [S] (SumNames); a scalar 0 where the rank has no pack.
        supervised: rows of the packs that train at depth 1.
        trained: float32 scalar, 1 if any rank has a row that carries a loss, else 0.
        bad_P: float32 [P], 1 where a pack of this rank has a non-finite loss; 0 elsewhere and for other ranks' packs.
    """

    loss: Tensor
    sums_S: Tensor
    supervised: int
    trained: Tensor
    bad_P: Tensor


def window_counts(head: Head, batches: list[FeatureBatch], device: torch.device) -> Tensor:
    """This rank's share of N_t: float32 [T]."""
    counts_T = torch.zeros(len(head.terms), device=device)
    for batch in batches:
        counts_T += head.loss_counts(batch)
    return counts_T


def accumulate_window(
    module: nn.Module,
    window: Window,
    counts_T: Tensor,
    weights_T: Tensor,
    size: int,
    accumulation: int,
    seed: int,
    backward: Callable[[Tensor], None],
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
    captured: CapturedPacks | None = None,
) -> WindowSums:
    """Add the window's gradient to `.grad`. Afterwards every rank holds the gradient of L.

    Captured steps leave each rank with its own part of the gradient, which Parallel.sum_gradients then sums.

    Args:
        module: LossModule, possibly wrapped (sharing/parallel.py).
        window: this rank's packs with their features; there may be none.
        counts_T: N_t over the window and all ranks; a term without positions (0) contributes 0.
        weights_T: weight_t.
        size: number of ranks. The loss is multiplied by it, because DDP averages gradients and L is a sum.
        accumulation: P.
        seed: see stream.seed_pack.
        backward: runs the backward pass of a loss.
        no_sync: context of every pass but the last. In the last backward pass, ranks exchange their gradients.
        captured: replays the packs as CUDA graphs instead of running `module`.
    """
    batches = window.batches
    scale_T = weights_T / counts_T.clamp(min=1.0)
    trained = (counts_T.sum() > 0).float()
    supervised = sum(batch.anchors.count_K[0] for batch in batches)
    zero, bad_P = counts_T.new_zeros(()), counts_T.new_zeros(accumulation)
    sums = WindowSums(zero, zero, supervised, trained, bad_P)
    passes = len(batches)
    if captured is None and size > 1:
        passes = max(passes, 1)  # a rank without a pack adds a zero loss, because the others wait for its gradients
    for number, (pack, batch, place) in enumerate(zip(window.own, batches, window.places, strict=True)):
        last = number == passes - 1
        seed_pack(seed, pack)
        if captured is not None:
            sum_T, sums_S = captured.backward(batch, scale_T)
            loss = (sum_T * scale_T).sum()
        else:
            with nullcontext() if last else no_sync():
                sum_T, sums_S = module(batch, scale_T, touch=size > 1 and last)
                loss = (sum_T * scale_T).sum()
                backward(loss * size)
        sums.loss = sums.loss + loss.detach()
        sums.sums_S = sums.sums_S + sums_S
        sums.bad_P[place] = (~torch.isfinite(loss.detach())).float()
    if passes > len(batches):
        backward((module(None, touch=True)[0] * scale_T).sum())
    return sums


def autocast_dtype(mixed_precision: str, device: torch.device) -> torch.dtype | None:
    """Autocast dtype of `train.mixed_precision`; None = float32 throughout. Weights are float32 in both cases."""
    if mixed_precision == "auto":
        mixed_precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "no"
    return torch.bfloat16 if mixed_precision == "bf16" else None
