"""Which shapes the cycles of a batch may have. Each one is a captured graph, so there are about a dozen.

A cycle costs time by its levels (in drafters that draft them one after the other), by the nodes of a row (attention
reads all of them) and by the rows of the target's forward.
"""

from __future__ import annotations

from headstart.eval.decoding.scheduler import PLAIN, CycleShape

#: chains that are verified as a whole, besides the deepest one
CHAINS = (1, 2, 3, 5)
#: rows per sequence, where the nodes of a chain are cut: from one draft for every second sequence upwards
CHAIN_ROWS = (1.5, 2, 3, 4)
#: a batch from which nodes are cut: in a smaller one a shorter chain or a smaller tree does as well
CUT = 4
#: nodes of a row in trees of a larger batch: the smallest ones, and what follows by doubling
LEAST_NODES = 3
#: levels of trees, besides all, in drafters that draft level after level; in a batch without cuts
TREE_LEVELS, SMALL_LEVELS = (2, 3), (2, 3, 4)
#: nodes of a row per level, in a batch without cuts
NODES = (1, 2, 3)
#: rows of a whole batch up to which a tree's nodes may be verified, if it is not the smallest
MOST_ROWS = 512
#: a shape whose rows are more than this share of all places is not worth a graph of its own
ALMOST_ALL = 0.85


def shapes_of(batch: int, nodes: int, levels: int, linear: bool, by_level: bool) -> list[CycleShape]:
    """The shapes, plain decoding first; the last one drafts all that there is, or nearly.

    Args:
        nodes: of the largest tree, without the root. levels: of it.
        linear: whether it is a chain.
        by_level: whether drafting fewer levels takes less time.
    """
    return [PLAIN, *(_chains(batch, levels, by_level) if linear else _trees(batch, nodes, levels, by_level))]


def _chains(batch: int, levels: int, by_level: bool) -> list[CycleShape]:
    found = []
    for depth in [depth for depth in CHAINS if depth < levels] + [levels]:
        # where all levels cost the same, the deepest chain alone is cut
        if batch >= CUT and (depth == levels or (by_level and depth > 3)):
            rows = dict.fromkeys(round(batch * share) for share in CHAIN_ROWS)
            found += [CycleShape(depth, rows=n) for n in rows if batch < n <= ALMOST_ALL * batch * (depth + 1)]
        found.append(CycleShape(depth))
    return found


def _trees(batch: int, nodes: int, levels: int, by_level: bool) -> list[CycleShape]:
    small = batch < CUT
    depths = [depth for depth in (SMALL_LEVELS if small else TREE_LEVELS) if by_level and depth < levels] + [levels]
    if small:
        sizes = [(depth, depth * share) for depth in depths for share in NODES]
        return [*(CycleShape(depth, size) for depth, size in sizes if size < nodes), CycleShape(levels, nodes)]
    counts = [nodes]
    while (fewer := (counts[0] + 1) // 2 - 1) >= LEAST_NODES:
        counts.insert(0, fewer)
    # the least that can be drafted: one node of each row
    found = [CycleShape(1 if by_level else levels, 1)] if nodes > 1 else []
    for depth in depths:
        for count in counts if depth == levels else counts[:2]:
            # a tree of fewer nodes than levels does not use them
            if by_level and count < depth and count < nodes:
                continue
            # all nodes, or the likelier half of the batch's places
            for rows in (batch * (count + 1), batch * (count + 1) // 2):
                if rows > batch and (rows <= MOST_ROWS or count == counts[0]):
                    found.append(CycleShape(depth, count, None if rows == batch * (count + 1) else rows))
    return found or [CycleShape(levels, nodes)]
