"""Attention of a few new tokens to a long context and to their ancestors in a tree: one pass over the KV buffers.

On CUDA a Triton kernel works on parts of the context side by side (flash decoding), and a second one merges the parts.
The eager twin builds the whole mask. Lengths are read on the device, so that one captured graph serves every context
length.
Shape legend: B batch, M tokens of a forward, R = B · M places, or flat rows, h query heads, g kv heads, d head dim,
S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.flat import FlatRows
from headstart.eval.kernels.launch import LINE_BYTES, await_previous, launch, launch_options, prefetch, tl, triton
from headstart.heads.kernels.device import wants_kernel

#: query rows of a tile (tokens × heads that share a kv head), slots per step of the loop
BLOCK_ROWS = 64
BLOCK_SLOTS = 64
#: blocks of slots that are loaded at the same time
STAGES = 3
#: programs that keep a whole card busy: measured on an H200 with its 132 multiprocessors, with contexts of 350 slots
PROGRAMS = 360
MAX_SPLITS = 32
#: numbers of a tile up to which eight warps were measured to be faster than four
SMALL_TILE = 32 * 64


@dataclass(frozen=True)
class Visibility:
    """Where the tokens of a forward stand and what they see.

    Attributes:
        position_BM: int64, rope position; negative = padding, which sees nothing.
        write_BM: int64, slot that each token's key and value are written to.
        base_B: int64, committed slots of each row; used with `tree_BMW` only.
        tree_BMW: bool, entry (m, n): token m sees slot base + n, beside all committed slots. The W ≥ M slots are those
            that this forward writes, and those of earlier forwards of the same tree. None: a token sees every slot up
            to its own position (chains, prompts).
    Kernels index the tensors by row, so expanded ones are copied here, once per forward.
    """

    position_BM: Tensor
    write_BM: Tensor
    base_B: Tensor
    tree_BMW: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("position_BM", "write_BM", "base_B", "tree_BMW"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, given.contiguous())

    def check_window(self) -> None:
        """Raises ValueError for a tree mask that is not square: a sliding window needs the position of every slot."""
        if self.tree_BMW is not None and self.tree_BMW.shape[2] != self.tree_BMW.shape[1]:
            count, width = self.tree_BMW.shape[1:]
            raise ValueError(f"a sliding window needs a square tree mask, found {count} tokens that see {width} slots")


@dataclass(frozen=True)
class AttendShape:
    """A layer's attention: query scale, window in positions (None = full), logit soft-cap, sink logits [h]."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_h: Tensor | None = None


