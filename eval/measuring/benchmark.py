"""Measures a drafter on prompts: τ, acceptance, speed against plain decoding in the same loop, greedy identity."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from headstart.data.features import Progress
from headstart.data.prompts import Prompt
from headstart.data.records.media import dropped_lines
from headstart.eval.config import EvalConfig, TreeConfig, check_config, tree_label
from headstart.eval.decoding.decode import Answer, Cycle, Decoded
from headstart.eval.decoding.memory import require_attention, require_chain
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import Drafter, build_drafter, require_drafting, require_schedulable
from headstart.eval.measuring.breakdown import cycle_parts, plain_cycle
from headstart.eval.measuring.contexts import Contexts, first_contexts
from headstart.eval.measuring.conversations import Conversations
from headstart.eval.measuring.generate import GenerateBaseline
from headstart.eval.measuring.metrics import Pace, acceptance, expected_tau
from headstart.eval.measuring.report import Report
from headstart.eval.measuring.samples import record_samples
from headstart.eval.measuring.sweep import check_contexts, queued, spread, sweep, sweep_points
from headstart.eval.measuring.task_results import TaskResults, report_of
from headstart.eval.prompts import eval_prompts
from headstart.eval.scheduling.throughput import scheduler_for
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, in_one_line
from headstart.heads.provenance import device_name
from headstart.heads.targets.target import Target


def evaluate(
    target: Target,
    head: Head | None,
    config: EvalConfig,
    drafter: Drafter | None = None,
    recipe: dict[str, Any] | None = None,
    head_info: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Evaluate on `config.data`.

    Args:
        head: on the target's device, or None for `eval.drafter` ngram / none.
        drafter: runs instead of what `eval.drafter` and the head ask for.
        recipe: the resolved recipe, for the report.
        head_info: more about the head (path, provenance), for the report.
    Raises: ConfigError, DataError, TemplateError naming field or file.
    """
    check_evaluation(target, head, config, drafter)
    dtype = str(target.dtype).removeprefix("torch.")
    check_dtype(config, target.dtype)
    prompts = eval_prompts(config)
    if head is not None:
        head.bind(target.ends)
    if drafter is None:
        drafter = build_drafter(head, config)
    training = head.training if head is not None else False
    try:
        if head is not None:
            head.eval()
        measured = _Measurement(target, drafter, config, prompts, progress)
        measured.run()
    finally:
        if head is not None:
            head.train(training)
    sampling = measured.decoder.sampling
    return report_of(
        config,
        measured.tasks,
        identity=sampling.greedy and not sampling.lossy and config.baseline and drafter is not None,
        timing={"capture_s": measured.decoder.graphs.seconds or None, "ready_s": measured.ready_s},
        target=target.fingerprint(),
        head=_describe(head, head_info),
        drafter=drafter.name if drafter is not None else "plain",
        dtype=dtype,
        device=device_name(target.device),
        device_type=target.device.type,
        cut=measured.cut,
        tree={**asdict(config.tree), "label": _label(config, drafter)},
        recipe=recipe or {},
        notes=[*_notes(target, measured), *dropped_lines(prompts.dropped, places_too=False)],
        sweeps=measured.sweeps or None,
        cycle=measured.cycle,
        scheduler=measured.scheduled(),
        engine_path=measured.decoder.path,
        verification=measured.rule,
        engine_note=measured.decoder.slow,
        engine_cost=measured.cost,
        generate=None if measured.generate is None else measured.generate.report(),
        samples=measured.samples,
    ).published()


def check_evaluation(target: Target, head: Head | None, config: EvalConfig, drafter: Drafter | None = None) -> None:
    """Refuse what `evaluate` would refuse. Neither target nor head need weights: both may be on the meta device.

    Args: as `evaluate`.
    Raises: ConfigError or TargetError naming the field.
    """
    check_config(config)
    check_contexts(config.context_lengths, config, target, "eval.context_lengths")
    require_attention(target.model.config, config)
    if head is not None:
        require_chain(target.model.config, config)
        require_its_target(head, target)
    if drafter is not None:
        require_schedulable(config, drafter.captures)
    elif require_drafting(head, config) is None and config.synthetic_acceptance is not None:
        raise ConfigError(
            f"eval.synthetic_acceptance: found {config.synthetic_acceptance!r}, but nothing drafts "
            f"(eval.drafter={config.drafter}{'' if head is not None else ', no head'}): give a head, or unset it"
        )


