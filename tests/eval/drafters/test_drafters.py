"""What drafters draft: EAGLE-2 trees against a naive search without any cache, Medusa's ranks, n-gram lookup."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, Trained
from torch import Tensor

from headstart.eval.config import DRAFTER_SETTINGS, EvalConfig, TreeConfig
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling, penalise, probabilities
from headstart.eval.drafters import DRAFTERS, build_drafter, cached
from headstart.eval.drafters.autoregressive import AutoregressiveDrafter
from headstart.eval.drafters.medusa import MedusaDrafter
from headstart.eval.drafters.ngram import NgramDrafter, NgramIndex
from headstart.eval.measuring.teacher_forced import draft_everywhere
from headstart.eval.tree import Tree
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.heads.families.autoregressive import AutoregressiveHead
from headstart.heads.targets.target import Target


@torch.no_grad()
def log_probs_after(
    target: Target, head: AutoregressiveHead, tokens: list[int], path: list[int], sampling: Sampling
) -> Tensor:
    """log q over the draft vocabulary after root tokens[-1] and a drafted path; every row recomputed, no cache.

    Every token before it is penalised, the path's as well, as the target's distribution is.
    """
    context = len(tokens) - 1
    hidden, streams = target.forward_documents(torch.tensor([tokens[:-1]]), head.spec.layer_ids)
    stacked = torch.stack([streams[k] for k in head.spec.layer_ids], 2) if streams else None
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q_BhNd: Tensor, k_BgNd: Tensor, v_BgNd: Tensor) -> Tensor:
        keys.append(k_BgNd.repeat_interleave(head.dims.num_heads // head.dims.num_kv_heads, 1))
        values.append(v_BgNd.repeat_interleave(head.dims.num_heads // head.dims.num_kv_heads, 1))
        k, v = torch.cat(keys, 2), torch.cat(values, 2)
        scores = q_BhNd @ k.transpose(2, 3) / head.dims.head_dim**0.5
        rows = q_BhNd.shape[2]
        future = torch.ones(rows, k.shape[2], dtype=torch.bool).triu(k.shape[2] - rows + 1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v

    g, logits = head.step(torch.tensor([tokens[1:]]), head.fuse(hidden, stacked), torch.arange(context)[None], attend)
    g = g[:, -1:]
    for n, token in enumerate(path):
        g, logits = head.step(torch.tensor([[token]]), g, torch.tensor([[context + n]]), attend)
    seen_V = torch.zeros(head.dims.vocab_size, dtype=torch.bool)
    seen_V[[*tokens, *path]] = True
    seen_U = seen_V if head.draft_ids_U is None else seen_V[head.draft_ids_U]
    return penalise(logits[0, -1], sampling, seen_U).log_softmax(-1)


def naive_tree(
    target: Target, head: AutoregressiveHead, tokens: list[int], k: int, depth: int, nodes: int, sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """EAGLE-2 by its definition: path → cumulative log-probability of the nodes kept."""
    stored: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path in frontier:
            top = log_probs_after(target, head, tokens, list(path), sampling).topk(k)
            for value, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                token = int(head.target_ids(torch.tensor(index)))
                level[(*path, token)] = value + stored.get(path, 0.0)
        stored |= level
        frontier = sorted(level, key=lambda path: -level[path])[:k]
    kept = sorted(stored, key=lambda path: (-stored[path], len(path)))[:nodes]
    return {path: stored[path] for path in kept}


@pytest.mark.parametrize("penalty", [1.0, 1.6])
@pytest.mark.parametrize("family", ["eagle3", "eagle"])
def test_dynamic_tree_is_the_naive_one(
    target: Target, family: str, penalty: float, request: pytest.FixtureRequest
) -> None:
    """Two cycles, so that drafted rows are thrown away and accepted ones recomputed; ragged contexts."""
    trained: Trained = request.getfixturevalue(family)
    head = trained.head
    assert isinstance(head, AutoregressiveHead)
    k, depth, total, sampling = 3, 3, 9, Sampling(repetition_penalty=penalty)
    drafter = AutoregressiveDrafter(head, TreeConfig("dynamic", depth, k, total), sampling)
    contexts = [list(context) for context in CONTEXTS]
    engine = Engine(target.model, len(contexts), 48, bucket=8, prefill_chunk=4)
    logits_BV, rows = engine.prefill(contexts, drafter.spec)
    drafter.start(rows, engine.capacity)
    roots_B = logits_BV.argmax(-1)
    for _ in range(2):
        tree = drafter.propose(roots_B)
        for row, context in enumerate(contexts):
            expected = naive_tree(target, head, [*context, int(roots_B[row])], k, depth, total - 1, sampling)
            paths = []
            for n in range(tree.nodes):
                path, node = [], n
                while node >= 0:
                    path.insert(0, int(tree.tokens_BN[row, node]))
                    node = int(tree.parent_BN[row, node])
                assert len(path) == tree.depth_BN[row, n]
                paths.append(tuple(path))
            assert set(paths) == set(expected)
        step = engine.verify(roots_B, tree, drafter.spec)
        # accept a different branch in each row, whatever the target says
        first, second = tree.depth_BN == 1, tree.depth_BN == 2
        path_BK = torch.full((len(contexts), depth), -1)
        child = int(torch.nonzero(second[0])[0, 0])
        path_BK[0, :2] = torch.tensor([int(tree.parent_BN[0, child]), child])
        path_BK[1, 0] = int(torch.nonzero(first[1])[-1, 0])
        accepted = engine.commit(roots_B, tree, step, path_BK, torch.tensor([True] * len(contexts)))
        for row, context in enumerate(contexts):
            context += accepted.tokens_BJ[row, : accepted.count_B[row]].tolist()
        drafter.commit(accepted)
        roots_B = torch.tensor([8, 9, 10])


@torch.no_grad()
def medusa_draft(
    target: Target, head: Any, config: TreeConfig, sampling: Sampling
) -> tuple[MedusaDrafter, int, Tree, Tensor]:
    """A drafter, the root after the context 5 6 7, what it drafts there, and the head's logits [K, V]."""
    drafter, engine = MedusaDrafter(head, config, sampling), Engine(target.model, 1, 32)
    logits_BV, rows = engine.prefill([[5, 6, 7]], drafter.spec)
    drafter.start(rows, 32)
    root_B = logits_BV.argmax(-1)
    tree = drafter.propose(root_B, torch.Generator().manual_seed(0))
    return drafter, int(root_B), tree, head.draft_logits(rows.hidden_BJD[:, -1])[0]


