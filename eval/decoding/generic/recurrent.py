"""Recurrent states beside the key/value buffers: gated delta rules, Mamba, short convolutions.

A recurrent layer keeps one state of all tokens so far. Rejected drafts cannot be taken out of it, as they can from a
list of keys. So while drafts are verified, the modules that read and write states (mixers) run token by token, and the
state after every token is kept. Committing chooses among these states. All other modules run over all tokens at once.
In a prefill, mixers read the real tokens of every row only: padding never reaches a state.

Mixers are the modules that ask the cache for a state in a forward over two tokens.
Shape legend: B batch, M tokens of a forward, n layers of one shape, T tokens kept (index 0: before the forward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from headstart.eval.decoding.cache import SlotLayer, Slots, StaticKV
from headstart.eval.decoding.generic.intercept import map_tensors, replaced_forwards
from headstart.eval.decoding.memory import Memory
from headstart.heads.errors import TargetError

#: (one of SORTS, index): a layer may hold several states of each sort
Key = tuple[str, int]
#: attributes of transformers' cache layer
SORTS = ("conv_states", "recurrent_states")


class RecurrentLayer(LinearAttentionLayer):
    """States of one layer, which its mixer reads and writes through transformers' interface.

    Attributes:
        now: state → its value [B, …] after each row's committed tokens.
        kept: state → [T, B, …]: entry 0 is `now`, and entry m + 1 the value after token m of the latest forward.
    """

    def __init__(self, states: int, batch: int):
        super().__init__(number_of_states=states)
        self.batch = batch
        self.now: dict[Key, Tensor] = {}
        self.kept: dict[Key, Tensor] = {}

    def load(self, rows: list[int] | None, started: bool) -> None:
        """Let the mixer read the states of some rows. Args: rows: None = all. started: False = they have none yet."""
        for n in range(self.number_of_states):
            self.conv_states[n] = self.recurrent_states[n] = None
            self.is_conv_states_initialized[n] = self.is_recurrent_states_initialized[n] = False
            self.has_previous_state[n] = started
        if started:
            self._show({key: now if rows is None else now[rows] for key, now in self.now.items()})

    def store(self, rows: list[int] | None) -> None:
        """Keep the states that the mixer has written, as those of some rows. Args: rows: None = all."""
        for sort in SORTS:
            for n, state in getattr(self, sort).items():
                if state is None:
                    continue
                if (sort, n) not in self.now:
                    self.now[sort, n] = state.new_zeros((self.batch, *state.shape[1:]))
                now = self.now[sort, n]
                if rows is not None:
                    now[rows] = state
                elif state is not now:
                    now.copy_(state)

    def step(self, token: int) -> None:
        """Let the mixer read a copy of the states after `token` tokens, which it overwrites with the next ones."""
        if token:
            for kept in self.kept.values():
                kept[token + 1].copy_(kept[token])
        self._show({key: kept[token + 1] for key, kept in self.kept.items()})

    def _show(self, states: dict[Key, Tensor]) -> None:
        for (sort, n), state in states.items():
            getattr(self, sort)[n] = state
            getattr(self, f"is_{sort}_initialized")[n] = True
            if sort == "conv_states":
                self.conv_kernel_size[n] = state.shape[-1]


class RecurrentSlotLayer(RecurrentLayer, SlotLayer):
    """A layer with a recurrent state and attention side by side."""

    def __init__(self, states: int, slots: Slots):
        SlotLayer.__init__(self, slots)
        RecurrentLayer.__init__(self, states, slots.batch)

    get_max_length = SlotLayer.get_max_length


def cache_layers(memory: Memory, slots: Slots) -> list[Any]:
    """The cache layers of a target."""
    made: list[Any] = []
    for layer in memory.layers:
        if not layer.states:
            made.append(SlotLayer(slots))
        elif layer.attends:
            made.append(RecurrentSlotLayer(layer.states, slots))
        else:
            made.append(RecurrentLayer(layer.states, slots.batch))
    return made


class WatchedKV(StaticKV):
    """Buffers that note which modules ask for states and lengths.

    Args: running: the modules that are running, the innermost last (`running_modules`).
    Attributes:
        mixers: layer → the module that asks for its recurrent states.
        length_readers: modules that ask a layer for the cache's length.
    """

    def __init__(self, slots: Slots, layers: Sequence[Any], running: list[nn.Module]):
        self.running = running
        self.mixers: dict[int, nn.Module] = {}
        self.length_readers: list[nn.Module] = []
        super().__init__(slots, layers)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        if layer_idx is not None and self.running and self.running[-1] not in self.length_readers:
            self.length_readers.append(self.running[-1])
        return super().get_seq_length(layer_idx)

    def _note(self, layer_idx: int | None) -> None:
        if layer_idx is not None and self.running:
            self.mixers.setdefault(layer_idx, self.running[-1])

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        self._note(layer_idx)
        return super().has_previous_state(layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._note(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._note(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


@torch.inference_mode()
def can_continue(kv: WatchedKV, forward: Callable[[], object]) -> bool:
    """Whether every mixer continues from its states when it reads several tokens at once.

    Otherwise a prompt must be read in one forward: some mixers start from nothing whenever they get several tokens.

    Args: forward: over two tokens on `kv`, which holds states already.
    """
    calls: dict[int, tuple[Any, Any]] = {}

    def note(index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.setdefault(index, (args, kwargs))
        return forward(*args, **kwargs)

    with replaced_forwards((mixer, partial(note, index)) for index, mixer in kv.mixers.items()):
        forward()
    return all(_reads_states(kv.layers[n], partial(kv.mixers[n], *calls[n][0], **calls[n][1])) for n in kv.mixers)


def _reads_states(layer: RecurrentLayer, run: Callable[[], Tensor]) -> bool:
    """Whether the output depends on each of the layer's states."""
    states = [state for sort in SORTS for state in getattr(layer, sort).values() if state is not None]
    outputs = []
    for changed in (None, *range(len(states))):
        for n, state in enumerate(states):
            state.fill_(float(n == changed))
        outputs.append(run())
    return not any(torch.equal(output, outputs[0]) for output in outputs[1:])


