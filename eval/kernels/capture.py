"""Captures work as a CUDA graph. Where that fails, everything is left as it was.

Work that synchronises with the host cannot be captured: a loop over the chosen experts, for instance. A failed capture
does damage: torch stays on the capture's stream, and generators believe that the capture goes on. So the work runs once
before, under torch's check for synchronisation, which raises an ordinary error. If the capture fails even so, streams
and generators are restored as far as torch allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from headstart.heads.errors import in_one_line

T = TypeVar("T")


class Uncapturable(Exception):
    """The work cannot be captured as a CUDA graph; the message says why. It may still run operation by operation."""


def warm_up(run: Callable[[], object], device: torch.device | None = None) -> None:
    """Run once before a capture, on a stream of its own: kernels compile and libraries set themselves up here."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)


def capture(
    run: Callable[[], T],
    device: torch.device | None = None,
    generators: Sequence[torch.Generator] = (),
    pool: Any = None,
    restore: Callable[[], object] = lambda: None,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture `run`, after `warm_up(run)`.

    Args:
        generators: that `run` draws from, besides the device's own.
        restore: undoes what a run changes on the host; called after the run before the capture.
    Returns: the graph, and what `run` returned: tensors that a replay fills.
    Raises: Uncapturable; out of memory as it is. The streams and generators are then as before, apart from the numbers
        that were drawn.
    """
    try:
        with _no_synchronisation():
            warm_up(run, device)
    except Exception as error:  # noqa: BLE001 - whatever it is, the work may run without a capture
        _raise(error)
    restore()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(device)
    try:
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=pool):
            made = run()
    except Exception as error:  # noqa: BLE001 - as above
        _restore(stream, [*generators, *_own_generator(stream)])
        _raise(error)
    return graph, made


def _raise(error: Exception) -> None:
    if isinstance(error, (torch.OutOfMemoryError, Uncapturable)):
        raise error
    raise Uncapturable(in_one_line(error)) from error


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    """While open, an operation that waits for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this check a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _own_generator(stream: torch.cuda.Stream) -> list[torch.Generator]:
    """The generator of the stream's device, which every capture registers."""
    generators = torch.cuda.default_generators
    index = stream.device_index
    return [generators[index]] if index < len(generators) else []


def _restore(stream: torch.cuda.Stream, generators: Sequence[torch.Generator]) -> None:
    """Undo what a failed capture leaves behind: its stream as the current one, generators inside a capture."""
    torch.cuda.set_stream(stream)
    for generator in generators:
        with suppress(RuntimeError):
            # a copy of the state holds the same seed and offset, and knows of no capture
            generator.graphsafe_set_state(generator.clone_state())
