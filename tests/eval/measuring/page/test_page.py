"""The page shows the numbers of report.json, leaves out with a reason what is missing, and runs no text of others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from page_help import CURVES, SAMPLES, SEEN, Page, bare, hostile, whole

from headstart.eval.measuring.compare import read_reports, write_comparison
from headstart.eval.measuring.page.page import render_page
from headstart.eval.measuring.page.told import samples
from headstart.eval.measuring.rendering import page_said, render_saved, write_report
from headstart.eval.measuring.report import Report

SECTIONS = (
    "verdict", "tasks", "positions", "cycle", "by-batch", "by-context", "chains", "latency", "training", "samples",
    "data", "measured", "notes", "recipe",
)  # fmt: skip


def html_of(**reports: Report) -> str:
    values = {name: report.to_json() for name, report in reports.items()}
    return render_page(values, page_said(reports))


def page_of(*reports: Report) -> Page:
    return Page(html_of(**{f"run{n}": report for n, report in enumerate(reports)}))


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but their SVG, which takes most of the time, is not."""
    monkeypatch.setattr("headstart.eval.measuring.page.page.svg_of", lambda figure, name: "<svg></svg>")


@pytest.fixture(scope="module")
def page() -> Page:
    return page_of(whole())


def test_the_numbers_of_a_page_are_those_of_the_report(page: Page) -> None:
    report = whole().to_json()
    rows = page.table("τ, speed-up")
    assert list(rows) == ["chat", "math", "writing", "all"]
    for name, row in rows.items():
        numbers = report if name == "all" else report["tasks"][name]
        for column, key, digits, unit in (
            ("prompts", "prompts", 0, ""), ("τ", "tau", 2, ""), ("speed-up", "speedup", 2, "×"),
            ("plain tokens/s", "baseline_tokens_per_s", 1, ""), ("drafting tokens/s", "tokens_per_s", 1, ""),
        ):  # fmt: skip
            text, value = row[column]
            assert value == numbers[key]
            assert text == ("–" if value is None else f"{value:.{digits}f}{unit}")
        low, high = numbers["tau_ci95"]
        assert row["95 % of τ"][0] == f"{low:.2f}–{high:.2f}"
    assert rows["all"]["95 % of speed-up"][0] == "1.62–1.94" and rows["chat"]["95 % of speed-up"][0] == "–"
    assert rows["all"]["identical answers"][0] == "5/6" and rows["math"]["identical answers"][0] == "2/3"
    cards = [float(values["data-value"] or 0) for tag, values in page.tags if tag == "dd" and "data-value" in values]
    assert cards == [report["tau"], report["speedup"], report["tokens_per_s"]]


def test_tables_of_positions_cycles_sweeps_and_chains(page: Page) -> None:
    report = whole().to_json()
    rows = [row for caption, table in page.tables.items() if caption.startswith("Share of drafts") for row in table]
    everything = [[value for _, value in row[2:]] for row in rows if row[0][0] == "all"]
    assert everything == [report["per_position_acceptance"], report["per_position_conditional"]]
    (cycle,) = page.table("Milliseconds of the parts").values()
    draft, verify, rest = report["cycle"].values()
    assert [cycle[f"{name} ms"][1] for name in ("draft", "verify", "rest")] == [draft, verify, rest]
    assert cycle["cycle ms"][1] == draft + verify + rest and cycle["plain token ms"][1] == 1e3 / 100
    assert cycle["per token ms"][1] == (draft + verify + rest) / report["tau"]
    for name in ("batch", "context"):
        for found in report["sweeps"][name]["points"]:
            row = page.table(f"Speed-up by {name}")[f"{found[name]:,}"]
            if found.get("out_of_memory"):
                assert row["speed-up"][0] == "out of memory"
                continue
            assert (row["speed-up"][1], row["τ"][1]) == (found["speedup"], found["tau"])
            low, high = (found["speedup"] * end / 2.25 for end in (2, 2.5))
            assert row["95 %, by that of τ"][0] == f"{low:.2f}–{high:.2f}"
            assert row["drafting tokens/s"][1] == found["speculative_tokens_per_s"]
    chains = page.table("Speed-up by length")
    assert {n: row["speed-up"][1] for n, row in chains.items()} == report["chain_speedups"]
    rows = page.tables["Milliseconds"]
    assert [value for _, value in rows[2][1:]] == list(report["latency"]["speculative"].values())


