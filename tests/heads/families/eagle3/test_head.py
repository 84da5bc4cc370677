"""EAGLE-3 training-time test against the per-row loop, and serving against training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.cache import ListCache, chain_by_steps, fused, rows_by_steps, run_step
from reference.documents import Document, Ends, is_supervised
from reference.eagle3 import chain_logits, eagle3_loss, fuse, row_keys, row_output, ttt_logits
from reference.llama import Shape
from reference.tiny import (
    FAVOURITES,
    assert_near,
    check_against,
    double_document,
    double_ends,
    double_weights,
    ends_of,
    favour,
    feature_batch,
    random_document,
    random_ends,
    randomise,
    teacher_of,
)

from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families import Eagle3Config, build_head
from headstart.heads.families.eagle3.head import Eagle3Head

VOCAB, DRAFT, DEPTH = 97, 40, 4
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DIMS = HeadDims(
    32, VOCAB, 8, 4, 2, 8, 48, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100.0}
)
VARIANTS: dict[str, tuple[HeadDims, dict[str, object]]] = {
    "draft vocabulary": (DIMS, {}),
    "whole vocabulary": (DIMS, {"draft_vocab_size": VOCAB}),
    "vocabulary 0 is whole": (DIMS, {"draft_vocab_size": 0}),
    "own width": (DIMS, {"hidden_size": 24, "intermediate_size": 20}),
    "wide heads, llama3 rope": (replace(DIMS, head_dim=16, num_kv_heads=1, rope_parameters=LLAMA3), {}),
    "partial rope, gelu": (
        replace(
            DIMS, hidden_act="gelu_pytorch_tanh",
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        ),
        {},
    ),
}  # fmt: skip
PATTERNS = ["..AAAAAA.B..CCC", ".", "AAAA", "...AABBBBB", ".A", "....AA"]


def shape_of(dims: HeadDims) -> Shape:
    return Shape(
        dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.rms_norm_eps, dims.hidden_act, dims.rope_parameters
    )


def documents(seed: int = 0, patterns: list[str] | None = None) -> list[Document]:
    return [random_document(p, VOCAB, 32, 3, seed + i) for i, p in enumerate(patterns or PATTERNS)]


def draft_ids() -> torch.Tensor:
    """Two of the three favourites are inside."""
    others = [
        i for i in torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7)).tolist() if i not in FAVOURITES
    ]
    return torch.tensor(sorted([*others[: DRAFT - 2], *FAVOURITES[:2]]))


def tiny_eagle3(
    variant: str = "draft vocabulary",
    dtype: torch.dtype = torch.float32,
    ends: Ends | None = None,
    **changed: object,
) -> tuple[Eagle3Head, Ends, Shape, list[int] | None]:
    """A head with random weights, its target's ends, and its draft ids."""
    dims, fields = VARIANTS[variant]
    ends = ends or random_ends(VOCAB, 32, 50)
    ends = double_ends(ends) if dtype == torch.float64 else ends
    config = Eagle3Config(
        **{"depth": DEPTH, "draft_vocab_size": DRAFT, "feature_layers": [1, 3, 5], **fields, **changed}
    )
    head = build_head(config, dims)
    ids = None if config.draft_vocab_size in (0, VOCAB) else draft_ids()
    head.initialise(ends_of(ends), ids)
    randomise(head, 1)
    listed = list(range(VOCAB)) if ids is None else ids.tolist()
    favour(head.lm_head.weight, [listed.index(i) for i in FAVOURITES if i in listed])
    return head.to(dtype), ends, shape_of(dims), None if ids is None else listed


def test_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="head.loss: found 'ce', expected one of soft_ce, kl, lk"):
        build_head(Eagle3Config(loss="ce", draft_vocab_size=DRAFT, feature_layers=[1, 3, 5]), DIMS)


def test_many_steps_on_long_turns():
    head, ends, shape, ids = tiny_eagle3(dtype=torch.float64)
    deep = build_head(Eagle3Config(depth=7, draft_vocab_size=DRAFT, feature_layers=[1, 3, 5]), DIMS).double()
    deep.initialise(ends_of(ends), draft_ids())
    deep.load_state_dict(head.state_dict())
    inputs = [double_document(d) for d in documents(5, [".AAAAAAAAA", ".AAA.BBBBBBBB"])]
    weights = double_weights(deep)
    expected = eagle3_loss(weights, ends, inputs, shape, 7, ids)
    assert expected.total == [17, 14, 11, 9, 7, 5, 3]
    check_against(deep, feature_batch(inputs, ends, 7, pad_to=30), teacher_of(ends), expected, weights)


