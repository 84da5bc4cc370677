"""The step `train`: trains the head and saves it in the portable format."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from headstart.data.features import FeatureSource
from headstart.data.packing import make_packs
from headstart.data.prepare import PreparedData
from headstart.eval.measuring.benchmark import tau_probe
from headstart.heads.base import Head
from headstart.heads.errors import Terminated
from headstart.heads.families import build_head
from headstart.heads.formats import save_head
from headstart.heads.formats.shards import shard_bytes
from headstart.heads.provenance import provenance
from headstart.pipeline.data import (
    first_prompt,
    held_out_prompts,
    prepare,
    save_data_report,
    statistics_of,
    trained_samples,
)
from headstart.pipeline.draft_vocab import choose_vocabulary, keep_vocabulary
from headstart.pipeline.features import data_tokens, feature_source, features_kind, store_features
from headstart.pipeline.inputs import lasting
from headstart.pipeline.joint import save_adapter_of, trained_head
from headstart.pipeline.markers import Begin, no_begin
from headstart.pipeline.placeholder import keep_placeholder, settled_config
from headstart.pipeline.resampling import make_copies, samples_with_copies
from headstart.pipeline.run import Run
from headstart.pipeline.run_length import require_steps
from headstart.refusals import require_decoding
from headstart.saved_heads import continued_head
from headstart.sigterm import stop_soon
from headstart.train import loop
from headstart.train.checkpoints.resume import TRAINED
from headstart.train.coverage import Coverage, measure_coverage
from headstart.train.launching.setup import check_layout
from headstart.train.sharing.distributed import all_ranks
from headstart.train.step import autocast_dtype
from headstart.train.stream import TrainData
from headstart.train.validate import Validator


def train(run: Run) -> dict[str, Any]:
    """Train the head in this process. The first Ctrl-C saves a checkpoint and ends it; the same command continues."""
    require_layout(run, 1, 1)
    if not is_trained(run):
        store_features(run)
    return train_once(run)


def require_layout(run: Run, ranks: int, node_ranks: int, kind: str | None = None) -> None:
    """Raise ConfigError where this number of ranks cannot train the recipe; see train.launching.setup.check_layout."""
    check_layout(kind or run.recipe.train.parallel, run.recipe.train, run.recipe.target, ranks, node_ranks)


def is_trained(run: Run) -> bool:
    """Whether the run's head was trained with these inputs, and `train.resume` keeps it."""
    outputs = [run.head_dir, run.held_out_path]
    return run.recipe.train.resume and run.markers.is_done("train", run.inputs.train, outputs)


def train_once(run: Run, accelerator: Any = None, watch: Any = None) -> dict[str, Any]:
    """`train_head` as a step with a marker: skipped when it is done. What another recipe made is moved away."""
    return run.markers.do(
        "train",
        run.inputs.train,
        [run.head_dir, run.held_out_path],
        lambda begin: train_head(run, accelerator, watch, lambda: run.claim(begin)),
        leftovers=[run.dir / name for name in TRAINED],
        lasting=lasting,
        again="" if run.recipe.train.resume else "as asked (train.resume=false)",
        worth=lambda: run.head_dir.is_dir() or any((run.dir / "checkpoints").glob("step-*")),
    )


def train_head(run: Run, accelerator: Any = None, watch: Any = None, begin: Begin = no_begin) -> dict[str, Any]:
    """Train on the ranks of `accelerator` (None: in this process alone), which `watch` watches; rank 0 writes.

    Args: begin: called when nothing can be refused any more, before the first training step.
    """
    data = prepare(run)
    require_steps(run)
    if features_kind(run) == "memory":  # held beside everything else, and only now known how many
        run.check_memory(data_tokens(run))
    require_decoding(run.target, run.feature_spec(), run.recipe.export.force)
    make_copies(run, all_ranks())
    head, features = head_and_features(run)
    with trained_head(run, head) as training:
        return _train(run, data, head, training, features, accelerator, watch, begin)


def _train(
    run: Run, data: PreparedData, head: Head, training: Head, features: FeatureSource | None, accelerator: Any,
    watch: Any, begin: Begin,
) -> dict[str, Any]:  # fmt: skip
    """Train `training`: `head`, alone or with an adapter; then save both. Args: features: of training, if made."""
    recipe, target = run.recipe, run.target
    main = accelerator is None or accelerator.is_main_process
    samples = samples_with_copies(run)
    source = features
    if source is None:
        source = feature_source(run, samples, "train", training, training.depth)
    with run.console.phase("looking at some training samples", said=False):
        covered = _say_coverage(run, training, source)
    origin = {**provenance(target.device), "recipe": run.inputs.recipe_facts(), "target": target.fingerprint()}
    validator = _validator(run, data, training, accelerator)
    begin()
    if main:
        save_data_report(run, _statistics(run, head, covered))
        keep_placeholder(run, head.config)
        keep_vocabulary(run, head)
    supervised = [sample.supervised for sample in samples]
    result = loop.train(
        training,
        TrainData(source, recipe.data.pack_size, supervised),
        target.teacher,
        recipe.train,
        run.dir,
        loop.Observers(validator, watch, not run.console.silent, run.console.screen, stop_soon),
        provenance=origin,
        accelerator=accelerator,
        chain=measured_chain(run, head),
    )
    if result.stopped == "signal":
        raise KeyboardInterrupt if result.interrupted else Terminated
    values = dataclasses.asdict(result)
    if main:
        origin["training"] = values
        # numbers alone: names of conversations are private
        origin["data"] = {name: n for name, n in data.report.as_dict().items() if isinstance(n, int | float)}
        origin["target"] = save_adapter_of(run)
        with run.console.phase("saving the head", said=False):
            save_head(head, run.head_dir, origin, max_shard_bytes=shard_bytes(recipe.export.max_shard_size))
    return {**values, "head": str(run.head_dir)}


