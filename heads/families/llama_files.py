"""EAGLE-1/2/3 checkpoints: portable, published by their authors, SpecForge, speculators (methods §3, §4)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.checkpoints.geometry import flag, integer, llama_dims, require_plain
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import Plan, finish, require_llama, target_embedding, with_target
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError

#: what transformers' LlamaConfig means by a field that a file leaves out (speculators write differences only)
LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYER_1 = tuple(f"self_attn.{p}.weight" for p in ATTENTION) + (
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
)
LAYER_3 = (*LAYER_1, "input_layernorm.weight", "hidden_norm.weight")


def unnest(config: dict[str, Any]) -> dict[str, Any]:
    """`{"model_type": "eagle", "model": {llama config}}` → one flat config."""
    inner = config.get("model")
    if not isinstance(inner, dict):
        return config
    return {
        **inner,
        **{key: value for key, value in config.items() if key not in ("model", "model_type", "architectures")},
    }


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensor names (without `model.`) are an EAGLE-3 head's rather than an EAGLE-1's."""
    return any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in names)


def plan_eagle(
    raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, where: str, layout: str
) -> Plan:
    """EAGLE-1: fc [D, 2D] embedding first, one llama layer without input_layernorm, the target's lm_head "
    "(methods §3)."""
    require_plain(config, where, allowed=("bias",))
    require_llama(config, where)
    dims = with_target(llama_dims(config, where, target.num_layers if target else 1), target, where)
    expected = {"fc.weight": "fc.weight", **{f"layers.0.{name}": f"layers.0.{name}" for name in LAYER_1}}
    unused, biased = {}, False
    if "fc.bias" in names:
        sealed = (raw.sidecar or {}).get("config")
        biased = bool(raw.read(names["fc.bias"]).any()) or (isinstance(sealed, dict) and sealed.get("fc_bias") is True)
        if biased:
            expected["fc.bias"] = "fc.bias"
        else:
            unused["fc.bias"] = "all zero"
    unused |= target_embedding(raw, names, dims)
    fields = {"intermediate_size": dims.intermediate_size, "fc_bias": biased}
    return finish(raw, layout, "eagle", fields, dims, names, expected, unused)


# EAGLE-3


def plan_eagle3(
    raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, where: str, layout: str
) -> Plan:
    """EAGLE-3: fc [H, 3D], a 2H-wide layer, norm, lm_head [U, H], d2t (methods §4)."""
    require_plain(config, where)
    require_llama(config, where)
    if flag(config, "norm_before_residual", where, False):
        raise FormatError(
            f"{where}: norm_before_residual is true: the residual is taken after hidden_norm. Headstart trains "
            "and runs the "
            "variant that every engine runs (false); serve this head with vLLM or train a new one."
        )
    nested = eagle_config(config, where)
    if nested.get("use_aux_hidden_state", True) is not True:
        raise FormatError(
            f"{where}: eagle_config.use_aux_hidden_state is false: the head does not read three target layers"
        )
    layer_ids = aux_layer_ids(config, where, target.num_layers if target else None)
    if layer_ids is None and target is None:
        raise FormatError(
            f"{where}: does not say which target layers it reads (eagle_aux_hidden_state_layer_ids); the usual "
            "ones depend "
            "on the target's depth: name the target as well (--target, or load_head(directory, dims))"
        )
    draft = llama_dims(config, where, target.num_layers if target else max(layer_ids or (0,)) + 1)
    hidden = draft.hidden_size
    width = integer(config, "target_hidden_size", where, default=target.hidden_size if target else hidden)
    dims = with_target(replace(draft, hidden_size=width), target, where)
    size = integer(config, "draft_vocab_size", where, default=dims.vocab_size)
    fields = {
        "feature_layers": list(layer_ids) if layer_ids else None,
        "draft_vocab_size": size,
        "hidden_size": None if hidden == width else hidden,
        "intermediate_size": draft.intermediate_size,
    }
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    expected = {name: name for name in ("fc.weight", "norm.weight", "lm_head.weight")}
    expected |= {f"midlayer.{name}": f"{prefix}{name}" for name in LAYER_3}
    unused: dict[str, str] = {}
    if hidden == width:
        unused |= target_embedding(raw, names, dims)
    else:
        expected["embed_tokens.weight"] = "embed_tokens.weight"
    for name in ("verifier_lm_head.weight", "verifier_norm.weight"):
        if name in names:
            unused[name] = "the target's own, used in training only"
    if "lm_head.weight" not in names:
        raise FormatError(
            f"{raw.directory}: lm_head.weight is missing, so engines put the target's in its place"
            + (
                ""
                if size == dims.vocab_size
                else f", of {dims.vocab_size} rows where the draft vocabulary has {size}: wrong"
            )
            + ". Add the head's own [draft_vocab_size, hidden_size] matrix."
        )
    ids, maps = _draft_ids(raw, names, size, dims.vocab_size, where)
    plan = finish(raw, layout, "eagle3", fields, dims, names, expected, {**unused, **maps})
    plan.draft_ids_U = ids
    return plan


def eagle_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise FormatError(f"{where}: eagle_config is {nested!r}, expected an object")
    require_plain(nested, f"{where}: eagle_config")
    return nested


