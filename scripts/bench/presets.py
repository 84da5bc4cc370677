"""The benchmarks' models by name. Their weights are random."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from headstart.heads.base import HeadConfig
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.heads.targets.target import Target, TargetConfig

LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
#: name → (the target's config, size of the draft vocabulary)
PRESETS: dict[str, tuple[PretrainedConfig, int]] = {
    "llama-3.1-8b": (
        LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rope_parameters=LLAMA_ROPE,
        ),
        32000,
    ),
    "qwen3-8b": (
        Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        ),
        32000,
    ),
    "smollm2": (
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
        ),
        16000,
    ),
    "tiny": (
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16,
        ),
        128,
    ),
}  # fmt: skip


#: family of the heads that training benchmarks make: with a draft vocabulary; with one output matrix per depth
FAMILY, MATRICES_FAMILY = "eagle3", "medusa"
#: draft depths of the two, as their authors train them
DEPTH, MATRICES_DEPTH = 7, 5

#: families of block heads: the backbone alone, and with logits that depend on the draft before; layers and drafts, as
#: their authors train them
BLOCK_FAMILY, CORRECTED_FAMILY, BLOCK_LAYERS, BLOCK_DEPTH = "dflash", "dspark", 5, 7


def head_config(preset: str, depth: int = DEPTH, **fields: Any) -> HeadConfig:
    """The head that is benchmarked on a preset. Args: fields: more of the family's settings."""
    family: Any = FAMILIES[FAMILY]
    config: HeadConfig = family.config(depth=depth, draft_vocab_size=PRESETS[preset][1], **fields)
    return config


def drafting_block(family: str, vocab: int, **fields: Any) -> HeadConfig:
    """A block head of BLOCK_DEPTH drafts from as many slots. Args: vocab: V. fields: more of its settings."""
    family_: Any = FAMILIES[family]
    given = {"depth": BLOCK_DEPTH, "layers": BLOCK_LAYERS, "sample_from_anchor": True, "mask_token_id": vocab - 1}
    config: HeadConfig = family_.config(**{**given, **fields})
    return config


def matrices_config(lm_head: str, depth: int = MATRICES_DEPTH, **fields: Any) -> HeadConfig:
    """A head with one output matrix per depth. Args: lm_head: own | shared | lowrank. fields: more of its settings."""
    family: Any = FAMILIES[MATRICES_FAMILY]
    config: HeadConfig = family.config(depth=depth, lm_head=lm_head, **fields)
    return config


@dataclass(frozen=True)
class BlockCase:
    """A head that drafts blocks, in a training benchmark.

    Attributes:
        layers: of the head. share: head.anchor_share.
        blocks, vocabularies: sizes of a block (slots) and of the draft vocabulary (0 = all tokens); None = what the
            command line says.
        mixed: documents of mixed lengths (MIXED_LENGTHS) instead of equal ones.
    """

    family: str
    layers: int = 5
    share: float = 0.25
    blocks: tuple[int, ...] | None = None
    vocabularies: tuple[int, ...] | None = None
    mixed: bool = False


#: 512 anchors per 2,048 rows at 8B sizes (the papers'), 2,048 per 16,384 rows at SmolLM2's
BLOCK_CASES = {
    "dspark_all": BlockCase("dspark"),
    "dflash_all": BlockCase("dflash"),
    "smollm2_dspark": BlockCase("dspark", 2, 0.125, (8,), (0,), True),
}
#: tokens of conversations, repeated until a pack is full
MIXED_LENGTHS = (212, 345, 478, 611, 744, 1010, 289, 566, 131, 830)


def block_config(case: BlockCase, block: int, draft_vocab: int, vocab: int) -> HeadConfig:
    """The head of a case. Args: block: slots, from which the depth follows. draft_vocab: 0 = all. vocab: the target's.

    Raises: ConfigError for a draft vocabulary that is larger than the target's.
    """
    if not 0 <= draft_vocab <= vocab:
        raise ConfigError(f"--draft-vocab: found {draft_vocab}, expected at most the target's vocabulary of {vocab}")
    make: Any = FAMILIES[case.family].config
    fields = {"layers": case.layers, "anchor_share": case.share, "draft_vocab_size": draft_vocab}
    every = make().sample_from_anchor  # else the first slot drafts nothing
    config: HeadConfig = make(depth=block if every else block - 1, mask_token_id=vocab - 1, **fields)
    return config


def mixed_lengths(tokens: int) -> tuple[int, ...]:
    """Documents of MIXED_LENGTHS that fill a pack, the last one cut.

    >>> mixed_lengths(1000)
    (212, 345, 443)
    """
    lengths: list[int] = []
    for length in cycle(MIXED_LENGTHS):
        if sum(lengths) == tokens:
            return tuple(lengths)
        lengths.append(min(length, tokens - sum(lengths)))
    raise AssertionError  # the lengths never end


def random_target(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """The preset's full model with random weights, made on the device."""
    model_class = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen3ForCausalLM
    config._attn_implementation = "sdpa"
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config)
    finally:
        torch.set_default_dtype(default)
    return Target.from_model(model, config=TargetConfig(name="random"))


def random_ends(dims: HeadDims, device: torch.device, dtype: torch.dtype, embeddings: bool) -> TargetEnds:
    """Ends of a target that is not there itself. Args: embeddings: False for a head that reads no tokens."""
    weight_VD = torch.randn(dims.vocab_size, dims.hidden_size, device=device, dtype=dtype).mul_(0.02)
    place = device if embeddings else torch.device("meta")
    return TargetEnds(torch.randn(dims.vocab_size, dims.hidden_size, device=place, dtype=dtype), Teacher(weight_VD))


def refuse_ranks() -> None:
    """Raise ConfigError inside a launch of several ranks: each would measure by itself, all of them on one card."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ConfigError(
            f"launch: WORLD_SIZE is {ranks}, expected one process without a launcher. To measure several GPUs: "
            f"python -m headstart.bench.scaling --gpus 1 {ranks}, which starts its ranks itself"
        )
