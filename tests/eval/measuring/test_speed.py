"""Latency by hand, sweeps over batches and contexts, HF generate beside them, and how reports show them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, Trained, memory_for_two_rows
from rich.console import Console

from headstart.eval.config import EvalConfig, TreeConfig, check_config
from headstart.eval.decoding.decode import Answer, Cycle, Decoded
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import build_drafter
from headstart.eval.measuring.benchmark import evaluate
from headstart.eval.measuring.breakdown import cycle_parts
from headstart.eval.measuring.generate import LABEL, GenerateBaseline
from headstart.eval.measuring.metrics import Pace, Timed, bootstrap_speedup, token_seconds
from headstart.eval.measuring.rendering import render_markdown, render_tables, speedup_text, write_report
from headstart.eval.measuring.report import Report
from headstart.eval.measuring.sweep import fit, gain_ends, spread
from headstart.eval.measuring.task_results import TaskResults, section_of
from headstart.heads.errors import ConfigError
from headstart.heads.targets.target import Target
from headstart.pipeline.evaluate import summary


def decoded() -> Decoded:
    """Two rows: the first ends in the second cycle. Cycles of 4, 6 and 8 ms after a prefill of 20 ms."""
    first = Answer([1, 2, 3, 4], [Cycle(3, 1, 2), Cycle(3, 0, 1)], first_s=0.020)
    cycles = [Cycle(3, 0, 1), Cycle(3, 2, 3), Cycle(3, 1, 2)]
    second = Answer([1, 2, 3, 4, 5, 6, 7], cycles, first_s=0.020)
    return Decoded([first, second], 0.020, 0.018, [0.004, 0.006, 0.008])


def test_latency_by_hand() -> None:
    """Row 1: 2, 2, 6 ms; row 2: 4, then three of 2, then two of 4 ms. Sorted: 2 2 2 2 2 4 4 4 6."""
    assert token_seconds(decoded()) == pytest.approx([0.002, 0.002, 0.006, 0.004, 0.002, 0.002, 0.002, 0.004, 0.004])
    timed = Timed()
    timed.add(decoded())
    found = timed.latency()
    assert found["first_token_p50_ms"] == found["first_token_p95_ms"] == pytest.approx(20)
    assert found["token_p50_ms"] == pytest.approx(2)
    # between the 8th (4 ms) and the 9th (6 ms) of nine values: 0.95 · 8 = 7.6
    assert found["token_p95_ms"] == pytest.approx(4 + 0.6 * 2)
    # rows decoding: 2, 2, 1
    assert timed.active_rows == pytest.approx(5 / 3)
    both = Timed.sum([timed, timed])
    assert both.tokens_per_s == timed.tokens_per_s == pytest.approx(9 / 0.018)
    assert (both.latency()["token_p50_ms"], both.rows, both.cycles) == (found["token_p50_ms"], 10, 6)
    assert Timed().latency() is None


def apart() -> tuple[Decoded, Decoded]:
    """A batch of two rows, plain and drafted: one answer of 3 tokens after the first, one of 9; a cycle takes 10 ms.

    By the clock 12 tokens take 9 cycles, then 5: 1.8 ×. Rows decode for 3 + 9 cycles, then for 1 + 5: 2 ×.
    """
    plain = [Answer([0] * (count + 1), [Cycle(0, 0, 1)] * count) for count in (3, 9)]
    drafted = [Answer([0] * 4, [Cycle(2, 2, 3)]), Answer([0] * 10, [Cycle(2, 1, 2)] * 4 + [Cycle(2, 0, 1)])]
    return Decoded(plain, 0.02, 0.09, [0.01] * 9), Decoded(drafted, 0.02, 0.05, [0.01] * 5)


def test_both_speedups_where_rows_end_apart() -> None:
    results = TaskResults(cycles={0: [Cycle(2, 2, 3)], 1: [Cycle(2, 1, 2)]})
    for timed, decoded in zip((results.plain, results.speculative), apart(), strict=True):
        timed.add(decoded)
    section = section_of([results], EvalConfig(), identity=False)
    assert section.speedup == pytest.approx(9 / 5) and section.row_speedup == pytest.approx(12 / 6)


def test_the_report_says_which_speedup_is_by_the_clock(target: Target, eagle3: Trained, prompts: str) -> None:
    config = EvalConfig(data=prompts, max_new_tokens=6, warmup_tokens=0, tree=TreeConfig(depth=2))
    report = evaluate(target, eagle3.head, replace(config, batch_size=3))
    report.speedup, report.row_speedup = 1.8, 2.0
    markdown = render_markdown(report)
    lines = [line.split(" | ") for line in markdown.splitlines() if line.startswith(("| task", "| all"))]
    header, row = lines[:2]  # latency follows
    shown = dict(zip(header, row, strict=True))
    assert (shown["speed-up (clock)"], shown["speed-up (row time)"]) == ("1.80×", "2.00×")
    assert "by the wall clock, places that stay empty included" in markdown
    assert summary(report.to_json())["speedup"] == 1.8  # the clock's is the one that stands alone
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_tables(report))
    assert "wall clock" in " ".join(console.export_text().split())
    # alone in its batch a row's time is the clock's
    alone = evaluate(target, eagle3.head, config)
    assert "row time" not in render_markdown(alone) and "speed-up (clock)" in render_markdown(alone)


def test_interval_of_the_speedup() -> None:
    """Prompts alike give a point; of two unlike ones a resample holds either twice or both."""
    alike = [Pace(100, 2.0, 100, 1.0)] * 5
    assert bootstrap_speedup(alike, 0) == pytest.approx((2.0, 2.0))
    low, high = bootstrap_speedup([Pace(100, 1.0, 100, 1.0), Pace(100, 1.0, 100, 0.25)], 0)
    assert (low, high) == pytest.approx((1.0, 4.0))
    assert bootstrap_speedup(alike[:1], 0) is None
    assert bootstrap_speedup([*alike, Pace(100, 2.0)], 0) is None
    # answers of one token take time and bring nothing after prefill
    short = Pace(0, 1e-9, 0, 1e-9)
    assert bootstrap_speedup([short, short], 0) is None
    assert bootstrap_speedup([short, short, alike[0]], 0) == pytest.approx((2.0, 2.0))
    assert speedup_text(1.8, [1.72, 1.88]) == "1.80× (1.72–1.88)" and speedup_text(None, None) == "–"


@pytest.fixture(scope="module")
def swept(target: Target, eagle3: Trained, prompts: str) -> Report:
    config = EvalConfig(
        data=prompts, max_new_tokens=5, warmup_tokens=2, tree=TreeConfig(depth=2),
        batch_sizes=[4, 1], context_lengths=[6, 20], sweep_prompts=2, generate_baseline=True,
    )  # fmt: skip
    seen: list[tuple[int, int, str]] = []
    report = evaluate(target, eagle3.head, config, progress=lambda *step: seen.append(step))
    assert [step for step in seen if " " in step[2] and "  " not in step[2]] == [
        (3, 7, "batch 1"), (4, 7, "batch 4"), (5, 7, "context 6"), (6, 7, "context 20"),
    ]  # fmt: skip
    assert seen[-1] == (7, 7, "done")
    return report


def test_sweeps_of_a_report(swept: Report, tmp_path: Path) -> None:
    batches = swept.sweeps["batch"]
    # at batch 4, four times as many rows as there are places
    assert [(p["batch"], p["rows"], p["prompts"]) for p in batches["points"]] == [(1, 2, 2), (4, 16, 3)]
    assert batches["says"]
    contexts = swept.sweeps["context"]
    assert [(p["context"], p["rows"]) for p in contexts["points"]] == [(6, 2), (20, 2)]
    assert "repeating" in contexts["note"]
    for point in (*batches["points"], *contexts["points"]):
        expected = point["speculative_tokens_per_s"] / point["baseline_tokens_per_s"]
        assert point["speedup"] == pytest.approx(expected)
        assert 1 <= point["tau"] <= 3
        assert point["speculative_latency"]["token_p50_ms"] <= point["speculative_latency"]["token_p95_ms"]
    assert batches["points"][1]["baseline_active_rows"] == 4

    write_report(swept, tmp_path)
    assert Report.read(tmp_path) == swept
    markdown = (tmp_path / "report.md").read_text()
    assert "## Speed-up by batch" in markdown and "## Speed-up by context, batch 1" in markdown
    for name in ("speedup_by_batch.png", "speedup_by_context.png"):
        assert f"({name})" in markdown and (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_parts_of_a_cycle_are_measured_and_drawn(
    target: Target, eagle3: Trained, swept: Report, prompts: str, tmp_path: Path
) -> None:
    """Drafting, the target's forward, and what is left; the loop's state is as it was, at any temperature."""
    parts = swept.cycle
    assert set(parts) == {"draft_ms", "verify_ms", "rest_ms"}
    assert parts["draft_ms"] > 0 and parts["verify_ms"] > 0 and parts["rest_ms"] >= 0
    write_report(swept, tmp_path)
    assert "Parts of a cycle in ms, batch 1: draft " in (tmp_path / "report.md").read_text()
    assert (tmp_path / "cycle.png").read_bytes().startswith(b"\x89PNG")
    config = EvalConfig(data=prompts, max_new_tokens=4, tree=TreeConfig(depth=2), temperature=1.0)
    decoder, drafter = Decoder(target, config), build_drafter(eagle3.head, config)
    torch.manual_seed(5)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    cycle_parts(decoder, drafter, [[5, 6, 7], [8, 9]], repeats=1)
    assert torch.rand(1) == expected
    assert decoder.engine.length_B.tolist() == [3, 2]


def test_latency_and_generate_are_shown_with_their_labels(swept: Report) -> None:
    for way in ("baseline", "speculative"):
        found = swept.latency[way]
        assert 0 < found["token_p50_ms"] <= found["token_p95_ms"] and found["first_token_p50_ms"] > 0
    assert swept.tasks["all"].latency == swept.latency
    low, high = swept.speedup_ci95
    assert 0 < low <= high
    assert swept.generate["label"] == LABEL and swept.generate["prompts"] == 3
    assert swept.generate["tokens_per_s"] > 0
    out = io.StringIO()
    Console(file=out, width=200).print(render_tables(swept))
    first = swept.latency["speculative"]["first_token_p50_ms"]
    for text in (out.getvalue(), render_markdown(swept)):
        assert LABEL in text and f"{first:.2f} / " in text and "at batch 1 on 3 contexts" in text


def test_reports_without_the_newer_fields_are_read(swept: Report) -> None:
    value = {key: v for key, v in swept.to_json().items() if key not in ("latency", "sweeps", "generate", "engine")}
    del value["tasks"]["all"]["latency"]
    old = Report.from_json(value)
    assert (old.latency, old.sweeps, old.generate) == (None, None, None)
    assert "latency" not in render_markdown(old)


def test_generate_says_what_the_loop_says(target: Target, plain: list[Answer]) -> None:
    baseline = GenerateBaseline(target, Sampling(), 10)
    for context, answer in zip(CONTEXTS, plain, strict=True):
        assert baseline.run(context) == answer.tokens[:10]
    assert baseline.timed.tokens == 3 * 9 and len(baseline.timed.first_s) == 3


def test_generate_samples_by_its_seed_and_leaves_the_global_one(target: Target) -> None:
    baseline = GenerateBaseline(target, Sampling(temperature=1.0, top_k=8, min_p=0.01), 8)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    answers = [baseline.run(CONTEXTS[0], seed) for seed in (1, 1, 2, 3)]
    assert answers[0] == answers[1] and len({tuple(answer) for answer in answers}) > 1
    assert torch.equal(torch.random.get_rng_state(), before)


def test_fit() -> None:
    assert fit([1, 2, 3], 2) == [2, 3]
    assert fit([1, 2, 3], 3) == [1, 2, 3]
    assert fit([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]


def test_spread() -> None:
    assert spread([1, 2, 3], 5) == [1, 2, 3]
    assert spread([1, 2, 3, 4, 5, 6, 7], 4) == [1, 3, 5, 7]
    assert spread("abcdef", 1) == ["a"]


@pytest.mark.parametrize(
    ("speedups", "ends", "says"),
    [
        ([2.0, 1.5, 1.1], None, "gains at every batch measured (1.10× at 4)"),
        ([2.0, 0.9, 0.8], 2, "the gain ends at batch 2 (0.90×); batch 1 still gains (2.00×)"),
        ([2.0, 0.9, 1.1], None, "gains at batch 1 (2.00×), 4 (1.10×); it does not at 2 (0.90×)"),
        ([0.9, 1.2, 0.8], 4, "gains at batch 2 (1.20×); it does not at 1 (0.90×), 4 (0.80×)"),
        ([0.8, 0.7, 0.6], 1, "gains nothing from batch 1 on (0.80×)"),
        ([None, None, None], None, "no speed-up was measured"),
    ],
)
def test_where_the_gain_ends(speedups: list[float | None], ends: int | None, says: str) -> None:
    points = [{"batch": batch, "speedup": value} for batch, value in zip((1, 2, 4), speedups, strict=True)]
    found = gain_ends(points)
    assert found["gain_ends"] == ends and says in found["says"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": [4, 0]}, r"eval.batch_sizes\[1\]: found 0, expected at least 1"),
        ({"batch_sizes": [4, 4]}, r"eval.batch_sizes: found \[4, 4\], expected every value once"),
        ({"context_lengths": [1]}, r"eval.context_lengths\[0\]: found 1"),
        ({"sweep_prompts": 0}, "eval.sweep_prompts"),
    ],
)
def test_bad_sweeps(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(EvalConfig(**changes))


def test_contexts_beyond_the_targets_positions(target: Target, prompts: str) -> None:
    config = EvalConfig(data=prompts, context_lengths=[250], max_new_tokens=10)
    with pytest.raises(ConfigError, match="the target has 256 positions: give at most 246"):
        evaluate(target, None, config)


def test_a_batch_that_does_not_fit_ends_its_sweep(target: Target, prompts: str, monkeypatch: Any) -> None:
    memory_for_two_rows(monkeypatch)
    config = EvalConfig(data=prompts, max_new_tokens=3, drafter="ngram", batch_sizes=[2, 3, 4], sweep_prompts=1)
    report = evaluate(target, None, config)
    points = report.sweeps["batch"]["points"]
    assert [point["batch"] for point in points] == [2, 3] and points[1]["out_of_memory"]
    assert "| 3 | out of memory |" in render_markdown(report)
