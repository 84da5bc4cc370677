"""What every head family promises: the loss of its naive twin, and a gradient that belongs to the documents alone.

It runs over `FAMILIES` and names none; `reference/families.py` lists their examples. Its halves elsewhere:
heads/formats/test_contract.py (files), eval/test_contract.py (decoding), train/test_contract.py (resuming).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.documents import Document, is_supervised
from reference.families import PATTERNS, REFERENCES, Example, documents, draft_ids, example_head, examples
from reference.tiny import (
    assert_near,
    check_against,
    check_metrics,
    double_document,
    double_ends,
    double_weights,
    ends_of,
    feature_batch,
    gradients,
    prefixes,
    teacher_of,
)
from torch import Tensor

from headstart.heads.base import Head, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES, build_head
from headstart.train.launching.setup import recompute_activations

#: float64 modules whose float32 rope angles are the same in every layout: rounding of differently ordered sums
TOLERANCE = 1e-10

EXAMPLES = dict(examples())
#: heads that differ in more than their loss
STRUCTURES = {name: example for name, example in EXAMPLES.items() if not example.loss_only}
each_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
each_structure = pytest.mark.parametrize("example", STRUCTURES.values(), ids=STRUCTURES)
each_family = pytest.mark.parametrize("family", FAMILIES)


def first(family: str) -> Example:
    return next(iter(REFERENCES[family].examples.values()))


def test_every_family_is_listed() -> None:
    assert set(REFERENCES) == set(FAMILIES)
    for family, reference in REFERENCES.items():
        assert FAMILIES[family].head.family == FAMILIES[family].config().type == family
        assert {example.config.type for example in reference.examples.values()} == {family}


# the naive twin


@each_example
def test_the_loss_is_the_naive_twins(example: Example) -> None:
    """Sums, counts, metrics and every gradient, of each term and of the normalised loss; padding is there."""
    head, ends = example_head(example, torch.float64)
    inputs, weights = documents(PATTERNS), double_weights(head)
    reference = REFERENCES[head.family]
    expected = reference.twin(head, weights, ends, inputs)
    batch = feature_batch(inputs, ends, head.depth, pad_to=50)
    assert batch.anchors.count_K == (15, 9, 5, 3)[: head.depth]
    assert all(count > 0 for count in expected.count)
    assert float(head.covered_rows(batch)) == expected.numerators[head.depth]
    if head.draft_ids_U is not None and expected.prefix is not None:
        # some positions carry no loss
        assert expected.numerators[head.depth] < batch.anchors.count_K[0]
    check_against(head, batch, teacher_of(ends), expected, weights, reference.tolerance)


@each_family
def test_float32_agrees_with_float64(family: str) -> None:
    head, ends = example_head(first(family))
    inputs, weights = documents(PATTERNS, dtype=torch.float32), double_weights(head)
    expected = REFERENCES[family].twin(head, weights, double_ends(ends), [double_document(d) for d in inputs])
    # several steps deep in float32; gradients of early weights pass through all of them
    check_against(head, feature_batch(inputs, ends, head.depth, pad_to=50), teacher_of(ends), expected, weights, 5e-5)


@each_family
def test_hits_are_the_targets_greedy_tokens(family: str) -> None:
    """Hits, misses, and runs of hits where the head walks chains, on more documents than gradients are compared on."""
    head, ends = example_head(first(family), torch.float64)
    inputs = documents(["..AAAAA", ".AAAAAA", ".AAA.BBBB"] * 14, seed=30)
    with torch.no_grad():
        expected = REFERENCES[family].twin(head, double_weights(head), ends, inputs)
        loss = head.loss(feature_batch(inputs, ends, head.depth), teacher_of(ends))
    check_metrics(loss, expected)
    assert 0 < expected.numerators[0] < expected.denominators[0], "the documents prove nothing"
    if expected.prefix is not None:
        assert prefixes(loss, head.depth) == expected.prefix
        assert head.depth == 1 or 0 < expected.prefix[1] < expected.numerators[1] < expected.denominators[1]


@each_structure
def test_a_target_can_be_trained_with_a_head_that_gives_its_features_a_gradient(example: Example) -> None:
    """A head that gives none says so, and joint training refuses it."""
    head, ends = example_head(example, torch.float64)
    batch = feature_batch(documents(LONG), ends, head.depth)
    inputs = [x.requires_grad_() for x in (batch.hidden_RD, batch.streams_RkD) if x is not None]
    head.loss(batch, teacher_of(ends)).sum_T.sum().backward()
    reached = any(x.grad is not None and bool(x.grad.any()) for x in inputs)
    assert reached == (head.joint_obstacle is None)


# one gradient, whatever the documents are laid beside


LONG = ["..AAAAAAAA.B..CCC", ".", "AAAA", "...AABBBBB", ".....", ".A", "....AA", "." + "A" * 20]


def pieces(head: Head, ends: object, docs: list[Document]) -> list[FeatureBatch]:
    parts = ([docs[7]], docs[:2], [docs[4]], [docs[2], docs[6], docs[3], docs[5]])
    return [feature_batch(part, ends, head.depth, 40) for part in parts]


def fixed(spare: int) -> Callable[..., list[FeatureBatch]]:
    """Without a row to spare, padding anchors sit at the last row of the last document."""

    def layout(head: Head, ends: object, docs: list[Document]) -> list[FeatureBatch]:
        rows = sum(len(doc.tokens) for doc in docs) + spare
        return [feature_batch(docs, ends, head.depth).padded(rows=rows, anchors=70, documents=12)]

    return layout


#: how the same documents may lie: one list of packs per window, whatever ranks they go to
LAYOUTS: dict[str, Callable[..., list[FeatureBatch]]] = {
    "one row of padding": lambda head, ends, docs: [feature_batch(docs, ends, head.depth, 67)],
    "much padding": lambda head, ends, docs: [feature_batch(docs, ends, head.depth, 100)],
    "in another order": lambda head, ends, docs: [feature_batch(docs[::-1], ends, head.depth, 80)],
    "in four packs": pieces,
    "fixed shapes": fixed(0),
    "fixed shapes with rows to spare": fixed(23),
}


def window(head: Head, teacher: Teacher, packs: list[FeatureBatch]) -> tuple[Tensor, list[Loss]]:
    """L = Σ_t weight_t · S_t / N_t with N_t over all packs of the window, as the training loop scales it."""
    count_T = sum(head.loss_counts(pack) for pack in packs)
    scale_T = head.term_weights() / count_T.clamp(min=1)
    losses = [head.loss(pack, teacher, scale_T) for pack in packs]
    return sum((loss.sum_T * scale_T).sum() for loss in losses), losses


@each_example
def test_the_layout_changes_nothing(example: Example) -> None:
    """Neither the gradient nor a count nor a metric."""
    head, ends = example_head(example, torch.float64)
    docs, teacher = documents(LONG), teacher_of(ends)
    plain, (whole,) = window(head, teacher, [feature_batch(docs, ends, head.depth)])
    # divisors are float32: sums of weights round otherwise in another order, counts do not
    counted = all(count == int(count) for count in whole.count_T.tolist())
    tolerance = TOLERANCE if counted else 1e-6
    expected = gradients(head, plain)
    assert all(gradient.abs().max() > 0 for gradient in expected.values()), "a weight without gradient proves nothing"
    for name, layout in LAYOUTS.items():
        packs = layout(head, ends, docs)
        other, losses = window(head, teacher, packs)
        found = gradients(head, other)
        assert_near(other, plain, f"{name}: loss", tolerance)
        for key, gradient in expected.items():
            assert_near(found[key], gradient, f"{name}: gradient of {key}", tolerance)
        for pack, loss in zip(packs, losses, strict=True):
            assert torch.equal(head.loss_counts(pack), loss.count_T), name
        for values in ("count_T", "numerator_M", "denominator_M"):
            summed = sum(getattr(loss, values) for loss in losses).tolist()
            assert summed == pytest.approx(getattr(whole, values).tolist(), rel=1e-6), name
        if whole.run_A is not None:
            runs = [prefixes(loss, head.depth) for loss in losses]
            assert [sum(x) for x in zip(*runs, strict=True)] == prefixes(whole, head.depth), name


@each_structure
def test_changing_the_padding_or_a_neighbour_does_not_reach_a_document(example: Example) -> None:
    """Gradient of one document's loss when the rest of the pack has no answers, whatever the rest says."""
    head, ends = example_head(example, torch.float64)
    (answer,), teacher = documents(LONG[:1]), teacher_of(ends)
    expected = gradients(head, head.loss(feature_batch([answer], ends, head.depth), teacher).sum_T.sum())
    for seed in (100, 200):
        before, after = documents(["." * 9] * 2, seed)
        batch = feature_batch([before, answer, after], ends, head.depth, 60, noise_seed=seed)
        found = gradients(head, head.loss(batch, teacher).sum_T.sum())
        for key, gradient in expected.items():
            assert_near(found[key], gradient, f"gradient of {key}", TOLERANCE)


