"""What the decode loop asks of a drafter, which knows contexts and features, never the target's KV cache."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headstart.eval.decoding.rows import Rows
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import Tree
from headstart.heads.batch import FeatureSpec


class Drafter(Protocol):
    """Proposes trees. One drafter serves one batch at a time: `start` resets it.

    The rows that a drafter holds end one token before the root, as the root's own feature does not exist yet. Row p
    reads emb(x_{p+1}) and f_p: the root, which `propose` gets, completes the last row (methods §0).

    Attributes:
        name: what reports call it.
        spec: target features it reads; None = none.
        max_nodes: most nodes of a tree that it drafts (sizes the KV buffers).
        captures: whether a CUDA graph can hold `propose` and `commit`: they ask nothing of the host.
        prepare_s: seconds spent on buffers and compilation so far, which do not count as decoding.
        state: (object, attribute) of every tensor that `propose` and `commit` replace, KV apart. Their first dimension
            is the batch, and their shapes do not change after `start`. A drafter that owns an engine (a draft language
            model) adds the engine's `state`.
    """

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> FeatureSpec | None: ...

    @property
    def max_nodes(self) -> int: ...

    @property
    def captures(self) -> bool: ...

    @property
    def prepare_s(self) -> float: ...

    @property
    def state(self) -> list[tuple[object, str]]: ...

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        """Matrix products of a cycle with their rows, after a first `start`. The fastest kernel of each is measured."""
        ...

    def start(self, context: Rows, capacity: int) -> None:
        """Begin a batch: all context tokens with their features. No context grows beyond `capacity` tokens."""
        ...

    def aside(self) -> Drafter:
        """A drafter with the same weights, after a first `start`. It starts a context that `take_row` then moves here.

        It may be the same one at every call: it serves one context at a time, in a batch of one row.
        """
        ...

    def take_row(self, row: int, aside: Drafter, slots: int) -> None:
        """Copy what `aside` holds of its context into a row, all but `state`, which the loop copies.

        Args: aside: what `aside()` gave. slots: tokens of the context.
        """
        ...

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        """Draft what follows the roots. A row may draft nothing (valid_BN False).

        Whatever is drafted, the answers are the target's. Where tokens are drawn at random, the tree must hold the
        distribution that they were drawn from (Tree.q_BNV).
        """
        ...

    def commit(self, accepted: Rows) -> None:
        """Take over the last root and the accepted drafts, with the target's features. Idle rows have count 0."""
        ...


@runtime_checkable
class SizedDrafter(Protocol):
    """What a drafter has besides if it can draft less than it was built for.

    Attributes:
        by_level: whether fewer levels take less time. What it drafts is then no different: a chain is the beginning of
            the whole one. Drafts that are drawn have the same distribution, but not always the same random numbers.
        levels, nodes: that the next proposal has at most, 1 or more; None = all. What a drafter does not obey, the loop
            cuts.
        levels_before: levels that the cycle before drafted at most; None = any number.
    """

    by_level: bool
    levels: int | None
    nodes: int | None
    levels_before: int | None


@runtime_checkable
class ConfidentDrafter(Protocol):
    """What a drafter has besides if it can say how sure it is of its drafts (`Tree.confidence_BN`).

    It says that of chains and static trees. Other trees have scores (`Tree.score_BN`).

    Attributes:
        says_confidence: whether it does; False unless somebody asks. What is drafted is the same. Captured cycles keep
            what it was at their capture.
        confidence_source: where it takes that from: "confidence" (a confidence head) or "draft_probability" (its own
            probability of the most likely token, which is the draft itself unless drafts are drawn).
    """

    says_confidence: bool

    @property
    def confidence_source(self) -> str: ...
