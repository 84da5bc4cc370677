"""Heads that are there already, from a directory or the Hub: bound, trained on, exported again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headstart.console import Console
from headstart.heads.base import Head, HeadConfig
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.files import read_json
from headstart.heads.formats import ExportConfig, check_embeddings, export_head, fetch_head, load_head
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.launch import launch_commands, why_tokens
from headstart.heads.formats.loading import skeleton
from headstart.heads.formats.sidecar import SIDECAR, notes
from headstart.heads.provenance import provenance
from headstart.heads.published import published
from headstart.heads.repository import check_head_name
from headstart.heads.targets.fetch import hub_refusal
from headstart.heads.targets.target import Target

#: what a head's acceptance depends on in its target: part of the fingerprint → its name
TRAINED_ON = {"weight_hash": "set of weights", "tokenizer_hash": "tokenizer", "template_hash": "chat template"}
#: parts of a recipe that say how a head was made; the others say what is done with it
MAKING = ("seed", "start_from", "head", "data", "train")
#: family of the head that drafts where acceptance is synthetic and no head is named
SYNTHETIC = "eagle3"


def find_head(head: str, said: str = "--head") -> Path:
    """Directory of a head given as a path, or as `user/name[@revision]` on the Hub.

    Args:
        said: the option or field that names it, for messages.
    Raises: FormatError when it is neither or cannot be had; ConfigError for what can be no name.
    """
    if not head.strip() or "\0" in head:
        raise ConfigError(f"{said}: found {head!r}, expected a directory or user/name[@revision]")
    if Path(head).is_dir():
        inside = Path(head) / "head"
        if (inside / "config.json").is_file() and not (Path(head) / "config.json").is_file():
            raise FormatError(f"{said} {head}: found a run's directory; its head is {inside}")
        return Path(head)
    if head.count("/") != 1 or head.startswith((".", "/", "~")):
        raise FormatError(f"{said} {head}: no such directory; expected one with config.json and weights")
    check_head_name(head, said)
    refusal = hub_refusal()
    if refusal is not None and "HF_HUB_OFFLINE" not in refusal:
        raise FormatError(f"{said} {head}: no such directory, and {refusal}; give a local directory")
    return fetch_head(head)


def trained_date(directory: Path | None) -> str | None:
    """The day that the chat template showed when the head was trained, where its sidecar says one."""
    found = _trained_on(directory).get("template_date")
    return found if isinstance(found, str) and re.fullmatch(r"\d{4}-[01]\d-[0-3]\d", found) else None


def _trained_on(directory: Path | None) -> dict[str, Any]:
    """The fingerprint of the target that a head was trained on, {} where nothing tells it."""
    found = notes(directory).get("target") if directory is not None else None
    return found if isinstance(found, dict) else {}


def trained_otherwise(directory: Path | None, target: Target) -> str | None:
    """A warning that names what the target has otherwise than the one that the head was trained on, or None.

    Weights are compared in one precision only: rounding makes others of them.
    """
    then, now = _trained_on(directory), target.fingerprint()
    known = [name for name in TRAINED_ON if then.get(name) is not None and now.get(name) is not None]
    other = [TRAINED_ON[name] for name in known if then[name] != now[name]]
    if TRAINED_ON["weight_hash"] in other and then.get("dtype") != now["dtype"]:
        other.remove(TRAINED_ON["weight_hash"])
    if not other:
        return None
    return (
        f"WARNING: the head was trained on a target with another {' and another '.join(other)}: its acceptance here "
        "says nothing about that target"
    )


def recipe_of_head(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A recipe's values, with those parts that the head in `directory` was made by in their place.

    The head is what an evaluation measures, whatever the command's recipe says of other heads.
    """
    made = notes(directory).get("recipe") or {}
    return values | {name: made[name] for name in MAKING if name in made}


def bound_head(directory: Path, target: Target, dtype: torch.dtype | None = None) -> Head:
    """A saved head on the target's device, in its dtype unless another is given, with the frozen ends attached.

    Raises: FormatError as `load_head`, and where the file brings embeddings that are not the target's.
    """
    head = _read_head(directory, target).to(target.device, dtype or target.dtype)
    head.bind(target.ends)
    return head.eval()


def _read_head(directory: Path, target: Target) -> Head:
    head = load_head(directory, target.dims)
    if not (directory / SIDECAR).exists() and not head.own_embeddings:
        check_embeddings(directory, target.embed_VD)
    return head


