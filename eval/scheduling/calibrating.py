"""Keeps a draft's logits calibrated while it decodes: two numbers for each level, p = σ(scale · l + bias).

The host fits them from what the target accepted, and copies them to the device between two cycles. So they are older
than the drafts that they judge, which keeps decoding lossless.
Shape legend: B rows, N nodes, K levels.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.scheduling.logistic import Logistic, start, update

Floats = NDArray[np.float32]
#: rows that are learned from between two fits, at first and after so many fits
FIT_SOON, FIT_LATER, SOON = 64, 1024, 8
#: how much of its weight the past keeps at a fit
KEEP = 0.9
#: nodes that count as said and as accepted before any was
PRIOR = 1.0
#: largest step of a bias at a fit of `LevelShares`, and the share of the way that it goes
LARGEST_STEP, PACE = 1.0, 0.7


class Calibrating(Protocol):
    """Attributes: scale_K, bias_K: float32, on the host."""

    scale_K: Tensor
    bias_K: Tensor

    def learn(
        self, said: Floats, active_B: NDArray[np.bool_], accepted_B: NDArray[np.int64], kept_BN: NDArray[np.bool_]
    ) -> bool:
        """What came of a cycle. Returns: whether the numbers changed.

        Args:
            said: [2 or 3, B, N], see ThroughputScheduler.said.
            accepted_B: accepted drafts, those behind a stop token too. kept_BN: nodes that were verified.
        """
        ...


class ChainLogistic:
    """The online logistic of logistic.py. Args: slope, bias: where it begins."""

    def __init__(self, levels: int, slope: float, bias: float):
        begin = start(levels)
        self.state = Logistic(torch.tensor(slope), torch.full((levels,), bias), begin.precision)
        self.scale_K, self.bias_K = torch.full((levels,), slope), torch.full((levels,), bias)
        self._rows = self._fits = 0
        self._waiting: list[tuple[Floats, NDArray[np.int64], NDArray[np.int64]]] = []

    def learn(
        self, said: Floats, active_B: NDArray[np.bool_], accepted_B: NDArray[np.int64], kept_BN: NDArray[np.bool_]
    ) -> bool:
        judged_B = np.where(active_B, kept_BN.sum(1), 0)
        logit_BK = np.zeros((len(active_B), len(self.bias_K)), np.float32)
        logit_BK[:, : said.shape[2]] = said[0]
        self._waiting.append((logit_BK, np.where(active_B, accepted_B, 0), judged_B))
        self._rows += int(active_B.sum())
        if self._rows < (FIT_SOON if self._fits < SOON else FIT_LATER):
            return False
        self._rows, self._fits = 0, self._fits + 1
        parts = zip(*self._waiting, strict=True)
        logits, accepted, judged = (torch.from_numpy(np.concatenate(part)) for part in parts)
        self._waiting.clear()
        self.state = update(self.state, logits, accepted, judged, keep=KEEP)
        self.scale_K, self.bias_K = self.state.slope.expand_as(self.state.bias_K), self.state.bias_K
        return True


class LevelShares:
    """For trees: moves each level's bias until as many of its nodes are accepted as their probabilities say.

    One level's accepted nodes tell nothing of which node it was, so the scale stays 1.
    """

    def __init__(self, levels: int):
        self.scale_K, self.bias_K = torch.ones(levels), torch.zeros(levels)
        self.said_K, self.was_K = np.zeros(levels), np.zeros(levels)
        self._rows = self._fits = 0

    def learn(
        self, said: Floats, active_B: NDArray[np.bool_], accepted_B: NDArray[np.int64], kept_BN: NDArray[np.bool_]
    ) -> bool:
        level_K = np.arange(1, len(self.bias_K) + 1)
        reach_BN = np.where(kept_BN & active_B[:, None], np.exp(said[1]), 0.0)
        depth_BN = said[2].astype(np.int64).clip(0, len(level_K))
        self.said_K += np.bincount(depth_BN.ravel(), reach_BN.ravel(), len(level_K) + 1)[1:]
        self.was_K += (accepted_B[active_B, None] >= level_K).sum(0)
        self._rows += int(active_B.sum())
        if self._rows < (FIT_SOON if self._fits < SOON else FIT_LATER):
            return False
        self._rows, self._fits = 0, self._fits + 1
        # given that the level above was accepted: what was, over what was said. A level that nobody saw stays as it is
        above_K = np.append(1.0, (self.was_K + PRIOR) / (self.said_K + PRIOR))[:-1]
        share_K = np.log((self.was_K + PRIOR) / (self.said_K * above_K + PRIOR))
        step_K = share_K.clip(-LARGEST_STEP, LARGEST_STEP) * PACE
        self.bias_K = self.bias_K + torch.from_numpy(step_K.astype(np.float32))
        # what was said before the step would now be said otherwise
        self.said_K = KEEP * self.said_K * np.exp(np.cumsum(step_K))
        self.was_K = KEEP * self.was_K
        return True
