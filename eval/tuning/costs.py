"""What a cycle costs on this device: verification by tokens, drafting by depth, and the rest of a whole cycle.

Times are taken by CUDA events around replays of captured graphs, or by the clock where the engine cannot be captured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import Drafter
from headstart.eval.kernels.choices import decide_ways
from headstart.eval.measuring.breakdown import loop_seconds, started_loop
from headstart.eval.measuring.sweep import spread
from headstart.eval.tree import Tree, chain, static_paths

#: new tokens per row that whole cycles are timed on
CYCLE_TOKENS = 48
#: most sizes at which the target's forward is timed, for chains and for trees each
FORWARDS = 7


def node_count(tree: TreeConfig) -> int:
    """Nodes of a tree without the root.

    A dynamic tree has k candidates at its first level and k · k at every further one, which may be fewer than
    `total_tokens - 1`.
    """
    if tree.kind == "chain":
        return tree.depth
    if tree.kind == "static":
        return len(static_paths(tree, tree.depth))
    if tree.kind == "ddtree":
        return tree.total_tokens - 1
    return min(tree.total_tokens - 1, tree.k + (tree.depth - 1) * tree.k**2)


def drafting_of(tree: TreeConfig) -> str:
    """What a tree is drafted by: its kind, or "dynamic<k>". Trees of equal name differ in `draft_size` only."""
    return f"dynamic{tree.k}" if tree.kind == "dynamic" else tree.kind


def draft_size(tree: TreeConfig) -> int:
    """What drafting takes longer with: levels, or nodes.

    Nodes say more of a static tree than its levels do, and of a tree over marginals all levels come from one pass.
    """
    return node_count(tree) if tree.kind in ("static", "ddtree") else tree.depth


@dataclass
class Costs:
    """Seconds at one batch size. Between measured sizes they are interpolated, beyond them the nearest one holds.

    Attributes:
        context: mean length of the contexts.
        plain_s: a whole cycle of plain decoding.
        verify_s: "chain" or "tree" → tokens in the forward (nodes + 1) → seconds of the target's forward.
        draft_s: `drafting_of` → `draft_size` → seconds of drafting.
        rest_s: tree kind → nodes → seconds of a whole cycle less the two (acceptance, KV moves, features, host).
    """

    batch: int
    context: int
    plain_s: float
    verify_s: dict[str, dict[int, float]] = field(default_factory=dict)
    draft_s: dict[str, dict[int, float]] = field(default_factory=dict)
    rest_s: dict[str, dict[int, float]] = field(default_factory=dict)

    def cycle_s(self, tree: TreeConfig) -> float:
        return self.parts_s(tree) + _at(self.rest_s[tree.kind], node_count(tree))

    def parts_s(self, tree: TreeConfig) -> float:
        """Verification and drafting."""
        shape, tokens = forward_of(tree)
        return _at(self.verify_s[shape], tokens) + _at(self.draft_s[drafting_of(tree)], draft_size(tree))

    def cut_s(self, tokens: int) -> float:
        """A cycle that drafts the longest chain, and verifies only the first `tokens` of a row, the root included."""
        drafts = self.draft_s["chain"]
        return _at(self.verify_s["chain"], tokens) + drafts[max(drafts)] + _at(self.rest_s["chain"], tokens - 1)

    def to_json(self) -> dict[str, Any]:
        tables = {
            name: {key: {str(n): s * 1e3 for n, s in sorted(points.items())} for key, points in table.items()}
            for name, table in (("verify_ms", self.verify_s), ("draft_ms", self.draft_s), ("rest_ms", self.rest_s))
        }
        return {"batch": self.batch, "context": self.context, "plain_ms": self.plain_s * 1e3, **tables}


def _at(points: dict[int, float], where: int) -> float:
    known = sorted(points)
    return float(np.interp(where, known, [points[n] for n in known]))


def forward_of(tree: TreeConfig) -> tuple[str, int]:
    """("chain" or "tree", tokens) of the target's forward over a tree."""
    return "chain" if tree.kind == "chain" else "tree", node_count(tree) + 1


def extremes(trees: Iterable[TreeConfig]) -> list[TreeConfig]:
    """Trees whose whole cycles are timed: of every kind those with fewest and with most nodes."""
    kinds: dict[str, list[TreeConfig]] = {}
    for tree in trees:
        kinds.setdefault(tree.kind, []).append(tree)
    chosen = []
    for members in kinds.values():
        ordered = sorted(members, key=lambda tree: (node_count(tree), tree.depth))
        chosen += ordered[:1] if node_count(ordered[0]) == node_count(ordered[-1]) else [ordered[0], ordered[-1]]
    return chosen


