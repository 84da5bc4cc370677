"""Draft layers that start from layers of the target: what they compute then, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from headstart.heads.base import Head
from headstart.heads.ends import TargetEnds
from headstart.heads.errors import ConfigError
from headstart.heads.families import DSparkConfig, Eagle3Config, PEagleConfig, build_head
from headstart.heads.targets.layer_weights import check_start
from headstart.heads.targets.target import Target

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97, max_position_embeddings=128, head_dim=8, initializer_range=0.2, eos_token_id=1, bos_token_id=0,
    pad_token_id=0,
)  # fmt: skip


def target_of(kind: type[PreTrainedConfig] = LlamaConfig, **more: Any) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**(SIZES | more)), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms that matter
                parameter.add_(0.3 * torch.randn_like(parameter))
    return Target.from_model(model)


def head_of(target: Target, config: Any) -> Head:
    torch.manual_seed(1)
    head = build_head(config, target.dims)
    size = head.draft_vocab_size
    head.initialise(target.ends, None if size is None else torch.arange(size))
    return head


def layer_of_target(target: Target, number: int, x_BTD: Tensor) -> Tensor:
    """What the target's own layer makes of its input."""
    model: Any = target.model.model
    positions = torch.arange(x_BTD.shape[1])[None]
    turn = model.rotary_emb(x_BTD, positions)
    length = x_BTD.shape[1]
    mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
    out = model.layers[number](x_BTD, attention_mask=mask, position_embeddings=turn, position_ids=positions)
    return out[0] if isinstance(out, tuple) else out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaConfig, Eagle3Config(draft_vocab_size=40, start_layers=[-1])),
        (LlamaConfig, Eagle3Config(draft_vocab_size=40, start_layers=[3], num_key_value_heads=4)),
        (LlamaConfig, Eagle3Config(draft_vocab_size=40, start_layers=[3], intermediate_size=80)),
        (Qwen3Config, Eagle3Config(draft_vocab_size=40, start_layers=[2], qk_norm=True)),
        (LlamaConfig, PEagleConfig(draft_vocab_size=40, start_layers=[4, 5], layers=2, mask_token_id=96)),
    ],
)
@torch.no_grad()
def test_the_first_layer_computes_what_the_target_s_does(kind, config):
    """Without the half that reads embeddings, which starts at random; fc passes the features on."""
    target = target_of(kind)
    head: Any = head_of(target, config)
    number = config.start_layers[0] % 8
    x_BTD = torch.randn(1, 9, 32)
    nearest = min(range(3), key=lambda k: abs(head.feature_layers[k] - number))
    streams = torch.randn(1, 9, 3, 32)
    streams[:, :, nearest] = x_BTD
    assert torch.equal(head.fuse(x_BTD, streams), x_BTD)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.midlayer.self_attn, name).weight
        assert weight[:, :32].std() > 0.05  # of the embeddings: random
        weight[:, :32] = 0.0
    inner = head.mix(torch.randn(1, 9, 32), x_BTD)
    turn = head.rope(torch.arange(9)[None])
    found = head.midlayer.decode(inner, x_BTD, *turn, attend)
    torch.testing.assert_close(found, layer_of_target(target, number, x_BTD), rtol=1e-4, atol=1e-5)
    for layer, number in zip(head.later_layers, config.start_layers[1:], strict=True):
        found = layer.decode(layer.input_layernorm(x_BTD), x_BTD, *turn, attend)
        torch.testing.assert_close(found, layer_of_target(target, number, x_BTD), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fc_norm", ["stream", "concat"])
@torch.no_grad()
def test_normed_features_are_as_large_again_as_in_the_target(fc_norm):
    target = target_of()
    for layer in target.model.model.layers[:3]:  # a stream that is not of size 1
        layer.mlp.down_proj.weight.mul_(40)
    head: Any = head_of(target, Eagle3Config(draft_vocab_size=40, start_layers=[-1], fc_norm=fc_norm))
    torch.manual_seed(3)
    _, found = target.forward_documents(torch.randint(0, 97, (1, 50)), tuple(head.feature_layers))
    streams = torch.stack([found[k][0] for k in head.feature_layers], 1)
    fused, last = head.fuse(streams[:, -1], streams), streams[:, -1]
    ratio = fused.norm(dim=1) / last.norm(dim=1)
    assert last.square().mean(-1).sqrt().median() > 3
    assert 0.8 < ratio.median() < 1.25
    torch.testing.assert_close(torch.cosine_similarity(fused, last), torch.ones(50))


@torch.no_grad()
def test_block_layers_are_copies_too():
    target = target_of(Qwen3Config)
    config = DSparkConfig(layers=2, num_key_value_heads=4, start_layers=[5, -1], mask_token_id=96)
    head: Any = head_of(target, config)
    x_BTD, turn = torch.randn(1, 9, 32), head.rope(torch.arange(9)[None])
    for layer, number in zip(head.layers, (5, 7), strict=True):
        found = layer.decode(layer.input_layernorm(x_BTD), x_BTD, *turn, attend)
        torch.testing.assert_close(found, layer_of_target(target, number, x_BTD), rtol=1e-4, atol=1e-5)
    streams = torch.randn(3, len(head.feature_layers), 32)
    nearest = min(range(len(head.feature_layers)), key=lambda k: abs(head.feature_layers[k] - 5))
    normed: Any = target.model.model.layers[5].input_layernorm(streams[:, nearest])
    torch.testing.assert_close(head.context(streams), normed)


def test_norms_of_heads_that_the_target_lacks_stay_at_one():
    head: Any = head_of(target_of(), DSparkConfig(layers=1, start_layers=[0], mask_token_id=96))
    assert bool((head.layers[0].self_attn.q_norm.weight == 1).all())


def test_further_units_of_a_wider_mlp_can_learn():
    head: Any = head_of(target_of(), Eagle3Config(draft_vocab_size=40, start_layers=[3], intermediate_size=80))
    mlp = head.midlayer.mlp
    assert bool((mlp.down_proj.weight[:, 48:] == 0).all())
    mlp(torch.randn(5, 32)).square().sum().backward()
    assert mlp.down_proj.weight.grad[:, 48:].abs().sum(0).min() > 0


def test_null_starts_as_before():
    target = target_of()
    plain, copied = (head_of(target, Eagle3Config(draft_vocab_size=40, start_layers=x)) for x in (None, [-1]))
    assert not torch.equal(plain.state_dict()["fc.weight"], copied.state_dict()["fc.weight"])
    assert torch.equal(plain.state_dict()["lm_head.weight"], copied.state_dict()["lm_head.weight"])
    assert "start_layers" not in plain.config.identity() and copied.config.identity()["start_layers"] == [-1]


@pytest.mark.parametrize(
    ("kind", "more", "config", "message"),
    [
        (LlamaConfig, {}, dict(start_layers=[8]), "head.start_layers: found layer 8, expected -8 to 7"),
        (LlamaConfig, {}, dict(start_layers=[1, 2]), r"found \[1, 2\], expected one layer .* each of the 1 draft"),
        (LlamaConfig, {}, dict(start_layers=[1], intermediate_size=40), "intermediate_size: found 40 .* least the 48"),
        (LlamaConfig, {}, dict(start_layers=[1], hidden_size=16), "head.hidden_size: found 16 .* the 32 of layer 1"),
        (LlamaConfig, {}, dict(start_layers=[1], num_key_value_heads=1), "found 1 .* a multiple of the target's 2"),
        (Qwen3Config, {}, dict(start_layers=[1]), "head.qk_norm: found false with head.start_layers"),
        (Qwen2Config, {}, dict(start_layers=[1]), "layer 1 .* not of Llama's or Qwen3's type .*k_proj.bias"),
        (Gemma2Config, {}, dict(start_layers=[1]), "layer 1 .* not of Llama's .*post_feedforward_layernorm"),
        (LlamaConfig, {"hidden_act": "gelu"}, dict(start_layers=[1]), "a target whose MLP computes gelu, and .* silu"),
        (LlamaConfig, {"quantization_config": {"quant_method": "x"}}, dict(start_layers=[1]), "quantised weights"),
    ],
)
def test_layers_that_cannot_be_copied_are_refused_without_weights(kind, more, config, message):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**SIZES))
        head = build_head(Eagle3Config(draft_vocab_size=40, **config), target_of(kind).dims)
    for name, value in more.items():
        setattr(model.config, name, value)
    ends = TargetEnds(torch.zeros(97, 32), target_of().teacher, model)
    with pytest.raises(ConfigError, match=message):
        check_start(ends, config["start_layers"], head.draft_layers, "silu")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attention_multiplier": 0.25}, "layer 1 .* multiplies its scores of attention by 0.25, .* by 0.353553"),
        ({"attention_multiplier": 8**-0.5, "residual_multiplier": 0.5}, "multiplies its outputs by 0.5, .* by 1:"),
        ({"attention_multiplier": 8**-0.5}, None),
    ],
)
def test_layers_that_scale_otherwise_are_refused(more, said):
    """Granite's layers have the names of Llama's."""
    head = build_head(Eagle3Config(draft_vocab_size=40, start_layers=[1]), target_of().dims)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GraniteConfig(**SIZES, **more))
    ends = TargetEnds(torch.zeros(97, 32), target_of().teacher, model)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_start(ends, [1], head.draft_layers, "silu")


def test_weights_that_are_not_there_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    target = target_of()
    head = build_head(Eagle3Config(draft_vocab_size=40, start_layers=[1]), target.dims)
    with pytest.raises(ConfigError, match="layer 1 of the target is not whole on this device"):
        head.initialise(TargetEnds(target.ends.embed_VD, target.teacher, model), torch.arange(40))
    with pytest.raises(ConfigError, match="only the ends of the target are loaded"):
        head.initialise(TargetEnds(target.ends.embed_VD, target.teacher), torch.arange(40))
