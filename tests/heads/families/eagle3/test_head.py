"""EAGLE-3: serving against training, where its output head starts, and its choice of layers and vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.cache import ListCache, chain_by_steps, fused, rows_by_steps, run_step
from reference.documents import Document, Ends
from reference.eagle3 import chain_logits, first_step, recycled, ttt_logits
from reference.families import DIMS, REFERENCES, Example, documents, draft_ids, eagle3, example_head, shape_of
from reference.kept import kept_by_autograd
from reference.llama import rms_norm
from reference.tiny import (
    assert_near,
    check_against,
    double_weights,
    ends_of,
    feature_batch,
    gradients,
    random_ends,
    teacher_of,
)
from torch.utils.flop_counter import FlopCounterMode

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError
from headstart.heads.families import Eagle3Config, build_head

DRAFT, DEPTH = 40, 4
FAMILY = REFERENCES["eagle3"]
VARIANTS = ("draft vocabulary", "whole vocabulary", "vocabulary 0 is whole", "own width", "wide heads, llama3 rope",
            "partial rope, gelu", "two layers", "q/k norms", "three layers, q/k norms, partial rope",
            "norms of the streams, normed output", "norm before fc, two layers, own width",
            "all of EAGLE-3.1")  # fmt: skip


def double_head(variant: str = "draft vocabulary") -> tuple[Head, Ends]:
    return example_head(FAMILY.examples[variant], torch.float64)


def answerless(length: int) -> Document:
    return documents(["." * length], 4)[0]


def test_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="head.loss: found 'ce', expected one of soft_ce, kl, lk"):
        build_head(Eagle3Config(loss="ce", draft_vocab_size=DRAFT, feature_layers=[1, 3, 5]), DIMS)


def test_many_steps_on_long_turns():
    head, ends = example_head(Example(eagle3(depth=7)), torch.float64)
    inputs, weights = documents([".AAAAAAAAA", ".AAA.BBBBBBBB"], 5), double_weights(head)
    expected = FAMILY.twin(head, weights, ends, inputs)
    assert expected.total == [17, 14, 11, 9, 7, 5, 3]
    check_against(head, feature_batch(inputs, ends, 7, pad_to=30), teacher_of(ends), expected, weights)


def test_uniform_head_pays_the_log_of_the_vocabulary():
    head, ends = double_head()
    with torch.no_grad():
        head.norm.weight.zero_()
    loss = head.loss(feature_batch(documents(), ends, DEPTH), teacher_of(ends))
    expected = loss.count_T.double() * torch.log(torch.tensor(float(DRAFT), dtype=torch.float64))
    torch.testing.assert_close(loss.sum_T.double(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_serving_rows_are_the_training_forward(variant: str):
    head, ends = double_head(variant)
    document, weights, shape = answerless(9), double_weights(head), shape_of(head)
    normed = head.config.norm_output
    outputs, _ = first_step(weights, ends, shape, document)
    for cuts in ([8], [1] * 8, [3, 1, 4]):
        g_NH, logits_NU = rows_by_steps(head, document, cuts)
        for p in range(8):
            assert_near(g_NH[p], recycled(weights, shape, outputs[p], normed), f"g of row {p}, calls {cuts}")
            expected = ttt_logits(weights, ends, shape, document, p, 1)[0]
            assert_near(logits_NU[p], expected, f"logits of row {p}, calls {cuts}")


@pytest.mark.parametrize("variant", ["draft vocabulary", "own width", "wide heads, llama3 rope", *VARIANTS[6:]])
def test_serving_chain_on_ground_truth_is_training_time_test(variant: str):
    """Depth-i logits of `step`, fed with the true tokens, are those TTT trains: same keys, same positions, same g."""
    head, ends = double_head(variant)
    document, weights, shape = answerless(11), double_weights(head), shape_of(head)
    for p in (0, 1, 4, 6):
        trained = torch.stack(ttt_logits(weights, ends, shape, document, p, 4, norm_output=head.config.norm_output))
        served = chain_by_steps(head, document, p + 1, document.tokens[p + 1 : p + 5])
        assert_near(served, trained, f"anchor {p}")


@pytest.mark.parametrize("variant", ["draft vocabulary", *VARIANTS[6:]])
def test_serving_chain_on_its_own_drafts(variant: str):
    head, ends = double_head(variant)
    document, fed = answerless(9), [5, 71, 2, 40, 8]
    weights, shape = double_weights(head), shape_of(head)
    normed = head.config.norm_output
    expected = chain_logits(weights, ends, shape, document.tokens[:6], document.streams_TkD[:6], fed, normed)
    assert_near(chain_by_steps(head, document, 6, fed), torch.stack(expected), "chain")


def test_after_verification_accepted_rows_come_from_real_features():
    """Discard the drafted rows, recompute them from the target's features: the next draft is as if never drafted."""
    head, _ = double_head()
    document, cache = answerless(12), ListCache()
    g, _ = run_step(head, cache, document.tokens[1:6], fused(head, document, slice(0, 5)), 0)
    g = g[-1:]
    for position, token in enumerate(document.tokens[6:9], start=5):  # three drafts, all right
        g, _ = run_step(head, cache, [token], g, position)
    cache.cut(5)
    g, logits = run_step(head, cache, document.tokens[6:10], fused(head, document, slice(5, 9)), 5)
    _, fresh = rows_by_steps(head, document, [9])
    assert_near(logits, fresh[5:], "recomputed rows", 1e-12)


