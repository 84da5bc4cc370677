"""Block verification: exact output distributions by enumeration, and never fewer drafts accepted than one by one."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from eval_help import Trained, run
from reference.verify import Distribution, block_chain_outcomes
from test_verify import chi_square
from torch import Tensor

import headstart.eval.decoding.loop as loop_module
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.sampling import Sampling, draw, probabilities
from headstart.eval.decoding.verify import (
    Verified,
    acceptance,
    block_acceptance,
    block_residual,
    rule_of,
    verify,
    walk_block,
    walk_choices,
)
from headstart.eval.drafters import build_drafter
from headstart.eval.tree import Tree, chain, empty
from headstart.heads.targets.target import Target

Prefix = tuple[int, ...]
Joint = dict[Prefix, float]
#: says of a prefix whether a draft follows it
Goes = Callable[[Prefix], bool]


def language(seed: int, vocab: int, zeros: int = 0, sharp: float = 1.5) -> Distribution:
    """A random distribution after every prefix; `zeros` of its tokens, drawn anew each time, are impossible."""

    def p(prefix: Prefix) -> list[float]:
        rng = random.Random(f"{seed}{prefix}")
        weights = [2.718 ** (sharp * rng.gauss(0, 1)) for _ in range(vocab)]
        for token in rng.sample(range(vocab), zeros):
            weights[token] = 0.0
        return [w / sum(weights) for w in weights]

    return p


def one_hot(seed: int, vocab: int) -> Distribution:
    """A draft that is sure of one token after every prefix."""

    def q(prefix: Prefix) -> list[float]:
        sure = random.Random(f"{seed}{prefix}").randrange(vocab)
        return [float(token == sure) for token in range(vocab)]

    return q


def cut(seed: int) -> Goes:
    """A scheduler that stops anywhere, by the drafts before."""
    return lambda prefix: random.Random(f"{seed}{prefix}").random() < 0.7


def always(prefix: Prefix) -> bool:
    return True


def every_chain(
    length: int, vocab: int, p: Distribution, q: Distribution, goes: Goes = always, wide: int = 0
) -> tuple[Tree, Tensor, Tensor]:
    """All chains that q can say, as one batch, cut by `goes`.

    Returns: the chains, p at their rows (with `wide` more columns than q), and the probability of each.
    """
    said = [x for x in itertools.product(range(vocab), repeat=length) if all(q(x[:n])[x[n]] > 0 for n in range(length))]
    q_BNV = torch.tensor([[q(x[:n]) for n in range(length)] for x in said], dtype=torch.float64)
    p_BMV = torch.tensor([[p(x[:n]) for n in range(length + 1)] for x in said], dtype=torch.float64)
    tokens = torch.tensor(said)
    valid = torch.tensor([[all(goes(x[:m]) for m in range(n + 1)) for n in range(length)] for x in said])
    weight_B = q_BNV.gather(2, tokens[:, :, None])[..., 0].prod(1)
    return chain(tokens, valid, q_BNV), torch.nn.functional.pad(p_BMV, (0, wide)), weight_B


def outcomes(tree: Tree, p_BMV: Tensor, weight_B: Tensor, allowed: bool = True) -> tuple[Joint, float]:
    """What a cycle commits, over all chains, all passes of the drafts and the final draw, and the mean accepted.

    Args: allowed: whether rows stop as they may.
    """
    assert tree.q_BNV is not None
    reach_BM, ends_BN = block_acceptance(tree, tree.q_BNV, p_BMV)
    total: Joint = defaultdict(float)
    mean, at_least_BM = 0.0, torch.zeros_like(reach_BM)
    for bits in itertools.product([False, True], repeat=tree.nodes):
        bits_BN = torch.tensor(bits).expand_as(ends_BN)
        chance_B = torch.where(bits_BN, ends_BN, 1 - ends_BN).prod(1)
        end_B, path_BK, accepted_B = walk_block(tree, bits_BN & (ends_BN > 0))
        assert torch.equal(end_B, accepted_B) and torch.equal((path_BK >= 0).sum(1), accepted_B)
        last_BV = block_residual(tree, tree.q_BNV, p_BMV, reach_BM, end_B)
        at_least_BM += chance_B[:, None] * (torch.arange(tree.nodes + 1) <= accepted_B[:, None])
        mean += float((weight_B * chance_B * accepted_B).sum())
        for row, count in enumerate(accepted_B.tolist()):
            for final in torch.nonzero(last_BV[row])[:, 0].tolist():
                committed = (*tree.tokens_BN[row, :count].tolist(), final)
                total[committed] += float(weight_B[row] * chance_B[row] * last_BV[row, final])
    # whatever follows the first i drafts: they or more are accepted with P_i, as far as the row drafts
    drafted_BM = torch.cat([torch.ones_like(weight_B[:, None]), tree.valid_BN.long().cumprod(1)], 1)
    found: Joint = defaultdict(float)
    expected: Joint = defaultdict(float)
    for row, tokens in enumerate(tree.tokens_BN.tolist()):
        for i in range(tree.nodes + 1):
            found[tuple(tokens[:i])] += float(weight_B[row] * at_least_BM[row, i])
            expected[tuple(tokens[:i])] += float(weight_B[row] * reach_BM[row, i] * drafted_BM[row, i])
    assert (found == pytest.approx(expected, abs=1e-12)) == allowed
    return total, mean


def check(total: Joint, p: Distribution, vocab: int, length: int) -> float:
    """The largest distance of the first `length` tokens from the target's, what is open being drawn from p."""
    told: Joint = defaultdict(float)
    for committed, weight in total.items():
        committed = committed[:length]
        for rest in itertools.product(range(vocab), repeat=length - len(committed)):
            told[(*committed, *rest)] += weight * chance(p, committed, rest)
    assert sum(told.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(told[x] - chance(p, (), x)) for x in itertools.product(range(vocab), repeat=length))


