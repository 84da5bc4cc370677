"""The gradient belongs to the documents: padding, packing and splitting do not change it (methods §0)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.documents import Document, Ends
from reference.tiny import (
    assert_near,
    double_document,
    double_ends,
    ends_of,
    feature_batch,
    gradients,
    prefixes,
    random_document,
    random_ends,
    randomise,
    teacher_of,
)
from torch import Tensor

from headstart.heads.base import Head, HeadConfig
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import Eagle3Config, EagleConfig, MedusaConfig, build_head

VOCAB, DRAFT = 97, 40
DIMS = HeadDims(32, VOCAB, 8, 4, 2, 8, 48, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
CONFIGS: dict[str, HeadConfig] = {
    "medusa kl": MedusaConfig(depth=4, lm_head="own", loss="kl"),
    "medusa ce, low rank": MedusaConfig(depth=4, lm_head="lowrank", rank=4, loss="ce"),
    "eagle": EagleConfig(feature_noise=0.0),
    "eagle3": Eagle3Config(depth=4, draft_vocab_size=DRAFT, feature_layers=[1, 3, 5]),
    "eagle3, own width": Eagle3Config(depth=4, draft_vocab_size=VOCAB, feature_layers=[1, 3, 5], hidden_size=24),
}
PATTERNS = ["..AAAAAAAA.B..CCC", ".", "AAAA", "...AABBBBB", ".....", ".A", "....AA", "." + "A" * 20]
#: float64 modules whose float32 rope angles are the same in every layout: rounding of differently ordered sums
TOLERANCE = 1e-10


def build(name: str) -> tuple[Head, Ends, list[Document]]:
    ends = double_ends(random_ends(VOCAB, 32, 50))
    head = build_head(CONFIGS[name], DIMS)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))[:DRAFT].sort().values
    head.initialise(ends_of(ends), ids)
    randomise(head, 1)
    documents = [double_document(random_document(p, VOCAB, 32, 3, i)) for i, p in enumerate(PATTERNS)]
    return head.double(), ends, documents


def normalised(head: Head, teacher: Teacher, packs: list[FeatureBatch]) -> Tensor:
    """L = Σ_d λ_d · S_d / N_d with N_d over all packs of the window, as the training loop scales it."""
    count_T = sum(head.loss_counts(pack) for pack in packs)
    scale_T = head.term_weights() / count_T.clamp(min=1)
    return sum((head.loss(pack, teacher, scale_T).sum_T * scale_T).sum() for pack in packs)


def check_same(name: str, layout: Callable[[Head, Ends, list[Document]], list[FeatureBatch]]) -> None:
    head, ends, documents = build(name)
    teacher = teacher_of(ends)
    plain = normalised(head, teacher, [feature_batch(documents, ends, head.depth)])
    expected = gradients(head, plain)
    other = normalised(head, teacher, layout(head, ends, documents))
    found = gradients(head, other)
    assert_near(other, plain, "loss", TOLERANCE)
    for key, gradient in expected.items():
        assert gradient.abs().max() > 0, f"{key} gets no gradient: the test would prove nothing"
        assert_near(found[key], gradient, f"gradient of {key}", TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pad_to", [67, 100])
def test_padding_changes_nothing(name: str, pad_to: int):
    check_same(name, lambda head, ends, docs: [feature_batch(docs, ends, head.depth, pad_to)])


@pytest.mark.parametrize("name", CONFIGS)
def test_order_in_the_pack_changes_nothing(name: str):
    check_same(name, lambda head, ends, docs: [feature_batch(docs[::-1], ends, head.depth, 80)])


@pytest.mark.parametrize("name", CONFIGS)
def test_splitting_into_packs_changes_nothing(name: str):
    def layout(head: Head, ends: Ends, docs: list[Document]) -> list[FeatureBatch]:
        pieces = ([docs[7]], docs[:2], [docs[4]], [docs[2], docs[6], docs[3], docs[5]])
        return [feature_batch(piece, ends, head.depth, 40) for piece in pieces]

    check_same(name, layout)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spare", [0, 23])
def test_fixed_shapes_change_nothing(name: str, spare: int):
    """Without a row to spare, padding anchors sit at the last row of the last document."""

    def layout(head: Head, ends: Ends, docs: list[Document]) -> list[FeatureBatch]:
        rows = sum(len(doc.tokens) for doc in docs) + spare
        return [feature_batch(docs, ends, head.depth).padded(rows=rows, anchors=70, documents=12)]

    check_same(name, layout)


@pytest.mark.parametrize("name", CONFIGS)
def test_metrics_do_not_depend_on_the_layout(name: str):
    head, ends, documents = build(name)
    teacher = teacher_of(ends)
    whole = head.loss(feature_batch(documents, ends, head.depth, 90), teacher)
    fixed = head.loss(feature_batch(documents, ends, head.depth).padded(90, 70, 12), teacher)
    pieces = [head.loss(feature_batch([d], ends, head.depth), teacher) for d in documents]
    for field in ("count_T", "numerator_M", "denominator_M"):
        expected = getattr(whole, field).tolist()
        assert sum(getattr(piece, field) for piece in pieces).tolist() == expected, field
        assert getattr(fixed, field).tolist() == expected, field
    expected = prefixes(whole)
    assert [sum(x) for x in zip(*map(prefixes, pieces), strict=True)] == expected == prefixes(fixed)


@pytest.mark.parametrize("name", CONFIGS)
def test_changing_the_padding_or_a_neighbour_does_not_reach_a_document(name: str):
    """Gradient of one document's loss when the rest of the pack has no answers, whatever the rest says."""
    head, ends, documents = build(name)
    teacher = teacher_of(ends)
    answer = documents[0]
    expected = gradients(head, head.loss(feature_batch([answer], ends, head.depth), teacher).sum_T.sum())
    for seed in (100, 200):
        before, after = (double_document(random_document("." * 9, VOCAB, 32, 3, seed + i)) for i in (0, 1))
        batch = feature_batch([before, answer, after], ends, head.depth, 60, noise_seed=seed)
        found = gradients(head, head.loss(batch, teacher).sum_T.sum())
        for key, gradient in expected.items():
            assert_near(found[key], gradient, f"gradient of {key}", TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_unsupervised_tail_of_a_document_does_not_matter(name: str):
    """Nothing is trained on what follows a turn's end: other tokens there, same gradient."""
    head, ends, _ = build(name)
    teacher = teacher_of(ends)
    long = double_document(random_document("..AAAAA....", VOCAB, 32, 3, 5))
    other = Document(
        long.tokens[:7] + [3, 1, 4, 1],
        long.turns,
        torch.cat((long.hidden_TD[:7], -long.hidden_TD[7:])),
        long.streams_TkD,
    )
    first, second = (
        gradients(head, head.loss(feature_batch([d], ends, head.depth), teacher).sum_T.sum()) for d in (long, other)
    )
    for key, gradient in first.items():
        assert torch.equal(gradient, second[key]), key


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("patterns", [["....", "."], [".A", "AA"]])
def test_pack_without_positions_gives_zero_and_no_nan(name: str, patterns: list[str]):
    head, ends, _ = build(name)
    documents = [double_document(random_document(p, VOCAB, 32, 3, i)) for i, p in enumerate(patterns)]
    for batch in (
        feature_batch(documents, ends, head.depth, 12),
        feature_batch(documents, ends, head.depth).padded(12, 5, 4),
    ):
        loss = head.loss(batch, teacher_of(ends))
        for field in ("sum_T", "count_T", "numerator_M", "denominator_M"):
            assert not getattr(loss, field).any(), field
        assert loss.sum_T.shape == loss.count_T.shape == (len(head.terms),)
        assert not loss.run_A.any()
        assert all(not g.any() for g in gradients(head, loss.sum_T.sum()).values())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_target_gets_no_gradient(name: str):
    head, ends, documents = build(name)
    teacher = teacher_of(ends)
    for tensor in (ends.lm_head_VD, ends.embed_VD):
        tensor.requires_grad_(True)
    head.bind(TargetEnds(ends.embed_VD, teacher))
    try:
        head.loss(feature_batch(documents, ends, head.depth), teacher).sum_T.sum().backward()
        assert ends.embed_VD.grad is None or not ends.embed_VD.grad.any()
    finally:
        for tensor in (ends.lm_head_VD, ends.embed_VD):
            tensor.requires_grad_(False)
