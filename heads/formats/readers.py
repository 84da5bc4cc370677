"""Checkpoints from elsewhere → what our heads are built from. Every tensor of a file is accounted for, or it is refused.

Layouts read (by their public key names):
- portable / vLLM: `midlayer.*` or `layers.0.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`; `blocks.*`, `lm_heads.*`
- EAGLE-1/2/3 as published by their authors (`yuhuili/*`), SpecForge exports
- speculators (`speculators_model_type`, `transformer_layer_config`)
- FasterDecoding Medusa v1 = TGI v1 (`{i}.{j}.linear.*`, `{i}.{N}.weight`), TGI v2 (one layer, target's lm_head)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.formats.geometry import flag, integer, llama_dims, require_plain
from headstart.heads.formats.raw import RawCheckpoint

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

Rope = dict[str, Any]


@dataclass
class Plan:
    """How one checkpoint becomes a head.

    Attributes:
        layout: name for people.
        family: registry name.
        fields: keyword arguments of the family's config class that the file determines.
        dims: the target's dimensions with the draft layer's geometry (heads, rope, eps).
        names: tensor name in our head → tensor name in the file.
        zeros: tensors of our head that the file leaves out because they are zero.
        draft_ids_U: int64 [U], ascending target ids of the draft vocabulary, or None when U == V.
        unused: file tensor → why leaving it out changes nothing.
    """

    layout: str
    family: str
    fields: dict[str, Any]
    dims: HeadDims
    names: dict[str, str]
    zeros: tuple[str, ...] = ()
    draft_ids_U: Tensor | None = None
    unused: dict[str, str] = field(default_factory=dict)


def plan_foreign(raw: RawCheckpoint, dims: HeadDims | None) -> Plan:
    """Recognise the layout of a checkpoint without our sidecar.

    Args:
        dims: the target's dimensions; needed where the file does not say which target layers it reads.
    Raises: FormatError naming the file, the keys, and what to do.
    """
    config, where = raw.config, str(raw.directory / "config.json")
    if "speculators_model_type" in config:
        return _plan_speculators(raw, dims, where)
    if _is_medusa(raw):
        return plan_medusa(raw, dims, where)
    if isinstance(config.get("model"), dict):
        config = {**config["model"], **{k: v for k, v in config.items() if k not in ("model", "model_type", "architectures")}}
    names = {name.removeprefix("model."): name for name in raw.tensors}
    if len(names) != len(raw.tensors):
        raise FormatError(f"{raw.directory}: tensors appear both with and without the prefix 'model.'; keep one of each")
    if "fc.weight" not in names:
        raise FormatError(
            f"{raw.directory}: no head that Headstart knows: neither Medusa blocks nor fc.weight among "
            f"{_some(raw.tensors)}. Readable: Medusa v1/v2, EAGLE-1/2, EAGLE-3, SpecForge, speculators."
        )
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return plan_eagle3(raw, config, names, dims, where, "EAGLE-3")
    return plan_eagle(raw, config, names, dims, where, "EAGLE-1")


def _is_medusa(raw: RawCheckpoint) -> bool:
    config = raw.config
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and "MedusaModel" in architectures
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config or named


def _some(names: Any, limit: int = 8) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# EAGLE-1 and EAGLE-2 (one architecture)


def plan_eagle(
    raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, where: str, layout: str
) -> Plan:
    """EAGLE-1: fc [D, 2D] embedding first, one llama layer without input_layernorm, the target's lm_head (methods §3)."""
    require_plain(config, where, allowed=("bias",))
    _require_llama(config, where)
    dims = _with_target(llama_dims(config, where, target.num_layers if target else 1), target, where)
    expected = {"fc.weight": "fc.weight", **{f"layers.0.{name}": f"layers.0.{name}" for name in LAYER_1}}
    unused = {}
    if "fc.bias" in names:
        if bool(raw.read(names["fc.bias"]).any()):
            raise FormatError(
                f"{raw.directory}: fc.bias is not zero. vLLM drops it in silence and Headstart's EAGLE-1 has none: "
                "train a new head, or serve this one where its bias is read."
            )
        unused["fc.bias"] = "all zero"
    unused |= _target_embedding(raw, names, dims)
    return _finish(raw, layout, "eagle", {"intermediate_size": dims.intermediate_size}, dims, names, expected, unused)


# EAGLE-3


