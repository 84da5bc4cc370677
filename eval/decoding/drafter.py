"""What the decode loop asks of a drafter. Batched; knows contexts and features, never the target's KV."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headstart.eval.decoding.rows import Rows
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import Tree
from headstart.heads.batch import FeatureSpec


class Drafter(Protocol):
    """Proposes trees. One drafter serves one batch at a time: `start` resets it.

    The rows a drafter holds always end one token before the root: the root's own feature does not exist yet. A draft
    row p consumes emb(x_{p+1}) and f_p, so the last row is completed by the root given to `propose` (methods §0).

    Attributes:
        name: what reports call it.
        spec: target features it reads; None = none.
        max_nodes: most nodes a tree of it can have (sizes the KV buffers).
        captures: whether `propose` and `commit` ask nothing of the host, so that a CUDA graph can hold them.
        prepare_s: seconds that making buffers and compiling has taken: no part of decoding.
        state: (object, attribute) where the tensors stand that they change, KV apart. Shapes stay from `start` on. A
            drafter that owns an engine, as a draft language model does, lists the engine's `state` among them.
    """

    name: str
    spec: FeatureSpec | None
    max_nodes: int
    captures: bool

    @property
    def prepare_s(self) -> float: ...

    @property
    def state(self) -> list[tuple[object, str]]: ...

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        """(matrix products, rows of each) of a cycle, after a first `start`: it is measured how they run fastest."""
        ...

    def start(self, context: Rows, capacity: int) -> None:
        """A new batch: all context tokens with their features. No context will grow beyond `capacity` tokens."""
        ...

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        """Draft what follows the roots. A row may draft nothing (valid_BN False)."""
        ...

    def commit(self, accepted: Rows) -> None:
        """The last root and the accepted drafts, with real target features; idle rows have count 0."""
        ...
