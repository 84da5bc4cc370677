"""P-EAGLE's drafter: one pass per cycle, whose logits are those of training and whose distributions are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, DRAFTING_HEADS, Trained, train_briefly
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.sampling import Sampling, penalise, probabilities
from headstart.eval.drafters.layer import START_CHUNK
from headstart.eval.drafters.parallel import ParallelDrafter
from headstart.eval.kernels.linear import Linear
from headstart.eval.measuring.teacher_forced import teacher_forced_tau
from headstart.heads.errors import ConfigError
from headstart.heads.families import PEagleConfig, build_head
from headstart.heads.targets.target import Target

Heads = Callable[[str], Trained]
NAMES = [name for name, family in DRAFTING_HEADS.items() if family == "peagle"]
each_head = pytest.mark.parametrize("name", NAMES)
DEPTH = 4


class Watched(ParallelDrafter):
    """Keeps the logits of every cycle, and counts passes."""

    logits_BKU: Tensor
    passes = 0

    def _pass(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.passes += 1
        found = super()._pass(*args, **named)
        self.logits_BKU = found[1]
        return found


def started(
    target: Target, head: Any, tree: TreeConfig, sampling: Sampling, contexts: list[list[int]], slots: int = 64
) -> Watched:
    drafter = Watched(head, tree, sampling)
    engine = Engine(target.model, len(contexts), slots, bucket=8, prefill_chunk=4)
    _, rows = engine.prefill(contexts, drafter.spec)
    drafter.start(rows, engine.capacity)
    return drafter


@torch.no_grad()
@each_head
def test_training_logits_are_the_drafters_token_by_token(target: Target, trained: Heads, name: str) -> None:
    """In float32: every anchor of the pack at every depth, against a draft behind the same context."""
    head, batch = trained(name).head, trained(name).batch
    anchors = batch.anchors
    output_MH = head.rollout(batch)  # type: ignore[operator]
    logits = [head.lm_head(part) for part in output_MH.split(anchors.count_K)]  # type: ignore[operator]
    starts = torch.tensor([0, *batch.doc_lengths]).cumsum(0)
    compared = 0
    for a, row in list(enumerate(anchors.row_A.tolist()))[::3]:
        first = int(starts[starts <= row].max())
        context = batch.tokens_R[first : row + 1].tolist()
        drafter = started(target, head, TreeConfig(depth=DEPTH), Sampling(), [context])
        tree = drafter.propose(batch.tokens_R[row + 1 : row + 2])
        for d in range(int(anchors.depths_A[a])):
            expected = logits[d][a]
            torch.testing.assert_close(drafter.logits_BKU[0, d], expected, rtol=1e-3, atol=1e-3)
            assert int(tree.tokens_BN[0, d]) == int(head.target_ids(expected.argmax()))  # type: ignore[operator]
            compared += 1
    assert compared > 60


@torch.no_grad()
@each_head
def test_a_cycle_is_one_pass_that_leaves_no_masked_place_behind(target: Target, trained: Heads, name: str) -> None:
    """Ragged contexts; other tokens are committed than were drafted. The next drafts are those of a fresh start."""
    head = trained(name).head
    contexts = [list(context) for context in CONTEXTS]
    tree = TreeConfig(depth=DEPTH)
    drafter = Watched(head, tree, Sampling())
    engine = Engine(target.model, len(contexts), 64, bucket=8, prefill_chunk=4)
    logits_BV, rows = engine.prefill(contexts, drafter.spec)
    drafter.start(rows, engine.capacity)
    roots_B = logits_BV.argmax(-1)
    for kept in ([2, 0, 4], [1, 3, 0], [0, 0, 0]):
        before = drafter.passes
        drafted = drafter.propose(roots_B)
        assert drafter.passes == before + 1 and drafted.linear
        fresh = started(target, head, tree, Sampling(), contexts)
        assert torch.equal(drafted.tokens_BN, fresh.propose(roots_B).tokens_BN)
        torch.testing.assert_close(drafter.logits_BKU, fresh.logits_BKU, rtol=1e-3, atol=1e-3)
        step = engine.verify(roots_B, drafted, drafter.spec)
        path_BK = torch.arange(DEPTH).expand(3, -1)
        path_BK = torch.where(path_BK < torch.tensor(kept)[:, None], path_BK, -1)
        accepted = engine.commit(roots_B, drafted, step, path_BK, torch.tensor([True] * 3))
        for row, context in enumerate(contexts):
            context += accepted.tokens_BJ[row, : accepted.count_B[row]].tolist()
        drafter.commit(accepted)
        roots_B = torch.tensor([8, 9, 10])


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.7}])
def test_q_is_what_each_token_is_drawn_from(target: Target, trained: Heads, settings: dict[str, Any]) -> None:
    """Given what stands before it: with a penalty, the drafts too. Frequencies follow q, and nothing else is drawn."""
    head: Any = trained("peagle, two layers, q/k norms").head
    sampling, rows = Sampling(temperature=1.0, **settings), 3000
    context, root = CONTEXTS[0], 12
    drafter = started(target, head, TreeConfig(depth=3, sample=True), sampling, [context] * rows)
    tree = drafter.propose(torch.full((rows,), root), torch.Generator().manual_seed(0))
    assert tree.q_BNV is not None and tree.q_BNV.shape == (rows, 3, head.dims.vocab_size)
    seen_BV = torch.zeros((rows, head.dims.vocab_size), dtype=torch.bool)
    seen_BV[:, [*context, root]] = True
    for d in range(3):
        seen_BU = seen_BV[:, head.draft_ids_U] if sampling.penalises else None
        expected_BU = probabilities(drafter.logits_BKU[:, d], sampling, seen_BU)
        expected_BV = torch.zeros_like(tree.q_BNV[:, d]).index_copy_(1, head.draft_ids_U, expected_BU)
        torch.testing.assert_close(tree.q_BNV[:, d], expected_BV)
        drawn_B = tree.tokens_BN[:, d]
        assert bool((expected_BV.gather(1, drawn_B[:, None]) > 0).all())
        share_V = torch.bincount(drawn_B, minlength=head.dims.vocab_size) / rows
        # each token's share has a deviation of at most 0.5 / sqrt(rows)
        assert float((share_V - expected_BV.mean(0)).abs().max()) < 5 * 0.5 / rows**0.5
        seen_BV = seen_BV.scatter(1, drawn_B[:, None], True)
    # depths are drawn independently of each other
    assert len({tuple(path) for path in tree.tokens_BN.tolist()}) > 20


@torch.no_grad()
def test_a_greedy_chain_counts_what_it_drafted(target: Target, trained: Heads) -> None:
    head: Any = trained("peagle").head
    sampling = Sampling(repetition_penalty=1.7)
    drafter = started(target, head, TreeConfig(depth=DEPTH), sampling, [CONTEXTS[0]])
    tree = drafter.propose(torch.tensor([12]))
    seen_V = torch.zeros(head.dims.vocab_size, dtype=torch.bool)
    seen_V[[*CONTEXTS[0], 12]] = True
    for d in range(DEPTH):
        chosen = penalise(drafter.logits_BKU[0, d], sampling, seen_V[head.draft_ids_U]).argmax()
        assert int(tree.tokens_BN[0, d]) == int(head.target_ids(chosen))
        seen_V[tree.tokens_BN[0, d]] = True


@torch.no_grad()
def test_a_context_that_holds_the_mask_token_reads_its_trained_embedding(target: Target, trained: Heads) -> None:
    """As an engine does, which has one table; on the kernels' path and on the head's own."""
    head: Any = trained("peagle").head
    context = [5, head.mask_token, 7, head.mask_token, 9]
    drafter = started(target, head, TreeConfig(depth=DEPTH), Sampling(), [context])
    drafter.propose(torch.tensor([12]))
    hidden, streams = target.forward_documents(torch.tensor([context]), head.spec.layer_ids)
    stacked = torch.stack([streams[k] for k in head.spec.layer_ids], 2)
    tokens = torch.tensor([[*context[1:], 12, *[head.mask_token] * (DEPTH - 1)]])
    g = torch.cat((head.fuse(hidden, stacked), head.mask_feature().expand(1, DEPTH - 1, -1)), 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    _, logits = head.step(tokens, g, torch.arange(tokens.shape[1])[None], attend)
    torch.testing.assert_close(drafter.logits_BKU[0], logits[0, len(context) - 1 :], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_batch_reads_contexts_of_several_passes_as_each_row_alone(target: Target, trained: Heads) -> None:
    """Passes over a part of a batch's columns: their tokens do not lie one behind the other in memory."""
    head: Any = trained("peagle").head
    generator = torch.Generator().manual_seed(0)
    lengths = (START_CHUNK + 40, START_CHUNK + 7)
    contexts = [torch.randint(5, head.dims.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    slots = START_CHUNK + 96
    batch = started(target, head, TreeConfig(depth=DEPTH), Sampling(), contexts, slots)
    tree = batch.propose(torch.tensor([12, 13]))
    for row, context in enumerate(contexts):
        alone = started(target, head, TreeConfig(depth=DEPTH), Sampling(), [context], slots)
        own = alone.propose(torch.tensor([12 + row]))
        assert own.tokens_BN[0].tolist() == tree.tokens_BN[row].tolist()
        torch.testing.assert_close(batch.logits_BKU[row], alone.logits_BKU[0], rtol=1e-4, atol=1e-4)


def test_a_head_without_a_mask_token_does_not_draft(target: Target) -> None:
    head = build_head(PEagleConfig(draft_vocab_size=0, feature_layers=[1, 2, 3]), target.dims)
    head.bind(target.ends)
    drafter = ParallelDrafter(head, TreeConfig(depth=2), Sampling())  # type: ignore[arg-type]
    engine = Engine(target.model, 1, 32)
    with pytest.raises(ConfigError, match="head.mask_token_id: found null"):
        drafter.start(engine.prefill([[5, 6, 7]], drafter.spec)[1], 32)


def test_products_are_those_of_a_cycle(target: Target, trained: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of rows whose fastest kernels are measured: committed rows with masked places, and drafts."""
    head: Any = trained("peagle, two layers, q/k norms").head
    drafter = started(target, head, TreeConfig(depth=DEPTH), Sampling(), CONTEXTS)
    assert {rows for _, rows in drafter.products(3)} == {3 * (5 + 3), 3 * 5, 3 * DEPTH}
    seen, product = {}, Linear.__call__

    def counted(linear: Linear, x_RK: Tensor, *more: Any) -> Tensor:
        seen[id(linear)] = len(x_RK)
        return product(linear, x_RK, *more)

    monkeypatch.setattr(Linear, "__call__", counted)
    drafter.propose(torch.tensor([8, 9, 10]))
    assert seen.pop(id(drafter.step.output)) == 3 * DEPTH
    assert set(seen.values()) == {3 * (5 + 3)}


def test_long_chains_are_learnt(target: Target, plain: list[Answer]) -> None:
    """In a hundred steps, even the seventh token of a pass is right at times: masked places know where they stand."""
    config = PEagleConfig(
        depth=7, draft_vocab_size=0, feature_layers=[1, 2, 3], layers=2, row_fraction=1.0, mask_token_id=60,
        depth_decay=1.0, intermediate_size=96,
    )  # fmt: skip
    trained = train_briefly(target, plain, "peagle", config)
    head, optimizer = trained.head, torch.optim.Adam(trained.head.parameters(), lr=5e-3)
    for _ in range(100):
        result = head.loss(trained.batch, target.teacher)
        (result.sum_T / result.count_T.clamp(min=1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    items = [(context, answer.tokens) for context, answer in zip(CONTEXTS, plain, strict=True)]
    found = teacher_forced_tau(target, head, items, 7)
    assert found.tau > 3.5 and found.per_position[6] > 0.2


