"""Records of a .json file that holds one list. Python's JSON decoder reads them one by one where the file is large."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

from headstart.data.records.messages import Where
from headstart.heads.errors import DataError

#: bytes that are read at once; more where a record is longer
CHUNK = 1 << 20
#: what may stand between two records
BLANK = re.compile(r"[ \t\r\n]*")

#: a chunk may end inside a number, up to so many characters before its next digit (e+5)
NUMBER_PART = 3


class _Window:
    """A part of a file's text.

    Attributes: start: where the next record begins in `text`. line: its line in the file, from 1.
    """

    def __init__(self, file: IO[bytes], where: Where, most: int):
        self._file, self.where, self._most = file, where, most
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.start, self.line, self.ended = "", 0, 1, False

    def more(self) -> None:
        """Read on: a chunk, or as much as is there already, so that a long record is decoded few times."""
        self.text, self.start = self.text[self.start :], 0
        self.require_short(len(self.text))
        raw = self._file.read(max(CHUNK, len(self.text)))
        self.ended = not raw
        try:
            self.text += self._decode.decode(raw, final=self.ended)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where}: not UTF-8 text ({error.reason}): save the file as UTF-8") from error

    def go_to(self, place: int) -> None:
        self.line += self.text.count("\n", self.start, place)
        self.start = place

    def next(self) -> str:
        """The first character that is not blank, "" at the end of the file; `start` is there."""
        while True:
            blank = BLANK.match(self.text, self.start)
            self.go_to(blank.end() if blank else self.start)
            if self.start < len(self.text) or self.ended:
                return self.text[self.start : self.start + 1]
            self.more()

    def require_short(self, length: int) -> None:
        if length > self._most:
            raise DataError(f"{self.where}:{self.line}: found a record of more than {self._most} characters")

    def refuse(self, found: str) -> DataError:
        return DataError(f"{self.where}:{self.line}: not valid JSON ({found}); one record per line belongs in .jsonl")


def stream_list(file: IO[bytes], where: Where, most: int) -> Iterator[tuple[object, str]]:
    """Every record of a file that holds a JSON list, and the text it was written as.

    Args: most: most characters of a record.
    Raises: DataError naming file and line: no list, not JSON, not UTF-8, or a record that is too long.
    """
    window, decoder = _Window(file, where, most), json.JSONDecoder()
    if window.next() != "[":
        raise DataError(f"{where}: expected a JSON list of records (one object per line belongs in .jsonl)")
    window.go_to(window.start + 1)
    first = True
    while (character := window.next()) != "]":
        if not character:
            raise window.refuse("the list does not end")
        if not first:
            if character != ",":
                raise window.refuse("expected a comma between records")
            window.go_to(window.start + 1)
            window.next()
        value, stop = _decode(window, decoder)
        window.require_short(stop - window.start)
        yield value, window.text[window.start : stop]
        window.go_to(stop)
        first = False
    window.go_to(window.start + 1)
    if window.next():
        raise window.refuse("text after the list")


def _decode(window: _Window, decoder: json.JSONDecoder) -> tuple[object, int]:
    while True:
        try:
            value, stop = decoder.raw_decode(window.text, window.start)
            if stop + NUMBER_PART <= len(window.text) or window.ended:
                return value, stop
        except json.JSONDecodeError as error:
            if window.ended:
                raise window.refuse(f"{error.msg} at character {error.pos - window.start} of the record") from error
        except RecursionError:
            raise DataError(f"{window.where}:{window.line}: JSON nested too deeply") from None
        except ValueError as error:  # an integer with thousands of digits
            raise window.refuse(str(error).split(":")[0]) from error
        window.more()
