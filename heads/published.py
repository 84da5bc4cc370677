"""Takes private facts out of everything that leaves the machine: reports, model cards, headstart.json, trackers.

Private are directories, names of files, servers and values of environment variables. What others need to judge and
repeat a result is kept. `published` takes any of our JSON documents. Applying it twice changes nothing more, so
documents of older versions can pass it again.

| in the document | published |
|---|---|
| a target's directory | its last part, or the Hub id that the Hub's cache keeps it under |
| a file of conversations or prompts | `own data`; a bundled workload or a known benchmark by its name |
| a head's directory | `a local head` |
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
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from headstart.heads.errors import DataError
from headstart.heads.repository import is_repository, problem_of

LOCAL_PATH, OWN_DATA, OWN_HEAD, OWN_FILE = "LOCAL_PATH", "own data", "a local head", "own file"
HELD_OUT, ANSWERS = "held-out conversations", "the target's own answers"
#: public benchmarks, by the usual names of their files
BENCHMARKS = {"spec_bench", "mt_bench", "humaneval", "gsm8k", "gsm8k_test", "math", "alpaca", "question"}
#: shortest private text that is searched for inside other text; a shorter one might be any word
LONG = 8
#: limits of the search for a path's end: characters of the text, possible ends
MOST, PARTS = 4096, 32
#: endings of data files
FILES = (".jsonl", ".json", ".gz")
#: public hosts, and this machine
PUBLIC = re.compile(
    r"(.*\.)?(huggingface\.co|arxiv\.org|github\.com|pytorch\.org|localhost|127(\.\d+){3}|\[::1\])", re.I
)
#: keys whose values are words of ours (such as a dtype): programs read them, and nobody's names are in them
OURS = {
    "dtype", "device", "versions", "git_revision", "tree", "sampling", "config", "dims", "sha256", "facts", "type",
    "layout", "drafter", "digest",
}  # fmt: skip
#: environment variables with secrets, which a server's answer or an error might repeat
KEYS = ("OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")

_ADDRESS = re.compile(
    r"\b([a-z][a-z0-9+.-]*)://((?:[^\s/?#'\"`]*@)?)([^\s/?#:'\"`]*)((?::\d+)?[^\s?#'\"`]*)(?:[?#][^\s'\"`]*)?", re.I
)
_PATH = re.compile(r"(?<![\w/:.…}])(?:~[\w.-]*|\.{1,2})?/[^\s'\"`,;:()\[\]{}<>|]+")
#: the beginning of a path, and what may follow an existing folder
_BEGINS, _REST = re.compile(r"(~[\w.-]*|\.{1,2}|/[^/\n]+)/"), re.compile(r"/[^\s'\"`,;:()\[\]{}<>|]+")
_ENDS = re.compile(r"[/\s'\"`,;:()\[\]{}<>|]|$")
_QUOTED = re.compile(r"([\"'`])(?:~[\w.-]*|\.{1,2})?/[^\"'`\n]*/[^\"'`\n]*\1")
_OPENS = re.compile(r"\$\{\s*oc\.env:\s*")
#: quoted text (whose braces do not count), and braces
_BRACES = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[{}]", re.DOTALL)


def without_defaults(text: str) -> str:
    """The text with `${oc.env:NAME,default}` as `${oc.env:NAME}`.

    If a default reads another variable, the name of that one stays: `${oc.env:A,${oc.env:B}}`.
    """
    shown, place = [], 0
    while found := _OPENS.search(text, place):
        inside, end = _inside_braces(text, found.end())
        name, _, default = inside.partition(",")
        more = "".join(f",${{oc.env:{other}}}" for other in variables(default))
        shown.append(f"{text[place : found.start()]}${{oc.env:{name.strip()}{more}}}")
        place = end
    return "".join([*shown, text[place:]])


def variables(text: str) -> list[str]:
    """Names of the environment variables that a recipe's text reads by `${oc.env:NAME}`."""
    return list(dict.fromkeys(re.findall(r"\$\{\s*oc\.env:\s*([^,}\s$]+)", text)))


