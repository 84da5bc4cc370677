"""The enumerated verifiers are lossless: committed tokens, continued from p, are distributed as p (to 1e-12)."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from reference.verify import (
    Distribution,
    Node,
    block_chain_outcomes,
    next_tokens,
    point_mass_outcomes,
    sampled_chain_outcomes,
)

VOCAB, LENGTH = 4, 3


def random_distribution(seed: int, zeros: bool = False) -> Distribution:
    """A different distribution after every prefix; with `zeros`, one random token is impossible."""

    def p(prefix: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed}{prefix}")
        weights = [rng.random() + 0.01 for _ in range(VOCAB)]
        if zeros:
            weights[rng.randrange(VOCAB)] = 0.0
        return [w / sum(weights) for w in weights]

    return p


def exact(p: Distribution) -> dict[tuple[int, ...], float]:
    out = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = math.prod(p(tokens[:i])[tokens[i]] for i in range(LENGTH))
        if chance > 0:
            out[tokens] = chance
    return out


TREES = {
    "empty": Node(),
    "chain": Node({2: Node({0: Node()})}),
    "siblings": Node({3: Node({1: Node(), 0: Node()}), 0: Node(), 1: Node({2: Node()})}),
    "every child": Node({i: Node() for i in range(VOCAB)}),
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_point_mass_verification_is_lossless(tree: str, zeros: bool):
    p = random_distribution(1, zeros)
    outcomes = point_mass_outcomes(TREES[tree], p)
    assert next_tokens(outcomes, p, LENGTH) == pytest.approx(exact(p), abs=1e-12)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("length", [1, 2])
def test_sampled_chain_verification_is_lossless(length: int, zeros: bool):
    p, q = random_distribution(2, zeros), random_distribution(3, zeros)
    outcomes = sampled_chain_outcomes(length, p, q)
    assert next_tokens(outcomes, p, LENGTH) == pytest.approx(exact(p), abs=1e-12)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("length", [1, 2])
def test_block_verification_is_lossless_and_accepts_more(length: int, zeros: bool):
    p, q = random_distribution(2, zeros), random_distribution(3, zeros)
    block, token = block_chain_outcomes(length, p, q), sampled_chain_outcomes(length, p, q)
    assert next_tokens(block, p, LENGTH) == pytest.approx(exact(p), abs=1e-12)
    of_block, of_token = (sum(w * len(x) for x, w in found.items()) for found in (block, token))
    assert of_block >= of_token - 1e-12
    assert (of_block > of_token + 1e-4) == (length == 2 and not zeros)


def test_point_mass_accepts_a_token_as_often_as_the_target_says_it():
    p = random_distribution(4)
    outcomes = point_mass_outcomes(Node({2: Node()}), p)
    accepted = sum(chance for tokens, chance in outcomes.items() if len(tokens) == 2)
    assert accepted == pytest.approx(p(())[2], abs=1e-12)


def test_sampled_chain_accepts_the_overlap():
    p, q = random_distribution(5), random_distribution(6)
    outcomes = sampled_chain_outcomes(1, p, q)
    accepted = sum(chance for tokens, chance in outcomes.items() if len(tokens) == 2)
    assert accepted == pytest.approx(sum(map(min, p(()), q(()))), abs=1e-12)
