"""Weights in several files of bounded size, with the index that transformers and the engines' loaders follow."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from headstart.heads.errors import ConfigError, DataError, FormatError
from headstart.heads.files import read_json, write_json, write_safetensors

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
#: bytes of a header: of every file, and of every tensor in it
HEADER_BYTES, ENTRY_BYTES = 128, 192


def shard_bytes(size: str | int | None) -> int | None:
    """Bytes of "14MB", "5GB", "512MiB" or a number; None stays None (one file).

    Raises: ConfigError naming the field.
    """
    if size is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    value = float(match[1]) * UNITS[match[2].upper()] if match and match[2].upper() in UNITS else 0
    if not 1 <= value < 1 << 63:
        raise ConfigError(
            f"export.max_shard_size: found {size!r}, expected a size such as 14MB, 5GB or 512MiB, or null"
        )
    return int(value)


def split(tensors: dict[str, Tensor], limit: int, where: str) -> list[dict[str, Tensor]]:
    """Tensors in their order, a new file wherever the next one would pass `limit` bytes.

    Raises: FormatError for a tensor that alone passes the limit: a safetensors index cannot split one.
    """
    parts: list[dict[str, Tensor]] = []
    used = limit + 1
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() + ENTRY_BYTES
        if HEADER_BYTES + size > limit:
            raise FormatError(
                f"{where}: {name} {list(tensor.shape)} alone takes {size + HEADER_BYTES} bytes and "
                f"export.max_shard_size is {limit}: a tensor is not split over files. Raise the size to at least that, "
                "store the head in a smaller dtype, or take a smaller draft vocabulary"
            )
        if used + size > limit:
            parts.append({})
            used = HEADER_BYTES
        parts[-1][name] = tensor
        used += size
    return parts


def split_into_files(
    directory: Path, weights: str, tensors: dict[str, Tensor], limit: int | None
) -> dict[str, dict[str, Tensor]]:
    """File name → tensors: one file named `weights`, or shards where it would pass `limit` bytes."""
    whole = sum(t.numel() * t.element_size() + ENTRY_BYTES for t in tensors.values()) + HEADER_BYTES
    if limit is None or whole <= limit:
        return {weights: tensors}
    parts = split(tensors, limit, str(directory))
    stem = weights.removesuffix(".safetensors")
    return {f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, 1)}


def write_files(directory: Path, weights: str, files: dict[str, dict[str, Tensor]], earlier: set[str]) -> None:
    """Write the files of `split_into_files` and their index, then delete an earlier head's: engines would load both.

    Args:
        earlier: weight files of the head that was saved here before.
    """
    for name, part in files.items():
        write_safetensors(directory / name, part)
    index = directory / f"{weights}.index.json"
    if len(files) > 1:
        tensors = [tensor for part in files.values() for tensor in part.values()]
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        weight_map = {tensor: name for name, part in files.items() for tensor in part}
        write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})
    elif len(earlier) > 1:
        index.unlink(missing_ok=True)
    for name in earlier - set(files):
        (directory / name).unlink(missing_ok=True)


def earlier_files(directory: Path, sidecar: str) -> set[str]:
    """Weight files that the sidecar in `directory` names: of the head that was saved there before, and of no other."""
    if not (directory / sidecar).is_file():
        return set()
    try:
        sealed = read_json(directory / sidecar)
    except DataError:
        return set()
    digests = sealed.get("sha256") if isinstance(sealed, dict) else None
    names = [name for name in digests if isinstance(name, str)] if isinstance(digests, dict) else []
    return {name for name in names if name.endswith(".safetensors") and Path(name).name == name}
