"""Row subsampling: unbiased, nested, of known size, and nothing at all at a fraction of 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.documents import Ends
from reference.families import DIMS, Example, documents, eagle, eagle3, example_head, peagle
from reference.tiny import assert_near, feature_batch, gradients, teacher_of

from headstart.heads.base import Head, HeadConfig, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.subsample import Draw, draw_ranked, draw_rows, group_sizes, keep_fractions

CONFIGS: dict[str, HeadConfig] = {
    "eagle": eagle(depth=3, row_fraction=0.5),
    "eagle3": eagle3(row_fraction=0.5),
    "peagle": peagle(row_fraction=0.5, layers=2),
    "eagle, half of the rows": eagle(depth=3, row_fraction_first=0.5),
    "eagle3, half of the rows": eagle3(row_fraction=0.8, row_fraction_first=0.5),
    "eagle3 of two layers, half of the rows": eagle3(row_fraction=0.8, row_fraction_first=0.5, layers=2),
    # so few that the teacher's logits are made for each draft, not for each row that teaches
    "peagle, a fifth of the rows": peagle(row_fraction=0.5, row_fraction_first=0.2, layers=2),
}
SUMS = ("sum_T", "count_T", "numerator_M", "denominator_M")


def build(name: str) -> tuple[Head, Ends, FeatureBatch]:
    head, ends = example_head(Example(CONFIGS[name]), torch.float64)
    return head, ends, feature_batch(documents(), ends, head.depth, pad_to=50)


def drawn(batch: FeatureBatch, draw: Draw) -> FeatureBatch:
    return replace(batch, anchors=batch.anchors.subsampled(draw), teacher_argmax_A=batch.teacher_argmax_A[draw.order_A])


def gradient_of(head: Head, ends: Ends, batch: FeatureBatch, scaled: bool) -> tuple[Loss, dict[str, torch.Tensor]]:
    scale_T = head.term_weights() / head.loss_counts(batch)
    loss = head.loss(batch, teacher_of(ends), scale_T if scaled else None)
    return loss, gradients(head, (loss.sum_T * scale_T).sum())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_mean_over_all_draws_is_the_full_loss(name: str, scaled: bool):
    """Turning every group's ranks through all places keeps each row equally often: the mean is the expectation."""
    head, ends, batch = build(name)
    full, full_gradient = gradient_of(head, ends, batch, scaled)
    sizes = group_sizes(batch.anchors.count_K)
    turns = math.lcm(*sizes)
    assert turns > 1 and min(sizes) > 0
    mean = {field: 0.0 for field in SUMS}
    mean_gradient = {key: torch.zeros_like(value) for key, value in full_gradient.items()}
    rows_run = set()
    for turn in range(turns):
        draw = draw_ranked(head.keep_K, [(torch.arange(size) + turn) % size for size in sizes])
        loss, gradient = gradient_of(head, ends, drawn(batch, draw), scaled)
        for field in SUMS:
            mean[field] += getattr(loss, field).detach().double() / turns
        for key, value in gradient.items():
            mean_gradient[key] += value / turns
        # the normalisation and the accuracy's denominator know all rows in every single draw
        assert torch.equal(loss.count_T.float(), full.count_T.float())
        torch.testing.assert_close(loss.denominator_M, full.denominator_M, rtol=1e-6, atol=0)
        rows_run.add(draw.count_K)
    assert rows_run == {draw.count_K} and draw.count_K[-1] < batch.anchors.count_K[-1]
    for field in SUMS:
        # weights are float32
        torch.testing.assert_close(mean[field], getattr(full, field).detach().double(), rtol=1e-6, atol=1e-6)
    for key, value in full_gradient.items():
        assert_near(mean_gradient[key], value, f"mean gradient of {key}", 1e-6)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_a_single_draw_differs_from_the_full_loss(name: str):
    head, ends, batch = build(name)
    full = head.loss(batch, teacher_of(ends)).sum_T
    part = head.loss(batch.subsampled(head.keep_K, seed=3), teacher_of(ends)).sum_T
    torch.testing.assert_close(part[0], full[0])
    assert (part[1:] - full[1:]).abs().min() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_keeping_every_row_is_the_full_loss(name: str):
    head, ends, batch = build(name)
    full, full_gradient = gradient_of(head, ends, batch, True)
    everything = batch.subsampled((1.0,) * head.depth, seed=3)
    assert torch.equal(everything.anchors.row_A, batch.anchors.row_A)
    assert everything.anchors.count_K == batch.anchors.count_K
    loss, gradient = gradient_of(head, ends, everything, True)
    for field in SUMS:
        assert torch.equal(getattr(loss, field), getattr(full, field)), field
    for key, value in full_gradient.items():
        assert torch.equal(gradient[key], value), key