def draft_points(trees: Iterable[TreeConfig]) -> list[TreeConfig]:
    """Trees whose drafting is timed: of every `drafting_of` the smallest, a middle one and the largest.

    Static trees may have any shape, so up to FORWARDS of them are timed.
    """
    draftings: dict[str, dict[int, TreeConfig]] = {}
    for tree in trees:
        draftings.setdefault(drafting_of(tree), {})[draft_size(tree)] = tree
    chosen = []
    for members in draftings.values():
        sizes = sorted(members)
        static = members[sizes[0]].kind == "static"
        picked = spread(sizes, FORWARDS) if static else sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
        chosen += [members[size] for size in picked]
    return chosen


def measure_costs(
    decoder: Decoder,
    build: Callable[[TreeConfig], Drafter],
    trees: list[TreeConfig],
    contexts: list[list[int]],
    repeats: int = 5,
    advance: Callable[[], None] | None = None,
) -> Costs:
    """Time everything that `Costs.cycle_s` needs for `trees`.

    Args:
        build: makes the drafter of a tree.
        contexts: token ids of one batch, as long as contexts are on average while answers are decoded.
        repeats: replays (calls on a CPU) that a median is taken of.
        advance: called after every measurement, of which `measurements` gives the number.
    """
    done = advance or (lambda: None)
    context = round(statistics.mean(map(len, contexts)))
    costs = Costs(len(contexts), context, _cycle_seconds(decoder, None, contexts))
    done()
    for tree in draft_points(trees):
        seconds = _draft_seconds(decoder, build(tree), contexts, repeats)
        costs.draft_s.setdefault(drafting_of(tree), {})[draft_size(tree)] = seconds
        done()
    loop = started_loop(decoder, build(max(trees, key=node_count)), contexts)
    for shape, tokens in forwards(trees):
        costs.verify_s.setdefault(shape, {})[tokens] = _verify_seconds(loop, shape, tokens, repeats)
        done()
    for tree in extremes(trees):
        rest = max(_cycle_seconds(decoder, build(tree), contexts) - costs.parts_s(tree), 0.0)
        costs.rest_s.setdefault(tree.kind, {})[node_count(tree)] = rest
        done()
    return costs


def measurements(trees: list[TreeConfig]) -> int:
    """How many measurements `measure_costs` makes."""
    return 1 + len(draft_points(trees)) + len(forwards(trees)) + len(extremes(trees))


def forwards(trees: Iterable[TreeConfig]) -> list[tuple[str, int]]:
    """`forward_of` of the forwards that are timed: for chains and for trees the extreme sizes and some between."""
    sizes: dict[str, set[int]] = {}
    for shape, tokens in map(forward_of, trees):
        sizes.setdefault(shape, set()).add(tokens)
    return [(shape, tokens) for shape in sorted(sizes) for tokens in spread(sorted(sizes[shape]), FORWARDS)]


def _cycle_seconds(decoder: Decoder, drafter: Drafter | None, contexts: list[list[int]]) -> float:
    """Median seconds of a whole cycle of the decode loop, whatever is decoded: a stop token ends nothing."""
    decoder.run(contexts, drafter, CYCLE_TOKENS, seed=0, stop=False)
    seconds = decoder.run(contexts, drafter, CYCLE_TOKENS, seed=0, stop=False).cycle_s
    # captured cycles keep their drafters in memory
    decoder.graphs.clear()
    # the first cycle also waits for work that was queued before it
    return statistics.median(seconds[1:] or seconds)


def _draft_seconds(decoder: Decoder, drafter: Drafter, contexts: list[list[int]], repeats: int) -> float:
    if not drafter.captures:
        # a drafter on the host is timed as part of the rest
        return 0.0
    loop = started_loop(decoder, drafter, contexts)
    if loop.captures:
        for linears, rows in drafter.products(len(contexts)):
            decide_ways(linears, rows, loop.engine.choices)
    return loop_seconds(loop, lambda: drafter.propose(loop.roots_B, None), repeats)


def _verify_seconds(loop: Loop, shape: str, tokens: int, repeats: int) -> float:
    engine = loop.engine
    if engine.captures and engine.fused is not None:
        engine.fused.choose_ways(engine.batch * tokens)
    tree = chain(loop.roots_B[:, None].expand(-1, tokens - 1)) if shape == "chain" else _bush(loop, tokens - 1)
    return loop_seconds(loop, lambda: loop.forward(tree), repeats)


def _bush(loop: Loop, nodes: int) -> Tree:
    """A tree that branches. Its exact shape does not change the cost."""
    batch, device = len(loop.roots_B), loop.roots_B.device
    parent_N = ((torch.arange(nodes, device=device) - 3) // 2).clamp(min=-1)
    depth = [0] * nodes
    for node, parent in enumerate(parent_N.tolist()):
        depth[node] = 1 if parent < 0 else depth[parent] + 1
    depth_BN = torch.tensor(depth, device=device).expand(batch, nodes)
    token_BN = loop.roots_B[:, None].expand(batch, nodes)
    return Tree(token_BN, parent_N.expand(batch, nodes), depth_BN, torch.ones_like(depth_BN).bool(), max(depth))
