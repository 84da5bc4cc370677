"""Takes private facts out of what leaves the machine: reports, model cards, headstart.json, trackers' settings.

Private are directories, names of files, servers and values of environment variables. What others need to judge and
repeat a result is kept. `published` takes any of our JSON documents. Applying it twice changes nothing more, so
documents of older versions can pass it again.

| in the document | published |
|---|---|
| a target's directory | its last part, or the Hub id that the Hub's cache keeps it under |
| a file of conversations or prompts | `own data`; a bundled workload or a known benchmark by its name |
| a head's directory | `a local head` |
| an adapter's directory | `a local adapter` |
| a Hub id, `workload:NAME` | the same |
| the value of an environment variable that a recipe reads by `${oc.env:NAME}` | `${oc.env:NAME}` |
| an address | without user, password, query and, unless it is this machine or a public site, host |
| any other absolute path | `LOCAL_PATH` |
| the run's name and directory, the tracker's project | left out |

Numbers that say how something was measured (batch size, seed of sampling) are kept, even if an environment variable
gave them. A document with its recipe tells which variables that reads; for others, the caller names them.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from headstart.heads.errors import DataError
from headstart.heads.published_names import (
    ANSWERS,
    BENCHMARKS,
    FILES,
    HELD_OUT,
    OWN_ADAPTER,
    OWN_DATA,
    OWN_FILE,
    OWN_HEAD,
    is_local,
    name_of_adapter,
    name_of_data,
    name_of_dataset,
    name_of_head,
    name_of_target,
    numbered,
    workloads,
)
from headstart.heads.published_text import (
    LOCAL_PATH,
    private_values,
    published_text,
    setting_without_private,
    variables,
    without_private,
)
from headstart.heads.repository import is_repository

#: keys whose values are Headstart's own words (such as a dtype): programs read them, and no private name is in them
OURS = {
    "dtype", "device", "versions", "git_revision", "tree", "sampling", "config", "dims", "sha256", "facts", "type",
    "layout", "drafter", "digest",
}  # fmt: skip


def published(document: Mapping[str, Any], environment: Iterable[str] = ()) -> dict[str, Any]:
    """A document of ours (report, side file, provenance, settings) as others may see it.

    Args:
        document: JSON values; the keys say what is a target, a head, data, an address or a command.
        environment: names of variables whose values may be in it, besides those that it names by `${oc.env:NAME}`.
    Raises: DataError if it is nested deeper than any document of ours.
    """
    try:
        inside = [name for _, text in _texts(document) if "oc.env" in text for name in variables(text)]
        private = private_values([*environment, *inside])
        return _Boundary(private, _names_inside(document), _task_names(document)).mapping(document, ())
    except RecursionError:
        raise DataError("a document that is to be published is nested too deeply: write it anew") from None


def _texts(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text of a document, with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, place)
    elif isinstance(value, str):
        yield place, value


def _file(_: str) -> str:
    return OWN_FILE


def _nothing(_: str) -> None:
    return None


#: key of a document → how its text is published
BY_KEY: dict[str, Callable[[str], str | None]] = {
    "path": name_of_data,
    "dataset": name_of_dataset,
    "chat_template": _file,
    "start_from": name_of_head,
    "exported_from": name_of_head,
    "base_model_name_or_path": name_of_target,
    "checkpoint": lambda name: Path(name).name,
}
#: (the key around it, the key) → the same, for keys that do not decide it alone
BY_PLACE: dict[tuple[str, str], Callable[[str], str | None]] = {
    ("target", "name"): name_of_target,
    ("target", "adapter"): name_of_adapter,
    ("head", "path"): name_of_head,
    ("", "head"): name_of_head,
    ("engine", "model"): name_of_target,
    ("eval", "data"): name_of_data,
    ("recipe", "name"): _nothing,
    ("recipe", "run_dir"): _nothing,
    ("train", "project"): _nothing,
    ("", "project"): _nothing,
}


@dataclass(frozen=True)
class _Boundary:
    """Publishes one document.

    Attributes:
        private: values of environment variables → what replaces them.
        names: paths under the keys of BY_KEY and BY_PLACE, and their last parts → what replaces them.
        tasks: names of tasks that come from the names of files → the published ones.
    """

    private: dict[str, str]
    names: dict[str, str]
    tasks: dict[str, str]

    @cached_property
    def words(self) -> dict[str, str]:
        """Private text → what replaces it in sentences."""
        return {**self.private, **self.names}

    def mapping(self, value: Mapping[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
        kept = {}
        for key, item in value.items():
            if key == "tasks" and isinstance(item, Mapping):
                item = dict(zip(self.task_names(list(item)), item.values(), strict=True))
            result = self.value(item, (*place, str(key)))
            if result is not None or item is None:
                # no key is a variable's value: keys are Headstart's or a recipe's
                kept[setting_without_private(key, {}) if isinstance(key, str) else key] = result
        if isinstance(value.get("parts"), list) and "path" in kept:
            kept["path"] = ", ".join(numbered([_source_name(part) for part in value["parts"]]))
        return kept

    def value(self, item: Any, place: tuple[str, ...]) -> Any:
        if isinstance(item, Mapping):
            return self.mapping(item, place)
        if isinstance(item, list | tuple):
            return [self.value(one, place) for one in item]
        if not isinstance(item, str):
            return item
        if place[-1] == "command":
            return _command(item, self.private)
        if place[-2:] == ("divergences", "id"):
            return self.prompt_id(item)
        if place[-2:] == ("samples", "task"):
            item = self.tasks.get(item, item)
        rule = _rule(place)
        if rule is not None:
            # a variable's value is replaced here even if it is short
            shown = rule(item)
            return self.private.get(item) or (None if shown is None else without_private(shown, self.private))
        words = {} if OURS.intersection(place) else self.words
        return setting_without_private(item, words) if "recipe" in place else without_private(item, words)

    def task_names(self, names: list[Any]) -> list[str]:
        """Published names of all tasks of a report. Equal ones are numbered."""
        shown = [without_private(self.tasks.get(str(name), str(name)), self.words) for name in names]
        taken, told = set(shown), set[str]()
        for place, name in enumerate(shown):
            if name in told:
                free = (f"{name} {number}" for number in itertools.count(2))
                shown[place] = next(new for new in free if new not in taken | told)
            told.add(shown[place])
        return shown

    def prompt_id(self, name: str) -> str:
        """A prompt's id without the name of its file: `talk:12` becomes `own data:12`."""
        source, slash, rest = name.partition("/")
        if slash and source in self.tasks:
            return f"{self.tasks[source]}/{self.prompt_id(rest)}"
        match = re.fullmatch(r"([^/:]+):(\d+)(\D.*)?", name, re.DOTALL)
        if match is None or match[1] in workloads() | BENCHMARKS | {OWN_DATA}:
            return without_private(name, self.words)
        return f"{OWN_DATA}:{match[2]}{match[3] or ''}"


