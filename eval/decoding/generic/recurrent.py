"""Recurrent states beside the key/value buffers: gated delta rules, Mamba, short convolutions.

A recurrent layer keeps one state of all tokens so far, which cannot be cut back as a list of keys can. So the modules
that hold states (mixers) run token by token while drafts are verified, and the state after every token is kept; what
is committed chooses among them. All other modules run over all tokens at once. In a prefill, mixers read the real
tokens of every row only: padding never reaches a state.

Which modules are mixers is observed: those that ask the cache for a state.
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
from headstart.eval.decoding.generic.intercept import cut, replaced_forwards
from headstart.eval.decoding.memory import Memory
from headstart.heads.errors import TargetError

#: (attribute of transformers' cache layer, index): a layer may hold several states of each sort
Key = tuple[str, int]
SORTS = ("conv_states", "recurrent_states")


class RecurrentLayer(LinearAttentionLayer):
    """States of one layer, which its mixer reads and writes through transformers' interface.

    Attributes:
        now: state → [B, …], of every row after its committed tokens.
        kept: state → [T, B, …]; entry 0 is `now`, entry m + 1 the state after token m of a forward.
    """

    def __init__(self, states: int, batch: int):
        super().__init__(number_of_states=states)
        self.batch = batch
        self.now: dict[Key, Tensor] = {}
        self.kept: dict[Key, Tensor] = {}

    def load(self, rows: list[int] | None, started: bool) -> None:
        """Show the mixer the states of some rows (None: all). Args: started: False = these rows have no state yet."""
        for n in range(self.number_of_states):
            self.conv_states[n] = self.recurrent_states[n] = None
            self.is_conv_states_initialized[n] = self.is_recurrent_states_initialized[n] = False
            self.has_previous_state[n] = started
        if started:
            self._show({key: now if rows is None else now[rows] for key, now in self.now.items()})

    def store(self, rows: list[int] | None) -> None:
        """Keep the states that the mixer has left, as those of some rows (None: all)."""
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
        """Show the mixer a copy of the state after `token` earlier tokens, which it turns into the next one."""
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
    """Buffers that note which module asks for what.

    Attributes:
        running: the modules that run, the innermost last.
        holders: layer → the module that asks for its recurrent state.
        measurers: modules that ask a layer for the cache's length.
    """

    def __init__(self, slots: Slots, layers: Sequence[Any], running: list[nn.Module]):
        self.running = running
        self.holders: dict[int, nn.Module] = {}
        self.measurers: list[nn.Module] = []
        super().__init__(slots, layers)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        if layer_idx is not None and self.running:
            self.measurers.append(self.running[-1])
        return super().get_seq_length(layer_idx)

    def _note(self, layer_idx: int | None) -> None:
        if layer_idx is not None and self.running:
            self.holders.setdefault(layer_idx, self.running[-1])

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
def goes_on(kv: WatchedKV, forward: Callable[[], object]) -> bool:
    """Whether every mixer goes on from its states over several tokens at once, as chunks of a prompt need.

    Args: forward: over two tokens on `kv`, whose states are there already.
    """
    mixers = kv.holders
    calls: dict[int, tuple[Any, Any]] = {}

    def note(index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.setdefault(index, (args, kwargs))
        return forward(*args, **kwargs)

    with replaced_forwards((mixer, partial(note, index)) for index, mixer in mixers.items()):
        forward()
    return all(_reads_states(kv.layers[n], partial(mixers[n], *calls[n][0], **calls[n][1])) for n in mixers)


def _reads_states(layer: RecurrentLayer, run: Callable[[], Tensor]) -> bool:
    """Whether another value of each state changes the output."""
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
        layers: layer → its states, as StaticKV holds them.
        mixers: layer → the module that reads and writes them.
    """

    def __init__(self, layers: dict[int, RecurrentLayer], mixers: dict[int, nn.Module], batch: int):
        self.layers, self.mixers, self.batch = layers, mixers, batch
        self._wholes: list[Tensor] = []  # [n, T, B, …]: the states of n layers of one shape
        self._before: list[int] | None = None  # in a prefill: columns of padding before each row's tokens
        self._column = self._width = 0

    @contextmanager
    def filling(self, lengths: list[int]) -> Iterator[None]:
        """The forwards inside are a prefill: right-aligned contexts of these lengths, chunk after chunk."""
        longest = max(lengths)
        self._before, self._column = [longest - length for length in lengths], 0
        try:
            yield
        finally:
            self._before = None
        if not self._wholes:
            self._allocate(2)
        for layer in self.layers.values():
            layer.load(None, started=True)

    @contextmanager
    def begin(self, width: int) -> Iterator[None]:
        """The model's forward over `width` tokens runs inside: the mixers read and keep states as this class says."""
        self._width = width
        if self._before is None:
            if self._wholes[0].shape[1] <= width:
                self._allocate(width + 1)
            for whole in self._wholes:
                whole[:, 1] = whole[:, 0]
        with replaced_forwards((self.mixers[n], partial(self._mix, layer)) for n, layer in self.layers.items()):
            yield
        self._column += width

    def take(self, count_B: Tensor) -> None:
        """Go on with the states after the first `count_B` tokens of the last forward; 0 = those before it."""
        for whole in self._wholes:
            count_b = count_B.to(whole.device)
            whole[:, 0] = whole[:, count_b, torch.arange(self.batch, device=whole.device)]

    def _allocate(self, tokens: int) -> None:
        """Room for the states before a forward and after each of its tokens; what the rows have now stays."""
        alike: dict[Any, list[tuple[RecurrentLayer, Key]]] = {}
        for layer in self.layers.values():
            for key, now in layer.now.items():
                alike.setdefault((now.shape, now.dtype, now.device), []).append((layer, key))
        self._wholes = []
        for (shape, dtype, device), members in alike.items():
            whole = torch.zeros((len(members), tokens, *shape), dtype=dtype, device=device)
            for kept, (layer, key) in zip(whole, members, strict=True):
                kept[0] = layer.now[key]
                layer.kept[key], layer.now[key] = kept, kept[0]
            self._wholes.append(whole)

    def _mix(self, layer: RecurrentLayer, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A mixer's forward over all tokens of all rows."""
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # it tells padding, which is left out
        run = partial(self._part, forward, args, kwargs)
        if self._before is None:
            outputs = []
            for token in range(self._width):
                layer.step(token)
                outputs.append(run(None, token, token + 1))
            return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        return self._fill(layer, run, self._before)

    def _fill(self, layer: RecurrentLayer, run: Callable[..., Tensor], before: list[int]) -> Tensor:
        """A mixer's forward over one chunk of a prefill. Rows with equally many tokens run together."""
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

    def _part(
        self, forward: Callable[..., Tensor], args: Any, kwargs: Any, rows: list[int] | None, first: int, stop: int
    ) -> Tensor:
        """The forward over columns first … stop of some rows: every argument that has rows and columns is cut."""
        part = partial(self._cut, rows, first, stop)
        output = forward(*cut(args, part), **cut(kwargs, part))
        if not isinstance(output, Tensor):
            raise TargetError(f"a recurrent layer returns {type(output).__name__}, expected one tensor of its outputs")
        return output

    def _cut(self, rows: list[int] | None, first: int, stop: int, value: Tensor) -> Tensor:
        if value.ndim < 2 or value.shape[1] != self._width or value.shape[0] not in (1, self.batch):
            return value
        if rows is not None and value.shape[0] == self.batch:
            value = value[rows]
        return value[:, first:stop]
