"""Decode contexts to the end: cycles of propose, verify, commit. Plain decoding is the same without drafts.

Where there are more contexts than the batch has rows, a row that ended gives its place to the next context at once
(continuous batching).

Shape legend: B batch, N nodes, M = N + 1, J committed tokens of a cycle, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.eval.decoding.admission import admit_rows
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.graphs import CycleGraphs, uncaptured_cycles
from headstart.eval.decoding.loop import COUNT, DRAFTED, NEXT, Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.kernels.launch import synchronize

#: told after every cycle, on the host: (tokens of all answers so far, answers that have ended, answers in all). The
#: device may wait for it, so it must take microseconds
Watch = Callable[[int, int, int], None]
#: contexts per row, of those given at once, with which few places stay empty on the whole
QUEUED = 4


@dataclass(frozen=True)
class Cycle:
    """One target forward of one row.

    Attributes:
        drafted: levels drafted (0 = nothing).
        accepted: accepted drafts, without those cut off by a stop token or the length limit.
        committed: tokens that joined the answer: accepted + 1, or fewer where the answer was cut.
    """

    drafted: int
    accepted: int
    committed: int


@dataclass
class Answer:
    """One decoded context: all tokens (the stop token included), one Cycle per target forward after prefill.

    Attributes:
        row: of the batch, the one that decoded it.
        before: cycles of the batch before the first one of this answer.
        first_s: seconds from the start of its prefill until its first token is known. Contexts that begin together wait
            for each other.
    """

    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    finish_reason: str = "length"
    row: int = field(default=0, compare=False)
    before: int = field(default=0, compare=False)
    first_s: float = field(default=0.0, compare=False)


@dataclass
class Decoded:
    """Answers and what they took in wall-clock seconds.

    Attributes:
        prefill_s: seconds in which contexts were read, until their first tokens were known (device synchronised). All
            other rows wait meanwhile.
        decode_s: from the first prefill until the last token arrives, without the later prefills.
        cycle_s: seconds between the arrivals of two cycles' tokens on the host, without prefills between them.
        rule: the rule that accepted drafts (`verify.rule_of`); None where nothing was drafted.
    """

    answers: list[Answer]
    prefill_s: float
    decode_s: float
    cycle_s: list[float] = field(default_factory=list)
    rule: str | None = None

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode phase: all but the first of each answer, which comes from prefill."""
        return sum(max(len(answer.tokens) - 1, 0) for answer in self.answers)


def slots_needed(longest_context: int, max_new_tokens: int, drafter: Drafter | None) -> int:
    """KV slots per row for `decode`: a last cycle may overshoot the limit by its whole tree before it is cut."""
    nodes = drafter.max_nodes if drafter is not None else 0
    return longest_context + max_new_tokens + 2 * (nodes + 1)


