"""What a checkpoint has to say before it becomes a head, and the checks every reader shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError


@dataclass
class Plan:
    """How one checkpoint becomes a head.

    Attributes:
        layout: name for people.
        family: registry name.
        fields: keyword arguments of the family's config class that the file determines.
        dims: the target's dimensions with the draft layer's geometry (heads, rope, eps).
        names: tensor name in our head → tensor name in the file.
        zeros: tensors of our head that the file leaves out because they are zero.
        draft_ids_U: int64 [U], ascending target ids of the draft vocabulary, or None when U == V.
        unused: file tensor → why leaving it out changes nothing.
    """

    layout: str
    family: str
    fields: dict[str, Any]
    dims: HeadDims
    names: dict[str, str]
    zeros: tuple[str, ...] = ()
    draft_ids_U: Tensor | None = None
    unused: dict[str, str] = field(default_factory=dict)


def some(names: Iterable[str], limit: int = 8) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def require_llama(config: dict[str, Any], where: str) -> None:
    kind = config.get("model_type", "llama")
    if kind not in ("llama", "eagle", "eagle3"):
        raise FormatError(
            f"{where}: model_type is {kind!r}; Headstart's draft layer is Llama's (Qwen3's has q/k norms, Qwen2's "
            "biases)"
        )
    layers = integer(config, "num_hidden_layers", where, default=1)
    if layers != 1:
        raise FormatError(f"{where}: num_hidden_layers is {layers}; Headstart reads drafts of one layer")


def with_target(dims: HeadDims, target: HeadDims | None, where: str) -> HeadDims:
    """The draft's geometry with the target's facts; sizes that must agree are compared."""
    if target is None:
        return dims
    require_equal(where, "hidden_size", dims.hidden_size, target.hidden_size)
    require_equal(where, "vocab_size", dims.vocab_size, target.vocab_size)
    return replace(
        dims, num_layers=target.num_layers, tie_word_embeddings=target.tie_word_embeddings, model_type=target.model_type
    )


def require_equal(where: str, name: str, found: int, expected: int) -> None:
    if found != expected:
        raise FormatError(
            f"{where}: {name} is {found} and the target has {expected}: the head was trained for another target"
        )


def target_embedding(raw: RawCheckpoint, names: dict[str, str], dims: HeadDims) -> dict[str, str]:
    if "embed_tokens.weight" not in names:
        return {}
    shape = raw.tensors[names["embed_tokens.weight"]].shape
    if shape != (dims.vocab_size, dims.hidden_size):
        raise FormatError(
            f"{raw.directory}: embed_tokens.weight has shape {list(shape)}, expected the target's "
            f"[{dims.vocab_size}, {dims.hidden_size}]"
        )
    return {"embed_tokens.weight": "the target's embeddings (compare with formats.check_embeddings)"}


def require_names(raw: RawCheckpoint, found: set[str], expected: set[str]) -> None:
    missing, unknown = expected - found, found - expected
    if missing or unknown:
        parts = [f"lacks {some(missing)}"] * bool(missing) + [f"holds unknown {some(unknown)}"] * bool(unknown)
        raise FormatError(
            f"{raw.directory}: the checkpoint {' and '.join(parts)}. Nothing is skipped: a head read in part "
            "drafts wrongly."
        )


def finish(
    raw: RawCheckpoint,
    layout: str,
    family: str,
    fields: dict[str, Any],
    dims: HeadDims,
    names: dict[str, str],
    expected: dict[str, str],
    unused: dict[str, str],
) -> Plan:
    """`expected`: our name → short file name; every other file tensor must be in `unused`."""
    require_names(raw, set(names) - set(unused), set(expected.values()))
    return Plan(layout, family, fields, dims, {ours: names[short] for ours, short in expected.items()}, unused=unused)
