"""A tiny target, a Medusa head and documents, joined."""

from __future__ import annotations

from typing import Any

import torch
from reference.tiny import turns_of
from torch import nn

from headstart.heads.batch import FeatureBatch
from headstart.heads.families import MedusaConfig, build_head
from headstart.heads.targets.target import Target
from headstart.train.joint.config import JointConfig
from headstart.train.joint.head import JointHead

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
PATTERNS = ("..AAAAA.BB", ".AAA", "...A", "....")


def tiny_target(dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Target:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return Target.from_model(model.to(device=device, dtype=dtype))


def config_of(**changes: Any) -> JointConfig:
    return JointConfig(**{"enabled": True, "rank": 3, "alpha": 6.0, "dropout": 0.0, **changes})


def fill(module: nn.Module, seed: int, size: float = 0.3) -> None:
    """Random values for every parameter, so that adapter and head change what they compute."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=noise) * size)


def joint_head(
    config: JointConfig, head: MedusaConfig | None = None, target: Target | None = None, filled: bool = True
) -> JointHead:
    target = target or tiny_target()
    torch.manual_seed(1)
    inner = build_head(head or MedusaConfig(depth=2, loss="kl"), target.dims).to(target.device)
    inner.initialise(target.ends)
    joined = JointHead(inner, target, config, seed=3)
    if filled:
        fill(joined.inner, 5)
        fill(joined.adapter, 6)
    return joined


def documents_of(patterns: tuple[str, ...] = PATTERNS, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    noise = torch.Generator().manual_seed(seed)
    vocab = SIZES["vocab_size"]
    return [
        (torch.randint(3, vocab, (len(p),), generator=noise), torch.tensor(turns_of(p), dtype=torch.int64))
        for p in patterns
    ]


def batch_of(patterns: tuple[str, ...] = PATTERNS, depth: int = 2, pad_to: int = 0, seed: int = 0) -> FeatureBatch:
    """One pack of tokens, as a source gives it to a head that runs the target itself; loud padding."""
    batch = FeatureBatch.pack(documents_of(patterns, seed), depth, pad_to)
    used = sum(batch.doc_lengths)
    batch.tokens_R[used:] = 7
    return batch
