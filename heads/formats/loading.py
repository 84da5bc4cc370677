"""Reads a head from disk, Headstart's own or a foreign one. Shapes are compared before memory is allocated."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.geometry import dims_from_json
from headstart.heads.checkpoints.head_files import COMPACT
from headstart.heads.checkpoints.raw import RawCheckpoint, open_checkpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, require_equal, some
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.formats.recognise import map_foreign, recognise
from headstart.heads.formats.sidecar import SIDECAR, family_config, verify_seal
from headstart.heads.vocab import is_draft_vocab

#: buffer of a head whose draft vocabulary is smaller than the target's
DRAFT_IDS = "draft_ids_U"


def load_head(directory: Path, dims: HeadDims | None = None) -> Head:
    """A head from Headstart's directory or any layout that a family reads, in float32. `bind` it next.

    Args:
        dims: the target's dimensions, with which sizes are compared. A foreign file that does not say which layers its
            head reads needs them.
    Raises: FormatError naming the file, the keys and the remedy; no tensor is skipped and no setting guessed.
    """
    raw = open_checkpoint(Path(directory))
    mapped, config = map_head(raw, dims)
    return instantiate(raw, mapped, config)


def map_head(raw: RawCheckpoint, dims: HeadDims | None) -> tuple[TensorMap, HeadConfig]:
    """The tensors and the head config of a checkpoint, ours or foreign; few tensors are read for it."""
    if raw.sidecar is not None:
        return _map_ours(raw, dims)
    mapped = map_foreign(raw, dims)
    return mapped, family_config(mapped.family, mapped.fields, str(raw.directory))


def _map_ours(raw: RawCheckpoint, target: HeadDims | None) -> tuple[TensorMap, HeadConfig]:
    where, side = str(raw.directory / SIDECAR), raw.sidecar or {}
    verify_seal(raw, where, side)
    config, dims = exported_settings(side, where)
    if target is not None:
        for name in ("hidden_size", "vocab_size", "num_layers"):
            require_equal(where, f"dims.{name}", getattr(dims, name), getattr(target, name))
    if side.get("layout") == COMPACT:
        return _map_compact(raw, config, dims), config
    if (family := recognise(raw)) != side["type"]:
        raise FormatError(f"{where}: says {side['type']} and the other files are {family}'s; copy the directory again")
    mapped = FAMILIES[side["type"]].files.read(raw, dims)
    compare_settings(mapped, config, dims, where)
    return replace(mapped, dims=dims, layout=f"Headstart {side.get('layout')}"), config


def exported_settings(side: dict[str, Any], where: str) -> tuple[HeadConfig, HeadDims]:
    """The head config and the target's dimensions in headstart.json. Raises: FormatError naming the field."""
    config = family_config(side.get("type"), side.get("config"), where)
    return config, dims_from_json(side.get("dims"), where, rope=FAMILIES[side["type"]].files.has_rope)


def compare_settings(mapped: TensorMap, config: HeadConfig, dims: HeadDims, where: str) -> None:
    """Raises: FormatError unless config.json and the tensors say what the head's settings and dimensions do."""
    for name, expected, value in FAMILIES[mapped.family].files.differences(mapped, config, dims):
        raise FormatError(f"{where}: {name} is {expected!r} and config.json with the tensors says {value!r}")


def _map_compact(raw: RawCheckpoint, config: HeadConfig, dims: HeadDims) -> TensorMap:
    names = {name: name for name in skeleton(config, dims, str(raw.directory)).state_dict()}
    odd = set(names) ^ set(raw.tensors)
    if odd:
        raise FormatError(f"{raw.directory}: tensors {some(odd)} are missing or unknown; copy the checkpoint again")
    draft_ids_U = raw.read(names.pop(DRAFT_IDS)) if DRAFT_IDS in names else None
    return TensorMap("Headstart compact", config.type, asdict(config), dims, names, draft_ids_U=draft_ids_U)


def skeleton(config: HeadConfig, dims: HeadDims, where: str) -> Head:
    """The head on the meta device: names and shapes without memory. Buffers that it computes itself are on the CPU."""
    try:
        with torch.device("meta"):
            return build_head(config, dims)
    except (ConfigError, LookupError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise FormatError(f"{where}: no head can be built from this config: {error}") from error


def check_shapes(raw: RawCheckpoint, mapped: TensorMap, config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Compare every shape with the header before anything is allocated.

    Returns: name → shape of the head's tensors.
    Raises: FormatError naming the tensor, its shape and the expected one.
    """
    where = str(raw.directory)
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton(config, mapped.dims, where).state_dict().items()}
    ids_shape = shapes.pop(DRAFT_IDS, None)
    sourced = {*mapped.names, *mapped.zeros, *mapped.pieces}
    if sourced != set(shapes):
        odd = sorted(sourced ^ set(shapes))
        raise FormatError(f"{where}: tensors {', '.join(odd[:8])} are missing or unknown for {mapped.family}")
    for ours, theirs in mapped.names.items():
        info = raw.tensors[theirs]
        if info.shape != shapes[ours] or not info.dtype.is_floating_point:
            raise FormatError(
                f"{where}: {theirs} is {info.dtype} {list(info.shape)}, expected floating point {list(shapes[ours])} "
                "from config.json: the config belongs to another head"
            )
    for ours, piece in mapped.pieces.items():
        info = raw.tensors[piece.name]
        if not piece.fits(info.shape, shapes[ours]) or not info.dtype.is_floating_point:
            part = "" if piece.row is None else f", of which row {piece.row} is"
            raise FormatError(
                f"{where}: {piece.name} is {info.dtype} {list(info.shape)}{part}, expected floating point "
                f"{list(shapes[ours])} from config.json: the config belongs to another head"
            )
    if (ids_shape is None) != (mapped.draft_ids_U is None):
        raise FormatError(f"{where}: a draft vocabulary smaller than the target's needs d2t, and only such a one")
    ids_U = mapped.draft_ids_U
    if ids_U is not None and (ids_U.shape != ids_shape or not is_draft_vocab(ids_U, mapped.dims.vocab_size)):
        raise FormatError(
            f"{where}: {DRAFT_IDS} {list(ids_U.shape)} is no ascending list of {ids_shape} ids below "
            f"{mapped.dims.vocab_size}; copy the checkpoint again"
        )
    return shapes


def instantiate(raw: RawCheckpoint, mapped: TensorMap, config: HeadConfig) -> Head:
    """Allocate and fill a head whose shapes agree.

    Raises: FormatError as `check_shapes` and `RawCheckpoint.read` do.
    """
    shapes = check_shapes(raw, mapped, config)
    head = build_head(config, mapped.dims)
    state = {ours: raw.read(theirs).float() for ours, theirs in mapped.names.items()}
    state |= {ours: piece.of(raw.read(piece.name), shapes[ours]).float() for ours, piece in mapped.pieces.items()}
    state |= {name: torch.zeros(shapes[name]) for name in mapped.zeros}
    if mapped.draft_ids_U is not None:
        state[DRAFT_IDS] = mapped.draft_ids_U
    head.load_state_dict(state, strict=True)
    return head.eval()
