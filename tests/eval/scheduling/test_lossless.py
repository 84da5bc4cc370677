"""Drawn chains that compete for the rows of a batch: exact output distributions of both sequences, by enumeration.

All draws of two sequences are enumerated. `reach` and `cut` choose what is verified, as in the decode loop. What both
sequences say must be distributed as the target says it, and independent of each other.
Shape legend: B sequences, P pairs of draws, R = 2 · P, N nodes, M = N + 1, V vocabulary, W texts of a few tokens, K
levels.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from reference.verify import Distribution
from test_block_verification import Prefix, every_chain, language
from torch import Tensor

from headstart.eval.decoding.sampling import logit_of_largest
from headstart.eval.decoding.scheduler import CycleShape
from headstart.eval.decoding.verify import acceptance, block_acceptance, block_residual, walk_accepted, walk_block
from headstart.eval.kernels.flat import cut
from headstart.eval.kernels.reach import reach
from headstart.eval.tree import Tree, chain, static_shape
from headstart.heads.sampling import logit_of

RULES = ["block", "token"]
#: pair of trees → logits of all nodes, [R, N]
Says = Callable[[Tree], Tensor]


@dataclass(frozen=True)
class Sequence2:
    """What the target and the draft say after every prefix of a sequence."""

    p: Distribution
    q: Distribution
    vocab: int

    def after(self, prefix: Prefix) -> Sequence2:
        return Sequence2(lambda x: self.p((*prefix, *x)), lambda x: self.q((*prefix, *x)), self.vocab)

    def law(self, length: int) -> Tensor:
        """The target's probability of every text of `length` tokens, [W]."""
        chances = [1.0]
        texts: list[Prefix] = [()]
        for _ in range(length):
            chances = [chance * x for text, chance in zip(texts, chances, strict=True) for x in self.p(text)]
            texts = [(*text, token) for text in texts for token in range(self.vocab)]
        return torch.tensor(chances, dtype=torch.float64)


def two(vocab: int, zeros: int = 0, seed: int = 1) -> list[Sequence2]:
    """Two sequences with languages of their own."""
    made = [cache(language(seed + n, vocab, zeros if n % 2 else 0)) for n in range(4)]
    return [Sequence2(p, q, vocab) for p, q in (made[:2], made[2:])]


@dataclass(frozen=True)
class Pairs:
    """All pairs of what both sequences may draft; rows 2 n and 2 n + 1 are one batch.

    Attributes: p_RMV: the target's distributions. chance_P: probability of each pair.
    """

    tree: Tree
    p_RMV: Tensor
    chance_P: Tensor

    @classmethod
    def of(cls, sequences: Sequence[Sequence2], levels: int) -> Pairs:
        one, other = (every_chain(levels, s.vocab, s.p, s.q) for s in sequences)
        assert one[0].q_BNV is not None and other[0].q_BNV is not None
        tree = chain(mixed(one[0].tokens_BN, other[0].tokens_BN), None, mixed(one[0].q_BNV, other[0].q_BNV))
        return cls(tree, mixed(one[1], other[1]), mixed(one[2], other[2]).view(-1, 2).prod(1))

    @classmethod
    def of_trees(cls, sequences: Sequence[Sequence2]) -> Pairs:
        """Two children of the root, drawn without replacement, and one child of the first of them."""
        one, other = (every_tree(s) for s in sequences)
        tokens_RN = mixed(one[0], other[0])
        tree = replace(static_shape([(0,), (1,), (0, 0)]).tree(tokens_RN), q_BNV=mixed(one[1], other[1]))
        return cls(tree, mixed(one[2], other[2]), mixed(one[3], other[3]).view(-1, 2).prod(1))

    def first(self, levels: int) -> Pairs:
        return Pairs(self.tree.first(levels), self.p_RMV[:, : levels + 1], self.chance_P)

    def cut(self, log_reach_RN: Tensor, rows_P: Sequence[int | None]) -> Pairs:
        """What is verified of every pair. p of cut places becomes what flat rows hold there."""
        kept, p = [], []
        for n, rows in enumerate(rows_P):
            here = slice(2 * n, 2 * n + 2)
            valid_BN, p_BMV = self.tree.valid_BN[here], self.p_RMV[here]
            if rows is not None:
                flat = cut(log_reach_RN[here], valid_BN, rows)
                valid_BN, p_BMV = flat.kept_BM[:, 1:], flat.places(flat.gather(p_BMV.flatten(0, 1)))
            kept.append(valid_BN)
            p.append(p_BMV)
        return replace(self, tree=self.tree.keep(torch.cat(kept)), p_RMV=torch.cat(p))


