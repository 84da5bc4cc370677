"""kill -9 at random moments of a distillation leaves no trace, and one that would is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headstart.bench import kill_points as module
from headstart.bench.kill_points import kill_points
from headstart.data.distilling import distill as distillation
from headstart.data.distilling.answer_file import AnswerFile

#: with this seed each kill comes after some answers were reported and before the last one, on a busy machine too
EARLY = 9


@pytest.fixture(autouse=True)
def few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = module.small_prompts(14)
    monkeypatch.setattr(module, "small_prompts", lambda: prompts)


def test_no_kill_leaves_a_trace(tmp_path: Path) -> None:
    kills = kill_points(3, 1, tmp_path)
    assert (kills.points, kills.ok, kills.faults) == (3, 3, [])
    assert any(0 < count for count in kills.found)
    ends = {line.count('"finish_reason":"stop"') for line in (tmp_path / "whole.jsonl").read_text().splitlines()}
    assert len(ends) > 1  # some answers end by themselves


def test_answers_held_back_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, held = AnswerFile.add, []

    def late(self: AnswerFile, record: dict[str, Any]) -> None:
        held.append(record)
        if len(held) == 14:
            while held:
                add(self, held.pop(0))

    monkeypatch.setattr(AnswerFile, "add", late)
    kills = kill_points(2, EARLY, tmp_path)
    assert kills.ok < kills.points and "had been reported" in kills.faults[0]


def test_answers_asked_twice_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation.AnswerFile, "resume", lambda *_: {})
    kills = kill_points(2, EARLY, tmp_path)
    assert kills.ok < kills.points and any("are there twice" in fault for fault in kills.faults)
