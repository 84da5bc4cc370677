"""The draft vocabulary: which U of the target's V tokens a head can propose (methods §4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstart.heads.errors import ConfigError

#: a size that a share decides is a multiple of it: engines pad vocabularies to 64 rows, and matrix kernels want them so
MULTIPLE = 64


def check_vocab_size(size: int | float) -> None:
    """Raises: ConfigError where `head.draft_vocab_size` is neither a whole number, 0 or more, nor a share in (0, 1)."""
    share = isinstance(size, float)
    if isinstance(size, bool) or (share and not 0 < size < 1) or (not share and size < 0):
        raise ConfigError(
            f"head.draft_vocab_size: found {size}, expected a whole number of tokens (0 = all of the target's), or a "
            "share of the target's choices above 0 and below 1, for example 0.99"
        )


def most_tokens(vocab_size: int) -> int:
    """The largest size that a share can lead to: the last multiple of MULTIPLE below V, or V where there is none."""
    return (vocab_size - 1) // MULTIPLE * MULTIPLE or vocab_size


def _by_count(count_V: Tensor, always: tuple[int, ...]) -> Tensor:
    """All ids, those of `always` first, then by falling count. Ties go to the lower id."""
    weight_V = count_V.to(torch.float64, copy=True)
    weight_V[list(always)] = float("inf")
    return torch.argsort(weight_V, descending=True, stable=True)


def size_for_share(count_V: Tensor, share: float, always: tuple[int, ...] = ()) -> int:
    """The smallest size, rounded up to a multiple of MULTIPLE, whose vocabulary holds `share` of what was counted.

    It is never above `most_tokens`. Args: as choose_draft_vocab.
    Raises: ConfigError where nothing was counted.
    """
    total = int(count_V.sum())
    if not total:
        raise ConfigError(
            f"head.draft_vocab_size: found the share {share}, and no supervised row to take it of: give a whole number"
        )
    held_V = count_V[_by_count(count_V, always)].to(torch.float64).cumsum(0)
    needed = math.ceil(share * total - 1e-6)  # a whole number of rows; the product of the two may end in …0001
    size = max(int((held_V < needed).sum()) + 1, len(set(always)))
    return min(-(-size // MULTIPLE) * MULTIPLE, most_tokens(count_V.shape[0]))


def choose_draft_vocab(count_V: Tensor, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The `size` most frequent tokens, ascending: int64 [U]. Ties go to the lower id.

    Args:
        count_V: how often each token is the right one on supervised rows.
        size: U ≤ V.
        always: ids that are kept whatever their count: stop tokens, without which no draft could end a turn.
    Raises: ConfigError when U is not in 1 … V, or too small for `always`.
    """
    if not 0 < size <= count_V.shape[0]:
        raise ConfigError(
            f"head.draft_vocab_size: found {size}, expected 1 … {count_V.shape[0]} (the target's vocabulary); "
            "set head.draft_vocab_size"
        )
    if size < len(set(always)):
        raise ConfigError(
            f"head.draft_vocab_size: found {size}, expected at least {len(set(always))}: so many stop tokens and "
            "special tokens of the chat template must be in it"
        )
    return _by_count(count_V, always)[:size].sort().values


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