def _rule(place: tuple[str, ...]) -> Callable[[str], str | None] | None:
    around = place[-2] if len(place) > 1 else ""
    return BY_PLACE.get((around, place[-1])) or BY_KEY.get(place[-1])


def _names_inside(document: Mapping[str, Any]) -> dict[str, str]:
    """Paths that a document gives under a key of BY_KEY or BY_PLACE → what replaces them in its sentences too."""
    names: dict[str, str] = {}
    for place, text in _texts(document):
        rule = _rule(place)
        if rule is None or "${" in text or not ("/" in text or is_local(text) or text.endswith(FILES)):
            continue
        shown = rule(text)
        if shown != text:
            names[text] = shown or LOCAL_PATH
            if rule in (name_of_data, _file) and "." in Path(text).name:
                names[Path(text).name] = shown or LOCAL_PATH
    return names


def _task_names(report: Mapping[str, Any]) -> dict[str, str]:
    """Task → its published name, for tasks that are named after their file."""
    data = report.get("data")
    parts = data.get("parts") if isinstance(data, Mapping) else None
    if not isinstance(parts, list):
        return {}
    stems = [Path(_source(part)).name.split(".")[0] for part in parts]
    names = numbered([_source_name(part) for part in parts])
    return {stem: name for stem, name in zip(stems, names, strict=True) if name.startswith(OWN_DATA)}


