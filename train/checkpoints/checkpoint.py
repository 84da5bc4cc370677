"""Checkpoints of a run: safetensors and JSON only, written whole or not at all, verified before use.

    checkpoints/
      step-00000100/   head.safetensors  optimizer.safetensors  rng.safetensors  state.json  manifest.json
      latest           name of the newest one
      best/            head.safetensors  state.json  manifest.json   (best validation so far)
      damaged-…/       a checkpoint that failed its check when the run resumed from an older one; kept to look at
      diverged-…/      a checkpoint that was taken between skipped steps (train.nonfinite=skip)

A directory is written under a temporary name and renamed when complete; `manifest.json` holds size and sha256 of
every file. Optimiser state is keyed by parameter name, so it does not depend on the number of ranks.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.errors import DataError, StorageError
from headstart.heads.files import (
    delete,
    explain_disk,
    read_json,
    sha256_file,
    unused,
    write_json,
    write_safetensors,
    write_text,
)
from headstart.train.nonfinite import bad_entries

VERSION = 1
MANIFEST = "manifest.json"
#: files of the best head, and of a checkpoint
BEST_FILES = ("head.safetensors", "state.json")
FILES = (*BEST_FILES, "optimizer.safetensors", "rng.safetensors")


@dataclass
class Checkpoint:
    """A checkpoint in memory (CPU tensors and JSON values).

    Attributes:
        head: the head's state dict.
        optimizer: `<key>/<parameter name>` → tensor (exp_avg, exp_avg_sq, step).
        rng: `rank<r>/cpu`, `rank<r>/cuda` → uint8 state of torch's generators.
        state: JSON: step, packs, elapsed, data, config, best, python/numpy generator states, provenance.
    """

    head: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    state: dict[str, Any]


def rng_state() -> dict[str, Any]:
    """This process's generators: torch (uint8 tensors), python and numpy (JSON values)."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = state
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))


