"""kill -9 at the writes of every step of a run: the same command continues, and ends with the same bits.

A process is killed just before or just after one of the calls that make what it wrote count: fsync, replace, rename.
Killed before an fsync, it loses the last bytes of that file, as a write that was cut in two does.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from train_fakes import forked

from headstart.cli import main
from headstart.data.distilling import answer_file
from headstart.heads.files import sha256_file

#: the step that a write belongs to, by the path within the run directory
STEPS = {
    "distillation": r"data/distilled\.jsonl.*|steps/distill\.json",
    "features": r"features/.*|steps/features\.json",
    "training": r"(checkpoints|head)/.*|steps/train\.json|data/(report\.json|held_out\.jsonl)",
    "evaluation": r"report\..*|steps/eval\.json",
    "export": r"export/.*|steps/export\.json",
}
CALLS = ("fsync", "replace", "rename")
LOST = 7
#: fields of report.json that say how long something took, in numbers or words, or when and where it ran
TIMES = re.compile(r"^says$|timing|seconds|per_s|speedup|latency|_ms|created|memory|cost")


class Writes:
    """Counts the calls that write, in this process; at the chosen one the kernel ends it, as kill -9 does."""

    def __init__(self, run: Path, step: str = "", number: int = -1, after: bool = False):
        self.run, self.step, self.number, self.after, self.seen = run, step, number, after, 0
        for name in CALLS:
            setattr(os, name, self.watched(name, getattr(os, name)))

    def watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*arguments: Any) -> Any:
            place = Path(os.readlink(f"/proc/self/fd/{arguments[0]}")) if name == "fsync" else Path(arguments[1])
            step = self.step_of(place)
            chosen = step == self.step and self.seen == self.number
            self.seen += step == self.step
            if chosen and not self.after:
                if name == "fsync" and place.is_file():
                    os.truncate(place, max(place.stat().st_size - LOST, 0))
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments)
            if chosen:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return watching

    def step_of(self, place: Path) -> str | None:
        if not place.is_relative_to(self.run):
            return None
        name = re.sub(r"(^|/)\.([^/]+?)\.\d+\.(tmp|old)", r"\1\2", place.relative_to(self.run).as_posix())
        return next((step for step, pattern in STEPS.items() if re.fullmatch(pattern, name)), None)


def started(recipe: Path, run: Path, *point: Any) -> ForkProcess:
    def work() -> None:
        answer_file.SYNC_S = 0.0  # every answer is a write to be killed at
        Writes(run, *point)
        os._exit(main(["run", str(recipe), *SETTINGS, f"run_dir={run}"]))

    return forked(work, run.with_name(f"{run.name}.stderr"))


def numbers(value: Any, name: str) -> dict[str, Any]:
    """A report, flat, without what depends on the clock or the machine."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value}
    items = [(key, item) for key, item in value.items() if not TIMES.search(str(key))]
    return {k: v for key, item in items for k, v in numbers(item, f"{name}.{key}").items()}


#: step → (number of the write within that step and process, whether it is still made): each kill is of one process
POINTS = {
    "distillation": [(0, False), (1, True), (2, False), (3, True), (4, False)],
    "features": [(1, False), (3, True), (4, False), (9, True), (6, False)],
    "training": [(1, True), (9, False), (17, True), (24, False), (11, True), (30, False)],
    "evaluation": [(1, True), (2, False), (3, True), (6, False)],
    "export": [(1, True), (2, False), (4, True), (6, False), (8, True)],
}
SETTINGS = """
data.features=stored data.shard_tokens=256 data.pack_tokens=128 data.distill.batch_size=1 data.distill.max_new_tokens=4
train.epochs=1 train.tau_prompts=1 train.tau_tokens=4 eval.limit=2 eval.max_new_tokens=4 export.max_shard_size=40KB
""".split()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_kills_in_every_step_leave_no_trace(recipe: Path, tmp_path: Path) -> None:
    records = [{"id": f"p{n}", "prompt": f"Hello {n}"} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    whole, killed = tmp_path / "whole/run", tmp_path / "kill/run"
    for place in (whole, killed):
        place.parent.mkdir()
    finish(started(recipe, whole), whole)
    kills: Counter[str] = Counter()
    for step, points in POINTS.items():
        for point in points:
            child = started(recipe, killed, step, *point)
            child.join()
            assert child.exitcode in (0, -signal.SIGKILL), f"{step} {point}: {said(killed)}"
            kills[step] += child.exitcode == -signal.SIGKILL
    assert kills == {step: len(points) for step, points in POINTS.items()}  # each of them came to pass
    finish(started(recipe, killed), killed)
    ours, theirs = made(killed), made(whole)
    assert {n: (ours.get(n), theirs.get(n)) for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)} == {}
    assert [path for path in killed.rglob("*") if path.suffix in (".tmp", ".old")] == []


def said(run: Path) -> str:
    return run.with_name("run.stderr").read_text()


def finish(child: ForkProcess, run: Path) -> None:
    child.join(timeout=200)
    assert child.exitcode == 0, said(run)


def made(run: Path) -> dict[str, Any]:
    """What a run leaves behind: bytes of its files, and numbers where a file also says how long things took."""
    files = [run / "data/distilled.jsonl", run / "data/held_out.jsonl", run / "head/config.json"]
    files += [*(run / "features").rglob("*.safetensors"), *(run / "head").glob("*.safetensors")]
    files += [run / "export/config.json", *(run / "export").glob("*.safetensors*")]
    values: dict[str, Any] = {str(path.relative_to(run)): sha256_file(path) for path in files}
    values |= numbers(json.loads((run / "report.json").read_text().replace(str(run), "")), "report.json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values["losses"] = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    for name in ("head", "export"):
        side = json.loads((run / name / "headstart.json").read_text())
        values[f"{name}/headstart.json"] = {key: side[key] for key in ("type", "layout", "config", "dims", "sha256")}
    return values
