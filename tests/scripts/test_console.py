"""What a command says cannot colour the screen, be taken for markup, or break the JSON of a machine that reads it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Group
from rich.table import Table

from headstart.console import Console

HOSTILE = "[red]a[/red] [bold] \x1b[31m\x9b2J\rb"
SHOWN = "[red]a[/red] [bold] \\x1b[31m\\x9b2J\\rb"


def told(capsys: pytest.CaptureFixture[str], *, as_json: bool = False) -> tuple[Console, io.StringIO]:
    console = Console(as_json)
    console._out = out = io.StringIO()
    return console, out


def test_messages_and_results_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console, out = told(capsys)
    console.say(f"{HOSTILE}\nnext")
    assert capsys.readouterr().err == f"{SHOWN}\nnext\n"
    console.result(None, f"{HOSTILE}\nnext")
    assert out.getvalue() == f"{SHOWN}\nnext\n"


def test_tables_and_groups_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    hostile, shown = HOSTILE.replace("\r", ""), SHOWN.replace("\\r", "")
    table = Table(title=hostile)
    table.add_column(f"column {hostile}")
    table.add_row(f"cell {hostile}")
    console, out = told(capsys)
    console.result(None, Group(table, f"alone {HOSTILE}"))
    for place in ("", "column ", "cell ", "alone "):
        assert f"{place}{shown}" in out.getvalue()
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_progress_lines_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console, _ = told(capsys)
    with console.progress(f"[red]{HOSTILE}", "x") as advance:
        advance(1, 2, HOSTILE)
    assert capsys.readouterr().err.startswith(f"[red]{SHOWN}: {SHOWN}\n")


def test_json_keeps_the_values_and_disturbs_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console, out = told(capsys, as_json=True)
    value = {"task": HOSTILE, "half": "\ud83d", "turned": "\u202e", "τ": "é\u2028"}
    console.result(value)
    assert json.loads(out.getvalue()) == value
    assert not set(out.getvalue()) & set("\x1b\x9b\r\ud83d\u202e\u2028") and "τ" in out.getvalue()


def test_sentences_of_a_result_are_wrapped_and_commands_are_not() -> None:
    from headstart.console import wrapped_lines

    command = "headstart eval --head runs/mine/head --target smollm2-135m-instruct --data my_conversations.jsonl"
    path = "/a/place/" * 12 + "file.json"
    text = f"one two three four five\n    - reads GGUF and writes it\n  {command}\n{path}"
    assert wrapped_lines(text, 20).split("\n") == [
        "one two three four", "five", "    - reads GGUF and", "      writes it", f"  {command}", path,
    ]  # fmt: skip


def test_a_pipe_is_as_wide_as_the_terminal_behind_it(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def widths() -> list[int]:
        table = Table(*(f"a column {n} with a long name" for n in range(4)))
        console, out = told(capsys)
        console.result(None, table)
        console.result(None, "a sentence of many words. " * 5)
        tabled, sentence = out.getvalue().split("a sentence", 1)
        return [max(map(len, tabled.splitlines())), max(map(len, f"a sentence{sentence}".splitlines()))]

    monkeypatch.delenv("COLUMNS", raising=False)
    table, sentence = widths()
    assert 80 < table <= 140 and sentence > 120
    monkeypatch.setenv("COLUMNS", "80")
    assert max(widths()) <= 80
