"""What drafts say of themselves, recorded while they are decoded: against training's slots and against q."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, DRAFTING_HEADS, HEAD_TREES, NEW_TOKENS, Trained, run, tokens_of
from torch import Tensor

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer, Cycle, decode, slots_needed
from headstart.eval.decoding.drafter import ConfidentDrafter
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import DRAFTERS, Drafter, build_drafter
from headstart.eval.tree import Tree
from headstart.eval.tuning.calibration import calibrate
from headstart.eval.tuning.recording import (
    ConfidenceRecorder,
    asked_for_confidence,
    calibrate_drafter,
    most_cycles,
    record,
    task_after_task,
)
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.sampling import logit_of
from headstart.heads.targets.target import Target

Heads = Callable[[str], Trained]
CHAINS = [name for name, family in DRAFTING_HEADS.items() if "chain" in DRAFTERS[family].kinds]
#: heads with a confidence head, and heads that say q
SURE = [name for name in CHAINS if DRAFTING_HEADS[name] == "dspark" and "without confidence" not in name]
OTHERS = [name for name in CHAINS if name not in SURE]
#: heads whose captured cycles are compared with others
CAPTURED = [
    "dspark", "dspark, without confidence head, fill in", "dflash", "domino", "eagle3", "peagle", "medusa", "hydra",
]  # fmt: skip
DEPTH = 4


def drafter_of(head: Any, temperature: float = 0.0, **options: Any) -> Drafter:
    config = EvalConfig(tree=TreeConfig(kind="chain", depth=DEPTH, sample=temperature > 0), temperature=temperature)
    for name, value in options.items():
        setattr(config, name, value)
    return build_drafter(head, config)


def recorded(target: Target, drafter: Drafter, **options: Any) -> tuple[list[Answer], ConfidenceRecorder, str]:
    recorder = ConfidenceRecorder(len(CONTEXTS), NEW_TOKENS, drafter.max_nodes)
    with asked_for_confidence(drafter) as source:
        answers = run(target, drafter, scheduler=recorder, **options)
    return answers, recorder, source


@pytest.mark.parametrize("name", SURE)
def test_a_confidence_head_says_what_it_says_in_training(
    target: Target, trained: Heads, plain: list[Answer], name: str
) -> None:
    """Up to the first rejection, the tokens before a draft are the answer's, which training read too."""
    head, batch = trained(name).head, trained(name).batch
    answers, recorder, source = recorded(target, drafter_of(head))
    assert source == "confidence" and tokens_of(answers) == tokens_of(plain)
    outcomes = recorder.outcomes(answers)
    hidden_AKD, row_A = head.slots(batch), batch.anchors.row_A.tolist()
    depth_K = torch.arange(1, head.depth + 1)
    previous_AK = batch.tokens_R[(batch.anchors.row_A[:, None] + depth_K).clamp(max=len(batch.tokens_R) - 1)]
    expected_AK = head.confidence_logits(hidden_AKD, previous_AK).detach()
    n, begin, compared = 0, 0, 0
    for context, answer in zip(CONTEXTS, answers, strict=True):
        row = begin + len(context) - 1  # the row whose root is the answer's first token
        for cycle in answer.cycles:
            for k in range(min(cycle.accepted + 1, int(outcomes.judged_S[n]))):
                if row in row_A:
                    expected = float(expected_AK[row_A.index(row), k])
                    assert float(outcomes.logit_SK[n, k]) == pytest.approx(expected, abs=2e-4), (n, k)
                    compared += 1
            row += cycle.committed
            n += 1
        begin += len(context) + len(answer.tokens)
    assert n == len(outcomes.accepted_S) and compared > 40
    assert outcomes.logit_SK[outcomes.known_SK].std() > 0.05


