"""Publish an exported head on the Hugging Face Hub, and fetch published ones.

Uploads go through huggingface_hub: files that arrived before a failure are recognised by their hash and not sent again,
so running the same command continues.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from headstart.heads.checkpoints.head_files import BESIDE
from headstart.heads.checkpoints.raw import PICKLED
from headstart.heads.errors import ConfigError, FormatError, StorageError, in_one_line
from headstart.heads.files import read_json, write_json, write_text
from headstart.heads.formats.beside import NAMES, write_beside
from headstart.heads.formats.card import render_card
from headstart.heads.formats.check import check_directory
from headstart.heads.formats.config import ExportConfig
from headstart.heads.formats.plots import draw_plots
from headstart.heads.formats.sidecar import SIDECAR, hub_name, notes, seal
from headstart.heads.formats.tuned_card import target_card
from headstart.heads.published import published
from headstart.heads.published_text import published_text, variables
from headstart.heads.repository import check_repository
from headstart.heads.targets.adapter import CONFIG_FILE, WEIGHTS_FILE
from headstart.heads.targets.tuned import ADAPTER, TUNED_TARGET, is_tuned

T = TypeVar("T")
#: files of a head that are fetched; nothing else in a repository is touched
HEAD_FILES = ["config.json", SIDECAR, "*.safetensors", "*.safetensors.index.json"]
HEAD_FILES += ["pytorch_model.bin", PICKLED, *BESIDE]
#: files that an engine reads in the place of the weights: uploaded, never fetched
ENGINE_FILES = "*.gguf"
#: files of the adapter that lies beside a head of a tuned target
ADAPTER_FILES = [f"{ADAPTER}/{CONFIG_FILE}", f"{ADAPTER}/{WEIGHTS_FILE}"]
#: files in folders of a repository; in a pattern, "*" also stands for "/"
IN_FOLDERS = "*/*"
#: files of a merged target that are uploaded
TARGET_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model", "README.md"]
#: weight files that exports write; an upload removes those of an earlier export that the new one does not have
WRITTEN = re.compile(r"(model(-\d{5}-of-\d{5})?|medusa_lm_head)\.safetensors(\.index\.json)?")
#: seconds to wait before the second attempt, the third and the fourth
WAITS = (1.0, 4.0, 15.0)


def check_published_name(name: str) -> None:
    """Raises: ConfigError where an export cannot be published under `name`."""
    check_repository(name, "export.push_to_hub")
    if "/" not in name:
        raise ConfigError(f"export.push_to_hub: found {name!r}, expected user/name")


def push_export(
    directory: Path,
    config: ExportConfig,
    report: dict[str, Any] | None = None,
    api: Any = None,
    sleep: Callable[[float], None] = time.sleep,
    environment: Iterable[str] = (),
) -> str:
    """Write the model card into an exported directory, create the repository and upload.

    Folders in it (exports for further engines) are not uploaded: a serving engine reads a repository's root. The
    folder `adapter` of a tuned target is, and the merged target goes into a repository of its own, `NAME-target`.
    Weight files of an earlier export that the new one does not have are removed: engines would load them too.

    Args:
        report: report.json of the head's evaluation, for the card.
        environment: names of the variables that the settings read.
        api: a `huggingface_hub.HfApi`; None takes the logged-in user's.
    Returns: the repository's address.
    Raises: ConfigError without a token or with a bad name; FormatError for a directory without our sidecar;
        StorageError when the Hub stays out of reach.
    """
    from huggingface_hub import HfApi

    name = config.push_to_hub or ""
    check_published_name(name)
    api = api or HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    directory = Path(directory)
    _require_access(api, directory)
    names = list(environment)
    side = _cleared(directory, names)
    checked = check_directory(directory)
    loads = [engine for engine in checked.engines if checked.loads(engine)]
    # synthetic acceptance says nothing about this head
    report = None if report is None or report.get("synthetic") else published(report, names)
    if report is not None and report.get("samples"):
        report["samples"] = None  # the texts of prompts stay here
    plots = [] if report is None else draw_plots(report, directory)
    write_beside(directory, side)
    card = render_card(name, side, report, loads, _licence(api, side), plots)
    write_text(directory / "README.md", card)
    if report is not None:
        write_json(directory / "report.json", report)
    named = (side.get("target") or {}).get("name", "its target")
    message = published_text(config.commit_message or f"{side['type']} head for {named}", names)
    if (side.get("target") or {}).get("served_as") is not None:
        _push_target(api, directory, config, side, message, sleep)
    patterns = [*HEAD_FILES, ENGINE_FILES, *NAMES, "README.md", "report.json", *plots]
    files = _root_files(directory, patterns) + ADAPTER_FILES
    return _patiently(lambda: _upload(api, name, directory, files, config, message), directory, name, sleep)


def _require_access(api: Any, directory: Path) -> None:
    """Raises: ConfigError where nothing can be uploaded from here: there is no token, or the Hub is switched off."""
    from huggingface_hub import constants, get_token

    complete = f"The export is complete in {directory}."
    if not (api.token or get_token()):
        raise ConfigError(
            "export.push_to_hub: no Hugging Face token found. Run `hf auth login`, or set HF_TOKEN to a token "
            f"with write access, then run the same command again. {complete}"
        )
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"export.push_to_hub: HF_HUB_OFFLINE is set: unset it and run the same command again. {complete}"
        )


def _upload(api: Any, name: str, place: Path, files: list[str], config: ExportConfig, message: str) -> str:
    """Upload files of a folder into the repository `name`, which is created where needed. Returns its address.

    Weight files of an earlier upload that `place` does not have are removed.
    """
    url = api.create_repo(name, private=config.private, repo_type="model", exist_ok=True)
    old = [file for file in api.list_repo_files(name) if WRITTEN.fullmatch(file)]
    api.upload_folder(
        repo_id=name,
        folder_path=place,
        commit_message=message,
        allow_patterns=files,
        delete_patterns=[file for file in old if not (place / file).is_file()] or None,
    )
    return str(url)


def published_target(repository: str) -> str:
    """The repository of a tuned target whose head is published as `repository`: engines read a repository's root."""
    return f"{repository}-target"


