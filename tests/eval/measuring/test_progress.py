"""What an evaluation shows while a batch is decoded, which may take minutes: tokens and answers that are there."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from eval_help import CONTEXTS, NEW_TOKENS, Trained
from rich.cells import cell_len
from rich.console import Console

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.measuring import conversations
from headstart.eval.measuring.benchmark import evaluate
from headstart.eval.measuring.report import Report
from headstart.heads.targets.target import Target
from headstart.train.tracking.screen import Screen

Step = tuple[int, int, str]
SAID = re.compile(r"all  (plain|with drafts|warm-up): ([\d,]+) tokens?  (\d+) of (\d+) answers ended")


def seen_of(
    target: Target, head: Any, place: Path, monkeypatch: pytest.MonkeyPatch, watch_s: float = 0.0, **changes: Any
) -> tuple[Report, list[Step]]:
    """A report on three prompts that are decoded together, and what its progress was told."""
    records = [{"id": f"p{n}", "category": "all", "prompt_token_ids": ids} for n, ids in enumerate(CONTEXTS)]
    (place / "ids.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    base = dict(data=str(place / "ids.jsonl"), max_new_tokens=NEW_TOKENS, warmup_tokens=2, batch_size=3)
    config = EvalConfig(**{**base, "tree": TreeConfig(depth=3), "samples": 0, **changes})
    monkeypatch.setattr(conversations, "WATCH_S", watch_s)
    seen: list[Step] = []
    return evaluate(target, head, config, progress=lambda *step: seen.append(step)), seen


def test_tokens_and_ended_answers_are_told_while_a_batch_is_decoded(
    target: Target, eagle3: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, seen = seen_of(target, eagle3.head, tmp_path, monkeypatch)
    assert seen[0] == (0, 3, "all") and seen[-1] == (3, 3, "done")
    told = [(done, *found.groups()) for done, _, what in seen if (found := SAID.fullmatch(what)) is not None]
    begun = [what for *_, what in seen if what.endswith("reading prompts")]
    assert begun == [f"all  {way}: reading prompts" for way in ("warm-up", "plain", "with drafts")]
    assert len(told) == len(seen) - len(begun) - 2
    assert {way for _, way, *_ in told} == {"plain", "with drafts", "warm-up"}
    for way in ("plain", "with drafts"):
        steps = [(done, int(n), int(ended), int(of)) for done, name, n, ended, of in told if name == way]
        tokens, ended = [step[1] for step in steps], [step[2] for step in steps]
        assert tokens == sorted(set(tokens)) and len(tokens) > 2  # every cycle adds some
        # prefill gives the first token of each, which a report does not count
        assert tokens[-1] == report.tokens + 3 and ended == sorted(ended) and ended[-1] == 3
        assert {of for *_, of in steps} == {3}
        # an answer counts once it was decoded both ways
        assert [step[0] for step in steps] == ([0] * len(steps) if way == "plain" else ended)


def test_without_drafts_a_plain_answer_is_a_finished_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, seen = seen_of(target, None, tmp_path, monkeypatch)
    plain = [(done, found[3]) for done, _, what in seen if (found := SAID.fullmatch(what)) and found[1] == "plain"]
    assert plain and [done for done, _ in plain] == [int(ended) for _, ended in plain] and plain[-1][0] == 3


def test_a_batch_is_not_told_of_more_often_than_it_is_worth(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, seen = seen_of(target, None, tmp_path, monkeypatch, watch_s=1e9)
    begun = [(0, 3, f"all  {way}: reading prompts") for way in ("warm-up", "plain")]
    assert seen == [(0, 3, "all"), *begun, (3, 3, "done")]


def test_points_of_a_sweep_tell_it_too(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen = seen_of(target, None, tmp_path, monkeypatch, batch_sizes=[2], sweep_prompts=2)
    points = [(done, what) for done, _, what in seen if what.startswith("batch 2")]
    assert points[0] == (3, "batch 2") and {done for done, _ in points} == {3}
    assert re.fullmatch(r"batch 2  \d+ tokens  \d of \d answers ended", points[-1][1])


def test_it_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a note that is too long, whole parts are left out."""
    monkeypatch.setattr(conversations, "WATCH_S", 0.0)
    out, screen = io.StringIO(), Screen(False, Console(quiet=True))
    terminal = Console(file=out, width=80, force_terminal=True, color_system=None)
    bar = screen.new_bar("eval (up to 1024 tokens)", "prompts", 480)
    asked = conversations.Conversations([], lambda done, total, what: bar.update(done, 480, what))
    for task in ("multi-turn", "a task with a name of its own that is quite long"):
        asked.tell(task)
        asked.decoding("with drafts:")
        asked.watch(123_456, 7, 480)
        bar.grown -= 3000  # a batch that decodes for long
        terminal.print(*bar.rows(screen._clock()))
    bar, note, _, cut = (line.rstrip() for line in out.getvalue().splitlines())
    assert bar.endswith("0 of 480 prompts  this one for 0:50:00")
    assert note == "multi-turn  with drafts: 123,456 tokens  7 of 480 answers ended"
    assert cut == "a task with a name of its own that is quite long  with drafts: 123,456 tokens"
    assert max(cell_len(line) for line in (bar, note, cut)) <= 80
