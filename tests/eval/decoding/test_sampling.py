"""Logits processors against their definitions, one row at a time."""

from __future__ import annotations

import pytest
import torch

from headstart.eval.decoding.sampling import Sampling, draw, probabilities

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 5.0]])


def test_temperature_zero_is_argmax() -> None:
    assert probabilities(LOGITS, Sampling()).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_temperature() -> None:
    torch.testing.assert_close(probabilities(LOGITS, Sampling(temperature=0.5)), (LOGITS * 2).softmax(-1))


def test_top_k_renormalises() -> None:
    p = probabilities(LOGITS, Sampling(temperature=1.0, top_k=2))
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(p[0], torch.stack([e / (1 + e), 1 / (1 + e), torch.tensor(0.0), torch.tensor(0.0)]))
    assert torch.equal(probabilities(LOGITS, Sampling(temperature=1.0, top_k=99)), LOGITS.softmax(-1))


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.65, 2), (0.9, 3), (1.0, 4), (1e-9, 1)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: int) -> None:
    # probabilities .644 .237 .087 .032
    p = probabilities(LOGITS[:1], Sampling(temperature=1.0, top_p=top_p))[0]
    assert int((p > 0).sum()) == kept
    torch.testing.assert_close(p.sum(), torch.tensor(1.0))
    full = LOGITS[0].softmax(-1)
    torch.testing.assert_close(p[:kept], full[:kept] / full[:kept].sum())


def test_min_p() -> None:
    p = probabilities(LOGITS[:1], Sampling(temperature=1.0, min_p=0.3))[0]
    full = LOGITS[0].softmax(-1)
    torch.testing.assert_close(p, torch.tensor([full[0], full[1], 0, 0]) / (full[0] + full[1]))


def test_repetition_penalty_pulls_seen_tokens_down() -> None:
    seen = torch.tensor([[True, False, False, True], [False] * 4])
    p = probabilities(LOGITS, Sampling(temperature=1.0, repetition_penalty=2.0), seen)
    torch.testing.assert_close(p[0], torch.tensor([1.0, 1.0, 0.0, -2.0]).softmax(-1))
    torch.testing.assert_close(p[1], LOGITS[1].softmax(-1))


def test_half_precision_logits_are_processed_in_float32() -> None:
    p = probabilities(LOGITS.bfloat16(), Sampling(temperature=0.7, top_p=0.99))
    assert p.dtype == torch.float32
    assert torch.isfinite(p).all()


def test_infinite_logits_stay_finite_probabilities() -> None:
    p = probabilities(torch.tensor([[0.0, -torch.inf, -torch.inf]]), Sampling(temperature=1.0, top_k=2, top_p=0.5))
    assert p.tolist() == [[1.0, 0.0, 0.0]]


def test_draw_follows_the_distribution_and_the_seed() -> None:
    p = torch.tensor([0.2, 0.0, 0.8]).expand(4000, 3)
    first = draw(p, torch.Generator().manual_seed(3))
    assert torch.equal(first, draw(p, torch.Generator().manual_seed(3)))
    counts = torch.bincount(first, minlength=3)
    assert counts[1] == 0
    assert abs(counts[2] / 4000 - 0.8) < 0.03