#: what trains through autograd
BY_AUTOGRAD = {
    "q/k norms": {"qk_norm": True},
    "two layers": {"layers": 2},
    "two layers, q/k norms": {"layers": 2, "qk_norm": True},
    "three layers, EAGLE-3.1": {"layers": 3, "norm_output": True, "fc_norm": "stream"},
}


def costly(fields: dict[str, Any]) -> tuple[Head, FeatureBatch]:
    """A head and a pack whose rows outnumber its anchors, in float32."""
    head, ends = example_head(Example(eagle3(**fields), replace(DIMS, intermediate_size=96)))
    return head, feature_batch(documents(["." * 24 + "A" * 40] * 4, dtype=torch.float32), ends, DEPTH)


@pytest.mark.parametrize("fields", BY_AUTOGRAD.values(), ids=BY_AUTOGRAD)
def test_multiply_adds_are_those_that_run(fields: dict[str, Any]):
    head, batch = costly(fields)
    counts, rows = batch.anchors.count_K, len(batch.tokens_R)
    with FlopCounterMode(display=False) as counter:
        head.rollout(batch)
    # scores of attention are bmm; the product with lm_head stands in the loss
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)) / 2
    assert rows > 1.5 * counts[0]
    output = head.lm_head.weight.numel() * sum(counts)
    assert head.multiply_adds(rows, counts) == counted + output
    head.lm_head.weight.requires_grad_(False)  # its gradient is a third of what a step computes with it
    assert head.multiply_adds(rows, counts) == pytest.approx(counted + output * 2 / 3)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "fields", [*BY_AUTOGRAD.values(), {"norm_output": True}], ids=[*BY_AUTOGRAD, "normed output"]
)
def test_kept_numbers_are_those_that_autograd_keeps(fields: dict[str, Any], recompute: bool):
    """All but logits, which only the forward pass holds. The estimate is within a fifth."""
    head, batch = costly(fields)
    if recompute:
        head.recompute_activations()
    found = kept_by_autograd(head, batch)
    anchors = batch.anchors.count_K[0]
    expected = head.kept_numbers(len(batch.tokens_R), anchors, recompute) - anchors * DRAFT
    assert found == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    "variant",
    [
        "draft vocabulary", "wide heads, llama3 rope", "partial rope, gelu", "own width",
        "norms of the streams, normed output",
    ],  # fmt: skip
)
def test_the_written_out_backward_is_autograds(variant: str, monkeypatch: pytest.MonkeyPatch):
    """One plain layer, for which there are both: equal losses and gradients on padded packs of several documents."""
    found = []
    for by_autograd in (False, True):
        head, ends = double_head(variant)
        monkeypatch.setattr(type(head), "by_autograd", by_autograd)
        batch = feature_batch(documents(), ends, DEPTH).padded(60, 20, 8)
        loss = head.loss(batch, teacher_of(ends)).sum_T
        found.append({"loss": loss.detach(), **gradients(head, loss.sum())})
    assert len(found[0]) > 10
    for name, expected in found[0].items():
        assert_near(found[1][name], expected, name, 1e-9)


def test_lm_head_starts_from_the_targets_rows():
    ends, ids = random_ends(97, 32, 50), draft_ids(DRAFT)
    head = build_head(eagle3(), DIMS)
    head.initialise(ends_of(ends), ids)
    assert torch.equal(head.lm_head.weight.detach(), ends.lm_head_VD[ids])
    assert head.lm_head.weight.requires_grad and head.lm_head.weight.data_ptr() != ends.lm_head_VD.data_ptr()
    assert head.draft_ids_U.dtype == torch.int64 and torch.equal(head.draft_ids_U, ids)
    whole = build_head(eagle3(draft_vocab_size=97), DIMS)
    whole.initialise(ends_of(ends))
    assert whole.draft_ids_U is None and torch.equal(whole.lm_head.weight.detach(), ends.lm_head_VD)


