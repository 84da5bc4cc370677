"""What a tuning found: the trees that were compared, the choice at every batch size, and the whole for the report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headstart.eval.config import TreeConfig, tree_label
from headstart.eval.tuning.costs import Costs, drafting_of, node_count
from headstart.eval.tuning.served import step_rates
from headstart.eval.tuning.verdict import verdict_of_tuning
from headstart.heads.formats.calibration import Calibration
from headstart.heads.formats.choices import STEP_RATES, TOKENS_PER_BATCH, tokens_by_batch
from headstart.heads.provenance import command_line, git_revision, versions

#: largest relative difference between predicted and measured speed-up that counts as agreement
AGREEMENT = 0.1
#: best trees by estimate whose τ is measured in runs of their own
FINALISTS = 3


def expected_speedup(tau: float, costs: Costs, tree: TreeConfig) -> float:
    """τ · t_plain / t_cycle of a tree, while all rows of the batch decode (methods §11)."""
    return tau * costs.plain_s / costs.cycle_s(tree)


def is_published(tree: TreeConfig) -> bool:
    """Whether it is the published static tree, to which the calibrated ones are compared."""
    return tree.kind == "static" and tree.paths is None


def is_calibrated(tree: TreeConfig) -> bool:
    """Whether it is a static tree that was built from counts."""
    return tree.kind == "static" and tree.paths is not None


def tree_name(tree: TreeConfig) -> str:
    """A short name, such as `chain3`, `dynamic k10 d6 n47`, `ddtree d8 n31`, `static n15` or `published n63`."""
    nodes = node_count(tree)
    if tree.kind == "dynamic":
        return f"dynamic k{tree.k} d{tree.depth} n{nodes}"
    if tree.kind == "ddtree":
        return f"ddtree d{tree.depth} n{nodes}"
    if tree.kind == "chain":
        return f"chain{nodes}"
    return f"{'published' if is_published(tree) else 'static'} n{nodes}"


def overrides(tree: TreeConfig) -> str:
    """The `eval.tree.*` overrides of the command line that give this tree."""
    default = TreeConfig()
    changed = [f.name for f in fields(TreeConfig) if getattr(tree, f.name) != getattr(default, f.name)]
    words = []
    for name in changed:
        value = getattr(tree, name)
        text = json.dumps(value).replace(" ", "") if isinstance(value, list) else str(value)
        words.append(f"eval.tree.{name}={text}")
    return shlex.join(words)


@dataclass(frozen=True)
class Prediction:
    """What is expected of a tree at one batch size: its τ, and the speed-up that follows from it and the costs."""

    tree: TreeConfig
    tau: float
    speedup: float

    def to_json(self) -> dict[str, Any]:
        return {
            "label": tree_label(self.tree, node_count(self.tree)), "tree": asdict(self.tree), "tau": self.tau,
            "predicted_speedup": self.speedup, "overrides": overrides(self.tree),
        }  # fmt: skip


def by_speedup(made: list[Prediction]) -> list[Prediction]:
    """The best first; of equals, the tree with fewer nodes."""
    return sorted(made, key=lambda prediction: (-prediction.speedup, node_count(prediction.tree)))


def first_of(ranked: list[Prediction], kind: Callable[[TreeConfig], bool]) -> Prediction | None:
    """The best one whose tree satisfies `kind`."""
    return next((prediction for prediction in ranked if kind(prediction.tree)), None)


def finalists(ranked: list[Prediction]) -> list[Prediction]:
    """The best few, the best chain, the best calibrated tree and the published one.

    They get runs of their own, which may show that another one is the fastest.
    """
    chosen = ranked[:FINALISTS]
    for kind in (lambda tree: tree.kind == "chain", is_calibrated, is_published):
        best = first_of(ranked, kind)
        if best is not None and best not in chosen:
            chosen = [*chosen, best]
    return chosen


@dataclass(frozen=True)
class Trial:
    """A tree that was decoded in full: its prediction, and its `measure_point`.

    `measured_speedup` is per row: rows which end early do not count.
    """

    prediction: Prediction
    measured: dict[str, Any]

    @property
    def measured_speedup(self) -> float:
        return float(self.measured["row_speedup"])

    @property
    def agrees(self) -> bool:
        return abs(self.prediction.speedup / self.measured_speedup - 1) <= AGREEMENT

    def to_json(self) -> dict[str, Any]:
        return {
            **self.prediction.to_json(), "nodes": node_count(self.prediction.tree),
            "measured_speedup": self.measured_speedup, "measured_tau": self.measured["tau"], "agrees": self.agrees,
            "measured": self.measured,
        }  # fmt: skip


@dataclass(frozen=True)
class Scheduled:
    """Decoding in full with the scheduler.

    Attributes:
        tree: the largest that it drafts.
        measured: `measure_point`. measured_speedup: as `Trial`'s.
        against_fixed: its speed-up over that of the best fixed draft.
        verified_per_cycle: rows of the target's forward that a sequence took in a cycle, its root included.
    """

    tree: TreeConfig
    measured: dict[str, Any]
    fixed_speedup: float
    verified_per_cycle: float | None

    @property
    def measured_speedup(self) -> float:
        return float(self.measured["row_speedup"])

    @property
    def against_fixed(self) -> float:
        return self.measured_speedup / self.fixed_speedup

    def kept(self) -> dict[str, Any]:
        """For the head's sidecar."""
        return {
            "label": tree_label(self.tree, node_count(self.tree)), "tree": asdict(self.tree),
            "measured_speedup": self.measured_speedup, "against_fixed": self.against_fixed,
            "verified_per_cycle": self.verified_per_cycle,
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            **self.kept(), "measured_tau": self.measured["tau"], "overrides": self.overrides, "measured": self.measured
        }  # fmt: skip

    @property
    def overrides(self) -> str:
        """The overrides of the command line that decode like this."""
        return f"eval.scheduler=true {overrides(self.tree)}".strip()


