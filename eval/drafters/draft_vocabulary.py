"""From the target's vocabulary to the draft's and back.

Shape legend: B batch, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from torch import Tensor


def in_draft_vocabulary(seen_BV: Tensor | None, ids_U: Tensor | None) -> Tensor | None:
    """Flags of the target's tokens → flags of the draft's, [B, U]. Args: ids_U: see Head.draft_ids_U."""
    return seen_BV if seen_BV is None or ids_U is None else seen_BV[:, ids_U]


def in_target_vocabulary(q_BU: Tensor, ids_U: Tensor | None, vocab: int) -> Tensor:
    """A distribution over the draft's tokens → over the target's, [..., V]: what cannot be drafted has 0."""
    if ids_U is None:
        return q_BU
    return q_BU.new_zeros((*q_BU.shape[:-1], vocab)).index_copy_(-1, ids_U, q_BU)
