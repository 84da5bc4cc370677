"""Decoding cycles captured as CUDA graphs: one launch per cycle. The host reads a cycle's table while the next runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from headstart.eval.decoding.loop import Loop
from headstart.eval.kernels.capture import Uncapturable, capture, warm_up
from headstart.eval.kernels.launch import compile_ahead, compiling

#: captured cycles of transformers' own forward that must give what the same cycles give without a capture. With more
#: than one, the contexts grow meanwhile: what depends on their length must not stay as it was at the capture
COMPARED = 2

#: gives places of rows that ended to contexts that wait; returns whether it gave any
Refill = Callable[[], bool]


def never() -> bool:
    """A batch for which no context waits."""
    return False


class CycleGraphs:
    """Captured cycles by `graph_key`. Each is captured at its first use.

    Where a cycle cannot be captured, cycles run operation by operation from then on.

    Attributes:
        seconds: spent on choosing kernels and on capturing.
    """

    def __init__(self) -> None:
        self.captured: dict[tuple[object, ...], _CycleGraph] = {}
        self._latest: _CycleGraph | None = None
        self.seconds = 0.0

    def clear(self) -> None:
        """Forget all graphs, before their buffers are freed."""
        self.captured.clear()
        self._latest = None

    def run(self, loop: Loop, refill: Refill = never) -> Generator[list[list[int]], None, None]:
        """Tables of the cycles, without end. The next cycle already runs while the host reads a table.

        Args: refill: called between two cycles, after the host has read a table.
        """
        key = graph_key(loop)
        if key not in self.captured:
            began = time.perf_counter()
            try:
                self.captured[key] = _CycleGraph(loop)
            except Uncapturable as reason:
                loop.engine.give_up_captures(str(reason))
                return uncaptured_cycles(loop, refill)
            finally:
                self.seconds += time.perf_counter() - began
        self._latest = self.captured[key]
        return self._latest.run(loop, refill)

    def replay_latest(self) -> None:
        """Run the latest cycle once more, for measurements. Its result is not read."""
        assert self._latest is not None
        self._latest.graph.replay()

    def device_ms(self, repeats: int = 20) -> float:
        """Milliseconds of the latest cycle when replays follow each other without the host."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.replay_latest()
        marks[0].record()
        for _ in range(repeats):
            self.replay_latest()
        marks[1].record()
        marks[1].synchronize()
        return marks[0].elapsed_time(marks[1]) / repeats


def uncaptured_cycles(loop: Loop, refill: Refill = never) -> Generator[list[list[int]], None, None]:
    """Tables of the cycles, without end, each run operation by operation. `close` commits the last one as well.

    Args: refill: called between two cycles.
    """
    while True:
        table = loop.read(loop.verify())
        try:
            yield table
        finally:
            loop.commit()
        refill()


def graph_key(loop: Loop) -> tuple[object, ...]:
    """What a captured cycle depends on, after `start`: loops with equal keys share one graph."""
    shapes = tuple((name, tensor.shape) for (_, name), tensor in zip(loop.state, loop.tensors(), strict=True))
    # the objects, not their ids: an id may be used again once its object is gone
    scheduler = loop.scheduler
    return (loop.engine, loop.drafter, scheduler, scheduler.rows, loop.sampling, loop.generator, shapes)


class _CycleGraph:
    def __init__(self, loop: Loop):
        self.held = [tensor.clone() for tensor in loop.tensors()]
        before = [value.clone() for value in self.held]
        noise = loop.generator.get_state() if loop.generator is not None else None
        with compiling():
            if loop.engine.fused is not None:
                # transformers' own forward writes its buffers by torch itself. A cycle whose kernels are not launched
                # would write slot 0, which holds the context
                compile_ahead(loop.cycle)
                _copy(self.held, before)
            loop.attach(self.held)
            loop.choose_ways()
        # this cycle writes KV beyond the contexts only, where the first real cycle writes again
        warm_up(loop.cycle, loop.engine.device)
        loop.attach(self.held)
        generators = [] if loop.generator is None else [loop.generator]

        def cycle() -> Tensor:
            table = loop.cycle()
            _copy(self.held, loop.tensors())
            return table

        def restore() -> None:
            loop.attach(self.held)
            _copy(self.held, before)
            if loop.generator is not None:
                loop.generator.set_state(noise)

        def cycles(run: Callable[[], Tensor]) -> list[Tensor]:
            """Tables of a few cycles, one after the other."""
            restore()
            tables = []
            for _ in range(COMPARED):
                tables.append(run().clone())
                loop.attach(self.held)
                if loop.generator is not None:
                    loop.generator.set_state(noise)
            return tables

        def replay() -> Tensor:
            self.graph.replay()
            return self.table

        restore()
        try:
            self.graph, self.table = capture(cycle, loop.engine.device, generators, restore=restore)
            # code that is not ours may do part of its work on the host, which a replay repeats as it was
            if loop.engine.fused is None and not all(map(torch.equal, cycles(replay), cycles(cycle))):
                raise Uncapturable("captured cycles gave other tokens than the same cycles without a capture")
        finally:
            restore()
        self.rule = loop.rule
        self.host = [torch.empty(self.table.shape, dtype=self.table.dtype, pin_memory=True) for _ in range(2)]
        self.done = [torch.cuda.Event() for _ in range(2)]

    def run(self, loop: Loop, refill: Refill) -> Generator[list[list[int]], None, None]:
        _copy(self.held, loop.tensors())
        loop.attach(self.held)
        loop.rule = self.rule
        turn = 0
        self._launch(turn)
        while True:
            self._launch(1 - turn)
            self.done[turn].synchronize()
            yield self.host[turn].tolist()
            if refill():
                # the cycle that already runs ends before these copies: all is on one stream
                _copy(self.held, loop.tensors())
                loop.attach(self.held)
            turn = 1 - turn

    def _launch(self, turn: int) -> None:
        self.graph.replay()
        self.host[turn].copy_(self.table, non_blocking=True)
        self.done[turn].record()


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its place, with one launch per dtype. A tensor is not copied onto itself."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(into, values, strict=True):
        if place is not value:
            places, sources = pairs.setdefault(place.dtype, ([], []))
            places.append(place)
            sources.append(value)
    for places, sources in pairs.values():
        torch._foreach_copy_(places, sources)
