"""Decoding cycles captured as CUDA graphs: one launch per cycle. The host reads a cycle's table while the next runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.scheduler import CycleShape
from headstart.eval.kernels.capture import Uncapturable, capture, warm_up
from headstart.eval.kernels.launch import compile_ahead, compiling, synchronize

#: captured cycles of transformers' own forward that must give what the same cycles give without a capture. With more
#: than one, the contexts grow meanwhile: what depends on their length must not stay as it was at the capture
COMPARED = 2
#: cycles of a shape that are timed, where there are several shapes
TIMED = 5
#: cycles that are remembered: the one before, the one whose table is read, the one that runs
ENDS = 3

#: a cycle's table on the host, see Loop.verify. It is overwritten a few cycles later
Table = NDArray[np.int64]
#: gives places of rows that ended to contexts that wait; returns whether it gave any
Refill = Callable[[], bool]


def never() -> bool:
    """A batch for which no context waits."""
    return False


class CycleGraphs:
    """Captured cycles by `graph_key`. Those of one key are captured at its first use.

    Where a cycle cannot be captured, cycles run operation by operation from then on.

    Attributes:
        seconds: spent on choosing kernels, on capturing and on timing.
    """

    def __init__(self) -> None:
        self.captured: dict[tuple[object, ...], _Captured] = {}
        self._latest: _Captured | None = None
        self.seconds = 0.0

    def clear(self) -> None:
        """Forget all graphs, before their buffers are freed."""
        self.captured.clear()
        self._latest = None

    def run(self, loop: Loop, refill: Refill = never) -> Generator[Table, None, None]:
        """Tables of the cycles, without end. The next cycle already runs while the host reads a table.

        Args: refill: called between two cycles, after the host has read a table.
        """
        key = graph_key(loop)
        if key not in self.captured:
            began = time.perf_counter()
            try:
                self.captured[key] = _Captured(loop)
            except Uncapturable as reason:
                loop.engine.give_up_captures(str(reason))
                return uncaptured_cycles(loop, refill)
            finally:
                self.seconds += time.perf_counter() - began
        self._latest = self.captured[key]
        if any(map(loop.scheduler.wants_time, self._latest.cycles)):
            began = time.perf_counter()
            self._latest.time(loop)
            self.seconds += time.perf_counter() - began
        return self._latest.run(loop, refill)

    def replay_latest(self) -> None:
        """Run the latest cycle once more, for measurements. Its result is not read."""
        assert self._latest is not None
        self._latest.latest.graph.replay()

    def device_ms(self, repeats: int = 20) -> float:
        """Milliseconds of the latest cycle when replays follow each other without the host."""
        self.replay_latest()
        return _device_ms(self.replay_latest, repeats)


def _device_ms(run: Callable[[], object], repeats: int) -> float:
    """Mean milliseconds on the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    for _ in range(repeats):
        run()
    marks[1].record()
    marks[1].synchronize()
    return marks[0].elapsed_time(marks[1]) / repeats


def uncaptured_cycles(loop: Loop, refill: Refill = never) -> Generator[Table, None, None]:
    """Tables of the cycles, without end, each run operation by operation. `close` commits the last one as well.

    Args: refill: called between two cycles.
    """
    scheduler = loop.scheduler
    time_shapes(loop)
    while True:
        loop.take(loop.next_shape())
        table = loop.read(loop.verify())
        said = scheduler.said
        try:
            yield table
        finally:
            loop.commit()
        refill()
        scheduler.learn(loop.shape, table, None if said is None else said.cpu().numpy())


def time_shapes(loop: Loop) -> None:
    """Time a cycle of every shape that the scheduler has no time of, and take everything back but keys and values.

    What a cycle writes of these lies beyond the contexts, where the first real cycle writes again.
    """
    scheduler = loop.scheduler
    untimed = [shape for shape in scheduler.shapes() if scheduler.wants_time(shape)]
    before = loop.tensors() if untimed else []
    noise = None if loop.generator is None else loop.generator.get_state()
    for shape in untimed:
        loop.take(shape)
        for _ in range(2):  # the first one may compile kernels
            synchronize(loop.engine.device)
            began = time.perf_counter()
            loop.verify()
            loop.commit()
            synchronize(loop.engine.device)
            seconds = time.perf_counter() - began
            loop.attach(before)
            if loop.generator is not None:
                loop.generator.set_state(noise)
        scheduler.timed(shape, seconds)


def graph_key(loop: Loop) -> tuple[object, ...]:
    """What captured cycles depend on, after `start`: loops with equal keys share them."""
    shapes = tuple((name, tensor.shape) for (_, name), tensor in zip(loop.state, loop.tensors(), strict=True))
    # the objects, not their ids: an id may be used again once its object is gone
    scheduler = loop.scheduler
    return (loop.engine, loop.drafter, scheduler, *scheduler.shapes(), loop.sampling, loop.generator, shapes)


