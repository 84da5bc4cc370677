"""`python -m headstart.bench.decode` at sizes of a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.bench import decode

RECORDED = Path(__file__).resolve().parents[3] / "docs/results/decode_speed.json"
#: what a processor can measure; device times and the host's share need a GPU
NAMES = {
    "plain_ms", "verify64_ms", "plain_cycle_ms", "frontier_ms", "prepare_s",
    *(f"{name}_{number}" for name in ("chain3", "tree60") for number in ("cycle_ms", "ms_per_token", "tau", "speedup")),
}  # fmt: skip


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
