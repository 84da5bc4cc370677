"""vLLM 0.32: its rules for drafts that Headstart does not read, which are DFlash heads and ordinary draft models."""

from __future__ import annotations

from typing import Any

import torch

from headstart.heads.checkpoints.geometry import are_integers, integer
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.families.eagle_files import LAYER_IDS, shifted
from headstart.heads.formats.eagle_rules import (
    check_reach,
    eagle_config_of,
    layer_tensors,
    llama_sizes,
    mask_token_problem,
)
from headstart.heads.formats.verdicts import REFUSES, Case, TensorRule
from headstart.heads.formats.vllm_targets import check_target_class

#: architectures of which a model is built to compare names: num_hidden_layers bounds the number of their modules
DENSE = ("llama", "mistral", "qwen2", "qwen3")
OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}


def check_dflash(case: Case) -> None:
    """DFlash: a small bidirectional Qwen3 over blocks of masked tokens that reads several target layers."""
    config = case.config
    case.require_architecture(("DFlashDraftModel",), config.get("architectures"))
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    ids = _layers(case, config, nested)
    sizes = llama_sizes(config)
    token = nested.get("mask_token_id", config.get("mask_token_id"))
    if problem := mask_token_problem("dflash_config.mask_token_id", token, sizes["V"]):
        case.refuse(problem)
    case.compare_target(sizes["D"], sizes["V"])
    sizes["F"] = sizes["D"] * (len(ids) or sizes["layers"])
    sizes["h"] = sizes["A"] // integer(config, "num_attention_heads", "config.json", default=32)
    rows = [TensorRule("fc.weight", ("H", "F"), REFUSES), TensorRule("hidden_norm.weight", ("H",), REFUSES)]
    rows.append(TensorRule("norm.weight", ("H",), REFUSES))
    for number in range(sizes["layers"]):
        prefix = f"layers.{number}."
        rows += layer_tensors(prefix, "H", REFUSES)
        rows += [TensorRule(f"{prefix}input_layernorm.weight", ("H",), REFUSES)]
        rows += [TensorRule(f"{prefix}self_attn.{name}.weight", ("h",), REFUSES) for name in ("q_norm", "k_norm")]
    case.match(rows, sizes)
    if "mask_hidden" in case.names:
        case.refuse("mask_hidden must be absent: DFlash embeds masked places by mask_token_id")
    if odd := case.unexplained({row.name for row in rows} | OPTIONAL | {"mask_hidden"}):
        case.refuse(f"unexpected tensors {some(odd)}")
    case.compare_geometry(config)
    check_target_class(case)
    wanted = [name for name in ("num_target_layers", "layer_types", "block_size") if config.get(name) is None]
    if wanted:
        case.note(f"the reference implementation also wants {', '.join(wanted)} in config.json")


def _layers(case: Case, config: dict[str, Any], nested: dict[str, Any]) -> list[int]:
    """The hidden_states indices that vLLM reads. Faults in them go to the verdict."""
    inner, top = nested.get("target_layer_ids"), config.get(LAYER_IDS)
    for name, ids in (("dflash_config.target_layer_ids", inner), (LAYER_IDS, top)):
        if ids is not None and not are_integers(ids):
            case.refuse(f"{name} is {ids!r}, expected a list of integers")
            return []
    read = shifted(inner, 1)
    if not inner:
        case.misread("dflash_config.target_layer_ids is missing: vLLM takes layers that fc was not trained on")
    elif top and top != read:
        case.misread(
            f"{LAYER_IDS} {top} are read as they are, in the place of dflash_config.target_layer_ids {inner}, to which "
            f"1 is added: write {read} or leave it out"
        )
    elif not top and isinstance(config.get("eagle_config"), dict):
        other = eagle_config_of(config).get(LAYER_IDS)
        if other != read:
            case.misread(f"eagle_config hides dflash_config: vLLM reads layers {other}; remove eagle_config")
    read = top or read
    if sorted(set(read)) != read:
        case.misread(f"feature layers {read} are not ascending or repeat: vLLM sorts and de-duplicates them")
    check_reach(case, read)
    return read


def check_draft_model(case: Case) -> None:
    """An ordinary causal language model that drafts: only its vocabulary has to be the target's."""
    _compare_layers(case)
    config = case.config.get("text_config")
    config = config if isinstance(config, dict) else case.config
    vocab = integer(config, "vocab_size", "config.json")
    longest = config.get("max_position_embeddings")
    if case.target is not None and type(longest) is int and longest < (limit := case.target.max_position_embeddings):
        case.note(f"it drafts for texts of up to {longest} tokens, the target's are up to {limit}")
    if case.target is None:
        case.note(f"as a draft model, for targets whose vocab_size is {vocab}")
    elif vocab != case.target.vocab_size:
        case.refuse(f"vocab_size is {vocab}, the target's {case.target.vocab_size}: a draft model needs the same")
    else:
        case.note('as a draft model: "method": "draft_model"; compare the tokenizers, which no engine does')


def _compare_layers(case: Case) -> None:
    """Compare the tensors with those of the architecture in config.json, if it is one of DENSE."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, and only this check needs it

    config, where = dict(case.raw.config), "config.json"
    kind = config.get("model_type")
    if kind not in DENSE or config.get("quantization_config") is not None:
        case.note(f"its layers are not compared with config.json (model_type {kind!r})")
        return
    llama_sizes(config)  # refuses sizes out of bounds before a module is built
    integer(config, "max_position_embeddings", where, default=2048)
    try:
        made = AutoConfig.for_model(**{**config, "dtype": None})
        with torch.device("meta"):
            shapes = {name: tuple(x.shape) for name, x in AutoModelForCausalLM.from_config(made).state_dict().items()}
    except Exception as error:  # noqa: BLE001 - a damaged config fails in engines as it fails here
        case.refuse(f"no {kind} can be built from config.json ({type(error).__name__}: {error})")
        return
    held = {name: info.shape for name, info in case.raw.tensors.items()}
    if made.tie_word_embeddings or "lm_head.weight" not in held:
        shapes.pop("lm_head.weight", None)
        if not made.tie_word_embeddings:
            case.refuse("lm_head.weight is missing and tie_word_embeddings is false")
    if missing := sorted(set(shapes) - set(held)):
        case.refuse(f"tensors {some(missing)} are missing")
    for name in sorted(set(shapes) & set(held)):
        if shapes[name] != held[name]:
            case.refuse(f"{name} is {list(held[name])}, config.json makes it {list(shapes[name])}")
        elif not case.raw.tensors[name].dtype.is_floating_point:
            case.misread(f"{name} is {case.raw.tensors[name].dtype}: it would be cast in silence")
    if odd := sorted(set(held) - set(shapes) - {"lm_head.weight"}):
        case.note(f"{some(odd)} belong to no layer of a {kind}")
