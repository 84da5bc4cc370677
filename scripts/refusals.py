"""Asks, before any work starts, whether a later step would refuse the recipe or its target.

Every question (QUESTIONS) calls the check of the step itself, with a head on the meta device. `doctor` and `plan` ask
them, and so does every command before its first step that is not done. No weights are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from headstart.data.distilling.writing_prompts import opening_of
from headstart.data.placeholder import settle
from headstart.data.serving.engines import require_settings
from headstart.heads.base import Head, HeadConfig
from headstart.heads.batch import FeatureSpec
from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.counting import counted
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.formats.export import check_ahead
from headstart.heads.formats.loading import check_shapes, map_head, skeleton
from headstart.heads.targets.adapter import check_continued, planned_parameters
from headstart.heads.targets.layer_weights import check_start
from headstart.heads.targets.target import Target
from headstart.heads.targets.tuned import adapter_of_head
from headstart.recipes.schema import Recipe
from headstart.saved_heads import find_head, require_same_head
from headstart.train.optim import freeze_still_matrices

#: raises what the step would raise; otherwise returns the answer in words, for `doctor`
Question = Callable[[Recipe, Target], str]


def refuse_ahead(recipe: Recipe, target: Target) -> None:
    """Ask all questions about this recipe and target, whose weights need not be loaded.

    Raises: ConfigError, TargetError or FormatError, as training, evaluating, saving or exporting would.
    """
    for question in QUESTIONS.values():
        question(recipe, target)


def planned_head(recipe: Recipe, target: Target) -> Head:
    """The head that training will make, on the meta device, bound to the target's ends.

    Raises: ConfigError where it cannot be built, reads layers that the target does not have, or differs from
    `start_from`; FormatError where `start_from` cannot be read.
    """
    dims, config = (target.dims, recipe.head) if recipe.start_from is None else _started(recipe, target.dims)
    config, _ = settle(config, target.tokenizer, target.dims.vocab_size, target.stop_token_ids)
    with torch.device("meta"):
        head = build_head(config.with_vocabulary(config.draft_tokens(dims.vocab_size)), dims)
    target.check_layer_ids(head.spec.layer_ids)
    head.bind(target.ends)
    freeze_still_matrices(head, recipe.train)
    numbers = getattr(config, "start_layers", None)
    if recipe.start_from is None and numbers is not None:
        if recipe.target.parallel == "fsdp2":
            raise ConfigError(
                "target.parallel: found fsdp2 with head.start_layers; no rank has a whole layer to start from: set "
                "head.start_layers=null"
            )
        check_start(target.ends, numbers, head.draft_layers, head.hidden_act or "")
    return head


def planned_training(recipe: Recipe, target: Target) -> Head:
    """What training will train: the head, in joint training with the adapter of its target.

    Raises: as planned_head. ConfigError or TargetError for a head or target that cannot be trained together.
        ConfigError where `train.activation_checkpointing` has nothing to recompute, Muon nothing to train, or rounds
        no loss that weighs drafts.
    """
    from headstart.train.launching.setup import recompute_activations
    from headstart.train.optim import check_muon, muon_matrices
    from headstart.train.rounds import check_rounds

    head = planned_head(recipe, target)
    if recipe.joint.enabled:
        from headstart.train.joint.head import JointHead

        if (start := started_adapter(recipe)) is not None:
            check_continued(planned_parameters(target.model, recipe.joint.lora), recipe.joint.lora, start)
        head = JointHead(head, target, recipe.joint, planned=True)
    check_rounds(recipe.train, head)
    check_muon(recipe.train, muon_matrices(head))
    if recipe.train.activation_checkpointing:
        recompute_activations(head)
    return head


def started_adapter(recipe: Recipe) -> Path | None:
    """The adapter that joint training goes on from, beside the head of `start_from`; None where it starts anew.

    Raises: ConfigError where the first stage would train the head on the features of the target without it.
    """
    if recipe.start_from is None or not recipe.joint.enabled:
        return None
    place = adapter_of_head(find_head(recipe.start_from, "start_from"))
    if place is not None and recipe.joint.heads_only > 0:
        raise ConfigError(
            f"joint.heads_only: found {recipe.joint.heads_only:g} with a start_from that has an adapter, expected 0: "
            "head and adapter go on together, and a stage for the head alone would show it the original target"
        )
    return place


def _started(recipe: Recipe, dims: HeadDims) -> tuple[HeadDims, HeadConfig]:
    """Dimensions and config of a head that continues from `start_from`, read from its file without its weights."""
    start_from = str(recipe.start_from)
    directory = find_head(start_from, "start_from")
    if not recipe.joint.enabled and recipe.target.adapter is None:
        require_untuned(directory)
    raw = open_checkpoint(directory)
    mapped, config = map_head(raw, dims)
    check_shapes(raw, mapped, config)
    given = skeleton(config, mapped.dims, str(raw.directory))
    return require_same_head(given, start_from, recipe.head, dims), recipe.head.adopting(given.config)


def require_untuned(directory: Path) -> None:
    """Raises: ConfigError where the head that training goes on from drafts for a tuned target, and this one is none."""
    place = adapter_of_head(directory)
    if place is not None:
        raise ConfigError(
            f"start_from: {directory} drafts for a target with the adapter beside it, and the recipe's has none: "
            f"set target.adapter={place} to go on with that target, or joint.enabled=true to train the adapter further"
        )


def ask_head(recipe: Recipe, target: Target) -> str:
    """Whether the head can be built, bound and trained: rope, feature layers, activation, the target's output matrix,
    enough steps for the stages and the settings, and a layer for `train.activation_checkpointing`."""
    from headstart.train.optim import Budget
    from headstart.train.short_runs import check_steps
    from headstart.train.stages import Stages

    head = planned_training(recipe, target)
    check_steps(recipe.train, Stages(head.stages, Budget.of(recipe.train, None)))
    return head.describe()


def ask_positions(recipe: Recipe, target: Target) -> str:
    """Whether the longest texts of the recipe fit the target's positions."""
    from headstart.eval.measuring.sweep import check_contexts

    limit = target.positions
    whole = target.dims.max_position_embeddings
    why = "" if limit == whole else f" (of {whole}: beyond the first {limit} its LongRoPE uses other factors)"
    lengths = {"data.max_length": (recipe.data.max_length, limit)}
    if recipe.data.distill.asks:  # a prompt has at least one token
        lengths["data.distill.max_new_tokens"] = (recipe.data.distill.max_new_tokens, limit - 1)
    if recipe.longer_answers is not None:
        lengths["longer_answers"] = (recipe.longer_answers, limit - 1)
    for name, (length, most) in lengths.items():
        if length > most:
            raise ConfigError(
                f"{name}: found {length}, the target has {limit} positions{why}: set {name}={most} or less"
            )
    check_contexts(recipe.eval.context_lengths, recipe.eval, target, "eval.context_lengths")
    return f"{limit}{why}, data.max_length={recipe.data.max_length}"


