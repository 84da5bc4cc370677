"""SGLang 0.5.23: its rules for heads that draft blocks (DFLASH, DSPARK), read from its source.

It takes embeddings and output matrix from the target, always: it has no draft vocabulary. Of the backbone, a missing
tensor stays random and an unknown one is skipped, both in silence; the Markov head's tensors are compared.
"""

from __future__ import annotations

from typing import Any

from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.families.block.published import CONFIDENCE, CORRECTION, GRU, MARKOV, NESTED
from headstart.heads.families.eagle_files import LAYER_IDS
from headstart.heads.formats.block_rules import (
    DFLASH_ARCHITECTURES,
    DSPARK_ARCHITECTURES,
    FILL_IN,
    MORE_OF_MARKOV,
    OPTIONAL,
    BlockLayout,
    block_sizes,
    check_biases,
    check_block_size,
    check_ends,
    check_ids,
    check_mask_token,
    check_rope_style,
    check_scaled_logits,
    mask_embedding,
    nested_of,
)
from headstart.heads.formats.calibration import calibration_of, sglang_sts
from headstart.heads.formats.choices import drafted_tokens, tables_of
from headstart.heads.formats.format import Launch
from headstart.heads.formats.handling import WRONG, Case

#: sizes of a Domino head's recurrent state and of its correction, in dflash_config
DOMINO_SIZES = ("gru_hidden_dim", "emb_dim")
#: family → (algorithm, slots of a block that do not draft and that its option counts)
ALGORITHMS = {"dflash": ("DFLASH", 1), "dspark": ("DSPARK", 0), "jetspec": ("DFLASH", 1), "domino": ("DFLASH", 0)}
#: algorithm → option with the size of a block
BLOCK_OPTIONS = {"DFLASH": "--speculative-dflash-block-size", "DSPARK": "--speculative-dspark-block-size"}
#: files beside a DSPARK head → options that name them
TEMPERATURES, STEP_RATES = "sglang_sts.json", "sglang_sps.json"
FILE_OPTIONS = {
    TEMPERATURES: "--speculative-dspark-confidence-sts-path",
    STEP_RATES: "--speculative-dspark-sps-table-path",
}
#: above a launch command with such files
SCHEDULED = (
    "# SGLANG_RAGGED_VERIFY_MODE=compact in the environment verifies as many drafts as pay by these files; without it, "
    "all (read in its source, not run)\n"
)
#: what to do with a head whose first slot drafts
AS_DSPARK = (
    "export it again (export.engines=[sglang]), which writes it as a DSpark head, of which it serves both layouts"
)


def block_words(launch: Launch) -> list[str]:
    """Words of the launch command that ask for a block."""
    algorithm, more = ALGORITHMS[launch.family]
    words = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", launch.head]
    words += [BLOCK_OPTIONS[algorithm], str(launch.tokens + more)]
    return words + [word for name, place in launch.files.items() for word in (FILE_OPTIONS[name], place)]


def temperatures(side: dict[str, Any]) -> dict[str, Any] | None:
    """Its file of temperatures for a confidence head; None where none were fitted to as many drafts as it serves."""
    if not scheduled(side):
        return None
    found, drafts = calibration_of(side), drafted_tokens(side)
    fits = found is not None and len(found.temperatures) == drafts
    return sglang_sts(found, drafts) if found is not None and fits else None


def step_rates(side: dict[str, Any]) -> dict[str, Any] | None:
    """Its file of steps per second by verified tokens; None where fewer than two numbers of tokens were timed.

    It takes a table of one for none at all.
    """
    found = tables_of(side) if scheduled(side) else None
    rates = None if found is None else found.rates
    return rates if rates is not None and len(rates["sample_batch_tokens"]) > 1 else None


def scheduled(side: dict[str, Any]) -> bool:
    """Whether its scheduler serves the head: DSPARK with a confidence head, the one that `headstart tune` compared."""
    if ALGORITHMS.get(side["type"], ("", 0))[0] != "DSPARK":
        return False
    found = calibration_of(side)
    return found is not None and found.source == "confidence"


def check_dflash(case: Case, remedy: str = AS_DSPARK) -> None:
    """DFlash: the first slot never drafts, whatever config.json says.

    Args: remedy: for a head whose first slot drafts.
    """
    config, nested = case.config, nested_of(case.config)
    if _speculators(case):
        return
    case.require_architecture(DFLASH_ARCHITECTURES, config.get("architectures"))
    said = {name: nested.get(name, config.get(name)) for name in ("sample_from_anchor", "shift_label")}
    if first := any(said.values()):
        case.misread(f"the first slot drafts (sample_from_anchor), which SGLang does not read for DFLASH: {remedy}")
    _shared(case, BlockLayout(block_sizes(config, 0)["layers"]))
    check_block_size(case, config, first, BLOCK_OPTIONS["DFLASH"], slots=True)


