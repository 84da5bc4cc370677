"""Prefill: whole contexts go through the target in chunks.

Chunks have few different widths, so that a chunk captured as a CUDA graph serves many prompts.

Shape legend: B batch, M tokens of a chunk, T context, J tokens for the drafter, D hidden, k streams, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.rows import Rows, Step
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.capture import Uncapturable, capture, warm_up
from headstart.eval.kernels.launch import compile_ahead, synchronize
from headstart.heads.batch import FeatureSpec

#: most prompt tokens (rows × chunk) of a captured forward: larger ones keep a card busy for longer than the host needs
#: to queue them
CAPTURED_TOKENS = 4096
#: narrowest captured chunk
NARROWEST = 32

#: (tokens_BM, visibility, upper bound of the slots that are seen) → result of a forward, logits of the last column only
Forward = Callable[[Tensor, Visibility, int], Step]


class Prefill:
    """Fills the KV buffers of one engine with contexts.

    Args:
        batch: rows of the engine.
        chunk: most prompt tokens per row of one forward.
        bin: KV slot that padding is written to.
        captures: whether forwards may be captured as CUDA graphs.

    Attributes:
        graphs: captured chunks by width and features.
        capture_s: seconds that capturing them has taken.
        uncaptured: why a forward could not be captured, so that all run operation by operation; else None.
    """

    def __init__(self, batch: int, chunk: int, bin: int, device: torch.device, captures: bool):
        self.batch, self.chunk, self.bin, self.device, self.captures = batch, chunk, bin, device, captures
        self.graphs: dict[tuple[int, FeatureSpec | None], ChunkGraph] = {}
        self.capture_s = 0.0
        self.uncaptured: str | None = None

    def run(self, forward: Forward, contexts: list[list[int]], spec: FeatureSpec | None) -> tuple[Tensor, Rows]:
        """Fill the KV buffers from slot 0 on.

        The tokens are right-aligned, so that the last column holds every row's last token. In the buffers every context
        starts at slot 0. Where chunks are captured, the first one is padded to one of a few widths.

        Args:
            forward: the engine's. Every call must give the same one, since captured chunks hold on to it.
            spec: features that `forward` returns.
        Returns: logits_BV after each context, and all tokens with their features.
        """
        longest = max(map(len, contexts))
        length_B = torch.tensor([len(context) for context in contexts], device=self.device)
        widths = self.widths(longest)
        columns = sum(widths)
        padded = [[0] * (columns - len(context)) + list(context) for context in contexts]
        tokens_BT = torch.tensor(padded, device=self.device)
        position_BT = torch.arange(columns, device=self.device) - (columns - length_B)[:, None]
        steps = []
        stop = 0
        for width in widths:
            start, stop = stop, stop + width
            given = tokens_BT[:, start:stop], position_BT[:, start:stop]
            steps.append(self._chunk(forward, spec, *given, min(stop, longest)))
        tokens_BJ = torch.tensor([list(c) + [0] * (longest - len(c)) for c in contexts], device=self.device)
        logits_BMV, rows = steps[-1].logits_BMV, Rows(tokens_BJ, length_B)
        if spec is not None:
            hidden, streams = [step.hidden_BMD for step in steps], [step.streams_BMkD for step in steps]
            column_BJ = torch.arange(longest, device=self.device) + (columns - length_B)[:, None]
            whole = Step(logits_BMV, _joined(hidden), _joined(streams))
            rows = whole.rows(tokens_BJ, length_B, column_BJ.clamp(max=columns - 1))
        return logits_BMV[:, -1], rows

    def widths(self, longest: int) -> list[int]:
        """Columns of each forward. The first takes the rest after whole chunks: as a power of two if it is captured."""
        whole, rest = divmod(longest, self.chunk)
        widths = [self.chunk] * whole
        if rest:
            power = min(max(1 << (rest - 1).bit_length(), NARROWEST), self.chunk)
            widths.insert(0, power if self._captured(power) else rest)
        return widths

    def _captured(self, width: int) -> bool:
        return self.captures and self.batch * width <= CAPTURED_TOKENS

    def _chunk(
        self, forward: Forward, spec: FeatureSpec | None, tokens_BM: Tensor, position_BM: Tensor, reach: int
    ) -> Step:
        """One forward of a prefill; negative positions are padding."""
        width = tokens_BM.shape[1]
        if not self._captured(width):
            return chunk_forward(forward, tokens_BM, position_BM, self.bin, reach)
        key = width, spec
        if key not in self.graphs:
            synchronize(self.device)  # do not count the earlier chunks, which may still run
            began = time.perf_counter()
            self._compile(forward)
            pool = next(iter(self.graphs.values())).pool if self.graphs else None
            try:
                self.graphs[key] = ChunkGraph(forward, self.batch, width, self.bin, self.device, pool)
            except Uncapturable as reason:
                self.captures, self.uncaptured = False, str(reason)
                return chunk_forward(forward, tokens_BM, position_BM, self.bin, reach)
            finally:
                self.capture_s += time.perf_counter() - began
        return self.graphs[key].run(tokens_BM, position_BM)

    def _compile(self, forward: Forward) -> None:
        """Compile the kernels for prompts of any length, once, before the first chunk is captured."""
        if self.graphs:
            return
        widths = [NARROWEST << n for n in range(self.chunk.bit_length()) if NARROWEST << n < self.chunk]

        def chunks() -> None:
            for width in [*widths, self.chunk]:
                if self._captured(width):
                    tokens_BM = torch.zeros((self.batch, width), dtype=torch.int64, device=self.device)
                    chunk_forward(forward, tokens_BM, torch.full_like(tokens_BM, -1), self.bin, width)

        compile_ahead(chunks)


def chunk_forward(forward: Forward, tokens_BM: Tensor, position_BM: Tensor, bin: int, reach: int) -> Step:
    """The forward over one chunk; padding, at negative positions, is written to the bin."""
    write_BM = torch.where(position_BM >= 0, position_BM, bin)
    return forward(tokens_BM, Visibility(position_BM, write_BM, position_BM[:, 0]), reach)


def _joined(chunks: list[Tensor | None]) -> Tensor | None:
    """The features of all chunks side by side, None where the forward gives none."""
    given = [chunk for chunk in chunks if chunk is not None]
    return torch.cat(given, 1) if given else None


class ChunkGraph:
    """One forward of a prefill, `width` columns, as a CUDA graph on the engine's buffers.

    Args:
        pool: memory pool of another ChunkGraph, to share: results are copied out before the next graph runs.
    """

    def __init__(self, forward: Forward, batch: int, width: int, bin: int, device: torch.device, pool: Any = None):
        self._tokens_BM = torch.zeros((batch, width), dtype=torch.int64, device=device)
        # all columns are padding, which is written to the bin: the capture changes no context
        self._position_BM = torch.full_like(self._tokens_BM, -1)

        def run() -> Step:
            return chunk_forward(forward, self._tokens_BM, self._position_BM, bin, width)

        warm_up(run, device)
        self._graph, self._step = capture(run, device, pool=pool)

    @property
    def pool(self) -> Any:
        return self._graph.pool()

    def run(self, tokens_BM: Tensor, position_BM: Tensor) -> Step:
        self._tokens_BM.copy_(tokens_BM)
        self._position_BM.copy_(position_BM)
        self._graph.replay()
        step = self._step
        features = (None if value is None else value.clone() for value in (step.hidden_BMD, step.streams_BMkD))
        return Step(step.logits_BMV.clone(), *features)
