"""vLLM 0.32: what it reads for each family, what it does with a faulty file, and the command that serves a head.

Read from its loaders, and run by `scripts/parity_vllm.sh`. Its EAGLE and Medusa loaders never complain about *missing*
tensors (they stay uninitialised); unexpected ones stop an EAGLE load and are dropped by Medusa's.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import torch

from headstart.heads.checkpoints.geometry import integer
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.medusa.files import COUNTS
from headstart.heads.formats.eagle_rules import (
    check_activation,
    check_draft_map,
    check_lm_head,
    check_own_embeddings,
    eagle3_tensors,
    eagle_config_of,
    eagle_tensors,
    llama_sizes,
    mask_token_problem,
)
from headstart.heads.formats.format import Check, Format, Launch, Rules
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
from headstart.heads.formats.vllm_dflash import check_dflash, check_draft_model

EAGLE_ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLM")
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
#: tensors an EAGLE load takes besides the table's
EAGLE_OPTIONAL = {"embed_tokens.weight"}
EAGLE3_OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "mask_hidden"}
MLP_SPECULATOR, NO_MLP = "mlp_speculator", "MLP speculators are no longer in vLLM's registry"


def _medusa(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
    config = dict(seen.config)
    where = "config.json"
    if config.get("model_type") != "medusa":
        verdict.add(REFUSES, f"model_type is {config.get('model_type')!r}, expected 'medusa'")
    for key in list(config):  # its own loop: the last key that holds both words wins
        for word, ours in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            if "num" in key and word in key:
                if key != ours and config.get(ours) not in (None, config[key]):
                    verdict.add(
                        WRONG,
                        f"{key} = {config[key]!r} is taken for {ours} (any key holding num and {word} is): remove it",
                    )
                config[ours] = config.pop(key)
                break
    heads = integer(config, "num_heads", where, default=5, bounds=COUNTS)
    layers = integer(config, "num_hidden_layers", where, default=1, bounds=COUNTS)
    for key, default in (("hidden_size", 4096), ("vocab_size", 32001)):
        if config.get(key) is None:
            verdict.add(LOADS, f"{key} is missing and defaults to {default}")
    sizes = {
        "D": integer(config, "hidden_size", where, default=4096),
        "V": integer(config, "vocab_size", where, default=32001),
    }
    bias = config.get("medusa_fc_bias", False)
    blocks = [(i, j) for i in range(heads) for j in range(layers)]
    rows = [TensorRule(f"blocks.{i}.layers.{j}.weight", ("D", "D"), WRONG, "it stays random") for i, j in blocks]
    if bias:
        rows += [TensorRule(f"blocks.{i}.layers.{j}.bias", ("D",), WRONG, "it stays random") for i, j in blocks]
    else:
        dropped = [n for n in sorted(seen.names) if n.endswith(".bias") and seen.nonzero(n)]
        if dropped:
            verdict.add(WRONG, f"{dropped[0]} (and all biases) is dropped in silence: set medusa_fc_bias to true")
    sizes["U"] = integer(config, "truncated_vocab_size", where, default=sizes["V"])
    shared = bool(config.get("original_lm_head"))
    strangers = set(seen.strangers)
    if sizes["U"] != sizes["V"] and not shared:
        verdict.add(REFUSES, "truncated_vocab_size: per-head matrices of a reduced vocabulary do not load")
    elif sizes["U"] < sizes["V"]:
        strangers -= {"token_map"}
        _token_map(verdict, seen, sizes["U"], sizes["V"])
        if seen.shape("lm_heads.0.weight") == (sizes["V"], sizes["D"]):
            sizes["U"] = sizes["V"]  # it takes the rows that token_map names
    matrix = ("U" if shared else "V", "D")
    rows += [
        TensorRule(f"lm_heads.{i}.weight", matrix, WRONG, "it stays random") for i in range(1 if shared else heads)
    ]
    match_tensors(verdict, seen, rows, sizes)
    extra = sorted(set(seen.names) - {row.name for row in rows} - {n for n in seen.names if n.endswith(".bias")})
    if extra or strangers:
        verdict.add(WRONG, f"{', '.join([*extra, *sorted(strangers)][:6])} would be dropped in silence")
    verdict.add(LOADS, f"num_speculative_tokens must be {heads} or fewer")
    check_target(verdict, target, sizes["D"], sizes["V"])


def _token_map(verdict: EngineVerdict, seen: HeadDirectory, size: int, vocab: int) -> None:
    """The target ids of a reduced vocabulary's rows (read, not run)."""
    info = seen.raw.tensors.get("token_map")
    if info is None:
        verdict.add(REFUSES, f"truncated_vocab_size is {size} of {vocab} and token_map [{size}] is missing")
        return
    if info.shape != (size,) or info.dtype not in (torch.int64, torch.int32):
        verdict.add(REFUSES, f"token_map is {info.dtype} {list(info.shape)}, expected int64 [{size}]")
        return
    ids = seen.raw.read("token_map")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != size:
        verdict.add(WRONG, f"token_map holds no {size} distinct ids below {vocab}: drafted ids would be others")


