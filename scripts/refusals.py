"""What later steps would refuse, asked of a recipe and its target before anything costs.

Every question is the later step's own check, put to a head without memory: sharding the target, building the head,
decoding the target, reading what the recipe is long for, saving and exporting. `doctor` and `plan` ask without the
target's weights, and so does every command before the first step that is not done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headstart.heads.base import Head
from headstart.heads.batch import FeatureSpec
from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.formats.export import check_ahead
from headstart.heads.formats.loading import check_shapes, map_head, skeleton
from headstart.heads.targets.target import Target
from headstart.recipes.schema import Recipe
from headstart.saved_heads import find_head, require_same_head

#: what is asked, in the order in which the steps come; each returns what was found, and raises as the step would
Question = Callable[[Recipe, Target], str]


def refuse_ahead(recipe: Recipe, target: Target) -> None:
    """Raise what training, evaluation, saving or exporting would raise for this recipe and target, or nothing.

    Args: target: with or without weights (weightless_target); none are read.
    Raises: ConfigError, TargetError or FormatError with the words of the step itself.
    """
    for question in QUESTIONS.values():
        question(recipe, target)


def planned_head(recipe: Recipe, target: Target) -> Head:
    """The head that training will make, without memory, bound to the target's ends.

    Raises: ConfigError where it cannot be built, reads layers that the target has not, or `start_from` is another;
    FormatError where `start_from` cannot be read.
    """
    dims = target.dims if recipe.start_from is None else _started(recipe, target.dims)
    with torch.device("meta"):
        head = build_head(recipe.head, dims)
    target.check_layer_ids(head.spec.layer_ids)
    head.bind(target.ends)
    return head


def _started(recipe: Recipe, dims: HeadDims) -> HeadDims:
    """Dimensions of a head that goes on from `start_from`: its draft layer's are the file's."""
    start_from = str(recipe.start_from)
    raw = open_checkpoint(find_head(start_from, "start_from"))
    mapped, config = map_head(raw, dims)
    check_shapes(raw, mapped, config)
    given = skeleton(config, mapped.dims, str(raw.directory))
    return require_same_head(given, start_from, recipe.head, dims)


def ask_head(recipe: Recipe, target: Target) -> str:
    """Whether the head can be built and bound: rope, feature layers, activation, the target's output matrix."""
    return planned_head(recipe, target).describe()


def ask_positions(recipe: Recipe, target: Target) -> str:
    """Whether what the recipe is long for fits the target's positions."""
    from headstart.eval.measuring.sweep import check_contexts

    limit = target.positions
    whole = target.dims.max_position_embeddings
    why = "" if limit == whole else f" (of {whole}: beyond the first {limit} its LongRoPE turns by other factors)"
    lengths: dict[str, Any] = {"data.max_length": recipe.data.max_length}
    if recipe.data.distill.prompts:
        lengths["data.distill.max_new_tokens"] = recipe.data.distill.max_new_tokens + 1
    for name, length in lengths.items():
        if length > limit:
            most = limit - (name != "data.max_length")
            raise ConfigError(
                f"{name}: found {length - (name != 'data.max_length')}, the target has {limit} positions{why}: set "
                f"{name}={most} or less"
            )
    check_contexts(recipe.eval.context_lengths, recipe.eval, target, "eval.context_lengths")
    return f"{limit}{why}, data.max_length={recipe.data.max_length}"


def ask_decoding(recipe: Recipe, target: Target) -> str:
    """Whether the decode loop, which evaluates and proves exports, can run the target."""
    from headstart.eval.decoding.engine import check_decodable

    windows = check_decodable(target.model)
    kinds = ", ".join(f"{kind} {window}" if window else kind for kind, window in windows.items())
    return f"{kinds}; {target.model.config.get_text_config()._attn_implementation}"


def ask_export(recipe: Recipe, target: Target) -> str:
    """Whether the engines of `export.engines` will load the head, and Headstart what is saved."""
    origin = {"target": {"name": recipe.target.name, "revision": recipe.target.revision}}
    check_ahead(planned_head(recipe, target), recipe.export, origin)
    return f"{', '.join(recipe.export.engines)} in {recipe.export.dtype}"


def ask_tracker(recipe: Recipe, target: Target) -> str:
    """Whether what `train.tracker` needs is installed."""
    from headstart.train.tracking.track import require_tracker

    require_tracker(recipe.train.tracker)
    return recipe.train.tracker


def ask_sharding(recipe: Recipe, target: Target) -> str:
    """Whether the target can be shared out over ranks as the recipe asks."""
    if recipe.target.parallel == "fsdp2":
        from headstart.heads.targets.load import check_shardable

        check_shardable(target)
    return f"target.parallel={recipe.target.parallel}"


QUESTIONS: dict[str, Question] = {
    "sharding": ask_sharding,
    "head": ask_head,
    "positions": ask_positions,
    "decoding": ask_decoding,
    "export": ask_export,
    "tracker": ask_tracker,
}


def require_decoding(target: Target, spec: FeatureSpec, force: bool) -> None:
    """Refuse a target whose decode loop gives other features than training reads, before anything is trained on them.

    The export asks the same of real text (serving_check.require_parity); here random tokens tell a fault, which shifts
    every row, from rounding, which spoils a few.
    Raises: TargetError, unless the export is forced (`export.force`).
    """
    from headstart.heads.targets.explained import explained_forward
    from headstart.heads.targets.probe import without_traces
    from headstart.serving_check import compare_features, probe_sequences, require_parity

    if force or target.lockstep:
        return
    with explained_forward(f"{target.config.name} in the decode loop"), without_traces(target.model):
        found = compare_features(target, spec, probe_sequences(target, 1, 24))
    require_parity(replace(found, tolerance=float("inf")))
