"""P-EAGLE: masked places in training and in serving, what is learnt of them, and what a pass costs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.cache import ListCache, fused, run_step
from reference.documents import Document, Ends
from reference.families import DIMS, REFERENCES, VOCAB, Example, documents, draft_ids, example_head, peagle, shape_of
from reference.kept import kept_by_autograd
from reference.peagle import chain_logits, parallel_logits, with_mask_row
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
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError
from headstart.heads.families import PEagleConfig, PEagleHead, build_head
from headstart.heads.families.peagle import rollout as peagle_rollout
from headstart.heads.kernels import block_attention, block_attention_kernels

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (and Triton)"
)
DEPTH, DRAFT, MASK = 4, 40, 11
FAMILY = REFERENCES["peagle"]
VARIANTS = [name for name, example in FAMILY.examples.items() if not example.loss_only]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def double_head(variant: str = "draft vocabulary") -> tuple[PEagleHead, Ends]:
    head, ends = example_head(FAMILY.examples[variant], torch.float64)
    assert isinstance(head, PEagleHead)
    return head, ends


def served(head: PEagleHead, document: Document, consumed: int, root: int, depth: int, cut: bool) -> Tensor:
    """Logits [K, U] after the target consumed x_0 … x_{consumed-1} and said `root`: masked places in one call, or `cut`
    into one call each."""
    cache = ListCache(len(head.draft_layers))
    following = [*document.tokens[1:consumed], root]
    _, logits = run_step(head, cache, following, fused(head, document, slice(0, consumed)), 0)
    found, g_H = [logits[-1:]], head.mask_feature()
    for size in [1] * (depth - 1) if cut else [depth - 1]:
        position = consumed + len(torch.cat(found)) - 1
        _, logits = run_step(head, cache, [head.mask_token] * size, g_H.expand(size, -1), position)
        found.append(logits)
    return torch.cat(found)


# rows


@pytest.mark.parametrize("fields", [{}, {"layers": 3}], ids=["one layer", "three layers"])
def test_many_depths_on_long_turns(fields: dict[str, Any]) -> None:
    head, ends = example_head(Example(peagle(depth=8, **fields)), torch.float64)
    inputs, weights = documents([".AAAAAAAAAAA", ".AAA.BBBBBBBBBB"], 5), double_weights(head)
    expected = FAMILY.twin(head, weights, ends, inputs)
    assert expected.total[0] == 21 and expected.total[-1] == 5
    check_against(head, feature_batch(inputs, ends, 8, pad_to=34), teacher_of(ends), expected, weights)


@each_variant
def test_serving_is_the_training_pass(variant: str) -> None:
    """Logits of every depth, the naive twin's, of places that are fed at once or one after the other."""
    head, ends = double_head(variant)
    (document,), shape = documents(["." * 11], 4), shape_of(head)
    weights = with_mask_row(double_weights(head), ends, MASK)
    for p in (0, 3, 6):
        root = document.tokens[p + 1]
        trained = torch.stack(parallel_logits(weights, ends, shape, MASK, document, p, DEPTH))
        expected = chain_logits(weights, ends, shape, MASK, document.tokens[: p + 1], document.streams_TkD, root, DEPTH)
        assert_near(torch.stack(expected), trained, f"anchor {p}: the twins", 1e-12)
        for cut in (False, True):
            assert_near(served(head, document, p + 1, root, DEPTH, cut), trained, f"anchor {p}, cut {cut}")


