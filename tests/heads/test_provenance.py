"""What artefacts say of where they come from."""

from __future__ import annotations

import sys

import pytest

from headstart.heads.provenance import command_line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/a/bin/python3", "/a/bin/headstart", "eval", "--data", "my file"], "headstart eval --data 'my file'"),
        (
            ["/a/bin/python3", "-m", "headstart.bench.decode", "--batch", "1"],
            "python -m headstart.bench.decode --batch 1",
        ),
        (["/a/bin/python3", "/home/me/tools/measure.py", "a=b"], "python measure.py a=b"),
    ],
)
def test_command_line(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    assert command_line() == said
