"""Calibrations as files: in a head's side file, for SGLang, and as a plot."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads.errors import ConfigError, DataError, FormatError
from headstart.heads.files import read_json, write_json
from headstart.heads.formats.calibration import (
    Calibration,
    calibration_from_json,
    mean_error,
    read_calibration,
    save_calibration,
    sglang_sts,
)
from headstart.heads.formats.plots import draw_reliability
from headstart.heads.formats.sidecar import SCHEMA, SIDECAR, annotate, seal

POINTS = [[0.25, 0.5, 3], [0.75, 0.5, 1]]
SCALED = Calibration(
    "temperature", "confidence", temperatures=[1.5, 0.5], dataset="wikitext", num_samples=7,
    ece_before=[0.1, 0.2], ece_after=[0.01, 0.02], reliability_before=POINTS, reliability_after=[[0.5, 0.5, 4]],
)  # fmt: skip
BESIDE = Calibration(
    "logistic", "confidence", [1.5, 0.5], slope=0.7, biases=[-0.2, 0.1], dataset="wikitext", num_samples=7,
    ece_before=[0.1, 0.2], ece_after=[0.01, 0.02], ece_of_temperatures=[0.05, 0.06],
)  # fmt: skip
LOGISTIC = Calibration("logistic", "draft_probability", slope=0.7, biases=[-0.2, 0.1], dataset="ultrachat")


@pytest.fixture
def head(tmp_path: Path) -> Path:
    write_json(tmp_path / SIDECAR, seal({"schema": SCHEMA, "tuned": {"card": {}}}))
    return tmp_path


@pytest.mark.parametrize("calibration", [SCALED, LOGISTIC, BESIDE])
def test_side_file_gives_it_back_and_keeps_other_notes(head: Path, calibration: Calibration) -> None:
    assert read_calibration(head) is None
    save_calibration(calibration, head)
    assert read_calibration(head) == calibration
    assert read_json(head / SIDECAR)["tuned"] == {"card": {}}
    assert json.loads(json.dumps(calibration.to_json())) == calibration.to_json()


def test_probability_is_that_of_the_formula() -> None:
    logit_BK = torch.tensor([[0.6, -1.2]])
    expected = [1 / (1 + math.exp(-0.6 / 1.5)), 1 / (1 + math.exp(1.2 / 0.5))]
    assert SCALED.probability(logit_BK)[0].tolist() == pytest.approx(expected)
    expected = [1 / (1 + math.exp(-(0.7 * 0.6 - 0.2)))]
    assert LOGISTIC.probability(logit_BK[:, :1])[0].tolist() == pytest.approx(expected)
    assert [x.tolist() for x in SCALED.scale_and_bias()] == [pytest.approx([1 / 1.5, 2.0]), [0.0, 0.0]]
    assert [x.tolist() for x in LOGISTIC.scale_and_bias()] == [pytest.approx([0.7, 0.7]), pytest.approx([-0.2, 0.1])]
    # temperatures beside a logistic change nothing
    assert torch.equal(BESIDE.probability(logit_BK), LOGISTIC.probability(logit_BK))
    with pytest.raises(ConfigError, match="found 3 drafts, it was fitted for 2"):
        SCALED.probability(torch.zeros(1, 3))
    assert mean_error(POINTS) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (SCALED, {"kind": "isotonic"}, "calibration.kind is 'isotonic', expected temperature or logistic"),
        (SCALED, {"source": None}, "calibration.source is None"),
        (SCALED, {"temperatures": []}, "calibration.temperatures"),
        (SCALED, {"temperatures": [1.0, 0.0]}, "numbers above 0"),
        (SCALED, {"temperatures": [1.0, math.nan]}, "finite numbers"),
        (SCALED, {"temperatures": [1.0, True]}, "finite numbers"),
        (SCALED, {"slope": 1.0}, "calibration.slope is 1.0, expected None where the kind is temperature"),
        (SCALED, {"ece_after": [0.1]}, "calibration.ece_after is \\[0.1\\], expected 2 numbers"),
        (SCALED, {"ece_before": [0.1, 1.5]}, "from 0 to 1"),
        (SCALED, {"num_samples": -1}, "calibration.num_samples is -1"),
        (SCALED, {"dataset": 3}, "calibration.dataset is 3, expected a text"),
        (SCALED, {"reliability_after": [[0.5, 2.0, 1]]}, "calibration.reliability_after"),
        (SCALED, {"colour": 1}, "unknown field 'colour'"),
        (LOGISTIC, {"slope": None}, "calibration.slope is None, expected a finite number"),
        (LOGISTIC, {"biases": "many"}, "calibration.biases is 'many'"),
        (LOGISTIC, {"temperatures": [1.0, 1.0]}, "where the kind is logistic of draft_probability"),
        (LOGISTIC, {"ece_of_temperatures": [0.1, 0.1]}, "ece_of_temperatures is \\[0.1, 0.1\\], expected \\[\\]"),
        (SCALED, {"ece_of_temperatures": [0.1, 0.1]}, "expected \\[\\] where the kind is temperature"),
        (BESIDE, {"temperatures": [1.0]}, "calibration.temperatures is \\[1.0\\], expected 2 finite numbers"),
        (BESIDE, {"temperatures": [1.0, -1.0]}, "numbers above 0"),
        (BESIDE, {"ece_of_temperatures": [0.1, 2.0]}, "from 0 to 1"),
    ],
)
def test_a_damaged_one_is_refused(head: Path, base: Calibration, change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        calibration_from_json({**base.to_json(), **change}, "headstart.json")
    annotate(head, {"calibration": {**base.to_json(), **change}})  # sealed, so only the reader can tell
    with pytest.raises((FormatError, DataError), match="headstart.json"):
        read_calibration(head)


def test_a_calibration_of_an_earlier_version_loads() -> None:
    for calibration in (SCALED, LOGISTIC):
        value = calibration.to_json()
        del value["ece_of_temperatures"]
        assert calibration_from_json(value, "headstart.json") == calibration


def test_a_damaged_side_file_is_refused(head: Path) -> None:
    save_calibration(SCALED, head)
    side = read_json(head / SIDECAR)
    side["calibration"]["temperatures"][0] = 9.0
    write_json(head / SIDECAR, side)
    with pytest.raises(FormatError, match="was changed after it was written"):
        read_calibration(head)
    (head / SIDECAR).write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_calibration(head)
    with pytest.raises(FormatError, match="expected an object"):
        calibration_from_json([1], "headstart.json")
    with pytest.raises(FormatError, match="numbers above 0"):
        save_calibration(replace(SCALED, temperatures=[-1.0, 1.0]), head)


def test_sglangs_file() -> None:
    assert sglang_sts(SCALED, 2) == {
        "temperatures": [1.5, 0.5],
        "dataset": "wikitext",
        "num_samples": 7,
        "ece_before": [0.1, 0.2],
        "ece_after": [0.01, 0.02],
    }
    # the engine computes no logistic: the error in its file is that of the temperatures
    assert sglang_sts(BESIDE, 2) == {**sglang_sts(SCALED, 2), "ece_after": [0.05, 0.06]}
    with pytest.raises(ConfigError, match="found 2 temperatures and 3 drafts"):
        sglang_sts(SCALED, 3)
    for other in (LOGISTIC, replace(SCALED, source="draft_probability")):
        with pytest.raises(ConfigError, match="temperatures of a confidence head"):
            sglang_sts(other, 2)


def test_plot(tmp_path: Path) -> None:
    assert draw_reliability(LOGISTIC, tmp_path) is None
    assert draw_reliability(SCALED, tmp_path) == "reliability.png"
    first = (tmp_path / "reliability.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    draw_reliability(SCALED, tmp_path)
    assert (tmp_path / "reliability.png").read_bytes() == first
