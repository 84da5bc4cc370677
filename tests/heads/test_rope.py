"""Rope: the formula, and equality with the target's own for every kind that the targets use."""

from __future__ import annotations

import pytest
import torch
from reference.llama import Shape
from reference.llama import rotate as naive_rotate
from reference.tiny import assert_near
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from headstart.heads.dims import HeadDims
from headstart.heads.kernels.elementwise import rotate
from headstart.heads.layers import Rope

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def llama_config(rope: dict, head_dim: int = 16) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_hidden_layers=2,
        intermediate_size=48,
        vocab_size=97,
        max_position_embeddings=1024,
        rope_parameters=dict(rope),
    )


@pytest.mark.parametrize("kind", ROPES)
def test_cos_and_sin_are_the_targets(kind: str):
    config = llama_config(ROPES[kind])
    position = torch.tensor([[0, 1, 7, 100, 255, 1000]])
    cos, sin = Rope(HeadDims.from_hf_config(config))(position)
    theirs_cos, theirs_sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 6, 32), position)
    torch.testing.assert_close(cos, theirs_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, theirs_sin, rtol=0, atol=1e-6)


def test_longrope_is_the_targets_within_its_original_length():
    """Beyond it the target turns all positions of a forward by its long factors: HeadDims.positions ends there."""
    factors = {"short_factor": [1.0 + 0.1 * n for n in range(8)], "long_factor": [4.0 + n for n in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256, **factors}
    config = llama_config(rope)
    dims, position = HeadDims.from_hf_config(config), torch.tensor([[0, 1, 7, 100, 255]])
    assert dims.positions == 256
    cos, _ = Rope(dims)(position)
    theirs, _ = LlamaRotaryEmbedding(config)(torch.zeros(1, 5, 32), position)
    torch.testing.assert_close(cos, theirs, rtol=0, atol=1e-6)
    beyond, _ = LlamaRotaryEmbedding(config)(torch.zeros(1, 6, 32), torch.tensor([[0, 1, 7, 100, 255, 256]]))
    assert (beyond[:, :5] - cos).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rotation_is_the_formula(kind: str):
    dims = HeadDims.from_hf_config(llama_config(ROPES[kind], head_dim=8))
    shape = Shape(4, 2, 8, rope=ROPES[kind])
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([0, 1, 5, 31, 200])
    # rotate takes [..., heads, width]: one head here
    turned = rotate(x[:, None], *Rope(dims)(position))[:, 0]
    naive = torch.stack([naive_rotate(x[i].double(), int(position[i]), shape) for i in range(5)])
    # the angle itself is a float32 product: 200 rad carries 200 · 6e-8 of error
    assert_near(turned, naive, kind, tolerance=4e-5)


def test_partial_rotation_leaves_the_other_channels_alone():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = PhiConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=48,
        vocab_size=97,
        rope_parameters=rope,
    )
    dims = HeadDims.from_hf_config(config)
    position = torch.tensor([[0, 1, 9, 40]])
    cos, sin = Rope(dims)(position)
    theirs_cos, theirs_sin = PhiRotaryEmbedding(config)(torch.zeros(1, 4, 32), position)
    torch.testing.assert_close(cos, theirs_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, theirs_sin, rtol=0, atol=1e-6)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x[:, None], cos[0], sin[0])[:, 0]
    assert torch.equal(turned[:, 4:], x[:, 4:])
    shape = Shape(4, 4, 8, rope=rope)
    naive = torch.stack([naive_rotate(x[i].double(), int(position[0, i]), shape) for i in range(4)])
    assert_near(turned, naive, "partial")


def test_rotation_is_transformers_half_split():
    config = llama_config(ROPES["llama3"])
    position = torch.arange(12)[None]
    cos, sin = Rope(HeadDims.from_hf_config(config))(position)
    q = torch.randn(1, 4, 12, 16, generator=torch.Generator().manual_seed(1))
    theirs, _ = apply_rotary_pos_emb(q, q, cos, sin)
    ours = rotate(q.transpose(1, 2), cos, sin).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
