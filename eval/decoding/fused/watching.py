"""Records the inputs and outputs of the parts of a transformers model while it runs.

Shape legend: T tokens, D hidden, W entries of a rotary table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headstart.eval.decoding.fused.errors import Unfusable
from headstart.heads.targets.locate import decoder_layers, text_decoder


@dataclass(frozen=True)
class Call:
    """A child module that ran. Input and output are copies of its first tensors; keywords are those of the call."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    keywords: dict[str, Any]


def tensor_of(value: Any) -> Tensor | None:
    """A tensor, or the first entry of a tuple if that is one; None for anything else."""
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, Tensor) else None


@contextmanager
def recorded_calls(module: nn.Module) -> Iterator[list[Call]]:
    """While open, calls of the module's children are added to the yielded list in their order, without dropout."""
    calls: list[Call] = []

    def hook(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        inputs: list[Tensor | None] = []

        def before(_child: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            input = tensor_of(args) if args else tensor_of(next(iter(keywords.values()), None))
            inputs.append(None if input is None else input.clone())

        def after(child: nn.Module, _args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
            input, output = inputs.pop(), tensor_of(result)
            if input is not None and output is not None:
                calls.append(Call(name, child, input, output.clone(), keywords))

        return before, after

    with ExitStack() as hooks:
        for name, child in module.named_children():
            if not isinstance(child, (nn.Dropout, nn.Identity)):
                before, after = hook(name)
                hooks.callback(child.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(child.register_forward_hook(after, with_kwargs=True).remove)
        yield calls


def same(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same numbers, whatever their shapes."""
    return a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten())


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Largest relative distance (L2) of a row. Rows of almost nothing count as a thousandth of a usual row."""
    mine, theirs = mine.flatten(0, -2), theirs.flatten(0, -2)
    scale = theirs.norm(dim=-1)
    return float(((mine - theirs).norm(dim=-1) / scale.clamp(min=1e-3 * float(scale.mean()) + 1e-30)).max())


def float_copy(layer: nn.Module) -> nn.Module:
    """The layer in float32, with the same config objects."""
    values = (value for part in layer.modules() for value in vars(part).values())
    return copy.deepcopy(layer, {id(value): value for value in values if isinstance(value, PretrainedConfig)}).float()


def as_float(value: Any) -> Any:
    """The value with its floating-point tensors in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(as_float(part) for part in value)
    return {key: as_float(part) for key, part in value.items()} if type(value) is dict else value


@dataclass(frozen=True)
class LayerArguments:
    """What the model passes to a layer in a forward of `tokens` tokens, besides the hidden states."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    tokens: int

    def run(self, layer: nn.Module, x_1TD: Tensor) -> Tensor:
        """The layer's output [1, T, D] for these hidden states. Raises: Unfusable where it returns no tensor."""
        output = tensor_of(layer(x_1TD, *self.args, **self.keywords))
        if output is None:
            raise Unfusable(f"{type(layer).__name__} returns no tensor")
        return output

    def rotary_tables(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, T, W] of tokens first … last - 1."""
        cos, sin = self.keywords["position_embeddings"]
        return cos[:, first:last], sin[:, first:last]


def layer_arguments(model: Any, tokens: int) -> tuple[list[LayerArguments], int, str]:
    """Run a model over some random tokens.

    Returns: (the arguments of each layer, the hidden size, name of the final norm inside the text decoder).
    Raises: Unfusable where not every layer runs once, or none of the decoder's children reads the last layer's output.
    """
    decoder, layers = text_decoder(model), decoder_layers(model)
    given: list[LayerArguments] = []
    last: list[Tensor] = []
    final: list[str] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        others = {key: value for key, value in keywords.items() if args or key != "hidden_states"}
        given.append(LayerArguments(args[1:], others, tokens))

    def keep_last(_layer: nn.Module, _args: Any, result: Any) -> None:
        last.append(result[0] if isinstance(result, tuple) else result)

    def keep_final(name: str) -> Callable[..., None]:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if last and args and args[0] is last[0]:
                final.append(name)

        return before

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(keep, with_kwargs=True).remove)
        hooks.callback(layers[-1].register_forward_hook(keep_last).remove)
        for name, child in decoder.named_children():
            hooks.callback(child.register_forward_pre_hook(keep_final(name)).remove)
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
