"""A drafter of the tests that owns an engine: a draft language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling, add_seen, best, context_seen, draw, probabilities
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import Tree, chain, empty


class ModelDrafter:
    """Drafts a chain with a small causal LM: a forward per level, each over the root and all levels before.

    Args:
        sampled: at temperature > 0 tokens are drawn, else they are the most likely ones.
        fused: the model's fused form, which can be captured.
    """

    name, spec = "model", None

    def __init__(
        self, model: Any, depth: int, sampling: Sampling, sampled: bool = True, fused: FusedModel | None = None
    ):
        self.model, self.max_nodes, self.sampling, self.fused = model, depth, sampling, fused
        self.sampled = sampled and not sampling.greedy
        self.engine: Engine | None = None
        self.seen_BV: Tensor | None = None

    @property
    def captures(self) -> bool:
        return self.engine is not None and self.engine.captures

    @property
    def prepare_s(self) -> float:
        return 0.0 if self.engine is None else self.engine.prompts.capture_s

    @property
    def state(self) -> list[tuple[object, str]]:
        assert self.engine is not None
        return self.engine.state if self.seen_BV is None else [*self.engine.state, (self, "seen_BV")]

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        rows = [batch * (levels + 1) for levels in range(self.max_nodes + 1)]
        return [] if self.fused is None else [(self.fused.linears(), count) for count in rows]

    def start(self, context: Rows, capacity: int) -> None:
        batch, capacity = context.tokens_BJ.shape[0], capacity + self.max_nodes + 1
        if self.engine is None or (self.engine.batch, self.engine.capacity) != (batch, capacity):
            self.engine = Engine(self.model, batch, capacity, fused=self.fused)
        counts = context.count_B.tolist()
        tokens = [line[:count] for line, count in zip(context.tokens_BJ.tolist(), counts, strict=True)]
        logits_BV, _ = self.engine.prefill(tokens)
        self.seen_BV = context_seen(self.sampling, context.tokens_BJ, context.count_B, logits_BV.shape[1])

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        assert self.engine is not None
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        self.seen_BV = add_seen(self.seen_BV, roots_B[:, None])
        seen_BV = self.seen_BV
        for _ in range(self.max_nodes):
            tree = chain(torch.stack(tokens, 1)) if tokens else empty(len(roots_B), roots_B.device)
            logits_BV = self.engine.verify(roots_B, tree).logits_BMV[:, -1]
            if self.sampled:
                qs.append(probabilities(logits_BV, self.sampling, seen_BV))
                tokens.append(draw(qs[-1], generator))
            else:
                tokens.append(best(logits_BV, self.sampling, seen_BV))
            seen_BV = add_seen(seen_BV, tokens[-1][:, None])
        self.roots_B, self.tree = roots_B, chain(torch.stack(tokens, 1), q_BKV=torch.stack(qs, 1) if qs else None)
        # once more, for the KV of the last level
        self.step = self.engine.verify(roots_B, self.tree)
        return self.tree

    @torch.inference_mode()
    def commit(self, accepted: Rows) -> None:
        assert self.engine is not None
        level_K = torch.arange(self.max_nodes, device=accepted.count_B.device)
        path_BK = torch.where(level_K < accepted.count_B[:, None] - 1, level_K, -1)
        self.engine.commit(self.roots_B, self.tree, self.step, path_BK, accepted.count_B > 0)
        self.seen_BV = add_seen(self.seen_BV, accepted.tokens_BJ, accepted.count_B)
