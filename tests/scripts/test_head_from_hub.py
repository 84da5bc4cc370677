"""`headstart eval --head user/name@revision`: downloaded, checked, measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import local_hub


def test_a_head_is_measured_by_revision(
    headstart: Callable, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.heads.families import build_head
    from headstart.heads.families.eagle.head import EagleConfig
    from headstart.heads.formats import save_head
    from headstart.heads.targets.load import load_target
    from headstart.heads.targets.target import TargetConfig

    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    save_head(build_head(EagleConfig(), target.dims), tmp_path / "head", {})
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [9, 8]}\n')
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    settings = [
        "eval.max_new_tokens=6",
        "eval.warmup_tokens=0",
        "eval.tree.depth=2",
        "--out",
        tmp_path / "out",
        "--json",
    ]
    with local_hub(monkeypatch) as hub:
        hub.published["v1"] = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
        asked = ["eval", "--target", tiny_target, "--data", data, *settings]
        result = headstart(*asked, "--head", "me/published@v1")
        assert result.code == 0, result.err
        report = json.loads(result.out)
        assert report["head"]["type"] == "eagle" and report["head"]["path"] == "me/published@v1"
        assert report["greedy_identity"]["identical"] == 2 and report["prompts"] == 2
        wrong = headstart(*asked, "--head", "me/published@v2")
    assert wrong.code == 1 and "me/published@v2" in wrong.err and "Traceback" not in wrong.err


def test_a_run_is_pushed_with_its_report(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_environment", lambda: "secret")
    with local_hub(monkeypatch) as hub:
        assert headstart("run", recipe, "data.distill.prompts=[]", "train.epochs=1").code == 0
        asked = ["export", recipe, "data.distill.prompts=[]", "train.epochs=1", "--push-to-hub", "me/head", "--json"]
        result = headstart(*asked)
        assert result.code == 0, result.err
        assert result.json["url"].endswith("/me/head")
        report = json.loads(hub.files["report.json"])
        assert report["tau"] == json.loads((tmp_path / "run/report.json").read_text())["tau"]
        card = hub.files["README.md"].decode()
        assert f"{report['tau']:.3f}" in card and "vllm serve" in card and "```bibtex" in card
        assert hub.files["model.safetensors"] == (tmp_path / "run/export/model.safetensors").read_bytes()
        pushed = len(hub.messages)
        again = headstart(*asked)
        assert again.code == 0 and "publish: finished before" in again.err and len(hub.messages) == pushed
