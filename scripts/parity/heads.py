"""Heads for the parity gates: those of a directory, or ones that are trained on the spot by a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headstart.console import Console
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.pipeline.distill import distill
from headstart.pipeline.run import Run
from headstart.pipeline.train import train
from headstart.recipes.load import load_recipe

#: family → what the recipe changes for it. Parity needs drafts that are accepted now and then, not good ones: Medusa
#: may share the target's lm_head
TRAINED = {
    "medusa": ("head.type=medusa", "head.depth={depth}", "head.lm_head=shared", "train.lr=1.0e-3"),
    "eagle": ("head.type=eagle", "head.depth=1", "train.lr=4.0e-4"),
    "eagle3": (),
    "peagle": ("head.type=peagle", "head.depth={depth}", "train.lr=1.0e-3"),
    "dflash": ("head.type=dflash", "head.depth={depth}", "head.layers=2", "head.anchor_share=0.5", "train.lr=1.0e-3"),
}
#: what the recipe changes for a small target: it learns from the target's own answers, in seconds
SMALL_RECIPE = (
    "data.sources=[]", "data.held_out=[]", "data.distill.max_new_tokens=64", "data.distill.batch_size=32",
    "head.draft_vocab_size=64", "train.lr=2.0e-3", "train.epochs=8", "train.tau_prompts=0",
)  # fmt: skip


def head_directory(family: str, target: Any, arguments: argparse.Namespace) -> Path:
    """Directory of the head: one of --heads, or one that is trained here by the recipe."""
    if arguments.heads is not None:
        given = arguments.heads / family
        return given / "head" if (given / "head").is_dir() else given

    own = [word.format(depth=arguments.depth) for word in TRAINED[family]]
    where = [f"name=parity-{family}", f"run_dir={arguments.work / family}", f"target.name={arguments.target}"]
    # large steps: the tuned target must say other things than the base, or nothing would be tested
    joint = ["joint.enabled=true", "joint.loss=ce", "joint.rank=8", "joint.heads_only=0.5"] if arguments.joint else []
    words = [*own, *joint, *where, "target.dtype=float32"]
    if arguments.small is not None:
        words += [*SMALL_RECIPE, f"data.distill.prompts=[{{path: {arguments.small.prompts}}}]"]
    words += arguments.set
    run = Run(load_recipe(arguments.recipe, words), Console(), target)
    with run.lock():
        run.save_recipe()
        distill(run)
        train(run)
    return run.head_dir


def require_chain(head: Head, chain: int) -> None:
    """Refuse a chain that engines do not draft with this head.

    Raises: ConfigError naming the length that they draft.
    """
    drafted = FAMILIES[head.family].files.drafted_tokens(head.depth, chain)
    if drafted != chain:
        raise ConfigError(f"--depth: found {chain}, and engines draft {drafted} tokens with this head: set it to that")
