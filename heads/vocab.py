"""The draft vocabulary: which U of the target's V tokens a head can propose (methods §4)."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.errors import ConfigError


def choose_draft_vocab(count_V: Tensor, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The `size` most frequent tokens, ascending: int64 [U]. Ties go to the lower id.

    Args:
        count_V: occurrences of each target token among supervised tokens.
        size: U ≤ V.
        always: ids that are kept whatever their count: stop tokens, without which no draft could end a turn.
    Raises: ConfigError when U is not in 1 … V.
    """
    if not 0 < size <= count_V.shape[0]:
        raise ConfigError(
            f"head.draft_vocab_size: found {size}, expected 1 … {count_V.shape[0]} (the target's vocabulary); "
            "set head.draft_vocab_size"
        )
    weight_V = count_V.to(torch.float64, copy=True)
    weight_V[list(always)] = float("inf")
    order = torch.argsort(weight_V, descending=True, stable=True)
    return order[:size].sort().values


def offsets(draft_ids_U: Tensor) -> Tensor:
    """`d2t`: int64 [U], target id − draft id, as serving engines read it."""
    return draft_ids_U - torch.arange(draft_ids_U.shape[0], device=draft_ids_U.device)


def membership(draft_ids_U: Tensor, vocab_size: int) -> Tensor:
    """`t2d`: bool [V], whether a target token can be drafted."""
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids_U.device)
    return inside.index_fill_(0, draft_ids_U, True)


def from_offsets(d2t_U: Tensor) -> Tensor:
    """Inverse of `offsets`: the draft ids, int64 [U]."""
    return d2t_U.to(torch.int64) + torch.arange(d2t_U.shape[0], device=d2t_U.device)


def is_draft_vocab(ids_U: Tensor, vocab_size: int) -> bool:
    """Whether ids form a draft vocabulary: integers from 0 to V - 1, ascending, each once."""
    if ids_U.dtype not in (torch.int64, torch.int32) or ids_U.dim() != 1 or not len(ids_U):
        return False
    ascending = bool((ids_U[1:] > ids_U[:-1]).all())
    return ascending and int(ids_U[0]) >= 0 and int(ids_U[-1]) < vocab_size


def coverage(count_V: Tensor, draft_ids_U: Tensor) -> float:
    """Share of supervised tokens that the draft vocabulary holds."""
    total = float(count_V.sum())
    return float(count_V[draft_ids_U].sum()) / total if total else 0.0
