"""What the scheduler expects of every shape, against sorts and sums in plain Python; which shapes there are."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from simulated import SilentDrafter, context

from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.loop import COUNT
from headstart.eval.decoding.scheduler import PLAIN, CycleShape
from headstart.eval.kernels.flat import cut
from headstart.eval.scheduling import estimates, means
from headstart.eval.scheduling.estimates import Estimates, kept, likeliest, silent
from headstart.eval.scheduling.means import Times
from headstart.eval.scheduling.shapes import shapes_of
from headstart.eval.scheduling.throughput import ThroughputScheduler

Floats = NDArray[np.float32]


@pytest.mark.parametrize("by_level", [True, False])
@pytest.mark.parametrize(("linear", "nodes", "levels"), [(True, 1, 1), (True, 3, 3), (True, 7, 7), (True, 16, 16),
                                                         (False, 3, 2), (False, 11, 3), (False, 59, 6)])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 31, 64, 200])
def test_shapes(batch: int, linear: bool, nodes: int, levels: int, by_level: bool) -> None:
    shapes = shapes_of(batch, nodes, levels, linear, by_level)
    assert shapes[0] == PLAIN and len(shapes) > 1
    assert len(set(shapes)) == len(shapes) <= 20
    for shape in shapes[1:]:
        assert shape.levels is not None and 1 <= shape.levels <= levels
        assert shape.nodes is None or 1 <= shape.nodes <= nodes
        places = batch * (1 + (shape.levels if linear else shape.nodes or nodes))
        assert shape.rows is None or batch < shape.rows < places
    # all levels can be drafted, and the deepest drafts do not all wait for a cut
    assert max(shape.levels or 0 for shape in shapes) == levels
    if batch == 1:
        assert all(shape.rows is None for shape in shapes)
    if not by_level and not linear:
        assert {shape.levels for shape in shapes[1:]} == {levels}


def table(batch: int, nodes: int, seed: int, linear: bool) -> tuple[Floats, Floats]:
    """(reach, depth) of chains or trees; no node has more than its parent. The last row is idle, and some are equal."""
    rng = np.random.default_rng(seed)
    parent = np.arange(-1, nodes - 1) if linear else np.array([rng.integers(-1, n) for n in range(nodes)])
    step_BN = rng.choice([0.25, 0.5, 0.75, 1.0], (batch, nodes)) * rng.choice([1.0, rng.random()], (batch, nodes))
    depth_N, reach_BN = np.ones(nodes), step_BN.copy()
    for n, above in enumerate(parent):
        if above >= 0:
            depth_N[n] = depth_N[above] + 1
            reach_BN[:, n] *= reach_BN[:, above]
    reach_BN[-1] = 0.0
    return reach_BN.astype(np.float32), np.broadcast_to(depth_N, reach_BN.shape).astype(np.float32)


def naive_sums(reach_BN: Floats, depth_BN: Floats, levels: int, nodes: int) -> list[float]:
    """Of the n likeliest drafts, n = 1 …, among the `nodes` likeliest ones of every row on the first levels."""
    drafts: list[float] = []
    for line, depths in zip(reach_BN.tolist(), depth_BN.tolist(), strict=True):
        within = sorted((x for x, depth in zip(line, depths, strict=True) if depth <= levels), reverse=True)
        drafts += within[:nodes]
    drafts.sort(reverse=True)
    return [sum(drafts[: n + 1]) for n in range(len(drafts))]


@pytest.mark.parametrize("seed", range(6))
def test_sums_of_the_likeliest(seed: int) -> None:
    linear = seed % 2 == 0
    reach_BN, depth_BN = table(4, 9, seed, linear)
    for levels in (1, 2, int(depth_BN.max())):
        for nodes in (1, 4, 9):
            found = likeliest(reach_BN, depth_BN, levels, nodes)
            expected = naive_sums(reach_BN, depth_BN, levels, nodes)
            assert found[: len(expected)] == pytest.approx(expected, rel=1e-5)
            # what is beyond adds nothing
            assert found[len(expected) :] == pytest.approx([expected[-1]] * (len(found) - len(expected)))


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_host_knows_what_the_device_keeps(seed: int, linear: bool) -> None:
    """With equal reaches, within a row and between rows, and idle rows."""
    reach_BN, _ = table(5, 7, seed, linear)
    log_reach_BN = torch.from_numpy(reach_BN).log()
    for rows in range(5, 5 * 8 + 1):
        device = cut(log_reach_BN, log_reach_BN.isfinite(), rows)
        assert np.array_equal(kept(np.exp(log_reach_BN.numpy()), rows - 5), device.kept_BM[:, 1:].numpy())
    assert np.array_equal(kept(reach_BN, None), reach_BN > 0)


@pytest.mark.parametrize("said", [
    [[-3e-8, -5e-8, -7e-8], [-1e-8, -2e-8, -4e-8]],  # all are 1 in float32
    [[-90.0, -120.0, -200.0], [-100.0, -110.0, -210.0]],  # most are 0 in float32
])  # fmt: skip
def test_reaches_next_to_0_and_1_are_told_apart(said: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host would take drafts for rejected that were not verified."""
    scheduler = ThroughputScheduler(cast(Drafter, SilentDrafter(3, True)), 3, True)
    scheduler.start(context(2))
    for shape in scheduler.shapes():
        scheduler.timed(shape, 1.0)
    found: list[NDArray[np.bool_]] = []
    monkeypatch.setattr(scheduler.calibrating, "learn", lambda said, active, accepted, kept: found.append(kept))
    log_reach_BN = torch.tensor(said)
    lines = np.zeros((2, 8), np.int64)
    lines[:, COUNT] = 1
    for rows in (3, 4, 5, 6, 7):
        scheduler.next_shape()
        both = np.stack([np.zeros((2, 3), np.float32), log_reach_BN.numpy()])
        scheduler.learn(CycleShape(3, rows=rows), lines, both)
        device = cut(log_reach_BN, torch.ones((2, 3), dtype=torch.bool), rows)
        assert np.array_equal(found[-1], device.kept_BM[:, 1:].numpy())


