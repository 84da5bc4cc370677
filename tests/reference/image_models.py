"""Small random models that read images, of the classes that serve them, saved as they lie on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from reference.words import save_word_tokenizer

#: the text part of each
TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
SEES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SEES_SQUARE = {**SEES, "image_size": 16, "patch_size": 8}
SEES_DEEP = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8,
    "initializer_range": 0.3,
}  # fmt: skip
THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", **SEES_SQUARE, "head_dim": 8}
#: ids of tokens that stand for parts of images, in a vocabulary of 61; no test says them
IDS = {"image_token_id": 55, "video_token_id": 56}
QWEN_IDS = {**IDS, "vision_start_token_id": 57, "vision_end_token_id": 58}
GEMMA_IDS = {"boi_token_index": 57, "eoi_token_index": 58}

#: name → model type, the text part's own settings, the other settings of the whole model
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3", {"sliding_window": 5, "layer_types": MIXED, "query_pre_attn_scalar": 8},
        {"vision_config": SEES_SQUARE, "mm_tokens_per_image": 4, "image_token_index": 55, **GEMMA_IDS},
    ),
    "gemma4": (
        "gemma4", {
            "sliding_window": 5, "layer_types": MIXED, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 61, "num_kv_shared_layers": 0,
        },
        {
            "vision_config": {**SEES, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64}, **IDS,
            "boi_token_id": 57, "eoi_token_id": 58, "audio_token_id": 59,
        },
    ),
    "llama4": (
        "llama4", {
            "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
        },
        {
            "vision_config": {
                **SEES_SQUARE, "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
            "image_token_index": 55,
        },
    ),
    "mistral3": (
        "mistral3", {"model_type": "mistral", "sliding_window": None},
        {"vision_config": PIXTRAL, "image_token_index": 55},
    ),
    "ministral3": ("mistral3", {"model_type": "ministral3"}, {"vision_config": PIXTRAL, "image_token_index": 55}),
    "qwen2.5-vl": ("qwen2_5_vl", {"rope_parameters": THREE_AXES}, {"vision_config": SEES_DEEP, **QWEN_IDS}),
    "qwen3-vl": (
        "qwen3_vl", {"rope_parameters": THREE_AXES},
        {"vision_config": {**SEES_DEEP, "deepstack_visual_indexes": [0]}, **QWEN_IDS},
    ),
    "glm-4.5v": (
        "glm4v_moe", {**EXPERTS, "rope_parameters": {**THREE_AXES, "partial_rotary_factor": 1.0}},
        {"vision_config": {**SEES_DEEP, "image_size": 16}, **IDS},
    ),
    "qwen3.5": ("qwen3_5", LINEAR, {"vision_config": SEES_DEEP, **QWEN_IDS}),
    "internvl": (
        "internvl", {"model_type": "qwen2"},
        {"vision_config": {**SEES, "image_size": [16, 16], "patch_size": [8, 8]}, "image_token_id": 55},
    ),
}  # fmt: skip
#: those of which transformers' own text class takes the text part alone
TEXT_ALONE = {"llama4": "Llama4ForCausalLM", "qwen3.5": "Qwen3_5ForCausalLM"}


def image_model(name: str, **text: Any) -> Any:
    """The whole model, in float32, with weights that make each path matter. Args: text: more of its text part."""
    kind, own, others = MODELS[name]
    settings = {**TEXT, **own, **text}
    if "vocab_size_per_layer_input" in settings:
        settings["vocab_size_per_layer_input"] = settings["vocab_size"]
    # the ids of images stay the last ones
    later = settings["vocab_size"] - TEXT["vocab_size"]
    moved = {key: value + later if key.endswith(("_id", "_index")) else value for key, value in others.items()}
    config = transformers.AutoConfig.for_model(kind, text_config=settings, **moved)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # a part without its own start has what lay in memory
            finite = torch.isfinite(parameter).all() and bool(parameter.abs().max() < 100)
            spread = 0.2 if parameter.ndim == 1 else 0.3
            if not finite:
                parameter.copy_(spread * torch.randn(parameter.shape))
            elif parameter.ndim == 1 and "layers" in parameter_name:
                parameter.add_(spread * torch.randn(parameter.shape))
    return model


def save_image_model(name: str, directory: Path, **text: Any) -> Any:
    """Write a whole model and a tokenizer to `directory`. Returns the model."""
    model = image_model(name, **text)
    model.save_pretrained(directory)
    save_word_tokenizer(directory, model.config.get_text_config().vocab_size)
    return model
