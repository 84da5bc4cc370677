"""Writes head directories: config.json and model.safetensors for engines, headstart.json for Headstart.

| file | read by | holds |
|---|---|---|
| config.json | engines | the draft layer's fields, rope in old and new form, layer ids as vLLM and SGLang count |
| model.safetensors | engines | the head's own tensors under vLLM's names, d2t, t2d; nothing shared with the target. |
|  | | With a size limit: model-00001-of-0000N.safetensors … and model.safetensors.index.json |
| headstart.json | Headstart | head config, target's dimensions and fingerprint, recipe, provenance, sha256 of both |

This is the portable form. A head that lacks what engines need is *saved* in the compact form, under an architecture
that they refuse: a head that shares the target's lm_head, or one of a family that no engine serves. The family decides
(`HeadFiles.contents`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Head
from headstart.heads.checkpoints.head_files import WEIGHTS, Contents
from headstart.heads.errors import FormatError
from headstart.heads.families import FAMILIES
from headstart.heads.files import remove_leftovers, require_disk, sha256_file, write_json
from headstart.heads.formats.shards import earlier_files, split_into_files, write_files
from headstart.heads.formats.sidecar import SIDECAR, seal, sidecar


def save_head(
    head: Head,
    directory: Path,
    provenance: dict[str, Any],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a head directory: the portable one, or a compact one where the head lacks what engines need.

    Args:
        provenance: where the head comes from; the keys `target` (fingerprint) and `recipe` get their own place.
        dtype: of the stored weights; None keeps the parameters' own.
        max_shard_bytes: larger weights go into several files of at most this size, with an index; None: one file.
    Raises: FormatError when the directory holds other weights; StorageError when the disk cannot take the file.
    """
    held = FAMILIES[head.family].files.contents(head)
    write_directory(head, Path(directory), held, provenance, dtype, max_shard_bytes)


def files_of(
    directory: Path, held: Contents, dtype: torch.dtype | None, max_shard_bytes: int | None
) -> dict[str, dict[str, Tensor]]:
    """File name → tensors. Raises: FormatError where a file that must be one would be several."""
    files = split_into_files(directory, held.weights, held.cast(dtype), max_shard_bytes)
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
