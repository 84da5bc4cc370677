"""Which drafts the target accepts (methods §10). Pure functions of the tree, the target's logits and random draws.

Every verifier has two parts: a deterministic one (distributions, acceptance probabilities, residuals) and a walk that
random draws drive. So tests can enumerate the draws and prove that the output distribution is exact.
Shape legend: B batch, N nodes, M = N + 1 rows of the target (row 0 is the root, row n + 1 is node n), F flat rows, K
levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.decoding.sampling import Sampling, best, draw, probabilities
from headstart.eval.kernels.bookkeeping import synthetic_kernel, walk_kernel
from headstart.eval.kernels.flat import FlatRows
from headstart.eval.tree import Tree
from headstart.heads.kernels.device import wants_kernel


@dataclass(frozen=True)
class Verified:
    """What one verification commits.

    Attributes:
        path_BK: int64, accepted node indices from the first level on, -1 after the end.
        accepted_B: int64, accepted drafts.
        next_B: int64, the target's own token after the accepted path: the next root.
    """

    path_BK: Tensor
    accepted_B: Tensor
    next_B: Tensor


def verify(
    tree: Tree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    seen_BV: Tensor | None = None,
    rate_K: Tensor | None = None,
    flat: FlatRows | None = None,
) -> Verified:
    """Accept drafts by the rule that `sampling` and the tree ask for.

    The rules (`rule_of`): greedy; one draw from p (trees without q); block verification (chains drawn from q); token
    verification (other trees drawn from q); typical and synthetic acceptance, which are lossy.

    Args:
        logits: the target's raw logits at the root and at every node, [B, M, V]; of flat rows [F, V].
        seen_BV: bool, tokens of each context with its root; needed for a repetition penalty only.
        rate_K: `sampling.synthetic` as a float32 tensor on the device: a captured cycle cannot copy it there.
        flat: the rows that `logits` are of, where these are not all places; cut nodes must be invalid in the tree.
    """
    seen_BMV = seen_tokens(tree, seen_BV) if seen_BV is not None and sampling.penalises else None
    if sampling.synthetic is not None:
        if sampling.greedy:
            choice_BM = _everywhere(best, logits, sampling, seen_BMV, flat)
        else:
            choice_BM = draw(_everywhere(probabilities, logits, sampling, seen_BMV, flat), generator)
        if rate_K is None:
            rate_K = torch.tensor(sampling.synthetic, device=choice_BM.device)
        return synthetic(tree, choice_BM, rate_K, generator)
    if sampling.greedy:
        return walk_choices(tree, _everywhere(best, logits, sampling, seen_BMV, flat))
    p_BMV = _everywhere(probabilities, logits, sampling, seen_BMV, flat)
    if sampling.typical is not None:
        return typical(tree, p_BMV, draw(p_BMV, generator), *sampling.typical)
    if tree.q_BNV is None:
        return walk_choices(tree, draw(p_BMV, generator))
    uniform_BN = torch.rand(tree.tokens_BN.shape, dtype=p_BMV.dtype, device=p_BMV.device, generator=generator)
    if rule_of(tree, sampling) == "block":
        reach_BM, ends_BN = block_acceptance(tree, tree.q_BNV, p_BMV)
        end_B, path_BK, accepted_B = walk_block(tree, uniform_BN < ends_BN)
        return Verified(path_BK, accepted_B, draw(block_residual(tree, tree.q_BNV, p_BMV, reach_BM, end_B), generator))
    ratio_BN, residual_BMV = acceptance(tree, p_BMV)
    end_B, path_BK, accepted_B = walk_accepted(tree, uniform_BN < ratio_BN)
    last_BV = residual_BMV[torch.arange(end_B.shape[0], device=end_B.device), end_B]
    return Verified(path_BK, accepted_B, draw(last_BV, generator))


def _everywhere(
    make: Callable[[Tensor, Sampling, Tensor | None], Tensor],
    logits: Tensor,
    sampling: Sampling,
    seen_BMV: Tensor | None,
    flat: FlatRows | None,
) -> Tensor:
    """What `make` gives for the logits of every place, [B, M, …]. It is made of flat rows and spread, where it can."""
    if flat is None:
        return make(logits, sampling, seen_BMV)
    if seen_BMV is None:
        return flat.places(make(logits, sampling, None))
    return make(flat.places(logits), sampling, seen_BMV)


def rule_of(tree: Tree, sampling: Sampling) -> str | None:
    """The name of the rule that `verify` follows, for reports; None where nothing is drafted.

    Without q both lossless rules are one draw from p: with q = 1 at the draft, block verification accepts just as many.
    """
    if tree.nodes == 0:
        return None
    if sampling.synthetic is not None:
        return "synthetic"
    if sampling.greedy:
        return "greedy"
    if sampling.typical is not None:
        return "typical"
    if tree.q_BNV is None:
        return "draw"
    return sampling.verification if tree.linear else "token"


def seen_tokens(tree: Tree, seen_BV: Tensor) -> Tensor:
    """bool [B, M, V]: for each row of the target, the tokens of the context and of the path to it, its own included."""
    batch, vocab = seen_BV.shape
    seen_BMV = seen_BV[:, None, :].expand(batch, tree.nodes + 1, vocab).clone()
    mask_BNN = tree.mask_BNN
    for n in range(tree.nodes):
        token_B1V = torch.zeros_like(seen_BV).scatter_(1, tree.tokens_BN[:, n : n + 1], True)[:, None, :]
        seen_BMV[:, 1:] |= mask_BNN[:, :, n : n + 1] & token_B1V
    return seen_BMV


def walk_choices(tree: Tree, choice_BM: Tensor) -> Verified:
    """Follow the target's own choice at each row as long as a child holds it.

    With choice = argmax this is greedy verification. With choice drawn from p it is exact sampling for trees that are a
    function of the context: to accept children in order with p(x), then draw from the renormalised rest, is the same as
    to draw once and look whether a child holds the draw.
    """
    return Verified(*walk_kernel(tree, choice_BM)) if wants_kernel(choice_BM) else walk_choices_eager(tree, choice_BM)


def walk_choices_eager(tree: Tree, choice_BM: Tensor) -> Verified:
    end_B, path_BK, accepted_B = walk_accepted(tree, tree.tokens_BN == choice_BM.gather(1, tree.parent_BN + 1))
    return Verified(path_BK, accepted_B, choice_BM.gather(1, end_B[:, None])[:, 0])


def walk_accepted(tree: Tree, accept_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow, from the root, the first accepted child of each accepted node.

    Returns: end_B (row of the target after the last accepted node: 0 = root, n + 1 = node n), path_BK, accepted_B.
    """
    accept_BN = accept_BN & tree.valid_BN
    if not tree.linear:
        earlier_NN = torch.ones((tree.nodes, tree.nodes), dtype=torch.bool, device=accept_BN.device).tril(-1)
        sibling_BNN = (tree.parent_BN[:, :, None] == tree.parent_BN[:, None, :]) & earlier_NN
        accept_BN = accept_BN & ~(sibling_BNN & accept_BN[:, None, :]).any(-1)
    return _path(tree, _closed(tree, accept_BN))


