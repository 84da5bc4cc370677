"""A target without its weights: for commands that only look."""

from __future__ import annotations

import torch

from headstart.heads.errors import TargetError
from headstart.heads.target import Target, TargetConfig, load_tokenizer, locate


def light_target(config: TargetConfig) -> Target:
    """The target without weights: tokenizer, dimensions and stop tokens, in seconds whatever its size.

    Raises: TargetError naming the target and the remedy.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    place, shared, hub_refusal = locate(config)
    try:
        tokenizer = load_tokenizer(config, place, shared)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place, **shared))
    except (OSError, ValueError) as error:
        raise TargetError(f"target {config.name!r} cannot be read: {hub_refusal or error}") from error
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            place, revision=config.revision, local_files_only=shared["local_files_only"]
        )
    except OSError:
        pass  # a model without one stops at its tokenizer's and config's end tokens
    return Target.from_model(model, tokenizer, config)
