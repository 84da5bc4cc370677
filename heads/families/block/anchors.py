"""Which anchors a step trains: a random part of the supervised rows, drawn anew at every step.

Shape legend: A anchors.
"""

from __future__ import annotations

import math

import torch

from headstart.heads.batch import FeatureBatch
from headstart.heads.transfer import to_device


def drawn_count(supervised: int, rows: int, share: float) -> int:
    """Anchors of one step: `share` of the pack's rows, at most all supervised ones.

    >>> drawn_count(5000, 8192, 0.25), drawn_count(100, 8192, 0.25)
    (2048, 100)
    """
    return min(supervised, math.ceil(share * rows))


def draw_anchors(batch: FeatureBatch, share: float, seed: int) -> FeatureBatch:
    """The pack with `drawn_count` of its anchors, drawn uniformly without replacement.

    The draw depends on the seed and the pack's numbers of rows and anchors alone. The host does not wait for the
    device. A pack with few supervised rows keeps all of them and counts as drawn nevertheless: captured steps need the
    same tensors of every pack. With a share of 1, nothing is drawn.
    """
    if share == 1:
        return batch
    supervised = len(batch.anchors)
    count = drawn_count(supervised, sum(batch.doc_lengths), share)
    drawn = torch.randperm(supervised, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    return batch.drawn(to_device(drawn, batch.tokens_R.device, non_blocking=True))
