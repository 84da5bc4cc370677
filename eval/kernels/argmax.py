"""The most likely token of each row, of equal logits the lower id, and how likely it is.

A row is cut into parts, to fill the card.

Shape legend: R rows, V vocabulary, P parts of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.sampling import FARTHEST, logit_of_best

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


def argmax_with_logit_eager(logits_RV: Tensor, ids_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(as argmax_eager; the logit of that token's probability, as logit_of_best, float32 [R])."""
    return argmax_eager(logits_RV, ids_V), logit_of_best(logits_RV).float()


def argmax_with_logit(logits: Tensor, ids_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As argmax_with_logit_eager, of [..., V], in as many launches as argmax."""
    if not wants_kernel(logits):
        return argmax_with_logit_eager(logits, ids_V)
    best_R, logit_R = argmax_with_logit_kernel(logits.reshape(-1, logits.shape[-1]), ids_V)
    return best_R.view(logits.shape[:-1]), logit_R.view(logits.shape[:-1])


def argmax_kernel(logits_RV: Tensor, ids_V: Tensor | None = None) -> Tensor:
    return _launch_argmax(logits_RV, ids_V, None)


def argmax_with_logit_kernel(logits_RV: Tensor, ids_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logit_R = torch.empty(len(logits_RV), dtype=torch.float32, device=logits_RV.device)
    return _launch_argmax(logits_RV, ids_V, logit_R), logit_R


def _launch_argmax(logits_RV: Tensor, ids_V: Tensor | None, logit_R: Tensor | None) -> Tensor:
    rows, size = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    parts = triton.cdiv(size, PART)
    value_RP = torch.empty((rows, parts), dtype=torch.float32, device=logits_RV.device)
    place_RP = torch.empty((rows, parts), dtype=torch.int32, device=logits_RV.device)
    # of each part, Σ exp(logit - its largest) without its largest; not written unless `logit_R` is wanted
    others_RP = value_RP if logit_R is None else torch.empty_like(value_RP)
    best_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        options = launch_options(logits_RV.device)
        block = min(PART, triton.next_power_of_2(size))
        launch(_parts_kernel, (parts, rows),
            logits_RV, value_RP, place_RP, others_RP, size, logits_RV.stride(0), PART=PART, BLOCK=block,
            LOGIT=logit_R is not None, num_warps=4, **options,
        )  # fmt: skip
        launch(_join_kernel, (rows,),
            value_RP, place_RP, others_RP, best_R if ids_V is None else ids_V, best_R,
            value_RP if logit_R is None else logit_R, parts, FARTHEST, IDS=ids_V is not None,
            BLOCK=triton.next_power_of_2(parts), LOGIT=logit_R is not None, num_warps=1, **options,
        )  # fmt: skip
    return best_R


if triton is not None:

    @triton.jit
    def _parts_kernel(
        logits, value, place, others, size, stride,
        PART: tl.constexpr, BLOCK: tl.constexpr, LOGIT: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
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
        at = tl.min(tl.where(logit == highest, column, size), 0)
        tl.store(place + spot, at)
        if LOGIT:
            # a part may hold nothing but -inf, which counts nothing
            base = tl.where(highest == float("-inf"), 0.0, highest)
            tl.store(others + spot, tl.sum(tl.where(inside & (column != at), tl.exp(logit - base), 0.0), 0))

    @triton.jit
    def _join_kernel(
        value, place, others, ids, best, logit, parts, farthest,
        IDS: tl.constexpr, BLOCK: tl.constexpr, LOGIT: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        part = tl.arange(0, BLOCK)
        inside = part < parts
        highest = tl.load(value + row * parts + part, mask=inside, other=float("-inf"))
        at = tl.load(place + row * parts + part, mask=inside, other=2147483647)
        top = tl.max(highest, 0)
        first = tl.min(tl.where(highest == top, at, 2147483647), 0).to(tl.int64)
        if LOGIT:
            finite = tl.abs(top) != float("inf")
            base = tl.where(finite, top, 0.0)
            # a part's largest stands beside its others, but for the row's
            counted = tl.load(others + row * parts + part, mask=inside, other=0.0) + tl.where(at == first, 0.0, 1.0)
            rest = tl.sum(tl.where(inside, tl.exp(highest - base) * counted, 0.0), 0)
            # no other token counts as one of almost no weight
            found = tl.minimum(tl.maximum(-tl.log(tl.maximum(rest, 1e-30)), -farthest), farthest)
            tl.store(logit + row, tl.where(finite, found, -farthest))
        if IDS:
            first = tl.load(ids + first)
        tl.store(best + row, first)
