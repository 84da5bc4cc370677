"""`headstart compare` on a tiny random target: cells at equal budget, what resumes, what fails, what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.comparing.cells import Work, cell_name, make_cells
from headstart.comparing.config import load_comparison, shipped_comparisons
from headstart.comparing.data import positions_of_steps, steps_for_positions
from headstart.comparing.page import sentences
from headstart.comparing.rows import add_gains, mark_front, notes_of, taus, walked_tau
from headstart.comparing.work import eval_settings
from headstart.data import memory
from headstart.heads.errors import ConfigError, HeadstartError
from headstart.pipeline.data import trained_samples
from headstart.pipeline.run import Run


def rows_of(folder: Path) -> list[dict]:
    return json.loads((folder / "compare.json").read_text())["rows"]


def test_cells_end_in_rows_that_equal_their_reports(headstart: Callable, comparison: Path, tmp_path: Path) -> None:
    result = headstart("compare", comparison, "--json")
    assert result.code == 0, result.err
    folder = tmp_path / "sides"
    values = json.loads((folder / "compare.json").read_text())
    assert values == result.json and values["failed"] == values["unfinished"] == []
    rows = values["rows"]
    names = ["plain-s0", "plain-s1", "rate-lr=0.01-s0", "rate-lr=0.01-s1"]
    assert [row["cell"] for row in rows] == names and values["sets"] == ["held_out"]
    for row in rows:
        place = folder / "cells" / row["cell"]
        report = json.loads((place / "measured/held_out/report.json").read_text())
        speed = json.loads((place / "measured/speed/report.json").read_text())
        trained = json.loads((place / "steps/train.json").read_text())["result"]
        assert row["tau_held_out"] == report["tau"] and row["tau_held_out_ci95"] == report["tau_ci95"]
        assert row["speedup_batch_1"] == speed["speedup"] and row["draft_ms"] == speed["cycle"]["draft_ms"]
        assert row["speedup_batch_2"] == speed["sweeps"]["batch"]["points"][0]["speedup"]
        assert row["steps"] == trained["step"] == 3 and row["train_seconds"] == trained["seconds"]
        assert row["features"] == "online"
        assert row["parameters"] == report["head"]["parameters"] > 0 and row["peak_memory_bytes"] > 0
        assert report["dtype"] == row["dtype"] == "float32" and row["budget"] == {"kind": "steps", "value": 3}
        assert row["git_revision"] == report["git_revision"] and row["card"] == report["device"]
    assert [row["lever"] for row in rows] == ["plain", "plain", "train.lr", "train.lr"]
    assert [row["value"] for row in rows] == [None, None, 0.01, 0.01]
    assert rows[2]["gain_held_out"] == rows[2]["tau_held_out"] - rows[0]["tau_held_out"]
    assert rows[3]["gain_held_out"] == rows[3]["tau_held_out"] - rows[1]["tau_held_out"]
    # one target for all trainings, one for all τ, which on a CPU is the same for the speed-up
    assert result.err.count("loading target") <= 3
    # the second cell reads the samples that the first one made, one set of samples per seed
    assert result.err.count("samples to train on") == 2

    page = (folder / "compare.html").read_text()
    assert "<svg" in page and "Pareto front" in page and "http-equiv" in page and "src=" not in page
    assert all(name in page for name in names)

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    again = headstart("compare", comparison)
    assert again.code == 0 and "loading target" not in again.err and "train: starts" not in again.err
    assert "rate-lr=0.01-s1" in again.out and "τ held_out" in again.out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before


def test_a_failing_cell_is_reported_and_stops_no_other(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headstart.comparing.work as work

    train, folder = work.train, tmp_path / "sides"

    def broken(run: Run) -> dict:
        if run.recipe.name == "plain-s1":
            raise RuntimeError("the disk is on <fire>")
        return train(run)

    monkeypatch.setattr(work, "train", broken)
    result = headstart("compare", comparison, "measure.speed.enabled=false")
    assert result.code == 1 and "plain-s1: failed" in result.err and "plain-s1: failed" in result.out
    values = json.loads((folder / "compare.json").read_text())
    assert [row["cell"] for row in values["rows"]] == ["plain-s0", "rate-lr=0.01-s0", "rate-lr=0.01-s1"]
    (failed,) = values["failed"]
    assert failed["cell"] == "plain-s1" and failed["step"] == "train" and failed["type"] == "RuntimeError"
    assert "on <fire>" in failed["error"] and "&lt;fire&gt;" in (folder / "compare.html").read_text()
    assert "gain_held_out" not in values["rows"][2]  # the baseline of its seed is missing
    assert values["rows"][0]["draft_ms"] > 0 and values["rows"][0]["draft_ms_from"] == "float32, batch 2"

    monkeypatch.setattr(work, "train", train)
    assert headstart("compare", comparison, "measure.speed.enabled=false").code == 0
    assert len(rows_of(folder)) == 4 and json.loads((folder / "compare.json").read_text())["failed"] == []


def test_a_stopped_cell_continues(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.train.loop import TrainingLoop

    step, folder = TrainingLoop.step, tmp_path / "sides"

    def stopping(self: TrainingLoop) -> None:
        if "rate" in str(self.standing.run_dir) and self.standing.state.step == 2:
            raise KeyboardInterrupt  # as a second Ctrl-C, or a kill
        step(self)

    monkeypatch.setattr(TrainingLoop, "step", stopping)
    stopped = headstart("compare", comparison, "seeds=[0]", "measure.speed.enabled=false")
    assert stopped.code == 130 and "stopped" in stopped.err
    values = json.loads((folder / "compare.json").read_text())
    assert values["unfinished"] == ["plain-s0", "rate-lr=0.01-s0"]
    (row,) = values["rows"]  # of the cell that is trained, as training saw it
    last = json.loads((folder / "cells/plain-s0/metrics.jsonl").read_text().splitlines()[-1])
    assert row["cell"] == "plain-s0" and row["walked_tau"] == last["valid/walked_tau"] >= 1 and last["step"] == 3
    assert (row["head"], row["steps"], row["prompts"]) == ("eagle3", 3, 0) and row["positions"] > 0
    assert row["draft_ms"] is row["tree"] is row["versions"] is None and not any(key.startswith("tau") for key in row)
    page = (folder / "compare.html").read_text()
    for said in (stopped.out, page):
        assert "walked τ" in said and "a diagnosis of the training" in said and f"{row['walked_tau']:.3f}" in said

    monkeypatch.setattr(TrainingLoop, "step", step)
    result = headstart("compare", comparison, "seeds=[0]", "measure.speed.enabled=false")
    assert result.code == 0 and "train: continues" in result.err
    trained = json.loads((folder / "cells/rate-lr=0.01-s0/steps/train.json").read_text())["result"]
    assert trained["resumed_from"] == 2
    assert [row["steps"] for row in rows_of(folder)] == [3, 3]
    # every cell has τ: the terminal no longer shows the diagnosis, the page does
    assert "walked" not in result.out and "τ held_out" in result.out
    assert "<th>walked τ</th>" in (folder / "compare.html").read_text()


def test_positions_are_equal_within_a_step(
    headstart: Callable, comparison: Path, recipe: Path, tmp_path: Path
) -> None:
    wanted = 700
    result = headstart(
        "compare", comparison, "budget.positions=700", "seeds=[0]", "measure.speed.enabled=false",
        'cells=[{name: wide, settings: {data.pack_tokens: 256}}, {name: narrow, settings: {data.pack_tokens: 64}}]',
        "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    work = Work.read(tmp_path / "sides/work.json")
    rows = result.json["rows"]
    assert rows[0]["steps"] < rows[1]["steps"]
    for row, cell in zip(rows, work.cells, strict=True):
        run = Run(work.recipe(cell), _silent())
        samples = trained_samples(run)
        assert steps_for_positions(run.recipe, samples, wanted) == row["steps"] == cell.steps
        # naively: the packs one by one
        assert row["positions"] == positions_of_steps(run.recipe, samples, row["steps"]) >= wanted
        assert positions_of_steps(run.recipe, samples, row["steps"] - 1) < wanted


def _silent():
    from headstart.console import Console

    return Console(silent=True)


def test_distilled_answers_are_shared(headstart: Callable, comparison: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    result = headstart(
        "compare", comparison, f"data.distill.prompts=[{{path: {prompts}}}]", "data.distill.max_new_tokens=8",
        "settings.data.distill.prompts=null", "seeds=[0, 1]", "measure.speed.enabled=false",
        "cells=[{name: one}, {name: two, settings: {train.lr: 0.01}}]", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    folder = tmp_path / "sides"
    (answers,) = (folder / "answers").iterdir()
    told = (answers / "data/distilled.jsonl").read_text()
    assert result.err.count("distill: starts") == 1
    cells = [folder / "cells" / row["cell"] for row in result.json["rows"]]
    assert len(cells) == 4 and all((cell / "data/distilled.jsonl").read_text() == told for cell in cells)


@pytest.mark.slow
def test_processes_share_the_cells_and_a_killed_one_loses_nothing(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    import headstart.comparing.team as team

    killed: list[int] = []
    look = team.Team._look

    def killing(self: team.Team, place: team.Place, word: str) -> None:
        if not killed and self._note(place).get("cell") == "plain-s1" and place.process is not None:
            killed.append(place.process.pid)
            os.kill(place.process.pid, signal.SIGKILL)
            place.process.wait()
        look(self, place, word)

    monkeypatch.setattr(team.Team, "_look", killing)
    result = headstart("compare", comparison, "--side-by-side", "2", "measure.speed.enabled=false", "--json")
    assert killed and result.code == 1, result.err
    (failed,) = result.json["failed"]
    assert failed["cell"] == "plain-s1" and "SIGKILL" in failed["error"]
    assert [row["cell"] for row in result.json["rows"]] == ["plain-s0", "rate-lr=0.01-s0", "rate-lr=0.01-s1"]
    assert any("trained on one device at the same time" in note for note in result.json["notes"])
    again = headstart("compare", comparison, "--side-by-side", "2", "measure.speed.enabled=false", "--json")
    assert again.code == 0 and len(again.json["rows"]) == 4


def test_what_a_cell_cannot_do_is_refused_before_the_first_starts(
    headstart: Callable, comparison: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sides"
    for words, said in (
        (["cells=[{name: a}, {name: b, settings: {head.feature_layers: [1, 2, 99]}}]"], "cell b-s0: "),
        (["cells=[{name: a}, {name: b, settings: {train.lrr: 1}}]"], "cell b-s0: override: unknown key 'train.lrr'"),
        (["measure.sets.other={data: missing.jsonl}"], "missing.jsonl"),
        (["budget.seconds=5", "budget.steps=3"], "budget: found seconds=5 and steps=3, expected exactly one"),
        (["cells=[{name: a}, {name: a}]"], "cells: a-s0 is there more than once"),
        (["train.lr=0.1"], "cells[1].grid varies train.lr"),
        (["run_dir=x"], "give folder=… instead"),
        (["train.steps=7"], "override: found train.steps=7, which the comparison gives every cell"),
        (["train={max_seconds: 7}"], "override: found train.max_seconds=7"),
        (["settings={train.epochs: 2}"], "settings: found train.epochs=2"),
        (["cells=[{name: a, grid: {seed: [0, 1]}}]"], "cells[0].grid: found seed=[0, 1]"),
        (["cells=[{name: a, settings: {run_dir: x}}]"], 'cells[0].settings: found run_dir="x"'),
        (["measure.sets.speed={limit: 2}"], "measure.sets: found 'speed', expected another name"),
        (["measure.sets.held_out_ci95={limit: 2}"], "measure.sets: found 'held_out_ci95'"),
        (["budget.positions=1000000000000"], "budget.positions: found 1,000,000,000,000"),
        (["budgt.steps=4"], "did you mean 'budget'?"),
        (["measure.sets.held_out=null"], "measure.sets: found none"),
        (["--gpus", "7"], "--gpus: found '7'"),
        (["--side-by-side", "0"], "--side-by-side: found 0"),
    ):
        result = headstart("compare", comparison, *words)
        assert result.code == 2 or result.code == 1, (words, result.err)
        assert said in result.err, (words, result.err)
        assert not (folder / "cells").exists()


def test_a_plan_says_what_the_cells_take(headstart: Callable, comparison: Path, tmp_path: Path) -> None:
    result = headstart("compare", comparison, "--dry-run", "--json")
    assert result.code == 0, result.err
    plan = result.json
    assert [cell["steps"] for cell in plan["cells"]] == [3, 3, 3, 3] and plan["sets"] == ["held_out"]
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 0 for cell in plan["cells"])
    assert plan["train_seconds"] == pytest.approx(sum(cell["seconds"] for cell in plan["cells"]))
    assert not (tmp_path / "sides").exists()
    timed = headstart("compare", comparison, "--plan", "budget={steps: null, seconds: 60}", "--side-by-side", "2")
    assert "4 cells of 60 seconds each, 2 at a time" in timed.out and "training: 2 minutes in all" in timed.out
    assert "the seconds of a cell are those of a shared device" in timed.out


def test_messages_of_one_cell_say_one(
    headstart: Callable, comparison: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.comparing.checks.local_device_bytes", lambda device: 1000)
    one = headstart("compare", comparison, "--dry-run")
    assert one.code == 2 and "error: the largest cell needs 0." in one.err
    two = headstart("compare", comparison, "--dry-run", "--side-by-side", "2")
    assert two.code == 2 and "error: --side-by-side 2: the 2 largest cells need 0." in two.err
    settings = ("cells=[{name: plain}]", "seeds=[0]", "budget.steps=1", "train.check_memory=false")
    assert "1 cell of 1 step, 1 at a time" in headstart("compare", comparison, "--dry-run", *settings).out

    values = {"budget": {"kind": "steps", "value": 1}, "failed": [], "notes": [], "unfinished": ["a"]}
    assert sentences(values, False)[0].startswith("every cell: 1 step; ")
    assert sentences(values, False)[1].endswith("goes on with it")
    several = sentences({**values, "unfinished": ["a", "b"]}, False)[1]
    assert several == "not finished: a, b; the same command goes on with them"


def test_walked_tau_is_that_of_the_saved_head(tmp_path: Path) -> None:
    best: dict = {"name": "valid/walked_tau", "value": 1.75, "step": 4}

    def seen(select: str) -> float | None:
        recipe = SimpleNamespace(train=SimpleNamespace(select=select))
        markers = SimpleNamespace(read=lambda step: {"result": {"best": best}})
        return walked_tau(SimpleNamespace(dir=tmp_path, recipe=recipe, markers=markers))  # type: ignore[arg-type]

    assert seen("last") is None and seen("best") is None
    records = [{"step": 2, "valid/walked_tau": 1.5}, {"step": 4, "valid/walked_tau": 1.75},
               {"step": 6, "valid/walked_tau": 1.25}, {"step": 6, "train/walked_tau": 9.0}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert (seen("last"), seen("best")) == (1.25, 1.75)


def test_shipped_comparisons_load() -> None:
    assert "smollm2" in shipped_comparisons()
    for name in shipped_comparisons():
        config, settings, path = load_comparison(name, ["budget.seconds=75", "train.lr=0.1"])
        cells = make_cells(config, [], path)
        assert config.budget.seconds == 75 and settings == ["train.lr=0.1"] and len(cells) > 4
        for cell in cells:
            recipe = cell.load(Path("x"))
            assert recipe.train.max_seconds == 75 and recipe.train.epochs is None and recipe.seed == cell.seed
    with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
        load_comparison("smolm2")


def test_a_budget_of_another_kind_takes_the_place_of_the_file_s(comparison: Path) -> None:
    words = ("budget.seconds=9", "budget.steps=4")
    seconds, steps = (load_comparison(str(comparison), [word])[0].budget for word in words)
    assert (seconds.kind, seconds.seconds) == ("seconds", 9) and (steps.kind, steps.steps) == ("steps", 4)
    assert load_comparison(str(comparison), ["seeds=[5]"])[0].budget.steps == 3
    with pytest.raises(ConfigError, match="found seconds=9 and steps=4, expected exactly one"):
        load_comparison(str(comparison), ["budget.seconds=9", "budget.steps=4"])
    with pytest.raises(ConfigError, match="found none, expected exactly one"):
        load_comparison(str(comparison), ["budget.steps=null"])


def test_the_front_and_gains() -> None:
    rows = [
        {"cell": name, "draft_ms": ms, "tau_a": tau, "baseline": name == "slow", "seed": seed, "recipe": "r"}
        for name, ms, tau, seed in (("fast", 1.0, 2.0, 0), ("slow", 2.0, 2.5, 0), ("worse", 2.5, 2.4, 0),
                                    ("twin", 1.0, 2.0, 1), ("bare", None, 3.0, 0))
    ]  # fmt: skip
    mark_front(rows, "a")
    assert [row["front_a"] for row in rows] == [True, True, False, True, None]
    add_gains(rows, ["a"])
    assert [row.get("gain_a") for row in rows] == [-0.5, None, pytest.approx(-0.1), None, 0.5]


def test_of_several_baselines_that_of_the_recipe_is_compared_with() -> None:
    tau = {"m": 1.0, "m-muon": 1.25, "e": 2.0, "e-muon": 2.5, "other": 3.0}
    rows = [
        {"cell": name, "tau_a": of, "baseline": name in ("m", "e"), "seed": 0, "recipe": name[0]}
        for name, of in tau.items()
    ]
    add_gains(rows, ["a"])
    assert [row.get("gain_a") for row in rows] == [None, 0.25, None, 0.5, 2.0]


def test_a_task_does_not_take_the_key_of_a_set() -> None:
    part = SimpleNamespace(tau=2.0, tau_ci95=[1.0, 3.0])
    report = SimpleNamespace(tasks={"mix": part, "code x": part}, total=SimpleNamespace(tau=4.0, tau_ci95=[3.0, 5.0]))

    def keys(**sets: dict) -> dict[str, float]:
        work = SimpleNamespace(measure={"sets": sets})
        found = taus(work, dict.fromkeys(sets, report))  # type: ignore[arg-type]
        return {key: value for key, value in found.items() if not key.endswith("_ci95")}

    assert keys(check={"task_field": "set"}) == {"tau_mix": 2.0, "tau_code_x": 2.0}
    assert keys(check={"task_field": "set"}, mix={}) == {"tau_check_mix": 2.0, "tau_code_x": 2.0, "tau_mix": 4.0}
    both = keys(a={"task_field": "set"}, b={"task_field": "kind"})
    assert list(both) == ["tau_a_mix", "tau_a_code_x", "tau_b_mix", "tau_b_code_x"]


def test_a_cell_that_was_begun_with_other_settings_starts_anew(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.train.loop import TrainingLoop

    step, words = TrainingLoop.step, ("compare", comparison, "seeds=[0]", "cells=[{name: plain}]",
                                      "measure.speed.enabled=false")  # fmt: skip

    def stopping(self: TrainingLoop) -> None:
        if self.standing.state.step == 2:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(TrainingLoop, "step", stopping)
    assert headstart(*words).code == 130
    monkeypatch.setattr(TrainingLoop, "step", step)
    result = headstart(*words, "budget.steps=4", "train.lr=0.02")
    assert result.code == 0 and "plain-s0: begun with other settings: it starts anew" in result.err
    trained = json.loads((tmp_path / "sides/cells/plain-s0/steps/train.json").read_text())["result"]
    assert (trained["resumed_from"], trained["step"]) == (0, 4)
    assert headstart(*words, "budget.steps=4", "train.lr=0.02").code == 0


def test_a_cell_that_lacks_a_measurement_is_not_finished(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.comparing.work import Worker

    measure, words = Worker.measure, ("compare", comparison, "seeds=[0]", "cells=[{name: plain}]")

    def stopping(self: Worker, name: str, run: Run) -> None:
        if name == "speed":
            raise KeyboardInterrupt
        measure(self, name, run)

    monkeypatch.setattr(Worker, "measure", stopping)
    assert headstart(*words).code == 130
    values = json.loads((tmp_path / "sides/compare.json").read_text())
    assert [row["cell"] for row in values["rows"]] == values["unfinished"] == ["plain-s0"]
    monkeypatch.setattr(Worker, "measure", measure)
    assert headstart(*words).code == 0
    assert json.loads((tmp_path / "sides/compare.json").read_text())["unfinished"] == []


def test_each_lost_card_costs_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends after an error of CUDA has failed its cell: the next one goes on, however often."""
    import headstart.comparing.team as team

    cells = [SimpleNamespace(name=f"c{n}") for n in range(5)]
    work = SimpleNamespace(folder=tmp_path, cells=cells, measure={"sets": {"a": {}}, "speed": {"enabled": False}})
    made = team.Team(work, _silent(), [None], 1)  # type: ignore[arg-type]
    (place,) = made.places
    started: list[int] = []
    monkeypatch.setattr(made, "_start", lambda place: started.append(1))
    place.process = SimpleNamespace(poll=lambda: 3, returncode=team.LOST_CODE)  # type: ignore[assignment]
    for _ in cells:
        made._look(place, "train")
    assert len(started) == 5 and not place.over
    place.process.returncode = 1  # it cannot even begin
    for _ in range(team.IDLE):
        made._look(place, "train")
    with pytest.raises(HeadstartError, match="process 0 ended with exit code 1"):
        made._look(place, "train")


