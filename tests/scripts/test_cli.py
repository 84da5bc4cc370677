"""Every command: help, results on stdout, messages on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

VERBS = "distill inspect plan train eval tune export report run doctor scripts target".split()
COMMANDS = [*VERBS, "target fetch", "target list"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(headstart: Callable, command: str) -> None:
    result = headstart(*command.split(), "--help")
    assert result.code == 0
    assert f"headstart {command}" in result.out and "--help" in result.out


def test_bare_call_lists_the_verbs(headstart: Callable) -> None:
    shown = headstart("--help").out
    assert all(f"  {command} " in shown for command in VERBS)
    assert headstart("--version").out.strip() == "0.1.0"


@pytest.mark.parametrize("arguments", [("trian",), ("train",), ("train", "--jsn"), ("target", "fetch")])
def test_wrong_usage_exits_with_2(headstart: Callable, arguments: tuple[str, ...]) -> None:
    result = headstart(*arguments)
    assert result.code == 2 and result.out == "" and "Usage" in result.err


def test_help_and_wrong_usage_do_not_wait_for_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from headstart.cli import main\n"
        "codes = [main(['--help']), main(['plan', '--help']), main(['train', '--help']), main(['trian'])]\n"
        "print(codes, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 2] []", done.stderr


def test_python_dash_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headstart", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "0.1.0"


def test_inspect_marks_exactly_the_assistants_tokens(headstart: Callable, recipe: Path) -> None:
    settings = ("data.distill.prompts=[]", "data.held_out_fraction=0")
    result = headstart("inspect", recipe, *settings, "--json", "-n", "1")
    assert result.code == 0, result.err
    pieces = result.json["samples"][0]["pieces"]
    assert pieces[0] == {"text": "<|im_start|>user\nSay 0<|im_end|>\n<|im_start|>assistant\n", "supervised": False}
    assert pieces[1] == {"text": "0 0 ok<|im_end|>", "supervised": True}
    assert result.json["counts"]["samples"] == 24
    shown = headstart("inspect", recipe, *settings, "-n", "1")
    assert "⟦0 0 ok<|im_end|>⟧" in shown.out and "24 conversations → 24 samples" in shown.err


def test_inspect_shows_all_tokens_supervised(headstart: Callable, recipe: Path) -> None:
    """data.supervise=all: every token of the same samples trains, prompt and template included."""
    settings = ("data.distill.prompts=[]", "data.held_out_fraction=0", "--json", "-n", "2")
    answers = headstart("inspect", recipe, *settings).json
    everything = headstart("inspect", recipe, *settings, "data.supervise=all").json
    assert answers["counts"]["supervised_tokens"] < answers["counts"]["tokens"] == everything["counts"]["tokens"]
    assert everything["counts"]["supervised_tokens"] == everything["counts"]["tokens"]
    assert all(piece["supervised"] for sample in everything["samples"] for piece in sample["pieces"])
    for name in ("turns", "answer", "length"):
        assert everything["counts"][name] == answers["counts"][name]
    wrong = headstart("inspect", recipe, "data.supervise=prompts")
    assert wrong.code == 2 and "data.supervise" in wrong.err and "answers, all" in wrong.err


def test_inspect_tells_whose_text_the_answers_are(headstart: Callable, recipe: Path) -> None:
    """The random target did not write "0 0 ok"; of what it wrote itself, greedily, nearly all is its own choice."""
    settings = ("data.held_out_fraction=0", "data.max_length=512")
    other = headstart("inspect", recipe, *settings, "data.distill.prompts=[]", "--stats", "--json")
    assert other.code == 0, other.err
    found = other.json["own_choice"]
    assert found["foreign"] and found["share"] < 0.3 and found["share"] == found["own"] / found["tokens"]
    assert found["tokens"] == other.json["counts"]["supervised_tokens"] - other.json["counts"]["turns"]
    shown = headstart("inspect", recipe, *settings, "data.distill.prompts=[]", "--stats")
    assert f"{found['share']:.1%} of {found['tokens']} answer tokens" in shown.out
    assert "WARNING" in shown.out and "data.distill.prompts" in shown.out
    assert "own_choice" not in headstart("inspect", recipe, *settings, "data.distill.prompts=[]", "--json").json
    assert headstart("distill", recipe, *settings, "data.sources=[]").code == 0
    own = headstart("inspect", recipe, *settings, "data.sources=[]", "--stats", "--json").json["own_choice"]
    assert own["share"] > 0.9 and not own["foreign"] and own["tokens"] > 0


def test_inspect_counts_truncations(headstart: Callable, recipe: Path) -> None:
    settings = ("data.distill.prompts=[]", "data.held_out_fraction=0", "data.max_length=40")
    result = headstart("inspect", recipe, *settings, "--json")
    report = result.json["report"]["train"]
    # "<|im_start|>user\nSay 10<|im_end|>\n<|im_start|>assistant\n" is 27 tokens of this tokenizer
    assert result.code == 0 and len(report["truncated"]) + sum(map(len, report["dropped"].values())) < 24
    shorter = headstart("inspect", recipe, *settings[:2], "data.max_length=30", "--json").json["report"]["train"]
    assert len(shorter["truncated"]) == 24


def test_eval_measures_a_ready_head_on_own_prompts(
    headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path
) -> None:
    assert headstart("train", recipe, "train.epochs=1").code == 0
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "One", "category": "a"}\n{"prompt": "Two", "category": "b"}\n')
    head = tmp_path / "run/head"
    options = ("--head", head, "--target", tiny_target, "--data", prompts)
    result = headstart("eval", *options, "eval.max_new_tokens=6", "eval.tree.depth=2", "--json")
    assert result.code == 0, result.err
    report = result.json
    assert sorted(report["tasks"]) == ["a", "b"] and report["tree"]["label"] == "chain2"
    assert report["greedy_identity"]["identical"] == 2
    assert json.loads(Path(report["report"]).read_text())["tau"] == report["tau"]
    plain = headstart("eval", *options[2:], "eval.drafter=none", "eval.max_new_tokens=6", "--json")
    assert plain.code == 0 and plain.json["tau"] == 1.0


def test_doctor_reports_the_machine_and_a_recipe(headstart: Callable, recipe: Path) -> None:
    result = headstart("doctor", recipe, "--json")
    assert result.code == 0, result.err
    checks = {check["name"]: check for check in result.json["checks"]}
    assert {"versions", "processor", "recipe", "target", "chat template", "head", "data"} <= set(checks)
    assert "hidden 32" in checks["target"]["found"] and "[2, 4, 5]" in checks["head"]["found"]
    broken = headstart("doctor", recipe, "head.feature_layers=[1,2,9]", "--json")
    assert broken.code == 1 and not broken.json["ok"]
    assert "feature_layers" in {c["name"]: c["found"] for c in broken.json["checks"]}["head"]


def test_target_list(headstart: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    rows = headstart("target", "list", "--json").json
    assert rows[0]["name"] == "smollm2-135m-instruct" and not rows[0]["cached"]


def test_eval_passes_template_variables(
    headstart: Callable, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.data.chat import ChatFormat

    template = tmp_path / "shout.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '!' if shout else '?' }}{% endif %}"
    )
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "One"}\n')
    asked: list[str] = []
    real = ChatFormat.prompt_ids

    def prompt_ids(self, messages, tools=()):
        ids = real(self, messages, tools)
        asked.append(self.tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(ChatFormat, "prompt_ids", prompt_ids)
    options = ("--target", tiny_target, "--data", prompts, f"target.chat_template={template}", "eval.max_new_tokens=2")
    for more in ((), ("eval.template_kwargs={shout: true}",)):
        assert headstart("eval", *options, "eval.drafter=none", *more).code == 0
    assert asked == ["One?", "One!"]


def test_a_signal_after_the_work_does_not_change_the_exit_code() -> None:
    program = (
        "import os, signal, sys; from headstart.cli import main; sys.argv = ['headstart', '--version']; code = main(); "
        "os.kill(os.getpid(), signal.SIGTERM); sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100).returncode == 0