@each_variant
def test_training_logits_are_decoding_logits_in_float32(variant: str) -> None:
    """Every anchor at every depth: the rows of `rollout`, and `step` behind the same context."""
    head, ends = example_head(FAMILY.examples[variant])
    assert isinstance(head, PEagleHead)
    inputs = documents(["..AAAAAA.B..CCC", "...AABBBBB"], dtype=torch.float32)
    batch = feature_batch(inputs, ends, DEPTH, pad_to=30)
    anchors, compared = batch.anchors, 0
    with torch.no_grad():
        output_MH = head.rollout(batch)
        logits = [head.lm_head(part) for part in output_MH.split(anchors.count_K)]
        for a, row in enumerate(anchors.row_A.tolist()):
            document, first = (inputs[0], 0) if row < 15 else (inputs[1], 15)
            consumed, depths = row - first + 1, int(anchors.depths_A[a])
            expected = served(head, document, consumed, document.tokens[consumed], DEPTH, cut=False)
            for d in range(depths):
                torch.testing.assert_close(logits[d][a], expected[d], rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == sum(anchors.count_K) > 20


def test_a_token_that_is_the_mask_token_reads_the_trained_embedding() -> None:
    """Engines read the whole table from the file, whatever a row stands for."""
    head, ends = double_head()
    tokens = torch.tensor([[3, MASK, 5]])
    found = head.embed(tokens)
    assert torch.equal(found[0, 1], head.mask_embedding) and not torch.equal(found[0, 1], ends.embed_VD[MASK])
    assert torch.equal(found[0, [0, 2]], ends.embed_VD[[3, 5]])


@pytest.mark.parametrize(
    "fields",
    [{}, {"layers": 3}, {"layers": 2, "row_fraction": 0.6}, {"row_fraction_first": 0.4}, {"depth": 2}],
    ids=str,
)
def test_places_in_blocks_are_places_one_depth_after_the_other(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for all depths, as on a GPU: losses, hits and gradients, of draws and of padded packs."""
    head, ends = example_head(Example(peagle(**{"depth": 6, **fields})), torch.float64)
    inputs = documents(["." + "A" * 14, "..AAAAAAAAA", "AAAA"], 5)
    drawn = head.choose_rows(feature_batch(inputs, ends, head.depth), 3)
    for batch in (drawn, drawn.padded(48, 40, 8)):
        found = []
        for in_blocks in (False, True):
            monkeypatch.setattr(peagle_rollout, "in_blocks", lambda x, head_dim, answer=in_blocks: answer)
            loss = head.loss(batch, teacher_of(ends))
            found.append((loss, gradients(head, (loss.sum_T * head.term_weights()).sum())))
        (slow, slow_gradient), (fast, fast_gradient) = found
        torch.testing.assert_close(fast.sum_T, slow.sum_T, rtol=1e-9, atol=0)
        assert torch.equal(fast.numerator_M, slow.numerator_M)
        assert slow_gradient["mask_hidden"].any()
        for name, expected in slow_gradient.items():
            assert_near(fast_gradient[name], expected, name, 1e-9)


@interpreter
@pytest.mark.parametrize("fields", [{}, {"depth": 2}, {"depth": 3, "num_key_value_heads": 4}], ids=str)
def test_places_in_blocks_with_the_kernels_interpreted(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn rows of a padded pack: its first anchors are not all drawn, and the last ones are padding."""
    pytest.importorskip("triton")
    draws = {"row_fraction": 0.6, "row_fraction_first": 0.6}
    head, ends = example_head(Example(peagle(**{"depth": 6, "layers": 2, **draws, **fields})))
    inputs = documents(["." + "A" * 14, "..AAAAAAAAA", "AAAA"], 5, dtype=torch.float32)
    batch = head.choose_rows(feature_batch(inputs, ends, head.depth), 3).padded(48, 40, 8)

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        sum_T = head.loss(batch, teacher_of(ends)).sum_T
        return sum_T.detach(), gradients(head, (sum_T * head.term_weights()).sum())

    expected, expected_gradient = run()
    tiles = {"D": 16, "BM": 32, "BN": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(peagle_rollout, "in_blocks", lambda x, head_dim: True)
    monkeypatch.setattr(block_attention, "wants_kernel", lambda x: True)
    monkeypatch.setattr(block_attention_kernels, "_tiles", lambda x, keys=False: tiles)
    found, gradient = run()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, value in expected_gradient.items():
        assert_near(gradient[name], value, name, 1e-4)


def test_the_loss_by_hand_from_what_serving_drafts() -> None:
    """Σ_d decay^(d-1) · mean of KL(target at row p + d ‖ draft d of anchor p), over anchors that depth d supervises.

    Drafts are those of `step` behind the served context. Rows are counted here from the documents' patterns alone.
    """
    config = peagle(depth=4, draft_vocab_size=0, depth_decay=0.7, layers=2)
    head, ends = example_head(Example(config), torch.float64)
    patterns = ["..AAAAAA.B..CCC", "...AABBBBB"]
    inputs = documents(patterns)
    sums, counts = [0.0] * 4, [0] * 4
    for document, pattern in zip(inputs, patterns, strict=True):
        for p in range(len(pattern) - 1):
            answer = pattern[p + 1]
            if answer == ".":
                continue
            drafts = served(head, document, p + 1, document.tokens[p + 1], 4, cut=False)
            for d in range(1, 5):
                # the draft is x_{p+1+d}: it and all from the root x_{p+1} on are of one answer
                if pattern[p + 1 : p + 2 + d] != answer * (d + 1):
                    break
                p_V = torch.softmax(ends.logits(document.hidden_TD[p + d]), 0)
                log_q_V = torch.log_softmax(drafts[d - 1], 0)
                sums[d - 1] += float((p_V * (p_V.log() - log_q_V.detach())).sum())
                counts[d - 1] += 1
    assert counts == [12, 8, 5, 3]
    batch, teacher = feature_batch(inputs, ends, 4), teacher_of(ends)
    assert head.loss_counts(batch).tolist() == counts
    scale_T = head.term_weights() / head.loss_counts(batch)
    expected = sum(0.7**d * total / count for d, (total, count) in enumerate(zip(sums, counts, strict=True)))
    for loss in (head.loss(batch, teacher), head.loss(batch, teacher, scale_T)):
        torch.testing.assert_close(loss.sum_T, torch.tensor(sums, dtype=torch.float64), rtol=1e-5, atol=0)
        assert float((loss.sum_T * scale_T).sum().detach()) == pytest.approx(expected, rel=1e-5)


# what is learnt


@pytest.mark.parametrize("layers", [1, 3])
def test_the_masked_places_start_from_noise_and_from_the_targets_embedding(layers: int) -> None:
    torch.manual_seed(0)
    wide = replace(DIMS, hidden_size=2048)
    with torch.no_grad():
        noise = build_head(peagle(layers=layers, draft_vocab_size=0), wide).mask_hidden.detach()
    assert noise.shape == (3 * 2048,)
    assert abs(float(noise.mean())) < 0.05 and float(noise.std()) == pytest.approx(1.0, abs=0.03)
    ends = random_ends(VOCAB, 32, 50)
    head = build_head(peagle(layers=layers), DIMS)
    head.initialise(ends_of(ends), draft_ids(DRAFT))
    assert torch.equal(head.mask_embedding, ends.embed_VD[MASK])  # type: ignore[union-attr, arg-type]
    assert torch.equal(head.lm_head.weight, ends.lm_head_VD[draft_ids(DRAFT)])  # type: ignore[union-attr]


def test_a_step_changes_the_mask_tokens_embedding_and_no_other() -> None:
    head, ends = double_head("two layers")
    before, own = ends.embed_VD.clone(), head.mask_embedding.detach().clone()  # type: ignore[union-attr]
    batch, teacher = feature_batch(documents(), ends, DEPTH), teacher_of(ends)
    found = gradients(head, head.loss(batch, teacher).sum_T.sum())
    assert float(found["mask_embedding"].norm()) > 0 and float(found["mask_hidden"].norm()) > 0
    optimizer = torch.optim.SGD([p for p in head.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    assert not torch.equal(head.mask_embedding, own)  # type: ignore[arg-type]
    assert torch.equal(ends.embed_VD, before)


def test_the_first_depth_learns_nothing_of_masked_places() -> None:
    """Depth 1 is EAGLE-3's, whose rows masked places do not reach."""
    head, ends = double_head()
    inputs = [replace(d, tokens=[t if t != MASK else 0 for t in d.tokens]) for d in documents()]
    batch = feature_batch(inputs, ends, DEPTH)
    found = gradients(head, head.loss(batch, teacher_of(ends)).sum_T[0])
    assert not found["mask_hidden"].any() and not found["mask_embedding"].any() and found["fc.weight"].any()


def test_depths_weigh_as_their_rows_are_drawn() -> None:
    """By default, until the draw's smallest share: the paper's one mean over drawn rows, up to a factor."""
    head = build_head(PEagleConfig(feature_layers=[1, 3, 5], draft_vocab_size=0, mask_token_id=MASK), DIMS)
    assert head.keep_K is not None  # type: ignore[union-attr]
    weights, kept = head.term_weights().tolist(), list(head.keep_K)  # type: ignore[union-attr, arg-type]
    assert len(weights) == len(kept) == 8
    assert weights[:5] == pytest.approx(kept[:5]) and kept[4] == pytest.approx(0.7**4)
    assert kept[5:] == [0.2] * 3 and weights[5:] == pytest.approx([0.7**d for d in range(5, 8)])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_of_a_depth_are_among_those_of_the_depth_before(seed: int) -> None:
    """The anchors' own masked places below a row run too: their keys exist."""
    head, ends = example_head(Example(peagle(depth=8, row_fraction=0.7)))
    inputs = documents(["." + "A" * 40, "..AAAAAAAAA"], dtype=torch.float32)
    batch = feature_batch(inputs, ends, 8)
    anchors = head.choose_rows(batch, seed).anchors
    rows_K = [set(anchors.row_A[anchors.depths_A > d].tolist()) for d in range(8)]
    assert rows_K[0] == set(batch.anchors.row_A.tolist())
    assert all(deeper < rows for rows, deeper in zip(rows_K[:5], rows_K[1:6], strict=True))
    assert all(deeper <= rows for rows, deeper in zip(rows_K, rows_K[1:], strict=False))
    assert [len(rows) for rows in rows_K] == list(anchors.count_K)
    assert anchors.count_K[7] < 0.35 * batch.anchors.count_K[7]


# refusals


def test_a_head_without_a_mask_token_neither_trains_nor_drafts() -> None:
    ends = random_ends(VOCAB, 32, 50)
    head = build_head(peagle(mask_token_id=None), DIMS)
    head.bind(ends_of(ends))
    assert head.multiply_adds(10, [4, 3, 2, 1]) > 0  # it can be planned
    batch = feature_batch(documents(dtype=torch.float32), ends, DEPTH)
    words = "head.mask_token_id: found null"
    with pytest.raises(ConfigError, match=words):
        head.initialise(ends_of(ends), draft_ids(DRAFT))
    with pytest.raises(ConfigError, match=words):
        head.loss(batch, teacher_of(ends))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mask_token_id": VOCAB}, "head.mask_token_id: found 97, expected a token .* 0 to 96"),
        ({"mask_token_id": -1}, "head.mask_token_id: found -1"),
        ({"depth": 1}, "head.depth: found 1, expected 2 or more.*head.type=eagle3"),
        ({"norm_output": True}, "head.norm_output: found true.*leave it false"),
        ({"loss": "ce"}, "head.loss: found 'ce'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_head(peagle(**fields), DIMS)


# costs


COSTLY: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"layers": 2},
    "three layers, q/k norms": {"layers": 3, "qk_norm": True},
    "two layers, norms of the streams": {"layers": 2, "fc_norm": "stream"},
    "two layers, eight depths, drawn rows": {"layers": 2, "depth": 8, "row_fraction": 0.7},
}
each_cost = pytest.mark.parametrize("fields", COSTLY.values(), ids=COSTLY)


def costly(fields: dict[str, Any]) -> tuple[Head, FeatureBatch]:
    """A head and a pack whose rows outnumber its anchors, in float32; not all rows run at every depth."""
    head, ends = example_head(Example(peagle(**fields), replace(DIMS, intermediate_size=96)))
    batch = feature_batch(documents(["." * 24 + "A" * 40] * 4, dtype=torch.float32), ends, head.depth)
    return head, head.choose_rows(batch, 1)


@each_cost
def test_multiply_adds_are_those_that_run(fields: dict[str, Any]) -> None:
    head, batch = costly(fields)
    counts, rows = batch.anchors.count_K, len(batch.tokens_R)
    with FlopCounterMode(display=False) as counter:
        head.rollout(batch)  # type: ignore[operator]
    # scores of attention are bmm; the product with lm_head stands in the loss
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)) / 2
    # one masked place passes through fc, and through the first layer's projections
    layer = head.draft_layers[0].self_attn
    once = head.fc.weight.numel() + sum(  # type: ignore[union-attr, operator]
        projection.weight.numel() for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    assert rows > 1.5 * counts[0]
    assert head.multiply_adds(rows, counts) == counted - once + head.lm_head.weight.numel() * sum(counts)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("recompute", [False, True])
@each_cost
def test_kept_numbers_are_those_that_autograd_keeps(fields: dict[str, Any], recompute: bool) -> None:
    """All but logits, which only the forward pass holds. The estimate is within a fifth."""
    head, batch = costly(fields)
    if recompute:
        head.recompute_activations()
    found = kept_by_autograd(head, batch)
    anchors = batch.anchors.count_K[0]
    expected = head.kept_numbers(len(batch.tokens_R), anchors, recompute) - anchors * DRAFT
    assert found == pytest.approx(expected, rel=0.2)