def round_up_slots(slots: int) -> int:
    """`slots` rounded up, by a fourth at most, to at least 512.

    The buffers, and the graphs captured on them, then also serve contexts that are a little longer.

    >>> [round_up_slots(n) for n in (1, 600, 1025, 5000)]
    [512, 1024, 1536, 5120]
    """
    step = 1 << max(9, (slots - 1).bit_length() - 3)
    return -(-slots // step) * step


@torch.inference_mode()
def decode(
    engine: Engine,
    contexts: list[list[int]],
    drafter: Drafter | None,
    sampling: Sampling,
    max_new_tokens: int | list[int],
    stop_ids: set[int] | list[set[int]],
    generator: torch.Generator | None = None,
    graphs: CycleGraphs | None = None,
    row_seeds: Tensor | None = None,
    scheduler: Scheduler = KEEP_ALL,
    watch: Watch | None = None,
) -> Decoded:
    """Decode contexts to the end.

    Args:
        contexts: non-empty token lists, at least as many as the engine has rows. A row that ended takes the next one.
        drafter: None = plain decoding (τ = 1).
        max_new_tokens, stop_ids: for all contexts, or one per context.
        generator: on the engine's device; used at temperature > 0 and by synthetic acceptance.
        graphs: where captured cycles are kept; None = every cycle runs operation by operation.
        row_seeds: int64, one per context, plain decoding only. An answer is drawn by its own seed, so what is decoded
            beside it does not change its tokens.
        scheduler: chooses which drafts are verified.
        watch: is told how far decoding is.
    """
    rows, device = engine.batch, engine.device
    record = _Record(rows, len(contexts), max_new_tokens, stop_ids)
    synchronize(device)
    first_seeds = None if row_seeds is None else row_seeds[:rows]
    loop = Loop(engine, drafter, sampling, generator, first_seeds, scheduler)
    began, preparing = time.perf_counter(), loop.prepare_s
    loop.start(contexts[:rows], record.limits[:rows], record.stops[:rows], max(map(len, record.stops)))
    synchronize(device)
    latest = time.perf_counter()
    prefill_s = latest - began - (loop.prepare_s - preparing)
    for row, token in enumerate(loop.roots_B.tolist()):
        record.begin(row, row, token, prefill_s)

    places = _Places(loop, record, contexts, row_seeds)
    places.refill()
    cycle_s = []
    if record.any_active:
        run = graphs.run if graphs is not None and loop.captures else uncaptured_cycles
        cycles = run(loop, places.refill)
        with closing(cycles):
            for table in cycles:
                arrival = time.perf_counter()
                cycle_s.append(arrival - latest - places.pop_waited())
                latest = arrival
                record.add_cycle(table.tolist())
                if watch is not None:
                    watch(record.tokens, record.ended, len(contexts))
                if not record.any_active and not record.waiting:
                    break
    # one captured cycle too many is still running: see CycleGraphs.run
    synchronize(device)
    return Decoded(record.answers, prefill_s + places.prefill_s, sum(cycle_s), cycle_s, loop.rule)


class _Places:
    """Gives places of rows that ended to contexts that wait.

    Attributes: prefill_s: seconds in which these contexts were read.
    """

    def __init__(self, loop: Loop, record: _Record, contexts: list[list[int]], seeds: Tensor | None):
        self.loop, self.record, self.contexts, self.seeds = loop, record, contexts, seeds
        self.prefill_s = self._waited = 0.0

    def refill(self) -> bool:
        """Admit contexts while a row is free and one waits. Returns whether any was admitted."""
        record, admitted = self.record, False
        for row in range(len(record.active)):
            # a context may end with its first token
            while record.waiting and not record.active[row]:
                self._admit(row, record.waiting.popleft())
                admitted = True
        return admitted

    def _admit(self, row: int, number: int) -> None:
        loop, record, device = self.loop, self.record, self.loop.engine.device
        synchronize(device)  # do not count the cycle that may still run
        began = time.perf_counter()
        loop.aside()
        preparing = loop.prepare_s
        seed_1 = None if self.seeds is None else self.seeds[number : number + 1]
        given = [self.contexts[number]], [record.limits[number]], [record.stops[number]]
        (token,) = admit_rows(loop, [row], *given, seed_1)
        synchronize(device)
        waited = time.perf_counter() - began
        seconds = waited - (loop.prepare_s - preparing)
        record.begin(row, number, token, seconds)
        self.prefill_s += seconds
        self._waited += waited

    def pop_waited(self) -> float:
        """Seconds since the last call in which rows waited for contexts to be admitted."""
        waited, self._waited = self._waited, 0.0
        return waited


class _Record:
    """The host's record: the answers so far, their limits and stop tokens, which rows go on, which contexts wait."""

    def __init__(
        self, rows: int, contexts: int, max_new_tokens: int | list[int], stop_ids: set[int] | list[set[int]]
    ):
        self.limits = [max_new_tokens] * contexts if isinstance(max_new_tokens, int) else list(max_new_tokens)
        self.stops = list(stop_ids) if isinstance(stop_ids, list) else [set(stop_ids)] * contexts
        if len(self.limits) != contexts or len(self.stops) != contexts or min(self.limits, default=0) < 1:
            raise ValueError(
                f"decode: found {contexts} contexts, limits {self.limits}, {len(self.stops)} sets of stop tokens; "
                "expected at least one context, and for each a limit of 1 or more and a set"
            )
        self.answers = [Answer() for _ in range(contexts)]
        self.waiting = deque(range(rows, contexts))
        self.number = list(range(rows))  # of the context that each row decodes
        self.active = [True] * rows
        self.cycles = self.tokens = self.ended = 0

    @property
    def any_active(self) -> bool:
        return any(self.active)

    def begin(self, row: int, number: int, token: int, seconds: float) -> None:
        """A row begins a context, of which the first token is known. Args: seconds: see Answer.first_s."""
        self.number[row], self.active[row] = number, True
        self.answers[number].first_s, self.answers[number].before = seconds, self.cycles
        self.answers[number].row = row
        self.take(row, [token])

    def take(self, row: int, tokens: list[int]) -> int:
        """Append tokens up to a stop token or the limit. Returns how many were appended."""
        number = self.number[row]
        answer = self.answers[number]
        for kept, token in enumerate(tokens, start=1):
            answer.tokens.append(token)
            self.tokens += 1
            if token in self.stops[number]:
                answer.finish_reason = "stop"
                self.active[row] = False
            elif len(answer.tokens) >= self.limits[number]:
                self.active[row] = False
            if not self.active[row]:
                self.ended += 1
                return kept
        return len(tokens)

    def add_cycle(self, table: list[list[int]]) -> None:
        """Record one cycle. Args: table: see Loop.verify."""
        for row, line in enumerate(table):
            answer, count = self.answers[self.number[row]], line[COUNT]
            # a captured cycle that began before the row's context was admitted took nothing from this row
            if not self.active[row] or not count:
                continue
            if not answer.cycles:
                answer.before = self.cycles
            kept = self.take(row, [*line[1:count], line[NEXT]])
            answer.cycles.append(Cycle(line[DRAFTED], min(count - 1, kept), kept))
        self.cycles += 1
