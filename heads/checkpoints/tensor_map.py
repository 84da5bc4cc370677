"""Which tensors of a checkpoint become which of a head's, and the checks that every family's reader shares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads import vocab
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError


@dataclass(frozen=True)
class Piece:
    """A tensor of our head that is a part of one of a file's, or has another shape there.

    Attributes:
        name: of the file's tensor.
        row: which of its rows it is; None for all of it, in our shape.
    """

    name: str
    row: int | None = None

    def fits(self, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether a tensor of shape `found` holds one of shape `expected`."""
        if self.row is None:
            return math.prod(found) == math.prod(expected)
        return found[1:] == expected and self.row < found[0]

    def of(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor.reshape(shape) if self.row is None else tensor[self.row]


@dataclass
class TensorMap:
    """How one checkpoint becomes a head.

    Attributes:
        layout: its name in messages.
        family: name in FAMILIES.
        fields: fields of the family's config class that the file gives.
        dims: the target's dimensions with the draft layer's geometry (heads, rope, eps).
        names: tensor name in our head → tensor name in the file.
        zeros: tensors of our head that the file leaves out because they are zero.
        draft_ids_U: int64 [U], ascending target ids of the draft vocabulary, or None when U == V.
        unused: file tensor → why leaving it out changes nothing.
        pieces: tensor name in our head → the part of a tensor in the file that it is.
    """

    layout: str
    family: str
    fields: dict[str, Any]
    dims: HeadDims
    names: dict[str, str]
    zeros: tuple[str, ...] = ()
    draft_ids_U: Tensor | None = None
    unused: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)


def some(names: Iterable[str]) -> str:
    """The first eight names in order, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def require_equal(where: str, name: str, found: int, expected: int) -> None:
    """Raises: FormatError where a size of the head is not the target's."""
    if found != expected:
        raise FormatError(
            f"{where}: {name} is {found} and the target has {expected}: the head was trained for another target"
        )


def require_names(raw: RawCheckpoint, found: set[str], expected: set[str]) -> None:
    """Raises: FormatError unless the two sets are equal."""
    missing, unknown = expected - found, found - expected
    if missing or unknown:
        parts = [f"lacks {some(missing)}"] * bool(missing) + [f"holds unknown {some(unknown)}"] * bool(unknown)
        raise FormatError(
            f"{raw.directory}: the checkpoint {' and '.join(parts)}. Nothing is skipped: a head read in part "
            "drafts wrongly."
        )


def draft_map_problem(raw: RawCheckpoint, names: dict[str, str], vocab_size: int) -> str | None:
    """What is wrong with the values of d2t, or with t2d beside it; None for a sound draft vocabulary.

    Args:
        names: short name → name in the file; d2t is one of them, and has one dimension.
    """
    offsets = raw.read(names["d2t"])
    if offsets.dtype not in (torch.int64, torch.int32):
        return f"d2t is {offsets.dtype}, expected int64 offsets"
    ids = vocab.from_offsets(offsets)
    if not vocab.is_draft_vocab(ids, vocab_size):
        return (
            f"d2t + index is no ascending list of distinct ids below {vocab_size}: it must hold offsets (target id - "
            "draft id), not target ids"
        )
    if "t2d" in names:
        mask = raw.read(names["t2d"])
        if tuple(mask.shape) != (vocab_size,) or not torch.equal(torch.nonzero(mask).squeeze(1), ids):
            return "t2d does not mark the ids that d2t lists"
    return None


def map_tensors(
    raw: RawCheckpoint,
    layout: str,
    family: str,
    fields: dict[str, Any],
    dims: HeadDims,
    names: dict[str, str],
    expected: dict[str, str],
    unused: dict[str, str],
    pieces: dict[str, Piece] | None = None,
) -> TensorMap:
    """The map of a checkpoint whose tensors are exactly the expected and the unused ones.

    Args:
        names: short name → name in the file, for every tensor of the file.
        expected: our name → short name.
        unused: short name → why leaving it out changes nothing.
        pieces: our name → the part of a tensor, by its short name, that it is.
    Raises: FormatError naming the tensors that are missing, and those that nothing explains.
    """
    pieces = pieces or {}
    read = {*expected.values(), *(piece.name for piece in pieces.values())}
    require_names(raw, set(names) - set(unused), read)
    in_file = {ours: names[short] for ours, short in expected.items()}
    found = {ours: replace(piece, name=names[piece.name]) for ours, piece in pieces.items()}
    return TensorMap(layout, family, fields, dims, in_file, unused=unused, pieces=found)
