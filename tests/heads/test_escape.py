"""Text of others is shown as it is: it colours no screen, opens no link, ends no table and no block."""

from __future__ import annotations

import pytest

from headstart.heads.escape import code, fenced, line, markdown, plain, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\rb\x07\x9b2J", "a\\rb\\x07\\x9b2J"),
        ("two\nlines\t.", "two\nlines\t."),
        ("\u202eabc\u2066\u2028", "\\u202eabc\\u2066\\u2028"),
        ("half \ud83d of one", "half \\ud83d of one"),
        ("τ ÷ 漢字 🙂 é", "τ ÷ 漢字 🙂 é"),
    ],
)
def test_a_terminal_gets_no_control_characters(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert line(text) == shown.replace("\n", "\\n").replace("\t", "\\t")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mt_bench", "mt_bench"),
        ("_so_ __init__", "\\_so\\_ \\_\\_init\\_\\_"),
        ("a|b", "a\\|b"),
        ("![x](http://e.com/p.png)", "!\\[x\\](http\\://e.com/p.png)"),
        ("<img src=x onerror=1>&lt;", "\\<img src=x onerror=1\\>\\&lt;"),
        ("`rm`", "\\`rm\\`"),
        ("one\n\n# two", "one\\n\\n# two".replace("\\n", "\\\\n")),
        ("# heading", "\\# heading"),
        ("1. list", "1\\. list"),
        ("- list", "\\- list"),
        ("1.80× (1.72–1.88)", "1.80× (1.72–1.88)"),
        ("www.e.com", "www\\.e.com"),
        ("a@b.c", "a\\@b.c"),
    ],
)
def test_markdown_has_no_markup_of_its_own(text: str, shown: str) -> None:
    assert markdown(text) == shown


def test_markdown_renders_back_to_the_text() -> None:
    """Read by a parser of CommonMark, where one is installed (rich brings it)."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    hostile = ["a|b", "[x](y)", "![i](u)", "<b>x</b>", "*e* _f_", "`c`", "# h", "&amp;", "\\", "~~s~~", "1) x", "```"]
    tokens = parser.parse("\n".join(table(["name", "x"], [[text, "1"] for text in hostile])))
    cells = [token for token in tokens if token.type == "inline"]
    assert ["".join(part.content for part in cell.children) for cell in cells[2::2]] == hostile
    assert {part.type for cell in cells for part in cell.children} <= {"text", "text_special"}
    for text in hostile:
        (span,) = parser.parse(code(text))[1].children
        assert span.type == "code_inline" and span.content == text
        (block,) = parser.parse(fenced(f"{text}\n```\n</details>", "json"))
        assert block.type == "fence" and block.content == f"{text}\n```\n</details>\n"
