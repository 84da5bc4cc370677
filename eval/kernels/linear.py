"""Matrix products for a handful of rows, near memory bandwidth: y = x · Wᵀ with what stands before and after it fused.

With 1 to 64 rows a product only streams its weights, so what counts is the bytes in flight. The kernel keeps several
weight tiles in flight per multiprocessor and turns the product over (weights as the tall operand), so that Hopper's
matrix units take few rows without waste. Small matrices (a small target's, a draft's) are over before a loop has got
going: a second kernel has none, and loads its weights before the kernel in front of it has ended. Which kernel and tile
sizes, or whether cuBLAS, is decided by `tune`: a measurement.
Shape legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.kernels.launch import compile_ahead, launch, wait_compiled, warm_up
from headstart.eval.kernels.pointwise import LINE_BYTES, NormWeights, launch_options, rms_norm, wants_kernel

try:
    import triton
    import triton.language as tl

    from headstart.eval.kernels.pointwise import await_previous, prefetch
except ImportError:  # CPU builds of torch come without Triton
    triton = None

#: rows beyond which products go to cuBLAS
MAX_ROWS = 64
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts a product: outputs and inputs per tile, warps, tiles in flight.

    Attributes:
        vector: a single row on the ordinary arithmetic units instead of the matrix units.
        splits: parts of the inputs that run side by side; a second kernel adds them up.
        whole: a program takes all inputs of its part at once, without a loop (`inputs` and `stages` mean nothing).
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    vector: bool = False
    splits: int = 1
    whole: bool = False

    def __str__(self) -> str:
        more = " vector" * self.vector + f" splits {self.splits}" * (self.splits > 1)
        return f"{self.outputs}×{'all' if self.whole else self.inputs} w{self.warps} s{self.stages}{more}"


#: what `tune` tries, best guesses first
CANDIDATES = (
    Tiles(64, 128, 4, 4), Tiles(64, 64, 4, 6), Tiles(128, 64, 4, 5),
    # fewer in flight, so that two programs share a multiprocessor and the last wave is no half-empty one
    Tiles(64, 128, 4, 3),
)  # fmt: skip
#: and for matrices of at least so many bytes
LARGE_BYTES = 16 << 20
LARGE_CANDIDATES = (
    Tiles(32, 256, 4, 4), Tiles(64, 256, 4, 3), Tiles(32, 128, 4, 6), Tiles(128, 64, 4, 4), Tiles(64, 64, 4, 4),
    Tiles(32, 128, 4, 4),
)  # fmt: skip
#: and for narrow outputs that would not fill the card
SPLIT_CANDIDATES = (Tiles(64, 128, 4, 4, splits=2), Tiles(64, 64, 4, 6, splits=2), Tiles(64, 128, 4, 3, splits=4))
#: and for a single row
VECTOR_CANDIDATES = (
    Tiles(8, 512, 4, 1, True), Tiles(4, 1024, 4, 1, True), Tiles(16, 512, 8, 1, True), Tiles(16, 256, 4, 1, True),
)  # fmt: skip
#: and for matrices of so many bytes at most, as the multiprocessors of a card can hold at once
SMALL_BYTES = 20 << 20
SMALL_CANDIDATES = (
    Tiles(64, 0, 4, 1, whole=True), Tiles(64, 0, 4, 1, splits=2, whole=True), Tiles(64, 0, 4, 1, splits=4, whole=True),
    Tiles(16, 64, 2, 6),
)  # fmt: skip
#: ways of a product that compete once more within the model: so much slower at most, and so many
CLOSE, MOST_CLOSE = 1.15, 4
#: inputs that a program can hold, of its outputs and of the rows together (16-bit numbers in 227 KiB)
WHOLE_ELEMENTS = 112 << 10


@dataclass(eq=False)
class Linear:
    """One product with its surroundings: out = act(x · W_gateᵀ) · (x · W_upᵀ), or x · Wᵀ + bias + residual.

    Attributes:
        weight_NK: the matrix; with `activation` the rows of gate, then those of up (N twice the outputs).
        bias_N: or None.
        activation: None, or a key of ACTIVATIONS.
        residual: whether calls add a residual; tuning does as well, and makes the norm that mostly follows.
        tiles: row bucket → Tiles, or None = cuBLAS; a missing bucket takes the first candidate, cuBLAS in float32.
    """

    weight_NK: Tensor
    bias_N: Tensor | None = None
    activation: str | None = None
    residual: bool = False
    tiles: dict[int, Tiles | None] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        return self.weight_NK.shape[0] // (2 if self.activation is not None else 1)

    @property
    def product(self) -> tuple[Any, ...]:
        """What the time of a product depends on: its sizes, and what stands before and after it."""
        return tuple(self.weight_NK.shape), self.activation, self.bias_N is not None, self.residual

    def __call__(self, x_RK: Tensor, residual_RN: Tensor | None = None) -> Tensor:
        tiles = self._tiles(x_RK)
        if tiles is None:
            return linear_eager(x_RK, self, residual_RN)
        return linear_kernel(x_RK, self, residual_RN, tiles)

    def _tiles(self, x_RK: Tensor) -> Tiles | None:
        """How the kernel runs on these rows; None: it does not."""
        rows = x_RK.shape[0]
        if rows > MAX_ROWS or not wants_kernel(x_RK):
            return None
        return self.tiles.get(row_bucket(rows), CANDIDATES[0] if on_matrix_units(x_RK.dtype) else None)

    def with_norm(self, x_RK: Tensor, residual_RN: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """(the call's result, its RMSNorm): one kernel fewer where the product is split."""
        return with_norm(x_RK, self, residual_RN, norm, self._tiles(x_RK))


def row_bucket(rows: int) -> int:
    """Rows that one choice of tiles serves: 1, or what the matrix units' operand is padded to (16, 32, 64)."""
    return 1 if rows == 1 else next(size for size in (16, 32, 64) if rows <= size)


def on_matrix_units(dtype: torch.dtype) -> bool:
    """Whether the matrix units take the dtype without rounding. Others would be unrolled into single products, whose
    compilation takes minutes."""
    return dtype.itemsize == 2


def linear_eager(x_RK: Tensor, linear: Linear, residual_RN: Tensor | None = None) -> Tensor:
    """The product through the library, its surroundings as tensor operations."""
    y_RN = F.linear(x_RK, linear.weight_NK, linear.bias_N)
    if linear.activation is not None:
        gate, up = y_RN.chunk(2, -1)
        y_RN = ACTIVATIONS[linear.activation](gate) * up
    return y_RN if residual_RN is None else residual_RN + y_RN


def with_norm(
    x_RK: Tensor, linear: Linear, residual_RN: Tensor, norm: NormWeights, tiles: Tiles | None
) -> tuple[Tensor, Tensor]:
    """(the product with its residual, its RMSNorm), the product as `tiles` say (None: cuBLAS)."""
    if tiles is not None and tiles.splits > 1:
        return join_kernel(split_kernel(x_RK, linear, tiles), linear.bias_N, residual_RN, norm)
    if tiles is None:
        y_RN = linear_eager(x_RK, linear, residual_RN)
    else:
        y_RN = linear_kernel(x_RK, linear, residual_RN, tiles)
    return y_RN, rms_norm(y_RN, norm)


def linear_kernel(x_RK: Tensor, linear: Linear, residual_RN: Tensor | None, tiles: Tiles) -> Tensor:
    """As linear_eager with accumulation in float32 and one rounding at the end."""
    if tiles.splits > 1:
        return join_kernel(split_kernel(x_RK, linear, tiles), linear.bias_N, residual_RN, None)[0]
    x_RK = x_RK.contiguous()
    rows, inputs = x_RK.shape
    outputs, weight_NK, bias_N = linear.outputs, linear.weight_NK, linear.bias_N
    out_RN = x_RK.new_empty((rows, outputs))
    paired = linear.activation is not None
    bias, residual = (out_RN if extra is None else extra for extra in (bias_N, residual_RN))
    flags = {
        "PAIRED": paired,
        "SILU": linear.activation == "silu",
        "BIAS": bias_N is not None,
        "RESIDUAL": residual_RN is not None,
        **launch_options(x_RK.device),
    }
    even = not tiles.whole and inputs % tiles.inputs == 0
    if tiles.vector:
        launch(_vector_kernel, (triton.cdiv(outputs, tiles.outputs),),
            x_RK, weight_NK, bias, residual, out_RN, outputs, inputs,
            BN=tiles.outputs, BK=tiles.inputs, EVEN=even, num_warps=tiles.warps, num_stages=tiles.stages, **flags,
        )  # fmt: skip
        return out_RN
    if tiles.whole:
        # gate and up are tiles of their own
        launch(_whole_kernel, (triton.cdiv(outputs, tiles.outputs), 1),
            x_RK,
            weight_NK,
            bias,
            residual,
            out_RN,
            rows,
            outputs,
            inputs,
            inputs,
            **_whole_options(x_RK, tiles),
            **flags,
        )
        return out_RN
    tile_outputs = max(16, tiles.outputs // 2) if paired else tiles.outputs
    launch(_linear_kernel, (triton.cdiv(outputs, tile_outputs),),
        x_RK, weight_NK, bias, residual, out_RN, rows, outputs, inputs,
        BR=max(16, row_bucket(rows)), BN=tile_outputs, BK=tiles.inputs, EVEN=even,
        num_warps=tiles.warps, num_stages=tiles.stages, SPLITS=1, **_prefetched(weight_NK, tiles), **flags,
    )  # fmt: skip
    return out_RN


def whole_tiles(inputs: int) -> tuple[int, int]:
    """Inputs as two tiles: the largest power of two within them, and a power of two that holds the rest (none: 0)."""
    first = 1 << (inputs.bit_length() - 1)
    rest = inputs - first
    return first, max(16, 1 << (rest - 1).bit_length()) if rest else 0


def _whole_options(x_RK: Tensor, tiles: Tiles) -> dict[str, int]:
    """How the kernel without a loop is compiled."""
    first, rest = whole_tiles(x_RK.shape[1] // tiles.splits)
    return {
        "BR": max(16, row_bucket(x_RK.shape[0])), "BN": tiles.outputs, "BK": first, "BL": rest,
        "SPLITS": tiles.splits, "num_warps": tiles.warps, "num_stages": 1,
    }  # fmt: skip


def _prefetched(weight_NK: Tensor, tiles: Tiles) -> dict[str, int]:
    """Input tiles that a program asks for before it may read anything else, and the elements of a cache line."""
    count = -(-weight_NK.shape[1] // (tiles.inputs * tiles.splits))
    return {"AHEAD": min(tiles.stages, count), "LINE": min(tiles.inputs, LINE_BYTES // weight_NK.element_size())}


@dataclass(frozen=True)
class Parts:
    """A product in parts: float32 [splits, R, N], not yet added up; `dtype`: what it is to be rounded to."""

    sums_SRN: Tensor
    dtype: torch.dtype


def splittable(linear: Linear, tiles: Tiles) -> bool:
    """Whether every part takes whole tiles, and nothing but a bias and a residual follows the sum."""
    tile = 16 if tiles.whole else tiles.inputs
    return linear.activation is None and linear.weight_NK.shape[1] % (tile * tiles.splits) == 0


def split_kernel(x_RK: Tensor, linear: Linear, tiles: Tiles) -> Parts:
    """The parts of x · Wᵀ, side by side. Raises: ValueError when the inputs do not divide (`splittable`)."""
    if not splittable(linear, tiles):
        raise ValueError(f"{tuple(linear.weight_NK.shape)} cannot be cut into {tiles}")
    x_RK = x_RK.contiguous()
    (rows, inputs), outputs = x_RK.shape, linear.outputs
    sums_SRN = torch.empty((tiles.splits, rows, outputs), dtype=torch.float32, device=x_RK.device)
    if tiles.whole:
        launch(_whole_kernel, (triton.cdiv(outputs, tiles.outputs), tiles.splits),
            x_RK, linear.weight_NK, sums_SRN, sums_SRN, sums_SRN, rows, outputs, inputs, inputs // tiles.splits,
            PAIRED=False, SILU=False, BIAS=False, RESIDUAL=False, **_whole_options(x_RK, tiles),
            **launch_options(x_RK.device),
        )  # fmt: skip
        return Parts(sums_SRN, x_RK.dtype)
    launch(_linear_kernel, (triton.cdiv(outputs, tiles.outputs), tiles.splits),
        x_RK, linear.weight_NK, sums_SRN, sums_SRN, sums_SRN, rows, outputs, inputs,
        PAIRED=False, SILU=False, BIAS=False, RESIDUAL=False, EVEN=True, SPLITS=tiles.splits,
        BR=max(16, row_bucket(rows)), BN=tiles.outputs, BK=tiles.inputs,
        num_warps=tiles.warps, num_stages=tiles.stages,
        **_prefetched(linear.weight_NK, tiles), **launch_options(x_RK.device),
    )  # fmt: skip
    return Parts(sums_SRN, x_RK.dtype)


def join_kernel(
    parts: Parts, bias_N: Tensor | None, residual_RN: Tensor | None, norm: NormWeights | None
) -> tuple[Tensor, Tensor]:
    """(Σ parts + bias, rounded, + residual; its RMSNorm, or itself again without `norm`)."""
    splits, rows, outputs = parts.sums_SRN.shape
    out_RN = torch.empty((rows, outputs), dtype=parts.dtype, device=parts.sums_SRN.device)
    normed_RN = torch.empty_like(out_RN) if norm is not None else out_RN
    block = triton.next_power_of_2(outputs)
    bias, residual = (out_RN if extra is None else extra for extra in (bias_N, residual_RN))
    launch(_join_kernel, (rows,),
        parts.sums_SRN, bias, residual, norm.factor_D if norm is not None else out_RN, out_RN, normed_RN, rows,
        outputs, norm.eps if norm is not None else 0.0, BIAS=bias_N is not None, RESIDUAL=residual_RN is not None,
        NORM=norm is not None, SPLITS=splits, BLOCK=block, num_warps=min(16, max(1, block // 256)),
        **launch_options(out_RN.device),
    )  # fmt: skip
    return out_RN, normed_RN


@dataclass(frozen=True)
class Measured:
    """Products of one shape, and the microseconds of one of them by the way it runs (None = cuBLAS)."""

    linears: list[Linear]
    times: dict[Tiles | None, float]

    @property
    def close(self) -> list[Tiles | None]:
        """Ways that are about as fast as the fastest, which comes first; MOST_CLOSE of them at most."""
        ways = sorted(self.times, key=lambda tiles: self.times[tiles])
        return [tiles for tiles in ways[:MOST_CLOSE] if self.times[tiles] <= CLOSE * self.times[ways[0]]]

    def chosen(self, rows: int) -> Tiles | None:
        """How these products of `rows` rows run now."""
        return self.linears[0].tiles[row_bucket(rows)]

    def choose(self, rows: int, tiles: Tiles | None) -> None:
        """Run these products of `rows` rows this way."""
        for linear in self.linears:
            linear.tiles[row_bucket(rows)] = tiles

    def name(self) -> str:
        """N×K[ activation]."""
        (outputs, inputs), activation = self.linears[0].weight_NK.shape, self.linears[0].activation
        return f"{outputs}×{inputs}" + (f" {activation}" if activation else "")


def tune(linears: list[Linear], rows: int, replays: int = 5) -> list[Measured]:
    """Choose tiles or cuBLAS for `rows` by measurement, per shape of product; sets `tiles` of every linear.

    Args: linears: all products of a model; those of one shape are run in turn, so that no weight stays in the cache.
    Returns: what was measured; nothing for products that had been chosen before.
    """
    groups = undecided(linears, rows)
    compile_candidates(groups, rows)
    wait_compiled()
    found = [Measured(members, measure(members, rows, replays)) for members in groups]
    for measured in found:
        measured.choose(rows, measured.close[0])
    return found


def compile_candidates(groups: list[list[Linear]], rows: int) -> None:
    """Compile every way of these products, as `measure` will run them."""

    def once() -> None:
        for members in groups:
            for _, run in runs(members[:1], rows):
                run()

    compile_ahead(once)


def undecided(linears: list[Linear], rows: int) -> list[list[Linear]]:
    """Products that kernels may run and for which nothing is chosen yet, those of one shape together."""
    if rows > MAX_ROWS or not linears or not wants_kernel(linears[0].weight_NK):
        return []
    groups: dict[tuple[Any, ...], list[Linear]] = {}
    for linear in linears:
        if row_bucket(rows) not in linear.tiles:
            groups.setdefault(linear.product, []).append(linear)
    return list(groups.values())


def in_turn(members: list[Linear], cache: int) -> list[Linear]:
    """Products to time one after the other: as many as it takes to push each other's weights out of a cache of so many
    bytes, and eight at least, so that what a graph costs does not count. A draft has one of each, which stays in the
    cache, as it does between the levels of a tree where the whole draft fits."""
    count = max(8, -(-2 * cache // members[0].weight_NK.nbytes))
    chosen = members[:count]
    return chosen * -(-8 // len(chosen))


def candidates(linear: Linear, rows: int) -> list[Tiles | None]:
    """Ways that `tune` measures for this product of so many rows; None = cuBLAS."""
    ways: list[Tiles | None] = [None]
    large, small = linear.weight_NK.nbytes >= LARGE_BYTES, linear.weight_NK.nbytes <= SMALL_BYTES
    if rows == 1:
        ways += VECTOR_CANDIDATES
    if on_matrix_units(linear.weight_NK.dtype):
        ways += CANDIDATES
        if large:
            ways += LARGE_CANDIDATES
        if _splits(linear) and (large or rows > 1):
            ways += [tiles for tiles in SPLIT_CANDIDATES if splittable(linear, tiles)]
        if small and rows > 1:
            ways += [tiles for tiles in SMALL_CANDIDATES if not tiles.whole or _fits(tiles, linear, rows)]
    return ways


def _splits(linear: Linear) -> bool:
    """Whether parts of the inputs are worth a launch that adds them up: it is there already where a residual is to be
    added, and narrow products of many inputs run on few multiprocessors."""
    return linear.residual or linear.weight_NK.shape[1] > linear.outputs


def _fits(tiles: Tiles, linear: Linear, rows: int) -> bool:
    """Whether a program can hold its part of the inputs, of its outputs and of the rows."""
    if tiles.splits > 1 and not (_splits(linear) and splittable(linear, tiles)):
        return False
    first, rest = whole_tiles(linear.weight_NK.shape[1] // tiles.splits)
    outputs = tiles.outputs * (1 if linear.activation is None else 2)
    return first >= 16 and (first + rest) * (outputs + max(16, row_bucket(rows))) <= WHOLE_ELEMENTS


def measure(members: list[Linear], rows: int, replays: int = 5) -> dict[Tiles | None, float]:
    """Microseconds per product of every candidate (None = cuBLAS). Args: members: products of one shape."""
    members = in_turn(members, torch.cuda.get_device_properties(members[0].weight_NK.device).L2_cache_size)
    times: dict[Tiles | None, float] = {}
    for tiles, run in runs(members, rows):
        try:
            times[tiles] = graph_time(run, replays) / len(members) * 1e3
        except triton.runtime.errors.OutOfResources:
            # tiles that this card's shared memory cannot hold
            continue
    return times


def runs(members: list[Linear], rows: int) -> Iterator[tuple[Tiles | None, Callable[[], None]]]:
    """Every candidate (None = cuBLAS) with a run of all `members`, each with the norm that stands beside it: behind the
    ones that add a residual, before the others. What a product fetches ahead counts only behind another kernel."""
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
                    continue
                normed_RK = rms_norm(x_RK, norm)
                if tiles is None:
                    linear_eager(normed_RK, linear)
                else:
                    linear_kernel(normed_RK, linear, None, tiles)

        yield tiles, run


def graph_time(run: Callable[[], object], replays: int = 5, warmup: int = 2) -> float:
    """Milliseconds of one replay of `run` captured as a CUDA graph (median)."""
    warm_up(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(warmup):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))[replays // 2]


if triton is not None:

    @triton.jit
    def _gate(x, SILU: tl.constexpr):
        """SiLU, or GELU in its tanh form."""
        if SILU:
            return x * tl.sigmoid(x)
        return x * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))

    @triton.jit
    def _finish(
        sums, ups, bias, added, out, place, weight_row, outputs, kept,
        PAIRED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ):  # fmt: skip
        """What comes after the product of a tile [outputs, rows], and the store. `added`: the residual's tile."""
        if BIAS:
            sums += tl.load(bias + weight_row).to(tl.float32)[:, None]
            if PAIRED:
                ups += tl.load(bias + outputs + weight_row).to(tl.float32)[:, None]
        if PAIRED:
            sums = _gate(sums, SILU) * ups
        if RESIDUAL:
            # the product is rounded before the sum, as a separate addition would find it
            sums = sums.to(out.dtype.element_ty).to(tl.float32)
            sums += added.to(tl.float32)
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=kept)

    @triton.jit(do_not_specialize=["rows"])
    def _linear_kernel(
        x, weight, bias, residual, out, rows, outputs, inputs,
        PAIRED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
        BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
        LINE: tl.constexpr, OVERLAP: tl.constexpr, SPLITS: tl.constexpr,
    ):  # fmt: skip
        """BN outputs of all rows. PAIRED: output n comes from weight rows n (gate) and `outputs` + n (up).

        SPLITS > 1: program_id(1) numbers the part of the inputs; `out` is float32 [SPLITS, rows, outputs].
        """
        begin, end = 0, inputs
        if SPLITS > 1:
            begin = tl.program_id(1) * (inputs // SPLITS)
            end = begin + inputs // SPLITS
        output = tl.program_id(0) * BN + tl.arange(0, BN)
        inside = output < outputs
        # a clamped index keeps loads free of masks; what it computes is not stored
        weight_row = tl.minimum(output, outputs - 1).to(tl.int64)
        row = tl.arange(0, BR)
        real = row < rows
        channel = tl.arange(0, BK)
        weight_at = weight + weight_row[:, None] * inputs + channel[None, :]
        up_at = weight_at
        if PAIRED:
            up_at = weight_at + tl.cast(outputs, tl.int64) * inputs
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            # weights do not depend on the previous kernel: fetch the first tiles while it drains
            line = tl.arange(0, BK // LINE) * LINE
            for ahead in range(0, AHEAD):
                at = tl.minimum(begin + ahead * BK + line, inputs - 1)
                prefetch(weight + weight_row[:, None] * inputs + at[None, :])
                if PAIRED:
                    prefetch(weight + (outputs + weight_row)[:, None] * inputs + at[None, :])
            tl.extra.cuda.gdc_wait()
        x_at = x + row[None, :] * inputs + channel[:, None]
        place = row[None, :] * outputs + output[:, None]
        kept = inside[:, None] & real[None, :]
        added = 0.0
        if RESIDUAL:
            added = tl.load(residual + place, mask=kept, other=0.0)
        sums = tl.zeros((BN, BR), tl.float32)
        ups = tl.zeros((BN, BR), tl.float32)
        for first in range(begin, end, BK):
            if EVEN:
                part = tl.load(x_at + first, mask=real[None, :], other=0.0)
                tile = tl.load(weight_at + first, eviction_policy="evict_first")
            else:
                here = channel < inputs - first
                part = tl.load(x_at + first, mask=real[None, :] & here[:, None], other=0.0)
                tile = tl.load(weight_at + first, mask=here[None, :], other=0.0)
            sums = tl.dot(tile, part, sums, input_precision="ieee")
            if PAIRED:
                if EVEN:
                    tile = tl.load(up_at + first, eviction_policy="evict_first")
                else:
                    tile = tl.load(up_at + first, mask=(channel < inputs - first)[None, :], other=0.0)
                ups = tl.dot(tile, part, ups, input_precision="ieee")
        if SPLITS > 1:
            place += tl.program_id(1) * rows * outputs
        _finish(sums, ups, bias, added, out, place, weight_row, outputs, kept, PAIRED, SILU, BIAS, RESIDUAL)

    @triton.jit(do_not_specialize=["rows"])
    def _whole_kernel(
        x, weight, bias, residual, out, rows, outputs, inputs, length,
        PAIRED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BR: tl.constexpr,
        BN: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """BN outputs of all rows from `length` inputs: a tile of BK and, where BL > 0, one that holds the rest.

        SPLITS > 1: as in _linear_kernel.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        begin = 0
        if SPLITS > 1:
            begin = tl.program_id(1) * length
        output = tl.program_id(0) * BN + tl.arange(0, BN)
        weight_row = tl.minimum(output, outputs - 1).to(tl.int64)
        row = tl.arange(0, BR)
        real = (row < rows)[None, :]
        channel = tl.arange(0, BK)
        weight_at = weight + weight_row[:, None] * inputs + begin
        up_at = weight_at
        if PAIRED:
            up_at = weight_at + tl.cast(outputs, tl.int64) * inputs
        tile = tl.load(weight_at + channel[None, :])
        if PAIRED:
            up_tile = tl.load(up_at + channel[None, :])
        if BL > 0:
            rest = BK + tl.arange(0, BL)
            here = rest < length
            tail = tl.load(weight_at + rest[None, :], mask=here[None, :], other=0.0)
            if PAIRED:
                up_tail = tl.load(up_at + rest[None, :], mask=here[None, :], other=0.0)
        if OVERLAP:
            # the weights are here before the previous kernel's results are needed
            tl.extra.cuda.gdc_wait()
        x_at = x + row[None, :] * inputs + begin
        part = tl.load(x_at + channel[:, None], mask=real)
        if BL > 0:
            last = tl.load(x_at + rest[:, None], mask=real & here[:, None])
        place = row[None, :] * outputs + output[:, None]
        kept = (output < outputs)[:, None] & real
        added = 0.0
        if RESIDUAL:
            added = tl.load(residual + place, mask=kept, other=0.0)
        # masked here: a load that is a product's operand would be waited for before the next one starts
        part = tl.where(real, part, 0.0)
        if BL > 0:
            last = tl.where(real & here[:, None], last, 0.0)
        sums = tl.dot(tile, part, input_precision="ieee")
        ups = sums
        if PAIRED:
            ups = tl.dot(up_tile, part, input_precision="ieee")
        if BL > 0:
            sums = tl.dot(tail, last, sums, input_precision="ieee")
            if PAIRED:
                ups = tl.dot(up_tail, last, ups, input_precision="ieee")
        if SPLITS > 1:
            place += tl.program_id(1) * rows * outputs
        _finish(sums, ups, bias, added, out, place, weight_row, outputs, kept, PAIRED, SILU, BIAS, RESIDUAL)

    @triton.jit(do_not_specialize=["rows"])
    def _join_kernel(
        sums, bias, residual, factor, out, normed, rows, outputs, eps,
        BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One row: add up the parts and what comes after them."""
        row = tl.program_id(0)
        channel = tl.arange(0, BLOCK)
        inside = channel < outputs
        if BIAS:
            shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            by = tl.load(factor + channel, mask=inside, other=0.0)
        await_previous(OVERLAP)
        if RESIDUAL:
            added = tl.load(residual + row * outputs + channel, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(sums + (split * rows + row) * outputs + channel, mask=inside, other=0.0)
        if BIAS:
            total += shift
        if RESIDUAL:
            # rounded before the sum, as a separate addition would find it
            total = total.to(out.dtype.element_ty).to(tl.float32) + added
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + row * outputs + channel, rounded, mask=inside)
        if NORM:
            value = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, 0) / outputs + eps)
            tl.store(normed + row * outputs + channel, (value * scale * by).to(normed.dtype.element_ty), mask=inside)

    @triton.jit
    def _vector_kernel(
        x, weight, bias, residual, out, outputs, inputs,
        PAIRED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
        BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One row: sums are kept per input channel of a tile and added up once at the end."""
        output = tl.program_id(0) * BN + tl.arange(0, BN)
        weight_row = tl.minimum(output, outputs - 1).to(tl.int64)
        channel = tl.arange(0, BK)
        weight_at = weight + weight_row[:, None] * inputs + channel[None, :]
        up_at = weight_at
        if PAIRED:
            up_at = weight_at + tl.cast(outputs, tl.int64) * inputs
        here = channel < inputs
        tile = tl.load(weight_at, mask=here[None, :], other=0.0)
        up_tile = tile
        if PAIRED:
            up_tile = tl.load(up_at, mask=here[None, :], other=0.0)
        if OVERLAP:
            # the first tiles are on their way before the previous kernel's results are needed
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        kept = output < outputs
        if RESIDUAL:
            added = tl.load(residual + output, mask=kept, other=0.0).to(tl.float32)
        part = tl.load(x + channel, mask=here, other=0.0).to(tl.float32)[None, :]
        sums = tile.to(tl.float32) * part
        ups = sums
        if PAIRED:
            ups = up_tile.to(tl.float32) * part
        for first in range(BK, inputs, BK):
            if EVEN:
                part = tl.load(x + first + channel).to(tl.float32)[None, :]
                tile = tl.load(weight_at + first)
            else:
                here = channel < inputs - first
                part = tl.load(x + first + channel, mask=here, other=0.0).to(tl.float32)[None, :]
                tile = tl.load(weight_at + first, mask=here[None, :], other=0.0)
            sums += tile.to(tl.float32) * part
            if PAIRED:
                if EVEN:
                    up_tile = tl.load(up_at + first)
                else:
                    up_tile = tl.load(up_at + first, mask=(channel < inputs - first)[None, :], other=0.0)
                ups += up_tile.to(tl.float32) * part
        result = tl.sum(sums, 1)
        if BIAS:
            result += tl.load(bias + weight_row).to(tl.float32)
        if PAIRED:
            up = tl.sum(ups, 1)
            if BIAS:
                up += tl.load(bias + outputs + weight_row).to(tl.float32)
            result = _gate(result, SILU) * up
        if RESIDUAL:
            result = result.to(out.dtype.element_ty).to(tl.float32) + added
        tl.store(out + output, result.to(out.dtype.element_ty), mask=kept)
