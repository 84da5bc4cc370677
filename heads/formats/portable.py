"""The portable directory: config.json + model.safetensors that engines load, headstart.json that remembers the rest.

| file | read by | holds |
|---|---|---|
| config.json | engines | llama fields of the draft layer, rope in both spellings, feature layers in both countings |
| model.safetensors | engines | the head's own tensors under vLLM's names, d2t, t2d; nothing shared with the target |
| headstart.json | Headstart | head config, target's dimensions and fingerprint, recipe, provenance, sha256 of both |

A Medusa head that shares the target's lm_head (or updates it by low rank) is *saved* compactly, under an
architecture that engines refuse; `export` adds the matrices that engines need.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from headstart.heads import vocab
from headstart.heads.base import Head, HeadConfig, HeadDims, build_head
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.files import require_disk, sha256_file, write_json, write_safetensors
from headstart.heads.formats.geometry import dims_from_json, legacy_rope, rope_parameters, same_rope
from headstart.heads.formats.raw import RawCheckpoint, open_checkpoint
from headstart.heads.formats.readers import Plan, plan_foreign

SCHEMA = 1
SIDECAR = "headstart.json"
COMPACT_ARCHITECTURE = "HeadstartMedusaModel"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# writing


def save_head(head: Head, directory: Path, provenance: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """Write the portable directory (a compact one for Medusa heads without own output matrices).

    Args:
        provenance: where the head comes from; the keys `target` (fingerprint) and `recipe` get their own place.
        dtype: of the stored weights; None keeps the parameters' own.
    Raises: FormatError when the directory holds other weights; StorageError when the disk cannot take the file.
    """
    compact = head.family == "medusa" and head.config.lm_head != "own"  # type: ignore[attr-defined]
    tensors = native_tensors(head) if compact else portable_tensors(head)
    config = compact_config(head) if compact else portable_config(head)
    write_directory(head, Path(directory), "compact" if compact else "portable", config, tensors, provenance, dtype)


def write_directory(
    head: Head,
    directory: Path,
    layout: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    provenance: dict[str, Any],
    dtype: torch.dtype | None,
    weights: str = "model.safetensors",
    settings: HeadConfig | None = None,
) -> None:
    """Weights, then config, then the sidecar that seals both: an interrupted write is recognised when read.

    Args:
        settings: the head config that the file stands for, where merging made it another than the head's own.
    """
    others = [
        path.name
        for path in directory.glob("*")
        if path.suffix in (".safetensors", ".bin", ".pt") and path.name != weights
    ]
    if others:
        raise FormatError(
            f"{directory}: already holds {', '.join(others)}, which engines would load too; choose an empty directory"
        )
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.dtype.is_floating_point else t for name, t in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{directory}: {name} holds NaN or infinite values; take an earlier checkpoint")
    require_disk(directory, sum(t.numel() * t.element_size() for t in tensors.values()) + (1 << 20), "the head")
    kinds = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.dtype.is_floating_point}
    config = {**config, "dtype": kinds.pop() if len(kinds) == 1 else "float32"}
    write_safetensors(directory / weights, tensors)
    write_json(directory / "config.json", config)
    digests = {name: sha256_file(directory / name) for name in (weights, "config.json")}
    write_json(directory / SIDECAR, seal(sidecar(head, settings or head.config, layout, provenance, digests)))


def native_tensors(head: Head) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in head.state_dict().items()}


def portable_tensors(head: Head) -> dict[str, Tensor]:
    """The state dict under portable names; `draft_ids_U` becomes d2t (int64 offsets) and t2d (bool)."""
    tensors = native_tensors(head)
    ids_U = tensors.pop("draft_ids_U", None)
    if ids_U is not None:
        check_draft_ids(ids_U, head.dims.vocab_size)
        tensors["d2t"] = vocab.offsets(ids_U)
        tensors["t2d"] = vocab.membership(ids_U, head.dims.vocab_size)
    return tensors


def check_draft_ids(ids_U: Tensor, vocab_size: int) -> None:
    if not bool((ids_U[1:] > ids_U[:-1]).all()) or int(ids_U[0]) < 0 or int(ids_U[-1]) >= vocab_size:
        raise FormatError(
            f"draft_ids_U: expected ascending distinct ids below {vocab_size}; was init_from_target called?"
        )


def portable_config(head: Head) -> dict[str, Any]:
    """config.json of the portable directory (formats.md), without the dtype."""
    dims = head.dims
    if head.family == "medusa":
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": dims.hidden_size,
            "vocab_size": dims.vocab_size,
            "num_heads": head.depth,
            "num_hidden_layers": head.config.num_layers,  # type: ignore[attr-defined]
            "medusa_fc_bias": True,
        }
    if head.family not in ("eagle", "eagle3"):
        raise FormatError(f"{head.family}: no portable format is known for this family")
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    prefix = "midlayer." if head.family == "eagle3" else "layers.0."
    rope = rope_parameters({"rope_parameters": dims.rope_parameters}, "the target's rope")
    theta, scaling = legacy_rope(rope)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if head.family == "eagle3" else "EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shapes["fc.weight"][0],
        "intermediate_size": shapes[f"{prefix}mlp.gate_proj.weight"][0],
        "num_hidden_layers": 1,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": dims.hidden_act,
        "rms_norm_eps": dims.rms_norm_eps,
        "max_position_embeddings": dims.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": dims.vocab_size,
        "bos_token_id": dims.bos_token_id,
        "eos_token_id": dims.eos_token_id,
    }
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if head.family == "eagle3":
        ids = list(head.spec.layer_ids)
        config |= {
            "draft_vocab_size": shapes["lm_head.weight"][0],
            "target_hidden_size": dims.hidden_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids],
            },
        }
    return config


def compact_config(head: Head) -> dict[str, Any]:
    return {
        "architectures": [COMPACT_ARCHITECTURE],
        "model_type": "headstart_medusa",
        "hidden_size": head.dims.hidden_size,
        "vocab_size": head.dims.vocab_size,
        "note": "Saved without the target's lm_head: run `headstart export` before serving.",
    }


FACTS = {
    "medusa": {
        "feature": "last hidden state after the final norm",
        "block": "h + SiLU(W h + b)",
        "method": "methods.md §1, arXiv 2401.10774",
    },
    "eagle": {
        "feature": "last hidden state after the final norm",
        "input": "fc(cat(embedding, feature)), embedding first, no bias, no input_layernorm, no final norm",
        "method": "methods.md §3, arXiv 2401.15077",
    },
    "eagle3": {
        "feature": "hidden_states[k] at feature_layers (inputs of decoder layers k, before any norm)",
        "residual": "un-normed g (norm_before_residual = false)",
        "recycled": "pre-norm output",
        "method": "methods.md §4, arXiv 2503.01840",
    },
}


def sidecar(
    head: Head, settings: HeadConfig, layout: str, provenance: dict[str, Any], digests: dict[str, str]
) -> dict[str, Any]:
    rest = dict(provenance)
    return {
        "schema": SCHEMA,
        "type": head.family,
        "layout": layout,
        "config": asdict(settings),
        "dims": asdict(head.dims),
        "feature_layers": list(head.spec.layer_ids),
        "facts": FACTS.get(head.family, {}),
        "target": rest.pop("target", None),
        "recipe": rest.pop("recipe", None),
        "provenance": rest,
        "sha256": digests,
    }


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Add a digest over the sidecar itself, so that a damaged one is recognised."""
    value = json.loads(json.dumps(value, default=str))
    return {**value, "digest": _digest(value)}


