"""EAGLE-2 trees while they grow (methods §3): the best children of a level, the next frontier, the nodes that are kept.

On CUDA a level takes three Triton kernels: the best logits of parts of each row, the best of each row, and the growth.
The choice at the end takes two. The eager twins sort. No kernel reads what its own programs write, and no launch
depends on values on the device, so that a captured graph may hold a whole tree.
Shape legend: B batch, f frontier nodes whose children are scored, w children stored per node, M = f · w, k nodes of the
next frontier, U draft vocabulary, R rows (B · f), S stored candidates, N nodes kept, n scratch slots (levels · k).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.rows import take_rows
from headstart.eval.tree import Tree, expand, select
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.numerics import wide

#: most children per node that the kernels take: each child costs one more search over the logits
MAX_K = 16
#: parts that a row of logits is cut into, and the fewest and most elements of a part
PARTS, PART_ELEMENTS = 64, (512, 4096)
#: candidates of a program that ranks or compacts
BLOCK_CANDIDATES = 32


@dataclass(frozen=True)
class Frontier:
    """The best nodes of a level, best first, which the draft runs next.

    Attributes:
        tokens_Bk, score_Bk: int64, target ids; cumulative log-probability.
        under_Bk: int64, index of the parent within the frontier before (0 = the root's row at the first level).
        index_Bk: int64, index among the stored candidates.
        seen_Bkn: bool, scratch slots of the node's ancestors and its own.
        position_Bk, write_Bk: int64, rope position and KV slot of the node.
    """

    tokens_Bk: Tensor
    score_Bk: Tensor
    under_Bk: Tensor
    index_Bk: Tensor
    seen_Bkn: Tensor
    position_Bk: Tensor
    write_Bk: Tensor


@dataclass(frozen=True)
class Stored:
    """All candidates of a tree in level order.

    Attributes: score_BS: cumulative log-probability; token_BS, parent_BS, depth_BS: int64, draft-vocabulary id, index
        in S (-1 = root), level.
    """

    score_BS: Tensor
    token_BS: Tensor
    parent_BS: Tensor
    depth_BS: Tensor


@dataclass(frozen=True)
class Growth:
    """A tree of which some levels have grown.

    Attributes:
        length_B: int64, committed draft rows. Level d = 1, 2, … has rope position length + d - 1 and the KV slots
            length + (d - 1) · k … length + d · k - 1.
        k, levels: children kept per node and nodes expanded per level; levels of the whole tree.
        draft_ids_U: target id of each draft id; None = they are the same.
        stored, filled: room for all candidates, and how many of them are stored.
        number, frontier: levels that have grown, and the nodes that are expanded next.
    """

    length_B: Tensor
    k: int
    levels: int
    draft_ids_U: Tensor | None
    stored: Stored
    number: int = 0
    filled: int = 0
    frontier: Frontier | None = None

    @classmethod
    def start(cls, length_B: Tensor, k: int, levels: int, logits_B1U: Tensor, ids_U: Tensor | None = None) -> Growth:
        """An empty tree with room for `levels` levels. Args: logits_B1U: vocabulary, dtype and device of its logits."""
        width, frontier, total = min(k, logits_B1U.shape[-1]), 1, 0
        for _ in range(levels):
            total += frontier * width
            frontier = min(k, frontier * width)
        dtype = torch.promote_types(logits_B1U.dtype, torch.float32)
        score_BS = torch.empty((length_B.shape[0], total), dtype=dtype, device=logits_B1U.device)
        index = [torch.empty_like(score_BS, dtype=torch.int64) for _ in range(3)]
        return cls(length_B, k, levels, ids_U, Stored(score_BS, *index))

    def grow(self, logits_BfU: Tensor) -> Growth:
        """The tree with one more level. Args: logits_BfU: of the frontier's nodes, at first of the root."""
        frontier = (grow_kernel if self._kernels() else grow_eager)(self, logits_BfU)
        children = logits_BfU.shape[1] * min(self.k, logits_BfU.shape[2])
        return replace(self, number=self.number + 1, filled=self.filled + children, frontier=frontier)

    def seen_on_path(self, seen_BfU: Tensor | None) -> Tensor | None:
        """`seen_along` of the frontier. Args: seen_BfU: the same of the frontier before; None stays None."""
        if seen_BfU is None:
            return None
        nodes = self.frontier
        assert nodes is not None
        return seen_along(seen_BfU, nodes.under_Bk, self.stored.token_BS.gather(1, nodes.index_Bk))

    def tree(self, nodes: int) -> Tree:
        """The best `nodes` candidates; exact ties prefer the shallower one. Tokens are target ids."""
        run = select_kernel if self._kernels() else select_eager
        return run(self.stored, nodes, self.levels, self.draft_ids_U)

    def _kernels(self) -> bool:
        return wants_kernel(self.stored.score_BS) and self.k <= MAX_K


def seen_along(seen_BfU: Tensor, under_Bk: Tensor, token_Bk: Tensor) -> Tensor:
    """bool [B, k, U]: tokens before the children of each node: those before the node itself, and its own.

    Args: seen_BfU: tokens before the nodes, by parent; under_Bk: the parent's row in it; token_Bk: the nodes' own.
    """
    return take_rows(seen_BfU, under_Bk).scatter(2, token_Bk[:, :, None], True)


def grow_eager(growth: Growth, logits_BfU: Tensor) -> Frontier:
    """Score and store the children of the frontier; returns the best of them."""
    length_B, k, before, stored = growth.length_B, growth.k, growth.frontier, growth.stored
    batch, device = logits_BfU.shape[0], logits_BfU.device
    level = expand(logits_BfU, stored.score_BS.new_zeros((batch, 1)) if before is None else before.score_Bk, k)
    here = slice(growth.filled, growth.filled + level.score_BM.shape[1])
    stored.score_BS[:, here], stored.token_BS[:, here] = level.score_BM, level.tokens_BM
    stored.parent_BS[:, here] = -1 if before is None else before.index_Bk.gather(1, level.parent_BM)
    stored.depth_BS[:, here] = growth.number + 1
    best_Bk, under_Bk = level.frontier_Bk, level.parent_BM.gather(1, level.frontier_Bk)
    own_k = growth.number * k + torch.arange(best_Bk.shape[1], device=device)
    seen_Bkn = (torch.arange(growth.levels * k, device=device) == own_k[:, None]).expand(batch, -1, -1)
    if before is not None:
        seen_Bkn = seen_Bkn | before.seen_Bkn.gather(1, under_Bk[:, :, None].expand_as(seen_Bkn))
    draft_Bk = level.tokens_BM.gather(1, best_Bk)
    tokens_Bk = draft_Bk if growth.draft_ids_U is None else growth.draft_ids_U[draft_Bk]
    score_Bk, index_Bk = level.score_BM.gather(1, best_Bk), growth.filled + best_Bk
    position_Bk, write_Bk = (length_B[:, None] + growth.number).expand_as(best_Bk), length_B[:, None] + own_k
    return Frontier(tokens_Bk, score_Bk, under_Bk, index_Bk, seen_Bkn, position_Bk, write_Bk)


def grow_kernel(growth: Growth, logits_BfU: Tensor) -> Frontier:
    """As grow_eager; of equal logits the lower id comes first."""
    before, stored, ids_U = growth.frontier, growth.stored, growth.draft_ids_U
    batch, count, size = logits_BfU.shape
    width = min(growth.k, size)
    values_Rw, ids_Rw, total_R = best_kernel(logits_BfU.flatten(0, 1), width)
    kept, slots = min(growth.k, count * width), growth.levels * growth.k
    token_Bk, under_Bk, index_Bk, position_Bk, write_Bk = ids_Rw.new_empty((5, batch, kept)).unbind()
    score_Bk = values_Rw.new_empty((batch, kept))
    seen_Bkn = torch.empty((batch, kept, slots), dtype=torch.bool, device=ids_Rw.device)
    block = max(16, triton.next_power_of_2(count * width))
    launch(_grow_kernel, (batch,),
        values_Rw, ids_Rw, total_R, total_R if before is None else before.score_Bk,
        ids_Rw if before is None else before.index_Bk,
        (seen_Bkn if before is None else before.seen_Bkn.contiguous()).view(torch.uint8), growth.length_B,
        ids_Rw if ids_U is None else ids_U, stored.score_BS, stored.token_BS, stored.parent_BS, stored.depth_BS,
        token_Bk, score_Bk, under_Bk, index_Bk, seen_Bkn.view(torch.uint8), position_Bk, write_Bk,
        count, kept, stored.score_BS.shape[1], growth.filled, growth.number, slots, K=growth.k, WIDTH=width,
        FIRST=before is None, MAPPED=ids_U is not None, BM=block, CHUNK=min(block, 32),
        BK=triton.next_power_of_2(kept), BN=triton.next_power_of_2(slots), num_warps=8 if block > 64 else 4,
        **launch_options(ids_Rw.device),
    )  # fmt: skip
    return Frontier(token_Bk, score_Bk, under_Bk, index_Bk, seen_Bkn, position_Bk, write_Bk)


def top_ids(logits: Tensor, k: int) -> Tensor:
    """int64 [..., k]: ids of the k largest of [..., U], best first."""
    if not wants_kernel(logits) or k > MAX_K:
        return logits.topk(k, dim=-1).indices
    return best_kernel(logits.reshape(-1, logits.shape[-1]), k)[1].view(*logits.shape[:-1], k)


def top_log_p(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of […, U], best first: their log p […, k] at temperature 1, never above 0, and int64 ids.

    log p is at least float32. It is -inf where a logit is not a number.
    """
    if not wants_kernel(logits):
        values, ids = logits.topk(k, dim=-1)
        return _log_p(values, wide(logits).logsumexp(-1)), ids
    logits_RU = logits.reshape(-1, logits.shape[-1])
    # more than MAX_K: only the sum is of use
    values_Rk, ids_Rk, total_R = best_kernel(logits_RU, k if k <= MAX_K else 1)
    if k > MAX_K:
        values_Rk, ids_Rk = logits_RU.topk(k, dim=-1)
    log_p_Rk, shape = _log_p(values_Rk, total_R), (*logits.shape[:-1], k)
    return log_p_Rk.view(shape), ids_Rk.view(shape)


def _log_p(values: Tensor, total: Tensor) -> Tensor:
    """Args: total: log Σ exp. Never above 0, even by rounding, so that no score is above its parent's."""
    return (wide(values) - total[..., None]).clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def best_kernel(logits_RU: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k ≤ MAX_K largest of every row, best first, of equal ones the lower id first.

    Args: logits_RU: bfloat16, float16 or float32, k ≤ U; -inf is allowed, NaN counts as -inf.
    Returns: (values [R, k] float32, ids [R, k] int64, log Σ exp of the row [R] float32).
    """
    logits_RU = logits_RU if logits_RU.stride(1) == 1 else logits_RU.contiguous()
    (rows, size), device, options = logits_RU.shape, logits_RU.device, launch_options(logits_RU.device)
    block = min(max(triton.next_power_of_2(triton.cdiv(size, PARTS)), PART_ELEMENTS[0]), PART_ELEMENTS[1])
    parts, places = triton.cdiv(size, block), triton.next_power_of_2(k)
    order, id_ = torch.empty((2, rows, parts, places), dtype=torch.int32, device=device).unbind()
    sums = torch.empty((rows, parts, 2), dtype=torch.float32, device=device)
    values_Rk = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids_Rk, total_R = torch.empty_like(values_Rk, dtype=torch.int64), values_Rk.new_empty(rows)
    launch(_part_kernel, (rows, parts),
        logits_RU, order, id_, sums, size, logits_RU.stride(0), K=k, BK=places, BLOCK=block, num_warps=block // 512,
        **options,
    )  # fmt: skip
    spots = triton.next_power_of_2(parts * places)
    launch(_best_kernel, (rows,),
        order, id_, sums, values_Rk, ids_Rk, total_R, parts, K=k, BK=places, BS=spots,
        BP=triton.next_power_of_2(parts), num_warps=min(8, max(1, spots // 256)), **options,
    )  # fmt: skip
    return values_Rk, ids_Rk, total_R


def select_eager(stored: Stored, nodes: int, levels: int, draft_ids_U: Tensor | None) -> Tree:
    """The best `nodes` of the stored candidates, as a tree of target ids."""
    tree = select(stored.score_BS, stored.parent_BS, stored.depth_BS, stored.token_BS, nodes, levels)
    return tree if draft_ids_U is None else replace(tree, tokens_BN=draft_ids_U[tree.tokens_BN])


def select_kernel(stored: Stored, nodes: int, levels: int, draft_ids_U: Tensor | None) -> Tree:
    """As select_eager."""
    (batch, total), device = stored.score_BS.shape, stored.score_BS.device
    keep, kept_BS = min(nodes, total), torch.empty((batch, total), dtype=torch.uint8, device=device)
    tokens_BN, parent_BN, depth_BN = stored.token_BS.new_empty((3, batch, keep)).unbind()
    score_BN = stored.score_BS.new_empty((batch, keep))
    valid_BN = torch.empty((batch, keep), dtype=torch.bool, device=device)
    grid = (batch, triton.cdiv(total, BLOCK_CANDIDATES))
    launch(_rank_kernel, grid,
        stored.score_BS, kept_BS, total, keep, BLOCK=BLOCK_CANDIDATES, CHUNK=128, num_warps=4, **launch_options(device),
    )  # fmt: skip
    launch(_compact_kernel, grid,
        kept_BS, stored.score_BS, stored.token_BS, stored.parent_BS, stored.depth_BS,
        stored.token_BS if draft_ids_U is None else draft_ids_U, tokens_BN, parent_BN, depth_BN, score_BN,
        valid_BN.view(torch.uint8), total, keep, MAPPED=draft_ids_U is not None, BLOCK=BLOCK_CANDIDATES, CHUNK=128,
        num_warps=4, **launch_options(device),
    )  # fmt: skip
    return Tree(tokens_BN, parent_BN, depth_BN, valid_BN, levels, score_BN=score_BN).or_chain()


if triton is not None:
    #: below every sortable value, and an id above every other: places that hold nothing
    LOWEST = tl.constexpr(-(2**31))
    NOWHERE = tl.constexpr(2**31 - 1)

    @triton.jit
    def _flip(bits):
        """float32 bits → int32 of the same order, and back."""
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    @triton.jit
    def _largest(order, index, K: tl.constexpr, BK: tl.constexpr):
        """(orders, indices, 0 …) [BK] of the K largest, best first, the lower index first; the rest holds nothing."""
        place = tl.arange(0, BK)
        best_order = tl.full((BK,), LOWEST, tl.int32)
        best_index = tl.full((BK,), NOWHERE, tl.int32)
        for turn in range(K):
            highest = tl.max(order, 0)
            at = tl.min(tl.where(order == highest, index, NOWHERE), 0)
            at = tl.where(highest == LOWEST, NOWHERE, at)
            best_order = tl.where(place == turn, highest, best_order)
            best_index = tl.where(place == turn, at, best_index)
            order = tl.where(index == at, LOWEST, order)
        return best_order, best_index, place

    @triton.jit
    def _part_kernel(
        logits, order_out, id_out, sums, size, stride, K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """The largest of one part of a row, its peak, and Σ exp below the peak."""
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = index < size
        value = tl.load(logits + row * stride + index, mask=inside, other=float("-inf")).to(tl.float32)
        value = tl.where(value == value, value, float("-inf"))
        # one zero: the negative one is not lower
        order = tl.where(inside, _flip(tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)), LOWEST)
        peak = tl.max(value, 0)
        total = tl.sum(tl.exp(value - tl.where(peak == float("-inf"), 0.0, peak)), 0)
        spot = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums + spot * 2, peak)
        tl.store(sums + spot * 2 + 1, total)
        best_order, best_index, place = _largest(order, index, K, BK)
        tl.store(order_out + spot * BK + place, best_order)
        tl.store(id_out + spot * BK + place, best_index)

    @triton.jit
    def _best_kernel(
        order_in, id_in, sums, values, ids, totals, parts,
        K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """The largest of a row from those of its parts, and log Σ exp."""
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        spot = tl.arange(0, BS)
        order = tl.load(order_in + row * parts * BK + spot, mask=spot < parts * BK, other=LOWEST)
        index = tl.load(id_in + row * parts * BK + spot, mask=spot < parts * BK, other=NOWHERE)
        part = tl.arange(0, BP)
        peak = tl.load(sums + (row * parts + part) * 2, mask=part < parts, other=float("-inf"))
        total = tl.load(sums + (row * parts + part) * 2 + 1, mask=part < parts, other=0.0)
        highest = tl.max(peak, 0)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        tl.store(totals + row, safe + tl.log(tl.sum(total * tl.exp(peak - safe), 0)))
        best_order, best_index, place = _largest(order, index, K, BK)
        tl.store(values + row * K + place, _flip(best_order).to(tl.float32, bitcast=True), mask=place < K)
        tl.store(ids + row * K + place, best_index.to(tl.int64), mask=place < K)

    @triton.jit
    def _child_score(values, totals, scores, batch, child, count, WIDTH: tl.constexpr, FIRST: tl.constexpr):
        """The parent's score + log-probability, never above 0; -inf without a child, or in a row of -inf alone."""
        real = child < count * WIDTH
        row = batch * count + child // WIDTH
        value = tl.load(values + batch * count * WIDTH + child, mask=real, other=float("-inf"))
        log_p = value - tl.load(totals + row, mask=real, other=0.0)
        log_p = tl.where(log_p == log_p, tl.minimum(log_p, 0.0), float("-inf"))
        return log_p if FIRST else tl.load(scores + row, mask=real, other=0.0) + log_p

    @triton.jit
    def _precedes(their, other, own, mine):
        """int32 [others, own]: whether a score stands before another in a stable sort, best first."""
        tied = (their[:, None] == own[None, :]) & (other[:, None] < mine[None, :])
        return ((their[:, None] > own[None, :]) | tied).to(tl.int32)

    @triton.jit(do_not_specialize=["count", "kept", "total", "filled", "number", "slots"])
    def _grow_kernel(
        values, ids, totals, up_score, up_index, up_seen, length, table,
        stored_score, stored_token, stored_parent, stored_depth,
        token_out, score_out, under_out, index_out, seen_out, position_out, write_out,
        count, kept, total, filled, number, slots,
        K: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, MAPPED: tl.constexpr,
        BM: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One sequence's children: all are stored, the best of them become the next frontier."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        child = tl.arange(0, BM)
        parent = child // WIDTH
        children = count * WIDTH
        real = child < children
        score = _child_score(values, totals, up_score, batch, child, count, WIDTH, FIRST)
        token = tl.load(ids + batch * children + child, mask=real, other=0)
        target = tl.load(table + token, mask=real, other=0) if MAPPED else token
        up = tl.full((BM,), -1, tl.int64)
        if not FIRST:
            up = tl.load(up_index + batch * count + parent, mask=real, other=-1)
        base = tl.load(length + batch)
        spot = batch * total + filled + child
        tl.store(stored_score + spot, score, mask=real)
        tl.store(stored_token + spot, token, mask=real)
        tl.store(stored_parent + spot, up, mask=real)
        tl.store(stored_depth + spot, tl.zeros((BM,), tl.int64) + number + 1, mask=real)
        # places in the order of a stable sort
        ahead = tl.zeros((CHUNK, BM), tl.int32)
        for first in range(0, children, CHUNK):
            other = first + tl.arange(0, CHUNK)
            their = _child_score(values, totals, up_score, batch, other, count, WIDTH, FIRST)
            ahead += _precedes(their, other, score, child)
        rank = tl.sum(ahead, 0)
        chosen = rank < kept
        place = batch * kept + rank
        tl.store(token_out + place, target, mask=chosen)
        tl.store(score_out + place, score, mask=chosen)
        tl.store(under_out + place, parent.to(tl.int64), mask=chosen)
        tl.store(index_out + place, (filled + child).to(tl.int64), mask=chosen)
        node = tl.arange(0, BK)
        own = number * K + node
        tl.store(position_out + batch * kept + node, tl.zeros((BK,), tl.int64) + base + number, mask=node < kept)
        tl.store(write_out + batch * kept + node, base + own, mask=node < kept)
        slot = tl.arange(0, BN)
        seen = (slot[None, :] == own[:, None]).to(tl.uint8)
        inside = (node < kept)[:, None] & (slot < slots)[None, :]
        if not FIRST:
            under = tl.sum(tl.where(rank[:, None] == node[None, :], parent[:, None], 0), 0)
            row = (batch * count + under) * slots
            seen = seen | tl.load(up_seen + row[:, None] + slot[None, :], mask=inside, other=0)
        tl.store(seen_out + ((batch * kept + node) * slots)[:, None] + slot[None, :], seen, mask=inside)

    @triton.jit
    def _rank_kernel(score, kept, total, keep, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
        """Whether a candidate is among the `keep` first of a stable sort."""
        await_previous(OVERLAP)
        first = tl.program_id(0).to(tl.int64) * total
        mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(score + first + mine, mask=mine < total, other=float("-inf"))
        ahead = tl.zeros((CHUNK, BLOCK), tl.int32)
        for begin in range(0, total, CHUNK):
            other = begin + tl.arange(0, CHUNK)
            their = tl.load(score + first + other, mask=other < total, other=float("-inf"))
            ahead += _precedes(their, other, own, mine)
        tl.store(kept + first + mine, (tl.sum(ahead, 0) < keep).to(tl.uint8), mask=mine < total)

    @triton.jit
    def _compact_kernel(
        kept, score, token, parent, depth, table, token_out, parent_out, depth_out, score_out, valid_out, total, keep,
        MAPPED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Move what is kept to its place among the kept, and its parent's index with it."""
        await_previous(OVERLAP)
        first = tl.program_id(0).to(tl.int64) * total
        mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = mine < total
        moved = tl.load(kept + first + mine, mask=inside, other=0) != 0
        own_token = tl.load(token + first + mine, mask=inside, other=0)
        own_score = tl.load(score + first + mine, mask=inside, other=0.0)
        own_depth = tl.load(depth + first + mine, mask=inside, other=0)
        up = tl.load(parent + first + mine, mask=inside, other=-1).to(tl.int32)
        if MAPPED:
            own_token = tl.load(table + own_token, mask=moved, other=0)
        # how many are kept before it, and before its parent
        ahead = tl.zeros((CHUNK, BLOCK), tl.int32)
        up_ahead = tl.zeros((CHUNK, BLOCK), tl.int32)
        for begin in range(0, total, CHUNK):
            other = begin + tl.arange(0, CHUNK)
            there = tl.load(kept + first + other, mask=other < total, other=0).to(tl.int32)
            ahead += tl.where(other[:, None] < mine[None, :], there[:, None], 0)
            up_ahead += tl.where(other[:, None] < up[None, :], there[:, None], 0)
        spot = tl.program_id(0).to(tl.int64) * keep + tl.sum(ahead, 0)
        tl.store(token_out + spot, own_token, mask=moved)
        tl.store(parent_out + spot, tl.where(up >= 0, tl.sum(up_ahead, 0).to(tl.int64), -1), mask=moved)
        tl.store(depth_out + spot, own_depth, mask=moved)
        tl.store(score_out + spot, own_score, mask=moved)
        tl.store(valid_out + spot, (tl.abs(own_score) < float("inf")).to(tl.uint8), mask=moved)
