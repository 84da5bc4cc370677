"""Step markers: what is skipped, continued, done again, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.directory_lock import locked
from headstart.heads.errors import StorageError
from headstart.pipeline.markers import Begin, Markers, changed


class Work:
    """Counts how often it ran and writes its output."""

    def __init__(self, output: Path, fail: bool = False):
        self.output, self.fail, self.runs = output, fail, 0

    def __call__(self, begin: Begin) -> dict:
        begin()
        self.runs += 1
        if self.fail:
            raise RuntimeError("killed")
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "made.txt").write_text(str(self.runs))
        return {"runs": self.runs}


def test_done_once(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "head")
    assert markers.do("train", {"lr": 1e-3, "sizes": (1, 2)}, [work.output], work) == {"runs": 1}
    assert markers.do("train", {"sizes": [1, 2], "lr": 0.001}, [work.output], work) == {"runs": 1}
    assert said[0] == "train: starts" and "finished before" in said[1] and work.runs == 1


def test_a_setting_that_an_older_version_did_not_know_is_no_change(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "answers")
    markers.do("distill", {"settings": {"tokens": 8}}, [work.output], work)
    markers.do("distill", {"settings": {"tokens": 8, "max_seconds": None}}, [work.output], work)
    assert "finished before" in said[-1] and work.runs == 1
    markers.do("distill", {"settings": {"tokens": 8, "max_seconds": 5}}, [work.output], work)
    assert "max_seconds: null → 5" in said[-2] and work.runs == 2
    work.fail = True
    for inputs in ({"data": {"a": 1}, "lr": 1}, {"data": {"a": 1, "new": None}, "lr": 2}):
        with pytest.raises(RuntimeError):
            markers.do("train", inputs, [tmp_path / "head"], work, lasting=lambda inputs: inputs["data"])
    assert said[-1] == "train: continues with other settings (lr: 1 → 2)"


def test_a_failed_step_continues(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "head", fail=True)
    with pytest.raises(RuntimeError):
        markers.do("train", {"a": 1}, [work.output], work)
    work.fail = False
    (tmp_path / "checkpoints").mkdir()
    markers.do("train", {"a": 1}, [work.output], work, leftovers=[tmp_path / "checkpoints"])
    assert said[-1] == "train: continues" and (tmp_path / "checkpoints").exists()


def test_changed_inputs_set_the_old_work_aside(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "head")
    cache = tmp_path / "features"
    for value in (1, 2, 3):
        cache.mkdir(exist_ok=True)
        (cache / "stale").touch()
        markers.do("train", {"a": {"b": value}}, [work.output], work, caches=[cache])
        (cache / "stale").exists() or cache.mkdir(exist_ok=True)
    assert "its inputs changed (a.b: 1 → 2)" in said[1]
    assert (tmp_path / "previous/1-train/head/made.txt").read_text() == "1"
    assert (tmp_path / "previous/2-train/head/made.txt").read_text() == "2"
    assert (tmp_path / "head/made.txt").read_text() == "3"
    assert not (cache / "stale").exists()


def test_changed_inputs_of_an_unfinished_step_start_afresh(tmp_path: Path) -> None:
    markers, work = Markers(tmp_path, lambda message: None), Work(tmp_path / "head", fail=True)
    checkpoints = tmp_path / "checkpoints"
    with pytest.raises(RuntimeError):
        markers.do("train", {"a": 1}, [work.output], work, leftovers=[checkpoints])
    checkpoints.mkdir()
    work.fail = False
    markers.do("train", {"a": 2}, [work.output], work, leftovers=[checkpoints])
    assert not checkpoints.exists() and (tmp_path / "previous/1-train/checkpoints").exists()


def test_an_unfinished_step_goes_on_with_settings_that_do_not_spoil_what_it_has_made(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "head", fail=True)
    checkpoints = tmp_path / "checkpoints"

    def run(lr: float, data: str) -> None:
        markers.do(
            "train", {"lr": lr, "data": data}, [work.output], work, leftovers=[checkpoints],
            lasting=lambda inputs: inputs["data"],
        )  # fmt: skip

    with pytest.raises(RuntimeError):
        run(1.0, "a")
    checkpoints.mkdir()
    with pytest.raises(RuntimeError):
        run(0.5, "a")
    assert said[-1] == "train: continues with other settings (lr: 1.0 → 0.5)" and checkpoints.exists()
    work.fail = False
    run(0.5, "b")
    assert "done again, its inputs changed" in said[-2] and (tmp_path / "previous/1-train/checkpoints").exists()
    run(0.25, "b")  # finished: another rate is another head
    assert "its inputs changed (lr: 0.5 → 0.25)" in said[-2] and (tmp_path / "previous/2-train/head").exists()


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_a_mistake_does_not_cost_what_was_there(tmp_path: Path, stop: type[BaseException]) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "export")
    markers.do("export", {"engines": ["vllm"]}, [work.output], work)

    def mistaken(begin: Begin) -> dict:
        raise stop

    def unlucky(begin: Begin) -> dict:
        begin()
        assert not work.output.exists()
        raise stop

    marker = (tmp_path / "steps/export.json").read_text()
    for refused in (mistaken, unlucky):
        with pytest.raises(stop):
            markers.do("export", {"engines": ["tgi"]}, [work.output], refused)
        assert (work.output / "made.txt").read_text() == "1" and list(tmp_path.glob("previous/*")) == []
        assert json.loads((tmp_path / "steps/export.json").read_text()) == json.loads(marker)
        assert ("what was there before is back in its place" in said[-1]) == (refused is unlucky)
    markers.do("export", {"engines": ["vllm"]}, [work.output], work)
    assert "finished before" in said[-1]

    def torn(begin: Begin) -> dict:
        work(begin)
        raise stop

    with pytest.raises(stop):
        markers.do("export", {"engines": ["tgi"]}, [work.output], torn, worth=lambda: False)
    assert (work.output / "made.txt").read_text() == "1" and list(tmp_path.glob("previous/*")) == []
    with pytest.raises(stop):
        markers.do("export", {"engines": ["tgi"]}, [work.output], torn)
    assert (work.output / "made.txt").read_text() == "3"
    assert (tmp_path / "previous/1-export/export/made.txt").read_text() == "1"


def test_what_is_ahead_is_asked_once_before_the_first_step_that_is_not_done(tmp_path: Path) -> None:
    asked: list[str] = []

    def markers(refuses: bool) -> Markers:
        def check() -> None:
            asked.append("asked")
            if refuses:
                raise StorageError("no")

        return Markers(tmp_path, lambda message: None, check)

    work = Work(tmp_path / "head")
    with pytest.raises(StorageError):
        markers(True).do("train", {"a": 1}, [work.output], work)
    assert work.runs == 0 and list(tmp_path.iterdir()) == []
    one = markers(False)
    one.do("train", {"a": 1}, [work.output], work)
    one.do("eval", {"a": 1}, [tmp_path / "report"], work)
    assert len(asked) == 2 and work.runs == 2
    markers(True).do("train", {"a": 1}, [work.output], work)  # nothing to do, nothing to ask
    assert len(asked) == 2


def test_two_commands_do_not_write_to_one_place(tmp_path: Path) -> None:
    with locked(tmp_path / "a", "--out"):
        with pytest.raises(StorageError, match=r"a: another headstart command is working there; .* with --out"):
            with locked(tmp_path / "a", "--out"):
                pass
        with locked(tmp_path / "b", "--out"):
            pass
    with locked(tmp_path / "a", "--out"):
        pass
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/below", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(StorageError, match="--out"), locked(place, "--out"):
            pass


def test_a_step_that_was_done_goes_on_where_that_only_adds_to_it(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "answers")

    def run(seconds: float, prompts: str) -> None:
        inputs = {"seconds": seconds, "prompts": prompts}
        markers.do("distill", inputs, [work.output], work, lasting=lambda inputs: inputs["prompts"], extends=True)

    run(1.0, "a")
    run(2.0, "a")
    assert said[-1] == "distill: continues with other settings (seconds: 1.0 → 2.0)"
    assert not (tmp_path / "previous").exists() and work.runs == 2
    run(2.0, "a")
    assert "finished before" in said[-1]
    run(2.0, "b")
    assert (tmp_path / "previous/1-distill/answers").exists()


def test_a_step_is_done_again_when_asked_to(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "head")
    for _ in range(3):
        markers.do("train", {"a": 1}, [work.output], work, again="as asked (train.resume=false)")
    assert said[1] == "train: done again, as asked (train.resume=false)"
    assert [(tmp_path / f"previous/{n}-train/head/made.txt").read_text() for n in (1, 2)] == ["1", "2"]
    assert (tmp_path / "head/made.txt").read_text() == "3"


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p.write_text('{"step": "tr'),
        lambda p: p.write_text("[]"),
        lambda p: p.write_text("{}"),
        lambda p: p.write_text('{"status": "done", "inputs": {"a": 1}}'),
        None,
    ],
)
def test_a_marker_that_cannot_be_read_is_told_with_the_remedy(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    markers, work = Markers(tmp_path, lambda message: None), Work(tmp_path / "head")
    markers.do("train", {"a": 1}, [work.output], work)
    marker = tmp_path / "steps/train.json"
    if harm is None:
        marker.unlink()
        marker.mkdir()
    else:
        harm(marker)
    with pytest.raises(StorageError, match=r"steps/train.json: found .*, expected a step's marker .* Move it away"):
        markers.do("train", {"a": 1}, [work.output], work)
    marker.rename(tmp_path / "away")
    assert markers.do("train", {"a": 1}, [work.output], work) == {"runs": 2}


def test_a_missing_output_is_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    markers, work = Markers(tmp_path, said.append), Work(tmp_path / "head")
    markers.do("train", {}, [work.output], work)
    (work.output / "made.txt").unlink()
    work.output.rmdir()
    assert markers.do("train", {}, [work.output], work) == {"runs": 2}
    assert "head is gone" in said[-1]


def test_differences_are_named() -> None:
    old = {"a": 1, "b": {"c": [1, 2]}, "gone": "x"}
    assert list(changed(old, {"a": 1, "b": {"c": [1, 3]}, "new": None})) == ["b.c[1]: 2 → 3", 'gone: "x" → null']
