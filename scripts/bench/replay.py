"""Acceptance as a trained head had it on real text, replayed where weights are random.

With random weights no draft is better than another. Where every row has the same rate of acceptance, a scheduler can
only choose a chain's length: what it gains by giving places to sure drafts cannot be seen. Here every row walks through
recorded cycles (recordings.py), one per cycle that drafts. Its drafts say what the recorded ones said, and each is
accepted with the recorded probability if those before it are. At a context's end the row goes on with the next one. A
row that gets a new context takes another recorded one.

All ways of decoding see the same recorded contexts in the same order, whatever they accept. Chains that are shorter
than the recorded ones see the same cycles: those that began where a recorded chain had ended.
Shape legend: S recorded cycles, K drafts of a recorded cycle, B batch, N drafts of a cycle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.bench.recordings import Recording
from headstart.eval.decoding.drafter import ConfidentDrafter, Drafter, SizedDrafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import Tree
from headstart.heads.batch import FeatureSpec


class ReplayedDrafter:
    """A drafter of chains that say, and are accepted, as recorded ones were. The tokens are the wrapped drafter's.

    A cycle takes as long as with that drafter, and two small lookups more.

    Args: whole: where this is for a batch of one row, the drafter whose row that becomes.
    Attributes: place_B: int64, the recorded cycle that each row's next one replays.
    Raises: ConfigError for chains that are longer than the recorded ones.
    """

    place_B: Tensor

    def __init__(self, drafter: Drafter, recording: Recording, whole: ReplayedDrafter | None = None):
        recording.require(f"chain{drafter.max_nodes}", drafter.max_nodes, recording.temperature)
        assert isinstance(drafter, SizedDrafter) and isinstance(drafter, ConfidentDrafter)
        self.drafter: Any = drafter  # there is no type for all three protocols together
        self.recording, self.whole = recording, whole
        self._begun = 0  # contexts of this batch so far
        # captured cycles read these, so they outlive the batch: logits and rates; the cycle after each
        self._said_S2K = torch.stack([recording.logit_SK, recording.rate_SK], 1)
        self._following_S = (torch.arange(recording.cycles) + 1) % recording.cycles

    def start(self, context: Rows, capacity: int) -> None:
        self.drafter.start(context, capacity)
        device = context.count_B.device
        if self._said_S2K.device != device:
            self._said_S2K, self._following_S = self._said_S2K.to(device), self._following_S.to(device)
        if self.whole is None:
            self._begun = 0
        counter = self.whole or self
        places = [self.recording.first(counter._begun + row) for row in range(len(context.count_B))]
        counter._begun += len(places)
        self.place_B = torch.tensor(places, device=device)

    def aside(self) -> ReplayedDrafter:
        aside = ReplayedDrafter(self.drafter.aside(), self.recording, self)
        aside._said_S2K, aside._following_S = self._said_S2K, self._following_S
        return aside

    def take_row(self, row: int, aside: Drafter, slots: int) -> None:
        assert isinstance(aside, ReplayedDrafter)
        self.drafter.take_row(row, aside.drafter, slots)

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        tree: Tree = self.drafter.propose(roots_B, generator)
        assert tree.linear
        logit_BN, rate_BN = self._said_S2K[self.place_B, :, : tree.nodes].unbind(1)
        self.place_B = self._following_S[self.place_B]
        return replace(tree, confidence_BN=logit_BN if self.says_confidence else None, rate_BN=rate_BN)

    def commit(self, accepted: Rows) -> None:
        self.drafter.commit(accepted)

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        return self.drafter.products(batch)  # type: ignore[no-any-return]

    @property
    def state(self) -> list[tuple[object, str]]:
        return [*self.drafter.state, (self, "place_B")]

    @property
    def name(self) -> str:
        return self.drafter.name  # type: ignore[no-any-return]

    @property
    def spec(self) -> FeatureSpec | None:
        return self.drafter.spec  # type: ignore[no-any-return]

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes  # type: ignore[no-any-return]

    @property
    def captures(self) -> bool:
        return self.drafter.captures  # type: ignore[no-any-return]

    @property
    def prepare_s(self) -> float:
        return self.drafter.prepare_s  # type: ignore[no-any-return]

    @property
    def by_level(self) -> bool:
        return self.drafter.by_level  # type: ignore[no-any-return]

    @property
    def levels(self) -> int | None:
        return self.drafter.levels  # type: ignore[no-any-return]

    @levels.setter
    def levels(self, levels: int | None) -> None:
        self.drafter.levels = levels

    @property
    def nodes(self) -> int | None:
        return self.drafter.nodes  # type: ignore[no-any-return]

    @nodes.setter
    def nodes(self, nodes: int | None) -> None:
        self.drafter.nodes = nodes

    @property
    def levels_before(self) -> int | None:
        return self.drafter.levels_before  # type: ignore[no-any-return]

    @levels_before.setter
    def levels_before(self, levels: int | None) -> None:
        self.drafter.levels_before = levels

    @property
    def says_confidence(self) -> bool:
        """The wrapped drafter's, which takes the time to say it. What is heard is the recording."""
        return self.drafter.says_confidence  # type: ignore[no-any-return]

    @says_confidence.setter
    def says_confidence(self, says: bool) -> None:
        self.drafter.says_confidence = says

    @property
    def confidence_source(self) -> str:
        """The recorded head's."""
        return self.recording.source
