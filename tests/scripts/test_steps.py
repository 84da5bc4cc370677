"""Step markers: what is skipped, continued, done again, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.steps import Steps, changed


class Work:
    """Counts how often it ran and writes its output."""

    def __init__(self, output: Path, fail: bool = False):
        self.output, self.fail, self.runs = output, fail, 0

    def __call__(self) -> dict:
        self.runs += 1
        if self.fail:
            raise RuntimeError("killed")
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "made.txt").write_text(str(self.runs))
        return {"runs": self.runs}


def test_done_once(tmp_path: Path) -> None:
    said: list[str] = []
    steps, work = Steps(tmp_path, said.append), Work(tmp_path / "head")
    assert steps.run("train", {"lr": 1e-3, "sizes": (1, 2)}, [work.output], work) == {"runs": 1}
    assert steps.run("train", {"sizes": [1, 2], "lr": 0.001}, [work.output], work) == {"runs": 1}
    assert said[0] == "train: starts" and "finished before" in said[1] and work.runs == 1


def test_a_failed_step_continues(tmp_path: Path) -> None:
    said: list[str] = []
    steps, work = Steps(tmp_path, said.append), Work(tmp_path / "head", fail=True)
    with pytest.raises(RuntimeError):
        steps.run("train", {"a": 1}, [work.output], work)
    work.fail = False
    (tmp_path / "checkpoints").mkdir()
    steps.run("train", {"a": 1}, [work.output], work, leftovers=[tmp_path / "checkpoints"])
    assert said[-1] == "train: continues" and (tmp_path / "checkpoints").exists()


def test_changed_inputs_set_the_old_work_aside(tmp_path: Path) -> None:
    said: list[str] = []
    steps, work = Steps(tmp_path, said.append), Work(tmp_path / "head")
    cache = tmp_path / "features"
    for value in (1, 2, 3):
        cache.mkdir(exist_ok=True)
        (cache / "stale").touch()
        steps.run("train", {"a": {"b": value}}, [work.output], work, caches=[cache])
        (cache / "stale").exists() or cache.mkdir(exist_ok=True)
    assert "its inputs changed (a.b: 1 → 2)" in said[1]
    assert (tmp_path / "previous/1-train/head/made.txt").read_text() == "1"
    assert (tmp_path / "previous/2-train/head/made.txt").read_text() == "2"
    assert (tmp_path / "head/made.txt").read_text() == "3"
    assert not (cache / "stale").exists()


def test_changed_inputs_of_an_unfinished_step_start_afresh(tmp_path: Path) -> None:
    steps, work = Steps(tmp_path, lambda message: None), Work(tmp_path / "head", fail=True)
    checkpoints = tmp_path / "checkpoints"
    with pytest.raises(RuntimeError):
        steps.run("train", {"a": 1}, [work.output], work, leftovers=[checkpoints])
    checkpoints.mkdir()
    work.fail = False
    steps.run("train", {"a": 2}, [work.output], work, leftovers=[checkpoints])
    assert not checkpoints.exists() and (tmp_path / "previous/1-train/checkpoints").exists()


def test_a_missing_output_is_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    steps, work = Steps(tmp_path, said.append), Work(tmp_path / "head")
    steps.run("train", {}, [work.output], work)
    (work.output / "made.txt").unlink()
    work.output.rmdir()
    assert steps.run("train", {}, [work.output], work) == {"runs": 2}
    assert "head is gone" in said[-1]


def test_differences_are_named() -> None:
    old = {"a": 1, "b": {"c": [1, 2]}, "gone": "x"}
    assert list(changed(old, {"a": 1, "b": {"c": [1, 3]}, "new": None})) == ["b.c[1]: 2 → 3", 'gone: "x" → null']
