"""Rows of a running batch that ended get other contexts, between two cycles."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.decoding.loop import Loop


@torch.inference_mode()
def admit_rows(
    loop: Loop,
    rows: list[int],
    contexts: list[list[int]],
    limits: list[int],
    stops: list[set[int]],
    seeds_n: Tensor | None = None,
    places: int = 1,
) -> list[int]:
    """Give the places of rows that ended to other contexts.

    They start in a batch of their own, whose states then become the rows'. Tensors of `loop.state` are replaced by new
    ones, so that nothing that holds the old ones changes.

    Args:
        seeds_n: int64, the rows' seeds, where rows draw by seeds.
        places: rows of that batch, 1 with a drafter. Fewer contexts leave some idle: another batch size would need
            other graphs.
    Returns: their first tokens, for which the host waits.
    """
    aside, count = loop.aside(places), len(rows)
    idle = places - count
    aside.seeds_B = seeds_n if seeds_n is None or not idle else torch.cat([seeds_n, seeds_n.new_zeros(idle)])
    filled = [*contexts, *[contexts[0][:1]] * idle], [*limits, *[1] * idle], [*stops, *[set[int]()] * idle]
    aside.start(*filled, loop.stop_BS.shape[1])
    longest = max(map(len, contexts))
    loop.engine.take_rows(rows, aside.engine, longest)
    if loop.drafter is not None and aside.drafter is not None:
        (row,) = rows
        loop.drafter.take_row(row, aside.drafter, longest)
    place = slice(rows[0], rows[0] + 1) if count == 1 else torch.tensor(rows, device=loop.engine.device)
    for (owner, name), (giver, given) in zip(loop.row_state, aside.row_state, strict=True):
        whole = getattr(owner, name).clone()
        whole[place] = getattr(giver, given)[:count]
        setattr(owner, name, whole)
    loop.longest = max(loop.longest, longest)
    for row in rows:
        loop.scheduler.admitted(row)
    first: list[int] = aside.roots_B[:count].tolist()
    return first