def test_what_every_process_is_at_is_shown(tmp_path: Path) -> None:
    import headstart.comparing.team as team

    cells = [SimpleNamespace(name=f"c{n}") for n in range(3)]
    work = SimpleNamespace(folder=tmp_path, cells=cells, measure={"sets": {"a": {}}, "speed": {"enabled": False}})
    made = team.Team(work, _silent(), [None], 2)  # type: ignore[arg-type]
    (tmp_path / "workers").mkdir()
    assert made._counted("train") == (0, 3, "")
    logs = ["train: 2 of 9 steps, 5 s left  loss 3.1\ntrain: 3 of", f"{'x' * 9000}\nloading …\n"]
    for number, said in enumerate(logs):
        (tmp_path / f"workers/{number}.json").write_text(json.dumps({"cell": f"c{number + 1}", "phase": "train"}))
        (tmp_path / f"workers/{number}.log").write_text(said)
    (tmp_path / "cells/c0").mkdir(parents=True)
    (tmp_path / "cells/c0/cost.json").write_text("{}")
    assert made._counted("train") == (1, 3, "c1: train: 2 of 9 steps, 5 s left  c2: loading …")
    made.failures.add(cells[0], "train", "Error", "why")  # type: ignore[arg-type]
    assert made._counted("measure") == (0, 3, "1 failed  c1: train: 2 of 9 steps, 5 s left  c2: loading …")


