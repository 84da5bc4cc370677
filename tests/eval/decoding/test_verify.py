"""Verifiers: exact output distributions by enumeration on a 4-token vocabulary, and the rules one by one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headstart.eval.decoding.sampling import Sampling, draw, probabilities
from headstart.eval.decoding.verify import (
    acceptance,
    seen_tokens,
    synthetic,
    typical,
    verify,
    walk_accepted,
    walk_choices,
)
from headstart.eval.tree import Tree, chain, empty, expand, select

V = 4
Joint = dict[tuple[int, ...], float]


class Language:
    """A random next-token distribution for every short path after the root."""

    def __init__(self, seed: int, sharp: float = 1.5, zero: bool = False):
        self.noise = torch.Generator().manual_seed(seed)
        self.sharp, self.zero = sharp, zero
        self.table: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.table:
            p = (torch.randn(V, generator=self.noise, dtype=torch.float64) * self.sharp).softmax(-1)
            if self.zero:
                # some tokens are impossible, as after top-k
                p[int(torch.randint(0, V, (1,), generator=self.noise))] = 0.0
            self.table[path] = p / p.sum()
        return self.table[path]

    def joint(self, length: int) -> Joint:
        return {path: self.chance((), path) for path in itertools.product(range(V), repeat=length)}

    def chance(self, before: tuple[int, ...], path: tuple[int, ...]) -> float:
        value = 1.0
        for n, token in enumerate(path):
            value *= self((*before, *path[:n]))[token].item()
        return value


def build(parent: list[int], tokens: list[int], q: list[Tensor] | None = None) -> Tree:
    depth: list[int] = []
    for p in parent:
        depth.append(1 if p < 0 else depth[p] + 1)
    row = lambda x: torch.tensor([x])  # noqa: E731
    valid = torch.ones((1, len(parent)), dtype=torch.bool)
    return Tree(row(tokens), row(parent), row(depth), valid, max(depth), torch.stack(q)[None] if q else None)


def repeat(tree: Tree, times: int) -> Tree:
    grow = lambda x: x.expand(times, *x.shape[1:])  # noqa: E731
    q = None if tree.q_BNV is None else grow(tree.q_BNV)
    parts = map(grow, (tree.tokens_BN, tree.parent_BN, tree.depth_BN, tree.valid_BN))
    return Tree(*parts, tree.levels, q, tree.linear)


def path_of(tree: Tree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(tree.tokens_BN[0, node]))
        node = int(tree.parent_BN[0, node])
    return tuple(path)


def target_rows(tree: Tree, language: Language) -> Tensor:
    """p [1, N + 1, V] at the root and every node."""
    return torch.stack([language(()), *(language(path_of(tree, n)) for n in range(tree.nodes))])[None]


def continue_from(total: Joint, weight: float, committed: tuple[int, ...], language: Language, length: int) -> None:
    """Book an outcome; what it leaves open up to `length` tokens is decoded plainly."""
    committed = committed[:length]
    for rest in itertools.product(range(V), repeat=length - len(committed)):
        total[(*committed, *rest)] += weight * language.chance(committed, rest)


def committed_tokens(tree: Tree, path_K: list[int], final: int) -> tuple[int, ...]:
    return (*(int(tree.tokens_BN[0, n]) for n in path_K if n >= 0), final)


def point_mass_outcomes(tree: Tree, language: Language) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All ways in which the target's rows can be drawn, through the real walk."""
    p_MV = target_rows(tree, language)[0]
    draws = list(itertools.product(range(V), repeat=tree.nodes + 1))
    verified = walk_choices(repeat(tree, len(draws)), torch.tensor(draws))
    for choices, path, final in zip(draws, verified.path_BK.tolist(), verified.next_B.tolist(), strict=True):
        weight = torch.stack([p_MV[m, token] for m, token in enumerate(choices)]).prod().item()
        yield weight, committed_tokens(tree, path, final)


