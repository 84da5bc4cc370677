"""Exceptions for mistakes that a user can make and mend.

Every message names the field or file, what was found, what was expected, and the remedy.
The command line prints these without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

from typing import Any


class HeadstartError(Exception):
    """Base of every error that a user can mend."""

    exit_code = 1
    #: what `--json` adds to the message (JSON values)
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
