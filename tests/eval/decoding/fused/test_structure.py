"""What a layer consists of is found by watching it, and a fused form that computes something else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from headstart.bench.architectures import random_model
from headstart.eval.decoding.engine import attention_windows
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.layers import LayerFacts
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.fused.proof import find_layers
from headstart.eval.decoding.fused.weights import norm_weights
from headstart.eval.kernels.norm import norm_eager

PRE = ("input_layernorm", None, "post_attention_layernorm", None)
BOTH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
POST = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
#: architecture → (norms, parallel, scales)
BLOCKS = {
    "Llama": (PRE, False, (1.0, 1.0)),
    "Granite": (PRE, False, (0.5, 0.5)),
    "Gemma 2": (BOTH, False, (1.0, 1.0)),
    "GLM-4": (
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        False, (1.0, 1.0),
    ),
    "OLMo-2": (POST, False, (1.0, 1.0)),
    "Cohere2": (("input_layernorm", None, None, None), True, (1.0, 1.0)),
    "GPT-NeoX": (PRE, True, (1.0, 1.0)),
    "Phi-2": (("input_layernorm", None, None, None), True, (1.0, 1.0)),
}  # fmt: skip
#: architecture → (rotation, by angle, grouped, norms last) of the first layer
ATTENTIONS = {
    "Llama": ("halves", False, False, False),
    "Cohere2": ("pairs", False, False, False),
    "GLM-4": ("pairs", True, False, False),
    "ERNIE-4.5": ("pairs", True, False, False),
    "gpt-oss": ("halves", True, False, False),
    "GPT-NeoX": ("halves", False, True, False),
    "HunYuan dense": ("halves", False, False, True),
    "OLMo-2": ("halves", False, False, False),
}
#: architecture → (first products, activation, without a gate)
MLPS = {
    "Llama": (("gate_proj", "up_proj"), "silu", False),
    "Gemma 2": (("gate_proj", "up_proj"), "gelu_tanh", False),
    "Phi-3": (("gate_up_proj",), "silu", False),
    "GPT-NeoX": (("dense_h_to_4h",), "gelu", True),
    "StarCoder2": (("c_fc",), "gelu_tanh", True),
    "Nemotron": (("up_proj",), "relu2", True),
}


def windows_of(model: Any) -> list[int | None]:
    config = model.config.get_text_config()
    windows = attention_windows(model.config)
    kinds = getattr(config, "layer_types", None) or [next(iter(windows))] * config.num_hidden_layers
    return [windows[kind] for kind in kinds]


def facts_of(name: str) -> list[LayerFacts]:
    model = random_model(name)
    return find_layers(model, windows_of(model))[2]


@pytest.mark.parametrize("name", BLOCKS)
def test_where_the_norms_stand(name: str) -> None:
    facts = facts_of(name)
    found = {
        ((each.before_attention, each.after_attention, each.before_mlp, each.after_mlp), each.parallel, each.scales)
        for each in facts
    }
    assert found == {BLOCKS[name]} and len(facts) == 8


@pytest.mark.parametrize("name", ATTENTIONS)
def test_how_queries_and_keys_rotate(name: str) -> None:
    heads = facts_of(name)[0].attention_facts
    assert (heads.rotation, heads.by_angle, heads.grouped, heads.norm_last) == ATTENTIONS[name]


@pytest.mark.parametrize("name", MLPS)
def test_what_the_mlp_multiplies(name: str) -> None:
    products = facts_of(name)[0].mlp_facts
    assert products is not None and (products.first, products.activation, products.alone) == MLPS[name]


def test_layers_without_rope() -> None:
    assert [each.attention_facts.rotation for each in facts_of("SmolLM3")] == ["halves", "halves", "halves", "none"] * 2
    model = random_model("EXAONE-4")
    rotations = [each.attention_facts.rotation for each in find_layers(model, windows_of(model))[2]]
    assert rotations == ["halves" if window is not None else "none" for window in windows_of(model)]


def test_small_weights_do_not_hide_that_nothing_turns() -> None:
    """With scores near 0 every token is seen alike, turned or not: louder inputs tell."""
    model = random_model("SmolLM3")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(1e-4)
    facts = find_layers(model, windows_of(model))[2]
    assert [each.attention_facts.rotation for each in facts] == ["halves", "halves", "halves", "none"] * 2


class UpFirst(nn.Module):
    """An MLP that makes the factor before the gate."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.up_proj, self.gate_proj = mlp.up_proj, mlp.gate_proj
        self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        factor = self.up_proj(x)
        return self.down_proj(factor * self.act_fn(self.gate_proj(x)))