def _closed(tree: Tree, ok_BN: Tensor) -> Tensor:
    """Nodes that are ok, as are all their ancestors."""
    if tree.linear:
        return ok_BN.long().cumprod(1).bool()
    return ~(tree.mask_BNN & ~ok_BN[:, None, :]).any(-1)


def _path(tree: Tree, on_path_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As walk_accepted's results, from the marked nodes: one per depth at most, each with its parent."""
    batch, nodes = on_path_BN.shape
    depth_BN = torch.where(on_path_BN, tree.depth_BN, 0)
    index_BN = torch.arange(nodes, device=depth_BN.device).expand(batch, nodes)
    # column 0 receives every node off the path, and is dropped
    path_BK = torch.full((batch, tree.levels + 1), -1, dtype=torch.int64, device=depth_BN.device)
    path_BK = path_BK.scatter(1, depth_BN, index_BN)[:, 1:]
    accepted_B = on_path_BN.sum(1)
    last_BK = torch.cat([path_BK.new_full((batch, 1), -1), path_BK], 1)
    end_B = last_BK.gather(1, accepted_B[:, None])[:, 0] + 1
    return end_B, path_BK, accepted_B


def acceptance(tree: Tree, p_BMV: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance probabilities and residuals for drafts drawn from q (siblings without replacement).

    For the children of a node in order: accept x with min(1, p(x)/q(x)). If rejected, p ← normalise(max(p - q, 0))
    and q loses x. Without q (point mass): accept x with p(x); if it is rejected, p loses x.

    Returns:
        ratio_BN: probability that the node is accepted, given its parent accepted and its earlier siblings rejected.
        residual_BMV: distribution of the target's own token at each row once all its children are rejected.
    """
    if tree.linear and tree.q_BNV is not None and tree.nodes:
        return _chain_acceptance(tree, tree.q_BNV, p_BMV)
    residual_BMV = p_BMV.clone()
    drawn_BMV = torch.zeros_like(p_BMV, dtype=torch.bool)
    rows_B = torch.arange(p_BMV.shape[0], device=p_BMV.device)
    ratio_BN = torch.zeros(tree.tokens_BN.shape, dtype=p_BMV.dtype, device=p_BMV.device)
    for n in range(tree.nodes):
        parent_B, token_B1, valid_B = tree.parent_BN[:, n] + 1, tree.tokens_BN[:, n : n + 1], tree.valid_BN[:, n]
        p_BV = residual_BMV[rows_B, parent_B]
        if tree.q_BNV is None:
            q_BV = torch.zeros_like(p_BV).scatter(1, token_B1, 1.0)
        else:
            q_BV = _normalised(_as_wide(tree.q_BNV[:, n], p_BV).masked_fill(drawn_BMV[rows_B, parent_B], 0.0))
        ratio_BN[:, n], left_BV = _accept(p_BV, q_BV, token_B1)
        residual_BMV[rows_B, parent_B] = torch.where(valid_B[:, None], left_BV, p_BV)
        drawn_BMV[rows_B, parent_B] |= torch.zeros_like(p_BV, dtype=torch.bool).scatter(1, token_B1, True)
    return ratio_BN, residual_BMV


def _chain_acceptance(tree: Tree, q_BNV: Tensor, p_BMV: Tensor) -> tuple[Tensor, Tensor]:
    """`acceptance` for chains, where every row of the target has at most one child: all levels at once."""
    before_BNV = p_BMV[:, :-1]
    ratio_BN, left_BNV = _accept(before_BNV, _normalised(_as_wide(q_BNV, before_BNV)), tree.tokens_BN[:, :, None])
    residual_BNV = torch.where(tree.valid_BN[:, :, None], left_BNV, before_BNV)
    return ratio_BN, torch.cat([residual_BNV, p_BMV[:, -1:]], 1)


def _as_wide(q: Tensor, p: Tensor) -> Tensor:
    """q in the dtype and vocabulary of p: targets pad their output matrix beyond the tokens that drafts know."""
    missing = p.shape[-1] - q.shape[-1]
    return torch.nn.functional.pad(q.to(p.dtype), (0, missing)) if missing else q.to(p.dtype)


def _normalised(q: Tensor) -> Tensor:
    return q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """p(x) / q(x). 0/0, a token that neither p nor q holds, is 0: a rejection."""
    return torch.where(q_x > 0, p_x / q_x.clamp(min=torch.finfo(q_x.dtype).tiny), 0.0)


def _accept(p: Tensor, q: Tensor, token_1: Tensor) -> tuple[Tensor, Tensor]:
    """(min(1, p(x) / q(x)), normalise(max(p - q, 0))) for distributions […, V] and a token x, int64 […, 1]."""
    tiny = torch.finfo(p.dtype).tiny
    p_x, q_x = p.gather(-1, token_1)[..., 0], q.gather(-1, token_1)[..., 0]
    ratio = _ratio(p_x, q_x).clamp(max=1.0)
    left = (p - q).clamp(min=0.0)
    total_1 = left.sum(-1, keepdim=True)
    # p = q leaves nothing. Such a draft is never rejected, so this residual is never drawn from
    return ratio, torch.where(total_1 > 0, left / total_1.clamp(min=tiny), p)


def block_acceptance(tree: Tree, q_BNV: Tensor, p_BMV: Tensor) -> tuple[Tensor, Tensor]:
    """What block verification accepts of chains drawn from q (arXiv 2403.10444, algorithm 2).

    P_0 = 1, P_i = min(1, P_{i-1} · p(x_i) / q(x_i)) is the probability that the first i drafts or more are accepted.
    Token verification has Π min(1, p/q) there, which is never more. Of a row's last draft, the path ends there with
    h = P. Of an earlier one, h_i = Z_i / (Z_i + 1 - P_i) with Z_i = Σ_v max(P_i · p(v) - q(v), 0), the p and q after
    draft i. The path is as long as the last draft whose h passed, whatever the earlier ones gave.

    Every cycle needs new random draws: where a path ends depends on draws for the drafts beyond it as well.
    A row may stop anywhere, as long as it does not depend on the drafts beyond: h is P then, and P stays what it is.

    Returns:
        reach_BM: P_0 … P_N.
        ends_BN: h of every node, the probability that the path ends there if it does not end later. 0 = not drafted.
    """
    tiny, token_BN1 = torch.finfo(p_BMV.dtype).tiny, tree.tokens_BN[:, :, None]
    drafted_BN, before_BNV = _closed(tree, tree.valid_BN), p_BMV[:, :-1]
    # q need not sum to 1 exactly: p is scaled to it, which is cheaper than to divide q
    wide_q_BNV = _as_wide(q_BNV, p_BMV)
    scale_BN = wide_q_BNV.sum(-1).clamp(min=tiny)
    ratio_BN = _ratio(before_BNV.gather(-1, token_BN1)[..., 0] * scale_BN, wide_q_BNV.gather(-1, token_BN1)[..., 0])
    # the recursion in logs, for all levels at once: log P_i = S_i - max(0, S_1 … S_i) with S_i = Σ log p(x)/q(x)
    sum_BN = ratio_BN.log().cumsum(1)
    p_BN = (sum_BN - sum_BN.cummax(1).values.clamp(min=0.0)).exp()
    # Z of every node but the last, which no row of q follows
    p_Bn, scale_Bn = p_BN[:, :-1], scale_BN[:, 1:]
    beyond_BnV = ((p_Bn * scale_Bn)[:, :, None] * before_BNV[:, 1:]).sub_(wide_q_BNV[:, 1:]).clamp_(min=0.0)
    z_Bn = beyond_BnV.sum(-1) / scale_Bn
    # Z = 0 and P = 1 say that p = q: the next draft is accepted for certain, so the path does not end here
    h_Bn = z_Bn / (z_Bn + (1.0 - p_Bn)).clamp(min=tiny)
    ends_BN = torch.cat([torch.where(drafted_BN[:, 1:], h_Bn, p_Bn), p_BN[:, -1:]], 1)
    return torch.nn.functional.pad(p_BN, (1, 0), value=1.0), torch.where(drafted_BN, ends_BN, 0.0)


def walk_block(tree: Tree, ends_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results as walk_accepted's, for chains whose path leads to the last marked node."""
    index_N = torch.arange(1, tree.nodes + 1, device=ends_BN.device)
    return _path(tree, index_N <= torch.where(ends_BN, index_N, 0).amax(1, keepdim=True))


def block_residual(tree: Tree, q_BNV: Tensor, p_BMV: Tensor, reach_BM: Tensor, end_B: Tensor) -> Tensor:
    """[B, V]: the distribution of the target's own token where a path of block verification ends.

    It is normalise(max(P · p - q, 0)), or p after a row's last draft.

    Args: reach_BM: P of `block_acceptance`. end_B: row of the target after the last accepted draft.
    """
    rows_B = torch.arange(end_B.shape[0], device=end_B.device)
    p_BV, next_B = p_BMV[rows_B, end_B], end_B.clamp(max=tree.nodes - 1)
    q_BV = _normalised(_as_wide(q_BNV[rows_B, next_B], p_BV))
    left_BV = (reach_BM[rows_B, end_B, None] * p_BV - q_BV).clamp(min=0.0)
    total_B1 = left_BV.sum(-1, keepdim=True)
    more_B = _closed(tree, tree.valid_BN)[rows_B, next_B] & (end_B < tree.nodes)
    # where nothing is left, p = q and the next draft is accepted: only rounding leads here
    holds_B1 = more_B[:, None] & (total_B1 > 0)
    return torch.where(holds_B1, left_BV / total_B1.clamp(min=torch.finfo(p_BV.dtype).tiny), p_BV)


def typical(tree: Tree, p_BMV: Tensor, choice_BM: Tensor, epsilon: float, delta: float) -> Verified:
    """Typical acceptance (methods §1). LOSSY: the output distribution is not the target's.

    A token is accepted if p(x) > min(ε, δ · exp(-H(p))); the longest accepted path wins, ties by Σ log p.
    `choice_BM`: tokens drawn from p at every row; the one at the end of the path is committed after it.
    """
    entropy_BM = -(p_BMV * p_BMV.clamp(min=torch.finfo(p_BMV.dtype).tiny).log()).sum(-1)
    threshold_BM = (delta * (-entropy_BM).exp()).clamp(max=epsilon)
    rows_B1 = torch.arange(p_BMV.shape[0], device=p_BMV.device)[:, None]
    p_BN = p_BMV[rows_B1, tree.parent_BN + 1, tree.tokens_BN]
    accepted_BN = _closed(tree, tree.valid_BN & (p_BN > threshold_BM.gather(1, tree.parent_BN + 1)))
    if tree.nodes:
        mask_BNN = tree.mask_BNN
        log_p_BN = p_BN.clamp(min=torch.finfo(p_BN.dtype).tiny).log()
        score_BN = (mask_BNN * log_p_BN[:, None, :]).sum(-1)
        depth_BN = torch.where(accepted_BN, tree.depth_BN, 0)
        deepest_BN = accepted_BN & (depth_BN == depth_BN.amax(1, keepdim=True))
        best_B1 = torch.where(deepest_BN, score_BN, -torch.inf).argmax(1, keepdim=True)
        accepted_BN = mask_BNN[rows_B1, best_B1][:, 0] & accepted_BN
    return _verified(tree, accepted_BN, choice_BM)


def synthetic(tree: Tree, choice_BM: Tensor, rate_K: Tensor, generator: torch.Generator | None = None) -> Verified:
    """Accept level d with probability `rate_K[d - 1]` if all earlier ones were. LOSSY: p decides nothing.

    The path leads to the first of a row's deepest nodes. Levels beyond the rates are rejected. Where the tree has
    rates of its own (`Tree.rate_BN`), a node of that path is accepted with its rate instead. `choice_BM`: the target's
    own token at every row; the one at the end of the path is committed after it.
    """
    shape = (choice_BM.shape[0], tree.levels)
    uniform_BK = torch.rand(shape, device=choice_BM.device, generator=generator)
    if wants_kernel(choice_BM):
        return Verified(*synthetic_kernel(tree, choice_BM, uniform_BK, rate_K))
    return synthetic_eager(tree, choice_BM, uniform_BK, rate_K)


def synthetic_eager(tree: Tree, choice_BM: Tensor, uniform_BK: Tensor, rate_K: Tensor) -> Verified:
    if tree.nodes == 0:
        return _verified(tree, tree.valid_BN, choice_BM)
    if tree.rate_BN is None:
        known = min(len(rate_K), tree.levels)
        passed_BK = torch.zeros_like(uniform_BK, dtype=torch.bool)
        passed_BK[:, :known] = uniform_BK[:, :known] < rate_K[:known]
        levels_B = passed_BK.long().cumprod(1).sum(1)
        passed_BN = tree.depth_BN <= levels_B[:, None]
    else:
        passed_BN = _closed(tree, uniform_BK.gather(1, (tree.depth_BN - 1).clamp(min=0)) < tree.rate_BN)
    deepest_B1 = torch.where(tree.valid_BN, tree.depth_BN, 0).argmax(1, keepdim=True)
    rows_B = torch.arange(uniform_BK.shape[0], device=uniform_BK.device)
    ancestors_BN = tree.mask_BNN[rows_B, deepest_B1[:, 0]]
    return _verified(tree, ancestors_BN & tree.valid_BN & passed_BN, choice_BM)


def _verified(tree: Tree, on_path_BN: Tensor, choice_BM: Tensor) -> Verified:
    """The path of the marked nodes, and the target's own choice at its end."""
    end_B, path_BK, accepted_B = _path(tree, on_path_BN)
    return Verified(path_BK, accepted_B, choice_BM.gather(1, end_B[:, None])[:, 0])