def fresh_head(run: Run) -> Head:
    """The head as training starts: that of `start_from`, or a new one. Its draft vocabulary comes from the data."""
    return head_and_features(run)[0]


def head_and_features(run: Run) -> tuple[Head, FeatureSource | None]:
    """`fresh_head`, and the features of training where the choice of a draft vocabulary has made them already."""
    target, config, say = run.target, run.recipe.head, run.console.say
    if run.recipe.start_from is not None:
        torch.manual_seed(run.recipe.seed)
        say(f"training goes on from {run.recipe.start_from}")
        head = continued_head(run.recipe.start_from, config, target)
        settled_config(run, head.config)  # the data must not hold its placeholder
        target.keep_rows(head.draft_ids_U)
        return head, None
    config, draft_ids_U, source = settled_config(run, config), None, None
    with torch.device("meta"):
        sketch = build_head(config, target.dims)
    if sketch.draft_vocab_size is not None:
        with run.console.phase("choosing the draft vocabulary", said=False):
            ids, source = choose_vocabulary(run, config, sketch)
        draft_ids_U, config = torch.tensor(ids), config.with_vocabulary(len(ids))
    torch.manual_seed(run.recipe.seed)
    head = build_head(config, target.dims).to(target.device)
    head.initialise(target.ends, draft_ids_U)
    target.keep_rows(head.draft_ids_U)
    head.bind(target.ends)
    return head, source


def _say_coverage(run: Run, head: Head, source: Any) -> Coverage | None:
    """Look at a few training samples: say what share of their rows can train with this draft vocabulary, and what share
    of the answers the target would have written. None for a sharded target and a head that runs the target itself.
    """
    if run.target.lockstep or head.spec.tokens_alone:
        return None
    found = measure_coverage(head, source, run.recipe.seed, run.target.teacher, len(trained_samples(run)))
    if found.rows and head.draft_ids_U is not None:
        covered = found.inside / found.rows
        share = f"{covered:.1%} of {found.rows} supervised rows of some training samples"
        more = "" if covered >= 0.9 else "; a larger head.draft_vocab_size lets more rows train"
        kept = f", and {found.mass / found.rows:.1%} of the target's probability" if found.mass else ""
        run.console.say(f"draft vocabulary: it holds the right token on {share}{kept}; other rows do not train{more}")
    if found.own.tokens:
        run.console.say(f"data: {found.own.line()}")
    return found


def _statistics(run: Run, head: Head, covered: Coverage | None) -> dict[str, Any]:
    """Numbers about the training samples for data/report.json, with what the look at a few of them showed."""
    found = statistics_of(run, head.draft_ids_U, covered.own if covered and covered.own.tokens else None)
    if covered and covered.rows and found["draft_vocabulary"] is not None:
        kept = {"rows_that_train": covered.inside / covered.rows, "rows": covered.rows}
        found["draft_vocabulary"] |= kept | ({"probability": covered.mass / covered.rows} if covered.mass else {})
    return found


def measured_chain(run: Run, head: Head) -> int:
    """Length of the chain whose acceptance training measures: `train.tau_depth`, or else `eval.tree.depth`."""
    depth = run.recipe.train.tau_depth or run.recipe.eval.tree.depth
    return depth if head.longest_chain is None else min(depth, head.longest_chain)


def _validator(run: Run, data: PreparedData, head: Head, accelerator: Any) -> Validator | None:
    if not data.held_out:
        return None
    config, target = run.recipe.train, run.target
    chain = measured_chain(run, head)
    source = feature_source(run, data.held_out, "held_out", head, max(head.depth, chain))
    packs = make_packs(source.lengths, run.recipe.data.pack_size, 0, 0)
    prompts = [first_prompt(sample) for sample in held_out_prompts(data)[: config.tau_prompts]]

    def probe(trained: Head) -> float:
        return tau_probe(target, trained.drafting_head(), prompts, config.tau_tokens, chain)

    rank, size = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    autocast = autocast_dtype(config.mixed_precision, target.device)
    measure = probe if prompts and not target.lockstep else None  # a sharded target runs only on all ranks together
    return Validator(source, packs, target.teacher, measure, config.tau_every, autocast, rank, size, chain)