@each_structure
def test_what_follows_a_turns_end_does_not_matter(example: Example) -> None:
    head, ends = example_head(example, torch.float64)
    teacher = teacher_of(ends)
    (long,) = documents(["..AAAAA...."], 5)
    other = Document(
        long.tokens[:7] + [3, 1, 4, 1],
        long.turns,
        torch.cat((long.hidden_TD[:7], -long.hidden_TD[7:])),
        long.streams_TkD,
    )
    one, two = (gradients(head, head.loss(feature_batch([d], ends, head.depth), teacher).sum_T.sum())
                for d in (long, other))  # fmt: skip
    for key, gradient in one.items():
        assert torch.equal(gradient, two[key]), key


@each_structure
@pytest.mark.parametrize("patterns", [["....", "."], [".A", "AA"]])
def test_a_pack_without_positions_gives_zero_and_no_nan(example: Example, patterns: list[str]) -> None:
    head, ends = example_head(example, torch.float64)
    docs = documents(patterns)
    assert not any(is_supervised(d.turns, t, 1) for d in docs for t in range(len(d.tokens)))
    batch = feature_batch(docs, ends, head.depth)
    for pack in (feature_batch(docs, ends, head.depth, 12), batch.padded(12, 5, 4)):
        loss = head.loss(pack, teacher_of(ends))
        assert head.loss_counts(pack).tolist() == loss.count_T.tolist()
        for values in (loss.sum_T, loss.count_T, loss.numerator_M, loss.denominator_M):
            assert not values.any() and not values.isnan().any()
        assert loss.run_A is None or not loss.run_A.any()
        assert all(not g.any() for g in gradients(head, loss.sum_T.sum()).values())