def _root_files(directory: Path, patterns: list[str]) -> list[str]:
    """Files of the directory itself, not of its folders, that match one of the patterns."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def _push_target(
    api: Any,
    directory: Path,
    config: ExportConfig,
    side: dict[str, Any],
    message: str,
    sleep: Callable[[float], None],
) -> None:
    """Upload the merged target of an export into a repository of its own, before the head that refers to it.

    Raises: FormatError where it is not there, or was exported for another repository.
    """
    head, place = config.push_to_hub or "", directory / TUNED_TARGET
    name, served = published_target(head), side["target"]["served_as"]
    if served != name or not (place / "config.json").is_file():
        raise FormatError(
            f"{directory}: the head drafts for the tuned target {served!r}, expected {name!r} with its files in "
            f"{place}: run `headstart export` again with this repository"
        )
    write_text(place / "README.md", target_card(name, head, side, _licence(api, side)))
    files = _root_files(place, TARGET_FILES)
    _patiently(lambda: _upload(api, name, place, files, config, message), directory, name, sleep)


def _cleared(directory: Path, environment: list[str]) -> dict[str, Any]:
    """headstart.json without private facts. It is written again if an older version left some in it.

    Raises: FormatError if there is none, or if config.json holds a private fact.
    """
    if not (directory / SIDECAR).is_file():
        raise FormatError(f"{directory}: no {SIDECAR}; push a directory that `headstart export` wrote")
    side = read_json(directory / SIDECAR)
    environment = [*environment, *variables(json.dumps(side))]
    cleared = seal(published(side, environment))
    if cleared != side:
        write_json(directory / SIDECAR, cleared)
    config = read_json(directory / "config.json")
    if published(config, environment) != config:
        raise FormatError(
            f"{directory / 'config.json'}: holds a directory of this machine, or what a variable of its environment "
            "says, which others would see: run `headstart export` again"
        )
    return cleared


def _licence(api: Any, side: dict[str, Any]) -> str | None:
    """The target's licence as the Hub states it; None where it cannot be asked."""
    target = side.get("target") or {}
    name = hub_name(target)
    if name is None:
        return None
    try:
        card = api.model_info(name).card_data
    except Exception:  # noqa: BLE001 - the card then points to the target's own page
        return None
    licence = getattr(card, "license", None)
    return licence if isinstance(licence, str) and licence != "other" else None


def _patiently(work: Callable[[], T], directory: Path, name: str, sleep: Callable[[float], None]) -> T:
    """`work()`, tried again after failures of the network; the last failure is explained."""
    from huggingface_hub.errors import HfHubHTTPError

    for wait in (*WAITS, None):
        try:
            return work()
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403):
                raise ConfigError(
                    f"export.push_to_hub: the Hub refuses {name!r} ({status}): the token may not write there. "
                    "Check the name, or set HF_TOKEN to a token with write access."
                ) from error
            if status < 500 and status not in (408, 409, 429):
                raise StorageError(f"export.push_to_hub: the Hub refuses the upload of {name!r}: {error}") from error
            problem: Exception = error
        except Exception as error:
            if not _is_passing(error):
                raise
            problem = error
        if wait is None:
            raise StorageError(
                f"export.push_to_hub: the Hub stays out of reach ({type(problem).__name__}: {problem}). The export is "
                f"complete in {directory}; run the same command again: files that arrived are not sent twice."
            ) from problem
        sleep(wait)
    raise AssertionError("unreachable")


def _is_passing(error: Exception) -> bool:
    """Whether the network caused a failure. Classes go by name: the HTTP client's moved between releases."""
    cause: BaseException | None = error
    while cause is not None:
        named = any(kind.__name__ == "TransportError" for kind in type(cause).__mro__)
        if named or isinstance(cause, ConnectionError | TimeoutError):
            return True
        cause = cause.__cause__
    return False


def fetch_head(name: str, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """A local directory for `user/name` on the Hub (optionally `user/name@revision`), head files only.

    Raises: FormatError when the repository, revision or the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, tag = name.partition("@")

    def fetch(allowed: list[str], ignored: str | None) -> Path:
        return Path(
            snapshot_download(
                repo,
                revision=revision or tag or None,
                allow_patterns=allowed,
                ignore_patterns=ignored,
                cache_dir=cache_dir,
                endpoint=os.environ.get("HF_ENDPOINT") or None,
            )
        )

    try:
        directory = fetch(HEAD_FILES, IN_FOLDERS)
        if is_tuned(notes(directory).get("target")):
            fetch(ADAPTER_FILES, None)
        return directory
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FormatError(
            f"head {name!r}: neither a directory here nor a repository on the Hub that can be read "
            f"({in_one_line(error)}). Check the name and revision, or give a "
            "local directory."
        ) from error
