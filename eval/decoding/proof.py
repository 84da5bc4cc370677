"""Finds the facts of all layers of a model (structure.py), and proves them.

The fused form of a layer's float32 copy must equal the copy, with a prompt and a few rows after it.

Shape legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.fused_layers import FusedLayer, LayerFacts, Pass, PassHolder
from headstart.eval.decoding.merge import Unfusable
from headstart.eval.decoding.structure import TOLERANCE, find_layer
from headstart.eval.decoding.watching import Given, as_float, distance, float_copy, watch
from headstart.eval.kernels.attention import Visibility
from headstart.heads.kernels.device import eager_twins
from headstart.heads.targets.locate import decoder_layers

#: rows of the proof that come after the prompt
LATER = 3
#: tokens of a proof; for a window of at most CHECKED_WINDOW, enough to leave it
TOKENS, CHECKED_WINDOW = 24, 1024


@torch.no_grad()
def find_layers(model: Any, windows: list[int | None]) -> tuple[int, str, list[LayerFacts]]:
    """What a model's layers consist of, each proven by itself.

    Args: windows: of each layer.
    Returns: (hidden size, name of the final norm inside the text decoder, facts of each layer).
    Raises: Unfusable.
    """
    layers = decoder_layers(model)
    short, width, final = watch(model, TOKENS)
    # the first layer of every window is proven on rows that leave it
    longer: dict[int, Given] = {}
    for window in {window for window in windows if window is not None and TOKENS - LATER <= window <= CHECKED_WINDOW}:
        longer[windows.index(window)] = watch(model, window + 8)[0][windows.index(window)]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        facts = [
            prove(layer, index, width, windows[index], longer.get(index, short[index]))
            for index, layer in enumerate(layers)
        ]
    finally:
        torch.set_float32_matmul_precision(precision)
    return width, final, facts


@torch.no_grad()
def prove(layer: nn.Module, index: int, width: int, window: int | None, given: Given) -> LayerFacts:
    """The facts of a layer, after its fused form has been compared with it.

    Args: width: D. given: of this layer in a forward of the model.
    Raises: Unfusable when they do not describe the layer.
    """
    given = Given(as_float(given.args), as_float(given.keywords), given.tokens)
    if not isinstance(given.keywords.get("position_embeddings"), tuple):
        raise Unfusable(f"{type(layer).__name__} gets no rotary tables")
    twin = float_copy(layer)
    device = given.keywords["position_embeddings"][0].device
    noise = torch.Generator().manual_seed(index)
    x_1TD = torch.randn((1, given.tokens, width), generator=noise).to(device)
    facts = find_layer(twin, x_1TD, given, window)
    theirs_1TD = given.run(twin, x_1TD)
    mine_1TD = _run_fused(twin, facts, window, x_1TD, given)
    found = distance(mine_1TD - x_1TD, theirs_1TD - x_1TD)
    if not found <= TOLERANCE:
        raise Unfusable(
            f"layer {index} ({type(layer).__name__}): its fused form differs by {found:.1e} in float32, "
            f"expected at most {TOLERANCE:.0e}"
        )
    return facts


def _run_fused(twin: nn.Module, facts: LayerFacts, window: int | None, x_1TD: Tensor, given: Given) -> Tensor:
    """The fused form of a float32 layer: first a prompt, then LATER rows that see it in the buffers."""
    holder, heads, count = PassHolder(), facts.heads, x_1TD.shape[1]
    fused = FusedLayer(twin, facts, 0, holder, window)
    buffers = Buffers([(heads.kv_heads, heads.head_dim)], 1, count, torch.float32, x_1TD.device)
    position_1T = torch.arange(count, device=x_1TD.device)[None]
    made = []
    with eager_twins():
        for first, last in ((0, count - LATER), (count - LATER, count)):
            here = position_1T[:, first:last]
            holder.current = Pass(Visibility(here, here, here[:, 0]), buffers)
            made.append(fused(x_1TD[:, first:last].clone(), position_embeddings=given.part(first, last)))
    return torch.cat(made, 1)
