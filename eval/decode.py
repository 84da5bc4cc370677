"""The decode loop: propose, verify, commit, until every row has stopped. Plain decoding is the loop without drafts.

Shape legend: B batch, N nodes, M = N + 1, J committed tokens of a cycle, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.data.row_random import draw_at, uniforms
from headstart.eval.choices import compile_ways, decide
from headstart.eval.control import advance, stops_at, take_path
from headstart.eval.drafters.base import Drafter
from headstart.eval.engine import Engine, synchronize
from headstart.eval.graphs import CycleGraphs
from headstart.eval.launch import compiling
from headstart.eval.sampling import Sampling, best, draw, probabilities
from headstart.eval.tree import empty
from headstart.eval.verify import Verdict, verify


@dataclass(frozen=True)
class Cycle:
    """One target forward of one row.

    Attributes:
        drafted: levels drafted (0 = nothing).
        accepted: accepted drafts that were kept (what lies beyond a stop token or the length limit is not).
        committed: tokens kept: accepted + 1, less what was cut.
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
        prefill_s: until the first tokens were there (device synchronised).
        decode_s: from then until the last token arrived.
        cycle_s: seconds of each cycle of the batch, as the host sees its tokens arrive.
    """

    answers: list[Answer]
    prefill_s: float
    decode_s: float
    cycle_s: list[float] = field(default_factory=list)

    @property
    def decode_tokens(self) -> int:
        """Tokens that the decode phase produced: all but each row's first, which prefill gives."""
        return sum(max(len(answer.tokens) - 1, 0) for answer in self.answers)


def slots_needed(longest_context: int, max_new_tokens: int, drafter: Drafter | None) -> int:
    """KV slots per row for `decode`: a last cycle may overshoot the limit by its whole tree before it is cut."""
    nodes = drafter.max_nodes if drafter is not None else 0
    return longest_context + max_new_tokens + 2 * (nodes + 1)


