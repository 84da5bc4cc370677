"""headstart.json: what a head directory holds beside the files for engines. It is sealed, which shows damage."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.errors import FormatError, HeadstartError, TargetError, first_line
from headstart.heads.families import FAMILIES
from headstart.heads.files import read_json, sha256_file, write_json
from headstart.heads.published import published
from headstart.heads.repository import is_repository
from headstart.heads.targets.fetch import TARGETS
from headstart.heads.targets.tuned import ADAPTER, adapter_of_head, read_adapter

SCHEMA = 1
SIDECAR = "headstart.json"
#: type of every field; a field may be missing
KINDS: dict[str, type] = {
    "type": str,
    "layout": str,
    "config": dict,
    "dims": dict,
    "feature_layers": list,
    "facts": dict,
    "target": dict,
    "recipe": dict,
    "provenance": dict,
    "sha256": dict,
    "tuned": dict,
    "quality": dict,
    "calibration": dict,
}
#: fields that are added to a saved head later, and do not change it
ADDED = ("tuned", "quality", "calibration", "measured")
#: most items of a list, or characters of a text, in the head's settings
MAX_ITEMS = 64


def sidecar(
    head: Head, settings: HeadConfig, layout: str, provenance: dict[str, Any], digests: dict[str, str]
) -> dict[str, Any]:
    """headstart.json of a head, not sealed yet.

    Args:
        settings: the head config that the files stand for, of the family whose form they have.
        provenance: as for `save_head`.
        digests: name of every other file → its sha256.
    """
    rest = published(provenance)
    added = {name: value for name in ADDED if (value := rest.pop(name, None))}
    return {
        "schema": SCHEMA,
        "type": settings.type,
        "layout": layout,
        "config": asdict(settings),
        "dims": asdict(head.dims),
        "feature_layers": list(head.spec.layer_ids),
        "facts": FAMILIES[settings.type].files.facts_of(settings),
        "target": rest.pop("target", None),
        "recipe": rest.pop("recipe", None),
        "provenance": rest,
        "sha256": digests,
        **added,
    }


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Add a digest over the sidecar itself, so that a damaged one is recognised."""
    value = json.loads(json.dumps(value, default=str))
    return {**value, "digest": _digest(value)}


def _digest(value: dict[str, Any]) -> str:
    body = {key: item for key, item in value.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def verify_seal(raw: RawCheckpoint, where: str, side: dict[str, Any]) -> None:
    """Raises: FormatError unless headstart.json and the files that it seals are as they were written."""
    verify_sidecar(where, side)
    digests, files = side.get("sha256"), sealed_files(raw)
    if not isinstance(digests, dict) or set(digests) != files:
        raise FormatError(
            f"{where}: seals {sorted(digests or {})} and the directory holds {sorted(files)}; copy it again"
        )
    if changed := changed_files(raw, side):
        raise FormatError(
            f"{raw.directory / changed[0]}: was changed or damaged after the head was saved (sha256 differs from "
            f"{SIDECAR}). Copy it again, or, if the change is meant, delete {SIDECAR} to have the directory read as a "
            "foreign checkpoint"
        )


def verify_sidecar(where: str, side: dict[str, Any]) -> None:
    """Raises: FormatError unless the sidecar itself is as it was written."""
    if side.get("schema") != SCHEMA:
        raise FormatError(f"{where}: schema {side.get('schema')!r}, this Headstart reads {SCHEMA}: update Headstart")
    if side.get("digest") != _digest(side):
        raise FormatError(
            f"{where}: was changed after it was written. Restore it, or delete it to have the directory read as a "
            "foreign checkpoint"
        )
    if (name := misshapen(side)) is not None:
        raise FormatError(
            f"{where}: {name} is {side[name]!r}, expected {KINDS[name].__name__} (JSON): copy the directory again"
        )


def misshapen(side: dict[str, Any]) -> str | None:
    """The first field of a wrong type, or None. A sealed file can have one: whoever wrote it sealed it."""
    return next((name for name, kind in KINDS.items() if not isinstance(side.get(name), kind | None)), None)


def sealed_files(raw: RawCheckpoint) -> set[str]:
    return {"config.json", *raw.readers}


def changed_files(raw: RawCheckpoint, side: dict[str, Any]) -> list[str]:
    """Files of the directory whose checksum differs from the one in headstart.json, or is not in it."""
    digests = side.get("sha256")
    digests = digests if isinstance(digests, dict) else {}
    changed = [name for name in sorted(sealed_files(raw)) if sha256_file(raw.directory / name) != digests.get(name)]
    return changed + ([ADAPTER] if adapter_changed(raw.directory, side) else [])


def adapter_changed(directory: Path, side: dict[str, Any]) -> bool:
    """Whether an adapter lies beside the head, and is not the one of the target that the head was trained for."""
    place, target = adapter_of_head(directory), side.get("target")
    if place is None:
        return False
    try:
        digest = read_adapter(place).digest
    except TargetError:
        return True
    return not isinstance(target, dict) or digest != target.get("adapter_digest")


def annotate(directory: Path, values: dict[str, Any]) -> None:
    """Add notes to headstart.json of a head directory, or replace them, and seal it again. Private paths are left out.

    Raises: FormatError when there is none.
    """
    place = directory / SIDECAR
    if not place.is_file():
        raise FormatError(f"{place}: not there; only directories that Headstart wrote can keep notes")
    write_json(place, seal({**read_json(place), **published(values)}))


def notes(directory: Path) -> dict[str, Any]:
    """The sidecar of a head directory, or {} where it has none or one that cannot be read."""
    place = directory / SIDECAR
    try:
        side = read_json(place) if place.is_file() else {}
    except HeadstartError:
        return {}
    return side if isinstance(side, dict) and misshapen(side) is None else {}


def hub_name(target: dict[str, Any]) -> str | None:
    """The target's id on the Hub, from what headstart.json says about it; None where it has none."""
    name = str(target.get("hub_id") or target.get("name") or "")
    name = TARGETS[name].hub_id if name in TARGETS else name
    return name if is_repository(name) else None


def served_name(target: dict[str, Any]) -> str | None:
    """What engines load as the target, from what headstart.json says about it: for a tuned one, the merged model.

    That is a Hub id, or `target`, the folder beside the head.
    """
    served = target.get("served_as")
    return served if isinstance(served, str) and served else hub_name(target)


def family_config(family: Any, values: Any, where: str) -> HeadConfig:
    """The head config in a file. Raises: FormatError for one of no family, or with a wrong or too large value."""
    if not isinstance(family, str) or family not in FAMILIES:
        raise FormatError(f"{where}: type is {family!r}, expected one of {sorted(FAMILIES)}")
    if not isinstance(values, dict) or "${" in json.dumps(values):
        raise FormatError(f"{where}: config is not a plain object of head settings")
    for name, value in values.items():
        if isinstance(value, list | dict | str) and len(value) > MAX_ITEMS:
            raise FormatError(f"{where}: config.{name} holds {len(value)} items, expected at most {MAX_ITEMS}")
    try:
        merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(FAMILIES[family].config), values))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise FormatError(f"{where}: config does not fit {family}: {first_line(error)}") from error
    config = cast(HeadConfig, merged)
    for name, value, most in config.beyond_limits():
        raise FormatError(f"{where}: config.{name} is {value}, expected 1 … {most}")
    return config