def check_causal(case: Case) -> None:
    """A causal block, which drafts as DFlash's does. The first slot cannot draft: DSPARK's block is not causal here."""
    check_dflash(case, FILL_IN)


def check_domino(case: Case) -> None:
    """DFLASH with a recurrent network's correction, whose settings stand in dflash_config. Its first slot drafts."""
    config, nested = case.config, nested_of(case.config)
    if _speculators(case):
        return
    case.require_architecture(DFLASH_ARCHITECTURES, config.get("architectures"))
    if nested.get("projector_type") != "domino":
        case.misread(f"{NESTED}.projector_type is {nested.get('projector_type')!r}: the correction is skipped")
        return
    state, rank = (integer(nested, name, f"config.json: {NESTED}", bounds=(1, 1 << 17)) for name in DOMINO_SIZES)
    hidden = block_sizes(config, 0)["H"]
    more = {
        f"{GRU}weight_ih_l0": ("3g", "H"), f"{GRU}weight_hh_l0": ("3g", "g"),
        f"{CORRECTION}0.weight": ("e", "H+g"), f"{CORRECTION}2.weight": ("V", "e"),
    }  # fmt: skip
    sizes = {"g": state, "3g": 3 * state, "e": rank, "H+g": hidden + state}
    _shared(case, BlockLayout(block_sizes(config, 0)["layers"], more=more, sizes=sizes))
    first = bool(nested.get("shift_label", nested.get("sample_from_anchor")))
    if not first:
        case.misread(f"{NESTED}.shift_label is not true: its Domino drafts from the first slot on")
    check_block_size(case, config, first, BLOCK_OPTIONS["DFLASH"], slots=True)
    case.note("its Domino drafts greedily, on one GPU, one token fewer than the block has slots")


def check_dspark(case: Case) -> None:
    """DSpark with each kind of Markov head, over the whole vocabulary."""
    config, nested = case.config, nested_of(case.config)
    if _speculators(case):
        return
    case.require_architecture(DSPARK_ARCHITECTURES, config.get("architectures"))
    rank, kind = (nested.get(name, config.get(name)) for name in ("markov_rank", "markov_head_type"))
    if type(rank) is not int or rank < 1 or kind not in list(MORE_OF_MARKOV):
        wanted = f"a positive rank and one of {', '.join(MORE_OF_MARKOV)}"
        case.refuse(f"markov_rank is {rank!r} and markov_head_type {kind!r}, expected {wanted}")
        return
    sizes = _shared(case, BlockLayout(block_sizes(config, 0)["layers"], kind, "V"), markov_rank=rank)
    top, inner = config.get("sample_from_anchor"), nested.get("sample_from_anchor")
    first = True if top is None else bool(top)
    if inner is not None and bool(inner) is not first:
        case.misread(f"{NESTED}.sample_from_anchor is {inner} and is not read: write sample_from_anchor at top level")
    elif top is None:
        case.note("sample_from_anchor is missing and taken as true (the first slot drafts): write it as was trained")
    check_block_size(case, config, first, BLOCK_OPTIONS["DSPARK"])
    if mask_embedding(case):
        case.misread("mask_embedding.pt is not read for DSPARK: the mask token's row of the target is taken")
    _confidence(case, sizes, bool(config.get("confidence_head_with_markov", True)))


def _speculators(case: Case) -> bool:
    """Whether config.json is the speculators library's, of which SGLang reads none."""
    if "speculators_model_type" not in case.config:
        return False
    case.refuse("config.json is of the speculators library, which SGLang does not read: `headstart export` it")
    return True


def _confidence(case: Case, sizes: dict[str, int], with_markov: bool) -> None:
    """The confidence head, which the other modes of verification than `static` (the default) build."""
    modes = "with SGLANG_RAGGED_VERIFY_MODE=cap-accept or compact"
    shapes = {"weight": (1, sizes["H+r"] if with_markov else sizes["H"]), "bias": (1,)}
    names = {name: case.shape(f"{CONFIDENCE}proj.{name}") for name in shapes}
    if None in names.values():
        lost = some(f"{CONFIDENCE}proj.{name}" for name, shape in names.items() if shape is None)
        case.note(f"{lost} missing: {modes} it stops; the default mode, static, needs no confidence head")
    elif wrong := [name for name, shape in names.items() if shape != shapes[name]]:
        case.note(
            f"{CONFIDENCE}proj.{wrong[0]} is {list(names[wrong[0]] or ())}, config.json makes it "
            f"{list(shapes[wrong[0]])}: {modes} it stops"
        )


