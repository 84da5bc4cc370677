"""Makes text that others wrote (task names, server answers, file names) harmless for each place that shows it.

| shown in | by |
|---|---|
| a terminal | `plain`: control characters, which move the cursor or colour the screen, become visible |
| Markdown | `markdown` in text and table cells, `code` as an inline span, `fenced` as a block, `table_row` |
| JSON on a terminal | `in_json` |
| YAML | `yaml.safe_dump`, never string formatting |
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: control characters, halves of surrogate pairs, line and paragraph separators, marks that change the text's direction
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: characters with a meaning in Markdown, anywhere in a line; an underscore inside a word has none
_MARKS = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])|(?<=\w)@(?=\w)")
#: characters that begin a heading, a list or a rule at the start of a line
_OPENING = re.compile(r"^(\s*)([#+\-=])|^(\s*\d+)([.)])(?=\s|$)")
#: addresses that renderers turn into links by themselves
_LINK = re.compile(r"(https?|ftp):(?=//)|\b(www)\.", re.IGNORECASE)


def plain(text: str, keep: str = "\n\t") -> str:
    """`text` for a terminal: control characters as `\\x1b`, lone surrogates as `\\ud800`; those in `keep` stay."""
    return _HIDDEN.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], str(text))


def line(text: str) -> str:
    """`plain` on one line: line breaks are visible too."""
    return plain(text, keep="")


def in_json(text: str) -> str:
    """JSON text with escapes for characters that would disturb a terminal or cannot be encoded."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def markdown(text: str) -> str:
    """Markdown that shows `text` unchanged, on one line, without markup, HTML, links, images or table borders."""
    escaped = _MARKS.sub(lambda match: "\\" + match[0], line(text))
    escaped = _LINK.sub(lambda match: f"{match[1]}\\:" if match[1] else f"{match[2]}\\.", escaped)
    return _OPENING.sub(lambda f: f"{f[1]}\\{f[2]}" if f[2] else f"{f[3]}\\{f[4]}", escaped)


def code(text: str) -> str:
    """`text` as an inline code span, on one line."""
    shown = line(text)
    ticks = "`" * (_longest(shown) + 1)
    # a space keeps a first or last backtick apart from the span's own; an empty span cannot be written
    space = " " if not shown.strip() or "`" in (shown[0], shown[-1]) else ""
    return f"{ticks}{space}{shown}{space}{ticks}"


def fenced(text: str, language: str = "") -> str:
    """`text` as a code block with more backticks than the text has."""
    ticks = "`" * max(3, _longest(text) + 1)
    return f"{ticks}{language}\n{plain(text)}\n{ticks}"


def _longest(text: str) -> int:
    """Length of the longest run of backticks."""
    return max(map(len, re.findall(r"`+", text)), default=0)


def table_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table, each cell shown as it is."""
    return "| " + " | ".join(markdown(cell) for cell in cells) + " |"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [table_row(columns), "|" + "---|" * len(columns), *map(table_row, rows)]
