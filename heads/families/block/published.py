"""What config.json of a head that drafts blocks says about the block, in the spellings that trainers write.

z-lab, SpecForge: most settings inside `dflash_config`. DeepSpec: at top level. The speculators library: at top level,
beside `transformer_layer_config`. Engines read the one before the other, so a setting that stands twice must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.heads.base import MAX_LAYERS
from headstart.heads.checkpoints.geometry import are_integers, flag, integer, require_plain
from headstart.heads.checkpoints.head_files import BESIDE
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle_files import LAYER_IDS, is_block_draft, shifted

NESTED = "dflash_config"
#: names of the target's layers in config.json → what leads from them to indices of hidden_states
LAYER_PLACES = {
    LAYER_IDS: 0,
    "aux_hidden_state_layer_ids": 0,
    f"{NESTED}.target_layer_ids": 1,
    "target_layer_ids": 1,
    "dspark_target_layer_ids": 1,
}
#: fields that say whether a slot sees only the slots of its block up to itself
CAUSAL = ("is_causal", "causal")
#: fields, at top level or in dflash_config, that change what a block head computes → values with which they do not
PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*CAUSAL, "use_swa", "attention_sink_bias", "use_gemma_norm"), (None, False)),
    **dict.fromkeys(("add_swa_attention_sink_bias", "has_embed_tokens", "ffn_bias"), (None, False)),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style", "use_aux_hidden_state"), (None, True)),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), (None, 0)),
    **dict.fromkeys(("attention_value_scale", "output_multiplier"), (None, 1)),
    **dict.fromkeys(("final_logit_softcapping", "attention_modes", "gating"), (None, 0)),
    "attention_mode": (None, "gqa"),
    "projector_type": (None, "dflash", "dspark"),
}
#: fields of geometry.PLAIN that block heads have
KNOWN = ("layer_types", "mask_token_id", "final_logit_softcapping")
#: tensors that a Markov head and a confidence head add to the backbone's
MARKOV, CONFIDENCE = "markov_head.", "confidence_head."
#: tensors that a recurrent network and the correction made of its state add to the backbone's
GRU, CORRECTION = "prefix_gru.", "embed_proj."
#: tensors of a selector among the most likely tokens
SELECTOR = "candidate_selector."
#: pickled side file with an embedding of the mask token of its own
(MASK_EMBEDDING,) = BESIDE


@dataclass(frozen=True)
class PublishedBlock:
    """The block of a published head.

    Attributes:
        feature_layers: indices of hidden_states.
        size: B, slots of a block. anchor_first: whether the first slot drafts too.
    """

    layers: int
    feature_layers: list[int]
    size: int
    anchor_first: bool
    mask_token_id: int

    @property
    def drafts(self) -> int:
        """K, drafts of a block."""
        return self.size - (0 if self.anchor_first else 1)


def nested_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """`dflash_config`, {} where there is none. Raises: FormatError where it is no object."""
    nested = config.get(NESTED) or {}
    if not isinstance(nested, dict):
        raise FormatError(f"{where}: {NESTED} is {nested!r}, expected an object")
    return nested


def stated(config: dict[str, Any], name: str, where: str) -> Any:
    """A setting, from dflash_config or top level; None where neither has it.

    Raises: FormatError where the two contradict each other.
    """
    inner, top = nested_of(config, where).get(name), config.get(name)
    if inner is not None and top is not None and inner != top:
        raise FormatError(
            f"{where}: {name} is {top!r} at top level and {inner!r} in {NESTED}: engines read either. Write both alike."
        )
    return top if inner is None else inner


def read_block(
    config: dict[str, Any],
    where: str,
    limit: int,
    vocab_size: int,
    anchor_first: bool,
    own_fields: tuple[str, ...] = (),
) -> PublishedBlock:
    """The block by a config of one level, whose layer has transformers' defaults.

    Args:
        limit: layers of the target; feature layers are below.
        anchor_first: what a config without `sample_from_anchor` means.
        own_fields: of PLAIN, those that the family computes.
    Raises: FormatError for a setting that is missing, out of bounds or contradicts another, and for what Headstart's
        block heads do not compute.
    """
    layers = integer(config, "num_hidden_layers", where, bounds=(1, MAX_LAYERS))
    nested = nested_of(config, where)
    if (kinds := config.get("layer_types")) not in (None, ["full_attention"] * layers):
        raise FormatError(
            f"{where}: layer_types is {kinds!r}, expected full_attention for each of {layers} layers: Headstart's "
            "block heads have no sliding windows. Serve this head with an engine, or train a new one."
        )
    require_plain(config, where, KNOWN)
    for place, values in ((where, config), (f"{where}: {NESTED}", nested)):
        require_plain(values, place, own_fields, PLAIN)
    token = stated(config, "mask_token_id", where)
    if type(token) is not int or not 0 <= token < vocab_size:
        raise FormatError(
            f"{where}: mask_token_id is {token!r}, expected the id of the token in the masked slots, below the "
            f"target's vocabulary of {vocab_size}; write the one that the head was trained with"
        )
    blocks = {"block_size": stated(config, "block_size", where)}
    first = _anchor_first(config, where, anchor_first)
    size = integer(blocks, "block_size", where, bounds=(1 if first else 2, MAX_LAYERS))
    return PublishedBlock(layers, _feature_layers(config, where, limit), size, first, token)


def _anchor_first(config: dict[str, Any], where: str, default: bool) -> bool:
    """`sample_from_anchor`, which some trainers call `shift_label`."""
    said = {name: stated(config, name, where) for name in ("sample_from_anchor", "shift_label")}
    given = {name: flag(said, name, where, default) for name, value in said.items() if value is not None}
    if len(set(given.values())) > 1:
        raise FormatError(f"{where}: {given} contradict each other: both say whether the first slot drafts")
    return next(iter(given.values()), default)


def _feature_layers(config: dict[str, Any], where: str, limit: int) -> list[int]:
    found = {}
    for name, by in LAYER_PLACES.items():
        inner = name.removeprefix(f"{NESTED}.")
        ids = config.get(name) if inner == name else nested_of(config, where).get(inner)
        if ids is None:
            continue
        if not are_integers(ids):
            raise FormatError(f"{where}: {name} is {ids!r}, expected a list of integers")
        found[name] = shifted(ids, by)
    if not found:
        raise FormatError(
            f"{where}: does not say which layers of the target it reads; write {NESTED}.target_layer_ids, counted from "
            "0 for the output of the first layer"
        )
    (name, ids), *others = found.items()
    for other, different in others:
        if different != ids:
            raise FormatError(
                f"{where}: {name} and {other} name different layers of the target, {ids} and {different} as indices "
                f"of hidden_states (engines add {LAYER_PLACES[name]} and {LAYER_PLACES[other]}). Keep the right one."
            )
    if not ids or sorted(set(ids)) != ids or ids[0] < 1 or ids[-1] >= limit:
        raise FormatError(
            f"{where}: {name} are layers {ids} as indices of hidden_states, expected distinct ascending ones from 1, "
            f"below {limit}, the target's depth (the last state is post-norm): engines sort them, without doubles"
        )
    return ids


def addition(raw: RawCheckpoint) -> str | None:
    """What a block head adds to DFlash's: the first that it has of MARKOV, GRU, SELECTOR, and CAUSAL's first name for a
    causal block; None where it adds nothing.
    """
    nested = raw.config.get(NESTED)
    places = (nested if isinstance(nested, dict) else {}, raw.config)
    if is_corrected(raw):
        return MARKOV
    named = any(place.get("projector_type") == "domino" for place in places)
    if named or any(name.removeprefix("model.").startswith(GRU) for name in raw.tensors):
        return GRU
    if any(name.removeprefix("model.").startswith(SELECTOR) for name in raw.tensors) or any(
        place.get("selector_rank") for place in places
    ):
        return SELECTOR
    return CAUSAL[0] if any(place.get(name) for place in places for name in CAUSAL) else None


def is_corrected(raw: RawCheckpoint) -> bool:
    """Whether a checkpoint is a block head whose drafts a Markov head corrects, even if it is damaged."""
    if any(name.removeprefix("model.").startswith((MARKOV, CONFIDENCE)) for name in raw.tensors):
        return True
    nested = raw.config.get(NESTED)
    places = (nested if isinstance(nested, dict) else {}, raw.config)
    ranks = [place["markov_rank"] for place in places if place.get("markov_rank") is not None]
    kind = raw.config.get("speculators_model_type")
    named = kind == "dspark" or any(place.get("projector_type") == "dspark" for place in places) or _named_dspark(raw)
    return is_block_draft(raw) and (any(rank != 0 for rank in ranks) if ranks else named)


def first_by_default(raw: RawCheckpoint) -> bool:
    """Whether the first slot drafts where `sample_from_anchor` is missing.

    So it is in DeepSpec's heads and in those that engines call DSpark, and not in files of the speculators library.
    """
    return "speculators_model_type" not in raw.config and (_named_dspark(raw) or is_corrected(raw))


def _named_dspark(raw: RawCheckpoint) -> bool:
    named = raw.config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and "DSpark" in name for name in named)
