"""What the parts of a decoding cycle cost: drafting, the target's forward, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from headstart.eval.decoding.loop import Loop
from headstart.eval.drafters import Drafter
from headstart.eval.kernels.launch import graph_time, host_time

if TYPE_CHECKING:
    from headstart.eval.decoding.session import Decoder


def cycle_parts(decoder: Decoder, drafter: Drafter, contexts: list[list[int]], repeats: int = 5) -> dict[str, float]:
    """Milliseconds of one cycle after the given contexts: {"draft_ms", "verify_ms", "rest_ms"}.

    `verify_ms` is the target's forward over the tree. The rest accepts drafts, moves their keys and values into place
    and hands features to the draft. On a GPU these are device times of captured graphs.
    """
    loop = started_loop(decoder, drafter, contexts)
    if loop.captures:
        loop.choose_ways()
    with torch.inference_mode():
        before = loop.tensors()
        tree = drafter.propose(loop.roots_B, loop.generator)
        loop.attach(before)
    draft = loop_seconds(loop, lambda: drafter.propose(loop.roots_B, loop.generator), repeats)
    verify = loop_seconds(loop, lambda: loop.forward(tree), repeats)
    whole = loop_seconds(loop, loop.cycle, repeats)
    return {"draft_ms": draft * 1e3, "verify_ms": verify * 1e3, "rest_ms": max(whole - draft - verify, 0.0) * 1e3}


def plain_cycle(decoder: Decoder, contexts: list[list[int]], repeats: int = 10) -> dict[str, float]:
    """Milliseconds of a plain cycle: {"wall_ms", "device_ms"} (CUDA only); the same twice if cycles are captured.

    `device_ms` is the time of the same work when all of it is queued before the card begins. It is an upper bound of
    the card's work: where the work waits for the host in between, or is longer than the queue, it contains waiting too.
    """
    loop = started_loop(decoder, None, contexts)
    if loop.captures:
        replayed = loop_seconds(loop, loop.cycle, repeats) * 1e3
        return {"wall_ms": replayed, "device_ms": replayed}
    before = loop.tensors()

    def cycle() -> None:
        loop.attach(before)
        loop.cycle()

    with torch.inference_mode():
        wall = host_time(cycle, loop.roots_B.device, repeats)
        device = sorted(_queued_ms(cycle, 2 * wall) for _ in range(3))[1]
        loop.attach(before)
    return {"wall_ms": wall, "device_ms": min(device, wall)}


def _queued_ms(run: Callable[[], object], busy_ms: float) -> float:
    """Milliseconds of `run` on the card, queued while the card is kept busy for about `busy_ms`."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    marks[0].record()
    torch.cuda._sleep(1_000_000)
    marks[1].record()
    marks[1].synchronize()
    torch.cuda._sleep(int(1_000_000 * busy_ms / marks[0].elapsed_time(marks[1])))
    marks[2].record()
    run()
    marks[3].record()
    marks[3].synchronize()
    return marks[2].elapsed_time(marks[3])


def started_loop(decoder: Decoder, drafter: Drafter | None, contexts: list[list[int]]) -> Loop:
    """A started loop whose buffers hold the contexts, with room for one more tree."""
    # to decode one token makes the buffers and runs no cycle
    decoder.run(contexts, drafter, 1, seed=0)
    assert decoder.engine is not None
    # a capture draws from the device's own generator, everything else from the decoder's
    generator = None if decoder.engine.captures else decoder.generator
    loop = Loop(decoder.engine, drafter, decoder.sampling, generator)
    stops: list[set[int]] = [set() for _ in contexts]
    with torch.inference_mode():
        loop.start(contexts, [2] * len(contexts), stops)
    # a drafter keeps the size that an earlier scheduler gave it
    loop.take(loop.shape)
    return loop


def loop_seconds(loop: Loop, run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `run` on the loop's state, which is restored afterwards."""
    before = loop.tensors()

    def again() -> None:
        loop.attach(before)
        run()

    with torch.inference_mode():
        try:
            if loop.captures:
                return graph_time(again, repeats) / 1e3
            return host_time(again, loop.roots_B.device, repeats) / 1e3
        finally:
            loop.attach(before)
