"""The target as a decode engine: static KV, tree attention, features. Knows nothing about drafters.

`Engine.forward` is the one place that calls the model. Any transformers causal LM runs unchanged: the tree goes in as
a ready 4-D attention mask and explicit rope positions, the KV as a Cache object. A FusedModel runs on explicit buffers
and needs nothing from the host, so that whole cycles can be captured as CUDA graphs.
Shape legend: B batch, M tokens of a forward (root + N nodes), S slots read (extent), T context, D hidden, k streams,
V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.cache import StaticKV
from headstart.eval.decoding.fused import Buffers, FusedModel
from headstart.eval.kernels.attention import Visibility, visible_slots
from headstart.eval.kernels.bookkeeping import Taken, lay_out, take_path
from headstart.eval.kernels.choices import Choices
from headstart.eval.kernels.launch import compile_ahead, warm_up
from headstart.eval.kernels.rows import take_rows
from headstart.eval.tree import Tree
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import TargetError


@dataclass
class Rows:
    """Tokens whose target KV now exist, with their features: what a drafter is fed.

    Attributes:
        tokens_BJ: int64, left-aligned; row b has `count_B[b]` of them (0 = nothing new, the row is idle).
        count_B: int64.
        hidden_BJD: f, last hidden state after the final norm, or None when the drafter reads no features.
        streams_BJkD: pre-norm residual streams at FeatureSpec.layer_ids, or None.
    """

    tokens_BJ: Tensor
    count_B: Tensor
    hidden_BJD: Tensor | None = None
    streams_BJkD: Tensor | None = None


@dataclass
class Step:
    """Result of one target forward: logits [B, M or 1, V] as the model gives them, and features of all M rows."""

    logits_BMV: Tensor
    hidden_BMD: Tensor | None
    streams_BMkD: Tensor | None


#: prompt tokens of one forward (rows × chunk) up to which it is captured: more keep a card busy for longer than the
#: host takes to queue them
CAPTURED_TOKENS = 4096
#: narrowest captured chunk
NARROWEST = 32


def attention_windows(config: Any) -> dict[str, int | None]:
    """Attention kinds of a model → window (None = full), from its config. Raises TargetError for kinds we lack."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if not kinds:
        # Mistral, Phi-3, StarCoder2: one window for all layers
        used = window is not None and getattr(config, "use_sliding_window", True)
        return {"sliding_attention": window} if used else {"full_attention": None}
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise TargetError(
            f"{config.model_type}: attention of kind {unknown} cannot verify trees here; "
            "expected full_attention or sliding_attention"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def check_decodable(model: Any) -> dict[str, int | None]:
    """Attention kinds of a model → window, as attention_windows. Raises: TargetError where it takes no tree mask."""
    windows = attention_windows(model.config)
    implementation = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        raise TargetError(
            f"attention implementation {implementation!r} takes no tree mask; load the target with "
            "target.attn_implementation=sdpa (or eager)"
        )
    return windows


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued: what is timed next starts from nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Engine:
    """KV state of a batch of contexts under one target.

    Args:
        model: a transformers causal LM in eval mode.
        batch: rows decoded together.
        capacity: slots per row: longest context + new tokens + tree nodes + 1.
        spec: features to capture; None = none (plain decoding).
        bucket: without `fused`, attention reads a multiple of this many slots.
        prefill_chunk: prompt tokens per forward.
        fused: the model's fused form, which then runs instead of it.
    Raises: TargetError for a model that takes no tree mask.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        capacity: int,
        spec: FeatureSpec | None = None,
        bucket: int = 128,
        prefill_chunk: int = 512,
        fused: FusedModel | None = None,
    ):
        self.model, self.batch, self.capacity, self.spec = model, batch, capacity, spec
        self.bucket, self.prefill_chunk, self.fused = bucket, prefill_chunk, fused
        self.device, self.dtype = model.device, model.dtype
        self.kv: StaticKV | Buffers
        if fused is not None:
            self.kv = fused.buffers(batch, capacity)
        else:
            self._prepare_model()
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        #: host int, an upper bound of the longest context
        self.longest = 0
        self._chunks: dict[tuple[int, FeatureSpec | None], ChunkGraph] = {}
        #: seconds that capturing chunks of prompts has taken
        self.capture_s = 0.0

    @property
    def captures(self) -> bool:
        """Whether forwards may be captured as CUDA graphs: nothing in them asks the host."""
        return self.fused is not None and self.device.type == "cuda"

    @property
    def choices(self) -> Choices | None:
        """How products run fastest on this card, where that is known."""
        return None if self.fused is None else self.fused.choices

    @property
    def state(self) -> list[str]:
        """Names of the tensors that a cycle changes, KV apart."""
        return ["length_B"]

    def _prepare_model(self) -> None:
        config = self.model.config.get_text_config()
        self.windows = check_decodable(self.model)
        self.additive = config._attn_implementation == "eager"
        self.kv = StaticKV(config.num_hidden_layers, self.batch, self.capacity, self.device)
        # transformers 5.24 renames the argument
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    # forward -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, tokens_BM: Tensor, visibility: Visibility, reach: int, last_only: bool = False) -> Step:
        """One pass over M tokens: writes their KV and attends as `visibility` says.

        Args:
            reach: host int, an upper bound of the slots that are seen.
            last_only: logits of the last column only.
        """
        if isinstance(self.kv, Buffers):
            assert self.fused is not None
            layer_ids = self.spec.layer_ids if self.spec is not None else ()
            return Step(*self.fused.forward(tokens_BM, visibility, self.kv, layer_ids, last_only))
        extent = min(-(-reach // self.bucket) * self.bucket, self.capacity)
        self.kv.aim(visibility.write_BM, extent)
        output = self.model(
            input_ids=tokens_BM,
            position_ids=visibility.position_BM.clamp(min=0),
            attention_mask=self._masks(visibility, extent),
            use_cache=True,
            output_hidden_states=self.spec is not None,
            logits_to_keep=1 if last_only else 0,
            **{self.cache_argument: self.kv},
        )
        if self.spec is None:
            return Step(output.logits, None, None)
        states = output.hidden_states
        streams = torch.stack([states[k] for k in self.spec.layer_ids], 2) if self.spec.layer_ids else None
        return Step(output.logits, states[-1], streams)

    def _masks(self, visibility: Visibility, extent: int) -> Tensor | dict[str, Tensor]:
        """What the model takes as its mask: [B, 1, M, extent], or one such per attention kind."""
        # padding sees slot 0, so that no row of the softmax is empty
        padding_BMS = (visibility.position_BM < 0)[:, :, None] & (torch.arange(extent, device=self.device) == 0)
        made = {}
        for kind, window in self.windows.items():
            allowed = (visible_slots(visibility, window, extent) | padding_BMS)[:, None]
            if self.additive:
                zero = torch.zeros((), dtype=self.dtype, device=self.device)
                allowed = torch.where(allowed, zero, torch.finfo(self.dtype).min)
            made[kind] = allowed
        return made if len(made) > 1 else next(iter(made.values()))

    # prefill -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, contexts: list[list[int]]) -> tuple[Tensor, Rows]:
        """Fill the KV with whole contexts, in chunks.

        Contexts are right-aligned in the token dimension only, so that the last column is every row's last token;
        in the buffers each starts at slot 0. Where chunks are captured, the first one is padded to a width that serves
        again.
        Returns: logits_BV after each context, and the rows with their features.
        """
        lengths = [len(context) for context in contexts]
        longest = max(lengths)
        if len(contexts) != self.batch or min(lengths) < 1:
            raise ValueError(f"prefill: found contexts of lengths {lengths}, expected {self.batch} non-empty ones")
        if longest >= self.capacity:
            raise ValueError(f"prefill: context of {longest} tokens, the KV buffers hold {self.capacity}")
        self.length_B = torch.tensor(lengths, device=self.device)
        self.longest = longest
        widths = self._chunk_widths(longest)
        columns = sum(widths)
        padded = [[0] * (columns - len(context)) + list(context) for context in contexts]
        tokens_BT = torch.tensor(padded, device=self.device)
        position_BT = torch.arange(columns, device=self.device) - (columns - self.length_B)[:, None]
        steps = []
        stop = 0
        for width in widths:
            start, stop = stop, stop + width
            steps.append(self._chunk(tokens_BT[:, start:stop], position_BT[:, start:stop], min(stop, longest)))
        return steps[-1].logits_BMV[:, -1], self._prefill_rows(contexts, steps, columns)

    def _captures_chunks(self, width: int) -> bool:
        return self.captures and self.batch * width <= CAPTURED_TOKENS

    def _chunk_widths(self, longest: int) -> list[int]:
        """Columns of each forward: the first takes what whole chunks leave, a power of two where it is captured."""
        whole, rest = divmod(longest, self.prefill_chunk)
        widths = [self.prefill_chunk] * whole
        if rest:
            power = min(max(1 << (rest - 1).bit_length(), NARROWEST), self.prefill_chunk)
            widths.insert(0, power if self._captures_chunks(power) else rest)
        return widths

    def _chunk(self, tokens_BM: Tensor, position_BM: Tensor, reach: int) -> Step:
        """One forward of a prefill; negative positions are padding."""
        width = tokens_BM.shape[1]
        if not self._captures_chunks(width):
            return self._chunk_forward(tokens_BM, position_BM, reach)
        key = width, self.spec
        if key not in self._chunks:
            synchronize(self.device)  # the time of the chunks before is no part of this
            began = time.perf_counter()
            self._compile_chunks()
            pool = next(iter(self._chunks.values())).pool if self._chunks else None
            self._chunks[key] = ChunkGraph(self, width, pool)
            self.capture_s += time.perf_counter() - began
        return self._chunks[key].run(tokens_BM, position_BM)

    def _compile_chunks(self) -> None:
        """Compile what a prompt of any length needs, before the first chunk of these buffers is captured."""
        assert self.fused is not None
        if self._chunks:
            return
        widths = [NARROWEST << n for n in range(self.prefill_chunk.bit_length()) if NARROWEST << n < self.prefill_chunk]

        def chunks() -> None:
            for width in [*widths, self.prefill_chunk]:
                if self._captures_chunks(width):
                    tokens_BM = torch.zeros((self.batch, width), dtype=torch.int64, device=self.device)
                    self._chunk_forward(tokens_BM, torch.full_like(tokens_BM, -1), width)

        compile_ahead(chunks)

    def _chunk_forward(self, tokens_BM: Tensor, position_BM: Tensor, reach: int) -> Step:
        write_BM = torch.where(position_BM >= 0, position_BM, self.kv.bin)
        visibility = Visibility(position_BM, write_BM, position_BM[:, 0])
        return self.forward(tokens_BM, visibility, reach, last_only=True)

    def _prefill_rows(self, contexts: list[list[int]], steps: list[Step], columns: int) -> Rows:
        """Features left-aligned again: row b's position t at column t."""
        longest = self.longest
        tokens_BT = torch.tensor([list(c) + [0] * (longest - len(c)) for c in contexts], device=self.device)
        rows = Rows(tokens_BT, self.length_B.clone())
        if self.spec is None:
            return rows
        column_BT = torch.arange(longest, device=self.device) + (columns - self.length_B)[:, None]
        column_BT = column_BT.clamp(max=columns - 1)
        hidden = torch.cat([step.hidden_BMD for step in steps if step.hidden_BMD is not None], 1)
        rows.hidden_BJD = take_rows(hidden, column_BT)
        if self.spec.layer_ids:
            streams = torch.cat([step.streams_BMkD for step in steps if step.streams_BMkD is not None], 1)
            rows.streams_BJkD = take_rows(streams, column_BT)
        return rows

    # verification ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify(self, roots_B: Tensor, tree: Tree) -> Step:
        """One forward over root and nodes: the root at slot (and position) `length`, node n at slot length + 1 + n."""
        layout = lay_out(tree, roots_B, self.length_B)
        visibility = Visibility(layout.position_BM, layout.write_BM, self.length_B, layout.mask_BMM)
        return self.forward(layout.tokens_BM, visibility, self.longest + tree.nodes + 1)

    @torch.inference_mode()
    def commit(self, roots_B: Tensor, tree: Tree, step: Step, path_BK: Tensor, active_B: Tensor) -> Rows:
        """Make the accepted rows contiguous and advance the contexts.

        Returns the committed tokens (root, then accepted drafts) with their features; idle rows count 0.
        """
        taken = take_path(tree, roots_B, path_BK, active_B, self.length_B, self.kv.bin)
        return self.take(tree, step, taken)

    @torch.inference_mode()
    def take(self, tree: Tree, step: Step, taken: Taken) -> Rows:
        """As `commit`, of a path that is laid out already."""
        if taken.source_BK.shape[1] and not tree.linear:
            self.kv.move(taken.source_BK, taken.target_BK)
        self.length_B = taken.length_B
        rows = Rows(taken.tokens_BJ, taken.count_B)
        if step.hidden_BMD is not None:
            rows.hidden_BJD = take_rows(step.hidden_BMD, taken.column_BJ)
        if step.streams_BMkD is not None:
            rows.streams_BJkD = take_rows(step.streams_BMkD, taken.column_BJ)
        return rows


class ChunkGraph:
    """One forward of a prefill, `width` columns, as a CUDA graph on the engine's buffers.

    Args:
        pool: memory of another one, to be shared: a result is copied out before the next one runs.
    """

    def __init__(self, engine: Engine, width: int, pool: Any = None):
        device = engine.device
        self._tokens_BM = torch.zeros((engine.batch, width), dtype=torch.int64, device=device)
        # padding writes to the bin, so that a capture leaves no trace
        self._position_BM = torch.full_like(self._tokens_BM, -1)

        def forward() -> Step:
            return engine._chunk_forward(self._tokens_BM, self._position_BM, width)

        warm_up(forward, device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._step = forward()

    @property
    def pool(self) -> Any:
        return self._graph.pool()

    def run(self, tokens_BM: Tensor, position_BM: Tensor) -> Step:
        self._tokens_BM.copy_(tokens_BM)
        self._position_BM.copy_(position_BM)
        self._graph.replay()
        step = self._step
        features = (None if value is None else value.clone() for value in (step.hidden_BMD, step.streams_BMkD))
        return Step(step.logits_BMV.clone(), *features)
