"""Reads a draft layer's sizes and rope from a config.json that may be damaged or hostile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from transformers.activations import ACT2FN

from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.rope import LISTS, checked_rope, number, same_rope

#: field → (lowest, highest) value; a config with another one is damaged or hostile
LIMITS = {
    "hidden_size": (1, 1 << 17),
    "target_hidden_size": (1, 1 << 17),
    "intermediate_size": (1, 1 << 20),
    "vocab_size": (1, 1 << 21),
    "draft_vocab_size": (1, 1 << 21),
    "truncated_vocab_size": (1, 1 << 21),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 4096),
    "max_position_embeddings": (1, 1 << 26),
}

#: config fields that change what a llama layer computes → the values with which it computes what a plain one does
PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("attention_bias", "bias", "mlp_bias", "norm_output", "norm_before_fc", "fc_norm", "use_qk_norm", "qk_norm"),
        (None, False),
    ),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "scale_emb", "logits_scaling"), (None, 1)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "sliding_window"), (None,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "quantization_config"), (None,)),
    **dict.fromkeys(("ptd_token_id", "mask_token_id"), (None,)),
    "logit_scale": (None, 1),
    "no_rope_layers": (None, []),
    "parallel_drafting": (None, False),
    "attention_dropout": (None, 0),
    "pretraining_tp": (None, 0, 1),
    "layer_types": (None, ["full_attention"]),
}

#: defaults of transformers' LlamaConfig; files of the speculators library leave out every field that has its default
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

#: defaults of transformers' Qwen3Config
QWEN3_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A config with what transformers fills in for its `model_type`, of those that draft layers have."""
    return {**(QWEN3_DEFAULTS if config.get("model_type") == "qwen3" else LLAMA_DEFAULTS), **config}


def integer(
    config: dict[str, Any], name: str, where: str, default: int | None = None, bounds: tuple[int, int] | None = None
) -> int:
    """An integer field within its bounds, by default those of `LIMITS`.

    Raises: FormatError when it is missing (and there is no default), no integer, or out of bounds.
    """
    value = config.get(name)
    value = default if value is None else value
    low, high = bounds or LIMITS[name]
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{where}: {name} is {value!r}, expected an integer from {low} to {high}")
    return value


def are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def flag(config: dict[str, Any], name: str, where: str, default: bool) -> bool:
    value = config.get(name, default)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise FormatError(f"{where}: {name} is {value!r}, expected true or false")
    return value


def require_plain(
    config: dict[str, Any],
    where: str,
    allowed: tuple[str, ...] = (),
    plain: Mapping[str, tuple[Any, ...]] = PLAIN,
) -> None:
    """Refuse every field that makes the layer compute something else than Headstart's heads do.

    Args: plain: field → the values with which it changes nothing.
    Raises: FormatError naming the field and its value.
    """
    for name, neutral in plain.items():
        value = config.get(name)
        if name in allowed or (name == "sliding_window" and config.get("use_sliding_window") is False):
            continue
        # 0 == False and 1 == True in Python
        if not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in neutral):
            raise FormatError(
                f"{where}: {name} is {value!r}: this head computes something that Headstart's does not, and reading it "
                "without would draft wrongly in silence. Convert it with the tool that trained it, or train a new head."
            )


