"""Heads that draft a block of tokens in one forward: the backbone of DFlash (arXiv 2602.06036) and its successors.
docs/block-drafters.md says what they are for and what to choose.

A block begins at a committed token, its root x_{t+1}, and continues with mask tokens. Draft layers turn all slots of
the block into drafts at once. Every slot sees the whole block (in a causal head, the slots up to itself), and keys and
values made from the target's features of rows ≤ t.

    slot             0        1       2       …
    input            root     mask    mask
    rope position    t + 1    t + 2   t + 3
    anchor first     x_{t+2}  x_{t+3} x_{t+4}      every slot drafts (`sample_from_anchor`): K = B
    fill in          -        x_{t+2} x_{t+3}      the root's slot drafts nothing: K = B - 1

The draft of depth k is x_{t+1+k} in both layouts, so anchors, depths and teacher rows are those of positions.py.

A family may correct the base logits of each slot by what was drafted before it: logits_k = W h_k + up · low_k, where
low_k depends on h_k, on the token before the drafted one, and on a state (`corrections`, `walk_step`).

Shape legend: R rows of a pack, A anchors, K drafts of a block, B slots of a block, M = A · B, D target hidden,
m feature streams, r rank of a correction, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_LAYERS, MAX_SIZE, HeadConfig, Loss, LossTerm
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.counting import counted
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families.block.anchors import draw_anchors
from headstart.heads.families.block.corrections import Corrected, Drafts
from headstart.heads.families.block.labels import find_labels, measured
from headstart.heads.families.block.modules import BlockLayer, ModuleStack
from headstart.heads.families.block.stack import ContextRows, Slots, Stack
from headstart.heads.gradients import AddsGradients
from headstart.heads.kernels.block_attention import BlockAttention, BlockRows
from headstart.heads.layers import DraftLayer, RMSNorm, Rope
from headstart.heads.losses.block import KINDS, BlockLabels, BlockLosses, block_loss
from headstart.heads.losses.select import select_loss
from headstart.heads.numerics import compute_dtype
from headstart.heads.targets.layer_weights import start

WEIGHTINGS = ("decay", "dpace")
#: most slots that run at once without gradients
SLOTS_AT_ONCE = 8192


@dataclass
class BlockConfig(HeadConfig):
    """Fields that all block heads share."""

    structure: ClassVar[tuple[str, ...]] = ("draft_vocab_size", "intermediate_size", "layers", "num_key_value_heads")
    behaviour: ClassVar[tuple[str, ...]] = ("depth", "mask_token_id", "sample_from_anchor")
    reading: ClassVar[tuple[str, ...]] = ("feature_layers",)
    added: ClassVar[tuple[str, ...]] = ("start_layers",)
    placeholder: ClassVar[str | None] = "mask_token_id"
    #: fields that weigh a term of the loss
    weights: ClassVar[tuple[str, ...]] = tuple(f"{kind}_weight" for kind in KINDS)
    limits: ClassVar[dict[str, int]] = {
        **HeadConfig.limits, "intermediate_size": MAX_SIZE, "layers": MAX_LAYERS, "num_key_value_heads": MAX_SIZE,
    }  # fmt: skip

    #: Drafts of a block (K). The block has one slot more where sample_from_anchor is false.
    depth: int = 7
    #: Weight of the loss of draft k, as a power: depth_decay ** (k - 1). exp(-1/4) is the DSpark paper's.
    depth_decay: float = 0.7788
    #: Decoder layers.
    layers: int = 5
    #: Layers of the target (from 0; -1 is the last) whose weights the draft layers start from, one for each of them. fc
    #: then starts by passing on the stream nearest to the first. null starts from random weights; start_from goes
    #: before it.
    start_layers: list[int] | None = None
    #: Width of the MLP; null takes the target's.
    intermediate_size: int | None = None
    #: Key and value heads of each layer; null takes the target's. All that slots learn of the context passes through
    #: the values, so a target with few and narrow ones is drafted better with more.
    num_key_value_heads: int | None = None
    #: Layers of the target whose inputs the head reads, as indices of hidden_states; null spreads as many as the head
    #: has layers (three at least) evenly from 2 to L - 2 of L layers.
    feature_layers: list[int] | None = None
    #: Tokens that the head can draft (U): a whole number, or a share of the target's choices that the smallest
    #: vocabulary must hold (0.99). 0 or the target's vocabulary size lets it draft all.
    draft_vocab_size: int | float = 0
    #: Token that stands in the slots of a block but the first. null takes a reserved token of the target's tokenizer.
    mask_token_id: int | None = None
    #: Whether the first slot, which holds the last committed token, drafts too (anchor-first layout).
    sample_from_anchor: bool = False
    #: Anchors that a step trains, as a share of the pack's rows. They are drawn anew at every step.
    anchor_share: float = 0.25
    #: Share of the features' numbers that training sets to zero, each on its own; the others grow by 1 / (1 - share).
    feature_dropout: float = 0.0
    #: Weight of the cross-entropy against the data's tokens.
    ce_weight: float = 1.0
    #: Weight of the L1 distance between the draft's and the target's distribution (twice the total variation).
    l1_weight: float = 0.0
    #: Weight of the Kullback-Leibler divergence from the target's distribution.
    kl_weight: float = 0.0
    #: Weight of minus the log of the acceptance rate (LK loss).
    lk_weight: float = 0.0
    #: How the drafts of a block weigh: decay (depth_decay), or dpace (by the draft's own probability of getting there).
    weighting: str = "decay"

    @property
    def learns_text(self) -> tuple[str, str] | None:
        return (f"head.ce_weight={self.ce_weight:g}", "head.ce_weight=0 head.kl_weight=1") if self.ce_weight else None

    def check(self) -> None:
        super().check()
        for name in self.weights:
            if not 0 <= (found := getattr(self, name)) < math.inf:
                raise ConfigError(f"head.{name}: found {found}, expected a finite number, 0 or more")


def default_feature_layers(num_layers: int, count: int) -> list[int]:
    """Published choice for `count` streams: 1 + round(1 + i (L - 4) / (count - 1)), as indices of hidden_states.

    >>> default_feature_layers(36, 5), default_feature_layers(30, 3), default_feature_layers(4, 1)
    ([2, 10, 18, 26, 34], [2, 15, 28], [3])
    """
    if count == 1:
        return [num_layers // 2 + 1]
    # a target of few layers has fewer streams than asked for
    return sorted({1 + round(1 + i * max(num_layers - 4, 0) / (count - 1)) for i in range(count)})


class BlockHead(Corrected, AddsGradients):
    """The backbone: the target's features become keys and values of every layer; slots are the queries.

    Attributes:
        fc, hidden_norm: features of m streams → context c [D], the same for all layers.
        layers: layers of Qwen3's type. norm: behind the last one.
        lm_head: the target's rows of the draft vocabulary, frozen; None where the head can draft all tokens.
        causal: whether a slot sees none of the slots behind it.
    """

    config: BlockConfig
    causal: ClassVar[bool] = False
    joint_obstacle = "whose layers give the target's features no gradient"

    def __init__(self, config: BlockConfig, dims: HeadDims):
        dims = dims.with_key_heads(config.num_key_value_heads)
        super().__init__(config, dims)
        self.feature_layers = self._feature_layers()
        if not 0 < config.anchor_share <= 1:
            raise ConfigError(f"head.anchor_share: found {config.anchor_share}, expected a share above 0, at most 1")
        if not 0 <= config.feature_dropout < 1:
            raise ConfigError(
                f"head.feature_dropout: found {config.feature_dropout}, expected a share: 0 (off) or more, less than 1"
            )
        if config.weighting not in WEIGHTINGS:
            raise ConfigError(f"head.weighting: found {config.weighting!r}, expected one of {', '.join(WEIGHTINGS)}")
        size = config.draft_tokens(dims.vocab_size)
        if not 0 < size <= dims.vocab_size:
            raise ConfigError(
                f"head.draft_vocab_size: found {size}, expected at most the target's vocabulary of {dims.vocab_size}"
            )
        hidden, eps, width = dims.hidden_size, dims.rms_norm_eps, config.intermediate_size or dims.intermediate_size
        self.fc = nn.Linear(len(self.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(
            BlockLayer(hidden, width, dims) for _ in range(config.layers)
        )
        self.norm = RMSNorm(hidden, eps)
        reduced = size < dims.vocab_size
        self.lm_head = nn.Linear(hidden, size, bias=False).requires_grad_(False) if reduced else None
        self.register_buffer("draft_ids_U", torch.arange(size, device="cpu") if reduced else None)
        self.rope = Rope(dims)
        if not self.kinds:
            raise ConfigError("head: found no loss, expected one of " + ", ".join(f"{k}_weight" for k in KINDS))
        terms = tuple(LossTerm(kind, getattr(config, f"{kind}_weight")) for kind in self.kinds)
        self.terms = terms + tuple(replace(t, name=f"base_{t.name}") for t in terms if self.teaches_base)
        if self.selects:
            self.terms = (*self.terms, LossTerm("select", self.select_weight))

    def _feature_layers(self) -> list[int]:
        layers, found = self.dims.num_layers, self.config.feature_layers
        ids = list(found) if found is not None else default_feature_layers(layers, max(self.config.layers, 3))
        if not ids or ids != sorted(set(ids)) or not all(0 < k < layers for k in ids):
            origin = "the recipe gives" if found is not None else f"the default for {layers} layers is"
            raise ConfigError(
                f"head.feature_layers: {self.family} needs distinct ascending ids in 1 … {layers - 1}, {origin} {ids}; "
                "set head.feature_layers"
            )
        return ids

    @property
    def spec(self) -> FeatureSpec:
        return FeatureSpec(tuple(self.feature_layers))

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def hidden_act(self) -> str:
        return self.dims.hidden_act

    @property
    def block_size(self) -> int:  # type: ignore[override]
        """B, slots of a block."""
        return self.depth + (0 if self.config.sample_from_anchor else 1)

    def describe(self) -> str:
        block = f"a block of {self.block_size} slots drafts {counted(self.depth, 'tokens')}"
        return f"{super().describe()}; {block}, mask token {self.config.mask_token_id}"

    @property
    def mask_token(self) -> int:
        """The token in the slots of a block but the first. Raises: ConfigError where none is set."""
        token = self.config.mask_token_id
        if token is None or not 0 <= token < self.dims.vocab_size:
            raise ConfigError(
                f"head.mask_token_id: found {token}, expected a token id below {self.dims.vocab_size} that no text "
                "holds, such as a reserved token of the tokenizer; set head.mask_token_id"
            )
        return token

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As the base class's; norm starts from the target's final norm, lm_head is the target's, frozen.

        Draft layers start as `start_layers` says.
        """
        super().initialise(ends, draft_ids_U)
        with torch.no_grad():
            if self.lm_head is not None and self.draft_ids_U is not None:
                self.lm_head.weight.copy_(ends.teacher.weight_VD[self.draft_ids_U.to(ends.teacher.weight_VD.device)])
            if ends.teacher.norm_D is not None:
                self.norm.weight.copy_(ends.teacher.norm_D)
        if (numbers := self.config.start_layers) is not None:
            start(self, numbers, ends, self.hidden_norm)

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        return draw_anchors(batch, self.config.anchor_share, seed)

    def chosen_anchors(self, rows: float, anchors: float) -> float:
        return min(anchors, self.config.anchor_share * rows)

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """As the base class's. Dropout makes a copy of the features, which fc's gradient reads."""
        copied = rows * self.fc.in_features if self.config.feature_dropout else 0
        return super().kept_numbers(rows, anchors, recompute) + copied

    # what training and drafting share

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] → the target's embeddings [..., D] in the compute dtype."""
        return F.embedding(tokens, self.bound_ends().embed_VD).to(compute_dtype(self.fc.weight))

    def context(self, streams: Tensor) -> Tensor:
        """The target's streams [..., m, D] → what every layer's keys and values of the context read, c [..., D]."""
        return self.hidden_norm(self.fc(streams.to(compute_dtype(self.fc.weight)).flatten(-2)))

    def block_tokens(self, root_A: Tensor) -> Tensor:
        """int64 [A] → the inputs of the slots, int64 [A, B]."""
        tokens_AB = root_A.new_full((root_A.shape[0], self.block_size), self.mask_token)
        tokens_AB[:, 0] = root_A
        return tokens_AB

    @property
    def output_UD(self) -> Tensor:  # type: ignore[override]
        """The frozen output matrix W, [U, D]."""
        return self.bound_ends().teacher.weight_VD if self.lm_head is None else self.lm_head.weight

    def target_ids(self, draft: Tensor) -> Tensor:
        """Draft-vocabulary ids → target ids."""
        return draft if self.draft_ids_U is None else self.draft_ids_U[draft]

    # training

    def blocks(self, batch: FeatureBatch) -> BlockRows:
        """What the block of every anchor at row t sees: the rows of its document up to t.

        Padding anchors see no row.
        """
        anchors = batch.anchors
        return BlockRows.behind(
            anchors.row_A, anchors.depths_A > 0, batch.position_R, self.block_size, self.causal
        )

    def slots(self, batch: FeatureBatch) -> Tensor:
        """Normed outputs of the slots that draft, [A, K, D], for the blocks of all anchors.

        Without gradients, blocks run in parts, which bounds memory where all rows are anchors.
        """
        assert batch.streams_RkD is not None
        streams_RF = batch.streams_RkD.to(compute_dtype(self.fc.weight)).flatten(1)
        if self.config.feature_dropout:
            streams_RF = F.dropout(streams_RF, self.config.feature_dropout, self.training)
        rows = ContextRows(streams_RF, self.rope(batch.position_R))
        # attention wants blocks in the order of their rows; results have the order of the anchors
        blocks, order_A = self.blocks(batch).ascending()
        row_A, index_A = batch.anchors.row_A[order_A], torch.arange(len(order_A), device=order_A.device)
        place_A = torch.empty_like(order_A).scatter_(0, order_A, index_A)
        stack = self._stack()
        if torch.is_grad_enabled():
            return stack.run(rows, self._slots(batch, row_A, blocks, place_A)).unflatten(0, (-1, self.depth))
        count = max(1, SLOTS_AT_ONCE // self.block_size)
        parts = (
            self._slots(batch, row_A[first : first + count], blocks.part(first, first + count), index_A[:count])
            for first in range(0, max(len(row_A), 1), count)
        )
        return stack.evaluate(rows, parts).unflatten(0, (-1, self.depth))[place_A]

    def _stack(self) -> Stack | ModuleStack:
        layers: list[BlockLayer] = list(self.layers)  # type: ignore[arg-type]
        if layers[0].attention_conv is not None:
            return ModuleStack(self.fc, self.hidden_norm, layers, self.norm)
        return Stack(self.fc, self.hidden_norm, layers, self.norm, self.adds_gradients)

    def _slots(self, batch: FeatureBatch, row_A: Tensor, blocks: BlockRows, place_A: Tensor) -> Slots:
        """Args: row_A: of each block. place_A: index of the block that comes first, second … in the result."""
        size, place_A = self.block_size, place_A[: len(row_A)]
        slot_B = torch.arange(size, device=row_A.device)
        root_A = batch.tokens_R[(row_A + 1).clamp(max=batch.tokens_R.shape[0] - 1)]
        turn_M = self.rope((batch.position_R[row_A][:, None] + 1 + slot_B).flatten())
        drafting_N = (place_A[:, None] * size + slot_B[size - self.depth :]).flatten()
        attention = BlockAttention(blocks, batch.tokens_R.shape[0])
        return Slots(self.embed(self.block_tokens(root_A)).flatten(0, 1), turn_M, attention, drafting_N)

    def labels(self, batch: FeatureBatch) -> BlockLabels:
        """What the slots learn from (`find_labels`). With D-PACE, the divisor counts slots: each has the weight 1."""
        decay = 1.0 if self.config.weighting == "dpace" else self.config.depth_decay
        return find_labels(batch, self.depth, decay, self.draft_ids_U)

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        return self.labels(batch).weight_AK.sum().expand(len(self.terms)).clone()

    def covered_rows(self, batch: FeatureBatch) -> Tensor:
        return self.labels(batch).active_AK[:, 0].sum()

    @property
    def needs_teacher(self) -> bool:  # type: ignore[override]
        """Whether the loss needs the target's distribution."""
        return self.reads_overlap or self.kinds != ("ce",)

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        kinds, last = self.kinds, batch.tokens_R.shape[0] - 1
        labels, hidden_AKD = self.labels(batch), self.slots(batch)
        depth_K = torch.arange(1, self.depth + 1, device=batch.tokens_R.device)
        previous_AK = batch.tokens_R[(batch.anchors.row_A[:, None] + depth_K).clamp(max=last)]
        low_AKr = self.corrections(hidden_AKD, previous_AK)
        assert batch.hidden_RD is not None
        teacher_RD = batch.hidden_RD.detach()
        parts = [None, None] if scale_T is None else [scale_T[: len(kinds)], scale_T[len(kinds) : 2 * len(kinds)]]

        def run(low: Tensor | None, up_Ur: Tensor | None, part_T: Tensor | None, overlap: bool = False) -> BlockLosses:
            return block_loss(
                hidden_AKD, self.output_UD, low, up_Ur, labels, teacher_RD, teacher, self.draft_ids_U, kinds,
                self.config.weighting == "dpace", part_T, overlap,
            )  # fmt: skip

        losses, selected = run(*self._taught(low_AKr), parts[0], self.reads_overlap), []
        if self.selects:
            assert low_AKr is not None and self.correction_Ur is not None
            total, argmax_AK = select_loss(
                hidden_AKD, self.output_UD, low_AKr, self.correction_Ur, labels, self.selects
            )
            losses, selected = replace(losses, argmax_AK=argmax_AK), [total]
        more, metrics = self.more_terms(Drafts(hidden_AKD, previous_AK, low_AKr), labels, losses)
        more = [*selected, *more]
        base = [run(None, None, parts[1]).sum_T] if self.teaches_base else []
        sum_T = torch.cat((losses.sum_T, *base, *(x[None] for x in more))) if base or more else losses.sum_T
        count_T = labels.weight_AK.sum().expand(len(self.terms)).clone()
        loss = measured(batch, labels, self.target_ids(losses.argmax_AK), sum_T, count_T)
        return loss.with_metrics(*zip(*metrics, strict=True)) if metrics else loss

    def _taught(self, low_AKr: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The correction of the logits that carry `kinds`. Where drafts are selected, those are the base logits."""
        return (None, None) if self.selects else (low_AKr, self.correction_Ur)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The loss terms with a weight above 0, in the order of heads/losses/block.py."""
        return tuple(kind for kind in KINDS if getattr(self.config, f"{kind}_weight") > 0)
