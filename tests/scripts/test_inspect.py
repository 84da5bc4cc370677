"""headstart inspect: what trains, token by token and in numbers, as text and as JSON."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from headstart.console import Console
from headstart.inspection import Wanted, inspect, opened
from headstart.inspection_text import ASCII, Signs, signs_for, text_of

ONLY_FILES = ("data.distill.prompts=[]", "data.held_out_fraction=0")


def test_marks_are_exactly_those_of_the_answers(headstart: Callable, recipe: Path) -> None:
    result = headstart("inspect", recipe, *ONLY_FILES, "--json", "-n", "1")
    assert result.code == 0, result.err
    (sample,) = result.json["samples"]
    prompt = "<|im_start|>user\nSay 0<|im_end|>\n<|im_start|>assistant\n"
    assert sample["pieces"][:2] == [
        {"text": prompt, "supervised": False}, {"text": "0 0 ok<|im_end|>", "supervised": True},
    ]  # fmt: skip
    assert result.json["counts"]["samples"] == 24 and result.json["depth"] == 2
    assert {name: sample[name] for name in ("id", "conversation", "held_out", "truncated", "finish_reason")} == {
        "id": "c0", "conversation": "c0", "held_out": False, "truncated": False, "finish_reason": "stop",
    }  # fmt: skip
    answer = [token for token in sample["tokens"] if token["supervised"]]
    assert [(t["text"], t["drafted"], t["mark"]) for t in answer] == [
        ("0", 0, "supervised"), (" ", 1, "drafted"), ("0", 2, "drafted"), (" ", 2, "drafted"), ("o", 2, "drafted"),
        ("k", 2, "drafted"), ("<|im_end|>", 2, "drafted"),
    ]  # fmt: skip
    shown = headstart("inspect", recipe, *ONLY_FILES, "-n", "1")
    assert "assistant\n⟨0⟩⟦ ₁0 ok<|im_end|>⟧\n" in shown.out and "24 conversations → 24 samples" in shown.err
    assert "⟦text⟧" in shown.out and "at all 2 depths or at as many as the small number says" in shown.out
    assert "⟪" not in shown.out
    lines = headstart("inspect", recipe, *ONLY_FILES, "-n", "1", "--tokens").out.splitlines()
    assert next(line.split() for line in lines if "'k'" in line) == ["0", "2", str(answer[5]["id"]), "'k'"]


def schema_errors(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """Where a JSON value has other keys or other kinds of values than the schema (its types, by key)."""
    if isinstance(schema, list):
        return [error for n, item in enumerate(value) for error in schema_errors(item, schema[0], f"{where}[{n}]")]
    if not isinstance(schema, dict):
        right = isinstance(value, schema) and not (schema is int and isinstance(value, bool))
        return [] if right else [f"{where}: {value!r}"]
    if set(value) != set(schema):
        return [f"{where}: keys {sorted(set(value) ^ set(schema))}"]
    return [error for key in schema for error in schema_errors(value[key], schema[key], f"{where}.{key}")]


MAYBE_FLOAT, MAYBE_INT = (float, int, type(None)), (int, type(None))
SPREAD = dict.fromkeys(("min", "p5", "median", "p95", "max"), int)
COUNTS = {
    "samples": int, "tokens": int, "supervised_tokens": int, "turns": int, "tasks": dict, "open_ended": int,
    "length": SPREAD, "answer": SPREAD,
}  # fmt: skip
TOKEN = {
    "id": int, "text": str, "turn": int, "supervised": bool, "drafted": int, "in_draft_vocabulary": bool, "mark": str,
}  # fmt: skip
SAMPLE = {
    "id": str, "conversation": str, "held_out": bool, "truncated": bool, "finish_reason": str,
    "pieces": [{"text": str, "supervised": bool}], "tokens": [TOKEN],
}  # fmt: skip
STATISTICS = {
    **COUNTS, "drafted_tokens": int, "depth": int,
    "duplicates": {"mode": str, "exact": int, "near": int, "held_out": int, "left": int},
    "scripts": {"samples": int, "letters": int, "shares": dict},
    "draft_vocabulary": {"size": int, "of": int, "coverage": float, "choices": float, "origin": str},
    "own_choice": {"own": int, "tokens": int, "share": float, "foreign": bool, "summary": str},
    "training": {
        "epochs": MAYBE_FLOAT, "steps": MAYBE_INT, "hours": MAYBE_FLOAT, "tokens_per_step": float,
        "tokens_per_s": MAYBE_FLOAT, "summary": str,
    },
}  # fmt: skip
SCHEMA = {
    "counts": COUNTS, "held_out_samples": int, "report": dict, "supervise": str, "depth": int,
    "draft_vocabulary": {"size": int, "origin": str}, "seed": MAYBE_INT, "samples": [SAMPLE], "statistics": STATISTICS,
}  # fmt: skip


def test_json_has_the_documented_keys(headstart: Callable, recipe: Path) -> None:
    found = headstart("inspect", recipe, *ONLY_FILES, "--json", "--stats", "--n", "2", "--random").json
    assert schema_errors(found, SCHEMA) == [] and len(found["samples"]) == 2
    told = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    keys = {*SCHEMA, *SAMPLE, *TOKEN, *STATISTICS} - set(COUNTS)
    assert [key for key in sorted(keys) if f"`{key}`" not in told] == []


def test_all_tokens_supervised(headstart: Callable, recipe: Path) -> None:
    """data.supervise=all: every token of the same samples trains, prompt and template included."""
    settings = (*ONLY_FILES, "--json", "-n", "2")
    answers = headstart("inspect", recipe, *settings).json
    everything = headstart("inspect", recipe, *settings, "data.supervise=all").json
    assert answers["counts"]["supervised_tokens"] < answers["counts"]["tokens"] == everything["counts"]["tokens"]
    assert everything["counts"]["supervised_tokens"] == everything["counts"]["tokens"]
    assert all(piece["supervised"] for sample in everything["samples"] for piece in sample["pieces"])
    for name in ("turns", "answer", "length"):
        assert everything["counts"][name] == answers["counts"][name]
    assert "of a prompt, which trains too" in headstart("inspect", recipe, *ONLY_FILES, "data.supervise=all").out
    wrong = headstart("inspect", recipe, "data.supervise=prompts")
    assert wrong.code == 2 and "data.supervise" in wrong.err and "answers, all" in wrong.err


def test_whose_text_the_answers_are(headstart: Callable, recipe: Path) -> None:
    """The random target did not write "0 0 ok"; of what it wrote itself, greedily, nearly all is its own choice."""
    settings = ("data.held_out_fraction=0", "data.max_length=512")
    other = headstart("inspect", recipe, *settings, "data.distill.prompts=[]", "--stats", "--json")
    assert other.code == 0, other.err
    found = other.json["statistics"]["own_choice"]
    assert found["foreign"] and found["share"] < 0.3 and found["share"] == found["own"] / found["tokens"]
    assert found["tokens"] == other.json["counts"]["supervised_tokens"] - other.json["counts"]["turns"]
    shown = headstart("inspect", recipe, *settings, "data.distill.prompts=[]", "--stats")
    assert f"{found['share']:.1%} of {found['tokens']} answer tokens" in shown.out
    assert "WARNING" in shown.out and "data.distill.prompts" in shown.out
    assert "statistics" not in headstart("inspect", recipe, *settings, "data.distill.prompts=[]", "--json").json
    assert headstart("distill", recipe, *settings, "data.sources=[]").code == 0
    answers = headstart("inspect", recipe, *settings, "data.sources=[]", "--stats", "--json").json
    own = answers["statistics"]["own_choice"]
    assert own["share"] > 0.9 and not own["foreign"] and own["tokens"] > 0


def test_truncations_are_counted_and_shown(headstart: Callable, recipe: Path) -> None:
    settings = (*ONLY_FILES, "data.max_length=40")
    report = headstart("inspect", recipe, *settings, "--json").json["report"]["train"]
    # "<|im_start|>user\nSay 10<|im_end|>\n<|im_start|>assistant\n" is 27 tokens of this tokenizer
    assert len(report["truncated"]) + sum(map(len, report["dropped"].values())) < 24
    cut = headstart("inspect", recipe, *ONLY_FILES, "data.max_length=30", "--json").json
    assert len(cut["report"]["train"]["truncated"]) == 24 and all(sample["truncated"] for sample in cut["samples"])
    shown = headstart("inspect", recipe, *ONLY_FILES, "data.max_length=30", "-n", "1").out
    assert "⟨0⟩⟦ ₁0 ok⟧ … cut here\n" in shown and "ends by length, cut at data.max_length)" in shown


def test_random_samples_stay_the_same_by_seed(headstart: Callable, recipe: Path) -> None:
    def ids(*options: str) -> list[str]:
        found = headstart("inspect", recipe, *ONLY_FILES, "--json", "--n", "5", *options).json
        return [sample["id"] for sample in found["samples"]]

    first, random = ids(), ids("--random")
    assert first == [f"c{n}" for n in range(5)] and random != first and len(set(random)) == 5
    assert ids("--random") == random == ids("--random", "--seed", "0") != ids("--random", "--seed", "1")
    assert ids("--random", "seed=1") == ids("--random", "--seed", "1")
    told = headstart("inspect", recipe, *ONLY_FILES, "--random", "-n", "5").err
    assert "5 random samples of 24, chosen by seed 0" in told
    assert len(ids("--random", "--samples", "99")) == 24


def test_one_conversation_by_its_id(headstart: Callable, recipe: Path) -> None:
    found = headstart("inspect", recipe, *ONLY_FILES, "--id", "c7", "--json").json
    assert [sample["id"] for sample in found["samples"]] == ["c7"]
    held = headstart("inspect", recipe, "data.distill.prompts=[]", "--id", "c7", "data.held_out_fraction=0.9")
    assert "held out: it does not train" in held.out
    wrong = headstart("inspect", recipe, *ONLY_FILES, "--id", "c77")
    assert wrong.code == 2 and "--id: found 'c77', expected the id of one of 24 conversations" in wrong.err
    assert "the nearest are c7, " in wrong.err
    dropped = headstart("inspect", recipe, *ONLY_FILES, "data.min_supervised=8", "--id", "c7")
    assert dropped.code == 1 and "--id: c7 was dropped: fewer than min_supervised=8 supervised tokens" in dropped.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--id", "c7", "--random"), "--id: found with --random, expected --id alone"),
        (("--id", "c7", "-n", "2"), "--id: found with --n, expected --id alone"),
        (("--seed", "2"), "--seed: found 2 without --random"),
    ],
)
def test_options_that_exclude_each_other(
    headstart: Callable, recipe: Path, options: tuple[str, ...], said: str
) -> None:
    result = headstart("inspect", recipe, *options)
    assert result.code == 2 and said in result.err


def test_the_draft_vocabulary_that_the_run_chose_is_shown(headstart: Callable, recipe: Path) -> None:
    """Before training the data's tokens choose it; afterwards it is the run's."""
    few = (*ONLY_FILES, "head.draft_vocab_size=5", "train.epochs=1", "train.tau_prompts=0")
    before = headstart("inspect", recipe, *few, "--json").json
    assert before["draft_vocabulary"] == {"size": 5, "origin": "chosen by the data's tokens; training asks the target"}
    # stop token, and of "N N ok" the digits that two answers have most, the space and one letter: ties to the lower id
    tokens = [token for sample in before["samples"] for token in sample["tokens"]]
    marks = {(token["text"], token["mark"]) for token in tokens if token["mark"] in ("drafted", "outside")}
    assert (" ", "drafted") in marks and ("<|im_end|>", "drafted") in marks
    assert any(mark == "outside" for _, mark in marks) and len({t for t, mark in marks if mark == "drafted"}) <= 5
    shown = headstart("inspect", recipe, *few)
    assert "⟪" in shown.out and "outside the draft vocabulary" in shown.out
    assert headstart("train", recipe, *few).code == 0
    ids = json.loads((recipe.parent / "run" / "data" / "draft_vocab.json").read_text())["ids"]
    after = headstart("inspect", recipe, *few, "--json", "-n", "24").json
    assert after["draft_vocabulary"] == {"size": 5, "origin": "chosen by this run"}
    for token in (token for sample in after["samples"] for token in sample["tokens"]):
        assert token["in_draft_vocabulary"] == (token["id"] in ids)
    place = recipe.parent / "run" / "head"
    going_on = (*few, f"start_from={place}", f"run_dir={recipe.parent}/other", "--json", "-n", "24")
    continued = headstart("inspect", recipe, *going_on).json
    assert continued["draft_vocabulary"] == {"size": 5, "origin": "that of start_from"}
    assert continued["samples"] == after["samples"]
    whole = headstart("inspect", recipe, *ONLY_FILES, "head.draft_vocab_size=0", "--json").json
    assert whole["draft_vocabulary"] is None


def test_statistics_are_stored_by_training(headstart: Callable, recipe: Path) -> None:
    settings = ("data.distill.prompts=[]", "train.epochs=1", "train.tau_prompts=0", "data.held_out_fraction=0.1")
    assert headstart("train", recipe, *settings).code == 0
    stored = json.loads((recipe.parent / "run" / "data" / "report.json").read_text())["statistics"]
    found = headstart("inspect", recipe, *settings, "--stats", "--json").json["statistics"]
    same = set(found) - {"draft_vocabulary", "own_choice", "training"}
    assert {name: stored[name] for name in same} == {name: found[name] for name in same}
    ids = json.loads((recipe.parent / "run" / "data" / "draft_vocab.json").read_text())["ids"]
    shown = headstart("inspect", recipe, *settings, "--json", "-n", "24").json["samples"]
    # all tokens of an answer but its first
    labels = [[t for t in sample["tokens"] if t["supervised"]][1:] for sample in shown]
    drafted = [token for answer in labels for token in answer if token["id"] in ids]
    assert stored["drafted_tokens"] == len(drafted) == sum(t["drafted"] > 0 for s in shown for t in s["tokens"])
    assert stored["scripts"]["shares"] == {"Latin": 1.0} and stored["duplicates"] == {
        "mode": "exact", "exact": 0, "near": 0, "held_out": 0, "left": 0,
    }  # fmt: skip
    vocabulary = stored["draft_vocabulary"]
    assert (vocabulary["size"], vocabulary["of"]) == (64, 259)
    assert vocabulary["coverage"] == len(drafted) / sum(map(len, labels)) < 1
    assert 0 < found["draft_vocabulary"]["choices"] <= 1
    assert 0 < vocabulary["probability"] <= 1 and 0 < vocabulary["rows_that_train"] <= 1
    assert stored["own_choice"]["tokens"] > 0 and 0 <= stored["own_choice"]["share"] < 0.3


def test_a_page_of_numbers(headstart: Callable, recipe: Path) -> None:
    shown = headstart("inspect", recipe, *ONLY_FILES, "--stats")
    assert shown.code == 0, shown.err
    lines = [line.strip() for line in shown.out.splitlines() if not line.startswith(" ")]
    rows = dict(re.split(r" {2,}", line, maxsplit=1) for line in lines)
    assert rows["conversations"] == "24 read; 24 samples to train on, 0 held out"
    assert rows["duplicates"] == "none (data.duplicates=exact)"
    assert rows["tokens an answer"] == "min 7, p5 7, median 9, p95 9, max 9"
    assert rows["supervised"].endswith(" of 810 tokens; 24 answers")
    assert rows["languages"].startswith("Latin 100 % of the letters")
    assert rows["training"].startswith("2 epochs, ") and "expected on" in rows["training"]
    assert "⟦" not in shown.out  # samples are shown when they are asked for
    assert "⟦" in headstart("inspect", recipe, *ONLY_FILES, "--stats", "--n", "1").out


def test_a_run_that_the_plan_refuses_still_has_its_numbers(headstart: Callable, recipe: Path) -> None:
    long = (*ONLY_FILES, "--stats", "data.max_length=5000")
    training = headstart("inspect", recipe, *long, "--json").json["statistics"]["training"]
    assert "data.max_length: found 5000, the target has 2048 positions" in training["refused"]
    assert "refused: data.max_length: found 5000" in headstart("inspect", recipe, *long).out


def test_copies_and_repeats(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    """Duplicates leave and are named; what a weight repeats is no copy, and is shown once."""
    def row(name: str, number: int) -> str:
        said = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"{number} it is"}]
        return json.dumps({"id": name, "messages": said}) + "\n"

    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    few.write_text(row("again", 1) + row("twin", 1))
    many.write_text("".join(row(f"m{n}", 100 + n) for n in range(8)))
    sources = f"data.sources=[{{path: {few}, weight: 3}}, {{path: {many}, weight: 8}}]"
    settings = (*ONLY_FILES, sources, "data.most_repeats=4", "data.max_length=32")
    found = headstart("inspect", recipe, *settings, "--json", "--stats", "-n", "20").json
    ids = [sample["id"] for sample in found["samples"]]
    assert [name for name in ids if name.startswith("again")] == ["again", "again#2", "again#3"]
    assert found["statistics"]["duplicates"] == {"mode": "exact", "exact": 1, "near": 0, "held_out": 0, "left": 0}
    assert found["report"]["duplicates"]["exact"] == {"twin": "again"} and len(found["report"]["sources"]) == 2
    assert all(sample["truncated"] for sample in found["samples"])
    one = headstart("inspect", recipe, *settings, "--json", "--id", "again").json["samples"]
    assert [sample["id"] for sample in one] == ["again"]
    twin = headstart("inspect", recipe, *settings, "--id", "twin")
    assert twin.code == 1 and "--id: twin was dropped: it is an exact duplicate of again" in twin.err
    kept = headstart("inspect", recipe, *settings, "data.duplicates=keep", "--stats", "--json").json
    assert kept["statistics"]["duplicates"]["left"] >= 1


def exported(recipe: Path, width: int, **options: Any) -> str:
    """What a terminal of this width shows, with its colour codes."""
    value, shown = inspect(opened(Console(silent=True), str(recipe), list(ONLY_FILES), False), Wanted(1))
    out = io.StringIO()
    RichConsole(file=out, force_terminal=True, width=width, color_system="truecolor", **options).print(
        text_of(value, shown, False)
    )
    return out.getvalue()


def test_colours_tell_the_marks_apart(recipe: Path) -> None:
    shown = exported(recipe, 100)
    assert "\x1b[2m<|im_start|>user\x1b[0m" in shown  # dim
    assert "\x1b[1;33m⟨0⟩\x1b[0m\x1b[32m⟦ \x1b[0m\x1b[2m₁\x1b[0m\x1b[1;32m0 ok<|im_end|>⟧\x1b[0m" in shown


def test_a_narrow_terminal_loses_nothing(recipe: Path) -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", exported(recipe, 24))
    assert max(map(len, plain.splitlines())) <= 24
    assert "⟨0⟩⟦ ₁0 ok<|im_end|>⟧" in plain.replace("\n", "") and "context," in plain


def test_terminals_without_such_brackets_get_others(headstart: Callable, recipe: Path) -> None:
    assert signs_for("utf-8") == signs_for(None) == Signs() and signs_for("ascii") == signs_for("latin-1") == ASCII
    assert ASCII.around("drafted", "x") == "[[x]]" and ASCII.around("prompt", "x") == "x" and ASCII.number(3) == "^3"


def test_answers_that_are_not_those_of_the_recipe_are_told(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    assert headstart("distill", recipe).code == 0
    told = "this shows the answers that it holds. `headstart distill"
    fresh = headstart("inspect", recipe, "-n", "0")
    assert fresh.code == 0 and "WARNING: /" not in fresh.err and told not in fresh.err
    one = f"data.distill.prompts=[{{path: {tmp_path}/prompts.jsonl, limit: 1}}]"
    for change in ("data.distill.max_new_tokens=4", one):
        other = headstart("inspect", recipe, change, "-n", "0")
        assert other.code == 0 and told in other.err and change.split("=")[0] in other.err
    (marker,) = tmp_path.glob("run/**/distill.json")
    marker.write_text(marker.read_text().replace('"done"', '"begun"'))  # killed meanwhile
    assert told in headstart("inspect", recipe, "-n", "0").err
