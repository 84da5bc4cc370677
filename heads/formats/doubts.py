"""Oddities that no engine looks for: matrices without content, and settings that no model has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.heads.errors import FormatError, clip
from headstart.heads.families import FAMILIES
from headstart.heads.formats.handling import HeadDirectory

#: a doubtful rms_norm_eps is outside; models have 1e-8 … 1e-5. A smaller one does not keep the norm from dividing by
#: zero, a larger one outweighs the values
EPSILONS = (1e-12, 1e-2)
ZERO = "every value is zero"


def weight_doubts(seen: HeadDirectory) -> tuple[list[str], list[str]]:
    """(doubts, faults) of the weights. Every tensor is read once.

    A matrix or a norm of zeros, or a matrix whose rows are all equal, was lost or never trained: a doubt. A value that
    is not finite is a fault. A bias may well be zero.
    """
    doubts, faults = [], []
    portable = {file: name for name, file in seen.names.items()}
    for file, info in seen.raw.tensors.items():
        if not info.dtype.is_floating_point or info.nbytes == 0:
            continue
        try:
            tensor = seen.raw.read(file)
        except FormatError as error:
            faults.append(str(error))
            continue
        if file.endswith(".bias") or (word := _emptiness(tensor)) is None:
            continue
        if seen.family in FAMILIES and word == ZERO:
            name, meanings = portable.get(file, file), FAMILIES[seen.family].files.zero_at_start
            word = next((meaning for start, meaning in meanings.items() if name.startswith(start)), word)
        doubts.append(f"{file} {list(info.shape)}: {word}")
    return doubts, faults


def _emptiness(tensor: Tensor) -> str | None:
    if not bool(tensor.any()):
        return ZERO
    if tensor.dim() == 2 and len(tensor) > 1 and bool((tensor[1] == tensor[0]).all()):
        return "every row is the same" if bool((tensor == tensor[:1]).all()) else None
    return None


def epsilon_doubts(config: dict[str, Any]) -> list[str]:
    """Doubts about `rms_norm_eps` of a config, and of the configs inside it."""
    doubts = []
    low, high = EPSILONS
    for name in ("", "model", "transformer_layer_config", "text_config"):
        node = config.get(name) if name else config
        value = node.get("rms_norm_eps") if isinstance(node, dict) else None
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
            place = f"{name}.rms_norm_eps" if name else "rms_norm_eps"
            doubts.append(clip(f"config.json: {place} is {value!r}, which no model has (usual: 1e-6 or 1e-5)"))
    return doubts
