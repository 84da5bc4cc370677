"""How large a target is: parameters, those that a token is multiplied with, and what its cache takes.

All of it is found from the modules and the config, with or without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headstart.heads.targets.locate import cache_argument, decoder_layers, text_decoder

#: what configs call the number of experts that compute a token
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
#: tokens of the forward that fills a cache
LENGTH = 8


@dataclass(frozen=True)
class CacheBytes:
    """What the keys, values and states of one sequence take.

    Attributes:
        per_token: bytes of a token in the layers that keep every token.
        windowed: window → bytes of a token in the layers that keep so many tokens.
        state: bytes of recurrent and convolution states, whatever the length.
    """

    per_token: int = 0
    windowed: dict[int, int] = field(default_factory=dict)
    state: int = 0

    def at(self, length: int) -> int:
        """Bytes of a sequence of so many tokens."""
        windows = sum(each * min(length, window) for window, each in self.windowed.items())
        return length * self.per_token + windows + self.state

    def __str__(self) -> str:
        parts = [f"{self.per_token / 1024:.4g} KiB a token"] if self.per_token else []
        parts += [f"{each / 1024:.4g} KiB a token of the last {window}" for window, each in self.windowed.items()]
        parts += [f"{self.state / 2**20:.4g} MiB of states a sequence"] if self.state else []
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class TargetSizes:
    """What `headstart plan` says about a target.

    Attributes:
        parameters: of the whole model.
        active: those of the text part that a token is multiplied with, the output matrix included: of a mixture's
            experts the chosen ones, and no embedding tables.
        experts, experts_per_token: of a layer, and those that compute a token; None without experts.
        cache: what the cache of one sequence takes; None where the model's code does not tell it without weights.
    """

    parameters: int
    active: int
    experts: int | None = None
    experts_per_token: int | None = None
    cache: CacheBytes | None = None

    @classmethod
    def of(cls, model: Any) -> TargetSizes:
        """The sizes of a model, whose cache is measured if it is on the meta device."""
        chosen, decoder, output = experts_per_token(model), text_decoder(model), model.get_output_embeddings()
        experts = max((count for _, count in expert_stacks(decoder)), default=None)
        return cls(
            parameters=active_parameters(model, None, tables=True),
            active=active_parameters(decoder, chosen) + active_parameters(output, None),
            experts=experts,
            experts_per_token=chosen if experts is not None else None,
            cache=cache_bytes(model) if output.weight.is_meta else None,
        )

    def __str__(self) -> str:
        of = f" ({self.experts_per_token} of {self.experts} experts)" if self.experts_per_token is not None else ""
        cache = "" if self.cache is None else f"; the cache takes {self.cache}"
        return f"{self.parameters / 1e9:.4g} B parameters, {self.active / 1e9:.3g} B per token{of}{cache}"


def experts_per_token(model: Any) -> int | None:
    """Routed experts that compute a token; None where the config does not say."""
    config = model.config.get_text_config()
    for name in EXPERTS_PER_TOKEN:
        value = getattr(config, name, None)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, int):
            return value
    return None


def expert_stacks(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Modules that hold the weights of all experts of a layer as [experts, …], with their number of experts."""
    for part in module.modules():
        count = getattr(part, "num_experts", None)
        if isinstance(count, int) and any(p.ndim == 3 and len(p) == count for p in part.parameters(recurse=False)):
            yield part, count


def packed_numel(module: nn.Module) -> int | None:
    """Numbers in the matrix that a quantised linear layer stands for; None for a module that holds none of its own."""
    rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if not (isinstance(rows, int) and isinstance(columns, int)):
        return None
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not own or any(tensor.numel() == rows * columns for tensor in own):
        return None
    return rows * columns


def active_parameters(module: nn.Module, per_token: int | None, tables: bool = False) -> int:
    """Parameters that every token passes through: no embedding tables, and of the routed experts only the chosen.

    Args:
        per_token: routed experts that compute a token; None counts all.
        tables: whether embedding tables count nevertheless.
    """
    stacks = {id(part): count for part, count in expert_stacks(module)}
    seen: set[int] = set()
    total = 0
    for part in module.modules():
        if isinstance(part, nn.Embedding) and not tables:
            continue
        own = [p for p in part.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        numel = packed_numel(part) or sum(p.numel() for p in own)
        count = stacks.get(id(part))
        total += numel if count is None or per_token is None else numel * min(per_token, count) // count
    return total


def widest_layer(model: Any) -> int:
    """Numbers per token that the widest decoder layer makes: its products, and what its chosen experts hold.

    An expert holds a copy of the token, what its matrices make of it, and its answer.
    """
    per_token, width = experts_per_token(model), model.config.get_text_config().hidden_size
    widest = 0
    for layer in decoder_layers(model):
        sizes = (getattr(part, "out_features", 0) for part in layer.modules())
        numbers = 2 * width + sum(size for size in sizes if isinstance(size, int))
        for stack, count in expert_stacks(layer):
            inner = sum(p.numel() for p in stack.parameters(recurse=False) if p.ndim == 3) // (count * width)
            numbers += (count if per_token is None else min(per_token, count)) * (inner + 2 * width)
        widest = max(widest, numbers)
    return widest


@torch.no_grad()
def cache_bytes(model: Any) -> CacheBytes | None:
    """What transformers' cache of a model on the meta device takes, measured by a forward without values.

    Layers that share keys and values, latent attention, sliding windows and recurrent states are thereby what the
    model's own code makes of them.
    Returns: None if that code needs values.
    """
    from transformers import DynamicCache

    decoder = text_decoder(model)
    stacks = [stack for stack, _ in expert_stacks(decoder)]
    cache = DynamicCache(config=model.config.get_text_config())
    for stack in stacks:  # which experts a token goes to is a matter of values
        stack.forward = lambda *args, **kwargs: args[0] if args else kwargs["hidden_states"]
    try:
        with torch.device("meta"):
            tokens_BT = torch.zeros(1, LENGTH, dtype=torch.int64)
            decoder(input_ids=tokens_BT, use_cache=True, **{cache_argument(decoder): cache})
    except Exception:  # whatever a model's own code raises without values
        return None
    finally:
        for stack in stacks:
            vars(stack).pop("forward", None)
    return _counted(cache)


def _counted(cache: Any) -> CacheBytes:
    per_token, state = 0, 0
    windowed: dict[int, int] = {}
    for layer in cache.layers:
        kept = [t for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if torch.is_tensor(t)]
        each = sum(t.numel() * t.element_size() for t in kept) // LENGTH
        window = getattr(layer, "sliding_window", None)
        if getattr(layer, "is_sliding", False) and isinstance(window, int):
            windowed[window] = windowed.get(window, 0) + each
        else:
            per_token += each
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None)
            for tensor in states.values() if isinstance(states, dict) else [states]:
                state += tensor.numel() * tensor.element_size() if torch.is_tensor(tensor) else 0
    return CacheBytes(per_token, {window: each for window, each in windowed.items() if each}, state)