def plan_eagle3(
    raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], target: HeadDims | None, where: str, layout: str
) -> Plan:
    """EAGLE-3: fc [H, 3D], a 2H-wide layer, norm, lm_head [U, H], d2t (methods §4)."""
    require_plain(config, where)
    _require_llama(config, where)
    if flag(config, "norm_before_residual", where, False):
        raise FormatError(
            f"{where}: norm_before_residual is true: the residual is taken after hidden_norm. Headstart trains and runs the "
            "variant that every engine runs (false); serve this head with vLLM or train a new one."
        )
    eagle_config = _eagle_config(config, where)
    if eagle_config.get("use_aux_hidden_state", True) is not True:
        raise FormatError(f"{where}: eagle_config.use_aux_hidden_state is false: the head does not read three target layers")
    layer_ids = aux_layer_ids(config, where, target.num_layers if target else None)
    if layer_ids is None and target is None:
        raise FormatError(
            f"{where}: does not say which target layers it reads (eagle_aux_hidden_state_layer_ids); the usual ones depend "
            "on the target's depth: name the target as well (--target, or load_head(directory, dims))"
        )
    draft = llama_dims(config, where, target.num_layers if target else max(layer_ids or (0,)) + 1)
    hidden = draft.hidden_size
    width = integer(config, "target_hidden_size", where, default=target.hidden_size if target else hidden)
    dims = _with_target(replace(draft, hidden_size=width), target, where)
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
        unused |= _target_embedding(raw, names, dims)
    else:
        expected["embed_tokens.weight"] = "embed_tokens.weight"
    for name in ("verifier_lm_head.weight", "verifier_norm.weight"):
        if name in names:
            unused[name] = "the target's own, used in training only"
    if "lm_head.weight" not in names:
        raise FormatError(
            f"{raw.directory}: lm_head.weight is missing, so engines put the target's in its place"
            + ("" if size == dims.vocab_size else f", of {dims.vocab_size} rows where the draft vocabulary has {size}: wrong")
            + ". Add the head's own [draft_vocab_size, hidden_size] matrix."
        )
    ids, maps = _draft_ids(raw, names, size, dims.vocab_size, where)
    plan = _finish(raw, layout, "eagle3", fields, dims, names, expected, {**unused, **maps})
    plan.draft_ids_U = ids
    return plan


def _eagle_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise FormatError(f"{where}: eagle_config is {nested!r}, expected an object")
    require_plain(nested, f"{where}: eagle_config")
    return nested


def aux_layer_ids(config: dict[str, Any], where: str, target_layers: int | None) -> tuple[int, ...] | None:
    """HF `hidden_states` indices the head reads, or None where the file leaves the usual choice to the engine.

    The top-level key counts as vLLM does (k = hidden_states index); the one inside `eagle_config` as SGLang does (k - 1).
    Raises: FormatError when the two disagree, or the ids are not three distinct ascending layers below the target's last.
    """
    top = config.get("eagle_aux_hidden_state_layer_ids")
    inner = _eagle_config(config, where).get("eagle_aux_hidden_state_layer_ids")
    for name, ids in (("eagle_aux_hidden_state_layer_ids", top), ("eagle_config.eagle_aux_hidden_state_layer_ids", inner)):
        if ids is not None and not (isinstance(ids, list) and all(type(k) is int for k in ids)):
            raise FormatError(f"{where}: {name} is {ids!r}, expected a list of integers")
    if top is not None and inner is not None and [k + 1 for k in inner] != top:
        raise FormatError(
            f"{where}: eagle_aux_hidden_state_layer_ids {top} (read by vLLM) and the ones inside eagle_config {inner} (SGLang "
            f"adds 1) name different layers. Write {[k - 1 for k in top]} inside eagle_config."
        )
    found = top if top is not None else [k + 1 for k in inner] if inner is not None else None
    if found is None:
        return None
    limit = target_layers if target_layers is not None else 1 << 16
    if len(found) != 3 or sorted(set(found)) != found or found[0] < 1 or found[-1] >= limit:
        below = f"below {target_layers}, the target's depth (its last hidden state is post-norm)" if target_layers else "from 1"
        raise FormatError(
            f"{where}: feature layers {found}; expected three distinct ascending ids {below}: engines sort and de-duplicate them"
        )
    return tuple(found)