def ask_decoding(recipe: Recipe, target: Target) -> str:
    """Whether the decode loop can run the target, and head and target the recipe's tree and scheduler. Evaluations and
    exports need it."""
    from headstart.eval.decoding.engine import attention_windows
    from headstart.eval.decoding.fused.errors import Unfusable
    from headstart.eval.decoding.generic.model import check_decodable
    from headstart.eval.decoding.memory import require_attention, require_chain
    from headstart.eval.drafters import require_drafting

    memory = check_decodable(target.model)
    require_chain(target.model.config, recipe.eval)
    require_attention(target.model.config, recipe.eval)
    require_drafting(planned_head(recipe, target), recipe.eval)
    if recipe.eval.engine == "fused":  # the forms of the layers are proven later, on their weights
        try:
            attention_windows(target.model.config)
        except Unfusable as error:
            raise ConfigError(f"eval.engine: found 'fused', but {error}; set eval.engine=transformers") from error
    return f"{memory}; {target.model.config.get_text_config()._attn_implementation}"


def ask_export(recipe: Recipe, target: Target) -> str:
    """Whether Headstart and the engines of `export.engines` will load what is saved."""
    origin = {"target": {"name": recipe.target.name, "revision": recipe.target.revision}}
    check_ahead(planned_head(recipe, target), recipe.export, origin)
    return f"{', '.join(recipe.export.engines)} in {recipe.export.dtype}"


