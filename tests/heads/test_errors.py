"""Errors of libraries, as messages quote them."""

from __future__ import annotations

from headstart.heads.errors import first_line, in_one_line


def test_an_error_of_a_library_becomes_one_line() -> None:
    assert in_one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert in_one_line(OSError("  \n x" + "y" * 300), 4) == "OSError: xyyy…"


def test_an_error_without_a_message_is_named_by_its_kind() -> None:
    assert in_one_line(KeyError()) == first_line(KeyError()) == "KeyError"
    assert in_one_line(ValueError("\n")) == "ValueError"
