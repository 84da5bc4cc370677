"""A feature store: hidden states of the target on disk.

A store is a directory of safetensors shards, each holding whole documents one after another, and a manifest that says
what the states are and of which target:

    manifest.json           see `Manifest`; rewritten after every shard, so a killed build continues
    shard-00000.safetensors tokens_R, turn_R, argmax_R (int32), hidden_RD (post-norm), streams_RkD (pre-norm)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.data.features import FeatureSource, Progress, argmax_rows, extract, groups_within, silent, store_bytes
from headstart.data.samples import Sample, answer_turns, check_vocabulary
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.counting import counted
from headstart.heads.errors import DataError, StorageError, TargetError
from headstart.heads.files import read_json, require_disk, sha256_file, write_json, write_safetensors
from headstart.heads.numerics import DTYPES
from headstart.heads.provenance import provenance
from headstart.heads.targets.target import Target

SCHEMA = 1
#: fields of a fingerprint in which a store must equal the target; the name may differ, because it only says where the
#: target was found
FINGERPRINT = (
    "weight_hash", "adapter_digest", "dtype", "tokenizer_hash", "template_hash", "vocab_size", "hidden_size",
    "num_layers",
)  # fmt: skip


@dataclass
class Shard:
    """One file of the store, with the documents `first … last`; size and hash are None until it is complete."""

    file: str
    first: int
    last: int
    rows: int
    bytes: int | None = None
    sha256: str | None = None

    @property
    def complete(self) -> bool:
        return self.sha256 is not None


@dataclass
class Manifest:
    """manifest.json of a feature store.

    Attributes:
        layer_ids: HF `hidden_states` indices of streams_RkD.
        norms: tensor → whether the target's final norm has been applied to it.
        dtype: of hidden_RD and streams_RkD.
        fingerprint: Target.fingerprint().
        samples: `[id, rows, digest]` per document, in order.
    """

    layer_ids: list[int]
    dtype: str
    fingerprint: dict[str, Any]
    samples: list[list[Any]]
    shards: list[Shard]
    schema: int = SCHEMA
    norms: dict[str, str] = field(default_factory=lambda: {"hidden_RD": "post_norm", "streams_RkD": "pre_norm"})
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(shard.complete for shard in self.shards)

    def write(self, directory: Path) -> None:
        write_json(directory / "manifest.json", asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises: StorageError when there is no manifest or it is of another schema."""
        path = directory / "manifest.json"
        if not path.is_file():
            raise StorageError(f"{directory}: no feature store there (manifest.json is missing): build it first")
        value = read_json(path)
        if value.get("schema") != SCHEMA:
            raise StorageError(f"{path}: schema: found {value.get('schema')}, expected {SCHEMA}: build the store again")
        try:
            return cls(**{**value, "shards": [Shard(**shard) for shard in value["shards"]]})
        except (TypeError, KeyError) as error:
            raise StorageError(f"{path}: damaged ({error}): remove the directory and build the store again") from error


