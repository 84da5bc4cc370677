"""What the layers of a target keep of earlier tokens: keys and values within a span, or recurrent states.

It is read from the config's layer kinds and from the cache that transformers makes for that config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from headstart.eval.config import EvalConfig
from headstart.heads.errors import ConfigError, TargetError


@dataclass(frozen=True)
class Span:
    """Which earlier tokens one kind of attention sees.

    Attributes:
        window: the last `window` positions; None = all.
        chunk: only positions of its own chunk, `position // chunk`; None = all.
    """

    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        return f" {self.window}" if self.window else f" of {self.chunk}" if self.chunk else ""


@dataclass(frozen=True)
class LayerMemory:
    """Attributes: attends: whether the layer has keys and values; states: its recurrent states, 0 = none."""

    attends: bool
    states: int


@dataclass(frozen=True)
class Memory:
    """What the layers of a target keep of earlier tokens.

    Attributes:
        spans: attention kind → what it sees. Recurrent kinds are not among them.
        recurrent: the kinds of layers without attention that hold a recurrent state.
        layers: one entry per layer.
    """

    spans: dict[str, Span]
    recurrent: tuple[str, ...]
    layers: tuple[LayerMemory, ...]

    @property
    def chains_only(self) -> bool:
        """Whether a layer holds a recurrent state, which follows one order of tokens."""
        return any(layer.states for layer in self.layers)

    def __str__(self) -> str:
        attention = [f"{kind}{span}" for kind, span in self.spans.items()]
        states = sum(bool(layer.states) for layer in self.layers)
        recurrent = [f"recurrent states in {states} of {len(self.layers)} layers: chains only"] if states else []
        return ", ".join([*attention, *recurrent])


TREES_REFUSED = (
    "a recurrent state follows one order of tokens, and the branches of a tree would each need their own; "
    "set eval.tree.kind=chain"
)
#: a layer with attention and a recurrent state → the attention kind whose mask it takes
_BESIDE = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
#: the kinds of attention that masks can express
_SPANS: dict[str, Callable[[Any], Span]] = {
    "full_attention": lambda config: Span(),
    "sliding_attention": lambda config: Span(window=config.sliding_window),
    "chunked_attention": lambda config: Span(chunk=config.attention_chunk_size),
}


def layer_kinds(config: Any) -> list[str]:
    """The kind of every layer. A config that names none has one kind for all."""
    named = list(getattr(config, "layer_types", None) or [])
    if named:
        return named
    # Mistral, Phi-3, StarCoder2: one window for all layers
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def memory_of(config: Any) -> Memory:
    """What the layers of the target with this config keep of earlier tokens.

    Raises: TargetError for layers that have neither attention of a kind in `_SPANS` nor recurrent states in
        transformers' cache.
    """
    config = config.get_text_config()
    kinds = layer_kinds(config)
    try:
        made = list(DynamicCache(config=config).layers)
    except (KeyError, TypeError, ValueError) as reason:
        raise _unknown(config, sorted(set(kinds) - set(_SPANS)), f" ({type(reason).__name__}: {reason})") from reason
    spans: dict[str, Span] = {}
    recurrent: list[str] = []
    layers = []
    for index, kind in enumerate(kinds):
        # layers beyond transformers' own read keys and values of other layers
        cache_layer = made[index] if index < len(made) else None
        states = cache_layer.number_of_states if isinstance(cache_layer, LinearAttentionCacheLayerMixin) else 0
        attends = not states or isinstance(cache_layer, CacheLayerMixin)
        layers.append(LayerMemory(attends, states))
        if not attends:
            recurrent.append(kind)
        elif (seen := _BESIDE.get(kind, kind)) in _SPANS:
            spans[seen] = _SPANS[seen](config)
        elif isinstance(cache_layer, CacheLayerMixin):
            raise _unknown(config, [kind])
    return Memory(spans, tuple(dict.fromkeys(recurrent)), tuple(layers))


def require_chain(config: Any, settings: EvalConfig) -> None:
    """Raises: ConfigError where `eval` drafts trees for a target (with this config) that verifies chains only."""
    kind = settings.tree.kind
    # methods without a head draft chains, whatever eval.tree.kind says
    if settings.drafter == "auto" and kind != "chain" and memory_of(config).chains_only:
        raise ConfigError(
            f"eval.tree.kind: found {kind!r}, but {config.get_text_config().model_type} verifies chains only: "
            f"{TREES_REFUSED}"
        )


def require_attention(config: Any, settings: EvalConfig) -> None:
    """Raises: ConfigError where `eval` asks for a scheduler on a target (with this config) with recurrent states."""
    if settings.scheduler and memory_of(config).chains_only:
        raise ConfigError(
            f"eval.scheduler: found true, but layers of {config.get_text_config().model_type} hold recurrent states; "
            "a scheduler is expected on targets whose layers all have attention: set eval.scheduler=false"
        )


def _unknown(config: Any, kinds: list[str], why: str = "") -> TargetError:
    return TargetError(
        f"{config.model_type}: layers of kind {kinds} keep their past in a form that cannot verify drafts here{why}; "
        f"expected attention of kind {', '.join(_SPANS)}, or layers with recurrent states"
    )
