"""EAGLE-1 against the per-position loop, and its serving step against the same loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.cache import chain_by_steps, rows_by_steps
from reference.documents import Document, Ends
from reference.eagle import chain_logits, eagle_loss, predicted_feature
from reference.llama import Shape
from reference.tiny import (
    assert_near,
    check_against,
    double_document,
    double_ends,
    double_weights,
    ends_of,
    feature_batch,
    random_document,
    random_ends,
    randomise,
    teacher_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families import EagleConfig, build_head
from headstart.heads.families.eagle.head import EagleHead
from headstart.heads.losses import fused

ROPE = {"rope_type": "default", "rope_theta": 100.0}
DIMS = HeadDims(32, 97, 8, 4, 2, 8, 48, rms_norm_eps=1e-5, rope_parameters=ROPE)
PATTERNS = ["..AAAAAA.B..CCC", ".", "AAAA", "...AABBBBB", ".A", "....AA"]


def shape_of(dims: HeadDims) -> Shape:
    return Shape(
        dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.rms_norm_eps, dims.hidden_act, dims.rope_parameters
    )


def documents(seed: int = 0) -> list[Document]:
    return [random_document(pattern, 97, 32, 3, seed + i) for i, pattern in enumerate(PATTERNS)]


def tiny_eagle(
    dims: HeadDims = DIMS, dtype: torch.dtype = torch.float32, ends: Ends | None = None, **fields: object
) -> tuple[EagleHead, Ends]:
    ends = ends or random_ends(97, 32, 50)
    ends = double_ends(ends) if dtype == torch.float64 else ends
    head = build_head(EagleConfig(**{"feature_noise": 0.0, **fields}), dims)
    head.initialise(ends_of(ends))
    randomise(head, 1)
    return head.to(dtype), ends


def test_defaults_are_one_and_a_tenth():
    config = EagleConfig()
    assert (config.hidden_loss_weight, config.logit_loss_weight, config.feature_noise) == (1.0, 0.1, 0.1)


def test_serving_rows_are_the_training_forward():
    """Rows fed through `step` into a cache give g_t and its logits, however they are cut into calls."""
    head, ends = tiny_eagle(dtype=torch.float64)
    document = double_document(random_document("." * 9, 97, 32, 3, 4))
    weights, shape = double_weights(head), shape_of(DIMS)
    for cuts in ([8], [1] * 8, [3, 1, 4]):
        g_NH, logits_NU = rows_by_steps(head, document, cuts)
        for t in range(8):
            expected = predicted_feature(weights, ends, shape, document, t)
            assert_near(g_NH[t], expected, f"g of row {t}, calls of {cuts}")
            assert_near(logits_NU[t], ends.logits(expected), f"logits of row {t}")


def test_serving_chain_recycles_its_own_prediction():
    head, ends = tiny_eagle(dtype=torch.float64)
    document = double_document(random_document("." * 9, 97, 32, 3, 4))
    fed = [5, 71, 2, 40]
    expected = chain_logits(
        double_weights(head), ends, shape_of(DIMS), document.tokens[:6], document.hidden_TD[:6], fed
    )
    assert_near(chain_by_steps(head, document, 6, fed), torch.stack(expected), "chain")


def test_noise_is_uniform_scaled_by_document_length_and_only_in_training():
    head, ends = tiny_eagle(feature_noise=0.1)
    lengths = [40, 8]
    inputs = [random_document("." * (n // 2) + "A" * (n // 2), 97, 32, 3, n) for n in lengths]
    batch = feature_batch(inputs, ends, 1, pad_to=60)
    head.eval()
    assert torch.equal(head.noisy(batch), batch.hidden_RD)
    head.train()
    torch.manual_seed(0)
    noise = head.noisy(batch) - batch.hidden_RD
    start = 0
    for length in lengths:
        limit = 0.1 * 512 / length
        part = noise[start : start + length]
        assert part.abs().max() <= limit * (1 + 1e-5)
        # uniform on (-a, a): standard deviation a / √3, mean 0
        assert part.std().item() == pytest.approx(limit / 3**0.5, rel=0.08)
        assert abs(part.mean().item()) < 0.15 * limit
        start += length
    targets = batch.hidden_RD.clone()
    head.loss(batch, teacher_of(ends))
    assert torch.equal(batch.hidden_RD, targets), "noise must not reach the regression target"


def test_no_input_norm_no_bias_no_final_norm():
    names = set(tiny_eagle()[0].state_dict())
    assert names == {
        "fc.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.post_attention_layernorm.weight",
    }


def test_the_loss_of_the_top_tokens_in_chunks(monkeypatch: pytest.MonkeyPatch):
    head, ends = tiny_eagle(dtype=torch.float64, depth=2, top_tokens_loss_weight=1.0)
    inputs = [double_document(d) for d in documents()]
    weights = double_weights(head)
    expected = eagle_loss(weights, ends, inputs, shape_of(DIMS), depth=2, top_weight=1.0)
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 4 * 97)
    check_against(head, feature_batch(inputs, ends, 2), teacher_of(ends), expected, weights)


class Blocks(TorchDispatchMode):
    """Counts operations that allocate `elements` or more."""

    def __init__(self, elements: int):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.count += made.numel() >= self.elements
        return result


def test_the_loss_of_the_top_tokens_holds_no_block_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """In chunks, as many blocks of anchors × V and more are made with that loss as without."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 4 * 97)
    inputs = [double_document(d) for d in documents()]
    counts = []
    for weight in (0.0, 1.0):
        head, ends = tiny_eagle(dtype=torch.float64, depth=2, top_tokens_loss_weight=weight)
        batch = feature_batch(inputs, ends, 2)
        with Blocks(len(batch.anchors) * 97) as found:
            head.loss(batch, teacher_of(ends)).sum_T.sum().backward()
        counts.append(found.count)
    assert counts[0] == counts[1] > 0


def test_the_loss_of_the_top_tokens_needs_a_soft_cross_entropy():
    assert EagleConfig().top_tokens_loss_weight == 0.0
    for fields, message in (
        ({"loss": "kl"}, "head.top_tokens_loss_weight: found 1.0 with head.loss=kl"),
        ({"logit_loss_weight": 0.0}, "head.logit_loss_weight=0.0"),
        ({"top_tokens": 0}, "head.top_tokens: found 0, expected at least 1"),
        ({"top_tokens_loss_weight": -1.0}, "head.top_tokens_loss_weight: found -1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_head(EagleConfig(**{"top_tokens_loss_weight": 1.0, **fields}), DIMS)


def test_the_first_pass_is_eagle_1():
    head, ends = tiny_eagle(dtype=torch.float64, depth=3)
    single, _ = tiny_eagle(dtype=torch.float64)
    single.load_state_dict(head.state_dict())
    inputs = [double_document(d) for d in documents()]
    first = head.loss(feature_batch(inputs, ends, 3), teacher_of(ends))
    only = single.loss(feature_batch(inputs, ends, 1), teacher_of(ends))
    assert first.sum_T[0].item() == pytest.approx(only.sum_T[0].item(), rel=1e-12)
    assert head.term_weights().tolist() == [1.0, 1.0, 1.0], "every pass has the same weight"


def test_unknown_loss_and_no_pass_at_all_are_refused():
    with pytest.raises(ConfigError, match="head.loss: found 'ce', expected one of soft_ce, kl, lk"):
        build_head(EagleConfig(loss="ce"), DIMS)
    with pytest.raises(ConfigError, match="head.depth"):
        build_head(EagleConfig(depth=0), DIMS)
