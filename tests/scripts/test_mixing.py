"""Weights, caps and duplicates in a run: what the console says, what the report holds, and when data changed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.data.choosing.split import KEEPING_RULE


def records(name: str, count: int, words: int = 12) -> list[dict[str, Any]]:
    draw = random.Random(name)
    say = lambda: " ".join(f"{name}{draw.randrange(900)}" for _ in range(words))  # noqa: E731
    return [{"id": f"{name}{n}", "prompt": say(), "response": say()} for n in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "data" / "report.json").read_text())


def test_a_run_says_and_reports_what_was_left_out(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    a, b = records("a", 40), records("b", 30)
    a += [{**a[n], "id": f"again{n}"} for n in range(3)]
    first = write(tmp_path / "first.jsonl", a)
    second = write(tmp_path / "second.jsonl", b)
    bench = write(tmp_path / "bench.jsonl", [{"prompt": a[5]["prompt"] + "!"}])
    sources = f"data.sources=[{{path: {first}, weight: 1}}, {{path: {second}, cap: 20, weight: 3}}]"
    options = ("data.distill.prompts=[]", "train.epochs=1", "train.tau_prompts=0")
    found = headstart("train", recipe, sources, *options, f"data.exclude=[{{path: {bench}}}]", "data.most_repeats=2")
    assert found.code == 0, found.err
    assert "data: left out 3 exact duplicates (again0 of a0, again1 of a1, again2 of a2)" in found.err
    assert "43 conversations read, " in found.err and "10 over the cap of 20" in found.err
    told = report(tmp_path)
    one, two = told["sources"]
    assert told["duplicates"] == {"mode": "exact", "exact": {f"again{n}": f"a{n}" for n in range(3)}, "near": {}}
    assert one["dropped"]["exact duplicates"] == 3 and one["dropped"]["begin with a prompt of data.exclude"] == 1
    assert two["dropped"]["over the cap of 20"] == 10 and (one["weight"], two["cap"]) == (1, 20)
    used = [each["trained"] + each["repeated"] for each in (one, two)]
    assert abs(used[0] / sum(used) - 0.25) < 0.02 and two["repeated"] == two["trained"] > 10
    for each in (one, two):
        assert each["read"] == each["trained"] + each["held_out"] + sum(each["dropped"].values())
    again = headstart("train", recipe, sources, *options, f"data.exclude=[{{path: {bench}}}]", "data.most_repeats=2")
    assert "train: finished before" in again.err
    more = headstart("train", recipe, sources, *options, f"data.exclude=[{{path: {bench}}}]", "data.most_repeats=1")
    assert more.code == 0 and "train: done again, its inputs changed (data.settings.most_repeats: 2 → null" in more.err


def test_prompts_of_the_evaluation_in_training_are_told(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    rows = records("a", 30)
    source = write(tmp_path / "log.jsonl", rows)
    bench = write(tmp_path / "bench.jsonl", [{"prompt": rows[2]["prompt"]}, {"prompt": "Something else"}])
    options = (f"data.sources=[{{path: {source}}}]", "data.distill.prompts=[]", "train.epochs=1", "train.tau_prompts=0")
    found = headstart("run", recipe, *options, f"eval.data={bench}")
    assert found.code == 0, found.err
    assert "data: WARNING: 1 conversation beginning with a prompt of eval.data or a near copy of one" in found.err
    clean = headstart("run", recipe, *options, f"eval.data={bench}", f"data.exclude=[{{path: {bench}}}]", "name=two")
    assert clean.code == 0 and "begin with a prompt of eval.data" not in clean.err, clean.err


def test_a_run_of_an_earlier_version_keeps_its_duplicates(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    rows = records("a", 30)
    source = write(tmp_path / "log.jsonl", [*rows, *({**row, "id": f"again-{row['id']}"} for row in rows)])
    options = (f"data.sources=[{{path: {source}}}]", "data.distill.prompts=[]", "train.epochs=1", "train.tau_prompts=0")
    assert headstart("train", recipe, *options, "data.duplicates=keep").code == 0
    assert report(tmp_path)["split"]["rule"] == KEEPING_RULE and report(tmp_path)["train"]["samples"] == 60
    # such a run differs from one of an earlier version in nothing that its marker holds
    on = headstart("train", recipe, *options)
    assert on.code == 0 and "train: finished before" in on.err
    said = headstart("inspect", recipe, *options)
    assert said.code == 0 and "this run began with duplicates kept and goes on so" in said.err
    new = headstart("train", recipe, *options, "data.duplicates=exact")
    assert new.code == 0 and "train: done again, its inputs changed (data.split" in new.err
    assert report(tmp_path)["train"]["samples"] == 30
    assert "train: finished before" in headstart("train", recipe, *options).err
