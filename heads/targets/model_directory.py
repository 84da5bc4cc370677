"""Checks a local model directory before transformers opens it: for pipes and devices, and for JSON that is none."""

from __future__ import annotations

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
    error that names no file.
    """
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
