"""`export --check DIR`: which engines load a head directory, which load it wrongly, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.checkpoints.raw import RawCheckpoint, open_checkpoint
from headstart.heads.checkpoints.tensor_map import TensorMap
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families import FAMILIES
from headstart.heads.formats.doubts import epsilon_doubts, weight_doubts
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.handling import (
    EngineHandling,
    Handling,
    doubled_names,
    geometry_notes,
    look_at,
    rope_problems,
)
from headstart.heads.formats.loading import check_shapes, map_head
from headstart.heads.formats.sealed import add_changes, read_sealed


@dataclass
class CheckReport:
    """What the engines do with one directory.

    Attributes:
        family: what `recognise` returns.
        layout: its name in Headstart's reader; None if that refuses the directory.
        engines: `headstart` and every key of FORMATS → handling.
        doubts: oddities of the files that no engine looks for (doubts.py).
    """

    directory: str
    family: str | None
    layout: str | None
    engines: dict[str, EngineHandling] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    def loads(self, engine: str) -> bool:
        return self.engines[engine].handling is Handling.LOADS

    @property
    def wrong(self) -> dict[str, list[str]]:
        """Engines that would load the directory wrongly, with the reasons."""
        return {name: v.wrong for name, v in self.engines.items() if v.handling is Handling.WRONG}

    @property
    def served(self) -> list[str]:
        """Keys of the serving engines that load the directory rightly."""
        return [name for name in FORMATS if self.loads(name)]

    def to_json(self) -> dict[str, Any]:
        # the key keeps the name that scripts read
        engines = {name: {**asdict(v), "verdict": v.handling.value} for name, v in self.engines.items()}
        return {**vars(self), "engines": engines}

    def render(self) -> str:
        """Plain text: one line per engine, its reasons below."""
        lines = [f"{self.directory}: {self.layout or self.family or 'unknown'}"]
        lines += [f"  doubtful: {doubt}" for doubt in self.doubts]
        for handling in self.engines.values():
            lines.append(f"  {handling.engine:<14} {handling.handling.value}")
            lines += [f"      - {reason}" for reason in handling.reasons]
            lines += [f"      · {note}" for note in handling.notes]
        return "\n".join(lines)


def check_directory(path: Path, target_dims: HeadDims | None = None) -> CheckReport:
    """Apply every engine's rules to a directory. Faults are kept with each engine, they raise nothing.

    Args:
        target_dims: the target's dimensions. Without them those in headstart.json are taken; in a directory that has
            none, rope, feature layers and widths are not compared.
    Raises: FormatError only when the directory itself, its config or its weight files cannot be opened.
    """
    raw = open_checkpoint(Path(path))
    report = check_checkpoint(raw, target_dims)
    doubts, faults = weight_doubts(look_at(raw))
    report.doubts = [*doubts, *epsilon_doubts(raw.config)]
    faults += [f"{name} is there twice, also as model.{name}: keep one of them" for name in doubled_names(raw)]
    for fault in faults:
        for key in FORMATS:
            if not report.engines[key].refused:
                report.engines[key].add(Handling.WRONG, f"{fault} (no engine looks for that)")
    return report


def check_checkpoint(raw: RawCheckpoint, target_dims: HeadDims | None = None) -> CheckReport:
    """As `check_directory`, for a checkpoint that is open, and without the doubts about its weights."""
    seen, sealed = look_at(raw), read_sealed(raw)
    ours, mapped = _headstart(raw, target_dims)
    if target_dims is None and sealed is not None:
        target_dims = sealed.dims
    engines = {"headstart": ours, **{key: engine.check(seen, target_dims) for key, engine in FORMATS.items()}}
    if sealed is not None:
        for key in FORMATS:
            add_changes(engines[key], sealed, raw)
    if len(raw.readers) > 1:
        for key, handling in engines.items():
            if FORMATS[key].reads_shards(seen.family) if key in FORMATS else seen.family in FAMILIES:
                handling.add(Handling.LOADS, f"weights in {len(raw.readers)} files: all of them are read")
    return CheckReport(str(raw.directory), seen.family, None if mapped is None else mapped.layout, engines)


def _headstart(raw: RawCheckpoint, target: HeadDims | None) -> tuple[EngineHandling, TensorMap | None]:
    handling = EngineHandling("Headstart")
    try:
        mapped, config = map_head(raw, target)
        check_shapes(raw, mapped, config)
        for name in (*mapped.names.values(), *(piece.name for piece in mapped.pieces.values())):
            raw.read(name)
    except FormatError as error:
        handling.add(Handling.REFUSES, str(error))
        return handling, None
    for name, reason in mapped.unused.items():
        if not reason.startswith("turned into"):
            handling.add(Handling.LOADS, f"{name} is not kept: {reason}")
    if target is not None and raw.sidecar is None and FAMILIES[mapped.family].files.has_rope:
        draft = {
            "hidden_size": mapped.fields.get("hidden_size") or mapped.dims.hidden_size,
            "num_attention_heads": mapped.dims.num_heads,
            "head_dim": mapped.dims.head_dim,
            "rms_norm_eps": mapped.dims.rms_norm_eps,
            "rope_parameters": mapped.dims.rope_parameters,
        }
        for note in [*rope_problems(draft, target), *geometry_notes(draft, target)]:
            handling.add(Handling.LOADS, f"runs as config.json says: {note}")
    return handling, mapped


def check_embeddings(
    path: Path, embed_VD: Tensor, output_VD: Tensor | None = None, dims: HeadDims | None = None
) -> None:
    """Compare ends that a foreign file carries with the target's, which Headstart uses in their place.

    Args:
        output_VD: the target's output matrix, which some heads use as it is; None: it is not compared.
        dims: of the target, with which the file is read to see whether its own output matrix is kept.
    Raises: FormatError when they differ by more than the rounding of the file's dtype.
    """
    raw = open_checkpoint(Path(path))
    name = next((n for n in raw.tensors if n.endswith("embed_tokens.weight")), None)
    if name is not None:
        # rows that the head keeps are its own
        pieces = map_head(raw, dims)[0].pieces.values() if dims is not None else ()
        kept = [piece.row for piece in pieces if piece.name == name and piece.row is not None]
        _compare_end(raw, name, embed_VD, "embedding", "its embeddings are read", kept)
    name = next((n for n in raw.tensors if n.removeprefix("model.") == "lm_head.weight"), None)
    if output_VD is not None and name is not None and "lm_head.weight" in map_head(raw, dims)[0].unused:
        _compare_end(raw, name, output_VD, "output matrix", "its output matrix is read")


def _compare_end(
    raw: RawCheckpoint, name: str, target_VD: Tensor, what: str, place: str, but: Sequence[int] = ()
) -> None:
    """Args: but: rows that may differ."""
    own_VD, target_VD = raw.read(name), target_VD.cpu()
    if own_VD.shape != target_VD.shape:
        raise FormatError(
            f"{raw.directory}: {name} is {list(own_VD.shape)}, the target's {what} {list(target_VD.shape)}"
        )
    coarse = torch.bfloat16 if torch.bfloat16 in (own_VD.dtype, target_VD.dtype) else torch.float16
    allowed = 2 * torch.finfo(coarse).eps
    apart_VD = (own_VD.float() - target_VD.float()).abs() / target_VD.float().abs().clamp(min=1e-3)
    apart_VD[list(but)] = 0
    worst = float(apart_VD.max())
    if worst > allowed:
        raise FormatError(
            f"{raw.directory}: {name} differs from the target's {what} (relative {worst:.3g}): the head was trained "
            f"with its own or for another target. Serve it where {place}, or name the target it was trained for."
        )