def _draft_ids(
    raw: RawCheckpoint, names: dict[str, str], size: int, vocab: int, where: str
) -> tuple[Tensor | None, dict[str, str]]:
    if size > vocab:
        raise FormatError(f"{where}: draft_vocab_size {size} exceeds vocab_size {vocab}")
    unused = {name: "turned into the draft ids" for name in ("d2t", "t2d") if name in names}
    if "d2t" not in names:
        if size < vocab:
            raise FormatError(
                f"{raw.directory}: draft_vocab_size is {size} of {vocab} and d2t is missing: drafted ids would be taken for "
                "target ids. Copy d2t (int64 offsets) from where the head was trained."
            )
        return None, unused
    for name, length in (("d2t", size), ("t2d", vocab)):
        if name in names and raw.tensors[names[name]].shape != (length,):
            raise FormatError(f"{raw.directory}: {name} has shape {list(raw.tensors[names[name]].shape)}, expected [{length}]")
    offsets = raw.read(names["d2t"])
    if offsets.dtype not in (torch.int64, torch.int32):
        raise FormatError(f"{raw.directory}: d2t is {offsets.dtype}, expected int64 offsets")
    ids = offsets.to(torch.int64) + torch.arange(size)
    if size and (int(ids.min()) < 0 or int(ids.max()) >= vocab or not bool((ids[1:] > ids[:-1]).all())):
        raise FormatError(
            f"{raw.directory}: d2t + index is not an ascending list of distinct ids below {vocab}: it must hold offsets "
            "(target id - draft id), not target ids"
        )
    if "t2d" in names:
        mask = raw.read(names["t2d"])
        marked = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        if mask.dtype != torch.bool or not torch.equal(mask, marked):
            raise FormatError(f"{raw.directory}: t2d ({mask.dtype}) does not mark the ids that d2t lists")
    return (None if size == vocab else ids), unused


# Medusa

MEDUSA_KEYS = (
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), "blocks.{0}.layers.{1}.{2}"),
    (re.compile(r"lm_heads\.(\d+)\.(weight)"), "lm_heads.{0}.{1}"),
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), "blocks.{0}.layers.{1}.{2}"),
    (re.compile(r"(\d+)\.(\d+)\.(weight)"), "lm_heads.{0}.{2}"),
)


def medusa_names(tensors: Any, where: str) -> dict[str, str]:
    """Our tensor name → file name for every Medusa spelling. Raises FormatError for keys of no known spelling."""
    names: dict[str, str] = {}
    unknown = []
    for name in tensors:
        short = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        found = next(((pattern.fullmatch(short), ours) for pattern, ours in MEDUSA_KEYS if pattern.fullmatch(short)), None)
        if found is None or found[0] is None:
            unknown.append(name)
            continue
        ours = found[1].format(*(str(int(part)) if part.isdigit() else part for part in found[0].groups()))
        if ours in names:
            raise FormatError(f"{where}: {names[ours]} and {name} are the same tensor ({ours}); keep one")
        names[ours] = name
    if unknown:
        raise FormatError(f"{where}: tensors {_some(unknown)} belong to no Medusa head that Headstart knows; it would be read in part")
    return names


def plan_medusa(raw: RawCheckpoint, target: HeadDims | None, where: str) -> Plan:
    """Medusa in vLLM's, FasterDecoding's or TGI's spelling (methods §1). The tensors, not the config, count the heads:
    published configs are known to say fewer than the file holds."""
    config = raw.config
    names = medusa_names(raw.tensors, str(raw.directory))
    heads = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
    layers = len({name.split(".")[3] for name in names if name.startswith("blocks.0.")})
    if not heads or not layers:
        raise FormatError(f"{raw.directory}: no Medusa residual blocks among {_some(raw.tensors)}")
    first = raw.tensors[names.get("blocks.0.layers.0.weight", next(iter(names.values())))]
    hidden = integer(config, "hidden_size", where, default=first.shape[-1])
    matrices = sorted(name for name in names if name.startswith("lm_heads."))
    original = flag(config, "original_lm_head", where, False)
    own = bool(matrices) and not original
    if original and matrices != ["lm_heads.0.weight"]:
        raise FormatError(f"{where}: original_lm_head is true, so exactly lm_heads.0.weight is expected; found {matrices}")
    rows = raw.tensors[names[matrices[0]]].shape[0] if matrices else (target.vocab_size if target else None)
    vocab = integer(config, "vocab_size", where, default=rows)
    if config.get("truncated_vocab_size") not in (None, vocab):
        raise FormatError(f"{where}: truncated_vocab_size is {config['truncated_vocab_size']!r}: reduced Medusa vocabularies are not read")
    if config.get("logit_scale", 1.0) != 1.0:
        raise FormatError(f"{where}: logit_scale is {config['logit_scale']!r}, expected 1")
    dims = target or HeadDims(hidden, vocab, 1, 1, 1, hidden, hidden)
    _require_equal(where, "hidden_size", hidden, dims.hidden_size)
    _require_equal(where, "vocab_size", vocab, dims.vocab_size)
    expected = {f"blocks.{i}.layers.{j}.weight" for i in range(heads) for j in range(layers)}
    biases = {f"blocks.{i}.layers.{j}.bias" for i in range(heads) for j in range(layers)}
    has_bias = any(name.endswith(".bias") for name in names)
    if has_bias:
        expected |= biases
    unused: dict[str, str] = {}
    if own:
        expected |= {f"lm_heads.{i}.weight" for i in range(heads)}
    elif matrices:
        unused[names.pop("lm_heads.0.weight")] = "the target's lm_head, shared by all heads"
    _require_names(raw, set(names), expected)
    fields = {"depth": heads, "num_layers": layers, "lm_head": "own" if own else "shared"}
    zeros = () if has_bias else tuple(sorted(biases))
    return Plan("Medusa", "medusa", fields, dims, names, zeros, unused=unused)


