"""Every command: help, results on stdout, messages on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

VERBS = "init distill inspect plan train eval tune export report run doctor recipe launch scripts target".split()
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
    assert "the head was trained on the file of these prompts" not in result.err + str(report["notes"])
    trained = headstart("eval", *options[:-1], tmp_path / "prompts.jsonl", "eval.max_new_tokens=6", "--json")
    assert "WARNING: the head was trained on the file of these prompts" in " ".join(trained.err.split())
    assert any(note.startswith("the head was trained on the file of these prompts") for note in trained.json["notes"])
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
    from headstart.data.chat.chat import ChatFormat

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


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_soon(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    """Unless the environment says how they wait."""
    import os

    from headstart.threads import sleep_soon

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    sleep_soon()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_threads_are_told_before_torch_is_loaded(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from headstart.cli import main\n"
        "main(['--version'])\n"
        "print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])\n"
    )
    clean = {name: value for name, value in __import__("os").environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert done.stdout.splitlines()[-1] == "False 3000", done.stderr