def test_seconds_of_cells_whose_features_differ_are_not_equal() -> None:
    rows = [{"cell": "a", "features": "memory"}, {"cell": "b", "features": "online"}, {"cell": "c", "features": None}]
    seconds = SimpleNamespace(notes=["x"], budget={"kind": "seconds", "value": 5})
    steps = SimpleNamespace(notes=[], budget={"kind": "steps", "value": 5})
    assert "those of the other cell before: set" in notes_of(seconds, rows[:2])[1]  # type: ignore[arg-type]
    kept, said = notes_of(seconds, rows)  # type: ignore[arg-type]
    assert kept == "x" and said.startswith("the seconds are not equal: the target's features of b were made within")
    assert notes_of(seconds, rows[1:2]) == ["x"] and notes_of(steps, rows) == []  # type: ignore[arg-type]


def test_prompts_of_several_sets_are_timed_once(comparison: Path) -> None:
    sets = "measure.sets={a: {data: [x.jsonl, y.jsonl]}, b: {data: x.jsonl, temperature: 1}, c: {}, held_out: {}}"
    config, settings, path = load_comparison(str(comparison), [sets])
    recipe = make_cells(config, settings, path)[0].load(Path("f"))
    measured = {**asdict(config.measure), "sets": config.sets, "cycle_parts": False}
    assert eval_settings(recipe, measured, "speed", Path("held")).data == ["held", "x.jsonl", "y.jsonl"]
    assert eval_settings(recipe, measured, "b", Path("held")).data == "x.jsonl"
    assert eval_settings(recipe, measured, "c", Path("held")).data == "held"