def rejection_outcomes(tree: Tree, language: Language) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All ways in which acceptance bits and the final draw can fall, through the real walk."""
    ratio_BN, residual_BMV = acceptance(tree, target_rows(tree, language))
    bits = torch.tensor(list(itertools.product([False, True], repeat=tree.nodes)))
    end_B, path_BK, _ = walk_accepted(repeat(tree, len(bits)), bits)
    weight_B = torch.where(bits, ratio_BN, 1 - ratio_BN).prod(1)
    for weight, end, path in zip(weight_B.tolist(), end_B.tolist(), path_BK.tolist(), strict=True):
        for final in range(V):
            yield weight * residual_BMV[0, end, final].item(), committed_tokens(tree, path, final)


TREES = {
    "chain": ([-1, 0, 1], [2, 0, 3]),
    "siblings": ([-1, -1, -1], [1, 3, 0]),
    "all children": ([-1, -1, -1, -1], [3, 1, 0, 2]),
    "tree": ([-1, -1, 0, 0, 1], [1, 2, 0, 3, 2]),
    "duplicate siblings": ([-1, -1, 0, 1], [1, 1, 0, 3]),
}


def check(total: Joint, language: Language, length: int) -> None:
    expected = language.joint(length)
    assert sum(total.values()) == pytest.approx(1.0, abs=1e-12)
    for path, p in expected.items():
        assert abs(total[path] - p) < 1e-9, path


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("rule", [point_mass_outcomes, rejection_outcomes])
def test_deterministic_trees_are_exact(name: str, zero: bool, rule) -> None:
    """Both forms of the point-mass rule: draw once and look, and accept one child after the other."""
    language = Language(1, zero=zero)
    tree = build(*TREES[name])
    length = tree.levels + 1
    total: Joint = defaultdict(float)
    for weight, committed in rule(tree, language):
        if weight:
            continue_from(total, weight, committed, language, length)
    check(total, language, length)


@pytest.mark.parametrize("zero", [False, True])
def test_sampled_chain_is_exact(zero: bool) -> None:
    """Summed over every chain that the draft can say, its acceptance and the final draw."""
    language, draft = Language(2, zero=zero), Language(3, zero=zero)
    total: Joint = defaultdict(float)
    for tokens in itertools.product(range(V), repeat=2):
        drafted = draft.chance((), tokens)
        if drafted == 0:
            continue
        tree = chain(torch.tensor([tokens]), q_BKV=torch.stack([draft(tokens[:n]) for n in range(2)])[None])
        for weight, committed in rejection_outcomes(tree, language):
            continue_from(total, drafted * weight, committed, language, 3)
    check(total, language, 3)


def test_a_chain_is_accepted_level_by_level_or_all_at_once() -> None:
    """As the loop over nodes has it: short rows, a smaller draft vocabulary, tokens that one side would never say."""
    noise = torch.Generator().manual_seed(3)
    p_BMV = torch.rand((4, 6, 9), generator=noise, dtype=torch.float64)
    q_BNV = torch.rand((4, 5, 7), generator=noise, dtype=torch.float64)
    p_BMV[0, 1], q_BNV[0, 1, :4] = torch.nn.functional.one_hot(torch.tensor(2), 9).double(), 0.0
    p_BMV[1, 2, :7], p_BMV[1, 2, 7:] = q_BNV[1, 2], 0.0
    p_BMV, q_BNV = p_BMV / p_BMV.sum(-1, keepdim=True), q_BNV / q_BNV.sum(-1, keepdim=True)
    valid = torch.arange(5) < torch.tensor([5, 4, 1, 0])[:, None]
    tree = chain(torch.randint(0, 7, (4, 5), generator=noise), valid, q_BNV)
    found, expected = acceptance(tree, p_BMV), acceptance(replace(tree, linear=False), p_BMV)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_sampled_chain_equal_to_the_target_is_always_accepted() -> None:
    language = Language(4)
    tree = chain(torch.tensor([[1, 2]]), q_BKV=torch.stack([language(()), language((1,))])[None])
    ratio_BN, _ = acceptance(tree, target_rows(tree, language))
    assert ratio_BN.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("zero", [False, True])
def test_siblings_without_replacement_are_exact(zero: bool) -> None:
    """Two siblings drawn without replacement under the root, two more under the first of them."""
    language, draft = Language(5, zero=zero), Language(6)
    total: Joint = defaultdict(float)
    for first, second in itertools.permutations(range(V), 2):
        top = draft(())
        drawn = top[first] * top[second] / (1 - top[first])
        for third, fourth in itertools.permutations(range(V), 2):
            low = draft((first,))
            weight_low = low[third] * low[fourth] / (1 - low[third])
            tree = build([-1, -1, 0, 0], [first, second, third, fourth], [top, top, low, low])
            for weight, committed in rejection_outcomes(tree, language):
                if weight:
                    continue_from(total, (drawn * weight_low).item() * weight, committed, language, 3)
    check(total, language, 3)


@pytest.mark.parametrize("zero", [False, True])
def test_independent_heads_chain_is_exact(zero: bool) -> None:
    """A chain drawn from heads that do not see each other's tokens (Medusa): q depends on the level alone."""
    language = Language(8, zero=zero)
    heads = [Language(9 + level, zero=zero)(()) for level in range(2)]
    total: Joint = defaultdict(float)
    for tokens in itertools.product(range(V), repeat=2):
        drafted = (heads[0][tokens[0]] * heads[1][tokens[1]]).item()
        if drafted:
            tree = chain(torch.tensor([tokens]), q_BKV=torch.stack(heads)[None])
            for weight, committed in rejection_outcomes(tree, language):
                continue_from(total, drafted * weight, committed, language, 3)
    check(total, language, 3)


