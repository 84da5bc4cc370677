"""Where numbers go: metrics.jsonl always, tensorboard or wandb if asked, a progress bar on stderr."""

from __future__ import annotations

import importlib
import json
import math
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headstart.heads.errors import ConfigError, DiskFullError
from headstart.heads.escape import plain
from headstart.heads.files import explain_disk, unused, write_text
from headstart.heads.published import published
from headstart.train.config import TrainConfig

#: values of a record that a terminal shows, and their short names there; a coverage of 1 is left out
SHOWN = {
    "train/loss": "loss",
    "train/coverage": "coverage",
    "train/walked_tau": "walked τ",
    "valid/loss": "valid loss",
    "valid/coverage": "valid coverage",
    "valid/walked_tau": "valid walked τ",
    "valid/tau": "decoded τ",
    "lr": "lr",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
}


class Tracker(Protocol):
    """Receives every record of the run; only rank 0 has one."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """`metrics.jsonl`: one JSON object per record, `step` first.

    A run that resumes drops the records that were written after its checkpoint. Records that a full disk refuses are
    kept in memory and written with a later one.

    Args:
        resume_step: step of the checkpoint, 0 = the run starts anew.
        validates_again: whether the run will validate at `resume_step` again; it drops that validation's record too.
    """

    def __init__(self, path: Path, resume_step: int = 0, validates_again: bool = False):
        self.path = path
        with explain_disk(path):
            if resume_step and not path.exists():
                warn(f"{path} is gone: the records until step {resume_step} are missing")
            if path.exists():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                kept = [line for line in lines if _is_kept(line, resume_step, validates_again)]
                if any(_step(line) is None for line in lines[:-1]):  # a kill can cut the last one only
                    aside = unused(path.with_name(f"damaged-{path.name}"))
                    shutil.copyfile(path, aside)
                    warn(f"{path} has lines that are no records; they are left out, the file as it was is {aside.name}")
                write_text(path, "".join(line + "\n" for line in kept) if resume_step else "")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        self._unwritten = b""

    def log(self, step: int, values: dict[str, float]) -> None:
        # JSON has no NaN or infinity
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._unwritten += (json.dumps({"step": step, **clean}) + "\n").encode()
        with suppress(DiskFullError):
            self._write()

    def _write(self) -> None:
        with explain_disk(self.path):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Raises DiskFullError when records are still unwritten."""
        try:
            self._write()
        finally:
            self._file.close()


def warn(message: str) -> None:
    print(f"WARNING: {plain(message)}", file=sys.stderr, flush=True)


