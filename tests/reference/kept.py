"""What a training pass keeps for its backward pass, counted by autograd's own hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.heads.batch import FeatureBatch


def kept_by_autograd(head: Any, batch: FeatureBatch) -> float:
    """Numbers of float32 that `head.rollout` keeps, but for parameters and features."""
    given = {x.untyped_storage().data_ptr() for x in (*head.parameters(), batch.hidden_RD, batch.streams_RkD)}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in given:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = head.train().rollout(batch)
    assert output.requires_grad
    return sum(x.untyped_storage().nbytes() / 4 for x in kept.values())