def _inside_braces(text: str, start: int) -> tuple[str, int]:
    """The text from `start` to the closing brace, and the place after it; everything if no brace closes."""
    depth = 1
    for found in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[start : found.start()], found.end()
    return text[start:], len(text)


def published(document: Mapping[str, Any], environment: Iterable[str] = ()) -> dict[str, Any]:
    """A document of ours (report, side file, provenance, settings) as others may see it.

    Args:
        document: JSON values; the keys say what is a target, a head, data, an address or a command.
        environment: names of variables whose values may be in it. Those that it reads itself by `${oc.env:NAME}` are
            found without.
    Raises: DataError if it is nested deeper than any document of ours.
    """
    try:
        private = _values([*environment, *_variables_inside(document)])
        return _Boundary(private, _names_inside(document), _task_names(document)).mapping(document, ())
    except RecursionError:
        raise DataError("a document that is to be published is nested too deeply: write it anew") from None


def published_text(text: str, environment: Iterable[str] = ()) -> str:
    """A sentence without paths, private parts of addresses and the values of these environment variables."""
    return _text(text, _values([*environment, *variables(text)]))


def _values(names: Iterable[str]) -> dict[str, str]:
    """Private text → what replaces it: values of these variables, and of KEYS."""
    keys = {os.environ[name]: f"${name}" for name in KEYS if len(os.environ.get(name, "")) >= LONG}
    named = {os.environ[name]: f"${{oc.env:{name}}}" for name in names if os.environ.get(name, "").strip()}
    return {**keys, **named}


