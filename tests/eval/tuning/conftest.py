"""Answers that are longer than what a test decodes."""

from __future__ import annotations

import pytest
from eval_help import run

from headstart.eval.decoding.decode import Answer
from headstart.heads.targets.target import Target


@pytest.fixture(scope="session")
def long_answers(target: Target) -> list[Answer]:
    # so that no path is cut by the end of the answer
    return run(target, None, max_new_tokens=26)
