"""How large targets are: published ones by their config.json, small ones by counting what a forward does."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.targets.load import with_attention
from headstart.heads.targets.locate import text_decoder
from headstart.heads.targets.sizes import (
    CacheBytes,
    TargetSizes,
    active_parameters,
    cache_bytes,
    expert_stacks,
    experts_per_token,
    widest_layer,
)

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
KIB, MIB = 1024, 2**20


def on_meta(name: str) -> Any:
    config = AutoConfig.for_model(**json.loads((CONFIGS / f"{name}.json").read_text()))
    with torch.device("meta"):
        model, _ = with_attention(
            lambda attention: AutoModelForCausalLM.from_config(config, attn_implementation=attention), "sdpa"
        )
    return model.eval().to(torch.bfloat16)


#: name → parameters in all (model cards), active ones (by hand), experts, and what the cache takes
PUBLISHED = {
    "Llama-3.1-8B-Instruct": (8.03e9, 8.03e9 - 128256 * 4096, None, CacheBytes(32 * 2 * 8 * 128 * 2)),
    "Llama-3.3-70B-Instruct": (70.55e9, 70.55e9 - 128256 * 8192, None, CacheBytes(80 * 2 * 8 * 128 * 2)),
    # the card: 30.5 B in all, 3.3 B active, both matrices of 151936 × 2048 among them
    "Qwen3-30B-A3B": (30.5e9, 3.35e9 - 151936 * 2048, (8, 128), CacheBytes(48 * 2 * 4 * 128 * 2)),
    # the card: 20.9 B in all, 3.6 B active, the output matrix among them (arXiv 2508.10925 table 1)
    "gpt-oss-20b": (20.91e9, 3.61e9, (4, 32), CacheBytes(12 * 2 * 8 * 64 * 2, {128: 12 * 2 * 8 * 64 * 2})),
    # arXiv 2503.19786 table 1: vision 417 M, embeddings 1,012 M (tied), others 10,759 M
    "gemma-3-12b-it": (
        12.19e9, 10.759e9 + 1.007e9, None, CacheBytes(8 * 2 * 8 * 256 * 2, {1024: 40 * 2 * 8 * 256 * 2})
    ),
    # the card: 80 B in all (with the MTP layer), 3 B active, the two matrices apart; per recurrent layer 32 states of
    # 128 × 128 in float32 and 4 columns of 8192 channels
    "Qwen3-Next-80B-A3B-Instruct": (
        79.67e9, 3.25e9 + 151936 * 2048, (10, 512),
        CacheBytes(12 * 2 * 2 * 256 * 2, {}, 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_targets_have_their_published_sizes(name: str) -> None:
    total, active, experts, cache = PUBLISHED[name]
    sizes = TargetSizes.of(on_meta(name))
    assert sizes.parameters == pytest.approx(total, rel=0.02)
    assert sizes.active == pytest.approx(active, rel=0.02)
    assert (sizes.experts_per_token, sizes.experts) == (experts or (None, None))
    assert sizes.cache == cache


def test_a_cache_is_said_in_words_and_counted_at_any_length() -> None:
    cache = CacheBytes(24 * KIB, {128: 12 * KIB}, 3 * MIB)
    assert str(cache) == "24 KiB a token, 12 KiB a token of the last 128, 3 MiB of states a sequence"
    assert cache.at(100) == 100 * 36 * KIB + 3 * MIB
    assert cache.at(1000) == 1000 * 24 * KIB + 128 * 12 * KIB + 3 * MIB


SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
QWEN = dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=16)
DEEPSEEK = dict(
    n_routed_experts=4, num_experts_per_tok=3, n_group=1, topk_group=1, n_shared_experts=1, moe_intermediate_size=16,
    first_k_dense_replace=1,
)  # fmt: skip
MIXTURES = {
    "qwen3_moe": QWEN,
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 16},
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=3),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=3),
    "glm4_moe": DEEPSEEK,
    "deepseek_v3": DEEPSEEK
    | dict(
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
    ),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=3, moe_intermediate_size=16, moe_layer_start_index=1),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=3),
    "gemma4_text": dict(enable_moe_block=True, num_experts=4, top_k_experts=3, moe_intermediate_size=16),
}


def small(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **MIXTURES[kind]})
    model, _ = with_attention(
        lambda attention: AutoModelForCausalLM.from_config(config, attn_implementation=attention), "sdpa"
    )
    return model.eval()


@pytest.mark.parametrize("kind", MIXTURES)
@torch.no_grad()
def test_the_chosen_experts_are_those_that_the_model_runs(kind: str) -> None:
    """Against the width of the router's choice in a forward."""
    model, chosen = small(kind), []

    def see(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        integers = [a for a in (*args, *kwargs.values()) if torch.is_tensor(a) and not a.is_floating_point()]
        chosen.extend(a.shape[-1] for a in integers if a.ndim == 2)

    stacks = list(expert_stacks(model))
    assert stacks and {count for _, count in stacks} == {4}
    for stack, _ in stacks:
        stack.register_forward_pre_hook(see, with_kwargs=True)
    model(input_ids=torch.arange(8)[None])
    assert experts_per_token(model) == 3
    if kind != "granitemoe":  # its experts get the tokens sorted, and no choice
        assert set(chosen) == {3} and len(chosen) == len(stacks)
    routed = sum(p.numel() for stack, _ in stacks for p in stack.parameters(recurse=False))
    tables = sum(
        p.numel() for m in text_decoder(model).modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    )
    plain = sum(p.numel() for p in text_decoder(model).parameters()) - tables
    assert active_parameters(text_decoder(model), 3) == plain - routed // 4


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@torch.no_grad()
def test_the_cache_of_a_model_without_values_is_that_of_one_with_values(kind: str) -> None:
    model = small(kind)
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=torch.arange(8)[None], use_cache=True, **{name: cache})
    kept = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    found = cache_bytes(model.to("meta"))
    assert found is not None and found.at(8) == kept > 0


def test_a_chosen_expert_holds_its_token_what_it_makes_of_it_and_its_answer() -> None:
    model = small("mixtral")
    text = model.config.get_text_config()
    width, inner = text.hidden_size, 3 * text.intermediate_size
    layer = model.model.layers[0]
    products = sum(part.out_features for part in layer.modules() if isinstance(part, nn.Linear))
    assert widest_layer(model) == 2 * width + products + text.num_experts_per_tok * (inner + 2 * width)


def test_equal_numbers_of_experts_of_all_layers_are_one_number() -> None:
    """As HunYuan's config has them."""
    config = AutoConfig.for_model("hunyuan_v1_moe", moe_topk=[2, 2])
    model = SimpleNamespace(config=config)
    assert experts_per_token(model) == 2
    config.moe_topk = [2, 4]
    assert experts_per_token(model) is None


def test_key_heads_that_do_not_divide_the_query_heads_are_refused_with_the_remedy() -> None:
    config = json.loads((CONFIGS / "Llama-3.1-8B-Instruct.json").read_text())
    dims = HeadDims.from_hf_config(AutoConfig.for_model(**config))
    assert dims.with_key_heads(16).num_kv_heads == 16 and dims.with_key_heads(None) == dims
    with pytest.raises(ConfigError, match="found 9, expected a divisor of the 32 .*, or null for"):
        dims.with_key_heads(9)
