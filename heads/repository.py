"""Names of repositories on the Hugging Face Hub: what may be one, told before anything is loaded or trained."""

from __future__ import annotations

from pathlib import Path

from headstart.heads.errors import ConfigError


def problem_of(name: str) -> str | None:
    """Why the Hub would not take `name` as a repository's (`name` or `user/name`), in its client's words; or None."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error).splitlines()[0]
    return None


def is_repository(name: str) -> bool:
    """Whether `name` is written as `user/name` of the Hub; a directory of that name here does not matter."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and problem_of(name) is None


def check_repository(name: str, said: str, expected: str = "user/name") -> None:
    """Raises: ConfigError where `name`, given as `said`, cannot be a repository of the Hub."""
    if (problem := problem_of(name)) is not None:
        raise ConfigError(f"{said}: found {name!r}, expected {expected} ({problem})")


def check_head_name(head: str, said: str) -> None:
    """Raises: ConfigError where `head` is no directory, is not written as one, and cannot be user/name[@revision]."""
    if head.startswith((".", "/", "~")) or Path(head).is_dir():
        return
    name, at, revision = head.partition("@")
    if name.count("/") > 1:
        return  # a path, also where nothing is there
    check_repository(name, said, "a directory or user/name[@revision]")
    if at and (not revision or any(c.isspace() or not c.isprintable() for c in revision)):
        raise ConfigError(f"{said}: found {head!r}, expected a branch, tag or commit after @")
