"""The chosen experts of a mixture: first product with its activation, second product, weighted sum over the experts.

Each of R rows has chosen k experts: R · k pairs of a row and an expert. Only weights of chosen experts are read, and
nothing waits for the host, so the kernels can be captured. A program takes up to `rows` pairs of one expert
(`pair_tiles`), or, in float32 with few pairs per expert, one pair (`pair_vectors`). The kernels are in
expert_kernels.py.
Shape legend: R rows, k experts per row, P = R · k pairs, E experts, D hidden, N width of an expert, C channels of the
first product (2 N where a gate and an up projection stand in one matrix), T tiles of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.kernels.launch import launch, launch_options, triton
from headstart.heads.kernels.device import wants_kernel

if triton is not None:
    from headstart.eval.kernels.expert_kernels import mix_pairs, pair_tiles, pair_vectors

#: pairs beyond which a sort on the device groups them by expert; below it, every program looks for its own
SORTED_PAIRS = 256
#: pairs per expert, on average, up to which float32 pairs are multiplied one by one. On an H200 (128 experts of
#: 768 × 2048, 8 per row) that is 8 times as fast as tiles for one row, and 2.8 times for 64 (4 pairs per expert). It
#: takes 2.1 µs more for each further pair, and so meets the tiles' 5.8 ms before 512 rows. In 16 bits, where tiles run
#: on the matrix units, they win for any number of rows (by 12 % for one, by half for 64), and are 1.3 to 3.7 times as
#: fast as torch's grouped products
SINGLE_PAIRS = 8


@dataclass(frozen=True)
class GatedActivation:
    """act(gate) · (up + shift), where act(g) = g · σ(slope · (g + cubic · g³)) is SiLU, or GELU's tanh form.

    Attributes:
        limit: gate is clamped from above, and up from both sides, to this.
        interleaved: gate and up channels take turns, instead of all gate channels before all up channels.
    """

    slope: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False

    def __call__(self, x_PC: Tensor) -> Tensor:
        gate, up = (x_PC[..., ::2], x_PC[..., 1::2]) if self.interleaved else x_PC.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.slope * (gate + self.cubic * gate**3)) * (up + self.shift)


SILU = GatedActivation()
GELU_TANH = GatedActivation(slope=2 * math.sqrt(2 / math.pi), cubic=0.044715)


@dataclass(eq=False)
class Experts:
    """Weights of all experts, in views of any strides, and what stands between the two products.

    Attributes:
        activation: a GatedActivation, which the kernels fuse with the first product, or any function [P, C] → [P, N].
    """

    first_ECD: Tensor
    second_EDN: Tensor
    first_bias_EC: Tensor | None
    second_bias_ED: Tensor | None
    activation: GatedActivation | Callable[[Tensor], Tensor]

    @property
    def count(self) -> int:
        return self.first_ECD.shape[0]


def experts_eager(x_RD: Tensor, expert_Rk: Tensor, weight_Rk: Tensor, experts: Experts) -> Tensor:
    """Σ over a row's experts of weight · down(activation(first(x))) [R, D], one expert after the other."""
    mixed_RD = torch.zeros_like(x_RD)
    for expert in expert_Rk.unique().tolist():
        if not 0 <= expert < experts.count:
            continue
        row, place = torch.where(expert_Rk == expert)
        first_bias, second_bias = (
            None if bias is None else bias[expert] for bias in (experts.first_bias_EC, experts.second_bias_ED)
        )
        hidden = experts.activation(F.linear(x_RD[row], experts.first_ECD[expert], first_bias))
        out = F.linear(hidden, experts.second_EDN[expert], second_bias) * weight_Rk[row, place, None]
        mixed_RD.index_add_(0, row, out.to(x_RD.dtype))
    return mixed_RD


def mix_experts(x_RD: Tensor, expert_Rk: Tensor, weight_Rk: Tensor, experts: Experts) -> Tensor:
    """As experts_eager. An expert outside 0 … E - 1 adds nothing."""
    return (experts_kernel if wants_kernel(x_RD) else experts_eager)(x_RD, expert_Rk, weight_Rk, experts)