def largest_like(best: TreeConfig, trees: Iterable[TreeConfig]) -> TreeConfig:
    """The largest tree that is drafted like `best`; of equals, the deepest."""
    like = [tree for tree in trees if drafting_of(tree) == drafting_of(best)]
    return max(like, key=lambda tree: (node_count(tree), tree.depth))


@dataclass
class Choice:
    """What to do at one batch size.

    Attributes:
        best: of the trees that were measured the fastest, even if it is slower than plain decoding; its τ comes from
            its own run. Measured are the best by prediction and, where static trees are drafted, the two below.
        best_chain: the fastest chain by prediction, since serving engines mostly draft chains; None where none was
            searched.
        measured: `measure_point` of `best`.
        calibrated, published: the best calibrated tree by prediction, and the published one; None without static trees.
        passed_over: the best by prediction, where another one was faster.
        scheduled: decoding with the scheduler; None where that was not measured (`Tuning.notes` say why).
    """

    costs: Costs
    best: Prediction
    best_chain: Prediction | None
    measured: dict[str, Any]
    calibrated: Trial | None = None
    published: Trial | None = None
    passed_over: Trial | None = None
    scheduled: Scheduled | None = None

    @classmethod
    def of(cls, costs: Costs, refined: list[Prediction], trials: list[Trial]) -> Choice:
        """Args: refined: by predicted speed-up, the best first. trials: of the first of them, and more."""
        best = max(trials, key=lambda trial: trial.measured_speedup)

        def trial_of(prediction: Prediction | None) -> Trial | None:
            return next((trial for trial in trials if trial.prediction is prediction), None)

        return cls(
            costs,
            best.prediction,
            first_of(refined, lambda tree: tree.kind == "chain"),
            best.measured,
            calibrated=trial_of(first_of(refined, is_calibrated)),
            published=trial_of(first_of(refined, is_published)),
            passed_over=None if best.prediction is refined[0] else trial_of(refined[0]),
        )

    @property
    def speculate(self) -> bool:
        return self.measured_speedup > 1

    @property
    def launched(self) -> int:
        """Drafted tokens to launch an engine with, which drafts chains; 0 where no chain pays."""
        if not self.speculate or self.best.tree.kind == "chain":
            return self.best.tree.depth if self.speculate else 0
        chain = self.best_chain
        return chain.tree.depth if chain is not None and chain.speedup > 1 else 0

    @property
    def measured_speedup(self) -> float:
        return Trial(self.best, self.measured).measured_speedup

    @property
    def agrees(self) -> bool:
        return Trial(self.best, self.measured).agrees

    def to_json(self) -> dict[str, Any]:
        def shown(made: Trial | Prediction | None) -> dict[str, Any] | None:
            return None if made is None else made.to_json()

        return {
            "batch": self.costs.batch, "speculate": self.speculate, "launched": self.launched, **self.best.to_json(),
            "measured_speedup": self.measured_speedup, "measured_tau": self.measured["tau"], "agrees": self.agrees,
            "best_chain": shown(self.best_chain), "calibrated": shown(self.calibrated),
            "published": shown(self.published), "passed_over": shown(self.passed_over),
            "scheduled": None if self.scheduled is None else self.scheduled.to_json(),
            "costs": self.costs.to_json(), "measured": self.measured,
        }  # fmt: skip