def test_embeddings_are_saved_where_the_head_has_its_own_width():
    assert not any("embed" in name for name in double_head()[0].state_dict())
    assert double_head("own width")[0].state_dict()["embed_tokens.weight"].shape == (97, 24)


def test_default_layers_and_depth():
    config = Eagle3Config()
    assert (config.depth, config.depth_decay, config.draft_vocab_size) == (7, 0.8, 32000)
    head = build_head(Eagle3Config(draft_vocab_size=DRAFT), replace(DIMS, num_layers=32))
    assert head.spec.layer_ids == (2, 16, 29)
    assert head.term_weights().tolist() == pytest.approx([0.8**i for i in range(7)])


@pytest.mark.parametrize(
    ("of_target", "layers"),
    [*((count, None) for count in range(1, 7)),
     *((8, ids) for ids in ([1, 3], [1, 3, 3], [3, 1, 5], [0, 3, 5], [1, 3, 8], [1, 2, 3, 4], []))],
)  # fmt: skip
def test_layers_that_do_not_fit_are_refused_with_the_remedy(of_target: int, layers: list[int] | None):
    """None: the default layers, of which the smallest targets do not have three."""
    with pytest.raises(ConfigError, match="head.feature_layers"):
        build_head(eagle3(feature_layers=layers), replace(DIMS, num_layers=of_target))


def test_default_layers_of_the_smallest_target_that_has_them():
    assert build_head(eagle3(feature_layers=None), replace(DIMS, num_layers=7)).spec.layer_ids == (2, 3, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"fc_norm": "both"}, "head.fc_norm: found 'both', expected one of none, stream, concat"),
     ({"layers": 0}, "head.layers: found 0, expected 1 to 64"), ({"layers": 65}, "head.layers: found 65")],
)  # fmt: skip
def test_variants_that_do_not_exist_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config = eagle3(**fields)
        config.check()
        build_head(config, DIMS)


def test_a_layer_above_attends_to_rows_that_are_not_supervised():
    """A prompt's tokens reach its anchors through the lower layers of every row, and through those alone."""
    head, ends = example_head(Example(eagle3(layers=2)), torch.float64)
    (document,) = documents(["......AA"], 3)
    weights, shape = double_weights(head), shape_of(head)
    first, caches = first_step(weights, ends, shape, document)
    assert [len(rows) for rows in caches] == [7, 7] and len(first) == 7
    batch = feature_batch([document], ends, DEPTH)
    found = head.rollout(batch)
    expected = torch.stack([rms_norm(first[p], weights["norm.weight"], shape.eps) for p in batch.anchors.row_A])
    assert_near(found, expected, "step 1 of the supervised rows")
    (document.streams_TkD[0]).mul_(-1)
    changed = head.rollout(feature_batch([document], ends, DEPTH))
    assert (changed - found).abs().max() > 1e-3


def test_wrong_vocabulary_size_is_refused():
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        build_head(eagle3(draft_vocab_size=98), DIMS)
    head = build_head(eagle3(), DIMS)
    for ids in (None, draft_ids(DRAFT)[:-1]):
        with pytest.raises(ConfigError, match="draft"):
            head.initialise(ends_of(random_ends(97, 32, 50)), ids)


def test_loss_reaches_nothing_but_what_each_depth_uses():
    """Depth 1's loss reads no later step, and an out-of-vocabulary depth still passes its g on to later depths."""
    head, ends = double_head()
    ids, weights = head.draft_ids_U.tolist(), double_weights(head)
    inputs = documents(["..AAAAA"] * 80, 40)
    holes = [
        d for d in inputs
        if int(ends.logits(d.hidden_TD[2]).argmax()) not in ids and int(ends.logits(d.hidden_TD[3]).argmax()) in ids
    ]  # fmt: skip
    assert holes, "the fixture must hold a row with depth 1 outside and depth 2 inside the vocabulary"
    for document in holes[:2]:
        expected = FAMILY.twin(head, weights, ends, [document])
        check_against(head, feature_batch([document], ends, DEPTH), teacher_of(ends), expected, weights)


def test_settings_that_came_later_are_no_fact_of_a_plain_head():
    """Runs that were made before there were such settings are not trained again."""
    later = {"layers", "qk_norm", "fc_norm", "norm_output"}
    plain = Eagle3Config().identity()
    assert later.isdisjoint(plain) and plain["depth"] == 7
    assert {name: Eagle3Config(layers=2, norm_output=True).identity()[name] for name in ("layers", "norm_output")} == {
        "layers": 2, "norm_output": True,
    }  # fmt: skip
    assert later & set(Eagle3Config(layers=2, norm_output=True).identity()) == {"layers", "norm_output"}
