"""Small checkpoints in every public layout, built from key names alone, and heads of ours to save.

Sizes: D 32 (target), V 97, U 40, 4 query heads and 2 key/value heads of 8, MLP 64, target of 8 layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headstart.heads.base import Head, HeadConfig
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import build_head
from headstart.heads.formats import Handling

D, V, U, I, A, G = 32, 97, 40, 64, 32, 16  # noqa: E741
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DIMS = HeadDims(D, V, 8, 4, 2, 8, I, rms_norm_eps=1e-5, max_position_embeddings=512, rope_parameters=LLAMA3)
LLAMA = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": I,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "vocab_size": V,
    "rope_theta": 500000.0,
    "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
}
Tensors = dict[str, Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(prefix: str, width: int, seed: int = 0) -> Tensors:
    """One llama layer without input norm whose attention reads `width` channels."""
    shapes = {
        "self_attn.q_proj": (A, width),
        "self_attn.k_proj": (G, width),
        "self_attn.v_proj": (G, width),
        "self_attn.o_proj": (D, A),
        "mlp.gate_proj": (I, D),
        "mlp.up_proj": (I, D),
        "mlp.down_proj": (D, I),
        "post_attention_layernorm": (D,),
    }
    return {f"{prefix}{name}.weight": random(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def draft_ids() -> Tensor:
    return torch.randperm(V, generator=torch.Generator().manual_seed(7))[:U].sort().values


def eagle3_tensors(prefix: str = "midlayer.", size: int = U) -> Tensors:
    """EAGLE-3 as published: midlayer.*, fc, norm, lm_head, d2t offsets, t2d."""
    tensors = layer(prefix, 2 * D, seed=20)
    for i, name in enumerate(("input_layernorm", "hidden_norm")):
        tensors[f"{prefix}{name}.weight"] = random(D, seed=30 + i)
    tensors |= {"fc.weight": random(D, 3 * D, seed=32), "norm.weight": random(D, seed=33)}
    tensors["lm_head.weight"] = random(size, D, seed=34)
    if size < V:
        ids = draft_ids()
        tensors["d2t"] = ids - torch.arange(U)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def later_layer(n: int, *norms: str) -> Tensors:
    """Layer n ≥ 1 of an EAGLE-3 head, with the same input norm under each of the names."""
    tensors = layer(f"layers.{n}.", D, seed=100 + 20 * n)
    return tensors | {f"layers.{n}.{name}.weight": random(D, seed=110 + n) for name in norms}


def qk_norms(*prefixes: str) -> Tensors:
    names = [f"{prefix}self_attn.{name}.weight" for prefix in prefixes for name in ("q_norm", "k_norm")]
    return {name: random(8, seed=130 + i) for i, name in enumerate(names)}


def stream_norms(*names: str) -> Tensors:
    """A norm before fc for each of the streams."""
    return {f"{name}.weight": random(D, seed=140 + i) for i, name in enumerate(names)}


def eagle_tensors() -> Tensors:
    """EAGLE-1 as published: fc, layers.0.* without input_layernorm."""
    return {"fc.weight": random(D, 2 * D, seed=50), **layer("layers.0.", D, seed=51)}


def medusa_tensors(heads: int = 3, layers: int = 1, own: bool = True) -> Tensors:
    """Medusa v1 as published by FasterDecoding: {i}.{j}.linear.* and {i}.{N}.weight."""
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = random(D, D, seed=60 + 10 * i + j)
            tensors[f"{i}.{j}.linear.bias"] = random(D, seed=160 + 10 * i + j)
        if own:
            tensors[f"{i}.{layers}.weight"] = random(V, D, seed=260 + i)
    return tensors


def vllm_medusa(tensors: Tensors, layers: int = 1) -> Tensors:
    """The same tensors under vLLM's names."""
    renamed = {}
    for name, tensor in tensors.items():
        head, block, *rest = name.split(".")
        own = rest == ["weight"]
        renamed[f"lm_heads.{head}.weight" if own else f"blocks.{head}.layers.{block}.{rest[-1]}"] = tensor
    return renamed


