"""Medusa as a drafter: all depths from one feature, as a chain, a static tree (methods §1) or a tree over marginals."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling, add_seen, context_seen, penalise
from headstart.eval.drafters.independent import choose_each
from headstart.eval.drafters.sized import Sized
from headstart.eval.kernels.candidates import top_ids, top_log_p
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.marginals import drafted_marginals
from headstart.eval.tree import Tree, chain, drafted_shape
from headstart.heads.batch import FeatureSpec
from headstart.heads.families.medusa.head import MedusaHead
from headstart.heads.sampling import logit_of


class MedusaDrafter(Sized):
    """Keeps the feature of the last committed token and drafts the whole tree from it."""

    captures = True
    prepare_s = 0.0

    def __init__(self, head: MedusaHead, tree: TreeConfig, sampling: Sampling):
        self.head, self.tree, self.sampling = head, tree, sampling
        self.name = head.family
        self.says_confidence = False
        self.spec: FeatureSpec | None = head.spec
        self.depth = self.max_nodes = min(tree.depth, head.depth)
        self.shape = drafted_shape(tree, self.depth, head.dims.vocab_size)
        self.by_level = self.shape is None
        if self.shape is not None:
            self.max_nodes = len(self.shape.parent_N)
        self.marginals = drafted_marginals(tree, self.depth, head.dims.vocab_size)
        if self.marginals is not None:
            self.max_nodes = self.marginals.nodes

    @property
    def confidence_source(self) -> str:
        return "draft_probability"

    @property
    def state(self) -> list[tuple[object, str]]:
        return [(self, "hidden_BD")] if self.seen_BV is None else [(self, "hidden_BD"), (self, "seen_BV")]

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        return []

    def aside(self) -> MedusaDrafter:
        return copy.copy(self)

    def take_row(self, row: int, aside: Drafter, slots: int) -> None:
        return None

    @torch.inference_mode()
    def start(self, context: Rows, capacity: int) -> None:
        self.hidden_BD = context.last_features()
        if self.shape is not None:
            self.shape = self.shape.to(context.tokens_BJ.device)
        if self.marginals is not None:
            self.marginals = self.marginals.to(context.tokens_BJ.device)
        vocab = self.head.dims.vocab_size
        self.seen_BV = context_seen(self.sampling, context.tokens_BJ, context.count_B, vocab)

    @torch.inference_mode()
    def commit(self, accepted: Rows) -> None:
        new_B1 = (accepted.count_B > 0)[:, None]
        self.hidden_BD = torch.where(new_B1, accepted.last_features(), self.hidden_BD)
        self.seen_BV = add_seen(self.seen_BV, accepted.tokens_BJ, accepted.count_B)

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        drafted = self.drafted
        logits_BKV = self.head.draft_logits(self.hidden_BD, drafted if drafted < self.head.depth else None)[:, :drafted]
        self.seen_BV = add_seen(self.seen_BV, roots_B[:, None])
        if self.shape is None and self.marginals is None:
            return self.chain_of(logits_BKV, generator)
        # nodes of one depth and rank share a token, whatever their paths: only the context's tokens are penalised
        seen_B1V = None if self.seen_BV is None else self.seen_BV[:, None]
        logits_BKV = penalise(logits_BKV, self.sampling, seen_B1V)
        if self.marginals is not None:
            best = self.marginals.first(drafted)
            return best.tree(best.marginals(logits_BKV), None, self.nodes)
        assert self.shape is not None
        if not self.says_confidence:
            return self.shape.fill(top_ids(logits_BKV, self.shape.ranks))
        log_p_BKR, ids_BKR = top_log_p(logits_BKV, self.shape.ranks)
        return replace(self.shape.fill(ids_BKR), confidence_BN=logit_of(self.shape.of_nodes(log_p_BKR).exp()).float())

    def chain_of(self, logits_BKV: Tensor, generator: torch.Generator | None) -> Tree:
        """The chain of one token per depth that these logits [B, K, V] draft."""
        sampled = self.tree.sample and not self.sampling.greedy
        tokens_BK, q_BKV, confidence_BK = choose_each(
            logits_BKV, self.sampling, sampled, self.seen_BV, None, generator, self.says_confidence
        )
        return replace(chain(tokens_BK, q_BKV=q_BKV), confidence_BN=confidence_BK)
