"""A target without its weights: for commands that only look."""

from __future__ import annotations

from pathlib import Path

import torch

from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.fetch import locate_target
from headstart.heads.target import Target, TargetConfig


def light_target(config: TargetConfig) -> Target:
    """The target without weights: tokenizer, dimensions and stop tokens, in seconds whatever its size.

    Raises: TargetError naming the target and the remedy.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    place, hub_refusal = locate_target(config.name)
    local = hub_refusal is not None
    shared = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, "local_files_only": local}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **shared)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place, **shared))
    except (OSError, ValueError) as error:
        raise TargetError(f"target {config.name!r} cannot be read: {hub_refusal or error}") from error
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            place, revision=config.revision, local_files_only=local
        )
    except OSError:
        pass  # a model without one stops at its tokenizer's and config's end tokens
    if config.chat_template is not None:
        template = Path(config.chat_template)
        if not template.is_file():
            raise ConfigError(f"target.chat_template: {template} does not exist; expected a Jinja file")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return Target.from_model(model, tokenizer, config)