def aux_layer_ids(config: dict[str, Any], where: str, target_layers: int | None) -> tuple[int, ...] | None:
    """HF `hidden_states` indices the head reads, or None where the file leaves the usual choice to the engine.

    The top-level key counts as vLLM does (k = hidden_states index), the one inside `eagle_config` as SGLang does
    (k - 1). Raises: FormatError when the two disagree, or the ids are not three distinct ascending layers below the
    target's last.
    """
    top = config.get("eagle_aux_hidden_state_layer_ids")
    inner = eagle_config(config, where).get("eagle_aux_hidden_state_layer_ids")
    for name, ids in (
        ("eagle_aux_hidden_state_layer_ids", top),
        ("eagle_config.eagle_aux_hidden_state_layer_ids", inner),
    ):
        if ids is not None and not (isinstance(ids, list) and all(type(k) is int for k in ids)):
            raise FormatError(f"{where}: {name} is {ids!r}, expected a list of integers")
    if top is not None and inner is not None and [k + 1 for k in inner] != top:
        raise FormatError(
            f"{where}: eagle_aux_hidden_state_layer_ids {top} (read by vLLM) and the ones inside eagle_config "
            f"{inner} (SGLang "
            f"adds 1) name different layers. Write {[k - 1 for k in top]} inside eagle_config."
        )
    found = top if top is not None else [k + 1 for k in inner] if inner is not None else None
    if found is None:
        return None
    limit = target_layers if target_layers is not None else 1 << 16
    if len(found) != 3 or sorted(set(found)) != found or found[0] < 1 or found[-1] >= limit:
        below = (
            f"below {target_layers}, the target's depth (its last hidden state is post-norm)"
            if target_layers
            else "from 1"
        )
        raise FormatError(
            f"{where}: feature layers {found}; expected three distinct ascending ids {below}: engines sort and "
            "de-duplicate them"
        )
    return tuple(found)


def _draft_ids(
    raw: RawCheckpoint, names: dict[str, str], size: int, vocab: int, where: str
) -> tuple[Tensor | None, dict[str, str]]:
    if size > vocab:
        raise FormatError(f"{where}: draft_vocab_size {size} exceeds vocab_size {vocab}")
    unused: dict[str, str] = {name: "turned into the draft ids" for name in ("d2t", "t2d") if name in names}
    if "d2t" not in names:
        if size < vocab:
            raise FormatError(
                f"{raw.directory}: draft_vocab_size is {size} of {vocab} and d2t is missing: drafted ids would be "
                "taken for "
                "target ids. Copy d2t (int64 offsets) from where the head was trained."
            )
        return None, unused
    for name, length in (("d2t", size), ("t2d", vocab)):
        if name in names and raw.tensors[names[name]].shape != (length,):
            raise FormatError(
                f"{raw.directory}: {name} has shape {list(raw.tensors[names[name]].shape)}, expected [{length}]"
            )
    offsets = raw.read(names["d2t"])
    if offsets.dtype not in (torch.int64, torch.int32):
        raise FormatError(f"{raw.directory}: d2t is {offsets.dtype}, expected int64 offsets")
    ids = offsets.to(torch.int64) + torch.arange(size)
    if size and (int(ids.min()) < 0 or int(ids.max()) >= vocab or not bool((ids[1:] > ids[:-1]).all())):
        raise FormatError(
            f"{raw.directory}: d2t + index is not an ascending list of distinct ids below {vocab}: it must hold "
            "offsets "
            "(target id - draft id), not target ids"
        )
    if "t2d" in names:
        mask = raw.read(names["t2d"])
        marked = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        if mask.dtype != torch.bool or not torch.equal(mask, marked):
            raise FormatError(f"{raw.directory}: t2d ({mask.dtype}) does not mark the ids that d2t lists")
    return (None if size == vocab else ids), unused


def plan_speculators(raw: RawCheckpoint, target: HeadDims | None, where: str) -> Plan:
    config = raw.config
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind not in ("eagle", "eagle3"):
        raise FormatError(f"{where}: speculators_model_type is {kind!r}; Headstart reads eagle and eagle3")
    if not isinstance(layer, dict):
        raise FormatError(f"{where}: transformer_layer_config is {type(layer).__name__}, expected an object")
    require_plain(config, where)
    flat = {**LLAMA_DEFAULTS, **layer}
    if kind == "eagle3":
        keys = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
        flat |= {key: config[key] for key in keys if config.get(key) is not None}
        flat.setdefault("draft_vocab_size", 32000)  # their default
        flat["norm_before_residual"] = flag(config, "norm_before_residual", where, True)
        return plan_eagle3(raw, flat, {name: name for name in raw.tensors}, target, where, "speculators EAGLE-3")
    if flag(config, "layernorms", where, False):
        raise FormatError(
            f"{where}: layernorms is true: norms that Headstart's EAGLE-1 does not have; it would draft wrongly"
        )
    flat["num_hidden_layers"] = 1
    names = {}
    for name in raw.tensors:
        names[re.sub(r"^transformer\.", "layers.0.", re.sub(r"^fusion_fc\.", "fc.", name))] = name
    return plan_eagle(raw, flat, names, target, where, "speculators EAGLE-1")
