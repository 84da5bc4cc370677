"""A run without any prompt file: the target writes the prompts, answers them, and a head trains on the answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.console import Console
from headstart.pipeline.run import Run
from headstart.plan import DataShape, Launch, data_of
from headstart.recipes.load import load_recipe

#: bytes that end a message of the random target, so that what it writes has a few letters
STOPS = range(2, 60)


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path) -> Path:
    """No source and no prompt: 16 prompts to write."""
    target = tmp_path / "talks"
    shutil.copytree(tiny_target, target)
    settings = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": list(STOPS)}))
    path = tmp_path / "tiny.yaml"
    distill = {"written": 16, "written_max_tokens": 24, "written_top_p": 1.0, "max_new_tokens": 8, "batch_size": 4}
    head = {"type": "eagle3", "depth": 2, "draft_vocab_size": 64, "intermediate_size": 32}
    node: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "target": {"name": str(target)},
        "head": head,
        "data": {"distill": distill, "held_out_fraction": 0.2, "pack_tokens": 128},
        "train": {"epochs": 1, "save_every": 2, "tau_prompts": 0, "log_every": 1},
    }
    path.write_text(yaml.safe_dump(node))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_target_writes_answers_and_trains(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "run/data"
    planned = headstart("plan", recipe)
    assert planned.code == 0, planned.err
    assert "16 prompts not answered yet (16 of them are still to be written)" in " ".join(planned.out.split())
    made = headstart("distill", recipe, "--json")
    assert made.code == 0, made.err
    prompts, answers = read(data / "written.jsonl"), read(data / "distilled.jsonl")
    result = made.json
    assert (result["prompts"], result["answers"], result["written"]["kept"]) == (16, 16, 16)
    assert "distill: the target wrote 16 prompts in" in made.err
    said = {record["id"]: record["messages"] for record in prompts}
    assert {record["id"]: record["messages"][:1] for record in answers} == said
    again = headstart("distill", recipe)
    assert "distill: finished before" in again.err
    trained = headstart("train", recipe)
    assert trained.code == 0, trained.err
    assert "distill: finished before" in trained.err and (tmp_path / "run/head/model.safetensors").is_file()
    counts = json.loads((data / "report.json").read_text())["sources"]
    assert sum(count["trained"] + count["held_out"] for count in counts) >= 12  # short ones are left out


def test_a_plan_counts_every_answer_to_a_prompt(recipe: Path) -> None:
    def shape(*settings: str) -> DataShape:
        return data_of(Run(load_recipe(recipe, list(settings)), Console(silent=True)), Launch())

    one, four = shape(), shape("data.distill.samples_per_prompt=4", "data.distill.temperature=1.0")
    assert (one.samples, four.samples, four.tokens) == (16, 64, 4 * one.tokens)
    assert "each counts as a sample" in one.notes[0]
    assert "each of the 4 answers to one (data.distill.samples_per_prompt) counts as a sample" in four.notes[0]


def test_written_prompts_join_those_of_files(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"id": "p0", "prompt": "Hello"}\n')
    words = (f"data.distill.prompts=[{{path: {tmp_path}/own.jsonl}}]", "data.distill.written=3")
    assert headstart("distill", recipe, *words).code == 0
    names = {record["id"] for record in read(tmp_path / "run/data/distilled.jsonl")}
    assert names == {"p0", *(record["id"] for record in read(tmp_path / "run/data/written.jsonl"))} and len(names) == 4
    (tmp_path / "own.jsonl").write_text('{"id": "written-0", "prompt": "Hello"}\n')
    refused = headstart("distill", recipe, *words, f"run_dir={tmp_path}/other")
    assert refused.code == 1 and "found 'written-0', expected one that does not begin with 'written-'" in refused.err
    assert not (tmp_path / "other/data").exists()


def test_other_settings_write_anew_and_keep_the_old_ones(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    assert headstart("distill", recipe).code == 0
    old = (tmp_path / "run/data/written.jsonl").read_text()
    again = headstart("distill", recipe, "data.distill.written_temperature=0.7")
    assert again.code == 0, again.err
    changed = "distill: done again, its inputs changed (settings.written_temperature: 1.0 → 0.7)"
    assert changed in again.err and (tmp_path / "run/data/written.jsonl").read_text() != old
    kept = next((tmp_path / "run/previous").glob("*-distill"))
    assert (kept / "written.jsonl").read_text() == old and (kept / "written.tries.jsonl").is_file()


def test_a_stopped_run_goes_on_with_the_prompts_that_it_wrote(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run/data/written.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("headstart.pipeline.distill.distillation.distill", _stop)
        assert headstart("distill", recipe).code == 130
    first, tries = place.read_text(), place.with_name("written.tries.jsonl").read_text()
    again = headstart("distill", recipe)
    assert again.code == 0 and "distill: continues" in again.err, again.err
    assert place.read_text() == first and place.with_name("written.tries.jsonl").read_text() == tries
    assert len(read(tmp_path / "run/data/distilled.jsonl")) == 16


def _stop(*arguments: Any, **more: Any) -> None:
    raise KeyboardInterrupt


def test_targets_and_servers_that_cannot_write_are_refused_first(
    headstart: Callable, recipe: Path, tmp_path: Path
) -> None:
    servers = headstart("distill", recipe, "data.distill.servers=[{url: http://127.0.0.1:1}]")
    assert servers.code == 2 and "data.distill.written: found 16 with data.distill.servers, expected 0" in servers.err
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    for command in ("distill", "train", "plan"):
        bare = headstart(command, recipe, f"target.chat_template={tmp_path}/bare.jinja")
        assert bare.code == 1 and "data.distill.written: found 'user: ' before the content" in bare.err, bare.err
    assert not (tmp_path / "run/data").exists()


def test_a_run_that_writes_none_has_the_inputs_of_an_earlier_version(
    headstart: Callable, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.jsonl").write_text('{"id": "p0", "prompt": "Hello"}\n')
    words = (f"data.distill.prompts=[{{path: {tmp_path}/own.jsonl}}]", "data.distill.written=0")
    made = headstart("distill", recipe, *words, "--json")
    assert made.code == 0 and "written" not in made.json, made.err
    settings = json.loads((tmp_path / "run/steps/distill.json").read_text())["inputs"]["settings"]
    assert "max_new_tokens" in settings and not [name for name in settings if name.startswith("written")]
    assert not list((tmp_path / "run/data").glob("written*"))
    none = headstart("distill", recipe, "data.distill.written=0", f"data.sources=[{{path: {tmp_path}/own.jsonl}}]")
    assert none.code == 2 and "data.distill.prompts is empty" in none.err and "data.distill.written=20000" in none.err
