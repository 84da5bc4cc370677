"""What a draft head is to the rest of the house: its inputs, its loss, its interface.

Shape legend (methods §0): B batch, T tokens, R rows of a pack, A anchors (supervised rows), D target hidden,
H head hidden, V target vocabulary, U draft vocabulary, K draft depths, k feature streams, N tree nodes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.errors import TargetError
from headstart.heads.numerics import wide
from headstart.heads.positions import Anchors, find_anchors
from headstart.heads.rope import drafted_rope, positions_with_one_rope
from headstart.heads.subsample import draw_rows
from headstart.heads.transfer import to_device


@dataclass
class HeadConfig:
    """Fields every family shares; each family's file subclasses this."""

    type: str = "???"
    #: draft depths trained (K): Medusa heads, or TTT steps of EAGLE-3
    depth: int = 1
    #: weight of depth d is decay ** (d - 1)
    depth_decay: float = 1.0


@dataclass(frozen=True)
class HeadDims:
    """The target's dimensions that a head is built from (no weights).

    Attributes:
        hidden_act: activation of a draft layer's MLP where the head's config names none. It is not the target's:
            engines compute silu in a draft layer whatever the target computes.
        rope_parameters: what a draft layer takes over of the target's rope (rope.drafted_rope), in the form of
            transformers v5: rope_type, rope_theta, factor, partial_rotary_factor, …
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    tie_word_embeddings: bool = False
    model_type: str = "llama"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def from_hf_config(cls, config: Any) -> HeadDims:
        """Read the dimensions from a transformers config (the text part of a multimodal one).

        Raises: TargetError for an architecture that is no decoder with a gated MLP and rotary positions.
        """
        config = config.get_text_config()

        def given(name: str) -> Any:
            """A field; where every layer has its own (Gemma 4), the first layer's."""
            try:
                value = getattr(config, name, None)
            except Exception:  # transformers 5.24 has an error of its own for this, which older ones lack
                value = getattr(config.per_layer_config[0], name, None)
            return value[0] if name in needed and isinstance(value, list) and len(set(value)) == 1 else value

        needed = (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
            "max_position_embeddings",
        )  # fmt: skip
        sizes = {name: given(name) for name in needed}
        if odd := {name: value for name, value in sizes.items() if type(value) is not int}:
            missing = [name for name, value in odd.items() if value is None]
            said = f"has no {', '.join(missing)}" if missing else f"says {odd}, no whole numbers"
            raise TargetError(
                f"target of type {config.model_type}: its config {said}; draft layers are built from those: expected "
                "a decoder such as Llama, Qwen, Mistral, Gemma or gpt-oss"
            )
        rope = given("rope_parameters") or {}
        if rope and all(isinstance(v, dict) or v is None for v in rope.values()):
            # one rope per attention kind (Gemma 3): a draft layer attends globally
            rope = rope.get("full_attention") or next(filter(None, rope.values()), {})
        rope = dict(rope)
        rope.setdefault("rope_theta", float(given("rope_theta") or 10000.0))
        rope.setdefault("partial_rotary_factor", given("partial_rotary_factor"))
        heads, kv_heads, head_dim = sizes["num_attention_heads"], given("num_key_value_heads"), given("head_dim")
        return cls(
            hidden_size=sizes["hidden_size"],
            vocab_size=sizes["vocab_size"],
            num_layers=sizes["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads if type(kv_heads) is int and kv_heads else heads,
            head_dim=head_dim if type(head_dim) is int and head_dim else sizes["hidden_size"] // heads,
            intermediate_size=sizes["intermediate_size"],
            rms_norm_eps=given("rms_norm_eps") or 1e-6,
            max_position_embeddings=sizes["max_position_embeddings"],
            rope_parameters=drafted_rope(rope),
            tie_word_embeddings=bool(given("tie_word_embeddings")),
            model_type=config.model_type,
            bos_token_id=given("bos_token_id"),
            eos_token_id=given("eos_token_id"),
        )

    @property
    def positions(self) -> int:
        """Tokens that a context may hold, its answer included: all of them turned by the same frequencies."""
        return min(self.max_position_embeddings, positions_with_one_rope(self.rope_parameters) or sys.maxsize)


@dataclass(frozen=True)
class FeatureSpec:
    """What a head reads from the target at every row.

    Attributes:
        layer_ids: indices k of HF `hidden_states[k]` (0 < k < L), i.e. the *input* of decoder layer k: pre-norm
            residual streams, ascending; empty when only the last hidden state is read.
            The last hidden state (post-final-norm) is always captured: teachers need it.
    """

    layer_ids: tuple[int, ...] = ()


@dataclass
class FeatureBatch:
    """One pack of whole documents laid end to end; padding, if any, at the end (`doc_R` = -1).

    Attributes:
        tokens_R: int64 [R].
        turn_R: int64 [R], assistant turn of the token within its document, -1 = unsupervised.
        answer_R: int64 [R], the same for the answers alone, where more than them is supervised; None = turn_R.
        doc_R: int64 [R], document index within the pack, -1 = padding.
        position_R: int64 [R], rope position, restarting at 0 in every document.
        doc_lengths: rows of each document, in order.
        edges_E: int32, row offsets of the documents; rows of padding at the end form a document of their own.
        longest: rows of the longest stretch between two edges (or an upper bound of it).
        anchors: supervised rows (positions.find_anchors) for the head's K.
        sample_ids: one id per document, for error messages.
        hidden_RD: last hidden state **after the final norm**, or None before the target ran.
        streams_RkD: **pre-norm** residual streams at FeatureSpec.layer_ids, or None.
        teacher_argmax_A: int64 [A], argmax over the V tokens of the target's distribution at row_A + 1.
    """

    tokens_R: Tensor
    turn_R: Tensor
    doc_R: Tensor
    position_R: Tensor
    doc_lengths: tuple[int, ...]
    edges_E: Tensor
    longest: int
    anchors: Anchors
    sample_ids: tuple[str, ...] = ()
    hidden_RD: Tensor | None = None
    streams_RkD: Tensor | None = None
    teacher_argmax_A: Tensor | None = None
    answer_R: Tensor | None = None

    @classmethod
    def pack(
        cls,
        documents: list[tuple[Tensor, Tensor]],
        max_depth: int,
        pad_to: int = 0,
        sample_ids: tuple[str, ...] = (),
        answers: list[Tensor] | None = None,
    ) -> FeatureBatch:
        """Lay `(tokens_T, turn_T)` documents end to end and find the anchors (CPU).

        Args:
            answers: assistant turn of every token of each document [T], where `turn_T` tells otherwise (`answer_R`).
        """
        lengths = tuple(int(tokens.shape[0]) for tokens, _ in documents)
        rows = max(sum(lengths), pad_to)
        padding = rows - sum(lengths)
        length_E = torch.tensor(lengths, dtype=torch.int64)
        start_E = length_E.cumsum(0) - length_E
        # few operations whatever the number of documents: this runs on the host at every step
        tokens_R = torch.cat([*(tokens for tokens, _ in documents), torch.zeros(padding, dtype=torch.int64)])
        turn_R = torch.cat([*(turn for _, turn in documents), torch.full((padding,), -1)])
        inside_R = torch.repeat_interleave(torch.arange(len(lengths)), length_E)
        doc_R = torch.cat((inside_R, torch.full((padding,), -1)))
        position_R = torch.zeros(rows, dtype=torch.int64)
        position_R[: len(inside_R)] = torch.arange(len(inside_R)) - start_E[inside_R]
        anchors = find_anchors(turn_R, doc_R, max_depth)
        stretches = lengths if sum(lengths) == rows else (*lengths, rows - sum(lengths))
        edges_E = torch.tensor([0, *accumulate(stretches)], dtype=torch.int32)
        answer_R = None if answers is None else torch.cat([*answers, torch.full((padding,), -1)])
        return cls(
            tokens_R, turn_R, doc_R, position_R, lengths, edges_E, max(stretches, default=0), anchors, sample_ids,
            answer_R=answer_R,
        )  # fmt: skip

    def padded(self, rows: int, anchors: int, documents: int) -> FeatureBatch:
        """The same batch in fixed shapes (for captured graphs): R = `rows`, A = `anchors`, E = `documents` + 2.

        Padding anchors point at the last row, be it padding or the last of a document, which is never an anchor
        itself; they have no supervised depth. Every depth's count becomes A and `depths_A` says which rows are active.
        `longest` becomes R, the one bound that no later batch of these shapes can pass.
        Raises: ValueError when the batch does not fit.
        """
        used = sum(self.doc_lengths)
        if used > rows or len(self.anchors) > anchors or len(self.doc_lengths) > documents:
            raise ValueError(
                f"batch of {used} rows, {len(self.anchors)} anchors, {len(self.doc_lengths)} documents "
                f"does not fit {rows} rows, {anchors} anchors, {documents} documents"
            )

        def grow(x: Tensor | None, size: int, value: int) -> Tensor | None:
            if x is None or x.shape[0] == size:
                return x
            if x.shape[0] > size:
                return x[:size]  # more padding than wanted
            return torch.cat((x, x.new_full((size - x.shape[0], *x.shape[1:]), value)))

        edges = self.edges_E[: len(self.doc_lengths) + 1]
        return replace(
            self,
            tokens_R=grow(self.tokens_R, rows, 0),
            turn_R=grow(self.turn_R, rows, -1),
            doc_R=grow(self.doc_R, rows, -1),
            position_R=grow(self.position_R, rows, 0),
            edges_E=grow(edges, documents + 2, rows),
            longest=rows,
            anchors=self.anchors.padded(anchors, rows - 1),
            hidden_RD=grow(self.hidden_RD, rows, 0),
            streams_RkD=grow(self.streams_RkD, rows, 0),
            teacher_argmax_A=grow(self.teacher_argmax_A, anchors, 0),
            answer_R=grow(self.answer_R, rows, -1),
        )

    def subsampled(self, keep_K: Sequence[float], seed: int) -> FeatureBatch:
        """The same batch with a random part of the rows of every depth (subsample.py).

        The draw depends on the seed and the number of rows alone, and the device is not waited for.
        """
        draw = draw_rows(self.anchors.count_K, keep_K, torch.Generator().manual_seed(seed))
        draw = draw.to(self.tokens_R.device, non_blocking=True)
        argmax_A = self.teacher_argmax_A
        return replace(
            self,
            anchors=self.anchors.subsampled(draw),
            teacher_argmax_A=None if argmax_A is None else argmax_A[draw.order_A],
        )

    def teacher_hidden(self) -> Tensor:
        """[A, D]: the post-norm hidden state whose distribution is the depth-1 teacher of each anchor (row_A + 1)."""
        return self.hidden_RD[(self.anchors.row_A + 1).clamp(max=self.tokens_R.shape[0] - 1)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> FeatureBatch:
        moved: dict[str, Any] = {"anchors": self.anchors.to(device, non_blocking)}
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), Tensor):
                moved[f.name] = to_device(value, device, non_blocking)
        return replace(self, **moved)