def mixed(a: Tensor, b: Tensor) -> Tensor:
    """Every row of a with every row of b, one behind the other."""
    every_b = b.repeat(len(a), *[1] * (b.dim() - 1))
    return torch.stack([a.repeat_interleave(len(b), 0), every_b], 1).flatten(0, 1)


def every_tree(sequence: Sequence2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, q, p, probability) of all draws of `Pairs.of_trees`."""
    p, q = sequence.p, sequence.q
    first = q(())
    drawn = [x for x in itertools.product(range(sequence.vocab), repeat=3) if x[0] != x[1]]
    chances = [first[a] * first[b] / (1 - first[a]) * q((a,))[c] for a, b, c in drawn]
    q_BNV = [[first, first, q((a,))] for a, _, _ in drawn]
    p_BMV = [[p(()), p((a,)), p((b,)), p((a, c))] for a, b, c in drawn]
    return (
        torch.tensor(drawn), *(torch.tensor(x, dtype=torch.float64) for x in (q_BNV, p_BMV, chances)),
    )  # type: ignore[return-value]  # fmt: skip


def committed(tree: Tree, p_RMV: Tensor, rule: str) -> Tensor:
    """[R, M, V]: probability that a row accepts m drafts and then says v, over all draws of the verification."""
    rows_R = torch.arange(len(p_RMV))
    found_RMV = torch.zeros_like(p_RMV)
    assert tree.q_BNV is not None
    if rule == "block":
        reach_RM, passes_RN = block_acceptance(tree, tree.q_BNV, p_RMV)
    else:
        passes_RN, residual_RMV = acceptance(tree, p_RMV)
    for bits in itertools.product([False, True], repeat=tree.nodes):
        bits_RN = torch.tensor(bits).expand_as(passes_RN)
        chance_R = torch.where(bits_RN, passes_RN, 1 - passes_RN).prod(1)
        if rule == "block":
            end_R, _, _ = walk_block(tree, bits_RN & (passes_RN > 0))
            last_RV = block_residual(tree, tree.q_BNV, p_RMV, reach_RM, end_R)
        else:
            end_R, _, _ = walk_accepted(tree, bits_RN & (passes_RN > 0))
            last_RV = residual_RMV[rows_R, end_R]
        found_RMV[rows_R, end_R] += chance_R[:, None] * last_RV
    return found_RMV


def told(tokens_RN: Tensor, committed_RMV: Tensor, law_W: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """[R, W]: probability of every text, where what a row does not commit is drawn from the target later.

    Args: paths: the nodes that lead to each place, its own included.
    """
    rows, vocab = len(tokens_RN), committed_RMV.shape[2]
    found_RW = torch.zeros((rows, len(law_W)), dtype=torch.float64)
    for m, path in enumerate(paths):
        count = vocab ** len(path)
        rest = law_W.view(count, vocab, -1)
        rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
        before_R = torch.zeros(rows, dtype=torch.int64)
        for n in path:
            before_R = before_R * vocab + tokens_RN[:, n]
        found_RW.view(rows, count, vocab, -1)[torch.arange(rows), before_R] += (
            committed_RMV[:, m, :, None] * rest[before_R]
        )
    return found_RW


def both(sequences: Sequence[Sequence2], pairs: Pairs, rule: str, lengths: Sequence[int]) -> Tensor:
    """[W, W]: joint probability of what the two sequences say."""
    tree, committed_RMV = pairs.tree, committed(pairs.tree, pairs.p_RMV, rule)
    paths = [[], *([n for n in range(tree.nodes) if tree.mask_BNN[0, m, n]] for m in range(tree.nodes))]
    one, other = (
        told(tree.tokens_BN[n::2], committed_RMV[n::2], s.law(length), paths)
        for n, (s, length) in enumerate(zip(sequences, lengths, strict=True))
    )
    return (pairs.chance_P[:, None] * one).T @ other


def distance(found_WW: Tensor, sequences: Sequence[Sequence2], length: int) -> float:
    """The largest difference from the target's, whose sequences know nothing of each other."""
    assert float(found_WW.sum()) == pytest.approx(1.0, abs=1e-12)
    one, other = (s.law(length) for s in sequences)
    return float((found_WW - one[:, None] * other).abs().max())


def of_the_largest(tree: Tree) -> Tensor:
    """What drafters without a confidence head say."""
    assert tree.q_BNV is not None
    return logit_of_largest(tree.q_BNV)


