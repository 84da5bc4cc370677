"""Several processes that share the cells of a comparison: on several GPUs, or several on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.comparing.cells import Work
from headstart.comparing.work import COST, LOST_CODE, Failures
from headstart.comparing.worker import AGAIN_S
from headstart.console import Console
from headstart.heads.errors import ConfigError, DataError, HeadstartError
from headstart.heads.files import read_json
from headstart.sigterm import stop_if_asked

#: seconds between two looks at the processes, and for which they may save when they are told to stop
LOOK_S, STOP_S = 0.3, 120.0
#: bytes at the end of a process's log that are read to say what it is at
TAIL = 4096
#: how often a process may be started anew in one place, beside once for every cell; how often without a cell's failure
RESTARTS, IDLE = 20, 2


@dataclass
class Place:
    """A place for a process: a card, and which of the processes on it.

    Attributes:
        number: of the place. gpu: as CUDA_VISIBLE_DEVICES names it, None = the CPU.
        first: whether its process times the heads, too. Nothing else runs on its card then.
        starts: how often a process was started here. idle: how often one ended that had failed no cell.
        over: whether it has done what it was told last.
    """

    number: int
    gpu: str | None
    first: bool
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    idle: int = 0
    over: bool = False


class Team:
    """Starts the processes, tells them when to measure, and ends them.

    Args: gpus: one process per entry trains, times `side_by_side`; [None] = the CPU.
    """

    def __init__(self, work: Work, console: Console, gpus: list[str | None], side_by_side: int):
        self.work, self.console = work, console
        self.failures = Failures(work.folder)
        self.places = [
            Place(n * side_by_side + k, gpu, k == 0) for n, gpu in enumerate(gpus) for k in range(side_by_side)
        ]
        self.places.sort(key=lambda place: not place.first)  # few cells are spread over the cards
        self.threads = max(1, (os.cpu_count() or 1) // len(self.places))

    def run(self) -> None:
        """Every phase, one after the other: all processes train, all measure τ, the first of each card times."""
        (self.work.folder / "workers").mkdir(parents=True, exist_ok=True)
        useful = self.places[: max(len(self.work.cells), 1)]
        try:
            self._phase("train", useful)
            self._phase("measure", useful)
            self._leave([place for place in useful if not place.first])
            first = [place for place in useful if place.first]
            if self.work.measure["speed"]["enabled"]:
                self._phase("time", first)
            self._leave(first)
        finally:
            self._stop()

    def _phase(self, word: str, places: list[Place]) -> None:
        for place in places:
            place.over = False
            if place.process is None:
                self._start(place)
            if word != "train":
                self._tell(place, word)
        with self.console.progress(word, "cells", notes=True) as advance:
            while not all(place.over for place in places):
                stop_if_asked()
                for place in places:
                    if not place.over:
                        self._look(place, word)
                advance(*self._counted(word))
                time.sleep(LOOK_S)

    def _look(self, place: Place, word: str) -> None:
        """Whether the process of a place has done what it was told; a lost one is started anew."""
        note, process = self._note(place), place.process
        if process is not None and process.poll() is None:
            place.over = note.get("phase") == f"{word} done"
            return
        code = process.returncode if process is not None else 0
        cell = next((cell for cell in self.work.cells if cell.name == note.get("cell")), None)
        if cell is not None and not self.failures.has(cell):
            self.failures.add(cell, str(note.get("phase")), "ProcessEnded", self._ended(place, code))
        place.idle += cell is None and code != LOST_CODE
        if place.starts > RESTARTS + len(self.work.cells) or place.idle > IDLE:
            raise HeadstartError(f"compare: {self._ended(place, code)}")
        self.console.say(f"{self._ended(place, code)}; another process takes its place")
        self._start(place)
        if word != "train":
            self._tell(place, word)

    def _ended(self, place: Place, code: int) -> str:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"process {place.number} ended with {how}; {self._log(place)} has what it said"

    def _start(self, place: Place) -> None:
        self._note_path(place).unlink(missing_ok=True)
        environment = {**os.environ}
        environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        if place.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = place.gpu
        with self._log(place).open("a", encoding="utf-8") as log:
            place.process = subprocess.Popen(
                [sys.executable, "-m", "headstart.comparing.worker", str(self.work.folder / "work.json"),
                 str(place.number)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=environment,
                start_new_session=True,  # Ctrl-C reaches this command alone, which then tells them
            )  # fmt: skip
        place.starts += 1

    def _tell(self, place: Place, word: str) -> None:
        with suppress(OSError):  # it is gone, which the next look finds
            assert place.process is not None and place.process.stdin is not None
            place.process.stdin.write(f"{word}\n")
            place.process.stdin.flush()

    def _leave(self, places: list[Place]) -> None:
        for place in places:
            self._tell(place, "leave")
        for place in places:
            if place.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    place.process.wait(STOP_S)

    def _stop(self) -> None:
        """End what still works. Every process saves what it has. The signal comes again, because a library that a
        process is inside may swallow it; training that saves takes it any number of times.
        """
        alive = [p.process for p in self.places if p.process is not None]
        until = time.monotonic() + STOP_S
        while (alive := [process for process in alive if process.poll() is None]) and time.monotonic() < until:
            for process in alive:
                process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                for process in alive:
                    process.wait(AGAIN_S)
        for process in alive:
            process.kill()
            process.wait()

    def _counted(self, word: str) -> tuple[int, int, str]:
        """(Cells that are trained or measured, all cells, what failed and what every process is at)."""
        cells, folder = self.work.cells, self.work.folder / "cells"
        if word == "train":
            done = sum((folder / cell.name / COST).is_file() for cell in cells)
        else:
            last = list(self.work.measure["sets"])[-1] if word == "measure" else "speed"
            done = sum((folder / cell.name / "measured" / last / "report.json").is_file() for cell in cells)
        failed = sum(self.failures.has(cell) for cell in cells)
        parts = [f"{failed} failed"] if failed else []
        for place in self.places:
            if not place.over and (name := self._note(place).get("cell")):
                parts.append(f"{name}: {last_said(self._log(place))}")
        return done, len(cells), "  ".join(parts)

    def _note_path(self, place: Place) -> Path:
        return self.work.folder / "workers" / f"{place.number}.json"

    def _note(self, place: Place) -> dict[str, Any]:
        with suppress(DataError, OSError):
            note = read_json(self._note_path(place))
            return note if isinstance(note, dict) else {}
        return {}

    def _log(self, place: Place) -> Path:
        return self.work.folder / "workers" / f"{place.number}.log"


def last_said(log: Path) -> str:
    """The last whole line of a log, up to two spaces: what is done, how much of it, and the time left."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").split("\n")[:-1]
        return lines[-1].split("  ")[0] if lines else ""
    return ""


def cards_of(gpus: str | None, side_by_side: int) -> list[str | None]:
    """The cards of a team, as CUDA_VISIBLE_DEVICES names them; [None] is the CPU, and [] needs no team.

    Args: gpus: numbers of GPUs, separated by commas.
    Raises: ConfigError for numbers that are no GPU of this machine.
    """
    import torch

    if side_by_side < 1:
        raise ConfigError(f"--side-by-side: found {side_by_side}, expected 1 or more")
    if gpus is None and side_by_side == 1:
        return []
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    if gpus is None:
        return [visible[0] if visible else "0"] if count else [None]
    numbers = [text.strip() for text in gpus.split(",")]
    wrong = [text for text in numbers if not text.isdecimal() or int(text) >= count]
    if wrong or len(set(numbers)) < len(numbers):
        there = f"0 to {count - 1}" if count else "none: this machine has no GPU"
        raise ConfigError(f"--gpus: found {gpus!r}, expected different numbers of GPUs, separated by commas ({there})")
    return [visible[int(text)] if visible else text for text in numbers]