def test_small_draft_vocabulary_is_exact() -> None:
    """The draft never says token 3, which the target may; the target's output matrix has a padded column."""
    language, total = Language(11), defaultdict(float)
    q = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    for token in range(3):
        tree = chain(torch.tensor([[token]]), q_BKV=q[None, None])
        ratio_BN, residual_BMV = acceptance(tree, torch.nn.functional.pad(target_rows(tree, language), (0, 1)))
        assert residual_BMV[..., V].abs().max() == 0
        accepted = q[token] * ratio_BN[0, 0]
        for final in range(V):
            rejected = q[token] * (1 - ratio_BN[0, 0]) * residual_BMV[0, 0, final]
            continue_from(total, rejected.item(), (final,), language, 2)
            continue_from(total, (accepted * residual_BMV[0, 1, final]).item(), (token, final), language, 2)
    check(total, language, 2)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", [point_mass_outcomes, rejection_outcomes])
def test_dynamic_trees_are_exact(k: int, rule) -> None:
    """Trees that `expand` and `select` build from a draft: two levels, the best five of all candidates."""
    language, draft = Language(12), Language(13)
    first = expand(draft(()).log()[None, None], torch.zeros(1, 1), k)
    seen = [(int(first.tokens_BM[0, n]),) for n in first.frontier_Bk[0]]
    logits = torch.stack([draft(path).log() for path in seen])[None]
    second = expand(logits, first.score_BM.gather(1, first.frontier_Bk), k)
    below = first.frontier_Bk.gather(1, second.parent_BM)
    parts = [(first.score_BM, second.score_BM), (torch.full_like(first.parent_BM, -1), below)]
    parts += [(torch.ones_like(first.parent_BM), torch.full_like(below, 2)), (first.tokens_BM, second.tokens_BM)]
    tree = select(*(torch.cat(part, 1) for part in parts), nodes=5, levels=2)
    assert tree.nodes == min(5, k + k * k)
    total: Joint = defaultdict(float)
    for weight, committed in rule(tree, language):
        if weight:
            continue_from(total, weight, committed, language, 3)
    check(total, language, 3)


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("rule", [point_mass_outcomes, rejection_outcomes])
def test_short_drafts_are_exact(length: int, rule) -> None:
    """A row of a ragged chain (prompt lookup) that drafts fewer tokens than its neighbours."""
    language = Language(14)
    whole = chain(torch.tensor([[2, 1, 3]]))
    tree = chain(whole.tokens_BN, torch.arange(3)[None] < length)
    total: Joint = defaultdict(float)
    for weight, committed in rule(tree, language):
        if weight:
            assert len(committed) <= length + 1
            continue_from(total, weight, committed, language, 4)
    check(total, language, 4)


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=3), Sampling(1.0, top_p=0.7), Sampling(1.3, min_p=0.2)])
def test_processed_distributions_are_exact(sampling: Sampling) -> None:
    """p and q behind the same processors: what comes out is the processed target."""
    raw, raw_draft = Language(15), Language(16)
    processed: dict[tuple[int, ...], Tensor] = {}

    class Processed(Language):
        def __call__(self, path: tuple[int, ...]) -> Tensor:
            return processed.setdefault(path, probabilities(raw(path).log(), sampling))

    language, total = Processed(0), defaultdict(float)
    for tokens in itertools.product(range(V), repeat=2):
        q = [probabilities(raw_draft(tokens[:n]).log(), sampling) for n in range(2)]
        drafted = (q[0][tokens[0]] * q[1][tokens[1]]).item()
        if drafted:
            tree = chain(torch.tensor([tokens]), q_BKV=torch.stack(q)[None])
            for weight, committed in rejection_outcomes(tree, language):
                continue_from(total, drafted * weight, committed, language, 3)
    check(total, language, 3)
    assert any(p == 0 for p in language.joint(1).values())


