"""`headstart distill` through a server: whole commands, without the target's weights, continued and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai_server import State, answer_to, serving
from transformers import AutoTokenizer


@pytest.fixture
def state(tiny_target: Path) -> Any:
    """state(**changes) → a server of the tiny target."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    return lambda **changes: State(tokenizer, tokenizer.eos_token_id, model=tiny_target.name, **changes)


@pytest.fixture
def light(recipe: Path, tiny_target: Path, tmp_path: Path) -> Path:
    """The recipe's target without its weights: config and tokenizer must do."""
    import shutil

    place = tmp_path / "light" / tiny_target.name
    shutil.copytree(tiny_target, place, ignore=shutil.ignore_patterns("*.safetensors"))
    recipe.write_text(recipe.read_text().replace(str(tiny_target), str(place)))
    return recipe


def through(*urls: str) -> list[str]:
    listed = ", ".join(f"{{url: {url}}}" for url in urls)
    return [f"data.distill.servers=[{listed}]", "data.distill.max_new_tokens=40"]


def answers(tmp_path: Path) -> dict[str, str]:
    lines = (tmp_path / "run" / "data" / "distilled.jsonl").read_text().splitlines()
    return {record["id"]: record["messages"][-1]["content"] for record in map(json.loads, lines)}


def test_prompts_are_answered_and_more_of_them_ask_only_those(
    light: Path, headstart: Any, state: Any, tmp_path: Path
) -> None:
    one, two = state(), state()
    prompts = tmp_path / "prompts.jsonl"
    with serving(one) as (first,):
        result = headstart("distill", light, *through(first.url))
        assert result.code == 0, result.err
        assert "(vLLM) serves tiny, 32 requests at once" in result.err
        assert answers(tmp_path) == {"p0": answer_to("Hello"), "p1": answer_to("Bye")}
        assert "finished before" in headstart("distill", light, *through(first.url)).err and len(one.asked) == 2
    prompts.write_text('{"id": "new", "prompt": "Say 12"}\n' + prompts.read_text())
    with serving(two) as (second,):
        result = headstart("distill", light, *through(second.url))
    assert result.code == 0, result.err
    assert [question for question, _ in two.asked] == ["Say 12"]
    assert answers(tmp_path) == {"new": answer_to("Say 12"), "p0": answer_to("Hello"), "p1": answer_to("Bye")}


def test_what_a_server_cannot_do_is_refused_at_the_start(
    light: Path, headstart: Any, state: Any, tmp_path: Path
) -> None:
    with serving(state()) as (gone,):
        pass
    for command in ("distill", "doctor"):
        result = headstart(command, light, *through(gone.url), *(["--json"] if command == "doctor" else []))
        assert result.code == 1
        assert "no server answers there" in result.out + result.err
        assert "data.distill.servers[0].url" in result.out + result.err
    assert not (tmp_path / "run" / "data" / "distilled.jsonl").exists()
    with serving(state()) as (there,):
        found = {
            check["name"]: check for check in headstart("doctor", light, *through(there.url), "--json").json["checks"]
        }
    assert found["servers"]["status"] == "ok" and "(vLLM) serves tiny" in found["servers"]["found"]


def test_a_plan_knows_what_a_named_kind_of_server_cannot_do(recipe: Path, headstart: Any) -> None:
    result = headstart(
        "plan", recipe, "data.distill.servers=[{url: http://host:1/v1, engine: tgi}]", "data.distill.top_k=5",
        "data.distill.temperature=1",
    )  # fmt: skip
    assert result.code == 2 and "data.distill.top_k: found 5, but TGI (data.distill.servers[0])" in result.err


def test_answers_in_process_do_not_continue_those_of_servers(
    recipe: Path, headstart: Any, state: Any, tmp_path: Path
) -> None:
    with serving(state()) as (server,):
        assert headstart("distill", recipe, *through(server.url)).code == 0
    result = headstart("distill", recipe, "data.distill.max_new_tokens=4")
    assert result.code == 0, result.err
    assert "what it had made is kept in" in result.err
    assert all(text not in answers(tmp_path).values() for text in (answer_to("Hello"), answer_to("Bye")))
