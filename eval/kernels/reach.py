"""How probable it is that a drafted node is reached: that it and all its ancestors are accepted.

A node's logit l is what the draft says of itself. Calibrated for its level it gives the probability p that the node is
accepted if its ancestors are. The product of p along the path from the root is the node's reach.
Shape legend: B batch, N nodes, K levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headstart.eval.kernels.bookkeeping import contiguous_rows
from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.tree import Tree
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.sampling import NEAREST, logit_of

#: nodes of a sequence that the kernel takes; larger trees go to the eager twin
MOST_NODES = 256
#: logits are kept within ±this: float32 knows no probability nearer to 0 or 1, and a sum with an infinite one is lost
LARGEST_LOGIT = 30.0


@dataclass(frozen=True)
class Reach:
    """Logits and reach of every node.

    Attributes: both_2BN: float32, both in one tensor, so that one copy brings them to the host.
    """

    both_2BN: Tensor

    @property
    def logit_BN(self) -> Tensor:
        """l of every node, finite; 0 where no node is."""
        return self.both_2BN[0]

    @property
    def log_reach_BN(self) -> Tensor:
        """Logarithm of the reach, never above the parent's; -inf where no node is."""
        return self.both_2BN[1]


def reach(tree: Tree, scale_K: Tensor, bias_K: Tensor) -> Reach:
    """Reach of every node: Σ log σ(scale · l + bias) over its path, each term with the numbers of its own level.

    l is `tree.confidence_BN`. Without it, l comes from `tree.score_BN`: the logit of exp(score - parent's score).
    Without both it is 0, so that the bias alone speaks. A logit that is NaN counts as very low, and a path with a term
    that is NaN has reach 0.

    Args: scale_K, bias_K: float32; deeper levels take the last one's.
    """
    run = reach_kernel if wants_kernel(tree.parent_BN) and tree.nodes <= MOST_NODES else reach_eager
    return run(tree, scale_K, bias_K)


def reach_eager(tree: Tree, scale_K: Tensor, bias_K: Tensor) -> Reach:
    if tree.nodes == 0:
        return _none(tree)
    level_BN = (tree.depth_BN - 1).clamp(0, len(scale_K) - 1)
    logit_BN = torch.where(tree.valid_BN, _logits(tree), 0.0)
    term_BN = logsigmoid(scale_K[level_BN] * logit_BN + bias_K[level_BN]).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    # Own term first, then upwards. A node's sum then adds one term to what its parent's begins with. Rounding keeps
    # order, so it ends no higher than the parent's. Another order of additions would not guarantee that.
    sum_BN, current_BN = term_BN, torch.where(tree.valid_BN, tree.parent_BN, -1)
    for _ in range(1, tree.levels):
        above_BN = current_BN.clamp(min=0)
        sum_BN = sum_BN + torch.where(current_BN >= 0, term_BN.gather(1, above_BN), 0.0)
        current_BN = torch.where(current_BN >= 0, tree.parent_BN.gather(1, above_BN), -1)
    return Reach(torch.stack([logit_BN, torch.where(tree.valid_BN, sum_BN, -torch.inf)]))


def _logits(tree: Tree) -> Tensor:
    """l of every node, float32 [B, N], within ±LARGEST_LOGIT."""
    if tree.confidence_BN is not None:
        logit_BN = tree.confidence_BN.float()
    elif tree.score_BN is not None:
        score_BN = tree.score_BN.float()
        above_BN = torch.where(tree.parent_BN >= 0, score_BN.gather(1, tree.parent_BN.clamp(min=0)), 0.0)
        logit_BN = logit_of((score_BN - above_BN).exp())
    else:
        logit_BN = torch.zeros_like(tree.tokens_BN, dtype=torch.float32)
    return logit_BN.nan_to_num(nan=-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


def _none(tree: Tree) -> Reach:
    return Reach(torch.empty((2, *tree.tokens_BN.shape), dtype=torch.float32, device=tree.tokens_BN.device))


def reach_kernel(tree: Tree, scale_K: Tensor, bias_K: Tensor) -> Reach:
    """As reach_eager, in one launch."""
    made = _none(tree)
    if tree.nodes == 0:
        return made
    said = tree.score_BN if tree.confidence_BN is None else tree.confidence_BN
    parent, depth, valid = (contiguous_rows(part) for part in (tree.parent_BN, tree.depth_BN, tree.valid_BN))
    launch(_reach_kernel, (len(parent),),
        made.logit_BN if said is None else said.contiguous(), scale_K.contiguous(), bias_K.contiguous(),
        parent, depth, valid.view(torch.uint8), made.logit_BN, made.log_reach_BN,
        tree.nodes, tree.levels, len(scale_K), parent.stride(0), depth.stride(0), valid.stride(0),
        SAID=said is not None, SCORE=tree.confidence_BN is None, NEAREST=NEAREST, LARGEST=LARGEST_LOGIT,
        BN=triton.next_power_of_2(tree.nodes), num_warps=1, **launch_options(parent.device),
    )  # fmt: skip
    return made


if triton is not None:

    @triton.jit(do_not_specialize=["nodes", "levels", "size", "stride_p", "stride_d", "stride_v"])
    def _reach_kernel(
        said, scale, bias, parent, depth, valid, logit_out, reach_out,
        nodes, levels, size, stride_p, stride_d, stride_v,
        SAID: tl.constexpr, SCORE: tl.constexpr, NEAREST: tl.constexpr, LARGEST: tl.constexpr,
        BN: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per sequence. Terms stand in `reach_out` until all paths are walked."""
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        node = tl.arange(0, BN)
        there = tl.load(valid + batch * stride_v + node, mask=node < nodes, other=0) != 0
        current = tl.load(parent + batch * stride_p + node, mask=there, other=-1)
        level = tl.load(depth + batch * stride_d + node, mask=there, other=1) - 1
        level = tl.minimum(tl.maximum(level, 0), size - 1)
        row = batch * nodes
        logit = tl.zeros((BN,), tl.float32)
        if SAID:
            logit = tl.load(said + row + node, mask=there, other=0.0).to(tl.float32)
            if SCORE:
                above = tl.load(said + row + current, mask=current >= 0, other=0.0).to(tl.float32)
                step = logit - above
                q = tl.minimum(tl.maximum(tl.exp(step), NEAREST), 1 - NEAREST)
                logit = tl.where(step == step, tl.log(q / (1 - q)), -LARGEST)
            # minimum and maximum may pass NaN or not, so it goes first
            logit = tl.where(logit == logit, logit, -LARGEST)
            logit = tl.where(there, tl.minimum(tl.maximum(logit, -LARGEST), LARGEST), 0.0)
        x = tl.load(scale + level) * logit + tl.load(bias + level)
        term = tl.minimum(tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x))), 0.0)
        term = tl.where(x == x, term, float("-inf"))
        tl.store(logit_out + row + node, logit, mask=node < nodes)
        tl.store(reach_out + row + node, term, mask=node < nodes)
        tl.debug_barrier()  # a path is read by other threads than those that wrote it
        total = term
        for _ in range(1, levels):
            total += tl.load(reach_out + row + current, mask=current >= 0, other=0.0)
            current = tl.load(parent + batch * stride_p + current, mask=current >= 0, other=-1)
        tl.debug_barrier()  # every thread has read the terms that the sums overwrite
        tl.store(reach_out + row + node, tl.where(there, total, float("-inf")), mask=node < nodes)
