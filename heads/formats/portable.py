"""The portable directory: config.json + model.safetensors that engines load, headstart.json that remembers the rest.

| file | read by | holds |
|---|---|---|
| config.json | engines | llama fields of the draft layer, rope in both spellings, feature layers in both countings |
| model.safetensors | engines | the head's own tensors under vLLM's names, d2t, t2d; nothing shared with the target |
|  | | or model-00001-of-0000N.safetensors … and model.safetensors.index.json, where a size limit asks for it |
| headstart.json | Headstart | head config, target's dimensions and fingerprint, recipe, provenance, sha256 of both |

A Medusa head that shares the target's lm_head (or updates it by low rank) is *saved* compactly, under an
architecture that engines refuse; `export` adds the matrices that engines need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads import vocab
from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.geometry import legacy_rope, rope_parameters
from headstart.heads.errors import FormatError
from headstart.heads.files import remove_leftovers, require_disk, sha256_file, write_json
from headstart.heads.formats.shards import earlier_files, plan_files, write_files
from headstart.heads.formats.sidecar import SIDECAR, seal, sidecar

WEIGHTS = "model.safetensors"
COMPACT_ARCHITECTURE = "HeadstartMedusaModel"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def save_head(
    head: Head,
    directory: Path,
    provenance: dict[str, Any],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write the portable directory (a compact one for Medusa heads without own output matrices).

    Args:
        provenance: where the head comes from; the keys `target` (fingerprint) and `recipe` get their own place.
        dtype: of the stored weights; None keeps the parameters' own.
        max_shard_bytes: larger weights go into several files of at most this size, with an index; None: one file.
    Raises: FormatError when the directory holds other weights; StorageError when the disk cannot take the file.
    """
    write_directory(head, Path(directory), contents(head), provenance, dtype, max_shard_bytes)


@dataclass(frozen=True)
class Contents:
    """What a directory holds besides headstart.json.

    Attributes:
        layout: its name in headstart.json.
        config: config.json, without the dtype.
        weights: name of the file of the tensors.
        settings: the head config that the file stands for, where merging made it another than the head's own.
    """

    layout: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = WEIGHTS
    settings: HeadConfig | None = None

    def cast(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """The tensors, floating ones in `dtype`."""
        if dtype is None:
            return self.tensors
        return {name: t.to(dtype) if t.dtype.is_floating_point else t for name, t in self.tensors.items()}


def contents(head: Head) -> Contents:
    """Of the portable directory (a compact one for Medusa heads without own output matrices)."""
    if head.family == "medusa" and head.config.lm_head != "own":  # type: ignore[attr-defined]
        return Contents("compact", compact_config(head), native_tensors(head))
    return Contents("portable", portable_config(head), portable_tensors(head))


def files_of(
    directory: Path, held: Contents, dtype: torch.dtype | None, max_shard_bytes: int | None
) -> dict[str, dict[str, Tensor]]:
    """File name → tensors. Raises: FormatError where a file that must be one would be several."""
    files = plan_files(directory, held.weights, held.cast(dtype), max_shard_bytes)
    if len(files) > 1 and held.weights != WEIGHTS:
        raise FormatError(
            f"export.max_shard_size: {directory / held.weights} would be larger, and its readers open no second file "
            "(TGI, TensorRT-LLM's Medusa converter). Raise the size, set it to null, or leave that engine out"
        )
    return files


def write_directory(
    head: Head,
    directory: Path,
    held: Contents,
    provenance: dict[str, Any],
    dtype: torch.dtype | None,
    max_shard_bytes: int | None = None,
) -> None:
    """Weights, then config, then the sidecar that seals both: an interrupted write is recognised when read.

    Args: as for `save_head`.
    """
    files, earlier = files_of(directory, held, dtype, max_shard_bytes), earlier_files(directory, SIDECAR)
    tensors = {name: tensor for part in files.values() for name, tensor in part.items()}
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{directory}: {name} holds NaN or infinite values; take an earlier checkpoint")
    remove_leftovers(directory)
    others = [
        path.name
        for path in directory.glob("*")
        if path.suffix in (".safetensors", ".bin", ".pt") and path.name not in {*files, *earlier}
    ]
    if others:
        raise FormatError(
            f"{directory}: already holds {', '.join(others)}, which engines would load too; choose an empty directory"
        )
    require_disk(directory, sum(t.numel() * t.element_size() for t in tensors.values()) + (1 << 20), "the head")
    kinds = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.dtype.is_floating_point}
    config = {**held.config, "dtype": kinds.pop() if len(kinds) == 1 else "float32"}
    write_files(directory, held.weights, files, earlier)
    write_json(directory / "config.json", config)
    digests = {name: sha256_file(directory / name) for name in (*files, "config.json")}
    write_json(directory / SIDECAR, seal(sidecar(head, held.settings or head.config, held.layout, provenance, digests)))


def native_tensors(head: Head) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in head.state_dict().items()}


def portable_tensors(head: Head) -> dict[str, Tensor]:
    """The state dict under portable names; `draft_ids_U` becomes d2t (int64 offsets) and t2d (bool)."""
    tensors = native_tensors(head)
    ids_U = tensors.pop("draft_ids_U", None)
    if ids_U is not None:
        check_draft_ids(ids_U, head.dims.vocab_size)
        tensors["d2t"] = vocab.offsets(ids_U)
        tensors["t2d"] = vocab.membership(ids_U, head.dims.vocab_size)
    return tensors


def check_draft_ids(ids_U: Tensor, vocab_size: int) -> None:
    if not bool((ids_U[1:] > ids_U[:-1]).all()) or int(ids_U[0]) < 0 or int(ids_U[-1]) >= vocab_size:
        raise FormatError(
            f"draft_ids_U: expected ascending distinct ids below {vocab_size}; was initialise called?"
        )


def portable_config(head: Head) -> dict[str, Any]:
    """config.json of the portable directory (formats.md), without the dtype."""
    dims = head.dims
    if head.family == "medusa":
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": dims.hidden_size,
            "vocab_size": dims.vocab_size,
            "num_heads": head.depth,
            "num_hidden_layers": head.config.num_layers,  # type: ignore[attr-defined]
            "medusa_fc_bias": True,
        }
    if head.family not in ("eagle", "eagle3"):
        raise FormatError(f"{head.family}: no portable format is known for this family")
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    prefix = "midlayer." if head.family == "eagle3" else "layers.0."
    rope = rope_parameters({"rope_parameters": dims.rope_parameters}, "the target's rope")
    theta, scaling = legacy_rope(rope)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if head.family == "eagle3" else "EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shapes["fc.weight"][0],
        "intermediate_size": shapes[f"{prefix}mlp.gate_proj.weight"][0],
        "num_hidden_layers": 1,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": head.hidden_act,  # type: ignore[attr-defined]
        "rms_norm_eps": dims.rms_norm_eps,
        "max_position_embeddings": dims.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": dims.vocab_size,
        "bos_token_id": dims.bos_token_id,
        "eos_token_id": dims.eos_token_id,
    }
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if head.family == "eagle3":
        ids = list(head.spec.layer_ids)
        config |= {
            "draft_vocab_size": shapes["lm_head.weight"][0],
            "target_hidden_size": dims.hidden_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids],
            },
        }
    return config


def compact_config(head: Head) -> dict[str, Any]:
    return {
        "architectures": [COMPACT_ARCHITECTURE],
        "model_type": "headstart_medusa",
        "hidden_size": head.dims.hidden_size,
        "vocab_size": head.dims.vocab_size,
        "note": "Saved without the target's lm_head: run `headstart export` before serving.",
    }