def _digest(value: dict[str, Any]) -> str:
    body = {key: item for key, item in value.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


# reading


def load_head(directory: Path, dims: HeadDims | None = None) -> Head:
    """A head from our directory or any layout of readers.py, with float32 weights (cast with `head.to`); `bind` it next

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
    return plan, _family_config(plan.family, plan.fields, str(raw.directory))


def _plan_ours(raw: RawCheckpoint, target: HeadDims | None) -> tuple[Plan, HeadConfig]:
    where, side = str(raw.directory / SIDECAR), raw.sidecar or {}
    _verify_seal(raw, where, side)
    family = side.get("type")
    config = _family_config(family, side.get("config"), where)
    dims = dims_from_json(side.get("dims"), where)
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
    _compare_with_sidecar(plan, config, dims, where)
    return replace(plan, dims=dims, layout=f"Headstart {side.get('layout')}"), config


def _verify_seal(raw: RawCheckpoint, where: str, side: dict[str, Any]) -> None:
    if side.get("schema") != SCHEMA:
        raise FormatError(f"{where}: schema {side.get('schema')!r}, this Headstart reads {SCHEMA}: update Headstart")
    if side.get("digest") != _digest(side):
        raise FormatError(
            f"{where}: was changed after it was written. Restore it, or delete it to have the directory read as a "
            "foreign checkpoint"
        )
    digests = side.get("sha256")
    files = {"config.json", *raw.readers}
    if not isinstance(digests, dict) or set(digests) != files:
        raise FormatError(
            f"{where}: seals {sorted(digests or {})} and the directory holds {sorted(files)}; copy it again"
        )
    for name in sorted(files):
        if sha256_file(raw.directory / name) != digests[name]:
            raise FormatError(
                f"{raw.directory / name}: was changed or damaged after the head was saved (sha256 differs from "
                f"{SIDECAR}). Copy it "
                f"again, or, if the change is meant, delete {SIDECAR} to have the directory read as a foreign "
                "checkpoint"
            )


def _family_config(family: Any, values: Any, where: str) -> HeadConfig:
    from headstart.heads import HEADS

    if not isinstance(family, str) or family not in HEADS:
        raise FormatError(f"{where}: type is {family!r}, expected one of {sorted(HEADS)}")
    if not isinstance(values, dict) or "${" in json.dumps(values):
        raise FormatError(f"{where}: config is not a plain object of head settings")
    try:
        merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HEADS[family].config), values))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise FormatError(f"{where}: config does not fit {family}: {str(error).splitlines()[0]}") from error
    for name in ("depth", "num_layers"):
        if not 1 <= getattr(merged, name, 1) <= 64:
            raise FormatError(f"{where}: config.{name} is {getattr(merged, name)}, expected 1 … 64")
    return cast(HeadConfig, merged)


def _compare_with_sidecar(plan: Plan, config: HeadConfig, dims: HeadDims, where: str) -> None:
    found, expected = dict(plan.fields), asdict(config)
    if plan.family == "eagle3":
        head = _skeleton(config, dims, where)
        expected["feature_layers"] = list(head.spec.layer_ids)
        expected["draft_vocab_size"] = config.draft_vocab_size or dims.vocab_size  # type: ignore[attr-defined]
        if expected["hidden_size"] == dims.hidden_size:
            expected["hidden_size"] = None
    if plan.family in ("eagle", "eagle3"):
        expected["intermediate_size"] = expected["intermediate_size"] or dims.intermediate_size
        names = ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings")
        found |= {name: getattr(plan.dims, name) for name in names}
        expected |= {name: getattr(dims, name) for name in names}
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
    names = {name: name for name in _skeleton(config, dims, str(raw.directory)).state_dict()}
    odd = set(names) ^ set(raw.tensors)
    if odd:
        raise FormatError(
            f"{raw.directory}: tensors {', '.join(sorted(odd)[:8])} are missing or unknown; copy the checkpoint again"
        )
    return Plan("Headstart compact", config.type, asdict(config), dims, names)


def _skeleton(config: HeadConfig, dims: HeadDims, where: str) -> Head:
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
    shapes = {name: tuple(tensor.shape) for name, tensor in _skeleton(config, plan.dims, where).state_dict().items()}
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
