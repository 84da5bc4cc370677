"""Reports side by side: cells, what is not comparable, the batch sweep, and the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.cli import main
from headstart.eval.measuring.compare import (
    COLUMNS,
    comparison_markdown,
    comparison_table,
    differences,
    read_reports,
    speedups_by_batch,
    write_comparison,
)
from headstart.eval.measuring.rendering import write_report
from headstart.eval.measuring.report import Report, Section
from headstart.heads.errors import DataError


def section(tau: float, speedup: float | None) -> Section:
    return Section(2, 10, 20, tau, None, [0.5], [0.5], 10.0, 5.0, speedup)


def latency(first: float, token: float) -> dict[str, float]:
    return {
        "first_token_p50_ms": first, "first_token_p95_ms": first + 0.5, "token_p50_ms": token, "token_p95_ms": token + 1
    }  # fmt: skip


def report(**changes: Any) -> Report:
    made = Report(
        target={"name": "T"}, head=None, drafter="eagle3", data={"path": "d.jsonl", "sha256": "x"}, dtype="bfloat16",
        device="card", temperature=0.0, lossless=True, tree={"label": "chain3"}, batch_size=1, max_new_tokens=9,
        prompts=4, forwards=20, tokens=50, tau=2.5, tau_ci95=[2.25, 2.75], per_position_acceptance=[0.75, 0.5],
        per_position_conditional=[0.75, 0.667], baseline_tokens_per_s=100.0, tokens_per_s=180.0, speedup=1.8,
        tasks={"a": section(2.0, 1.5), "b": section(3.0, None)}, greedy_identity=None, timing={}, sampling={},
        recipe={}, versions={}, git_revision="r", latency={"baseline": latency(8, 10), "speculative": latency(9, 5)},
    )  # fmt: skip
    return replace(made, **changes)


def shown(reports: dict[str, Report], width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(comparison_table(reports))
    return out.getvalue()


def test_markdown_holds_every_run_and_task() -> None:
    lossy = report(lossless=False, tau=1.25, speedup=None, tasks={"a": section(1.5, 0.9)}, notes=["careful"])
    text = comparison_markdown({"one": report(), "two": lossy, "three": report(synthetic=[0.5], lossless=False)})
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    measured = "| lossless | 1 | 4 | 2.50 | 2.25–2.75 | .750 .500 | 100.0 | 180.0 | 1.80× | 9.00 / 9.50 |"
    assert f"{measured} 10.00 / 11.00 | 5.00 / 6.00 | – | card |" in rows["one"]
    assert "| LOSSY |" in rows["two"] and "| 1.25 |" in rows["two"]
    assert "| SYNTHETIC |" in rows["three"]
    assert "| a | 2.00 | 1.50 | 2.00 |" in text and "| b | 3.00 | – | 3.00 |" in text
    assert "| a | 1.50× | 0.90× | 1.50× |" in text
    assert "- two: careful" in text
    assert text.count("| task | one | two (LOSSY) | three (SYNTHETIC) |") == 2
    assert "- LOSSY: typical acceptance, the output distribution is not the target's" in text
    assert "- SYNTHETIC: acceptance was asked for" in text
    alone = comparison_markdown({"one": report()})
    assert "LOSSY" not in alone and "SYNTHETIC" not in alone


def four_runs() -> dict[str, Report]:
    """Every column as long as it gets in practice."""
    device, names = "NVIDIA H100 80GB HBM3", {"name": "SmolLM2-135M-Instruct"}
    many = report(
        target=names, device=device, tree={"label": "dynamic60"}, baseline_tokens_per_s=12345.6, tokens_per_s=23456.7,
        per_position_acceptance=[0.875, 0.766, 0.655, 0.544, 0.433, 0.322], speedup=10.25, speedup_ci95=[10.12, 10.38],
        latency={"baseline": latency(1234.25, 10), "speculative": latency(1345.25, 5)}, prompts=1000,
        greedy_identity={"identical": 998, "sequences": 1000},
    )  # fmt: skip
    lossy = {"lossless": False, "temperature": 0.7, "greedy_identity": None}
    return {
        "runs/one": many,
        "runs/two": replace(many, **lossy, tau=3.25),
        "runs/three": replace(many, lossless=False, synthetic=[0.5], tau=4.25),
        "runs/four": replace(many, latency=None, tau=5.25, device="cpu"),
    }


def rows_of(text: str) -> dict[str, list[str]]:
    """Quantity → a text per run; lines of a cell are put together by spaces, tables side by side."""
    found: dict[str, list[str]] = {}
    for table in text.split("┏")[1:]:
        rows: list[list[str]] = []
        for line in table.splitlines():
            if not line.startswith(("│", "┃")):
                continue
            cells = [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]
            if not rows or (cells[0] and rows[-1][0]):  # the head row's name stands in its last line
                rows.append(cells)
            else:
                rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
        for name, *cells in rows:
            found.setdefault(name, []).extend(cells)
    return found


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("runs", [2, 4])
def test_the_terminal_cuts_nothing(width: int, runs: int) -> None:
    text = shown(dict(list(four_runs().items())[:runs]), width)
    rows = rows_of(text)
    assert tuple(rows) == COLUMNS and "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert rows["run"] == ["runs/one", "runs/two (LOSSY)", "runs/three (SYNTHETIC)", "runs/four"][:runs]
    assert rows["acceptance"] == ["lossless", "LOSSY", "SYNTHETIC", "lossless"][:runs]
    assert rows["τ"] == ["2.50", "3.25", "4.25", "5.25"][:runs]
    assert rows["identical"] == ["998/1000", "–", "998/1000", "998/1000"][:runs]
    assert rows["device"] == [*["NVIDIA H100 80GB HBM3"] * 3, "cpu"][:runs]
    assert rows["first token ms"] == [*["1345.25 / 1345.75"] * 3, "–"][:runs]
    for name, value in (
        ("target", "SmolLM2-135M-Instruct"), ("drafter", "eagle3"), ("tree", "dynamic60"), ("batch", "1"),
        ("prompts", "1000"), ("95 %", "2.25–2.75"), ("by position", ".875 .766 .655 .544 .433 .322"),
        ("plain tokens/s", "12345.6"), ("spec. tokens/s", "23456.7"), ("speed-up (clock)", "10.25× (10.12–10.38)"),
    ):  # fmt: skip
        assert rows[name] == [value] * runs
    said = " ".join(text.split())
    assert "LOSSY: typical acceptance, the output distribution is not the target's" in said
    assert ("SYNTHETIC: acceptance was asked for" in said) == (runs == 4)
    assert "the runs differ in temperature" in said


def test_short_runs_share_one_table_and_long_paths_go_on() -> None:
    assert shown({str(n): report(tau=n) for n in range(4)}, 80).count("┏") == 1
    path = "/".join(["a-long-folder"] * 5)
    text = shown({path: report(lossless=False), "other/run [1]": report()}, 80)
    rows = rows_of(text)
    assert text.count("┏") == 1 and rows["run"][0].replace(" ", "") == f"{path}(LOSSY)"
    assert rows["run"][1] == "other/run [1]" and rows["speed-up (clock)"] == ["1.80×"] * 2


def test_differences_are_named() -> None:
    assert differences({"one": report(), "two": report(tau=1.0, batch_size=4)}) == []
    other = report(data={"path": "d.jsonl", "sha256": "y"}, device="other")
    assert differences({"one": report(), "two": other}) == ["the runs differ in prompts", "the runs differ in devices"]
    # the other half of one file, as many prompts
    odd, even = (report(recipe={"eval": {"half": half}}) for half in ("odd", "even"))
    assert differences({"one": odd, "two": even}) == ["the runs differ in prompts"]
    assert differences({"one": report(recipe={"eval": {"half": None}}), "two": report()}) == []


@pytest.mark.parametrize(
    ("one", "two", "what"),
    [
        ({}, {"temperature": 1.0}, ["temperature"]),
        ({"sampling": {"top_p": 1.0, "seed": 0}}, {"sampling": {"top_p": 0.9, "seed": 1}}, ["sampling"]),
        ({"sampling": {"top_p": 1.0}}, {"sampling": {"top_p": 1.0, "min_p": 0.1}}, []),
        ({}, {"lossless": False}, ["acceptance"]),
        ({"synthetic": [0.5]}, {"synthetic": [0.8]}, ["acceptance"]),
        ({"verification": "block"}, {"verification": "token"}, ["verification"]),
        ({"verification": "block"}, {"verification": "draw"}, []),
        ({}, {"prompts": 3}, ["prompts"]),
        ({}, {"target": {"name": "U"}}, ["targets"]),
        ({"target": {"name": "T", "weight_hash": "a"}}, {"target": {"name": "T", "weight_hash": "b"}},
         ["the target's weights"]),
        ({"target": {"name": "T", "weight_hash": "a"}},
         {"target": {"name": "T", "weight_hash": "b"}, "dtype": "float32"}, ["dtypes"]),
        ({"target": {"name": "T", "template_hash": "a"}}, {"target": {"name": "T", "template_hash": "b"}},
         ["tokenizer or chat template"]),
        ({"target": {"name": "T", "template_hash": "a"}}, {}, []),
        ({}, {"engine": {"name": "vLLM"}}, ["engines"]),
    ],
)  # fmt: skip
def test_what_does_not_compare(one: dict[str, Any], two: dict[str, Any], what: list[str]) -> None:
    reports = {"one": report(**one), "two": report(**two)}
    expected = [f"the runs differ in {name}" for name in what]
    assert differences(reports) == expected
    assert all(f"- {line}" in comparison_markdown(reports) for line in expected)
    assert all(line in shown(reports, 140) for line in expected)


def test_batch_sweep(tmp_path: Path) -> None:
    runs = {str(n): report(batch_size=n, speedup=2 - n / 10) for n in (4, 1)}
    (points,) = speedups_by_batch({**runs, "tree": report(tree={"label": "tree60"})}).values()
    assert points == [(1, 1.9), (4, 1.6)]
    (name,) = speedups_by_batch({label: replace(run, lossless=False) for label, run in runs.items()})
    assert ", LOSSY, " in name
    assert "(batches.png)" in write_comparison(runs, tmp_path / "sweep").read_text()
    assert (tmp_path / "sweep" / "batches.png").read_bytes().startswith(b"\x89PNG")
    assert "batches.png" not in write_comparison({"1": runs["1"]}, tmp_path / "one").read_text()


def test_sweeps_inside_runs_are_compared(tmp_path: Path) -> None:
    points = [{"batch": 1, "speedup": 2.0}, {"batch": 8, "speedup": 0.9}, {"batch": 16, "out_of_memory": True}]
    swept = report(sweeps={"batch": {"points": points[:2], "says": "it ends at batch 8"}})
    assert speedups_by_batch({"one": swept, "two": report()}) == {"one": [(1, 2.0), (8, 0.9)]}
    flagged = {"two": replace(swept, lossless=False), "three": replace(swept, lossless=False, synthetic=[0.5])}
    assert list(speedups_by_batch(flagged)) == ["two (LOSSY)", "three (SYNTHETIC)"]
    text = write_comparison({"one": swept, "two": report()}, tmp_path).read_text()
    assert "- one: it ends at batch 8" in text and "(batches.png)" in text


def test_labels_and_missing_reports(tmp_path: Path) -> None:
    places = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
    for place, tau in zip(places, (2.0, 3.0), strict=True):
        write_report(report(tau=tau), place)
    assert {label: found.tau for label, found in read_reports(places).items()} == {"x/run": 2.0, "y/run": 3.0}
    with pytest.raises(DataError, match="more than once"):
        read_reports([places[0], places[0]])
    with pytest.raises(DataError, match=r"none: no report.json there"):
        read_reports([places[0], tmp_path / "none"])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tau in (("one", 2.0), ("two", 3.0)):
        write_report(report(tau=tau), tmp_path / name)
    words = ["report", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    value = json.loads(capsys.readouterr().out)
    assert {label: run["tau"] for label, run in value["runs"].items()} == {"one": 2.0, "two": 3.0}
    assert (tmp_path / "out" / "comparison.md").is_file()
    assert main(["report", str(tmp_path / "none")]) == 1


def test_plots_of_a_report(tmp_path: Path) -> None:
    write_report(report(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    for name in ("acceptance.png", "tasks.png"):
        assert f"({name})" in text and (tmp_path / name).read_bytes().startswith(b"\x89PNG")
