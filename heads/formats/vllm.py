"""vLLM 0.32: what it reads for each family, what it does with a faulty file, and the command that serves a head.

The rules are read from its loaders, and `scripts/parity_vllm.sh` runs it. Its EAGLE and Medusa loaders do not notice
a *missing* tensor, which stays uninitialised. An unexpected tensor stops an EAGLE load; the Medusa loader drops it.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import torch

from headstart.heads.checkpoints.geometry import integer
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
from headstart.heads.formats.verdicts import LOADS, REFUSES, WRONG, Case, TensorRule
from headstart.heads.formats.vllm_dflash import check_dflash, check_draft_model

EAGLE_ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLM")
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
#: tensors an EAGLE load takes besides the table's
EAGLE_OPTIONAL = {"embed_tokens.weight"}
EAGLE3_OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "mask_hidden"}
MLP_SPECULATOR, NO_MLP = "mlp_speculator", "MLP speculators are no longer in vLLM's registry"


def _medusa(case: Case) -> None:
    config = dict(case.config)
    where = "config.json"
    if config.get("model_type") != "medusa":
        case.refuse(f"model_type is {config.get('model_type')!r}, expected 'medusa'")
    for key in list(config):  # as vLLM does: the last key that holds both words wins
        for word, ours in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            if "num" in key and word in key:
                if key != ours and config.get(ours) not in (None, config[key]):
                    case.misread(
                        f"{key} = {config[key]!r} is taken for {ours} (any key holding num and {word} is): remove it"
                    )
                config[ours] = config.pop(key)
                break
    heads = integer(config, "num_heads", where, default=5, bounds=COUNTS)
    layers = integer(config, "num_hidden_layers", where, default=1, bounds=COUNTS)
    for key, default in (("hidden_size", 4096), ("vocab_size", 32001)):
        if config.get(key) is None:
            case.note(f"{key} is missing and defaults to {default}")
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
        dropped = [n for n in sorted(case.names) if n.endswith(".bias") and case.nonzero(n)]
        if dropped:
            case.misread(f"{dropped[0]} (and all biases) is dropped in silence: set medusa_fc_bias to true")
    sizes["U"] = integer(config, "truncated_vocab_size", where, default=sizes["V"])
    shared = bool(config.get("original_lm_head"))
    strangers = set(case.strangers)
    if sizes["U"] != sizes["V"] and not shared:
        case.refuse("truncated_vocab_size: per-head matrices of a reduced vocabulary do not load")
    elif sizes["U"] < sizes["V"]:
        strangers -= {"token_map"}
        _token_map(case, sizes["U"], sizes["V"])
        if case.shape("lm_heads.0.weight") == (sizes["V"], sizes["D"]):
            sizes["U"] = sizes["V"]  # it takes the rows that token_map names
    matrix = ("U" if shared else "V", "D")
    rows += [
        TensorRule(f"lm_heads.{i}.weight", matrix, WRONG, "it stays random") for i in range(1 if shared else heads)
    ]
    case.match(rows, sizes)
    extra = sorted(set(case.names) - {row.name for row in rows} - {n for n in case.names if n.endswith(".bias")})
    if extra or strangers:
        case.misread(f"{', '.join([*extra, *sorted(strangers)][:6])} would be dropped in silence")
    case.note(f"num_speculative_tokens must be {heads} or fewer")
    case.compare_target(sizes["D"], sizes["V"])


def _token_map(case: Case, size: int, vocab: int) -> None:
    """The target ids of a reduced vocabulary's rows (read, not run)."""
    info = case.raw.tensors.get("token_map")
    if info is None:
        case.refuse(f"truncated_vocab_size is {size} of {vocab} and token_map [{size}] is missing")
        return
    if info.shape != (size,) or info.dtype not in (torch.int64, torch.int32):
        case.refuse(f"token_map is {info.dtype} {list(info.shape)}, expected int64 [{size}]")
        return
    ids = case.raw.read("token_map")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != size:
        case.misread(f"token_map holds no {size} distinct ids below {vocab}: drafted ids would be others")


