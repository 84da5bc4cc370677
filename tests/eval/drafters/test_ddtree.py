"""Drafters of trees over marginals: the paper's tree of their own logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, HEAD_TREES, Trained
from reference.ddtree import ddtree
from torch import Tensor

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.sampling import Sampling, penalise
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.kernels.candidates import top_log_p
from headstart.eval.kernels.marginals import MarginalTree
from headstart.eval.tree import Tree, published_paths
from headstart.heads.targets.target import Target

Heads = Callable[[str], Trained]
NAMES = [name for name, kind in HEAD_TREES if kind == "ddtree"]
#: fewer than levels, which tells the axes of logits apart
TEXTS = CONTEXTS[:2]
each_head = pytest.mark.parametrize("name", NAMES)


def made(head: Any, tree: TreeConfig, **settings: Any) -> Drafter:
    drafter = build_drafter(head, EvalConfig(tree=tree, **settings))
    assert drafter is not None
    return drafter


def drafted(target: Target, drafter: Drafter) -> Tree:
    engine = Engine(target.model, len(TEXTS), 48, bucket=8, prefill_chunk=4)
    _, rows = engine.prefill(TEXTS, drafter.spec)
    drafter.start(rows, engine.capacity)
    return drafter.propose(torch.tensor([8, 9]))


@pytest.fixture
def logits_seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits that trees were made of."""
    seen: list[Tensor] = []
    original = MarginalTree.marginals

    def watched(self: MarginalTree, logits: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logits)
        return original(self, logits)

    monkeypatch.setattr(MarginalTree, "marginals", watched)
    return seen


def by_row(logits: Tensor) -> Tensor:
    """[B, K, U] of either order of the axes."""
    return logits if logits.shape[0] == len(TEXTS) else logits.transpose(0, 1)


def full_log_p(logits_BKU: Tensor) -> Tensor:
    """[B, K, U] by the id of the token."""
    values, ids = top_log_p(logits_BKU, logits_BKU.shape[-1])
    return torch.empty_like(values).scatter(-1, ids, values)


@torch.no_grad()
@pytest.mark.parametrize("nodes", [3, 19, 59])
@each_head
def test_the_tree_is_the_papers(
    target: Target, trained: Heads, name: str, nodes: int, logits_seen: list[Tensor]
) -> None:
    """Of a chain's logits: its first path is the chain's drafts. Draft vocabularies are mapped to the target's."""
    head: Any = trained(name).head
    depth = min(4, head.longest_chain or 4)
    tree = drafted(target, made(head, TreeConfig("ddtree", depth, total_tokens=nodes + 1)))
    line = drafted(target, made(head, TreeConfig("chain", depth))).tokens_BN
    (logits,) = logits_seen
    log_p_BKU = full_log_p(by_row(logits))
    ids = torch.arange(log_p_BKU.shape[-1]) if head.draft_ids_U is None else head.draft_ids_U
    assert torch.equal(ids[log_p_BKU.argmax(-1)][:, :depth], line[:, : log_p_BKU.shape[1]])
    assert tree.nodes == nodes and tree.levels == min(depth, nodes)
    for row in range(len(TEXTS)):
        paths: list[tuple[int, ...]] = []
        for parent, token in zip(tree.parent_BN[row].tolist(), tree.tokens_BN[row].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        expected = ddtree(log_p_BKU[row, :depth].numpy(), nodes)
        assert set(paths) == {tuple(ids[list(node.tokens)].tolist()) for node in expected}
        assert sorted(tree.score_BN[row].tolist()) == sorted(float(node.score) for node in expected)


@torch.no_grad()
@each_head
def test_what_the_head_expects_to_be_accepted(
    target: Target, trained: Heads, name: str, logits_seen: list[Tensor]
) -> None:
    """Σ p of the nodes: no tree of as many nodes has more, neither a chain nor the published tree."""
    head: Any = trained(name).head
    tree = drafted(target, made(head, TreeConfig("ddtree", 4, total_tokens=21)))
    log_p_BKR = top_log_p(by_row(logits_seen[0]), 10)[0]
    depth = log_p_BKR.shape[1]
    assert tree.score_BN is not None
    for others in (
        [(0,) * level for level in range(1, depth + 1)],
        [path for path in published_paths() if len(path) <= depth][:20],
    ):
        p_B = sum(torch.stack([log_p_BKR[:, d, rank] for d, rank in enumerate(path)]).sum(0).exp() for path in others)
        assert (tree.score_BN.exp().sum(1) >= p_B - 1e-5).all()


@torch.no_grad()
@each_head
def test_a_repetition_penalty_counts_the_context(
    target: Target, trained: Heads, name: str, logits_seen: list[Tensor]
) -> None:
    head: Any = trained(name).head
    tree = TreeConfig("ddtree", 3, total_tokens=10)
    for penalty in (1.0, 1.6):
        drafted(target, made(head, tree, repetition_penalty=penalty))
    plain, penalised = map(by_row, logits_seen)
    seen_BV = torch.zeros(len(TEXTS), target.dims.vocab_size, dtype=torch.bool)
    for row, context in enumerate(TEXTS):
        seen_BV[row, [*context, 8 + row]] = True
    seen_BU = seen_BV if head.draft_ids_U is None else seen_BV[:, head.draft_ids_U]
    assert torch.equal(penalised, penalise(plain, Sampling(repetition_penalty=1.6), seen_BU[:, None]))
    assert not torch.equal(penalised, plain)