def build_store(
    target: Target,
    samples: Sequence[Sample],
    spec: FeatureSpec,
    directory: Path,
    dtype: str = "auto",
    shard_tokens: int = 8192,
    pack_tokens: int = 4096,
    progress: Progress = silent,
) -> Path:
    """Run the target over every sample and write the store; a killed build continues after its last complete shard.

    Args:
        dtype: "auto" stores the target's dtype.
        shard_tokens: rows per shard. A longer document gets a shard of its own.
        pack_tokens: rows per forward of the target.
    Returns: `directory`.
    Raises: TargetError when the directory holds states of another target, naming the field and both values; DataError
        when it holds other samples, or states overflow `dtype`; StorageError when the disk cannot take it.
    """
    directory = Path(directory)
    target.check_layer_ids(spec.layer_ids)
    check_vocabulary(samples, target.dims.vocab_size)
    stored = target.dtype if dtype == "auto" else DTYPES[dtype]
    lengths = [len(sample) for sample in samples]
    shards = [
        Shard(f"shard-{number:05d}.safetensors", group.start, group.stop - 1, sum(lengths[i] for i in group))
        for number, group in enumerate(groups_within(lengths, shard_tokens))
    ]
    new = Manifest(
        list(spec.layer_ids), str(stored).removeprefix("torch."), target.fingerprint(), index_of(samples), shards,
        provenance=provenance(target.device),
    )  # fmt: skip
    manifest = _continue(directory, new)
    total = sum(shard.rows for shard in manifest.shards)
    todo = sum(shard.rows for shard in manifest.shards if not shard.complete)
    require_disk(
        directory, store_bytes(todo, target.dims.hidden_size, len(spec.layer_ids), stored), "the feature store"
    )
    manifest.write(directory)
    done = total - todo
    progress(done, total, f"{counted(done, 'rows')} found in {directory}" if done else "")
    for shard in manifest.shards:
        if shard.complete:
            continue
        path = directory / shard.file
        parts = []
        for group in groups_within(lengths[shard.first : shard.last + 1], pack_tokens):
            batch = extract(target, [samples[shard.first + i] for i in group], spec)
            parts.append(_rows_to_store(batch, stored))
            done += len(batch.tokens_R)
            progress(done, total, "")
        write_safetensors(path, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        shard.bytes, shard.sha256 = path.stat().st_size, sha256_file(path)
        manifest.write(directory)
    return directory


def index_of(samples: Sequence[Sample]) -> list[list[Any]]:
    """`Manifest.samples` of these samples."""
    return [[sample.id, len(sample), sample.digest()] for sample in samples]


def _continue(directory: Path, new: Manifest) -> Manifest:
    """The manifest on disk, to continue its build; `new` if there is none, or its shards have another size."""
    if not (directory / "manifest.json").is_file():
        return new
    found = Manifest.read(directory)
    check_fingerprint(found.fingerprint, new.fingerprint, directory)
    remedy = "remove the directory, or build elsewhere with run_dir=…"
    for name in ("layer_ids", "dtype", "norms"):
        if getattr(found, name) != getattr(new, name):
            raise TargetError(
                f"{directory}: {name}: found {getattr(found, name)}, expected {getattr(new, name)}: {remedy}"
            )
    check_samples(found.samples, new.samples, directory)
    layout = [(s.file, s.first, s.last) for s in found.shards]
    if layout != [(s.file, s.first, s.last) for s in new.shards]:
        return new  # another shard size: start again
    for shard in found.shards:
        path = directory / shard.file
        if shard.complete and (not path.is_file() or path.stat().st_size != shard.bytes):
            shard.bytes = shard.sha256 = None
    return found


def check_fingerprint(found: dict[str, Any], expected: dict[str, Any], where: Path) -> None:
    """Raises: TargetError naming the first field in which the store's target differs from the one in use."""
    for name in FINGERPRINT:
        if found.get(name) != expected.get(name):
            raise TargetError(
                f"{where}: target {name}: found {found.get(name)!r}, expected {expected.get(name)!r}: these "
                "hidden states are of another target; use the target they were made with, or remove the directory to "
                "build it again"
            )


def check_samples(found: list[list[Any]], expected: list[list[Any]], where: Path) -> None:
    """Raises: DataError naming the first document that differs."""
    remedy = "the data or its settings changed: remove the directory to build it again"
    if len(found) != len(expected):
        raise DataError(f"{where}: samples: found {len(found)}, expected {len(expected)}: {remedy}")
    for position, (old, new) in enumerate(zip(found, expected, strict=True)):
        if list(old) != list(new):
            raise DataError(f"{where}: sample {position}: found {old}, expected {new} (id, tokens, digest): {remedy}")


def _rows_to_store(batch: FeatureBatch, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a shard holds of one pack, on the CPU. Raises: DataError for hidden states that overflow `dtype`."""
    integers = {"tokens_R": batch.tokens_R, "turn_R": batch.turn_R, "argmax_R": argmax_rows(batch)}
    states = {"hidden_RD": batch.hidden_RD, "streams_RkD": batch.streams_RkD}
    stored = {name: values.to(dtype).cpu() for name, values in states.items() if values is not None}
    for name, values in stored.items():
        finite_R = torch.isfinite(values).flatten(1).all(1)
        if not finite_R.all():
            row = int(torch.nonzero(~finite_R)[0])
            raise DataError(
                f"sample {batch.sample_ids[int(batch.doc_R[row])]}: {name} is not finite in "
                f"{str(dtype).removeprefix('torch.')}: use data.features_dtype=bfloat16 or float32"
            )
    return {name: values.int().cpu() for name, values in integers.items()} | stored


class StoredFeatures(FeatureSource):
    """Reads packs from a store.

    Args:
        directory: made by build_store.
        max_depth: the head's K.
        device: where batches go.
        spec: layers the head reads; they must be among the store's. None = all of the store's.
        fingerprint: Target.fingerprint() to check the store against, or None.
        samples: samples the store must hold, or None: all that is supervised then counts as answers.
    Raises: TargetError, DataError or StorageError naming the field, what was found and what was expected.
    """

    #: shards held open (memory-mapped)
    max_open = 16

    def __init__(
        self,
        directory: Path,
        max_depth: int,
        device: torch.device | str = "cpu",
        spec: FeatureSpec | None = None,
        fingerprint: dict[str, Any] | None = None,
        samples: Sequence[Sample] | None = None,
    ):
        self.directory, self.max_depth, self.device = Path(directory), max_depth, torch.device(device)
        self.manifest = manifest = Manifest.read(self.directory)
        if fingerprint is not None:
            check_fingerprint(manifest.fingerprint, fingerprint, self.directory)
        if samples is not None:
            check_samples(manifest.samples, index_of(samples), self.directory)
        self._samples = samples
        self.spec = spec or FeatureSpec(tuple(manifest.layer_ids))
        missing = [k for k in self.spec.layer_ids if k not in manifest.layer_ids]
        if missing:
            raise TargetError(
                f"{directory}: layer_ids: found {manifest.layer_ids}, expected {list(self.spec.layer_ids)}: "
                "build the store for this head, or set head.feature_layers to layers it holds"
            )
        self._columns = [manifest.layer_ids.index(k) for k in self.spec.layer_ids]
        self._check_files()
        self.lengths = [int(rows) for _, rows, _ in manifest.samples]
        self.sample_ids = [str(name) for name, _, _ in manifest.samples]
        self._place: list[tuple[int, int]] = []
        for number, shard in enumerate(manifest.shards):
            start = 0
            for document in range(shard.first, shard.last + 1):
                self._place.append((number, start))
                start += self.lengths[document]
        self._open: OrderedDict[int, Any] = OrderedDict()

    def get(self, pack: Sequence[int]) -> FeatureBatch:
        rows = [self._read(i) for i in pack]
        documents = [(part["tokens_R"].long(), part["turn_R"].long()) for part in rows]
        ids = tuple(self.sample_ids[i] for i in pack)
        answers = None if self._samples is None else answer_turns([self._samples[i] for i in pack])
        batch = FeatureBatch.pack(documents, self.max_depth, sample_ids=ids, answers=answers)
        argmax_R = torch.cat([part["argmax_R"] for part in rows]).long()
        streams_RkD = None
        if self._columns:
            streams_RkD = torch.cat([part["streams_RkD"] for part in rows])
            if self._columns != list(range(streams_RkD.shape[1])):
                streams_RkD = streams_RkD[:, self._columns]
        batch = replace(
            batch,
            hidden_RD=torch.cat([part["hidden_RD"] for part in rows]),
            streams_RkD=streams_RkD,
            teacher_argmax_A=argmax_R[batch.anchors.row_A + 1],
        )
        return batch.to(self.device)

    def _check_files(self) -> None:
        for shard in self.manifest.shards:
            path = self.directory / shard.file
            if not shard.complete or not path.is_file():
                raise StorageError(
                    f"{path}: the feature store is incomplete: run the same command again, it continues the build"
                )
            if (size := path.stat().st_size) != shard.bytes:
                raise StorageError(
                    f"{path}: found {size} bytes, expected {shard.bytes}: the shard is damaged; remove it and run "
                    "the same command again"
                )

    def _read(self, document: int) -> dict[str, Tensor]:
        number, start = self._place[document]
        file, stop = self._file(number), start + self.lengths[document]
        names = ["tokens_R", "turn_R", "argmax_R", "hidden_RD"] + (["streams_RkD"] if self._columns else [])
        return {name: file.get_slice(name)[start:stop] for name in names}

    def _file(self, number: int) -> Any:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        path = self.directory / self.manifest.shards[number].file
        try:
            self._open[number] = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path}: cannot be read ({error}): remove it and run the same command again") from error
        if len(self._open) > self.max_open:
            self._open.popitem(last=False)
        return self._open[number]
