"""Which documents share a pack: whole documents, a token budget, one plan per (seed, epoch) whatever the world size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from headstart.heads.errors import ConfigError


def plan_packs(
    lengths: Sequence[int],
    budget: int,
    seed: int = 0,
    epoch: int = 0,
    window: int = 1024,
    too_long: str = "own_pack",
) -> list[list[int]]:
    """Lists of document indices: every document exactly once, at most `budget` tokens per list.

    Documents are shuffled, cut into windows of `window`, and packed best-fit-decreasing inside each; the packs are
    then shuffled. Deterministic in (lengths, budget, seed, epoch, window).

    Args:
        lengths: tokens per document, each ≥ 1.
        budget: tokens per pack.
        too_long: "own_pack" gives a document longer than the budget a pack of its own; "refuse" raises.
    Raises: ConfigError naming the document.
    """
    if budget < 1 or window < 1:
        raise ConfigError(f"data.pack_tokens: found budget {budget}, window {window}, expected numbers ≥ 1")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ConfigError(
                f"document {index}: found length {length}, expected ≥ 1: drop empty samples before packing"
            )
        if length > budget and too_long == "refuse":
            raise ConfigError(
                f"document {index}: found {length} tokens, expected at most data.pack_tokens={budget}: "
                "raise data.pack_tokens or lower data.max_length"
            )
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    packs: list[list[int]] = []
    for start in range(0, len(order), window):
        packs += _best_fit_decreasing(order[start : start + window].tolist(), lengths, budget)
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


def fill(packs: Sequence[Sequence[int]], lengths: Sequence[int], budget: int) -> float:
    """Share of the budget that holds tokens (1 = no waste)."""
    return sum(lengths[i] for pack in packs for i in pack) / (budget * len(packs)) if packs else 0.0
