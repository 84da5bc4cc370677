"""The cycle of the decode loop: propose, verify, commit, on device tensors only.

Shape legend: B batch, N nodes, M = N + 1, J committed tokens of a cycle, S stop tokens, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.data.row_random import draw_at, uniforms
from headstart.eval.decoding.drafter import Drafter, SizedDrafter
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.rows import Step
from headstart.eval.decoding.sampling import Sampling, add_seen, best, context_seen, draw, probabilities
from headstart.eval.decoding.scheduler import KEEP_ALL, PLAIN, CycleShape, Scheduler
from headstart.eval.decoding.verify import Verified, rule_of, verify
from headstart.eval.kernels.bookkeeping import advance, stops_at, take_path
from headstart.eval.kernels.choices import compile_ways, decide_ways
from headstart.eval.kernels.flat import FlatRows, cut, flatten
from headstart.eval.kernels.launch import compiling
from headstart.eval.tree import Tree, empty

#: last columns of a cycle's table, after its J committed tokens: their count, the next root, levels drafted, context
#: length
COUNT, NEXT, DRAFTED, LENGTH = -4, -3, -2, -1


class Loop:
    """One batch in the decode loop. Its cycle works on device tensors only, so that it can be captured.

    Args:
        drafter: None = plain decoding.
        scheduler: chooses how much is drafted and what is verified.

    Attributes:
        shape: of the next cycle.
        places: roots and nodes of a row in the latest cycle, with those that are cut; 0 before the first one.
        roots_B: int64, tokens that the target has chosen and not yet read.
        active_B: bool, rows that are not finished.
        left_B: int64, tokens that a row may still commit.
        stop_BS: int64, stop tokens of each row, -1 = none.
        seen_BV: bool, tokens of each context, for the repetition penalty; None without one.
        seeds_B: int64, the seed that each row draws its tokens by; None = all rows draw by `generator`.
        rate_K: float32, synthetic acceptance by level, or None.
        logits_BV: the target's, at the last root.
        rule: the rule of the latest verification (`verify.rule_of`); None before it, and for plain decoding.
        longest: host int, length of the longest context that the host knows of.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        sampling: Sampling,
        generator: torch.Generator | None,
        seeds_B: Tensor | None = None,
        scheduler: Scheduler = KEEP_ALL,
    ):
        if seeds_B is not None and (drafter is not None or sampling.synthetic is not None):
            raise ValueError("row seeds: found a drafter or synthetic acceptance, expected plain decoding")
        self.engine, self.drafter, self.sampling, self.generator = engine, drafter, sampling, generator
        self.seeds_B, self.scheduler = seeds_B, scheduler
        self.spec = None if drafter is None else drafter.spec
        self.shape, self._latest, self.places = CycleShape(), PLAIN, 0
        rates = sampling.synthetic
        self.rate_K = None if rates is None else torch.tensor(rates, dtype=torch.float32, device=engine.device)
        self.seen_BV: Tensor | None = None
        self._asides: dict[int, Loop] = {}
        self.rule: str | None = None

    @property
    def captures(self) -> bool:
        return self.engine.captures and (self.drafter is None or self.drafter.captures) and self.scheduler.captures

    @property
    def prepare_s(self) -> float:
        """Seconds spent so far on capturing chunks of prefill and on the drafter's preparation."""
        own = self.engine.prompts.capture_s + (0.0 if self.drafter is None else self.drafter.prepare_s)
        return own + sum(aside.prepare_s for aside in self._asides.values())

    @property
    def state(self) -> list[tuple[object, str]]:
        """(object, attribute) of every tensor that a cycle reads and replaces, KV apart."""
        rates: list[tuple[object, str]] = [] if self.rate_K is None else [(self, "rate_K")]
        return [*self._row_state, *self.scheduler.state, *rates]

    @property
    def row_state(self) -> list[tuple[object, str]]:
        """Those of `state` whose first dimension is the batch."""
        return [*self._row_state, *self.scheduler.row_state]

    @property
    def _row_state(self) -> list[tuple[object, str]]:
        """As `row_state`, without the scheduler's."""
        extra = [name for name in ("seen_BV", "seeds_B") if getattr(self, name) is not None]
        own: list[tuple[object, str]] = [(self, n) for n in ("roots_B", "active_B", "left_B", "stop_BS", *extra)]
        drafters = [] if self.drafter is None else self.drafter.state
        return [*own, *self.engine.state, *drafters]

    def tensors(self) -> list[Tensor]:
        """The tensors that `state` names."""
        return [getattr(owner, name) for owner, name in self.state]

    def attach(self, tensors: list[Tensor]) -> None:
        """Make these the tensors that `state` names."""
        for (owner, name), tensor in zip(self.state, tensors, strict=True):
            setattr(owner, name, tensor)

    @property
    def drafts(self) -> bool:
        """Whether the next cycle drafts."""
        return self.drafter is not None and self.shape.levels != 0

    def take(self, shape: CycleShape) -> None:
        """Give the next cycle its shape."""
        self.shape = shape
        self.scheduler.prepare(shape)
        if self.drafts and isinstance(self.drafter, SizedDrafter):
            self.drafter.levels, self.drafter.nodes = shape.levels, shape.nodes
            self.drafter.levels_before = None if shape.says else shape.levels

    def next_shape(self) -> CycleShape:
        """The shape that the scheduler wants for the next cycle, see CycleShape.after."""
        self._latest = self.scheduler.next_shape().after(self._latest)
        return self._latest

    def choose_ways(self) -> None:
        """Choose the fastest kernels for the matrix products of a cycle of this shape (CUDA only), after one ran."""
        engine, drafter = self.engine, self.drafter
        rows = self.shape.rows or engine.batch * self.places
        drafts = [] if drafter is None or not self.drafts else drafter.products(engine.batch)
        with compiling():
            # compile all of them before timing the first
            if engine.fused is not None:
                engine.fused.compile_ways(rows)
            for linears, count in drafts:
                compile_ways(linears, count, engine.choices)
            if engine.fused is not None:
                engine.fused.choose_ways(rows)
            for linears, count in drafts:
                decide_ways(linears, count, engine.choices)

    def start(
        self, contexts: list[list[int]], limits: list[int], stops: list[set[int]], most_stops: int = 1
    ) -> None:
        """Prefill, choose the first roots, hand the contexts to the drafter.

        Args: most_stops: stop tokens that any row may have, of those admitted later too.
        """
        engine, device = self.engine, self.engine.device
        self.logits_BV, context = engine.prefill(contexts, self.spec)
        self.longest = max(map(len, contexts))
        vocab = self.logits_BV.shape[-1]
        self.seen_BV = context_seen(self.sampling, context.tokens_BJ, context.count_B, vocab)
        self.roots_B = self._choose(self.logits_BV)
        widest = max(most_stops, *map(len, stops), 1)
        padded = [[*sorted(stop), *[-1] * (widest - len(stop))] for stop in stops]
        self.stop_BS = torch.tensor(padded, device=device)
        self.left_B = torch.tensor(limits, device=device) - 1
        self.active_B = (self.left_B > 0) & ~stops_at(self.roots_B[:, None], self.stop_BS)[:, 0]
        if self.drafter is not None:
            self.drafter.start(context, engine.capacity)
        self.scheduler.start(context)

    def aside(self, places: int = 1) -> Loop:
        """The batch, of so many rows, in which admitted contexts start."""
        if places not in self._asides:
            drafter = None if self.drafter is None else self.drafter.aside()
            engine, scheduler = self.engine.aside(places), self.scheduler.aside()
            self._asides[places] = Loop(engine, drafter, self.sampling, self.generator, None, scheduler)
        return self._asides[places]

    def _choose(self, logits_BV: Tensor, ahead: int = 0) -> Tensor:
        """The target's next token of every row. Args: ahead: tokens between the context's end and its position."""
        if self.sampling.greedy:
            return best(logits_BV, self.sampling, self.seen_BV)
        p_BV = probabilities(logits_BV, self.sampling, self.seen_BV)
        if self.seeds_B is not None:
            return draw_at(p_BV, uniforms(self.seeds_B, self.engine.length_B + ahead))
        return draw(p_BV, self.generator)

    def forward(self, tree: Tree, flat: FlatRows | None = None) -> Step:
        """The target's forward over the roots and a tree. Args: flat: see Engine.verify."""
        self.places = tree.nodes + 1
        return self.engine.verify(self.roots_B, tree, self.spec if self.drafts else None, self.longest, flat)

    def verify(self) -> Tensor:
        """Propose and verify. Returns the cycle's table: int64 [B, J + 4], see COUNT; `commit` must follow."""
        engine, roots_B, active_B = self.engine, self.roots_B, self.active_B
        self.seen_BV = add_seen(self.seen_BV, roots_B[:, None])
        tree, flat = self._propose(roots_B, active_B) if self.drafts else (empty(engine.batch, engine.device), None)
        step = self.forward(tree, flat)
        self.logits_BV = step.roots_BV
        self.rule = rule_of(tree, self.sampling)
        if self.seeds_B is not None:
            verified = Verified(tree.tokens_BN, torch.zeros_like(roots_B), self._choose(self.logits_BV, ahead=1))
        else:
            verified = verify(
                tree, step.logits, self.sampling, self.generator, self.seen_BV, self.rate_K, step.flat
            )
        taken = take_path(tree, roots_B, verified.path_BK, active_B, engine.length_B, engine.kv.bin)
        self.accepted = accepted = engine.take(tree, step, taken)
        self.seen_BV = add_seen(self.seen_BV, accepted.tokens_BJ, accepted.count_B)
        after = advance(tree, taken, verified.next_B, roots_B, self.left_B, active_B, self.stop_BS)
        self.roots_B, self.left_B, self.active_B = after.roots_B, after.left_B, after.active_B
        return after.table

    def _propose(self, roots_B: Tensor, active_B: Tensor) -> tuple[Tree, FlatRows | None]:
        """What is verified, and its flat rows if the shape has a number of them."""
        assert self.drafter is not None
        shape, scheduler = self.shape, self.scheduler
        tree = self.drafter.propose(roots_B, self.generator).keep(active_B[:, None])
        if shape.levels is not None:
            tree = tree.first(shape.levels)
        kept_BN = scheduler.choose(tree, roots_B, active_B)
        tree = tree if kept_BN is None else tree.keep(kept_BN)
        reach_BN = scheduler.reach(tree) if shape.says else None
        if shape.rows is None:
            return tree, None
        flat = flatten(tree.valid_BN, shape.rows) if reach_BN is None else cut(reach_BN, tree.valid_BN, shape.rows)
        return tree.keep(flat.kept_BM[:, 1:]), flat

    def read(self, table: Tensor) -> NDArray[np.int64]:
        """A cycle's table on the host. Sets `longest`, by which forwards that are not captured read less KV."""
        lines: NDArray[np.int64] = table.cpu().numpy()
        self.longest = int(lines[:, LENGTH].max())
        return lines

    def commit(self) -> None:
        """Give the drafter what the last `verify` committed."""
        if self.drafter is not None and self.drafts:
            self.drafter.commit(self.accepted)

    def cycle(self) -> Tensor:
        table = self.verify()
        self.commit()
        return table
