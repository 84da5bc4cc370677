"""Triton kernels for the attention of drafted blocks (block_attention.py): forward, and the gradients.

Query rows of one key head are numbered (block, slot, query head of the key head), so that those of a block are
neighbours. A tile of them sees the context rows from the start of its first block to the stop of its last one, and the
slots of its own blocks. Blocks ascend by row, so a tile of keys is seen by one contiguous range of query rows.

Softmax and log-sum-exp are in powers of two. No tensor has rows × rows numbers.

Shape legend: R rows of the pack, A blocks, B slots of a block, M = A · B slots, h query heads, g key heads, D head
width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.kernels.device import tl, triton

#: widest head that the kernels take
MAX_WIDTH = 256


@dataclass(frozen=True)
class KeyReaders:
    """The blocks, and which of them see each row of the pack.

    Attributes:
        start_A, stop_A: int32 [A], see BlockRows; neither falls.
        first_R: int32 [R], the first block whose stop lies behind the row.
        after_E: int32 [R + 1], the first block whose start lies at the row or behind it: row r is seen by blocks within
            [first[r], after[r + 1]).
        size: B.
        causal: see BlockRows.
    """

    start_A: Tensor
    stop_A: Tensor
    first_R: Tensor
    after_E: Tensor
    size: int
    causal: bool

    @classmethod
    def of(cls, start_A: Tensor, stop_A: Tensor, size: int, rows: int, causal: bool = False) -> KeyReaders:
        start_A, stop_A = start_A.int(), stop_A.int()
        row_E = torch.arange(rows + 1, dtype=torch.int32, device=start_A.device)
        first_R = torch.searchsorted(stop_A, row_E[:-1], right=True, out_int32=True)
        after_E = torch.searchsorted(start_A, row_E, out_int32=True)
        return cls(start_A, stop_A, first_R, after_E, size, causal)


if triton is not None:
    #: score of a key that a query does not see. Finite: a row that has seen no key yet has no NaN, and its weights
    #: vanish as soon as it sees one (it sees its own block's at last)
    UNSEEN = tl.constexpr(-1.0e30)

    @triton.jit
    def _load(base, place, inside, column, WIDTH: tl.constexpr, D: tl.constexpr):
        """[rows, D] numbers from base + place [rows] + column, zeros where a row is not inside."""
        mask = inside[:, None]
        if WIDTH < D:
            mask = mask & (column[None, :] < WIDTH)
        return tl.load(base + place[:, None] + column[None, :], mask=mask, other=0.0)

    @triton.jit
    def _store(base, place, inside, column, value, WIDTH: tl.constexpr, D: tl.constexpr):
        mask = inside[:, None]
        if WIDTH < D:
            mask = mask & (column[None, :] < WIDTH)
        tl.store(base + place[:, None] + column[None, :], value.to(base.dtype.element_ty), mask=mask)

    @triton.jit
    def _query_place(row, group, stride, REPEAT: tl.constexpr, WIDTH: tl.constexpr):
        """Offset of a query row's head in a tensor [M, h, D]."""
        return (row // REPEAT).to(tl.int64) * stride + (group * REPEAT + row % REPEAT) * WIDTH

    @triton.jit
    def _key_place(row, group, stride, WIDTH: tl.constexpr):
        """Offset of a key's head in a tensor [rows, g, D]."""
        return row.to(tl.int64) * stride + group * WIDTH

    @triton.jit
    def _attend_to(queries, keys, values, seen, top, total, mixed, scale, MASKED: tl.constexpr):
        """One tile of keys joins the running softmax of each query row: (top, total, mixed)."""
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(seen, scores, UNSEEN)
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        keep = tl.exp2(top - highest)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * keep[:, None], input_precision="ieee")
        return highest, total * keep + tl.sum(weights, 1), mixed

    @triton.jit
    def _forward_kernel(
        q, k, v, own_k, own_v, start, stop, out, lse, rows, q_stride, k_stride, v_stride, own_k_stride, own_v_stride,
        scale, SLOTS: tl.constexpr, REPEAT: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr,
    ):  # fmt: skip
        group = tl.program_id(1)
        row = tl.program_id(0) * BM + tl.arange(0, BM)
        column = tl.arange(0, D)
        inside = row < rows
        block = tl.minimum(row, rows - 1) // (SLOTS * REPEAT)
        first = tl.program_id(0) * BM // (SLOTS * REPEAT)
        last = tl.minimum(tl.program_id(0) * BM + BM - 1, rows - 1) // (SLOTS * REPEAT)
        queries = _load(q, _query_place(row, group, q_stride, REPEAT, WIDTH), inside, column, WIDTH, D)
        top = tl.full((BM,), UNSEEN, dtype=tl.float32)
        total = tl.zeros((BM,), dtype=tl.float32)
        mixed = tl.zeros((BM, D), dtype=tl.float32)

        # the context; up to `full`, every query row sees every key
        low, high = tl.load(start + first), tl.load(stop + last)
        full = low
        if tl.load(start + last) == low:
            full = low + tl.maximum(tl.load(stop + first) - low, 0) // BN * BN
        for key_0 in range(low, full, BN):
            key = key_0 + tl.arange(0, BN)
            keys = _load(k, _key_place(key, group, k_stride, WIDTH), key < high, column, WIDTH, D)
            values = _load(v, _key_place(key, group, v_stride, WIDTH), key < high, column, WIDTH, D)
            top, total, mixed = _attend_to(queries, keys, values, inside, top, total, mixed, scale, False)
        row_start, row_stop = tl.load(start + block), tl.load(stop + block)
        for key_0 in range(full, high, BN):
            key = key_0 + tl.arange(0, BN)
            keys = _load(k, _key_place(key, group, k_stride, WIDTH), key < high, column, WIDTH, D)
            values = _load(v, _key_place(key, group, v_stride, WIDTH), key < high, column, WIDTH, D)
            seen = (key[None, :] >= row_start[:, None]) & (key[None, :] < row_stop[:, None])
            top, total, mixed = _attend_to(queries, keys, values, seen, top, total, mixed, scale, True)

        # the slots of the same block
        for key_0 in range(first * SLOTS, (last + 1) * SLOTS, BN):
            key = key_0 + tl.arange(0, BN)
            there = key < (last + 1) * SLOTS
            keys = _load(own_k, _key_place(key, group, own_k_stride, WIDTH), there, column, WIDTH, D)
            values = _load(own_v, _key_place(key, group, own_v_stride, WIDTH), there, column, WIDTH, D)
            seen = (key // SLOTS)[None, :] == block[:, None]
            if CAUSAL:
                seen = seen & (key[None, :] <= (row // REPEAT)[:, None])
            top, total, mixed = _attend_to(queries, keys, values, seen, top, total, mixed, scale, True)
        heads = tl.num_programs(1) * REPEAT
        place = _query_place(row, group, heads * WIDTH, REPEAT, WIDTH)
        _store(out, place, inside, column, mixed / total[:, None], WIDTH, D)
        tl.store(lse + group.to(tl.int64) * rows + row, top + tl.log2(total), mask=inside)

    @triton.jit
    def _query_grad(queries, keys, values, upstream, lse_row, delta, seen, found, scale, MASKED: tl.constexpr):
        """The queries' gradient with what comes through one tile of keys, not scaled yet."""
        weights = tl.exp2(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale - lse_row[:, None])
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        d_scores = weights * (tl.dot(upstream, tl.trans(values), input_precision="ieee") - delta[:, None])
        return tl.dot(d_scores.to(keys.dtype), keys, found, input_precision="ieee")

    @triton.jit
    def _query_grad_kernel(
        q, k, v, own_k, own_v, start, stop, out, lse, grad, delta, dq, rows, q_stride, k_stride, v_stride, own_k_stride,
        own_v_stride, grad_stride, dq_stride, scale, factor, SLOTS: tl.constexpr, REPEAT: tl.constexpr,
        CAUSAL: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ):  # fmt: skip
        """dq, and delta = Σ grad · out of every query row. Loops as in `_forward_kernel`."""
        group = tl.program_id(1)
        row = tl.program_id(0) * BM + tl.arange(0, BM)
        column = tl.arange(0, D)
        inside = row < rows
        block = tl.minimum(row, rows - 1) // (SLOTS * REPEAT)
        first = tl.program_id(0) * BM // (SLOTS * REPEAT)
        last = tl.minimum(tl.program_id(0) * BM + BM - 1, rows - 1) // (SLOTS * REPEAT)
        heads = tl.num_programs(1) * REPEAT
        queries = _load(q, _query_place(row, group, q_stride, REPEAT, WIDTH), inside, column, WIDTH, D)
        upstream = _load(grad, _query_place(row, group, grad_stride, REPEAT, WIDTH), inside, column, WIDTH, D)
        result = _load(out, _query_place(row, group, heads * WIDTH, REPEAT, WIDTH), inside, column, WIDTH, D)
        row_delta = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
        scalar = group.to(tl.int64) * rows + row
        tl.store(delta + scalar, row_delta, mask=inside)
        row_lse = tl.load(lse + scalar, mask=inside, other=0.0)
        found = tl.zeros((BM, D), dtype=tl.float32)

        low, high = tl.load(start + first), tl.load(stop + last)
        full = low
        if tl.load(start + last) == low:
            full = low + tl.maximum(tl.load(stop + first) - low, 0) // BN * BN
        for key_0 in range(low, full, BN):
            key = key_0 + tl.arange(0, BN)
            keys = _load(k, _key_place(key, group, k_stride, WIDTH), key < high, column, WIDTH, D)
            values = _load(v, _key_place(key, group, v_stride, WIDTH), key < high, column, WIDTH, D)
            found = _query_grad(queries, keys, values, upstream, row_lse, row_delta, inside, found, scale, False)
        row_start, row_stop = tl.load(start + block), tl.load(stop + block)
        for key_0 in range(full, high, BN):
            key = key_0 + tl.arange(0, BN)
            keys = _load(k, _key_place(key, group, k_stride, WIDTH), key < high, column, WIDTH, D)
            values = _load(v, _key_place(key, group, v_stride, WIDTH), key < high, column, WIDTH, D)
            seen = (key[None, :] >= row_start[:, None]) & (key[None, :] < row_stop[:, None])
            found = _query_grad(queries, keys, values, upstream, row_lse, row_delta, seen, found, scale, True)
        for key_0 in range(first * SLOTS, (last + 1) * SLOTS, BN):
            key = key_0 + tl.arange(0, BN)
            there = key < (last + 1) * SLOTS
            keys = _load(own_k, _key_place(key, group, own_k_stride, WIDTH), there, column, WIDTH, D)
            values = _load(own_v, _key_place(key, group, own_v_stride, WIDTH), there, column, WIDTH, D)
            seen = (key // SLOTS)[None, :] == block[:, None]
            if CAUSAL:
                seen = seen & (key[None, :] <= (row // REPEAT)[:, None])
            found = _query_grad(queries, keys, values, upstream, row_lse, row_delta, seen, found, scale, True)
        place = _query_place(row, group, dq_stride, REPEAT, WIDTH)
        _store(dq, place, inside, column, found * factor, WIDTH, D)

    @triton.jit
    def _key_grad_kernel(
        q, k, v, start, stop, first_of, after_of, lse, grad, delta, dk, dv, rows, key_rows, q_stride, k_stride,
        v_stride, grad_stride, dk_stride, dv_stride, scale, factor, OWN: tl.constexpr, SLOTS: tl.constexpr,
        REPEAT: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
        BN: tl.constexpr,
    ):  # fmt: skip
        """dk and dv of one tile of keys: with OWN of the slots, else of the pack's rows."""
        group = tl.program_id(1)
        key_0 = tl.program_id(0) * BN
        key = key_0 + tl.arange(0, BN)
        column = tl.arange(0, D)
        there = key < key_rows
        key_end = tl.minimum(key_0 + BN, key_rows)
        keys = _load(k, _key_place(key, group, k_stride, WIDTH), there, column, WIDTH, D)
        values = _load(v, _key_place(key, group, v_stride, WIDTH), there, column, WIDTH, D)
        found_k = tl.zeros((BN, D), dtype=tl.float32)
        found_v = tl.zeros((BN, D), dtype=tl.float32)
        if OWN:
            low = key_0 // SLOTS * (SLOTS * REPEAT)
            high = ((key_end - 1) // SLOTS + 1) * (SLOTS * REPEAT)
        else:
            low = tl.load(first_of + key_0) * (SLOTS * REPEAT)
            high = tl.load(after_of + key_end) * (SLOTS * REPEAT)
        for row_0 in range(low, high, BM):
            row = row_0 + tl.arange(0, BM)
            inside = row < high
            block = row // (SLOTS * REPEAT)
            queries = _load(q, _query_place(row, group, q_stride, REPEAT, WIDTH), inside, column, WIDTH, D)
            upstream = _load(grad, _query_place(row, group, grad_stride, REPEAT, WIDTH), inside, column, WIDTH, D)
            scalar = group.to(tl.int64) * rows + row
            row_lse = tl.load(lse + scalar, mask=inside, other=0.0)
            row_delta = tl.load(delta + scalar, mask=inside, other=0.0)
            if OWN:
                seen = (key // SLOTS)[:, None] == block[None, :]
                if CAUSAL:
                    seen = seen & (key[:, None] <= (row // REPEAT)[None, :])
            else:
                row_start = tl.load(start + block, mask=inside, other=0)
                row_stop = tl.load(stop + block, mask=inside, other=0)
                seen = (key[:, None] >= row_start[None, :]) & (key[:, None] < row_stop[None, :])
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
            weights = tl.where(seen & inside[None, :], tl.exp2(scores - row_lse[None, :]), 0.0)
            found_v = tl.dot(weights.to(upstream.dtype), upstream, found_v, input_precision="ieee")
            d_weights = tl.dot(values, tl.trans(upstream), input_precision="ieee")
            d_scores = weights * (d_weights - row_delta[None, :])
            found_k = tl.dot(d_scores.to(queries.dtype), queries, found_k, input_precision="ieee")
        _store(dk, _key_place(key, group, dk_stride, WIDTH), there, column, found_k * factor, WIDTH, D)
        _store(dv, _key_place(key, group, dv_stride, WIDTH), there, column, found_v, WIDTH, D)


def _tiles(x: Tensor, keys: bool = False) -> dict[str, int]:
    """Sizes of the tiles: BM query rows, BN keys. Args: keys: for the kernel of the keys' gradients."""
    width = max(16, triton.next_power_of_2(x.shape[-1]))
    if x.element_size() == 4:
        return {"D": width, "BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    if width > 128:
        return {"D": width, "BM": 32 if keys else 64, "BN": 64 if keys else 32, "num_warps": 8, "num_stages": 1}
    if keys:
        return {"D": width, "BM": 64, "BN": 128, "num_warps": 8, "num_stages": 2}
    return {"D": width, "BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2}


def _sizes(q_MhD: Tensor, k_RgD: Tensor, readers: KeyReaders) -> dict[str, int]:
    repeat = q_MhD.shape[1] // k_RgD.shape[1]
    return {"SLOTS": readers.size, "REPEAT": repeat, "CAUSAL": readers.causal, "WIDTH": q_MhD.shape[2]}


def _strided(x: Tensor) -> Tensor:
    """The tensor [rows, heads, D] with contiguous heads."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def attend(q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD, readers: KeyReaders) -> tuple[Tensor, Tensor]:
    """(context [M, h, D], log-sum-exp of every query row, float32 [g, M · h / g], in powers of two)."""
    q, k, v, own_k, own_v = (_strided(x) for x in (q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD))
    groups, rows = k.shape[1], q.shape[0] * (q.shape[1] // k.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(groups, rows, dtype=torch.float32, device=q.device)
    if rows:
        tiles = _tiles(q)
        _forward_kernel[(triton.cdiv(rows, tiles["BM"]), groups)](
            q, k, v, own_k, own_v, readers.start_A, readers.stop_A, out, lse, rows, q.stride(0), k.stride(0),
            v.stride(0), own_k.stride(0), own_v.stride(0), q.shape[2] ** -0.5 * math.log2(math.e),
            **_sizes(q, k, readers), **tiles,
        )  # fmt: skip
    return out, lse


def attend_backward(
    grad_MhD: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    context_MhD: Tensor,
    lse: Tensor,
    into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    readers: KeyReaders,
) -> None:
    """Write the gradients of q, k, v, own_k, own_v to `into`: [rows, heads, D] each, with contiguous heads.

    Args: inputs: q, k, v, own_k, own_v. context, lse: what `attend` returned.
    """
    q, k, v, own_k, own_v = (_strided(x) for x in inputs)
    dq, dk, dv, d_own_k, d_own_v = into
    grad = _strided(grad_MhD)
    groups, rows = k.shape[1], q.shape[0] * (q.shape[1] // k.shape[1])
    factor = q.shape[2] ** -0.5
    scale, sizes = factor * math.log2(math.e), _sizes(q, k, readers)
    if not rows:
        for gradient in into:
            gradient.zero_()
        return
    delta = torch.empty_like(lse)
    tiles = _tiles(q)
    _query_grad_kernel[(triton.cdiv(rows, tiles["BM"]), groups)](
        q, k, v, own_k, own_v, readers.start_A, readers.stop_A, context_MhD, lse, grad, delta, dq, rows, q.stride(0),
        k.stride(0), v.stride(0), own_k.stride(0), own_v.stride(0), grad.stride(0), dq.stride(0), scale, factor,
        **sizes, **tiles,
    )  # fmt: skip
    tiles = _tiles(q, keys=True)
    for own, keys, values, d_keys, d_values in ((False, k, v, dk, dv), (True, own_k, own_v, d_own_k, d_own_v)):
        count = keys.shape[0]
        _key_grad_kernel[(triton.cdiv(count, tiles["BN"]), groups)](
            q, keys, values, readers.start_A, readers.stop_A, readers.first_R, readers.after_E, lse, grad, delta,
            d_keys, d_values, rows, count, q.stride(0), keys.stride(0), values.stride(0), grad.stride(0),
            d_keys.stride(0), d_values.stride(0), scale, factor, OWN=own, **sizes, **tiles,
        )  # fmt: skip
