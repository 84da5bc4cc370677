"""Measures how a matrix product runs fastest on this card.

A *way* is one of our kernels with its tile sizes (`Tiles`), or cuBLAS (None).
Shape legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headstart.eval.kernels.launch import compile_ahead, graph_time, triton, wait_compiled
from headstart.eval.kernels.linear import (
    DEFAULT,
    MAX_ROWS,
    TILE_ROWS,
    Linear,
    Tiles,
    linear_by,
    on_matrix_units,
    row_bucket,
    splittable,
    tile_rows,
    whole_tiles,
    with_norm,
)
from headstart.eval.kernels.norm import NormWeights, apply_norm
from headstart.heads.kernels.device import wants_kernel

#: what is tried for every product, best guesses first
CANDIDATES = (
    DEFAULT, Tiles(64, 64, 4, 6), Tiles(128, 64, 4, 5),
    # fewer tiles in flight: two programs share a multiprocessor, and the last wave of programs is fuller
    Tiles(64, 128, 4, 3),
)  # fmt: skip
#: tried in their place for more than TILE_ROWS rows. There are few, because each takes time to measure; for more than
#: FEW_ROWS rows LARGE_CANDIDATES and SPLIT_CANDIDATES are left out as well
MANY_CANDIDATES = (DEFAULT, Tiles(128, 64, 4, 5))
FEW_ROWS = 128
#: tried as well for matrices of at least LARGE_BYTES
LARGE_BYTES = 16 << 20
LARGE_CANDIDATES = (
    Tiles(32, 256, 4, 4), Tiles(64, 256, 4, 3), Tiles(32, 128, 4, 6), Tiles(128, 64, 4, 4), Tiles(64, 64, 4, 4),
    Tiles(32, 128, 4, 4),
)  # fmt: skip
#: tried as well for products with few outputs, which would not fill the card
SPLIT_CANDIDATES = (Tiles(64, 128, 4, 4, splits=2), Tiles(64, 64, 4, 6, splits=2), Tiles(64, 128, 4, 3, splits=4))
#: tried as well for a single row
VECTOR_CANDIDATES = (
    Tiles(8, 512, 4, 1, True), Tiles(4, 1024, 4, 1, True), Tiles(16, 512, 8, 1, True), Tiles(16, 256, 4, 1, True),
)  # fmt: skip
#: tried as well for matrices of at most SMALL_BYTES: a card's multiprocessors hold such a matrix at once
SMALL_BYTES = 20 << 20
SMALL_CANDIDATES = (
    Tiles(64, 0, 4, 1, whole=True), Tiles(64, 0, 4, 1, splits=2, whole=True), Tiles(64, 0, 4, 1, splits=4, whole=True),
    Tiles(16, 64, 2, 6),
)  # fmt: skip
#: ways that are timed once more inside the model: the fastest, and those that take at most CLOSE × its time; at most
#: MOST_CLOSE in all
CLOSE, MOST_CLOSE = 1.15, 4
#: 16-bit numbers that fit into the 227 KiB of a multiprocessor: a program's weights and its rows together
WHOLE_ELEMENTS = 112 << 10


@dataclass(frozen=True)
class Measured:
    """Products of one shape, and the microseconds that one of them takes in each way."""

    linears: list[Linear]
    times: dict[Tiles | None, float]

    @property
    def close(self) -> list[Tiles | None]:
        """The ways that are about as fast as the fastest, the fastest first; at most MOST_CLOSE."""
        ways = sorted(self.times, key=lambda tiles: self.times[tiles])
        return [tiles for tiles in ways[:MOST_CLOSE] if self.times[tiles] <= CLOSE * self.times[ways[0]]]

    def chosen(self, rows: int) -> Tiles | None:
        """The way in which these products of `rows` rows run now."""
        return self.linears[0].tiles[row_bucket(rows)]

    def choose(self, rows: int, tiles: Tiles | None) -> None:
        """Run these products of `rows` rows this way."""
        for linear in self.linears:
            linear.tiles[row_bucket(rows)] = tiles

    def name(self) -> str:
        """The sizes and the activation: `N×K`, `N×K silu`, or without a gate `N×K gelu alone`."""
        linear = self.linears[0]
        outputs, inputs = linear.weight_NK.shape
        activation = f" {linear.activation}" + " alone" * linear.alone if linear.activation else ""
        return f"{outputs}×{inputs}{activation}"


def choose_ways(linears: list[Linear], rows: int) -> list[Measured]:
    """Measure products of `rows` rows, and set `tiles` of each to the fastest way for its shape.

    Args: linears: all products of a model; those of one shape are run in turn, so that no weight stays in the cache.
    Returns: what was measured; products for which a way was chosen before are left out.
    """
    groups = undecided(linears, rows)
    compile_candidates(groups, rows)
    wait_compiled()
    products = [Measured(members, measure(members, rows)) for members in groups]
    for measured in products:
        measured.choose(rows, measured.close[0])
    return products


def compile_candidates(groups: list[list[Linear]], rows: int) -> None:
    """Compile every way of these products, as `measure` will run them."""

    def once() -> None:
        for members in groups:
            for _, run in runs(members[:1], rows):
                run()

    compile_ahead(once)


def undecided(linears: list[Linear], rows: int) -> list[list[Linear]]:
    """Products that kernels can run and for which no way is chosen yet, those of one shape together."""
    if rows > MAX_ROWS or not linears or not wants_kernel(linears[0].weight_NK):
        return []
    groups: dict[tuple[Any, ...], list[Linear]] = {}
    for linear in linears:
        if row_bucket(rows) not in linear.tiles:
            groups.setdefault(linear.product, []).append(linear)
    return list(groups.values())


def in_turn(members: list[Linear], cache: int) -> list[Linear]:
    """Products to time one after the other.

    A model's weights come from memory, so there are as many products as push each other's weights out of the cache. At
    least eight run, so that the cost of starting a graph does not count. A draft has one product of each shape: it is
    repeated, and its weights stay in the cache, as they do between the levels of a tree.

    Args: cache: its size in bytes.
    """
    count = max(8, -(-2 * cache // members[0].weight_NK.nbytes))
    chosen = members[:count]
    return chosen * -(-8 // len(chosen))


def candidates(linear: Linear, rows: int) -> list[Tiles | None]:
    """The ways that are measured for this product of so many rows."""
    ways: list[Tiles | None] = [None]
    large, small = linear.weight_NK.nbytes >= LARGE_BYTES, linear.weight_NK.nbytes <= SMALL_BYTES
    if rows == 1:
        ways += VECTOR_CANDIDATES
    if on_matrix_units(linear.weight_NK.dtype):
        many = rows > TILE_ROWS
        ways += MANY_CANDIDATES if many else CANDIDATES
        if large and rows <= FEW_ROWS:
            ways += LARGE_CANDIDATES
        if _splits(linear) and (large or rows > 1) and rows <= FEW_ROWS:
            ways += [tiles for tiles in SPLIT_CANDIDATES if splittable(linear, tiles)]
        if small and rows > 1:
            ways += [tiles for tiles in SMALL_CANDIDATES if (_fits(tiles, linear, rows) if tiles.whole else not many)]
    return ways


def _splits(linear: Linear) -> bool:
    """Whether it may pay to cut the inputs into parts, which costs a launch that adds them up.

    Where a residual is added, that launch is there anyway. A product with few outputs and many inputs would otherwise
    run on few multiprocessors.
    """
    return linear.residual or linear.weight_NK.shape[1] > linear.outputs


def _fits(tiles: Tiles, linear: Linear, rows: int) -> bool:
    """Whether a multiprocessor can hold what one program reads: its weights, and its part of the rows."""
    if tiles.splits > 1 and not (_splits(linear) and splittable(linear, tiles)):
        return False
    first, rest = whole_tiles(linear.weight_NK.shape[1] // tiles.splits)
    outputs = tiles.outputs * (2 if linear.gated else 1)
    return first >= 16 and (first + rest) * (outputs + tile_rows(rows)) <= WHOLE_ELEMENTS


def measure(members: list[Linear], rows: int) -> dict[Tiles | None, float]:
    """Microseconds per product of every candidate. Args: members: products of one shape."""
    members = in_turn(members, torch.cuda.get_device_properties(members[0].weight_NK.device).L2_cache_size)
    times: dict[Tiles | None, float] = {}
    for tiles, run in runs(members, rows):
        try:
            times[tiles] = graph_time(run) / len(members) * 1e3
        except triton.runtime.errors.OutOfResources:
            # tiles that this card's shared memory cannot hold
            continue
    return times


def runs(members: list[Linear], rows: int) -> Iterator[tuple[Tiles | None, Callable[[], None]]]:
    """Every candidate, with a function that runs all `members` in this way.

    Each product runs with the norm that stands beside it in a model: after products that add a residual, before the
    others. A product fetches weights while the kernel before it ends, so it must not be timed alone.
    """
    weight_NK = members[0].weight_NK
    x_RK = torch.randn((rows, weight_NK.shape[1]), device=weight_NK.device).to(weight_NK.dtype)
    residual_RN = x_RK.new_zeros((rows, members[0].outputs))
    width = members[0].outputs if members[0].residual else weight_NK.shape[1]
    norm = NormWeights(torch.ones(width, device=weight_NK.device), 1e-6)
    for tiles in candidates(members[0], rows):

        def run(tiles: Tiles | None = tiles) -> None:
            for linear in members:
                if linear.residual:
                    with_norm(x_RK, linear, residual_RN, norm, tiles)
                else:
                    linear_by(tiles, apply_norm(x_RK, norm), linear)

        yield tiles, run
