"""EAGLE-1: its serving step against the per-position loop, its noise, and the loss of the top tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.cache import chain_by_steps, rows_by_steps
from reference.eagle import chain_logits, predicted_feature
from reference.families import DIMS, REFERENCES, Example, documents, eagle, example_head, shape_of
from reference.tiny import assert_near, check_against, double_weights, feature_batch, teacher_of
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.errors import ConfigError
from headstart.heads.families import EagleConfig, build_head
from headstart.heads.losses import fused


def test_defaults_are_one_and_a_tenth():
    config = EagleConfig()
    assert (config.hidden_loss_weight, config.logit_loss_weight, config.feature_noise) == (1.0, 0.1, 0.1)


def test_serving_rows_are_the_training_forward():
    """Rows fed through `step` into a cache give g_t and its logits, however they are cut into calls."""
    head, ends = example_head(Example(eagle()), torch.float64)
    (document,), weights, shape = documents(["." * 9], 4), double_weights(head), shape_of(head)
    for cuts in ([8], [1] * 8, [3, 1, 4]):
        g_NH, logits_NU = rows_by_steps(head, document, cuts)
        for t in range(8):
            expected = predicted_feature(weights, ends, shape, document, t)
            assert_near(g_NH[t], expected, f"g of row {t}, calls of {cuts}")
            assert_near(logits_NU[t], ends.logits(expected), f"logits of row {t}")


def test_serving_chain_recycles_its_own_prediction():
    head, ends = example_head(Example(eagle()), torch.float64)
    (document,) = documents(["." * 9], 4)
    fed = [5, 71, 2, 40]
    expected = chain_logits(
        double_weights(head), ends, shape_of(head), document.tokens[:6], document.hidden_TD[:6], fed
    )
    assert_near(chain_by_steps(head, document, 6, fed), torch.stack(expected), "chain")


def test_noise_is_uniform_scaled_by_document_length_and_only_in_training():
    head, ends = example_head(Example(eagle(feature_noise=0.1)))
    lengths = [40, 8]
    inputs = documents(["." * (n // 2) + "A" * (n // 2) for n in lengths], dtype=torch.float32)
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
    names = set(example_head(Example(eagle()))[0].state_dict())
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
    head, ends = example_head(Example(eagle(depth=2, top_tokens_loss_weight=1.0)), torch.float64)
    weights = double_weights(head)
    expected = REFERENCES["eagle"].twin(head, weights, ends, documents())
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 4 * 97)
    check_against(head, feature_batch(documents(), ends, 2), teacher_of(ends), expected, weights)


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
    counts = []
    for weight in (0.0, 1.0):
        head, ends = example_head(Example(eagle(depth=2, top_tokens_loss_weight=weight)), torch.float64)
        batch = feature_batch(documents(), ends, 2)
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


def test_every_pass_has_the_same_weight():
    assert build_head(eagle(depth=3), DIMS).term_weights().tolist() == [1.0, 1.0, 1.0]


def test_unknown_loss_and_no_pass_at_all_are_refused():
    with pytest.raises(ConfigError, match="head.loss: found 'ce', expected one of soft_ce, kl, lk"):
        build_head(EagleConfig(loss="ce"), DIMS)
    with pytest.raises(ConfigError, match="head.depth"):
        build_head(EagleConfig(depth=0), DIMS)