def test_the_gate_is_what_the_activation_reads() -> None:
    model = random_model("Llama")
    model.model.layers[1].mlp = UpFirst(model.model.layers[1].mlp)
    products = find_layers(model, windows_of(model))[2][1].mlp_facts
    assert products is not None and products.first == ("gate_proj", "up_proj")


class Scaled(UpFirst):
    """Two products and one activation, but more between them than the fused form does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(1.5 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_an_mlp_that_does_more_runs_as_it_is() -> None:
    model = random_model("Llama")
    model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp)
    facts = find_layers(model, windows_of(model))[2]
    assert [each.mlp_facts is None for each in facts] == [False, True] + [False] * 6
    assert FusedModel(model, attention_windows(model.config)).mixes


def test_numbers_of_the_modules_are_followed() -> None:
    model = random_model("Llama")
    model.model.layers[2].self_attn.scaling *= 1.5
    twin = FusedModel(model, attention_windows(model.config))
    assert twin.layers[2].attention.shape.scale == pytest.approx(1.5 * twin.layers[1].attention.shape.scale)


@pytest.mark.parametrize("window", [11, 13, None])
def test_a_wrong_window_is_seen(window: int | None) -> None:
    model = random_model("Mistral")
    assert attention_windows(model.config) == {"sliding_attention": 12}
    with pytest.raises(Unfusable, match="no known form of rotary embedding and norms"):
        FusedModel(model, {"sliding_attention": window})


def test_a_longer_window_is_checked_on_rows_that_leave_it() -> None:
    model = random_model("Mistral")
    model.config.sliding_window = 40
    FusedModel(model, {"sliding_attention": 40})
    with pytest.raises(Unfusable, match="no known form"):
        FusedModel(model, {"sliding_attention": 41})


def test_an_unknown_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = modeling_llama.apply_rotary_pos_emb

    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return turned(q, k, cos, -2 * sin, **more)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
    with pytest.raises(Unfusable, match="no known form of rotary embedding"):
        facts_of("Llama")


def test_what_happens_at_late_positions_only_is_seen() -> None:
    """Ministral-3 scales the queries of positions beyond its first length."""
    model = random_model("Ministral-3")
    model.config.rope_parameters["original_max_position_embeddings"] = 400
    with pytest.raises(Unfusable, match="no known form"):
        FusedModel(model, attention_windows(model.config))


class Doubled(nn.Module):
    """Adds its sublayer twice."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        made, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **keywords)
        hidden_states = hidden_states + made + made.flip(-1)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_another_sum_is_refused() -> None:
    model = random_model("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.model.layers[3] = Doubled(model.model.layers[3])
    with pytest.raises(Unfusable, match="Doubled does not add the results of its sublayers"):
        FusedModel(model, attention_windows(model.config))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Special(Tensor):
    """As quantised weights are held."""


def test_special_weights_are_refused() -> None:
    model = random_model("Llama")
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.as_subclass(Special), requires_grad=False)
    with pytest.raises(Unfusable, match="weights .*Special"):
        FusedModel(model, attention_windows(model.config))


def test_whatever_fails_is_a_reason() -> None:
    model = random_model("Llama")
    model.model.layers[1].mlp.act_fn = None
    with pytest.raises(Unfusable, match="while fusing LlamaForCausalLM: TypeError"):
        FusedModel(model, attention_windows(model.config))


class Own(nn.Module):
    """A norm that tells no eps."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_norms_are_found_by_running_them() -> None:
    noise = torch.Generator().manual_seed(0)
    x_RD = torch.randn((4, 16), generator=noise)
    device = torch.device("cpu")
    layer, rms = nn.LayerNorm(16, eps=1e-3), nn.RMSNorm(16, eps=1e-3)
    for parameter in (*layer.parameters(), *rms.parameters()):
        parameter.data.normal_(generator=noise)
    weightless = Own(lambda x: nn.functional.layer_norm(x, (16,), eps=1e-5))
    for norm in (layer, rms, weightless):
        torch.testing.assert_close(norm_eager(x_RD, norm_weights(norm, 16, device)), norm(x_RD))
    with pytest.raises(Unfusable, match="Own is neither an RMSNorm nor a LayerNorm"):
        norm_weights(Own(lambda x: x / x.abs().mean(-1, keepdim=True)), 16, device)
