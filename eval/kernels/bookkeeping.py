"""The steps of a decoding cycle beside its matrix products: one kernel each on CUDA, eager twins elsewhere.

They lay the tree out for the target, walk it along the target's choices, take the accepted path over, and decide which
rows go on. As single torch operations these are about a hundred launches a cycle, which take longer than the layers of
a small target.
Shape legend: B batch, N nodes, M = N + 1 (row 0 is the root), K levels, J = K + 1 tokens of an accepted path, S stops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.tree import Tree, with_root
from headstart.heads.kernels.device import wants_kernel


def contiguous_rows(tensor_BN: Tensor) -> Tensor:
    """The tensor with its last axis contiguous. Its rows may have any stride, 0 included."""
    return tensor_BN if tensor_BN.stride(-1) == 1 or tensor_BN.shape[-1] <= 1 else tensor_BN.contiguous()


@dataclass(frozen=True)
class Layout:
    """Root and nodes as the target reads them.

    Attributes:
        tokens_BM, position_BM, write_BM: int64; the root at slot and position `length`, node n at slot length + 1 + n.
        mask_BMM: bool, as tree.with_root makes it; None for chains, where every token sees all tokens before it.
    """

    tokens_BM: Tensor
    position_BM: Tensor
    write_BM: Tensor
    mask_BMM: Tensor | None


def lay_out_eager(tree: Tree, roots_B: Tensor, length_B: Tensor) -> Layout:
    tokens_BM = torch.cat([roots_B[:, None], tree.tokens_BN], 1)
    depth_BM = torch.cat([torch.zeros_like(roots_B)[:, None], tree.depth_BN], 1)
    write_BM = length_B[:, None] + torch.arange(tree.nodes + 1, device=roots_B.device)
    return Layout(tokens_BM, length_B[:, None] + depth_BM, write_BM, None if tree.linear else with_root(tree.mask_BNN))


def lay_out(tree: Tree, roots_B: Tensor, length_B: Tensor) -> Layout:
    """Root and nodes as one forward of the target. Args: roots_B, length_B: int64, root and context length of a row."""
    return (lay_out_kernel if wants_kernel(roots_B) else lay_out_eager)(tree, roots_B, length_B)


def lay_out_kernel(tree: Tree, roots_B: Tensor, length_B: Tensor) -> Layout:
    batch, count = roots_B.shape[0], tree.nodes + 1
    tokens_BM, position_BM, write_BM = (roots_B.new_empty((batch, count)) for _ in range(3))
    mask = None if tree.linear else torch.empty((batch, count, count), dtype=torch.bool, device=roots_B.device)
    tokens, parent, depth = (contiguous_rows(part) for part in (tree.tokens_BN, tree.parent_BN, tree.depth_BN))
    launch(_lay_out_kernel, (batch, count),
        tokens, parent, depth, roots_B.contiguous(), length_B.contiguous(), tokens_BM, position_BM, write_BM,
        tokens_BM if mask is None else mask.view(torch.uint8), count, tree.levels,
        tokens.stride(0), parent.stride(0), depth.stride(0),
        TREE=mask is not None, BM=triton.next_power_of_2(count), num_warps=1, **launch_options(roots_B.device),
    )  # fmt: skip
    return Layout(tokens_BM, position_BM, write_BM, mask)


def walk_kernel(tree: Tree, choice_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As verify.walk_choices: (path_BK, accepted_B, next_B)."""
    choice_BM, verified = choice_BM.contiguous(), _empty_path(tree, choice_BM)
    tokens, parent, valid = (contiguous_rows(part) for part in (tree.tokens_BN, tree.parent_BN, tree.valid_BN))
    launch(_walk_kernel, (len(choice_BM),),
        tokens, parent, valid.view(torch.uint8), choice_BM, *verified, tree.nodes, tree.levels,
        tokens.stride(0), parent.stride(0), valid.stride(0),
        BN=triton.next_power_of_2(max(tree.nodes, 1)), num_warps=1, **launch_options(choice_BM.device),
    )  # fmt: skip
    return verified


