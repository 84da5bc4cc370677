"""TensorRT-LLM, read from its source: EAGLE-3 on the PyTorch backend, Medusa through the legacy converter.

EAGLE-3 takes the portable directory; Medusa takes TGI's v1 file (`medusa_lm_head.safetensors`).
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from headstart.heads.base import Head
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.families.eagle3.files import LEGACY_NORMS, QK_NORMS
from headstart.heads.families.eagle_files import LAYER_IDS
from headstart.heads.formats import tgi
from headstart.heads.formats.eagle_rules import (
    Eagle3Layout,
    check_draft_map,
    check_later_norms,
    check_layer,
    check_lm_head,
    eagle_config_of,
    file_layers,
    usual_layers,
)
from headstart.heads.formats.format import Format, Launch, Rules
from headstart.heads.formats.handling import LOADS, REFUSES, WRONG, Case
from headstart.heads.formats.medusa_rules import block_tensors, matrix_tensors, medusa_counts


def _eagle3(case: Case) -> None:
    config = case.config
    layers, nested = file_layers(case.names), eagle_config_of(config)
    sizes = check_layer(case, config, WRONG, layers)
    normed = "stream" if config.get("fc_norm") else "concat" if nested.get("norm_before_fc") else "none"
    layout = Eagle3Layout(min(layers, sizes["layers"]), "hidden_norm", False, normed)
    case.match(layout.tensors(REFUSES), sizes)
    check_later_norms(case, layout)
    case.require_parsed()
    _variants(case, layout)
    if config.get("norm_before_residual"):
        case.misread("norm_before_residual is true: the residual is always the un-normed one")
    if config.get("norm_before_fc") and not nested.get("norm_before_fc"):
        case.misread("norm_before_fc is read inside eagle_config only")
    if "mask_hidden" in case.names:
        case.misread("mask_hidden is not read: it drafts one token after the other, which P-EAGLE was not trained for")
    check_lm_head(case, sizes, LOADS if sizes["U"] == sizes["V"] else WRONG, "the target's is taken")
    check_draft_map(case, sizes)
    if case.target is not None and sizes["G"] != (held := case.target.num_kv_heads * case.target.head_dim):
        case.note(
            f"keys and values are {sizes['G']} wide and the target's {held}: a release that keeps both in one cache "
            "gives the head's layers the target's width"
        )
    ids = config.get(LAYER_IDS)
    if isinstance(ids, list) and ids != usual_layers(case.target):
        case.note(f"set the captured layers in its speculative config to the head's: hidden_states indices {ids}")


def _variants(case: Case, layout: Eagle3Layout) -> None:
    """Several layers and the norms of EAGLE-3.1."""
    if any(name.endswith(tuple(QK_NORMS)) for name in case.names):
        case.misread("q/k norms are skipped in silence: serve this head with vLLM (export.engines=[vllm])")
    files = [name.removeprefix("model.") for name in case.raw.tensors]
    if layout.layers > 1 and any(name.startswith("midlayer.") for name in files):
        case.refuse("several layers are read as layers.0, layers.1, …: rename midlayer to layers.0")
    if any(name in LEGACY_NORMS for name in files):
        case.misread("aux_norm_* are skipped in silence: it calls them fc_norm.0 … 2, and reads fc_norm in config.json")
    elif layout.fc_norm != "stream" and "fc_norm.0.weight" in case.names:
        case.misread("fc_norm.* are skipped in silence: fc_norm is not set in config.json")
    if nested := {"return_hidden_post_norm"} & set(eagle_config_of(case.config)) - {"norm_output"} & set(case.config):
        case.note(f"reads {some(nested)} beside norm_output: the output is normed if either is true")
    if layout.layers > 1 or layout.fc_norm == "stream" or case.config.get("norm_output"):
        case.note(
            "several layers, fc_norm and norm_output are read as its main branch of 2026 does: an older release may "
            "know none of them"
        )


def _medusa(case: Case) -> None:
    if not {tgi.WEIGHTS, "medusa_lm_head.pt"} & set(case.raw.readers):
        case.refuse(f"the converter reads {tgi.WEIGHTS}; the directory holds {some(case.raw.readers)}")
    heads, layers = medusa_counts(case.config)
    first, matrix = case.shape("blocks.0.layers.0.weight") or (0,), case.shape("lm_heads.0.weight") or (0,)
    stops = (REFUSES, "the converter stops")
    rules = [*block_tensors(heads, layers, *stops), *matrix_tensors(heads, *stops)]
    case.match(rules, {"D": first[-1], "V": matrix[0]})
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
    unchecked=("dflash", "dspark", "jetspec", "dflash2", "draft_model"),
)
