"""Finds the text decoder, the layers and the final norm of a transformers model, in whatever wrappers they are."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.errors import TargetError


def text_decoder(model: Any) -> nn.Module:
    """The module that turns token ids into `last_hidden_state`, inside any number of wrappers (Llama 4, Gemma 4).

    Raises: TargetError when the model has none.
    """
    module = model
    while True:
        try:
            inner = module.get_decoder()
        except (AttributeError, NotImplementedError):
            inner = module
        if inner is not None and inner is _output_of(module):
            inner = getattr(module, "base_model", module)  # ModernBERT's `decoder` is its output matrix
        if inner is module and _output_of(module) is not None:
            # Llama 4 gives itself as its decoder: take the part that holds the embeddings
            table = module.get_input_embeddings()
            inner = next((part for part in module.children() if part is not table and table in part.modules()), None)
        if inner is None:
            raise TargetError(f"{type(model).__name__}: no text decoder found; expected a causal language model")
        if inner is module:
            return module
        module = inner


def _output_of(module: Any) -> nn.Module | None:
    try:
        return module.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def decoder_layers(model: Any) -> nn.ModuleList:
    """The target's decoder layers, wherever the architecture keeps them.

    Raises: TargetError when no module list has one entry per configured layer.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [(n, m) for n, m in text_decoder(model).named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    for name, layers in lists:
        if name.rsplit(".", 1)[-1] in ("layers", "h", "blocks"):
            return layers
    raise TargetError(
        f"{type(model).__name__}: no list of {count} decoder layers found: heads read the input of every layer of a "
        "decoder; expected a causal language model such as Llama, Qwen, Mistral, Gemma or gpt-oss"
    )


@torch.no_grad()
def final_norm(model: Any) -> Tensor | None:
    """The factor of the target's final RMSNorm [D] (Gemma's 1 + weight included), or None where there is no RMSNorm."""
    norm = getattr(text_decoder(model), "norm", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.is_meta or getattr(norm, "bias", None) is not None:
        return None
    factor = norm(torch.ones_like(weight))  # a vector of ones has RMS 1
    return factor if bool((factor != 0).any()) and bool(torch.isfinite(factor).all()) else None


@contextmanager
def record_layer_inputs(model: Any, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """While open, the inputs of decoder layers `layer_ids` (= HF `hidden_states[k]`) appear in the yielded dict.

    Only these tensors are kept, where `output_hidden_states=True` would hold all layers.
    """
    captured: dict[int, Tensor] = {}
    layers = decoder_layers(model)

    def hook(layer_id: int):
        def save(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            captured[layer_id] = args[0] if args else kwargs["hidden_states"]

        return save

    with ExitStack() as hooks:
        for k in layer_ids:
            hooks.enter_context(layers[k].register_forward_pre_hook(hook(k), with_kwargs=True))
        yield captured


@contextmanager
def counted_calls(layers: nn.ModuleList) -> Iterator[list[int]]:
    """While open, the calls of each layer are counted in the yielded list."""
    calls = [0] * len(layers)

    def hook(number: int):
        def count(_module: nn.Module, _args: tuple) -> None:
            calls[number] += 1

        return count

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(hook(number)))
        yield calls


def cache_argument(model: nn.Module) -> str:
    """What the forward calls its cache: transformers 5.24 renamed `past_key_values`, and warns about the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def keep_first_frequencies(model: Any) -> None:
    """Make LongRoPE and dynamic rope rotate every position by their first frequencies, however long a forward is.

    transformers takes other frequencies for a whole forward as soon as one of its positions is beyond the original
    length. The last trees of a context reach beyond it: their verification would see another model than all before.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for prefix, kind in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
            stem = f"{prefix}_" if prefix else ""
            first = getattr(module, f"{stem}original_inv_freq", None)
            if first is None:
                continue
            if kind == "longrope":
                setattr(module, f"{stem}long_inv_freq", first.detach().clone())
            elif kind == "dynamic":
                # transformers computes others only for a forward that is longer than these
                module.original_max_seq_len = sys.maxsize
                setattr(module, f"{stem}max_seq_len_cached", sys.maxsize)
