"""Matrix products for a handful of rows, near memory bandwidth: y = x · Wᵀ fused with bias, activation and residual.

With 1 to 64 rows a product mostly reads its weights, so memory limits its speed. One kernel keeps several weight tiles
in flight per multiprocessor. It takes the weights as the tall operand, so that Hopper's matrix units waste little on
few rows. A second kernel is for small matrices (those of a small target or of a draft): it has no loop, and loads its
weights before the kernel in front of it has ended. Both cut more than 64 rows into tiles of 64. The kernels stand in
linear_kernels.py; ways.py measures which of them runs with which tile sizes, or whether cuBLAS does.
Shape legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.kernels.launch import LINE_BYTES, launch, launch_options, triton
from headstart.eval.kernels.norm import NormWeights, apply_norm, norm_eager
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.kernels.elementwise import gated_eager

if triton is not None:
    from headstart.eval.kernels.linear_kernels import (
        activate_rows,
        add_parts,
        tiled_product,
        vector_product,
        whole_product,
    )

#: rows that a program of the matrix units takes at most; beyond them cuBLAS runs unless another way was chosen
TILE_ROWS = 64
#: rows that the same choice of tiles serves at most: 1, or the sizes that rows are padded to
BUCKETS = (1, 16, 32, TILE_ROWS, 128, 256, 512)
#: rows beyond which products go to cuBLAS
MAX_ROWS = BUCKETS[-1]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts a product: outputs and inputs per tile, warps, tiles in flight.

    Attributes:
        vector: a single row, on the ordinary arithmetic units instead of the matrix units.
        splits: parts that the inputs are cut into. They run side by side, and a second kernel adds them up.
        whole: a program takes all inputs of its part at once, without a loop; `inputs` and `stages` are not used.
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


@dataclass(frozen=True)
class Ending:
    """What becomes of a sublayer's result before it is added to the residual.

    Attributes: norm: of the result (OLMo-2, Gemma 2), or None. scale: factor after the norm (Granite).
    """

    norm: NormWeights | None = None
    scale: float = 1.0

    @property
    def plain(self) -> bool:
        return self.norm is None and self.scale == 1.0


PLAIN = Ending()
#: how products run for which nothing has been chosen
DEFAULT = Tiles(64, 128, 4, 4)


@dataclass(eq=False)
class Linear:
    """One product and what is fused with it: act(x · W_gateᵀ) · (x · W_upᵀ), act(x · Wᵀ), or x · Wᵀ; with bias and
    residual.

    Attributes:
        weight_NK: the matrix; where it is `gated`, the rows of gate, then those of up (N twice the outputs).
        bias_N: or None.
        activation: None, or a key of ACTIVATIONS.
        alone: with `activation`: there is no gate, the activation is of the product itself.
        residual: whether the model adds a residual, so that ways are timed with one and with the norm behind it.
        tiles: row bucket → Tiles, or None for cuBLAS. Without an entry DEFAULT runs, or cuBLAS in float32 and for more
            than TILE_ROWS rows.
    """

    weight_NK: Tensor
    bias_N: Tensor | None = None
    activation: str | None = None
    residual: bool = False
    tiles: dict[int, Tiles | None] = field(default_factory=dict)
    alone: bool = False

    @property
    def gated(self) -> bool:
        return self.activation is not None and not self.alone

    @property
    def outputs(self) -> int:
        return self.weight_NK.shape[0] // (2 if self.gated else 1)

    @property
    def product(self) -> tuple[Any, ...]:
        """What the time of a product depends on: its sizes, and what is fused with it."""
        return tuple(self.weight_NK.shape), self.activation, self.alone, self.bias_N is not None, self.residual

    def __call__(self, x_RK: Tensor, residual_RN: Tensor | None = None) -> Tensor:
        return linear_by(self._tiles(x_RK), x_RK, self, residual_RN)

    def _tiles(self, x_RK: Tensor) -> Tiles | None:
        """The tiles for these rows; None where cuBLAS runs."""
        rows = x_RK.shape[0]
        if rows > MAX_ROWS or not wants_kernel(x_RK):
            return None
        default = DEFAULT if rows <= TILE_ROWS and on_matrix_units(x_RK.dtype) else None
        return self.tiles.get(row_bucket(rows), default)

    def with_norm(self, x_RK: Tensor, residual_RN: Tensor | None, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """(the call's result, its norm). The kernel that adds up a split product, or cuBLAS's product and a residual,
        makes the norm too."""
        return with_norm(x_RK, self, residual_RN, norm, self._tiles(x_RK))

    def end(
        self, x_RK: Tensor, residual_RN: Tensor, ending: Ending, norm: NormWeights | None
    ) -> tuple[Tensor, Tensor | None]:
        """(residual + the product after its `ending`, its norm): the end of a sublayer, in two launches at most."""
        if ending.plain and norm is not None:
            return self.with_norm(x_RK, residual_RN, norm)
        if ending.plain:
            return self(x_RK, residual_RN), None
        tiles = self._tiles(x_RK)
        if tiles is not None and tiles.splits > 1:
            found, normed = join_kernel(split_kernel(x_RK, self, tiles), self.bias_N, residual_RN, norm, ending)
            return found, normed if norm is not None else None
        return end_sublayer(linear_by(tiles, x_RK, self), residual_RN, ending, norm)


def row_bucket(rows: int) -> int:
    """Most rows that the same choice of tiles serves. Args: rows: at most MAX_ROWS."""
    return 1 if rows == 1 else next(size for size in BUCKETS[1:] if rows <= size)


def tile_rows(rows: int) -> int:
    """Rows of one program of the matrix units, padded."""
    return min(TILE_ROWS, max(16, row_bucket(rows)))


def on_matrix_units(dtype: torch.dtype) -> bool:
    """Whether the matrix units multiply this dtype exactly. Triton unrolls others into single products, which takes
    minutes to compile."""
    return dtype.itemsize == 2


def linear_eager(x_RK: Tensor, linear: Linear, residual_RN: Tensor | None = None) -> Tensor:
    """The product by cuBLAS, and the rest as tensor operations."""
    y_RN = F.linear(x_RK, linear.weight_NK, linear.bias_N)
    if linear.activation is not None:
        act = ACTIVATIONS[linear.activation]
        if linear.gated:
            gate, up = y_RN.chunk(2, -1)
            y_RN = gated_eager(gate, up, act)
        else:
            y_RN = act(y_RN)
    return y_RN if residual_RN is None else residual_RN + y_RN


def linear_by(tiles: Tiles | None, x_RK: Tensor, linear: Linear, residual_RN: Tensor | None = None) -> Tensor:
    """The product with its residual, run with these tiles (None: cuBLAS)."""
    if tiles is not None:
        return linear_kernel(x_RK, linear, residual_RN, tiles)
    if not wants_kernel(x_RK):
        return linear_eager(x_RK, linear, residual_RN)
    parts = library_product(x_RK, linear)
    return parts.whole if residual_RN is None else join_kernel(parts, None, residual_RN.contiguous(), None)[0]


def with_norm(
    x_RK: Tensor, linear: Linear, residual_RN: Tensor | None, norm: NormWeights, tiles: Tiles | None
) -> tuple[Tensor, Tensor]:
    """(as linear_by, its norm)."""
    if tiles is not None and tiles.splits > 1:
        return join_kernel(split_kernel(x_RK, linear, tiles), linear.bias_N, residual_RN, norm)
    if tiles is None and residual_RN is not None and wants_kernel(x_RK):
        return join_kernel(library_product(x_RK, linear), None, residual_RN.contiguous(), norm)
    y_RN = linear_by(tiles, x_RK, linear, residual_RN)
    return y_RN, apply_norm(y_RN, norm)


def library_product(x_RK: Tensor, linear: Linear) -> Parts:
    """The product by cuBLAS with its bias, as one part, and its activation and gate in a launch behind it.

    Rounded where linear_eager rounds: the product, the activation, and what the gate makes of it.
    """
    y_RN = F.linear(x_RK, linear.weight_NK, linear.bias_N)
    if linear.activation is not None:
        y_RN = activate_kernel(y_RN, linear)
    return Parts(y_RN[None], y_RN.dtype)


def activate_kernel(y_RN: Tensor, linear: Linear) -> Tensor:
    """act(gate) · up of [R, 2 N], or act(y) of [R, N]: as linear_eager does it with its product."""
    y_RN, rows, outputs = y_RN.contiguous(), y_RN.shape[0], linear.outputs
    out_RN = y_RN.new_empty((rows, outputs))
    block = min(1024, triton.next_power_of_2(outputs))
    launch(activate_rows, (rows, triton.cdiv(outputs, block)),
        y_RN, out_RN, outputs, PAIRED=linear.gated, ACT=linear.activation, BLOCK=block,
        num_warps=max(1, block // 256), **launch_options(y_RN.device),
    )  # fmt: skip
    return out_RN


def linear_kernel(x_RK: Tensor, linear: Linear, residual_RN: Tensor | None, tiles: Tiles) -> Tensor:
    """As linear_eager with accumulation in float32 and one rounding at the end."""
    if tiles.splits > 1:
        return join_kernel(split_kernel(x_RK, linear, tiles), linear.bias_N, residual_RN, None)[0]
    x_RK = x_RK.contiguous()
    rows, inputs = x_RK.shape
    outputs, weight_NK, bias_N = linear.outputs, linear.weight_NK, linear.bias_N
    out_RN = x_RK.new_empty((rows, outputs))
    # what is missing is not read: the output stands in its place
    bias, residual = (out_RN if extra is None else extra for extra in (bias_N, residual_RN))
    flags = {
        "PAIRED": linear.gated, "ACT": linear.activation or "", "BIAS": bias_N is not None,
        "RESIDUAL": residual_RN is not None, **launch_options(x_RK.device),
    }  # fmt: skip
    if tiles.vector:
        launch(vector_product, (triton.cdiv(outputs, tiles.outputs),),
            x_RK, weight_NK, bias, residual, out_RN, outputs, inputs, BN=tiles.outputs, BK=tiles.inputs,
            EVEN=inputs % tiles.inputs == 0, num_warps=tiles.warps, num_stages=tiles.stages, **flags,
        )  # fmt: skip
    else:
        _launch_product(x_RK, linear, tiles, bias, residual, out_RN, flags)
    return out_RN


def _launch_product(
    x_RK: Tensor, linear: Linear, tiles: Tiles, bias: Tensor, residual: Tensor, out: Tensor, flags: dict[str, Any]
) -> None:
    """Run a kernel of the matrix units, with or without a loop. Args: out: [R, N], or of each split [S, R, N]."""
    (rows, inputs), outputs, weight_NK = x_RK.shape, linear.outputs, linear.weight_NK
    padded_rows = tile_rows(rows)
    many = rows > padded_rows
    # numbered first, so that neighbouring programs read the same weights
    tiles_of_rows = (triton.cdiv(rows, padded_rows),) if many else ()
    if tiles.whole:
        first, rest = whole_tiles(inputs // tiles.splits)
        # gate and up have a tile of `outputs` each
        launch(whole_product, (*tiles_of_rows, triton.cdiv(outputs, tiles.outputs), tiles.splits),
            x_RK, weight_NK, bias, residual, out, rows, outputs, inputs, inputs // tiles.splits, BR=padded_rows,
            BN=tiles.outputs, BK=first, BL=rest, SPLITS=tiles.splits, MANY=many, num_warps=tiles.warps, num_stages=1,
            **flags,
        )  # fmt: skip
        return
    tile_outputs = max(16, tiles.outputs // 2) if flags["PAIRED"] else tiles.outputs
    # weights that a program fetches before the kernel in front of it has ended: input tiles, and elements per line
    ahead = min(tiles.stages, triton.cdiv(inputs, tiles.inputs * tiles.splits))
    line = min(tiles.inputs, LINE_BYTES // weight_NK.element_size())
    launch(tiled_product, (*tiles_of_rows, triton.cdiv(outputs, tile_outputs), tiles.splits),
        x_RK, weight_NK, bias, residual, out, rows, outputs, inputs, BR=padded_rows, BN=tile_outputs, BK=tiles.inputs,
        EVEN=inputs % (tiles.inputs * tiles.splits) == 0, AHEAD=ahead, LINE=line, SPLITS=tiles.splits,
        MANY=many, num_warps=tiles.warps, num_stages=tiles.stages, **flags,
    )  # fmt: skip


def whole_tiles(inputs: int) -> tuple[int, int]:
    """Sizes of the two tiles that hold the inputs: the largest power of two within them; one for the rest, or 0."""
    first = 1 << (inputs.bit_length() - 1)
    rest = inputs - first
    return first, max(16, 1 << (rest - 1).bit_length()) if rest else 0


@dataclass(frozen=True)
class Parts:
    """The parts of a split product: [splits, R, N] in float32, not yet added up; `dtype`: of the result.

    A product that is not split is its one part, in its own dtype.
    """

    sums_SRN: Tensor
    dtype: torch.dtype

    @property
    def whole(self) -> Tensor:
        """[R, N]: the product, where it is one part."""
        return self.sums_SRN[0]


def splittable(linear: Linear, tiles: Tiles) -> bool:
    """Whether the inputs can be cut into `tiles.splits`: parts are whole tiles, and no activation follows the sum."""
    tile = 16 if tiles.whole else tiles.inputs
    return linear.activation is None and linear.weight_NK.shape[1] % (tile * tiles.splits) == 0


def split_kernel(x_RK: Tensor, linear: Linear, tiles: Tiles) -> Parts:
    """The parts of x · Wᵀ, side by side. Raises: ValueError when the inputs do not divide (`splittable`)."""
    if not splittable(linear, tiles):
        raise ValueError(f"{tuple(linear.weight_NK.shape)} cannot be cut into {tiles}")
    x_RK = x_RK.contiguous()
    rows, outputs = x_RK.shape[0], linear.outputs
    sums_SRN = torch.empty((tiles.splits, rows, outputs), dtype=torch.float32, device=x_RK.device)
    flags = {"PAIRED": False, "ACT": "", "BIAS": False, "RESIDUAL": False, **launch_options(x_RK.device)}
    _launch_product(x_RK, linear, tiles, sums_SRN, sums_SRN, sums_SRN, flags)
    return Parts(sums_SRN, x_RK.dtype)


def end_eager(
    y_RN: Tensor, residual_RN: Tensor, ending: Ending, norm: NormWeights | None
) -> tuple[Tensor, Tensor | None]:
    """(residual + y after its `ending`, the norm of that)."""
    if ending.norm is not None:
        y_RN = norm_eager(y_RN, ending.norm)
    if ending.scale != 1.0:
        y_RN = y_RN * ending.scale
    x_RN = residual_RN + y_RN
    return x_RN, None if norm is None else norm_eager(x_RN, norm)


def end_sublayer(
    y_RN: Tensor, residual_RN: Tensor, ending: Ending, norm: NormWeights | None
) -> tuple[Tensor, Tensor | None]:
    """As end_eager, in one launch on CUDA."""
    if not wants_kernel(y_RN):
        return end_eager(y_RN, residual_RN, ending, norm)
    found, normed = join_kernel(Parts(y_RN.contiguous()[None], y_RN.dtype), None, residual_RN, norm, ending)
    return found, normed if norm is not None else None


def join_kernel(
    parts: Parts,
    bias_N: Tensor | None,
    residual_RN: Tensor | None,
    norm: NormWeights | None,
    ending: Ending = PLAIN,
) -> tuple[Tensor, Tensor]:
    """(Σ parts + bias, rounded, after its `ending`, + residual; its norm, or itself again without `norm`)."""
    splits, rows, outputs = parts.sums_SRN.shape
    out_RN = torch.empty((rows, outputs), dtype=parts.dtype, device=parts.sums_SRN.device)
    normed_RN = torch.empty_like(out_RN) if norm is not None else out_RN
    block = triton.next_power_of_2(outputs)
    none = NormWeights(out_RN, 0.0)
    after, following = ending.norm or none, norm or none
    bias, residual, after_bias, norm_bias = (
        out_RN if extra is None else extra for extra in (bias_N, residual_RN, after.bias_D, following.bias_D)
    )
    launch(add_parts, (rows,),
        parts.sums_SRN, bias, residual, after.factor_D, after_bias, following.factor_D, norm_bias, out_RN, normed_RN,
        rows, outputs, after.eps, ending.scale, following.eps, BIAS=bias_N is not None,
        RESIDUAL=residual_RN is not None, AFTER=ending.norm is not None, AFTER_BIAS=after.bias_D is not None,
        AFTER_CENTRED=after.centred, SCALED=ending.scale != 1.0, NORM=norm is not None,
        NORM_BIAS=following.bias_D is not None, CENTRED=following.centred, SPLITS=splits, BLOCK=block,
        num_warps=min(16, max(1, block // 256)), **launch_options(out_RN.device),
    )  # fmt: skip
    return out_RN, normed_RN
