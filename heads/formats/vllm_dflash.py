"""vLLM 0.32 on drafts that Headstart does not train yet: DFlash heads and ordinary draft models."""

from __future__ import annotations

from typing import Any

from headstart.heads.base import HeadDims
from headstart.heads.formats.findings import (
    EngineVerdict,
    Row,
    Verdict,
    View,
    eagle_config_of,
    layer_rows,
    llama_sizes,
    match_rows,
    rope_problems,
)
from headstart.heads.formats.geometry import integer

WRONG, REFUSES, LOADS = Verdict.WRONG, Verdict.REFUSES, Verdict.LOADS
ARCHITECTURE = "DFlashDraftModel"
OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}


def check_dflash(found: EngineVerdict, seen: View, target: HeadDims | None) -> None:
    """DFlash: a small bidirectional Qwen3 over blocks of masked tokens that reads several target layers."""
    config = seen.config
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        found.add(REFUSES, f"architectures is {architectures!r}, expected [{ARCHITECTURE!r}]")
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    if type(nested.get("mask_token_id", config.get("mask_token_id"))) is not int:
        found.add(REFUSES, "dflash_config.mask_token_id is missing: the token that stands for what is to be drafted")
    ids = _layers(found, config, nested, target)
    sizes = llama_sizes(config, "config.json")
    width = target.hidden_size if target is not None else sizes["D"]
    if sizes["D"] != width:
        found.add(REFUSES, f"reads hidden states of width {sizes['D']}, the target's are {width} wide")
    if target is not None and sizes["V"] != target.vocab_size:
        found.add(WRONG, f"vocab_size is {sizes['V']}, the target's {target.vocab_size}: it belongs to another target")
    sizes["F"] = sizes["D"] * (len(ids) or sizes["layers"])
    sizes["h"] = sizes["A"] // integer(config, "num_attention_heads", "config.json", default=32)
    rows = [Row("fc.weight", ("H", "F"), REFUSES), Row("hidden_norm.weight", ("H",), REFUSES)]
    rows.append(Row("norm.weight", ("H",), REFUSES))
    for number in range(sizes["layers"]):
        prefix = f"layers.{number}."
        rows += layer_rows(prefix, "H", REFUSES)
        rows += [Row(f"{prefix}input_layernorm.weight", ("H",), REFUSES)]
        rows += [Row(f"{prefix}self_attn.{name}.weight", ("h",), REFUSES) for name in ("q_norm", "k_norm")]
    match_rows(found, seen, rows, sizes)
    if "mask_hidden" in seen.names:
        found.add(REFUSES, "mask_hidden must be absent: DFlash embeds masked places by mask_token_id")
    odd = sorted(set(seen.names) - {row.name for row in rows} - OPTIONAL - {"mask_hidden"})
    if odd:
        found.add(REFUSES, f"unexpected tensors {', '.join(odd[:6])}")
    for reason in rope_problems(config, "config.json", target):
        found.add(WRONG, reason)
    wanted = [name for name in ("num_target_layers", "layer_types", "block_size") if config.get(name) is None]
    if wanted:
        found.add(LOADS, f"the reference implementation also wants {', '.join(wanted)} in config.json")


def _layers(found: EngineVerdict, config: dict[str, Any], nested: dict[str, Any], target: HeadDims | None) -> list[int]:
    """hidden_states indices that vLLM reads, with what is wrong about them."""
    inner, top = nested.get("target_layer_ids"), config.get("eagle_aux_hidden_state_layer_ids")
    for name, ids in (("dflash_config.target_layer_ids", inner), ("eagle_aux_hidden_state_layer_ids", top)):
        if ids is not None and not (isinstance(ids, list) and all(type(k) is int for k in ids)):
            found.add(REFUSES, f"{name} is {ids!r}, expected a list of integers")
            return []
    if not inner:
        found.add(WRONG, "dflash_config.target_layer_ids is missing: vLLM takes layers that fc was not trained on")
    if top and inner and top != [k + 1 for k in inner]:
        found.add(
            WRONG,
            f"eagle_aux_hidden_state_layer_ids {top} are read as they are, in the place of "
            f"dflash_config.target_layer_ids {inner}, to which 1 is added: write {[k + 1 for k in inner]} or leave it "
            "out",
        )
    if not top and isinstance(config.get("eagle_config"), dict):
        other = eagle_config_of(config).get("eagle_aux_hidden_state_layer_ids")
        if inner and other != [k + 1 for k in inner]:
            found.add(WRONG, f"eagle_config hides dflash_config: vLLM reads layers {other}; remove eagle_config")
    read = top or [k + 1 for k in inner or []]
    if len(set(read)) != len(read) or sorted(read) != read:
        found.add(WRONG, f"feature layers {read} are not ascending or repeat: vLLM sorts and de-duplicates them")
    if read and (min(read) < 0 or (target is not None and max(read) > target.num_layers)):
        found.add(REFUSES, f"feature layers {read} lie outside the target's {target.num_layers if target else '?'}")
    elif read and target is not None and max(read) == target.num_layers:
        found.add(WRONG, f"feature layer {max(read)} is the last hidden state, pre-norm in vLLM")
    return read


def check_draft_model(found: EngineVerdict, seen: View, target: HeadDims | None) -> None:
    """An ordinary causal language model that drafts: only its vocabulary has to be the target's."""
    config = seen.config.get("text_config")
    config = config if isinstance(config, dict) else seen.config
    vocab = integer(config, "vocab_size", "config.json")
    if target is None:
        found.add(LOADS, f"as a draft model, for targets whose vocab_size is {vocab}")
    elif vocab != target.vocab_size:
        found.add(REFUSES, f"vocab_size is {vocab}, the target's {target.vocab_size}: a draft model needs the same")
    else:
        found.add(LOADS, 'as a draft model: "method": "draft_model"; compare the tokenizers, which no engine does')