def experts_kernel(
    x_RD: Tensor, expert_Rk: Tensor, weight_Rk: Tensor, experts: Experts, single: bool | None = None
) -> Tensor:
    """As experts_eager, with accumulation in float32 and one rounding after each product.

    Args: single: whether pairs are multiplied one by one; None = as the numbers of pairs and experts suggest.
    """
    x_RD, (rows, per_row) = x_RD.contiguous(), expert_Rk.shape
    out_RD = torch.empty_like(x_RD)
    if not rows:
        return out_RD
    expert_P = expert_Rk.reshape(-1)
    pairs = expert_P.shape[0]
    if single is None:
        single = x_RD.dtype.itemsize > 2 and pairs <= SINGLE_PAIRS * experts.count
    groups = None if single else _groups(expert_P, experts.count, x_RD.dtype)
    gate = experts.activation if isinstance(experts.activation, GatedActivation) else None
    channels = experts.first_ECD.shape[1] // (1 if gate is None else 2)
    hidden_PN = x_RD.new_empty((pairs, channels))
    _product(x_RD, experts.first_ECD, experts.first_bias_EC, expert_P, hidden_PN, per_row, gate, groups)
    if gate is None:
        hidden_PN = experts.activation(hidden_PN).contiguous()
    out_PD = torch.empty((pairs, out_RD.shape[1]), dtype=torch.float32, device=x_RD.device)
    _product(hidden_PN, experts.second_EDN, experts.second_bias_ED, expert_P, out_PD, 1, None, groups)
    width = out_RD.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    launch(mix_pairs, (rows, triton.cdiv(width, block)),
        out_PD, expert_P, weight_Rk.contiguous(), out_RD, width, experts.count, PER_ROW=per_row, BLOCK=block,
        num_warps=max(1, block // 256), **launch_options(x_RD.device),
    )  # fmt: skip
    return out_RD


@dataclass(frozen=True)
class _Groups:
    """Pairs by expert. `tables`: None, or the tiles of sorted pairs: (order_P, expert_T, first_T, count_T)."""

    rows: int
    tables: tuple[Tensor, Tensor, Tensor, Tensor] | None


def _groups(expert_P: Tensor, experts: int, dtype: torch.dtype) -> _Groups:
    pairs = expert_P.shape[0]
    if pairs <= SORTED_PAIRS:
        return _Groups(16, None)
    # float32 products are unrolled: small tiles keep the compiler's time short
    rows = 64 if pairs >= 32 * experts and dtype.itemsize == 2 else 32 if pairs >= 16 * experts else 16
    return _Groups(rows, sorted_tiles(expert_P, experts, rows))


def sorted_tiles(expert_P: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tiles of up to `rows` pairs of one expert, made on the device.

    Returns: order_P (pairs by expert); of each tile its expert_T, the place first_T of its first pair in order_P, and
        how many count_T it holds. T is what the host can say for sure; tiles at the end hold nothing.
    """
    pairs = expert_P.shape[0]
    key_P, order_P = torch.sort(expert_P, stable=True)
    expert_E = torch.arange(experts, dtype=key_P.dtype, device=key_P.device)
    start_E, stop_E = torch.searchsorted(key_P, expert_E), torch.searchsorted(key_P, expert_E, right=True)
    tiles_E = (stop_E - start_E + rows - 1) // rows
    last_E = tiles_E.cumsum(0)
    tile_T = torch.arange(min(pairs, pairs // rows + experts), device=key_P.device)
    expert_T = torch.searchsorted(last_E, tile_T, right=True)
    held_T = expert_T.clamp(max=experts - 1)
    first_T = start_E[held_T] + (tile_T - last_E[held_T] + tiles_E[held_T]) * rows
    count_T = (stop_E[held_T] - first_T).clamp(0, rows) * (expert_T < experts)
    return order_P, held_T, first_T, count_T


def _product(
    x: Tensor,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    expert_P: Tensor,
    out_PO: Tensor,
    per_row: int,
    gate: GatedActivation | None,
    groups: _Groups | None,
) -> None:
    """Every pair's product, and its gate. Args: x: input rows, each for `per_row` pairs in a row."""
    pairs, outputs = out_PO.shape
    experts, _, inputs = weight_EOI.shape
    strides = weight_EOI.stride()
    across = strides[1] == 1 and strides[2] != 1  # outputs are neighbours in memory instead of inputs
    small = weight_EOI.dtype.itemsize == 2
    shape = gate or SILU
    held = 2 if shape.interleaved else 1  # rows of one matrix that make an output
    given = (
        x, weight_EOI, out_PO if bias_EO is None else bias_EO, expert_P, out_PO, experts, outputs, inputs, *strides,
        0 if bias_EO is None else bias_EO.stride(0), shape.slope, shape.cubic, shape.limit, shape.shift,
    )  # fmt: skip
    flags = {
        "PAIRED": gate is not None and not gate.interleaved, "INTERLEAVED": shape.interleaved,
        "BIAS": bias_EO is not None, "PER_ROW": per_row, **launch_options(x.device),
    }  # fmt: skip
    if groups is None:
        outs, ins = (64 // held, 32) if across else (16 // held, 256 if small else 128)
        launch(pair_vectors, (pairs, triton.cdiv(outputs, outs)),
            *given, EVEN=inputs % ins == 0, BN=outs, BK=ins, ROWS=outs * held, FULL=outputs % outs == 0, num_warps=4,
            **flags,
        )  # fmt: skip
        return
    ins = 64 if small else 32
    outs = (32 if gate is not None else 64) if groups.rows < 64 else 64
    tables = groups.tables or (expert_P, expert_P, expert_P, expert_P)
    tiles = pairs if groups.tables is None else tables[1].shape[0]
    launch(pair_tiles, (tiles, triton.cdiv(outputs, outs)),
        *given, *tables, pairs, SORTED=groups.tables is not None, EVEN=inputs % ins == 0,
        BP=max(16, triton.next_power_of_2(pairs)) if groups.tables is None else 16,
        BR=groups.rows, BN=outs, BK=ins, ROWS=outs * held, FULL=outputs % outs == 0, num_warps=4,
        num_stages=4 if small else 2, **flags,
    )  # fmt: skip
