"""Small random models of the architectures that people serve, at two sizes.

`ARCHITECTURES` is the one table: a new architecture is a line. `random_model` builds it.

    tiny    8 layers of width 64. Windows and chunks are shorter than the texts of the tests. Multipliers, soft-caps and
            sinks differ from their neutral values, norms and biases are random: whatever ignores one of them shows.
    equal   8 layers with Llama-3.1-8B's widths, for comparing times. The layers of all architectures hold about as many
            weights. Of a mixture of experts, those count that four tokens read together (a chain of 3 and its root).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PretrainedConfig

from headstart.heads.errors import ConfigError
from headstart.heads.targets.classes import auto_class
from headstart.heads.targets.load import with_attention
from headstart.heads.targets.locate import text_decoder

#: settings of all architectures by size; each takes those that its config knows
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "equal": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        config: its config class in transformers, without the ending "Config".
        both, tiny, equal: settings beyond SIZES, for both sizes and for one; they replace those of SIZES.
        vision: settings of a small image part. With it, the other settings are those of the config's text part.
        trees: False where layers keep a recurrent state, which cannot follow the branches of a tree.
    """

    config: str
    both: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    equal: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None
    trees: bool = True

    def settings(self, size: str) -> dict[str, Any]:
        return {**self.both, **(self.tiny if size == "tiny" else self.equal)}


def partial(share: float) -> dict[str, Any]:
    """Rope that turns this share of a head's dimensions."""
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}


def yarn(**more: float) -> dict[str, Any]:
    """YaRN from 64 positions to 512."""
    return {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, **more,
    }  # fmt: skip


A = Architecture
#: a window shorter than the texts of the tests
WINDOW = {"sliding_window": 12}
#: an MLP without a gate has two matrices: wider, it holds as many weights as one of 14336 with a gate
UNGATED = {"intermediate_size": 21504}
#: four tokens read 13 of 32 experts on average
EXPERTS = {
    "tiny": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "equal": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1024},
}
ROUTED = {
    "tiny": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2},
    "equal": {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "n_group": 1},
}
MULTIPLIERS = {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
#: gated delta rule: heads of the linear attention
DELTA = {
    "tiny": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "equal": {
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}  # fmt: skip
SMALL_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA4_VISION = {**SMALL_VISION, "head_dim": 16, "num_key_value_heads": 2}
GEMMA4 = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0}
GEMMA4_GLOBAL = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
FALCON = {
    "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_multipliers": [0.8, 0.6], "key_multiplier": 0.7,
    "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1, "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 1.2],
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
}  # fmt: skip