def untrained_head(config: HeadConfig | None, target: Target) -> Head:
    """A head as `config` describes it, on random weights (always the same): what drafts where acceptance is synthetic.

    Args: config: None: EAGLE-3 with a draft vocabulary of 32,000 tokens, or of half the target's where that is less.
    """
    if config is None:
        half = min(32000, target.dims.vocab_size // 2)
        config = FAMILIES[SYNTHETIC].config(draft_vocab_size=half)  # type: ignore[call-arg]
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(0)
        head = build_head(config, target.dims).to(target.device, target.dtype)
        size = head.draft_vocab_size
        head.initialise(target.ends, None if size is None else torch.arange(size, device=target.device))
    head.sharpen()
    return head.eval()


def continued_head(start_from: str, config: HeadConfig, target: Target) -> Head:
    """The head that training goes on from: the weights of `start_from`, trained as `config` says.

    Raises: ConfigError naming the fields of `head` by which the recipe describes another head.
    """
    directory = find_head(start_from, "start_from")
    given = _read_head(directory, target)
    dims = require_same_head(given, start_from, config, target.dims)
    head = build_head(config, dims)
    head.load_state_dict(given.state_dict(), strict=True)
    head = head.to(target.device)
    head.bind(target.ends)
    return head


def require_same_head(given: Head, start_from: str, config: HeadConfig, target: HeadDims) -> HeadDims:
    """The dimensions of the head that goes on from `given`: its draft layer's, the target's in the rest.

    Raises: ConfigError naming the fields of `head` by which the recipe describes another head.
    """
    if given.family != config.type:
        raise ConfigError(
            f"start_from: {start_from} is a head of type {given.family!r} and the recipe's is {config.type!r}: set "
            f"head.type={given.family}, or take a recipe of that family"
        )
    # the draft layer's rope and head split are the file's; its MLP's default width is the target's
    dims = replace(given.dims, intermediate_size=target.intermediate_size)
    planned = skeleton(config, dims, "the recipe's head")
    shapes, found = _shapes(planned), _shapes(given)
    if shapes != found or planned.spec != given.spec or planned.hidden_act != given.hidden_act:
        names = (*config.structure, *(("feature_layers",) if planned.spec != given.spec else ()))
        pairs = [(name, getattr(config, name), getattr(given.config, name)) for name in names]
        pairs.append(("hidden_act", planned.hidden_act, given.hidden_act))
        differing = [shlex.quote(f"head.{name}={theirs}") for name, ours, theirs in pairs if ours != theirs]
        odd = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise ConfigError(
            f"start_from: {start_from} is another head than the recipe's"
            + (f" ({odd[0]} is {found.get(odd[0])}, the recipe makes it {shapes.get(odd[0])})" if odd else "")
            + f": set {' '.join(differing) or 'the fields of head to its own'}"
        )
    return dims


def _shapes(head: Head) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def check_out(head: Path, out: Path) -> None:
    """Raises: ConfigError where an export to `out` would write over the head itself, or a model of somebody else."""
    if out.resolve() == head.resolve():
        raise ConfigError(f"--out {out}: that is the head itself; choose another directory")
    theirs = [path.name for name in ("config.json", "*.safetensors", "*.bin", "*.pt") for path in out.glob(name)]
    if theirs and not (out / SIDECAR).is_file():
        raise ConfigError(
            f"--out {out}: holds {theirs[0]} and no {SIDECAR}: a model that Headstart did not export and would write "
            "over; choose another directory"
        )


def export_found(
    head: str, target: Target, config: ExportConfig, out: Path, console: Console, environment: Iterable[str] = ()
) -> dict[str, Any]:
    """Export a head that is no run's: one from elsewhere, or an export for another engine.

    Args:
        head: directory, or `user/name[@revision]`.
        environment: names of the variables that the settings read.
    Returns: `exports` (engine → directory) and `checks` (engine → report).
    Raises: ConfigError as `check_out`; TargetError when serving would see other features.
    """
    from headstart.serving_check import compare_features, probe_sequences, require_parity

    place = find_head(head)
    check_out(place, out)
    drafted = bound_head(place, target, torch.float32)
    if warning := trained_otherwise(place, target):
        console.say(warning)
    parity = compare_features(target, drafted.spec, probe_sequences(target))
    require_parity(parity, config.force)
    console.say(f"serving sees the features that training saw: {parity.rows} tokens, worst {parity.worst:.2g}")
    side = read_json(place / SIDECAR) if (place / SIDECAR).is_file() else {}
    origin = {"exported_from": head, **(side.get("provenance") or {}), **provenance(target.device)}
    origin |= {"recipe": side.get("recipe"), "target": target.fingerprint(), "serving_parity": parity.to_json()}
    origin["tuned"] = side.get("tuned")
    return exported(export_head(drafted, out, config, published(origin, environment)), console)


def exported(reports: dict[str, Any], console: Console) -> dict[str, Any]:
    """Say what `export_head` found, and put it in the form of a result."""
    for report in reports.values():
        console.say(report.render())
        side = notes(Path(report.directory))
        commands = launch_commands(str(report.directory), side, report.served) if side else {}
        for engine, command in commands.items():
            console.say(f"{FORMATS[engine].title}:\n{command}")
        if commands and (why := why_tokens(side)):
            console.say(why)
    return {
        "exports": {name: report.directory for name, report in reports.items()},
        "checks": {name: report.to_json() for name, report in reports.items()},
    }