class RecurrentStates:
    """The recurrent states of a batch under one target.

    Args:
        layers: index of a layer → its states, as StaticKV holds them.
        mixers: index of a layer → the module that reads and writes them.
    """

    def __init__(self, layers: dict[int, RecurrentLayer], mixers: dict[int, nn.Module], batch: int):
        self.layers, self.mixers, self.batch = layers, mixers, batch
        self._stacks: list[Tensor] = []  # [n, T, B, …]: the states of n layers of one shape
        self._padding: list[int] | None = None  # columns of padding before each row's tokens; None outside a prefill
        self._column = self._width = 0

    @contextmanager
    def prefilling(self, lengths: list[int]) -> Iterator[None]:
        """While open, forwards are the chunks of a prefill: contexts of these lengths, aligned at their ends."""
        longest = max(lengths)
        self._padding, self._column = [longest - length for length in lengths], 0
        try:
            yield
        finally:
            self._padding = None
        if not self._stacks:
            self._allocate(2)
        for layer in self.layers.values():
            layer.load(None, started=True)

    @contextmanager
    def running(self, width: int) -> Iterator[None]:
        """While open, the model's forward over `width` tokens runs, with the mixers as this class runs them."""
        self._width = width
        if self._padding is None:
            if self._stacks[0].shape[1] <= width:
                self._allocate(width + 1)
            for whole in self._stacks:
                whole[:, 1] = whole[:, 0]
        with replaced_forwards((self.mixers[n], partial(self._run_mixer, layer)) for n, layer in self.layers.items()):
            yield
        self._column += width

    def take(self, count_B: Tensor) -> None:
        """Make the states after the first `count_B` tokens of the latest forward the current ones; 0 = before it."""
        for whole in self._stacks:
            count_b = count_B.to(whole.device)
            whole[:, 0] = whole[:, count_b, torch.arange(self.batch, device=whole.device)]

    def take_row(self, row: int, other: RecurrentStates, source: int) -> None:
        """Copy the current states of another's row `source` into a row of these."""
        for n, layer in self.layers.items():
            for key, now in layer.now.items():
                now[row] = other.layers[n].now[key][source]

    def _allocate(self, tokens: int) -> None:
        """Make room for `tokens` values of every state: before a forward, and after each token. Current states stay."""
        alike: dict[Any, list[tuple[RecurrentLayer, Key]]] = {}
        for layer in self.layers.values():
            for key, now in layer.now.items():
                alike.setdefault((now.shape, now.dtype, now.device), []).append((layer, key))
        self._stacks = []
        for (shape, dtype, device), members in alike.items():
            whole = torch.zeros((len(members), tokens, *shape), dtype=dtype, device=device)
            for kept, (layer, key) in zip(whole, members, strict=True):
                kept[0] = layer.now[key]
                layer.kept[key], layer.now[key] = kept, kept[0]
            self._stacks.append(whole)

    def _run_mixer(self, layer: RecurrentLayer, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A mixer's forward over all tokens of all rows."""
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # it marks padding, which is left out
        run = partial(self._run_columns, forward, args, kwargs)
        if self._padding is None:
            outputs = []
            for token in range(self._width):
                layer.step(token)
                outputs.append(run(None, token, token + 1))
            return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        return self._prefill_mixer(layer, run, self._padding)

    def _prefill_mixer(self, layer: RecurrentLayer, run: Callable[..., Tensor], before: list[int]) -> Tensor:
        """A mixer's forward over one chunk of a prefill. Rows with equally much padding run together.

        Args: before: columns of padding before each row's tokens.
        """
        alike: dict[tuple[int, bool], list[int]] = {}
        for row, padding in enumerate(before):
            first = max(padding - self._column, 0)
            alike.setdefault((first, padding < self._column), []).append(row)
        whole: Tensor | None = None
        for (first, started), rows in alike.items():
            if first >= self._width:
                continue
            every = len(rows) == self.batch
            some = None if every else rows
            layer.load(some, started)
            part = run(some, first, self._width)
            layer.store(some)
            if every and first == 0:
                return part
            if whole is None:
                whole = part.new_zeros((self.batch, self._width, *part.shape[2:]))
            whole[rows, first:] = part
        assert whole is not None
        return whole

    def _run_columns(
        self, forward: Callable[..., Tensor], args: Any, kwargs: Any, rows: list[int] | None, first: int, stop: int
    ) -> Tensor:
        """The forward over columns first … stop - 1 of some rows, as every argument with rows and columns is cut."""
        part = partial(self._columns_of, rows, first, stop)
        output = forward(*map_tensors(args, part), **map_tensors(kwargs, part))
        if not isinstance(output, Tensor):
            raise TargetError(f"a recurrent layer returns {type(output).__name__}, expected one tensor of its outputs")
        return output

    def _columns_of(self, rows: list[int] | None, first: int, stop: int, value: Tensor) -> Tensor:
        if value.ndim < 2 or value.shape[1] != self._width or value.shape[0] not in (1, self.batch):
            return value
        if rows is not None and value.shape[0] == self.batch:
            value = value[rows]
        return value[:, first:stop]
