"""Medusa checkpoints in vLLM's, FasterDecoding's and TGI's spelling (methods §1)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headstart.heads.checkpoints.geometry import flag, integer
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import Plan, require_equal, require_names, some
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError

MEDUSA_KEYS = (
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), "blocks.{0}.layers.{1}.{2}"),
    (re.compile(r"lm_heads\.(\d+)\.(weight)"), "lm_heads.{0}.{1}"),
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), "blocks.{0}.layers.{1}.{2}"),
    (re.compile(r"(\d+)\.(\d+)\.(weight)"), "lm_heads.{0}.{2}"),
)


def medusa_names(tensors: Iterable[str], where: str) -> dict[str, str]:
    """Our tensor name → file name for every Medusa spelling. Raises FormatError for keys of no known spelling."""
    names: dict[str, str] = {}
    unknown = []
    for name in tensors:
        short = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        found = next(
            ((pattern.fullmatch(short), ours) for pattern, ours in MEDUSA_KEYS if pattern.fullmatch(short)), None
        )
        if found is None or found[0] is None:
            unknown.append(name)
            continue
        ours = found[1].format(*(str(int(part)) if part.isdigit() else part for part in found[0].groups()))
        if ours in names:
            raise FormatError(f"{where}: {names[ours]} and {name} are the same tensor ({ours}); keep one")
        names[ours] = name
    if unknown:
        raise FormatError(
            f"{where}: tensors {some(unknown)} belong to no Medusa head that Headstart knows; it would be read in part"
        )
    return names


def is_medusa(raw: RawCheckpoint) -> bool:
    config = raw.config
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and "MedusaModel" in architectures
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config or named


def plan_medusa(raw: RawCheckpoint, target: HeadDims | None, where: str) -> Plan:
    """Medusa in vLLM's, FasterDecoding's or TGI's spelling (methods §1). The tensors, not the config, count the heads:
    published configs are known to say fewer than the file holds."""
    config = raw.config
    names = medusa_names(raw.tensors, str(raw.directory))
    heads = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
    layers = len({name.split(".")[3] for name in names if name.startswith("blocks.0.")})
    if not heads or not layers:
        raise FormatError(f"{raw.directory}: no Medusa residual blocks among {some(raw.tensors)}")
    first = raw.tensors[names.get("blocks.0.layers.0.weight", next(iter(names.values())))]
    hidden = integer(config, "hidden_size", where, default=first.shape[-1])
    matrices = sorted(name for name in names if name.startswith("lm_heads."))
    original = flag(config, "original_lm_head", where, False)
    own = bool(matrices) and not original
    if original and matrices != ["lm_heads.0.weight"]:
        raise FormatError(
            f"{where}: original_lm_head is true, so exactly lm_heads.0.weight is expected; found {matrices}"
        )
    rows = raw.tensors[names[matrices[0]]].shape[0] if matrices else (target.vocab_size if target else None)
    vocab = integer(config, "vocab_size", where, default=rows)
    if config.get("truncated_vocab_size") not in (None, vocab):
        raise FormatError(
            f"{where}: truncated_vocab_size is {config['truncated_vocab_size']!r}: reduced Medusa vocabularies "
            "are not read"
        )
    if config.get("logit_scale", 1.0) != 1.0:
        raise FormatError(f"{where}: logit_scale is {config['logit_scale']!r}, expected 1")
    dims = target or HeadDims(hidden, vocab, 1, 1, 1, hidden, hidden)
    require_equal(where, "hidden_size", hidden, dims.hidden_size)
    require_equal(where, "vocab_size", vocab, dims.vocab_size)
    expected = {f"blocks.{i}.layers.{j}.weight" for i in range(heads) for j in range(layers)}
    biases = {f"blocks.{i}.layers.{j}.bias" for i in range(heads) for j in range(layers)}
    has_bias = any(name.endswith(".bias") for name in names)
    if has_bias:
        expected |= biases
    unused: dict[str, str] = {}
    if own:
        expected |= {f"lm_heads.{i}.weight" for i in range(heads)}
    elif matrices:
        unused[names.pop("lm_heads.0.weight")] = "the target's lm_head, shared by all heads"
    require_names(raw, set(names), expected)
    fields = {"depth": heads, "num_layers": layers, "lm_head": "own" if own else "shared"}
    zeros = () if has_bias else tuple(sorted(biases))
    return Plan("Medusa", "medusa", fields, dims, names, zeros, unused=unused)
