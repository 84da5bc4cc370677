"""`python -m headstart.bench.decode` at sizes of a toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.bench import decode
from headstart.bench.presets import PRESETS, random_target
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs

RECORDED = Path(__file__).resolve().parents[3] / "docs/results/decode_speed.json"
#: what a processor can measure; device times and the host's share need a GPU
NAMES = {
    "plain_ms", "verify64_ms", "plain_cycle_ms", "frontier_ms", "prepare_s",
    *(f"{name}_{number}" for name in ("chain3", "tree60") for number in ("cycle_ms", "ms_per_token", "tau", "speedup")),
}  # fmt: skip


def test_times_of_the_device_need_captured_cycles(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    target = random_target(PRESETS["tiny"][0], torch.device("cpu"), torch.float32)
    cycles = decode.CycleBench(target, FusedModel(target.model, attention_windows(target.model.config)), 32, 1, 8)
    monkeypatch.setattr(CycleGraphs, "device_ms", lambda self, repeats: 0.5 * repeats)
    assert cycles.device_ms(4) is None
    cycles.engine.give_up_captures("RuntimeError: no capture")
    assert cycles.device_ms(4) is None and "RuntimeError: no capture" in capsys.readouterr().out
    monkeypatch.setattr(Engine, "captures", True)
    assert cycles.device_ms(4) == 2.0


def test_rows_are_named_as_the_recorded_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "decode.json"
    small = "--preset tiny --new-tokens 12 --context 32 --repeats 1 --out".split()
    monkeypatch.setattr("sys.argv", ["decode", *small, str(out)])
    decode.main()
    rows = json.loads(out.read_text())
    value = {row["case"]: row["value"] for row in rows}
    assert set(value) == NAMES and NAMES <= {row["case"] for row in json.loads(RECORDED.read_text())}
    for name in ("chain3", "tree60"):
        per_token = value[f"{name}_cycle_ms"] / value[f"{name}_tau"]
        assert value[f"{name}_ms_per_token"] == pytest.approx(per_token, rel=1e-6)
