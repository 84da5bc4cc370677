"""The samples of a run, to train on and to hold out: tokenised conversations, made anew by each command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from headstart.data.choosing.shingles import of_messages
from headstart.data.config import SourceConfig
from headstart.data.own_choice import OwnChoice
from headstart.data.prepare import PreparedData
from headstart.data.prepare import prepare as prepare_data
from headstart.data.ranks import ALONE, Ranks
from headstart.data.records.conversation import opening
from headstart.data.samples import Sample
from headstart.data.statistics import exact_copies, label_tokens, scripts, summarise
from headstart.eval.prompts import eval_prompts
from headstart.heads.counting import counted
from headstart.heads.errors import DataError
from headstart.heads.files import write_json, write_text
from headstart.heads.vocab import membership
from headstart.pipeline.run import EVAL_DATA, Run


def prepare(run: Run, ranks: Ranks = ALONE) -> PreparedData:
    """The samples to train on and to hold out. The first call makes them and says what became of the data.

    Args: ranks: processes that make the first call together and share the work.
    """
    if run.prepared is None:
        recipe, say = run.recipe, run.console.say
        weight, config = recipe.data.distill.weight, replace(recipe.data, duplicates=run.inputs.duplicates)
        distilled = [SourceConfig(path=str(run.distilled_path), weight=weight)] if recipe.data.distill.asks else []
        if distilled and not run.distilled_path.is_file():
            raise DataError(
                f"{run.distilled_path}: no such file: the recipe's prompts (data.distill.prompts, written) "
                "were not answered in this run. If the run was made with other overrides, give them again, or give "
                f"{run.dir / 'recipe.yaml'}, which has them, as the recipe. Otherwise run `headstart distill` with "
                "the same arguments first"
            )
        target = run.either_target
        with run.console.phase("tokenising", said=False):
            run.prepared = data = prepare_data(
                config, target.tokenizer, target.stop_token_ids, distilled, recipe.seed, ranks, _watched(run)
            )
        if recipe.data.duplicates is None and config.duplicates == "keep":
            say("data: this run began with duplicates kept and goes on so; data.duplicates=exact removes them")
        gathered = [line for each in (data.gathered, data.held_out_gathered) if each for line in each.lines()]
        for line in [*data.report.lines(), *data.rejects.lines(), *gathered]:
            say(f"data: {line}")
        if recipe.data.supervise == "all":
            say("data: data.supervise=all: every token of these trains, prompts too")
        say(f"data: {counted(len(data.train), 'samples')} to train on, {len(data.held_out)} held out")
        for line in data.split.lines():
            say(f"data: {line}")
        if data.gathered is not None and data.gathered.begin_watched:
            watched = counted(data.gathered.begin_watched, "conversations")
            say(
                f"data: WARNING: {watched} beginning with a prompt of eval.data or a "
                "near copy of one: the evaluation measures on what is trained. data.exclude=[{path: FILE.jsonl}] "
                "leaves those out that begin with a prompt of FILE"
            )
        if "eval" in run.ahead and recipe.eval.data is None and not data.held_out:
            raise DataError(f"eval.data: not set, and no conversation is held out. {EVAL_DATA}")
    return run.prepared


def _watched(run: Run) -> list[np.ndarray]:
    """The prompts of `eval.data`, as sets of hashes, where the run will be evaluated on them."""
    if "eval" not in run.ahead or run.recipe.eval.data is None:
        return []
    return [of_messages(opening(prompt.first)) for prompt in eval_prompts(run.recipe.eval)]


def trained_samples(run: Run) -> list[Sample]:
    """The training samples as the loop gets them: under `data.supervise=all`, every token is supervised."""
    samples = prepare(run).train
    return samples if run.recipe.data.supervise == "answers" else [sample.with_all_supervised() for sample in samples]


def counted_samples(run: Run) -> list[Sample]:
    """Samples of the same lengths and turns as those that train, copies included (`data.resampled_copies`), in the same
    order: originals stand in for their copies. The target need not be loaded."""
    return trained_samples(run) * (1 + run.recipe.data.resampled_copies)


def summary_of(run: Run, trained: Sequence[Sample]) -> dict[str, Any]:
    """`summarise` of the training samples. Under data.supervise=all every token is supervised; turns and answers are
    counted as they are."""
    return {**summarise(prepare(run).train), "supervised_tokens": sum(sample.supervised for sample in trained)}


def statistics_of(run: Run, draft_ids_U: Tensor | None, own: OwnChoice | None = None) -> dict[str, Any]:
    """Numbers about the training samples, as JSON values; what each means stands in docs/inspect.md.

    Args: draft_ids_U: int64 [U], None where the head drafts all tokens. own: whose text the answers are, if known.
    """
    trained, target = trained_samples(run), run.either_target
    whole = target.dims.vocab_size
    draftable_V = None if draft_ids_U is None else membership(draft_ids_U.cpu(), whole)
    labels, drafted = label_tokens(trained, draftable_V)
    vocabulary = None
    if draft_ids_U is not None:
        vocabulary = {"size": len(draft_ids_U), "of": whole, "coverage": drafted / labels if labels else 0.0}
    return {
        **summary_of(run, trained),
        "drafted_tokens": drafted,
        "depth": run.recipe.head.depth,
        "duplicates": {**_copies_that_left(prepare(run)), "left": exact_copies(trained)},
        "scripts": scripts(trained, target.tokenizer, run.recipe.seed),
        "draft_vocabulary": vocabulary,
        "own_choice": None if own is None else own.as_dict(),
    }


def _copies_that_left(data: PreparedData) -> dict[str, Any]:
    """How many conversations are not used because they are copies, by kind; `mode`: data.duplicates."""
    found = data.gathered.as_dict()["duplicates"] if data.gathered else {"mode": "keep", "exact": {}, "near": {}}
    counts = {"exact": len(found["exact"]), "near": len(found["near"]), "held_out": len(data.split.near_copies)}
    return {"mode": found["mode"], **counts}


def report_of(data: PreparedData) -> dict[str, Any]:
    """What became of the data, as data/report.json has it: train, held_out, duplicates, sources, split, rejected."""
    held = data.held_out_report
    gathered = data.gathered.as_dict() if data.gathered else {}
    held_out = {"held_out_sources": data.held_out_gathered.as_dict()} if data.held_out_gathered else {}
    rejected = {"rejected": dict(data.rejects.counts)} if data.rejects.counts else {}
    both = {"train": data.report.as_dict(), "held_out": held.as_dict() if held else None}
    return {**both, **gathered, **held_out, "split": data.split.as_dict(), **rejected}


def save_data_report(run: Run, statistics: dict[str, Any] | None = None) -> None:
    """Write data/report.json, data/held_out.jsonl with the prompts that an evaluation decodes, and data/rejects.jsonl
    with the rows that were left out, if any. Args: statistics: of `statistics_of`."""
    data = prepare(run)
    more = {} if statistics is None else {"statistics": statistics}
    write_json(run.dir / "data" / "report.json", {**report_of(data), **more})
    data.rejects.write(run.dir / "data" / "rejects.jsonl")
    records = [
        {"id": sample.id, "task": sample.meta.get("task") or "held_out", "prompt_token_ids": first_prompt(sample)}
        for sample in held_out_prompts(data)
    ]
    write_text(run.held_out_path, "".join(json.dumps(record) + "\n" for record in records))


def first_prompt(sample: Sample) -> list[int]:
    """The token ids before the first supervised token: what the target was asked."""
    first = int((sample.turn_ids >= 0).argmax())
    return sample.token_ids[:first].tolist()


def held_out_prompts(data: PreparedData) -> list[Sample]:
    """The first held-out sample of every prompt: a prompt with several answers is decoded once."""
    samples: dict[tuple[int, ...], Sample] = {}
    for sample in data.held_out:
        samples.setdefault(tuple(first_prompt(sample)), sample)
    return list(samples.values())
