"""Transformers' own forward on static buffers. Any causal LM decodes this way; nothing depends on its architecture.

The model gets a 4-D attention mask, explicit rope positions, and the buffers as a Cache object. Layers that need more
are found by watching what they ask of the cache: see recurrent.py and by_row.py.
Shape legend: B batch, M tokens of a forward.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.cache import Slots, StaticKV
from headstart.eval.decoding.generic.by_row import ByRow
from headstart.eval.decoding.generic.intercept import running_modules
from headstart.eval.decoding.generic.masks import model_masks
from headstart.eval.decoding.generic.recurrent import (
    RecurrentLayer,
    RecurrentStates,
    WatchedKV,
    cache_layers,
    can_continue,
)
from headstart.eval.decoding.memory import Memory, memory_of
from headstart.eval.decoding.rows import Step
from headstart.eval.kernels.attention import Visibility
from headstart.heads.errors import TargetError
from headstart.heads.targets.locate import cache_argument


def check_decodable(model: Any) -> Memory:
    """The memory of a model's layers. Raises: TargetError for a model that this engine cannot run."""
    taken = inspect.signature(model.forward).parameters
    needed = {"attention_mask": "attention_mask", "position_ids": "position_ids", "cache": cache_argument(model)}
    lacking = [what for what, name in needed.items() if name not in taken]
    if lacking:
        # such a model would ignore them without a word, and see no context
        raise TargetError(
            f"the forward of {type(model).__name__} takes no {', no '.join(lacking)}; expected attention_mask, "
            "position_ids and past_key_values (or cache), without which it cannot verify drafts here"
        )
    memory = memory_of(model.config)
    implementation = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        raise TargetError(
            f"attention implementation {implementation!r} takes no tree mask; load the target with "
            "target.attn_implementation=sdpa (or eager)"
        )
    return memory


class GenericModel:
    """A model with the buffers of one batch.

    Attributes:
        kv: keys and values.
        recurrent: the states of recurrent layers; None without them.
        chunks: whether a prompt may be read in several forwards.
    Raises: TargetError for a model that cannot verify drafts.
    """

    def __init__(self, model: Any, batch: int, capacity: int):
        self.model, self.memory = model, check_decodable(model)
        self.additive = model.dtype if model.config.get_text_config()._attn_implementation == "eager" else None
        self.device = model.device
        self.cache_argument = cache_argument(model)
        slots = Slots(batch, capacity, self.device)
        self.kv = StaticKV(slots, cache_layers(self.memory, slots))
        self.recurrent: RecurrentStates | None = None
        self.by_row: ByRow | None = None
        self.chunks = True
        if self.memory.chains_only:
            watched = self._watched_forward()
            self.chunks = can_continue(watched, lambda: self._run_two_tokens(watched))
            layers = {n: layer for n, layer in enumerate(self.kv.layers) if isinstance(layer, RecurrentLayer)}
            self.recurrent = RecurrentStates(layers, watched.mixers, batch)

    def forward(
        self, tokens_BM: Tensor, visibility: Visibility, extent: int, layer_ids: tuple[int, ...] | None, last_only: bool
    ) -> Step:
        """One pass over M tokens. Args: extent: slots that are read. layer_ids: None = no features. Others: Engine."""
        options = {"output_hidden_states": layer_ids is not None, "logits_to_keep": 1 if last_only else 0}
        output = self._run(tokens_BM, visibility, extent, options)
        if self.kv.asked and self.by_row is None:
            # the length that it got is wrong for these tokens: find the modules that asked, and run once more
            if self.recurrent is not None:
                raise TargetError(
                    f"{type(self.model).__name__}: its attention takes positions from the cache, beside recurrent "
                    "states; it cannot verify drafts here"
                )
            self.by_row = ByRow(self._watched_forward().length_readers, self.kv.slots)
            output = self._run(tokens_BM, visibility, extent, options)
        if layer_ids is None:
            return Step(output.logits, None, None)
        states = output.hidden_states
        streams = torch.stack([states[k] for k in layer_ids], 2) if layer_ids else None
        return Step(output.logits, states[-1], streams)

    def prefilling(self, lengths: list[int]) -> AbstractContextManager[None]:
        """While open, forwards are the chunks of a prefill of contexts of these lengths."""
        return nullcontext() if self.recurrent is None else self.recurrent.prefilling(lengths)

    def take(self, count_B: Tensor) -> None:
        """Commit the first `count_B` tokens of every row of the last forward, a chain."""
        if self.recurrent is not None:
            self.recurrent.take(count_B)

    def take_row(self, row: int, other: GenericModel, slots: int, source: int = 0) -> None:
        """Copy row `source` of another one of the same model into a row: its first slots and its states."""
        self.kv.take_row(row, other.kv, slots, source)
        if self.recurrent is not None and other.recurrent is not None:
            self.recurrent.take_row(row, other.recurrent, source)

    def _run(self, tokens_BM: Tensor, visibility: Visibility, extent: int, options: dict[str, Any]) -> Any:
        around: AbstractContextManager[None] = nullcontext()
        if self.recurrent is not None:
            around = self.recurrent.running(tokens_BM.shape[1])
        elif self.by_row is not None:
            around = self.by_row.running(visibility.position_BM.clamp(min=0))
        with around:
            return self._call(self.kv, tokens_BM, visibility, extent, **options)

    def _call(self, kv: StaticKV, tokens_BM: Tensor, visibility: Visibility, extent: int, **options: Any) -> Any:
        """The model's own forward on `kv`, of which it reads `extent` slots."""
        kv.aim(visibility.write_BM, extent)
        return self.model(
            input_ids=tokens_BM,
            position_ids=visibility.position_BM.clamp(min=0),
            attention_mask=model_masks(self.memory, visibility, extent, self.additive),
            use_cache=True,
            **{self.cache_argument: kv},
            **options,
        )

    @torch.inference_mode()
    def _watched_forward(self) -> WatchedKV:
        """A forward over two tokens, on buffers that note which modules ask for states and lengths.

        Raises: TargetError where the model keeps its states elsewhere.
        """
        slots = Slots(1, 2, self.device)
        with running_modules(self.model) as running:
            kv = WatchedKV(slots, cache_layers(self.memory, slots), running)
            try:
                self._run_two_tokens(kv)
            except (torch.OutOfMemoryError, TargetError):
                raise
            except Exception as reason:
                raise TargetError(
                    f"{type(self.model).__name__} keeps its past in a cache of its own ({reason}), expected the "
                    "public one of transformers; it cannot verify drafts here"
                ) from reason
        return kv

    @torch.inference_mode()
    def _run_two_tokens(self, kv: StaticKV) -> None:
        """A forward over two tokens on `kv`."""
        place_BM = torch.arange(2, device=self.device)[None]
        # no padding, whose embedding may be zero
        config = self.model.config.get_text_config()
        padding, middle = getattr(config, "pad_token_id", None), config.vocab_size // 2
        tokens_BM = torch.tensor([[n for n in range(middle, middle + 3) if n != padding][:2]], device=self.device)
        self._call(kv, tokens_BM, Visibility(place_BM, place_BM, place_BM[:, 0]), 2)
