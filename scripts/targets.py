"""Loading the target in a command."""

from __future__ import annotations

from headstart.console import Console
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.memory import require_attention, require_chain
from headstart.eval.kernels.launch import wake_compiler
from headstart.heads.targets.load import config_of, load_target
from headstart.heads.targets.target import Target, TargetConfig


def loaded_target(config: TargetConfig, console: Console, decoding: EvalConfig | None = None) -> Target:
    """Load the target. Says so first, because it may take minutes, and prints the target's notes afterwards.

    Args: decoding: how it is to decode, if that is known. What it cannot do is refused before it is loaded.
    Raises: TargetError as `load_target` does; ConfigError as `require_chain` and `require_attention` do.
    """
    if decoding is not None:
        planned = config_of(config)
        require_chain(planned, decoding)
        require_attention(planned, decoding)
    console.say(f"loading target {config.name} …")
    wake_compiler()
    target = load_target(config)
    for note in target.notes:
        console.say(f"target: {note}")
    return target