def _variables_inside(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _variables_inside(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _variables_inside(item)
    elif isinstance(value, str) and "oc.env" in value:
        yield from variables(value)


# -- names -------------------------------------------------------------------------------------------------------------


def is_local(text: str) -> bool:
    """Whether `text` has the form of a path, or names an existing file or directory."""
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    try:
        return bool(text) and "\0" not in text and Path(text).exists()
    except OSError:
        return False


def name_of_target(name: str) -> str:
    """A Hub id or a registered name unchanged; of a directory the last part, which tells the model."""
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", name)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    if not is_local(name):
        return _text(name, {})
    return _text(os.path.basename(os.path.abspath(os.path.expanduser(name))) or "a local model", {})


def name_of_head(name: str) -> str:
    """`user/name[@revision]`, or a word that is no path, unchanged; a directory as OWN_HEAD."""
    return OWN_HEAD if is_local(name) or ("/" in name and not is_repository(name.partition("@")[0])) else name


def name_of_data(name: str) -> str:
    """A data set of the Hub, a bundled workload or a public benchmark by its name; anything else as OWN_DATA."""
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
    """The Hub's name of a data set; a directory as OWN_DATA."""
    return OWN_DATA if is_local(name) or problem_of(name) is not None else name


def workloads() -> set[str]:
    """Names of the workloads that come with the package."""
    folder = Path(__file__).resolve().parents[1] / "data" / "workloads"
    return {path.stem for path in folder.glob("*.jsonl")}


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
#: the key around it and the key → the same, if the key alone does not decide it
BY_PLACE: dict[tuple[str, str], Callable[[str], str | None]] = {
    ("target", "name"): name_of_target,
    ("head", "path"): name_of_head,
    ("", "head"): name_of_head,
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
                # keys are ours or a recipe's, in which no variable is read
                kept[_setting(key, {}) if isinstance(key, str) else key] = result
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
        rule = _rule(place)
        if rule is not None:
            # a name that is a variable's value is replaced even if it is short
            return self.private.get(item) or _none_or_text(rule(item), self.private)
        words = {} if OURS.intersection(place) else self.words
        return _setting(item, words) if "recipe" in place else _text(item, words)

    def task_names(self, names: list[Any]) -> list[str]:
        """Published names of all tasks of a report. Equal ones are numbered."""
        shown = [_text(self.tasks.get(str(name), str(name)), self.words) for name in names]
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
        found = re.fullmatch(r"([^/:]+):(\d+)(\D.*)?", name, re.DOTALL)
        if found is None or found[1] in workloads() | BENCHMARKS | {OWN_DATA}:
            return _text(name, self.words)
        return f"{OWN_DATA}:{found[2]}{found[3] or ''}"


def _rule(place: tuple[str, ...]) -> Callable[[str], str | None] | None:
    around = place[-2] if len(place) > 1 else ""
    return BY_PLACE.get((around, place[-1])) or BY_KEY.get(place[-1])


def _names_inside(value: Any) -> dict[str, str]:
    """Paths that a document gives under a key of BY_KEY or BY_PLACE → what replaces them in its sentences too."""
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


def numbered(names: Sequence[str]) -> list[str]:
    """Published names of sources that are evaluated together: several of own data are numbered."""
    own = names.count(OWN_DATA)
    numbers = iter(range(1, own + 1))
    return [f"{name} {next(numbers)}" if name == OWN_DATA and own > 1 else name for name in names]


def _setting(text: str, words: Mapping[str, str]) -> str:
    """As `_text`, for a value that is no sentence: if it begins like a path, all of it is one."""
    text = _without(text, words)
    return LOCAL_PATH if _BEGINS.match(text) else _text(text, {})


def _none_or_text(text: str | None, words: Mapping[str, str]) -> str | None:
    return None if text is None else _text(text, words)


def _without(text: str, words: Mapping[str, str]) -> str:
    for word in sorted(words, key=len, reverse=True):  # the longest first, because one may contain another
        if len(word) >= LONG or (len(word) > 3 and ("/" in word or "." in word)):
            text = text.replace(word, words[word])
    return text


def _text(text: str, words: Mapping[str, str]) -> str:
    text = _ADDRESS.sub(_address, without_defaults(_without(text, words)))
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    # in quotes a path may hold spaces
    text = _QUOTED.sub(lambda found: f"{found[1]}{LOCAL_PATH}{found[1]}", text)
    shown, place = [], 0
    while found := _PATH.search(text, place):
        end = max(found.end(), _end_of_path(text, found.start()))
        shown.append(text[place : found.start()] + _path(text[found.start() : end]))
        place = end
    return "".join([*shown, text[place:]])


def _end_of_path(text: str, start: int) -> int:
    """Where an existing path ends; its folders and its name may contain spaces and signs."""
    if len(text) > MOST or "\0" in text:
        return start  # too long to be a sentence of ours
    line = text[start:].partition("\n")[0]
    ends = [found.start() for found in itertools.islice(_ENDS.finditer(line), PARTS) if found.start() > 1]
    there = max((end for end in ends if os.path.exists(os.path.expanduser(line[:end]))), default=0)
    # the file in the last folder need not exist
    rest = _REST.match(line, there) if there else None
    return start + (rest.end() if rest else there)


def _address(found: re.Match[str]) -> str:
    scheme, _, host, rest = found[1], found[2], found[3], found[4]
    if scheme.lower() == "file":
        return LOCAL_PATH
    return f"{scheme}://{host if PUBLIC.fullmatch(host) else 'SERVER'}{rest}"


def _path(text: str) -> str:
    # a single name such as `/red` is a path only if it exists
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
#: replacements in a command, without spaces
WORDS = {OWN_DATA: "FILE.jsonl", HELD_OUT: "FILE.jsonl", ANSWERS: "FILE.jsonl", OWN_HEAD: "DIR", OWN_FILE: "FILE"}


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
            shown.append(_text(word, private))
        option = word if word.startswith("--") else ""
    return shlex.join(_text(word, private) for word in shown)


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
    found: Any = _Boundary(private, {}, {}).mapping({"recipe": nested}, ())["recipe"]
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return "…"
        found = found[key]
    if isinstance(found, str):
        return value if found == parsed else _word(found)
    if found == parsed:
        return value
    return yaml.safe_dump(found, default_flow_style=True, allow_unicode=True, width=100_000, sort_keys=False).strip()