@pytest.mark.parametrize("name", CONFIGS)
def test_fixed_shapes_hold_any_draw(name: str):
    """Counts of the padded batch come from its size alone; sums and gradients are those of the draw."""
    head, ends, batch = build(name)
    padded_counts = set()
    for seed in range(4):
        part = batch.subsampled(head.keep_K, seed)
        padded = part.padded(rows=64, anchors=24, documents=8)
        padded_counts.add(padded.anchors.count_K)
        expected, expected_gradient = gradient_of(head, ends, part, True)
        found, found_gradient = gradient_of(head, ends, padded, True)
        for field in SUMS:
            torch.testing.assert_close(getattr(found, field), getattr(expected, field))
        for key, value in expected_gradient.items():
            assert_near(found_gradient[key], value, key, 1e-9)
    (counts,) = padded_counts
    first = math.ceil(head.keep_K[0] * 24) + head.depth
    assert counts[0] == min(24, first) and counts[-1] < 24


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=6).map(lambda x: tuple(sorted(x, reverse=True))),
    fraction=st.floats(0.05, 1.0),
    least=st.floats(0.01, 1.0),
    first=st.sampled_from([1.0, 0.5, 0.1]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_draws_are_nested_and_their_weights_add_up(counts, fraction, least, first, seed):
    depth = len(counts)
    keep_K = keep_fractions(depth, fraction, least, first) or (1.0,) * depth
    draw = draw_rows(counts, keep_K, torch.Generator().manual_seed(seed))
    assert sorted(draw.order_A.tolist()) == list(range(counts[0]))
    supervised = torch.tensor([sum(i < count for count in counts) for i in range(counts[0])], dtype=torch.int64)
    assert (draw.depths_A <= supervised[draw.order_A]).all() and (draw.depths_A[:-1] >= draw.depths_A[1:]).all()
    for d, (count, keep) in enumerate(zip(counts, keep_K, strict=True)):
        runs = draw.depths_A > d
        assert int(runs.sum()) == draw.count_K[d] <= min(counts[0], math.ceil(keep * counts[0]) + depth)
        assert draw.count_K[d] >= keep * count - 1e-6
        assert float((draw.weight_AK[:, d] * runs).sum()) == pytest.approx(count, rel=1e-5)


def test_every_row_is_kept_equally_often():
    """100 rows at one depth more than the first, a third kept: 300 draws, five standard deviations of a binomial."""
    kept = torch.zeros(100)
    for seed in range(300):
        draw = draw_rows((100, 100), (1.0, 0.3), torch.Generator().manual_seed(seed))
        kept[draw.order_A[draw.depths_A == 2]] += 1
    assert kept.sum() == 300 * 30
    assert (kept - 90).abs().max() < 5 * math.sqrt(300 * 0.3 * 0.7)


def test_the_seed_decides():
    _, _, batch = build("eagle3")
    first, again, other = (batch.subsampled((1.0, 0.5, 0.5, 0.5), seed).anchors.row_A for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_fractions_fall_geometrically_to_a_floor():
    assert keep_fractions(5, 0.5, 0.2) == (1.0, 0.5, 0.25, 0.2, 0.2)
    assert keep_fractions(5, 1.0, 0.2) is None and keep_fractions(1, 0.5, 0.2) is None
    assert keep_fractions(4, 0.5, 0.2, 0.5) == (0.5, 0.25, 0.125, 0.1)
    assert keep_fractions(3, 1.0, 0.2, 0.5) == (0.5, 0.5, 0.5) and keep_fractions(1, 1.0, 0.2, 0.25) == (0.25,)
    assert build_head(eagle(depth=3), DIMS).keep_K is None, "nothing is dropped unless asked for"
    wrong = [("row_fraction", 0.0), ("row_fraction", 1.5), ("row_fraction_min", 0.0), ("row_fraction_first", 0)]
    for field, value in wrong:
        with pytest.raises(ConfigError, match=f"head.{field}: found {value}"):
            build_head(eagle(**{"depth": 3, field: value}), DIMS)


def test_anchors_are_subsampled_once_and_before_padding():
    _, _, batch = build("eagle3")
    keep = (1.0, 0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="once"):
        batch.subsampled(keep, 0).subsampled(keep, 0)


@pytest.mark.parametrize("config", [eagle(), eagle3(), peagle()], ids=lambda config: config.type)
def test_plans_know_how_many_rows_a_step_draws(config: HeadConfig):
    """And a run of an earlier version, which did not have the field, goes on."""
    whole = build_head(config, DIMS)
    drawn = build_head(replace(config, row_fraction_first=0.25), DIMS)
    assert whole.chosen_anchors(1000, 800) == 800 and drawn.chosen_anchors(1000, 800) == 200
    assert drawn.kept_numbers(1000, 200, False) < whole.kept_numbers(1000, 800, False)
    assert "row_fraction_first" not in config.identity() and "row_fraction_first" in drawn.config.identity()


def test_few_drafts_need_few_rows_of_the_teacher():
    """A tenth of the rows at 4 depths: logits of 0.4 of the rows. Half of them: of all rows, once."""
    tenth, half = (build_head(eagle3(row_fraction_first=part), DIMS) for part in (0.1, 0.5))
    assert tenth.teacher_rows(10.0) == pytest.approx(40) and half.teacher_rows(50.0) == pytest.approx(100)
