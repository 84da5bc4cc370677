"""What the engines' rules about heads that draft blocks share: sizes, tensors, feature layers, the mask token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.heads.checkpoints.geometry import are_integers, integer, with_defaults
from headstart.heads.families.block.files import BACKBONE
from headstart.heads.families.block.published import CONFIDENCE, MARKOV, MASK_EMBEDDING, NESTED
from headstart.heads.families.eagle3.files import QK_NORMS
from headstart.heads.families.eagle_files import shifted
from headstart.heads.formats.eagle_rules import check_reach, layer_tensors, llama_sizes, mask_token_problem
from headstart.heads.formats.handling import WRONG, Case, Handling, TensorRule

#: architectures by which engines know a head of either kind
DFLASH_ARCHITECTURES, DSPARK_ARCHITECTURES = ("DFlashDraftModel",), ("Qwen3DSparkModel", "DSparkDraftModel")
#: tensors that engines take, and do not need
OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
#: what to do with a head whose first slot drafts, where no engine serves it so
FILL_IN = "train with head.sample_from_anchor=false, or draft with Headstart's own engine"
#: kinds of Markov head → tensors beside W1 and W2
MORE_OF_MARKOV: dict[str, dict[str, tuple[str, ...]]] = {
    "vanilla": {},
    "gated": {"gate_proj.weight": ("r", "H+r"), "gate_proj.bias": ("r",)},
    "rnn": {"joint_proj.weight": ("3r", "H+2r"), "joint_proj.bias": ("3r",)},
}


def nested_of(config: dict[str, Any]) -> dict[str, Any]:
    """`dflash_config`, empty where it is missing or no object."""
    nested = config.get(NESTED)
    return nested if isinstance(nested, dict) else {}


def block_sizes(config: dict[str, Any], streams: int) -> dict[str, int]:
    """As `llama_sizes`, with F, the width of fc's input, and the sizes of a Markov head (r, its rank).

    Args: streams: feature layers; 0 = as many as the head has layers.
    Raises: FormatError for a value that is no size.
    """
    sizes = llama_sizes(with_defaults(config))
    rank = 0
    if config.get("markov_rank") is not None:
        rank = integer(config, "markov_rank", "config.json", bounds=(0, 1 << 17))
    hidden = sizes["H"]
    sizes |= {"F": sizes["D"] * (streams or sizes["layers"]), "r": rank, "3r": 3 * rank, "1": 1}
    return sizes | {"H+r": hidden + rank, "H+2r": hidden + 2 * rank}


@dataclass(frozen=True)
class BlockLayout:
    """Which tensors an engine reads of a block head.

    Attributes:
        layers: decoder layers.
        markov: kind of Markov head; None without one. rows: symbol of W2's rows: U, or V where the engine has no draft
            vocabulary.
        confidence: whether it reads a confidence head. with_markov: whether that reads the token before a draft.
        more: other tensors and their shapes, in the symbols of `sizes` and of block_sizes.
    """

    layers: int
    markov: str | None = None
    rows: str = "U"
    confidence: bool = False
    with_markov: bool = True
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def tensors(self, missing: Handling) -> list[TensorRule]:
        """Rules for all but the ends and the draft vocabulary. Args: missing: what the engine does without."""
        why = "the norm stays at ones" if missing is WRONG else ""
        shapes = {name: ("H", "F") if name == "fc.weight" else ("H",) for name in BACKBONE}
        rules = [TensorRule(name, shape, missing, why if "norm" in name else "") for name, shape in shapes.items()]
        for n in range(self.layers):
            prefix = f"layers.{n}."
            rules += layer_tensors(prefix, "H", missing)
            norms = {"input_layernorm.weight": ("H",), **dict.fromkeys(QK_NORMS, ("d",))}
            rules += [TensorRule(prefix + name, shape, missing, why) for name, shape in norms.items()]
        rules += [TensorRule(name, shape, missing) for name, shape in self.more.items()]
        if self.markov is not None:
            w = {"markov_w1.weight": ("V", "r"), "markov_w2.weight": (self.rows, "r"), **MORE_OF_MARKOV[self.markov]}
            rules += [TensorRule(MARKOV + name, shape, missing) for name, shape in w.items()]
        if self.confidence:
            width = "H+r" if self.with_markov else "H"
            rules.append(TensorRule(f"{CONFIDENCE}proj.weight", ("1", width), missing))
            rules.append(TensorRule(f"{CONFIDENCE}proj.bias", ("1",), missing))
        return rules


def check_ids(case: Case, places: list[tuple[str, Any, int]]) -> list[int]:
    """The indices of hidden_states that an engine reads; faults are added to the case.

    Args: places: (name, what stands there, what the engine adds), the one that it asks first at the head of the list.
    """
    read: tuple[str, list[int]] | None = None
    for name, ids, by in places:
        if ids is not None and not are_integers(ids):
            case.refuse(f"{name} is {ids!r}, expected a list of integers")
            return []
        if not ids:
            continue
        if read is None:
            read = name, shifted(ids, by)
        elif shifted(ids, by) != read[1]:
            case.misread(
                f"{read[0]} stands before {name}, and names other layers: it reads {read[1]} as indices of "
                f"hidden_states, where {name} says {shifted(ids, by)}. Keep the one that the head was trained with"
            )
    if read is None:
        return []
    ids = read[1]
    if sorted(set(ids)) != ids:
        case.misread(f"feature layers {ids} are not ascending or repeat: engines sort and de-duplicate them")
    check_reach(case, ids)
    return ids


def check_mask_token(case: Case, name: str, token: Any, vocab_size: int) -> None:
    """The token in the slots that are to be drafted must be one of the target's, and better none that texts hold."""
    if problem := mask_token_problem(name, token, vocab_size):
        case.refuse(problem)
        return
    target = case.target
    for kind in ("eos", "pad", "bos"):
        ids = [
            case.config.get(f"{kind}_token_id"),
            None if target is None else getattr(target, f"{kind}_token_id", None),
        ]
        if any(token in (value if isinstance(value, list) else [value]) for value in ids):
            case.note(
                f"{name} {token} is the {kind} token: texts hold it, so a masked slot looks like one and fewer drafts "
                "are accepted. Train with a reserved token (head.mask_token_id)"
            )


