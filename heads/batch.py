"""A pack of documents with the target's features, which a head trains on.

Shape legend (methods §0): R rows of a pack, T tokens of a document, A anchors (supervised rows), E edges between
documents, D target hidden, K draft depths, k feature streams, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from headstart.heads.positions import Anchors, find_anchors
from headstart.heads.subsample import draw_rows
from headstart.heads.transfer import to_device


@dataclass(frozen=True)
class FeatureSpec:
    """The features that a head reads at every row besides the last hidden state, which teachers always need.

    Attributes:
        layer_ids: ascending indices k of HF `hidden_states[k]` (0 < k < L). That is the *input* of decoder layer k: the
            pre-norm residual stream.
        tokens_alone: the head reads tokens alone: it runs the target itself, so no features are made for it.
    """

    layer_ids: tuple[int, ...] = ()
    tokens_alone: bool = False


@dataclass
class FeatureBatch:
    """One pack of whole documents laid end to end; padding, if any, at the end (`doc_R` = -1).

    Attributes:
        tokens_R: int64 [R].
        turn_R: int64 [R], assistant turn of the token within its document, -1 = unsupervised.
        answer_R: int64 [R], as turn_R but for answers alone, where other tokens are supervised as well; None = turn_R.
        doc_R: int64 [R], document index within the pack, -1 = padding.
        position_R: int64 [R], rope position, restarting at 0 in every document.
        doc_lengths: rows of each document, in order.
        edges_E: int32, row offsets of the documents and the end; padding at the end counts as one more document.
        longest: most rows between two edges, or an upper bound of it.
        anchors: supervised rows (positions.find_anchors) for the head's K.
        sample_ids: one id per document, for error messages.
        hidden_RD: last hidden state **after the final norm**, or None before the target ran.
        streams_RkD: **pre-norm** residual streams at FeatureSpec.layer_ids, or None.
        teacher_argmax_A: int64 [A], argmax over the V tokens of the target's distribution at row_A + 1.
        teacher_argmax_R: int64 [R], the same at every row that teaches an anchor, 0 elsewhere, where anchors are drawn;
            None = teacher_argmax_A holds all (`argmax_by_row`).
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
    teacher_argmax_R: Tensor | None = None

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
            answers: assistant turns [T] for `answer_R`, one tensor per document.
        """
        lengths = tuple(int(tokens.shape[0]) for tokens, _ in documents)
        rows = max(sum(lengths), pad_to)
        padding = rows - sum(lengths)
        length_E = torch.tensor(lengths, dtype=torch.int64)
        start_E = length_E.cumsum(0) - length_E
        # this runs on the host at every step: few operations, whatever the number of documents
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

        Padding anchors have no supervised depth and point at the last row, which is never a real anchor. Every depth's
        count becomes A, and `depths_A` says which rows are active. `longest` becomes R, which bounds every later batch
        of these shapes.
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
            teacher_argmax_R=grow(self.teacher_argmax_R, rows, 0),
        )

    def subsampled(self, keep_K: Sequence[float], seed: int) -> FeatureBatch:
        """The same batch with a random part of the rows of every depth, and their weights (subsample.py).

        The draw depends on the seed and the numbers of rows alone. The host does not wait for the device.
        """
        draw = draw_rows(self.anchors.count_K, keep_K, torch.Generator().manual_seed(seed))
        draw = draw.to(self.tokens_R.device, non_blocking=True)
        argmax_A = self.teacher_argmax_A
        return replace(
            self,
            anchors=self.anchors.subsampled(draw),
            teacher_argmax_A=None if argmax_A is None else argmax_A[draw.order_A],
        )

    def drawn(self, index_A: Tensor) -> FeatureBatch:
        """The same batch with some of its anchors, each at all its depths, for a head whose teacher rows need not be
        anchors.

        Args: index_A: int64, ascending, of the anchors that stay; on the batch's device.
        """
        argmax_A = self.teacher_argmax_A
        return replace(
            self,
            anchors=self.anchors.drawn(index_A),
            teacher_argmax_A=None if argmax_A is None else argmax_A[index_A],
            teacher_argmax_R=None if argmax_A is None else self.argmax_by_row(),
        )

    def argmax_by_row(self) -> Tensor:
        """int64 [R]: the target's choice after each row that teaches an anchor, 0 elsewhere."""
        if self.teacher_argmax_R is not None:
            return self.teacher_argmax_R
        assert self.teacher_argmax_A is not None
        row_A = (self.anchors.row_A + 1).clamp(max=self.tokens_R.shape[0] - 1)
        # padding anchors stand at the last row: their zeros must not overwrite anything
        choice_A = torch.where(self.anchors.depths_A > 0, self.teacher_argmax_A, 0)
        return torch.zeros_like(self.tokens_R).index_add_(0, row_A, choice_A)

    def teacher_hidden(self) -> Tensor:
        """[A, D]: the post-norm hidden state whose distribution is the depth-1 teacher of each anchor (row_A + 1).

        It is what a head learns from, so no gradient goes through it.
        """
        return self.hidden_RD.detach()[(self.anchors.row_A + 1).clamp(max=self.tokens_R.shape[0] - 1)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> FeatureBatch:
        return self.map(lambda x: to_device(x, device, non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> FeatureBatch:
        """The same batch with every tensor changed, those of the anchors included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: change(x) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, anchors=self.anchors.map(change), **changed)