def chance(p: Distribution, before: Prefix, path: Prefix) -> float:
    value = 1.0
    for n, token in enumerate(path):
        value *= p((*before, *path[:n]))[token]
    return value


def token_mean(tree: Tree, p_BMV: Tensor, weight_B: Tensor) -> float:
    """Drafts that are accepted token by token, on average."""
    ratio_BN, _ = acceptance(tree, p_BMV)
    return float((weight_B[:, None] * (ratio_BN * tree.valid_BN).cumprod(1)).sum())


SIZES = [(1, 4), (2, 4), (3, 3), (4, 2), (2, 7), (5, 2)]


@pytest.mark.parametrize(("p_zeros", "q_zeros"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("goes", [always, cut(1), cut(2), lambda prefix: len(prefix) < 1])
@pytest.mark.parametrize(("length", "vocab"), SIZES)
def test_output_is_the_targets(length: int, vocab: int, goes: Goes, p_zeros: int, q_zeros: int) -> None:
    """Of every chain, wherever a row stops drafting, with tokens that p or q never says."""
    p, q = language(1, vocab, p_zeros), language(2, vocab, q_zeros)
    tree, p_BMV, weight_B = every_chain(length, vocab, p, q, goes)
    total, mean = outcomes(tree, p_BMV, weight_B)
    assert check(total, p, vocab, length + 1) < 1e-12
    assert mean >= token_mean(tree, p_BMV, weight_B) - 1e-12


def test_a_row_must_not_stop_by_the_draft_that_it_leaves_out() -> None:
    """The check above notices a scheduler that looks at what was drawn at the level itself."""
    p, q = language(1, 3), language(2, 3)
    tree, p_BMV, weight_B = every_chain(2, 3, p, q)
    total, _ = outcomes(tree.keep((tree.tokens_BN != 1).long().cumprod(1).bool()), p_BMV, weight_B, allowed=False)
    assert check(total, p, 3, 3) > 1e-2


@pytest.mark.parametrize("goes", [always, cut(3)])
@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_outcomes_are_those_of_the_naive_rule(length: int, zeros: int, goes: Goes) -> None:
    p, q = language(3, 3, zeros), language(4, 3, zeros)
    total, _ = outcomes(*every_chain(length, 3, p, q, goes))
    expected = block_chain_outcomes(length, p, q, goes)
    assert {x: w for x, w in total.items() if w > 1e-15} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_never_fewer_are_accepted_than_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    vocab, length = rng.choice([2, 3, 4]), rng.choice([2, 3])
    p = language(seed, vocab, rng.choice([0, 0, 1]), rng.choice([0.3, 1.0, 3.0]))
    q = language(100 + seed, vocab, rng.choice([0, 0, 1]), rng.choice([0.3, 1.0, 3.0]))
    tree, p_BMV, weight_B = every_chain(length, vocab, p, q, rng.choice([always, cut(seed)]))
    reach_BM, _ = block_acceptance(tree, tree.q_BNV, p_BMV)
    ratio_BN, _ = acceptance(tree, p_BMV)
    assert (reach_BM[:, 1:] >= ratio_BN.cumprod(1) - 1e-12).all()
    _, mean = outcomes(tree, p_BMV, weight_B)
    assert mean >= token_mean(tree, p_BMV, weight_B) - 1e-12


def test_more_are_accepted_where_a_likely_draft_makes_up_for_an_unlikely_one() -> None:
    """The paper's example (§2): p = (1/3, 2/3), q = (2/3, 1/3) at every position: 10/9 of two drafts, and 11/9."""
    p, q = (lambda prefix: [1 / 3, 2 / 3]), (lambda prefix: [2 / 3, 1 / 3])
    tree, p_BMV, weight_B = every_chain(2, 2, p, q)
    _, mean = outcomes(tree, p_BMV, weight_B)
    assert token_mean(tree, p_BMV, weight_B) == pytest.approx(10 / 9)
    assert mean == pytest.approx(11 / 9)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sure_drafts_are_one_draw_from_the_target(length: int) -> None:
    """With q = 1 at the draft, block verification has the outcomes of `walk_choices`, which needs no q."""
    p, q = language(5, 3), one_hot(6, 3)
    tree, p_BMV, weight_B = every_chain(length, 3, p, q, cut(7))
    total, mean = outcomes(tree, p_BMV, weight_B)
    assert check(total, p, 3, length + 1) < 1e-12
    assert mean == pytest.approx(token_mean(tree, p_BMV, weight_B), abs=1e-12)
    drawn: Joint = defaultdict(float)
    for choice in itertools.product(range(3), repeat=length + 1):
        verified = walk_choices(replace(tree, q_BNV=None), torch.tensor([choice]))
        count = int(verified.accepted_B)
        committed = (*tree.tokens_BN[0, :count].tolist(), int(verified.next_B))
        drawn[committed] += float(p_BMV[0, torch.arange(length + 1), torch.tensor(choice)].prod())
    assert {x: w for x, w in total.items() if w} == pytest.approx({x: w for x, w in drawn.items() if w}, abs=1e-12)


def test_narrow_draft_vocabularies_and_padded_targets() -> None:
    """q knows three of the target's four tokens, and the target's output matrix has two padded columns."""
    p, narrow = language(8, 4), language(9, 3)
    tree, p_BMV, weight_B = every_chain(3, 4, p, lambda prefix: [*narrow(prefix), 0.0], wide=2)
    assert tree.q_BNV is not None and (tree.tokens_BN < 3).all()
    total, _ = outcomes(replace(tree, q_BNV=tree.q_BNV[..., :3]), p_BMV, weight_B)
    assert check(total, p, 4, 4) < 1e-12
    # q as it may be after rounding, which sums to 1 nearly
    about_BNV = tree.q_BNV[..., :3] * torch.tensor([1.1, 0.9, 1.0])[:, None]
    scaled, _ = outcomes(replace(tree, q_BNV=about_BNV), p_BMV, weight_B)
    assert scaled == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=2), Sampling(1.0, top_p=0.6), Sampling(1.3, min_p=0.3)])
