"""Finds what a decoder layer of transformers consists of.

A float32 copy of the layer runs on random rows while the inputs and outputs of its parts are recorded. They show where
the norms are, what the MLP reads, and which factors scale the results. Of the known forms of rotary embedding, that one
is taken whose attention equals the module's. The name of an architecture decides nothing.
Shape legend: T tokens, D hidden, R rows, h query heads, g kv heads, d head dim, C = (h + 2g) · d, W table entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.layers import AttentionFacts, LayerFacts
from headstart.eval.decoding.fused.mlp import FusedMLP, MLPFacts
from headstart.eval.decoding.fused.watching import Call, LayerArguments, distance, recorded_calls, same, tensor_of
from headstart.eval.kernels.attention import Visibility, attend_eager
from headstart.eval.kernels.linear import ACTIVATIONS, PLAIN
from headstart.eval.kernels.rope_store import RopeStore, rope_store_eager
from headstart.heads.kernels.device import eager_twins

#: largest relative distance (L2, of a row) between what a layer's float32 copy and its fused form add to their input
TOLERANCE = 3e-4
#: an attention is also tried on inputs so many times as large: with small random weights, its scores would else be so
#: close to each other that a wrong rotation changes next to nothing
LARGER = 4.0


def find_layer(layer: nn.Module, x_1TD: Tensor, given: LayerArguments, window: int | None) -> LayerFacts:
    """The facts of a float32 layer. Args: x_1TD: random rows. Raises: Unfusable."""
    name = type(layer).__name__
    with recorded_calls(layer) as calls:
        y = given.run(layer, x_1TD.clone())
    attention = next((call for call in calls if "position_embeddings" in call.keywords), None)
    if attention is None:
        raise Unfusable(f"{name} has no attention that gets rotary tables")
    others = [call for call in calls if call is not attention]
    norms = [call for call in others if is_norm(call)]
    rest = [call for call in others if not is_norm(call)]
    if len(rest) != 1:
        raise Unfusable(f"{name} runs {[call.name for call in rest]} beside its attention, expected one MLP")
    mlp = rest[0]

    def norm_that(gives: Tensor | None = None, reads: Tensor | None = None) -> Call | None:
        def fits(norm: Call) -> bool:
            return (gives is None or same(norm.output, gives)) and (reads is None or same(norm.input, reads))

        return next((norm for norm in norms if fits(norm)), None)

    before = norm_that(gives=attention.input, reads=x_1TD)
    if before is None and not same(attention.input, x_1TD):
        raise Unfusable(f"the attention of {name} reads neither the layer's input nor a norm of it")
    after, after_mlp = norm_that(reads=attention.output), norm_that(reads=mlp.output)
    # the last one: two norms of the same input may have the same weights
    before_mlp = next((norm for norm in reversed(norms) if same(norm.output, mlp.input)), None)
    read = mlp.input if before_mlp is None else before_mlp.input
    parallel = same(read, x_1TD)
    if parallel and before_mlp is before:
        before_mlp = None
    of_attention, of_mlp = (after or attention).output, (after_mlp or mlp).output
    if parallel:
        scales = 1.0, 1.0
    else:
        scales = _scale(layer, read, x_1TD, of_attention), _scale(layer, y, read, of_mlp)
    chosen = [None if norm is None else norm.name for norm in (before, after, before_mlp, after_mlp)]
    unused = [norm.name for norm in norms if norm.name not in chosen]
    if unused:
        raise Unfusable(f"{name} has norms {unused} at places that the fused layer does not know")
    return LayerFacts(
        attention.name, mlp.name, chosen[0], chosen[1], chosen[2], chosen[3], parallel, scales,
        find_attention(attention, given, window), find_mlp(mlp),
    )  # fmt: skip


def is_norm(call: Call) -> bool:
    """Whether the part may be a norm: it has no parts of its own, no matrix, and keeps the shape."""
    leaf = next(call.module.children(), None) is None
    small = all(parameter.ndim <= 1 for parameter in call.module.parameters())
    return leaf and small and call.input.shape == call.output.shape


def _scale(layer: nn.Module, whole: Tensor, start: Tensor, part: Tensor) -> float:
    """The factor c of whole = start + c · part.

    Rounding is taken off: where 1 or a number of the layer is that close, it is returned.
    Raises: Unfusable where no factor fits.
    """
    added, part = (whole - start).flatten().double(), part.flatten().double()
    found = float(added @ part / (part @ part).clamp(min=1e-30))
    if not float((added - found * part).norm()) <= TOLERANCE * float(added.norm()):
        raise Unfusable(f"{type(layer).__name__} does not add the results of its sublayers to their inputs")
    known = [1.0, *(value for value in vars(layer).values() if type(value) is float)]
    nearest = min(known, key=lambda value: abs(value - found))
    return nearest if abs(nearest - found) <= 1e-4 * abs(found) else found


def find_attention(call: Call, given: LayerArguments, window: int | None) -> AttentionFacts:
    """The facts of a float32 attention, which ran as `call` says. Raises: Unfusable."""
    attention, name = call.module, type(call.module).__name__
    usual, larger = (_attention_calls(call, factor) for factor in (1.0, LARGER))
    linears = [part for part in usual if isinstance(part.module, nn.Linear)]
    norms = [part for part in usual if is_norm(part)]
    if not linears or len(linears) - 1 not in (1, 3):
        found = [f"{part.name} ({type(part.module).__name__})" for part in usual]
        raise Unfusable(f"{name} runs {found}, expected nn.Linear for q, k, v (or one for all) and the output")
    projections, out = linears[:-1], linears[-1]
    if not all(same(part.input, call.input) for part in projections) or len(norms) not in (0, 2):
        raise Unfusable(f"{name} does more with its input than q, k, v projections and norms of q and k")
    d = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    if not d:
        raise Unfusable(f"{name} has no attribute head_dim or head_size")
    heads = out.module.in_features // d
    kv_heads = (sum(part.module.out_features for part in projections) // d - heads) // 2
    softcap, scale = getattr(attention, "attn_logit_softcapping", None), getattr(attention, "scaling", d**-0.5)
    base = AttentionFacts(
        tuple(part.name for part in projections), out.name, heads, kv_heads, d,
        (norms[0].name, norms[1].name) if norms else None, float(scale), softcap,
        isinstance(getattr(attention, "sinks", None), Tensor),
    )  # fmt: skip
    entries = given.keywords["position_embeddings"][0].shape[-1]
    distances: dict[AttentionFacts, float] = {}
    for facts in forms(base, entries, len(projections) == 1, bool(norms)):
        shape = facts.rope(attention, call.input.device)
        if shape.norms_all_heads and (shape.norm_last or shape.grouped):
            continue
        distances[facts] = max(
            _distance_of(calls, facts, shape, given, attention, window) for calls in (usual, larger))
        if distances[facts] <= TOLERANCE:
            return facts
    best = min(distances, key=lambda facts: distances[facts])
    if not distances[best] <= 10 * TOLERANCE:
        raise Unfusable(
            f"{name}: no known form of rotary embedding and norms gives its result; the nearest differs by "
            f"{distances[best]:.1e} in float32"
        )
    return best


def forms(base: AttentionFacts, entries: int, one_projection: bool, normed: bool) -> Iterator[AttentionFacts]:
    """The known forms, the most common ones first. Args: entries: of a row of the rotary tables."""
    rotations: list[tuple[str, bool, int | None]] = [
        ("halves", False, None), ("pairs", True, None), ("pairs", False, None), ("none", False, None),
    ]  # fmt: skip
    # tables that hold each angle once
    rotations += [("halves", True, 2 * entries), ("pairs", True, 2 * entries)]
    for rotation, by_angle, rotary in rotations:
        if (rotary or entries) > base.head_dim and rotation != "none":
            continue
        for grouped in (False, True)[: 1 + (one_projection and base.heads % max(base.kv_heads, 1) == 0)]:
            for norm_last in (False, True)[: 1 + normed]:
                yield replace(
                    base, rotation=rotation, by_angle=by_angle, rotary=rotary, grouped=grouped, norm_last=norm_last
                )


def _attention_calls(call: Call, factor: float) -> list[Call]:
    """The calls inside an attention whose input is `factor` times as large."""
    input = factor * call.input
    with recorded_calls(call.module) as calls:
        if "hidden_states" in call.keywords:
            call.module(**{**call.keywords, "hidden_states": input})
        else:
            call.module(input, **call.keywords)
    return calls


def _distance_of(
    calls: list[Call],
    facts: AttentionFacts,
    shape: RopeStore,
    given: LayerArguments,
    attention: nn.Module,
    window: int | None,
) -> float:
    """The largest distance of a row between the input of the attention's output projection and what our eager twins
    compute for it with these facts."""
    by_name = {call.name: call for call in calls}
    qkv_TC = torch.cat([by_name[name].output for name in facts.projections], -1).flatten(0, -2)
    count, device = qkv_TC.shape[0], qkv_TC.device
    keys, values = qkv_TC.new_zeros((2, 1, facts.kv_heads, count, facts.head_dim))
    position_1T = torch.arange(count, device=device)[None]
    cos_1TW, sin_1TW = given.rotary_tables(0, count)
    q_Thd = rope_store_eager(qkv_TC, cos_1TW[0], sin_1TW[0], shape, keys, values, position_1T)
    visibility = Visibility(position_1T, position_1T, position_1T[:, 0])
    mine_TC = attend_eager(q_Thd, keys, values, visibility, facts.shape(attention, window)).flatten(1)
    return distance(mine_TC, by_name[facts.out].input.flatten(0, -2))


def find_mlp(call: Call) -> MLPFacts | None:
    """The facts of a float32 MLP, which ran as `call` says; None where it is not one of two products."""
    with recorded_calls(call.module) as calls:
        call.module(call.input)
    linears = [part for part in calls if type(part.module) is nn.Linear]
    others = [part for part in calls if part not in linears]
    if len(others) != 1 or len(linears) not in (2, 3) or len(list(call.module.parameters(recurse=False))):
        return None
    first, down, activation = linears[:-1], linears[-1], activation_of(others[0])
    if activation is None or not all(same(part.input, call.input) for part in first):
        return None
    read = others[0].input
    if len(first) == 2:
        first.sort(key=lambda part: not same(part.output, read))  # the gate comes first
        alone, found = False, same(first[0].output, read)
    else:
        alone = same(first[0].output, read)
        found = alone or same(first[0].output.chunk(2, -1)[0], read)
    if not found:
        return None
    facts = MLPFacts(tuple(part.name for part in first), down.name, activation, alone)
    x_RD = call.input.flatten(0, -2)
    with eager_twins():
        mine, _ = FusedMLP(call.module, facts).end(x_RD, torch.zeros_like(x_RD), PLAIN, None)
    return facts if distance(mine, call.output) <= TOLERANCE else None


def activation_of(call: Call) -> str | None:
    """The key in ACTIVATIONS of an MLP's activation, found by running it; None where the kernels have none like it."""
    probe = torch.linspace(-4, 4, 33, device=call.input.device)
    result = tensor_of(call.module(probe))
    for name, known in ACTIVATIONS.items():
        if result is not None and result.shape == probe.shape and torch.allclose(result, known(probe), atol=1e-5):
            return name
    return None
