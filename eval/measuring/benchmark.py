"""Measure a drafter on prompts: τ, acceptance, tokens/s against plain decoding in the same loop, greedy identity."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from headstart.data.chat import RefusedError
from headstart.data.prompts import Chats, Prompt
from headstart.data.records import Message, unread_note
from headstart.eval.config import EvalConfig, TreeConfig, check_config
from headstart.eval.decoding.decode import Answer, Cycle, Decoded
from headstart.eval.decoding.session import Decoder, positions_of
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.measuring.breakdown import cycle_parts
from headstart.eval.measuring.generate import GenerateBaseline
from headstart.eval.measuring.metrics import Pace, acceptance
from headstart.eval.measuring.report import Report
from headstart.eval.measuring.sweep import check_contexts, sweep, sweep_points
from headstart.eval.measuring.task_results import Found, Tally, report_of
from headstart.eval.prompts import batches, load_prompts
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.families.autoregressive import AutoregressiveHead
from headstart.heads.families.medusa.head import MedusaHead
from headstart.heads.targets.target import Target

#: called with (prompts done, prompts in all, what is being decoded)
Progress = Callable[[int, int, str], None]


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
        drafter: overrides what `eval.drafter` and the head ask for.
        recipe: resolved recipe, kept in the report.
        head_info: more about the head for the report (path, provenance).
    Raises: ConfigError, DataError, TemplateError naming field or file.
    """
    check_config(config)
    check_contexts(config.context_lengths, config, target, "eval.context_lengths")
    dtype = str(target.dtype).removeprefix("torch.")
    if config.dtype not in ("auto", dtype):
        raise ConfigError(
            f"eval.dtype: found {config.dtype!r}, the target is loaded in {dtype}; set target.dtype={config.dtype}"
        )
    if config.data is None:
        raise ConfigError("eval.data is not set: give a JSONL file of prompts, e.g. eval.data=prompts.jsonl")
    prompts = load_prompts(config.data, config.limit, config.limit_per_task, config.max_turns, config.task_field)
    if head is not None:
        attach(head, target)
    drafter = drafter or build_drafter(head, config)
    if drafter is None and config.synthetic_acceptance is not None:
        raise ConfigError(
            f"eval.synthetic_acceptance: found {config.synthetic_acceptance!r}, but nothing drafts "
            f"(eval.drafter={config.drafter}{'' if head is not None else ', no head'}): give a head, or unset it"
        )
    training = head.training if head is not None else False
    try:
        if head is not None:
            head.eval()
        found = _measure(target, drafter, config, prompts, progress)
    finally:
        if head is not None:
            head.train(training)
    return report_of(target, head, drafter, config, dtype, len(prompts), found, recipe, head_info).published()


def attach(head: Head, target: Target) -> None:
    """Give a loaded head the target's frozen ends. Raises ConfigError when it was made for another target."""
    for name in ("hidden_size", "vocab_size", "num_layers"):
        found, expected = getattr(head.dims, name), getattr(target.dims, name)
        if found != expected:
            raise ConfigError(
                f"the head was made for a target with {name} {found}, {target.config.name} has {expected}: "
                "evaluate it with the target it was trained on"
            )
    if isinstance(head, AutoregressiveHead | MedusaHead):
        head.bind(target.ends)


