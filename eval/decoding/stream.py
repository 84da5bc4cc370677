"""Plain decoding of requests that come one after another: a row that ended gives its answer out and takes the next
request (continuous batching).

The cycles are those of `decode`. What the host does per cycle is done for all rows at once, so that it stays well below
the time of a cycle with hundreds of rows. Rows that are free wait for each other, and are filled together: the whole
batch stands still while prompts are read.

Shape legend: B batch, L longest answer, n rows that begin.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from headstart.data.distilling.answering import Answer, Request, Requests
from headstart.eval.decoding.admission import admit_rows
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.graphs import CycleGraphs, Table, uncaptured_cycles
from headstart.eval.decoding.loop import COUNT, NEXT, Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.kernels.launch import synchronize

#: rows that are filled together: a part of the batch, and at most so many. With more, rows would stay empty for longer,
#: and prompts of up to 256 tokens would no longer be read by a captured forward (prefill.CAPTURED_TOKENS)
PART, MOST = 16, 16
#: cycles after which free rows are filled although they are fewer
PATIENCE = 16
#: latest cycles whose times tell how long one takes
REMEMBERED = 10
#: most prompt tokens, padding included, that the first batch reads at once
START_TOKENS = 1 << 14


class Stream:
    """One batch of an endless queue.

    Args:
        engine: every prompt and answer must fit into its slots: those that do not stay in `requests`.
        max_new_tokens: of every answer.
        generator: as in `decode`.
        graphs: where captured cycles are kept; None = every cycle runs operation by operation.

    Attributes:
        running: the request of every row, None where it is free.
        cycles: how many were run.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Requests,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: set[int],
        generator: torch.Generator | None = None,
        graphs: CycleGraphs | None = None,
    ):
        self.engine, self.requests, self.sampling, self.graphs = engine, requests, sampling, graphs
        self.limit, self.stops, self.generator = max_new_tokens, stop_ids, generator
        # a last cycle may write one more token than the answer has
        self.longest = engine.capacity - max_new_tokens - 2
        self.places = min(max(engine.batch // PART, 1), MOST)
        self.running: list[Request | None] = [None] * engine.batch
        self.cycles = 0
        self._stop_S = np.array(sorted(stop_ids), dtype=np.int64)
        self._tokens_BL = np.zeros((engine.batch, max_new_tokens), dtype=np.int64)
        self._count_B = np.zeros(engine.batch, dtype=np.int64)
        self._active_B = np.zeros(engine.batch, dtype=bool)
        self._done: deque[Answer] = deque()
        self._arrivals = deque[float](maxlen=REMEMBERED)
        self._waited = 0

    @property
    def in_flight(self) -> list[Request]:
        return [request for request in self.running if request is not None]

    @torch.inference_mode()
    def answers(self) -> Iterator[Answer]:
        """The requests' answers, each as soon as its last token is known."""
        first = self.requests.take(self.engine.batch, self.longest)
        if not first:
            return
        loop = self._start(first)
        yield from self.give()
        while self._fill(loop, every=True):
            yield from self.give()
        if not self._active_B.any():
            return
        captured = self.graphs is not None and loop.captures
        run = self.graphs.run if self.graphs is not None and captured else uncaptured_cycles
        with closing(run(loop, lambda: self._refill(loop))) as cycles:
            for table in cycles:
                self.cycles += 1
                self._add(table)
                # a captured cycle runs meanwhile
                yield from self.give(self._spare_s() if captured else None)
                if not self._active_B.any() and not self.requests.waiting(1, self.longest):
                    break
        # one captured cycle too many is still running, on buffers and graphs that may go now
        synchronize(self.engine.device)

    def give(self, seconds: float | None = None) -> Iterator[Answer]:
        """Answers that are finished and were not given yet.

        Args: seconds: after which the rest waits for the next cycle, unless much waits or nothing is decoded. Many rows
            may end at once, and what is done with their answers must not keep the device waiting. None = give all.
        """
        began = time.perf_counter()
        while self._done:
            yield self._done.popleft()
            late = seconds is not None and time.perf_counter() - began >= seconds
            if late and len(self._done) < self.engine.batch and self._active_B.any():
                return

    def _spare_s(self) -> float:
        """Seconds of the running cycle that may go by before the host must launch the next one."""
        self._arrivals.append(time.perf_counter())
        between = sorted(after - before for before, after in pairwise(self._arrivals))
        # some took longer, because prompts were read, and some seemed to take none, because the host came late
        return between[len(between) // 2] / 2 if between else 0.0

    def _start(self, first: list[Request]) -> Loop:
        """Read the first prompts, unless they would take much memory at once. Rows without one are idle."""
        batch = self.engine.batch
        widest = max(len(request.prompt_ids) for request in first)
        if batch * min(widest, self.engine.prompts.chunk) > START_TOKENS:
            self.requests.put_back(first)
            first = []
        self.running[: len(first)] = first
        idle = batch - len(first)
        contexts = [list(request.prompt_ids) for request in first] + [[0]] * idle
        limits, stops = [self.limit] * len(first) + [1] * idle, [self.stops] * batch
        loop = Loop(self.engine, None, self.sampling, self.generator, self._seeds(first, batch))
        loop.start(contexts, limits, stops)
        self._begin(list(range(len(first))), loop.roots_B.tolist())
        return loop

    def _seeds(self, requests: list[Request], rows: int) -> Tensor | None:
        if self.sampling.greedy:
            return None
        seeds = [request.seed for request in requests] + [0] * (rows - len(requests))
        return torch.tensor(seeds, dtype=torch.int64, device=self.engine.device)

    def _refill(self, loop: Loop) -> bool:
        """Between two cycles: fill rows if enough are free. Returns whether any was filled."""
        active = int(self._active_B.sum())
        if active == self.engine.batch or not self.requests.waiting(1, self.longest):
            return False
        self._waited += 1
        return self._fill(loop, every=self._waited >= PATIENCE or not active)

    def _fill(self, loop: Loop, every: bool) -> bool:
        """Fill free rows, `places` together; with `every` also those that are fewer. Returns whether any was filled."""
        filled = False
        while True:
            free = np.flatnonzero(~self._active_B)[: self.places].tolist()
            count = self.requests.waiting(len(free), self.longest)
            if not count or (count < self.places and not every):
                return filled
            taken = self.requests.take(count, self.longest)
            if not taken:  # the time is over since
                return filled
            rows = free[: len(taken)]
            for row, request in zip(rows, taken, strict=True):
                self.running[row] = request
            contexts, limits = [list(request.prompt_ids) for request in taken], [self.limit] * len(taken)
            seeds_n = self._seeds(taken, len(taken))
            stops = [self.stops] * len(taken)
            self._begin(rows, admit_rows(loop, rows, contexts, limits, stops, seeds_n, self.places))
            self._waited, filled = 0, True

    def _begin(self, rows: list[int], tokens: list[int]) -> None:
        """Rows begin their requests, of which the first tokens are known."""
        self._active_B[rows] = True
        self._count_B[rows] = 0
        self._put(np.array(rows, dtype=np.int64), np.array(tokens[: len(rows)], dtype=np.int64))

    def _add(self, table: Table) -> None:
        """What a cycle committed. Args: table: see Loop.verify."""
        # a cycle that began before a row's request was admitted took nothing from this row
        row_n = np.flatnonzero(self._active_B & (table[:, COUNT] > 0))
        self._put(row_n, table[row_n, NEXT])

    def _put(self, row_n: np.ndarray, token_n: np.ndarray) -> None:
        """Append a token to each of these rows' answers, and end those that it completes."""
        self._tokens_BL[row_n, self._count_B[row_n]] = token_n
        self._count_B[row_n] += 1
        stopped_n = (token_n[:, None] == self._stop_S).any(1)
        ended_n = stopped_n | (self._count_B[row_n] >= self.limit)
        for row, stopped in zip(row_n[ended_n].tolist(), stopped_n[ended_n].tolist(), strict=True):
            request, self.running[row] = self.running[row], None
            assert request is not None
            self._active_B[row] = False
            tokens = tuple(self._tokens_BL[row, : self._count_B[row]].tolist())
            self._done.append(Answer(request, tokens, "stop" if stopped else "length"))
