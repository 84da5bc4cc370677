"""Where numbers go: metrics.jsonl always, tensorboard or wandb if asked, how far a run is on stderr."""

from __future__ import annotations

import importlib
import json
import math
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from headstart.heads.errors import ConfigError, DiskFullError
from headstart.heads.escape import plain
from headstart.heads.files import explain_disk, unused, write_text
from headstart.heads.published import published
from headstart.train.config import TrainConfig
from headstart.train.tracking.screen import Screen, rate_text

#: said once, before the first numbers
EXPLAINED = (
    "train: loss is the weighted sum of the head's loss terms, which metrics.jsonl lists. The accepted length (τ) is "
    "how many tokens a forward of the target gives, 1 without drafts: walked along given text, or decoded as in "
    "serving. Coverage is the share of rows that can train"
)
#: accepted lengths of a record, and how each was measured
LENGTHS = {"walked_tau": " walked", "tau": " decoded"}


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
    """Shows how far the run is: a bar on a terminal, and elsewhere a line every few seconds. Validations are lines.

    Args:
        total, unit: what the run is measured by: steps, or seconds.
        first: see Bar.
    """

    def __init__(self, screen: Screen, total: float, unit: str, first: str | None = None):
        self.screen = screen
        self._bar = screen.new_bar("train", unit, total)
        self._bar.first = first
        self._explained = False

    def start(self) -> None:
        """Show the bar, from the first step that this process makes."""
        self.screen.begin(self._bar)

    def advance(self, done: float) -> None:
        self._bar.update(min(done, self._bar.total or done))

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        """Show the values of a record of metrics.jsonl."""
        if not self._explained:
            self._explained = True
            self.screen.say(EXPLAINED)
        done = min(done, self._bar.total or done)
        held_out = [name for name in values if name.startswith("valid/")]
        if held_out:
            self.screen.say(f"train: held out at step {step}:  {shown(values, 'valid')}")
            return
        number = f"step {step}  " if self._bar.unit == "s" else ""
        self._bar.update(done, note=f"{number}{shown(values, 'train')}")
        self.screen.tell(self._bar)

    def say(self, message: str) -> None:
        self.screen.say(message)

    def close(self) -> None:
        self.screen.end(self._bar)


def shown(values: dict[str, float], part: str) -> str:
    """The values of a record that a person looks at. Args: part: "train" or "valid"."""
    names = {name.removeprefix(f"{part}/"): value for name, value in values.items()}
    parts = []
    if "loss" in names:
        terms = [f"{name.removeprefix('loss_')}: {value:.2f}" for name, value in names.items() if "loss_" in name]
        parts.append(f"loss {names['loss']:.4g}" + (f" ({', '.join(terms)})" if terms else ""))
    lengths = [f"{names[name]:.2f}{said if part == 'valid' else ''}" for name, said in LENGTHS.items() if name in names]
    parts += [f"accepted length {', '.join(lengths)}"] if lengths else []
    if "tokens_per_s" in names:
        parts.append(f"{rate_text(names['tokens_per_s'])} tokens/s")
    if "mfu" in names:
        parts.append(f"MFU {names['mfu']:.0%}")
    if names.get("coverage", 1.0) != 1.0:
        parts.append(f"coverage {names['coverage']:.0%}")
    if "lr" in names:
        parts.append(f"lr {names['lr']:.2g}")
    return "  ".join(parts)