def test_processed_distributions_are_exact(sampling: Sampling) -> None:
    def processed(of: Distribution) -> Distribution:
        return lambda prefix: probabilities(torch.tensor(of(prefix), dtype=torch.float64).log(), sampling).tolist()

    p, q = processed(language(10, 3)), processed(language(11, 3))
    total, _ = outcomes(*every_chain(3, 3, p, q))
    assert check(total, p, 3, 4) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_accept_everything(dtype: torch.dtype) -> None:
    """p = q leaves Z = 0 and P = 1, or both but for rounding: no draft is lost and nothing is NaN."""
    noise, rows = torch.Generator().manual_seed(0), 2000
    p_BMV = (torch.randn((rows, 6, 50), generator=noise, dtype=dtype) * 3).softmax(-1)
    tokens_BN = draw(p_BMV[:, :-1], noise)
    tree = chain(tokens_BN, q_BKV=p_BMV[:, :-1])
    reach_BM, ends_BN = block_acceptance(tree, p_BMV[:, :-1], p_BMV)
    assert ((ends_BN >= 0) & (ends_BN <= 1)).all() and (reach_BM > 1 - 1e-5).all()
    verified = verify(tree, p_BMV.log(), Sampling(1.0), noise)
    assert (verified.accepted_B == 5).sum() >= rows - 1
    # where rounding ends a path, its token comes from p
    residual_BV = block_residual(tree, p_BMV[:, :-1], p_BMV, torch.ones_like(reach_BM), torch.zeros(rows).long())
    assert torch.isfinite(residual_BV).all()
    torch.testing.assert_close(residual_BV.sum(-1), torch.ones(rows, dtype=dtype))


