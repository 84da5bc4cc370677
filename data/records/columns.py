"""Column mapping: records of any form, by the names that their fields have in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.data.records.conversation import IDS, LAYOUTS
from headstart.data.records.messages import Where, kind, quote
from headstart.heads.errors import DataError

#: fields that a mapping may fill
FIELDS = (
    *LAYOUTS.values(), "completion", "input", "system", "tools", "functions", "chat_template_kwargs",
    "reasoning_content", "tool_calls", "finish_reason", "id", "task", "prompt_token_ids", "response_token_ids",
)  # fmt: skip


def map_columns(record: Any, columns: Mapping[str, str], where: Where) -> Any:
    """The record under the names that `columns` gives: our field → theirs.

    A name of theirs may lead into objects and lists: `request.body.0.text`. Fields by which a layout is recognised, and
    that the mapping does not name, are hidden: the mapping decides the layout. A field that is there without a value is
    left out.
    Raises: DataError naming the field that the record lacks.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {kind(record)}, expected an object with fields {', '.join(columns.values())}")
    made = {ours: _look_up(record, theirs, f"columns.{ours}", where) for ours, theirs in columns.items()}
    hidden = {*columns.values(), *FIELDS} - ({*IDS} - {*columns.values()})
    kept = {name: value for name, value in record.items() if name not in hidden}
    return {**kept, **{name: value for name, value in made.items() if value is not None}}


def _look_up(record: dict[str, Any], name: str, setting: str, where: Where) -> Any:
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif value is None and part != name:
            return None  # an object that is empty in this record
        else:
            names = ", ".join(quote(key) for key in list(record)[:20]) or "(none)"
            raise DataError(f"{where}: found fields {names}, expected {quote(name)}: correct {setting} of the source")
    return value
