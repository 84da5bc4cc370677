"""vLLM 0.32: its rules for heads that draft blocks (its methods dflash and dspark).

DFlash was run on its CPU build. DSpark drafts on GPUs alone: its config and its loader were run, with sound files and
with faulty ones, and its drafting was read.

Neither loader notices a missing tensor, which stays uninitialised; an unexpected one stops both, but for biases, which
are dropped. Which slots draft is fixed for dflash (all but the first); for dspark, config.json says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.tensor_map import some
from headstart.heads.errors import FormatError
from headstart.heads.families.block.files import BESIDE_LAYER
from headstart.heads.families.block.published import CONFIDENCE, NESTED, SELECTOR
from headstart.heads.families.eagle_files import LAYER_IDS, shifted
from headstart.heads.formats.block_rules import (
    DFLASH_ARCHITECTURES,
    DSPARK_ARCHITECTURES,
    FILL_IN,
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
from headstart.heads.formats.eagle_rules import check_draft_map, check_lm_head, eagle_config_of
from headstart.heads.formats.handling import REFUSES, WRONG, Case, Handling
from headstart.heads.formats.vllm_targets import check_target_class, check_window

DFLASH2_ARCHITECTURES = ("DFlash2DraftModel",)
#: sizes of a DFlash 2 head, in dflash_config
DFLASH2_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
TOKENS_OPTION = "num_speculative_tokens"


#: what to do with a head whose first slot drafts
AS_DSPARK = "export it again (export.engines=[vllm]) as a DSpark head, of which vLLM serves both layouts"


def check_causal(case: Case) -> None:
    """A causal block, which drafts a chain as DFlash's does."""
    check_dflash(case, FILL_IN)