def rope_parameters(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The rope of a config, in transformers-v5 form, from `rope_parameters` and/or `rope_theta` + `rope_scaling`.

    Raises: FormatError where the two spellings disagree (older engines read the one, newer ones the other), or a value
        is unknown.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise FormatError(f"{where}: {name} is {value!r}, expected an object or null")
    theta = None if config.get("rope_theta") is None else number(config, "rope_theta", where)
    modern = _rope(new, config, where) if new else None
    legacy = _rope({"rope_theta": theta, **(old or {})}, config, where) if old or theta is not None else None
    if modern is not None and legacy is not None:
        if theta is None:  # scaling alone says nothing about theta
            legacy["rope_theta"] = modern["rope_theta"]
        if old is None and modern["rope_type"] != "default":
            raise FormatError(
                f"{where}: rope_parameters says {modern['rope_type']!r} and there is no rope_scaling beside "
                "rope_theta: older engines read the latter. Write both alike."
            )
        if not same_rope(legacy, modern):
            raise FormatError(
                f"{where}: rope_parameters {modern} and rope_theta/rope_scaling {legacy} disagree: older and newer "
                "engines would rotate positions differently. Write both alike."
            )
    return modern or legacy or {"rope_type": "default", "rope_theta": 10000.0}  # the default of a llama config


def _rope(stated: dict[str, Any], config: dict[str, Any], where: str) -> dict[str, Any]:
    given = {key: value for key, value in stated.items() if value is not None}
    beside = {"partial_rotary_factor": config.get("partial_rotary_factor")}
    if "longrope" in (given.get("rope_type"), given.get("type")):  # Phi-3's configs have it at top level
        beside["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
    return checked_rope({**beside, **given}, where)


def llama_dims(config: dict[str, Any], where: str, target_layers: int) -> HeadDims:
    """Dimensions of a one-layer llama draft from its config. `hidden_size` is the **draft's** here.

    Args:
        target_layers: layers of the target, which the config does not say.
    Raises: FormatError naming the field.
    """
    hidden = integer(config, "hidden_size", where)
    heads = integer(config, "num_attention_heads", where)
    kv_heads = integer(config, "num_key_value_heads", where, default=heads)
    if config.get("head_dim") is None and hidden % heads:
        raise FormatError(
            f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads} and head_dim is missing"
        )
    if heads % kv_heads:
        raise FormatError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    act = config.get("hidden_act") or "silu"
    if not isinstance(act, str) or act not in ACT2FN:
        raise FormatError(f"{where}: hidden_act is {act!r}, expected an activation of transformers such as 'silu'")
    head_dim = integer(config, "head_dim", where, default=hidden // heads)
    rope = rope_parameters(config, where)
    rotary = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in LISTS:
        if name in rope and len(rope[name]) != rotary:
            raise FormatError(
                f"{where}: rope {name} has {len(rope[name])} entries, expected {rotary} (half the rotary width)"
            )
    return HeadDims(
        hidden_size=hidden,
        vocab_size=integer(config, "vocab_size", where),
        num_layers=target_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=integer(config, "intermediate_size", where),
        rms_norm_eps=number(config, "rms_norm_eps", where, default=1e-6),
        hidden_act=act,
        max_position_embeddings=integer(config, "max_position_embeddings", where, default=2048),
        rope_parameters=rope,
        bos_token_id=bos if type(bos := config.get("bos_token_id")) is int else None,
        eos_token_id=_end_tokens(config.get("eos_token_id"), where),
    )


def _end_tokens(value: Any, where: str) -> int | list[int] | None:
    if isinstance(value, list) and (len(value) > 64 or not are_integers(value)):
        raise FormatError(f"{where}: eos_token_id is a list of {len(value)}, expected at most 64 integers")
    return value if type(value) is int or isinstance(value, list) else None


def dims_from_json(value: Any, where: str, rope: bool = True) -> HeadDims:
    """`HeadDims` from headstart.json, every field checked.

    Args:
        rope: whether the head uses the rope. If not, its target's rope may be one that no draft layer has.
    """
    known = {f.name for f in fields(HeadDims)}
    if not isinstance(value, dict) or set(value) - known or "hidden_size" not in value:
        odd = sorted(set(value) - known) if isinstance(value, dict) else type(value).__name__
        raise FormatError(f"{where}: dims {odd} not understood; expected {sorted(known)}")
    spelled = {
        **value,
        "num_hidden_layers": value.get("num_layers"),
        "num_attention_heads": value.get("num_heads"),
        "num_key_value_heads": value.get("num_kv_heads"),
    }
    spelled.pop("num_heads", None)
    try:
        rope_parameters(spelled, where)
    except FormatError:
        if rope:
            raise
        spelled["rope_parameters"] = None
    return replace(
        llama_dims(spelled, where, integer(spelled, "num_hidden_layers", where)),
        tie_word_embeddings=flag(value, "tie_word_embeddings", where, False),
        model_type=str(value.get("model_type", "llama")),
        sliding_window=_window(value.get("sliding_window"), where),
    )


def _window(value: Any, where: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise FormatError(f"{where}: dims.sliding_window is {value!r}, expected a positive integer or null")
    return value


def legacy_rope(rope: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """`(rope_theta, rope_scaling)` as engines before transformers v5 read them."""
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return float(rope["rope_theta"]), None if scaling["rope_type"] == "default" else scaling
