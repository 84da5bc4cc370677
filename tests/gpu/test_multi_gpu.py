"""Several GPUs of one machine (`pytest -m gpu tests/gpu/test_multi_gpu.py`): equal losses, shards, a killed rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_run import losses, make_place
from train_fakes import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).resolve().parents[2]


def test_every_way_of_sharing_has_the_losses_of_one_gpu(tmp_path):
    """bf16: sums in another order move a loss by a few thousandths."""
    gpus, out = str(torch.cuda.device_count()), tmp_path / "scaling.json"
    cases = ["ddp", "ddp_saving", "fsdp2", "fsdp2_target"]
    subprocess.run(
        [sys.executable, "-m", "headstart.bench.scaling", "--preset", "tiny", "--gpus", "1", gpus, "--cases", *cases,
         "--tokens", "2048", "--length", "256", "--depth", "3", "--out", str(out)],
        check=True, timeout=500,
    )  # fmt: skip
    rows = {row["case"]: row for row in json.loads(out.read_text()) if row["gpus"] > 1}
    assert set(rows) == set(cases)
    for case, row in rows.items():
        assert row["loss_delta"] < 1e-2, case
    assert rows["fsdp2_target"]["target_gib_per_gpu"] < rows["ddp"]["target_gib_per_gpu"]


def start(place: Path, name: str) -> subprocess.Popen[str]:
    environment = os.environ | {"RANKS": "2", "PYTHON": sys.executable, "CONFIG": "recipes/accelerate/ddp-2.yaml"}
    environment["PORT"] = str(free_port())
    arguments = [str(place / "recipe.yaml"), f"run_dir={place / name}", "train.steps=40", "train.save_every=4"]
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "launch" / "node.sh"), *arguments], env=environment, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def test_a_killed_rank_ends_the_job_and_the_next_one_follows_the_same_curve(tmp_path):
    place = make_place(tmp_path, device="cuda", hidden=64)
    whole, job = start(place, "whole"), start(place, "killed")
    metrics = place / "killed" / "metrics.jsonl"
    while not metrics.exists() or len(losses(place / "killed")) < 10:
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    ranks = subprocess.run(["pgrep", "-P", children[0]], capture_output=True, text=True).stdout.split()
    began = time.monotonic()
    os.kill(int(ranks[1]), signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0 and time.monotonic() - began < 60
    assert "died" in err and "continues from the last checkpoint" in err
    again = start(place, "killed")
    _, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert losses(place / "killed") == pytest.approx(losses(place / "whole"), rel=2e-2)