@each_structure
def test_the_target_gets_no_gradient(example: Example) -> None:
    head, ends = example_head(example, torch.float64)
    teacher = teacher_of(ends)
    for tensor in (ends.lm_head_VD, ends.embed_VD):
        tensor.requires_grad_(True)
    head.bind(TargetEnds(ends.embed_VD, teacher))
    head.loss(feature_batch(documents(PATTERNS), ends, head.depth), teacher).sum_T.sum().backward()
    assert ends.embed_VD.grad is None or not ends.embed_VD.grad.any()


@each_structure
def test_recomputed_activations_change_neither_loss_nor_gradients(example: Example) -> None:
    head, ends = example_head(example, torch.float64)
    if not head.draft_layers:
        with pytest.raises(ConfigError, match=f"{head.family} heads have no layer whose activations could be"):
            recompute_activations(head)
        return
    batch, teacher, scale_T = feature_batch(documents(), ends, head.depth), teacher_of(ends), head.term_weights()
    found = []
    for recompute in (False, True):
        if recompute:
            recompute_activations(head)
        loss = (head.train().loss(batch, teacher, scale_T).sum_T * scale_T).sum()
        found.append({"loss": loss.detach(), **gradients(head, loss)})
    assert len(found[0]) > 8
    for name, kept in found[0].items():
        torch.testing.assert_close(found[1][name], kept, msg=name)


# rows and costs


@each_family
def test_chosen_rows_follow_the_seed_and_leave_the_counts(family: str) -> None:
    """A choice depends on the pack and the seed; what the sums are divided by knows all rows."""
    head, ends = example_head(Example(REFERENCES[family].random), torch.float64)
    batch = feature_batch(documents(LONG), ends, head.depth)
    for seed in (1, 2):
        chosen, again = head.choose_rows(batch, seed), head.choose_rows(batch, seed)
        assert torch.equal(chosen.anchors.row_A, again.anchors.row_A)
        loss = head.loss(chosen, teacher_of(ends))
        assert_near(loss.count_T, head.loss_counts(chosen), "count_T")
        assert all(0 < count <= all_rows for count, all_rows in zip(loss.count_T, head.loss_counts(batch), strict=True))


@each_structure
def test_costs_grow_with_the_rows(example: Example) -> None:
    head, ends = example_head(example)
    counts = [100.0 / d for d in range(1, head.depth + 1)]
    once, twice = head.multiply_adds(300, counts), head.multiply_adds(600, [2 * count for count in counts])
    assert once > 0 and twice == pytest.approx(2 * once)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert head.trained_parameters() == trained > 0
    # no cheaper than one use of the trained matrices on the rows of the deepest term
    assert once >= trained * counts[-1] / len(head.terms)
    kept, recomputed = (head.kept_numbers(300, 100, again) for again in (False, True))
    assert 0 < recomputed <= kept
    assert head.kept_numbers(600, 200, False) == pytest.approx(2 * kept)
    assert head.describe().startswith(family_line(head))  # a family may say more
    with torch.device("meta"):
        planned = build_head(example.config, example.dims)
    planned.bind(ends_of(ends))
    assert planned.multiply_adds(300, counts) == once and planned.kept_numbers(300, 100, False) == kept


def family_line(head: Head) -> str:
    """The head in one line: its family, size, layers and activation."""
    layers = f", reads layers {list(head.spec.layer_ids)}" if head.spec.layer_ids else ""
    act = f", {head.hidden_act}" if head.hidden_act else ""
    return f"{head.family}: {head.trained_parameters() / 1e6:.1f} M trained parameters{layers}{act}"


# the target's ends


@each_structure
def test_binding_keeps_trained_weights_and_starting_depends_on_the_target_alone(example: Example) -> None:
    head, ends = example_head(example)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    head.bind(ends_of(ends))
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    size, started = head.draft_vocab_size, []
    for _ in range(2):
        torch.manual_seed(5)
        fresh = build_head(example.config, example.dims)
        fresh.initialise(ends_of(ends), None if size is None else draft_ids(size))
        started.append(fresh.state_dict())
    assert set(started[0]) == set(before)
    assert all(torch.equal(value, started[1][name]) for name, value in started[0].items())
    assert all(value.data_ptr() not in (ends.embed_VD.data_ptr(), ends.lm_head_VD.data_ptr())
               for value in started[0].values())  # fmt: skip
