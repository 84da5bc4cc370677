"""The chat template of a model that reads images, which may lie beside its tokenizer and not in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.heads.errors import TargetError
from headstart.heads.files import parse_json, read_bounded

FILE = "chat_template.json"
#: most bytes of a chat template; the longest have some tens of KiB
MAX_BYTES = 1 << 22


def processor_template(place: str, revision: str | None, local: bool) -> str | None:
    """The template in chat_template.json, where older processors of images and text keep it; None where there is none.

    Args: place, revision, local: as for `from_pretrained`.
    Raises: TargetError for a file that holds no template.
    """
    from transformers.utils import cached_file

    found = cached_file(
        place, FILE, revision=revision, local_files_only=local, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    if found is None:
        return None
    path = Path(found)
    content: Any = parse_json(read_bounded(path, MAX_BYTES).decode("utf-8", "replace"), str(path))
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise TargetError(f"{path}: found no text under chat_template, expected a Jinja template: copy the model again")
    return template
