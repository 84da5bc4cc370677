"""Finds images, video and audio in a record. Heads are trained on text: such a record is dropped, with this reason.

Its text alone would be another conversation, whose answers speak of what nobody shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headstart.heads.errors import first_names

#: beginning of a name, of a content part's type or of a record's field → what it holds
MEDIA = {"image": "images", "video": "video", "audio": "audio"}
#: fields of a record beside its messages that hold media (LLaVA, ShareGPT4V, datasets with a column of images)
FIELDS = {
    f"{name}{ending}": held for name, held in MEDIA.items() for ending in ("", "s", "_url", "_urls", "_path", "_paths")
}
#: where a question is only a placeholder and text (LLaVA), the field with the media may have been removed
PLACEHOLDERS = {f"<{name}>": held for name, held in MEDIA.items()}


def media_of_part(part: Any) -> str | None:
    """What a content part holds: "images", "video", "audio", or None for text and for what is unknown.

    Its `type` says so (`image`, `image_url`, `input_image`, …); without a type, the name of its only content does.
    """
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if isinstance(kind, str):
        stem = kind.lower().removeprefix("input_")
        return next((held for name, held in MEDIA.items() if stem == name or stem.startswith(f"{name}_")), None)
    given = [name for name, value in part.items() if not _empty(value)] if kind is None else []
    return next((FIELDS[name] for name in given if name in FIELDS), None) if "text" not in given else None


def media_of(record: Mapping[str, Any], messages: Iterable[Any]) -> str | None:
    """What a record holds beside text: in its fields, in the parts of its messages, or by a placeholder.

    Args: messages: as they stand in the record.
    """
    parts = (media_of_message(message) for message in messages if isinstance(message, dict))
    return _media_of_fields(record) or next((held for held in parts if held is not None), None)


def _media_of_fields(values: Mapping[str, Any]) -> str | None:
    if FIELDS.keys().isdisjoint(values):  # nearly all records and messages
        return None
    return next((held for name, held in FIELDS.items() if not _empty(values.get(name))), None)


def media_of_message(message: Mapping[str, Any]) -> str | None:
    """What a message holds in a field of its own, in the parts of its content, or by a placeholder."""
    if (held := _media_of_fields(message)) is not None:
        return held
    content = message.get("content")
    content = message.get("value") if content is None else content
    if isinstance(content, list):
        return next((held for part in content if (held := media_of_part(part)) is not None), None)
    if isinstance(content, str) and "<" in content:
        lines = content.strip().split("\n")
        return next((PLACEHOLDERS[x] for x in (lines[0], lines[-1]) if len(lines) > 1 and x in PLACEHOLDERS), None)
    return None


def _empty(value: Any) -> bool:
    if isinstance(value, str | list | tuple | dict):
        return not value or (isinstance(value, list) and all(item is None for item in value))
    return value is None


def dropped_for(media: str) -> str:
    """Why a record is dropped."""
    return f"the conversation holds {media}"


def file_and_line(where: str) -> str:
    """`FILE:LINE` of a record, without the folders."""
    return Path(where).name


def dropped_lines(dropped: Iterable[tuple[str, str]], places_too: bool = True) -> list[str]:
    """One line per kind of media: how many records were dropped, and the first of them.

    Args:
        dropped: what each of them holds, and its `where`.
        places_too: name the first of them; published reports name no file of the user's.
    """
    places: dict[str, list[str]] = {}
    for media, where in dropped:
        places.setdefault(media, []).append(file_and_line(where))
    return [
        f"dropped {len(names)}: {dropped_for(media)}" + (f" ({first_names(names)})" if places_too else "")
        for media, names in sorted(places.items())
    ]