BATCH, LEVELS = 6, 5


class Naive:
    """Expectations of chains from a list of all cycles."""

    def __init__(self, seconds: dict[CycleShape, float]):
        self.seconds = seconds
        self.values: list[tuple[int, dict[CycleShape, float]]] = []
        self.expected = self.accepted = estimates.PRIOR

    @staticmethod
    def told(shape: CycleShape, reach_BN: Floats, depth_BN: Floats, rows: int) -> float:
        """Drafts of a shape that are accepted, per row."""
        sums = naive_sums(reach_BN, depth_BN, shape.levels or 0, LEVELS)
        return sums[-1 if shape.rows is None else min(shape.rows - BATCH, len(sums)) - 1] / rows

    def correct(self, ran: CycleShape, reach_BN: Floats, accepted: int) -> None:
        keep, prior = estimates.KEEP, estimates.PRIOR
        likely = sorted((x for x in reach_BN.flatten().tolist() if x > 0), reverse=True)
        likely = likely if ran.rows is None else likely[: ran.rows - BATCH]
        self.expected = keep * self.expected + (1 - keep) * prior + sum(likely)
        self.accepted = keep * self.accepted + (1 - keep) * prior + accepted

    def rate(self, shape: CycleShape) -> float:
        if shape == PLAIN:
            return 1 / self.seconds[shape]
        weights, values = [], []
        for rows, found in self.values:
            share = 1 - math.exp(-rows / means.RECENT)
            weights = [(1 - share) * weight for weight in weights] + [share]
            values.append(found[shape])
        mean = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
        return (1 + self.accepted / self.expected * mean) / self.seconds[shape]


def profile(book: Estimates, seconds: dict[CycleShape, float]) -> None:
    """Whole drafts mostly run without telling how sure they are, which is what counts."""
    for shape, value in seconds.items():
        book.times.profiled[shape] = 2 * value
        book.times.profiled[silent(shape)] = value


