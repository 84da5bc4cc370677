"""Finds the facts of all layers of a model (structure.py), and proves them by comparison.

First the fused form of each layer, in float32, must equal the layer on a prompt and a few rows after it
(`find_layers`). Then the fused model, in its own dtype and with its kernels, must equal the original part by part, and
as a whole (`check_model`).

Shape legend: T tokens, D hidden.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.layers import FusedLayer, LayerFacts, Pass, PassHolder
from headstart.eval.decoding.fused.structure import TOLERANCE, find_layer
from headstart.eval.decoding.fused.watching import LayerArguments, as_float, distance, float_copy, layer_arguments
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.launch import compile_ahead, compiling
from headstart.eval.kernels.norm import apply_norm
from headstart.heads.kernels.device import eager_twins
from headstart.heads.targets.locate import decoder_layers

#: largest relative distance (L2) between what the fused model and the original give that passes as rounding
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
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
    for part in layers.modules():
        if type(part) is nn.Linear and type(part.weight) not in (Tensor, nn.Parameter):
            raise Unfusable(f"the weights of a projection are {type(part.weight).__name__}, expected plain numbers")
    short, width, final = layer_arguments(model, TOKENS)
    # the first layer of every window is proven on rows that leave it
    longer: dict[int, LayerArguments] = {}
    for window in {window for window in windows if window is not None and TOKENS - LATER <= window <= CHECKED_WINDOW}:
        longer[windows.index(window)] = layer_arguments(model, window + 8)[0][windows.index(window)]
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
def prove(layer: nn.Module, index: int, width: int, window: int | None, given: LayerArguments) -> LayerFacts:
    """The facts of a layer, after its fused form has been compared with it.

    Args: width: D. given: of this layer in a forward of the model.
    Raises: Unfusable when they do not describe the layer.
    """
    given = LayerArguments(as_float(given.args), as_float(given.keywords), given.tokens)
    if not isinstance(given.keywords.get("position_embeddings"), tuple):
        raise Unfusable(f"{type(layer).__name__} gets no rotary tables")
    copied = float_copy(layer)
    device = given.keywords["position_embeddings"][0].device
    noise = torch.Generator().manual_seed(index)
    x_1TD = torch.randn((1, given.tokens, width), generator=noise).to(device)
    facts = find_layer(copied, x_1TD, given, window)
    theirs_1TD = given.run(copied, x_1TD)
    mine_1TD = _run_fused(copied, facts, window, x_1TD, given)
    found = distance(mine_1TD - x_1TD, theirs_1TD - x_1TD)
    if not found <= TOLERANCE:
        raise Unfusable(
            f"layer {index} ({type(layer).__name__}): its fused form differs by {found:.1e} in float32, "
            f"expected at most {TOLERANCE:.0e}"
        )
    return facts


def _run_fused(layer: nn.Module, facts: LayerFacts, window: int | None, x_1TD: Tensor, given: LayerArguments) -> Tensor:
    """The fused form of a float32 layer: first a prompt, then LATER rows that see it in the buffers."""
    holder, heads, count = PassHolder(), facts.attention_facts, x_1TD.shape[1]
    fused = FusedLayer(layer, facts, 0, holder, window)
    buffers = Buffers([(heads.kv_heads, heads.head_dim)], 1, count, torch.float32, x_1TD.device)
    position_1T = torch.arange(count, device=x_1TD.device)[None]
    made = []
    with eager_twins():
        for first, last in ((0, count - LATER), (count - LATER, count)):
            here = position_1T[:, first:last]
            holder.current = Pass(Visibility(here, here, here[:, 0]), buffers)
            made.append(fused(x_1TD[:, first:last].clone(), position_embeddings=given.rotary_tables(first, last)))
    return torch.cat(made, 1)


@torch.no_grad()
def check_model(fused: Any, model: Any, length: int = 12) -> None:
    """Compare a FusedModel with the original on random tokens.

    Each part gets what the original's part got: the embeddings, every layer, and the final norm with the output matrix.
    Then the models are compared as a whole, but for a mixture: rounding makes its routers choose other experts, and
    whatever follows differs.
    Raises: Unfusable where they differ.
    """
    noise = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens_BT = torch.randint(0, vocabulary, (2, length), generator=noise).to(fused.device)
    position_BT = torch.arange(length, device=fused.device).expand(2, length)
    given = tokens_BT, Visibility(position_BT, position_BT, position_BT[:, 0]), fused.buffers(2, length)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    with compiling(), ExitStack() as hooks:
        compile_ahead(lambda: fused.forward(*given))
        for layer in decoder_layers(model):
            hooks.callback(layer.register_forward_pre_hook(_keep_input(inputs), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(_keep_output(outputs)).remove)
        before = model(input_ids=tokens_BT, use_cache=False, output_hidden_states=True)
    ends = before.hidden_states[-1], before.logits
    distances = _distances_of_parts(fused, given, inputs, outputs, ends)
    if not fused.mixes:
        logits, hidden, _ = fused.forward(*given)
        for name, mine, theirs in zip(("last hidden states", "last logits"), (hidden, logits), ends, strict=True):
            distances[name] = _or_infinity((mine.double() - theirs.double()).norm() / theirs.double().norm())
    name = max(distances, key=lambda name: distances[name])
    found, allowed = distances[name], ROUNDING[fused.dtype]
    if found > allowed:
        raise Unfusable(
            f"the {name} of the fused {type(model).__name__} differ from the model's by {found:.2e} (relative), "
            f"expected at most {allowed:.0e}"
        )


def _distances_of_parts(
    fused: Any, given: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor], ends: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """How far each fused part is from the original's when it gets what the original's part got.

    Args:
        inputs, outputs: of each layer of the original.
        ends: the original's final hidden states and logits.
    """
    embedded: list[Tensor] = []
    made: list[Tensor] = []
    norms: dict[int, tuple[Tensor, Tensor]] = {}
    with ExitStack() as hooks:
        hooks.callback(fused.layers[0].register_forward_pre_hook(_keep_input(embedded), with_kwargs=True).remove)
        for part, x in zip([*fused.layers, fused.norm], [*inputs, outputs[-1]], strict=True):
            hooks.callback(part.register_forward_pre_hook(_replace_input(x), with_kwargs=True).remove)
        for layer in fused.layers:
            hooks.callback(layer.register_forward_hook(_keep_output(made)).remove)
            hooks.callback(layer.register_forward_hook(_keep_norm(norms)).remove)
        logits, hidden, _ = fused.forward(*given)
    finest = torch.finfo(fused.dtype).eps / ROUNDING[fused.dtype]
    distances = {}
    for index, (mine, x, theirs) in enumerate(zip(made, inputs, outputs, strict=True)):
        # what the layer adds counts, apart from the rounding of the sum
        added = (theirs.double() - x.double()).norm(dim=-1) + finest * theirs.double().norm(dim=-1)
        # most rows: in some, rounding makes a router choose another expert
        distance_BT = (mine.double() - theirs.double()).norm(dim=-1) / added
        distances[f"rows after layer {index}"] = _or_infinity(distance_BT.median())
    pairs = {"embeddings": (embedded[0], inputs[0]), "hidden states": (hidden, ends[0]), "logits": (logits, ends[1])}
    pairs |= {f"norms after layer {index}": pair for index, pair in norms.items()}
    for name, (mine, theirs) in pairs.items():
        distances[name] = _or_infinity(distance(mine.double(), theirs.double()))
    return distances


def _keep_input(inputs: list[Tensor]) -> Any:
    def keep(_layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        inputs.append((args[0] if args else keywords["hidden_states"]).clone())

    return keep


def _keep_output(outputs: list[Tensor]) -> Any:
    def keep(_layer: nn.Module, _args: Any, result: Any) -> None:
        outputs.append((result[0] if isinstance(result, tuple) else result).clone())

    return keep


def _keep_norm(norms: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """A hook that keeps the norm that a fused layer made for the next one, and what that one would make by itself."""

    def keep(layer: FusedLayer, _args: Any, _result: Any) -> None:
        run = layer.holder.current
        if run is not None and run.made is not None and run.stream_BMD is not None:
            norm, made_RD = run.made
            norms[layer.index] = made_RD.clone(), apply_norm(run.stream_BMD.flatten(0, -2), norm)

    return keep


def _replace_input(x: Tensor) -> Any:
    """A hook that puts `x` in the place of a part's first argument."""

    def replace(_part: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return (x, *args[1:]), {name: value for name, value in keywords.items() if name != "hidden_states"}

    return replace


def _or_infinity(found: Tensor | float) -> float:
    """The number, or infinity in place of NaN."""
    return float(found) if float(found) == float(found) else float("inf")