def _eagle(case: Case) -> None:
    config = case.config
    if "speculators_model_type" in config:
        case.refuse("vLLM's speculators reader knows no 'eagle': export it first")
        return
    nested = isinstance(case.raw.config.get("model"), dict)
    if nested:
        inner = case.raw.config["model"]
        for key in ("architectures", "model_type"):
            if key not in inner:
                case.refuse(f"the nested model config needs {key}")
        _architecture(case, inner.get("architectures"), EAGLE_ARCHITECTURES)
    else:
        _architecture(case, config.get("architectures"), EAGLE_ARCHITECTURES)
    sizes = _llama(case, config)
    case.match(eagle_tensors(WRONG), sizes)
    if case.nonzero("fc.bias"):
        case.misread("fc.bias is not zero and is dropped in silence: serve it with SGLang (export.engines=[sglang])")
    if "lm_head.weight" in case.names:
        case.refuse("lm_head.weight must be absent: EAGLE-1 uses the target's")
    if "layers.0.input_layernorm.weight" in case.names:
        case.refuse("layers.0.input_layernorm.weight: vLLM's EAGLE-1 layer has none")
    known = {row.name for row in eagle_tensors(WRONG)} | EAGLE_OPTIONAL
    _unexpected(case, known | {"lm_head.weight", "layers.0.input_layernorm.weight", "fc.bias"}, config)
    _embedding(case, sizes)


def _eagle3(case: Case) -> None:
    config = _speculators(case) if "speculators_model_type" in case.config else case.config
    if "speculators_model_type" not in case.config:
        _architecture(case, config.get("architectures"), EAGLE3_ARCHITECTURES)
    sizes = _llama(case, config)
    if config.get("draft_vocab_size") is None:
        case.note("draft_vocab_size is missing and taken for vocab_size")
    case.match(eagle3_tensors(WRONG), sizes)
    _draft_vocabulary(case, sizes)
    nested = eagle_config_of(config)
    if nested.get("use_aux_hidden_state", True) is not True:
        case.misread("eagle_config.use_aux_hidden_state is false: fc is left out and the last hidden state goes in")
    top, inner = config.get("eagle_aux_hidden_state_layer_ids"), nested.get("eagle_aux_hidden_state_layer_ids")
    if not top and inner:
        case.misread(
            f"the feature layers stand only inside eagle_config: vLLM takes {inner} as they are, SGLang (whose "
            f"key it is) adds 1. Write {[k + 1 for k in inner if type(k) is int]} as eagle_aux_hidden_state_layer_ids "
            "at top level"
        )
    if isinstance(top, list) and isinstance(inner, list) and [k + 1 for k in inner if type(k) is int] != top:
        case.note(
            f"reads the ids at top level, {top}; SGLang reads {[k + 1 for k in inner if type(k) is int]} from "
            "eagle_config: one of the two is not what the head was trained on"
        )
    _feature_layers(case, top or inner)
    _parallel(case, config, sizes)
    known = {row.name for row in eagle3_tensors(WRONG)} | EAGLE3_OPTIONAL
    if nested.get("norm_before_fc", config.get("norm_before_fc")):
        known |= {"input_norm.weight"}
    if config.get("fc_norm"):
        known |= {f"fc_norm.{i}.weight" for i in range(3)}
    for name in sorted(known - set(case.names)):
        if name.startswith(("input_norm", "fc_norm")):
            case.misread(f"{name} is missing: the norm stays at ones")
    _unexpected(case, known, config)
    check_own_embeddings(case, sizes)
    _embedding(case, sizes)


def _parallel(case: Case, config: dict[str, Any], sizes: dict[str, int]) -> None:
    """P-EAGLE: an EAGLE-3 head that drafts all its tokens at once, from masked places."""
    tokens = [config.get(name) for name in ("ptd_token_id", "mask_token_id") if config.get(name) is not None]
    shape = case.shape("mask_hidden")
    if not tokens and shape is None:
        return
    if not tokens:
        case.refuse("mask_hidden without ptd_token_id (or mask_token_id): parallel drafting needs both")
    elif problem := mask_token_problem("ptd_token_id (or mask_token_id)", tokens[0], sizes["V"]):
        case.refuse(problem)
    elif shape is None:
        case.refuse(f"mask_hidden [1, 1, {sizes['3D']}] is missing: parallel drafting needs it")
    elif math.prod(shape) != sizes["3D"]:
        case.refuse(f"mask_hidden is {list(shape)}, config.json makes it [1, 1, {sizes['3D']}]")
    case.note('launch it with "parallel_drafting": true in the speculative config; without, mask_hidden is unused')


def _speculators(case: Case) -> dict[str, Any]:
    outer, layer = case.config, case.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise FormatError("config.json: transformer_layer_config is missing")
    # what speculators means where the field is missing differs by kind
    if outer.get("norm_before_residual", outer["speculators_model_type"] != "peagle"):
        case.note("norm_before_residual is true (the default there): vLLM runs it, SGLang and TensorRT-LLM do not")
    names = "draft_vocab_size target_hidden_size eagle_aux_hidden_state_layer_ids norm_before_fc fc_norm"
    keys = [*names.split(), "ptd_token_id", "mask_token_id"]
    return {**layer, **{key: outer[key] for key in keys if outer.get(key) is not None}}