@pytest.mark.parametrize("seed", range(4))
def test_rates_are_those_of_a_naive_computation(seed: int) -> None:
    """Cycles of the deepest shapes, cut or not, tell of every shape."""
    rng = np.random.default_rng(seed)
    shapes = shapes_of(BATCH, LEVELS, LEVELS, True, True)
    book, naive = Estimates(shapes, BATCH, LEVELS, LEVELS), Naive({s: float(rng.uniform(1, 2)) for s in shapes})
    assert book.rate(shapes[-1]) == 0 and book.best() is None
    profile(book, naive.seconds)
    assert book.best() is None and book.rate(PLAIN) == naive.rate(PLAIN)
    deepest, best = [shape for shape in shapes if shape.levels == LEVELS], set()
    for cycle in range(8):
        reach_BN, depth_BN = table(BATCH, LEVELS, 100 * seed + cycle, True)
        rows = BATCH - 1
        ran = deepest[int(rng.integers(len(deepest)))]
        accepted_R = rng.integers(0, LEVELS + 1, rows)
        book.learn(ran, reach_BN, depth_BN, accepted_R)
        naive.values.append((rows, {s: naive.told(s, reach_BN, depth_BN, rows) for s in shapes if s != PLAIN}))
        naive.correct(ran, reach_BN, int(accepted_R.sum()))
        assert book.correction == pytest.approx(naive.accepted / naive.expected)
        for shape in shapes:
            assert book.rate(shape) == pytest.approx(naive.rate(shape), rel=1e-5)
        assert book.best() == max((s for s in shapes if s != PLAIN), key=naive.rate)
        best.add(book.best())
    assert len({s.rows for s in deepest}) > 1


def test_short_drafts_tell_of_longer_ones_by_what_these_gained_before() -> None:
    shapes = shapes_of(BATCH, LEVELS, LEVELS, True, True)
    naive = Naive(dict.fromkeys(shapes, 1.0))
    book = Estimates(shapes, BATCH, LEVELS, LEVELS)
    profile(book, naive.seconds)
    short, rows = CycleShape(2), BATCH - 1
    first, second = (table(BATCH, LEVELS, seed, True) for seed in (1, 2))
    for ran, (reach_BN, depth_BN) in ((shapes[-1], first), (short, second)):
        levels = ran.levels or 0
        book.learn(ran, reach_BN[:, :levels], depth_BN[:, :levels], np.ones(rows, dtype=np.int64))
        naive.correct(ran, reach_BN[:, :levels], rows)
    told = [{s: naive.told(s, *given, rows) for s in shapes if s != PLAIN} for given in (first, second)]
    gained = told[1][short] / told[0][short]
    assert gained != pytest.approx(1.0, abs=0.05)
    later = {s: told[1][s] if (s.levels or 0) <= 2 else told[0][s] * gained for s in told[0]}
    naive.values = [(rows, told[0]), (rows, later)]
    for shape in shapes:
        assert book.rate(shape) == pytest.approx(naive.rate(shape), rel=1e-5)


def test_what_a_size_got_accepted_corrects_its_own_expectation() -> None:
    """Level 1 is accepted more often than said, level 2 less often; both together as often as said. So a correction of
    all sizes by one factor would leave the shorter chain's rate too low."""
    one, two, cut_two = CycleShape(1), CycleShape(2), CycleShape(2, rows=6)
    book = Estimates([PLAIN, one, two, cut_two], batch=4, nodes=2, levels=2)
    for shape, seconds in ((PLAIN, 1.0), (one, 2.0), (two, 4.0), (cut_two, 4.0)):
        book.times.profiled[shape] = book.times.profiled[silent(shape)] = seconds
    reach_BN = np.tile(np.float32([0.5, 0.25]), (4, 1))
    depth_BN = np.tile(np.float32([1, 2]), (4, 1))
    accepted_R = np.array([1, 1, 1, 0])
    for cycle in range(4000):
        if cycle % 4 == 0:
            book.learn(two, reach_BN, depth_BN, accepted_R)
        book.took(two, accepted_R)
    assert book.correction == pytest.approx(1.0, abs=0.01)
    seen = means.LASTING * (1 - math.exp(-4000 / means.LASTING))  # rows that were learned from
    assert book.correction_of(one) == pytest.approx((1.5 * seen + estimates.SEEN) / (seen + estimates.SEEN), rel=0.01)
    assert book.correction_of(two) == pytest.approx(1.0, abs=0.01)
    assert book.rate(one) == pytest.approx((1 + book.correction_of(one) * 0.5) / 2)
    # a cut shape begins with what its size got, and then learns of its own
    assert book.correction_of(cut_two) == pytest.approx(1.0, abs=0.01)
    for _ in range(4000):
        book.learn(cut_two, reach_BN, depth_BN, np.array([0, 1, 0, 0]))  # 1.0 expected of two kept nodes, 1 accepted
        book.took(cut_two, np.array([0, 1, 0, 0]))
    assert book.correction_of(cut_two) == pytest.approx(1.0, abs=0.02)
    for _ in range(4000):
        book.learn(cut_two, reach_BN, depth_BN, np.array([0, 0, 0, 0]))
        book.took(cut_two, np.array([0, 0, 0, 0]))
    assert book.correction_of(cut_two) < 0.2 < 0.9 < book.correction_of(two)


