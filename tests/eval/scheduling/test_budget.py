"""The scheduler in the decode loop: answers stay the target's, whatever it chooses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from eval_help import Trained, run, tokens_of

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.scheduler import PLAIN
from headstart.eval.drafters import build_drafter
from headstart.eval.scheduling.budget import budget_for
from headstart.heads.targets.target import Target

WAYS = [
    ("eagle3", TreeConfig("chain", 5)), ("eagle3", TreeConfig("dynamic", 3, 3, 12)), ("dspark", TreeConfig("chain", 4)),
    ("medusa", TreeConfig("chain", 3)), ("medusa", TreeConfig("ddtree", 3, total_tokens=10)),
    ("hydra", TreeConfig("chain", 3)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tree"), WAYS)
def test_answers_are_the_targets(
    target: Target, plain: list[Answer], trained: Callable[[str], Trained], family: str, tree: TreeConfig
) -> None:
    drafter = build_drafter(trained(family).head, EvalConfig(tree=tree))
    assert drafter is not None
    scheduler = budget_for(drafter, tree)
    for _ in range(3):
        answers = run(target, drafter, scheduler=scheduler)
        assert tokens_of(answers) == tokens_of(plain)
    book = scheduler.book
    print(book.seconds, book.cycles, book.correction, [(s, book.drafts(s), book.rate(s)) for s in book.shapes])
    assert PLAIN in book.seconds and set(book.seconds) == set(book.shapes)
    assert sum(cycle.accepted for answer in answers for cycle in answer.cycles) > 0
