"""Where an artefact came from: git revision, package versions, hardware. Everything that a run makes carries it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("headstart", "torch", "transformers", "accelerate", "safetensors", "triton")


def git_revision() -> str:
    """Revision of the checkout that the code runs from; `-dirty` if tracked files differ; `unknown` outside git."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        revision = git("rev-parse", "--short=12", "HEAD")
        return revision + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def command_line() -> str:
    """The command that started this process, as a shell takes it, with programs' names but without their folders.

    `headstart eval …` for an installed script, `python -m headstart.bench.decode …` for a module.
    """
    words = sys.orig_argv[1:] or sys.argv
    if words and not words[0].startswith("-"):
        name = Path(words[0]).name
        return shlex.join([*(["python"] if name.endswith(".py") else []), name, *words[1:]])
    return shlex.join(["python", *words])


def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    installed["torch"] = torch.__version__
    return installed


def device_name(device: torch.device | str = "cpu") -> str:
    """Human name of a device: the GPU's, or the processor's with its core count."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model} ({os.cpu_count()} cores)"


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    return {"git_revision": git_revision(), "versions": versions(), "device": device_name(device)}