def test_greedy_takes_the_longest_argmax_path() -> None:
    language = Language(7)
    best = [int(language(()).argmax())]
    for _ in range(2):
        best.append(int(language(tuple(best)).argmax()))
    wrong = (best[0] + 1) % V
    # wrong sibling first; then the right one with a right child
    tree = build([-1, -1, 1], [wrong, best[0], best[1]])
    verified = verify(tree, target_rows(tree, language).log(), Sampling())
    assert verified.path_BK.tolist() == [[1, 2]]
    assert verified.accepted_B.tolist() == [2]
    assert verified.next_B.tolist() == [best[2]]


def test_right_child_of_a_wrong_parent_is_not_accepted() -> None:
    tree = build([-1, 0], [0, 3])
    logits = torch.tensor([[[0.0, 9, 0, 0], [0, 0, 0, 9], [9, 0, 0, 0]]])
    verified = verify(tree, logits, Sampling())
    assert verified.path_BK.tolist() == [[-1, -1]]
    assert verified.next_B.tolist() == [1]


def test_ragged_rows_and_empty_trees() -> None:
    tree = chain(torch.tensor([[1, 1], [1, 1]]), torch.tensor([[True, False], [False, False]]))
    logits = torch.zeros(2, 3, V)
    logits[:, :, 1] = 5.0
    verified = verify(tree, logits, Sampling())
    assert verified.accepted_B.tolist() == [1, 0]
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, typical=(0.09, 0.3))):
        verified = verify(empty(2), logits[:, :1], sampling, torch.Generator().manual_seed(0))
        assert verified.path_BK.shape == (2, 0)
        assert verified.accepted_B.tolist() == [0, 0]


def chi_square(counts: Tensor, expected_p: Tensor) -> float:
    """Pearson's statistic, in standard deviations above its mean."""
    expected = expected_p * counts.sum()
    assert counts[expected == 0].sum() == 0
    keep = expected > 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = max(int(keep.sum()) - 1, 1)
    return ((statistic - freedom) / (2 * freedom) ** 0.5).item()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3, min_p=0.05)])
