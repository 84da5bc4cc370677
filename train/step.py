"""One optimiser step's gradient: L = Σ_d λ_d · S_d / N_d over a window of packs and all ranks (methods §0).

Shape legend: K depths, P packs of the window over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headstart.heads.acceptance import walk
from headstart.heads.base import Head, HeadLoss
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.heads.numerics import wide
from headstart.train.captured import CapturedPacks
from headstart.train.stream import Pack, seed_pack


class LossModule(nn.Module):
    """The head's loss as a forward pass, so that DDP and friends see it; autocast happens in here.

    Args:
        chain: drafts of the chain whose acceptance is walked; None = as many as the batch's anchors have depths.

    `forward(None)` is the part of a rank that has no pack left in this window: a zero loss that still reaches every
    parameter, because the other ranks wait for this one's gradients.
    """

    def __init__(self, head: Head, teacher: Teacher, autocast: torch.dtype | None, chain: int | None = None):
        super().__init__()
        self.head, self._autocast = head, autocast
        self._teacher, self._chain = teacher, chain

    def forward(
        self, batch: FeatureBatch | None, scale_K: Tensor | None = None, touch: bool = False
    ) -> tuple[Tensor, ...]:
        """(loss_K, count_K, correct_K, total_K, walked_2), float32; see HeadLoss and acceptance.walk.

        Args:
            scale_K: see Head.loss.
            touch: connect every trainable parameter to the loss with gradient zero (a depth without positions leaves
                some out, and ranks must agree on which gradients exist).
        """
        if batch is None:
            device = next(self.head.parameters()).device
            parts = (*(torch.zeros(self.head.depth, device=device) for _ in range(4)), torch.zeros(2, device=device))
        else:
            with self.autocast():
                loss: HeadLoss = self.head.loss(batch, self._teacher, scale_K)
            parts = tuple(wide(part) for part in (loss.loss_K, loss.count_K, loss.correct_K, loss.total_K))
            chain = len(batch.anchors.count_K) if self._chain is None else self._chain
            parts = (*parts, walk(loss.run_A, batch, chain))
        if touch or (torch.is_grad_enabled() and not parts[0].requires_grad):  # the latter: a pack without anchors
            nothing = sum(p.reshape(-1)[:0].sum() for p in self.head.parameters() if p.requires_grad)
            parts = (parts[0] + nothing, *parts[1:])
        return parts

    def autocast(self) -> AbstractContextManager[object]:
        device = next(self.head.parameters()).device.type
        return nullcontext() if self._autocast is None else torch.autocast(device, self._autocast)


@dataclass
class WindowSums:
    """What one rank learnt from its packs of a window (device tensors, nothing waited for).

    Attributes:
        loss: float32 scalar, this rank's part of L.
        count_K, correct_K, total_K: float32 [K], sums of HeadLoss over the rank's packs.
        walked_2: float32 [2], tokens and cycles of acceptance.walk.
        trained: float32 scalar, 1 where any rank had a row that carries a loss.
        bad_P: float32 [P], 1 where a pack of this rank has a non-finite loss; other ranks' packs stay 0.
    """

    loss: Tensor
    count_K: Tensor
    correct_K: Tensor
    total_K: Tensor
    walked_2: Tensor
    trained: Tensor
    bad_P: Tensor


def window_counts(head: Head, batches: list[FeatureBatch], device: torch.device) -> Tensor:
    """This rank's share of N_d: float32 [K]."""
    counts_K = torch.zeros(head.depth, device=device)
    for batch in batches:
        counts_K += head.depth_counts(batch)
    return counts_K


def accumulate_window(
    module: nn.Module,
    packs: list[Pack],
    batches: list[FeatureBatch],
    places: list[int],
    counts_K: Tensor,
    weights_K: Tensor,
    size: int,
    accumulation: int,
    seed: int,
    backward: Callable[[Tensor], None],
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
    captured: CapturedPacks | None = None,
    rounds: int | None = None,
) -> WindowSums:
    """Add the window's gradient to `.grad`; after it, every rank holds the gradient of L.

    Captured steps leave each rank with its own part, which Parallel.sum_gradients sums.

    Args:
        module: LossModule, possibly wrapped (sharing/parallel.py).
        packs, batches, places: this rank's packs, their features, their places 0 … P-1 in the window; may be empty.
        counts_K: N_d over the window and all ranks; a depth that nobody supervises (0) contributes 0.
        weights_K: λ_d.
        size: ranks; the loss is multiplied by it because DDP averages gradients where L is a sum.
        accumulation: P.
        seed: see stream.seed_pack.
        no_sync: open around every pass but the last, whose backward shares the gradients.
        captured: replays the packs as CUDA graphs instead of running `module`.
        rounds: passes every rank makes at least (None: 1 with several ranks); a rank with fewer packs adds zero losses.
    """
    scale_K = weights_K / counts_K.clamp(min=1.0)
    zero_K = torch.zeros_like(counts_K)
    trained = (counts_K.sum() > 0).float()
    zero, zero_2, bad_P = counts_K.new_zeros(()), counts_K.new_zeros(2), counts_K.new_zeros(accumulation)
    sums = WindowSums(zero, zero_K, zero_K, zero_K, zero_2, trained, bad_P)
    passes = len(batches)
    if captured is None:
        passes = max(passes, (1 if size > 1 else 0) if rounds is None else rounds)
    every = (rounds or 0) > 1  # ranks must then agree at every pass on which gradients exist
    for number, (pack, batch, place) in enumerate(zip(packs, batches, places, strict=True)):
        last = number == passes - 1
        seed_pack(seed, pack)
        if captured is not None:
            loss_K, count_K, correct_K, total_K, walked_2 = captured.backward(batch, scale_K)
            loss = (loss_K * scale_K).sum()
        else:
            with nullcontext() if last else no_sync():
                found = module(batch, scale_K, touch=size > 1 and (last or every))
                loss_K, count_K, correct_K, total_K, walked_2 = found
                loss = (loss_K * scale_K).sum()
                backward(loss * size)
        sums.loss = sums.loss + loss.detach()
        sums.count_K = sums.count_K + count_K.detach()
        sums.correct_K = sums.correct_K + correct_K.detach()
        sums.total_K = sums.total_K + total_K.detach()
        sums.walked_2 = sums.walked_2 + walked_2
        sums.bad_P[place] = (~torch.isfinite(loss.detach())).float()
    for number in range(len(batches), passes):
        with nullcontext() if number == passes - 1 else no_sync():
            backward((module(None, touch=True)[0] * scale_K).sum())
    return sums


def autocast_dtype(mixed_precision: str, device: torch.device) -> torch.dtype | None:
    """Autocast dtype of `train.mixed_precision`, None = float32 throughout. Master weights are float32 either way."""
    if mixed_precision == "auto":
        mixed_precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "no"
    return torch.bfloat16 if mixed_precision == "bf16" else None