def test_curves_and_data(page: Page) -> None:
    rows = page.table("Ends of the curves")
    assert len(rows) == len(CURVES)
    for name, points in CURVES.items():
        (row,) = [row for title, row in rows.items() if title.endswith(f"({name})")]
        values = [value for _, value in points]
        shown = [row[column][1] for column in ("points", "first", "least", "largest", "last", "last step")]
        assert shown == [len(points), values[0], min(values), max(values), values[-1], points[-1][0]]
    assert "depth 2 (valid/loss_2)" in rows and "6 steps took 90 s" in page.text.replace("\n", " ")
    data = page.table("Training data")
    assert data["conversations: conversations"]["value"] == ("205", 205.0)
    assert data["training samples: own choice, share"]["value"][1] == 0.9921


def test_every_token_has_its_author(page: Page) -> None:
    (shown,) = samples({"": whole().to_json()})
    assert [(token.kind, token.text) for token in shown.tokens] == [
        ("target", "Hello"), ("accepted", ","), ("accepted", " my"), ("rejected", " friend"), ("target", " dear"),
        ("rejected", " friend"), ("later", "!"), ("later", "⏎"), ("target", " reader"), ("accepted", "."),
        ("accepted", "⏎\n"), ("accepted", "<|end|>"),
    ]  # fmt: skip
    assert "5 of 8 tokens drafted, 3 cycles, τ 2.00" in shown.title
    classes = [str(values.get("class")) for tag, values in page.tags if tag in ("span", "del") and "title" in values]
    assert classes == ["t", "a", "a", "r", "t", "r", "r l", "r l", "t", "a", "a", "a"]
    failed = page.tables["The most frequent rejections in these samples: 2 of 3 cycles with a draft had one"]
    assert [[text for text, _ in row] for row in failed[1:]] == [
        ["“ friend”", "“ dear”", "1", "33.3 %"], ["“ friend”", "“ reader”", "1", "33.3 %"]
    ]  # fmt: skip


def test_why_a_draft_was_rejected() -> None:
    cycles = [{"drafted": 2, "accepted": [], "rejected": [" a", " b"], "own": own} for own in (" c", " a")]
    sample = {"task": "t", "prompt": "", "first": "x", "tau": 1.0, "finish_reason": "stop", "cycles": cycles}
    (shown,) = samples({"": whole(samples=[sample]).to_json()})
    assert [token.title.split(": ", 2)[-1] for token in shown.tokens if token.kind in ("rejected", "later")] == [
        "the target wrote something else", "stood behind a rejected draft",
        "the target's own token reads the same", "stood behind a rejected draft",
    ]  # fmt: skip


def test_samples_say_what_of_a_tree_and_of_a_scheduler_they_show() -> None:
    tree = {"kind": "dynamic", "depth": 3, "label": "dynamic60"}
    one_path, whole_draft = "Of a draft tree only one path is shown", "Here each cycle drafts all that the"
    for changes, of_tree, of_scheduler in (
        ({}, False, False),
        ({"tree": tree}, True, False),
        ({"scheduler": {"verified_per_cycle": 2.0, "batches": {}}}, False, True),
        ({"tree": tree, "samples": None}, False, False),
    ):
        text = page_of(whole(**changes)).text
        assert (one_path in text, whole_draft in text) == (of_tree, of_scheduler), changes


def test_all_sections_are_there_and_reached_by_links(page: Page) -> None:
    ids = page.ids()
    assert len(set(ids)) == len(ids) and set(SECTIONS) <= set(ids)
    links = [str(values["href"]) for tag, values in page.tags if tag == "a"]
    assert set(links) - {"#main", "#notes"} == {f"#{name}" for name in SECTIONS} - {"#notes"}
    assert "earlier version" not in page.text


def test_what_is_missing_is_said_in_its_section() -> None:
    html = html_of(one=bare())
    parts = {m[1]: m[2] for m in re.finditer(r'<section id="([\w-]+)".*?>(.*?)</section>', html, re.DOTALL)}
    assert tuple(parts) == SECTIONS
    for name in ("verdict", "positions", "cycle", "by-batch", "by-context", "chains", "latency", "training", "samples",
                 "notes", "recipe"):  # fmt: skip
        assert parts[name].count('class="absent"') == 1, name
        assert "<svg" not in parts[name] and "<td" not in parts[name]
    assert "<svg" not in html and Page(html).table("τ, speed-up")["all"]["τ"][1] == 2.5


