"""What an evaluation gathers, task by task, and the report that is made of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headstart.eval.config import EvalConfig, tree_label
from headstart.eval.decoding.decode import Cycle
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import Drafter
from headstart.eval.measuring.generate import GenerateBaseline
from headstart.eval.measuring.metrics import (
    RESAMPLES,
    Pace,
    Timed,
    acceptance,
    bootstrap_speedup,
    bootstrap_tau,
    expected_tau,
)
from headstart.eval.measuring.report import Report, Section
from headstart.eval.prompts import describe_data
from headstart.heads.base import Head
from headstart.heads.provenance import command_line, device_name, git_revision, versions
from headstart.heads.targets.target import Target


@dataclass
class Found:
    """Everything that was measured: by task, over batches and contexts, and with HF `generate`."""

    tallies: dict[str, Tally]
    sweeps: dict[str, Any] = field(default_factory=dict)
    generate: GenerateBaseline | None = None
    #: why transformers' own forward ran where the fused one would have been faster
    unfused: str | None = None
    #: seconds that capturing cycles took, which are part of no other time
    capture_s: float = 0.0
    #: seconds from a loaded target to the first measured token: choosing kernels, compiling, capturing, warming up
    ready_s: float | None = None
    #: milliseconds of a cycle's parts (parts.cycle_parts)
    parts: dict[str, float] | None = None
    #: what the target's positions cut off
    notes: list[str] = field(default_factory=list)


@dataclass
class Tally:
    """What a task has gathered; cycles are kept per prompt for the bootstrap."""

    cycles: dict[int, list[Cycle]] = field(default_factory=dict)
    plain: Timed = field(default_factory=Timed)
    speculative: Timed = field(default_factory=Timed)
    #: by prompt, batch 1 only: what other rows of a batch take is not a prompt's own
    paces: dict[int, Pace] = field(default_factory=dict)
    sequences: int = 0
    identical: int = 0
    divergences: list[dict[str, Any]] = field(default_factory=list)


def section_of(tallies: list[Tally], config: EvalConfig, identity: bool) -> Section:
    """The numbers of some tasks together."""
    per_prompt = [cycles for tally in tallies for cycles in tally.cycles.values()]
    found = acceptance(cycle for cycles in per_prompt for cycle in cycles)
    plain = Timed.sum(tally.plain for tally in tallies)
    speculative = Timed.sum(tally.speculative for tally in tallies)
    rates = plain.tokens_per_s, speculative.tokens_per_s
    row_rates = plain.row_tokens_per_s, speculative.row_tokens_per_s
    interval = bootstrap_tau(per_prompt, RESAMPLES, config.seed)
    paces = [pace for tally in tallies for pace in tally.paces.values()]
    speeds = bootstrap_speedup(paces, RESAMPLES, config.seed)
    return Section(
        prompts=len(per_prompt),
        forwards=found.forwards,
        tokens=found.tokens,
        tau=found.tau,
        tau_ci95=None if interval is None else list(interval),
        per_position_acceptance=found.per_position,
        per_position_conditional=found.per_position_conditional,
        tokens_per_s=rates[1],
        baseline_tokens_per_s=rates[0],
        speedup=rates[1] / rates[0] if rates[0] and rates[1] else None,
        identity={"sequences": sum(t.sequences for t in tallies), "identical": sum(t.identical for t in tallies)}
        if identity
        else None,
        speedup_ci95=None if speeds is None else list(speeds),
        row_speedup=row_rates[1] / row_rates[0] if row_rates[0] and row_rates[1] else None,
        latency={"baseline": plain.latency(), "speculative": speculative.latency()},
    )


def report_of(
    target: Target,
    head: Head | None,
    drafter: Drafter | None,
    config: EvalConfig,
    dtype: str,
    prompts: int,
    measured: Found,
    recipe: dict[str, Any] | None,
    head_info: dict[str, Any] | None,
) -> Report:
    """The report of everything that was measured. Args: prompts: how many; measured: what came of them."""
    sampling, tallies = Sampling.from_config(config), measured.tallies
    identity = sampling.greedy and not sampling.lossy and config.baseline and drafter is not None
    total = section_of(list(tallies.values()), config, identity)
    divergences = [case for tally in tallies.values() for case in tally.divergences]
    timing: dict[str, float | None] = {
        "prefill_s": sum(t.speculative.prefill_s for t in tallies.values()) if drafter is not None else None,
        "decode_s": sum(t.speculative.decode_s for t in tallies.values()) if drafter is not None else None,
        "baseline_prefill_s": sum(t.plain.prefill_s for t in tallies.values()) or None,
        "baseline_decode_s": sum(t.plain.decode_s for t in tallies.values()) or None,
        "capture_s": measured.capture_s or None,
        "ready_s": measured.ready_s,
    }
    notes = []
    if sampling.synthetic is not None:
        rates = ", ".join(f"{rate:g}" for rate in sampling.synthetic)
        notes.append(
            f"SYNTHETIC acceptance ({rates} by level, τ {expected_tau(sampling.synthetic):.3f} if every row drafts all "
            "levels): the text is not the target's, τ is what was asked for and not the head's; times are real"
        )
    elif sampling.lossy:
        notes.append("typical acceptance is LOSSY: the output distribution is not the target's")
    if measured.unfused is not None:
        notes.append(f"the target ran by transformers' own forward, slower than the fused one: {measured.unfused}")
    notes += measured.notes
    if target.device.type == "cpu":
        notes.append("on a CPU more tokens per forward cost more time: τ carries over to a GPU, the speed-up does not")
    return Report(
        target=target.fingerprint(),
        head=_describe(head, head_info),
        drafter=drafter.name if drafter is not None else "plain",
        data=describe_data(config.data),
        dtype=dtype,
        device=device_name(target.device),
        temperature=float(config.temperature),
        lossless=not sampling.lossy,
        synthetic=None if sampling.synthetic is None else list(sampling.synthetic),
        tree={**_plain_dict(config.tree), "label": tree_label(config.tree, drafter.max_nodes if drafter else 0)},
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        prompts=prompts,
        **total.headline(),
        tasks={task: section_of([tally], config, identity) for task, tally in tallies.items()},
        greedy_identity={"dtype": dtype, **total.identity, "divergences": divergences} if total.identity else None,
        timing=timing,
        sampling={**_jsonable(asdict(sampling)), "acceptance": config.acceptance, "seed": config.seed},
        recipe=recipe or {},
        versions=versions(),
        git_revision=git_revision(),
        notes=notes,
        sweeps=measured.sweeps or None,
        cycle=measured.parts,
        generate=None if measured.generate is None else measured.generate.report(),
        command=command_line(),
    )


def _describe(head: Head | None, head_info: dict[str, Any] | None) -> dict[str, Any] | None:
    if head is None:
        return head_info
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return {"type": head.family, "config": _plain_dict(head.config), "parameters": parameters, **(head_info or {})}


def _plain_dict(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in type(config).__dataclass_fields__}


def _jsonable(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
