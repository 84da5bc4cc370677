"""Exact outcome distributions of the lossless verifiers (methods §10), by enumeration.

p(prefix) is the target's next-token distribution after the tokens of `prefix`, as a list over the vocabulary.
An outcome is what one forward commits: the accepted drafts and the target's own token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

Prefix = tuple[int, ...]
Distribution = Callable[[Prefix], list[float]]
Outcomes = dict[Prefix, float]


@dataclass
class Node:
    """Children of a tree node in the order in which they are tried: token → subtree."""

    children: dict[int, Node] = field(default_factory=dict)


def point_mass_outcomes(tree: Node, p: Distribution, prefix: Prefix = ()) -> Outcomes:
    """Deterministic tree: try the children in order, remove a rejected one from p and renormalise."""
    out: Outcomes = defaultdict(float)
    left, reached = list(p(prefix)), 1.0
    for token, child in tree.children.items():
        mass = sum(left)
        accept = left[token] / mass if mass > 0 else 0.0
        if accept > 0:
            for tail, chance in point_mass_outcomes(child, p, (*prefix, token)).items():
                out[tail] += reached * accept * chance
        reached *= 1 - accept
        left[token] = 0.0
    mass = sum(left)
    for token, weight in enumerate(left):
        if reached > 0 and weight > 0:
            out[(*prefix, token)] += reached * weight / mass
    return dict(out)


def sampled_chain_outcomes(length: int, p: Distribution, q: Distribution, prefix: Prefix = ()) -> Outcomes:
    """Chain whose tokens were sampled from q: accept with min(1, p/q), else sample normalise(max(p - q, 0))."""
    out: Outcomes = defaultdict(float)
    target = p(prefix)
    if length == 0:
        return {(*prefix, token): chance for token, chance in enumerate(target) if chance > 0}
    draft = q(prefix)
    rejected = 0.0
    for token, chance in enumerate(draft):
        if chance == 0:
            continue
        accept = min(1.0, target[token] / chance)
        rejected += chance * (1 - accept)
        if accept > 0:
            for tail, below in sampled_chain_outcomes(length - 1, p, q, (*prefix, token)).items():
                out[tail] += chance * accept * below
    residual = [max(a - b, 0.0) for a, b in zip(target, draft, strict=True)]
    mass = sum(residual)
    for token, weight in enumerate(residual):
        if weight > 0:
            out[(*prefix, token)] += rejected * weight / mass
    return dict(out)


def block_chain_outcomes(
    length: int, p: Distribution, q: Distribution, goes: Callable[[Prefix], bool] = lambda prefix: True
) -> Outcomes:
    """Block verification (arXiv 2403.10444, algorithm 2), chain by chain.

    Args: goes: whether a draft follows these drafts.
    """
    out: Outcomes = defaultdict(float)

    def chains(prefix: Prefix, chance: float) -> None:
        if len(prefix) < length and goes(prefix):
            for token, drawn in enumerate(q(prefix)):
                if drawn > 0:
                    chains((*prefix, token), chance * drawn)
        else:
            end(prefix, chance)

    def end(x: Prefix, chance: float) -> None:
        weight, beyond = [1.0], []
        for i in range(len(x)):
            beyond.append([max(weight[i] * a - b, 0.0) for a, b in zip(p(x[:i]), q(x[:i]), strict=True)])
            weight.append(min(1.0, weight[i] * p(x[:i])[x[i]] / q(x[:i])[x[i]]))
        later_fail = 1.0
        for i in reversed(range(len(x) + 1)):
            last = i == len(x)
            left = p(x) if last else beyond[i]
            mass = sum(left)
            if last:
                passes = weight[i]
            elif mass > 0:
                passes = mass / (mass + 1 - weight[i])
            else:
                passes = 0.0
            for token, value in enumerate(left):
                if later_fail * passes * value > 0:
                    out[(*x[:i], token)] += chance * later_fail * passes * value / mass
            later_fail *= 1 - passes

    chains((), 1.0)
    return dict(out)


def next_tokens(outcomes: Outcomes, p: Distribution, length: int) -> Outcomes:
    """Distribution of the first `length` tokens when the rest is sampled from p: equal to p's own if lossless."""
    out: Outcomes = defaultdict(float)

    def extend(prefix: Prefix, chance: float) -> None:
        if len(prefix) >= length:
            out[prefix[:length]] += chance
            return
        for token, below in enumerate(p(prefix)):
            if below > 0:
                extend((*prefix, token), chance * below)

    for prefix, chance in outcomes.items():
        extend(prefix, chance)
    return dict(out)