def ask_held_out(recipe: Recipe, target: Target) -> str:
    """Whether there is something to measure on: the target that joint training will change, and the head that
    `train.patience` follows."""
    from headstart.train.patience import check_patience

    data = recipe.data
    check_patience(recipe.train, bool(data.held_out) or data.held_out_fraction > 0)
    if recipe.joint.enabled and not data.held_out and data.held_out_fraction == 0:
        raise ConfigError(
            "joint.enabled: found true with data.held_out_fraction=0 and no data.held_out, expected held-out "
            "conversations, on which the tuned target is measured before it is exported: set one of them"
        )
    return "given as data.held_out" if data.held_out else f"data.held_out_fraction={data.held_out_fraction:g}"


def ask_servers(recipe: Recipe, target: Target) -> str:
    """Whether servers of the kinds that the recipe names can honour its settings, and whether the target can write
    prompts where it shall. `doctor` and distillation ask the servers themselves; here they need not run yet, or run no
    longer."""
    servers = recipe.data.distill.servers
    for number, server in enumerate(servers):
        if server.engine != "auto":
            where = f"data.distill.servers[{number}]"
            require_settings(server.engine, recipe.data.distill, recipe.data.template_kwargs, where)
    if recipe.data.distill.written:
        opening_of(target, recipe.data.distill, dict(recipe.data.template_kwargs))
        return f"in process; the target writes {counted(recipe.data.distill.written, 'prompts')} first"
    return f"{len(servers)} answer the prompts" if servers else "in process"


def ask_tracker(recipe: Recipe, target: Target) -> str:
    """Whether what `train.tracker` needs is installed."""
    from headstart.train.tracking.track import require_tracker

    require_tracker(recipe.train.tracker)
    return recipe.train.tracker


def ask_sharding(recipe: Recipe, target: Target) -> str:
    """Whether the target can be sharded over the ranks as the recipe asks."""
    if recipe.target.parallel == "fsdp2":
        from headstart.heads.targets.load import check_shardable

        check_shardable(target)
    return f"target.parallel={recipe.target.parallel}"


def ask_resampling(recipe: Recipe, target: Target) -> str:
    """Whether the target can redraw tokens of the training samples (`data.resampled_copies`)."""
    copies = recipe.data.resampled_copies
    if copies and recipe.target.parallel == "fsdp2":
        raise ConfigError(
            f"data.resampled_copies: found {copies} with target.parallel=fsdp2, expected 0: a sharded target runs on "
            "all ranks together, and copies are made by one: set data.resampled_copies=0, or target.parallel=none"
        )
    if copies and recipe.joint.enabled:
        raise ConfigError(
            f"data.resampled_copies: found {copies} with joint.enabled=true, expected 0: joint training trains the "
            "target too, and it must not learn from redrawn text: set data.resampled_copies=0, or joint.enabled=false"
        )
    if copies and (learns_text := recipe.head.learns_text) is not None:
        found, instead = learns_text
        raise ConfigError(
            f"data.resampled_copies: found {copies} with {found}, expected 0: that loss learns the text's tokens, and "
            "those behind a redrawn token are not what the target says there: set data.resampled_copies=0"
            + (f", or {instead}, which learns the target's distribution" if instead else "")
        )
    return f"{copies} of every sample" if copies else "none"


#: the name that `doctor` shows → the question, in the order of the steps
QUESTIONS: dict[str, Question] = {
    "sharding": ask_sharding,
    "head": ask_head,
    "held-out data": ask_held_out,
    "resampled copies": ask_resampling,
    "positions": ask_positions,
    "distillation": ask_servers,
    "decoding": ask_decoding,
    "export": ask_export,
    "tracker": ask_tracker,
}


def require_decoding(target: Target, spec: FeatureSpec, force: bool) -> None:
    """Before training, compare the features that training reads with those of the decode loop, on random tokens.

    The export compares them again on real text (serving_check.require_parity). Here rounding may spoil a few rows, but
    a fault shifts all of them, so only the median row is judged.

    Args: force: `export.force`, which skips the comparison.
    Raises: TargetError where they differ.
    """
    from headstart.heads.targets.explained import explained_forward
    from headstart.heads.targets.probe import without_traces
    from headstart.serving_check import compare_features, probe_sequences, require_parity

    if force or target.lockstep:
        return
    with explained_forward(f"{target.config.name} in the decode loop"), without_traces(target.model):
        parity = compare_features(target, spec, probe_sequences(target, 1, 24))
    require_parity(replace(parity, tolerance=float("inf")))