def test_a_draft_that_q_never_says_ends_the_path() -> None:
    p_BMV = torch.full((1, 4, 3), 1 / 3)
    q_BNV = torch.tensor([[[0.5, 0.5, 0.0]] * 3])
    tree = chain(torch.tensor([[0, 2, 0]]), q_BKV=q_BNV)
    reach_BM, ends_BN = block_acceptance(tree, q_BNV, p_BMV)
    torch.testing.assert_close(reach_BM, torch.tensor([[1.0, 2 / 3, 0.0, 0.0]]))
    assert ends_BN[0, 1:].tolist() == [0.0, 0.0] and torch.isfinite(ends_BN).all()


def test_rows_that_draft_nothing() -> None:
    p_BMV = torch.full((2, 3, 3), 1 / 3)
    tree = chain(torch.zeros(2, 2).long(), torch.tensor([[True, False], [False, False]]), p_BMV[:, :2])
    verified = verify(tree, p_BMV.log(), Sampling(1.0), torch.Generator().manual_seed(0))
    assert verified.accepted_B.tolist() == [1, 0]
    assert verified.path_BK.tolist() == [[0, -1], [-1, -1]]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_random_draws_follow_the_target(rule: str) -> None:
    """`verify` itself, its draws included: 60,000 rows, the first two committed tokens."""
    rows, sampling = 60_000, Sampling(0.9, top_k=3, verification=rule)
    noise, p, q = torch.Generator().manual_seed(1), language(12, 4, sharp=0.7), language(13, 4, sharp=0.7)
    p_of, q_of = (torch.zeros(3, 4, 4, 4) for _ in range(2))
    for table, of in ((p_of, p), (q_of, q)):
        table[0, 0, 0] = torch.tensor(of(()))
        for a in range(4):
            table[1, a, 0] = torch.tensor(of((a,)))
            for b in range(4):
                table[2, a, b] = torch.tensor(of((a, b)))
    zero_B = torch.zeros(rows).long()
    first_BV = probabilities(q_of[0, zero_B, zero_B].log(), sampling)
    first_B = draw(first_BV, noise)
    second_BV = probabilities(q_of[1, first_B, zero_B].log(), sampling)
    second_B = draw(second_BV, noise)
    logits = torch.stack([p_of[0, zero_B, zero_B], p_of[1, first_B, zero_B], p_of[2, first_B, second_B]], 1).log()
    tree = chain(torch.stack([first_B, second_B], 1), q_BKV=torch.stack([first_BV, second_BV], 1))
    verified = verify(tree, logits, sampling, noise)
    one_B = torch.where(verified.accepted_B > 0, first_B, verified.next_B)
    then_B = torch.where(verified.accepted_B > 1, second_B, verified.next_B)
    # rows that end after one token draw their second from the target
    alone_B = draw(probabilities(p_of[1, one_B, zero_B].log(), sampling), noise)
    two_B = torch.where(verified.accepted_B > 0, then_B, alone_B)
    root_V = probabilities(p_of[0, 0, 0].log(), sampling)
    joint_VV = root_V[:, None] * probabilities(p_of[1, :, 0].log(), sampling)
    assert chi_square(torch.bincount(one_B * 4 + two_B, minlength=16), joint_VV.flatten()) < 4