@pytest.mark.parametrize(("accepted", "gives_up"), [(0, True), (2, False)])
def test_drafting_is_given_up_by_what_was_committed(accepted: int, gives_up: bool) -> None:
    """A cycle that drafts takes twice as long as a plain one: it must commit two tokens."""
    shapes = shapes_of(BATCH, LEVELS, LEVELS, True, True)
    book = Estimates(shapes, BATCH, LEVELS, LEVELS)
    accepted_R = np.full(BATCH - 1, accepted)
    book.gained(shapes[-1], accepted_R)
    assert not book.gain.lost  # no time is known
    profile(book, {shape: 1.0 if shape == PLAIN else 2.0 for shape in shapes})
    for _ in range(means.SETTLED):
        book.gained(shapes[-1], accepted_R)
        assert not book.gain.lost  # first choices are poor
    for cycles in range(1, 200):
        book.gained(shapes[-1], accepted_R)
        rows = cycles * (BATCH - 1)
        believed = means.BELIEVED_ROWS + means.BELIEVED_CYCLES * BATCH
        assert book.gain.lost == ((1 + accepted) / 2 * rows + means.BELIEF * believed < rows + believed)
    assert book.gain.lost == gives_up


@pytest.mark.parametrize(("batch", "cycles"), [(1, 24), (8, 24), (16, 24), (32, 12), (64, 6)])
def test_a_large_batch_settles_in_fewer_cycles(batch: int, cycles: int) -> None:
    gain = means.Gain(batch)
    for _ in range(cycles):
        gain.add(0.0, batch)
        assert not gain.lost  # the first choices are poor
    gain.add(-1000.0, batch)
    assert gain.lost


def test_times_follow_what_cycles_take() -> None:
    one, two, three = (CycleShape(levels) for levels in (1, 2, 3))
    times = Times()
    assert times.of(one) == math.inf
    times.took(one, 1.0)  # of a shape without a profile
    assert times.of(one) == math.inf
    times.profiled.update({one: 1.0, two: 2.0})
    assert (times.of(one), times.of(two), times.of(three)) == (1.0, 2.0, math.inf)
    times.took(one, 9.0)  # held up by something else
    assert times.of(one) == 1.0
    for _ in range(means.TRUSTED):
        times.took(one, 1.25)
    assert times.of(one) == pytest.approx(1.25)
    assert times.of(two) == pytest.approx(2.25)  # as late as the others
    for _ in range(means.STALE):
        times.took(two, 2.1)
    assert times.of(two) == pytest.approx(2.1) and times.of(one) == pytest.approx(1.25)
    for _ in range(200):
        times.took(two, 2.1)
    # it has not run for long: as late as the others, until it has run again
    assert times.of(one) == pytest.approx(1.1, abs=1e-3)
    for count in range(means.TRUSTED):
        assert times.of(one) == pytest.approx(1.1, abs=0.02 * (1 + count))
        times.took(one, 1.3)
    assert times.of(one) == pytest.approx(1.3)
    times.clear()
    assert times.of(one) == math.inf


def test_silent_shapes() -> None:
    """Whole chains need not be told of. Of cut ones the device must know, and of plain decoding there is nothing."""
    assert silent(CycleShape(3)) == CycleShape(3, says=False) == silent(CycleShape(3, says=False))
    assert silent(CycleShape(3, rows=9)) == CycleShape(3, rows=9)
    assert silent(CycleShape(3, 7)) == CycleShape(3, 7)
    assert silent(PLAIN) == PLAIN