def pack_rng(states: list[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """States of all ranks → (tensors for rng.safetensors, JSON values for state.json)."""
    tensors = {f"rank{r}/{key}": s[key] for r, s in enumerate(states) for key in ("cpu", "cuda") if key in s}
    return tensors, [{"python": s["python"], "numpy": s["numpy"]} for s in states]


def unpack_rng(checkpoint: Checkpoint, rank: int) -> dict[str, Any] | None:
    """State of this rank; None when the checkpoint had fewer ranks (nothing is lost: every pack has its own seed)."""
    saved = checkpoint.state["rng"]
    if rank >= len(saved):
        return None
    prefix = f"rank{rank}/"
    return {**saved[rank], **{k.removeprefix(prefix): v for k, v in checkpoint.rng.items() if k.startswith(prefix)}}


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_directory(path: Path, write: Callable[[Path], None], known: dict[str, Any] | None = None) -> None:
    """Fill a temporary directory through `write`, add the manifest, rename it onto `path` (replacing an old one).

    Args:
        known: manifest entries of files that `write` takes over as they are.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write(temporary)
            files = {
                f.name: (known or {}).get(f.name) or {"bytes": f.stat().st_size, "sha256": sha256_file(f)}
                for f in sorted(temporary.iterdir())
            }
            write_json(temporary / MANIFEST, {"version": VERSION, "files": files})
            _fsync_directory(temporary)
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            if path.exists():
                os.rename(path, old)
            os.rename(temporary, path)
            _fsync_directory(path.parent)
            delete(old)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def damage(path: Path, names: Sequence[str] = FILES) -> str | None:
    """What is wrong with a directory that must hold the files `names`; None when all have their size and hash."""
    try:
        manifest = read_json(path / MANIFEST)
        if manifest["version"] != VERSION:
            return f"version {manifest['version']}, this program reads {VERSION}"
        files = manifest["files"]
        if not isinstance(files, dict):
            return f"{MANIFEST}: found files as a {type(files).__name__}, expected names with sizes and hashes"
        if unlisted := [name for name in names if name not in files]:
            return f"{MANIFEST} does not list {', '.join(unlisted)}"
        for name, facts in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, expected {facts['bytes']}"
            if sha256_file(file) != facts["sha256"]:
                return f"{name} does not have the content that was written (sha256 differs)"
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None for any other name, such as that of a copy beside it."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return None if match is None else int(match[1])


class CheckpointStore:
    """The `checkpoints/` directory of one run. Rank 0 alone writes into it; every rank reads.

    Args: keep: checkpoints that stay, the newest ones; 0 = all.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory, self.keep = directory, keep

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def paths(self) -> list[Path]:
        """Complete checkpoint directories, newest first."""
        steps = {path: step for path in self.directory.glob("step-*") if (step := step_of(path.name)) is not None}
        return sorted(steps, key=steps.__getitem__, reverse=True)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write one, point `latest` at it, delete those beyond `keep`. Raises StorageError when the disk is full.

        A checkpoint that was taken between skipped steps deletes none: its weights may have diverged.
        """
        path = self._path(checkpoint.state["step"])
        tensors = {"head": checkpoint.head, "optimizer": checkpoint.optimizer, "rng": checkpoint.rng}
        self._write(path, tensors, checkpoint.state)
        write_text(self.directory / "latest", path.name + "\n")
        for old in self.paths()[self.keep :] if self.keep and not checkpoint.state.get("skipped") else []:
            self._remove(old)
        return path

    @staticmethod
    def _write(path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        def write(directory: Path) -> None:
            for name, named in tensors.items():
                write_safetensors(directory / f"{name}.safetensors", named)
            write_json(directory / "state.json", {"version": VERSION, **state})

        write_directory(path, write)

    def before_skips(self) -> Path | None:
        """The newest checkpoint that has finite weights and was not taken between skipped steps.

        Newer ones are renamed to `diverged-…`.
        """
        latest = self.directory / "latest"
        for path in self.paths():
            try:
                skipped = read_json(path / "state.json").get("skipped", 0)
                diverged = skipped or bad_entries(load_file(path / "head.safetensors"))
            except (DataError, OSError, SafetensorError):
                diverged = False  # it is damaged, which `find` deals with
            if not diverged:
                write_text(latest, path.name + "\n")
                return path
            os.rename(path, unused(path.with_name(f"diverged-{path.name}")))
        latest.unlink(missing_ok=True)
        return None

    def rewrite_state(self, state: dict[str, Any]) -> Path:
        """Replace the JSON state of the checkpoint of state["step"]. Tensors and generator states stay."""
        path = self._path(state["step"])
        state = state | {"rng": read_json(path / "state.json")["rng"]}
        files = read_json(path / MANIFEST)["files"]
        kept = {name: facts for name, facts in files.items() if name != "state.json"}

        def write(directory: Path) -> None:
            for name in kept:
                try:
                    os.link(path / name, directory / name)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path / name, directory / name)
            write_json(directory / "state.json", {"version": VERSION, **state})

        write_directory(path, write, kept)
        return path

    @staticmethod
    def _remove(path: Path) -> None:
        """Delete a checkpoint. A kill in between leaves no half of it under a valid name."""
        trash = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.rename(path, trash)
        delete(trash)

    def clean(self) -> None:
        """Delete what killed writers left. A checkpoint that was being replaced when they died gets its name back."""
        for old in self.directory.glob(".*.old"):
            path = self.directory / old.name[1:].split(".")[0]
            step, whole = step_of(path.name), self.paths()
            # a checkpoint older than the newest was not being replaced but deleted
            newest = step is not None and (not whole or step > (step_of(whole[0].name) or 0))
            if not path.exists() and (path.name == "best" or newest):
                os.rename(old, path)
        for leftover in [*self.directory.glob(".*.tmp"), *self.directory.glob(".*.old")]:
            delete(leftover)

    def find(self, say: Callable[[str], None]) -> Path | None:
        """The newest intact checkpoint, None when there is none at all.

        Newer ones that are damaged are renamed to `damaged-…`, and `say` tells so.

        Raises: StorageError when there are checkpoints and all are damaged. They keep their names, so that every call
        raises until the user decides: to start over is not this program's choice.
        """
        with explain_disk(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        self.clean()
        faults: dict[Path, str] = {}
        for path in self.paths():
            fault = damage(path)
            if fault is None:
                for damaged, what in faults.items():
                    aside = unused(damaged.with_name(f"damaged-{damaged.name}"))
                    os.rename(damaged, aside)
                    say(f"WARNING: checkpoint {damaged} is damaged: {what}. Set aside as {aside.name}; using {path}.")
                write_text(self.directory / "latest", path.name + "\n")
                return path
            faults[path] = fault
        faults |= {path: "set aside before" for path in self.directory.glob("damaged-step-*") if not faults}
        latest = self.directory / "latest"
        if faults or latest.exists():
            listed = "; ".join(f"{path.name}: {fault}" for path, fault in faults.items())
            what = f"the one that {latest.name} names is gone"
            if faults:
                what = f"every checkpoint is damaged ({listed})"
            raise StorageError(
                f"{self.directory}: no checkpoint can be used: {what}. Put back a copy of one if you have it, start "
                "over with train.resume=false (what is there is kept in previous/), or choose another place with "
                "run_dir=…"
            )
        return None

    @staticmethod
    def head_shapes(path: Path | str) -> dict[str, tuple[int, ...]]:
        """Name and shape of the head's tensors in a checkpoint, without reading them."""
        with safe_open(Path(path) / "head.safetensors", framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def load(path: Path) -> Checkpoint:
        head, optimizer, rng = (load_file(path / f"{name}.safetensors") for name in ("head", "optimizer", "rng"))
        return Checkpoint(head, optimizer, rng, read_json(path / "state.json"))

    def save_best(self, head: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._write(self.directory / "best", {"head": head}, state)

    def best_damage(self) -> str | None:
        """What is wrong with the best head; None when it can be used."""
        return damage(self.directory / "best", BEST_FILES)

    def best_state(self) -> dict[str, Any]:
        """{"name", "value", "step"} of the validation that chose the best head."""
        state = read_json(self.directory / "best" / "state.json")
        return {name: state[name] for name in ("name", "value", "step")}

    def load_best(self) -> dict[str, Tensor]:
        return load_file(self.directory / "best" / "head.safetensors")
