"""What every head family promises about decoding: it drafts, and the answers are the target's own.

It runs over `FAMILIES`, their variants and `DRAFTERS`, and names none of them. Sampling is compared with the exact
distribution in decoding/test_distribution.py, over the families.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eval_help import DRAFTING_HEADS, HEAD_TREES, Trained, check_cycles, run, tokens_of, tree_of
from test_teacher_forced import items_of, walked

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.engine import attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import DRAFTERS, build_drafter
from headstart.eval.measuring.metrics import acceptance
from headstart.eval.measuring.teacher_forced import draft_everywhere, teacher_forced_cycles, teacher_forced_tau
from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.heads.targets.target import Target
from headstart.train.step import LossModule

Heads = Callable[[str], Trained]
each_tree = pytest.mark.parametrize(("name", "kind"), HEAD_TREES)
each_head = pytest.mark.parametrize("name", DRAFTING_HEADS)


def stops_of(plain: list[Answer]) -> list[set[int]]:
    return [{plain[0].tokens[17]}, set(), {plain[2].tokens[11]}]


def test_every_family_drafts_a_chain_and_refuses_trees_that_it_does_not_draft(trained: Heads) -> None:
    for family in FAMILIES:
        assert "chain" in DRAFTERS[family].kinds
        for kind in {kind for drafting in DRAFTERS.values() for kind in drafting.kinds} - {*DRAFTERS[family].kinds}:
            with pytest.raises(ConfigError, match=f"eval.tree.kind: {family} drafts a chain.*found '{kind}'"):
                build_drafter(trained(family).head, EvalConfig(tree=tree_of(kind)))


# greedy identity


@each_tree
def test_greedy_answers_are_the_plain_ones(
    target: Target, plain: list[Answer], trained: Heads, name: str, kind: str
) -> None:
    """In float32, token by token; the engine's own forward of the target gives the same cycles."""
    stops, drafter = stops_of(plain), build_drafter(trained(name).head, EvalConfig(tree=tree_of(kind)))
    answers = run(target, drafter, stops=stops)
    assert tokens_of(answers) == tokens_of(run(target, None, stops=stops))
    check_cycles(answers)
    accepted = sum(cycle.accepted for answer in answers for cycle in answer.cycles)
    rejected = sum(cycle.drafted - cycle.accepted for answer in answers for cycle in answer.cycles)
    # both outcomes occur, else the test shows little
    assert accepted > 5 and rejected > 2
    fused = FusedModel(target.model, attention_windows(target.model.config))
    drafter = build_drafter(trained(name).head, EvalConfig(tree=tree_of(kind)))
    again = run(target, drafter, stops=stops, fused=fused)
    assert [(a.tokens, a.cycles) for a in again] == [(a.tokens, a.cycles) for a in answers]


@each_tree
def test_greedy_answers_with_a_repetition_penalty(target: Target, trained: Heads, name: str, kind: str) -> None:
    config = EvalConfig(tree=tree_of(kind), repetition_penalty=1.3)
    sampling = Sampling.from_config(config)
    answers = run(target, build_drafter(trained(name).head, config), sampling=sampling)
    assert tokens_of(answers) == tokens_of(run(target, None, sampling=sampling))


# one pass over known answers says what the loop does


@each_head
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_known_answers_are_walked_as_the_loop_decodes_them(
    target: Target, plain: list[Answer], trained: Heads, name: str, depth: int
) -> None:
    """By evaluation (`draft_everywhere`), and by training, whose anchors may be deeper than the head is trained."""
    head = trained(name).head
    depth = min(depth, head.longest_chain or depth)
    stops = stops_of(plain)
    known = items_of(run(target, None, stops=stops))
    loop = run(target, build_drafter(head, EvalConfig(tree=TreeConfig(depth=depth))), stops=stops)
    expected = acceptance(cycle for answer in loop for cycle in answer.cycles)
    assert expected.tau > 1.2 or depth == 1 and expected.tau > 1
    if DRAFTERS[DRAFTING_HEADS[name]].draft_everywhere is not None:
        # small forwards: several groups of documents
        cycles = teacher_forced_cycles(target, head, known, depth, max_forward_tokens=64)
        assert cycles == [answer.cycles for answer in loop]
        assert teacher_forced_tau(target, head, known, depth) == expected
    documents = [
        (torch.tensor([*prompt, *answer]), torch.tensor([-1] * len(prompt) + [0] * len(answer)))
        for prompt, answer in known
    ]
    batch = target.extract(FeatureBatch.pack(documents, max(depth, head.depth), pad_to=120), head.spec)
    with torch.no_grad():
        if head.loss(batch, target.teacher).run_A is not None:
            sums_S = LossModule(head, target.teacher, None, depth)(batch)[1]
            assert walked(head, batch, sums_S) == (expected.tokens, expected.forwards)


@each_head
def test_serving_agrees_with_training(target: Target, plain: list[Answer], trained: Heads, name: str) -> None:
    """The loss counts rows whose depths 1 … d all hit; drafting from the same rows must hit exactly there."""
    head, items = trained(name).head, items_of(plain)
    with torch.no_grad():
        run_A = head.loss(trained(name).batch, target.teacher).run_A
    if run_A is None or DRAFTERS[DRAFTING_HEADS[name]].draft_everywhere is None:
        return
    prefix_K = [int((run_A >= d).sum()) for d in range(1, head.depth + 1)]
    drafts = draft_everywhere(target, head, items, head.depth)
    hits = [0] * head.depth
    for (_, answer), rows in zip(items, drafts, strict=True):
        for at, drafted in enumerate(rows):
            for depth in range(1, head.depth + 1):
                following = answer[at + 1 : at + 1 + depth]
                hits[depth - 1] += len(following) == depth and drafted[:depth] == following
    assert hits == prefix_K
    assert hits[0] > 5
