"""Which documents share a pack: whole documents within a token budget, the same packs for any number of ranks.

Ranks work on packs of one window at the same time, and all wait for the slowest. So packs get equally many tokens,
which decide what the target's forward costs, and equally many supervised tokens, which decide what the head's costs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from headstart.heads.errors import ConfigError

#: documents among which packs are made
POOL = 1024


def make_packs(
    lengths: Sequence[int],
    budget: int,
    seed: int = 0,
    epoch: int = 0,
    pool: int = POOL,
    supervised: Sequence[int] | None = None,
) -> list[list[int]]:
    """Lists of document indices: every document exactly once, at most `budget` tokens per list.

    Documents are shuffled and cut into pools. Best-fit-decreasing tells how many packs a pool needs. Its documents are
    then spread evenly over that many packs, or over a few more where they do not fit. At the end the packs are
    shuffled. The result depends on the arguments alone.

    Args:
        lengths: tokens per document, each ≥ 1.
        supervised: supervised tokens per document, which are spread evenly as well; None spreads tokens only.
        budget: tokens per pack. A longer document gets a pack of its own.
    Raises: ConfigError naming the document.
    """
    if budget < 1 or pool < 1:
        raise ConfigError(f"data.pack_tokens: found budget {budget}, pool {pool}, expected numbers ≥ 1")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ConfigError(
                f"document {index}: found length {length}, expected ≥ 1: drop empty samples before packing"
            )
    if supervised is not None and len(supervised) != len(lengths):
        raise ConfigError(f"supervised: found counts of {len(supervised)} documents, expected {len(lengths)}")
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    packs: list[list[int]] = []
    for start in range(0, len(order), pool):
        documents = order[start : start + pool].tolist()
        tight = _best_fit_decreasing(documents, lengths, budget)
        # where packs are nearly full, spreading evenly may need a few more of them: 2 % at most
        counts = range(len(tight), len(tight) + len(tight) // 50 + 1)
        evenly = (_spread(documents, lengths, supervised, budget, count) for count in counts)
        packs += next((spread for spread in evenly if spread is not None), tight)
    return [packs[i] for i in generator.permutation(len(packs))]


def _best_fit_decreasing(documents: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for index in sorted(documents, key=lambda i: -lengths[i]):  # stable: equal lengths keep the shuffled order
        place = bisect_left(room, (lengths[index], 0))
        free, pack = room.pop(place) if place < len(room) else (budget, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(index)
        insort(room, (free - lengths[index], pack))
    return packs


def _spread(
    documents: list[int], lengths: Sequence[int], supervised: Sequence[int] | None, budget: int, count: int
) -> list[list[int]] | None:
    """The documents in `count` packs with about equal loads, or None if this rule finds no room.

    The longest documents come first. Each goes to the pack with room where it adds least to Σ_packs ‖load‖². A load is
    (tokens, supervised tokens), each divided by its mean over the documents. Documents longer than the budget have
    packs of their own.

    Shape legend: p packs, n documents, c columns of a load.
    """
    alone = [[i] for i in documents if lengths[i] > budget]
    rest = sorted((i for i in documents if lengths[i] <= budget), key=lambda i: -lengths[i])
    count -= len(alone)
    if not rest:
        return alone
    columns = [np.array([lengths[i] for i in rest], dtype=np.float64)]
    if supervised is not None:
        columns.append(np.array([supervised[i] for i in rest], dtype=np.float64))
    size_nc = np.stack([x / max(x.mean(), 1e-9) for x in columns], axis=1)
    load_pc, room_p = np.zeros((count, len(columns))), np.full(count, budget)
    packs: list[list[int]] = [[] for _ in range(count)]
    for index, size_c in zip(rest, size_nc, strict=True):
        added_p = np.where(room_p >= lengths[index], load_pc @ size_c, np.inf)
        pack = int(added_p.argmin())
        if not np.isfinite(added_p[pack]):
            return None
        packs[pack].append(index)
        load_pc[pack] += size_c
        room_p[pack] -= lengths[index]
    return alone + packs


def fill(packs: Sequence[Sequence[int]], lengths: Sequence[int], budget: int) -> float:
    """Share of the budget that holds tokens (1 = no waste)."""
    return sum(lengths[i] for pack in packs for i in pack) / (budget * len(packs)) if packs else 0.0
