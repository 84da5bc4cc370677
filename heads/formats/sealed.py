"""Finds what was changed in a directory since Headstart wrote it, by headstart.json, which engines do not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.heads.checkpoints.head_files import COMPACT
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import FAMILIES
from headstart.heads.formats.handling import EngineHandling, Handling
from headstart.heads.formats.loading import exported_settings, skeleton
from headstart.heads.formats.sidecar import SIDECAR, changed_files, verify_sidecar

#: fields that exports for different engines write differently
SPELLED = ("architectures", "model_type", "dtype")


@dataclass(frozen=True)
class Sealed:
    """The head that was exported, from an intact headstart.json.

    Attributes:
        dims: the target's dimensions with the draft layer's geometry.
        config: config.json of the portable form; empty for a compact directory.
        changed: names of the files that are no longer what was exported.
    """

    dims: HeadDims
    config: dict[str, Any]
    changed: list[str]


def read_sealed(raw: RawCheckpoint) -> Sealed | None:
    """What was exported; None where headstart.json is missing or damaged."""
    side = raw.sidecar
    if side is None:
        return None
    where = str(raw.directory / SIDECAR)
    try:
        verify_sidecar(where, side)
        settings, dims = exported_settings(side, where)
        head = skeleton(settings, dims, where)
        config = {} if side.get("layout") == COMPACT else FAMILIES[side["type"]].files.config_json(head)
    except (FormatError, ConfigError):
        return None
    return Sealed(dims, config, changed_files(raw, side))


def add_changes(handling: EngineHandling, sealed: Sealed, raw: RawCheckpoint) -> None:
    """Add what was changed, for one engine. An engine that refuses the directory needs no warning."""
    if not sealed.changed or handling.refused:
        return
    meant = f"if the change is meant, delete {SIDECAR}"
    for name in sealed.changed:
        if name != "config.json":
            reason = (
                f"{name} is not the file that was exported (sha256 differs from {SIDECAR}), which no engine compares"
            )
            handling.add(Handling.WRONG, f"{reason}: copy it again or, {meant}")
    if "config.json" not in sealed.changed:
        return
    differing = [key for key in sealed.config if key not in SPELLED and raw.config.get(key) != sealed.config[key]]
    for key in differing:
        reason = f"config.json: {key} is {raw.config.get(key)!r}, exported as {sealed.config[key]!r}"
        handling.add(Handling.WRONG, f"{reason}: put it back or, {meant}")
    if not differing:
        handling.add(Handling.LOADS, "config.json was changed after the export, in nothing that the head depends on")
