"""Whether a run fits the memory of the device that it will run on: the layout of a recipe, and the question before it.

`headstart plan` asks with the data counted, `train` and `run` before their first step, from shapes alone.
"""

from __future__ import annotations

import torch

from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.targets.load import resolve_device, resolve_dtype
from headstart.heads.targets.target import Target
from headstart.recipes.schema import Recipe
from headstart.refusals import planned_training
from headstart.train.plan import GIB, Layout, local_device_bytes, memory_of, require_memory
from headstart.train.step import autocast_dtype


def run_layout(
    recipe: Recipe, device: torch.device, ranks: int, node_ranks: int, cards: int, supervised: float, tokens: int
) -> Layout:
    """The layout that train/plan.py estimates; `train.parallel=auto` counts as replicated and
    `data.features=auto` as online.

    Args: device: what computes. tokens: of the data, 0 = unknown. Others: see Layout.
    """
    tuned = recipe.joint.enabled or recipe.target.adapter is not None
    if device.type == "cpu":
        half = autocast_dtype(recipe.train.mixed_precision, device) is not None
    else:
        half = recipe.target.dtype in ("auto", "bfloat16", "float16") and recipe.train.mixed_precision != "no"
    return Layout(
        ranks=ranks,
        ranks_per_node=node_ranks,
        cards=cards,
        parallel="replicated" if recipe.train.parallel == "auto" else recipe.train.parallel,
        target_parallel=recipe.target.parallel,
        shard_ranks=recipe.target.shard_ranks,
        pack_tokens=recipe.data.pack_size,
        accumulation=recipe.train.accumulation,
        supervised=supervised,
        half=half,
        activation_checkpointing=recipe.train.activation_checkpointing,
        features="online" if recipe.data.features == "auto" else recipe.data.features,
        exports_target=tuned and recipe.export.adapter == "merged",
        host=device.type == "cpu",
        muon=recipe.train.optimizer == "muon",
        averages=recipe.train.average_decay is not None,
        tokens=tokens,
    )


def in_dtype(target: Target, recipe: Recipe, device: torch.device) -> None:
    """Give a target without weights the dtype that it is loaded in on `device`."""
    target.model.to(resolve_dtype(recipe.target.dtype, device))
    target.embed_VD = target.model.get_input_embeddings().weight


def require_room(recipe: Recipe, target: Target, head: Head | None = None, tokens: int = 0) -> str:
    """Whether one process can train the recipe on its device. `target` has no weights.

    Returns: the answer in words.
    Raises: ConfigError naming what to change.
    """
    device = resolve_device(recipe.target.device)
    cards = torch.cuda.device_count() if recipe.target.parallel == "device_map" else 1
    layout = run_layout(recipe, device, 1, 1, max(cards, 1), 1.0, tokens)
    in_dtype(target, recipe, device)
    head = head or planned_training(recipe, target)
    peak, most = memory_of(target, head, layout)[1], local_device_bytes(device)
    if recipe.train.check_memory:
        try:
            require_memory(layout, peak, most, target, head)
        except ConfigError as error:
            raise ConfigError(f"{error} (train.check_memory=false tries it all the same)") from None
    return f"{peak / GIB:.1f} of {most / GIB:.1f} GiB"
