"""Reads a checkpoint directory that may be damaged or hostile: bounded JSON, headers before tensors, no code.

A `RawCheckpoint` knows every tensor's name, dtype and shape before one byte of tensor data is allocated, so
shapes can be compared with the config first. Pickled files go through `torch.load(weights_only=True, mmap=True)`
only: nothing in them is executed, and their storages stay on disk until a tensor is asked for. Only regular files
are opened: a pipe or a device in a file's place is refused, not waited for.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.heads.errors import FormatError, first_line
from headstart.heads.files import explain_read, open_regular, read_bounded, require_regular

MAX_JSON_BYTES = 64 << 20
#: most levels of objects and lists; a config has five
MAX_DEPTH = 64
MAX_HEADER_BYTES = 100 << 20
MAX_RANK = 4

#: safetensors dtypes a head may hold; quantised and fp8 heads are refused by name
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class RawCheckpoint:
    """A head directory on disk: its JSON files parsed, the headers of its weight files, and a way to read one tensor.

    Attributes:
        config: config.json.
        sidecar: headstart.json; None where there is none.
        tensors: name → what the header of its file says of it.
        readers: weight file → what reads one of its tensors by name.
    """

    directory: Path
    config: dict[str, Any]
    sidecar: dict[str, Any] | None
    tensors: dict[str, TensorInfo]
    readers: dict[str, Callable[[str], Tensor]] = field(repr=False, default_factory=dict)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype of the file. Raises FormatError for non-finite values."""
        info = self.tensors[name]
        tensor = self.readers[info.file](name)
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            raise FormatError(
                f"{self.directory / info.file}: {name} changed while it was read: header {info.dtype} {info.shape}, "
                f"data {tensor.dtype} {tuple(tensor.shape)}. Copy the checkpoint again."
            )
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise FormatError(
                f"{self.directory / info.file}: {name} holds NaN or infinite values: the file is damaged or the "
                "training diverged. Take an earlier checkpoint or copy the file again."
            )
        return tensor


def safe_child(directory: Path, name: str, named_in: str) -> Path:
    """`directory / name` for a file name found inside a file; refuses anything that leaves the directory."""
    if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise FormatError(f"{named_in}: names the file {name!r}; only plain file names in the same directory are read")
    return directory / name


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size and depth. Raises FormatError naming the file."""
    with explain_read(path, FormatError):
        content = read_bounded(path, MAX_JSON_BYTES)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def parse_json(content: bytes) -> Any:
    """JSON whose every value can be shown in a message: bounded depth, unique keys, text that UTF-8 can hold.

    Raises: ValueError (of which JSONDecodeError and UnicodeDecodeError are kinds).
    """
    text = content.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level, depth = [value], 0
    while level := [item for node in level for item in _inside(node)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate
    return value


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice")
        result[key] = value
    return result


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of a safetensors file, verified against its size; no tensor is read.

    Raises: FormatError for a truncated, oversized or inconsistent file, or a dtype heads do not use.
    """
    with explain_read(path, FormatError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise FormatError(f"{path}: {size} bytes, too short for a safetensors file: it is truncated; copy it again")
        length = struct.unpack("<Q", prefix)[0]
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise FormatError(
                f"{path}: the header claims {length} bytes and the file has {size}: truncated, or no safetensors file"
            )
        content = file.read(length)
    try:
        header = parse_json(content)
    except ValueError as error:
        raise FormatError(f"{path}: the safetensors header is not valid JSON ({error}); copy the file again") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the safetensors header holds a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, entry, size - 8 - length) for name, entry in header.items()}
    covered = 0
    for name, (_, start, stop) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if start != covered:
            raise FormatError(
                f"{path}: {name} starts at byte {start} of the data, expected {covered}: gaps and overlaps are refused"
            )
        covered = stop
    if covered != size - 8 - length:
        raise FormatError(
            f"{path}: the header describes {covered} bytes of tensors and the file holds {size - 8 - length}: "
            "it is truncated or has something appended; copy it again"
        )
    return {name: info for name, (info, _, _) in entries.items()}


def _entry(path: Path, name: str, entry: Any, available: int) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{path}: the header entry of {name!r} is malformed; expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(
            f"{path}: {name} has dtype {dtype!r}; heads are read in {', '.join(DTYPES)}: export it unquantised"
        )
    lists = isinstance(shape, list) and isinstance(offsets, list)
    numbers = [*shape, *offsets] if lists and len(shape) <= MAX_RANK and len(offsets) == 2 else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise FormatError(
            f"{path}: {name} has shape {shape!r} at {offsets!r}; expected up to {MAX_RANK} sizes and two byte offsets"
        )
    info = TensorInfo(DTYPES[dtype], tuple(shape), path.name)
    start, stop = offsets
    if stop > available or stop - start != info.nbytes:
        raise FormatError(
            f"{path}: {name} {dtype} {shape} needs {info.nbytes} bytes, the header gives it bytes {start}…{stop} "
            f"of {available}"
        )
    return info, start, stop


#: what opening a weight file gives: its header, and a reader of one tensor
Opened = tuple[dict[str, TensorInfo], Callable[[str], Tensor]]


def open_safetensors(path: Path) -> Opened:
    """The header of a safetensors file, and a reader of one tensor."""
    infos = read_header(path)

    def read(name: str) -> Tensor:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{path}: {name} cannot be read ({error}); copy the file again") from error

    return infos, read


