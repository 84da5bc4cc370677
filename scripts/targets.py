"""Loading the target in a command."""

from __future__ import annotations

from headstart.console import Console
from headstart.eval.kernels.launch import wake_compiler
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig


def loaded_target(config: TargetConfig, console: Console) -> Target:
    """Load the target. Says so first, because it may take minutes, and prints the target's notes afterwards.

    Raises: TargetError as `load_target` does.
    """
    with console.phase(f"loading target {config.name}"):
        wake_compiler()
        target = load_target(config)
    for note in target.notes:
        console.say(f"target: {note}")
    return target