def test_nothing_is_asked_of_the_host() -> None:
    """On the meta device there are no values: whatever waits for one fails."""
    q_BNV = torch.rand((2, 3, 5), device="meta")
    tree = chain(torch.zeros((2, 3), dtype=torch.int64, device="meta"), q_BKV=q_BNV)
    verified = verify(tree, torch.zeros((2, 4, 7), device="meta"), Sampling(1.0))
    assert verified.path_BK.shape == (2, 3) and verified.next_B.shape == (2,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_verification_is_the_same() -> None:
    noise = torch.Generator().manual_seed(2)
    p_BMV, q_BNV = (torch.rand((4, n, 97), generator=noise).softmax(-1).cuda() for n in (6, 5))
    tokens_BN, uniform_BN = draw(q_BNV.cpu(), noise).cuda(), torch.rand((4, 5), generator=noise).cuda()
    tree = chain(tokens_BN, torch.arange(5, device="cuda") < torch.tensor([[5], [3], [1], [0]]).cuda(), q_BNV)

    def work() -> tuple[Tensor, ...]:
        reach_BM, ends_BN = block_acceptance(tree, q_BNV, p_BMV)
        end_B, path_BK, _ = walk_block(tree, uniform_BN < ends_BN)
        return path_BK, ends_BN, block_residual(tree, q_BNV, p_BMV, reach_BM, end_B)

    expected = work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_which_rule_runs() -> None:
    drawn, sure = chain(torch.zeros(1, 2).long(), q_BKV=torch.ones(1, 2, 3) / 3), chain(torch.zeros(1, 2).long())
    sampled = Sampling(1.0)
    assert sampled.verification == "block"
    assert rule_of(drawn, sampled) == "block"
    assert rule_of(drawn, replace(sampled, verification="token")) == "token"
    assert rule_of(replace(drawn, linear=False), sampled) == "token"
    assert rule_of(sure, sampled) == "draw"
    assert rule_of(drawn, Sampling()) == "greedy"
    assert rule_of(drawn, replace(sampled, typical=(0.1, 0.3))) == "typical"
    assert rule_of(drawn, replace(sampled, synthetic=(0.5,))) == "synthetic"
    assert rule_of(empty(1), sampled) is None


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_a_trained_head_gains(
    target: Target, trained: Callable[[str], Trained], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temperature 1, every cycle of a decode: what both rules expect to accept of the very same drafts."""
    head: Trained = trained(family)
    expected: list[tuple[float, float]] = []

    def watched(tree: Tree, logits_BMV: Tensor, sampling: Sampling, *rest: object) -> Verified:
        p_BMV = probabilities(logits_BMV, sampling)
        drafted_BN = tree.valid_BN.long().cumprod(1)
        reach_BM, _ = block_acceptance(tree, tree.q_BNV, p_BMV)
        block_B = (reach_BM[:, 1:] * drafted_BN).sum(1)
        token_B = (acceptance(tree, p_BMV)[0].cumprod(1) * drafted_BN).sum(1)
        expected.extend(zip(block_B.tolist(), token_B.tolist(), strict=True))
        return verify(tree, logits_BMV, sampling, *rest)

    monkeypatch.setattr(loop_module, "verify", watched)
    config = EvalConfig(tree=TreeConfig("chain", 4), temperature=1.0)
    drafter = build_drafter(head.head, config)
    for seed in range(4):
        run(target, drafter, sampling=Sampling.from_config(config), seed=seed)
    assert all(block >= token - 1e-5 for block, token in expected)
    block, token = (sum(values) for values in zip(*expected, strict=True))
    assert block > token > 0