def _shared(case: Case, layout: BlockLayout, markov_rank: int = 0) -> dict[str, int]:
    """The rules of both algorithms. Returns: the sizes."""
    config, nested = case.config, nested_of(case.config)
    ids = _ids(case, config, nested)
    sizes = block_sizes({**config, "markov_rank": markov_rank}, len(ids)) | layout.sizes
    token = nested.get("mask_token_id", config.get("mask_token_id"))
    if token is None and layout.markov is None:
        case.misread(f"{NESTED}.mask_token_id is missing: SGLang takes the tokenizer's <|MASK|>, or adds one")
    else:
        check_mask_token(case, "mask_token_id", token, sizes["V"])
    if (top := config.get("mask_token_id")) is not None and top != token:
        case.misread(f"{NESTED}.mask_token_id {token} stands before mask_token_id {top}: keep the one that was trained")
    case.compare_target(sizes["D"], sizes["V"])
    rules = layout.tensors(WRONG)
    if sizes["U"] < sizes["V"]:
        _reduced(case, sizes, layout)
        rules = [rule for rule in rules if not rule.name.startswith(f"{MARKOV}markov_w2")]
    case.match(rules, sizes)
    known = {rule.name for rule in rules} | OPTIONAL | {f"{MARKOV}markov_w2.weight"}
    known |= {name for name in case.names if name.startswith(CONFIDENCE) and layout.markov is not None}
    known |= check_biases(case, config, known)
    odd = case.unexplained(known)
    if markov := [name for name in odd if name.startswith(MARKOV) and layout.markov is not None]:
        case.refuse(f"unexpected tensors {some(markov)}: a {layout.markov} Markov head has none")
    if skipped := [name for name in odd if name not in markov]:
        case.misread(f"{some(skipped)} would be skipped in silence")
    _attention(case, config, nested, sizes["layers"])
    check_ends(case, config, sizes)
    check_scaled_logits(case, config)
    check_rope_style(case, ("rope_is_neox_style", "is_neox_style"))
    case.compare_geometry(config)
    return sizes


def _reduced(case: Case, sizes: dict[str, int], layout: BlockLayout) -> None:
    """A draft vocabulary smaller than the target's."""
    said = f"draft_vocab_size is {sizes['U']} of {sizes['V']}: SGLang drafts over the target's whole output matrix"
    remedy = "serve this head with vLLM (export.engines=[vllm]), or train with head.draft_vocab_size=0"
    if layout.markov is None:
        case.misread(f"{said} and reads neither lm_head nor d2t, so it drafts tokens that were never trained; {remedy}")
    else:
        case.refuse(f"{said}, and its markov_w2 has {sizes['V']} rows; {remedy}")


def _ids(case: Case, config: dict[str, Any], nested: dict[str, Any]) -> list[int]:
    places: list[tuple[str, Any, int]] = [
        (f"{NESTED}.target_layer_ids", nested.get("target_layer_ids"), 1),
        ("target_layer_ids", config.get("target_layer_ids"), 1),
    ]
    ids = check_ids(case, places)
    depth = nested.get("num_target_layers", config.get("num_target_layers"))
    if type(depth) is int and ids and ids[-1] > depth:
        case.refuse(f"feature layers {ids}: num_target_layers is {depth}")
    if case.target is not None and type(depth) is int and depth != case.target.num_layers:
        case.misread(f"num_target_layers is {depth}, the target's {case.target.num_layers}: another target's head")
    if not ids:
        case.misread(
            f"{NESTED}.target_layer_ids is missing: SGLang spreads as many layers as the head has; {LAYER_IDS} is not "
            "read"
        )
    elif (top := config.get(LAYER_IDS)) is not None and top != ids:
        case.misread(f"{LAYER_IDS} {top}, which vLLM reads first, is not read: SGLang takes {ids}; keep the right ones")
    return ids


def _attention(case: Case, config: dict[str, Any], nested: dict[str, Any], layers: int) -> None:
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) < layers):
        case.refuse(f"layer_types is {kinds!r}, expected one kind for each of {layers} layers")
        return
    windowed = "sliding_attention" in (kinds or [])
    causal, inner = config.get("is_causal"), nested.get("causal")
    if causal is None and windowed:
        case.misread("layer_types has sliding_attention and is_causal is missing: SGLang takes those layers as causal")
    elif bool(causal) is not bool(inner) and inner is not None and (causal is not None or inner):
        case.misread(f"{NESTED}.causal is {inner} and is not read (is_causal is {causal!r}): write is_causal")
    elif causal:
        case.note("is_causal is true: a slot sees only the slots before it, as config.json says")
    if nested.get("use_swa"):
        case.misread(f"{NESTED}.use_swa is not read: write the layers' kinds in layer_types")
