"""Runs the target over the rows of a pack so that gradients reach its adapter.

Two ways compute the same:
    packed   all rows in one pass; attention stays inside the documents (heads/kernels/packed.py). No shape depends on
             the documents, so CUDA graphs can capture it.
    padded   documents of similar length side by side, as Target.extract runs them; for models that do more than plain
             causal attention.

Shape legend: R rows of a pack, D target hidden, k feature streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.heads.batch import FeatureBatch
from headstart.heads.kernels.packed import PackRows, packed_attention
from headstart.heads.targets.kept_dropout import Masks, dropping
from headstart.heads.targets.locate import decoder_layers, record_layer_inputs, text_decoder
from headstart.heads.targets.target import Target, side_by_side

#: name of our attention among those of transformers
PACKED = "headstart_packed"
#: largest difference between both ways, relative to the size of a document's hidden states
TOLERANCE = 1e-4
#: in half precision: of the first document, whose rows see nothing else in a pack, and of later ones. Rounding makes
#: the later ones differ about as much as the first; what a document sees of another makes it far more
FIRST_HALF, LATER_HALF, TIMES_FIRST = 0.1, 0.02, 4.0
#: documents of the comparison, in tokens
PROBE = (23, 7, 16)
#: kinds of rope whose frequencies depend on the longest position, which the host would have to read
CHANGING_ROPE = ("dynamic", "longrope")


class NotPlainError(Exception):
    """A layer asks for more than causal attention inside documents."""


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, pack_rows: PackRows | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' interface of attention: query [1, h, R, d], key and value [1, g, R, d] → [1, R, h, d].

    Raises: NotPlainError.
    """
    special = [name for name in ("softcap", "sliding_window", "s_aux", "position_bias") if others.get(name) is not None]
    if pack_rows is None or attention_mask is not None or dropout or special:
        raise NotPlainError(", ".join(special) or "a mask, dropout, or arguments that do not reach the attention")
    q_RhD, k_RgD, v_RgD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(q_RhD, k_RgD, v_RgD, pack_rows, scale)[None], None


@contextmanager
def _own_attention(config: Any) -> Iterator[None]:
    """While open, a model of this config attends through `_attend`. transformers builds no mask for an attention that
    it does not know."""
    before = config._attn_implementation
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, _attend)


@contextmanager
def _wrapped(layers: nn.ModuleList, wrap: Callable[..., Any]) -> Iterator[None]:
    """While open, each layer's forward is `wrap(layer, forward, …)`. Hooks of the layers stay outside it."""
    for layer in layers:
        layer.forward = partial(wrap, layer, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # what was set on the object; its class has its own


class LivePass:
    """The target's forward pass over a pack, differentiable.

    Args:
        target: whole on this device, with its adapter if it has one.
    Attributes:
        packed: which of the two ways it takes.
        note: why it is not the packed one; None if it is.
        capturable: whether a CUDA graph can capture it.
        recompute: keep the inputs of the decoder layers alone, and compute the rest again in the backward pass.
    """

    def __init__(self, target: Target):
        self.target = target
        self.config = text_decoder(target.model).config
        self.recompute = False
        _register()
        self.packed = True
        self.note = self._difference()
        self.packed = self.note is None
        self.capturable = self.packed and not self._changing_rope()

    def _changing_rope(self) -> bool:
        kinds = (getattr(module, "rope_type", None) for module in self.target.model.modules())
        found = {kind for each in kinds for kind in (each.values() if isinstance(each, dict) else [each])}
        return bool(found & set(CHANGING_ROPE))

    def __call__(self, batch: FeatureBatch, layer_ids: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """(hidden [R, D], post-norm; the inputs of the layers `layer_ids` [R, k, D], pre-norm, None without any).

        Padding rows hold finite values that mean nothing.
        """
        return self._in_one(batch, layer_ids) if self.packed else self._in_groups(batch, layer_ids)

    @contextmanager
    def _layers(self, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """The layers as a pass needs them; the inputs of `layer_ids` appear in the yielded dict."""
        model = self.target.model
        attention = partial(_own_attention, self.config) if self.packed else nullcontext

        def again(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            masks: Masks = {}

            def run(*args: Any, **kwargs: Any) -> Any:  # in the forward pass, and again in the backward pass
                with attention(), dropping(layer, masks):
                    return forward(*args, **kwargs)

            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        recompute = self.recompute and torch.is_grad_enabled()
        wrapped = _wrapped(decoder_layers(model), again) if recompute else nullcontext()
        with attention(), wrapped, record_layer_inputs(model, layer_ids) as streams:
            yield streams

    def _in_one(self, batch: FeatureBatch, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        with self._layers(layer_ids) as streams:
            output = text_decoder(self.target.model)(
                input_ids=batch.tokens_R[None], position_ids=batch.position_R[None], use_cache=False,
                pack_rows=PackRows.of(batch),
            )  # fmt: skip
        stream = [streams[k][0] for k in layer_ids]
        return output.last_hidden_state[0], torch.stack(stream, dim=1) if stream else None

    def _in_groups(self, batch: FeatureBatch, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        rows = batch.tokens_R.shape[0]
        kept, values = [], []
        for row_BT, real in side_by_side(batch, self.target.max_forward_tokens):
            with self._layers(layer_ids) as streams:
                # no mask is needed: attention is causal, so the padding after a document cannot change it
                output = text_decoder(self.target.model)(input_ids=batch.tokens_R[row_BT], use_cache=False)
            states = torch.stack([output.last_hidden_state, *(streams[k] for k in layer_ids)], dim=2)
            kept.append(row_BT.flatten()[real])
            values.append(states.flatten(0, 1)[real])
        value_NkD = torch.cat(values)
        all_RkD = value_NkD.new_zeros(rows, *value_NkD.shape[1:]).index_copy(0, torch.cat(kept), value_NkD)
        return all_RkD[:, 0], all_RkD[:, 1:] if layer_ids else None

    @torch.no_grad()
    def _difference(self) -> str | None:
        """Why the packed way cannot be taken: what the config says, or how far it is off on random tokens."""
        if kinds := set(getattr(self.config, "layer_types", None) or ()) - {"full_attention"}:
            return f"it has layers of {', '.join(sorted(kinds))}"
        noise = torch.Generator().manual_seed(0)
        vocab = self.target.dims.vocab_size
        documents = [(torch.randint(vocab, (n,), generator=noise), torch.zeros(n, dtype=torch.int64)) for n in PROBE]
        batch = FeatureBatch.pack(documents, 1, pad_to=sum(PROBE) + 2).to(self.target.device)
        try:
            found_RD = self._in_one(batch, ())[0]
        except (NotPlainError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            return f"its layers refuse the packed attention ({type(error).__name__}: {str(error)[:200]})"
        self.packed = False
        expected_RD = self._in_groups(batch, ())[0]
        self.packed = True
        half = expected_RD.dtype in (torch.bfloat16, torch.float16)
        tolerance, start = FIRST_HALF if half else TOLERANCE, 0
        for number, length in enumerate(PROBE):
            found, expected = (x[start : start + length].double() for x in (found_RD, expected_RD))
            start += length
            off = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
            if not off <= tolerance:
                return f"document {number + 1} of a pack differs by {off:.2g} of its size from the document alone"
            if half and number == 0:
                tolerance = max(LATER_HALF, TIMES_FIRST * off)
        return None
