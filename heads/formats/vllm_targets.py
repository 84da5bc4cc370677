"""Which targets vLLM 0.32 must run by its Transformers backend, so that a head gets hidden states of inner layers.

Read from its registry: the class that it takes for each `model_type`, and whether that class has the interface
(`SupportsEagle3`). Types that stand in neither table have it, or run by the Transformers backend anyway (OLMo-2 and 3).
In both, feature layer k is the input of layer k, residual included, before any norm.
"""

from __future__ import annotations

from typing import Any

from headstart.heads.families.eagle_files import LAYER_IDS, shifted
from headstart.heads.formats.handling import Case

#: types of targets whose own class in vLLM 0.32 gives no hidden states to a head; its Transformers backend does
WITHOUT_INTERFACE = frozenset(
    (
        "bloom", "cohere", "cohere2", "dbrx", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gptj", "granitemoe",
        "granitemoeshared", "mixtral", "nemotron", "olmoe", "opt", "qwen2_moe", "stablelm",
    )
)  # fmt: skip
#: the same, with recurrent layers, which the Transformers backend does not run
RECURRENT_WITHOUT_INTERFACE = frozenset(
    ("falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "olmo_hybrid", "zamba2")
)
#: methods that read hidden states of the target's inner layers
READ_INNER_LAYERS = ("eagle3", "dflash", "dspark")


def model_impl(model_type: str, method: str) -> str | None:
    """`--model-impl` with which a target of this type gives a head what it reads; None where vLLM's choice does.

    Args: method: of the speculative config.
    """
    return "transformers" if method in READ_INNER_LAYERS and model_type in WITHOUT_INTERFACE else None


def served(model_type: str, method: str) -> bool:
    """Whether vLLM gives a head what it reads of a target of this type. Args: method: of the speculative config."""
    return method not in READ_INNER_LAYERS or model_type not in RECURRENT_WITHOUT_INTERFACE


def check_target_class(case: Case) -> None:
    """Say how a target is launched whose own class lacks the interface for heads that read inner layers."""
    kind = "" if case.target is None else case.target.model_type
    if kind in WITHOUT_INTERFACE:
        case.note(
            f"vLLM 0.32's own class for {kind} targets has no EAGLE-3 interface: launch the target with --model-impl "
            'transformers (from Python: model_impl="transformers"), as the launch command does'
        )
    elif kind in RECURRENT_WITHOUT_INTERFACE:
        case.note(
            f"vLLM 0.32's own class for {kind} targets has no EAGLE-3 interface, and its Transformers backend runs no "
            "recurrent layers: it does not serve this target with the head"
        )


def check_window(case: Case) -> None:
    """Say that vLLM gives a window that all layers of the target share (cache_config.sliding_window) to the head too.

    Interleaved windows stay with their layers.
    """
    target = case.target
    if target is None or target.sliding_window is None or target.sliding_window >= target.max_position_embeddings:
        return
    case.note(
        f"all layers of the target see the last {target.sliding_window} positions only, and vLLM gives this window to "
        "the head's layers as well, which were trained without one: longer texts stay lossless, and fewer drafts are "
        "accepted"
    )


def with_layers_shifted(config: dict[str, Any], layers: list[int], by: int) -> dict[str, Any]:
    """config.json that names other layers than `layers`, which the head reads, to show what such a fault does.

    The ids at top level count before all others, for every head that reads inner layers.
    """
    return {**config, LAYER_IDS: shifted(layers, by)}