@dataclass
class Teacher:
    """The target's frozen output head: post-norm hidden state → next-token logits.

    Attributes:
        weight_VD: lm_head weight (the tied embedding where the target ties).
        bias_V: lm_head bias, or None.
        softcap: Gemma-style final logit soft-cap, or None.
        scale: multiplier applied to the logits (Cohere/Granite style), 1 elsewhere.
        norm_D: what the target's final RMSNorm multiplies by, or None; heads with a norm of their own start from it.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    norm_D: Tensor | None = None

    def logits(self, hidden_AD: Tensor, ids_U: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """[A, V] (or [A, U], the columns of ids_U), float32 or `dtype`."""
        weight = self.weight_VD if ids_U is None else self.weight_VD[ids_U]
        bias = self.bias_V if self.bias_V is None or ids_U is None else self.bias_V[ids_U]
        logits = nn.functional.linear(hidden_AD.to(weight.dtype), weight, bias)
        if self.scale == 1.0 and self.softcap is None:
            return wide(logits) if dtype is None else logits.to(dtype)
        logits = wide(logits) * self.scale
        logits = logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
        return logits if dtype is None else logits.to(dtype)


@dataclass
class HeadLoss:
    """Sums per depth over one pack, to be normalised by global counts (methods §0).

    Attributes:
        loss_K: float32 [K], S_d, differentiable.
        count_K: float32 [K], positions that carry a loss at depth d (N_d's share; no subsampling).
        correct_K: float32 [K], teacher-forced hits: head argmax == target argmax. This and the next are weighted by
            importance where rows are subsampled.
        total_K: float32 [K], positions the accuracy is over (out-of-vocabulary ones count as misses).
        run_A: int64 [A], depths 1 … run that were hits one after the other: what a chain from that row gets accepted
            (acceptance.walk).
    """

    loss_K: Tensor
    count_K: Tensor
    correct_K: Tensor
    total_K: Tensor
    run_A: Tensor

    @classmethod
    def of(
        cls,
        loss_K: Tensor,
        weight: list[Tensor],
        hit: list[Tensor],
        rows: list[Tensor],
        count_K: Tensor | None = None,
    ) -> HeadLoss:
        """Sum what each depth's rows say.

        Args:
            weight: float, what a row counts for in the loss.
            hit: bool, False where a row is not active.
            rows: float, what a row counts for in the other sums (Anchors.weights).
            count_K: None = the sums of `weight`.
        """
        run = hit[0]
        run_A = run.to(torch.int64)
        for hits in hit[1:]:
            run = run[: hits.shape[0]] & hits
            run_A[: run.shape[0]] += run

        def total(x: list[Tensor]) -> Tensor:
            return torch.stack([r.sum(dtype=loss_K.dtype) for r in x])

        def weighted(x: list[Tensor]) -> Tensor:
            return total([flag * row for flag, row in zip(x, rows, strict=True)])

        return cls(loss_K, total(weight) if count_K is None else count_K, weighted(hit), total(rows), run_A)


class Head(nn.Module, ABC):
    """A draft head. Subclasses live one per file and are registered in `FAMILIES`."""

    family: ClassVar[str]

    def __init__(self, config: HeadConfig, dims: HeadDims):
        super().__init__()
        self.config, self.dims = config, dims

    @property
    def depth(self) -> int:
        """K, the depths that are trained."""
        return self.config.depth

    @property
    def longest_chain(self) -> int | None:
        """Most tokens a chain of its drafts can have, None = any number."""
        return self.depth

    @property
    def spec(self) -> FeatureSpec:
        """Which target features the head reads."""
        return FeatureSpec()

    @property
    def keep_K(self) -> tuple[float, ...] | None:
        """Fraction of the supervised rows of every depth that training runs, None = all."""
        return None

    def depth_weights(self) -> Tensor:
        """λ_d, float32 [K]."""
        return self.config.depth_decay ** torch.arange(self.depth, dtype=torch.float32)

    @abstractmethod
    def init_from_target(self, embed_VD: Tensor, teacher: Teacher, draft_ids_U: Tensor | None = None) -> None:
        """Bind the frozen ends of the target and initialise what starts from them."""

    @abstractmethod
    def depth_counts(self, batch: FeatureBatch) -> Tensor:
        """count_K of `loss` without running the head: float32 [K] (for the global normalisation)."""

    @abstractmethod
    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_K: Tensor | None = None) -> HeadLoss:
        """Per-depth loss sums over one pack. Gradients flow to trainable parameters only.

        Args:
            scale_K: float32 [K]. The caller's promise that what it differentiates is a multiple of
                `(loss_K * scale_K).sum()`: a head may form gradients with it. None = any combination of depths.
        """
