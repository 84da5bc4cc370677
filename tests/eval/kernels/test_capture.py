"""A capture that fails leaves streams and generators as they were; a card is played by a small stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstart.eval.kernels import capture as capture_module
from headstart.eval.kernels.capture import Uncapturable, capture, warm_up

MAIN, SIDE = "main", "side"


class Generator:
    """Knows whether a capture has begun and not ended, as torch's does."""

    def __init__(self, inside: bool = False):
        self.inside = inside

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_set_state(self, state: Generator) -> None:
        self.inside = state.inside


class Card:
    """torch.cuda as far as `capture` uses it. Asking the host ends a capture for good, as on a card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.stream, self.mode, self.capturing, self.spoilt = MAIN, 0, False, False
        self.own = Generator()
        for name, value in {
            "get_sync_debug_mode": lambda: self.mode, "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
            "current_stream": self.current, "set_stream": self.set_stream, "CUDAGraph": Graph,
            "graph": lambda graph, pool: Context(self, graph), "default_generators": (self.own,),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(capture_module, "warm_up", lambda run, device=None: run())

    def current(self, device: Any = None) -> Any:
        return type("Stream", (), {"device_index": 0, "name": self.stream})()

    def set_stream(self, stream: Any) -> None:
        self.stream = stream.name

    def ask(self) -> None:
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.fail()

    def fail(self, error: type[Exception] = RuntimeError) -> None:
        """Something that only a capture does not allow."""
        if self.capturing:
            self.spoilt = True
            raise error("operation not permitted when stream is capturing")


class Graph:
    def __init__(self) -> None:
        self.generators: list[Generator] = []

    def register_generator_state(self, generator: Generator) -> None:
        self.generators.append(generator)


class Context:
    """torch.cuda.graph: where the capture fails, ending it raises, and the stream is not given back."""

    def __init__(self, card: Card, graph: Graph):
        self.card, self.generators = card, [card.own, *graph.generators]

    def __enter__(self) -> None:
        self.card.stream, self.card.capturing = SIDE, True
        for generator in self.generators:
            generator.inside = True

    def __exit__(self, *error: object) -> None:
        self.card.capturing = False
        if self.card.spoilt:
            raise RuntimeError("capture was invalidated")
        self.card.stream = MAIN
        for generator in self.generators:
            generator.inside = False


def untouched(card: Card, generator: Generator) -> bool:
    return card.stream == MAIN and card.mode == 0 and not (card.own.inside or generator.inside or card.capturing)


def test_work_runs_once_before_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    card, generator, modes = Card(monkeypatch), Generator(), []

    def run() -> int:
        modes.append(card.mode)
        return len(modes)

    restored: list[int] = []
    _, made = capture(run, None, [generator], restore=lambda: restored.append(len(modes)))  # type: ignore[list-item]
    assert modes == ["error", 0] and made == 2 and restored == [1] and untouched(card, generator)


@pytest.mark.parametrize("what", ["ask", "fail"])
def test_a_failed_capture_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    card, generator = Card(monkeypatch), Generator()
    run: Callable[[], None] = getattr(card, what)
    with pytest.raises(Uncapturable, match="RuntimeError: (called a synchronizing|capture was invalidated)"):
        capture(run, None, [generator])  # type: ignore[list-item]
    assert untouched(card, generator)


@pytest.mark.parametrize("when", ["before", "capture"])
def test_out_of_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    card, generator = Card(monkeypatch), Generator()

    def run() -> None:
        if card.capturing or when == "before":
            raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        capture(run, None, [generator])  # type: ignore[list-item]
    assert untouched(card, generator)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_card_work_that_waits_for_the_host_is_refused_and_everything_goes_on() -> None:
    x, generator = torch.ones(8, device="cuda"), torch.Generator("cuda").manual_seed(3)
    stream = torch.cuda.current_stream()

    def asks() -> torch.Tensor:
        return x[x > 0] * torch.rand(8, device="cuda", generator=generator)

    def asks_only_inside() -> torch.Tensor:
        return asks() if torch.cuda.is_current_stream_capturing() else x * 2

    for run in (asks, asks_only_inside):
        warm_up(run)
        with pytest.raises(Uncapturable):
            capture(run, generators=[generator])
        assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
        assert float(asks().sum()) > 0 and float(torch.rand(8, device="cuda").sum()) > 0
        generator.manual_seed(3)
        once = torch.rand(8, device="cuda", generator=generator)
        generator.manual_seed(3)
        graph, made = capture(lambda: x * torch.rand(8, device="cuda", generator=generator), generators=[generator])
        generator.manual_seed(3)
        graph.replay()
        assert torch.equal(made, once)
