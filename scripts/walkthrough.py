"""Follows the laptop walk-through of the docs with an own file: from `git clone` to a verdict, and says what it took.

python3 scripts/walkthrough.py FILE.jsonl [DIRECTORY]

FILE.jsonl holds one conversation a line: {"messages": [{"role": "user", "content": "…"}, {"role": "assistant",
"content": "…"}]}. Everything is made in DIRECTORY (default: a new temporary one). Every command stands in
docs/walkthrough-laptop.md, and is typed as it stands there, in bash. The exit code is 1 where a command fails or is
killed, and where no verdict is printed. It needs nothing but Python, git and bash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

#: what a reader types, in this order; CLONE stands for the repository's address
CLONE = "git clone"
COMMANDS = (
    "bash scripts/install.sh",
    ". .venv/bin/activate",
    "headstart init --target smollm2-135m-instruct --data my_conversations.jsonl --gpu none --out mine.yaml",
    "headstart plan mine.yaml",
    "headstart inspect mine.yaml --n 2",
    "headstart run mine.yaml",
)
#: most minutes that the docs promise
MINUTES = 25


@dataclass
class Step:
    """What a command took.

    Attributes:
        seconds, cpu_seconds: on the clock, and of processors.
        peak_gib: most memory of its largest process.
        code: exit code; below 0, the signal that ended it.
    """

    command: str
    seconds: float
    cpu_seconds: float
    peak_gib: float
    code: int


def main(arguments: list[str]) -> int:
    """Follow the walk-through. Args: arguments: FILE, and where to work."""
    if not 1 <= len(arguments) <= 2 or not Path(arguments[0]).is_file():
        print((__doc__ or "").split("\n\n")[1], file=sys.stderr)
        return 2
    file = Path(arguments[0]).resolve()
    place = Path(arguments[1]) if len(arguments) == 2 else Path(tempfile.mkdtemp(prefix="headstart-walkthrough-"))
    place.mkdir(parents=True, exist_ok=True)
    repository = os.environ.get("REPOSITORY", str(Path(__file__).resolve().parents[1]))
    steps, before, checkout = [], [], place / "headstart"
    step = follow(f"{CLONE} -q {repository} headstart", place, [])
    steps.append(step)
    if step.code == 0:
        shutil.copyfile(file, checkout / "my_conversations.jsonl")
    for command in COMMANDS if step.code == 0 else ():
        if command.startswith(". "):  # changes the shell that later commands are typed in
            before.append(command)
            continue
        steps.append(follow(command, checkout, before))
        if steps[-1].code != 0:
            break
    return told(steps, place)


def follow(command: str, place: Path, before: list[str]) -> Step:
    """Type a command. Its output goes to the screen, and that of the last one to `output` too.

    Args: before: commands that were typed in this shell before it.
    """
    print(f"\n$ {command}", flush=True)
    began = time.monotonic()
    typed = " && ".join([*before, f"exec {command}"])
    with (place / "output").open("wb") as kept:
        child = subprocess.Popen(
            ["bash", "-c", typed], cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            env={**os.environ, "COLUMNS": str(shutil.get_terminal_size().columns)},
        )  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            kept.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
    # with what its children took: their sum of time, and the memory of the largest
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return Step(
        command, time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, child.returncode
    )


def told(steps: list[Step], place: Path) -> int:
    """Say what the steps took and whether the walk-through holds. Returns: the exit code."""
    print(f"\n{'command':<46}{'minutes':>10}{'CPU min':>10}{'peak GiB':>10}")
    for step in steps:
        took = f"{step.seconds / 60:>10.1f}{step.cpu_seconds / 60:>10.1f}{step.peak_gib:>10.1f}"
        print(f"{step.command[:45]:<46}{took}")
    minutes = sum(step.seconds for step in steps) / 60
    print(f"{'together':<46}{minutes:>10.1f}{sum(step.cpu_seconds for step in steps) / 60:>10.1f}")
    last, output = steps[-1], place / "headstart" / "output"
    if last.code != 0:
        ended = f"was ended by signal {-last.code}" if last.code < 0 else f"failed with exit code {last.code}"
        print(f"FAILED: `{last.command}` {ended}")
    elif "Verdict: " not in output.read_text(encoding="utf-8", errors="replace"):
        print(f"FAILED: `{last.command}` printed no verdict")
    elif minutes > MINUTES:
        print(f"FAILED: it took {minutes:.1f} minutes, and the docs promise at most {MINUTES}")
    else:
        print(f"the walk-through holds: a verdict after {minutes:.1f} minutes; what it made lies in {place}")
        return 0
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
