"""A run whose every name is a secret: nothing of it is in what leaves the machine, byte by byte."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import local_hub

from headstart.heads.formats import load_head

SECRET = "zq7secret"
NUMBER = "771239"


@pytest.fixture
def secretive(tmp_path: Path, tiny_target: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that has the secret in every path, file name and value of the environment."""
    home = tmp_path / f"{SECRET} home"
    target = home / f"{SECRET}.models" / "tiny-llama"
    shutil.copytree(tiny_target, target)
    template = json.loads((target / "tokenizer_config.json").read_text()).get("chat_template")
    template = template or (target / "chat_template.jinja").read_text()
    (home / f"{SECRET}.jinja").write_text(template)
    records = [json.loads(line) for line in conversations.read_text().splitlines()]
    without_ids = "".join(json.dumps({"messages": record["messages"]}) + "\n" for record in records)
    (home / f"{SECRET}_talk.jsonl").write_text(without_ids)
    for name in ("asked", "one", "two"):
        (home / f"{SECRET}_{name}.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "Bye"}\n')
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("MY_SECRET", f"{SECRET}-value")
    monkeypatch.setenv("MY_NUMBER", NUMBER)
    monkeypatch.setenv("MY_PLACE", str(home))
    path = home / f"{SECRET}_recipe.yaml"
    path.write_text(f"""
run_dir: ${{oc.env:MY_PLACE}}/run
target: {{name: "{target}", chat_template: "${{oc.env:MY_PLACE}}/{SECRET}.jinja"}}
head: {{type: eagle3, depth: 2, draft_vocab_size: 64, intermediate_size: 32}}
data:
  sources: [{{path: "{home}/{SECRET}_talk.jsonl"}}]
  distill: {{prompts: [{{path: "{home}/{SECRET}_asked.jsonl"}}], max_new_tokens: 8}}
  template_kwargs: {{key: "${{oc.env:MY_SECRET}}", deep: ["x-${{oc.env:MY_SECRET,{SECRET}}}", "{home}/x"]}}
  held_out_fraction: 0.2
  shard_tokens: ${{oc.env:MY_NUMBER}}
  pack_tokens: 128
train: {{epochs: 1, lr: 1e-3, tau_prompts: 2, tau_tokens: 8, project: "${{oc.env:MY_SECRET}}"}}
eval:
  data: ["{home}/{SECRET}_one.jsonl", "{home}/{SECRET}_two.jsonl"]
  max_new_tokens: 8
  warmup_tokens: 0
  tree: {{depth: 2}}
export: {{commit_message: "for ${{oc.env:MY_SECRET}} in {home}"}}
""")
    return path


def leaks(files: dict[str, bytes], *more: str) -> list[tuple[str, str]]:
    """(file, what of the secrets it holds)."""
    secrets = [SECRET, NUMBER, *more]
    return [(name, word) for name, content in files.items() for word in secrets if word.encode() in content.lower()]


def files_of(*places: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_nothing_that_is_published_names_what_is_local(
    headstart: Callable, secretive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = secretive.parent
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "/x/headstart", "run", str(secretive), f"eval.data={home}/{SECRET}_one.jsonl"]
    )
    done = headstart("run", secretive)
    assert done.code == 0, done.err
    # whose file is whose is said here alone
    assert f"own data 1 is {home}/{SECRET}_one.jsonl, own data 2 is {home}/{SECRET}_two.jsonl" in done.err
    run = home / "run"
    tuned = headstart(
        "tune", secretive, "--data", home / f"{SECRET}_one.jsonl", "--out", home / "tuned",
        "tune.batch_sizes=[1]", "tune.depth=2", "tune.total_tokens=[3]", "tune.prompts=2", "tune.repeats=1",
    )  # fmt: skip
    assert tuned.code == 0, tuned.err
    models = home / f"{SECRET}.models" / "tiny-llama"
    again = headstart("export", "--head", run / "head", "--target", models, "--out", home / "again")
    assert again.code == 0, again.err
    with local_hub(monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", "secret")
        # the resolved recipe of the run, which a later command may be given instead
        pushed = headstart("export", run / "recipe.yaml", "--push-to-hub", "me/head")
        assert pushed.code == 0, pushed.err
    reports = {name: content for name, content in files_of(run).items() if Path(name).name.startswith("report.")}
    assert {f"{run}/report.{kind}" for kind in ("json", "md", "html")} <= set(reports)
    published = {**files_of(run / "export", run / "head", home / "tuned", home / "again"), **reports, **hub.files}
    published["message"] = " ".join(hub.messages).encode()
    del published[f"{run}/data/report.json"]
    assert {"README.md", "headstart.json", "report.json", "model.safetensors"} <= set(hub.files)
    assert leaks(published, str(tmp_path).lower(), os.environ["MY_PLACE"].lower()) == []
    assert f"{SECRET}-value" not in (run / "recipe.yaml").read_text()  # no password is written down

    report = json.loads((run / "report.json").read_text())
    assert report["target"]["name"] == "tiny-llama" and set(report["tasks"]) == {"own data 1", "own data 2"}
    assert report["recipe"]["data"]["shard_tokens"] == "${oc.env:MY_NUMBER}"
    assert report["command"] == "headstart run RECIPE.yaml eval.data=FILE.jsonl"
    side = json.loads(hub.files["headstart.json"])
    (source,) = side["recipe"]["data"]["sources"]
    assert source["path"] == "own data" and len(source["sha256"]) == 16
    assert side["recipe"]["data"]["template_kwargs"]["deep"] == ["x-${oc.env:MY_SECRET}", "${oc.env:MY_PLACE}/x"]
    assert "own data (sha256 `" in hub.files["README.md"].decode()
    load_head(run / "export")  # what was cleared is sealed
    found = json.loads((home / "again" / "headstart.json").read_text())
    assert found["provenance"]["exported_from"] == "a local head" and found["target"]["name"] == "tiny-llama"
