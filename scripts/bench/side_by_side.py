"""Ways of decoding, measured side by side: plainly, with fixed drafts, with drafts that a scheduler chooses from."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.bench.recordings import Recording
from headstart.bench.replay import ReplayedDrafter
from headstart.eval.config import TreeConfig
from headstart.eval.decoding.decode import Cycle, Decoded
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.measuring.metrics import Timed, acceptance, expected_tau
from headstart.eval.measuring.sweep import fit
from headstart.eval.scheduling.throughput import ThroughputScheduler, scheduler_for
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError

#: tokens per row that a way decodes before it is measured
WARM_UP = 16
#: shapes of a scheduler's cycles that are told, the most frequent ones
SHOWN_SHAPES = 4


@dataclass
class Row:
    """One way of decoding at one batch size: a row of docs/results/scheduler.json.

    Attributes:
        head, target: the family (or --name), and the target's name or the preset's.
        scheduler: on, off (all that is drafted is verified) or plain (nothing is drafted).
        tree: name of the draft; "plain" without one.
        tau: tokens committed per target forward of a row, over all runs.
        tokens_per_s: of the whole batch while it decodes, without prefill; the median of `runs`.
        verified_tokens_per_cycle: the target's rows that a sequence takes in a cycle, on average: the root and the
            nodes that are verified.
        ece_before, ece_after: expected calibration error of the probability that the first k drafts are all accepted,
            over all k together (`mean_error`), as the head says it and after its calibration. Of a chain, on prompts
            that are not timed. None where it was not measured. Where acceptance is replayed, the recorded head's.
        context: tokens of a context, the median.
        prompts: contexts decoded per run.
        speedup: tokens_per_s ÷ that of plain decoding in the same command.
        cycles: target forwards of the rows, over all runs.
        active_rows: rows that a cycle decodes, on average. It is below the batch because the last contexts end one by
            one.
        same_answers: share of the answers that are plain decoding's, token by token. None unless acceptance is measured
            and greedy.
        acceptance: measured; synthetic (the same rates in all cycles); or replayed (every cycle has those of a recorded
            one, see replay.py), which is synthetic as well: what the target says decides nothing.
        expected_tau: what the rates give for the levels that were verified: tau without the luck of the draw. None
            where acceptance is measured.
        rates: probability of acceptance by level where it is synthetic; where it is replayed, its mean over the
            recorded cycles.
        runs: tokens per second of every run.
    """

    head: str
    target: str
    batch: int
    temperature: float
    scheduler: str
    tree: str
    tau: float
    tokens_per_s: float
    verified_tokens_per_cycle: float
    ece_before: float | None
    ece_after: float | None
    card: str
    command: str
    git_revision: str
    versions: dict[str, str]
    dtype: str
    context: int
    data: str
    prompts: int
    max_new_tokens: int
    speedup: float
    cycles: int
    active_rows: float | None
    same_answers: float | None
    acceptance: str
    expected_tau: float | None
    rates: list[float] | None
    runs: list[float]

    @property
    def steady(self) -> float:
        """Tokens per second without the luck of the draw; tokens_per_s where acceptance is measured."""
        return self.tokens_per_s * (self.tau if self.expected_tau is None else self.expected_tau) / self.tau


def parse_tree(label: str, depth: int) -> TreeConfig:
    """The draft that a label names. Args: depth: levels of a tree whose label does not say them.

    >>> parse_tree("dynamic:k4:n16", 5)
    TreeConfig(kind='dynamic', depth=5, k=4, total_tokens=16, sample=True, paths=None)

    Raises: ConfigError for a label of another form.
    """
    if re.fullmatch(r"chain[1-9]\d*", label):
        return TreeConfig("chain", int(label.removeprefix("chain")))
    kind, *parts = label.split(":")
    found = [re.fullmatch(r"([kdn])([1-9]\d*)", part) for part in parts]
    given = {match[1]: int(match[2]) for match in found if match}
    allowed = {"dynamic": "kdn", "ddtree": "dn", "static": "dn"}.get(kind, "")
    if len(given) < len(parts) or given.get("n", 1) < 2 or not set(given) <= set(allowed):
        raise ConfigError(
            f"draft {label!r}: expected chain5, dynamic:k4:d5:n16, ddtree:n16 or static:n16; n is 2 or more"
        )
    tree = TreeConfig(kind, given.get("d", depth), total_tokens=given["n"])
    return replace(tree, k=given.get("k", tree.k))


def rows_computed(scheduler: Scheduler) -> float | None:
    """The target's rows that sequences took under a scheduler so far; None where it does not count them."""
    verified = getattr(scheduler, "verified", None)
    return None if verified is None else float(verified)


@dataclass
class Way:
    """One way of decoding.

    Attributes:
        scheduler, tree: as in Row.
        largest: the largest tree that is drafted; None without a drafter.
        chooser: the scheduler itself.
    """

    scheduler: str
    tree: str
    drafter: Drafter | None
    largest: TreeConfig | None = None
    chooser: Scheduler = KEEP_ALL

    @property
    def nodes(self) -> int:
        """Most drafts of a cycle."""
        return 0 if self.drafter is None else self.drafter.max_nodes

    def __str__(self) -> str:
        return f"{self.tree}, scheduled" if self.scheduler == "on" else self.tree


