"""Hugging Face TGI (read from its source): Medusa only.

v1: `{i}.{j}.linear.weight` + bias (required) and `{i}.{N}.weight`; v2: `{i}.0.linear.*` only, one layer, the target's
lm_head. The file must be `medusa_lm_head.safetensors`. Where v1 fails to load, TGI tries v2. With `medusa_fc_bias` the
v1 directory serves vLLM 0.32 too.
"""

from __future__ import annotations

from typing import Any

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import integer
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.formats import portable
from headstart.heads.formats.findings import EngineVerdict, Row, Verdict, View, guarded, match_rows
from headstart.heads.formats.launch import hub_name
from headstart.heads.formats.vllm import merge_medusa, own_matrices
from headstart.heads.published import name_of_target

ENGINE = "TGI"
WEIGHTS = "medusa_lm_head.safetensors"
WRONG, REFUSES, LOADS = Verdict.WRONG, Verdict.REFUSES, Verdict.LOADS


def check(seen: View, target: HeadDims | None) -> EngineVerdict:
    """Verdict of TGI on a directory."""
    found = EngineVerdict(ENGINE)
    if seen.family != "medusa":
        found.add(REFUSES, "TGI serves Medusa heads only")
        return found
    return guarded(found, lambda: _medusa(found, seen, target))


def _medusa(found: EngineVerdict, seen: View, target: HeadDims | None) -> None:
    config = seen.raw.config
    if WEIGHTS not in seen.raw.readers:
        found.add(REFUSES, f"reads {WEIGHTS} only; the directory holds {', '.join(sorted(seen.raw.readers))}")
    spelled = [name for name in seen.names.values() if not name.split(".")[0].isdigit()]
    if spelled:
        found.add(REFUSES, f"{spelled[0]}: TGI's keys are {{i}}.{{j}}.linear.* and {{i}}.{{N}}.weight")
    for key in ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"):
        if key not in config:
            found.add(REFUSES, f"config.json lacks {key}")
    base = config.get("base_model_name_or_path", "a target")
    if not isinstance(base, str) or not base:
        found.add(REFUSES, f"base_model_name_or_path is {base!r}, expected the target: TGI loads it from there")
    elif "${" in base:
        found.add(
            REFUSES, f"base_model_name_or_path is {base!r}: TGI loads the target from there: export with its name"
        )
    elif base.startswith(("/", ".", "~")):
        found.add(LOADS, f"base_model_name_or_path is {base!r}: the target must lie there where TGI runs")
    heads = integer(config, "medusa_num_heads", "config.json", default=1)
    layers = integer(config, "medusa_num_layers", "config.json", default=1)
    first = seen.shape("blocks.0.layers.0.weight") or (0, 0)
    matrix = seen.shape("lm_heads.0.weight")
    sizes = {"D": target.hidden_size if target else first[-1]}
    sizes["V"] = target.vocab_size if target else (matrix or (0,))[0]
    blocks = [(i, j) for i in range(heads) for j in range(layers)]
    rows = [Row(f"blocks.{i}.layers.{j}.weight", ("D", "D"), REFUSES, "TGI stops") for i, j in blocks]
    rows += [Row(f"blocks.{i}.layers.{j}.bias", ("D",), REFUSES, "TGI's blocks have one") for i, j in blocks]
    present = [i for i in range(heads) if f"lm_heads.{i}.weight" in seen.names]
    if len(present) == heads:
        rows += [Row(f"lm_heads.{i}.weight", ("V", "D"), REFUSES) for i in range(heads)]
    elif layers != 1:
        found.add(
            REFUSES,
            f"{heads - len(present)} output matrices are missing and v2, which shares the target's, has one layer",
        )
    elif present:
        found.add(WRONG, f"output matrices of heads {present} only: TGI falls back to v2 and uses the target's for all")
    else:
        found.add(LOADS, "read as v2: the target's lm_head is shared")
    match_rows(found, seen, rows, sizes)
    more = sorted({n.split(".")[1] for n in seen.names} - {str(i) for i in range(heads)})
    if more and "medusa_num_heads" in config:
        found.add(WRONG, f"medusa_num_heads is {heads}: heads {', '.join(more)} are never used")


def contents(head: Head, provenance: dict[str, Any], v1: bool = False) -> portable.Contents:
    """v2 for one-layer heads that share the target's lm_head, v1 otherwise or on demand (low-rank updates are merged).

    Raises: FormatError for other families, or a head that is not bound to its target.
    """
    if head.family != "medusa":
        raise FormatError(f"export.engines: TGI serves Medusa only, found {head.family}")
    layers = head.config.num_layers  # type: ignore[attr-defined]
    shared = not v1 and head.config.lm_head == "shared" and layers == 1  # type: ignore[attr-defined]
    tensors = portable.native_tensors(head) if shared else merge_medusa(head)
    settings = head.config if shared else own_matrices(head)
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        key = f"{parts[1]}.{parts[3]}.linear.{parts[4]}" if parts[0] == "blocks" else f"{parts[1]}.{layers}.weight"
        renamed[key] = tensor
    target = provenance.get("target") or {}
    base = hub_name(target) or name_of_target(str(target.get("name", "")))
    config = portable.portable_config(head) | {
        "medusa_num_heads": head.depth,
        "medusa_num_layers": layers,
        "base_model_name_or_path": base,
    }
    if shared:  # vLLM would keep random output matrices: an architecture it refuses
        config |= {"architectures": ["MedusaModelV2"], "model_type": "medusa_v2"}
    return portable.Contents("tgi", config, renamed, WEIGHTS, settings)
