"""What a report says of a head's training: curves of metrics.jsonl and numbers of data/report.json, nothing private."""

from __future__ import annotations

import json
from pathlib import Path

from headstart.training_record import POINTS, measured_on_training, training_record


def run_dir(place: Path, records: list[object], data: object) -> Path:
    for name in ("steps", "head", "data"):
        (place / name).mkdir(parents=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (place / "metrics.jsonl").write_text("\n".join(lines))
    (place / "data/report.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return place / "head"


def test_curves_hold_what_was_logged(tmp_path: Path) -> None:
    records: list[object] = [
        {"step": 1, "train/loss": 9.5, "train/acc_1": 0.25, "train/walked_tau": 1.25, "lr": 1e-4, "mfu": 0.1,
         "seconds": 0.5},
        {"step": 2, "train/loss": None, "train/acc_1": 0.5, "train/walked_tau": 1.5, "lr": 2e-4, "seconds": 1.25},
        {"step": 2, "valid/loss": 8.5, "valid/loss_1": 4.25, "valid/tau": 1.75, "valid/coverage": 1.0},
        '{"step": 3, "train/lo',
    ]  # fmt: skip
    found = training_record(run_dir(tmp_path, records, {}))
    assert found == {
        "curves": {
            "lr": [[1, 1e-4], [2, 2e-4]], "train/acc_1": [[1, 0.25], [2, 0.5]], "train/loss": [[1, 9.5]],
            "train/walked_tau": [[1, 1.25], [2, 1.5]], "valid/loss": [[2, 8.5]], "valid/loss_1": [[2, 4.25]],
            "valid/tau": [[2, 1.75]],
        },
        "steps": 2, "seconds": 1.25, "data": {},
    }  # fmt: skip


def test_prompts_of_the_training_are_known_by_their_file(tmp_path: Path) -> None:
    head = run_dir(tmp_path / "run", [], {})
    assert not measured_on_training(head, [str(tmp_path / "a.jsonl")]), "a run without its recipe"
    recipe = tmp_path / "run/recipe.yaml"
    recipe.write_text(
        f"data:\n  sources: [{{path: {tmp_path}/logs}}, {{dataset: a/b}}]\n"
        f"  distill: {{prompts: [{{path: {tmp_path}/x/../a.jsonl}}]}}\n"
    )
    for name, trained in (("a.jsonl", True), ("b.jsonl", False), ("logs/day/1.jsonl", True), ("logs2.jsonl", False)):
        assert measured_on_training(head, [str(tmp_path / name)]) is trained, name
    assert measured_on_training(head, ["elsewhere.jsonl", str(tmp_path / "a.jsonl")])
    assert not measured_on_training(None, [str(tmp_path / "a.jsonl")])
    for broken in ("data: 3\n", "[", "data: {sources: [7]}\n"):
        recipe.write_text(broken)
        assert not measured_on_training(head, [str(tmp_path / "a.jsonl")])


def test_long_curves_are_thinned_and_keep_their_end(tmp_path: Path) -> None:
    found = training_record(run_dir(tmp_path, [{"step": n, "lr": n / 8} for n in range(1, 5001)], {}))
    assert found is not None
    points = found["curves"]["lr"]
    assert len(points) == POINTS and points[-1] == [5000, 625.0] and all(value == step / 8 for step, value in points)


def test_data_is_numbers_alone(tmp_path: Path) -> None:
    data = {
        "train": {"conversations": 7, "tokens": 90, "dropped": {"my file": 1}, "broken": ["secret"]},
        "held_out": None,
        "sources": [{"name": "secret.jsonl", "read": 7}],
        "statistics": {
            "samples": 7, "tasks": {"secret": 7}, "length": {"min": 1, "max": 30},
            "scripts": {"shares": {"Latin": 1.0}},
            "duplicates": {"mode": "exact", "exact": 0}, "own_choice": {"share": 0.5, "foreign": False},
        },
    }  # fmt: skip
    found = training_record(run_dir(tmp_path, [], data))
    assert found is not None and "secret" not in json.dumps(found) and "my file" not in json.dumps(found)
    assert found["data"] == {
        "train": {"conversations": 7, "tokens": 90},
        "statistics": {
            "samples": 7, "length": {"min": 1, "max": 30}, "scripts": {"shares": {"Latin": 1.0}},
            "duplicates": {"exact": 0}, "own_choice": {"share": 0.5},
        },
    }  # fmt: skip


def test_damaged_files_and_heads_outside_of_runs(tmp_path: Path) -> None:
    nothing = {"curves": {}, "steps": None, "seconds": None, "data": {}}
    assert training_record(run_dir(tmp_path / "a", ["[1]", "null", '{"step": "x"}', "\x00"], "{")) == nothing
    assert training_record(run_dir(tmp_path / "b", [], [1, 2])) == nothing
    (tmp_path / "alone").mkdir()
    assert training_record(tmp_path / "alone") is None and training_record(None) is None
