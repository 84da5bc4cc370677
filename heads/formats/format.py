"""What Headstart knows about one serving engine: which families it serves, and by which rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.heads.base import Head
from headstart.heads.checkpoints.head_files import Contents
from headstart.heads.dims import HeadDims
from headstart.heads.errors import DataError, FormatError
from headstart.heads.families import FAMILIES
from headstart.heads.files import read_json
from headstart.heads.formats.handling import Case, EngineHandling, Handling, HeadDirectory
from headstart.heads.formats.recognise import NOT_READ
from headstart.heads.formats.sidecar import ADDED, SIDECAR, family_config, verify_sidecar
from headstart.heads.targets.tuned import is_tuned

#: a rule: adds to the case what the engine does with the directory; by a FormatError it refuses it
Check = Callable[[Case], None]


@dataclass(frozen=True)
class Versions:
    """The releases of an engine that serve a family, where not all of them do.

    Attributes:
        newest: the last release that serves it; None if no later one stopped. oldest: the first; None if all before do.
        run: the release in which heads of the family were loaded and drafted; None if the rules were only read.
        later: what the other releases do.
    """

    newest: str | None
    run: str | None
    later: str
    oldest: str | None = None

    def sentence(self, engine: str) -> str:
        """For messages, launch commands and cards. Args: engine: its name in messages."""
        proven = "" if self.run is None else f" (run on {self.run})"
        which = f"{self.newest} or earlier" if self.newest else f"{self.oldest} or later"
        return f"needs {engine} {which}{proven}: {self.later}"


@dataclass(frozen=True)
class Rules:
    """What an engine does with heads of one family.

    Attributes:
        check: judges a directory.
        write: head, provenance → a directory for this engine; None if the engine takes the portable one.
        shards: whether the engine reads weights in several files.
        convert: directory that was written → adds the file that the engine reads in the place of the weights.
        versions: the releases that serve the family; None if every release since the one that was read does.
        draws: whether the engine can draw this family's drafts from the head's distribution, and verify them by it.
    """

    check: Check
    write: Callable[[Head, dict[str, Any]], Contents] | None = None
    shards: bool = False
    convert: Callable[[Path], None] | None = None
    versions: Versions | None = None
    draws: bool = True


@dataclass(frozen=True)
class Launch:
    """What a launch command is made from.

    Attributes:
        head, target: where the engine finds them: a directory or a Hub id.
        tokens: drafted tokens per cycle.
        context: most tokens of a context; None for as many as the target has positions.
        adapter, rank: directory and rank of a LoRA adapter that the engine applies to the target; None without one.
        model_type: the target's, as transformers names it; "" where it is not known.
        place: directory from where the head's own settings name its target; None where they name it wherever one is.
        files: name of a file that the engine reads beside the head (`Format.beside`) → its path.
        per_batch: [first batch size, last one, drafted tokens], as `headstart tune` measured; [] where it did not.
        confident: whether the head has a confidence head, whose word was compared with what was accepted.
    """

    head: str
    target: str
    family: str
    tokens: int
    context: int | None
    adapter: str | None = None
    rank: int = 0
    model_type: str = ""
    place: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    per_batch: Sequence[Sequence[int]] = ()
    confident: bool = False

    def limit(self, option: str) -> list[str]:
        """`option` with the limit of contexts, as words of a command; [] without a limit."""
        return [] if self.context is None else [option, str(self.context)]


@dataclass(frozen=True)
class Format:
    """One serving engine. Each has a module here, with its tables and a `FORMAT`.

    Attributes:
        key: its name in `export.engines`.
        name: its name in messages. title: its name above launch commands.
        version: its name in messages, with the release whose source was read.
        serves: family → rules. A family that is absent is not served.
        launch: the shell command that serves a target with a head; None if no single command does.
        dropped: `model_type` of drafts that the engine no longer serves → why it refuses them.
        unchecked: families that the engine may serve and whose rules are not known here.
        before: what the engine checks first, whatever the family.
        targets: `model_type` of the targets whose hidden states it gives to a head; None: of all, or it is not known.
        block: what asks it for block verification of drawn drafts; None if it has none, or that is not known.
        adapters: whether it applies a LoRA adapter to the target that verifies drafts, and `launch` says how.
        beside: JSON file that the engine reads beside a head → makes its content from headstart.json; None where the
            head has no such file. Raises: FormatError for what was not measured so.
    """

    key: str
    name: str
    title: str
    version: str
    serves: dict[str, Rules]
    launch: Callable[[Launch], str | None]
    dropped: Mapping[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    before: Check = lambda case: None
    targets: frozenset[str] | None = None
    adapters: bool = False
    block: str | None = None
    beside: Mapping[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = field(default_factory=dict)

    def check(self, seen: HeadDirectory, target: HeadDims | None) -> EngineHandling:
        """What the engine does with a directory, and every reason."""
        case = Case(**vars(seen), target=target, handling=EngineHandling(self.version))
        rules = self.serves.get(seen.family)
        dropped = [why for kind, why in self.dropped.items() if kind == seen.raw.config.get("model_type")]
        if dropped:
            case.refuse(dropped[0])
        elif rules is None and seen.family in self.unchecked:
            what = f"a {seen.family}" if seen.family in NOT_READ else f"{seen.family} heads"
            case.handling.add(Handling.UNKNOWN, f"what it does with {what} has not been checked")
        elif rules is None:
            case.refuse(self.not_served(seen.family))
        else:
            try:
                if target is not None and not self.serves_target(target):
                    case.refuse(f"it does not give a head the hidden states of {target.model_type} targets")
                self.before(case)
                rules.check(case)
                if (sentence := self.versions_of(seen.family)) is not None:
                    case.note(sentence)
                if (sentence := self.tuned_target(seen.raw.sidecar or {})) is not None:
                    case.note(sentence)
                self._compare_beside(case)
            except FormatError as error:  # what Headstart cannot read, the engine cannot read either
                case.refuse(str(error))
        return case.handling

    def serves_target(self, target: HeadDims) -> bool:
        """Whether it can run a head for a target of this type, as far as is known."""
        return self.targets is None or target.model_type in self.targets

    def not_served(self, family: str | None) -> str:
        """Why the engine refuses a directory of a family without rules."""
        able = f"it drafts with {', '.join(self.serves)}"
        if family is None:
            return f"no draft that {self.name} knows; {able}"
        what = NOT_READ[family][0] if family in NOT_READ else f"{family} heads"
        return f"{self.name} does not draft with {what}; {able}"

    def write(self, head: Head, provenance: dict[str, Any]) -> Contents:
        """What a directory for this engine holds.

        Raises: FormatError for a family that it does not serve, or a head that is not bound to a target it needs.
        """
        rules = self.serves.get(head.family)
        if rules is None:
            raise FormatError(f"export.engines: {self.name} does not serve {head.family} heads")
        return FAMILIES[head.family].files.portable(head) if rules.write is None else rules.write(head, provenance)

    def finish(self, family: str, directory: Path) -> None:
        """Add to a directory that was written for this engine what the engine reads beside, or in place of, it."""
        rules = self.serves.get(family)
        if rules is not None and rules.convert is not None:
            rules.convert(directory)

    def files_beside(self, side: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Name → content of the files that the engine reads beside this head. Args: side: headstart.json.

        Raises: FormatError that names the field of headstart.json which no tuning writes.
        """
        made = {name: make(side) for name, make in self.beside.items()}
        return {name: content for name, content in made.items() if content is not None}

    def _compare_beside(self, case: Case) -> None:
        """Compare the files beside a head with headstart.json, from which an export writes them."""
        side = case.raw.sidecar
        if side is None or not self.beside or not any(side.get(name) for name in ADDED):
            return
        try:
            verify_sidecar(SIDECAR, side)
            family_config(side.get("type"), side.get("config"), SIDECAR)
            made = self.files_beside(side)
        except FormatError as error:  # the engine does not read headstart.json
            case.note(str(error))
            return
        again = "`headstart export` writes it from headstart.json"
        for name, content in made.items():
            place = case.raw.directory / name
            try:
                held = read_json(place) if os.path.lexists(place) else None
            except DataError as error:
                case.misread(f"{error}: {again}")
                continue
            if held is None:
                case.note(f"{name} is not here: {again}")
            elif held != content:
                case.misread(f"{name} is not what `headstart tune` measured, as headstart.json has it: {again}")

    def reads_shards(self, family: str | None) -> bool:
        """Whether the engine reads a head of this family whose weights stand in several files."""
        return family in self.serves and self.serves[family].shards

    def versions_of(self, family: str | None) -> str | None:
        """A sentence that says which releases serve the family; None where all do, or none does."""
        rules = self.serves.get(family) if family is not None else None
        return None if rules is None or rules.versions is None else rules.versions.sentence(self.name)

    def sampled(self, family: str) -> str | None:
        """A sentence that says how to sample with a head of the family; None where no setting is known."""
        if self.block is None or family not in self.serves or not self.serves[family].draws:
            return None
        return f"temperature above 0: {self.block} accepts more drafts (block verification, lossless)"

    def tuned_target(self, side: dict[str, Any]) -> str | None:
        """Which target an engine must serve with a head of a tuned target; None for any other head.

        Args: side: headstart.json.
        """
        target: Any = side.get("target")
        if not is_tuned(target):
            return None
        if target.get("served_as") is not None:
            return f"drafts for a tuned target: serve the merged model {target['served_as']!r} with it, not the base"
        if self.adapters:
            return "drafts for a tuned target: serve the base with the adapter applied, as the launch command does"
        return "drafts for a tuned target: export it with export.adapter=merged, and serve the merged model with it"

    def loads_portable(self, family: str) -> bool:
        """Whether the portable directory of a family is made for this engine, among others."""
        return family in self.serves and self.serves[family].write is None
