"""Published names of targets, heads and data: public ones unchanged, local ones without their path."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from headstart.heads.published_text import without_private
from headstart.heads.repository import is_repository, problem_of

#: what replaces the names of local things
OWN_DATA, OWN_HEAD, OWN_ADAPTER, OWN_FILE = "own data", "a local head", "a local adapter", "own file"
HELD_OUT, ANSWERS = "held-out conversations", "the target's own answers"
#: public benchmarks, by the usual names of their files
BENCHMARKS = {"spec_bench", "mt_bench", "humaneval", "gsm8k", "gsm8k_test", "math", "alpaca", "question"}
#: endings of data files
FILES = (".jsonl", ".json", ".gz")


def is_local(text: str) -> bool:
    """Whether `text` has the form of a path, or names an existing file or directory."""
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    try:
        return bool(text) and "\0" not in text and Path(text).exists()
    except OSError:
        return False


def name_of_target(name: str) -> str:
    """A Hub id or a registered name unchanged; for a directory its last part, which names the model."""
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", name)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    if not is_local(name):
        return without_private(name, {})
    return without_private(os.path.basename(os.path.abspath(os.path.expanduser(name))) or "a local model", {})


def name_of_head(name: str) -> str:
    """`user/name[@revision]`, or a word that is no path, unchanged; a directory as OWN_HEAD."""
    return OWN_HEAD if is_local(name) or ("/" in name and not is_repository(name.partition("@")[0])) else name


def name_of_adapter(name: str) -> str:
    """As `name_of_head`, for an adapter of the target."""
    return OWN_ADAPTER if name_of_head(name) == OWN_HEAD else name


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


def numbered(names: Sequence[str]) -> list[str]:
    """Published names of sources that are evaluated together: several of own data are numbered."""
    own = names.count(OWN_DATA)
    numbers = iter(range(1, own + 1))
    return [f"{name} {next(numbers)}" if name == OWN_DATA and own > 1 else name for name in names]