def of_a_head(tree: Tree) -> Tensor:
    """Any number, by the tokens before: what a confidence head says. Some numbers are equal in both sequences."""
    assert tree.q_BNV is not None
    lines = [
        [round(random.Random(f"{first}{tokens[:n]}").gauss(0, 2)) / 2 for n in range(tree.nodes)]
        for tokens, first in zip(tree.tokens_BN.tolist(), tree.q_BNV[:, 0].tolist(), strict=True)
    ]
    return torch.tensor(lines, dtype=torch.float32)


def of_the_token(tree: Tree) -> Tensor:
    """Not allowed: it tells what was drawn."""
    assert tree.q_BNV is not None
    return logit_of(tree.q_BNV.gather(2, tree.tokens_BN[:, :, None])[..., 0]).float()


def reached(pairs: Pairs, says: Says) -> Tensor:
    """log-reach [R, N], with a calibration of each level."""
    tree = replace(pairs.tree, confidence_BN=says(pairs.tree))
    return reach(tree, torch.tensor([1.0, 0.7, 1.2]), torch.tensor([0.0, 0.4, -0.3])).log_reach_BN


def shared(
    says: Says, vocab: int, levels: int, rows: int, rule: str, zeros: int = 0, seed: int = 1
) -> tuple[float, set[int]]:
    """How far both sequences are from the target, and how many drafts of the first one are kept."""
    sequences = two(vocab, zeros, seed)
    pairs = Pairs.of(sequences, levels)
    pairs = pairs.cut(reached(pairs, says), [rows] * len(pairs.chance_P))
    kept = set(pairs.tree.valid_BN[::2].sum(1).tolist())
    return distance(both(sequences, pairs, rule, [levels + 1] * 2), sequences, levels + 1), kept


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("says", [of_the_largest, of_a_head])
@pytest.mark.parametrize(("vocab", "levels", "rows"), [
    (2, 2, 3), (2, 2, 5), (3, 2, 2), (3, 2, 3), (3, 2, 4), (3, 2, 6), (2, 3, 4), (2, 3, 5), (2, 3, 6), (2, 3, 7),
])  # fmt: skip
def test_sequences_that_share_rows_say_what_the_target_says(
    vocab: int, levels: int, rows: int, says: Says, rule: str
) -> None:
    wanders = False
    for seed in range(3, 7):
        far, kept = shared(says, vocab, levels, rows, rule, zeros=seed % 2 if vocab > 2 else 0, seed=seed)
        assert far < 1e-12
        wanders |= len(kept) > 1
    # what was drawn decides which sequence gets the rows, unless all first drafts or all drafts have one
    assert wanders == (3 < rows < 2 * levels + 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "levels", "rows"), [(2, 2, 3), (3, 2, 4), (2, 3, 5)])
def test_no_draft_may_speak_of_its_own_token(vocab: int, levels: int, rows: int, rule: str) -> None:
    """The check above notices a logit that tells what was drawn."""
    far = [shared(of_the_token, vocab, levels, rows, rule, seed=seed)[0] for seed in range(3, 7)]
    assert max(far) > 1e-2


def of_the_parents(tree: Tree) -> Tensor:
    """What a head may say of siblings: any number, by the tokens above."""
    assert tree.q_BNV is not None
    lines = []
    for row, (a, _, _) in enumerate(tree.tokens_BN.tolist()):
        first, below = (random.Random(f"{tree.q_BNV[row, 0, 0]}{x}").gauss(0, 2) for x in ("", a))
        lines.append([first, first, below])
    return torch.tensor(lines, dtype=torch.float32)


def unasked(tree: Tree) -> Tensor:
    """What is said of trees whose siblings are drawn now: nothing, so that the calibration of the level decides."""
    return torch.zeros(tree.tokens_BN.shape)


@pytest.mark.parametrize("rows", range(2, 9))
@pytest.mark.parametrize("says", [unasked, of_the_parents])
def test_trees_of_drawn_siblings_that_share_rows(says: Says, rows: int) -> None:
    wanders = False
    for seed in range(3, 7):
        sequences = two(3, seed=seed)
        pairs = Pairs.of_trees(sequences)
        pairs = pairs.cut(reached(pairs, says), [rows] * len(pairs.chance_P))
        assert distance(both(sequences, pairs, "token", [3, 3]), sequences, 3) < 1e-12
        wanders |= len(set(pairs.tree.valid_BN[::2].sum(1).tolist())) > 1
    assert wanders == (says is of_the_parents and 5 <= rows < 8)


