"""The line of τ over data and time: what was put into synthetic rows comes out, and a plan says it only where it is
measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headstart.plan as plan
from headstart.heads.errors import DataError
from headstart.heads.families import FAMILIES
from headstart.scaling_line import Line, fit_line, main, more_data, packaged_lines, save_lines


def rows(head: str = "eagle3", noise: float = 0.0, data=(2048, 8192, 32768), times=(75, 290, 580)) -> list[dict]:
    draw = np.random.default_rng(0)
    return [
        {"head": head, "conversations": n, "train_seconds": s + 0.7, "card": "A", "git_revision": "r1",
         "tau_mix": 0.4 + 0.11 * math.log2(n) + 0.07 * math.log2(s + 0.7) + noise * draw.standard_normal()}
        for n in data for s in times
    ]  # fmt: skip


def test_the_slopes_that_rows_were_made_with_come_out() -> None:
    line = fit_line([*rows(), *rows("dspark", data=(1, 2))], "eagle3", "t", "mix", "docs/results")
    assert (line.at_one, line.per_double_data, line.per_double_time) == pytest.approx((0.4, 0.11, 0.07))
    assert line.residual == pytest.approx(0, abs=1e-9) and line.rows == 9
    assert line.conversations == (2048, 32768) and line.seconds == (75.7, 580.7)
    assert line.gain(4) == pytest.approx(0.22) and (line.card, line.git_revision) == ("A", "r1")
    noisy = fit_line(rows(noise=0.02), "eagle3", "t", "mix", "")
    assert noisy.per_double_data == pytest.approx(0.11, abs=0.02) and 0.005 < noisy.residual < 0.03


def test_what_was_not_varied_has_no_slope() -> None:
    timed = fit_line(rows(data=(8192,), times=(75, 150, 290, 580)), "eagle3", "t", "mix", "")
    assert timed.per_double_data is None and timed.gain(4) is None
    assert timed.per_double_time == pytest.approx(0.07)
    assert more_data("eagle3", "t", 8192, [timed]) is None
    for wrong, said in (
        (rows()[:3], "3 rows of eagle3 with tau_mix, expected 4"),
        ([{**row, "conversations": None} for row in rows()], "conversations: found None, expected a number above 0"),
        ([{**row, "train_seconds": 0} for row in rows()], "train_seconds: found 0, expected a number above 0"),
        (rows(data=(8192, 8200), times=(290, 291)), "neither conversations nor seconds differ"),
        ([row for row in rows(times=(75, 300)) if row["conversations"] == row["train_seconds"]] or
         [{**row, "train_seconds": row["conversations"]} for row in rows(times=(75, 290))], "grow together"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=said):
            fit_line(wrong, "eagle3", "t", "mix", "")


def test_a_sentence_stands_only_near_what_was_measured() -> None:
    line = fit_line(rows(), "eagle3", "smol", "mix", "docs/results/scaling rows")
    said = more_data("eagle3", "smol", 8192, [line])
    assert said is not None and said.startswith("another 4 × data: about +0.2 accepted length")
    assert "9 measurements on mix" in said and "2,048 to 32,768 conversations; docs/results/scaling rows" in said
    assert "another target (smol)" in str(more_data("eagle3", "other", 8192, [line]))
    assert more_data("dspark", "smol", 8192, [line]) is None and more_data("eagle3", "smol", 8192, []) is None
    # 4 × the data may go four times beyond the largest measurement, and not further
    assert more_data("eagle3", "smol", 32768, [line]) and more_data("eagle3", "smol", 32769, [line]) is None
    assert more_data("eagle3", "smol", 128, [line]) and more_data("eagle3", "smol", 127, [line]) is None
    nearer = replace(line, target="other", per_double_data=0.5)
    assert "+1.0" in str(more_data("eagle3", "other", 8192, [line, nearer]))


def test_lines_are_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, place = tmp_path / "compare.json", tmp_path / "scaling.json"
    source.write_text(json.dumps({"rows": [*rows(), *rows("dspark")]}))
    words = [str(source), "--set", "mix", "--target", "t", "--source", "here", "--into", str(place)]
    assert main(words) == 0 and main(words) == 0
    lines = packaged_lines(place)
    assert [line.head for line in lines] == ["dspark", "eagle3"] and isinstance(lines[0].conversations, tuple)
    assert lines[1] == fit_line(rows(), "eagle3", "t", "mix", "here")
    assert json.loads(capsys.readouterr().out.split("\n]\n")[0] + "\n]")[0]["head"] == "dspark"
    place.write_text('{"schema": 1, "lines": [{"head": "eagle3"}]}')
    with pytest.raises(DataError, match="expected"):
        packaged_lines(place)
    with pytest.raises(DataError, match="expected a comparison's compare.json, or a list of rows"):
        main([str(place), *words[1:]])


def test_packaged_lines_come_from_measurements() -> None:
    for line in packaged_lines():
        assert line.head in FAMILIES and line.rows >= 4 and line.source and line.git_revision != "unknown"


def test_a_plan_says_what_was_measured(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", recipe, "data.distill.prompts=[]")
    monkeypatch.setattr(plan, "packaged_lines", lambda: [])
    assert "another 4 ×" not in headstart(*words).out
    line: Line = fit_line(rows(data=(8, 16, 32)), "eagle3", "t", "mix", "docs/results/x.json")
    save_lines([line], tmp_path / "lines.json")
    monkeypatch.setattr(plan, "packaged_lines", lambda: packaged_lines(tmp_path / "lines.json"))
    out = " ".join(headstart(*words).out.split())
    assert "note: another 4 × data: about +0.2 accepted length" in out and "docs/results/x.json" in out
