"""Checkpoints with quantised weights, written by hand from plain ones, and the plain weights that they stand for.

FP8 in blocks (`fp8`), MXFP4 experts (`mxfp4`) and packed 4-bit integers (`compressed-tensors`) need no package to be
written. The packages of the other methods write their own files through transformers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: the numbers of E2M1 by their four bits
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK, GROUP = 16, 32


def fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix whose sides are multiples of BLOCK as E4M3 with a scale per block, and what it stands for."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    packed = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = (packed.float() * scale[:, None, :, None]).view(rows, columns)
    return {"": packed.view(rows, columns), "_scale_inv": scale}, plain


def int4_groups(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as signed 4-bit integers with a scale per GROUP columns, eight in an int32; and what it stands for."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(2) / 7).to(torch.bfloat16).float()
    number = (groups / scale[..., None]).round().clamp(-8, 7)
    nibbles = (number.view(rows, columns // 8, 8).to(torch.int64) + 8) << (4 * torch.arange(8))
    total = nibbles.sum(2)
    packed = torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)
    shape = torch.tensor([rows, columns])
    plain = (number * scale[..., None]).view(rows, columns)
    return {"_packed": packed, "_scale": scale.to(torch.bfloat16), "_shape": shape}, plain


def mxfp4(weight_EIO: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Experts' matrices [E, in, out] as blocks [E, out, in/32, 16] and exponents; and what they stand for."""
    experts, inner, outer = weight_EIO.shape
    groups = weight_EIO.float().transpose(1, 2).reshape(experts, outer, inner // 32, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(3).clamp(min=1e-30))) - 2
    table = torch.tensor(FP4)
    scaled = groups / torch.exp2(exponent)[..., None]
    code = (scaled[..., None] - table).abs().argmin(-1)
    blocks = (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)
    plain = (table[code] * torch.exp2(exponent)[..., None]).reshape(experts, outer, inner).transpose(1, 2)
    return {"_blocks": blocks, "_scales": (exponent + 127).to(torch.uint8)}, plain.contiguous()


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            }
        },
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}  # fmt: skip
WRITERS = {"fp8": fp8_blocks, "compressed-tensors": int4_groups}


def quantise(source: Path, directory: Path, method: str) -> dict[str, Tensor]:
    """Write the model of `source` to `directory` with quantised weights. Returns: the plain weights they stand for."""
    shutil.copytree(source, directory)
    weights = load_file(source / "model.safetensors")
    written, plain = {}, {}
    for name, weight in weights.items():
        if method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            parts, plain[name] = mxfp4(weight)
        elif method != "mxfp4" and name.endswith("proj.weight"):
            parts, plain[name] = WRITERS[method](weight)
        else:
            parts, plain[name] = {"": weight}, weight
        written |= {f"{name}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    _set_config(directory, CONFIGS[method])
    return plain


def _set_config(directory: Path, quantisation: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation}))


def quantise_by_package(source: Path, directory: Path, settings: Any) -> None:
    """Write the model of `source` to `directory` as the package of these transformers settings quantises it."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("model*", "config.json"))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=settings, dtype=torch.bfloat16)
    model.save_pretrained(directory)
