"""Messages count in words that agree with the number."""

from __future__ import annotations

import pytest
from rich.console import Console

from headstart.data.choosing.mixing import SourceCount
from headstart.data.choosing.split import Split
from headstart.data.prepare import TokenizeReport
from headstart.heads.counting import counted, noun_of
from headstart.initial import Found
from headstart.train.tracking.screen import Screen


@pytest.mark.parametrize(
    ("nouns", "noun"),
    [("conversations", "conversation"), ("held-out prompts", "held-out prompt"), ("GPUs", "GPU"), ("passes", "pass"),
     ("batches", "batch"), ("copies", "copy"), ("responses", "response"), ("sequences", "sequence")],
)  # fmt: skip
def test_one_has_the_singular_and_all_other_numbers_the_plural(nouns: str, noun: str) -> None:
    assert noun_of(1, nouns) == noun_of(1.0, nouns) == noun
    assert {noun_of(number, nouns) for number in (0, 2, 0.5, 21)} == {nouns}


def test_the_number_is_written_as_asked() -> None:
    assert [counted(n, "steps", ",") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
    assert [counted(n, "epochs", ".3g") for n in (0.51234, 1.0, 2.0)] == ["0.512 epochs", "1 epoch", "2 epochs"]


def test_reports_of_one_conversation_say_so() -> None:
    report = TokenizeReport(conversations=1, samples=1, tokens=20, supervised_tokens=5)
    assert report.lines() == ["1 conversation → 1 sample, 20 tokens, 5 supervised (25%)"]
    assert SourceCount("talk", 1.0, None, read=1).asked(0) == "talk: 1 prompt read; 1 asked"
    assert SourceCount("talk", 1.0, None, read=3).asked(1) == "talk: 3 prompts read, 1 bad row; 2 asked"
    cases = ((1, True), (1, False), (1200, True))
    found = [Found({"path": "talk.jsonl"}, count, answered, ["messages"]) for count, answered in cases]
    assert [source.describe() for source in found] == [
        "talk.jsonl: 1 conversation (messages)",
        "talk.jsonl: 1 prompt, which the target answers before training (messages)",
        "talk.jsonl: 1,200 conversations (messages)",
    ]
    split = Split([], [], 9, 1, copied_answers=1, copies=["a"])
    assert split.lines()[:2] == [
        "1 answer left training for repeating held-out text",
        "1 sample left training because of it, having no other answer (a)",
    ]
    assert split.lines()[2].startswith("WARNING: fewer than 20 different held-out prompts (1): numbers on so few")


def test_bars_agree_with_their_total_or_else_with_their_count() -> None:
    screen = Screen(False, Console(quiet=True))
    shown = []
    for done, total in ((0, 1), (1, 1), (1, 3), (1, None), (2, None)):
        bar = screen.new_bar("eval", "prompts", total)
        bar.update(done)
        shown.append(bar.counted())
    assert shown == ["0 of 1 prompt", "1 of 1 prompt", "1 of 3 prompts", "1 prompt", "2 prompts"]
