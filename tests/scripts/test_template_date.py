"""A run shows its first day in every command: distillation, inspection, training, evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from headstart.heads.families import build_head
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.formats import save_head
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.saved_heads import trained_date

TEMPLATE = (
    "{{ 'On ' + strftime_now('%d %b %Y') + '\n' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def on(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    class Day(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, day, tzinfo=tz)

    monkeypatch.setattr("headstart.heads.targets.template_date.datetime", Day)


def test_a_run_goes_on_with_the_day_on_which_it_began(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dated.jinja").write_text(TEMPLATE)
    settings = (f"target.chat_template={tmp_path / 'dated.jinja'}", "data.distill.max_new_tokens=4")
    on(monkeypatch, 5)
    before = headstart("inspect", recipe, *settings)
    assert "On 05 Mar 2026" in before.out
    assert not (tmp_path / "run" / "data").exists(), "looking begins no run"
    assert headstart("distill", recipe, *settings).code == 0
    on(monkeypatch, 6)
    again = headstart("distill", recipe, *settings)
    assert again.code == 0 and "skipped" in again.err, again.err
    shown = headstart("inspect", recipe, *settings, "--json", "-n", "40").json
    for sample in shown["samples"]:  # the target's own answers and the file's conversations alike
        assert sample["pieces"][0]["text"].startswith("On 05 Mar 2026")
    note = "the chat template shows the date, which is fixed at 2026-03-05 (target.template_date)"
    assert shown["report"]["train"]["template"] == [note]
    other = headstart("inspect", recipe, *settings, "target.template_date=2026-04-01", "data.distill.prompts=[]")
    assert "On 01 Apr 2026" in other.out


def test_a_template_without_a_date_leaves_no_trace(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    assert headstart("distill", recipe, "data.distill.max_new_tokens=4").code == 0
    assert not (tmp_path / "run" / "data" / "template_date").exists()


def test_a_wrong_date_is_refused_before_any_work(headstart: Callable, recipe: Path) -> None:
    for verb in ("inspect", "distill"):
        result = headstart(verb, recipe, "target.template_date=tomorrow")
        assert result.code == 2 and "target.template_date: found 'tomorrow'" in result.err


@pytest.mark.parametrize(
    ("sidecar", "expected"),
    [
        ({"target": {"template_date": "2026-03-05"}}, "2026-03-05"),
        ({"target": {"template_date": "soon"}}, None),
        ({"target": ["template_date"]}, None),
        ({"target": None}, None),
        ({}, None),
    ],
)
def test_the_day_that_a_sidecar_says(tmp_path: Path, sidecar: dict, expected: str | None) -> None:
    (tmp_path / "headstart.json").write_text(json.dumps(sidecar))
    assert trained_date(tmp_path) == expected
    assert trained_date(None) is None


def test_a_head_is_evaluated_on_the_day_it_was_trained_for(
    headstart: Callable, tiny_target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dated.jinja").write_text(TEMPLATE)
    dated = f"target.chat_template={tmp_path / 'dated.jinja'}"
    on(monkeypatch, 5)
    target = load_target(TargetConfig(name=str(tiny_target), chat_template=str(tmp_path / "dated.jinja")))
    save_head(build_head(EagleConfig(), target.dims), tmp_path / "head", {"target": target.fingerprint()})
    on(monkeypatch, 6)
    asked = ("eval", "--head", tmp_path / "head", "--target", tiny_target, "--data", prompts, "--out", tmp_path / "out")
    result = headstart(*asked, dated, "eval.max_new_tokens=4", "eval.warmup_tokens=0", "--json")
    assert result.code == 0, result.err
    assert result.json["target"]["template_date"] == "2026-03-05"