def first_tree(target: Target, drafter: Drafter, sampling: Sampling, seed: int = 0) -> Tree:
    """The drafts behind CONTEXTS and three roots."""
    engine = Engine(target.model, len(CONTEXTS), slots_needed(max(map(len, CONTEXTS)), NEW_TOKENS, drafter))
    loop = Loop(engine, drafter, sampling, torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        loop.start(CONTEXTS, [NEW_TOKENS] * 3, [set()] * 3)
    return drafter.propose(torch.tensor([30, 7, 12]), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OTHERS)
def test_other_heads_say_their_probability_of_the_draft(target: Target, trained: Heads, name: str) -> None:
    """The most likely token's q, as a drafter that draws puts it into its tree. One that draws says the same."""
    head = trained(name).head
    drafter = drafter_of(head)
    assert isinstance(drafter, ConfidentDrafter) and first_tree(target, drafter, Sampling()).confidence_BN is None
    with asked_for_confidence(drafter) as source:
        tree = first_tree(target, drafter, Sampling())
    assert source == "draft_probability" and tree.confidence_BN is not None
    assert tree.confidence_BN.shape == tree.tokens_BN.shape and not drafter.says_confidence
    compared = set()
    drawing = drafter_of(head, 1.0)
    for seed in range(12):
        with asked_for_confidence(drawing):
            drawn = first_tree(target, drawing, Sampling(temperature=1.0), seed)
        assert drawn.q_BNV is not None and drawn.confidence_BN is not None
        best_BK = logit_of(drawn.q_BNV.amax(-1))
        torch.testing.assert_close(drawn.confidence_BN, best_BK, rtol=1e-5, atol=1e-5)
        for b in range(len(CONTEXTS)):
            for k in range(tree.nodes):
                assert float(tree.confidence_BN[b, k]) == pytest.approx(float(best_BK[b, k]), abs=2e-3), (b, k)
                compared.add(k)
                if drawn.tokens_BN[b, k] != tree.tokens_BN[b, k]:
                    break  # what follows is drafted behind another token
    assert len(compared) > 1


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("temperature", "penalty"), [(0.0, 1.0), (0.0, 1.4), (0.8, 1.0), (0.8, 1.4)])
def test_what_is_drafted_does_not_depend_on_the_question(
    target: Target, trained: Heads, name: str, temperature: float, penalty: float
) -> None:
    """With a repetition penalty, what is said is of the penalised logits, by which drafts are chosen."""
    head, sampling = trained(name).head, Sampling(temperature, repetition_penalty=penalty)
    drafter = drafter_of(head, temperature, repetition_penalty=penalty)
    silent = first_tree(target, drafter, sampling)
    with asked_for_confidence(drafter):
        tree = first_tree(target, drafter, sampling)
    assert silent.confidence_BN is None and tree.confidence_BN is not None
    assert torch.equal(silent.tokens_BN, tree.tokens_BN)
    assert (silent.q_BNV is None) == (tree.q_BNV is None) == (temperature == 0)
    assert tree.confidence_BN.dtype == torch.float32 and tree.confidence_BN.shape == tree.tokens_BN.shape
    if tree.q_BNV is not None and silent.q_BNV is not None:
        assert torch.equal(silent.q_BNV, tree.q_BNV)
    if name in OTHERS and penalty != 1.0 and temperature == 0:
        # a drafter that draws at temperature 1 makes the same distribution of the first draft
        drawn = first_tree(
            target, drafter_of(head, 1.0, repetition_penalty=penalty), Sampling(1.0, repetition_penalty=penalty)
        )
        assert drawn.q_BNV is not None
        expected_B = logit_of(drawn.q_BNV[:, 0].amax(-1))
        torch.testing.assert_close(tree.confidence_BN[:, 0], expected_B, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", [n for n, kind in HEAD_TREES if kind == "static"])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_nodes_of_a_static_tree_say_their_own_probability(
    target: Target, trained: Heads, name: str, penalty: float
) -> None:
    """Against a dynamic tree's or a tree over marginals' scores of the same nodes."""
    head, sampling = trained(name).head, Sampling(repetition_penalty=penalty)
    tree = TreeConfig(kind="static", depth=3, paths=[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])
    drafter = build_drafter(head, EvalConfig(tree=tree, repetition_penalty=penalty))
    silent = first_tree(target, drafter, sampling)
    with asked_for_confidence(drafter):
        asked = first_tree(target, drafter, sampling)
    assert silent.confidence_BN is None and torch.equal(silent.tokens_BN, asked.tokens_BN)
    assert asked.confidence_BN is not None and asked.confidence_BN.dtype == torch.float32
    kind = next(kind for kind in DRAFTERS[DRAFTING_HEADS[name]].kinds if kind in ("dynamic", "ddtree"))
    scored = TreeConfig(kind=kind, depth=3, k=6, total_tokens=50)
    other = first_tree(target, build_drafter(head, EvalConfig(tree=scored, repetition_penalty=penalty)), sampling)
    score_BN, compared = other.score_BN, 0
    assert score_BN is not None
    for b in range(len(CONTEXTS)):
        theirs = dict(zip(paths_of(other, b), range(other.nodes), strict=True))
        for n, path in enumerate(paths_of(asked, b)):
            if path in theirs:
                above = float(score_BN[b, theirs[path[:-1]]]) if path[:-1] else 0.0
                expected = logit_of((score_BN[b, theirs[path]] - above).exp())
                assert float(asked.confidence_BN[b, n]) == pytest.approx(float(expected), abs=1e-3)
                compared += 1
    assert compared > 12