@dataclass
class Tuning:
    """The result of `tune`, for the report and the head's sidecar."""

    drafter: str
    target: dict[str, Any]
    data: dict[str, Any]
    device: str
    dtype: str
    temperature: float
    context: int
    prompts: int
    cycles: dict[str, int]
    #: `tree_name` → estimated τ, of every tree that was compared
    taus: dict[str, float]
    choices: list[Choice]
    #: of every head: positions, and how often the target's token was its candidate of rank r (`HeadCounts.to_json`)
    rank_accuracy: list[dict[str, Any]] = field(default_factory=list)
    #: of every static tree: name, nodes, levels, τ of the recorded cycles and by both estimates, paths
    static_trees: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: of the longest chain; None where there is none (`notes` say why)
    calibration: Calibration | None = None
    device_type: str | None = None

    @property
    def verdict(self) -> dict[str, Any]:
        """Whether drafting pays: `Verdict.to_json`."""
        return verdict_of_tuning(self._facts()).to_json()

    def _facts(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "choices"}
        return {**values, "choices": [choice.to_json() for choice in self.choices]}

    def to_json(self) -> dict[str, Any]:
        return {
            **self._facts(), "verdict": self.verdict, "command": command_line(),
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "versions": versions(), "git_revision": git_revision(),
        }  # fmt: skip

    def entry(self) -> dict[str, Any]:
        """For the head's sidecar: the choice at each batch size, tables for engines, and what was measured under."""
        kept = ("label", "tree", "speculate", "tau", "predicted_speedup", "measured_speedup", "agrees", "best_chain")
        batches = {
            str(c.costs.batch): {
                **{name: c.to_json()[name] for name in kept}, "scheduled": c.scheduled.kept() if c.scheduled else None
            }
            for c in self.choices
        }  # fmt: skip
        return {
            "device": self.device, "dtype": self.dtype, "temperature": self.temperature, "context": self.context,
            "data": self.data, "batches": batches, **self.tables(), "versions": versions(),
            "git_revision": git_revision(),
        }  # fmt: skip

    def tables(self) -> dict[str, Any]:
        """Tables that engines read (formats/choices.py).

        Steps per second are for engines that go by a confidence head.
        """
        made: dict[str, Any] = {TOKENS_PER_BATCH: tokens_by_batch({c.costs.batch: c.launched for c in self.choices})}
        if self.calibration is not None and self.calibration.source == "confidence":
            made[STEP_RATES] = step_rates([choice.costs for choice in self.choices])
        return {name: table for name, table in made.items() if table}
