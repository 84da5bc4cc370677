"""Loading the target in a command: said beforehand, because it may take minutes; its notes are said afterwards."""

from __future__ import annotations

from headstart.console import Console
from headstart.eval.kernels.launch import wake_compiler
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig


def loaded_target(config: TargetConfig, console: Console) -> Target:
    """The target, announced, with its notes. Raises: TargetError as `load_target` does."""
    console.say(f"loading target {config.name} …")
    wake_compiler()
    target = load_target(config)
    for note in target.notes:
        console.say(f"target: {note}")
    return target