def _step(line: str) -> float | None:
    """The step of a line of metrics.jsonl; None for a line that is no record, such as one that a kill cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_kept(line: str, resume_step: int, validates_again: bool) -> bool:
    """Whether a run that resumes at `resume_step` keeps this line; see MetricLog."""
    step = _step(line)
    if step is None or not step <= resume_step:
        return False
    is_validation = any(name.startswith("valid/") for name in json.loads(line))
    return not (validates_again and is_validation and step == resume_step)


def last_step(path: Path) -> int:
    """The largest step in a metrics.jsonl, 0 without one."""
    if not path.is_file():
        return 0
    steps = map(_step, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return max((int(step) for step in steps if step is not None and math.isfinite(step)), default=0)


#: `train.tracker` → the module that it needs
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def require_tracker(name: str) -> Any:
    """The module that `train.tracker` needs, None where it needs none. Raises ConfigError where it is not installed."""
    if name not in MODULES:
        return None
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        others = " or ".join(sorted({"none", *MODULES} - {name}))
        raise ConfigError(
            f"train.tracker: {name} is not installed; `pip install {name}`, or set train.tracker to {others}"
        ) from error


class TensorBoardTracker:
    def __init__(self, directory: Path, resume_step: int):
        writer = require_tracker("tensorboard").SummaryWriter
        # purge_step hides what a killed run wrote after the checkpoint that this one continues from
        self._writer = writer(str(directory), purge_step=resume_step + 1 if resume_step else None)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    def __init__(self, directory: Path, config: TrainConfig, name: str):
        wandb = require_tracker("wandb")
        # a run that continues keeps its id; one that starts anew finds this directory moved away
        written = directory / "headstart-id"
        if not written.is_file():
            write_text(written, f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:80]}-{secrets.token_hex(4)}\n")
        run_id = written.read_text().strip()
        try:
            self._run = wandb.init(
                project=config.project, name=name, id=run_id, resume="allow", dir=str(directory),
                config=published(asdict(config)),
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise ConfigError(
                f"train.tracker: wandb does not start ({error}); `wandb login` or WANDB_API_KEY gives it an account, "
                "WANDB_MODE=offline needs none; or set train.tracker=tensorboard or none"
            ) from error

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class RunTracker:
    """The log of a run, and the tracker beside it where one was asked for.

    A failure of that tracker (a full disk, a lost server) does not end the run: metrics.jsonl has every record.

    Args: name: of `beside`, for messages.
    """

    def __init__(self, log: MetricLog, name: str, beside: Tracker | None):
        self._log, self._name, self._beside = log, name, beside

    def log(self, step: int, values: dict[str, float]) -> None:
        self._log.log(step, values)
        self._try(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        try:
            self._log.close()
        finally:
            self._try(lambda tracker: tracker.close())

    def _try(self, act: Callable[[Tracker], None]) -> None:
        if self._beside is None:
            return
        try:
            act(self._beside)
        except Exception as error:
            self._beside = None
            warn(
                f"train.tracker: {self._name} failed ({type(error).__name__}: {error}) and gets no more records; "
                "metrics.jsonl has them all, and training goes on"
            )


def open_tracker(
    config: TrainConfig, run_dir: Path, resume_step: int = 0, validates_again: bool = False
) -> RunTracker:
    """metrics.jsonl, and what `config.tracker` names.

    Args: resume_step, validates_again: see MetricLog.
    Raises: ConfigError when the tracker cannot start.
    """
    beside: Tracker | None = None
    if config.tracker == "tensorboard":
        beside = TensorBoardTracker(run_dir / "tensorboard", resume_step)
    elif config.tracker == "wandb":
        beside = WandbTracker(run_dir / "wandb", config, run_dir.name)
    return RunTracker(MetricLog(run_dir / "metrics.jsonl", resume_step, validates_again), config.tracker, beside)


class Reporter:
    """Shows on stderr how far the run is: a bar on a terminal, a line per record in a log file.

    Args:
        show: False is silent.
        total, unit: what the run is measured by: steps, or seconds.
    """

    def __init__(self, show: bool, total: float, unit: str, console: Console | None = None):
        self._console = console or Console(stderr=True, highlight=False)
        self._show, self._total, self._unit = show, total, unit
        self._bar: Progress | None = None
        self._started: tuple[float, float] | None = None
        if show and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=total, note="")
            self._bar.start()

    def advance(self, done: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, self._total))

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        told = {name: short for name, short in SHOWN.items() if name in values}
        told = {name: short for name, short in told.items() if not (short.endswith("coverage") and values[name] == 1.0)}
        note = "  ".join(f"{short} {values[name]:.4g}" for name, short in told.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, self._total), note=note)
        elif self._show:
            line = f"train step {step}, {done:.0f} of {self._total:g} {self._unit}{self._time_left(done)}  {note}"
            self._console.print(line, soft_wrap=True)
        if self._started is None:
            self._started = (time.monotonic(), done)

    def _time_left(self, done: float) -> str:
        """Time left at the pace since the first record; empty at the first record and at the last."""
        since, first = self._started or (0.0, done)
        if not first < done < self._total:
            return ""
        pace = (done - first) / max(time.monotonic() - since, 1e-9)
        return f"  {timedelta(seconds=round((self._total - done) / pace))} left"

    def say(self, message: str) -> None:
        if self._show:
            self._console.print(plain(message), soft_wrap=True, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