@dataclass
class _Cycle:
    """A captured cycle of one shape.

    Attributes:
        table, said: what a replay fills. said: see Scheduler.said.
        hosts: pinned copies of both, for the cycles whose tables the host may still need.
    """

    shape: CycleShape
    graph: torch.cuda.CUDAGraph
    rule: str | None
    table: Tensor
    said: Tensor | None

    def __post_init__(self) -> None:
        given = [self.table] if self.said is None else [self.table, self.said]
        self.hosts = [[torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in given] for _ in range(ENDS)]

    def launch(self, turn: int, end: torch.cuda.Event) -> None:
        self.graph.replay()
        for host, value in zip(self.hosts[turn], (self.table, self.said), strict=False):
            host.copy_(value, non_blocking=True)
        end.record()


class _Captured:
    """The captured cycles of a loop, one for each shape that its scheduler may ask for, on one state.

    Attributes: latest: the cycle that was launched last.
    """

    def __init__(self, loop: Loop):
        self.held = [tensor.clone() for tensor in loop.tensors()]
        self._before = [value.clone() for value in self.held]
        self._noise = loop.generator.get_state() if loop.generator is not None else None
        self.cycles: dict[CycleShape, _Cycle] = {}
        for shape in loop.scheduler.shapes():
            loop.take(shape)
            try:
                self.cycles[shape] = self.latest = self._cycle(loop, shape)
            finally:
                self._restore(loop)
        self.ends = [torch.cuda.Event(enable_timing=True) for _ in range(ENDS)]

    def time(self, loop: Loop) -> None:
        """Time a cycle of every shape that the scheduler has no time of, on the contexts that `start` has read."""
        before = [value.clone() for value in loop.tensors()]
        noise = loop.generator.get_state() if loop.generator is not None else None
        for shape, cycle in self.cycles.items():
            if loop.scheduler.wants_time(shape):
                _copy(self.held, before)
                cycle.graph.replay()
                loop.scheduler.timed(shape, _device_ms(cycle.graph.replay, TIMED) / 1e3)
        loop.attach(before)
        if loop.generator is not None:
            loop.generator.set_state(noise)

    def _restore(self, loop: Loop) -> None:
        loop.attach(self.held)
        _copy(self.held, self._before)
        if loop.generator is not None:
            loop.generator.set_state(self._noise)

    def _cycle(self, loop: Loop, shape: CycleShape) -> _Cycle:
        with compiling():
            if loop.engine.fused is not None:
                # transformers' own forward writes its buffers by torch itself. A cycle whose kernels are not launched
                # would write slot 0, which holds the context
                compile_ahead(loop.cycle)
                _copy(self.held, self._before)
            loop.attach(self.held)
            loop.choose_ways()
        # this cycle writes KV beyond the contexts only, where the first real cycle writes again
        warm_up(loop.cycle, loop.engine.device)
        loop.attach(self.held)
        generators = [] if loop.generator is None else [loop.generator]

        def cycle() -> tuple[Tensor, Tensor | None]:
            table = loop.cycle()
            _copy(self.held, loop.tensors())
            return table, loop.scheduler.said

        def restore() -> None:
            self._restore(loop)

        def cycles(run: Callable[[], Tensor]) -> list[Tensor]:
            """Tables of a few cycles, one after the other."""
            restore()
            tables = []
            for _ in range(COMPARED):
                tables.append(run().clone())
                loop.attach(self.held)
                if loop.generator is not None:
                    loop.generator.set_state(self._noise)
            return tables

        restore()
        # they never run at the same time, so all share the first one's memory
        pool = self.latest.graph.pool() if self.cycles else None
        graph, (table, said) = capture(cycle, loop.engine.device, generators, pool, restore=restore)
        # code that is not ours may do part of its work on the host, which a replay repeats as it was
        if loop.engine.fused is None:

            def replay() -> Tensor:
                graph.replay()
                return table

            if not all(map(torch.equal, cycles(replay), cycles(lambda: cycle()[0]))):
                raise Uncapturable("captured cycles gave other tokens than the same cycles without a capture")
        return _Cycle(shape, graph, loop.rule, table, said)

    def run(self, loop: Loop, refill: Refill) -> Generator[Table, None, None]:
        _copy(self.held, loop.tensors())
        loop.attach(self.held)
        number, refilled = 0, 0
        running, before = self._launch(loop, number), None
        while True:
            following = self._launch(loop, number + 1)
            # only now, while the card works: it has nothing to do from the moment that places are refilled
            if before is not None:
                loop.scheduler.learn(*before)
            turn = number % ENDS
            end = self.ends[turn]
            end.synchronize()
            table, *said = running.hosts[turn]
            # of one shape no time matters, and contexts are read before the second cycle after places are refilled
            alone = len(self.cycles) > 1 and number > refilled + 2
            seconds = self.ends[(number - 1) % ENDS].elapsed_time(end) / 1e3 if alone else None
            before = running.shape, table.numpy(), said[0].numpy() if said else None, seconds
            yield before[1]
            if refill():
                refilled = number
                # the cycle that already runs ends before these copies: all is on one stream
                _copy(self.held, loop.tensors())
                loop.attach(self.held)
            running, number = following, number + 1

    def _launch(self, loop: Loop, number: int) -> _Cycle:
        """Launch a cycle of the shape that the scheduler wants now. Args: number: of the cycle."""
        cycle = self.cycles[loop.next_shape()]
        # plain cycles follow others for good, so a rule that was used once stays the rule
        loop.rule = cycle.rule or loop.rule
        cycle.launch(number % ENDS, self.ends[number % ENDS])
        self.latest = cycle
        return cycle


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
