"""Fits of calibrations: against naive loops, and on cycles whose true calibration is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from headstart.eval.scheduling import logistic
from headstart.eval.tuning.calibration import (
    Outcomes,
    calibrate,
    ece,
    errors,
    fit_temperatures,
    reliability,
)
from headstart.heads.errors import DataError
from headstart.heads.formats.calibration import mean_error
from headstart.heads.sampling import logit_of, logit_of_best


def cycles(logit_SK: Tensor, p_SK: Tensor, seed: int) -> Outcomes:
    """Chains whose draft k is accepted with p[k], if all before it are."""
    hit_SK = torch.rand(p_SK.shape, generator=torch.Generator().manual_seed(seed), dtype=p_SK.dtype) < p_SK
    accepted_S = hit_SK.long().cumprod(1).sum(1)
    return Outcomes(logit_SK, accepted_S, torch.full_like(accepted_S, p_SK.shape[1]))


def logits(samples: int, positions: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.5 * torch.randn((samples, positions), generator=generator, dtype=torch.float64) + 1


def naive_ece(p: list[float], hit: list[bool], bins: int) -> float:
    places: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for x, h in zip(p, hit, strict=True):
        places[min(int(x * bins), bins - 1)].append((x, h))
    total = 0.0
    for place in filter(None, places):
        mean = sum(x for x, _ in place) / len(place)
        share = sum(h for _, h in place) / len(place)
        total += len(place) / len(p) * abs(mean - share)
    return total


def test_error_is_that_of_a_naive_loop() -> None:
    p_N = torch.cat([torch.sigmoid(logits(200, 1)[:, 0]), torch.tensor([0.0, 1.0], dtype=torch.float64)])
    hit_N = torch.rand(202, generator=torch.Generator().manual_seed(3)) < 0.5
    assert ece(p_N, hit_N, 15) == pytest.approx(naive_ece(p_N.tolist(), hit_N.tolist(), 15))
    assert math.isnan(ece(p_N[:0], hit_N[:0]))


def test_bins_of_equal_mass_hold_equally_many() -> None:
    p_N = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.85, 0.15])
    hit_N = torch.tensor([True, False, True, True, False, False])
    points = reliability(p_N, hit_N, bins=3, equal_mass=True)
    expected = [[0.125, 0.0, 2], [0.5, 1.0, 2], [0.875, 0.5, 2]]
    assert [pytest.approx(point) for point in expected] == points
    assert ece(p_N, hit_N, 3, equal_mass=True) == pytest.approx((0.125 + 0.5 + 0.375) / 3)
    # by width: .1 .15 .2 lie in the first third, .8 .85 .9 in the last one
    assert reliability(p_N, hit_N, bins=3) == [pytest.approx([0.15, 1 / 3, 3]), pytest.approx([0.85, 2 / 3, 3])]


def test_temperatures_are_found_one_after_the_other() -> None:
    true = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
    logit_SK = logits(20000, 3)
    outcomes = cycles(logit_SK, torch.sigmoid(logit_SK / true), seed=1)
    found = fit_temperatures(outcomes)
    assert found == fit_temperatures(outcomes)
    assert found == pytest.approx(true.tolist(), rel=0.25)
    said = torch.sigmoid(logit_SK)
    after = errors(outcomes, torch.sigmoid(logit_SK / torch.tensor(found, dtype=torch.float64)))
    assert errors(outcomes, said)[0] > 0.05 and max(after) < 0.01
    # no temperature of SGLang's grid does better at a position, with the same ones before it
    for k in range(3):
        for n in range(41):
            other = [*found[:k], 10 ** (n / 20 - 1)]
            p_SK = torch.sigmoid(logit_SK[:, : k + 1] / torch.tensor(other, dtype=torch.float64))
            part = Outcomes(logit_SK[:, : k + 1], outcomes.accepted_S.clamp(max=k + 1), torch.full((20000,), k + 1))
            assert errors(part, p_SK)[k] >= after[k] - 1e-12


def test_equal_errors_take_the_temperature_nearest_one() -> None:
    zero_SK = torch.zeros((4, 1))  # σ(0 / T) is ½ at every T
    found = fit_temperatures(Outcomes(zero_SK, torch.tensor([0, 1, 1, 1]), torch.ones(4, dtype=torch.int64)))
    assert found == [1.0]
    unknown = Outcomes(zero_SK, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    assert fit_temperatures(unknown) == [1.0]


def test_logistic_finds_what_made_the_cycles() -> None:
    slope, bias_K = 0.7, torch.tensor([-0.4, 0.3, 0.0], dtype=torch.float64)
    logit_SK = logits(40000, 3)
    outcomes = cycles(logit_SK, torch.sigmoid(slope * logit_SK + bias_K), seed=2)
    found = logistic.fit(outcomes.logit_SK, outcomes.accepted_S, outcomes.judged_S)
    assert float(found.slope) == pytest.approx(slope, abs=0.03)
    assert found.bias_K.tolist() == pytest.approx(bias_K.tolist(), abs=0.06)


def naive_loss(theta: Tensor, outcomes: Outcomes) -> Tensor:
    """-log p of drafts up to the first rejection, and the pull to the start values."""
    slope, bias_K = theta[0], theta[1:]
    total = 0.5 * ((slope - logistic.SLOPE) ** 2 + ((bias_K - logistic.BIAS) ** 2).sum())
    for logit_K, accepted, judged in zip(outcomes.logit_SK, outcomes.accepted_S, outcomes.judged_S, strict=True):
        for k in range(int(judged)):
            p = torch.sigmoid(slope * logit_K[k] + bias_K[k])
            total = total - (p if k < accepted else 1 - p).log()
            if k >= accepted:
                break
    return total


def small(seed: int = 5) -> Outcomes:
    logit_SK = logits(30, 3, seed)
    made = cycles(logit_SK, torch.sigmoid(0.4 * logit_SK), seed)
    cut_S = torch.arange(30) % 7 == 0  # answers that ended among the accepted drafts
    return Outcomes(logit_SK, made.accepted_S, torch.where(cut_S, made.accepted_S, made.judged_S))


def test_the_fit_is_the_minimum_of_a_naive_loss() -> None:
    outcomes = small()
    found = logistic.fit(outcomes.logit_SK, outcomes.accepted_S, outcomes.judged_S)
    theta = torch.cat([found.slope[None], found.bias_K]).requires_grad_()
    gradient = torch.autograd.grad(naive_loss(theta, outcomes), theta)[0]
    assert gradient.abs().max() < 1e-6
    hessian = torch.autograd.functional.hessian(lambda t: naive_loss(t, outcomes), theta.detach())
    arrow = found.precision
    torch.testing.assert_close(torch.cat([arrow.corner[None], arrow.edge_K]), hessian[0])
    torch.testing.assert_close(torch.diag(arrow.diagonal_K), hessian[1:, 1:])
    vector = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64)
    solved = torch.cat([part.reshape(-1) for part in arrow.solve(vector[0], vector[1:])])
    torch.testing.assert_close(hessian @ solved, vector)


def test_a_position_without_observations_keeps_its_start() -> None:
    logit_SK = logits(50, 3)
    none_S = torch.zeros(50, dtype=torch.int64)
    found = logistic.fit(logit_SK, none_S, torch.full((50,), 3))
    assert found.bias_K[0] < -0.5 and found.bias_K[1:].tolist() == [logistic.BIAS] * 2


@pytest.mark.parametrize("accepted", [0, 3])
def test_cycles_that_all_end_alike_give_finite_numbers(accepted: int) -> None:
    logit_SK = 13.8 * torch.ones((5000, 3), dtype=torch.float64)
    found = logistic.fit(logit_SK, torch.full((5000,), accepted), torch.full((5000,), 3))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.tensors)
    state = logistic.start(3)
    for _ in range(20):
        state = logistic.update(state, logit_SK.float(), torch.full((5000,), accepted), torch.full((5000,), 3))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.tensors)
    first = float(state.probability(logit_SK.float())[0, 0])
    assert first > 0.99 if accepted else first < 0.01


def test_one_update_is_the_fit_and_many_come_near_it() -> None:
    outcomes = small()
    whole = logistic.fit(outcomes.logit_SK, outcomes.accepted_S, outcomes.judged_S)
    start = logistic.start(3, dtype=torch.float64)
    once = logistic.update(start, outcomes.logit_SK, outcomes.accepted_S, outcomes.judged_S)
    assert float(once.slope) == pytest.approx(float(whole.slope), abs=0.01)
    assert once.bias_K.tolist() == pytest.approx(whole.bias_K.tolist(), abs=0.01)
    slope, bias_K = 0.9, torch.tensor([0.5, -0.6], dtype=torch.float64)
    state, logit_SK = logistic.start(2), logits(8000, 2)
    made = cycles(logit_SK, torch.sigmoid(slope * logit_SK + bias_K), seed=4)
    for n in range(0, 8000, 8):
        rows = made.part(slice(n, n + 8))
        state = logistic.update(state, rows.logit_SK.float(), rows.accepted_S, rows.judged_S)
    whole = logistic.fit(made.logit_SK, made.accepted_S, made.judged_S)
    assert float(state.slope) == pytest.approx(float(whole.slope), abs=0.02)
    assert state.bias_K.tolist() == pytest.approx(whole.bias_K.tolist(), abs=0.03)
    assert state.slope.dtype == torch.float32


def test_an_update_forgets_and_idle_rows_change_nothing() -> None:
    state, zero_B = logistic.start(2), torch.zeros(4, dtype=torch.int64)
    idle = logistic.update(state, torch.full((4, 2), math.inf), zero_B, zero_B)
    assert all(map(torch.equal, idle.tensors, state.tensors))

    def after(keep: float) -> float:
        """The probability of a first draft when acceptance was .3 for 60 cycles and .8 for another 60."""
        now, generator = state, torch.Generator().manual_seed(0)
        for rate in [0.3] * 60 + [0.8] * 60:
            accepted_B = (torch.rand(16, generator=generator) < rate).long()
            now = logistic.update(now, torch.zeros(16, 2), accepted_B, torch.ones_like(accepted_B), keep)
        return float(now.probability(torch.zeros(2))[0])

    assert after(1.0) == pytest.approx(0.55, abs=0.05)
    assert after(0.9) == pytest.approx(0.8, abs=0.05)


def test_logit_of_a_certain_draft_is_finite() -> None:
    found = logit_of(torch.tensor([0.0, 0.25, 1.0]))
    assert found.tolist() == pytest.approx([-13.8155, -1.0986, 13.8], abs=0.05)
    logits_2U = torch.tensor([[0.3, 1.7, -0.5], [60.0, 0.0, 1.0]])
    q_2 = logits_2U.double().softmax(-1).amax(-1)
    assert float(logit_of_best(logits_2U)[0]) == pytest.approx(math.log(q_2[0] / (1 - q_2[0])), abs=1e-4)
    assert float(logit_of_best(logits_2U)[1]) == pytest.approx(13.8, abs=0.05)


@pytest.mark.parametrize("kind", ["temperature", "logistic"])
def test_errors_fall_on_cycles_that_were_not_fitted(kind: str) -> None:
    logit_SK = logits(16000, 4)
    true = torch.sigmoid(0.5 * logit_SK)  # T = 2, slope ½: the drafts are too sure of themselves
    outcomes = cycles(logit_SK.float(), true, seed=6)
    ours = calibrate(outcomes.part(slice(0, 8000)), outcomes.part(slice(8000, None)), kind, "confidence", "drawn")
    assert ours.num_samples == 8000 and ours.positions == 4
    assert min(ours.ece_before) > 0.02 and max(ours.ece_after) < 0.02
    held = outcomes.part(slice(8000, None))
    p_SK = ours.probability(held.logit_SK)
    assert errors(held, p_SK) == pytest.approx(ours.ece_after, abs=1e-9)
    assert mean_error(ours.reliability_after) < 0.02 < mean_error(ours.reliability_before)
    assert sum(point[2] for point in ours.reliability_after) == 8000 * 4


def test_a_biased_confidence_needs_a_bias() -> None:
    """It says .3 where .65 are accepted: on the wrong side of ½, which no temperature changes."""
    bias = math.log(0.65 / 0.35) - math.log(0.3 / 0.7)
    logit_SK = 0.5 * (logits(16000, 3) - 1) + math.log(0.3 / 0.7)
    outcomes = cycles(logit_SK.float(), torch.sigmoid(logit_SK + bias), seed=7)
    halves = outcomes.part(slice(0, 8000)), outcomes.part(slice(8000, None))
    found, scaled = (calibrate(*halves, kind, "confidence", "drawn") for kind in ("logistic", "temperature"))
    assert found.slope == pytest.approx(1.0, abs=0.05) and found.biases[0] == pytest.approx(bias, abs=0.05)
    assert max(found.ece_after) < 0.02 and scaled.ece_after[0] > 0.1
    # what engines read is the same, with the same error
    assert (found.temperatures, found.ece_of_temperatures) == (scaled.temperatures, scaled.ece_after)
    own = calibrate(*halves, "logistic", "draft_probability", "drawn")
    assert own.temperatures == own.ece_of_temperatures == [] and own.biases == found.biases


def test_cut_cycles_count_only_as_far_as_they_are_known() -> None:
    logit_SK = torch.zeros((3, 2))
    logit_SK[1, 1] = math.nan  # nobody knows of this draft
    outcomes = Outcomes(logit_SK, torch.tensor([2, 1, 0]), torch.tensor([2, 1, 2]))
    assert outcomes.known_SK.tolist() == [[True, True], [True, False], [True, True]]
    assert errors(outcomes, torch.sigmoid(logit_SK)) == pytest.approx([abs(0.5 - 2 / 3), abs(0.25 - 1 / 2)])
    assert all(map(math.isfinite, [*fit_temperatures(outcomes), *logistic.fit(*vars(outcomes).values()).bias_K]))


def test_wrong_records_are_refused() -> None:
    zero_SK, one_S = torch.zeros((2, 3)), torch.ones(2, dtype=torch.int64)
    with pytest.raises(DataError, match="accepted_S: found shape"):
        Outcomes(zero_SK, one_S[:1], one_S)
    for accepted, judged in itertools.product((2, 4), (1, 4)):
        with pytest.raises(DataError, match="0 ≤ accepted ≤ judged ≤ 3"):
            Outcomes(zero_SK, accepted * one_S, judged * one_S)
    with pytest.raises(DataError, match="not finite"):
        Outcomes(zero_SK + math.nan, one_S, one_S)
    fine = Outcomes(zero_SK, one_S, one_S)
    with pytest.raises(DataError, match="none tells the fate of draft 2"):
        calibrate(fine, fine, "temperature", "confidence", "x")
    with pytest.raises(DataError, match="found 0 of 3 drafts"):
        calibrate(fine.part(slice(0, 0)), fine, "temperature", "confidence", "x")
