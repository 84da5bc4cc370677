"""Every silent trap of the engines has a directory here that the validators catch, with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from format_layouts import (
    DIMS,
    DRAFT,
    E1,
    E3,
    EAGLE3_CONFIG,
    EAGLE_CONFIG,
    LLAMA,
    LLAMA3,
    MEDUSA_CONFIG,
    D,
    F,
    L,
    M,
    R,
    Tensors,
    U,
    V,
    W,
    draft_ids,
    drop,
    eagle3_tensors,
    eagle_tensors,
    later_layer,
    medusa_tensors,
    peagle_tensors,
    qk_norms,
    same,
    trapped,
    vllm_medusa,
    write,
)

from headstart.heads.errors import FormatError
from headstart.heads.formats import Handling, check_directory

TGI_CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "someone/target"}


def put(**shapes: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    return lambda t: {**t, **{n.replace("__", "."): torch.ones(*s) for n, s in shapes.items()}}


def gone(*keys: str) -> dict[str, None]:
    return dict.fromkeys(keys)


#: a Medusa head whose heads share one matrix of U rows, and the target ids of those rows
REDUCED = {"original_lm_head": True, "truncated_vocab_size": U}


def reduced(rows: int) -> Callable[[Tensors], Tensors]:
    def edit(tensors: Tensors) -> Tensors:
        kept = drop("lm_heads.1.weight", "lm_heads.2.weight")(tensors)
        return {**kept, "lm_heads.0.weight": torch.ones(rows, D), "token_map": draft_ids()}

    return edit


#: trap → (directory, config changes (None removes), tensor changes, engine → (handling, words of the reason))
TRAPS: dict[str, tuple[Any, dict[str, Any], Callable[[Tensors], Tensors], dict[str, tuple[Handling, str]]]] = {
    # EAGLE-3
    "d2t missing with U < V": (
        E3,
        {},
        drop("d2t", "t2d"),
        {"vllm": (W, "d2t is missing"), "sglang": (W, "d2t is missing"), "tensorrt_llm": (W, "d2t is missing")},
    ),
    "d2t with U = V": (
        (EAGLE3_CONFIG, lambda: {**eagle3_tensors(size=V), "d2t": torch.zeros(V, dtype=torch.int64)}),
        {"draft_vocab_size": V},
        same,
        {"vllm": (R, "leave it out"), "sglang": (L, "")},
    ),
    "lm_head missing with U < V": (
        E3,
        {},
        drop("lm_head.weight"),
        {"vllm": (W, "97-row head is shared in silence"), "sglang": (W, "random"), "tensorrt_llm": (W, "lm_head")},
    ),
    "d2t holds ids, not offsets": (
        E3,
        {},
        lambda t: {**t, "d2t": draft_ids() + 40},
        {"vllm": (W, "offsets"), "sglang": (W, "offsets"), "headstart": (R, "offsets")},
    ),
    "d2t of another length": (
        E3,
        {},
        lambda t: {**t, "d2t": t["d2t"][:-1]},
        {"vllm": (R, "shape"), "sglang": (W, "shape")},
    ),
    "draft_vocab_size missing": (
        E3,
        gone("draft_vocab_size"),
        same,
        {"vllm": (R, "lm_head.weight is"), "sglang": (R, "lm_head.weight is")},
    ),
    "draft_vocab_size missing with U = V": (
        (EAGLE3_CONFIG, lambda: eagle3_tensors(size=V)),
        gone("draft_vocab_size"),
        same,
        {"sglang": (W, "takes the target's lm_head"), "vllm": (L, "")},
    ),
    "norm_before_residual": (
        E3,
        {"norm_before_residual": True},
        same,
        {"sglang": (W, "norm_before"), "tensorrt_llm": (W, "norm_before"), "vllm": (L, ""), "headstart": (R, "norm_b")},
    ),
    "attention bias in config and file": (
        E3,
        {"attention_bias": True},
        put(**{f"midlayer__self_attn__{p}_proj__bias": (s,) for p, s in (("q", 32), ("k", 16), ("v", 16))}),
        {"sglang": (W, "drops the biases"), "vllm": (L, "")},
    ),
    "attention bias in config only": (E3, {"attention_bias": True}, same, {"vllm": (W, "biases are missing")}),
    "attention bias in file only": (
        E3,
        {},
        put(midlayer__self_attn__q_proj__bias=(32,)),
        {"vllm": (W, "dropped in silence"), "sglang": (W, "skipped in silence")},
    ),
    "aux ids unsorted": (
        E3,
        {"eagle_aux_hidden_state_layer_ids": [4, 2, 5], "eagle_config": None},
        same,
        {"vllm": (W, "not ascending"), "sglang": (W, "reads"), "headstart": (R, "ascending")},
    ),
    "aux ids twice": (
        E3,
        {"eagle_aux_hidden_state_layer_ids": [2, 2, 5], "eagle_config": None},
        same,
        {"vllm": (R, "repeat")},
    ),
    "aux id k = L": (
        E3,
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 8], "eagle_config": None},
        same,
        {"vllm": (W, "pre-norm in vLLM, post-norm"), "headstart": (R, "below 8")},
    ),
    "aux id beyond L": (
        E3,
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9], "eagle_config": None},
        same,
        {"vllm": (R, "outside")},
    ),
    "SGLang adds one": (
        E3,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
        same,
        {"sglang": (W, r"reads \[3, 5, 6\].*write \[1, 3, 4\]"), "vllm": (L, ""), "headstart": (R, "name different")},
    ),
    "aux ids where SGLang does not look": (
        E3,
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "eagle_config": None},
        same,
        {"sglang": (W, r"reads \[2, 4, 5\]")},
    ),
    "aux ids where only SGLang counts them": (
        E3,
        gone("eagle_aux_hidden_state_layer_ids"),
        same,
        {"vllm": (W, r"as they are.*Write \[2, 4, 5\]"), "sglang": (L, ""), "headstart": (L, "")},
    ),
    "tied embeddings": (
        E3,
        {"tie_word_embeddings": True},
        same,
        {"sglang": (W, "embeddings in the place of lm_head"), "vllm": (L, "")},
    ),
    "layer count left to llama's default": (
        E3,
        gone("num_hidden_layers"),
        same,
        {"vllm": (W, "defaults to 32"), "sglang": (W, "defaults to 32")},
    ),
    "feature layers that are no list": (
        E3,
        {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}},
        same,
        {"vllm": (R, "5 are no list of integers"), "sglang": (R, "expected a list of integers")},
    ),
    "hidden_norm missing": (
        E3,
        {},
        drop("midlayer.hidden_norm.weight"),
        {"vllm": (W, "stays at ones"), "sglang": (W, "stays at ones"), "tensorrt_llm": (R, "missing")},
    ),
    "norm before fc": (
        E3,
        {"norm_before_fc": True},
        put(input_norm__weight=(96,)),
        {"sglang": (L, ""), "tensorrt_llm": (W, "inside eagle_config"), "vllm": (L, ""), "headstart": (L, "")},
    ),
    "norm before fc without its weight": (
        E3,
        {"eagle_config": {**EAGLE3_CONFIG["eagle_config"], "norm_before_fc": True}},
        same,
        {
            "vllm": (W, "input_norm.weight .* is missing: the norm stays at ones"),
            "sglang": (W, "input_norm.weight .* is missing: the norm stays at ones"),
            "tensorrt_llm": (R, "input_norm.weight .* is missing"),
            "headstart": (R, "lacks input_norm.weight"),
        },
    ),
    "norm before fc without its setting": (
        E3,
        {},
        put(input_norm__weight=(96,)),
        {"vllm": (W, "input_norm.weight is dropped in silence"), "sglang": (W, "skipped in silence")},
    ),
    "both norms before fc": (
        E3,
        {"norm_before_fc": True, "fc_norm": True},
        put(input_norm__weight=(96,)),
        {"vllm": (W, "one after the other"), "sglang": (W, "one after the other"), "headstart": (R, "both set")},
    ),
    "fc_norm": (
        E3,
        {"fc_norm": True},
        put(fc_norm__0__weight=(32,), fc_norm__1__weight=(32,), fc_norm__2__weight=(32,)),
        {"sglang": (L, ""), "vllm": (L, ""), "tensorrt_llm": (L, ""), "headstart": (L, "")},
    ),
    "fc_norm without its weights": (
        E3,
        {"fc_norm": True},
        put(fc_norm__0__weight=(32,), fc_norm__1__weight=(32,)),
        {
            "vllm": (W, "fc_norm.2.weight .32. is missing: the norm stays at ones"),
            "sglang": (W, "fc_norm.2.weight .32. is missing: the norm stays at ones"),
            "tensorrt_llm": (R, "fc_norm.2.weight .32. is missing: the engine stops"),
        },
    ),
    "fc_norm without its setting": (
        E3,
        {},
        put(fc_norm__0__weight=(32,), fc_norm__1__weight=(32,), fc_norm__2__weight=(32,)),
        {
            "vllm": (R, "unexpected tensors fc_norm.0.weight"),
            "sglang": (W, "fc_norm.0.weight.* would be skipped in silence"),
            "tensorrt_llm": (W, "fc_norm.. are skipped in silence"),
            "headstart": (R, "unknown fc_norm.0"),
        },
    ),
    "aux_norm of an earlier SGLang": (
        E3,
        {"use_aux_norm": True},
        put(aux_norm_low__weight=(32,), aux_norm_mid__weight=(32,), aux_norm_high__weight=(32,)),
        {
            "sglang": (L, ""),
            "vllm": (R, "unexpected tensors aux_norm_high.weight.*calls them fc_norm"),
            "tensorrt_llm": (W, "aux_norm_. are skipped in silence"),
            "headstart": (L, ""),
        },
    ),
    "norm_output": (
        E3,
        {"norm_output": True},
        same,
        {"sglang": (L, ""), "vllm": (L, ""), "tensorrt_llm": (L, ""), "headstart": (L, "")},
    ),
    "norm_output where no engine reads it": (
        E3,
        {"eagle_config": {**EAGLE3_CONFIG["eagle_config"], "norm_output": True}},
        same,
        {"sglang": (W, "norm_output is read at top level"), "headstart": (R, "norm_output is True")},
    ),
    "two layers named for vLLM alone": (
        E3,
        {"num_hidden_layers": 2},
        lambda t: {**t, **later_layer(1, "input_layernorm")},
        {
            "vllm": (L, ""),
            "sglang": (W, "layers.1.hidden_norm.weight .32. is missing: the norm stays at ones"),
            "tensorrt_llm": (R, "layers.1.hidden_norm.weight .32. is missing"),
            "headstart": (L, ""),
        },
    ),
    "two layers named for SGLang alone": (
        (EAGLE3_CONFIG, lambda: eagle3_tensors("layers.0.")),
        {"num_hidden_layers": 2},
        lambda t: {**t, **later_layer(1, "hidden_norm")},
        {
            "vllm": (W, "layers.1.input_layernorm.weight .32. is missing: the norm stays at ones"),
            "sglang": (L, ""),
            "tensorrt_llm": (L, ""),
            "headstart": (L, ""),
        },
    ),
    "two layers for all engines": (
        (EAGLE3_CONFIG, lambda: eagle3_tensors("layers.0.")),
        {"num_hidden_layers": 2},
        lambda t: {**t, **later_layer(1, "input_layernorm", "hidden_norm")},
        {"vllm": (L, ""), "sglang": (L, ""), "tensorrt_llm": (L, ""), "headstart": (L, "")},
    ),
    "two layers, the first called midlayer": (
        E3,
        {"num_hidden_layers": 2},
        lambda t: {**t, **later_layer(1, "input_layernorm", "hidden_norm")},
        {"vllm": (L, ""), "sglang": (L, ""), "tensorrt_llm": (R, "rename midlayer to layers.0")},
    ),
    "two names of a norm with other values": (
        (EAGLE3_CONFIG, lambda: eagle3_tensors("layers.0.")),
        {"num_hidden_layers": 2},
        lambda t: {**t, **later_layer(1, "input_layernorm"), "layers.1.hidden_norm.weight": torch.ones(D)},
        {
            "vllm": (W, "differ: this engine reads layers.1.input_layernorm"),
            "sglang": (W, "differ: this engine reads layers.1.hidden_norm"),
            "tensorrt_llm": (W, "differ: this engine reads layers.1.hidden_norm"),
            "headstart": (R, "differ"),
        },
    ),
    "more layers in the file than in config.json": (
        E3,
        {},
        lambda t: {**t, **later_layer(1, "input_layernorm", "hidden_norm")},
        {
            "vllm": (R, "unexpected tensors layers.1"),
            "sglang": (W, "the file holds 2 layers: the others are left out"),
            "tensorrt_llm": (W, "the file holds 2 layers: the others are left out"),
            "headstart": (R, "unknown layers.1"),
        },
    ),
    "q/k norms": (
        E3,
        {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]},
        lambda t: {**t, **qk_norms("midlayer.")},
        {
            "vllm": (L, ""),
            "sglang": (R, "no q/k norms .head.qk_norm.: serve this head with vLLM"),
            "tensorrt_llm": (W, "q/k norms are skipped in silence"),
            "headstart": (L, ""),
        },
    ),
    "q/k norms under llama's architecture": (
        E3,
        {},
        lambda t: {**t, **qk_norms("midlayer.")},
        {
            "vllm": (R, "unexpected tensors midlayer.self_attn.k_norm"),
            "sglang": (W, "k_norm.* would be skipped in silence"),
            "tensorrt_llm": (W, "q/k norms are skipped in silence"),
            "headstart": (R, "unknown midlayer.self_attn.k_norm"),
        },
    ),
    "q/k norms missing": (
        E3,
        {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]},
        same,
        {
            "vllm": (W, "q_norm.weight .8. is missing: the norm stays at ones"),
            "headstart": (R, "lacks midlayer.*k_norm"),
        },
    ),
    "an unknown tensor": (
        E3,
        {},
        put(gate__weight=(4,)),
        {"vllm": (R, "unexpected tensors gate.weight"), "sglang": (W, "skipped in silence")},
    ),
    "weights of integers": (
        E3,
        {},
        lambda t: {**t, "fc.weight": t["fc.weight"].long()},
        {
            "vllm": (W, "fc.weight is torch.int64: it would be cast"),
            "sglang": (W, "cast in silence"),
            "tensorrt_llm": (W, "cast in silence"),
            "headstart": (R, "expected floating point"),
        },
    ),
    "no auxiliary states": (
        E3,
        {"eagle_config": {"use_aux_hidden_state": False}},
        same,
        {"vllm": (W, "fc is left out"), "headstart": (R, "use_aux")},
    ),
    "own width without embeddings": (
        E3,
        {"target_hidden_size": 32, "hidden_size": 16},
        same,
        {"vllm": (R, r"config.json makes it"), "sglang": (R, "makes it")},
    ),
    "shapes of another head": (
        E3,
        {"num_key_value_heads": 4},
        same,
        {"vllm": (R, r"k_proj.weight is \[16, 64\], config.json makes it \[32, 64\]"), "headstart": (R, "k_proj")},
    ),
    "a matrix transposed": (
        E3,
        {},
        lambda t: {**t, "midlayer.self_attn.k_proj.weight": t["midlayer.self_attn.k_proj.weight"].T},
        {
            "vllm": (R, r"k_proj.weight is \[64, 16\], config.json makes it \[16, 64\].*it is transposed"),
            "sglang": (R, "it is transposed"),
            "tensorrt_llm": (R, "it is transposed"),
            "headstart": (R, r"k_proj.weight is .*\[64, 16\], expected floating point \[16, 64\]"),
        },
    ),
    "a weight missing": (
        E3,
        {},
        drop("midlayer.mlp.up_proj.weight"),
        {
            "vllm": (W, "up_proj.weight .* is missing: the engine keeps uninitialised memory"),
            "sglang": (W, "uninitialised memory"),
            "tensorrt_llm": (R, "is missing: the engine stops"),
            "headstart": (R, "lacks midlayer.mlp.up_proj.weight"),
        },
    ),
    "architecture unknown": (
        E3,
        {"architectures": ["Eagle3Speculator"]},
        same,
        {"vllm": (R, "architectures"), "sglang": (R, "architectures")},
    ),
    "activation": (
        E3,
        {"hidden_act": "gelu"},
        same,
        {"vllm": (R, "silu"), "sglang": (R, "silu"), "tensorrt_llm": (W, "silu")},
    ),
    "a target of another width": (
        (EAGLE3_CONFIG, lambda: {**eagle3_tensors(), "fc.weight": torch.ones(D, 48 * 3)}),
        {"target_hidden_size": 48},
        same,
        {
            "vllm": (R, "width 48, the target's are 32"),
            "sglang": (R, "width 48, the target's are 32"),
            "tensorrt_llm": (R, "width 48, the target's are 32"),
            "headstart": (R, "hidden_size is 48 and the target has 32"),
        },
    ),
    "rope theta of another target": (
        E3,
        {"rope_theta": 10000.0},
        same,
        {"vllm": (W, "differs from the target's"), "sglang": (W, "differs"), "tensorrt_llm": (W, "differs")},
    ),
    "rope left to llama's default": (
        E3,
        gone("rope_theta", "rope_scaling"),
        same,
        {"vllm": (W, "differs from the target's"), "sglang": (W, "differs")},
    ),
    "rope spellings disagree": (
        E3,
        {"rope_parameters": {**LLAMA3, "factor": 4.0}},
        same,
        {"vllm": (W, "disagree"), "headstart": (R, "disagree")},
    ),
    "another target": (
        E3,
        {"vocab_size": 96},
        same,
        {
            "vllm": (W, "another target"),
            "sglang": (W, "another target"),
            "tensorrt_llm": (W, "another target"),
            "headstart": (R, "another target"),
        },
    ),
    # EAGLE-1
    "EAGLE-1 lm_head": (E1, {}, put(lm_head__weight=(V, D)), {"vllm": (R, "must be absent")}),
    "EAGLE-1 fc bias": (
        E1,
        {},
        put(fc__bias=(D,)),
        {"vllm": (W, r"fc.bias is not zero.*export.engines=\[sglang\]"), "headstart": (L, "")},
    ),
    "EAGLE-1 without SGLang's bias": (
        E1,
        {"architectures": ["LlamaForCausalLMEagle"]},
        same,
        {"sglang": (W, "export zeros"), "vllm": (R, "architectures")},
    ),
    "EAGLE-1 input_layernorm": (
        E1,
        {},
        put(layers__0__input_layernorm__weight=(D,)),
        {"vllm": (R, "has none"), "headstart": (R, "input_layernorm")},
    ),
    "EAGLE-1 nested without architectures": (
        ({"model_type": "eagle", "model": {**LLAMA}}, eagle_tensors),
        {},
        same,
        {"vllm": (R, "needs architectures")},
    ),
    "EAGLE-1 nested without model_type": (
        (
            {"model": {k: v for k, v in EAGLE_CONFIG.items() if k != "model_type"}, "model_type": "eagle"},
            eagle_tensors,
        ),
        {},
        same,
        {"vllm": (R, "needs model_type")},
    ),
    "EAGLE-1 in TensorRT-LLM": (
        E1,
        {},
        same,
        {"tensorrt_llm": (R, "eagle heads; it drafts with eagle3, medusa"), "vllm": (L, "")},
    ),  # fmt: skip
    "EAGLE-1 tied embeddings in SGLang": (
        E1,
        {"architectures": ["LlamaForCausalLMEagle"], "tie_word_embeddings": True},
        lambda t: {**t, "fc.bias": torch.zeros(D)},
        {"sglang": (W, "tie_word_embeddings is true")},
    ),
    "EAGLE-1 layer missing": (E1, {}, drop("layers.0.mlp.up_proj.weight"), {"vllm": (W, "uninitialised")}),
    # Medusa
    "Medusa num_attention_heads": (
        M,
        {"num_attention_heads": 4},
        same,
        {"vllm": (W, "num_attention_heads = 4 is taken for num_heads")},
    ),
    "Medusa num_layers": (M, {"num_target_layers": 8}, same, {"vllm": (W, "num_target_layers = 8 is taken for")}),
    "Medusa lm_heads missing": (M, {}, drop("lm_heads.1.weight"), {"vllm": (W, "lm_heads.1.weight.*random")}),
    "Medusa bias without medusa_fc_bias": (M, gone("medusa_fc_bias"), same, {"vllm": (W, "medusa_fc_bias")}),
    "Medusa biases missing": (M, {}, drop("blocks.2.layers.0.bias"), {"vllm": (W, "bias.*random")}),
    "Medusa hidden_size left out": (M, gone("hidden_size"), same, {"vllm": (R, r"makes it \[4096, 4096\]")}),
    "Medusa vocab_size left out": (M, gone("vocab_size"), same, {"vllm": (R, r"makes it \[32001")}),
    "Medusa reduced vocabulary": (M, {"truncated_vocab_size": 50}, same, {"vllm": (R, "reduced vocabulary")}),
    "Medusa model_type left out": (M, gone("model_type"), same, {"vllm": (R, "model_type")}),
    "Medusa more heads than said": (M, {"num_heads": 2}, same, {"vllm": (W, "dropped in silence")}),
    "Medusa stranger": (
        M,
        {},
        put(token_map=(V,)),
        {"vllm": (W, "token_map would be dropped"), "headstart": (R, "token")},
    ),
    "Medusa one shared matrix": (
        M,
        {"original_lm_head": True},
        drop("lm_heads.1.weight", "lm_heads.2.weight"),
        {"vllm": (L, "")},
    ),
    "Medusa shared matrix missing": (
        M,
        {"original_lm_head": True},
        drop("lm_heads.0.weight", "lm_heads.1.weight", "lm_heads.2.weight"),
        {"vllm": (W, "lm_heads.0.weight.*random")},
    ),
    "Medusa shared matrix beside own ones": (
        M,
        {"original_lm_head": True},
        same,
        {"vllm": (W, "lm_heads.1.weight, lm_heads.2.weight would be dropped")},
    ),
    "Medusa reduced, shared": (M, REDUCED, reduced(U), {"vllm": (L, ""), "headstart": (R, "token_map")}),
    "Medusa reduced, whole matrix": (M, REDUCED, reduced(V), {"vllm": (L, "")}),
    "Medusa reduced without token_map": (
        M,
        REDUCED,
        lambda t: drop("token_map")(reduced(U)(t)),
        {"vllm": (R, r"token_map \[40\] is missing")},
    ),
    "Medusa token_map of another size": (
        M,
        REDUCED,
        lambda t: {**reduced(U)(t), "token_map": draft_ids()[1:]},
        {"vllm": (R, r"token_map is torch.int64 \[39\]")},
    ),
    "Medusa token_map beyond the vocabulary": (
        M,
        REDUCED,
        lambda t: {**reduced(U)(t), "token_map": draft_ids() + V},
        {"vllm": (W, "no 40 distinct ids below 97")},
    ),
    "Medusa in TGI by vLLM's names": (
        M,
        TGI_CONFIG,
        same,
        {"tgi": (R, "TGI's keys"), "tensorrt_llm": (R, "converter")},
    ),
    # P-EAGLE
    "P-EAGLE": (
        E3,
        {"ptd_token_id": 5},
        put(mask_hidden=(1, 1, 3 * D), embed_tokens__weight=(V, D)),
        {
            "vllm": (L, ""),
            "sglang": (R, "SGLang does not draft with peagle heads"),
            "tensorrt_llm": (R, "does not draft with peagle heads"),
            "llama_cpp": (R, "does not draft with peagle heads"),
            "tgi": (R, "does not draft with peagle heads"),
            "headstart": (L, ""),
        },
    ),
    "P-EAGLE without mask_hidden": (
        E3,
        {"mask_token_id": 5},
        put(embed_tokens__weight=(V, D)),
        {"vllm": (R, r"mask_hidden \[1, 1, 96\] is m"), "headstart": (R, "lacks mask_hidden")},
    ),
    "P-EAGLE without its token": (
        E3,
        {},
        put(mask_hidden=(1, 1, 3 * D), embed_tokens__weight=(V, D)),
        {"vllm": (R, "without mask_token_id"), "headstart": (R, "mask_token_id is missing")},
    ),
    "P-EAGLE of another width": (
        E3,
        {"ptd_token_id": 5},
        put(mask_hidden=(1, 1, D), embed_tokens__weight=(V, D)),
        {"vllm": (R, r"mask_hidden is \[1, 1, 32\]"), "headstart": (R, r"mask_hidden is .* \[1, 1, 32\], expected")},
    ),
    "P-EAGLE without embeddings": (
        E3,
        {"ptd_token_id": 5},
        put(mask_hidden=(1, 1, 3 * D)),
        {"vllm": (W, "embed_tokens.weight is missing"), "headstart": (R, "lacks embed_tokens.weight")},
    ),
    "P-EAGLE with embeddings of another size": (
        E3,
        {"ptd_token_id": 5},
        put(mask_hidden=(1, 1, 3 * D), embed_tokens__weight=(V - 1, D)),
        {
            "vllm": (R, r"embed_tokens.weight is \[96, 32\]"),
            "headstart": (R, r"embed_tokens.weight is .* \[96, 32\], expected"),
        },
    ),
    "P-EAGLE with two mask tokens": (
        E3,
        {"ptd_token_id": 5, "mask_token_id": 6},
        put(mask_hidden=(1, 1, 3 * D), embed_tokens__weight=(V, D)),
        {"vllm": (W, "several mask tokens"), "headstart": (R, "several mask tokens")},
    ),
    "P-EAGLE with a mask token outside the vocabulary": (
        E3,
        {"mask_token_id": V},
        put(mask_hidden=(1, 1, 3 * D), embed_tokens__weight=(V, D)),
        {"vllm": (R, "mask_token_id is 97"), "headstart": (R, "mask_token_id is 97, expected an integer from 0 to 96")},
    ),
    "P-EAGLE of a name that vLLM completes": (
        E3,
        {"ptd_token_id": 5, "architectures": ["PeagleLlamaForCausalLM"]},
        put(mask_hidden=(1, 1, 3 * D), embed_tokens__weight=(V, D)),
        {"vllm": (R, "architectures")},
    ),
    # DFlash
    "DFlash": (
        F,
        {},
        same,
        {
            "vllm": (L, ""),
            "sglang": (L, ""),
            "tensorrt_llm": (Handling.UNKNOWN, "not been checked"),
            "llama_cpp": (Handling.UNKNOWN, "not been checked"),
            "tgi": (R, "TGI does not draft with dflash heads; it drafts with medusa"),
            "headstart": (L, ""),
        },
    ),
    "DFlash ids counted twice": (
        F,
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        same,
        {"vllm": (W, r"it reads \[1, 3, 5\].*target_layer_ids says \[2, 4, 6\]")},
    ),
    "DFlash ids in both countings": (F, {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, same, {"vllm": (L, "")}),
    "DFlash ids hidden by eagle_config": (
        F,
        {"eagle_config": {"use_aux_hidden_state": True}},
        same,
        {"vllm": (W, "eagle_config hides dflash_config")},
    ),
    "DFlash without ids": (F, {"dflash_config": {"mask_token_id": 5}}, same, {"vllm": (R, "fc.weight is")}),
    "DFlash without a mask token": (
        F,
        {"dflash_config": {"target_layer_ids": [1, 3, 5]}},
        same,
        {"vllm": (R, "mask_token_id is None")},
    ),
    "DFlash id that becomes L": (
        F,
        {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 7]}},
        same,
        {"vllm": (W, "feature layer 8 is the last hidden state")},
    ),
    "DFlash ids unsorted": (
        F,
        {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [3, 1, 5]}},
        same,
        {"vllm": (W, "not ascending")},
    ),
    "DFlash mask_hidden": (F, {}, put(mask_hidden=(1, 1, 96)), {"vllm": (R, "mask_hidden must be absent")}),
    "DFlash q_norm missing": (F, {}, drop("layers.1.self_attn.q_norm.weight"), {"vllm": (W, "norm stays at ones")}),
    # others
    "draft model": (
        DRAFT,
        {},
        same,
        {"vllm": (L, ""), "sglang": (Handling.UNKNOWN, "draft_model"), "headstart": (R, "")},
    ),
    "draft model of another vocabulary": (DRAFT, {"vocab_size": 96}, same, {"vllm": (R, "96, the target's 97")}),
    "MLP speculator": (
        ({"model_type": "mlp_speculator"}, lambda: {"proj.0.weight": torch.ones(2, 2)}),
        {},
        same,
        {"vllm": (R, "no longer in vLLM's registry"), "sglang": (R, "no draft that SGLang"), "headstart": (R, "")},
    ),
    "Medusa in SGLang": (M, {}, same, {"sglang": (R, "medusa heads; it drafts with eagle, eagle3"), "vllm": (L, "")}),
    "EAGLE in TGI": (E3, {}, same, {"tgi": (R, "does not draft with eagle3 heads; it drafts with medusa")}),
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS.keys())
def test_silent_traps_are_caught(tmp_path: Path, trap: Any) -> None:
    report = check_directory(trapped(tmp_path, trap), DIMS)
    for engine, (handling, words) in trap[3].items():
        found = report.engines[engine]
        assert found.handling is handling, report.render()
        assert not words or any(re.search(words, reason) for reason in found.reasons), report.render()


def widened(tensors: Tensors) -> Tensors:
    return {**tensors, "embed_tokens.weight": torch.ones(V, D)}


SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": LLAMA,
    "draft_vocab_size": U, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
}  # fmt: skip
#: directory → (config, tensors, engines that load it)
RIGHT: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "EAGLE-3": (EAGLE3_CONFIG, eagle3_tensors(), "headstart vllm sglang tensorrt_llm"),
    "EAGLE-1": (EAGLE_CONFIG, eagle_tensors(), "headstart vllm"),
    "Medusa": (MEDUSA_CONFIG, vllm_medusa(medusa_tensors()), "headstart vllm"),
    "nested EAGLE-1": (
        {"model_type": "eagle", "model": {**LLAMA, "architectures": ["LlamaForCausalLM"]}}, eagle_tensors(), "vllm",
    ),
    "the other prefix, embeddings": (EAGLE3_CONFIG, widened(eagle3_tensors("layers.0.")), "vllm sglang tensorrt_llm"),
    "EAGLE-1, embeddings": (EAGLE_CONFIG, widened(eagle_tensors()), "vllm"),
    "U = V without lm_head": (
        {**EAGLE3_CONFIG, "draft_vocab_size": V}, drop("lm_head.weight")(eagle3_tensors(size=V)), "vllm tensorrt_llm",
    ),
    "speculators": (SPECULATORS, eagle3_tensors("layers.0."), "headstart vllm"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "engines"), RIGHT.values(), ids=RIGHT.keys())
def test_right_directories_load(tmp_path: Path, config: dict[str, Any], tensors: Tensors, engines: str) -> None:
    report = check_directory(write(tmp_path, config, tensors), DIMS)
    assert all(report.loads(engine) for engine in engines.split()), report.render()
    assert config is not SPECULATORS or not report.loads("sglang")


TGI_TRAPS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str, Handling, str]] = {
    "v1": (TGI_CONFIG, same, "medusa_lm_head.safetensors", L, ""),
    "file name": (TGI_CONFIG, same, "model.safetensors", R, "medusa_lm_head.safetensors only"),
    "pickle": (TGI_CONFIG, same, "medusa_lm_head.pt", R, "medusa_lm_head.safetensors only"),
    "bias missing": (TGI_CONFIG, drop("1.0.linear.bias"), "medusa_lm_head.safetensors", R, "a weight and a bias"),
    "config": ({"medusa_num_heads": 3}, same, "medusa_lm_head.safetensors", R, "base_model_name_or_path"),
    "no target": (
        {**TGI_CONFIG, "base_model_name_or_path": ""},
        same,
        "medusa_lm_head.safetensors",
        R,
        "base_model_name_or_path is '', expected the target",
    ),
    "undercount": ({**TGI_CONFIG, "medusa_num_heads": 2}, same, "medusa_lm_head.safetensors", W, "never used"),
    "one matrix lost": (TGI_CONFIG, drop("1.1.weight"), "medusa_lm_head.safetensors", W, "falls back to v2"),
    "several blocks without matrices": (
        {**TGI_CONFIG, "medusa_num_layers": 2},
        lambda _: medusa_tensors(layers=2, own=False),
        "medusa_lm_head.safetensors",
        R,
        "v2, which shares the target's, has one layer",
    ),
    "v2": (TGI_CONFIG, drop("0.1.weight", "1.1.weight", "2.1.weight"), "medusa_lm_head.safetensors", L, ""),
}


@pytest.mark.parametrize("trap", TGI_TRAPS.values(), ids=TGI_TRAPS.keys())
def test_tgi(tmp_path: Path, trap: Any) -> None:
    config, edit, weights, handling, words = trap
    report = check_directory(write(tmp_path, config, edit(medusa_tensors()), weights), DIMS)
    assert report.engines["tgi"].handling is handling, report.render()
    assert any(words in reason for reason in report.engines["tgi"].reasons) or not words, report.render()


OTHER_LAYERS = {
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
}
NOTES = {
    "speculative tokens": (M, {}, "vllm", "num_speculative_tokens must be 3 or fewer"),
    "releases": (M, {}, "vllm", "needs vLLM 0.32 or earlier (run on 0.32): 0.33 has no Medusa model"),
    "parallel drafting": (
        (E3[0], lambda: peagle_tensors()),
        {"ptd_token_id": 5}, "vllm", '"parallel_drafting": true',
    ),
    "draft model": (DRAFT, {}, "vllm", '"method": "draft_model"'),
    "DFlash reference": (F, {"layer_types": None}, "vllm", "also wants layer_types"),
    "captured layers": (E3, OTHER_LAYERS, "tensorrt_llm", "hidden_states indices [1, 3, 6]"),
    "two sets of layer ids": (
        E3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, "vllm",
        "SGLang reads [3, 5, 6] from eagle_config: one of the two",
    ),
    "another head split": (
        E3, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, "vllm",
        "8 attention heads of 4 where the target has 4 of 8",
    ),
    "another epsilon": (E3, {"rms_norm_eps": 1e-6}, "sglang", "rms_norm_eps is 1e-06 where the target has 1e-05"),
    "epsilon left out": (E3, {"rms_norm_eps": None}, "tensorrt_llm", "rms_norm_eps is 1e-06 where the target"),
    "another rope in Headstart": (
        E3, {"rope_theta": 1e4}, "headstart", "runs as config.json says: rope {",
    ),
    "EAGLE-1 lm_head": (
        ({**EAGLE_CONFIG, "architectures": ["LlamaForCausalLMEagle"]},
         lambda: {**eagle_tensors(), "fc.bias": torch.zeros(D), "lm_head.weight": torch.ones(V, D)}),
        {}, "sglang", "lm_head.weight is skipped",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "engine", "words"), NOTES.values(), ids=NOTES.keys())
def test_what_a_user_should_know_although_it_loads(
    tmp_path: Path, base: Any, changes: dict[str, Any], engine: str, words: str
) -> None:
    report = check_directory(trapped(tmp_path, (base, changes, same, {})), DIMS)
    assert report.loads(engine), report.render()
    assert any(words in note for note in report.engines[engine].notes), report.render()


def test_only_families_that_some_releases_dropped_have_a_note_on_releases(tmp_path: Path) -> None:
    noted = {
        (family, engine)
        for family, base in (("medusa", M), ("eagle3", E3), ("draft model", DRAFT))
        for engine, handling in check_directory(trapped(tmp_path / family, (base, {}, same, {})), DIMS).engines.items()
        if any("or earlier" in note for note in handling.notes)
    }
    assert noted == {("medusa", "vllm")}


def test_residual_default_of_speculators_differs_by_kind(tmp_path: Path) -> None:
    config = {"transformer_layer_config": LLAMA, "draft_vocab_size": U, "ptd_token_id": 5}
    tensors = {**eagle3_tensors("layers.0."), "mask_hidden": torch.ones(1, 1, 96)}
    for kind, noted in (("eagle3", True), ("peagle", False)):
        given = {**config, "speculators_model_type": kind, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
        notes = check_directory(write(tmp_path / kind, given, tensors), DIMS).engines["vllm"].notes
        assert any("norm_before_residual is true" in note for note in notes) is noted


def test_one_directory_serves_vllm_and_tgi(tmp_path: Path) -> None:
    write(tmp_path, {**MEDUSA_CONFIG, **TGI_CONFIG}, medusa_tensors(), "medusa_lm_head.safetensors")
    report = check_directory(tmp_path, DIMS)
    assert all(report.loads(engine) for engine in ("vllm", "tgi", "tensorrt_llm", "headstart")), report.render()


def test_without_the_target_the_file_is_checked_against_itself(tmp_path: Path) -> None:
    report = check_directory(write(tmp_path, EAGLE3_CONFIG, eagle3_tensors()))
    assert report.loads("vllm") and report.loads("sglang")


def test_a_target_with_another_rope_is_named(tmp_path: Path) -> None:
    dims = replace(DIMS, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    report = check_directory(write(tmp_path, EAGLE3_CONFIG, eagle3_tensors()), dims)
    assert set(report.wrong) >= {"vllm", "sglang", "tensorrt_llm"}


def test_the_report_reads_as_text_and_json(tmp_path: Path) -> None:
    report = check_directory(trapped(tmp_path, TRAPS["d2t missing with U < V"]), DIMS)
    assert "vLLM 0.32      loads wrongly\n      - d2t is missing" in report.render()
    assert report.to_json()["engines"]["vllm"]["verdict"] == "loads wrongly"


def test_a_directory_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such directory"):
        check_directory(tmp_path / "nowhere")


def test_garbage_in_config_is_a_refusal_not_a_crash(tmp_path: Path) -> None:
    report = check_directory(write(tmp_path, {**EAGLE3_CONFIG, "hidden_size": "wide"}, eagle3_tensors()), DIMS)
    assert all(found.handling is Handling.REFUSES for found in report.engines.values()), report.render()
