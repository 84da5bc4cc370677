"""`export`: write a head for some engines, then check by their rules that they will load it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import dims_from_json
from headstart.heads.checkpoints.head_files import COMPACT, Contents
from headstart.heads.checkpoints.raw import RawCheckpoint, TensorInfo
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import FAMILIES
from headstart.heads.formats.beside import write_beside
from headstart.heads.formats.calibration import calibration_of
from headstart.heads.formats.check import CheckReport, check_checkpoint, check_directory
from headstart.heads.formats.choices import tables_of
from headstart.heads.formats.config import ExportConfig
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.loading import compare_settings
from headstart.heads.formats.portable import files_of, write_directory
from headstart.heads.formats.recognise import map_foreign
from headstart.heads.formats.shards import shard_bytes
from headstart.heads.formats.sidecar import notes
from headstart.heads.numerics import DTYPES

PORTABLE = "portable"
#: values of export.adapter
ADAPTER_KINDS = ("merged", "separate")


def contents(head: Head, engine: str, provenance: dict[str, Any]) -> Contents:
    """What the directory for an engine holds. Raises: FormatError as `Format.write` does."""
    return FAMILIES[head.family].files.portable(head) if engine == PORTABLE else FORMATS[engine].write(head, provenance)


def check_export(config: ExportConfig, family: str | None = None) -> None:
    """Refuse settings with which no export can be written. Nothing is loaded for it.

    Args: family: of the head, where it is known.
    Raises: ConfigError for an unknown engine, one that does not serve the family, or cannot be used with
        `config.adapter`; an unknown dtype or size.
    """
    known = [PORTABLE, *FORMATS]
    if not config.engines or not set(config.engines) <= set(known):
        raise ConfigError(f"export.engines: found {list(config.engines)}, expected some of {known}")
    if config.adapter not in ADAPTER_KINDS:
        raise ConfigError(f"export.adapter: found {config.adapter!r}, expected one of {', '.join(ADAPTER_KINDS)}")
    unable = [name for name in config.engines if name in FORMATS and not FORMATS[name].adapters]
    if config.adapter == "separate" and unable:
        raise ConfigError(
            f"export.adapter: found separate with export.engines={list(config.engines)}, but "
            f"{FORMATS[unable[0]].name} is not known to apply an adapter to the target that verifies drafts: set "
            "export.adapter=merged"
        )
    if config.dtype not in DTYPES:
        raise ConfigError(f"export.dtype: found {config.dtype!r}, expected one of {sorted(DTYPES)}")
    able = [PORTABLE, *(key for key, engine in FORMATS.items() if family in engine.serves)]
    for name in config.engines:
        if family is not None and name not in able:
            raise ConfigError(
                f"export.engines: {FORMATS[name].name} does not serve {family} heads; expected some of {able}"
            )
    shard_bytes(config.max_shard_size)


def export_head(
    head: Head, directory: Path, config: ExportConfig, provenance: dict[str, Any]
) -> dict[str, CheckReport]:
    """Write one directory per engine: `directory` itself for the first, `directory/<engine>` for each further one.

    Args:
        provenance: as for `save_head`.
    Returns: engine → report of the directory written for it.
    Raises: ConfigError for an unknown engine, one that does not serve the family, an unknown dtype or size;
        FormatError when an engine that a directory was written for would not load it rightly and `config.force` is off;
        and for what `headstart tune` would not have written into the head's headstart.json.
    """
    check_export(config, head.family)
    limit = shard_bytes(config.max_shard_size)
    # a head is exported with what was measured of it, or not at all
    tables_of(provenance)
    calibration_of(provenance)
    reports = {}
    for index, name in enumerate(config.engines):
        place = directory if index == 0 else directory / name
        write_directory(head, place, contents(head, name, provenance), provenance, DTYPES[config.dtype], limit)
        if name in FORMATS:
            FORMATS[name].finish(head.family, place)
        write_beside(place, notes(place))
        reports[name] = check_directory(place, head.dims)
        _require_right(reports[name], name, head.family, config.force)
    return reports


def check_ahead(head: Head, config: ExportConfig, provenance: dict[str, Any]) -> None:
    """Refuse before training what `export_head` would refuse after it, judging by names and shapes alone.

    Args:
        head: on the meta device, bound to its target's ends; nothing of its weights is read.
        provenance: as for `save_head`; the target's name is enough.
    Raises: as `export_head`; and as `load_head` would for what it wrote.
    """
    check_export(config, head.family)
    dims_from_json(json.loads(json.dumps(asdict(head.dims))), "the target", rope=FAMILIES[head.family].files.has_rope)
    for name in config.engines:
        held, place = contents(head, name, provenance), Path(f"the export for {name}")
        files_of(place, held, DTYPES[config.dtype], shard_bytes(config.max_shard_size))
        if held.layout == COMPACT:  # no engine reads it
            continue
        raw = ImaginedCheckpoint.of(held, place)
        _require_right(check_checkpoint(raw, head.dims), name, head.family, config.force)
        compare_settings(map_foreign(raw, head.dims), held.settings or head.config, head.dims, str(place))


def engines_that_load(head: Head, provenance: dict[str, Any]) -> list[str]:
    """Keys of the engines that load what an export of this head writes, judged by names and shapes alone.

    Args: head, provenance: as for `check_ahead`.
    """
    able = []
    for key, engine in FORMATS.items():
        if head.family not in engine.serves:
            continue
        written = PORTABLE if engine.loads_portable(head.family) else key
        try:
            held = contents(head, written, provenance)
            if held.layout != COMPACT and check_checkpoint(
                ImaginedCheckpoint.of(held, Path(f"the export for {written}")), head.dims
            ).loads(key):
                able.append(key)
        except FormatError:
            continue
    return able


@dataclass
class ImaginedCheckpoint(RawCheckpoint):
    """A directory that is not written yet. Tensors on the meta device read as ones."""

    held: dict[str, Tensor] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, held: Contents, place: Path) -> ImaginedCheckpoint:
        tensors = {name: TensorInfo(t.dtype, tuple(t.shape), held.weights) for name, t in held.tensors.items()}
        unread: dict[str, Callable[[str], Tensor]] = {held.weights: held.tensors.__getitem__}
        return cls(place, {**held.config, "dtype": "float32"}, None, tensors, unread, held.tensors)

    def read(self, name: str) -> Tensor:
        tensor = self.held[name]
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape) if tensor.is_meta else tensor


def _require_right(report: CheckReport, name: str, family: str, force: bool) -> None:
    engines = [key for key, engine in FORMATS.items() if engine.loads_portable(family)] if name == PORTABLE else [name]
    bad = [engine for engine in ("headstart", *engines) if not report.loads(engine)]
    if bad and not force:
        found = [report.engines[engine] for engine in bad]
        reasons = "; ".join(f"{each.engine} {each.handling.value}: {each.reasons[0]}" for each in found)
        raise FormatError(f"{report.directory}: {reasons}. Set export.force=true to keep it all the same.")
