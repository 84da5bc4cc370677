"""The greedy walk over a block whose logits depend on the token before: one kernel for all steps, with its eager twin.

Step k chooses x_k = argmax(base_k + up · table[x_{k-1}]). Every program of the kernel owns a stretch of the vocabulary
for all steps. At the end of a step the programs wait for each other at a counter in memory, and read each other's best
logits. So no program may be kept from running: there are at most as many as the card has multiprocessors. Where a
kernel cannot wait like that, the same kernel is launched once per step.
Shape legend: B batch, K steps, r rank, U draft vocabulary, V target vocabulary, G programs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.kernels.argmax import argmax_eager
from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.linear import on_matrix_units
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.numerics import wide

#: rows of a launch; more take several
MAX_ROWS = 64
#: rows of `up` in a tile: for one row, on the ordinary arithmetic units, and for more on the matrix units
VECTOR_TILE, MATRIX_TILE = 128, 64


@dataclass(frozen=True)
class Walk:
    """Which tokens raise which logits.

    Attributes:
        table_Vr: a row per token of the target's vocabulary.
        up_Ur: a row per token that can be drafted, in the table's dtype.
        ids_U: int64, target id of each of them; None = all tokens can be drafted (U = V).
        counters: int32, programs that have finished each step, and at the end those that have left; 0 between launches.
    """

    table_Vr: Tensor
    up_Ur: Tensor
    ids_U: Tensor | None
    steps: int
    counters: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counters = torch.zeros(self.steps + 1, dtype=torch.int32, device=self.up_Ur.device)
        object.__setattr__(self, "counters", counters)


def walk_eager(base_KBU: Tensor, roots_B: Tensor, walk: Walk) -> Tensor:
    """Greedy drafts, target ids, int64 [B, K]; of equal logits the lower id. Args: base_KBU: logits without `up`."""
    previous_B, tokens = roots_B, []
    for base_BU in base_KBU:
        logits_BU = wide(base_BU) + wide(F.linear(walk.table_Vr[previous_B], walk.up_Ur))
        previous_B = argmax_eager(logits_BU, walk.ids_U)
        tokens.append(previous_B)
    return torch.stack(tokens, 1)


def walk(base_KBU: Tensor, roots_B: Tensor, walk: Walk) -> Tensor:
    """As walk_eager."""
    if not wants_kernel(base_KBU) or not on_matrix_units(walk.up_Ur.dtype):
        return walk_eager(base_KBU, roots_B, walk)
    programs = torch.cuda.get_device_properties(base_KBU.device).multi_processor_count
    return walk_kernel(base_KBU, roots_B, walk, programs)


def walk_kernel(base_KBU: Tensor, roots_B: Tensor, walk: Walk, programs: int, together: bool = True) -> Tensor:
    """As walk_eager, with sums in float32.

    Args:
        programs: G at most. With `together` all of them must be able to run at the same time.
        together: one launch for all steps. False: one launch per step, and one more.
    """
    steps, batch, size = base_KBU.shape
    if steps > walk.steps:
        raise ValueError(f"found {steps} steps, expected at most {walk.steps}")
    tokens_BK = torch.empty((batch, steps), dtype=torch.int64, device=base_KBU.device)
    for first in range(0, batch, MAX_ROWS):
        rows = slice(first, first + MAX_ROWS)
        _launch_walk(base_KBU[:, rows], roots_B[rows], walk, tokens_BK[rows], programs, together)
    return tokens_BK


def _launch_walk(
    base_KBU: Tensor, roots_B: Tensor, walk: Walk, tokens_BK: Tensor, programs: int, together: bool
) -> None:
    steps, batch, size = base_KBU.shape
    rank = walk.up_Ur.shape[1]
    base_KBU = base_KBU if base_KBU.stride(2) == 1 else base_KBU.contiguous()
    tile = VECTOR_TILE if batch == 1 else MATRIX_TILE
    tiles = triton.cdiv(size, tile)
    stretch = triton.cdiv(tiles, programs) * tile
    parts = triton.cdiv(size, stretch)
    value_KBG = torch.empty((steps, batch, parts), dtype=torch.float32, device=base_KBU.device)
    place_KBG = torch.empty((steps, batch, parts), dtype=torch.int32, device=base_KBU.device)
    options: dict[str, Any] = {
        "RANK": rank, "BR": max(16, triton.next_power_of_2(rank)), "BU": tile,
        "BB": 1 if batch == 1 else max(16, triton.next_power_of_2(batch)), "BG": triton.next_power_of_2(parts),
        "IDS": walk.ids_U is not None, "num_warps": 4 if 1 < batch <= 16 else 8, **launch_options(base_KBU.device),
    }  # fmt: skip

    def run(grid: int, begin: int, end: int, **flags: bool) -> None:
        launch(_walk_kernel, (grid,),
            base_KBU, walk.up_Ur, walk.table_Vr, roots_B if walk.ids_U is None else walk.ids_U, roots_B, value_KBG,
            place_KBG, tokens_BK, walk.counters, size, batch, steps, begin, end, parts, stretch, base_KBU.stride(0),
            base_KBU.stride(1), **flags, **options,
        )  # fmt: skip

    if together:
        run(parts, 0, steps, TOGETHER=True, LAST=True)
        return
    for step in range(steps):
        run(parts, step, step + 1, TOGETHER=False, LAST=False)
    run(1, steps, steps, TOGETHER=False, LAST=True)


if triton is not None:

    @triton.jit
    def _winner(
        value, place, ids, step, row, real, batch, parts, BG: tl.constexpr, BB: tl.constexpr, IDS: tl.constexpr
    ):
        """int64 [BB]: target ids of the best tokens of a step, of equal ones the lowest."""
        part = tl.arange(0, BG)[None, :]
        there = (part < parts) & real[:, None]
        spot = (step * batch + row)[:, None] * parts + part
        # the other programs' stores: not from this multiprocessor's own cache
        logit = tl.load(value + spot, mask=there, other=float("-inf"), cache_modifier=".cg")
        at = tl.load(place + spot, mask=there, other=2147483647, cache_modifier=".cg")
        first = tl.min(tl.where(logit == tl.max(logit, 1)[:, None], at, 2147483647), 1)
        if IDS:
            return tl.load(ids + first, mask=real, other=0)
        return first.to(tl.int64)

    @triton.jit(do_not_specialize=["batch", "steps", "begin", "end", "parts"])
    def _walk_kernel(
        base, up, table, ids, roots, value, place, tokens, counters,
        size, batch, steps, begin, end, parts, stretch, stride_k, stride_b,
        RANK: tl.constexpr, BR: tl.constexpr, BU: tl.constexpr, BB: tl.constexpr, BG: tl.constexpr, IDS: tl.constexpr,
        TOGETHER: tl.constexpr, LAST: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Steps begin … end - 1 over one stretch of the vocabulary. LAST: the last step's token is written as well."""
        program = tl.program_id(0)
        row = tl.arange(0, BB)
        real = row < batch
        channel = tl.arange(0, BR)[None, :]
        low = program * stretch
        high = tl.minimum(low + stretch, size)
        await_previous(OVERLAP)
        for step in range(begin, end):
            if step == 0:
                token = tl.load(roots + row, mask=real, other=0)
            else:
                token = _winner(value, place, ids, step - 1, row, real, batch, parts, BG, BB, IDS)
                if program == 0:
                    tl.store(tokens + row * steps + step - 1, token, mask=real)
            e = tl.load(
                table + token[:, None] * RANK + channel, mask=real[:, None] & (channel < RANK), other=0.0
            )  # fmt: skip
            ahead = (tl.zeros((BB,), tl.int64) + step) * stride_k + row * stride_b
            best = tl.full((BB,), float("-inf"), tl.float32)
            at = tl.full((BB,), 2147483647, tl.int32)
            for first in range(low, high, BU):
                unit = (first + tl.arange(0, BU))[:, None]
                there = unit < high
                weight = tl.load(up + unit.to(tl.int64) * RANK + channel, mask=there & (channel < RANK), other=0.0)
                inside = there & real[None, :]
                logit = tl.load(base + ahead[None, :] + unit, mask=inside, other=0.0).to(tl.float32)
                if BB == 1:
                    logit += tl.sum(weight.to(tl.float32) * e.to(tl.float32), 1)[:, None]
                else:
                    logit += tl.dot(weight, tl.trans(e), input_precision="ieee")
                # as argmax: what is not a number counts as largest
                logit = tl.where(logit == logit, logit, float("inf"))
                logit = tl.where(inside, logit, float("-inf"))
                highest = tl.max(logit, 0)
                lowest = tl.min(tl.where(there & (logit == highest[None, :]), unit, 2147483647), 0)
                # of equal logits the first one stays; the first tile always counts
                better = (highest > best) | (first == low)
                at = tl.where(better, lowest, at)
                best = tl.where(better, highest, best)
            spot = (step * batch + row) * parts + program
            tl.store(value + spot, best, mask=real)
            tl.store(place + spot, at, mask=real)
            if TOGETHER:
                tl.debug_barrier()
                tl.atomic_add(counters + step, 1, sem="acq_rel")
                while tl.atomic_add(counters + step, 0, sem="acquire") < parts:
                    pass
                tl.debug_barrier()
        if LAST:
            if program == 0:
                token = _winner(value, place, ids, steps - 1, row, real, batch, parts, BG, BB, IDS)
                tl.store(tokens + row * steps + steps - 1, token, mask=real)
        if TOGETHER:
            # the last to leave sets the counters back, as nobody waits at them any more
            if tl.atomic_add(counters + steps, 1, sem="acq_rel") == parts - 1:
                for step in range(0, steps + 1):
                    tl.store(counters + step, 0)