def test_correct_answers_are_counted():
    """With one head row far above the rest, hits are exactly the positions whose greedy token is that one."""
    head, ends, _, ids = tiny_eagle3(dtype=torch.float64)
    inputs = [double_document(d) for d in documents()]
    batch = feature_batch(inputs, ends, DEPTH)
    inside = [t for t in batch.teacher_argmax_A.tolist() if t in ids]
    favourite = max(set(inside), key=inside.count)
    with torch.no_grad():
        head.norm.weight.zero_()  # every logit 0: argmax is the first id …
    first = head.loss(batch, teacher_of(ends))
    hits = sum(
        int(ends.logits(d.hidden_TD[t + 1]).argmax()) == ids[0]
        for d in inputs
        for t in range(len(d.tokens))
        if is_supervised(d.turns, t, 1)
    )
    assert first.numerator_M[0] == hits
    order = ids.index(favourite)
    permuted = torch.tensor([favourite, *[i for i in ids if i != favourite]])
    assert order > 0 and permuted[0] == favourite  # … and a draft id is never mistaken for a target id
    head.draft_ids_U.copy_(permuted)
    assert head.loss(batch, teacher_of(ends)).numerator_M[0] == inside.count(favourite) > 0


def test_uniform_head_pays_the_log_of_the_vocabulary():
    head, ends, _, _ = tiny_eagle3(dtype=torch.float64)
    with torch.no_grad():
        head.norm.weight.zero_()
    loss = head.loss(feature_batch([double_document(d) for d in documents()], ends, DEPTH), teacher_of(ends))
    expected = loss.count_T.double() * torch.log(torch.tensor(float(DRAFT), dtype=torch.float64))
    torch.testing.assert_close(loss.sum_T.double(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_serving_rows_are_the_training_forward(variant: str):
    head, ends, shape, _ = tiny_eagle3(variant, torch.float64)
    document = double_document(random_document("." * 9, VOCAB, 32, 3, 4))
    weights = double_weights(head)
    g1 = [fuse(weights, streams) for streams in document.streams_TkD]
    rows = [row_keys(weights, ends, shape, document.tokens[p + 1], g1[p], p) for p in range(8)]
    for cuts in ([8], [1] * 8, [3, 1, 4]):
        g_NH, logits_NU = rows_by_steps(head, document, cuts)
        for p in range(8):
            assert_near(
                g_NH[p], row_output(weights, shape, g1[p], rows[p], rows[: p + 1]), f"g of row {p}, calls {cuts}"
            )
            expected = ttt_logits(weights, ends, shape, document, p, 1)[0]
            assert_near(logits_NU[p], expected, f"logits of row {p}, calls {cuts}")


@pytest.mark.parametrize("variant", ["draft vocabulary", "own width", "wide heads, llama3 rope"])
def test_serving_chain_on_ground_truth_is_training_time_test(variant: str):
    """Depth-i logits of `step`, fed with the true tokens, are those TTT trains: same keys, same positions, same g."""
    head, ends, shape, _ = tiny_eagle3(variant, torch.float64)
    document = double_document(random_document("." * 11, VOCAB, 32, 3, 4))
    weights = double_weights(head)
    for p in (0, 1, 4, 6):
        trained = torch.stack(ttt_logits(weights, ends, shape, document, p, 4))
        served = chain_by_steps(head, document, p + 1, document.tokens[p + 1 : p + 5])
        assert_near(served, trained, f"anchor {p}")


def test_serving_chain_on_its_own_drafts():
    head, ends, shape, _ = tiny_eagle3(dtype=torch.float64)
    document = double_document(random_document("." * 9, VOCAB, 32, 3, 4))
    fed = [5, 71, 2, 40, 8]
    expected = chain_logits(double_weights(head), ends, shape, document.tokens[:6], document.streams_TkD[:6], fed)
    assert_near(chain_by_steps(head, document, 6, fed), torch.stack(expected), "chain")


def test_after_verification_accepted_rows_come_from_real_features():
    """Discard the drafted rows, recompute them from the target's features: the next draft is as if never drafted."""
    head, _, _, _ = tiny_eagle3(dtype=torch.float64)
    document = double_document(random_document("." * 12, VOCAB, 32, 3, 4))
    cache = ListCache()
    g, _ = run_step(head, cache, document.tokens[1:6], fused(head, document, slice(0, 5)), 0)
    g = g[-1:]
    for position, token in enumerate(document.tokens[6:9], start=5):  # three drafts, all right
        g, _ = run_step(head, cache, [token], g, position)
    cache.cut(5)
    g, logits = run_step(head, cache, document.tokens[6:10], fused(head, document, slice(5, 9)), 5)
    _, fresh = rows_by_steps(head, document, [9])
    assert_near(logits, fresh[5:], "recomputed rows", 1e-12)


def test_lm_head_starts_from_the_targets_rows():
    ends = random_ends(VOCAB, 32, 50)
    config = Eagle3Config(depth=2, draft_vocab_size=DRAFT, feature_layers=[1, 3, 5])
    head = build_head(config, DIMS)
    head.initialise(ends_of(ends), draft_ids())
    assert torch.equal(head.lm_head.weight.detach(), ends.lm_head_VD[draft_ids()])
    assert head.lm_head.weight.requires_grad and head.lm_head.weight.data_ptr() != ends.lm_head_VD.data_ptr()
    assert head.draft_ids_U.dtype == torch.int64 and torch.equal(head.draft_ids_U, draft_ids())
    whole = build_head(replace(config, draft_vocab_size=VOCAB), DIMS)
    whole.initialise(ends_of(ends))
    assert whole.draft_ids_U is None and torch.equal(whole.lm_head.weight.detach(), ends.lm_head_VD)


def test_embeddings_are_frozen_and_not_saved_when_the_widths_agree():
    head, ends, _, _ = tiny_eagle3()
    assert not any("embed" in name for name in head.state_dict())
    before = ends.embed_VD.clone()
    head.loss(feature_batch(documents(), ends, DEPTH), teacher_of(ends)).sum_T.sum().backward()
    assert torch.equal(ends.embed_VD, before) and not ends.embed_VD.requires_grad
    own, _, _, _ = tiny_eagle3("own width")
    assert own.state_dict()["embed_tokens.weight"].shape == (VOCAB, 24)


def test_default_layers_and_depth():
    config = Eagle3Config()
    assert (config.depth, config.depth_decay, config.draft_vocab_size) == (7, 0.8, 32000)
    head = build_head(Eagle3Config(draft_vocab_size=DRAFT), replace(DIMS, num_layers=32))
    assert head.spec.layer_ids == (2, 16, 29)
    assert head.term_weights().tolist() == pytest.approx([0.8**i for i in range(7)])


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_default_layers_that_collapse_are_refused_with_the_remedy(layers: int):
    with pytest.raises(ConfigError, match="head.feature_layers"):
        build_head(Eagle3Config(draft_vocab_size=DRAFT), replace(DIMS, num_layers=layers))


def test_default_layers_of_the_smallest_target_that_has_them():
    assert build_head(Eagle3Config(draft_vocab_size=DRAFT), replace(DIMS, num_layers=7)).spec.layer_ids == (2, 3, 4)


@pytest.mark.parametrize("layers", [[1, 3], [1, 3, 3], [3, 1, 5], [0, 3, 5], [1, 3, 8], [1, 2, 3, 4], []])
def test_bad_layers_are_refused(layers: list[int]):
    with pytest.raises(ConfigError, match="head.feature_layers"):
        build_head(Eagle3Config(draft_vocab_size=DRAFT, feature_layers=layers), DIMS)


def test_wrong_vocabulary_size_is_refused():
    ends = random_ends(VOCAB, 32, 50)
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        build_head(Eagle3Config(draft_vocab_size=VOCAB + 1, feature_layers=[1, 3, 5]), DIMS)
    head = build_head(Eagle3Config(draft_vocab_size=DRAFT, feature_layers=[1, 3, 5]), DIMS)
    for ids in (None, draft_ids()[:-1]):
        with pytest.raises(ConfigError, match="draft"):
            head.initialise(ends_of(ends), ids)


def test_loss_reaches_nothing_but_what_each_depth_uses():
    """Depth 1's loss reads no later step, and an out-of-vocabulary depth still passes its g on to later depths."""
    head, ends, shape, ids = tiny_eagle3(dtype=torch.float64)
    inputs = [double_document(random_document("..AAAAA", VOCAB, 32, 3, seed)) for seed in range(40, 120)]
    holes = [
        d for d in inputs
        if int(ends.logits(d.hidden_TD[2]).argmax()) not in ids and int(ends.logits(d.hidden_TD[3]).argmax()) in ids
    ]  # fmt: skip
    assert holes, "the fixture must hold a row with depth 1 outside and depth 2 inside the vocabulary"
    weights = double_weights(head)
    for document in holes[:2]:
        expected = eagle3_loss(weights, ends, [document], shape, DEPTH, ids)
        check_against(head, feature_batch([document], ends, DEPTH), teacher_of(ends), expected, weights)
