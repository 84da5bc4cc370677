"""Decoding cycles captured as CUDA graphs: one launch a cycle, whose table the host looks at one cycle later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from headstart.eval.decoding.loop import Loop
from headstart.eval.kernels.launch import compile_ahead, compiling, warm_up


class CycleGraphs:
    """Cycles captured as CUDA graphs, by what they run on; each is captured at its first use."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[object, ...], _CycleGraph] = {}
        self._latest: _CycleGraph | None = None
        #: seconds spent on choosing kernels and on capturing
        self.seconds = 0.0

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs, as the buffers they run on are to go."""
        self._graphs.clear()
        self._latest = None

    def run(self, loop: Loop) -> Iterator[list[list[int]]]:
        """Tables of the cycles, without end. The next cycle runs while the host looks at a table."""
        key = graph_key(loop)
        if key not in self._graphs:
            began = time.perf_counter()
            self._graphs[key] = _CycleGraph(loop)
            self.seconds += time.perf_counter() - began
        self._latest = self._graphs[key]
        return self._latest.run(loop)

    def replay_latest(self) -> None:
        """The cycle that ran last, once more and without looking at it: for measurements, after a run."""
        assert self._latest is not None
        self._latest.graph.replay()

    def device_ms(self, repeats: int = 20) -> float:
        """Milliseconds of the cycle that ran last when the host keeps out of its way."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.replay_latest()
        marks[0].record()
        for _ in range(repeats):
            self.replay_latest()
        marks[1].record()
        marks[1].synchronize()
        return marks[0].elapsed_time(marks[1]) / repeats


def graph_key(loop: Loop) -> tuple[object, ...]:
    """What a captured cycle runs on, after `start`: loops with equal keys share one."""
    shapes = tuple((name, tensor.shape) for (_, name), tensor in zip(loop.state, loop.tensors(), strict=True))
    # the objects themselves are part of the key: an id would be taken again once they are gone
    return (loop.engine, loop.drafter, loop.scheduler, loop.sampling, loop.generator, shapes)


class _CycleGraph:
    def __init__(self, loop: Loop):
        self.held = [tensor.clone() for tensor in loop.tensors()]
        before = [value.clone() for value in self.held]
        noise = loop.generator.get_state() if loop.generator is not None else None
        with compiling():
            compile_ahead(loop.cycle)
            _copy(self.held, before)
            loop.attach(self.held)
            loop.choose_ways()
        # KV that this cycle writes lies beyond the contexts, where the next one writes it again
        warm_up(loop.cycle, loop.engine.device)
        loop.attach(self.held)
        self.graph = torch.cuda.CUDAGraph()
        if loop.generator is not None:
            self.graph.register_generator_state(loop.generator)
        with torch.cuda.graph(self.graph):
            self.table = loop.cycle()
            _copy(self.held, loop.tensors())
        loop.attach(self.held)
        _copy(self.held, before)
        if loop.generator is not None:
            loop.generator.set_state(noise)
        self.host = [torch.empty(self.table.shape, dtype=self.table.dtype, pin_memory=True) for _ in range(2)]
        self.done = [torch.cuda.Event() for _ in range(2)]

    def run(self, loop: Loop) -> Iterator[list[list[int]]]:
        _copy(self.held, loop.tensors())
        loop.attach(self.held)
        turn = 0
        self._launch(turn)
        while True:
            self._launch(1 - turn)
            self.done[turn].synchronize()
            yield self.host[turn].tolist()
            turn = 1 - turn

    def _launch(self, turn: int) -> None:
        self.graph.replay()
        self.host[turn].copy_(self.table, non_blocking=True)
        self.done[turn].record()


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors of the same shapes, with one launch per dtype. A tensor is not copied onto itself."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(into, values, strict=True):
        if place is not value:
            places, sources = pairs.setdefault(place.dtype, ([], []))
            places.append(place)
            sources.append(value)
    for places, sources in pairs.values():
        torch._foreach_copy_(places, sources)
