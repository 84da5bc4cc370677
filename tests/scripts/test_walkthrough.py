"""The script that follows the laptop walk-through: what it types stands in the docs, and it fails when a step does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from headstart import walkthrough

ROOT = Path(__file__).resolve().parents[2]


def commands_of_docs() -> list[str]:
    """Every command of a bash block of the README and of the walk-through, without its comment."""
    found = []
    for page in (ROOT / "README.md", ROOT / "docs/walkthrough-laptop.md"):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += [re.sub(r"\s+#.*", "", line).strip() for line in block.splitlines()]
    return found


def test_every_command_stands_in_the_docs() -> None:
    known = commands_of_docs()
    assert [command for command in walkthrough.COMMANDS if command not in known] == []


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with nothing to install, and what each command of the walk-through does in it."""
    place = tmp_path / "repository"
    place.mkdir()
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    (place / "file").write_text("x\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setenv("REPOSITORY", str(place))
    return place


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("echo Verdict: drafting pays", 0, "the walk-through holds: a verdict after"),
        ("echo all is well", 1, "printed no verdict"),
        ("bash -c 'echo Verdict: x; exit 3'", 1, "failed with exit code 3"),
        ("bash -c 'echo Verdict: x; kill -KILL $$'", 1, "was ended by signal 9"),
    ],
)
def test_it_fails_where_a_step_fails(
    last: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "log.jsonl"
    data.write_text('{"messages": []}\n')
    monkeypatch.setattr(walkthrough, "COMMANDS", ("cat my_conversations.jsonl", ". ./file || true", last))
    assert walkthrough.main([str(data), str(tmp_path / "there")]) == code
    out = capfd.readouterr().out
    assert said in out and '{"messages": []}' in out
    # Linux counts what the parent held before the child began as the child's peak: here, that of the test's process
    assert re.search(r"^cat my_conversations.jsonl +0\.\d +0\.\d +\d+\.\d$", out, re.MULTILINE)


def test_without_a_file_it_says_how_it_is_called(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert walkthrough.main([]) == walkthrough.main([str(tmp_path / "none.jsonl")]) == 2
    assert "python3 scripts/walkthrough.py FILE.jsonl" in capsys.readouterr().err