@dataclass(frozen=True)
class Ahead:
    """Weights of the next product, fetched into the cache while attention leaves the memory idle.

    Attributes: weight_NK: the matrix; bytes: how much of it, the first columns of every row.
    """

    weight_NK: Tensor
    bytes: int

    def lines(self) -> tuple[int, int]:
        """(cache lines per row, elements per line)."""
        rows, inputs = self.weight_NK.shape
        elements = LINE_BYTES // self.weight_NK.element_size()
        return min(self.bytes // (rows * LINE_BYTES), inputs // elements), elements


def visible_slots(visibility: Visibility, window: int | None, slots: int) -> Tensor:
    """bool [B, M, S]: the mask that the kernel never builds."""
    position_BM = visibility.position_BM
    slot_S = torch.arange(slots, device=position_BM.device)
    distance_BMS = position_BM[:, :, None] - slot_S
    if visibility.tree_BMW is None:
        seen = distance_BMS >= 0
    else:
        batch, count, width = visibility.tree_BMW.shape
        seen = (slot_S < visibility.base_B[:, None])[:, None, :].expand(batch, count, slots)
        place_BW = visibility.base_B[:, None] + torch.arange(width, device=position_BM.device)
        seen = seen.scatter(2, place_BW[:, None, :].expand(batch, count, width), visibility.tree_BMW)
        if window is not None:
            visibility.check_window()
            at_BS = slot_S.expand(batch, slots).scatter(1, place_BW, position_BM)
            distance_BMS = position_BM[:, :, None] - at_BS[:, None, :]
    seen = seen & (position_BM >= 0)[:, :, None]
    return seen if window is None else seen & (distance_BMS < window)


def attend_eager(
    q_Rhd: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    shape: AttendShape,
    flat: FlatRows | None = None,
) -> Tensor:
    """Queries [R, h, d] against buffers [B, g, S, d] → context [R, h, d]. Softmax in float32 (float64 stays).

    Args: flat: queries and context are of these rows alone. Cut places must be padding in `visibility`; the context of
        rows that are left over is 0.
    """
    if flat is not None:
        context_Rhd = attend_eager(flat.spread(q_Rhd), keys, values, visibility, shape)
        return flat.gather(context_Rhd).masked_fill(~flat.used_F()[:, None, None], 0)
    batch, count = visibility.position_BM.shape
    kv_heads, slots, d = keys.shape[1:]
    wide = torch.promote_types(q_Rhd.dtype, torch.float32)
    q = q_Rhd.view(batch, count, kv_heads, -1, d).permute(0, 2, 3, 1, 4).to(wide)
    scores = torch.einsum("bgamd,bgsd->bgams", q, keys.to(wide)) * shape.scale
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    seen = visible_slots(visibility, shape.window, slots)[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    if shape.sinks_h is not None:
        sinks = shape.sinks_h.to(wide).view(1, kv_heads, -1, 1, 1)
        peak = torch.maximum(peak, sinks)
    peak = peak.clamp(min=torch.finfo(wide).min)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    if shape.sinks_h is not None:
        total = total + (sinks - peak).exp()
    context = torch.einsum("bgams,bgsd->bgamd", weights, values.to(wide)) / total.clamp(min=1e-30)
    return context.permute(0, 3, 1, 2, 4).reshape(q_Rhd.shape).to(q_Rhd.dtype)


def attend(
    q_Rhd: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    shape: AttendShape,
    ahead: Ahead | None = None,
    flat: FlatRows | None = None,
) -> Tensor:
    """As attend_eager. Args: ahead: weights to fetch into the cache meanwhile, where the card can."""
    if not wants_kernel(q_Rhd):
        return attend_eager(q_Rhd, keys, values, visibility, shape, flat)
    return attend_kernel(q_Rhd, keys, values, visibility, shape, ahead=ahead, flat=flat)


def attend_kernel(
    q_Rhd: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    shape: AttendShape,
    splits: int | None = None,
    ahead: Ahead | None = None,
    flat: FlatRows | None = None,
) -> Tensor:
    """Split-KV attention. Args: splits: parts that the context is cut into; None: as many as fill the card."""
    batch, count = visibility.position_BM.shape
    rows, heads, d = q_Rhd.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_rows = min(BLOCK_ROWS, max(16, triton.next_power_of_2(count * group)))
    if d > 128:
        block_rows = min(block_rows, 32)
    tiles = triton.cdiv(count * group, block_rows)
    block_slots, capacity = BLOCK_SLOTS, keys.shape[2]
    if splits is None:
        splits = max(1, min(MAX_SPLITS, PROGRAMS // (batch * kv_heads * tiles)))
        # half blocks where the card has room for a program per half block: each then runs one block instead of two
        if capacity <= splits * BLOCK_SLOTS // 2:
            block_slots = BLOCK_SLOTS // 2
        splits = min(splits, triton.cdiv(capacity, block_slots))
    out = torch.empty_like(q_Rhd)
    if flat is not None and rows > batch * count:
        # a program clears no row but those that are as many as the places
        out = torch.zeros_like(q_Rhd)
    partial = stats = out
    if splits > 1:
        partial = torch.empty((splits, rows, heads, d), dtype=torch.float32, device=out.device)
        stats = torch.empty((splits, rows, heads, 2), dtype=torch.float32, device=out.device)
    tree = visibility.tree_BMW
    if shape.window is not None:
        visibility.check_window()
    sinks = shape.sinks_h
    # of None Triton makes no argument
    maps = (None, None) if flat is None else (flat.place_F, flat.row_R)
    options = launch_options(out.device)
    # where a program reads a whole context, more warps hide the time of its loads
    wide = d > 128 or block_rows * d > BLOCK_ROWS * 64 or (splits == 1 and block_rows * d <= SMALL_TILE)
    per_row, elements = ahead.lines() if ahead is not None and options["OVERLAP"] else (0, 1)
    following = ahead.weight_NK if ahead is not None else out
    launch(_attend_kernel, (splits, batch * kv_heads, tiles),
        q_Rhd, keys, values, visibility.position_BM, visibility.base_B,
        visibility.base_B if tree is None else tree.view(torch.uint8), out if sinks is None else sinks,
        partial, stats, out, *maps, count, count if tree is None else tree.shape[2], rows, splits,
        shape.scale, shape.softcap or 0.0, shape.window or 0,
        keys.stride(0), keys.stride(1), keys.stride(2), following, following.shape[0] * per_row, max(per_row, 1),
        following.stride(0), LINE=elements, AHEAD=per_row > 0,
        H=heads, G=kv_heads, D=d, BD=max(16, triton.next_power_of_2(d)), BR=block_rows, BS=block_slots,
        TREE=tree is not None, WINDOW=shape.window is not None, SOFTCAP=shape.softcap is not None,
        SINKS=sinks is not None, SPLIT=splits > 1, SINGLE=splits * block_slots >= capacity,
        FLAT=flat is not None,
        num_warps=8 if wide else 4, num_stages=STAGES, **options,
    )  # fmt: skip
    if splits > 1:
        launch(_merge_kernel, (rows, heads),
            partial, stats, out if sinks is None else sinks, out, *maps, rows, splits,
            H=heads, D=d, BD=triton.next_power_of_2(d), BP=triton.next_power_of_2(splits), SINKS=sinks is not None,
            FLAT=flat is not None,
            num_warps=1, **options,
        )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _score(query, key, scale, softcap, SOFTCAP: tl.constexpr):
        score = tl.dot(query, key, input_precision="ieee") * scale
        if SOFTCAP:
            score = (2 * tl.sigmoid(2 * score / softcap) - 1) * softcap
        return score

    @triton.jit
    def _fold(score, value, peak, total, context):
        """One more block of the online softmax; a score of -inf is not seen."""
        higher = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - safe[:, None])
        shrink = tl.exp(peak - safe)
        total = total * shrink + tl.sum(weight, 1)
        context = context * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        return higher, total, context

    @triton.jit
    def _block(
        query, key_base, value_base, tree_base, own_position, peak, total, context, first, stop, committed,
        at, real, alive, scale, softcap, window, stride_s,
        D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, LOOKUP: tl.constexpr, TREE: tl.constexpr,
        WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ):  # fmt: skip
        """Slots first … stop - 1, one block at most. LOOKUP: some are a tree's own. Returns _fold's."""
        channel = tl.arange(0, BD)
        slot = first + tl.arange(0, BS)
        there = slot < stop
        key = tl.load(
            key_base + slot[None, :] * stride_s + channel[:, None],
            mask=there[None, :] & (channel < D)[:, None], other=0.0,
        )  # fmt: skip
        value = tl.load(
            value_base + slot[:, None] * stride_s + channel[None, :],
            mask=there[:, None] & (channel < D)[None, :], other=0.0,
        )  # fmt: skip
        seen = there[None, :] & alive
        where = slot
        if LOOKUP:
            node = slot - committed
            own = there & (node >= 0)
            linked = tl.load(tree_base + node[None, :], mask=real[:, None] & own[None, :], other=0)
            seen = seen & ((node < 0)[None, :] | (linked != 0))
            if WINDOW:
                where = tl.where(own, tl.load(own_position + node, mask=own, other=0).to(tl.int32), slot)
        if not TREE:
            seen = seen & (slot[None, :] <= at[:, None])
        if WINDOW:
            seen = seen & (at[:, None] - where[None, :] < window)
        score = _score(query, key, scale, softcap, SOFTCAP)
        return _fold(tl.where(seen, score, float("-inf")), value, peak, total, context)

    @triton.jit(do_not_specialize=["tokens", "width", "rows", "splits"])
    def _attend_kernel(
        q, keys, values, position, base, tree, sinks, partial, stats, out, place_of, row_of,
        tokens, width, rows, splits, scale, softcap, window, stride_b, stride_g, stride_s,
        following, lines, per_row, stride_row, LINE: tl.constexpr, AHEAD: tl.constexpr,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
        TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
        SINGLE: tl.constexpr, FLAT: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One part of the context for one tile of (tokens × heads that share a kv head). SINGLE: no part is longer than
        a block. FLAT: the query of a place, and its context, are row `row_of[place]`; cut places write nothing."""
        if AHEAD:
            # every program asks for its share of the next product's weights
            program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
            share = tl.cdiv(lines, tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2))
            last = tl.minimum(program * share + share, lines) - 1
            for ahead in range(0, share, 256):
                line = tl.minimum(program * share + ahead + tl.arange(0, 256), last)
                prefetch(following + (line // per_row).to(tl.int64) * stride_row + (line % per_row) * LINE)
        await_previous(OVERLAP)
        split = tl.program_id(0)
        batch = (tl.program_id(1) // G).to(tl.int64)
        kv_head = tl.program_id(1) % G
        A: tl.constexpr = H // G
        tile_row = tl.program_id(2) * BR + tl.arange(0, BR)
        token = tile_row // A
        head = kv_head * A + tile_row % A
        real = token < tokens
        row = batch * tokens + token
        channel = tl.arange(0, BD)
        at = tl.load(position + row, mask=real, other=-1).to(tl.int32)
        written = real
        if FLAT:
            own_row = row
            row = tl.load(row_of + row, mask=real, other=0)
            written = at >= 0
        query = tl.load(
            q + (row * H + head)[:, None] * D + channel[None, :],
            mask=real[:, None] & (channel < D)[None, :], other=0.0,
        )  # fmt: skip
        end = tl.max(at, 0) + 1
        committed = end
        if TREE:
            committed = tl.load(base + batch).to(tl.int32)
            end = committed + width
        low = end * 0
        if WINDOW:
            low = tl.maximum(tl.min(tl.where(at >= 0, at, end), 0) - window + 1, 0)
        part = tl.cdiv(tl.cdiv(end - low, splits), BS) * BS
        start = low + split * part
        stop = tl.minimum(start + part, end)
        peak = tl.full((BR,), float("-inf"), tl.float32)
        total = tl.zeros((BR,), tl.float32)
        context = tl.zeros((BR, BD), tl.float32)
        key_base = keys + batch * stride_b + kv_head * stride_g
        value_base = values + batch * stride_b + kv_head * stride_g
        tree_base = tree + batch * tokens * width + (token * width)[:, None]
        own_position = position + batch * tokens
        alive = (at >= 0)[:, None]
        # committed slots are seen by a whole tree. Its own few, which are looked up, lie behind them: in their own
        # loop where a program has several blocks, or else one block would take two turns
        border = stop
        if TREE and not SINGLE:
            border = tl.minimum(stop, committed)
        for first in range(start, border, BS):
            peak, total, context = _block(
                query, key_base, value_base, tree_base, own_position, peak, total, context, first, border, committed,
                at, real, alive, scale, softcap, window, stride_s, D, BD, BS, TREE and SINGLE, TREE, WINDOW, SOFTCAP,
            )  # fmt: skip
        if TREE and not SINGLE:
            for first in range(tl.maximum(start, border), stop, BS):
                peak, total, context = _block(
                    query, key_base, value_base, tree_base, own_position, peak, total, context, first, stop, committed,
                    at, real, alive, scale, softcap, window, stride_s, D, BD, BS, True, TREE, WINDOW, SOFTCAP,
                )  # fmt: skip
        place = (row * H + head)[:, None] * D + channel[None, :]
        stored = written[:, None] & (channel < D)[None, :]
        if SPLIT:
            ahead = split.to(tl.int64) * rows * H
            tl.store(partial + ahead * D + place, context, mask=stored)
            tl.store(stats + (ahead + row * H + head) * 2, peak, mask=written)
            tl.store(stats + (ahead + row * H + head) * 2 + 1, total, mask=written)
        else:
            if SINKS:
                sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
                higher = tl.maximum(peak, sink)
                shrink = tl.exp(peak - higher)
                total = total * shrink + tl.exp(sink - higher)
                context = context * shrink[:, None]
            context = context / tl.maximum(total, 1e-30)[:, None]
            tl.store(out + place, context.to(out.dtype.element_ty), mask=stored)
            if FLAT:
                # there are as many places as rows, or more: each looks after the row of its own number
                there = real & (own_row < rows)
                stands_for = tl.load(place_of + own_row, mask=there, other=0)
                left_over = there & (tl.load(row_of + stands_for, mask=there, other=0) != own_row)
                place = (own_row * H + head)[:, None] * D + channel[None, :]
                cleared = left_over[:, None] & (channel < D)[None, :]
                tl.store(out + place, tl.zeros((BR, BD), out.dtype.element_ty), mask=cleared)

    @triton.jit(do_not_specialize=["rows", "splits"])
    def _merge_kernel(
        partial, stats, sinks, out, place_of, row_of, rows, splits,
        H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, SINKS: tl.constexpr,
        FLAT: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Weigh the parts of one row and head by their shares of the softmax. FLAT: rows that are left over have none,
        and become 0."""
        await_previous(OVERLAP)
        place = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
        channel = tl.arange(0, BD)
        part = tl.arange(0, BP)
        there = part < splits
        spot = part.to(tl.int64) * rows * H + place
        peak = tl.load(stats + spot * 2, mask=there, other=float("-inf"))
        total = tl.load(stats + spot * 2 + 1, mask=there, other=0.0)
        context = tl.load(
            partial + spot[:, None] * D + channel[None, :], mask=there[:, None] & (channel < D)[None, :], other=0.0
        )
        highest = tl.max(peak, 0)
        if SINKS:
            sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
            highest = tl.maximum(highest, sink)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp(peak - safe)
        whole = tl.sum(total * share, 0)
        if SINKS:
            whole += tl.exp(sink - safe)
        merged = tl.sum(context * share[:, None], 0) / tl.maximum(whole, 1e-30)
        if FLAT:
            row = tl.program_id(0)
            merged = tl.where(tl.load(row_of + tl.load(place_of + row)) == row, merged, 0.0)
        tl.store(out + place * D + channel, merged.to(out.dtype.element_ty), mask=channel < D)
