"""EAGLE-1 and EAGLE-3 as drafters: a KV cache of the draft layers, chains, EAGLE-2's dynamic trees (methods §3, §4).

Draft row p reads emb(x_{p+1}) and a feature g_p at rope position p. Rows of committed tokens are always computed from
the target's features. Rows of drafted tokens are scratch that the next cycle overwrites. A dynamic tree's frontier is
the k nodes that are expanded next.
Shape legend: B batch, J new rows, N rows of a pass, k frontier nodes, f rows of the pass before, H head hidden,
U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import (
    Sampling,
    add_seen,
    context_seen,
    penalise,
)
from headstart.eval.drafters.cached import CachedDrafter
from headstart.eval.drafters.draft import DraftStep
from headstart.eval.drafters.draft_vocabulary import in_draft_vocabulary
from headstart.eval.drafters.layer import appended
from headstart.eval.drafters.one_by_one import OneByOne
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.candidates import Growth
from headstart.eval.kernels.line_up import Lined, hold, line_up
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import Tree, chain
from headstart.heads.families.autoregressive import AutoregressiveHead


class AutoregressiveDrafter(CachedDrafter):
    """Drafts token after token with an AutoregressiveHead bound to its target."""

    by_level = True
    head: AutoregressiveHead
    step: DraftStep

    def __init__(self, head: AutoregressiveHead, tree: TreeConfig, sampling: Sampling):
        super().__init__(head, tree, sampling)
        self.dynamic = tree.kind == "dynamic"
        self.depth = tree.depth
        self.max_nodes = tree.total_tokens - 1 if self.dynamic else tree.depth
        #: most rows of a commit: the root and one node per level
        self.width = tree.depth + 1

    @property
    def confidence_source(self) -> str:
        return "draft_probability"

    @property
    def state(self) -> list[tuple[object, str]]:
        names = ["length_B", "pending_BJ", "pending_g_BJH", "pending_B"]
        return [(self, name) for name in (names if self.seen_BV is None else [*names, "seen_BV"])]

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        rows = {batch * self.waiting, batch * (self.tree.k if self.dynamic else 1), batch}
        return self._products(batch, rows)

    def _products(self, batch: int, rows: set[int]) -> list[tuple[list[Linear], int]]:
        """As `products`. Args: rows: of passes. A commit's features may have fewer, if fewer levels are drafted."""
        found, features = [(self.step.linears(), count) for count in sorted(rows)], batch * (self.drafted + 1)
        if self.step.fc is not None and features not in rows:
            found.append(([self.step.fc], features))
        return found

    @torch.inference_mode()
    def start(self, context: Rows, capacity: int) -> None:
        scratch = self.tree.depth * (self.tree.k if self.dynamic else 1)
        self._prepare(context, capacity + scratch)
        self.length_B = torch.zeros_like(context.count_B)
        vocab = self.head.dims.vocab_size
        self.seen_BV = context_seen(self.sampling, context.tokens_BJ, context.count_B, vocab)
        # the next token of every row but the last is known; the last row waits for the root
        known_B = context.count_B - 1
        self._read_context(replace(context, tokens_BJ=F.pad(context.tokens_BJ[:, 1:], (0, 1))), known_B)
        self._hold(context.at(known_B[:, None]))

    def _make_step(self, slots: int) -> DraftStep:
        return DraftStep(self.head, slots)

    def _place(self, batch: int, device: torch.device) -> None:
        self._chain = chain(torch.zeros((batch, self.tree.depth), dtype=torch.int64, device=device))

    @torch.inference_mode()
    def commit(self, accepted: Rows) -> None:
        self.seen_BV = add_seen(self.seen_BV, accepted.tokens_BJ, accepted.count_B)
        self._hold(accepted)

    def _hold(self, rows: Rows) -> None:
        """Keep rows for the next `propose`: their last one lacks its next token, the root."""
        fused_BJH = self._fuse(rows, slice(None))
        # the state of captured cycles keeps its shape, whatever a cycle drafted
        self.pending_BJ, self.pending_g_BJH = hold(rows.tokens_BJ, fused_BJH, self.width)
        self.pending_B = rows.count_B

    @property
    def waiting(self) -> int:
        """Most rows that wait for the next `propose`: a root and one node per level of the cycle before."""
        return self.width if self.levels_before is None else min(self.levels_before + 1, self.width)

    def _line_up(self, roots_B: Tensor) -> tuple[Lined, Tensor]:
        """The rows that wait, and their features [B, W, H]."""
        tokens_BW, levels = self.pending_BJ[:, : self.waiting], self.tree.depth
        lined = line_up(tokens_BW, self.pending_B, roots_B, self.length_B, self.kv.bin, levels)
        self.seen_BV = add_seen(self.seen_BV, roots_B[:, None])
        return lined, self.pending_g_BJH[:, : self.waiting]

    def _fuse(self, rows: Rows, columns: slice) -> Tensor:
        hidden, streams = rows.hidden_BJD, rows.streams_BJkD
        if hidden is None:
            raise ValueError("the rows carry no features: give the engine the drafter's spec")
        return self.step.fuse(hidden[:, columns], None if streams is None else streams[:, columns])

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        lined, g_BWH = self._line_up(roots_B)
        visibility = Visibility(lined.position_BW, lined.write_BW, self.length_B)
        g_B1H, logits_B1U = self._pass(lined.tokens_BW, g_BWH, visibility, lined.last_B1)
        self.length_B = lined.length_B
        if self.dynamic:
            return self._propose_tree(g_B1H, logits_B1U)
        return self._propose_chain(g_B1H, logits_B1U, generator, lined)

    def _propose_chain(
        self, g_B1H: Tensor, logits_B1U: Tensor, generator: torch.Generator | None, lined: Lined
    ) -> Tree:
        ids_U = self.head.draft_ids_U
        chosen = OneByOne(self.sampling, self._sampled, self.says_confidence, self.seen_BV, ids_U, generator)
        for level in range(self.drafted):
            if level:
                position_B1 = lined.ahead_DB[level - 1][:, None]
                visibility = Visibility(position_B1, position_B1, self.length_B)
                g_B1H, logits_B1U = self._pass(chosen.tokens[-1][:, None], g_B1H, visibility)
            chosen.choose(logits_B1U[:, 0])
        return chosen.fill(self._chain, self.head.dims.vocab_size)

    def _propose_tree(self, g_B1H: Tensor, logits_B1U: Tensor) -> Tree:
        """EAGLE-2: expand the k best nodes of each level, then keep the best of all candidates."""
        seen_BU = in_draft_vocabulary(self.seen_BV, self.head.draft_ids_U)
        seen_BfU = None if seen_BU is None else seen_BU[:, None]
        logits_BfU, g_BfH = penalise(logits_B1U, self.sampling, seen_BfU), g_B1H
        growth = Growth.start(self.length_B, self.tree.k, self.drafted, logits_BfU, self.head.draft_ids_U)
        growth = growth.grow(logits_BfU)
        for _ in range(self.drafted - 1):
            g_BfH, logits_BfU = self._frontier_pass(growth, g_BfH)
            seen_BfU = growth.seen_on_path(seen_BfU)
            growth = growth.grow(penalise(logits_BfU, self.sampling, seen_BfU))
        return growth.tree(min(self.nodes or self.max_nodes, self.max_nodes))

    def _frontier_pass(self, growth: Growth, g_BfH: Tensor) -> tuple[Tensor, Tensor]:
        """A pass over the frontier. A node sees the context, its ancestors, itself. `g_BfH`: of the last frontier."""
        nodes = growth.frontier
        assert nodes is not None
        visibility = Visibility(nodes.position_Bk, nodes.write_Bk, growth.length_B, nodes.seen_Bkn)
        return self._pass(nodes.tokens_Bk, g_BfH, visibility, under_BN=nodes.under_Bk)

    def _append(self, rows: Rows, columns: slice, count_B: Tensor) -> None:
        tokens_BJ = rows.tokens_BJ[:, columns]
        # a pass drafts after at least one row; this draft is not read
        first_B1 = torch.zeros_like(count_B)[:, None]
        visibility = appended(count_B, tokens_BJ.shape[1], self.length_B, self.kv.bin)
        self._pass(tokens_BJ, self._fuse(rows, columns), visibility, first_B1)
        self.length_B = self.length_B + count_B

    def _pass(
        self,
        tokens_BN: Tensor,
        g_BfH: Tensor,
        visibility: Visibility,
        only_Bn: Tensor | None = None,
        under_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.step(tokens_BN, g_BfH, visibility, self.kv.keys, self.kv.values, only_Bn, under_BN)
