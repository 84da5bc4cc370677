"""Mistakes people make: a clean message that names the place and the remedy, the right exit code, no traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ONLY_FILES = ("data.distill.prompts=[]",)


def check(result, code: int, *parts: str) -> None:
    assert result.code == code, result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err


def test_missing_recipe(headstart: Callable) -> None:
    check(headstart("run", "quickstrt"), 2, "quickstrt: no such recipe", "did you mean 'quickstart'?")


def test_unknown_key_in_a_file_names_line_and_nearest_key(headstart: Callable, recipe: Path) -> None:
    text = recipe.read_text().replace("pack_tokens:", "pack_token:")
    recipe.write_text(text)
    line = next(n for n, t in enumerate(text.splitlines(), 1) if "pack_token:" in t)
    expected = f"{recipe}:{line}: unknown key 'data.pack_token'; did you mean 'data.pack_tokens'?"
    check(headstart("train", recipe), 2, expected)


def test_unknown_override(headstart: Callable, recipe: Path) -> None:
    check(headstart("run", recipe, "train.lrr=1"), 2, "unknown key 'train.lrr'; did you mean 'train.lr'?")


def test_wrong_type(headstart: Callable, recipe: Path) -> None:
    check(headstart("run", recipe, "train.lr=fast"), 2, "train.lr: found 'fast', expected number")


def test_missing_data_file(headstart: Callable, recipe: Path) -> None:
    check(headstart("run", recipe, *ONLY_FILES, "data.sources=[{path: gone.jsonl}]"), 1, "gone.jsonl", "no such file")


@pytest.mark.parametrize(
    ("line", "found"),
    [('{"messages": [', "not valid JSON"), ('{"text": "x"}', "text"), ('{"messages": [{"role": "robot"}]}', "role")],
)
def test_bad_jsonl_line_is_numbered(headstart: Callable, recipe: Path, tmp_path: Path, line: str, found: str) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]})
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{good}\n{good}\n{line}\n")
    check(headstart("inspect", recipe, *ONLY_FILES, f"data.sources=[{{path: {bad}}}]"), 1, f"{bad}:3:", found)


LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", LONG), ("run", LONG + ".yaml"), ("export", "--check", "/" + LONG), ("report", LONG),
        ("eval", "--target", "t", "--data", LONG), ("eval", "--target", LONG, "--data", "RECORDS"),
        ("eval", "--target", "TARGET", "--data", "RECORDS", "--head", "/" + LONG),
        ("inspect", "RECIPE", f"target.chat_template={LONG}"), ("inspect", "RECIPE", f"target.name=/{LONG}"),
        ("distill", "RECIPE", f"data.distill.prompts=[{{path: {LONG}}}]"), ("inspect", "RECIPE", *ONLY_FILES,
        f"data.sources=[{{path: {LONG}}}]"),
    ],
    ids=lambda arguments: " ".join(part if len(part) < 50 else "LONG" for part in arguments),
)  # fmt: skip
def test_a_name_longer_than_any_file_has_one_short_message(
    headstart: Callable, recipe: Path, tiny_target: Path, prompts: Path, arguments: tuple[str, ...]
) -> None:
    given = {"RECIPE": recipe, "TARGET": tiny_target, "RECORDS": prompts}
    result = headstart(*(given.get(part, part) for part in arguments))
    assert result.code in (1, 2) and "Traceback" not in result.err and "cannot be written" not in result.err
    message = result.err.partition("error: ")[2]
    assert 0 < len(message) < 2000, result.err


def test_a_refusal_to_read_does_not_speak_of_writing(
    headstart: Callable, prompts: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.eval import prompts as module

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module, "sha256_file", refuse)  # a place that does not expect it
    arguments = ("eval", "--target", tiny_target, "--data", prompts, "eval.drafter=none", "eval.max_new_tokens=2")
    check(headstart(*arguments), 1, f"{prompts}: Permission denied: check the path, and who may read and write there")


def test_nothing_supervised_is_refused(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts_only.jsonl"
    path.write_text('{"prompt": "Hello"}\n' * 3)
    check(headstart("inspect", recipe, *ONLY_FILES, f"data.sources=[{{path: {path}}}]"), 1, "no assistant answer")


def test_target_without_chat_template(headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare)
    (bare / "chat_template.jinja").unlink()
    check(headstart("inspect", recipe, *ONLY_FILES, f"target.name={bare}"), 1, "chat template", "target.chat_template")


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{% for m in messages %}{{ m['content'] }}", ("template",)),
        ("{{ raise_exception('only poems') }}", ("only poems",)),
    ],
)
def test_wrong_template(
    headstart: Callable, recipe: Path, tmp_path: Path, template: str, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "wrong.jinja"
    path.write_text(template)
    check(headstart("inspect", recipe, *ONLY_FILES, f"target.chat_template={path}"), 1, *parts)


def test_missing_template_file(headstart: Callable, recipe: Path) -> None:
    check(headstart("inspect", recipe, *ONLY_FILES, "target.chat_template=gone.jinja"), 1, "gone.jinja: no such file")


def test_missing_target_directory(headstart: Callable, recipe: Path) -> None:
    for verb in ("inspect", "train"):
        check(headstart(verb, recipe, *ONLY_FILES, "target.name=./gone"), 1, "./gone is not a directory")


def test_unknown_registered_target(headstart: Callable) -> None:
    check(headstart("target", "fetch", "smollm-135m-instruct"), 1, "did you mean 'smollm2-135m-instruct'?")


def test_steps_out_of_order(headstart: Callable, recipe: Path) -> None:
    check(headstart("eval", recipe), 1, "there is no trained head; run `headstart train` first")
    check(headstart("export", recipe), 1, "there is no trained head; run `headstart train` first")
    check(headstart("distill", recipe, *ONLY_FILES), 2, "data.distill.prompts is empty")
    unanswered = ("data.sources=[]", "data.max_length=77")
    check(headstart("inspect", recipe, *unanswered), 1, f"run `headstart distill {recipe} 'data.sources=[]' data.max")


def test_a_run_without_anything_to_evaluate_on_does_not_train_first(headstart: Callable, recipe: Path) -> None:
    result = headstart("run", recipe, "data.held_out_fraction=0")
    check(result, 2, "eval.data: not set, and data.held_out_fraction=0 holds no conversation out")
    assert "distill" not in result.err


def test_conversations_of_one_prompt_do_not_train_before_there_is_something_to_evaluate_on(
    headstart: Callable, recipe: Path, tmp_path: Path
) -> None:
    path = tmp_path / "one.jsonl"
    records = [{"prompt": "Go on", "response": f"{n} {n} ok"} for n in range(24)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = headstart("run", recipe, f"data.sources=[{{path: {path}}}]", "data.distill.prompts=[]")
    check(result, 1, "eval.data: not set, and no conversation is held out")
    assert "WARNING: all conversations begin with the same prompt, so none is held out" in result.err
    assert not (tmp_path / "run/checkpoints").exists()


def test_options_of_a_plan_do_not_train(headstart: Callable, recipe: Path) -> None:
    refused = headstart("train", recipe, "--gpus", "2")
    check(refused, 2, "--gpus: found in `headstart train`, expected in `headstart plan`", "torchrun --nproc_per_node")


def test_a_gpu_that_is_not_there_is_refused_by_every_verb_that_computes(
    headstart: Callable, recipe: Path, tiny_target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert headstart("run", recipe).code == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked, head = "target.device=cuda", ("--head", tmp_path / "run" / "head", "--target", tiny_target)
    verbs = [(verb, recipe, f"run_dir={tmp_path}/new") for verb in ("distill", "train", "run")]
    verbs += [("eval", recipe, "eval.max_new_tokens=7"), ("eval", *head, "--data", prompts), ("tune", recipe)]
    verbs += [("export", *head, "--out", tmp_path / "out")]
    for verb in verbs:
        result = headstart(*verb, asked)
        assert result.code == 2 and "target.device: found cuda, this machine has no GPU" in result.err, verb
        assert "loading target" not in result.err
    assert not (tmp_path / "new" / "data" / "distilled.jsonl").exists()
    assert not (tmp_path / "out" / "config.json").exists()
    assert "FAIL" in (doctor := headstart("doctor", recipe, asked)).out and doctor.code == 1
    assert headstart("plan", recipe, asked).code == 0


def test_a_runs_directory_is_not_its_head(headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "run/head").mkdir(parents=True)
    (tmp_path / "run/head/config.json").write_text("{}")
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "Hi"}\n')
    result = headstart("eval", "--head", tmp_path / "run", "--target", tiny_target, "--data", data)
    check(result, 1, f"found a run's directory; its head is {tmp_path / 'run/head'}")
    assert "loading target" not in result.err
    looked = headstart("export", "--check", tmp_path / "run")
    check(looked, 1, f"found a run's directory; look at {tmp_path / 'run/head'}")
    (tmp_path / "run/recipe.yaml").write_text("name: x\n")
    check(headstart("eval", tmp_path / "run"), 2, f"a run's directory; its recipe is {tmp_path / 'run/recipe.yaml'}.")


def test_an_export_that_cannot_be_leaves_the_one_that_is_there(
    headstart: Callable, recipe: Path, tmp_path: Path
) -> None:
    """Engines that do not serve the family, and the recipe without the overrides that the run was made with."""
    made = (*ONLY_FILES, "train.epochs=1")
    assert headstart("train", recipe, *made).code == 0 and headstart("export", recipe, *made).code == 0
    before = sorted(path.name for path in (tmp_path / "run/export").iterdir())
    wrong = headstart("export", recipe, *made, "export.engines=[tgi]")
    check(wrong, 2, "TGI does not serve eagle3")
    forgot = headstart("export", recipe, "export.engines=[sglang]")
    check(forgot, 1, "prompts (data.distill.prompts, written) were not answered", str(tmp_path / "run/recipe.yaml"))
    assert "loading target" not in wrong.err and not list(tmp_path.glob("run/previous/*"))
    assert sorted(path.name for path in (tmp_path / "run/export").iterdir()) == before
    assert "export: finished before" in headstart("export", recipe, *made).err


def test_eval_needs_a_recipe_or_a_target(headstart: Callable, tiny_target: Path, tmp_path: Path) -> None:
    check(headstart("eval"), 2, "give a RECIPE, or --target T --data FILE.jsonl")
    check(headstart("eval", "--target", tiny_target, "--data", "gone.jsonl"), 1, "gone.jsonl: no such file")
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "a"}\n')
    options = ("--target", tiny_target, "--data", data)
    check(headstart("eval", *options, "--head", tmp_path / "nope"), 1, "no such directory")
    check(headstart("eval", *options, "eval.tre=1"), 2, "did you mean 'eval.tree'?")


def test_publishing_without_a_token_says_how_to_get_one(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert headstart("train", recipe, "train.epochs=1").code == 0
    check(headstart("export", recipe, "train.epochs=1", "--push-to-hub", "me/head"), 2, "hf auth login")
    assert (tmp_path / "run/export/model.safetensors").is_file()  # the export itself is done
    check(headstart("export", recipe, "--push-to-hub", "nonsense"), 2, "expected user/name")


def test_a_head_that_is_nowhere(
    headstart: Callable, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "a"}\n')
    options = ("--target", tiny_target, "--data", data, "--head", "someone/head")
    check(headstart("eval", *options), 1, "someone/head", "cannot be reached")


def test_exit_codes_are_the_same_for_every_verb(
    headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 where what the words name is missing or out of reach, 2 for words that cannot work wherever they are said."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    recipes = [*((verb, recipe) for verb in ("run", "train", "distill", "inspect")), ("plan", recipe)]
    measured = [(verb, "--target", tiny_target, "--data", prompts) for verb in ("eval", "tune")]
    exported = [("export", "--target", tiny_target)]
    for code, more, verbs in (
        (1, ("target.name=./gone",), recipes),
        (1, ("target.name=someone/gone",), recipes),
        (1, ("target.chat_template=gone.jinja",), recipes),
        (1, ("data.distill.prompts=[{path: gone.jsonl}]",), [*recipes[:3], recipes[4]]),
        (1, ("--head", "./gone"), measured + exported),
        (1, ("--head", "someone/gone"), measured + exported),
        (1, ("--data", "gone.jsonl"), measured),
        (1, ("--head", "x" * 5000), measured + exported),
        (2, ("target.name=",), recipes),
        (2, ("train.lrr=1",), recipes),
        (2, ("target.device=abacus",), [recipes[0], recipes[1], recipes[2]]),
        (2, ("export.engines=[nonsense]",), recipes),
        (2, ("--head", ""), measured + exported),
        (2, ("--head", "a\x1bb/c d"), measured + exported),
        (2, ("eval.tree.depth=0",), measured),
        (2, ("half \udc80=1",), [*recipes, *measured]),
    ):
        for verb in verbs:
            check(headstart(*verb, *more), code)
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("[!.]*"))


def test_words_that_are_no_utf_8(tmp_path: Path) -> None:
    """As a shell gives them: a clean message also where the terminal takes ASCII only."""
    odd = b"\xff"
    words = [[b"run", odd], [b"run", b"quickstart", b"name=" + odd], [b"report", odd], [b"export", b"--check", odd]]
    code = "import sys; from headstart.cli import main; sys.exit([main(w) for w in eval(sys.argv[1])] != [2, 2, 1, 1])"
    decoded = repr([[os.fsdecode(word) for word in line] for line in words])
    done = subprocess.run(
        [sys.executable, "-c", code, decoded], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_check_says_what_engines_do(headstart: Callable, recipe: Path, tmp_path: Path, tiny_target: Path) -> None:
    assert headstart("train", recipe, "train.epochs=1").code == 0
    result = headstart("export", "--check", tmp_path / "run/head", "--json")
    assert result.code == 0 and result.json["engines"]["vllm"]["verdict"] == "loads"
    config = tmp_path / "run/head/config.json"
    values = json.loads(config.read_text())
    values["norm_before_residual"] = True
    config.write_text(json.dumps(values))
    broken = headstart("export", "--check", tmp_path / "run/head")
    assert broken.code == 1 and "loads wrongly" in broken.out
    check(headstart("export", "--check", tmp_path / "gone"), 1, "no such directory")
    (tmp_path / "run/head/headstart.json").unlink()
    values |= {"norm_before_residual": False, "rope_parameters": None, "rope_theta": 5e5}
    config.write_text(json.dumps(values))
    assert headstart("export", "--check", tmp_path / "run/head").code == 0
    other = headstart("export", "--check", tmp_path / "run/head", "--target", tiny_target)
    assert other.code == 1 and "differs from the target's" in other.out
    gone = ("export", "--check", tmp_path / "run/head", "--target", tmp_path / "gone")
    check(headstart(*gone), 1, "gone is not a directory")
    config.write_text(json.dumps({**values, "architectures": ["Eagle3Speculator"], "hidden_act": "gelu"}))
    refused = headstart("export", "--check", tmp_path / "run/head", "--json")
    assert refused.code == 1 and {found["verdict"] for found in refused.json["engines"].values()} >= {"refuses"}
    check(headstart("export"), 2, "give a RECIPE, --head DIR with --target T, or --check DIR")


def test_error_as_json(headstart: Callable, recipe: Path) -> None:
    result = headstart("run", recipe, "train.lrr=1", "--json")
    assert result.code == 2 and result.json["error"]["type"] == "ConfigError"


def test_full_disk_loses_nothing_and_the_run_continues(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert headstart("distill", recipe).code == 0
    real = os.replace

    def full(source, destination, **kwargs):
        if "checkpoints" in str(destination) or str(destination).endswith("model.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device", str(destination))
        return real(source, destination, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        patch.setattr(os, "rename", full)
        check(headstart("run", recipe, "train.disk_wait=1.5"), 1, "the disk is full", "paused")
    after = headstart("run", recipe, "train.disk_wait=1.5")
    assert after.code == 0 and "distill: finished before" in after.err and (tmp_path / "run/head").is_dir()


def test_unreachable_hub_costs_seconds(headstart: Callable, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    result = headstart("inspect", recipe, *ONLY_FILES, "target.name=someone/something")
    check(result, 1, "someone/something", "cannot be reached")
    assert time.monotonic() - began < 30  # the Hub's own client tries for minutes