def _draft_vocabulary(case: Case, sizes: dict[str, int]) -> None:
    size, vocab_size = sizes["U"], sizes["V"]
    if size < vocab_size:
        whole = f"[{size}, {sizes['H']}] is missing: the target's {vocab_size}-row head is shared in silence"
        check_lm_head(case, sizes, WRONG, f"lm_head.weight {whole}")
    else:
        check_lm_head(case, sizes, LOADS, "lm_head.weight is missing: the target's is shared")
    if "d2t" in case.names and size == vocab_size:
        case.refuse("d2t is not expected when draft_vocab_size equals vocab_size: leave it out")
    else:
        check_draft_map(case, sizes, misshapen=REFUSES)


def _feature_layers(case: Case, ids: Any) -> None:
    if not ids:
        case.note("no feature layers given: vLLM takes 2, L//2 and L-3")
        return
    if not isinstance(ids, list) or not all(type(k) is int for k in ids):
        case.refuse(f"feature layers {ids!r} are no list of integers")
        return
    if len(set(ids)) != len(ids):
        case.refuse(f"feature layers {ids} repeat: vLLM de-duplicates them and fc no longer fits")
    elif len(ids) != 3:
        case.refuse(f"{len(ids)} feature layers {ids}, fc reads three")
    elif sorted(ids) != ids:
        case.misread(f"feature layers {ids} are not ascending: vLLM sorts them, fc was trained in the order given")
    if min(ids) < 0 or (case.target is not None and max(ids) > case.target.num_layers):
        case.refuse(
            f"feature layers {ids} lie outside the target's {case.target.num_layers if case.target else '?'} layers"
        )
    elif case.target is not None and max(ids) == case.target.num_layers:
        case.misread(
            f"feature layer {max(ids)} is the last hidden state: pre-norm in vLLM, post-norm where heads are trained"
        )


def _llama(case: Case, config: dict[str, Any]) -> dict[str, int]:
    sizes = llama_sizes(config)
    check_activation(case, config)
    if sizes["layers"] != 1:
        given = "missing and defaults to" if config.get("num_hidden_layers") is None else "is"
        case.misread(f"num_hidden_layers {given} {sizes['layers']} and the file holds one: the others stay random")
    case.compare_geometry(config)
    case.compare_target(sizes["D"], sizes["V"])
    return sizes


def _architecture(case: Case, architectures: Any, known: tuple[str, ...]) -> None:
    if not isinstance(architectures, list) or not any(name in known for name in architectures):
        case.refuse(f"architectures is {architectures!r}, expected one of {list(known)}")


def _unexpected(case: Case, known: set[str], config: dict[str, Any]) -> None:
    biases = [name for name in case.names if name.endswith(".bias") and name not in known]
    if config.get("attention_bias") or config.get("bias"):
        needed = [f"{p}_proj.bias" for p in "qkv"]
        if sum(any(name.endswith(n) for name in biases) for n in needed) < 3:
            case.misread("attention_bias is true and q/k/v biases are missing: they stay random")
    elif any(case.nonzero(name) for name in biases):
        case.misread(f"{', '.join(biases[:3])}: biases are dropped in silence without attention_bias")
    odd = sorted(set(case.names) - known - set(biases)) + case.strangers
    if odd:
        case.refuse(f"unexpected tensors {', '.join(odd[:6])}")


def _embedding(case: Case, sizes: dict[str, int]) -> None:
    shape = case.shape("embed_tokens.weight")
    if shape is not None and shape != (sizes["V"], sizes["H"]):
        case.refuse(f"embed_tokens.weight is {list(shape)}, config.json makes it [{sizes['V']}, {sizes['H']}]")


def _asked_first(check: Check) -> Check:
    """`check`, after the questions that vLLM asks of every family."""

    def whole(case: Case) -> None:
        if case.raw.config.get("model_type") == MLP_SPECULATOR:
            raise FormatError(NO_MLP)
        case.require_parsed()
        check(case)

    return whole


def _not_served(case: Case) -> str:
    if case.raw.config.get("model_type") == MLP_SPECULATOR:
        return NO_MLP
    if case.family is None:
        return "neither a Medusa, EAGLE or DFlash head nor a language model"
    return f"vLLM serves no {case.family} heads"


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