def check_rope_style(case: Case, reads: tuple[str, ...]) -> None:
    """The rotation of interleaved pairs. Args: reads: fields that the engine reads, the first before the others."""
    said = {name: case.config[name] for name in ("rope_is_neox_style", "is_neox_style") if name in case.config}
    taken = next((said[name] for name in reads if name in said), True)
    if any(bool(value) is not bool(taken) for value in said.values()):
        case.misread(f"{said}: {reads[0]} decides how queries and keys are rotated. Write {reads[0]} as was trained")
    elif taken is False:
        case.note(
            "rotates interleaved pairs (is_neox_style false), which Headstart's heads do not: as config.json says"
        )


def check_ends(case: Case, config: dict[str, Any], sizes: dict[str, int]) -> None:
    """Embeddings and output matrix are the target's, or have its width and rows; layers compute silu."""
    if config.get("hidden_act", "silu") != "silu":
        case.refuse(f"hidden_act is {config['hidden_act']!r}: the draft layers compute silu")
    if sizes["H"] != sizes["D"]:
        case.misread(f"hidden_size is {sizes['H']} and the target's {sizes['D']}: its embeddings do not fit the head")
    for name, rows in (("embed_tokens.weight", "V"), ("lm_head.weight", "U")):
        shape = case.shape(name)
        if shape is not None and shape != (sizes[rows], sizes["H"]):
            case.refuse(f"{name} is {list(shape)}, config.json makes it [{sizes[rows]}, {sizes['H']}]")
    if case.config.get("tie_word_embeddings") and "lm_head.weight" in case.names:
        case.note(
            "tie_word_embeddings is true and the file has an lm_head: trainers' own code puts the embeddings in its "
            "place; write false"
        )


def check_scaled_logits(case: Case, config: dict[str, Any], reads: tuple[str, ...] = ()) -> None:
    """Find factors and soft-caps of the logits that the engine does not apply. Args: reads: those that it does."""
    for place, values in (("", config), (f"{NESTED}.", nested_of(config))):
        for name, neutral in (("logit_scale", 1), ("output_multiplier", 1), ("final_logit_softcapping", None)):
            value = values.get(name)
            if place + name not in reads and value not in (None, 0, neutral):
                case.misread(f"{place}{name} is {value!r} and is not applied to the draft's logits")


def check_biases(case: Case, config: dict[str, Any], known: set[str]) -> set[str]:
    """Find biases of the layers that are dropped, or that stay random. Returns: their names, and those of sinks."""
    sinks = {name for name in case.names if name.endswith(".attention_sink_bias")}
    if not nested_of(config).get("attention_sink_bias"):
        sinks = set()
    biases = {name for name in case.names if name.startswith("layers.") and name.endswith(".bias")} - known
    if config.get("attention_bias"):
        if not all(any(name.endswith(f"{p}_proj.bias") for name in biases) for p in "qkvo"):
            case.misread("attention_bias is true and biases of q, k, v or o are missing: they stay random")
    elif lost := sorted(name for name in biases if case.nonzero(name)):
        case.misread(f"{', '.join(lost[:3])}: biases are dropped in silence without attention_bias")
    return biases | sinks


def check_block_size(case: Case, config: dict[str, Any], anchor_first: bool, option: str, slots: bool = False) -> None:
    """Say what the engine is to be launched with.

    Args: option: of the engine. slots: whether it counts the slots of a block, and not the drafts.
    """
    found = {"block_size": nested_of(config).get("block_size", config.get("block_size"))}
    if found["block_size"] is None:
        case.note(f"block_size is missing: give {option} what the head was trained with")
        return
    size = integer(found, "block_size", "config.json", bounds=(1 if anchor_first else 2, 1024))
    drafts = size - (0 if anchor_first else 1)
    layout = "all of them draft" if anchor_first else "all but the first draft"
    case.note(
        f"a block of {size} slots, {layout}: launch it with {option} {size if slots else drafts}, as the launch "
        "command does; any other number makes a block that was not trained"
    )


def mask_embedding(case: Case) -> bool:
    """Whether an embedding of the mask token lies beside the weights."""
    return os.path.lexists(case.raw.directory / MASK_EMBEDDING)
