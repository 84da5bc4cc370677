"""The online calibration finds how often simulated drafts are accepted.

Shape legend: B rows, N nodes, K levels.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headstart.eval.scheduling.calibrating import ChainLogistic, LevelShares
from headstart.eval.scheduling.estimates import kept
from headstart.eval.scheduling.logistic import BIAS, SLOPE

Floats = NDArray[np.float64]
BATCH = 32


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def numbers(of: ChainLogistic | LevelShares) -> tuple[Floats, Floats]:
    return of.scale_K.double().numpy(), of.bias_K.double().numpy()


#: (what the draft says of a logit of acceptance, the scale and the bias that undo it)
SAYS = {
    "true": (lambda x: x, 1.0, 0.0),
    "too sure of itself": (lambda x: 2 * x + 1.5, 0.5, -0.75),
    "too modest": (lambda x: x / 2 - 1, 2.0, 2.0),
}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("begin", [(1.0, 0.0), (SLOPE, BIAS)])
@pytest.mark.parametrize("says", SAYS)
def test_chains(says: str, begin: tuple[float, float], cut: bool) -> None:
    """Also where drafts that are unlikely were not verified, and where a row is idle."""
    rng = np.random.default_rng(1)
    say, scale, bias = SAYS[says]
    calibrating, levels, changed = ChainLogistic(3, *begin), np.array([0.8, 0.2, -0.3]), 0
    active_B = np.arange(BATCH) > 0
    for cycle in range(700):
        depth = 2 if cycle % 5 == 0 else 3
        logit_BK = levels[:depth] + rng.normal(0, 1, (BATCH, depth))
        said_BK = say(logit_BK)
        now = numbers(calibrating)
        reach_BK = np.where(active_B[:, None], sigmoid(now[0][:depth] * said_BK + now[1][:depth]).cumprod(1), 0.0)
        kept_BK = kept(reach_BK.astype(np.float32), BATCH if cut else None)
        hit_BK = rng.random(logit_BK.shape) < sigmoid(logit_BK)
        accepted_B = (hit_BK & kept_BK).cumprod(1).sum(1)
        said = np.stack([said_BK, np.log(np.maximum(reach_BK, 1e-30))]).astype(np.float32)
        changed += calibrating.learn(said, active_B, accepted_B, kept_BK)
    assert 10 < changed < 100
    now = numbers(calibrating)
    logit_BK = levels + rng.normal(0, 1, (1000, 3))
    found_BK = sigmoid(now[0] * say(logit_BK) + now[1])
    # the last ten fits count, some 5,000 drafts of the first level. Where drafts are cut, hardly any of the third one
    distance_K = np.abs(found_BK - sigmoid(logit_BK)).mean(0)
    assert (distance_K < [0.015, 0.025, 1.0 if cut else 0.025]).all()
    # what it began with was not that good already, unless it said the truth
    before_BK = sigmoid(begin[0] * say(logit_BK) + begin[1])
    assert np.abs(before_BK - sigmoid(logit_BK)).mean() > 0.05 or (says, begin) == ("true", (1.0, 0.0))
    assert now[0] == pytest.approx([scale] * 3, rel=0.1) and now[1][0] == pytest.approx(bias, abs=0.15)


#: two children of the root, two of the first and one of the second, and one of the first of these
PARENT, DEPTH = np.array([-1, -1, 0, 0, 1, 2]), np.array([1, 1, 2, 2, 2, 3])


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("off", [(0.0, 0.0, 0.0), (-1.0, -0.5, -1.5), (0.6, 0.9, 0.4)])
def test_trees(off: tuple[float, float, float], cut: bool) -> None:
    """Nodes that are accepted less often than they say, and more often."""
    rng, bias_K = np.random.default_rng(2), np.array(off)
    calibrating, active_B = LevelShares(3), np.arange(BATCH) > 0
    rows_B = np.arange(BATCH)

    def reached(term_BN: Floats) -> Floats:
        reach_BN = term_BN.copy()
        for n, above in enumerate(PARENT):
            if above >= 0:
                reach_BN[:, n] *= reach_BN[:, above]
        return reach_BN

    for _ in range(700):
        logit_BN = rng.normal(-1.2, 0.3, (BATCH, len(PARENT)))
        true_BN = sigmoid(logit_BN + bias_K[DEPTH - 1])
        said_BN = reached(sigmoid(logit_BN + numbers(calibrating)[1][DEPTH - 1]))
        kept_BN = kept(np.where(active_B[:, None], said_BN, 0.0).astype(np.float32), 3 * BATCH if cut else None)
        accepted_B, at_B = np.zeros(BATCH, np.int64), np.full(BATCH, -1)
        for _level in range(3):
            # one draw of the target: at most one child holds it
            left_B, next_B = rng.random(BATCH), np.full(BATCH, -2)
            for n in range(len(PARENT)):
                here_B = (PARENT[n] == at_B) & (next_B == -2) & kept_BN[:, n]
                next_B = np.where(here_B & (left_B < true_BN[rows_B, n]), n, next_B)
                left_B = np.where(PARENT[n] == at_B, left_B - true_BN[rows_B, n], left_B)
                left_B = np.where(left_B < 0, 2.0, left_B)
            accepted_B += next_B >= 0
            at_B = next_B
        said = np.stack([logit_BN, np.log(said_BN), np.broadcast_to(DEPTH, said_BN.shape)]).astype(np.float32)
        calibrating.learn(said, active_B, accepted_B, kept_BN)
    scale_K, found_K = numbers(calibrating)
    assert (scale_K == 1).all()
    # some 5,000 roots count; the third level was reached a few hundred times
    assert (np.abs(found_K - bias_K) < [0.1, 0.15, 3.0 if cut else 0.35]).all()
    # where it was hardly ever verified, it stays where it began
    assert min(bias_K[2], 0) - 0.35 < found_K[2] < max(bias_K[2], 0) + 0.35