def _source(part: Any) -> str:
    """The path or the dataset that a part of a report's data names."""
    given = (part.get("path") or part.get("dataset")) if isinstance(part, Mapping) else None
    return str(given or OWN_DATA)


def _source_name(part: Any) -> str:
    known = isinstance(part, Mapping) and not part.get("path") and part.get("dataset")
    return name_of_dataset(str(known)) if known else name_of_data(_source(part))


# -- commands ----------------------------------------------------------------------------------------------------------

#: option → how its value is published
OPTIONS: dict[str, Callable[[str], str | None]] = {
    "--head": name_of_head,
    "--target": name_of_target,
    "--model": name_of_target,
    "--data": name_of_data,
    "--out": lambda _: "DIR",
    "--check": lambda _: "DIR",
    "--url": published_text,
}
#: replacements in a command, without spaces
WORDS = dict.fromkeys((OWN_DATA, HELD_OUT, ANSWERS), "FILE.jsonl")
WORDS |= {OWN_HEAD: "DIR", OWN_ADAPTER: "DIR", OWN_FILE: "FILE"}


def _command(command: str, private: dict[str, str]) -> str:
    """A command line of `headstart` or one of its modules, with files and addresses as `published` has them."""
    try:
        words = shlex.split(command)
    except ValueError:
        return "headstart '…'"
    option, start = "", 3 if words[:2] == ["python", "-m"] else 2 if words[:1] == ["python"] else 1
    module = words[2] if start == 3 and len(words) > 2 else ""
    known = words[:1] == ["headstart"] or module.split(".")[0] in ("headstart", "accelerate", "torch")
    shown = words[:start] if known else ["python", "SCRIPT.py"]
    for number, word in enumerate(words[start:]):
        name, equals, value = word.partition("=")
        if option in OPTIONS:
            shown.append(_word(OPTIONS[option](word)))
        elif word.startswith("--") and equals and name in OPTIONS:
            shown.append(f"{name}={_word(OPTIONS[name](value))}")
        elif equals and not name.startswith("-"):
            shown.append(f"{name}={_override(name, value, private)}")
        elif not re.fullmatch(r"-?[\d.]+(e-?\d+)?|…", word) and (re.search(r"[/.]", word) or number and is_local(word)):
            shown.append(_positional(word))
        else:
            shown.append(without_private(word, private))
        option = word if word.startswith("--") else ""
    return shlex.join(without_private(word, private) for word in shown)


def _word(text: str | None) -> str:
    return WORDS.get(text or "", text or "…")


def _positional(word: str) -> str:
    """A positional argument: a recipe, a head on the Hub, or some file."""
    return "RECIPE.yaml" if word.endswith((".yaml", ".yml")) else name_of_head(word) if is_repository(word) else "FILE"


def _override(name: str, value: str, private: dict[str, str]) -> str:
    """The value of `dotted.key=value`, published as the recipe's own value would be."""
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        parsed = value
    nested: dict[str, Any] = {}
    keys = [part for part in re.split(r"[.\[\]]+", name) if part]
    if not keys:
        return "…"
    inner = nested
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = parsed
    shown: Any = _Boundary(private, {}, {}).mapping({"recipe": nested}, ())["recipe"]
    for key in keys:
        if not isinstance(shown, dict) or key not in shown:
            return "…"
        shown = shown[key]
    if isinstance(shown, str):
        return value if shown == parsed else _word(shown)
    if shown == parsed:
        return value
    return yaml.safe_dump(shown, default_flow_style=True, allow_unicode=True, width=100_000, sort_keys=False).strip()