def check_dflash2(case: Case) -> None:
    """DFlash with convolutions and a selector, whose sizes stand in dflash_config."""
    nested, where = nested_of(case.config), f"config.json: {NESTED}"
    taps, group, rank, count = (integer(nested, name, where, bounds=(1, 1 << 17)) for name in DFLASH2_SIZES)
    hidden, layers = (block_sizes(case.config, 0)[name] for name in ("H", "layers"))
    if hidden % group:
        case.refuse(f"{NESTED}.conv_group_size is {group}, expected a divisor of the {hidden} channels")
        return
    more: dict[str, tuple[str, ...]] = {
        f"{SELECTOR}predecessor_codebook": ("V", "s"), f"{SELECTOR}successor_codebook": ("U", "s"),
        f"{SELECTOR}hidden_projection.weight": ("s", "H"),
    }  # fmt: skip
    for prefix in (f"layers.{n}.{part}_conv." for n in range(layers) for part in ("attention", "mlp")):
        more |= {f"{prefix}base_kernel": ("2", "taps", "H"), f"{prefix}kernel_projection.weight": ("kernels", "H")}
    sizes = {"s": rank, "2": 2, "taps": taps, "kernels": 2 * taps * hidden // group}
    check_dflash(case, FILL_IN, DFLASH2_ARCHITECTURES, more, sizes)
    case.note(f"it chooses each draft among the {count} most likely tokens")


def check_dflash(
    case: Case,
    remedy: str = AS_DSPARK,
    architectures: tuple[str, ...] = DFLASH_ARCHITECTURES,
    more: Mapping[str, tuple[str, ...]] | None = None,
    more_sizes: dict[str, int] | None = None,
) -> None:
    """DFlash: the first slot never drafts, and a reduced vocabulary without its parts is not noticed.

    Args:
        remedy: for a head whose first slot drafts.
        more, more_sizes: see BlockLayout.
    """
    config = _as_read(case)
    if "speculators_model_type" not in case.config:
        case.require_architecture(architectures, config.get("architectures"))
    nested = nested_of(config)
    ids = _ids(case, config, by_top=False)
    layout = BlockLayout(block_sizes(config, len(ids))["layers"], more=more or {}, sizes=more_sizes or {})
    sizes = _shared(case, config, ids, layout)
    if not ids:
        case.misread(f"{NESTED}.target_layer_ids is missing: vLLM takes layers that fc was not trained on")
    inner, top = nested.get("sample_from_anchor"), config.get("sample_from_anchor", nested.get("shift_label"))
    if inner:
        case.refuse(f"{NESTED}.sample_from_anchor is true: its first slot never drafts; {remedy}")
    elif top:
        case.misread(f"the first slot drafts (sample_from_anchor), which vLLM does not read here; {remedy}")
    check_block_size(case, config, bool(inner or top), TOKENS_OPTION)
    if wanted := [name for name in ("num_target_layers", "layer_types") if config.get(name) is None]:
        case.note(f"the reference implementation also wants {', '.join(wanted)} in config.json")
    if sizes["layers"] > 1:
        case.note("serve it on GPUs: vLLM's CPU build norms the keys of all layers by the first layer's k_norm")
    _draft_vocabulary(case, sizes, WRONG)


def check_dspark(case: Case) -> None:
    """DSpark: the vanilla Markov head alone; a reduced vocabulary without its parts stops it."""
    config = _as_read(case)
    if "speculators_model_type" not in case.config:
        case.require_architecture(DSPARK_ARCHITECTURES, config.get("architectures"))
    kind = config.get("markov_head_type") or "vanilla"
    if config.get("markov_rank") is None:
        inner = f" (it stands in {NESTED} only)" if nested_of(config).get("markov_rank") is not None else ""
        case.refuse(f"markov_rank is missing at top level{inner}: vLLM builds no Markov head without it")
        return
    if kind != "vanilla":
        case.refuse(
            f"markov_head_type is {kind!r}: vLLM builds the vanilla head alone. Serve this head with SGLang "
            "(export.engines=[sglang]), or train with head.markov_head=vanilla"
        )
        return
    ids = _ids(case, config, by_top=True)
    if not ids:
        case.misread("target_layer_ids is missing: vLLM takes layers that fc was not trained on")
    held = any(name.startswith(CONFIDENCE) for name in case.names)
    asked = bool(config.get("enable_confidence_head"))
    layout = BlockLayout(
        block_sizes(config, len(ids))["layers"], "vanilla", "U", asked and held,
        bool(config.get("confidence_head_with_markov")),
    )  # fmt: skip
    sizes = _shared(case, config, ids, layout)
    if asked is not held:
        why = "the file holds none" if asked else "enable_confidence_head is not set"
        case.note(f"no confidence head ({why}): vLLM schedules verification without one")
    _anchor(case, config)
    _draft_vocabulary(case, sizes, REFUSES)
    if mask_embedding(case):
        case.misread("mask_embedding.pt is not read for dspark: the mask token's row of the target is taken")
    case.note("runs on GPUs alone: vLLM's CPU build has no DSpark")


def _anchor(case: Case, config: dict[str, Any]) -> None:
    """Whether the first slot drafts, which vLLM reads at top level for dspark."""
    top, inner = config.get("sample_from_anchor"), nested_of(config).get("sample_from_anchor")
    first = True if top is None else bool(top)
    if inner is not None and bool(inner) is not first:
        case.misread(
            f"{NESTED}.sample_from_anchor is {inner} and is not read: the first slot is taken to "
            f"{'draft' if first else 'draft nothing'}. Write sample_from_anchor at top level"
        )
    elif top is None:
        case.note("sample_from_anchor is missing and taken as true (the first slot drafts): write it as was trained")
    check_block_size(case, config, first, TOKENS_OPTION)


def _as_read(case: Case) -> dict[str, Any]:
    """The config that vLLM builds the draft from: of a speculators file, its parts put together."""
    outer = case.config
    if "speculators_model_type" not in outer:
        return outer
    layer = outer.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise FormatError("config.json: transformer_layer_config is missing")
    config = {**layer, **{name: outer[name] for name in BESIDE_LAYER if outer.get(name) is not None}}
    ids, first = config.pop("aux_hidden_state_layer_ids", None), bool(outer.get("sample_from_anchor", False))
    for name in ("aux_hidden_state_layer_ids", "mask_token_id"):
        if outer.get(name) is None:
            case.refuse(f"{name} is missing, which vLLM asks of a speculators file")
    if outer.get("sample_from_anchor") is None:
        case.note("sample_from_anchor is missing and taken as false (the first slot drafts nothing)")
    config |= {LAYER_IDS: ids, "sample_from_anchor": first}
    if case.family == "dflash":
        causal = not outer.get("sliding_window_non_causal", True)
        token = config.pop("mask_token_id", None)
        config[NESTED] = {
            "mask_token_id": token, "target_layer_ids": shifted(ids, -1), "sample_from_anchor": first, "causal": causal,
        }  # fmt: skip
        kinds = layer.get("layer_types")
        if causal and not (isinstance(kinds, list) and "sliding_attention" in kinds):
            case.misread(
                "sliding_window_non_causal is false, which vLLM takes for all layers: it runs them causal, and full "
                "attention was trained without. Set it to true"
            )
    return config


def _ids(case: Case, config: dict[str, Any], by_top: bool) -> list[int]:
    """Args: by_top: whether ids at top level are asked for; for dflash, one of vLLM's two runners passes them over."""
    nested = nested_of(config)
    places: list[tuple[str, Any, int]] = [
        (LAYER_IDS, config.get(LAYER_IDS), 0),
        (f"{NESTED}.target_layer_ids", nested.get("target_layer_ids"), 1),
        ("dspark_target_layer_ids", config.get("dspark_target_layer_ids"), 1),
        ("target_layer_ids", config.get("target_layer_ids"), 1),
        (f"{NESTED}.layer_ids", nested.get("layer_ids"), 0),
    ]
    ids = check_ids(case, places)
    if by_top or not ids or config.get(LAYER_IDS):
        return ids
    if not nested.get("target_layer_ids"):
        case.misread(f"the feature layers stand at top level, where vLLM's V1 runner does not look: write them as "
                     f"{NESTED}.target_layer_ids")  # fmt: skip
    elif isinstance(config.get("eagle_config"), dict) and (other := eagle_config_of(config).get(LAYER_IDS)) != ids:
        case.misread(f"eagle_config hides {NESTED}: vLLM's V1 runner reads layers {other}; remove eagle_config")
    return ids


def _shared(case: Case, config: dict[str, Any], ids: list[int], layout: BlockLayout) -> dict[str, int]:
    """The rules of both methods. Returns: the sizes."""
    sizes = block_sizes(config, len(ids)) | layout.sizes
    nested = nested_of(config)
    inner, top = nested.get("mask_token_id"), config.get("mask_token_id")
    if inner is not None and top is not None and inner != top:
        case.misread(f"{NESTED}.mask_token_id {inner} stands before mask_token_id {top}: keep the one that was trained")
    check_mask_token(case, f"{NESTED}.mask_token_id" if inner is not None else "mask_token_id",
                     top if inner is None else inner, sizes["V"])  # fmt: skip
    case.compare_target(sizes["D"], sizes["V"])
    rules = layout.tensors(WRONG)
    case.match(rules, sizes)
    if "mask_hidden" in case.names:
        case.refuse("mask_hidden must be absent: masked slots are embedded by mask_token_id")
    known = {rule.name for rule in rules} | OPTIONAL | {"mask_hidden"}
    known |= {name for name in case.names if name.startswith(CONFIDENCE)}
    known |= check_biases(case, config, known)
    if odd := case.unexplained(known):
        case.refuse(f"unexpected tensors {some(odd)}")
    _attention(case, config, sizes["layers"])
    check_ends(case, config, sizes)
    check_scaled_logits(case, config, ("logit_scale",))
    check_rope_style(case, ("is_neox_style",))
    if config.get("use_aux_hidden_state", nested.get("use_aux_hidden_state", True)) is not True:
        case.misread("use_aux_hidden_state is false: fc is left out")
    case.compare_geometry(config)
    check_target_class(case)
    check_window(case)
    return sizes


def _attention(case: Case, config: dict[str, Any], layers: int) -> None:
    """Which layers are causal within the block, and which have a window."""
    nested, kinds = nested_of(config), config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) < layers):
        case.refuse(f"layer_types is {kinds!r}, expected one kind for each of {layers} layers")
        return
    windowed = sum(kind == "sliding_attention" for kind in kinds or [])
    said = {"is_causal": config.get("is_causal"), f"{NESTED}.causal": nested.get("causal")}
    name, causal = next(((name, value) for name, value in said.items() if value is not None), ("", None))
    if causal is None and windowed:
        case.misread(
            "layer_types has sliding_attention and nothing says whether the block is causal: vLLM takes those layers "
            f"as causal. Write is_causal and {NESTED}.causal as was trained"
        )
    elif causal:
        case.note(f"{name} is true: a slot sees only the slots before it, as config.json says")
    if causal is not None and len({bool(value) for value in said.values() if value is not None}) > 1:
        case.misread(f"{said} contradict each other: vLLM takes {name}")
    if 0 < windowed < layers:
        case.note("layers with and without a window: vLLM's V2 runner alone serves them")


def _draft_vocabulary(case: Case, sizes: dict[str, int], missing: Handling) -> None:
    """Args: missing: what vLLM does where a reduced vocabulary lacks its matrix or its ids."""
    reduced = sizes["U"] < sizes["V"]
    if reduced and "lm_head.weight" not in case.names:
        shared = f"rows of the target's {sizes['V']} are taken for it" if missing is WRONG else "the loader stops"
        check_lm_head(case, sizes, missing, shared)
    if "d2t" in case.names and not reduced:
        case.refuse("d2t is not expected when draft_vocab_size equals vocab_size: leave it out")
    elif reduced and "d2t" not in case.names and missing is REFUSES:
        case.refuse(f"d2t is missing with draft_vocab_size {sizes['U']} < vocab_size {sizes['V']}: the loader stops")
    else:
        check_draft_map(case, sizes, misshapen=REFUSES)
