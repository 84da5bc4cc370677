"""The most likely token of each row, of equal logits the lower id. A row is cut into parts, to fill the card.

Shape legend: R rows, V vocabulary, P parts of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.heads.kernels.device import wants_kernel

#: logits of a part
PART = 4096


def argmax_eager(logits_RV: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """int64 [R]: the first largest; NaN counts as largest. Args: ids_V: int64, id of each column (None: its index)."""
    best_R = logits_RV.argmax(-1)
    return best_R if ids_V is None else ids_V[best_R]


def argmax(logits: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """As argmax_eager, of [..., V]."""
    if not wants_kernel(logits):
        return argmax_eager(logits, ids_V)
    return argmax_kernel(logits.reshape(-1, logits.shape[-1]), ids_V).view(logits.shape[:-1])


def argmax_kernel(logits_RV: Tensor, ids_V: Tensor | None = None) -> Tensor:
    rows, size = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    parts = triton.cdiv(size, PART)
    value_RP = torch.empty((rows, parts), dtype=torch.float32, device=logits_RV.device)
    place_RP = torch.empty((rows, parts), dtype=torch.int32, device=logits_RV.device)
    best_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        options = launch_options(logits_RV.device)
        block = min(PART, triton.next_power_of_2(size))
        launch(_parts_kernel, (parts, rows),
            logits_RV, value_RP, place_RP, size, logits_RV.stride(0), PART=PART, BLOCK=block, num_warps=4, **options,
        )  # fmt: skip
        launch(_join_kernel, (rows,),
            value_RP, place_RP, best_R if ids_V is None else ids_V, best_R, parts, IDS=ids_V is not None,
            BLOCK=triton.next_power_of_2(parts), num_warps=1, **options,
        )  # fmt: skip
    return best_R


if triton is not None:

    @triton.jit
    def _parts_kernel(
        logits, value, place, size, stride, PART: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
    ):
        await_previous(OVERLAP)
        part = tl.program_id(0)
        row = tl.program_id(1).to(tl.int64)
        column = part * PART + tl.arange(0, BLOCK)
        inside = column < size
        logit = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("inf"))
        highest = tl.max(logit, 0)
        spot = row * tl.num_programs(0) + part
        tl.store(value + spot, highest)
        # columns beyond the row stand last, so that they lose every tie
        tl.store(place + spot, tl.min(tl.where(logit == highest, column, size), 0))

    @triton.jit
    def _join_kernel(value, place, ids, best, parts, IDS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        part = tl.arange(0, BLOCK)
        inside = part < parts
        highest = tl.load(value + row * parts + part, mask=inside, other=float("-inf"))
        at = tl.load(place + row * parts + part, mask=inside, other=2147483647)
        first = tl.min(tl.where(highest == tl.max(highest, 0), at, 2147483647), 0).to(tl.int64)
        if IDS:
            first = tl.load(ids + first)
        tl.store(best + row, first)