@dataclass
class Runs:
    """What the measured runs of one way gave. Attributes: rows: of the target, that sequences took in each run."""

    decoded: list[Decoded] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)

    def add(self, way: Way, decoded: Decoded, computed: float | None) -> None:
        """Args: computed: rows that the scheduler counted meanwhile, see `rows_computed`; None = all drafts."""
        cycles = sum(len(answer.cycles) for answer in decoded.answers)
        self.rows.append(cycles * (1 + way.nodes) if computed is None else computed)
        self.decoded.append(decoded)

    @property
    def timed(self) -> Timed:
        timed = Timed()
        for decoded in self.decoded:
            timed.add(decoded)
        return timed

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every run."""
        return [decoded.decode_tokens / decoded.decode_s if decoded.decode_s else 0.0 for decoded in self.decoded]

    @property
    def cycles(self) -> list[Cycle]:
        """All cycles of all rows."""
        return [cycle for decoded in self.decoded for answer in decoded.answers for cycle in answer.cycles]

    def expected_tau(self, rates: list[float], replay: Recording | None) -> float:
        """Mean over cycles of the τ that the rates give for their levels; 1 without a cycle.

        Args: replay: the recording whose cycles have rates of their own.
        """
        if replay is None:
            taus = [expected_tau(rates[:levels]) for levels in range(len(rates) + 1)]
            expected = [taus[min(cycle.drafted, len(rates))] for cycle in self.cycles]
        else:
            expected = [tau for decoded in self.decoded for tau in replay.expected_taus(decoded.answers)]
        return statistics.fmean(expected) if expected else 1.0

    def same_answers(self, plain: Runs) -> float:
        """Share of the first run's answers that are the other way's."""
        pairs = zip(self.decoded[0].answers, plain.decoded[0].answers, strict=True)
        return statistics.mean(mine.tokens == other.tokens for mine, other in pairs)


@dataclass
class Bench:
    """A target with its head, and how they are measured.

    Attributes:
        names: fields of Row that all rows share.
        stop: whether answers end at the target's stop tokens.
        replay: recorded cycles that say how drafts are accepted; None = the decoder's config does.
    """

    decoder: Decoder
    head: Head
    names: dict[str, Any]
    repeats: int
    stop: bool = True
    replay: Recording | None = None

    @property
    def tokens(self) -> int:
        return self.decoder.config.max_new_tokens

    def drafter(self, tree: TreeConfig) -> Drafter:
        drafter = build_drafter(self.head, replace(self.decoder.config, tree=tree))
        assert drafter is not None
        return drafter if self.replay is None else ReplayedDrafter(drafter, self.replay)

    def ways(self, fixed: Sequence[str], scheduled: Sequence[str]) -> list[Way]:
        """Plain decoding, the fixed drafts and the scheduled ones. Chains beyond the head's depths are shortened."""
        ways = {("plain", "plain"): Way("plain", "plain", None)}
        for scheduler, labels in (("off", fixed), ("on", scheduled)):
            for label in labels:
                tree = parse_tree(label, self.head.depth)
                drafter = self.drafter(tree)
                name = f"chain{drafter.max_nodes}" if tree.kind == "chain" else label
                ways.setdefault((scheduler, name), Way(scheduler, name, drafter, tree))
        return list(ways.values())

    def point(self, ways: list[Way], contexts: list[list[int]], batch: int) -> list[Row]:
        """The rows of one batch size. What distinguishes them is printed as JSON lines, then a summary."""
        measured = self.measure(ways, contexts, batch)
        rows = []
        for way, runs in zip(ways, measured, strict=True):
            own = self._fields(way, runs, measured[0], contexts, batch)
            print(json.dumps(rounded(own), ensure_ascii=False), flush=True)
            rows.append(Row(**self.names, **own))
        choosers = [(way.tree, way.chooser) for way in ways if isinstance(way.chooser, ThroughputScheduler)]
        for line in (*summary(rows), *(line for tree, chooser in choosers for line in chosen(tree, chooser, batch))):
            print(line, flush=True)
        return rows

    def measure(self, ways: list[Way], contexts: list[list[int]], batch: int) -> list[Runs]:
        """Run every way `repeats` times, by turns, after a warm-up. Every repeat draws by a seed of its own."""
        self.warm_up(ways, contexts, batch)
        measured = [Runs() for _ in ways]
        for number in range(self.repeats):
            for way, runs in zip(ways, measured, strict=True):
                before = rows_computed(way.chooser)
                decoded = self._run(way, contexts, batch, self.tokens, number)
                after = rows_computed(way.chooser)
                runs.add(way, decoded, None if before is None or after is None else after - before)
                print(
                    f"  batch {batch} {way}: {runs.rates[-1]:,.0f} tokens/s, decoding {decoded.decode_s:.2f} s, "
                    f"prefill {decoded.prefill_s:.1f} s", flush=True,
                )  # fmt: skip
        return measured

    def warm_up(self, ways: list[Way], contexts: list[list[int]], batch: int) -> None:
        """Decode a little in every way, which makes schedulers and buffers and captures cycles.

        The largest drafts come first, with a context that is as long as any will become: the buffers then fit all ways,
        and no cycle is captured twice.
        """
        longest = max(contexts, key=len)
        grown = fit(longest, len(longest) + max(self.tokens - WARM_UP, 0))
        given = [grown, *contexts[: batch - 1]]
        for way in sorted(ways, key=lambda way: -way.nodes):
            began = time.perf_counter()
            if way.scheduler == "on" and way.drafter is not None and way.largest is not None:
                way.chooser = scheduler_for(way.drafter, way.largest)
            self._run(way, given, batch, min(WARM_UP, self.tokens))
            print(f"  batch {batch} {way}: warm-up {time.perf_counter() - began:.1f} s", flush=True)
            given = contexts[:batch]
        if self.decoder.slow is not None:
            print(f"WARNING: {self.decoder.slow}", flush=True)

    def _run(self, way: Way, contexts: list[list[int]], batch: int, tokens: int, number: int = 0) -> Decoded:
        return self.decoder.run(
            contexts, way.drafter, tokens, self.decoder.config.seed + number, stop=self.stop, rows=batch,
            scheduler=way.chooser,
        )  # fmt: skip

    def _fields(self, way: Way, runs: Runs, plain: Runs, contexts: list[list[int]], batch: int) -> dict[str, Any]:
        """The fields of Row that are not in `names`."""
        config, timed = self.decoder.config, runs.timed
        accepted, rates = acceptance(runs.cycles), config.synthetic_acceptance
        rate = statistics.median(runs.rates)
        greedy = rates is None and config.temperature == 0
        return {
            "batch": batch, "temperature": config.temperature, "scheduler": way.scheduler, "tree": way.tree,
            "tau": accepted.tau, "tokens_per_s": rate,
            "verified_tokens_per_cycle": sum(runs.rows) / max(accepted.forwards, 1),
            "context": round(statistics.median(map(len, contexts))), "prompts": len(contexts),
            "max_new_tokens": config.max_new_tokens, "speedup": rate / statistics.median(plain.rates),
            "cycles": accepted.forwards, "active_rows": timed.active_rows,
            "same_answers": runs.same_answers(plain) if greedy else None,
            "expected_tau": None if rates is None else runs.expected_tau(rates, self.replay), "runs": runs.rates,
        }  # fmt: skip


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """The same with fractions of four digits, for reading."""
    return {
        name: [round(x, 4) for x in value] if isinstance(value, list)
        else round(value, 4) if isinstance(value, float) else value
        for name, value in values.items()
    }  # fmt: skip


