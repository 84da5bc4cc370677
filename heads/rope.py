"""Rotary positions (rope) of a draft layer: the settings it takes from its target, and those it can compute.

A draft layer is a plain Llama layer. It uses the target's base and scaling, which every engine reads from the head's
config.json. It leaves out settings of the target's own layers (NOT_DRAFTED). A field that no table below lists is an
error when a head is built, before training: engines might apply it where the head does not.
"""

from __future__ import annotations

import sys
from typing import Any

from headstart.heads.errors import FormatError

NUMBERS = (
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
LISTS = ("short_factor", "long_factor")
FLAGS = ("truncate",)
#: rope type → fields that it needs
TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
#: field of a target's rope that a draft layer leaves out → why it may
NOT_DRAFTED = {
    "type": "the older name of rope_type",
    "max_position_embeddings": "a copy of the config's own",
    "mrope_section": "text has the same position on all axes, so they rotate as one axis does",
    "mrope_interleaved": "text has the same position on all axes, so they rotate as one axis does",
    "llama_4_scaling_beta": "it scales the target's own queries, by 1 up to its original length",
}
#: field → the value that has no effect
NEUTRAL = {"partial_rotary_factor": 1.0, "rope_type": "default"}


def number(config: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    """A finite positive number. Raises FormatError otherwise."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise FormatError(f"{where}: {name} is {value!r}, expected a positive number")
    return float(value)


def drafted_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The part of a target's `rope_parameters` that a draft layer uses (transformers v5, one kind of attention).

    Unknown fields are kept: `checked_rope` raises for them when a layer is built.
    """
    left_out = {*NOT_DRAFTED, *(key for key, value in NEUTRAL.items() if rope.get(key) == value)}
    kept = {key: value for key, value in rope.items() if value is not None and key not in left_out}
    kept.setdefault("rope_type", rope.get("type") or "default")
    kept.setdefault("rope_theta", 10000.0)
    if kept["rope_type"] == "proportional" and kept.get("factor", 1.0) == 1.0:
        # Gemma 4 rotates some pairs, with the frequencies of a full rotation; a draft layer rotates all pairs
        return {"rope_type": "default", "rope_theta": kept["rope_theta"]}
    return kept


def checked_rope(found: dict[str, Any], where: str) -> dict[str, Any]:
    """The rope settings, checked: known fields only, numbers as float, `rope_type` and `rope_theta` always present.

    Raises: FormatError naming the unknown type or field, or the wrong value.
    """
    rope = {key: value for key, value in found.items() if value is not None}
    kinds = {rope.pop(key) for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    kinds.discard("default") if len(kinds) > 1 else None
    kind = kinds.pop() if len(kinds) == 1 else ("default" if not kinds else None)
    if kind not in TYPES:
        raise FormatError(
            f"{where}: rope type {found.get('rope_type', found.get('type'))!r}; known: {', '.join(TYPES)}"
        )
    result: dict[str, Any] = {"rope_type": kind}
    rope.setdefault("rope_theta", 10000.0)
    for key, value in rope.items():
        if key in NUMBERS:
            value = number(rope, key, f"{where}: rope")
            if key not in NEUTRAL or value != NEUTRAL[key]:
                result[key] = int(value) if key == "original_max_position_embeddings" else value
        elif key in LISTS and isinstance(value, list) and len(value) <= 4096:
            result[key] = [number({key: item}, key, f"{where}: rope") for item in value]
        elif key in FLAGS and isinstance(value, bool):
            result[key] = value
        else:
            known = ", ".join(NUMBERS + LISTS)
            raise FormatError(f"{where}: rope field {key} = {value!r} is not known; known: {known}")
    missing = [key for key in TYPES[kind] if key not in result]
    if missing:
        raise FormatError(f"{where}: rope type {kind} needs {', '.join(missing)}")
    if result.get("partial_rotary_factor", 1.0) > 1:
        raise FormatError(f"{where}: partial_rotary_factor is {result['partial_rotary_factor']}, expected at most 1")
    return result


def same_rope(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two v5 rope dictionaries give the same rotation. A field at its neutral value counts as absent."""

    def clean(rope: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in rope.items() if value is not None and NEUTRAL.get(key) != value}

    return clean(left) == clean(right)


def positions_with_one_rope(rope: dict[str, Any]) -> int | None:
    """Longest context whose positions all rotate by the same frequencies; None if any length does.

    LongRoPE has two sets of frequencies. Beyond the original length, transformers uses the long set for all positions
    of a forward; vLLM uses it if it is launched with a longer context. Keys in the cache keep the rotation they had.
    So a head is trained, measured and served within the original length, where everybody uses the short set. The target
    is held to that set as well (locate.keep_first_frequencies).
    """
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None


def dynamic_note(rope: dict[str, Any]) -> str | None:
    """A warning about a dynamic rope, which vLLM and SGLang apply at every length; None for other ropes."""
    if rope.get("rope_type") != "dynamic" or rope.get("factor", 1.0) == 1.0:
        return None
    base = rope["factor"] ** 2 - rope["factor"] + 1
    return (
        f"dynamic rope: vLLM and SGLang rotate all positions, the target's too, with a base {base:g}^(d/(d-2)) times "
        "as large (d: rotary width). transformers, and so the training, does that only beyond the original length. "
        "Expect these engines to accept less than is measured here"
    )
