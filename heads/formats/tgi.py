"""Hugging Face TGI (read from its source): Medusa only.

v1: `{i}.{j}.linear.weight` + bias (required) and `{i}.{N}.weight`; v2: `{i}.0.linear.*` only, one layer, the target's
lm_head. The file must be `medusa_lm_head.safetensors`. Where v1 fails to load, TGI tries v2. With `medusa_fc_bias` the
v1 directory serves vLLM 0.32 too.
"""

from __future__ import annotations

import shlex
from typing import Any

from headstart.heads.base import Head
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.families import FAMILIES
from headstart.heads.families.medusa.files import config_of, merged_tensors, own_matrices
from headstart.heads.formats.format import Format, Launch, Rules
from headstart.heads.formats.handling import REFUSES, Case
from headstart.heads.formats.medusa_rules import block_tensors, matrix_tensors, medusa_counts
from headstart.heads.formats.sidecar import served_name
from headstart.heads.published_names import name_of_target

WEIGHTS = "medusa_lm_head.safetensors"


def _medusa(case: Case) -> None:
    config = case.raw.config
    if WEIGHTS not in case.raw.readers:
        case.refuse(f"reads {WEIGHTS} only; the directory holds {some(case.raw.readers)}")
    foreign = [name for name in case.names.values() if not name.split(".")[0].isdigit()]
    if foreign:
        case.refuse(f"{foreign[0]}: TGI's keys are {{i}}.{{j}}.linear.* and {{i}}.{{N}}.weight")
    for key in ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"):
        if key not in config:
            case.refuse(f"config.json lacks {key}")
    base = config.get("base_model_name_or_path", "a target")
    if not isinstance(base, str) or not base:
        case.refuse(f"base_model_name_or_path is {base!r}, expected the target: TGI loads it from there")
    elif "${" in base:
        case.refuse(f"base_model_name_or_path is {base!r}, from where TGI loads the target: export with its name")
    elif base.startswith(("/", ".", "~")):
        case.note(f"base_model_name_or_path is {base!r}: the machine that runs TGI needs the target there")
    heads, layers = medusa_counts(config)
    first, matrix = case.shape("blocks.0.layers.0.weight") or (0,), case.shape("lm_heads.0.weight") or (0,)
    width, vocab_size = (case.target.hidden_size, case.target.vocab_size) if case.target else (first[-1], matrix[0])
    rules = block_tensors(heads, layers, REFUSES, "TGI's blocks have a weight and a bias")
    present = [i for i in range(heads) if f"lm_heads.{i}.weight" in case.names]
    if len(present) == heads:
        rules += matrix_tensors(heads, REFUSES, "TGI stops")
    elif layers != 1:
        case.refuse(
            f"{heads - len(present)} output matrices are missing and v2, which shares the target's, has one layer"
        )
    elif present:
        case.misread(f"output matrices of heads {present} only: TGI falls back to v2 and uses the target's for all")
    else:
        case.note("read as v2: the target's lm_head is shared")
    case.match(rules, {"D": width, "V": vocab_size})
    more = {name.split(".")[1] for name in case.names} - {str(i) for i in range(heads)}
    if more and "medusa_num_heads" in config:
        case.misread(f"medusa_num_heads is {heads}: heads {some(more)} are never used")


def contents(head: Head, provenance: dict[str, Any], v1: bool = False) -> Contents:
    """v2 for one-layer heads that share the target's lm_head, v1 otherwise or on demand (low-rank updates are merged).

    Raises: FormatError for a head that is not bound to the target whose lm_head it needs.
    """
    files, settings = FAMILIES["medusa"].files, config_of(head)
    layers = settings.num_layers
    shared = not v1 and settings.lm_head == "shared" and layers == 1
    renamed = {}
    for name, tensor in (files.tensors(head) if shared else merged_tensors(head)).items():
        parts = name.split(".")
        key = f"{parts[1]}.{parts[3]}.linear.{parts[4]}" if parts[0] == "blocks" else f"{parts[1]}.{layers}.weight"
        renamed[key] = tensor
    target = provenance.get("target") or {}
    config = files.config_json(head) | {
        "medusa_num_heads": head.depth,
        "medusa_num_layers": layers,
        "base_model_name_or_path": served_name(target) or name_of_target(str(target.get("name", ""))),
    }
    if shared:  # an architecture that vLLM refuses: it would load this with random output matrices
        config |= {"architectures": ["MedusaModelV2"], "model_type": "medusa_v2"}
    return Contents("tgi", config, renamed, WEIGHTS, settings if shared else own_matrices(head))


def _launch(launch: Launch) -> str:
    words = ["text-generation-launcher", "--model-id", launch.head, "--speculate", str(launch.tokens)]
    command = shlex.join([*words, *launch.limit("--max-total-tokens")])
    return command if launch.place is None else f"{shlex.join(['cd', launch.place])} && {command}"


FORMAT = Format(
    key="tgi",
    name="TGI",
    title="TGI",
    version="TGI",
    serves={"medusa": Rules(_medusa, contents)},
    launch=_launch,
)
