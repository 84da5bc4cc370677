"""The targets of commands: with their weights for work, without them for questions that the shapes answer."""

from __future__ import annotations

from typing import Any

import torch

from headstart.console import Console
from headstart.eval.kernels.launch import wake_compiler
from headstart.heads.targets.load import load_target, load_tokenizer, loading, locate, with_attention
from headstart.heads.targets.target import Target, TargetConfig


def loaded_target(config: TargetConfig, console: Console) -> Target:
    """Load the target and say so first, because it may take minutes; its notes are said afterwards.

    Raises: TargetError as `load_target` does.
    """
    console.say(f"loading target {config.name} …")
    wake_compiler()
    target = load_target(config)
    for note in target.notes:
        console.say(f"target: {note}")
    return target


def weightless_target(config: TargetConfig) -> Target:
    """The target without weights: tokenizer, dimensions and stop tokens, in seconds whatever its size.

    Raises: TargetError naming the target and the remedy.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    place, shared, hub_refusal = locate(config)
    with loading(config.name, hub_refusal):
        tokenizer = load_tokenizer(config, place, shared)
        settings = AutoConfig.from_pretrained(place, **shared)
        check_quantisation(settings)

        def make(attention: str) -> Any:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    settings, attn_implementation=attention, trust_remote_code=config.trust_remote_code
                )

        model, notes = with_attention(make, config.attn_implementation)
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            place, revision=config.revision, local_files_only=shared["local_files_only"]
        )
    except OSError:
        pass  # a model without one stops at its tokenizer's and config's end tokens
    with loading(config.name, hub_refusal):
        target = Target.from_model(model, tokenizer, config)
    target.notes = [*notes, *target.notes]
    return target


def check_quantisation(settings: Any) -> None:
    """Raises: ImportError, as loading would, where quantised weights need a package that is not installed."""
    from transformers.quantizers import AutoHfQuantizer

    quantised = getattr(settings, "quantization_config", None)
    if quantised is None:
        return
    try:
        AutoHfQuantizer.from_config(quantised, pre_quantized=True).validate_environment()
    except ImportError:
        raise
    except Exception:  # another machine than the one that will load it: no GPU, another device map
        return