def check_dtype(config: EvalConfig, dtype: torch.dtype) -> None:
    """Raises: ConfigError where `eval.dtype` is not the one that the target has, or will be loaded in."""
    name = str(dtype).removeprefix("torch.")
    if config.dtype not in ("auto", name):
        raise ConfigError(
            f"eval.dtype: found {config.dtype!r}, the target is loaded in {name}; set target.dtype={config.dtype}"
        )


def require_its_target(head: Head, target: Target) -> None:
    """Raises: ConfigError for a head of another target. Neither needs weights."""
    for name in ("hidden_size", "vocab_size", "num_layers"):
        of_head, of_target = getattr(head.dims, name), getattr(target.dims, name)
        if of_head != of_target:
            raise ConfigError(
                f"the head was made for a target with {name} {of_head}, {target.config.name} has {of_target}: "
                "evaluate it with the target it was trained on"
            )


def _label(config: EvalConfig, drafter: Drafter | None) -> str:
    """The tree's name; with a scheduler it names the largest draft."""
    return tree_label(config.tree, drafter.max_nodes if drafter else 0) + (", scheduled" if config.scheduler else "")


def _describe(head: Head | None, head_info: dict[str, Any] | None) -> dict[str, Any] | None:
    if head is None:
        return head_info
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return {"type": head.family, "config": asdict(head.config), "parameters": parameters, **(head_info or {})}