def paths_of(tree: Tree, b: int) -> list[tuple[int, ...]]:
    """Tokens from the root to every node of a sequence."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens_BN[b].tolist(), tree.parent_BN[b].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@pytest.mark.parametrize("name", SURE)
def test_a_confidence_head_that_is_no_table_says_the_same(
    target: Target, trained: Heads, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = trained(name).head
    said = []
    for parts in (head.confidence_parts, None):
        monkeypatch.setattr(type(head), "confidence_parts", parts)
        drafter = drafter_of(head)
        with asked_for_confidence(drafter):
            said.append(first_tree(target, drafter, Sampling()).confidence_BN)
    assert said[0] is not None and said[0].std() > 0.01
    torch.testing.assert_close(said[0], said[1], rtol=1e-4, atol=1e-4)


def test_drawn_chains_are_recorded_by_their_largest_q(target: Target, trained: Heads) -> None:
    drafter, trees = drafter_of(trained("eagle3").head, 1.0), []

    class Listening(ConfidenceRecorder):
        def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
            trees.append(tree)
            return super().choose(tree, roots_B, active_B)

    recorder = Listening(len(CONTEXTS), NEW_TOKENS, drafter.max_nodes)
    with asked_for_confidence(drafter):
        answers = run(target, drafter, sampling=Sampling(temperature=1.0), scheduler=recorder)
    outcomes = recorder.outcomes(answers)
    n = 0
    for row, answer in enumerate(answers):
        for turn, _ in enumerate(answer.cycles):
            said = [float(logit_of(q_V.max())) for q_V in trees[turn].q_BNV[row]]
            assert outcomes.logit_SK[n].tolist() == pytest.approx(said, abs=1e-5)
            n += 1
    assert n == len(outcomes.accepted_S) > 10


def test_records_of_a_run_can_be_calibrated_and_batches_do_not_mix(target: Target, trained: Heads) -> None:
    drafter = drafter_of(trained("dspark").head)
    first, recorder, source = recorded(target, drafter)
    before = recorder.outcomes(first)
    with asked_for_confidence(drafter):
        again = run(target, drafter, scheduler=recorder)
    assert torch.equal(recorder.outcomes(again).logit_SK, before.logit_SK)
    found = calibrate(before, before, "temperature", source, "tiny")
    assert found.positions == DEPTH and sum(found.ece_after) < sum(found.ece_before)


def test_cut_cycles_know_only_what_was_accepted() -> None:
    recorder = ConfidenceRecorder(2, 3, 2)
    recorder.logit_TBK[:] = torch.arange(20.0).view(5, 2, 2)
    answers = [Answer(cycles=[Cycle(2, 1, 2), Cycle(2, 2, 2)]), Answer(cycles=[Cycle(2, 0, 1), Cycle(0, 0, 1)], row=1)]
    outcomes = recorder.outcomes(answers)
    assert outcomes.logit_SK.tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert outcomes.accepted_S.tolist() == [1, 2, 0, 0] and outcomes.judged_S.tolist() == [2, 2, 2, 0]
    one = recorder.outcomes([Answer(cycles=[Cycle(2, 1, 1)])])
    assert one.judged_S.tolist() == [1]
    later = recorder.outcomes([Answer(cycles=[Cycle(2, 1, 2)], row=1, before=3)])
    assert later.logit_SK.tolist() == [[14, 15]]
    with pytest.raises(ValueError, match="found 5 in the batch, 3 are recorded"):
        recorder.outcomes([Answer(cycles=[Cycle(2, 1, 2)], before=4)])


@pytest.mark.parametrize("name", ["dspark", "eagle3", "medusa"])
def test_rows_that_take_further_contexts_are_recorded(target: Target, trained: Heads, name: str) -> None:
    """Two rows for seven contexts of unequal answers record what every context records alone."""
    drafter = drafter_of(trained(name).head)
    contexts = [[*CONTEXTS[n % 3], n, 2 * n + 1] for n in range(7)]
    limits = [3, 17, 1, 9, 20, 2, 12]
    decoder = Decoder(target, EvalConfig())
    with asked_for_confidence(drafter):
        recorder = ConfidenceRecorder(2, most_cycles(limits, 2), drafter.max_nodes)
        answers = decoder.run(contexts, drafter, limits, 0, rows=2, scheduler=recorder).answers
        together = recorder.outcomes(answers)
        alone = []
        for context, limit in zip(contexts, limits, strict=True):
            recorder = ConfidenceRecorder(1, limit, drafter.max_nodes)
            alone.append(recorder.outcomes(decoder.run([context], drafter, [limit], 0, scheduler=recorder).answers))
    assert {answer.row for answer in answers} == {0, 1} and max(answer.before for answer in answers) > 3
    accepted_S, judged_S = torch.cat([o.accepted_S for o in alone]), torch.cat([o.judged_S for o in alone])
    assert len(accepted_S) > 25
    assert torch.equal(together.accepted_S, accepted_S) and torch.equal(together.judged_S, judged_S)
    torch.testing.assert_close(together.logit_SK, torch.cat([o.logit_SK for o in alone]), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_recorded_is_refused(target: Target, trained: Heads) -> None:
    head = trained("eagle3").head
    silent = drafter_of(head)  # nobody asked it
    with pytest.raises(ConfigError, match="does not say how sure it is"):
        run(target, silent, scheduler=ConfidenceRecorder(len(CONTEXTS), NEW_TOKENS, silent.max_nodes))
    tree = build_drafter(head, EvalConfig(tree=TreeConfig(kind="dynamic", depth=3, k=2, total_tokens=6)))
    with pytest.raises(ConfigError, match="found a tree, expected a chain"):
        run(target, tree, scheduler=ConfidenceRecorder(len(CONTEXTS), NEW_TOKENS, tree.max_nodes))


@pytest.mark.parametrize(
    ("name", "kind", "source"), [("dspark", "logistic", "confidence"), ("eagle3", "logistic", "draft_probability")]
)
def test_a_drafter_is_calibrated_on_every_other_prompt(
    target: Target, trained: Heads, name: str, kind: str, source: str
) -> None:
    drafter = drafter_of(trained(name).head)
    contexts = [[*CONTEXTS[n % 3], n, 2 * n + 1] for n in range(10)]
    decoder = Decoder(target, EvalConfig(max_new_tokens=20))
    # batches of 3 and 2 rows: 5 prompts to fit on, 5 to measure on
    found = calibrate_drafter(decoder, drafter, contexts, "tiny", rows=3)
    assert (found.kind, found.source, found.dataset, found.positions) == (kind, source, "tiny", DEPTH)
    with asked_for_confidence(drafter):
        fitted, measured = (record(decoder, drafter, part, 5, 0) for part in (contexts[::2], contexts[1::2]))
    same = calibrate(fitted, measured, kind, source, "tiny")
    assert found.num_samples == same.num_samples == len(measured.accepted_S)
    assert found.ece_after == pytest.approx(same.ece_after, abs=1e-3)
    assert not drafter.says_confidence  # type: ignore[union-attr]
    with pytest.raises(DataError, match="found 1 prompt, expected 2 or more"):
        calibrate_drafter(decoder, drafter, contexts[:1], "tiny")
    lossy = Decoder(target, EvalConfig(synthetic_acceptance=0.5))
    with pytest.raises(ConfigError, match="found lossy acceptance"):
        calibrate_drafter(lossy, drafter, contexts, "tiny")


@pytest.mark.parametrize("tasks", [["a", "b", "c", "d", "e", "f"] * 8, [t for t in "abcdef" for _ in range(8)]])
def test_every_other_context_is_of_all_tasks(tasks: list[str]) -> None:
    order = task_after_task(range(48), tasks)
    assert sorted(order) == list(range(48))
    for part in (order[::2], order[1::2]):
        assert Counter(tasks[n] for n in part) == dict.fromkeys("abcdef", 4)
    assert task_after_task([5, 3, 4], [None, None, None]) == [5, 3, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_cycles_record_what_others_do(
    target: Target, plain: list[Answer], trained: Heads, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, so that the second batch runs on the first one's graph; cycles without the question have their own."""
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    there = Target.from_model(copy.deepcopy(target.model).to("cuda"))
    head = copy.deepcopy(trained(name).head).to("cuda")
    head.bind(there.ends)
    drafter, graphs, generator = drafter_of(head), CycleGraphs(), torch.Generator("cuda")
    fused = FusedModel(there.model, attention_windows(there.model.config))
    engine = Engine(there.model, 3, slots_needed(max(map(len, CONTEXTS)), NEW_TOKENS, drafter), fused=fused)
    recorder = ConfidenceRecorder(3, NEW_TOKENS, drafter.max_nodes, "cuda")
    here, expected, _ = recorded(target, drafter_of(trained(name).head))
    wanted = expected.outcomes(here)
    decode(engine, CONTEXTS, drafter, Sampling(), NEW_TOKENS, set(), generator, graphs=graphs)
    for _ in range(2):
        with asked_for_confidence(drafter):
            answers = decode(
                engine, CONTEXTS, drafter, Sampling(), NEW_TOKENS, set(), generator, graphs=graphs, scheduler=recorder
            ).answers
        assert tokens_of(answers) == tokens_of(plain)
        found = recorder.outcomes(answers)
        assert torch.equal(found.accepted_S, wanted.accepted_S) and torch.equal(found.judged_S, wanted.judged_S)
        known_SK = wanted.known_SK
        torch.testing.assert_close(found.logit_SK[known_SK], wanted.logit_SK[known_SK], rtol=5e-3, atol=5e-3)
    assert len(graphs.captured) == 2
