"""What reading or running a model raises, in a library's code or its own, becomes a TargetError with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headstart.heads.errors import HeadstartError, TargetError

#: what stays as it is: our own messages, memory that runs out, a rank that waits for another
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
    """Around reading a target. Args: hub_refusal: why the Hub was left out, or None."""
    from headstart.heads.targets.fetch import TARGETS

    def message(error: Exception) -> str:
        failed = f"target {name!r} cannot be loaded:"
        if isinstance(error, ImportError):
            return (
                f"{failed} {str(error).strip()}\nInstall the package it names, or do without: "
                "target.attn_implementation=sdpa, a target whose weights are not quantised"
            )
        if isinstance(error, OSError | ValueError):
            return (
                f"{failed} {hub_refusal or error}\n"
                f"Registered targets: {', '.join(sorted(TARGETS))}; or give a directory or a Hub id."
            )
        return (
            f"{failed} {type(error).__name__}: {error}. Its config or its code does not fit this version of "
            "transformers: update transformers, or name another target or revision"
        )

    with explained(message):
        yield


@contextmanager
def explained_forward(name: str) -> Iterator[None]:
    """Around a forward of a target. Args: name: what the message begins with."""

    def message(error: Exception) -> str:
        return (
            f"{name}: a forward fails with {type(error).__name__}: {error}. This architecture, or this version of "
            "transformers, cannot be a target"
        )

    with explained(message):
        yield
