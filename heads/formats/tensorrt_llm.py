"""TensorRT-LLM (read from its source): EAGLE-3 on the PyTorch backend, Medusa through the legacy converter.

EAGLE-3 takes the portable directory; Medusa takes TGI's v1 file (`medusa_lm_head.safetensors`).
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from headstart.heads.base import Head
from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.dims import HeadDims
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
from headstart.heads.formats.verdicts import (
    LOADS,
    REFUSES,
    WRONG,
    EngineVerdict,
    HeadDirectory,
    TensorRule,
    check_geometry,
    check_parses,
    check_target,
    match_tensors,
)


def _eagle3(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
    config = seen.config
    sizes = llama_sizes(config)
    match_tensors(verdict, seen, eagle3_tensors(REFUSES), sizes)
    check_parses(verdict, seen)
    nested = eagle_config_of(config)
    if config.get("norm_before_residual"):
        verdict.add(WRONG, "norm_before_residual is true: the residual is always the un-normed one")
    if config.get("norm_before_fc") and not nested.get("norm_before_fc"):
        verdict.add(WRONG, "norm_before_fc is read inside eagle_config only")
    if config.get("hidden_act", "silu") != "silu":
        verdict.add(WRONG, f"hidden_act is {config['hidden_act']!r}: its draft layer computes silu")
    check_target(verdict, target, sizes["D"], sizes["V"])
    if "mask_hidden" in seen.names:
        verdict.add(
            WRONG, "mask_hidden is not read: it drafts one token after the other, which P-EAGLE was not trained for"
        )
    check_geometry(verdict, config, target)
    if sizes["layers"] != 1:
        verdict.add(WRONG, f"num_hidden_layers is {sizes['layers']} and the file holds one layer")
    missing = LOADS if sizes["U"] == sizes["V"] else WRONG
    check_lm_head(verdict, seen, sizes, missing, "lm_head.weight is missing: the target's is taken")
    check_draft_map(verdict, seen, sizes)
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    usual = [2, target.num_layers // 2, target.num_layers - 3] if target else None
    if isinstance(ids, list) and ids != usual:
        verdict.add(
            LOADS, f"set the captured layers in its speculative config to the head's: hidden_states indices {ids}"
        )


def _medusa(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
    weights = {tgi.WEIGHTS, "medusa_lm_head.pt"} & set(seen.raw.readers)
    if not weights:
        verdict.add(
            REFUSES, f"the converter reads {tgi.WEIGHTS}; the directory holds {', '.join(sorted(seen.raw.readers))}"
        )
    heads = integer(seen.config, "medusa_num_heads", "config.json", default=1, bounds=COUNTS)
    layers = integer(seen.config, "medusa_num_layers", "config.json", default=1, bounds=COUNTS)
    first, matrix = seen.shape("blocks.0.layers.0.weight") or (0, 0), seen.shape("lm_heads.0.weight") or (0, 0)
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
    match_tensors(verdict, seen, rows, {"D": first[-1], "V": matrix[0]})
    verdict.add(LOADS, "through the legacy converter (convert_checkpoint.py --medusa_model_dir)")


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
    not_served=lambda seen: "its PyTorch backend serves EAGLE-3 only, its legacy converter Medusa",
    unchecked=("dflash", "draft_model"),
)
