"""What drafters share that can draft less than they were built for."""

from __future__ import annotations


class Sized:
    """The fields of SizedDrafter (eval/decoding/drafter.py).

    Attributes: depth: levels of the largest tree.
    """

    by_level = False
    levels: int | None = None
    nodes: int | None = None
    levels_before: int | None = None
    depth: int

    @property
    def drafted(self) -> int:
        """Levels of the next proposal. Where fewer take no less time, all are drafted, and the loop cuts them."""
        return min(self.levels, self.depth) if self.by_level and self.levels is not None else self.depth