def roomy(slots: int) -> int:
    """`slots` rounded up to a fourth of its octave (at least 512), so that buffers, and the graphs on them, last.

    >>> [roomy(n) for n in (1, 600, 1025, 5000)]
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
) -> Decoded:
    """Decode a batch to the end.

    Args:
        contexts: one non-empty token list per row of the engine.
        drafter: None = plain decoding (τ = 1).
        max_new_tokens, stop_ids: for all rows, or one per row.
        generator: on the engine's device; used at temperature > 0 and by synthetic acceptance.
        graphs: where captured cycles are kept; None = every cycle runs operation by operation.
        row_seeds: int64 [B], plain decoding only: every row draws by its own seed, whatever it is batched with.
    """
    book = _Rows(len(contexts), max_new_tokens, stop_ids)
    device = engine.device
    synchronize(device)
    loop = Loop(engine, drafter, sampling, generator, row_seeds)
    began, preparing = time.perf_counter(), loop.prepare_s
    loop.start(contexts, book.limits, book.stops)
    synchronize(device)
    prefilled = time.perf_counter()
    began += loop.prepare_s - preparing
    arrivals = [prefilled]

    for row, token in enumerate(loop.roots_B.tolist()):
        book.take(row, [token])
    if graphs is not None and loop.captures:
        if book.any_active:
            for table in graphs.run(loop):
                arrivals.append(time.perf_counter())
                book.cycle(table)
                if not book.any_active:
                    break
    else:
        while book.any_active:
            rows_table = loop.verify().tolist()
            engine.longest = max(line[LENGTH] for line in rows_table)
            book.cycle(rows_table)
            arrivals.append(time.perf_counter())
            loop.commit()
    # a captured cycle beyond the last one is under way; no token waits for it
    synchronize(device)
    cycle_s = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    return Decoded(book.answers, prefilled - began, arrivals[-1] - prefilled, cycle_s)


#: columns of a cycle's table that follow the committed tokens: how many, the next root, levels drafted, context length
COUNT, NEXT, DRAFTED, LENGTH = -4, -3, -2, -1


class Loop:
    """Propose, verify, commit for one batch: device tensors only, so that a cycle can be captured.

    Attributes:
        roots_B: int64, tokens that the target has chosen and not yet read.
        active_B: bool, rows that go on.
        left_B: int64, tokens that a row may still commit.
        stop_BS: int64, stop tokens of each row, -1 = none.
        seen_BV: bool, tokens of each context, where the repetition penalty asks for it.
        seeds_B: int64, seeds of rows that draw by themselves, or None.
        rate_K: float32, synthetic acceptance by level, or None.
        logits_BV: the target's, at the last root.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        sampling: Sampling,
        generator: torch.Generator | None,
        seeds_B: Tensor | None = None,
    ):
        if seeds_B is not None and (drafter is not None or sampling.synthetic is not None):
            raise ValueError("row seeds: rows draw by themselves in plain decoding only, found a drafter")
        self.engine, self.drafter, self.sampling, self.generator = engine, drafter, sampling, generator
        self.seeds_B = seeds_B
        rates = sampling.synthetic
        self.rate_K = None if rates is None else torch.tensor(rates, dtype=torch.float32, device=engine.device)
        self.seen_BV: Tensor | None = None

    @property
    def captures(self) -> bool:
        return self.engine.captures and (self.drafter is None or self.drafter.captures)

    @property
    def prepare_s(self) -> float:
        """Seconds that capturing prompts' chunks and making the drafter ready have taken so far."""
        return self.engine.capture_s + (0.0 if self.drafter is None else self.drafter.prepare_s)

    @property
    def state(self) -> list[tuple[object, str]]:
        """Where the tensors live that a cycle reads and changes, KV apart."""
        extra = [name for name in ("seen_BV", "seeds_B", "rate_K") if getattr(self, name) is not None]
        names = ["roots_B", "active_B", "left_B", "stop_BS", *extra]
        owners: list[tuple[object, list[str]]] = [(self, names), (self.engine, self.engine.state)]
        if self.drafter is not None:
            owners.append((self.drafter, self.drafter.state))
        return [(owner, name) for owner, names in owners for name in names]

    def tensors(self) -> list[Tensor]:
        """What stands at `state` now."""
        return [getattr(owner, name) for owner, name in self.state]

    def attach(self, tensors: list[Tensor]) -> None:
        """Put these tensors at `state`."""
        for (owner, name), tensor in zip(self.state, tensors, strict=True):
            setattr(owner, name, tensor)

    def tune(self) -> None:
        """Choose how the products of a cycle run (CUDA only), after `start`."""
        engine, drafter = self.engine, self.drafter
        rows = engine.batch * (1 if drafter is None else drafter.max_nodes + 1)
        drafts = [] if drafter is None else drafter.products(engine.batch)
        with compiling():
            # all are compiled before the first is timed
            if engine.fused is not None:
                engine.fused.compile(rows)
            for linears, count in drafts:
                compile_ways(linears, count, engine.choices)
            if engine.fused is not None:
                engine.fused.tune(rows)
            for linears, count in drafts:
                decide(linears, count, engine.choices)

    def start(self, contexts: list[list[int]], limits: list[int], stops: list[set[int]]) -> None:
        """Prefill, choose the first roots, hand the contexts to the drafter."""
        engine, device = self.engine, self.engine.device
        self.logits_BV, context = engine.prefill(contexts)
        if self.sampling.penalises:
            self.seen_BV = _seen(context.tokens_BJ, context.count_B, self.logits_BV.shape[-1])
        self.roots_B = self._choose(self.logits_BV)
        widest = max(1, *(len(stop) for stop in stops))
        padded = [[*sorted(stop), *[-1] * (widest - len(stop))] for stop in stops]
        self.stop_BS = torch.tensor(padded, device=device)
        self.left_B = torch.tensor(limits, device=device) - 1
        self.active_B = (self.left_B > 0) & ~stops_at(self.roots_B[:, None], self.stop_BS)[:, 0]
        if self.drafter is not None:
            self.drafter.start(context, engine.capacity)

    def _choose(self, logits_BV: Tensor, ahead: int = 0) -> Tensor:
        """The target's own next token of every row, which will stand `ahead` places after the context's end."""
        if self.sampling.greedy:
            return best(logits_BV, self.sampling, self.seen_BV)
        p_BV = probabilities(logits_BV, self.sampling, self.seen_BV)
        if self.seeds_B is not None:
            return draw_at(p_BV, uniforms(self.seeds_B, self.engine.length_B + ahead))
        return draw(p_BV, self.generator)

    def verify(self) -> Tensor:
        """Propose and verify. Returns the cycle's table: int64 [B, J + 4], see COUNT; `commit` must follow."""
        engine, roots_B, active_B = self.engine, self.roots_B, self.active_B
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV.scatter(1, roots_B[:, None], True)
        if self.drafter is not None:
            tree = self.drafter.propose(roots_B, self.generator).limit(active_B)
        else:
            tree = empty(engine.batch, engine.device)
        step = engine.verify(roots_B, tree)
        self.logits_BV = step.logits_BMV[:, 0]
        if self.seeds_B is not None:
            verdict = Verdict(tree.tokens_BN, torch.zeros_like(roots_B), self._choose(self.logits_BV, ahead=1))
        else:
            verdict = verify(tree, step.logits_BMV, self.sampling, self.generator, self.seen_BV, self.rate_K)
        taken = take_path(tree, roots_B, verdict.path_BK, active_B, engine.length_B, engine.kv.bin)
        self.accepted = accepted = engine.take(tree, step, taken)
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV | _seen(accepted.tokens_BJ, accepted.count_B, self.seen_BV.shape[1])
        progress = advance(tree, taken, verdict.next_B, roots_B, self.left_B, active_B, self.stop_BS)
        self.roots_B, self.left_B, self.active_B = progress.roots_B, progress.left_B, progress.active_B
        return progress.table

    def commit(self) -> None:
        """Give the drafter the rows of the last `verify`."""
        if self.drafter is not None:
            self.drafter.commit(self.accepted)

    def cycle(self) -> Tensor:
        table = self.verify()
        self.commit()
        return table


class _Rows:
    """Host side of the loop: answers, stops, limits."""

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
        """Append until a stop token or the limit; returns how many tokens were kept."""
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

    def cycle(self, table: list[list[int]]) -> None:
        """Book one cycle."""
        for row, line in enumerate(table):
            if not self.active[row]:
                continue
            count = line[COUNT]
            kept = self.take(row, [*line[1:count], line[NEXT]])
            self.answers[row].cycles.append(Cycle(line[DRAFTED], min(count - 1, kept), kept))


def _seen(tokens_BJ: Tensor, count_B: Tensor, vocab: int) -> Tensor:
    """bool [B, V]: which tokens occur among the first `count_B` of each row."""
    inside_BJ = torch.arange(tokens_BJ.shape[1], device=tokens_BJ.device) < count_B[:, None]
    counts = torch.zeros((tokens_BJ.shape[0], vocab), dtype=torch.int32, device=tokens_BJ.device)
    return counts.scatter_add_(1, tokens_BJ, inside_BJ.int()) > 0
