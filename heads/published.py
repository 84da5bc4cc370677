"""The one boundary that facts pass before they leave the machine: reports, model cards, headstart.json, trackers.

What is inside (which directory, whose file, which server, what the environment said) stays inside; what others need to
judge and repeat a result goes out. `published` takes any of our JSON documents and is idempotent, so that documents of
older versions pass it as well.

| inside | outside |
|---|---|
| a target's directory | its last part, or the Hub id that the Hub's cache keeps it under |
| a file of conversations or prompts | `own data`; a bundled workload or a known benchmark by its name |
| a head's directory | `a local head` |
| a Hub id, `workload:NAME` | the same |
| a value that came from `${oc.env:NAME}` | `${oc.env:NAME}` |
| an address | without user, password, query and, unless it is this machine or a public site, host |
| any other absolute path | `LOCAL_PATH` |
| the run's name and directory, the tracker's project | left out |

Numbers that say how something was measured (batch size, seed of sampling) go out wherever they came from.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headstart.heads.errors import DataError
from headstart.heads.repository import is_repository, problem_of

LOCAL_PATH, OWN_DATA, OWN_HEAD, OWN_FILE = "LOCAL_PATH", "own data", "a local head", "own file"
HELD_OUT, ANSWERS = "held-out conversations", "the target's own answers"
#: benchmarks that anybody may name, by the stem of their usual files
BENCHMARKS = {"spec_bench", "mt_bench", "humaneval", "gsm8k", "gsm8k_test", "math", "alpaca", "question"}
#: how the names of data files end
FILES = (".jsonl", ".json", ".gz")
#: hosts that anybody knows, and those that are this machine
PUBLIC = re.compile(
    r"(.*\.)?(huggingface\.co|arxiv\.org|github\.com|pytorch\.org|localhost|127(\.\d+){3}|\[::1\])", re.I
)
#: where facts say what they are about, and not what others named
OURS = {"dtype", "device", "versions", "git_revision", "tree", "sampling", "config", "dims", "sha256", "facts"}

_ADDRESS = re.compile(
    r"\b([a-z][a-z0-9+.-]*)://((?:[^\s/?#'\"`]*@)?)([^\s/?#:'\"`]*)((?::\d+)?[^\s?#'\"`]*)(?:[?#][^\s'\"`]*)?", re.I
)
_PATH = re.compile(r"(?<![\w/:.…}])(?:~[\w.-]*|\.{1,2})?/[^\s'\"`,;:()\[\]{}<>|]+")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env:\s*([^,}\s]+)[^}]*\}")
#: text that came from the environment → what stands for it
_private: dict[str, str] = {}


def keep_private(value: str, shown: str) -> None:
    """From here on `published` shows `shown` wherever others' texts are or hold `value`."""
    if value.strip():
        _private[value] = shown
        for word in sorted(_private, key=len, reverse=True):  # the longest first: one may hold another
            _private[word] = _private.pop(word)


def without_defaults(text: str) -> str:
    """`${oc.env:NAME,default}` as `${oc.env:NAME}`: what stands for a value that came from the environment."""
    return _ENVIRONMENT.sub(r"${oc.env:\1}", text)


