"""Exceptions for mistakes that a user can make and mend.

Every message names the field or file, what was found, what was expected, and the remedy. The command line prints it
without a traceback and exits with `exit_code`: 2 for settings that cannot work on any machine (ConfigError), 1 if what
they name is missing, damaged, out of reach or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: most characters of a message; one that quotes a damaged file could be as long as the file
LONGEST = 4000


def first_line(error: BaseException, most: int = 320) -> str:
    """The first line of an error's message, `most` characters at most; the error's kind where it has no message."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= most else line[:most] + "…"


def in_one_line(error: BaseException, most: int = 200) -> str:
    """An error of a library in one line: its kind, and the first line of its message.

    >>> in_one_line(ValueError("first\\nsecond"))
    'ValueError: first'
    """
    kind = type(error).__name__
    return f"{kind}: {first_line(error, most)}" if str(error).strip() else kind


def first_names(names: Sequence[str], most: int = 3) -> str:
    """The first of many names, for a message.

    >>> first_names(["a", "b", "c", "d"])
    'a, b, c, …'
    """
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def clip(text: str) -> str:
    """The beginning and the end of a text that is too long for a message."""
    left = len(text) - LONGEST
    return text if left <= 0 else f"{text[: LONGEST // 2]} … ({left} more characters) … {text[-LONGEST // 2 :]}"


class HeadstartError(Exception):
    """Base of every error that a user can mend."""

    exit_code = 1

    def __str__(self) -> str:
        return clip(super().__str__())

    #: JSON values that `--json` prints beside the message
    details: dict[str, Any] | None = None


class ConfigError(HeadstartError):
    """A recipe, override or config file says something that cannot work."""

    exit_code = 2


class DataError(HeadstartError):
    """An input file or record is missing or malformed; names the file and the line."""


class TemplateError(DataError):
    """The chat template is missing or cannot tell which tokens are the assistant's."""


class TargetError(HeadstartError):
    """The target model is missing, corrupt, or not what the artefact was made for."""


class FormatError(HeadstartError):
    """A head checkpoint cannot be read or would load wrongly."""


class StorageError(HeadstartError):
    """Disk full, unwritable, or an artefact on disk is incomplete or corrupt."""


class DiskFullError(StorageError):
    """No room for a file; what was there before is still there."""


class TrainingError(HeadstartError):
    """Training cannot go on (non-finite loss, no supervised tokens, …)."""


class ServerError(HeadstartError):
    """A running inference server cannot be reached, or does not report what is asked of it."""


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived and everything is saved: the process ends with exit code 0, and the same command continues."""


def check_settings(
    config: object, node: str, names: Iterable[str], expected: str, works: Callable[[Any], bool]
) -> None:
    """Raise ConfigError for the first of the settings `names` of a recipe's node whose value does not work."""
    for name in names:
        if not works(found := getattr(config, name)):
            raise ConfigError(f"{node}.{name}: found {found!r}, expected {expected}")


def explain_memory(error: BaseException) -> HeadstartError | None:
    """The message for an error of Python or torch about memory that is used up; None for any other error."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # torch has a class for GPUs; its CPU allocator is told by its words only
    if not kinds & {"MemoryError", "OutOfMemoryError"} and "can't allocate memory" not in str(error):
        return None
    cause = next(iter(str(error).splitlines()), "") or type(error).__name__
    return HeadstartError(
        f"out of memory ({cause[:300]}). What is finished is kept. A smaller data.pack_tokens or data.max_length takes "
        "less in training (`headstart plan RECIPE` says how much), eval.batch_size, eval.tree.total_tokens or "
        "eval.max_new_tokens in decoding, data.distill.batch_size in distillation"
    )