def _measure(
    target: Target, drafter: Drafter | None, config: EvalConfig, prompts: list[Prompt], progress: Progress | None
) -> Found:
    began, ready_s = time.perf_counter(), None
    decoder = Decoder(target, config)
    tallies = {str(prompt.task): Tally() for prompt in prompts}
    generate = GenerateBaseline(target, decoder.sampling, config.max_new_tokens) if config.generate_baseline else None
    plain = config.baseline or drafter is None
    decoded_turns, total = 0, sum(prompt.answers for prompt in prompts) + sweep_points(config)
    starts = first_contexts(prompts, target, config)
    talks = _Talks(target, config, prompts, starts)
    warm = config.warmup_tokens < 1
    for number, (task, turn, asked) in enumerate(batches(prompts, config.batch_size)):
        if progress is not None:
            progress(decoded_turns, total, task)
        decoded_turns += len(asked)
        batch, contexts = talks.ask(asked, turn)
        if not batch:
            continue
        if not warm:
            for way in [None] * plain + [drafter] * (drafter is not None):
                decoder.run(contexts, way, config.warmup_tokens, config.seed)
            if generate is not None:
                GenerateBaseline(target, decoder.sampling, config.warmup_tokens).run(contexts[0])
            warm = True
        if ready_s is None:
            ready_s = time.perf_counter() - began
        tally, seed, limits = tallies[task], config.seed + number, decoder.limits(contexts)
        base = decoder.run(contexts, None, limits, seed) if plain else None
        spec = decoder.run(contexts, drafter, limits, seed) if drafter is not None else None
        _book(tally, batch, turn, base, spec)
        if base is not None and spec is not None and decoder.sampling.greedy and not decoder.sampling.lossy:
            _compare(tally, decoder, batch, turn, contexts, base, spec)
        for row, context in enumerate(contexts if generate is not None else []):
            generate.run(context, seed + row)  # type: ignore[union-attr]
        # plain answers go on into the next turn, so that both ways see the same context
        talks.answer(batch, turn, (base or spec).answers, limits)  # type: ignore[union-attr]
    steps = count(decoded_turns)
    say = None if progress is None else lambda what: progress(next(steps), total, what)
    sweeps = sweep(decoder, drafter, config, starts, say)
    parts = None
    if config.cycle_parts and drafter is not None and drafter.captures and starts:
        # the prompt of middle length stands for all
        middle = sorted(starts, key=len)[len(starts) // 2]
        parts = cycle_parts(decoder, drafter, [middle] * config.batch_size)
    if progress is not None:
        progress(total, total, "done")
    captured = decoder.graphs.seconds
    return Found(tallies, sweeps, generate, decoder.unfused, captured, ready_s, parts, talks.notes())


class _Talks:
    """The prompts' conversations as they grow, and what the target's positions and its template cut off them.

    Args: starts: first_contexts of the prompts.
    """

    def __init__(self, target: Target, config: EvalConfig, prompts: list[Prompt], starts: list[list[int]]):
        self.config, self.positions, self.chats = config, positions_of(target), chats_of(target, config)
        self.starts = {id(prompt): start for prompt, start in zip(prompts, starts, strict=True)}
        self.answers: dict[int, list[Message]] = {id(prompt): [] for prompt in prompts}
        self.ended: dict[int, str] = {}
        self.unread = Counter(name for prompt in prompts for name in prompt.unread)
        self.left_out: Counter[str] = Counter()
        self.cut = 0

    def ask(self, prompts: list[Prompt], turn: int) -> tuple[list[Prompt], list[list[int]]]:
        """Prompts whose question of this turn can be asked, with its context."""
        asked, contexts = [], []
        for prompt in prompts:
            context = self._context(prompt, turn) if id(prompt) not in self.ended else None
            if context is None:
                self.left_out[self.ended[id(prompt)]] += 1
            else:
                asked.append(prompt)
                contexts.append(context)
        return asked, contexts

    def _context(self, prompt: Prompt, turn: int) -> list[int] | None:
        if not turn:
            return self.starts[id(prompt)]
        try:
            context = self.chats.prompt_ids(prompt, self.answers[id(prompt)])
        except RefusedError as error:
            self.ended[id(prompt)] = error.reason
            return None
        if len(context) < self.positions:
            return context
        self.ended[id(prompt)] = f"the target has {self.positions} positions, which their conversations fill"
        return None

    def answer(self, prompts: list[Prompt], turn: int, answers: list[Answer], limits: list[int]) -> None:
        """Add the messages that the answers stand for; one that cannot be told ends its conversation."""
        for prompt, answer, limit in zip(prompts, answers, limits, strict=True):
            self.cut += limit < self.config.max_new_tokens and answer.finish_reason == "length"
            if turn + 1 == prompt.answers:
                continue
            said = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
            try:
                self.answers[id(prompt)].append(self.chats.of(prompt).answer_message(said))
            except RefusedError as error:
                self.ended[id(prompt)] = error.reason

    def notes(self) -> list[str]:
        notes = [f"{count} later turns were left out: {reason}" for reason, count in self.left_out.items()]
        if self.cut:
            reason = f"the target has {self.positions} positions"
            notes.insert(0, f"{self.cut} answers end before eval.max_new_tokens={self.config.max_new_tokens}: {reason}")
        unread = unread_note(self.unread)
        return [*notes, *self.chats.notes, *([unread] if unread else [])]


def chats_of(target: Target, config: EvalConfig) -> Chats:
    return Chats(target.tokenizer, target.stop_token_ids, dict(config.template_kwargs))


def first_contexts(prompts: list[Prompt], target: Target, config: EvalConfig) -> list[list[int]]:
    """Token ids that the first answers of the prompts are to follow.

    Raises: DataError naming a prompt that leaves no room, that the template refuses, or whose ids are not the target's.
    """
    chats, positions, contexts = chats_of(target, config), positions_of(target), []
    for prompt in prompts:
        try:
            context = chats.prompt_ids(prompt)
        except RefusedError as error:
            raise DataError(f"prompt {prompt.id} ({prompt.where}): {error}: change it, or leave it out") from error
        if not context:
            raise DataError(f"prompt {prompt.id} ({prompt.where}): has no tokens: change it, or leave it out")
        if prompt.prompt_token_ids is not None and max(context) >= target.dims.vocab_size:
            raise DataError(
                f"prompt {prompt.id}: prompt_token_ids: found {max(context)}, the target has {target.dims.vocab_size} "
                "tokens: these ids are another tokenizer's"
            )
        if len(context) >= positions:
            raise DataError(
                f"prompt {prompt.id}: found {len(context)} tokens, the target has {positions} positions: shorten it, "
                "or leave it out"
            )
        contexts.append(context)
    return contexts


def _book(tally: Tally, batch: list[Prompt], turn: int, base: Decoded | None, spec: Decoded | None) -> None:
    if base is not None:
        tally.plain.add(base)
    if spec is not None:
        tally.speculative.add(spec)
    if len(batch) == 1 and base is not None and spec is not None:
        pace = tally.paces.setdefault(id(batch[0]), Pace())
        pace.plain_tokens += base.decode_tokens
        pace.plain_s += base.decode_s
        pace.tokens += spec.decode_tokens
        pace.seconds += spec.decode_s
    counted = spec or base
    for row, prompt in enumerate(batch):
        if counted is not None:
            tally.cycles.setdefault(id(prompt), []).extend(counted.answers[row].cycles)


def _compare(
    tally: Tally,
    decoder: Decoder,
    batch: list[Prompt],
    turn: int,
    contexts: list[list[int]],
    base: Decoded,
    spec: Decoded,
) -> None:
    """Count identical greedy answers; of the others, note where they part and how close the target's choice was."""
    for prompt, context, plain, drafted in zip(batch, contexts, base.answers, spec.answers, strict=True):
        tally.sequences += 1
        place = first_difference(plain, drafted)
        if place is None:
            tally.identical += 1
        else:
            gap = decoder.gap([*context, *plain.tokens[:place]])
            tally.divergences.append({"id": prompt.id, "turn": turn, "position": place, "gap": gap})


def first_difference(plain: Answer, speculative: Answer) -> int | None:
    """Index of the first token that differs, or None when the answers are identical."""
    if plain.tokens == speculative.tokens:
        return None
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(speculative.tokens)))


def tau_probe(
    target: Target, head: Head, prompts: list[list[int]], max_new_tokens: int, depth: int, batch_size: int = 16
) -> float:
    """Real greedy draft-verify τ of a chain of `depth`: cheap enough to run in training validation.

    Args: prompts: token ids of each context, decoded `batch_size` at a time.
    """
    tree = TreeConfig(kind="chain", depth=depth)
    # a short look: choosing kernels and capturing would take longer, and fusing moves weights that training holds on to
    config = EvalConfig(tree=tree, max_new_tokens=max_new_tokens, engine="transformers")
    drafter = build_drafter(head, config)
    decoder = Decoder(target, config)
    cycles: list[Cycle] = []
    for start in range(0, len(prompts), batch_size):
        decoded = decoder.run(prompts[start : start + batch_size], drafter, max_new_tokens, seed=0)
        cycles += [cycle for answer in decoded.answers for cycle in answer.cycles]
    return acceptance(cycles).tau