def synthetic_kernel(
    tree: Tree, choice_BM: Tensor, uniform_BK: Tensor, rate_K: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As verify.synthetic_eager: (path_BK, accepted_B, next_B)."""
    choice_BM, verified = choice_BM.contiguous(), _empty_path(tree, choice_BM)
    parent, depth, valid = (contiguous_rows(part) for part in (tree.parent_BN, tree.depth_BN, tree.valid_BN))
    own = tree.nodes > 0 and tree.rate_BN is not None
    rates = rate_K if tree.rate_BN is None or not own else contiguous_rows(tree.rate_BN)
    launch(_synthetic_kernel, (len(choice_BM),),
        parent, depth, valid.view(torch.uint8), choice_BM, uniform_BK, rates, *verified,
        tree.nodes, tree.levels, rates.shape[-1], parent.stride(0), depth.stride(0), valid.stride(0), rates.stride(0),
        OWN=own, BN=triton.next_power_of_2(max(tree.nodes, 1)), BK=triton.next_power_of_2(tree.levels + 1), num_warps=1,
        **launch_options(choice_BM.device),
    )  # fmt: skip
    return verified


def _empty_path(tree: Tree, choice_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for (path_BK, accepted_B, next_B)."""
    batch = len(choice_BM)
    return choice_BM.new_empty((batch, tree.levels)), choice_BM.new_empty(batch), choice_BM.new_empty(batch)


@dataclass(frozen=True)
class Taken:
    """The accepted path of every row.

    Attributes:
        tokens_BJ: int64, the root, then accepted drafts; the first `count_B` are valid (0 in rows that are idle).
        column_BJ: int64, index of each in the target's forward (0 = the root); 0 beyond the path.
        length_B: int64, length of the contexts with the path.
        source_BK, target_BK: int64, KV slots to copy from and to; both are the bin where nothing is to be copied.
    """

    tokens_BJ: Tensor
    count_B: Tensor
    column_BJ: Tensor
    length_B: Tensor
    source_BK: Tensor
    target_BK: Tensor


def take_path_eager(
    tree: Tree, roots_B: Tensor, path_BK: Tensor, active_B: Tensor, length_B: Tensor, bin: int
) -> Taken:
    kept_BK = (path_BK >= 0) & active_B[:, None]
    count_B = kept_BK.sum(1) + active_B
    step_K = torch.arange(1, path_BK.shape[1] + 1, device=path_BK.device)
    source_BK = torch.where(kept_BK, length_B[:, None] + 1 + path_BK, bin)
    target_BK = torch.where(kept_BK, length_B[:, None] + step_K, bin)
    column_BJ = torch.cat([torch.zeros_like(roots_B)[:, None], (path_BK + 1).clamp(min=0)], 1)
    tokens_BJ = torch.cat([roots_B[:, None], tree.tokens_BN], 1).gather(1, column_BJ)
    return Taken(tokens_BJ, count_B, column_BJ, length_B + count_B, source_BK, target_BK)


def take_path(tree: Tree, roots_B: Tensor, path_BK: Tensor, active_B: Tensor, length_B: Tensor, bin: int) -> Taken:
    """Args: path_BK: as in Verified; active_B: rows that are not idle; bin: slot that padding is written to."""
    run = take_path_kernel if wants_kernel(roots_B) else take_path_eager
    return run(tree, roots_B, path_BK, active_B, length_B, bin)


def take_path_kernel(
    tree: Tree, roots_B: Tensor, path_BK: Tensor, active_B: Tensor, length_B: Tensor, bin: int
) -> Taken:
    batch, levels = path_BK.shape
    made = [roots_B.new_empty(shape) for shape in ((batch, levels + 1), (batch,), (batch, levels + 1), (batch,))]
    moves = [roots_B.new_empty((batch, levels)) for _ in range(2)]
    tokens = contiguous_rows(tree.tokens_BN)
    launch(_take_path_kernel, (batch,),
        tokens, roots_B.contiguous(), path_BK.contiguous(), active_B.contiguous().view(torch.uint8),
        length_B.contiguous(), *made, *moves, levels,
        tokens.stride(0), bin, BJ=triton.next_power_of_2(levels + 1), num_warps=1, **launch_options(roots_B.device),
    )  # fmt: skip
    return Taken(*made, *moves)


@dataclass(frozen=True)
class Advanced:
    """Rows after a cycle.

    Attributes:
        table: int64 [B, J + 4]: tokens_BJ, then the columns COUNT, NEXT, DRAFTED and LENGTH of loop.py.
        roots_B: int64, the next roots. left_B: int64, tokens that may still follow. active_B: bool, rows that go on.
    """

    table: Tensor
    roots_B: Tensor
    left_B: Tensor
    active_B: Tensor


def advance_eager(
    tree: Tree, taken: Taken, next_B: Tensor, roots_B: Tensor, left_B: Tensor, active_B: Tensor, stop_BS: Tensor
) -> Advanced:
    roots_B = torch.where(active_B, next_B, roots_B)
    left_B = left_B - taken.count_B
    # new tokens are the accepted drafts and the next root; the root before them came with the cycle before
    column_J = torch.arange(taken.tokens_BJ.shape[1], device=roots_B.device)
    fresh_BJ = (column_J > 0) & (column_J < taken.count_B[:, None])
    said_B = (stops_at(taken.tokens_BJ, stop_BS) & fresh_BJ).any(1) | stops_at(roots_B[:, None], stop_BS)[:, 0]
    active_B = active_B & ~said_B & (left_B > 0)
    columns = [taken.count_B, roots_B, drafted_levels(tree), taken.length_B]
    return Advanced(torch.cat([taken.tokens_BJ, torch.stack(columns, 1)], 1), roots_B, left_B, active_B)


def advance(
    tree: Tree, taken: Taken, next_B: Tensor, roots_B: Tensor, left_B: Tensor, active_B: Tensor, stop_BS: Tensor
) -> Advanced:
    """Which rows go on after a cycle: those without a stop token that have not reached their limit.

    Args:
        next_B: the target's token after the path. roots_B, left_B, active_B: their values before the cycle.
        stop_BS: int64, stop tokens of each row, -1 = none.
    """
    run = advance_kernel if wants_kernel(roots_B) else advance_eager
    return run(tree, taken, next_B, roots_B, left_B, active_B, stop_BS)


def advance_kernel(
    tree: Tree, taken: Taken, next_B: Tensor, roots_B: Tensor, left_B: Tensor, active_B: Tensor, stop_BS: Tensor
) -> Advanced:
    batch, width = taken.tokens_BJ.shape
    table, after = roots_B.new_empty((batch, width + 4)), [torch.empty_like(x) for x in (roots_B, left_B, active_B)]
    depth, valid, stops = (contiguous_rows(part) for part in (tree.depth_BN, tree.valid_BN, stop_BS))
    launch(_advance_kernel, (batch,),
        taken.tokens_BJ, taken.count_B, taken.length_B, next_B, roots_B, left_B, active_B.view(torch.uint8), stops,
        depth, valid.view(torch.uint8), table, after[0], after[1], after[2].view(torch.uint8), width, tree.nodes,
        stops.shape[1], stops.stride(0), depth.stride(0), valid.stride(0), BJ=triton.next_power_of_2(width),
        BN=triton.next_power_of_2(max(tree.nodes, 1)), num_warps=1, **launch_options(roots_B.device),
    )  # fmt: skip
    return Advanced(table, *after)


def stops_at(tokens_BJ: Tensor, stop_BS: Tensor) -> Tensor:
    """bool [B, J]: which tokens are stop tokens of their row."""
    return (tokens_BJ[:, :, None] == stop_BS[:, None, :]).any(-1)


def drafted_levels(tree: Tree) -> Tensor:
    """int64 [B], deepest valid level of each row."""
    if tree.nodes == 0:
        return tree.tokens_BN.new_zeros(tree.tokens_BN.shape[0])
    return torch.where(tree.valid_BN, tree.depth_BN, 0).amax(1)


if triton is not None:

    @triton.jit(do_not_specialize=["count", "levels", "stride_t", "stride_p", "stride_d"])
    def _lay_out_kernel(
        tokens, parent, depth, roots, length, tokens_out, position, write, mask,
        count, levels, stride_t, stride_p, stride_d,
        TREE: tl.constexpr, BM: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row and token."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        own = tl.program_id(1)
        row = batch * count + own
        node = tl.maximum(own - 1, 0)
        base = tl.load(length + batch)
        token = tl.load(tokens + batch * stride_t + node, mask=own > 0, other=0)
        level = tl.load(depth + batch * stride_d + node, mask=own > 0, other=0)
        tl.store(tokens_out + row, tl.where(own > 0, token, tl.load(roots + batch)))
        tl.store(position + row, base + level)
        tl.store(write + row, base + own)
        if TREE:
            column = tl.arange(0, BM)
            seen = (column == 0) | (column == own)
            current = tl.load(parent + batch * stride_p + node, mask=own > 0, other=-1)
            for _ in range(1, levels):
                seen = seen | (column == current + 1)
                above = tl.load(parent + batch * stride_p + tl.maximum(current, 0), mask=current >= 0, other=-1)
                current = above
            tl.store(mask + row * count + column, seen.to(tl.uint8), mask=column < count)

    @triton.jit(do_not_specialize=["nodes", "levels", "stride_t", "stride_p", "stride_v"])
    def _walk_kernel(
        tokens, parent, valid, choice, path, accepted, following, nodes, levels, stride_t, stride_p, stride_v,
        BN: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row: from the root, the first child that is the target's choice, as long as there is one."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        node = tl.arange(0, BN)
        inside = node < nodes
        token = tl.load(tokens + batch * stride_t + node, mask=inside, other=-1)
        above = tl.load(parent + batch * stride_p + node, mask=inside, other=-2)
        there = tl.load(valid + batch * stride_v + node, mask=inside, other=0) != 0
        chosen = choice + batch * (nodes + 1)
        wanted = tl.load(chosen)
        current = wanted * 0 - 1
        count = wanted * 0
        for level in range(levels):
            hit = there & (above == current) & (token == wanted)
            found = tl.min(tl.where(hit, node, BN), 0)
            going = found < BN
            tl.store(path + batch * levels + level, tl.where(going, found, -1).to(tl.int64))
            # where nothing is found nothing is found later on: no node hangs under N
            current = tl.where(going, found, BN).to(tl.int64)
            wanted = tl.where(going, tl.load(chosen + current + 1, mask=going, other=0), wanted)
            count += going.to(tl.int64)
        tl.store(accepted + batch, count)
        tl.store(following + batch, wanted)

    @triton.jit(do_not_specialize=["nodes", "levels", "known", "stride_p", "stride_d", "stride_v", "stride_r"])
    def _synthetic_kernel(
        parent, depth, valid, choice, uniform, rates, path, accepted, following, nodes, levels, known,
        stride_p, stride_d, stride_v, stride_r, OWN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row: from its first deepest node up to the root. OWN: whether every node has a rate."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        node = tl.arange(0, BN)
        there = tl.load(valid + batch * stride_v + node, mask=node < nodes, other=0) != 0
        deep = tl.where(there, tl.load(depth + batch * stride_d + node, mask=node < nodes, other=0), 0)
        top = tl.max(deep, 0)
        last = tl.min(tl.where(deep == top, node, BN), 0).to(tl.int64)
        if OWN:
            count, current = top, last
            for step in range(levels):
                at = levels - step
                on = at <= top
                drawn = tl.load(uniform + batch * levels + at - 1)
                chance = tl.load(rates + batch * stride_r + current, mask=on, other=0.0)
                # upwards, so that the highest node that fails decides
                count = tl.where(on & (drawn >= chance), at - 1, count)
                current = tl.where(on, tl.load(parent + batch * stride_p + current, mask=on, other=-1), current)
        else:
            level = tl.arange(0, BK)
            chances = tl.load(rates + level, mask=level < known, other=0.0)
            draws = tl.load(uniform + batch * levels + level, mask=level < levels, other=2.0)
            passed = tl.min(tl.where(draws < chances, BK, level), 0)
            count = tl.minimum(passed.to(tl.int64), top)
        current = last
        end = top * 0 - 1
        for step in range(levels):
            at = levels - step
            on = at <= top
            tl.store(path + batch * levels + at - 1, tl.where(on & (at <= count), current, -1))
            end = tl.where(on & (at == count), current, end)
            current = tl.where(on, tl.load(parent + batch * stride_p + current, mask=on, other=-1), current)
        tl.store(accepted + batch, count)
        tl.store(following + batch, tl.load(choice + batch * (nodes + 1) + end + 1))

    @triton.jit(do_not_specialize=["levels", "stride_t", "bin"])
    def _take_path_kernel(
        tokens, roots, path, active, length, tokens_out, count_out, column_out, length_out, source, target,
        levels, stride_t, bin, BJ: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row; column j holds level j, the root in column 0."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        level = tl.arange(0, BJ)
        drafted = (level > 0) & (level <= levels)
        at = tl.load(path + batch * levels + level - 1, mask=drafted, other=-1)
        on = tl.load(active + batch) != 0
        base = tl.load(length + batch)
        token = tl.load(tokens + batch * stride_t + at, mask=at >= 0, other=0)
        kept = (at >= 0) & on
        count = tl.sum(kept.to(tl.int64), 0) + on.to(tl.int64)
        place = batch * (levels + 1) + level
        tl.store(tokens_out + place, tl.where(at >= 0, token, tl.load(roots + batch)), mask=level <= levels)
        tl.store(column_out + place, tl.maximum(at + 1, 0), mask=level <= levels)
        tl.store(count_out + batch, count)
        tl.store(length_out + batch, base + count)
        move = batch * levels + level - 1
        tl.store(source + move, tl.where(kept, base + 1 + at, bin), mask=drafted)
        tl.store(target + move, tl.where(kept, base + level, bin), mask=drafted)

    @triton.jit(do_not_specialize=["width", "nodes", "several", "stride_s", "stride_d", "stride_v"])
    def _advance_kernel(
        tokens, count, length, following, roots, left, active, stops, depth, valid,
        table, roots_out, left_out, active_out, width, nodes, several, stride_s, stride_d, stride_v,
        BJ: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BJ)
        token = tl.load(tokens + batch * width + column, mask=column < width, other=-2)
        new = tl.load(count + batch)
        on = tl.load(active + batch) != 0
        root = tl.where(on, tl.load(following + batch), tl.load(roots + batch))
        remaining = tl.load(left + batch) - new
        fresh = (column > 0) & (column < new)
        said = new * 0
        for number in range(several):
            stop = tl.load(stops + batch * stride_s + number)
            said += tl.sum((fresh & (token == stop)).to(tl.int64), 0) + (root == stop).to(tl.int64)
        node = tl.arange(0, BN)
        there = tl.load(valid + batch * stride_v + node, mask=node < nodes, other=0) != 0
        level = tl.load(depth + batch * stride_d + node, mask=node < nodes, other=0)
        row = table + batch * (width + 4)
        tl.store(row + column, token, mask=column < width)
        tl.store(row + width, new)
        tl.store(row + width + 1, root)
        tl.store(row + width + 2, tl.max(tl.where(there, level, 0), 0))
        tl.store(row + width + 3, tl.load(length + batch))
        tl.store(roots_out + batch, root)
        tl.store(left_out + batch, remaining)
        tl.store(active_out + batch, (on & (said == 0) & (remaining > 0)).to(tl.uint8))
