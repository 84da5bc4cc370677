"""Checks a local model directory before transformers opens it.

Looked for are pipes and devices, JSON that is none, and a draft head or a run in place of the model.
"""

from __future__ import annotations

import os
from pathlib import Path

from headstart.heads.errors import HeadstartError, TargetError
from headstart.heads.files import explain_read, read_json, require_regular

#: endings of the files that transformers opens
SUFFIXES = {".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".py"}
#: JSON objects that decide what the model is; a few KiB each
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")


def check_model_directory(directory: Path) -> None:
    """Raise TargetError naming the first file that would hang or crash its reader.

    Reading a pipe that nobody writes to, or a device, never ends. JSON nested thousands deep stops the parser with an
    error that names no file. Of a head's directory transformers says that it lacks a tokenizer.
    """
    if (found := _other_directory(directory)) is not None:
        raise TargetError(
            f"target.name: {directory} is {found}; expected the model that the head drafts for, a transformers "
            "checkpoint directory"
        )
    try:
        with explain_read(directory):
            files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
        for path in files:
            with explain_read(path):
                require_regular(path)
            if path.name in CONFIGS and not isinstance(read_json(path), dict):
                raise TargetError(f"{path}: found no JSON object, expected one")
    except TargetError:
        raise
    except HeadstartError as error:
        raise TargetError(f"target.name: {error}: copy the model again, or give another directory") from error


def _other_directory(directory: Path) -> str | None:
    """What of Headstart's own a directory is in place of a model, or None. A file that cannot be seen is not there."""
    if os.path.isfile(directory / "headstart.json"):
        return "a draft head (it holds headstart.json)"
    if not os.path.lexists(directory / "config.json") and os.path.isfile(directory / "head" / "headstart.json"):
        return "a run's directory (its head lies in head/)"
    return None
