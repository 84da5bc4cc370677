"""Anchors of a step: a uniform draw that depends on pack and seed alone, and what it leaves unchanged.

Shape legend: R rows, A anchors, K drafts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from reference.documents import Document, Ends
from reference.tiny import ends_of, feature_batch, random_document, random_ends, randomise, teacher_of

from headstart.heads.base import Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.families.block.anchors import draw_anchors, drawn_count
from headstart.heads.families.dflash.head import DFlashConfig
from headstart.heads.families.dspark.head import DSparkConfig
from headstart.train.captured import PackShape, tensors_of

WIDTH, VOCAB, K = 32, 97, 4
DIMS = HeadDims(
    hidden_size=WIDTH, vocab_size=VOCAB, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)
PATTERNS = ("..AAAAAAA..BBBB.", "...AAAAAAAAAA", "AA.", ".A", "..AAAAAAAAAAAAAAAAAAAA.")
CONFIGS = {
    "dflash": DFlashConfig(depth=K, layers=2, mask_token_id=5, anchor_share=0.3),
    "dspark": DSparkConfig(depth=K, layers=2, mask_token_id=5, anchor_share=0.3, markov_rank=6),
}


@pytest.fixture(scope="module")
def ends() -> Ends:
    return random_ends(VOCAB, WIDTH, 3)


def packed(ends: Ends, patterns: tuple[str, ...] = PATTERNS, pad_to: int = 0) -> FeatureBatch:
    documents: list[Document] = [random_document(p, VOCAB, WIDTH, 3, seed) for seed, p in enumerate(patterns)]
    return feature_batch(documents, ends, K, pad_to)


def head_of(family: str, ends: Ends, **changes: object):
    head = build_head(replace(CONFIGS[family], **changes), DIMS)
    randomise(head, 4)
    head.bind(ends_of(ends))
    return head


@pytest.mark.parametrize("family", CONFIGS)
def test_feature_dropout_acts_on_the_features_and_in_training_alone(ends: Ends, family: str) -> None:
    share, batch = 0.4, packed(ends)
    plain, dropping = (head_of(family, ends, feature_dropout=p) for p in (0.0, share))
    assert batch.streams_RkD is not None
    torch.manual_seed(3)
    dropped_RF = torch.nn.functional.dropout(batch.streams_RkD.flatten(1), share)
    expected = plain.slots(replace(batch, streams_RkD=dropped_RF.view_as(batch.streams_RkD)))
    torch.manual_seed(3)
    torch.testing.assert_close(dropping.train().slots(batch), expected)
    assert not torch.equal(expected, plain.slots(batch))
    assert torch.equal(dropping.eval().slots(batch), plain.slots(batch))


@pytest.mark.parametrize("found", [-0.1, 1.0])
def test_a_feature_dropout_that_is_no_share_is_refused(found: float) -> None:
    with pytest.raises(ConfigError, match=f"head.feature_dropout: found {found}"):
        build_head(replace(CONFIGS["dflash"], feature_dropout=found), DIMS)


def anchors_of(batch: FeatureBatch) -> list[tuple[int, int]]:
    """(row, depths) of every real anchor, in the order of the rows."""
    pairs = zip(batch.anchors.row_A.tolist(), batch.anchors.depths_A.tolist(), strict=True)
    return sorted(pair for pair in pairs if pair[1] > 0)


def test_a_draw_is_uniform_without_replacement(ends: Ends) -> None:
    batch, all_of_them = packed(ends), anchors_of(packed(ends))
    count = drawn_count(len(all_of_them), sum(batch.doc_lengths), 0.2)
    assert count == 12 < len(all_of_them)
    found, times = Counter(), 1500
    for seed in range(times):
        drawn = anchors_of(draw_anchors(batch, 0.2, seed))
        assert len(drawn) == len(set(drawn)) == count and set(drawn) <= set(all_of_them)
        found.update(drawn)
    share = count / len(all_of_them)
    spread = 4.5 * (share * (1 - share) / times) ** 0.5  # one in 150,000 draws of a right one lies beyond
    assert all(abs(found[anchor] / times - share) < spread for anchor in all_of_them)


def test_a_draw_depends_on_pack_and_seed_alone(ends: Ends) -> None:
    batch = packed(ends)
    first = draw_anchors(batch, 0.2, 11)
    torch.manual_seed(99)  # the state of the rank's own generators says nothing
    assert anchors_of(draw_anchors(batch, 0.2, 11)) == anchors_of(first)
    assert anchors_of(draw_anchors(packed(ends, pad_to=100), 0.2, 11)) == anchors_of(first)  # nor does padding
    assert anchors_of(draw_anchors(batch, 0.2, 12)) != anchors_of(first)
    depths_A = first.anchors.depths_A
    assert depths_A.tolist() == sorted(depths_A.tolist(), reverse=True)  # the rows of every depth stay a prefix
    assert all(int((depths_A >= d).sum()) <= count for d, count in enumerate(first.anchors.count_K, start=1))


def test_the_targets_choices_are_found_after_a_draw(ends: Ends) -> None:
    batch = packed(ends)
    drawn = draw_anchors(batch, 0.2, 3)
    assert batch.teacher_argmax_A is not None and drawn.teacher_argmax_A is not None
    wanted = dict(zip((batch.anchors.row_A + 1).tolist(), batch.teacher_argmax_A.tolist(), strict=True))
    found = drawn.argmax_by_row().tolist()
    assert all(found[row] == wanted.get(row, 0) for row in range(len(found)))
    for row, depths in anchors_of(drawn):  # every row that a drawn anchor learns from
        assert all(row + d in wanted for d in range(1, depths + 1))


def sums(loss: Loss) -> torch.Tensor:
    return torch.cat((loss.sum_T, loss.count_T, loss.numerator_M, loss.denominator_M)).detach()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_drawn_sums_are_those_of_the_drawn_anchors_one_by_one(family: str, ends: Ends) -> None:
    """Blocks do not see each other, so the sums over a draw are those of its anchors by themselves."""
    head, batch = head_of(family, ends), packed(ends)
    drawn = draw_anchors(batch, 0.2, 5)
    total = torch.zeros(())
    for index in range(len(batch.anchors)):
        row = int(batch.anchors.row_A[index])
        if (row, int(batch.anchors.depths_A[index])) in anchors_of(drawn):
            total = total + sums(head.loss(batch.drawn(torch.tensor([index])), teacher_of(ends)))
    torch.testing.assert_close(sums(head.loss(drawn, teacher_of(ends))), total, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_fixed_shapes_change_nothing(family: str, ends: Ends) -> None:
    """Captured steps pad rows, anchors and documents: same sums, same gradients."""
    head = head_of(family, ends)
    drawn = draw_anchors(packed(ends), 0.2, 5)
    padded = drawn.padded(100, 24, 8)
    assert len(padded.anchors) == 24 and len(drawn.anchors) == 12
    found = []
    for batch in (drawn, padded):
        head.zero_grad()
        loss = head.loss(batch, teacher_of(ends))
        assert torch.equal(loss.count_T, head.loss_counts(batch))
        loss.sum_T.sum().backward()
        gradients = [p.grad.flatten() for p in head.parameters() if p.grad is not None]
        found.append((sums(loss), torch.cat(gradients)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=2e-5)
    assert found[0][1].abs().sum() > 0


def test_packs_of_any_kind_have_the_same_tensors(ends: Ends) -> None:
    """A graph is captured with one pack and replayed with others, of which some keep all their anchors."""
    few = packed(ends, ("...............AAA", "............................AA"))
    drawn, kept = draw_anchors(packed(ends), 0.2, 5), draw_anchors(few, 0.2, 5)
    assert anchors_of(kept) == anchors_of(few) and len(anchors_of(few)) == 3
    assert len(tensors_of(drawn)) == len(tensors_of(kept))
    shape = PackShape(128, 24, 8)
    for mine, theirs in zip(tensors_of(shape.pad(drawn)), tensors_of(shape.pad(kept)), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
    # everything, for a share of 1: nothing is drawn, and the walked acceptance is measured in training too
    assert draw_anchors(few, 1.0, 5) is few and head_of("dflash", ends, anchor_share=1.0).choose_rows(few, 1) is few


@pytest.mark.parametrize("family", CONFIGS)
def test_a_pack_without_anchors_trains_nothing(family: str, ends: Ends) -> None:
    head = head_of(family, ends)
    empty = head.choose_rows(packed(ends, ("......", ".A", "....")), 1)
    assert len(empty.anchors) == 0
    for batch in (empty, empty.padded(128, 24, 4)):
        loss = head.loss(batch, teacher_of(ends))
        assert not loss.sum_T.any() and not loss.count_T.any() and not head.loss_counts(batch).any()
        assert not loss.numerator_M.any() and not loss.denominator_M.any()
        assert loss.run_A is None or not loss.run_A.any()


@pytest.mark.parametrize("family", CONFIGS)
def test_documents_shorter_than_a_block(family: str, ends: Ends) -> None:
    """Only labels of the document count: drafts beyond its end leave every sum."""
    head = head_of(family, ends, depth_decay=1.0)
    batch = packed(ends, ("AAA", "AAA", "BB"))  # all of it is supervised, as under data.supervise=all
    assert anchors_of(batch) == [(0, 1), (3, 1)]
    assert head.loss_counts(batch)[0] == 2 and int(head.covered_rows(batch)) == 2
    first = sums(head.loss(batch.drawn(torch.tensor([0])), teacher_of(ends)))
    alone = sums(head.loss(packed(ends, ("AAA",)), teacher_of(ends)))
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-5)


def test_few_shapes_are_captured(ends: Ends) -> None:
    """Rounded as captured steps round them, the anchors of packs of any mix take few sizes."""
    rows, share, sizes = 16384, 0.125, set()
    for supervised in range(0, rows + 1, 97):
        for filled in (rows, int(rows * 0.97)):
            count = drawn_count(min(supervised, filled), filled, share)
            sizes.add(max(1024, -(-count // 1024) * 1024))
    assert sizes == {1024, 2048}


def test_plans_count_what_a_step_trains(ends: Ends) -> None:
    head = head_of("dspark", ends, anchor_share=0.25)
    assert head.chosen_anchors(8192, 8000) == 2048 and head.chosen_anchors(8192, 100) == 100