# speculators


def _plan_speculators(raw: RawCheckpoint, target: HeadDims | None, where: str) -> Plan:
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
        raise FormatError(f"{where}: layernorms is true: norms that Headstart's EAGLE-1 does not have; it would draft wrongly")
    flat["num_hidden_layers"] = 1
    names = {}
    for name in raw.tensors:
        names[re.sub(r"^transformer\.", "layers.0.", re.sub(r"^fusion_fc\.", "fc.", name))] = name
    return plan_eagle(raw, flat, names, target, where, "speculators EAGLE-1")


# shared checks


def _require_llama(config: dict[str, Any], where: str) -> None:
    kind = config.get("model_type", "llama")
    if kind not in ("llama", "eagle", "eagle3"):
        raise FormatError(f"{where}: model_type is {kind!r}; Headstart's draft layer is Llama's (Qwen3's has q/k norms, Qwen2's biases)")
    layers = integer(config, "num_hidden_layers", where, default=1)
    if layers != 1:
        raise FormatError(f"{where}: num_hidden_layers is {layers}; Headstart reads drafts of one layer")


def _with_target(dims: HeadDims, target: HeadDims | None, where: str) -> HeadDims:
    """The draft's geometry with the target's facts; sizes that must agree are compared."""
    if target is None:
        return dims
    _require_equal(where, "hidden_size", dims.hidden_size, target.hidden_size)
    _require_equal(where, "vocab_size", dims.vocab_size, target.vocab_size)
    return replace(
        dims, num_layers=target.num_layers, tie_word_embeddings=target.tie_word_embeddings, model_type=target.model_type
    )


def _require_equal(where: str, name: str, found: int, expected: int) -> None:
    if found != expected:
        raise FormatError(f"{where}: {name} is {found} and the target has {expected}: the head was trained for another target")


def _target_embedding(raw: RawCheckpoint, names: dict[str, str], dims: HeadDims) -> dict[str, str]:
    if "embed_tokens.weight" not in names:
        return {}
    shape = raw.tensors[names["embed_tokens.weight"]].shape
    if shape != (dims.vocab_size, dims.hidden_size):
        raise FormatError(
            f"{raw.directory}: embed_tokens.weight has shape {list(shape)}, expected the target's [{dims.vocab_size}, {dims.hidden_size}]"
        )
    return {"embed_tokens.weight": "the target's embeddings (compare with formats.check_embeddings)"}


def _require_names(raw: RawCheckpoint, found: set[str], expected: set[str]) -> None:
    missing, unknown = expected - found, found - expected
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"holds unknown {_some(unknown)}"] * bool(unknown)
        raise FormatError(
            f"{raw.directory}: the checkpoint {' and '.join(parts)}. Nothing is skipped: a head read in part drafts wrongly."
        )


def _finish(
    raw: RawCheckpoint,
    layout: str,
    family: str,
    fields: dict[str, Any],
    dims: HeadDims,
    names: dict[str, str],
    expected: dict[str, str],
    unused: dict[str, str],
) -> Plan:
    """`expected`: our name → short file name; every other file tensor must be in `unused`."""
    _require_names(raw, set(names) - set(unused), set(expected.values()))
    return Plan(layout, family, fields, dims, {ours: names[short] for ours, short in expected.items()}, unused=unused)
