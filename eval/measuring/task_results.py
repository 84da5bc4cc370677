"""What an evaluation measures task by task, and the report of it, for Headstart's own loop and for servers alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Cycle
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.measuring.metrics import Pace, Timed, acceptance, bootstrap_speedup, bootstrap_tau, speedup
from headstart.eval.measuring.report import Report, Section
from headstart.eval.prompts import describe_data
from headstart.heads.provenance import command_line, git_revision, versions


@dataclass
class TaskResults:
    """What was measured on one task.

    Attributes:
        prompts: id(prompt) of those that were asked.
        cycles: by id(prompt), or by batch where a server answered several prompts at once: the bootstrap draws these.
        plain, speculative: times of both ways of decoding.
        paces: by id(prompt), at batch 1 only: in a larger batch a prompt's time depends on the other rows.
        sequences, identical: answers that were decoded in both ways, and those of them that are the same.
        divergences: where the others differ first.
    """

    prompts: set[int] = field(default_factory=set)
    cycles: dict[int, list[Cycle]] = field(default_factory=dict)
    plain: Timed = field(default_factory=Timed)
    speculative: Timed = field(default_factory=Timed)
    paces: dict[int, Pace] = field(default_factory=dict)
    sequences: int = 0
    identical: int = 0
    divergences: list[dict[str, Any]] = field(default_factory=list)


def section_of(tasks: list[TaskResults], config: EvalConfig, identity: bool) -> Section:
    """The numbers of some tasks together. Args: identity: whether answers were compared with plain decoding."""
    units = [cycles for results in tasks for cycles in results.cycles.values()]
    accepted = acceptance(cycle for cycles in units for cycle in cycles)
    plain = Timed.sum(results.plain for results in tasks)
    speculative = Timed.sum(results.speculative for results in tasks)
    paces = [pace for results in tasks for pace in results.paces.values()]
    same = {name: sum(getattr(results, name) for results in tasks) for name in ("sequences", "identical")}
    return Section(
        prompts=sum(len(results.prompts) for results in tasks),
        forwards=accepted.forwards,
        tokens=accepted.tokens,
        tau=accepted.tau,
        tau_ci95=bootstrap_tau(units, config.seed),
        per_position_acceptance=accepted.per_position,
        per_position_conditional=accepted.per_position_conditional,
        tokens_per_s=speculative.tokens_per_s,
        baseline_tokens_per_s=plain.tokens_per_s,
        speedup=speedup(speculative.tokens_per_s, plain.tokens_per_s),
        identity=same if identity else None,
        speedup_ci95=bootstrap_speedup(paces, config.seed),
        row_speedup=speedup(speculative.row_tokens_per_s, plain.row_tokens_per_s),
        latency={"baseline": plain.latency(), "speculative": speculative.latency()},
    )


def report_of(
    config: EvalConfig,
    tasks: dict[str, TaskResults],
    *,
    identity: bool = False,
    timing: dict[str, float | None] | None = None,
    **about: Any,
) -> Report:
    """The report of everything that was measured.

    Args:
        identity: see section_of.
        timing: further entries of the report's `timing`.
        about: the Report's other fields.
    """
    sampling, total = Sampling.from_config(config), section_of(list(tasks.values()), config, identity)
    # which rule ran is a fact of its own (Report.verification), and a server has its own rule
    processors = {name: value for name, value in asdict(sampling).items() if name != "verification"}
    divergences = [case for results in tasks.values() for case in results.divergences]
    fields = {
        "data": describe_data(config.data),
        "temperature": float(config.temperature),
        "lossless": not sampling.lossy,
        "synthetic": None if sampling.synthetic is None else list(sampling.synthetic),
        "batch_size": config.batch_size,
        "max_new_tokens": config.max_new_tokens,
        **total.numbers(),
        "tasks": {task: section_of([results], config, identity) for task, results in tasks.items()},
        "greedy_identity": None,
        "timing": {**_seconds(list(tasks.values())), **(timing or {})},
        "sampling": {**_jsonable(processors), "acceptance": config.acceptance, "seed": config.seed},
        "recipe": {},
        "versions": versions(),
        "git_revision": git_revision(),
        "command": command_line(),
    }
    if total.identity is not None:
        fields["greedy_identity"] = {"dtype": about["dtype"], **total.identity, "divergences": divergences}
    return Report(**{**fields, **about})


def _seconds(tasks: list[TaskResults]) -> dict[str, float | None]:
    """Seconds of prefill and decoding, of both ways; None where a way did not run."""
    seconds: dict[str, float | None] = {}
    for prefix, parts in (("", [r.speculative for r in tasks]), ("baseline_", [r.plain for r in tasks])):
        ran = any(part.first_s for part in parts)
        seconds[f"{prefix}prefill_s"] = sum(part.prefill_s for part in parts) if ran else None
        seconds[f"{prefix}decode_s"] = sum(part.decode_s for part in parts) if ran else None
    return seconds


def _jsonable(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
