"""What an engine does with a checkpoint directory, and what the rules of all engines share.

Headstart's own reader stops at the first fault. The rules of an engine say what it does with every fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headstart.heads.checkpoints.geometry import LLAMA_DEFAULTS, rope_parameters
from headstart.heads.checkpoints.head_files import Spelling
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError, clip
from headstart.heads.families import FAMILIES
from headstart.heads.formats.recognise import recognise
from headstart.heads.rope import dynamic_note, positions_with_one_rope, same_rope


class Handling(StrEnum):
    """What an engine does with a directory."""

    LOADS = "loads"
    WRONG = "loads wrongly"
    REFUSES = "refuses"
    UNKNOWN = "not known"


LOADS, WRONG, REFUSES = Handling.LOADS, Handling.WRONG, Handling.REFUSES


@dataclass
class EngineHandling:
    """What one engine does with a directory, with every reason.

    Attributes:
        wrong: why it would silently draft something else than was trained.
        refused: why it stops with an error.
        unknown: why nobody knows what it does.
        notes: what a user should know although it loads.
    """

    engine: str
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def handling(self) -> Handling:
        """What it does, in one word. An engine that refuses a directory cannot load it wrongly."""
        if self.refused or self.wrong:
            return Handling.REFUSES if self.refused else Handling.WRONG
        return Handling.UNKNOWN if self.unknown else Handling.LOADS

    @property
    def reasons(self) -> list[str]:
        return [*self.refused, *self.wrong, *self.unknown]

    def add(self, handling: Handling, reason: str) -> None:
        lists = {Handling.LOADS: self.notes, Handling.WRONG: self.wrong, Handling.UNKNOWN: self.unknown}
        lists.get(handling, self.refused).append(clip(reason))


@dataclass(frozen=True)
class TensorRule:
    """A tensor that an engine reads, its shape in symbols, and what the engine does when it is missing."""

    name: str
    shape: tuple[str, ...]
    missing: Handling
    why: str = ""


@dataclass
class HeadDirectory(Spelling):
    """A directory as the engines' rules see it.

    Attributes:
        family: a name of FAMILIES or recognise.NOT_READ, or None.
    """

    raw: RawCheckpoint
    family: str | None

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.raw.tensors[self.names[name]].shape if name in self.names else None

    def nonzero(self, name: str) -> bool:
        """Whether the tensor is in the file and not all zero."""
        return name in self.names and bool(self.raw.read(self.names[name]).any())

    def unexplained(self, known: set[str]) -> list[str]:
        """Tensors that are not among the known ones."""
        return sorted(set(self.names) - known) + self.strangers


#: fields that transformers parses before an engine sees them → (type, its name in messages)
PARSED: dict[str, tuple[type, str]] = {
    "eagle_config": (dict, "an object"),
    "dflash_config": (dict, "an object"),
    "architectures": (list, "a list of names"),
    "max_position_embeddings": (int, "an integer"),
    "hidden_act": (str, "the name of an activation"),
}


@dataclass
class Case(HeadDirectory):
    """A directory that one engine is to load, and what it does with it, to which the engine's rules add.

    Attributes:
        target: the target's dimensions, where they are known.
    """

    target: HeadDims | None
    handling: EngineHandling

    def refuse(self, reason: str) -> None:
        """The engine stops with an error."""
        self.handling.add(Handling.REFUSES, reason)

    def misread(self, reason: str) -> None:
        """The engine silently drafts something else than was trained."""
        self.handling.add(Handling.WRONG, reason)

    def note(self, reason: str) -> None:
        """The engine loads the head, and the user should know this."""
        self.handling.add(Handling.LOADS, reason)

    def match(self, rules: Iterable[TensorRule], sizes: dict[str, int]) -> None:
        """Compare names, shapes and dtypes with what the engine reads.

        Args: sizes: symbol of the rules' shapes → size.
        """
        for rule in rules:
            shape = self.shape(rule.name)
            expected = tuple(sizes[symbol] for symbol in rule.shape)
            if shape is None:
                silent = "the engine keeps uninitialised memory in its place; copy or export the head again"
                reason = rule.why or ("the engine stops" if rule.missing is Handling.REFUSES else silent)
                self.handling.add(rule.missing, f"{rule.name} {list(expected)} is missing: {reason}")
                continue
            name = self.names[rule.name]
            if shape != expected:
                turned = ": it is transposed" if shape == expected[::-1] else ""
                wanted = f"{list(expected)} ({' × '.join(rule.shape)})"
                self.refuse(f"{name} is {list(shape)}, config.json makes it {wanted}{turned}")
            elif not self.raw.tensors[name].dtype.is_floating_point:
                self.misread(f"{name} is {self.raw.tensors[name].dtype}: it would be cast in silence")

    def require_architecture(self, known: tuple[str, ...], architectures: Any) -> None:
        if not isinstance(architectures, list) or not any(name in known for name in architectures):
            self.refuse(f"architectures is {architectures!r}, expected {'one of ' * (len(known) > 1)}{list(known)}")

    def require_parsed(self) -> None:
        """Add the faults for which transformers, which engines ask first, rejects config.json."""
        config = self.raw.config
        kind = config.get("model_type")
        if not (isinstance(kind, str) and kind) and "speculators_model_type" not in config:
            self.refuse(f"model_type is {kind!r}, expected the name of an architecture such as 'llama'")
        for name, (wanted, words) in PARSED.items():
            value = config.get(name)
            parts = value if isinstance(value, list) else []
            if value is not None and not (type(value) is wanted and all(isinstance(part, str) for part in parts)):
                self.refuse(f"{name} is {value!r}, expected {words}")

    def compare_target(self, width: int, vocab_size: int) -> None:
        """Compare the sizes that a head shares with its target."""
        if self.target is None:
            return
        if width != self.target.hidden_size:
            self.refuse(f"reads hidden states of width {width}, the target's are {self.target.hidden_size} wide")
        if vocab_size != self.target.vocab_size:
            other = f"the target's {self.target.vocab_size}: the head belongs to another target"
            self.misread(f"vocab_size is {vocab_size}, {other}")

    def compare_geometry(self, config: dict[str, Any]) -> None:
        """Compare the draft layer's rope and sizes with the target's."""
        for problem in rope_problems(config, self.target):
            self.misread(problem)
        for note in geometry_notes(config, self.target):
            self.note(note)


def doubled_names(raw: RawCheckpoint) -> list[str]:
    """Tensors that a file holds with and without the prefix `model.`. Engines differ in which one they take."""
    return sorted(name for name in raw.tensors if f"model.{name}" in raw.tensors)


def look_at(raw: RawCheckpoint) -> HeadDirectory:
    """Recognise the family and give the tensors portable names."""
    family = recognise(raw)
    if family in FAMILIES:
        return HeadDirectory(**vars(FAMILIES[family].files.spell(raw)), raw=raw, family=family)
    return HeadDirectory(raw.config, {name.removeprefix("model."): name for name in raw.tensors}, [], raw, family)


def rope_problems(config: dict[str, Any], target: HeadDims | None) -> list[str]:
    """Why the draft layer would use another rope than the target. All engines read the rope from the draft's config."""
    try:
        rope = rope_parameters(config, "config.json")
    except FormatError as error:
        return [str(error)]
    if target is None or same_rope(rope, target.rope_parameters):
        return []
    return [
        f"rope {rope} differs from the target's {target.rope_parameters}: write the target's, unless the head was "
        "trained with another"
    ]


