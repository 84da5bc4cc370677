"""Saved heads, in a directory or on the Hub: finds them, loads them for a target, prepares them for more training."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headstart.data.placeholder import settle
from headstart.heads.base import Head, HeadConfig
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.formats import check_embeddings, fetch_head, load_head
from headstart.heads.formats.loading import skeleton
from headstart.heads.formats.sidecar import SIDECAR, adapter_changed, notes
from headstart.heads.repository import check_head_name
from headstart.heads.targets.fetch import hub_refusal
from headstart.heads.targets.load import has_merged_adapter
from headstart.heads.targets.target import Target, TargetConfig
from headstart.heads.targets.tuned import adapter_of_head

#: the parts of a target's fingerprint that a head's acceptance depends on → what messages call them
TRAINED_ON = {
    "weight_hash": "set of weights",
    "base_weight_hash": "base",
    "adapter_digest": "adapter",
    "tokenizer_hash": "tokenizer",
    "template_hash": "chat template",
}
#: those of them that rounding to another precision changes
ROUNDED = ("weight_hash", "base_weight_hash")
#: the parts of a recipe that say how a head is made; the others say what is done with it
MAKING = ("seed", "start_from", "head", "data", "train")
#: family of the untrained head that drafts where acceptance is synthetic and no recipe describes a head
SYNTHETIC = "eagle3"


def find_head(head: str, said: str = "--head") -> Path:
    """Directory of a head given as a path, or as `user/name[@revision]` on the Hub.

    Args:
        said: the option or setting that names it, for messages.
    Raises: FormatError when it is neither or cannot be fetched; ConfigError when it cannot be a name.
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
    """The day that the chat template showed when the head was trained; None where its sidecar does not tell."""
    day = _trained_on(directory).get("template_date")
    return day if isinstance(day, str) and re.fullmatch(r"\d{4}-[01]\d-[0-3]\d", day) else None


def _trained_on(directory: Path | None) -> dict[str, Any]:
    """The fingerprint of the target that a head was trained on, {} where its sidecar has none."""
    target = notes(directory).get("target") if directory is not None else None
    return target if isinstance(target, dict) else {}


def trained_otherwise(directory: Path | None, target: Target) -> str | None:
    """A warning that names how the target differs from the one that the head was trained on; None where it does not.

    Weights are compared only where both have the same precision, because rounding changes their hash.
    """
    then, now = _trained_on(directory), target.fingerprint()
    known = [name for name in TRAINED_ON if then.get(name) is not None and now.get(name) is not None]
    names = [name for name in known if then[name] != now[name]]
    if then and then.get("weight_hash") != now["weight_hash"] and "adapter_digest" not in known:
        # a target without an adapter is another one than with it
        names += ["adapter_digest"] if then.get("adapter_digest") != now.get("adapter_digest") else []
    if then.get("dtype") != now["dtype"]:
        names = [name for name in names if name not in ROUNDED]
    other = [TRAINED_ON[name] for name in names]
    if not other:
        return None
    return (
        f"WARNING: the head was trained on a target with another {' and another '.join(other)}: its acceptance here "
        "says nothing about that target"
    )


def target_of_head(directory: Path | None, config: TargetConfig) -> TargetConfig:
    """The target that a head drafts for: `config`, with the adapter that lies beside the head, if there is one.

    A target that has an adapter merged already, or for which the settings name one, stays as it is.

    Raises: FormatError where the adapter is not the one that the head was trained with; TargetError where the target's
    config cannot be read.
    """
    place = adapter_of_head(directory) if directory is not None else None
    if directory is None or place is None or config.adapter is not None or has_merged_adapter(config):
        return config
    if (directory / SIDECAR).is_file() and adapter_changed(directory, notes(directory)):
        raise FormatError(
            f"{place}: is not the adapter that the head was trained with (its digest is not target.adapter_digest in "
            f"{SIDECAR}): copy the directory again"
        )
    return replace(config, adapter=str(place))