def chosen(tree: str, chooser: ThroughputScheduler, batch: int) -> Iterator[str]:
    """What the scheduler drafted in most cycles, how long such cycles take, and what it expected of them."""
    shapes = chooser.to_json()[str(batch)]["shapes"]
    total = max(sum(shape["cycles"] for shape in shapes), 1)
    for shape in sorted(shapes, key=lambda shape: -shape["cycles"])[:SHOWN_SHAPES]:
        if shape["cycles"]:
            levels = {None: "all levels", 0: "nothing"}.get(shape["levels"], f"{shape['levels']} levels")
            nodes = "" if shape["nodes"] is None else f" of {shape['nodes']} nodes a row"
            rows = "" if shape["rows"] is None else f" cut to {shape['rows']} rows"
            yield (
                f"  {tree}, scheduled: {shape['cycles'] / total:.1%} of cycles draft {levels}{nodes}{rows}; "
                f"{shape['ms']:.4f} ms, {shape['tokens_per_s']:,.0f} tokens/s of a row expected"
            )


def summary(rows: list[Row]) -> Iterator[str]:
    """What drafts gain at one batch size, in words. Args: rows: of all ways, plain decoding first."""
    plain, *others = rows
    fixed = [row for row in others if row.scheduler == "off"]
    best = max(fixed, key=lambda row: row.steady, default=plain)
    better = max(plain.steady, best.steady)
    luck = "" if plain.expected_tau is None else ", gains without the luck of the draw"
    yield f"batch {plain.batch}: plain {plain.tokens_per_s:,.0f} tokens/s{luck}"
    if fixed:
        yield f"  best fixed draft {best.tree}: {best.steady / plain.steady:.3f} × plain, τ {best.tau:.2f}"
    for row in others:
        if row.scheduler == "on":
            gains = f"{row.steady / plain.steady:.3f} × plain"
            if fixed:
                gains += f", {row.steady / best.steady:.3f} × the best fixed draft"
            gains += f", {row.steady / better:.3f} × the better of both"
            cost = f"τ {row.tau:.2f}, {row.verified_tokens_per_cycle:.2f} rows per cycle"
            yield f"  {row.tree}, scheduled: {gains}; {cost}"
    same = [f"{row.tree} {row.same_answers:.1%}" for row in others if row.same_answers is not None]
    if same:
        yield f"  answers that are plain decoding's, token by token: {', '.join(same)}"