@pytest.mark.parametrize("changes", [
    {"drafter": "ngram", "head": None},
    {"drafter": "plain", "head": None, "per_position_acceptance": [], "tokens_per_s": None, "speedup": None},
    {"engine": {"name": "vllm", "version": "0.33"}, "baseline_tokens_per_s": None, "speedup": None, "cycle": None},
    {"synthetic": [0.5], "lossless": False, "head": {"path": None, "untrained": True}},
    {"tasks": {}},
    {"per_position_acceptance": [0.5], "per_position_conditional": [0.5]},
    {"batch_size": 8, "row_speedup": 1.5, "speedup_ci95": None},
])  # fmt: skip
@pytest.mark.usefixtures("unsaved")
def test_drafters_without_head_servers_and_other_kinds(changes: dict[str, Any]) -> None:
    shown = page_of(whole(**changes))
    assert shown.table("τ, speed-up")["all"]["τ"][1] == 2.5
    assert ("SYNTHETIC" in shown.text) == ("synthetic" in changes)


def test_no_text_of_others_becomes_markup() -> None:
    ours, theirs = Page(html_of(a=whole(), b=bare())), Page(html_of(one=hostile()))
    assert {tag for tag, _ in theirs.tags} <= {tag for tag, _ in ours.tags}
    for tag, values in theirs.tags:
        assert not [name for name in values if name.startswith("on")], (tag, values)
        if tag == "script":
            assert not values
    assert sum(tag == "script" for tag, _ in theirs.tags) == 1
    assert theirs.text.count(SEEN) >= 20
    html = html_of(one=hostile())
    assert "<script>alert" not in html and "\x1b" not in html and "\u202e" not in html and "<img" not in html
    html.encode()


def test_a_page_asks_for_nothing_outside_of_it() -> None:
    html = html_of(one=whole())
    for tag, values in Page(html).tags:
        assert "src" not in values, tag
        for name in ("href", "xlink:href"):
            assert str(values.get(name) or "#").startswith(("#", "data:")), (tag, values)
    assert not re.search(r"@import|url\((?!#)", html) and "default-src 'none'" in html
    assert html == html_of(one=whole())  # the same report gives the same page


def test_plots_have_words_and_parts_of_their_own() -> None:
    shown = page_of(whole(), whole(tau=3.5, drafter="medusa"))
    drawings = [values for tag, values in shown.tags if values.get("role") == "img"]
    assert len(drawings) >= 8 and sum(tag == "svg" for tag, _ in shown.tags) == len(drawings)
    ids = shown.ids()
    assert len(set(ids)) == len(ids)
    for values in drawings:
        assert values["aria-labelledby"] in ids and values["aria-describedby"] in ids
    for tag, values in shown.tags:
        if tag == "th":
            assert values.get("scope") in ("row", "col")
    html = html_of(one=whole())
    assert not re.search(r"#0102\w\w", html) and "var(--s1)" in html  # every colour is one of the scheme's


@pytest.mark.usefixtures("unsaved")
def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    for name, report in (("one", whole()), ("two", whole(tau=3.5, temperature=0.5))):
        write_report(report, tmp_path / name)
    reports = read_reports([tmp_path / "one", tmp_path / "two"])
    write_comparison(reports, tmp_path / "out")
    shown = Page((tmp_path / "out/comparison.html").read_text())
    rows = next(rows for caption, rows in shown.tables.items() if caption.startswith("τ, speed-up"))
    assert [(row[0][0], row[1][0], row[3][1]) for row in rows[-2:]] == [("all", "one", 2.5), ("all", "two", 3.5)]
    assert [name for name, _ in shown.tables["Hardware, settings and versions"][0]] == ["fact", "one", "two"]
    assert "the runs differ in temperature" in shown.text and "Recipe of two" in shown.text


def test_a_page_is_written_beside_the_report_and_again(tmp_path: Path) -> None:
    path = write_report(whole(samples=SAMPLES), tmp_path)
    written = (tmp_path / "report.html").read_text()
    values = json.loads(path.read_text())
    assert Page(written).table("τ, speed-up")["all"]["τ"][1] == values["tau"]
    (tmp_path / "report.html").unlink()
    assert render_saved(path, print) and (tmp_path / "report.html").read_text() == written
    whole().save(tmp_path)  # a new measurement: what was drawn of the one before goes
    assert not (tmp_path / "report.html").exists()