def test_names_of_cells() -> None:
    assert cell_name("a/b", {"data.sources[0].limit": 8, "head.loss": "lk"}, 3) == "a_b-limit=8-loss=lk-s3"
    assert len(cell_name("x" * 300, {}, 0)) < 130


def test_what_is_left_to_the_memory_is_chosen_once(headstart: Callable, comparison: Path, tmp_path: Path) -> None:
    words = ("data.pack_tokens=auto", "data.features=auto", "seeds=[0, 1]", "measure.speed.enabled=false",
             "cells=[{name: plain}]", "settings.data={distill: {prompts: []}}")  # fmt: skip
    plan = headstart("compare", comparison, *words, "--dry-run", "--json").json
    for cell in plan["cells"]:
        chosen = dict(text.split("=", 1) for text in cell["settings"] if "=auto" not in text)
        assert chosen["data.features"] == "memory" and int(chosen["data.pack_tokens"]) >= 256
    result = headstart("compare", comparison, *words, "--json")
    assert result.code == 0, result.err
    cells = Work.read(tmp_path / "sides/work.json").cells
    assert cells[0].auto == cells[1].auto and any(text.startswith("data.pack_tokens=") for text in cells[0].auto)
    # the next start keeps the choice, whatever is free then
    small = cells[0].auto[0].replace("data.pack_tokens=", "data.pack_tokens=1")
    path = tmp_path / "sides/work.json"
    path.write_text(path.read_text().replace(cells[0].auto[0], small))
    plan = headstart("compare", comparison, *words, "--dry-run", "--json").json
    assert all(small in cell["settings"] for cell in plan["cells"])


