"""Finds what a decoder layer of transformers consists of, and proves that its fused form computes the same.

A float32 copy of the layer runs on random rows, with hooks on its parts: what each is fed and gives tells where the
norms stand, what the MLP reads, and which factors the results get. Rotary embeddings are tried: the form whose attention
equals the module's is taken. In the end the fused form of the copy must equal the copy, with a prompt and a few rows
after it. Nothing is taken from the name of an architecture.
Shape legend: T tokens, D hidden, h query heads, g kv heads, d head dim, C = (h + 2g) · d.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.fused_layers import AttentionFacts, FusedLayer, LayerFacts, Pass, PassHolder
from headstart.eval.decoding.fused_mlp import FusedMLP, MLPFacts
from headstart.eval.decoding.merge import Unfusable
from headstart.eval.kernels.attention import Visibility, attend_eager
from headstart.eval.kernels.linear import ACTIVATIONS, PLAIN
from headstart.eval.kernels.rope_store import RopeStore, rope_store_eager
from headstart.heads.kernels.device import eager_twins
from headstart.heads.targets.locate import decoder_layers, text_decoder

#: largest relative distance (L2, of a row) between a layer's float32 copy and its fused form, beyond what was fed
TOLERANCE = 3e-4
#: an attention's input is also tried this many times larger: even scores of small random weights then tell tokens apart
LOUDER = 4.0
#: rows of the proof that come after the prompt
LATER = 3


@dataclass(frozen=True)
class Call:
    """A part of a module that ran: what it was fed and gave, and the keywords of the call."""

    name: str
    part: nn.Module
    fed: Tensor
    gave: Tensor
    keywords: dict[str, Any]


def tensor_of(value: Any) -> Tensor | None:
    """The tensor, or the first of a tuple."""
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, Tensor) else None


@contextmanager
def observed(module: nn.Module) -> Iterator[list[Call]]:
    """While open, the calls of the module's children appear in the yielded list, in their order. Dropout is left out."""
    calls: list[Call] = []

    def hook(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        fed: list[Tensor | None] = []

        def before(_part: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            given = tensor_of(args) if args else tensor_of(next(iter(keywords.values()), None))
            fed.append(None if given is None else given.clone())

        def after(part: nn.Module, _args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
            given, made = fed.pop(), tensor_of(result)
            if given is not None and made is not None:
                calls.append(Call(name, part, given, made.clone(), keywords))

        return before, after

    with ExitStack() as hooks:
        for name, child in module.named_children():
            if not isinstance(child, (nn.Dropout, nn.Identity)):
                before, after = hook(name)
                hooks.callback(child.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(child.register_forward_hook(after, with_kwargs=True).remove)
        yield calls


def same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten())


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Largest relative distance (L2) of a row."""
    mine, theirs = mine.flatten(0, -2), theirs.flatten(0, -2)
    scale = theirs.norm(dim=-1)
    return float(((mine - theirs).norm(dim=-1) / scale.clamp(min=1e-3 * float(scale.mean()) + 1e-30)).max())


def float_copy(layer: nn.Module) -> nn.Module:
    """The layer in float32, with the same config objects."""
    configs = [value for part in layer.modules() for value in vars(part).values() if isinstance(value, PretrainedConfig)]
    return copy.deepcopy(layer, {id(config): config for config in configs}).float()


def as_float(value: Any) -> Any:
    """The value with its floating-point tensors in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(as_float(part) for part in value)
    return {key: as_float(part) for key, part in value.items()} if type(value) is dict else value


@dataclass(frozen=True)
class Given:
    """What the model hands to a layer in a forward of T tokens, but for the rows: arguments after them, and keywords."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    tokens: int

    def run(self, layer: nn.Module, x_1TD: Tensor) -> Tensor:
        made = tensor_of(layer(x_1TD, *self.args, **self.keywords))
        if made is None:
            raise Unfusable(f"{type(layer).__name__} returns no tensor")
        return made

    def part(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The rotary tables of tokens first … last - 1."""
        cos, sin = self.keywords["position_embeddings"]
        return cos[:, first:last], sin[:, first:last]


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


def watch(model: Any, tokens: int) -> tuple[list[Given], int, str]:
    """(What each layer is given in a forward of so many tokens, the hidden size, name of the final norm)."""
    decoder, layers = text_decoder(model), decoder_layers(model)
    given: list[Given] = []
    last: list[Tensor] = []
    final: list[str] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        others = {key: value for key, value in keywords.items() if args or key != "hidden_states"}
        given.append(Given(args[1:], others, tokens))

    def keep_last(_layer: nn.Module, _args: Any, result: Any) -> None:
        last.append(result[0] if isinstance(result, tuple) else result)

    def look(name: str) -> Callable[..., None]:
        def see(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if last and args and args[0] is last[0]:
                final.append(name)

        return see

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(keep, with_kwargs=True).remove)
        hooks.callback(layers[-1].register_forward_hook(keep_last).remove)
        for name, child in decoder.named_children():
            hooks.callback(child.register_forward_pre_hook(look(name)).remove)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        noise = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (1, tokens), generator=noise).to(model.device)
        # as late as positions go: some architectures scale the queries of late positions
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
        position_1T = max(positions - tokens, 0) + torch.arange(tokens, device=ids.device)[None]
        model(input_ids=ids, position_ids=position_1T, use_cache=False, logits_to_keep=1)
    if len(given) != len(layers):
        raise Unfusable(f"{len(given)} of {len(layers)} layers ran in a forward")
    if len(final) != 1:
        raise Unfusable(f"{type(decoder).__name__} has no norm after its last layer")
    return given, last[0].shape[-1], final[0]


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


def find_layer(twin: nn.Module, x_1TD: Tensor, given: Given, window: int | None) -> LayerFacts:
    """The facts of a float32 layer. Raises: Unfusable."""
    name = type(twin).__name__
    with observed(twin) as calls:
        y = given.run(twin, x_1TD.clone())
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
            return (gives is None or same(norm.gave, gives)) and (reads is None or same(norm.fed, reads))

        return next((norm for norm in norms if fits(norm)), None)

    before = norm_that(gives=attention.fed, reads=x_1TD)
    if before is None and not same(attention.fed, x_1TD):
        raise Unfusable(f"the attention of {name} reads neither the layer's input nor a norm of it")
    after, after_mlp = norm_that(reads=attention.gave), norm_that(reads=mlp.gave)
    # the last one: two norms of the same input may have the same weights
    before_mlp = next((norm for norm in reversed(norms) if same(norm.gave, mlp.fed)), None)
    read = mlp.fed if before_mlp is None else before_mlp.fed
    parallel = same(read, x_1TD)
    if parallel and before_mlp is before:
        before_mlp = None
    of_attention, of_mlp = ((sub if norm is None else norm).gave for sub, norm in ((attention, after), (mlp, after_mlp)))
    if parallel:
        scales = 1.0, 1.0
    else:
        scales = _scale(twin, read, x_1TD, of_attention), _scale(twin, y, read, of_mlp)
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
    leaf = next(call.part.children(), None) is None
    small = all(parameter.ndim <= 1 for parameter in call.part.parameters())
    return leaf and small and call.fed.shape == call.gave.shape


def _scale(layer: nn.Module, whole: Tensor, start: Tensor, part: Tensor) -> float:
    """The factor c of whole = start + c · part: 1, a number of the layer, or as it was found. Raises: Unfusable."""
    added, part = (whole - start).flatten().double(), part.flatten().double()
    found = float(added @ part / (part @ part).clamp(min=1e-30))
    if not float((added - found * part).norm()) <= TOLERANCE * float(added.norm()):
        raise Unfusable(f"{type(layer).__name__} does not add the results of its sublayers to their inputs")
    told = [1.0, *(value for value in vars(layer).values() if type(value) is float)]
    nearest = min(told, key=lambda value: abs(value - found))
    return nearest if abs(nearest - found) <= 1e-4 * abs(found) else found


def find_attention(call: Call, given: Given, window: int | None) -> AttentionFacts:
    """The facts of a float32 attention that ran as `call` tells. Raises: Unfusable."""
    attention, name = call.part, type(call.part).__name__
    quiet, loud = (_attention_run(call, factor) for factor in (1.0, LOUDER))
    linears = [part for part in quiet if isinstance(part.part, nn.Linear)]
    norms = [part for part in quiet if is_norm(part)]
    if not linears or len(linears) - 1 not in (1, 3):
        found = [f"{part.name} ({type(part.part).__name__})" for part in quiet]
        raise Unfusable(f"{name} runs {found}, expected nn.Linear for q, k, v (or one for all) and the output")
    projections, out = linears[:-1], linears[-1]
    if not all(same(part.fed, call.fed) for part in projections) or len(norms) not in (0, 2):
        raise Unfusable(f"{name} does more with its input than q, k, v projections and norms of q and k")
    d = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    if not d:
        raise Unfusable(f"{name} does not tell its head dim")
    heads = out.part.in_features // d
    kv_heads = (sum(part.part.out_features for part in projections) // d - heads) // 2
    softcap, scale = getattr(attention, "attn_logit_softcapping", None), getattr(attention, "scaling", d**-0.5)
    base = AttentionFacts(
        tuple(part.name for part in projections), out.name, heads, kv_heads, d,
        (norms[0].name, norms[1].name) if norms else None, float(scale), softcap,
        isinstance(getattr(attention, "sinks", None), Tensor),
    )  # fmt: skip
    entries = given.keywords["position_embeddings"][0].shape[-1]
    far: dict[AttentionFacts, float] = {}
    for facts in forms(base, entries, len(projections) == 1, bool(norms)):
        shape = facts.rope(attention, call.fed.device)
        if shape.norms_all_heads and (shape.norm_last or shape.grouped):
            continue
        far[facts] = max(_distance_of(calls, facts, shape, given, attention, window) for calls in (quiet, loud))
    best = min(far, key=lambda facts: far[facts])
    if not far[best] <= 10 * TOLERANCE:
        raise Unfusable(
            f"{name}: no known form of rotary embedding and norms gives its result; the nearest differs by "
            f"{far[best]:.1e} in float32"
        )
    return best


def forms(base: AttentionFacts, entries: int, one_projection: bool, normed: bool) -> Iterator[AttentionFacts]:
    """What is tried. Args: entries: of a row of the rotary tables."""
    turns = [("halves", False, None), ("pairs", True, None), ("pairs", False, None), ("none", False, None)]
    # tables that hold each angle once
    turns += [("halves", True, 2 * entries), ("pairs", True, 2 * entries)]
    for turn, by_angle, rotary in turns:
        if (rotary or entries) > base.head_dim and turn != "none":
            continue
        for grouped in (False, True)[: 1 + (one_projection and base.heads % max(base.kv_heads, 1) == 0)]:
            for norm_last in (False, True)[: 1 + normed]:
                yield replace(
                    base, turn=turn, by_angle=by_angle, rotary=rotary, grouped=grouped, norm_last=norm_last
                )


def _attention_run(call: Call, factor: float) -> list[Call]:
    """The calls inside an attention whose input is `factor` times as large."""
    fed = factor * call.fed
    with observed(call.part) as calls:
        if "hidden_states" in call.keywords:
            call.part(**{**call.keywords, "hidden_states": fed})
        else:
            call.part(fed, **call.keywords)
    return calls


def _distance_of(
    calls: list[Call], facts: AttentionFacts, shape: RopeStore, given: Given, attention: nn.Module, window: int | None
) -> float:
    """How far the eager twins with these facts are from what an attention fed to its output projection."""
    by_name = {call.name: call for call in calls}
    qkv_TC = torch.cat([by_name[name].gave for name in facts.projections], -1).flatten(0, -2)
    count, device = qkv_TC.shape[0], qkv_TC.device
    keys, values = qkv_TC.new_zeros((2, 1, facts.kv_heads, count, facts.head_dim))
    position_1T = torch.arange(count, device=device)[None]
    cos_1TW, sin_1TW = given.part(0, count)
    q_Thd = rope_store_eager(qkv_TC, cos_1TW[0], sin_1TW[0], shape, keys, values, position_1T)
    visibility = Visibility(position_1T, position_1T, position_1T[:, 0])
    mine_TC = attend_eager(q_Thd, keys, values, visibility, facts.shape(attention, window)).flatten(1)
    return distance(mine_TC, by_name[facts.out].fed.flatten(0, -2))


def find_mlp(call: Call) -> MLPFacts | None:
    """The facts of a float32 MLP that ran as `call` tells; None where it is not one of two products."""
    with observed(call.part) as calls:
        call.part(call.fed)
    linears = [part for part in calls if type(part.part) is nn.Linear]
    acts = [part for part in calls if part not in linears]
    if len(acts) != 1 or len(linears) not in (2, 3) or len(list(call.part.parameters(recurse=False))):
        return None
    first, down, activation = linears[:-1], linears[-1], activation_of(acts[0])
    if activation is None or not all(same(part.fed, call.fed) for part in first):
        return None
    read = acts[0].fed
    if len(first) == 2:
        first.sort(key=lambda part: not same(part.gave, read))  # the gate comes first
        alone, found = False, same(first[0].gave, read)
    else:
        alone = same(first[0].gave, read)
        found = alone or same(first[0].gave.chunk(2, -1)[0], read)
    if not found:
        return None
    facts = MLPFacts(tuple(part.name for part in first), down.name, activation, alone)
    x_RD = call.fed.flatten(0, -2)
    with eager_twins():
        mine, _ = FusedMLP(call.part, facts).end(x_RD, torch.zeros_like(x_RD), PLAIN, None)
    return facts if distance(mine, call.gave) <= TOLERANCE else None


def activation_of(call: Call) -> str | None:
    """Name of an MLP's activation, found by running it; None for one that the kernels do not know."""
    probe = torch.linspace(-4, 4, 33, device=call.fed.device)
    shown = tensor_of(call.part(probe))
    for name, known in ACTIVATIONS.items():
        if shown is not None and shown.shape == probe.shape and torch.allclose(shown, known(probe), atol=1e-5):
            return name
    return None