def geometry_notes(config: dict[str, Any], target: HeadDims | None) -> list[str]:
    """Settings that change the draft layer's output although every shape fits and every engine accepts them.

    A size that is not the target's may be how the head was trained, or an edit by hand: the files look the same.
    """
    notes = rope_notes(config)
    if target is None:
        return notes
    heads = config.get("num_attention_heads") or LLAMA_DEFAULTS["num_attention_heads"]
    hidden = config.get("hidden_size") or LLAMA_DEFAULTS["hidden_size"]
    size = config.get("head_dim") or hidden // max(heads, 1)
    epsilon = config.get("rms_norm_eps") or LLAMA_DEFAULTS["rms_norm_eps"]
    if hidden == target.hidden_size and (heads, size) != (target.num_heads, target.head_dim):
        notes.append(
            f"{heads} attention heads of {size} where the target has {target.num_heads} of {target.head_dim}: right "
            "only if the head was trained so"
        )
    known = target.rms_norm_eps
    if not isinstance(epsilon, int | float) or not known * 0.999 <= epsilon <= known * 1.001:
        notes.append(
            f"rms_norm_eps is {epsilon!r} where the target has {known!r}: right only if the head was trained so"
        )
    longest = config.get("max_position_embeddings")
    if type(longest) is int and longest < target.max_position_embeddings:
        notes.append(
            f"max_position_embeddings is {longest}, the target's {target.max_position_embeddings}: engines that go by "
            "it draft nothing for longer texts"
        )
    return notes


def rope_notes(config: dict[str, Any]) -> list[str]:
    """LongRoPE serves only within its original length; a dynamic rope is not served alike by all engines."""
    try:
        rope = rope_parameters(config, "config.json")
    except FormatError:
        return []
    limit = positions_with_one_rope(rope)
    if limit is None:
        return [note] if (note := dynamic_note(rope)) else []
    return [
        f"LongRoPE: launch the engine with a context of at most {limit} tokens (vLLM: --max-model-len {limit}); with a "
        "longer one it rotates every position, the target's too, by the long factors, which this head never saw"
    ]
