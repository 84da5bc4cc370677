"""`python -m headstart.bench.scaling` on ranks of this machine's processor."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from headstart.bench import scaling, train

SMALL = "--preset tiny --tokens 128 --length 64 --depth 2 --steps 8 --cases ddp".split()


def test_one_and_several_ranks_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    out = tmp_path / "scaling.json"
    assert scaling.main([*SMALL, "--gpus", "1", "2", "--out", str(out)]) == 0
    one, two = json.loads(out.read_text())
    assert [(row["case"], row["gpus"], row["tokens_per_step"]) for row in (one, two)] == [
        ("ddp", 1, 128),
        ("ddp", 2, 256),
    ]
    assert (one["efficiency"], one["loss_delta"]) == (1.0, None) and two["loss_delta"] < 1e-5
    assert one["command"].startswith("python -m headstart.bench.scaling --preset tiny")
    rates = [row["tokens_per_step"] / row["step_ms"] * 1e3 for row in (one, two)]
    assert two["efficiency"] == pytest.approx(rates[1] / 2 / rates[0])
    shown = capsys.readouterr().out.splitlines()
    assert "1 × ddp" in shown[0] and "tokens/s  efficiency 1.000" in shown[0]
    assert "2 × ddp" in shown[1] and f"efficiency {two['efficiency']:.3f}" in shown[1] and "loss delta" in shown[1]


@pytest.mark.parametrize("module", [train, scaling])
def test_a_launch_of_several_ranks_is_refused_with_the_command_that_starts_them(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("sys.argv", ["bench", "--preset", "tiny"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "WORLD_SIZE is 4, expected one process" in said
    assert "python -m headstart.bench.scaling --gpus 1 4" in said


def test_rows_of_another_benchmark_are_not_mixed_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "speed.json"
    out.write_text('[{"case": "fixed_all", "preset": "tiny", "tokens_per_s": 1.0}]')
    with pytest.raises(SystemExit):
        scaling.main(["--preset", "tiny", "--gpus", "1", "--out", str(out)])
    assert "holds rows of another benchmark" in capsys.readouterr().err
    assert len(json.loads(out.read_text())) == 1