#: name → architecture
ARCHITECTURES: dict[str, Architecture] = {
    "Llama": A("Llama", tiny={"rope_parameters": LLAMA3}),
    "Qwen2": A("Qwen2"),
    "Qwen3": A("Qwen3"),
    "Mistral": A("Mistral", tiny=WINDOW),
    "Granite": A("Granite", MULTIPLIERS, {"logits_scaling": 2.0}, {"logits_scaling": 8.0}),
    "Cohere2": A("Cohere2", tiny={**WINDOW, "logit_scale": 0.25}),
    "GLM-4": A("Glm4", {"rope_parameters": partial(0.5)}),
    "SmolLM3": A("SmolLM3"),
    "DeepSeek-V3": A(
        "DeepseekV3", {"first_k_dense_replace": 1, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)},
        {
            **ROUTED["tiny"], "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 24, "num_key_value_heads": 4,
        },
        {**ROUTED["equal"], "topk_group": 1, "num_key_value_heads": 32},
    ),
    "ERNIE-4.5": A("Ernie4_5", tiny={"use_bias": True}),
    "HunYuan dense": A("HunYuanDenseV1"),
    "StableLM": A("StableLm", {"rope_parameters": partial(0.5), "use_qkv_bias": True}),
    "Seed-OSS": A("SeedOss"),
    "gpt-oss": A(
        "GptOss", {"rope_parameters": yarn(truncate=False)},
        {**WINDOW, "num_local_experts": 8, "num_experts_per_tok": 2},
        {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 1024},
    ),
    "Gemma 2": A(
        "Gemma2", {}, {
            **WINDOW, "final_logit_softcapping": 10.0, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 9,
        },
        {"query_pre_attn_scalar": 144},
    ),
    "OLMo-2": A("Olmo2"),
    "OLMo-3": A("Olmo3", tiny=WINDOW),
    "EXAONE-4": A("Exaone4", tiny=WINDOW),
    "Qwen3-MoE": A("Qwen3Moe", {"norm_topk_prob": True}, EXPERTS["tiny"], EXPERTS["equal"]),
    "Mixtral": A(
        "Mixtral", tiny={"num_local_experts": 8, "intermediate_size": 32},
        equal={"num_local_experts": 8, "intermediate_size": 2560},
    ),
    "Gemma 1": A("Gemma"),
    "Gemma 3": A("Gemma3Text", tiny={**WINDOW, "query_pre_attn_scalar": 9}, equal={"query_pre_attn_scalar": 128}),
    "Phi-2": A("Phi", {"rope_parameters": partial(0.5)}, {}, UNGATED),
    "Phi-3": A("Phi3", tiny=WINDOW, equal={"sliding_window": 2047}),
    "StarCoder2": A("Starcoder2", {}, WINDOW, {**UNGATED, "sliding_window": 4096}),
    "GPT-NeoX": A("GPTNeoX", {"rope_parameters": partial(0.25)}, {}, {"intermediate_size": 18432}),
    "Nemotron": A("Nemotron", {"rope_parameters": partial(0.5)}, {}, UNGATED),
    "Qwen3-Next": A(
        "Qwen3Next", {"rope_parameters": partial(0.25)},
        {**DELTA["tiny"], **EXPERTS["tiny"], "shared_expert_intermediate_size": 32},
        {**DELTA["equal"], **EXPERTS["equal"], "moe_intermediate_size": 896, "shared_expert_intermediate_size": 512},
        trees=False,
    ),
    "Qwen3.5": A("Qwen3_5Text", {}, DELTA["tiny"], {**DELTA["equal"], "intermediate_size": 12544}, trees=False),
    "LFM2": A(
        "Lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False},
        equal={"intermediate_size": 12800}, trees=False,
    ),
    "Falcon-H1": A(
        "FalconH1", FALCON,
        {
            "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
        {
            "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_n_groups": 1,
            "intermediate_size": 10240,
        },
        trees=False,
    ),
    "Granite-4": A(
        "GraniteMoeHybrid", {**MULTIPLIERS, "layer_types": ["mamba", "mamba", "attention", "mamba"] * 2},
        {
            "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
            "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "intermediate_size": 32,
            "logits_scaling": 2.0,
        },
        {
            "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "num_local_experts": 32,
            "num_experts_per_tok": 4, "shared_intermediate_size": 512, "intermediate_size": 768,
            "logits_scaling": 8.0,
        },
        trees=False,
    ),
    "Gemma 4": A(
        "Gemma4", GEMMA4, {**WINDOW, **GEMMA4_GLOBAL},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "global_head_dim": 256}, GEMMA4_VISION,
    ),
    "Llama 4": A(
        "Llama4", {},
        {
            "attention_chunk_size": 16, "floor_scale": 8, "num_local_experts": 8, "interleave_moe_layer_step": 2,
            "intermediate_size": 32, "intermediate_size_mlp": 96,
        },
        {"num_local_experts": 16, "intermediate_size": 3072, "intermediate_size_mlp": 14336},
        {**SMALL_VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "Mistral-3": A("Mistral3", {"sliding_window": None}, vision=SMALL_VISION),
    "Ministral-3": A(
        "Ministral3",
        tiny={"rope_parameters": yarn(
            original_max_position_embeddings=16, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0
        )},
        equal={"rope_parameters": yarn(
            original_max_position_embeddings=1024, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0
        )},
    ),
    "Qwen2.5-VL": A(
        "Qwen2_5_VL", {}, {"rope_parameters": {**partial(1.0), "mrope_section": [2, 3, 3]}},
        {"rope_parameters": {**partial(1.0), "mrope_section": [16, 24, 24]}},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "fullatt_block_indexes": [0]},
    ),
    "Qwen3-VL": A(
        "Qwen3VL", {},
        {"rope_parameters": {**partial(1.0), "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {"rope_parameters": {**partial(1.0), "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
        {
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
    "GLM-4.5": A(
        "Glm4Moe", {"first_k_dense_replace": 1, "use_qk_norm": True, "rope_parameters": partial(0.5)},
        {**ROUTED["tiny"], "topk_group": 1}, {**ROUTED["equal"], "topk_group": 1},
    ),
    # further forms of these
    "Gemma 3 (images)": A(
        "Gemma3", {}, {**WINDOW, "query_pre_attn_scalar": 9}, {"query_pre_attn_scalar": 128},
        {**SMALL_VISION, "image_size": 16, "patch_size": 4},
    ),
    "Gemma 4 E2B": A(
        "Gemma4", {"final_logit_softcapping": 20.0, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {
            **WINDOW, "global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        {
            "global_head_dim": 256, "vocab_size_per_layer_input": 32000, "intermediate_size": 10240,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        GEMMA4_VISION,
    ),
    "Gemma 4 26B-A4B": A(
        "Gemma4", {**GEMMA4, "enable_moe_block": True},
        {**WINDOW, **GEMMA4_GLOBAL, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
        {
            "attention_k_eq_v": True, "num_global_key_value_heads": 4, "global_head_dim": 256, "num_experts": 32,
            "top_k_experts": 4, "moe_intermediate_size": 512, "intermediate_size": 7168,
        },
        GEMMA4_VISION,
    ),
    "Qwen3.5 (images)": A(
        "Qwen3_5", {}, DELTA["tiny"], {**DELTA["equal"], "intermediate_size": 12544},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16},
        trees=False,
    ),
}  # fmt: skip


def config_of(name: str, size: str) -> PretrainedConfig:
    """The config of an architecture of the table.

    Raises: ConfigError for a name or a size that is not there, and for a setting that its config class does not know.
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"architecture: found {name!r}, expected one of {', '.join(ARCHITECTURES)}")
    if size not in SIZES:
        raise ConfigError(f"size: found {size!r}, expected one of {', '.join(SIZES)}")
    entry = ARCHITECTURES[name]
    config_class = _class(entry.config)
    if entry.vision is None:
        return config_class(**_known(config_class, name, size))
    # with empty parts, it makes them of their default classes
    default = config_class(text_config={}, vision_config={})
    text_class, vision_class = type(default.text_config), type(default.vision_config)
    vision = dict(entry.vision)
    width = SIZES[size]["hidden_size"]
    vision.update({key: width for key in ("out_hidden_size",) if key in _fields(vision_class)})
    parts = {"text_config": _known(text_class, name, size), "vision_config": vision_class(**vision).to_dict()}
    parts["text_config"] = text_class(**parts["text_config"]).to_dict()
    tied = parts["text_config"].get("tie_word_embeddings", False)
    return config_class(**parts, tie_word_embeddings=tied)


def _class(name: str) -> Any:
    return getattr(transformers, f"{name}Config")


def _fields(config_class: Any) -> set[str]:
    """Names that a config class takes."""
    return {f.name for f in dataclasses.fields(config_class)} | set(config_class.attribute_map)


def _known(config_class: Any, name: str, size: str) -> dict[str, Any]:
    """Settings of an architecture: those of SIZES that its config class takes, and its own."""
    # taken by the class beyond its fields
    beyond = {"global_head_dim", "num_global_key_value_heads"}
    fields, settings = _fields(config_class), ARCHITECTURES[name].settings(size)
    if unknown := settings.keys() - fields - beyond:
        raise ConfigError(f"{name}: {config_class.__name__} does not know {', '.join(sorted(unknown))}")
    return {**{key: value for key, value in SIZES[size].items() if key in fields}, **settings}


def random_model(
    name: str,
    size: str = "tiny",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> Any:
    """A random model in eval mode whose greedy answers have clear margins.

    Args:
        name: of ARCHITECTURES.
        size: tiny or equal. Tiny weights are the same on every device, those of an equal size are made on the device.
        attention: sdpa, eager or another of transformers; sdpa falls back to eager as for loaded targets.
    Raises: ConfigError, see config_of.
    """
    config, device = config_of(name, size), torch.device(device)
    kind = auto_class(config, name)
    tiny = size == "tiny"
    held = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        with torch.device("cpu" if tiny else device):
            model, _ = with_attention(lambda a: kind.from_config(config, attn_implementation=a, dtype=dtype), attention)
    finally:
        torch.random.set_rng_state(held)
    if tiny and dtype != torch.float32:  # the same weights, rounded
        model.load_state_dict(random_model(name, size, "cpu", torch.float32, attention).state_dict())
    else:
        embed_VD, output_VD = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if tiny:
            randomise(model)
            if embed_VD is not output_VD:
                embed_VD.data.normal_(generator=torch.Generator().manual_seed(1))
        # a tied row is an embedding as well: stretched far, it would be repeated for ever
        favour(output_VD, 1.5 if embed_VD is output_VD else 5.0)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def whole_model(name: str) -> Any:
    """The tiny model as its makers publish it: with its image part, where `random_model` takes the text alone."""
    config, model = config_of(name, "tiny"), random_model(name)
    classes = AutoModelForImageTextToText._model_mapping
    if ARCHITECTURES[name].vision is None or isinstance(model, classes[type(config)]):
        return model
    whole = AutoModelForImageTextToText.from_config(config)
    text_decoder(whole).load_state_dict(text_decoder(model).state_dict())
    whole.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight)
    return whole


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give all weights random values of a size at which every part matters, the same for a name and shape always."""
    noise = torch.Generator().manual_seed(0)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(held.items()):
        last = name.rsplit(".", 1)[-1]
        learned = isinstance(tensor, nn.Parameter) or last in ("e_score_correction_bias", "layer_scalar")
        if learned and tensor.is_floating_point():
            tensor.copy_(_random_values(last, tensor, noise))


def _random_values(name: str, tensor: Tensor, noise: torch.Generator) -> Tensor:
    """Norms and the like near 1, biases near 0, matrices such that a layer keeps the size of what it reads."""
    value = torch.randn(tensor.shape, generator=noise)
    if name == "A_log":  # a state that keeps about 0.8 of itself per token
        return value * 0.5 - 1.0
    if name.endswith("bias"):
        return value * 0.15
    if tensor.dim() < 2:
        return value * 0.3 + 1.0
    return value * 1.2 / max(tensor[0].numel() if tensor.dim() != 3 else min(tensor.shape[1:]), 1) ** 0.5


@torch.no_grad()
def favour(weight_VD: Tensor, factor: float) -> None:
    """Stretch three rows of an output matrix, so that the argmax is mostly one of them, with a clear margin."""
    weight_VD[[3, 21, 80]] *= factor
