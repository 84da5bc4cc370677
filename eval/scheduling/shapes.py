"""Which shapes the cycles of a batch may have. Each one is a captured graph, so there are about a dozen.

A cycle costs time by its levels (in drafters that draft them one after the other) and by the rows of the target's
forward. Rows beyond what is likely to be accepted are waste, and so are shapes that lie close to each other.
"""

from __future__ import annotations

from headstart.eval.decoding.scheduler import PLAIN, CycleShape

#: chains that are verified as a whole, besides the deepest one
CHAINS = (1, 2, 3, 5)
#: rows per sequence, where nodes are cut: from one draft for every second sequence upwards
ROWS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: most rows per sequence, of chains
CHAIN_ROWS = 4
#: levels of a tree, besides all, in drafters that draft level after level
TREE_LEVELS = (2, 3)
#: a shape whose rows are more than this share of all places is not worth a graph of its own
ALMOST_ALL = 0.85
#: rows of a whole batch up to which all nodes of a tree may be verified
MOST_WHOLE = 512
#: a batch from which nodes of chains are cut: in a smaller one a shorter chain does as well
CUT_CHAINS = 4


def shapes_of(batch: int, nodes: int, levels: int, linear: bool, by_level: bool) -> list[CycleShape]:
    """The shapes, plain decoding first, then from the cheapest to the dearest of each number of levels.

    Args:
        nodes: of the largest tree, without the root. levels: of it.
        linear: whether it is a chain.
        by_level: whether drafting fewer levels takes less time.
    """
    return [PLAIN, *(_chains(batch, levels, by_level) if linear else _trees(batch, nodes, levels, by_level))]


def _chains(batch: int, levels: int, by_level: bool) -> list[CycleShape]:
    found = []
    depths = [depth for depth in CHAINS if depth < levels] + [levels]
    for depth in depths:
        # where all levels cost the same, the deepest chain alone is cut
        if batch >= CUT_CHAINS and (depth == levels or (by_level and depth > 3)):
            found += [CycleShape(depth, rows) for rows in _cuts(batch, depth) if rows <= CHAIN_ROWS * batch]
        found.append(CycleShape(depth))
    return found


def _trees(batch: int, nodes: int, levels: int, by_level: bool) -> list[CycleShape]:
    found = []
    for depth in [depth for depth in TREE_LEVELS if depth < levels and by_level and batch >= CUT_CHAINS]:
        found += [CycleShape(depth, rows) for rows in _cuts(batch, nodes) if batch < rows <= CHAIN_ROWS * batch]
    found += [CycleShape(levels, rows) for rows in _cuts(batch, nodes) if rows <= max(MOST_WHOLE, 3 * batch)]
    if not found or batch * (nodes + 1) <= MOST_WHOLE:
        found.append(CycleShape(levels))
    return found


def _cuts(batch: int, nodes: int) -> list[int]:
    """Numbers of rows, each above the batch and below all places."""
    rows = [round(batch * share) for share in ROWS]
    return [n for n in dict.fromkeys(rows) if batch < n <= ALMOST_ALL * batch * (nodes + 1)]
