"""What is shown of a report, and what is said while it is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_compare import report

from headstart.eval.measuring.rendering import render_markdown, render_saved, render_tables
from headstart.eval.measuring.report import Report


def test_the_first_plot_on_a_machine_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib lists the fonts at its first import, for about ten seconds."""
    cache, said = tmp_path / "cache", list[str]()
    monkeypatch.setattr("matplotlib.get_cachedir", lambda: str(cache))
    path = report().save(tmp_path)
    assert render_saved(path, said.append) and len(said) == 1 and "lists this machine's fonts" in said[0]
    cache.mkdir()
    (cache / "fontlist-v390.json").touch()
    assert render_saved(path, said.append) and len(said) == 1


def test_a_target_off_the_fast_path_says_so_with_its_cost(tmp_path: Path) -> None:
    slow = report()
    slow.engine_path, slow.engine_note = "generic", "the target ran by transformers' own forward: X lacks ['v_proj']"
    slow.engine_cost = {"wall_ms": 21.31, "device_ms": 3.92}
    slow.save(tmp_path)
    read = Report.read(tmp_path)
    assert (read.engine_path, read.engine_note, read.engine_cost) == (
        slow.engine_path, slow.engine_note, slow.engine_cost,
    )  # fmt: skip
    cost = "A plain cycle took 21.3 ms, of which the card worked at most 3.9 ms and otherwise waited"
    for shown in (render_markdown(read), _terminal(read)):
        assert "he target ran by transformers" in shown and "v_proj" in shown and cost in " ".join(shown.split())
    read.engine_note = None
    assert "plain cycle" not in render_markdown(read)


def test_a_report_without_the_engines_path_still_loads() -> None:
    before = report().to_json()
    for name in ("engine_path", "engine_note", "engine_cost"):
        del before[name]
    read = Report.from_json(before)
    assert read.engine_path is None and "transformers' own forward" not in render_markdown(read)


def test_what_a_scheduler_ran() -> None:
    def shape(cycles: int, levels: int | None, nodes: int | None = None, rows: int | None = None) -> dict[str, Any]:
        return {"levels": levels, "nodes": nodes, "rows": rows, "cycles": cycles, "ms": 2.0, "tokens_per_s": 300.0}

    small = [shape(1, 0), shape(30, 3), shape(0, 5), shape(9, 4, 12)]
    large = [shape(60, 0), shape(25, 5, rows=24), shape(15, 1), shape(10, 2)]
    found = {"verified_per_cycle": 2.346, "batches": {"16": {"shapes": large}, "2": {"shapes": small}}}
    text = render_markdown(report(scheduler=found))
    lines = [line for line in text.splitlines() if line.startswith("Scheduler")]
    assert lines[0].startswith("Scheduler: a cycle verified 2.35 rows per sequence on average, the root included")
    assert lines[1:] == [
        "Scheduler at batch 2: chain of 3 in 75% of the cycles, tree of 12 on 4 levels in 22% of the cycles, "
        "plain decoding in 2% of the cycles.",
        "Scheduler at batch 16: plain decoding in 55% of the cycles, chain of 5 cut to 24 rows of the batch in 23% of "
        "the cycles, chain of 1 in 14% of the cycles.",
    ]
    assert "a cycle verified 2.35 rows" in _terminal(report(scheduler=found))
    assert "cheduler" not in render_markdown(report())


def test_the_headline_says_that_answers_were_cut() -> None:
    cut = report(cut={"answers": 4, "cut": 3}, max_new_tokens=48)
    for shown in (render_markdown(cut), _terminal(cut)):
        assert "card · 3 of 4 answers cut at 48 tokens" in shown
    assert "cut at" not in _terminal(report(cut={"answers": 4, "cut": 0})) + _terminal(report())


def test_the_markdown_begins_with_the_verdict() -> None:
    verdict = {"pays": False, "says": ["It does not."], "next": ["Try *this*."]}
    text = render_markdown(report(verdict=verdict))
    assert text.split("\n\n")[1:5] == ["**Verdict: drafting does not pay.**", "- It does not.", "Next:",
                                        "- Try \\*this\\*."]  # fmt: skip
    assert "Verdict" not in render_markdown(report())


def _terminal(report: Report) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(render_tables(report))
    return console.file.getvalue()  # type: ignore[attr-defined]
