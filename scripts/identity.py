"""Values that identify a step's inputs: a file, a data source, a head, the target. Equal inputs give equal values."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.data.config import SourceConfig
from headstart.data.sources.sources import source_files
from headstart.heads.files import explain_read, json_text, read_json, sha256_file
from headstart.heads.formats.sidecar import ADDED, SIDECAR, seal
from headstart.heads.targets.target import TargetConfig
from headstart.heads.targets.tuned import adapter_of_head, read_adapter


def of_file(path: Path) -> str:
    """sha256 of a file (short). Raises DataError when it is missing, no regular file, or cannot be read."""
    with explain_read(path):
        return sha256_file(path)[:16]


def of_saved_head(directory: Path) -> str:
    """A saved head, by its sidecar without what was added there after training: that does not change the head."""
    place = directory / SIDECAR
    kept = read_json(place)
    if not kept.keys() & set(ADDED):
        return of_file(place)
    bare = seal(without(kept, *ADDED))
    return hashlib.sha256(json_text(bare).encode()).hexdigest()[:16]


def of_source(source: SourceConfig) -> dict[str, Any]:
    """A data source: its settings and the digest of its files."""
    values = {name: value for name, value in dataclasses.asdict(source).items() if value is not None}
    if source.on_bad == "stop":
        del values["on_bad"]  # runs made before this setting have no value of it
    if source.path is not None:
        files = source_files(source.path)
        digests = [of_file(file) for file in files]
        several = "".join(f"{file.name} {digest}\n" for file, digest in zip(files, digests, strict=True))
        values["sha256"] = digests[0] if len(files) == 1 else hashlib.sha256(several.encode()).hexdigest()[:16]
    return values


def of_sources(sources: Sequence[SourceConfig]) -> list[dict[str, Any]]:
    return [of_source(source) for source in sources]


def of_target(config: TargetConfig) -> dict[str, Any]:
    """A target: name, revision, precision and template; for a directory also names, sizes and times of its files."""
    values: dict[str, Any] = {"name": config.name, "revision": config.revision, "dtype": config.dtype}
    if config.adapter is not None:
        values["adapter"] = of_adapter(config.adapter)
    if config.chat_template is not None:
        values["chat_template"] = of_file(Path(config.chat_template))
    if config.template_date is not None:
        values["template_date"] = config.template_date
    directory = Path(os.path.expanduser(config.name))
    if directory.is_dir():
        files = sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".json", ".jinja", ".bin"))
        listing = "".join(f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}\n" for p in files)
        values["files"] = hashlib.sha256(listing.encode()).hexdigest()[:16]
    return values


def of_adapter(name: str) -> str:
    """An adapter of the target: the digest of its tensors and settings, or, on the Hub, its name."""
    directory = Path(os.path.expanduser(name))
    return read_adapter(directory, name).digest[:16] if directory.is_dir() else name


def of_head(directory: Path) -> dict[str, str]:
    """Digests of a head's files, by name."""
    files = [p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".json")]
    digests = {path.name: of_file(path) for path in sorted(files)}
    if (adapter := adapter_of_head(directory)) is not None:
        digests[adapter.name] = read_adapter(adapter).digest[:16]
    return digests


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """A copy of `values` without these keys."""
    return {name: value for name, value in values.items() if name not in names}
