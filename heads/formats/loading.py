"""Read a head from disk: ours or foreign, shapes compared before memory is spent, every tensor accounted for."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.geometry import dims_from_json
from headstart.heads.checkpoints.raw import RawCheckpoint, open_checkpoint
from headstart.heads.checkpoints.tensor_map import Plan
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import build_head
from headstart.heads.formats.recognise import plan_foreign
from headstart.heads.formats.sidecar import SIDECAR, family_config, verify_seal
from headstart.heads.rope import same_rope


def load_head(directory: Path, dims: HeadDims | None = None) -> Head:
    """A head from our directory or any layout that a family reads, in float32 (cast with `head.to`); `bind` it next.

    Args:
        dims: the target's dimensions; sizes are compared with it. Foreign EAGLE-3 files that do not say which layers
            they read need it.
    Raises: FormatError naming the file, the keys and the remedy; nothing is skipped and nothing is guessed.
    """
    raw = open_checkpoint(Path(directory))
    plan, config = plan_load(raw, dims)
    return instantiate(raw, plan, config)


def plan_load(raw: RawCheckpoint, dims: HeadDims | None) -> tuple[Plan, HeadConfig]:
    """Plan and head config of a checkpoint, ours or foreign; reads only d2t/t2d."""
    if raw.sidecar is not None:
        return _plan_ours(raw, dims)
    plan = plan_foreign(raw, dims)
    return plan, family_config(plan.family, plan.fields, str(raw.directory))


def _plan_ours(raw: RawCheckpoint, target: HeadDims | None) -> tuple[Plan, HeadConfig]:
    where, side = str(raw.directory / SIDECAR), raw.sidecar or {}
    verify_seal(raw, where, side)
    family = side.get("type")
    config = family_config(family, side.get("config"), where)
    dims = dims_from_json(side.get("dims"), where, rope=family != "medusa")
    if target is not None:
        for name in ("hidden_size", "vocab_size", "num_layers"):
            found, expected = getattr(dims, name), getattr(target, name)
            if found != expected:
                raise FormatError(
                    f"{where}: dims.{name} is {found} and the target has {expected}: the head was trained for "
                    "another target"
                )
    if side.get("layout") == "compact":
        return _plan_compact(raw, config, dims), config
    plan = plan_foreign(raw, dims)
    if plan.family != family:
        raise FormatError(f"{where}: says {family} and the tensors are {plan.family}'s; copy the directory again")
    compare_settings(plan, config, dims, where)
    return replace(plan, dims=dims, layout=f"Headstart {side.get('layout')}"), config


def compare_settings(plan: Plan, config: HeadConfig, dims: HeadDims, where: str) -> None:
    """Raises: FormatError unless config.json and the tensors say what the head's settings and dimensions do."""
    found, expected = dict(plan.fields), asdict(config)
    if plan.family == "eagle3":
        head = skeleton(config, dims, where)
        expected["feature_layers"] = list(head.spec.layer_ids)
        expected["draft_vocab_size"] = config.draft_vocab_size or dims.vocab_size  # type: ignore[attr-defined]
        if expected["hidden_size"] == dims.hidden_size:
            expected["hidden_size"] = None
    if plan.family in ("eagle", "eagle3"):
        expected["intermediate_size"] = expected["intermediate_size"] or dims.intermediate_size
        names = ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings")
        found |= {name: getattr(plan.dims, name) for name in names}
        expected = {**{name: getattr(dims, name) for name in names}, "hidden_act": None, **expected}
        expected["hidden_act"] = expected["hidden_act"] or dims.hidden_act
        if not same_rope(plan.dims.rope_parameters, dims.rope_parameters):
            raise FormatError(
                f"{where}: rope {dims.rope_parameters} and config.json's {plan.dims.rope_parameters} differ"
            )
    for name, value in found.items():
        if expected.get(name) != value:
            raise FormatError(
                f"{where}: {name} is {expected.get(name)!r} and config.json with the tensors says {value!r}"
            )


def _plan_compact(raw: RawCheckpoint, config: HeadConfig, dims: HeadDims) -> Plan:
    names = {name: name for name in skeleton(config, dims, str(raw.directory)).state_dict()}
    odd = set(names) ^ set(raw.tensors)
    if odd:
        raise FormatError(
            f"{raw.directory}: tensors {', '.join(sorted(odd)[:8])} are missing or unknown; copy the checkpoint again"
        )
    return Plan("Headstart compact", config.type, asdict(config), dims, names)


def skeleton(config: HeadConfig, dims: HeadDims, where: str) -> Head:
    """The head on the meta device: names and shapes without memory. Buffers a head derives itself stay on the CPU."""
    try:
        with torch.device("meta"):
            return build_head(config, dims)
    except (ConfigError, LookupError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise FormatError(f"{where}: no head can be built from this config: {error}") from error


def check_shapes(raw: RawCheckpoint, plan: Plan, config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Compare every shape with the header before anything is allocated; returns the shapes our head has.

    Raises: FormatError naming the tensor, its shape and the expected one.
    """
    where = str(raw.directory)
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton(config, plan.dims, where).state_dict().items()}
    ids_shape = shapes.pop("draft_ids_U", None)
    sourced = set(plan.names) | set(plan.zeros)
    if sourced != set(shapes):
        odd = sorted(sourced ^ set(shapes))
        raise FormatError(f"{where}: tensors {', '.join(odd[:8])} are missing or unknown for {plan.family}")
    for ours, theirs in plan.names.items():
        info = raw.tensors[theirs]
        if info.shape != shapes[ours] or not info.dtype.is_floating_point:
            raise FormatError(
                f"{where}: {theirs} is {info.dtype} {list(info.shape)}, expected floating point {list(shapes[ours])} "
                "from config.json: the config belongs to another head"
            )
    if (ids_shape is None) != (plan.draft_ids_U is None):
        raise FormatError(f"{where}: a draft vocabulary smaller than the target's needs d2t, and only such a one")
    return shapes


def instantiate(raw: RawCheckpoint, plan: Plan, config: HeadConfig) -> Head:
    """Allocate and fill a head whose shapes agree. Raises: FormatError as `check_shapes` and "
    "`RawCheckpoint.read` do."""
    shapes = check_shapes(raw, plan, config)
    head = build_head(config, plan.dims)
    state = {ours: raw.read(theirs).float() for ours, theirs in plan.names.items()}
    state |= {name: torch.zeros(shapes[name]) for name in plan.zeros}
    if plan.draft_ids_U is not None:
        state["draft_ids_U"] = plan.draft_ids_U
    head.load_state_dict(state, strict=True)
    return head.eval()
