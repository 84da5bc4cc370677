"""What `headstart inspect` finds: samples token by token, and statistics. inspection_text.py shows it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from headstart.auto import settled_here
from headstart.console import Console
from headstart.data.inspection import DRAFTED, ShownToken, as_json, find_samples, shown_tokens
from headstart.data.own_choice import own_choice_of
from headstart.data.samples import Sample, check_vocabulary
from headstart.heads.counting import counted
from headstart.heads.errors import DataError
from headstart.heads.targets.load import weightless_target
from headstart.heads.vocab import membership
from headstart.pipeline.data import prepare, report_of, statistics_of, summary_of, trained_samples
from headstart.pipeline.draft_vocab import KnownVocabulary, vocabulary_ahead
from headstart.pipeline.placeholder import settled_config
from headstart.pipeline.run import Run, dated_target
from headstart.plan import prediction
from headstart.recipes.load import load_recipe


@dataclass(frozen=True)
class Wanted:
    """What to look at.

    Attributes:
        count: samples to show. name: instead, those of the conversation of this id.
        random: random samples instead of the first ones. seed: which ones; None = the recipe's seed.
        stats: also the statistics, for which the target runs.
    """

    count: int = 0
    name: str | None = None
    random: bool = False
    seed: int | None = None
    stats: bool = False


@dataclass(frozen=True)
class Shown:
    """A sample as it is shown. `held_out`: it does not train. `cut`: it was longer than data.max_length."""

    sample: Sample
    tokens: Sequence[ShownToken]
    held_out: bool
    cut: bool

    def title(self) -> str:
        counts = f"{counted(len(self.tokens), 'tokens')}, {sum(token.supervised for token in self.tokens)} supervised"
        drafted = f"{sum(token.mark == DRAFTED for token in self.tokens)} drafted"
        cut = ", cut at data.max_length" if self.cut else ""
        side = ", held out: it does not train" if self.held_out else ""
        return f"── {self.sample.id} ({counts}, {drafted}, ends by {self.sample.finish_reason}{cut}{side})"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.sample.id,
            "conversation": self.sample.meta.get("conversation"),
            "held_out": self.held_out,
            "truncated": self.cut,
            "finish_reason": self.sample.finish_reason,
            **as_json(self.tokens),
        }


def inspect(run: Run, wanted: Wanted) -> tuple[dict[str, Any], list[Shown]]:
    """(what `--json` prints, whose keys docs/inspect.md explains; the samples to show).

    Args: run: of `opened`.
    """
    settings, data = run.recipe, prepare(run)
    settled_config(run, settings.head)  # says which token stands for those to come
    trained = trained_samples(run)
    check_vocabulary(trained, run.target.dims.vocab_size)
    known = vocabulary_ahead(run, trained)
    seed = settings.seed if wanted.seed is None else wanted.seed
    shown = _shown(run, _chosen(run, wanted, seed), known)
    if wanted.random and shown:
        run.console.say(f"{len(shown)} random samples of {len(trained)}, chosen by seed {seed}")
    value: dict[str, Any] = {
        "counts": summary_of(run, trained),
        "held_out_samples": len(data.held_out),
        "report": report_of(data),
        "supervise": settings.data.supervise,
        "depth": settings.head.depth,
        "draft_vocabulary": None if known is None else {"size": len(known.ids_U), "origin": known.origin},
        "seed": seed if wanted.random else None,
        "samples": [each.as_json() for each in shown],
    }
    if wanted.stats:
        value["statistics"] = _statistics(run, trained, known)
    return value, shown


def _statistics(run: Run, trained: list[Sample], known: KnownVocabulary | None) -> dict[str, Any]:
    inside_V = _draftable(run, known)
    own = own_choice_of(run.target, trained, run.recipe.seed, draftable_V=inside_V)
    found = statistics_of(run, None if known is None else known.ids_U, own)
    if known is not None:
        choices = own.inside / own.tokens if own.tokens else None
        found["draft_vocabulary"] |= {"choices": choices, "origin": known.origin}
    return {**found, "own_choice": {**own.as_dict(), "summary": own.line()}, "training": prediction(run)}


def opened(console: Console, recipe: str, overrides: list[str], weights: bool) -> Run:
    """The run of the recipe, without prompts that are not answered yet. Args: weights: of its target are needed.

    Raises: DataError where it has nothing but such prompts.
    """
    settings, _ = settled_here(load_recipe(recipe, overrides))
    run = Run(settings, console)
    if weights:
        run.require_one_process("--stats runs the target", "leave --stats out")
    else:
        run = Run(settings, console, weightless_target(dated_target(settings)))
    if not settings.data.distill.asks:
        return run
    same = shlex.join(["headstart", "distill", recipe, *overrides])
    if not run.distilled_path.is_file():
        if not settings.data.sources:
            raise DataError(f"{run.distilled_path}: the prompts are not answered yet: run `{same}` first")
        console.say(
            f"the prompts are not answered yet ({run.distilled_path} is missing): this shows data.sources alone"
        )
        return run.without_prompts()
    if not run.markers.is_done("distill", run.inputs.distill, [run.distilled_path]):
        console.say(
            f"WARNING: {run.distilled_path} was not finished, or with other settings: this shows the answers that it "
            f"holds. `{same}` answers the prompts"
        )
    return run


def _chosen(run: Run, wanted: Wanted, seed: int) -> list[Sample]:
    trained = trained_samples(run)
    if wanted.name is not None:
        supervised = {sample.id: sample for sample in trained}
        return [supervised.get(sample.id, sample) for sample in find_samples(prepare(run), wanted.name)]
    if not wanted.random:
        return trained[: wanted.count]
    order = np.random.default_rng(seed).permutation(len(trained))
    return [trained[index] for index in order[: wanted.count].tolist()]


def _shown(run: Run, chosen: list[Sample], known: KnownVocabulary | None) -> list[Shown]:
    data, target, depth = prepare(run), run.target, run.recipe.head.depth
    inside_V = _draftable(run, known)
    held = {sample.id for sample in data.held_out}
    names = {*data.report.truncated, *(data.held_out_report.truncated if data.held_out_report else ())}
    # what a weight repeats has another id and the same tokens
    cut = {id(sample.token_ids) for sample in (*data.train, *data.held_out) if sample.id in names}
    return [
        Shown(
            sample, shown_tokens(sample, target.tokenizer, depth, inside_V), sample.id in held,
            id(sample.token_ids) in cut,
        )
        for sample in chosen
    ]  # fmt: skip


def _draftable(run: Run, known: KnownVocabulary | None) -> Tensor | None:
    """The draft vocabulary as bool [V]; None = all tokens."""
    return None if known is None else membership(known.ids_U, run.target.dims.vocab_size)