def open_pickle(path: Path) -> Opened:
    """A `.bin`/`.pt` state dict through `weights_only=True`: any other object in it is refused, nothing is executed.

    Checksums of an archive's members are compared first; the older layout, a plain pickle, has none.
    """
    with explain_read(path, FormatError):
        require_regular(path)
        size = path.stat().st_size
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _verify_archive(path, size)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except FormatError:
        raise
    except pickle.UnpicklingError as error:
        raise FormatError(
            f"{path}: holds more than tensors, so it is not opened ({first_line(error)}). "
            "Convert it to safetensors where you trust it."
        ) from error
    except Exception as error:  # noqa: BLE001 - a damaged archive raises anything from KeyError to RuntimeError
        raise FormatError(
            f"{path}: cannot be read as a weight file ({type(error).__name__}: {error}); copy it again"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise FormatError(f"{path}: expected a flat dictionary of tensors")
    infos = {}
    for name, tensor in state.items():
        if tensor.dtype not in DTYPES.values() or tensor.dim() > MAX_RANK or tensor.layout != torch.strided:
            raise FormatError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}; heads are read in {', '.join(DTYPES)}"
            )
        if tensor.numel() * tensor.element_size() > size:
            raise FormatError(
                f"{path}: {name} claims shape {tuple(tensor.shape)}, more than the file's {size} bytes hold"
            )
        infos[name] = TensorInfo(tensor.dtype, tuple(tensor.shape), path.name)
    return infos, lambda name: state[name].contiguous()


def _verify_archive(path: Path, size: int) -> None:
    """Compare the checksums of an archive's members, which torch does not. Raises: FormatError for a damaged one."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        total = sum(member.file_size for member in members)
        if total > 2 * size + (1 << 20):
            raise FormatError(f"{path}: unpacks to {total} bytes from {size}: compressed weight files are refused")
        if len({member.filename for member in members}) < len(members):
            raise FormatError(f"{path}: a member appears twice in the archive; copy it again")
        if damaged := archive.testzip():
            raise FormatError(
                f"{path}: {damaged} does not have the checksum (CRC-32) that the archive says: the file was damaged or "
                "changed, or written without checksums. Copy it again, or save it again where it came from."
            )


#: weight files in the order they are looked for: (index, single file)
WEIGHT_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    (None, "medusa_lm_head.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
#: the pickled weights of trainers that name the file after their method
PICKLED = "*_lm_head.pt"


def open_checkpoint(directory: Path) -> RawCheckpoint:
    """Open a head directory: config, sidecar and tensor headers; tensors are read later, one by one.

    Raises: FormatError naming the file and what is wrong with it.
    """
    directory = Path(directory)
    if not os.path.lexists(directory / "config.json"):
        lacks = "no config.json in it" if directory.is_dir() else "no such directory"
        raise FormatError(f"{directory}: {lacks}; expected a head directory with config.json and weights")
    config = read_json_object(directory / "config.json")
    sidecar = directory / "headstart.json"
    raw = RawCheckpoint(directory, config, read_json_object(sidecar) if os.path.lexists(sidecar) else None, {})
    for path, (infos, read) in _open_weights(directory).items():
        twice = sorted(set(infos) & set(raw.tensors))
        if twice:
            raise FormatError(f"{path}: {', '.join(twice[:5])} is in another shard as well; keep one")
        raw.tensors.update(infos)
        raw.readers[path.name] = read
    if not raw.tensors:
        raise FormatError(f"{directory}: the weight files hold no tensors")
    return raw


def _open_weights(directory: Path) -> dict[Path, Opened]:
    for index, single in WEIGHT_FILES:
        # a link to a missing file counts: passing it over would read another file than was meant
        if index is not None and os.path.lexists(directory / index):
            return _open_shards(directory, index)
        if os.path.lexists(directory / single):
            return {directory / single: _open_file(directory / single)}
    pickled = sorted(directory.glob(PICKLED))
    if len(pickled) > 1:
        raise FormatError(f"{directory}: {len(pickled)} files named {PICKLED}; keep the one that is meant")
    if pickled:
        return {pickled[0]: _open_file(pickled[0])}
    shards = sorted(directory.glob("*.safetensors"))
    if len(shards) == 1:
        return {shards[0]: open_safetensors(shards[0])}
    if shards:
        raise FormatError(
            f"{directory}: {len(shards)} safetensors files and no model.safetensors.index.json that says which to read"
        )
    expected = ", ".join([*(single for _, single in WEIGHT_FILES), PICKLED])
    raise FormatError(f"{directory}: no weights; expected one of {expected}")


def _open_file(path: Path) -> Opened:
    return (open_safetensors if path.suffix == ".safetensors" else open_pickle)(path)


def _open_shards(directory: Path, index: str) -> dict[Path, Opened]:
    path = directory / index
    weight_map = read_json_object(path).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not files or not all(isinstance(file, str) for file in files):
        raise FormatError(f"{path}: weight_map is missing or malformed; expected tensor name → file name")
    suffix = ".safetensors" if index.endswith(".safetensors.index.json") else ".bin"
    opened: dict[Path, Opened] = {}
    for name in dict.fromkeys(files):
        shard = safe_child(directory, name, str(path))
        if shard.suffix != suffix:
            raise FormatError(f"{path}: names {shard.name!r}, expected {suffix} files")
        opened[shard] = _open_file(shard)
        listed = {tensor for tensor, file in weight_map.items() if file == shard.name}
        if odd := sorted(listed ^ set(opened[shard][0])):
            raise FormatError(
                f"{path}: disagrees with {shard.name} about {', '.join(odd[:5])}; copy the checkpoint again"
            )
    return opened