EAGLE3_CONFIG = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": U,
    "tie_word_embeddings": False,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
}
EAGLE_CONFIG = {**LLAMA, "architectures": ["EagleLlamaForCausalLM"]}
MEDUSA_CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": D,
    "vocab_size": V,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "medusa_fc_bias": True,
}


SPECFORGE_CONFIG = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": U,
    "target_model_type": "llama",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
}
YUHUILI_CONFIG = {key: value for key, value in EAGLE3_CONFIG.items() if "eagle_" not in key}
SPECULATORS_CONFIG = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "transformer_layer_config": LLAMA,
    "draft_vocab_size": U,
    "norm_before_residual": False,
    "target_hidden_size": D,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/target"}},
}
NESTED_EAGLE = {
    "model_type": "eagle",
    "model": {**LLAMA, "architectures": ["LlamaForCausalLM"]},
}
MEDUSA_V1_CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "someone/target"}
SPECULATORS_EAGLE_CONFIG = {
    "speculators_model_type": "eagle",
    "architectures": ["EagleSpeculator"],
    "transformer_layer_architecture": "LlamaDecoderLayer",
    "transformer_layer_config": LLAMA,
    "layernorms": False,
    "fusion_bias": False,
}
DFLASH_CONFIG = {
    **LLAMA,
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "head_dim": 8,
    "block_size": 4,
    "num_target_layers": 8,
    "layer_types": ["full_attention"] * 2,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 5]},
}
#: DSpark as DeepSpec writes it: all at top level
DSPARK_CONFIG = {
    **LLAMA,
    "model_type": "qwen3",
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "head_dim": 8,
    "block_size": 3,
    "num_target_layers": 8,
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False,
    "mask_token_id": 5,
    "target_layer_ids": [1, 3, 5],
    "num_anchors": 512,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
#: DSpark as SpecForge writes it: all inside dflash_config
SPECFORGE_DSPARK_CONFIG = {
    **DFLASH_CONFIG,
    "architectures": ["DSparkDraftModel"],
    "block_size": 3,
    "dflash_config": {
        "mask_token_id": 5,
        "target_layer_ids": [1, 3, 5],
        "projector_type": "dspark",
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "attention_mode": "gqa",
    },
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}
SPECULATORS_DFLASH_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "transformer_layer_config": QWEN3,
    "draft_vocab_size": U,
    "block_size": 4,
    "aux_hidden_state_layer_ids": [2, 4, 6],
    "mask_token_id": 5,
    "target_hidden_size": None,
    "sliding_window_non_causal": True,
    "sample_from_anchor": False,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "someone/target"}},
}
SPECULATORS_DSPARK_CONFIG = {
    **SPECULATORS_DFLASH_CONFIG,
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "block_size": 3,
    "sample_from_anchor": True,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def peagle_tensors(layer: str = "midlayer.") -> Tensors:
    """An EAGLE-3 head's tensors, the feature of masked places and all embeddings."""
    more = {"mask_hidden": random(1, 1, 3 * D, seed=91), "embed_tokens.weight": random(V, D, seed=92)}
    return {**eagle3_tensors(layer), **more}


def speculators_eagle(tensors: Tensors) -> Tensors:
    """EAGLE-1 tensors under the names that speculators gives them."""
    renamed = ((name.replace("fc.", "fusion_fc."), tensor) for name, tensor in tensors.items())
    return {name.replace("layers.0.", "transformer."): tensor for name, tensor in renamed}


def dflash_tensors() -> Tensors:
    """DFlash as published: two Qwen3 layers, fc over three of the target's."""
    tensors = {"fc.weight": random(D, 3 * D, seed=80)}
    tensors |= {"hidden_norm.weight": torch.ones(D), "norm.weight": torch.ones(D)}
    for prefix in ("layers.0.", "layers.1."):
        tensors |= {**layer(prefix, D), f"{prefix}input_layernorm.weight": torch.ones(D)}
        tensors |= {f"{prefix}self_attn.{name}.weight": torch.ones(8) for name in ("q_norm", "k_norm")}
    return tensors


def markov_tensors(kind: str = "vanilla", rows: int = V, confidence: bool = True) -> Tensors:
    """A Markov head of rank 6, and a confidence head."""
    tensors = {"markov_w1.weight": random(V, 6, seed=150), "markov_w2.weight": random(rows, 6, seed=151)}
    if kind == "gated":
        tensors |= {"gate_proj.weight": random(6, D + 6, seed=152), "gate_proj.bias": random(6, seed=153)}
    if kind == "rnn":
        tensors |= {"joint_proj.weight": random(18, D + 12, seed=152), "joint_proj.bias": random(18, seed=153)}
    tensors = {f"markov_head.{name}": tensor for name, tensor in tensors.items()}
    if confidence:
        tensors |= {"confidence_head.proj.weight": random(1, D + 6, seed=154)}
        tensors |= {"confidence_head.proj.bias": random(1, seed=155)}
    return tensors


def dspark_tensors() -> Tensors:
    """DSpark as published: DFlash's backbone, a vanilla Markov head, a confidence head."""
    return {**dflash_tensors(), **markov_tensors()}


def reduced(tensors: Tensors) -> Tensors:
    """The same head with a draft vocabulary of U tokens."""
    ids = draft_ids()
    t2d = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    ends = {"lm_head.weight": random(U, D, seed=156), "d2t": ids - torch.arange(U), "t2d": t2d}
    name = "markov_head.markov_w2.weight"
    return {**tensors, **ends, **({name: tensors[name][:U]} if name in tensors else {})}


def language_model() -> Tensors:
    """An ordinary llama of one layer."""
    tensors = {**layer("model.layers.0.", D), "model.layers.0.input_layernorm.weight": torch.ones(D)}
    ends = {"model.embed_tokens.weight": random(V, D, seed=81), "lm_head.weight": random(V, D, seed=82)}
    return {**tensors, **ends, "model.norm.weight": torch.ones(D)}


def write(directory: Path, config: dict[str, Any], tensors: Tensors, weights: str = "model.safetensors") -> Path:
    """A head directory; `.bin` and `.pt` are written as published ones are: a pickled state dict."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if weights.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / weights)
    else:
        torch.save(tensors, directory / weights)
    return directory


def trapped(directory: Path, trap: Any) -> Path:
    """A directory made of (config, tensors), config changes (None removes a field), tensor changes, …"""
    (config, tensors), changes, edit = trap[:3]
    return write(directory, {k: v for k, v in {**config, **changes}.items() if v is not None}, edit(tensors()))


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


#: no change
same: Callable[[Tensors], Tensors] = dict


#: (config, its tensors) of a right directory of each family
E3: tuple[dict[str, Any], Callable[[], Tensors]] = (EAGLE3_CONFIG, eagle3_tensors)
E1 = (EAGLE_CONFIG, eagle_tensors)
M = (MEDUSA_CONFIG, lambda: vllm_medusa(medusa_tensors()))
F = (DFLASH_CONFIG, dflash_tensors)
S = (DSPARK_CONFIG, dspark_tensors)
DRAFT = ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, language_model)
W, R, L = Handling.WRONG, Handling.REFUSES, Handling.LOADS


def our_head(config: HeadConfig, dims: HeadDims = DIMS, bound: bool = True) -> Head:
    """A head of ours with random weights (and a random draft vocabulary), bound to a random target."""
    torch.manual_seed(3)
    head = build_head(config, dims)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    if head.draft_ids_U is not None:
        size = head.draft_ids_U.shape[0]
        head.draft_ids_U.copy_(torch.randperm(dims.vocab_size)[:size].sort().values)
    if bound:
        embed_VD, output_VD = (torch.randn(dims.vocab_size, dims.hidden_size) for _ in range(2))
        head.bind(TargetEnds(embed_VD, Teacher(output_VD)))
    return head.eval()


def same_state(left: Head, right: Head) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