def test_random_draws_follow_the_target(sampled: bool, sampling: Sampling) -> None:
    """`verify` itself, draws included: 40,000 rows, first committed token."""
    rows = 40_000
    language, noise = Language(8, sharp=0.6), torch.Generator().manual_seed(0)
    logits = torch.stack([language((n,)).log() for n in range(V)]).float()
    root = language(()).log().float()
    likely = int(root.argmax())
    if sampled:
        q_BV = probabilities(torch.tensor([0.5, 0.1, -0.5, 0.2]).roll(likely), sampling).expand(rows, V)
        drafted = draw(q_BV, noise)
        tree = chain(drafted[:, None], q_BKV=q_BV[:, None])
    else:
        drafted = torch.full((rows,), likely)
        tree = chain(drafted[:, None])
    logits_BMV = torch.stack([root.expand(rows, V), logits[drafted]], 1)
    verified = verify(tree, logits_BMV, sampling, noise)
    first = torch.where(verified.accepted_B > 0, drafted, verified.next_B)
    assert chi_square(torch.bincount(first, minlength=V), probabilities(root, sampling)) < 4
    # and the token after an accepted draft
    accepted = (verified.accepted_B > 0) & (drafted == likely)
    following = torch.bincount(verified.next_B[accepted], minlength=V)
    assert chi_square(following, probabilities(logits[likely], sampling)) < 4


