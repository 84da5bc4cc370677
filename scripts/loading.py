"""Loading the target in a command: told beforehand, because it may take minutes; its notes are told afterwards."""

from __future__ import annotations

from headstart.eval.kernels.launch import wake_compiler
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.talk import Talk


def loaded_target(config: TargetConfig, talk: Talk) -> Target:
    """The target, with its notes told. Raises: TargetError as `load_target` does."""
    talk.say(f"loading target {config.name} …")
    wake_compiler()
    target = load_target(config)
    for note in target.notes:
        talk.say(f"target: {note}")
    return target