def published(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document of ours (report, side file, provenance, settings) as others may see it.

    Args: document: JSON values; the keys say what is a target, a head, data, an address or a command.
    Raises: DataError where it is nested deeper than any document of ours.
    """
    try:
        words = {**_private, **_keys(), **_names_inside(document)}
        ordered = {word: words[word] for word in sorted(words, key=len, reverse=True)}
        return _Boundary(ordered, _task_names(document)).mapping(document, ())
    except RecursionError:
        raise DataError("a document that is to be published is nested too deeply: write it anew") from None


def published_text(text: str) -> str:
    """A sentence without paths, parts of addresses and values of the environment."""
    return _text(text, {**_private, **_keys()})


def _keys() -> dict[str, str]:
    """Keys of this environment that a server's answer or an error might repeat."""
    names = ("OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
    return {os.environ[name]: f"${name}" for name in names if len(os.environ.get(name, "")) >= 8}


# -- names -------------------------------------------------------------------------------------------------------------


def is_local(text: str) -> bool:
    """Whether `text` is written as a path, or names something that is here."""
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    try:
        return bool(text) and "\0" not in text and Path(text).exists()
    except OSError:
        return False


def name_of_target(name: str) -> str:
    """A Hub id or a registered name as it is; a directory by its last part, which says which model it is."""
    if name in _private:
        return published_text(name)
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", name)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    if not is_local(name):
        return _text(name, _private)
    return _text(os.path.basename(os.path.abspath(os.path.expanduser(name))) or "a local model", _private)


def name_of_head(name: str) -> str:
    """`user/name[@revision]`, or a word that is no path, as it is; a directory as a local head."""
    if name in _private:
        return published_text(name)
    return OWN_HEAD if is_local(name) or ("/" in name and not is_repository(name.partition("@")[0])) else name


def name_of_data(name: str) -> str:
    """A data set of the Hub, a bundled workload or a known benchmark by its name; anything else is own data."""
    if name in _private:
        return published_text(name)
    if name.startswith("workload:") or name in (OWN_DATA, HELD_OUT, ANSWERS) or name in BENCHMARKS:
        return name
    place = Path(name)
    stem = place.name.split(".")[0]
    if place.parent.name == "workloads" and place.parent.parent.name == "data" and stem in workloads():
        return f"workload:{stem}"
    if place.parent.name == "data" and place.name in ("held_out.jsonl", "distilled.jsonl"):
        return HELD_OUT if stem == "held_out" else ANSWERS
    if stem in BENCHMARKS and "." in place.name:
        return stem
    return name if is_repository(name) and not name.endswith(FILES) and not is_local(name) else OWN_DATA


def name_of_dataset(name: str) -> str:
    """As the Hub knows it; a directory is own data."""
    if name in _private:
        return published_text(name)
    return OWN_DATA if is_local(name) or problem_of(name) is not None else name


def workloads() -> set[str]:
    """Names of the workloads that come with the package."""
    folder = Path(__file__).resolve().parents[1] / "data" / "workloads"
    return {path.stem for path in folder.glob("*.jsonl")}


def _file(name: str) -> str:
    return published_text(name) if name in _private else OWN_FILE


def _nothing(_: str) -> None:
    return None


#: key → what becomes of its text, wherever it stands
BY_KEY: dict[str, Callable[[str], str | None]] = {
    "path": name_of_data,
    "dataset": name_of_dataset,
    "chat_template": _file,
    "start_from": name_of_head,
    "exported_from": name_of_head,
    "base_model_name_or_path": name_of_target,
    "checkpoint": lambda name: Path(name).name,
}
#: last two keys of a place → the same, where the key alone does not say it
BY_PLACE: dict[tuple[str, str], Callable[[str], str | None]] = {
    ("target", "name"): name_of_target,
    ("head", "path"): name_of_head,
    ("engine", "model"): name_of_target,
    ("eval", "data"): name_of_data,
    ("recipe", "name"): _nothing,
    ("recipe", "run_dir"): _nothing,
    ("train", "project"): _nothing,
    ("", "project"): _nothing,
}


# -- documents ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Boundary:
    """One document on its way out.

    Attributes:
        words: text that must not be found in its sentences → what stands for it.
        tasks: names that tasks and ids have from a file of own data → the published ones.
    """

    words: dict[str, str]
    tasks: dict[str, str]

    def mapping(self, value: Mapping[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
        kept = {}
        for key, item in value.items():
            if key == "tasks" and isinstance(item, Mapping):
                item = {self.tasks.get(name, name): section for name, section in item.items()}
            result = self.value(item, (*place, str(key)))
            if result is not None or item is None:
                kept[_text(key, self.words) if isinstance(key, str) else key] = result
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
            return published_command(item)
        if place[-2:] == ("divergences", "id"):
            return self.prompt_id(item)
        rule = _rule(place)
        if rule is not None:
            return rule(item)
        return _text(item, {} if OURS.intersection(place) else self.words)

    def prompt_id(self, name: str) -> str:
        """A prompt's id without the file that it came from: `talk:12` is line 12 of own data."""
        source, slash, rest = name.partition("/")
        if slash and source in self.tasks:
            return f"{self.tasks[source]}/{self.prompt_id(rest)}"
        found = re.fullmatch(r"([^/:]+):(\d+)(\D.*)?", name, re.DOTALL)
        if found is None or found[1] in workloads() | BENCHMARKS | {OWN_DATA}:
            return _text(name, self.words)
        return f"{OWN_DATA}:{found[2]}{found[3] or ''}"


def _rule(place: tuple[str, ...]) -> Callable[[str], str | None] | None:
    around = place[-2] if len(place) > 1 else ""
    return BY_PLACE.get((around, place[-1])) or BY_KEY.get(place[-1])


def _names_inside(value: Any) -> dict[str, str]:
    """Paths that a document gives as such, and their last parts: they are not to be found in its sentences either."""
    found: dict[str, str] = {}

    def look(item: Any, place: tuple[str, ...]) -> None:
        if isinstance(item, Mapping):
            for key, inner in item.items():
                look(inner, (*place, str(key)))
        elif isinstance(item, list | tuple):
            for inner in item:
                look(inner, place)
        elif isinstance(item, str) and place and (rule := _rule(place)) is not None:
            named = "${" not in item and ("/" in item or is_local(item) or item.endswith(FILES))
            shown = rule(item) if named else item
            if shown != item:
                found[item] = shown or LOCAL_PATH
                if rule in (name_of_data, _file) and "." in Path(item).name:
                    found[Path(item).name] = shown or LOCAL_PATH

    look(value, ())
    return found


def _task_names(report: Mapping[str, Any]) -> dict[str, str]:
    """Task → its published name, for those that are called after the file they came from."""
    data = report.get("data")
    parts = data.get("parts") if isinstance(data, Mapping) else None
    if not isinstance(parts, list):
        return {}
    stems = [Path(_source(part)).name.split(".")[0] for part in parts]
    names = numbered([_source_name(part) for part in parts])
    return {stem: name for stem, name in zip(stems, names, strict=True) if name.startswith(OWN_DATA)}


def _source(part: Any) -> str:
    """What a part of a report's data names."""
    given = (part.get("path") or part.get("dataset")) if isinstance(part, Mapping) else None
    return str(given or OWN_DATA)


def _source_name(part: Any) -> str:
    known = isinstance(part, Mapping) and not part.get("path") and part.get("dataset")
    return name_of_dataset(str(known)) if known else name_of_data(_source(part))


def numbered(names: Sequence[str]) -> list[str]:
    """Published names of sources that are evaluated together, own data numbered where there are several of it."""
    own = names.count(OWN_DATA)
    numbers = iter(range(1, own + 1))
    return [f"{name} {next(numbers)}" if name == OWN_DATA and own > 1 else name for name in names]


def _text(text: str, words: Mapping[str, str]) -> str:
    text = words.get(text, text)
    for word, shown in words.items():
        if len(word) >= 8 or (len(word) > 3 and ("/" in word or "." in word)):
            text = text.replace(word, shown)
    text = _ADDRESS.sub(_address, without_defaults(text))
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    return _PATH.sub(_path, text)


def _address(found: re.Match[str]) -> str:
    scheme, _, host, rest = found[1], found[2], found[3], found[4]
    if scheme.lower() == "file":
        return LOCAL_PATH
    return f"{scheme}://{host if PUBLIC.fullmatch(host) else 'SERVER'}{rest}"


def _path(found: re.Match[str]) -> str:
    text = found[0]
    # `/red` alone may be anything, unless it is there
    return text if re.fullmatch(r"/[^/]*", text) and not os.path.exists(text) else LOCAL_PATH


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
#: what stands for a thing in a command, which has no spaces
WORDS = {OWN_DATA: "FILE.jsonl", HELD_OUT: "FILE.jsonl", ANSWERS: "FILE.jsonl", OWN_HEAD: "DIR", OWN_FILE: "FILE"}


def published_command(command: str) -> str:
    """A command line of `headstart` or one of its modules, with files and addresses as `published` has them."""
    try:
        words = shlex.split(command)
    except ValueError:
        return "headstart '…'"
    option, start = "", 3 if words[:2] == ["python", "-m"] else 2 if words[:1] == ["python"] else 1
    known = words[:1] == ["headstart"] or (start == 3 and words[2].startswith(("headstart.", "accelerate.", "torch.")))
    shown = words[:start] if known else ["python", "SCRIPT.py"]
    for number, word in enumerate(words[start:]):
        name, equals, value = word.partition("=")
        if option in OPTIONS:
            shown.append(_word(OPTIONS[option](word)))
        elif word.startswith("--") and equals and name in OPTIONS:
            shown.append(f"{name}={_word(OPTIONS[name](value))}")
        elif equals and not name.startswith("-"):
            shown.append(f"{name}={_override(name, value)}")
        elif not re.fullmatch(r"-?[\d.]+(e-?\d+)?|…", word) and (re.search(r"[/.]", word) or number and is_local(word)):
            shown.append(_positional(word))
        else:
            shown.append(_text(word, _private))
        option = word if word.startswith("--") else ""
    return shlex.join(shown)


def _word(text: str | None) -> str:
    return WORDS.get(text or "", text or "…")


def _positional(word: str) -> str:
    """A recipe, a run's directory, a file: which one does not matter to others."""
    return "RECIPE.yaml" if word.endswith((".yaml", ".yml")) else name_of_head(word) if is_repository(word) else "FILE"


def _override(name: str, value: str) -> str:
    """The value of `dotted.key=value` as the recipe's is published."""
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
    found: Any = _Boundary(_private, {}).mapping({"recipe": nested}, ())["recipe"]
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return "…"
        found = found[key]
    if isinstance(found, str):
        return value if found == parsed else _word(found)
    if found == parsed:
        return value
    return yaml.safe_dump(found, default_flow_style=True, allow_unicode=True, width=100_000, sort_keys=False).strip()