def test_features_are_made_once_for_cells_of_one_seed(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []
    extract = memory.extract
    monkeypatch.setattr(
        memory, "extract", lambda target, samples, spec: made.append(spec.layer_ids) or extract(target, samples, spec)
    )
    cells = "cells=[{name: plain}, {name: deep, settings: {head.depth: 3}}, {name: low, settings: LOW}]"
    cells = cells.replace("LOW", "{head.feature_layers: [1, 2, 3]}")
    words = ("data.features=memory", "measure.speed.enabled=false", cells)
    result = headstart("compare", comparison, *words, "--json")
    assert result.code == 0, result.err
    # as often as the layers change: for each seed once for the first two cells, once for the third
    changes = [layers for n, layers in enumerate(made) if n == 0 or made[n - 1] != layers]
    assert len(changes) == 4 and changes[1] == changes[3] == (1, 2, 3) and changes[0] == changes[2] != (1, 2, 3)
    passes = [made.count(layers) for layers in changes[:2]]
    alone = headstart(
        "compare", comparison, "data.features=memory", "measure.speed.enabled=false", "cells=[{name: plain}]",
        f"folder={tmp_path / 'alone'}", "--json",
    )  # fmt: skip
    assert alone.code == 0 and made.count(changes[0]) == 2 * passes[0]
    # and the head is the one that is trained without others before it
    heads = [tmp_path / place / "cells/plain-s1/head/model.safetensors" for place in ("sides", "alone")]
    assert heads[0].read_bytes() == heads[1].read_bytes()


def test_numbers_of_an_earlier_head_are_no_row(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.comparing.work import Worker

    words = ("compare", comparison, "seeds=[0]", "measure.speed.enabled=false")
    assert headstart(*words).code == 0 and len(rows_of(tmp_path / "sides")) == 2
    measure = Worker.measure

    def stopping(self: Worker, name: str, run: Run) -> None:
        if run.recipe.name == "rate-lr=0.01-s0":
            raise KeyboardInterrupt
        measure(self, name, run)

    monkeypatch.setattr(Worker, "measure", stopping)
    assert headstart(*words, "train.clip_norm=0.1").code == 130  # both train anew, one is measured anew
    values = json.loads((tmp_path / "sides/compare.json").read_text())
    assert values["unfinished"] == ["rate-lr=0.01-s0"]
    assert [(row["cell"], "tau_held_out" in row) for row in values["rows"]] == [
        ("plain-s0", True), ("rate-lr=0.01-s0", False)
    ]  # fmt: skip