def _eagle(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
    config = seen.config
    if "speculators_model_type" in config:
        verdict.add(REFUSES, "vLLM's speculators reader knows no 'eagle': export it first")
        return
    nested = isinstance(seen.raw.config.get("model"), dict)
    if nested:
        inner = seen.raw.config["model"]
        for key in ("architectures", "model_type"):
            if key not in inner:
                verdict.add(REFUSES, f"the nested model config needs {key}")
        _architecture(verdict, inner.get("architectures"), EAGLE_ARCHITECTURES)
    else:
        _architecture(verdict, config.get("architectures"), EAGLE_ARCHITECTURES)
    sizes = _llama(verdict, config, target)
    match_tensors(verdict, seen, eagle_tensors(WRONG), sizes)
    if seen.nonzero("fc.bias"):
        verdict.add(
            WRONG, "fc.bias is not zero and is dropped in silence: serve it with SGLang (export.engines=[sglang])"
        )
    if "lm_head.weight" in seen.names:
        verdict.add(REFUSES, "lm_head.weight must be absent: EAGLE-1 uses the target's")
    if "layers.0.input_layernorm.weight" in seen.names:
        verdict.add(REFUSES, "layers.0.input_layernorm.weight: vLLM's EAGLE-1 layer has none")
    known = {row.name for row in eagle_tensors(WRONG)} | EAGLE_OPTIONAL
    _unexpected(verdict, seen, known | {"lm_head.weight", "layers.0.input_layernorm.weight", "fc.bias"}, config)
    _embedding(verdict, seen, sizes)


def _eagle3(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
    config = _speculators(verdict, seen) if "speculators_model_type" in seen.config else seen.config
    if "speculators_model_type" not in seen.config:
        _architecture(verdict, config.get("architectures"), EAGLE3_ARCHITECTURES)
    sizes = _llama(verdict, config, target)
    if config.get("draft_vocab_size") is None:
        verdict.add(LOADS, "draft_vocab_size is missing and taken for vocab_size")
    match_tensors(verdict, seen, eagle3_tensors(WRONG), sizes)
    _draft_vocabulary(verdict, seen, sizes)
    nested = eagle_config_of(config)
    if nested.get("use_aux_hidden_state", True) is not True:
        verdict.add(
            WRONG, "eagle_config.use_aux_hidden_state is false: fc is left out and the last hidden state goes in"
        )
    top, inner = config.get("eagle_aux_hidden_state_layer_ids"), nested.get("eagle_aux_hidden_state_layer_ids")
    if not top and inner:
        verdict.add(
            WRONG,
            f"the feature layers stand only inside eagle_config: vLLM takes {inner} as they are, SGLang (whose "
            f"key it is) adds 1. Write {[k + 1 for k in inner if type(k) is int]} as eagle_aux_hidden_state_layer_ids "
            "at top level",
        )
    if isinstance(top, list) and isinstance(inner, list) and [k + 1 for k in inner if type(k) is int] != top:
        verdict.add(
            LOADS,
            f"reads the ids at top level, {top}; SGLang reads {[k + 1 for k in inner if type(k) is int]} from "
            "eagle_config: one of the two is not what the head was trained on",
        )
    _feature_layers(verdict, top or inner, target)
    _parallel(verdict, seen, config, sizes)
    known = {row.name for row in eagle3_tensors(WRONG)} | EAGLE3_OPTIONAL
    if nested.get("norm_before_fc", config.get("norm_before_fc")):
        known |= {"input_norm.weight"}
    if config.get("fc_norm"):
        known |= {f"fc_norm.{i}.weight" for i in range(3)}
    for name in sorted(known - set(seen.names)):
        if name.startswith(("input_norm", "fc_norm")):
            verdict.add(WRONG, f"{name} is missing: the norm stays at ones")
    _unexpected(verdict, seen, known, config)
    check_own_embeddings(verdict, seen, sizes)
    _embedding(verdict, seen, sizes)


def _parallel(verdict: EngineVerdict, seen: HeadDirectory, config: dict[str, Any], sizes: dict[str, int]) -> None:
    """P-EAGLE: an EAGLE-3 head that drafts all its tokens at once, from masked places."""
    tokens = [config.get(name) for name in ("ptd_token_id", "mask_token_id") if config.get(name) is not None]
    shape = seen.shape("mask_hidden")
    if not tokens and shape is None:
        return
    if not tokens:
        verdict.add(REFUSES, "mask_hidden without ptd_token_id (or mask_token_id): parallel drafting needs both")
    elif problem := mask_token_problem("ptd_token_id (or mask_token_id)", tokens[0], sizes["V"]):
        verdict.add(REFUSES, problem)
    elif shape is None:
        verdict.add(REFUSES, f"mask_hidden [1, 1, {sizes['3D']}] is missing: parallel drafting needs it")
    elif math.prod(shape) != sizes["3D"]:
        verdict.add(REFUSES, f"mask_hidden is {list(shape)}, config.json makes it [1, 1, {sizes['3D']}]")
    verdict.add(
        LOADS, 'launch it with "parallel_drafting": true in the speculative config; without, mask_hidden is unused'
    )


def _speculators(verdict: EngineVerdict, seen: HeadDirectory) -> dict[str, Any]:
    outer, layer = seen.config, seen.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise FormatError("config.json: transformer_layer_config is missing")
    # what speculators means where the field is missing differs by kind
    if outer.get("norm_before_residual", outer["speculators_model_type"] != "peagle"):
        verdict.add(
            LOADS, "norm_before_residual is true (the default there): vLLM runs it, SGLang and TensorRT-LLM do not"
        )
    names = "draft_vocab_size target_hidden_size eagle_aux_hidden_state_layer_ids norm_before_fc fc_norm"
    keys = [*names.split(), "ptd_token_id", "mask_token_id"]
    return {**layer, **{key: outer[key] for key in keys if outer.get(key) is not None}}


def _draft_vocabulary(verdict: EngineVerdict, seen: HeadDirectory, sizes: dict[str, int]) -> None:
    size, vocab_size = sizes["U"], sizes["V"]
    if size < vocab_size:
        whole = f"[{size}, {sizes['H']}] is missing: the target's {vocab_size}-row head is shared in silence"
        check_lm_head(verdict, seen, sizes, WRONG, f"lm_head.weight {whole}")
    else:
        check_lm_head(verdict, seen, sizes, LOADS, "lm_head.weight is missing: the target's is shared")
    if "d2t" in seen.names and size == vocab_size:
        verdict.add(REFUSES, "d2t is not expected when draft_vocab_size equals vocab_size: leave it out")
    else:
        check_draft_map(verdict, seen, sizes, misshapen=REFUSES)


def _feature_layers(verdict: EngineVerdict, ids: Any, target: HeadDims | None) -> None:
    if not ids:
        verdict.add(LOADS, "no feature layers given: vLLM takes 2, L//2 and L-3")
        return
    if not isinstance(ids, list) or not all(type(k) is int for k in ids):
        verdict.add(REFUSES, f"feature layers {ids!r} are no list of integers")
        return
    if len(set(ids)) != len(ids):
        verdict.add(REFUSES, f"feature layers {ids} repeat: vLLM de-duplicates them and fc no longer fits")
    elif len(ids) != 3:
        verdict.add(REFUSES, f"{len(ids)} feature layers {ids}, fc reads three")
    elif sorted(ids) != ids:
        verdict.add(
            WRONG, f"feature layers {ids} are not ascending: vLLM sorts them, fc was trained in the order given"
        )
    if min(ids) < 0 or (target is not None and max(ids) > target.num_layers):
        verdict.add(
            REFUSES, f"feature layers {ids} lie outside the target's {target.num_layers if target else '?'} layers"
        )
    elif target is not None and max(ids) == target.num_layers:
        verdict.add(
            WRONG,
            f"feature layer {max(ids)} is the last hidden state: pre-norm in vLLM, post-norm where heads are trained",
        )


def _llama(verdict: EngineVerdict, config: dict[str, Any], target: HeadDims | None) -> dict[str, int]:
    sizes = llama_sizes(config)
    check_activation(verdict, config)
    if sizes["layers"] != 1:
        given = "missing and defaults to" if config.get("num_hidden_layers") is None else "is"
        verdict.add(
            WRONG, f"num_hidden_layers {given} {sizes['layers']} and the file holds one: the others stay random"
        )
    check_geometry(verdict, config, target)
    check_target(verdict, target, sizes["D"], sizes["V"])
    return sizes


def _architecture(verdict: EngineVerdict, architectures: Any, known: tuple[str, ...]) -> None:
    if not isinstance(architectures, list) or not any(name in known for name in architectures):
        verdict.add(REFUSES, f"architectures is {architectures!r}, expected one of {list(known)}")


def _unexpected(verdict: EngineVerdict, seen: HeadDirectory, known: set[str], config: dict[str, Any]) -> None:
    biases = [name for name in seen.names if name.endswith(".bias") and name not in known]
    if config.get("attention_bias") or config.get("bias"):
        needed = [f"{p}_proj.bias" for p in "qkv"]
        if sum(any(name.endswith(n) for name in biases) for n in needed) < 3:
            verdict.add(WRONG, "attention_bias is true and q/k/v biases are missing: they stay random")
    elif any(seen.nonzero(name) for name in biases):
        verdict.add(WRONG, f"{', '.join(biases[:3])}: biases are dropped in silence without attention_bias")
    odd = sorted(set(seen.names) - known - set(biases)) + seen.strangers
    if odd:
        verdict.add(REFUSES, f"unexpected tensors {', '.join(odd[:6])}")


def _embedding(verdict: EngineVerdict, seen: HeadDirectory, sizes: dict[str, int]) -> None:
    shape = seen.shape("embed_tokens.weight")
    if shape is not None and shape != (sizes["V"], sizes["H"]):
        verdict.add(REFUSES, f"embed_tokens.weight is {list(shape)}, config.json makes it [{sizes['V']}, {sizes['H']}]")


def _asked_first(check: Check) -> Check:
    """`check`, after the questions that vLLM asks of every family."""

    def whole(verdict: EngineVerdict, seen: HeadDirectory, target: HeadDims | None) -> None:
        if seen.raw.config.get("model_type") == MLP_SPECULATOR:
            raise FormatError(NO_MLP)
        check_parses(verdict, seen)
        check(verdict, seen, target)

    return whole


def _not_served(seen: HeadDirectory) -> str:
    if seen.raw.config.get("model_type") == MLP_SPECULATOR:
        return NO_MLP
    if seen.family is None:
        return "neither a Medusa, EAGLE or DFlash head nor a language model"
    return f"vLLM serves no {seen.family} heads"


def _launch(launch: Launch) -> str:
    spec = {"method": launch.family, "model": launch.head, "num_speculative_tokens": launch.tokens}
    words = ["vllm", "serve", launch.target, *launch.limit("--max-model-len")]
    return shlex.join([*words, "--speculative-config", json.dumps(spec, ensure_ascii=False)])


FORMAT = Format(
    key="vllm",
    name="vLLM",
    title="vLLM",
    version="vLLM 0.32",
    serves={
        "medusa": Rules(_asked_first(_medusa), shards=True),
        "eagle": Rules(_asked_first(_eagle), shards=True),
        "eagle3": Rules(_asked_first(_eagle3), shards=True),
        "dflash": Rules(_asked_first(check_dflash)),
        "draft_model": Rules(_asked_first(check_draft_model)),
    },
    launch=_launch,
    not_served=_not_served,
)