def test_medusa_takes_ranks_of_each_head(target: Target, medusa: Trained) -> None:
    head: Any = medusa.head
    drafter, _, tree, logits_KV = medusa_draft(target, head, TreeConfig("static", depth=3, total_tokens=30), Sampling())
    assert tree.nodes == drafter.max_nodes == 29
    ranked = logits_KV.argsort(-1, descending=True)
    shape = drafter.shape
    for n in range(tree.nodes):
        assert tree.tokens_BN[0, n] == ranked[shape.depth_N[n] - 1, shape.rank_N[n]]
    assert drafter.name == "medusa"
    deeper = MedusaDrafter(head, TreeConfig("static", paths=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]), Sampling())
    assert deeper.max_nodes == 3  # the head has three depths


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_medusa_chain_counts_what_it_drafted(target: Target, medusa: Trained, temperature: float) -> None:
    """A penalty holds for drafted tokens as for the context: each level's q is of what stands before it."""
    sampling = Sampling(temperature, repetition_penalty=1.7)
    _, root, tree, logits_KV = medusa_draft(target, medusa.head, TreeConfig("chain", depth=3), sampling)
    seen_V = torch.zeros(logits_KV.shape[1], dtype=torch.bool)
    seen_V[[5, 6, 7, root]] = True
    for n in range(3):
        if temperature:
            torch.testing.assert_close(tree.q_BNV[0, n], probabilities(logits_KV[n], sampling, seen_V))
        else:
            assert tree.tokens_BN[0, n] == penalise(logits_KV[n], sampling, seen_V).argmax()
        seen_V[tree.tokens_BN[0, n]] = True


def test_ngram_prefers_the_longest_then_the_latest_match() -> None:
    index = NgramIndex(1, 3)
    for token in [1, 2, 3, 9, 8, 2, 3, 7, 7, 5, 3, 6, 1, 2, 3]:
        index.append(token)
    # 1 2 3 was followed by 9 8 2; the shorter 2 3 by 7, the latest single 3 by 6
    assert index.continuation(3) == [9, 8, 2]
    index.append(4)
    assert index.continuation(3) == []
    index.append(3)
    # nothing longer than one token matches: after the latest 3 that has a successor came 4
    assert index.continuation(2) == [4, 3]


def test_ngram_rows_may_draft_nothing() -> None:
    drafter = NgramDrafter(2, 1, 2)
    context = Rows(torch.tensor([[1, 2, 1, 0], [3, 4, 5, 6]]), torch.tensor([3, 4]))
    drafter.start(context, 99)
    tree = drafter.propose(torch.tensor([2, 7]))
    assert tree.tokens_BN.tolist() == [[1, 2], [0, 0]]
    assert tree.valid_BN.tolist() == [[True, True], [False, False]]
    # the root is not appended twice
    drafter.commit(Rows(torch.tensor([[2, 1, 0], [7, 0, 0]]), torch.tensor([2, 1])))
    assert drafter.rows[0].tokens == [1, 2, 1, 2, 1]
    assert drafter.rows[1].tokens == [3, 4, 5, 6, 7]


def test_what_drafts(target: Target) -> None:
    """Every family, and every method that a recipe can name; another family is told what there is."""
    assert set(DRAFTERS) == {*FAMILIES, *DRAFTER_SETTINGS} - {"auto", "none"}
    other: Any = SimpleNamespace(family="other")
    assert build_drafter(other, EvalConfig(drafter="none")) is build_drafter(None, EvalConfig()) is None
    assert isinstance(build_drafter(other, EvalConfig(drafter="ngram")), NgramDrafter)
    with pytest.raises(ConfigError, match="no drafter for a head of the family other, expected one of .*'eagle'"):
        build_drafter(other, EvalConfig())
    with pytest.raises(ConfigError, match="found a head of the family other, expected one of .*'eagle'"):
        draft_everywhere(target, other, [([5], [6, 7])], 2)


def test_making_ready_is_timed_without_what_was_under_way(
    target: Target, eagle3: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts' forwards, 5 s here, still run when the draft's buffers are made and its kernels compiled, 2 s."""
    clock, waits = [0.0], [5.0, 0.0]

    def pass_by(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(cached, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(cached, "synchronize", lambda device: pass_by(waits.pop(0)))
    monkeypatch.setattr(cached, "compile_ahead", lambda run: pass_by(2.0))
    drafter = AutoregressiveDrafter(eagle3.head, TreeConfig(depth=2), Sampling())
    for batch, prepared in ((1, 2.0), (1, 2.0), (2, 4.0)):
        engine = Engine(target.model, batch, 64)
        drafter.start(engine.prefill(CONTEXTS[:batch], drafter.spec)[1], 64)
        assert drafter.prepare_s == prepared
    assert clock == [9.0] and not waits
