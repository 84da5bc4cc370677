"""Small random targets of many architectures, with weights that make each path matter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers

from reference.tiny import SIZES

VOCAB = SIZES["vocab_size"]


def build(name: str, **changes: object) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():  # norms that are not 1 and biases that are not 0 tell pre- from post-norm
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    offset = 0.3 * torch.randn(parameter.shape)
                    parameter.add_(offset)
                elif "embed" in parameter_name or "lm_head" in parameter_name:
                    parameter.mul_(20)
        return model

    return make


MODELS = {
    "llama": build("Llama"),
    "llama tied": build("Llama", tie_word_embeddings=True),
    "qwen2": build("Qwen2"),
    "qwen3": build("Qwen3", head_dim=16),
    "mistral sliding": build("Mistral", sliding_window=8),
    "gemma2": build("Gemma2", head_dim=8, sliding_window=8, final_logit_softcapping=5.0, query_pre_attn_scalar=8),
    "gemma3": build("Gemma3", head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "phi3": build("Phi3", pad_token_id=0),
    "phi": build("Phi", num_key_value_heads=4),
    "granite": build("Granite", logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.7),
    "cohere": build("Cohere", logit_scale=0.25),
    "olmo2": build("Olmo2"),
}
PATTERNS = ["..AAA", "." * 9 + "A" * 11 + "..BB", "AAA", "...A", "." * 3 + "A" * 14]


def model_for(name: str) -> torch.nn.Module:
    if name == "gemma3":
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, query_pre_attn_scalar=8)
        return transformers.Gemma3ForCausalLM(config).eval()
    return MODELS[name]()
