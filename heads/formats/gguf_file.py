"""Writes an EAGLE-3 head as GGUF, as llama.cpp reads it (src/models/eagle3.cpp).

| GGUF | from |
|---|---|
| `eagle3.target_layers` | the feature layers: k is the input of layer k, as in vLLM |
| `blk.0.attn_q.weight`, `blk.0.attn_k.weight` | q_proj, k_proj: rows reordered, as its rope rotates neighbours |
| `d2t` | ids of the target's tokens (config.json's files hold offsets) |
| `rope_freqs.weight` | Llama 3's rope: what each frequency is divided by |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.checkpoints.geometry import rope_parameters
from headstart.heads.checkpoints.raw import RawCheckpoint, open_checkpoint
from headstart.heads.families.eagle_files import LAYER_IDS
from headstart.heads.files import atomic_write
from headstart.heads.formats.eagle_rules import fc_norm_of

GGUF = "eagle3.gguf"
#: kinds of rope that the file can say
ROPES = ("default", "linear", "llama3", "yarn")
#: our tensor → llama.cpp's
NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def write_gguf(directory: Path) -> None:
    """Write `eagle3.gguf` from the portable files of an EAGLE-3 head in the same directory."""
    from gguf import GGMLQuantizationType, GGUFWriter

    raw = open_checkpoint(directory)
    kinds = {torch.float16: GGMLQuantizationType.F16, torch.bfloat16: GGMLQuantizationType.BF16}

    def write(place: Path) -> None:
        writer = GGUFWriter(str(place), "eagle3")
        _add_settings(writer, raw.config, directory)
        for name, tensor in gguf_tensors(raw):
            if tensor.dtype == torch.int64 or tensor.dim() == 1:  # llama.cpp takes norms in float32 only
                writer.add_tensor(name, tensor.numpy() if tensor.dtype == torch.int64 else tensor.float().numpy())
            elif tensor.dtype == torch.bfloat16:  # numpy has no such type: its bytes
                writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=kinds[tensor.dtype])
            else:
                writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    atomic_write(directory / GGUF, write)


def gguf_tensors(raw: RawCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Name in the GGUF file and contiguous tensor, one after the other."""
    config = raw.config
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in sorted(raw.tensors):
        if name == "d2t":
            offsets_U = raw.read(name).long()
            yield name, offsets_U + torch.arange(offsets_U.shape[0])
        elif name in NAMES:
            count = next((count for part, count in heads.items() if part in name), None)
            tensor = raw.read(name)
            reordered = tensor if count is None else neighbours(tensor, count, rotated_rows(config))
            yield NAMES[name], reordered.contiguous()
    rope = rope_parameters(config, "config.json")
    if rope["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_divisors(rope, rotated_rows(config))


def rotated_rows(config: dict[str, Any]) -> int:
    """How many dimensions of each head rope rotates."""
    return int(config["head_dim"] * rope_parameters(config, "config.json").get("partial_rotary_factor", 1.0))


def neighbours(weight: Tensor, heads: int, rotated: int) -> Tensor:
    """Reorder the rows of each head: row i and row i + rotated / 2, which rope rotates together, become neighbours."""
    rows, width = weight.shape
    whole = weight.reshape(heads, rows // heads, width)
    first = whole[:, :rotated].reshape(heads, 2, rotated // 2, width).transpose(1, 2).reshape(heads, rotated, width)
    return torch.cat([first, whole[:, rotated:]], 1).reshape(rows, width)


def llama3_divisors(rope: dict[str, Any], rotated: int) -> Tensor:
    """What Llama 3's rope divides each frequency by: 1 for short waves, `factor` for long ones. [rotated / 2]"""
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    frequencies = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    smooth = (original * frequencies / (2 * math.pi) - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 / ((1 - smooth) / factor + smooth)).float()


def _add_settings(writer: Any, config: dict[str, Any], directory: Path) -> None:
    rope = rope_parameters(config, "config.json")
    writer.add_name(directory.name)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(1)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(rotated_rows(config))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string("eagle3.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        for ours, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if rope.get(ours) is not None:
                writer.add_float32(f"eagle3.rope.scaling.{key}", float(rope[ours]))
    # keys that the package may not know by name yet
    writer.add_array("eagle3.target_layers", [int(layer) for layer in config[LAYER_IDS]])
    writer.add_uint32("eagle3.target_hidden_size", config.get("target_hidden_size") or config["hidden_size"])
    writer.add_bool("eagle3.norm_before_residual", bool(config.get("norm_before_residual")))
    writer.add_bool("eagle3.norm_before_fc", fc_norm_of(config) == "concat")
