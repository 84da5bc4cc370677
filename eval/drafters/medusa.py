"""Medusa as a drafter: all depths from one feature, laid out as a chain or a static tree (methods §1)."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling, add_seen, best, context_seen, draw, penalise, probabilities
from headstart.eval.kernels.candidates import top_ids
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import StaticShape, Tree, chain, static_paths, static_shape
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import ConfigError
from headstart.heads.families.medusa.head import MedusaHead


class MedusaDrafter:
    """Keeps the feature of the last committed token; the tree is a function of it."""

    captures = True
    prepare_s = 0.0

    def __init__(self, head: MedusaHead, tree: TreeConfig, sampling: Sampling):
        self.head, self.tree, self.sampling = head, tree, sampling
        self.name = head.family
        self.spec: FeatureSpec | None = head.spec
        self.depth = min(tree.depth, head.depth)
        self.shape: StaticShape | None = None
        if tree.kind == "static":
            self.shape = static_shape(static_paths(tree, self.depth))
            if self.shape.ranks > head.dims.vocab_size:
                raise ConfigError(
                    f"eval.tree.paths: found rank {self.shape.ranks - 1}, the vocabulary has {head.dims.vocab_size} "
                    "tokens: ranks count from 0"
                )
        self.max_nodes = self.shape.parent_N.shape[0] if self.shape is not None else self.depth

    @property
    def state(self) -> list[tuple[object, str]]:
        return [(self, "hidden_BD")] if self.seen_BV is None else [(self, "hidden_BD"), (self, "seen_BV")]

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        return []

    @torch.inference_mode()
    def start(self, context: Rows, capacity: int) -> None:
        self.hidden_BD = self._last(context)
        if self.shape is not None:
            self.shape = self.shape.to(context.tokens_BJ.device)
        self.seen_BV: Tensor | None = None
        if self.sampling.penalises:
            self.seen_BV = context_seen(context.tokens_BJ, context.count_B, self.head.dims.vocab_size)

    @torch.inference_mode()
    def commit(self, accepted: Rows) -> None:
        new_B1 = (accepted.count_B > 0)[:, None]
        self.hidden_BD = torch.where(new_B1, self._last(accepted), self.hidden_BD)
        if self.seen_BV is not None:
            self.seen_BV = add_seen(self.seen_BV, accepted.tokens_BJ, accepted.count_B)

    def _last(self, rows: Rows) -> Tensor:
        if rows.hidden_BJD is None:
            raise ValueError("the engine captured no features: build it with the drafter's spec")
        batch = torch.arange(rows.count_B.shape[0], device=rows.count_B.device)
        return rows.hidden_BJD[batch, (rows.count_B - 1).clamp(min=0)]

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        logits_BKV = self.head.draft_logits(self.hidden_BD)[:, : self.depth]
        seen_B1V = None
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV.scatter(1, roots_B[:, None], True)
            seen_B1V = self.seen_BV[:, None]
        if self.shape is None:
            return self._chain(logits_BKV, generator)
        if seen_B1V is not None:
            # a static tree has one token for all nodes of a rank: only what stands before all of them is penalised
            logits_BKV = penalise(logits_BKV, self.sampling, seen_B1V)
        return self.shape.fill(top_ids(logits_BKV, self.shape.ranks))

    def _chain(self, logits_BKV: Tensor, generator: torch.Generator | None) -> Tree:
        """A token of every head; a penalty counts those drafted before it, as the target's does."""
        sampled = self.tree.sample and not self.sampling.greedy
        seen_BV = self.seen_BV
        if seen_BV is None:
            if not sampled:
                return chain(best(logits_BKV, self.sampling, None))
            q_BKV = probabilities(logits_BKV, self.sampling)
            return chain(draw(q_BKV, generator), q_BKV=q_BKV)
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        for logits_BV in logits_BKV.unbind(1):
            if sampled:
                qs.append(probabilities(logits_BV, self.sampling, seen_BV))
                tokens.append(draw(qs[-1], generator))
            else:
                tokens.append(best(logits_BV, self.sampling, seen_BV))
            seen_BV = seen_BV.scatter(1, tokens[-1][:, None], True)
        return chain(torch.stack(tokens, 1), q_BKV=torch.stack(qs, 1) if sampled else None)
