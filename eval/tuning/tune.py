"""Which tree pays on this device: costs measured here × acceptance measured on the user's prompts, per batch size.

    speed-up = τ(tree) · t_plain(batch) / (t_draft(tree) + t_verify(nodes + 1) + rest)          (methods §11)

τ of every tree is estimated from a few runs with large trees (`profile.py`, `static.py`). The estimate is not exact: a
smaller tree accepts less per cycle, so its cycles begin at other tokens than the large tree's. So the few trees with
the best estimate are run themselves. Then the best tree of each batch size is decoded in full, and its measured
speed-up stands beside the predicted one. Where static trees are drafted, the best calibrated one and the published one
are decoded in full as well: what is measured decides. Last, the scheduler decodes in full with the largest tree of the
best one's kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headstart.data.features import Progress
from headstart.data.records.media import dropped_lines
from headstart.eval.config import EvalConfig, TreeConfig, TuneConfig, check_config, check_tune
from headstart.eval.decoding.decode import Decoded
from headstart.eval.decoding.memory import memory_of
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import Drafter, Drafting, build_drafter, find_drafting
from headstart.eval.measuring.benchmark import require_its_target
from headstart.eval.measuring.contexts import first_contexts
from headstart.eval.measuring.metrics import acceptance
from headstart.eval.measuring.sweep import check_contexts, fit, measure_point, row_batches, spread
from headstart.eval.prompts import describe_data, eval_prompts
from headstart.eval.scheduling.throughput import scheduler_for
from headstart.eval.tree import PUBLISHED_RANKS, static_paths, static_shape
from headstart.eval.tuning.choice import (
    Choice,
    Prediction,
    Scheduled,
    Trial,
    Tuning,
    by_speedup,
    expected_speedup,
    finalists,
    first_of,
    is_calibrated,
    is_published,
    largest_like,
    tree_name,
)
from headstart.eval.tuning.costs import Costs, drafting_of, measure_costs, measurements, node_count
from headstart.eval.tuning.profile import Profile, Recorder
from headstart.eval.tuning.recording import calibrate_drafter, task_after_task
from headstart.eval.tuning.static import StaticProfile, published_tree, recorded_ranks, recorded_tree, static_facts
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.formats.calibration import Calibration
from headstart.heads.provenance import device_name
from headstart.heads.targets.target import Target

#: contexts decoded together while acceptance is recorded
PROFILE_BATCH = 16


def tune(
    target: Target,
    head: Head | None,
    config: EvalConfig,
    search: TuneConfig,
    progress: Progress | None = None,
) -> Tuning:
    """Find the best tree per batch size.

    Args:
        head: on the target's device; None with `eval.drafter=ngram`.
        config: prompts, sampling, limits; its `tree` and `scheduler` are not used.
        progress: called with (measurements done, measurements in all, the next one in words).
    Raises: ConfigError, DataError naming field or file.
    """
    check_tuning(target, head, config, search)
    config = replace(config, scheduler=False)
    prompts = eval_prompts(replace(config, max_turns=1))
    drafting = drafting_for(head, config)
    recurrent = memory_of(target.model.config).chains_only
    if recurrent:
        drafting = replace(drafting, kinds=("chain",))
    taken, contexts, dropped = first_contexts(spread(prompts, search.prompts), target, config)
    if search.context is not None:
        contexts = [fit(context, search.context) for context in contexts]
    if head is not None:
        head.bind(target.ends)
        head.eval()
    search = replace(search, depth=deepest(head, search))
    session = _Session(target, head, config, search, contexts, progress)
    session.unscheduled = why_unscheduled(recurrent, drafting)
    for note in [*dropped_lines(prompts.dropped), *dropped]:
        session.say(note)
    profiles, halfway = session.profiles(drafting)
    reference = published_tree(search.depth, session.draftable) if "static" in profiles else None
    trees = compared_trees(profiles, search, reference)
    static = profiles.get("static")
    data = describe_data(config.data)
    calibration, uncalibrated = None, list[str]()
    if head is not None:
        calibration, uncalibrated = session.calibration(str(data["path"]), [prompt.task for prompt in taken])
    choices = session.choices(halfway, trees, profiles)
    facts = static_facts(static, trees, search.depth) if isinstance(static, StaticProfile) else {}
    return Tuning(
        drafter=head.family if head is not None else config.drafter,
        target=target.fingerprint(),
        data=data,
        device=device_name(target.device),
        device_type=target.device.type,
        dtype=str(target.dtype).removeprefix("torch."),
        temperature=float(config.temperature),
        context=mean_length(halfway),
        prompts=len(contexts),
        cycles={name: profile.cycles for name, profile in profiles.items()},
        taus={tree_name(tree): profiles[drafting_of(tree)].tau(tree) for tree in trees},
        choices=choices,
        notes=[*facts.pop("notes", []), *uncalibrated, *session.notes()],
        calibration=calibration,
        **facts,
    )


def check_tuning(target: Target, head: Head | None, config: EvalConfig, search: TuneConfig) -> None:
    """Refuse what `tune` would refuse. Neither target nor head need weights: both may be on the meta device.

    Args: as `tune`.
    Raises: ConfigError naming the field.
    """
    check_config(config)
    check_tune(search)
    check_contexts([search.context] if search.context else [], config, target, "tune.context")
    if config.synthetic_acceptance is not None:
        raise ConfigError("eval.synthetic_acceptance: tune measures the head's own acceptance: unset it")
    if config.acceptance != "lossless":
        raise ConfigError(f"eval.acceptance: found {config.acceptance!r}, tune knows lossless verification only")
    if head is not None:
        require_its_target(head, target)
    drafting_for(head, config)


def mean_length(contexts: list[list[int]]) -> int:
    """Tokens, rounded."""
    return round(statistics.mean(map(len, contexts)))


def typical_batch(contexts: list[list[int]], batch: int) -> list[list[int]]:
    """A typical batch of those that `measure_point` decodes: the one whose longest context is the median.

    At batch 1 it is one context of mean length, since the times of all single rows are added.
    """
    if batch == 1:
        return [fit(contexts[0], mean_length(contexts))]
    batches = row_batches(contexts, max(batch, len(contexts)), batch)
    return sorted(batches, key=lambda some: max(map(len, some)))[len(batches) // 2]


def drafting_for(head: Head | None, config: EvalConfig) -> Drafting:
    """How the head drafts, or the setting `eval.drafter`. Raises: ConfigError where nothing drafts."""
    drafting = find_drafting(head, config)
    if drafting is None:
        raise ConfigError("tune: give a head, or eval.drafter=ngram")
    return drafting


def why_unscheduled(recurrent: bool, drafting: Drafting) -> str | None:
    """Why the scheduler cannot be measured; None where it can. Args: recurrent: whether the target has such states."""
    if recurrent:
        return "the target has layers with recurrent states"
    return None if drafting.captures else "the host drafts, whose cycles cannot be captured"


def deepest(head: Head | None, search: TuneConfig) -> int:
    """`tune.depth`, or as many tokens as the head can draft in a chain, if they are fewer."""
    most = None if head is None else head.longest_chain
    return search.depth if most is None else min(search.depth, most)


def compared_trees(
    profiles: dict[str, Profile], search: TuneConfig, reference: TreeConfig | None = None
) -> list[TreeConfig]:
    """All trees that are compared, each once.

    Args: reference: the published static tree. A calibrated tree of its size is compared as well.
    """
    trees = [TreeConfig("chain", depth) for depth in range(1, search.depth + 1)]
    for k in search.k if f"dynamic{search.k[0]}" in profiles else []:
        for depth in range(1, search.depth + 1):
            sizes = {node_count(TreeConfig("dynamic", depth, k, total)) for total in search.total_tokens}
            trees += [TreeConfig("dynamic", depth, k, nodes + 1) for nodes in sorted(sizes) if nodes > 1]
    # one pass drafts all depths, so a tree over marginals has them all: what is chosen is how many nodes pay
    sizes = {total for total in search.total_tokens if "ddtree" in profiles}
    trees += [TreeConfig("ddtree", search.depth, total_tokens=total) for total in sorted(sizes)]
    static = profiles.get("static")
    if isinstance(static, StaticProfile):
        sizes = {total - 1 for total in search.total_tokens} | ({node_count(reference)} if reference else set())
        by_size = {len(paths): paths for paths in map(static.best_paths, sorted(sizes))}
        for nodes, paths in by_size.items():
            if nodes:
                depth = max(map(len, paths))
                trees.append(TreeConfig("static", depth, total_tokens=nodes + 1, paths=paths))
        trees += [reference] if reference else []
    return trees


def predictions(profiles: dict[str, Profile], costs: Costs, trees: list[TreeConfig]) -> list[Prediction]:
    """What is expected of every tree, by speed-up, the best first; of equals, that with fewer nodes first."""
    estimated = [(tree, profiles[drafting_of(tree)].tau(tree)) for tree in trees]
    return by_speedup([Prediction(tree, tau, expected_speedup(tau, costs, tree)) for tree, tau in estimated])


class _Session:
    """The runs of one tuning, and a count of those that are done."""

    def __init__(
        self,
        target: Target,
        head: Head | None,
        config: EvalConfig,
        search: TuneConfig,
        contexts: list[list[int]],
        progress: Progress | None,
    ):
        self.target, self.head, self.config, self.search, self.contexts = target, head, config, search, contexts
        self.progress, self.done, self.total = progress, 0, 0
        #: `tree_name` → τ of the tree's own run
        self.own_taus: dict[str, float] = {}
        self.decoder = Decoder(target, config)
        #: why nothing is measured with the scheduler; None where it can be
        self.unscheduled: str | None = None
        #: batch sizes at which it did not fit into memory
        self.without_room: list[int] = []
        own = head.draft_vocab_size if head is not None else None
        #: tokens that can be drafted
        self.draftable = own or target.dims.vocab_size

    def say(self, what: str = "", step: int = 0) -> None:
        self.done += step
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done), what)

    def expect(self, trees: list[TreeConfig]) -> None:
        measured = 1 + any(map(is_calibrated, trees)) + any(map(is_published, trees)) + (self.unscheduled is None)
        self.total = self.done + len(self.search.batch_sizes) * (measurements(trees) + 1 + measured)

    def build(self, tree: TreeConfig) -> Drafter:
        drafter = build_drafter(self.head, replace(self.config, tree=tree))
        assert drafter is not None
        return drafter

    def profiles(self, drafting: Drafting) -> tuple[dict[str, Profile], list[list[int]]]:
        """`drafting_of` → acceptance, and the contexts that costs are measured with."""
        depth, most = self.search.depth, max(self.search.total_tokens)
        trees = [TreeConfig("chain", depth)]
        if "dynamic" in drafting.kinds:
            trees += [TreeConfig("dynamic", depth, k, most) for k in self.search.k]
        if "ddtree" in drafting.kinds:
            trees.append(TreeConfig("ddtree", depth, total_tokens=most))
        if "static" in drafting.kinds:
            trees.append(recorded_tree(depth, min(PUBLISHED_RANKS, self.draftable), drafting.shared_candidates))
        self.total = len(trees) * -(-len(self.contexts) // PROFILE_BATCH)
        profiles: dict[str, Profile] = {}
        lengths: list[int] = []
        for tree in trees:
            profiles[drafting_of(tree)], answers = self._profile(tree, drafting.shared_candidates)
            lengths = lengths or answers
        if self.search.context is not None:
            return profiles, self.contexts
        # contexts halfway through their answers; each keeps its own length, as a batch waits for its longest context
        half, limits = round(statistics.mean(lengths) / 2), self.decoder.limits(self.contexts)
        return profiles, [
            fit(context, len(context) + min(half, limit // 2))
            for context, limit in zip(self.contexts, limits, strict=True)
        ]

    def _profile(self, tree: TreeConfig, shared: bool) -> tuple[Profile, list[int]]:
        """Decode the prompts with the largest tree of a kind: its profile, and the lengths of the answers."""
        shape = static_shape(static_paths(tree, tree.depth)) if tree.kind == "static" else None
        recorder = Recorder(self.build(tree))
        lengths: list[int] = []
        ranks = []
        self.say(f"acceptance of {drafting_of(tree)}")
        for decoded in self._decoded(recorder):
            lengths += [len(answer.tokens) for answer in decoded.answers]
            if shape is not None:
                ranks.append(recorded_ranks(shape, recorder.proposals, decoded.answers, shared))
            self.say(step=1)
        profile: Profile
        if shape is not None:
            profile = StaticProfile(np.concatenate(ranks), shape.ranks)
        else:
            profile = recorder.dynamic_profile() if recorder.ranks else recorder.chain_profile()
        if not profile.cycles:
            raise DataError("tune: the answers are too short to tell what is accepted: give longer ones")
        return profile, lengths

    def calibration(self, dataset: str, tasks: list[str | None]) -> tuple[Calibration | None, list[str]]:
        """The calibration of the longest chain; without one, a sentence that says why. Args: tasks: of the contexts."""
        self.say("calibration")
        try:
            # engines that read it draft as many as the head has, whatever depth was searched
            longest = None if self.head is None else self.head.longest_chain
            drafter = self.build(TreeConfig("chain", longest or self.search.depth))
            found = calibrate_drafter(
                self.decoder, drafter, task_after_task(self.contexts, tasks), dataset, rows=PROFILE_BATCH,
                seed=self.config.seed,
            )  # fmt: skip
        except (ConfigError, DataError) as error:
            return None, [f"not calibrated: {error}"]
        finally:
            # captured cycles keep their drafters in memory
            self.decoder.graphs.clear()
        return found, []

    def choices(self, halfway: list[list[int]], trees: list[TreeConfig], profiles: dict[str, Profile]) -> list[Choice]:
        """The choice at every batch size that fits into memory. Args: as `choose`."""
        self.expect(trees)
        made: list[Choice] = []
        for batch in sorted(set(self.search.batch_sizes)):
            try:
                made.append(self.choose(batch, halfway, trees, profiles))
            except torch.OutOfMemoryError:
                if not made:
                    raise
                self.say(f"batch {batch} does not fit into memory: it and larger ones are left out")
                break
        self.total = self.done
        self.say("done")
        return made

    def choose(
        self, batch: int, halfway: list[list[int]], trees: list[TreeConfig], profiles: dict[str, Profile]
    ) -> Choice:
        """Find the best tree at one batch size. Args: halfway: the contexts that costs are measured with."""
        rows = typical_batch(halfway, batch)
        self.say(f"costs at batch {batch}")
        costs = measure_costs(self.decoder, self.build, trees, rows, self.search.repeats, lambda: self.say(step=1))
        ranked = predictions(profiles, costs, trees)
        refined = by_speedup([self.refine(prediction, costs) for prediction in finalists(ranked)])
        self.say(step=1)
        chosen = [refined[0]]
        for best in (first_of(refined, is_calibrated), first_of(refined, is_published)):
            if best is not None and best != refined[0]:
                chosen.append(best)
        choice = Choice.of(costs, refined, [self.decode_in_full(prediction, batch) for prediction in chosen])
        if self.unscheduled is None:
            choice.scheduled = self.decode_scheduled(largest_like(choice.best.tree, trees), choice, batch)
        return choice

    def decode_in_full(self, prediction: Prediction, batch: int) -> Trial:
        """Decode all prompts plainly and with the tree."""
        self.say(f"decoding with {tree_name(prediction.tree)} at batch {batch}")
        measured = self._measured(self.build(prediction.tree), batch)
        self.say(step=1)
        return Trial(prediction, measured)

    def decode_scheduled(self, tree: TreeConfig, choice: Choice, batch: int) -> Scheduled | None:
        """The same with the scheduler, which drafts at most this tree; None where its cycles do not fit into memory."""
        self.say(f"decoding with the scheduler, up to {tree_name(tree)}, at batch {batch}")
        drafter = self.build(tree)
        scheduler = scheduler_for(drafter, tree)
        try:
            measured = self._measured(drafter, batch, scheduler)
        except torch.OutOfMemoryError:
            self.decoder.graphs.clear()
            self.decoder.drop_buffers()
            self.without_room.append(batch)
            return None
        finally:
            self.say(step=1)
        verified = scheduler.verified / scheduler.cycles if scheduler.cycles else None
        return Scheduled(tree, measured, choice.measured_speedup, verified)

    def _measured(self, drafter: Drafter, batch: int, scheduler: Scheduler = KEEP_ALL) -> dict[str, Any]:
        """`measure_point` on all prompts."""
        config = replace(self.config, sweep_prompts=min(self.search.prompts, len(self.contexts)))
        measured = measure_point(self.decoder, drafter, config, self.contexts, batch, scheduler)
        # captured cycles keep their drafters in memory
        self.decoder.graphs.clear()
        return measured

    def notes(self) -> list[str]:
        """Why the scheduler was not measured, and at which batch sizes."""
        if self.unscheduled is not None:
            return [f"nothing was scheduled: {self.unscheduled}"]
        return [f"batch {batch}: the scheduler's cycles do not fit into memory" for batch in self.without_room]

    def refine(self, prediction: Prediction, costs: Costs) -> Prediction:
        """The same with τ from the tree's own run over all prompts."""
        name = tree_name(prediction.tree)
        if name not in self.own_taus:
            self.say(f"acceptance of {name}")
            runs = self._decoded(self.build(prediction.tree))
            cycles = [cycle for decoded in runs for answer in decoded.answers for cycle in answer.cycles]
            # captured cycles keep their drafters in memory
            self.decoder.graphs.clear()
            self.own_taus[name] = acceptance(cycles).tau
        tau = self.own_taus[name]
        return Prediction(prediction.tree, tau, expected_speedup(tau, costs, prediction.tree))

    def _decoded(self, drafter: Drafter) -> Iterator[Decoded]:
        """Decode all prompts, batch after batch."""
        for number, start in enumerate(range(0, len(self.contexts), PROFILE_BATCH)):
            batch = self.contexts[start : start + PROFILE_BATCH]
            yield self.decoder.run(batch, drafter, self.decoder.limits(batch), self.config.seed + number)