def recipe_of_head(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A recipe's values, with the parts that say how a head is made taken from the saved head.

    The report of a saved head must describe that head, whatever this command's recipe says.
    """
    made = notes(directory).get("recipe") or {}
    return values | {name: made[name] for name in MAKING if name in made}


def bound_head(directory: Path, target: Target, dtype: torch.dtype | None = None) -> Head:
    """A saved head, ready to draft for the target: on its device, in its dtype (or `dtype`), bound to its ends.

    Raises: FormatError as `load_head`, and where the file holds ends that are not the target's.
    """
    head = _read_head(directory, target).to(target.device, dtype or target.dtype)
    head.bind(target.ends)
    return head.eval()


def _read_head(directory: Path, target: Target) -> Head:
    head = load_head(directory, target.dims)
    if not (directory / SIDECAR).exists() and not head.own_embeddings:
        check_embeddings(directory, target.embed_VD, target.teacher.weight_VD, target.dims)
    return head


def untrained_head(config: HeadConfig | None, target: Target) -> Head:
    """A head with random weights, the same at every call. It drafts where acceptance is synthetic.

    Args: config: None takes EAGLE-3 with a draft vocabulary of 32,000 tokens, or half the target's if that is less.
    """
    config = untrained_config(config, target)
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(0)
        head = build_head(config, target.dims).to(target.device, target.dtype)
        size = head.draft_vocab_size
        head.initialise(target.ends, None if size is None else torch.arange(size, device=target.device))
    head.sharpen()
    return head.eval()


def untrained_config(config: HeadConfig | None, target: Target) -> HeadConfig:
    """The config of `untrained_head`. The target needs no weights."""
    if config is None:
        half = min(32000, target.dims.vocab_size // 2)
        config = FAMILIES[SYNTHETIC].config(draft_vocab_size=half)  # type: ignore[call-arg]
    config, _ = settle(config, target.tokenizer, target.dims.vocab_size, target.stop_token_ids)
    return config.with_vocabulary(config.draft_tokens(target.dims.vocab_size))


def continued_head(start_from: str, config: HeadConfig, target: Target) -> Head:
    """The head that training goes on from: the weights of `start_from` under the recipe's `config`.

    Raises: ConfigError naming the fields of `head` by which the recipe describes another head.
    """
    directory = find_head(start_from, "start_from")
    given = _read_head(directory, target)
    dims = require_same_head(given, start_from, config, target.dims)
    head = build_head(config.adopting(given.config), dims)
    head.load_state_dict(given.state_dict(), strict=True)
    head = head.to(target.device)
    head.bind(target.ends)
    return head


def require_same_head(given: Head, start_from: str, config: HeadConfig, target: HeadDims) -> HeadDims:
    """The dimensions of a head that continues from `given`: the draft layer's of the file, the others of the target.

    Raises: ConfigError naming the fields of `head` by which the recipe describes another head.
    """
    if given.family != config.type:
        raise ConfigError(
            f"start_from: {start_from} is a head of type {given.family!r} and the recipe's is {config.type!r}: set "
            f"head.type={given.family}, or take a recipe of that family"
        )
    config = config.adopting(given.config)
    # rope and attention heads of the draft layer are the file's; the default width of its MLP is the target's
    dims = replace(given.dims, intermediate_size=target.intermediate_size)
    described = skeleton(config, dims, "the recipe's head")
    ours, theirs = _shapes(described), _shapes(given)
    behaves = all(getattr(config, name) == getattr(given.config, name) for name in config.behaviour)
    if ours != theirs or described.spec != given.spec or described.hidden_act != given.hidden_act or not behaves:
        names = (*config.structure, *config.behaviour, *(config.reading if described.spec != given.spec else ()))
        files = FAMILIES[config.type].files  # its settings say null as the value that it stands for
        said, held = files.settings(config, dims), files.settings(given.config, given.dims)
        pairs = [(name, said[name], held[name]) for name in names]
        if hasattr(config, "hidden_act"):
            pairs.append(("hidden_act", described.hidden_act, given.hidden_act))
        differing = [shlex.quote(f"head.{name}={_yaml(value)}") for name, own, value in pairs if own != value]
        odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise ConfigError(
            f"start_from: {start_from} is another head than the recipe's"
            + (f" ({_difference(odd[0], theirs, ours)})" if odd else "")
            + f": set {' '.join(differing) or 'the fields of head to its own'}"
        )
    return dims


def _yaml(value: Any) -> str:
    """A value as an override takes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _difference(name: str, theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]]) -> str:
    if name not in ours:
        return f"it has {name}, the recipe's head has not"
    if name not in theirs:
        return f"it has no {name}, the recipe's head has"
    return f"{name} is {list(theirs[name])}, the recipe makes it {list(ours[name])}"


def _shapes(head: Head) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
