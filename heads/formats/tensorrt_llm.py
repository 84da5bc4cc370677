"""TensorRT-LLM, read from its source: EAGLE-3 on the PyTorch backend, Medusa through the legacy converter.

EAGLE-3 takes the portable directory; Medusa takes TGI's v1 file (`medusa_lm_head.safetensors`).
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.families.medusa.files import COUNTS
from headstart.heads.formats import tgi
from headstart.heads.formats.eagle_rules import (
    check_draft_map,
    check_lm_head,
    eagle3_tensors,
    eagle_config_of,
    llama_sizes,
)
from headstart.heads.formats.format import Format, Launch, Rules
from headstart.heads.formats.verdicts import LOADS, REFUSES, WRONG, Case, TensorRule


def _eagle3(case: Case) -> None:
    config = case.config
    sizes = llama_sizes(config)
    case.match(eagle3_tensors(REFUSES), sizes)
    case.require_parsed()
    nested = eagle_config_of(config)
    if config.get("norm_before_residual"):
        case.misread("norm_before_residual is true: the residual is always the un-normed one")
    if config.get("norm_before_fc") and not nested.get("norm_before_fc"):
        case.misread("norm_before_fc is read inside eagle_config only")
    if config.get("hidden_act", "silu") != "silu":
        case.misread(f"hidden_act is {config['hidden_act']!r}: its draft layer computes silu")
    case.compare_target(sizes["D"], sizes["V"])
    if "mask_hidden" in case.names:
        case.misread("mask_hidden is not read: it drafts one token after the other, which P-EAGLE was not trained for")
    case.compare_geometry(config)
    if sizes["layers"] != 1:
        case.misread(f"num_hidden_layers is {sizes['layers']} and the file holds one layer")
    missing = LOADS if sizes["U"] == sizes["V"] else WRONG
    check_lm_head(case, sizes, missing, "lm_head.weight is missing: the target's is taken")
    check_draft_map(case, sizes)
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    usual = [2, case.target.num_layers // 2, case.target.num_layers - 3] if case.target else None
    if isinstance(ids, list) and ids != usual:
        case.note(f"set the captured layers in its speculative config to the head's: hidden_states indices {ids}")


def _medusa(case: Case) -> None:
    weights = {tgi.WEIGHTS, "medusa_lm_head.pt"} & set(case.raw.readers)
    if not weights:
        case.refuse(f"the converter reads {tgi.WEIGHTS}; the directory holds {', '.join(sorted(case.raw.readers))}")
    heads = integer(case.config, "medusa_num_heads", "config.json", default=1, bounds=COUNTS)
    layers = integer(case.config, "medusa_num_layers", "config.json", default=1, bounds=COUNTS)
    first, matrix = case.shape("blocks.0.layers.0.weight") or (0, 0), case.shape("lm_heads.0.weight") or (0, 0)
    rows = []
    for i in range(heads):
        rows += [
            TensorRule(f"blocks.{i}.layers.{j}.weight", ("D", "D"), REFUSES, "the converter stops")
            for j in range(layers)
        ]
        rows += [
            TensorRule(f"blocks.{i}.layers.{j}.bias", ("D",), REFUSES, "the converter stops") for j in range(layers)
        ]
        rows.append(TensorRule(f"lm_heads.{i}.weight", ("V", "D"), REFUSES, "the converter stops"))
    case.match(rows, {"D": first[-1], "V": matrix[0]})
    case.note("through the legacy converter (convert_checkpoint.py --medusa_model_dir)")


def _write_medusa(head: Head, provenance: dict[str, Any]) -> Contents:
    return tgi.contents(head, provenance, v1=True)


def _launch(launch: Launch) -> str | None:
    """EAGLE-3 through a file of options; the legacy converter's Medusa has no one command."""
    if launch.family != "eagle3":
        return None
    settings = {"decoding_type": "Eagle3", "max_draft_len": launch.tokens, "speculative_model": launch.head}
    text = yaml.safe_dump({"speculative_config": settings}, sort_keys=False, allow_unicode=True, width=1000)
    serve = ["trtllm-serve", launch.target, "--backend", "pytorch", *launch.limit("--max_seq_len")]
    serve += ["--extra_llm_api_options", "spec.yaml"]
    return f"printf %s {shlex.quote(text)} > spec.yaml\n{shlex.join(serve)}"


FORMAT = Format(
    key="tensorrt_llm",
    name="TensorRT-LLM",
    title="TensorRT-LLM (PyTorch backend)",
    version="TensorRT-LLM",
    serves={"eagle3": Rules(_eagle3, shards=True), "medusa": Rules(_medusa, _write_medusa)},
    launch=_launch,
    not_served=lambda case: "its PyTorch backend serves EAGLE-3 only, its legacy converter Medusa",
    unchecked=("dflash", "draft_model"),
)
