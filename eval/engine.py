"""The target as a decode engine: static KV, tree attention, features. Knows nothing about drafters.

Any transformers causal LM runs unchanged: the tree goes in as a ready 4-D attention mask and explicit rope positions,
the KV as a Cache object. `Engine.forward` is the one place that calls the model, with shapes that depend only on
(batch, tokens, extent): the seam for CUDA graphs.
Shape legend: B batch, M tokens of a forward (root + N nodes), S slots read (extent), T context, D hidden, k streams,
V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.eval.cache import StaticKV
from headstart.eval.tree import Tree, with_root
from headstart.heads.base import FeatureSpec
from headstart.heads.errors import TargetError


@dataclass
class Rows:
    """Tokens whose target KV now exist, with their features: what a drafter is fed.

    Attributes:
        tokens_BJ: int64, left-aligned; row b has `count_B[b]` of them (0 = nothing new, the row is idle).
        count_B: int64.
        hidden_BJD: f, last hidden state after the final norm, or None when the drafter reads no features.
        streams_BJkD: pre-norm residual streams at FeatureSpec.layer_ids, or None.
        longest: host int, length of the longest context with these rows.
    """

    tokens_BJ: Tensor
    count_B: Tensor
    hidden_BJD: Tensor | None = None
    streams_BJkD: Tensor | None = None
    longest: int = 0


@dataclass
class Step:
    """Result of one target forward: logits [B, M or 1, V] as the model gives them, and features of all M rows."""

    logits_BMV: Tensor
    hidden_BMD: Tensor | None
    streams_BMkD: Tensor | None


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


class Engine:
    """KV state of a batch of contexts under one target.

    Args:
        model: a transformers causal LM in eval mode.
        batch: rows decoded together.
        capacity: slots per row: longest context + new tokens + tree nodes + 1.
        spec: features to capture; None = none (plain decoding).
        bucket: attention reads a multiple of this many slots.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        capacity: int,
        spec: FeatureSpec | None = None,
        bucket: int = 128,
        prefill_chunk: int = 512,
    ):
        self.model, self.batch, self.spec = model, batch, spec
        self.bucket, self.prefill_chunk = bucket, prefill_chunk
        self.config = model.config.get_text_config()
        self.windows = attention_windows(model.config)
        implementation = getattr(self.config, "_attn_implementation", None)
        if implementation not in ("sdpa", "eager"):
            raise TargetError(
                f"attention implementation {implementation!r} takes no tree mask; load the target with "
                "target.attn_implementation=sdpa (or eager)"
            )
        self.additive = implementation == "eager"
        self.device, self.dtype = model.device, model.dtype
        self.kv = StaticKV(self.config.num_hidden_layers, batch, capacity, self.device)
        # transformers 5.24 renames the argument
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.longest = 0

    # forward -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        tokens_BM: Tensor,
        position_BM: Tensor,
        mask: Tensor | dict[str, Tensor],
        write_BM: Tensor,
        extent: int,
        last_only: bool = False,
    ) -> Step:
        """One pass over M tokens: writes their KV at `write_BM`, attends where `mask` says.

        Args:
            mask: [B, 1, M, extent] in the form the attention implementation takes, or one such per attention kind.
            last_only: logits of the last column only.
        """
        self.kv.aim(write_BM, extent)
        output = self.model(
            input_ids=tokens_BM,
            position_ids=position_BM,
            attention_mask=mask,
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

    def extent(self, tokens: int) -> int:
        """Slots to read when `tokens` more follow the longest context."""
        needed = self.longest + tokens
        return min(-(-needed // self.bucket) * self.bucket, self.kv.capacity)

    def masks(self, visible_BMS: Tensor, distance_BMS: Tensor | None) -> Tensor | dict[str, Tensor]:
        """Turn "query may see slot" into what the model takes; windows cut by distance in positions."""
        made = {}
        for kind, window in self.windows.items():
            allowed = visible_BMS
            if window is not None and distance_BMS is not None:
                allowed = allowed & (distance_BMS < window)
            made[kind] = self._as_attention_mask(allowed[:, None])
        return made if len(made) > 1 else next(iter(made.values()))

    def _as_attention_mask(self, allowed_B1MS: Tensor) -> Tensor:
        if not self.additive:
            return allowed_B1MS
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(allowed_B1MS, zero, torch.finfo(self.dtype).min)

    @property
    def _windowed(self) -> bool:
        return any(window is not None for window in self.windows.values())

    # prefill -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, contexts: list[list[int]]) -> tuple[Tensor, Rows]:
        """Fill the KV with whole contexts, in chunks.

        Contexts are right-aligned in the token dimension only, so that the last column is every row's last token;
        in the buffers each starts at slot 0.
        Returns: logits_BV after each context, and the rows with their features.
        """
        lengths = [len(context) for context in contexts]
        longest = max(lengths)
        if len(contexts) != self.batch or min(lengths) < 1:
            raise ValueError(f"prefill: found contexts of lengths {lengths}, expected {self.batch} non-empty ones")
        if longest >= self.kv.capacity:
            raise ValueError(f"prefill: context of {longest} tokens, the KV buffers hold {self.kv.capacity}")
        self.length_B = torch.tensor(lengths, device=self.device)
        self.longest = longest
        padded = [[0] * (longest - len(context)) + list(context) for context in contexts]
        tokens_BT = torch.tensor(padded, device=self.device)
        position_BT = torch.arange(longest, device=self.device) - (longest - self.length_B)[:, None]
        steps = []
        for start in range(0, longest, self.prefill_chunk):
            stop = min(start + self.prefill_chunk, longest)
            steps.append(self._prefill_chunk(tokens_BT[:, start:stop], position_BT[:, start:stop], stop))
        return steps[-1].logits_BMV[:, -1], self._prefill_rows(contexts, steps)

    def _prefill_chunk(self, tokens_BM: Tensor, position_BM: Tensor, stop: int) -> Step:
        extent = min(-(-stop // self.bucket) * self.bucket, self.kv.capacity)
        write_BM = torch.where(position_BM >= 0, position_BM, self.kv.slots.bin)
        slot_S = torch.arange(extent, device=self.device)
        distance_BMS = position_BM[:, :, None] - slot_S
        # padding sees slot 0, so that no row of the softmax is empty
        visible_BMS = (distance_BMS >= 0) | ((position_BM < 0)[:, :, None] & (slot_S == 0))
        mask = self.masks(visible_BMS, distance_BMS if self._windowed else None)
        return self.forward(tokens_BM, position_BM.clamp(min=0), mask, write_BM, extent, last_only=True)

    def _prefill_rows(self, contexts: list[list[int]], steps: list[Step]) -> Rows:
        """Features left-aligned again: row b's position t at column t."""
        longest = self.longest
        tokens_BT = torch.tensor([list(c) + [0] * (longest - len(c)) for c in contexts], device=self.device)
        rows = Rows(tokens_BT, self.length_B.clone(), longest=longest)
        if self.spec is None:
            return rows
        column_BT = torch.arange(longest, device=self.device) + (longest - self.length_B)[:, None]
        column_BT, rows_B1 = column_BT.clamp(max=longest - 1), self.kv.slots.rows_B1
        hidden = torch.cat([step.hidden_BMD for step in steps if step.hidden_BMD is not None], 1)
        rows.hidden_BJD = hidden[rows_B1, column_BT]
        if self.spec.layer_ids:
            streams = torch.cat([step.streams_BMkD for step in steps if step.streams_BMkD is not None], 1)
            rows.streams_BJkD = streams[rows_B1, column_BT]
        return rows

    # verification ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify(self, roots_B: Tensor, tree: Tree) -> Step:
        """One forward over root and nodes: the root at slot (and position) `length`, node n at slot length + 1 + n."""
        batch, count = self.batch, tree.nodes + 1
        length_B1 = self.length_B[:, None]
        tokens_BM = torch.cat([roots_B[:, None], tree.tokens_BN], 1)
        depth_BM = torch.cat([torch.zeros_like(roots_B)[:, None], tree.depth_BN], 1)
        position_BM = length_B1 + depth_BM
        write_BM = length_B1 + torch.arange(count, device=self.device)
        extent = self.extent(count)
        slot_S = torch.arange(extent, device=self.device)
        visible_BMS = (slot_S < length_B1)[:, None, :].expand(batch, count, extent).clone()
        visible_BMS.scatter_(2, write_BM[:, None, :].expand(batch, count, count), with_root(tree.mask_BNN))
        distance = None
        if self._windowed:
            key_position_BS = slot_S.expand(batch, extent).scatter(1, write_BM, position_BM)
            distance = position_BM[:, :, None] - key_position_BS[:, None, :]
        return self.forward(tokens_BM, position_BM, self.masks(visible_BMS, distance), write_BM, extent)

    @torch.inference_mode()
    def commit(self, roots_B: Tensor, tree: Tree, step: Step, path_BK: Tensor, active_B: Tensor) -> Rows:
        """Make the accepted rows contiguous and advance the contexts.

        Returns the committed tokens (root, then accepted drafts) with their features; idle rows count 0.
        """
        kept_BK = (path_BK >= 0) & active_B[:, None]
        count_B = kept_BK.sum(1) + active_B
        levels = path_BK.shape[1]
        if levels and not tree.linear:
            step_K = torch.arange(1, levels + 1, device=self.device)
            bin_slot = self.kv.slots.bin
            source_BK = torch.where(kept_BK, self.length_B[:, None] + 1 + path_BK, bin_slot)
            target_BK = torch.where(kept_BK, self.length_B[:, None] + step_K, bin_slot)
            self.kv.move(source_BK, target_BK)
        self.length_B = self.length_B + count_B
        column_BJ = torch.cat([torch.zeros_like(roots_B)[:, None], (path_BK + 1).clamp(min=0)], 1)
        tokens_BM = torch.cat([roots_B[:, None], tree.tokens_BN], 1)
        rows = Rows(tokens_BM.gather(1, column_BJ), count_B)
        rows_B1 = self.kv.slots.rows_B1
        if step.hidden_BMD is not None:
            rows.hidden_BJD = step.hidden_BMD[rows_B1, column_BJ]
        if step.streams_BMkD is not None:
            rows.streams_BJkD = step.streams_BMkD[rows_B1, column_BJ]
        return rows