class _Measurement:
    """One evaluation: every prompt decoded plainly and speculatively, then the sweeps.

    Attributes:
        first, dropped: the prompts' first contexts, and notes on prompts that the chat template refuses.
        plain: whether plain decoding is measured.
        tasks: results by task.
        sweeps: over batch sizes and context lengths.
        cycle: milliseconds of a cycle's parts (breakdown.cycle_parts), or None.
        rule: the rule that accepted drafts (`verify.rule_of`), or None.
        cut: answers that were decoded, and those that `eval.max_new_tokens` cut.
        scheduler: of all runs that draft; `throughput` is the same where `eval.scheduler` is on, else None.
        cost: of a plain cycle, where the target decodes slower than it could (breakdown.plain_cycle), or None.
        samples: answers with every token's author (measuring/samples.py); None where nothing was asked or drafted.
        ready_s: seconds from a loaded target to the first measured token, in which kernels are chosen and compiled,
            cycles captured and caches warmed.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EvalConfig,
        prompts: list[Prompt],
        progress: Progress | None,
    ):
        self.began = time.perf_counter()
        self.target, self.drafter, self.config = target, drafter, config
        self.decoder = Decoder(target, config)
        self.generate = self._generate(config.max_new_tokens) if config.generate_baseline else None
        self.plain = config.baseline or drafter is None
        prompts, self.first, self.dropped = first_contexts(prompts, target, config)
        self.conversations = Conversations(prompts, progress, sweep_points(config))
        self.decoder.watch = self.conversations.watch
        self.contexts = Contexts(target, config, self.conversations, self.first)
        self.tasks = {str(prompt.task): TaskResults() for prompt in prompts}
        self.sweeps: dict[str, Any] = {}
        self.cycle: dict[str, float] | None = None
        self.cost: dict[str, float] | None = None
        self.rule: str | None = None
        self.cut = {"answers": 0, "cut": 0}
        self.samples: list[dict[str, Any]] | None = None
        self.unsampled: str | None = None
        asked = config.scheduler and drafter is not None
        self.throughput = scheduler_for(drafter, config.tree) if asked and drafter is not None else None
        self.scheduler: Scheduler = self.throughput or KEEP_ALL
        self._verified_per_cycle: float | None = None
        self.ready_s: float | None = None

    def _generate(self, limit: int) -> GenerateBaseline:
        return GenerateBaseline(self.target, self.decoder.sampling, limit)

    def run(self) -> None:
        decoder, drafter, config = self.decoder, self.drafter, self.config
        rows, before = config.batch_size, self._counts()
        for asked in self.conversations.batches(queued(config, rows)):
            batch, contexts = self.contexts.of(asked.prompts, asked.turn)
            if not batch:
                continue
            if self.ready_s is None:
                self._warm_up(contexts)
                before = self._counts()
                self.ready_s = time.perf_counter() - self.began
            seed, limits = config.seed + asked.number, decoder.limits(contexts)
            alone = self.generate is None
            base = spec = None
            if self.plain:
                self.conversations.decoding("plain:", ends=alone and drafter is None)
                base = decoder.run(contexts, None, limits, seed, rows=rows)
            if drafter is not None:
                self.conversations.decoding("with drafts:", ends=alone)
                spec = self._speculative(contexts, limits, seed)
            _add(self.tasks[asked.task], batch, base, spec)
            self._count_cut((spec or base).answers)  # type: ignore[union-attr]
            if spec is not None:
                self.rule = spec.rule or self.rule
            if base is not None and spec is not None and decoder.sampling.greedy and not decoder.sampling.lossy:
                _compare(self.tasks[asked.task], decoder, batch, asked.turn, contexts, base, spec)
            if self.generate is not None:
                for row, context in enumerate(contexts):
                    self.generate.run(context, seed + row)
            # the next turn follows the plain answers, so that both ways see the same context
            self.contexts.answered(batch, asked.turn, (base or spec).answers, limits)  # type: ignore[union-attr]
        verified, cycles = (after - earlier for after, earlier in zip(self._counts(), before, strict=True))
        self._verified_per_cycle = verified / cycles if cycles else None
        self.sweeps = sweep(decoder, drafter, config, self.first, self.conversations.tell, self.scheduler)
        if config.cycle_parts and drafter is not None and drafter.captures and self.first:
            # the prompt of median length stands for all
            middle = sorted(self.first, key=len)[len(self.first) // 2]
            self.cycle = cycle_parts(decoder, drafter, [middle] * config.batch_size)
        if decoder.slow is not None and self.target.device.type == "cuda" and self.first:
            with suppress(Exception):  # this explains the measurement, and must not lose it
                self.cost = plain_cycle(decoder, self.first[: config.batch_size])
        self._record_samples()
        self.conversations.finish()

    def _record_samples(self) -> None:
        """Decode a few prompts again, where the text is the target's: it is not with synthetic acceptance."""
        config = self.config
        if self.drafter is None or not config.samples or self.decoder.sampling.synthetic is not None:
            return
        asked = [(str(p.task), c) for p, c in zip(self.conversations.prompts, self.first, strict=True)]
        self.conversations.tell("samples", steps=0)
        try:
            self.samples = record_samples(self.target, self.drafter, config, spread(asked, config.samples))
        except Exception as error:  # noqa: BLE001 - this explains the measurement, and must not lose it
            self.unsampled = f"no samples were recorded: {in_one_line(error)}"

    def _count_cut(self, answers: list[Answer]) -> None:
        limit = self.config.max_new_tokens
        self.cut["answers"] += len(answers)
        self.cut["cut"] += sum(a.finish_reason == "length" and len(a.tokens) >= limit for a in answers)

    def _warm_up(self, contexts: list[list[int]]) -> None:
        tokens = self.config.warmup_tokens
        if tokens < 1:
            return
        self.conversations.decoding("warm-up:")
        if self.plain:
            self.decoder.run(contexts, None, tokens, self.config.seed, rows=self.config.batch_size)
        if self.drafter is not None:
            self._speculative(contexts, tokens, self.config.seed)
        if self.generate is not None:
            self._generate(tokens).run(contexts[0])

    def _speculative(self, contexts: list[list[int]], limits: int | list[int], seed: int) -> Decoded:
        rows = self.config.batch_size
        return self.decoder.run(contexts, self.drafter, limits, seed, rows=rows, scheduler=self.scheduler)

    def _counts(self) -> tuple[int, int]:
        """(roots and nodes that were verified, cycles of sequences) so far; 0 without a scheduler."""
        return (self.throughput.verified, self.throughput.cycles) if self.throughput is not None else (0, 0)

    def scheduled(self) -> dict[str, Any] | None:
        """The report's `scheduler`, after `run`."""
        if self.throughput is None:
            return None
        return {"verified_per_cycle": self._verified_per_cycle, "batches": self.throughput.to_json()}


