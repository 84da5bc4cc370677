"""Which family a foreign checkpoint belongs to, and how its tensors become a head's."""

from __future__ import annotations

from collections.abc import Callable

from headstart.heads.checkpoints.head_files import compact_architecture
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap, some
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families import FAMILIES


def is_language_model(raw: RawCheckpoint) -> bool:
    """An ordinary causal language model."""
    names = {name.removeprefix("model.") for name in raw.tensors}
    return "embed_tokens.weight" in names and "layers.0.input_layernorm.weight" in names and "fc.weight" not in names


#: drafts that engines serve and Headstart does not read: name → (its name in messages, whether a checkpoint is one)
NOT_READ: dict[str, tuple[str, Callable[[RawCheckpoint], bool]]] = {
    "draft_model": ("an ordinary language model", is_language_model),
}


def architectures(raw: RawCheckpoint) -> list[str]:
    """`architectures` of config.json, [] where it is no list."""
    named = raw.config.get("architectures")
    return named if isinstance(named, list) else []


def compact_family(raw: RawCheckpoint) -> str | None:
    """The family of a directory in the compact form; None for one in any other."""
    return next((family for family in FAMILIES if compact_architecture(family) in architectures(raw)), None)


def recognise(raw: RawCheckpoint) -> str | None:
    """A name of FAMILIES or NOT_READ, or None. headstart.json is not asked, because engines do not read it."""
    if (family := compact_family(raw)) is not None:
        return family
    for name, (_, matches) in NOT_READ.items():
        if matches(raw):
            return name
    return next((name for name, family in FAMILIES.items() if family.files.recognise(raw)), None)


def map_foreign(raw: RawCheckpoint, dims: HeadDims | None) -> TensorMap:
    """The tensors of a checkpoint that carries no headstart.json, by the rules of its family.

    Args:
        dims: the target's dimensions; needed where the file does not say which target layers it reads.
    Raises: FormatError naming the file, the keys, and what to do.
    """
    where, kind = raw.directory / "config.json", raw.config.get("speculators_model_type")
    kinds = [family.files.speculators for family in FAMILIES.values() if family.files.speculators]
    if kind is not None and kind not in kinds:
        raise FormatError(f"{where}: speculators_model_type is {kind!r}; Headstart reads {', '.join(kinds)}")
    if compact_family(raw) is not None:
        raise FormatError(f"{where}: the compact form is read with its headstart.json only; copy that file as well")
    family = recognise(raw)
    if family in FAMILIES:
        return FAMILIES[family].files.read(raw, dims)
    layouts = [layout for entry in FAMILIES.values() for layout in entry.files.layouts]
    readable = f"Readable: {', '.join([*layouts, 'speculators'])}."
    if family in NOT_READ:
        raise FormatError(f"{raw.directory}: {NOT_READ[family][0]}, which Headstart does not read. {readable}")
    raise FormatError(f"{raw.directory}: no head that Headstart knows has the tensors {some(raw.tensors)}. {readable}")
