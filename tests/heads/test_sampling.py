"""The sampling rule against its definition token by token, equal logits included, and that everybody follows it."""

from __future__ import annotations

import math

import pytest
import torch

from headstart.data.config import DistillConfig
from headstart.data.distilling.answering import choose
from headstart.data.row_random import draw_at
from headstart.eval.decoding.sampling import Sampling, probabilities
from headstart.heads.sampling import FARTHEST, distribution, logit_of_best

RULES = [
    (1.0, 0, 1.0, 0.0), (0.7, 3, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 5, 0.7, 0.1),
    (1.0, 99, 1.0, 0.0), (1.0, 1, 1e-9, 0.9), (0.0, 3, 0.5, 0.1),
]  # fmt: skip


def naive(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))]
    weight = [math.exp((value - logits[order[0]]) / temperature) for value in logits]
    if 0 < top_k < len(order):
        order = [token for token in order if weight[token] >= weight[order[top_k - 1]]]
    total = sum(weight[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if kept and top_p < 1 and reached >= top_p:
            break
        kept.append(token)
        reached += weight[token] / total
    kept = [token for token in kept if weight[token] >= min_p * weight[order[0]]]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("rule", RULES)
def test_definition(rule: tuple[float, int, float, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(50, 9, generator=generator, dtype=torch.float64)
    # steps that no sum of probabilities lands on, so that many logits are equal
    equal = torch.randint(0, 4, (50, 9), generator=generator).double() * 0.7123
    for logits in (apart, equal):
        expected = [naive(row, *rule) for row in logits.tolist()]
        found = distribution(logits, *rule)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_distillation_and_evaluation_draw_by_it() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = torch.randn(200, 40, generator=generator).bfloat16()
    uniform_B = torch.rand(200, generator=generator, dtype=torch.float64)
    for temperature, top_k, top_p, min_p in RULES:
        p_BV = distribution(logits_BV, temperature, top_k, top_p)
        config = DistillConfig(temperature=temperature, top_k=top_k, top_p=top_p)
        assert torch.equal(choose(logits_BV, config, uniform_B), draw_at(p_BV, uniform_B))
        sampling = Sampling(temperature, top_k, top_p, min_p)
        assert torch.equal(
            probabilities(logits_BV, sampling), distribution(logits_BV, temperature, top_k, top_p, min_p)
        )


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_the_logit_of_the_most_likely_token(spread: float) -> None:
    logits_RV = torch.randn((20, 30), generator=torch.Generator().manual_seed(0)) * spread
    for logits, found in zip(logits_RV.tolist(), logit_of_best(logits_RV).tolist(), strict=True):
        weights = sorted(math.exp(logit - max(logits)) for logit in logits)
        assert found == pytest.approx(min(-math.log(sum(weights[:-1])), FARTHEST), abs=1e-4)
    assert logit_of_best(logits_RV.double()).dtype == torch.float64


def test_the_logit_of_the_most_likely_token_is_finite() -> None:
    rows = [[50.0, 0.0], [3.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [1.0, -math.inf]]
    found = logit_of_best(torch.tensor(rows)).tolist()
    assert found == pytest.approx([FARTHEST, -FARTHEST, -FARTHEST, -FARTHEST, FARTHEST])