def _notes(target: Target, measured: _Measurement) -> list[str]:
    sampling, notes = measured.decoder.sampling, []
    if sampling.synthetic is not None:
        rates = ", ".join(f"{rate:g}" for rate in sampling.synthetic)
        notes.append(
            f"SYNTHETIC acceptance ({rates} by level, τ {expected_tau(sampling.synthetic):.3f} if every row drafts all "
            "levels): the text is not the target's, τ is what was asked for and not the head's; times are real"
        )
    elif sampling.lossy:
        notes.append("typical acceptance is LOSSY: the output distribution is not the target's")
    notes += [*measured.dropped, *measured.contexts.notes()]
    notes += [] if measured.unsampled is None else [measured.unsampled]
    if target.device.type == "cpu":
        notes.append("on a CPU more tokens per forward cost more time: τ carries over to a GPU, the speed-up does not")
    return notes


def _add(results: TaskResults, batch: list[Prompt], base: Decoded | None, spec: Decoded | None) -> None:
    """Add a batch's times and cycles to its task's results."""
    if base is not None:
        results.plain.add(base)
    if spec is not None:
        results.speculative.add(spec)
    if len(batch) == 1 and base is not None and spec is not None:
        pace = results.paces.setdefault(id(batch[0]), Pace())
        pace.plain_tokens += base.decode_tokens
        pace.plain_s += base.decode_s
        pace.tokens += spec.decode_tokens
        pace.seconds += spec.decode_s
    counted = spec or base
    assert counted is not None
    for prompt, answer in zip(batch, counted.answers, strict=True):
        results.prompts.add(id(prompt))
        results.cycles.setdefault(id(prompt), []).extend(answer.cycles)


def _compare(
    results: TaskResults,
    decoder: Decoder,
    batch: list[Prompt],
    turn: int,
    contexts: list[list[int]],
    base: Decoded,
    spec: Decoded,
) -> None:
    """Count identical greedy answers. Of the others note where they first differ, and the target's top-2 logit gap."""
    for prompt, context, plain, drafted in zip(batch, contexts, base.answers, spec.answers, strict=True):
        results.sequences += 1
        place = first_difference(plain, drafted)
        if place is None:
            results.identical += 1
        else:
            gap = decoder.gap([*context, *plain.tokens[:place]])
            results.divergences.append({"id": prompt.id, "turn": turn, "position": place, "gap": gap})


def first_difference(plain: Answer, speculative: Answer) -> int | None:
    """Index of the first token that differs, or None when the answers are identical."""
    if plain.tokens == speculative.tokens:
        return None
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(speculative.tokens)))


def tau_probe(
    target: Target, head: Head, prompts: list[list[int]], max_new_tokens: int, depth: int, batch_size: int = 16
) -> float:
    """τ of real greedy decoding with a chain of `depth`; cheap enough for validations during training.

    Args: prompts: token ids of each context, decoded `batch_size` at a time.
    """
    tree = TreeConfig(kind="chain", depth=depth)
    # choosing kernels and capturing would take longer than this decodes, and fusing moves weights that training holds
    config = EvalConfig(tree=tree, max_new_tokens=max_new_tokens, engine="transformers")
    drafter = build_drafter(head, config)
    decoder = Decoder(target, config)
    cycles: list[Cycle] = []
    for start in range(0, len(prompts), batch_size):
        decoded = decoder.run(prompts[start : start + batch_size], drafter, max_new_tokens, seed=0)
        cycles += [cycle for answer in decoded.answers for cycle in answer.cycles]
    return acceptance(cycles).tau
