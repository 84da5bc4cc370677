"""Names of repositories on the Hugging Face Hub, checked before anything is loaded or trained."""

from __future__ import annotations

from pathlib import Path

from headstart.heads.errors import ConfigError, first_line


def problem_of(name: str) -> str | None:
    """Why `name` cannot be a repository's name (`name` or `user/name`), in the words of the Hub's client; or None."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return first_line(error)
    return None


def is_repository(name: str) -> bool:
    """Whether `name` has the form `user/name` of a repository. Local directories are not looked at."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and problem_of(name) is None


def check_repository(name: str, said: str, expected: str = "user/name") -> None:
    """Raises: ConfigError if `name`, which the option or key `said` gives, cannot be a repository of the Hub."""
    if (problem := problem_of(name)) is not None:
        raise ConfigError(f"{said}: found {name!r}, expected {expected} ({problem})")


def check_head_name(head: str, said: str) -> None:
    """Raises: ConfigError if `head` is neither a directory, nor a path, nor possible as user/name[@revision]."""
    if head.startswith((".", "/", "~")) or Path(head).is_dir():
        return
    name, at, revision = head.partition("@")
    if name.count("/") > 1:
        return  # a path, whether or not it exists
    check_repository(name, said, "a directory or user/name[@revision]")
    if at and (not revision or any(c.isspace() or not c.isprintable() for c in revision)):
        raise ConfigError(f"{said}: found {head!r}, expected a branch, tag or commit after @")
