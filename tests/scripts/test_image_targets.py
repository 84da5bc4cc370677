"""A whole run with a target that reads images: from text and image rows to an export that engines load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.image_models import save_image_model

from headstart.heads.files import read_json

Call = Callable[..., Any]
#: ids behind the tokenizer's, some of which stand for parts of images
IMAGE_TOKENS = 6


def vocabulary_of(directory: Path) -> int:
    return len(read_json(directory / "tokenizer.json")["model"]["vocab"])


@pytest.fixture
def image_target(tiny_target: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The directory of a whole model, with the tokenizer and the template of the tiny text target."""

    def make(name: str) -> Path:
        directory, vocab = tmp_path / name, vocabulary_of(tiny_target) + IMAGE_TOKENS
        save_image_model(name, directory, vocab_size=vocab, max_position_embeddings=2048)
        for path in tiny_target.glob("*token*"):
            shutil.copy(path, directory / path.name)
        shutil.copy(tiny_target / "chat_template.jinja", directory)
        return directory

    return make


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mistral3", "qwen3-vl", "gemma4")]


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl", "llama4", *SLOW])
def test_a_run_from_text_and_image_rows_to_an_export(
    name: str, image_target: Callable[[str], Path], recipe: Path, tiny_target: Path, headstart: Call, tmp_path: Path
) -> None:
    directory, mixed = image_target(name), tmp_path / "mixed.jsonl"
    text = recipe.read_text().replace(str(tiny_target), str(directory))
    text = text.replace("type: eagle3,", "type: eagle3, feature_layers: [1, 2, 4],")
    source = text.split("sources: [{path: ")[1].split("}")[0]
    images = {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]}
    part = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x"}]}
    rows = Path(source).read_text().splitlines()
    mixed.write_text("\n".join([*rows[:4], json.dumps({**images, "image": "1.jpg"}), *rows[4:], json.dumps(part)]))
    recipe.write_text(text.replace(source, str(mixed)))
    shown = headstart("inspect", recipe, "data.distill.prompts=[]")
    dropped = "dropped 2: the conversation holds images (mixed.jsonl:5, mixed.jsonl:26)"
    assert shown.code == 0, shown.err
    assert dropped in shown.err
    checked = headstart("doctor", recipe)
    assert "26 records read, 2 of them dropped" in checked.out
    result = headstart("run", recipe)
    assert result.code == 0, result.err
    assert dropped in result.err
    run = tmp_path / "run"
    report, config = read_json(run / "report.json"), read_json(run / "export" / "config.json")
    assert report["greedy_identity"]["identical"] == report["greedy_identity"]["sequences"] > 0
    assert "LOAD REPORT" not in result.err
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "What is it?", "image": "1.jpg"}\n')
    out = tmp_path / "measured"
    again = headstart("eval", "--head", run / "export", "--target", directory, "--data", prompts, "--out", out)
    assert again.code == 0, again.err
    notes = read_json(out / "report.json")["notes"]
    assert "dropped 1: the conversation holds images" in notes and "asked" not in " ".join(notes)
    assert (config["hidden_size"], config["vocab_size"]) == (32, vocabulary_of(directory) + IMAGE_TOKENS)
    assert "vLLM 0.32      loads" in result.err and "vllm serve TARGET" in result.err


def test_doctor_and_plan_leave_out_prompts_with_images(recipe: Path, headstart: Call, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    shown = '{"prompt": "What is it?", "image": "1.jpg"}\n'
    prompts.write_text('{"prompt": "Hello"}\n' + shown)
    checked = headstart("doctor", recipe, "--json")
    found = {check["name"]: check for check in checked.json["checks"]}
    assert checked.code == 0 and "dropped 1: the conversation holds images (prompts.jsonl:2)" in found["data"]["found"]
    planned = headstart("plan", recipe)
    assert planned.code == 0 and "data: 1 prompt not answered yet" in planned.out
    prompts.write_text(shown)
    checked = headstart("doctor", recipe, "--json")
    found = {check["name"]: check for check in checked.json["checks"]}
    assert checked.code == 1 and found["data"]["status"] == "fail"
    assert "none of the first prompts can be answered: dropped 1: the conversation holds" in found["data"]["found"]