def test_repetition_penalty_sees_the_own_path_only() -> None:
    tree = build([-1, -1, 0], [1, 2, 3])
    seen = torch.tensor([[True, False, False, False]])
    assert seen_tokens(tree, seen)[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_typical_acceptance_by_hand() -> None:
    """p(x) > min(ε, δ·exp(-H)): at uniform p over 4, exp(-H) = 1/4, so δ = 0.3 asks for 0.075."""
    flat = torch.full((V,), 0.25)
    sharp = torch.tensor([0.97, 0.01, 0.01, 0.01])
    # root flat → 1 (accepted, 0.25 > 0.075), 2 (accepted); 1 → 3 under sharp (0.01 < 0.09: refused); 2 → 0 (0.97)
    tree = build([-1, -1, 0, 1], [1, 2, 3, 0])
    p = torch.stack([flat, sharp, sharp, flat, flat])[None]
    verified = typical(tree, p, torch.tensor([[0, 0, 0, 0, 3]]), 0.09, 0.3)
    assert verified.path_BK.tolist() == [[1, 3]]
    assert verified.next_B.tolist() == [3]


def test_typical_ties_go_to_the_likelier_path() -> None:
    p = torch.tensor([[[0.3, 0.6, 0.05, 0.05], [0.25] * 4, [0.25] * 4]])
    verified = typical(build([-1, -1], [0, 1]), p, torch.tensor([[0, 2, 3]]), 0.09, 0.3)
    assert verified.path_BK.tolist() == [[1]]
    assert verified.next_B.tolist() == [3]


def test_typical_is_called_lossy() -> None:
    assert Sampling(temperature=1.0, typical=(0.09, 0.3)).lossy
    assert not Sampling(temperature=0.0, typical=(0.09, 0.3)).lossy
    assert not Sampling(temperature=1.0).lossy


def test_synthetic_acceptance_follows_the_profile() -> None:
    """40,000 rows of a tree with two branches: levels reached as asked, always down the deepest branch."""
    rates, rows = torch.tensor([0.8, 0.5, 0.25]), 40_000
    tree = repeat(build([-1, -1, 1, 2], [0, 1, 2, 3]), rows)
    choice = torch.arange(5).expand(rows, 5)
    verified = synthetic(tree, choice, rates, torch.Generator().manual_seed(0))
    expected = torch.tensor([0.2, 0.8 * 0.5, 0.8 * 0.5 * 0.75, 0.8 * 0.5 * 0.25])
    assert chi_square(torch.bincount(verified.accepted_B, minlength=4), expected) < 4
    paths = torch.tensor([[-1, -1, -1], [1, -1, -1], [1, 2, -1], [1, 2, 3]])
    assert torch.equal(verified.path_BK, paths[verified.accepted_B])
    # the target's own choice at the path's end: row 0 is the root, row n + 1 is node n
    assert torch.equal(verified.next_B, torch.tensor([0, 2, 3, 4])[verified.accepted_B])
    again = synthetic(tree, choice, rates, torch.Generator().manual_seed(0))
    assert torch.equal(again.accepted_B, verified.accepted_B)


def test_synthetic_acceptance_with_rates_of_nodes() -> None:
    """40,000 rows of each of two trees, of which the nodes off the deepest branch say nothing."""
    rows, unused = 40_000, torch.tensor([0.0])
    tree = repeat(build([-1, -1, 1, 2], [0, 1, 2, 3]), 2 * rows)
    rate_2N = torch.tensor([[0.0, 0.8, 0.5, 0.25], [1.0, 0.3, 1.0, 0.6]])
    tree = replace(tree, rate_BN=rate_2N.repeat_interleave(rows, 0))
    verified = synthetic(tree, torch.arange(5).expand(2 * rows, 5), unused, torch.Generator().manual_seed(0))
    for accepted, (a, b, c) in zip(verified.accepted_B.split(rows), rate_2N[:, 1:].tolist(), strict=True):
        expected = torch.tensor([1 - a, a * (1 - b), a * b * (1 - c), a * b * c])
        found = torch.bincount(accepted, minlength=4) / rows
        assert torch.allclose(found, expected, atol=4 * 0.5 / rows**0.5)
    paths = torch.tensor([[-1, -1, -1], [1, -1, -1], [1, 2, -1], [1, 2, 3]])
    assert torch.equal(verified.path_BK, paths[verified.accepted_B])


def test_rates_of_nodes_are_cut_with_their_levels() -> None:
    tree = replace(chain(torch.tensor([[1, 2, 3]])), rate_BN=torch.tensor([[1.0, 0.0, 1.0]]))
    logits, sampling = torch.zeros(1, 4, V), Sampling(synthetic=(0.0,))
    assert verify(tree, logits, sampling).accepted_B.tolist() == [1]
    shorter = tree.first(2)
    assert shorter.rate_BN is not None and shorter.rate_BN.tolist() == [[1.0, 0.0]]
    sure = replace(tree, rate_BN=torch.ones(1, 3))
    kept = sure.keep(torch.tensor([[True, True, False]]))
    assert verify(kept, logits, sampling).accepted_B.tolist() == [2]
    assert verify(sure, logits, sampling).accepted_B.tolist() == [3]
    # lossless rules do not read them
    assert verify(sure, torch.eye(V)[torch.tensor([[3, 0, 0, 0]])], Sampling()).accepted_B.tolist() == [0]


def test_synthetic_acceptance_stops_where_rates_or_drafts_end() -> None:
    tree = chain(torch.tensor([[1, 2, 3]] * 3), torch.tensor([[True] * 3, [True, False, False], [False] * 3]))
    logits = torch.zeros(3, 4, V)
    verified = verify(tree, logits, Sampling(synthetic=(1.0, 1.0)))
    assert verified.accepted_B.tolist() == [2, 1, 0]
    verified = verify(tree, logits, Sampling(synthetic=(1.0,) * 9))
    assert verified.accepted_B.tolist() == [3, 1, 0]
    assert verify(tree, logits, Sampling(synthetic=(0.0, 1.0))).accepted_B.tolist() == [0, 0, 0]
    assert verify(empty(3), logits[:, :1], Sampling(synthetic=(1.0,))).accepted_B.tolist() == [0, 0, 0]


def test_synthetic_acceptance_is_lossy() -> None:
    assert Sampling(synthetic=(0.5,)).lossy
