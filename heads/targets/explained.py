"""Turns errors of reading or running a model (a library's, or its own code's) into a TargetError with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headstart.heads.errors import HeadstartError, TargetError
from headstart.heads.targets.classes import TRUST

#: errors that pass unchanged: our own, memory that is used up, and another rank that does not answer
KEPT = (HeadstartError, torch.OutOfMemoryError, torch.distributed.DistError)


@contextmanager
def explained(message: Callable[[Exception], str]) -> Iterator[None]:
    """Raise any error inside as a TargetError of this message."""
    try:
        yield
    except KEPT:
        raise
    except Exception as error:  # configs and code of a thousand architectures, theirs or the repository's
        raise TargetError(message(error)) from error


@contextmanager
def explained_loading(name: str, hub_refusal: str | None) -> Iterator[None]:
    """Errors of reading a target get a message with a remedy. Args: hub_refusal: why the Hub was not asked, or None."""
    from headstart.heads.targets.fetch import TARGETS

    def message(error: Exception) -> str:
        failed = f"target {name!r} cannot be loaded:"
        if isinstance(error, ImportError):
            return (
                f"{failed} {str(error).strip()}\nInstall the package it names, or do without: "
                "target.attn_implementation=sdpa, a target whose weights are not quantised"
            )
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            return f"{failed} only code that comes with it can do that: {TRUST}"
        if isinstance(error, ValueError) and "backend tokenizer" in str(error):
            return (
                f"{failed} no tokenizer that transformers reads lies beside the model. Copy its files there "
                "(tokenizer.json and tokenizer_config.json), or install the package that reads what is there "
                "(sentencepiece, tiktoken)"
            )
        if isinstance(error, OSError | ValueError):
            return (
                f"{failed} {hub_refusal or _without_list(error)}\n"
                f"Registered targets: {', '.join(sorted(TARGETS))}; or give a directory or a Hub id."
            )
        return (
            f"{failed} {type(error).__name__}: {error}. Its config or its code does not fit this version of "
            "transformers: update transformers, or name another target or revision"
        )

    with explained(message):
        yield


def _without_list(error: Exception) -> str:
    """What an error says. transformers ends some with the names of all classes or model types: these are left out."""
    return "\n".join(line for line in str(error).splitlines() if line.count(",") < 40)


@contextmanager
def explained_forward(name: str) -> Iterator[None]:
    """Errors of a target's forward get a message that begins with `name`."""

    def message(error: Exception) -> str:
        return (
            f"{name}: a forward fails with {type(error).__name__}: {error}. This architecture, or this version of "
            "transformers, cannot be a target"
        )

    with explained(message):
        yield