def test_no_sibling_may_speak_of_its_own_token() -> None:
    far = []
    for seed in range(3, 7):
        sequences = two(3, seed=seed)
        pairs = Pairs.of_trees(sequences)
        pairs = pairs.cut(reached(pairs, of_the_token), [4] * len(pairs.chance_P))
        far.append(distance(both(sequences, pairs, "token", [3, 3]), sequences, 3))
    assert max(far) > 1e-2


#: of two levels at batch 2, with the time that each takes
SHAPES = {
    CycleShape(1): 0.97, CycleShape(2, rows=3): 0.8, CycleShape(2, rows=4): 1.0, CycleShape(2, rows=5): 1.13,
    CycleShape(2): 1.3,
}  # fmt: skip


def chosen(log_reach_BN: Tensor, accepted: int) -> CycleShape:
    """The shape with the most expected tokens per time, by what one cycle said and what was accepted of it."""
    correction = (4 + accepted) / (4 + float(log_reach_BN.exp().sum()))

    def rate(shape: CycleShape) -> float:
        reach_F = log_reach_BN[:, : shape.levels].exp().flatten().sort(descending=True).values
        return (2 + correction * float(reach_F[: (shape.rows or 6) - 2].sum())) / SHAPES[shape]

    return max(SHAPES, key=rate)


@pytest.mark.parametrize("rule", RULES)
def test_the_budget_of_a_cycle_may_follow_from_the_drafts_of_the_cycle_before(rule: str) -> None:
    """Two cycles. Levels and rows of the second one follow from all that the first one drafted, kept or not."""
    sequences, length = two(2, seed=22), 6
    first = Pairs.of(sequences, 2)
    log_reach_RN = reached(first, of_the_largest)
    cut = first.cut(log_reach_RN, [4] * len(first.chance_P))
    committed_RMV = committed(cut.tree, cut.p_RMV, rule)
    states: dict[tuple[Prefix, Prefix, CycleShape], float] = defaultdict(float)
    for pair, chance in enumerate(first.chance_P.tolist()):
        ends = [
            [((*first.tree.tokens_BN[row, :m].tolist(), v), m, float(committed_RMV[row, m, v]))
             for m in range(3) for v in range(2) if committed_RMV[row, m, v] > 0]
            for row in (2 * pair, 2 * pair + 1)
        ]  # fmt: skip
        for (one, m, a), (other, n, b) in itertools.product(*ends):
            states[one, other, chosen(log_reach_RN[2 * pair : 2 * pair + 2], m + n)] += chance * a * b
    found = torch.zeros((2**length, 2**length), dtype=torch.float64)
    for (one, other, shape), chance in states.items():
        later = [s.after(x) for s, x in zip(sequences, (one, other), strict=True)]
        assert shape.levels is not None
        second = Pairs.of(later, 2).first(shape.levels)
        second = second.cut(reached(second, of_the_largest), [shape.rows] * len(second.chance_P))
        lengths = [length - len(x) for x in (one, other)]
        places = [
            slice(start := place(x) * 2**rest, start + 2**rest) for x, rest in zip((one, other), lengths, strict=True)
        ]
        found[places[0], places[1]] += chance * both(later, second, rule, lengths)
    assert distance(found, sequences, length) < 1e-12
    # the second cycle's shape does follow from the first one's drafts
    assert len({shape for _, _, shape in states}) >= 3


def place(text: Prefix) -> int:
    """Index of a text of tokens 0 and 1 among those of its length."""
    return int("".join(map(str, text)), 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_budget_must_not_follow_from_the_drafts_that_it_cuts(rule: str) -> None:
    """The check notices a choice of rows by the current drafts: their reach tells what was drawn above them."""
    sequences = two(2, seed=18)
    pairs = Pairs.of(sequences, 2)
    log_reach_RN = reached(pairs, of_the_largest)
    rows = [chosen(log_reach_RN[2 * n : 2 * n + 2], 1).rows or 6 for n in range(len(pairs.chance_P))]
    assert len(set(rows)) > 1
    now = pairs.cut(log_reach_RN, rows)
    assert distance(both(sequences, now, rule, [3, 3]), sequences, 3) > 1e-3
    # with the same rows for all of them, every choice is right
    for each in set(rows):
        fixed = pairs.cut(log_reach_RN, [each] * len(rows))
        assert distance(both(sequences, fixed, rule, [3, 3]), sequences, 3) < 1e-12
