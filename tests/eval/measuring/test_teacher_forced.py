"""Acceptance from one teacher-forced pass: equal to the decode loop's, and to what training calls a hit."""

from __future__ import annotations

import pytest
import torch
from eval_help import CONTEXTS, NEW_TOKENS, Trained

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer, Cycle, decode
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import build_drafter
from headstart.eval.measuring.benchmark import tau_probe
from headstart.eval.measuring.metrics import acceptance, bootstrap_tau
from headstart.eval.measuring.teacher_forced import teacher_forced_tau, walk
from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.targets.target import Target
from headstart.train.step import LossModule, SumNames


def items_of(answers: list[Answer]) -> list[tuple[list[int], list[int]]]:
    return [(context, answer.tokens) for context, answer in zip(CONTEXTS, answers, strict=True)]


def walked(head: Head, batch: FeatureBatch, sums_S: torch.Tensor) -> tuple[float, float]:
    """(tokens, cycles) of the chains that training walks: its last metric."""
    numerator_M, denominator_M = SumNames.of(head, len(batch.anchors.count_K)).fractions(sums_S)
    return float(numerator_M[-1]), float(denominator_M[-1])


@pytest.mark.parametrize("supervise_all", [False, True])
def test_conversations_in_a_pack_are_walked_turn_by_turn(
    target: Target, plain: list[Answer], eagle3: Trained, supervise_all: bool
) -> None:
    """Two turns of three conversations, among them answers of one and two tokens, against the loop turn by turn."""
    documents, answers, cycles, depth = [], [], [], 3
    for context, limits in zip(CONTEXTS, [(24, 1), (2, 14), (24, 5)], strict=True):
        tokens, turns = list(context), [-1] * len(context)
        for number, limit in enumerate(limits):
            drafter = build_drafter(eagle3.head, EvalConfig(tree=TreeConfig(depth=depth)))
            engine = Engine(target.model, 1, 128)
            (answer,) = decode(engine, [tokens], drafter, Sampling(), limit, set()).answers
            cycles += answer.cycles
            tokens, turns = tokens + answer.tokens, turns + [number] * limit
            if number == 0:
                tokens, turns = [*tokens, 5, 6, 7], turns + [-1] * 3
        answers.append(torch.tensor(turns))
        documents.append((torch.tensor(tokens), torch.zeros_like(answers[-1]) if supervise_all else answers[-1]))
    batch = FeatureBatch.pack(documents, max(depth, eagle3.head.depth), answers=answers if supervise_all else None)
    with torch.no_grad():
        sums_S = LossModule(eagle3.head, target.teacher, None, depth)(target.extract(batch, eagle3.head.spec))[1]
    assert walked(eagle3.head, batch, sums_S) == (23 + 0 + 1 + 13 + 23 + 4, len(cycles))
    assert sum(cycle.accepted for cycle in cycles) > 5


def test_probe_is_the_loop(target: Target, plain: list[Answer], eagle3: Trained) -> None:
    # the probe stops at the target's own stop tokens: this target has none
    assert target.stop_token_ids == ()
    expected = teacher_forced_tau(target, eagle3.head, items_of(plain), 4).tau
    assert tau_probe(target, eagle3.head, CONTEXTS, NEW_TOKENS, 4, batch_size=2) == pytest.approx(expected)


def test_walk_by_hand() -> None:
    # drafts after each root of [1, 2, 3, 4, 5, 6]
    drafts = [[2, 3], [9, 9], [9, 9], [5, 9], [9, 9]]
    assert walk([1, 2, 3, 4, 5, 6], drafts) == [Cycle(2, 2, 3), Cycle(2, 1, 2)]
    # the last cycle is cut by the end of the answer
    assert walk([1, 2, 3], [[2, 3], [9, 9]]) == [Cycle(2, 2, 2)]
    assert walk([1], []) == []


def test_acceptance_by_hand() -> None:
    found = acceptance([Cycle(3, 2, 3), Cycle(3, 0, 1), Cycle(0, 0, 1), Cycle(2, 2, 3)])
    assert found.tau == 2.0
    assert found.per_position == [2 / 3, 2 / 3, 0.0]
    assert found.per_position_conditional == [2 / 3, 1.0, 0.0]
    assert (found.forwards, found.tokens, found.drafts) == (4, 8, 3)
    assert acceptance([]).tau == 1.0
    assert acceptance([Cycle(2, 0, 1)]).per_position_conditional == [0.0, None]


def test_bootstrap_interval_holds_the_estimate() -> None:
    steady = [[Cycle(1, 1, 2)] * 10] * 5
    assert bootstrap_tau(steady, 0) == [2.0, 2.0]
    mixed = [[Cycle(1, 1, 2)] * 10, [Cycle(1, 0, 1)] * 20, [Cycle(1, 1, 2), Cycle(1, 0, 1)] * 5]
    low, high = bootstrap_tau(mixed, 0)
    tau = acceptance(cycle for row in mixed for cycle in row).tau
    assert 1.0 <= low < tau < high <= 2.0
    assert bootstrap_tau(mixed, 0) == [low, high]
    assert bootstrap_tau(mixed[:1], 0) is None
    assert bootstrap_tau([[], []], 0) == [1.0, 1.0]
    assert bootstrap_tau([[], [Cycle(2, 2, 3)]], 0) == [1.0, 3.0]
