"""Answers that a file holds already, found by what was asked: prompts may have other ids and another order.

Every turn of a record holds the hash of its request (`answerer.request_hash`). A record whose first hash and later
questions are those of a prompt of this run is kept, under the id that the prompt has now. Any other moves to
`OUT.unasked.jsonl`: nothing is lost, and nothing is trained on that the prompts do not ask.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.data.distilling.answer_file import belongs_to, record_line
from headstart.data.features import Progress
from headstart.data.prompts import Prompt
from headstart.data.records.conversation import parse_record
from headstart.heads.counting import counted
from headstart.heads.files import atomic_write, explain_disk

#: field of a record's turn: the hash of its request
REQUEST_HASH = "request"


def unasked_of(out: Path) -> Path:
    """Where the records of `out` go that this run does not ask for."""
    return out.with_name(out.name + ".unasked.jsonl")


def adopt(out: Path, asked: Mapping[str, Sequence[tuple[str, Prompt]]], progress: Progress) -> None:
    """Leave in `out` only records that this run asks for, each under this run's id.

    A file with a record that was not made through servers stays as it is: whoever continues the file refuses it.

    Args: asked: hash of a first request → ids of the records that it begins, each with its prompt.
    """
    found = _read(out, asked) if out.exists() else None
    if found is None:
        return
    free = {key: [name for name, _ in several] for key, several in asked.items()}
    ids: list[str | None] = [None] * len(found)
    for keeps in (True, False):  # those that keep their ids choose first
        for place, (name, key) in enumerate(found):
            left = free.get(key or "", [])
            if ids[place] is None and (name in left if keeps else left):
                ids[place] = name if keeps else left[0]
                left.remove(str(ids[place]))
    unasked, renamed = ids.count(None), sum(new not in (None, old) for new, (old, _) in zip(ids, found, strict=True))
    if not unasked and not renamed:
        return

    def write(place: Path) -> None:
        aside = unasked_of(out) if unasked else os.devnull
        with open(out, "rb") as lines, open(place, "wb") as kept, open(aside, "ab") as others:
            for new, line in zip(ids, (line for line in lines if _whole(line)), strict=True):
                record = json.loads(line)
                (others if new is None else kept).write(record_line(record if new is None else {**record, "id": new}))

    with explain_disk(out):
        atomic_write(out, write)
    if renamed:
        progress(0, 0, f"{counted(renamed, 'answers')} in {out}: the prompt has another id now")
    if unasked:
        progress(0, 0, f"{counted(unasked, 'answers')} not asked for any more: moved to {unasked_of(out)}")


def _read(out: Path, asked: Mapping[str, Sequence[tuple[str, Prompt]]]) -> list[tuple[str, str | None]] | None:
    """Id and hash of every record; no hash where no prompt asks all of it. None: not all were made through servers."""
    found: list[tuple[str, str | None]] = []
    with open(out, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not _whole(line):
                continue
            record = json.loads(line)
            key = _first_request(record)
            if key is None:
                return None
            made = parse_record(record, f"{out}:{number}", str(number))
            prompt = next((prompt for _, prompt in asked.get(key, ())), None)
            found.append((made.id, key if prompt is not None and belongs_to(made, prompt) else None))
    return found


def _whole(line: bytes) -> bool:
    """Whether it holds a record: a last line that a kill has cut does not, and is dropped later."""
    return line.endswith(b"\n") and bool(line.strip())


def _first_request(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    first = [*(record.get("earlier_turns") or []), record][0]
    key = first.get(REQUEST_HASH) if isinstance(first, dict) else None
    return key if isinstance(key, str) else None
