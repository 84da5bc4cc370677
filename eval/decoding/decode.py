"""Decode a batch to the end: cycles of propose, verify, commit. Plain decoding is the same without drafts.

Shape legend: B batch, N nodes, M = N + 1, J committed tokens of a cycle, V vocabulary.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.graphs import CycleGraphs, uncaptured_cycles
from headstart.eval.decoding.loop import COUNT, DRAFTED, NEXT, Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.kernels.launch import synchronize


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
    """One decoded row: all tokens (the stop token included), one Cycle per target forward after prefill."""

    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    finish_reason: str = "length"


@dataclass
class Decoded:
    """Answers of a batch and what they took in wall-clock seconds.

    Attributes:
        prefill_s: from the start until the first tokens are known (device synchronised).
        decode_s: from then until the last token arrives.
        cycle_s: seconds between the arrivals of two cycles' tokens on the host.
    """

    answers: list[Answer]
    prefill_s: float
    decode_s: float
    cycle_s: list[float] = field(default_factory=list)

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode phase: all but the first of each row, which comes from prefill."""
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
) -> Decoded:
    """Decode a batch to the end.

    Args:
        contexts: one non-empty token list per row of the engine.
        drafter: None = plain decoding (τ = 1).
        max_new_tokens, stop_ids: for all rows, or one per row.
        generator: on the engine's device; used at temperature > 0 and by synthetic acceptance.
        graphs: where captured cycles are kept; None = every cycle runs operation by operation.
        row_seeds: int64 [B], plain decoding only. A row draws by its own seed, so its batch does not change its tokens.
        scheduler: chooses which drafts are verified.
    """
    record = _Record(len(contexts), max_new_tokens, stop_ids)
    device = engine.device
    synchronize(device)
    loop = Loop(engine, drafter, sampling, generator, row_seeds, scheduler)
    began, preparing = time.perf_counter(), loop.prepare_s
    loop.start(contexts, record.limits, record.stops)
    synchronize(device)
    prefilled = time.perf_counter()
    began += loop.prepare_s - preparing
    arrivals = [prefilled]

    for row, token in enumerate(loop.roots_B.tolist()):
        record.take(row, [token])
    if record.any_active:
        cycles = graphs.run(loop) if graphs is not None and loop.captures else uncaptured_cycles(loop)
        with closing(cycles):
            for table in cycles:
                arrivals.append(time.perf_counter())
                record.add_cycle(table)
                if not record.any_active:
                    break
    # one captured cycle too many is still running: see CycleGraphs.run
    synchronize(device)
    cycle_s = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    return Decoded(record.answers, prefilled - began, arrivals[-1] - prefilled, cycle_s)


class _Record:
    """The host's record of a batch: the answers so far, their limits and stop tokens, and which rows go on."""

    def __init__(self, batch: int, max_new_tokens: int | list[int], stop_ids: set[int] | list[set[int]]):
        self.limits = [max_new_tokens] * batch if isinstance(max_new_tokens, int) else list(max_new_tokens)
        self.stops = list(stop_ids) if isinstance(stop_ids, list) else [set(stop_ids)] * batch
        if len(self.limits) != batch or len(self.stops) != batch or min(self.limits, default=0) < 1:
            raise ValueError(
                f"decode: found {batch} contexts, limits {self.limits}, {len(self.stops)} sets of stop tokens; "
                "expected at least one context, and for each a limit of 1 or more and a set"
            )
        self.answers = [Answer() for _ in range(batch)]
        self.active = [True] * batch

    @property
    def any_active(self) -> bool:
        return any(self.active)

    def take(self, row: int, tokens: list[int]) -> int:
        """Append tokens up to a stop token or the limit. Returns how many were appended."""
        answer = self.answers[row]
        for kept, token in enumerate(tokens, start=1):
            answer.tokens.append(token)
            if token in self.stops[row]:
                answer.finish_reason = "stop"
                self.active[row] = False
            elif len(answer.tokens) >= self.limits[row]:
                self.active[row] = False
            if not self.active[row]:
                return kept
        return len(tokens)

    def add_cycle(self, table: list[list[int]]) -> None:
        """Record one cycle. Args: table: see Loop.verify."""
        for row, line in enumerate(table):
            if not self.active[row]:
                continue
            count = line[COUNT]
            kept = self.take(row, [*line[1:count], line[NEXT]])
            self.answers[row].cycles.append(Cycle(line[DRAFTED], min(count - 1, kept), kept))
