"""The decode loop: propose, verify, commit, until every row has stopped. Plain decoding is the loop without drafts.

Shape legend: B batch, N nodes, M = N + 1, J committed tokens of a cycle, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.eval.drafters.base import Drafter
from headstart.eval.engine import Engine
from headstart.eval.sampling import Sampling, draw, penalise, probabilities
from headstart.eval.tree import Tree, empty
from headstart.eval.verify import verify


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
    #: plain decoding with record_gaps: the target's top-1 minus top-2 logit at every token
    gaps: list[float] = field(default_factory=list)


@dataclass
class Decoded:
    """Answers of a batch and the wall-clock seconds of its two phases (device synchronised).

    Attributes:
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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slots_needed(longest_context: int, max_new_tokens: int, drafter: Drafter | None) -> int:
    """KV slots per row for `decode`: a last cycle may overshoot the limit by its whole tree before it is cut."""
    nodes = drafter.max_nodes if drafter is not None else 0
    return longest_context + max_new_tokens + 2 * (nodes + 1)


@torch.inference_mode()
def decode(
    engine: Engine,
    contexts: list[list[int]],
    drafter: Drafter | None,
    sampling: Sampling,
    max_new_tokens: int | list[int],
    stop_ids: set[int] | list[set[int]],
    generator: torch.Generator | None = None,
    record_gaps: bool = False,
) -> Decoded:
    """Decode a batch to the end.

    Args:
        contexts: one non-empty token list per row of the engine.
        drafter: None = plain decoding (τ = 1).
        max_new_tokens, stop_ids: for all rows, or one per row.
        generator: on the engine's device; used at temperature > 0 only.
        record_gaps: fill Answer.gaps (plain decoding only).
    """
    rows = _Rows(len(contexts), max_new_tokens, stop_ids)
    device = engine.device
    synchronize(device)
    began = time.perf_counter()
    logits_BV, context = engine.prefill(contexts)
    seen_BV = _seen(context.tokens_BJ, context.count_B, logits_BV.shape[-1]) if sampling.penalises else None
    roots_B = _first(logits_BV, sampling, generator, seen_BV)
    if drafter is not None:
        drafter.start(context, engine.kv.capacity)
    synchronize(device)
    prefilled = time.perf_counter()
    arrivals = [prefilled]

    gaps = [_gap(logits_BV)] if record_gaps else []
    for row, token in enumerate(roots_B.tolist()):
        rows.take(row, [token])
    active_B = rows.active_B(device)
    while rows.any_active:
        if seen_BV is not None:
            seen_BV.scatter_(1, roots_B[:, None], True)
        proposed = drafter.propose(roots_B, generator) if drafter is not None else empty(engine.batch, device)
        tree = proposed.limit(active_B)
        step = engine.verify(roots_B, tree)
        verdict = verify(tree, step.logits_BMV, sampling, generator, seen_BV)
        accepted = engine.commit(roots_B, tree, step, verdict.path_BK, active_B)
        if seen_BV is not None:
            seen_BV |= _seen(accepted.tokens_BJ, accepted.count_B, seen_BV.shape[1])
        if record_gaps:
            gaps.append(_gap(step.logits_BMV[:, 0]))
        roots_B = torch.where(active_B, verdict.next_B, roots_B)
        if rows.cycle(accepted.tokens_BJ, accepted.count_B, roots_B, drafted_levels(tree), engine):
            active_B = rows.active_B(device)
        arrivals.append(time.perf_counter())
        if drafter is not None:
            accepted.longest = engine.longest
            drafter.commit(accepted)
    synchronize(device)
    finished = time.perf_counter()
    if record_gaps:
        table = torch.stack(gaps, 1).tolist()
        for answer, row_gaps in zip(rows.answers, table, strict=True):
            answer.gaps = row_gaps[: len(answer.tokens)]
    cycle_s = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    return Decoded(rows.answers, prefilled - began, finished - prefilled, cycle_s)


def drafted_levels(tree: Tree) -> Tensor:
    """int64 [B], deepest valid level of each row."""
    if tree.nodes == 0:
        return tree.tokens_BN.new_zeros(tree.tokens_BN.shape[0])
    return torch.where(tree.valid_BN, tree.depth_BN, 0).amax(1)


class _Rows:
    """Host side of the loop: answers, stops, limits."""

    def __init__(self, batch: int, max_new_tokens: int | list[int], stop_ids: set[int] | list[set[int]]):
        self.limits = [max_new_tokens] * batch if isinstance(max_new_tokens, int) else list(max_new_tokens)
        self.stops = list(stop_ids) if isinstance(stop_ids, list) else [set(stop_ids)] * batch
        self.answers = [Answer() for _ in range(batch)]
        self.active = [True] * batch

    @property
    def any_active(self) -> bool:
        return any(self.active)

    def active_B(self, device: torch.device) -> Tensor:
        return torch.tensor(self.active, device=device)

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

    def cycle(self, tokens_BJ: Tensor, count_B: Tensor, next_B: Tensor, drafted_B: Tensor, engine: Engine) -> bool:
        """Book one cycle (one transfer to the host). Returns whether a row finished."""
        columns = [tokens_BJ, count_B[:, None], next_B[:, None], drafted_B[:, None], engine.length_B[:, None]]
        table = torch.cat(columns, 1).tolist()
        engine.longest = max(line[-1] for line in table)
        finished = False
        for row, line in enumerate(table):
            if not self.active[row]:
                continue
            count, following, drafted = line[-4], line[-3], line[-2]
            kept = self.take(row, [*line[1:count], following])
            self.answers[row].cycles.append(Cycle(drafted, min(count - 1, kept), kept))
            finished |= not self.active[row]
        return finished


def _first(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None, seen_BV: Tensor | None) -> Tensor:
    if sampling.greedy:
        return penalise(logits_BV, sampling, seen_BV).argmax(-1)
    return draw(probabilities(logits_BV, sampling, seen_BV), generator)


def _seen(tokens_BJ: Tensor, count_B: Tensor, vocab: int) -> Tensor:
    """bool [B, V]: which tokens occur among the first `count_B` of each row."""
    inside_BJ = torch.arange(tokens_BJ.shape[1], device=tokens_BJ.device) < count_B[:, None]
    counts = torch.zeros((tokens_BJ.shape[0], vocab), dtype=torch.int32, device=tokens_BJ.device)
    return counts.scatter_add_(1, tokens_BJ, inside_BJ.int()) > 0


def _gap(logits_BV: Tensor) -> Tensor:
    top = logits_BV.float().topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]
