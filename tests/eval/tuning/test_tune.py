"""Costs and predicted speed-up by hand; a whole tuning of tiny heads; what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_help import Trained, memory_for_two_rows, word_tokenizer
from rich.console import Console

from headstart.eval.config import EvalConfig, TreeConfig, check_config
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import build_drafter
from headstart.eval.scheduling.throughput import ThroughputScheduler
from headstart.eval.tuning.choice import Scheduled, Trial, finalists, largest_like, overrides
from headstart.eval.tuning.costs import Costs, draft_points, extremes, forwards, measure_costs, measurements, node_count
from headstart.eval.tuning.profile import ChainProfile, DynamicProfile
from headstart.eval.tuning.ranks import NEVER
from headstart.eval.tuning.static import StaticProfile
from headstart.eval.tuning.tune import (
    Choice,
    Prediction,
    TuneConfig,
    Tuning,
    compared_trees,
    expected_speedup,
    predictions,
    tree_name,
    tune,
    typical_batch,
)
from headstart.eval.tuning.tune_report import tuning_markdown, tuning_table, tuning_text, write_tuning
from headstart.heads.errors import ConfigError
from headstart.heads.formats.choices import tuned_batches
from headstart.heads.targets.target import Target


@pytest.fixture(autouse=True)
def few_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle's time is measured on short answers: what it is does not matter here."""
    monkeypatch.setattr("headstart.eval.tuning.costs.CYCLE_TOKENS", 12)


def costs() -> Costs:
    """Milliseconds: plain 10; chains 11 + drafts of 1 and 3 levels; trees interpolated between 8 and 16 tokens."""
    return Costs(
        batch=1,
        context=64,
        plain_s=0.010,
        verify_s={"chain": {2: 0.011, 4: 0.012}, "tree": {8: 0.012, 16: 0.016}},
        draft_s={"chain": {1: 0.001, 3: 0.003}, "dynamic4": {1: 0.001, 5: 0.009}},
        rest_s={"chain": {1: 0.0005, 3: 0.0007}, "dynamic": {7: 0.001, 15: 0.002}},
    )


def test_cycle_by_hand() -> None:
    assert costs().cycle_s(TreeConfig("chain", 1)) == pytest.approx(0.0125)
    # a chain of 2: verify 11.5, draft 2, rest 0.6
    assert costs().cycle_s(TreeConfig("chain", 2)) == pytest.approx(0.0141)
    # 11 nodes, 12 tokens in the forward: verify 14; four levels: draft 7; rest 1.5
    assert costs().cycle_s(TreeConfig("dynamic", 4, 4, 12)) == pytest.approx(0.0225)
    # beyond what was measured the nearest holds
    assert costs().cycle_s(TreeConfig("chain", 9)) == pytest.approx(0.012 + 0.003 + 0.0007)
    assert costs().to_json()["draft_ms"]["dynamic4"] == {"1": pytest.approx(1.0), "5": pytest.approx(9.0)}
    # drafting of a static tree goes by its nodes: verify 10 tokens 13, draft 9 nodes 4, rest 2
    with_static = costs()
    with_static.draft_s["static"], with_static.rest_s["static"] = {7: 0.003, 11: 0.005}, {7: 0.002}
    tree = TreeConfig("static", 2, total_tokens=10, paths=[[rank] for rank in range(9)])
    assert with_static.cycle_s(tree) == pytest.approx(0.013 + 0.004 + 0.002)


def test_expected_speedup_by_hand() -> None:
    """Accepted 0, 1, 3, 3 drafts: τ 1.75 with a chain of 1, 2.25 with 2, 2.75 with 3, at cycles of 12.5, 14.1, 15.7."""
    profile = ChainProfile(np.array([0, 1, 3, 3]))
    for depth, expected in ((1, 1.75 * 10 / 12.5), (2, 2.25 * 10 / 14.1), (3, 2.75 * 10 / 15.7)):
        tree = TreeConfig("chain", depth)
        assert expected_speedup(profile.tau(tree), costs(), tree) == pytest.approx(expected)
    ranked = predictions({"chain": profile}, costs(), [TreeConfig("chain", depth) for depth in (1, 2, 3)])
    assert [prediction.tree.depth for prediction in ranked] == [3, 2, 1]
    never = ChainProfile(np.zeros(4, dtype=np.int64))
    assert predictions({"chain": never}, costs(), [TreeConfig("chain", 1)])[0].speedup == pytest.approx(10 / 12.5)


def test_nodes() -> None:
    assert node_count(TreeConfig("chain", 3)) == 3
    # 4 candidates at level 1, 16 more at every level
    assert node_count(TreeConfig("dynamic", 1, 4, 60)) == 4
    assert node_count(TreeConfig("dynamic", 2, 4, 60)) == 20
    assert node_count(TreeConfig("dynamic", 9, 4, 60)) == 59
    assert node_count(TreeConfig("static", 2, total_tokens=4, paths=[[0], [0, 0], [1], [0, 0, 0], [0, 1]])) == 3
    assert node_count(TreeConfig("static", 4, total_tokens=60)) == 59


def test_what_is_measured() -> None:
    trees = [TreeConfig("chain", depth) for depth in (1, 2, 3)]
    trees += [TreeConfig("dynamic", depth, 4, total) for depth in (2, 3, 4, 5) for total in (8, 16)]
    assert forwards(trees) == [("chain", 2), ("chain", 3), ("chain", 4), ("tree", 8), ("tree", 16)]
    assert [(t.kind, node_count(t)) for t in extremes(trees)] == [
        ("chain", 1), ("chain", 3), ("dynamic", 7), ("dynamic", 15),
    ]  # fmt: skip
    assert [(t.kind, t.depth) for t in draft_points(trees)] == [
        ("chain", 1), ("chain", 2), ("chain", 3), ("dynamic", 2), ("dynamic", 4), ("dynamic", 5),
    ]  # fmt: skip
    assert measurements(trees) == 1 + 6 + 5 + 4
    # static trees may have any shape: drafting is timed at every size, up to as many as forwards are
    paths = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [3], [4], [5], [6], [7], [8], [9]]
    static = [TreeConfig("static", 3, total_tokens=n + 1, paths=paths[:n]) for n in (2, 5, 8)]
    assert [node_count(t) for t in draft_points(static)] == [2, 5, 8]
    many = [TreeConfig("static", 3, total_tokens=n + 1, paths=paths[:n]) for n in range(1, 15)]
    assert [node_count(t) for t in draft_points(many)] == [1, 3, 5, 7, 10, 12, 14]
    long = [TreeConfig("chain", depth) for depth in range(1, 14)]
    assert forwards(long) == [("chain", n) for n in (2, 4, 6, 8, 10, 12, 14)]


def test_compared_trees_are_all_different() -> None:
    static = StaticProfile(np.array([[0, 0], [1, 0], [0, 1], [0, 0]]))
    trees = compared_trees(
        {"chain": ChainProfile(np.array([1])), "static": static}, TuneConfig(depth=2, total_tokens=[3, 4, 60])
    )
    assert [tree_name(tree) for tree in trees] == ["chain1", "chain2", "static n2", "static n3", "static n6"]
    assert trees[2].paths == [[0], [0, 0]] and trees[2].depth == 2
    # (1, 1) was never right, but both of its ranks were
    assert trees[4].paths is not None and sorted(trees[4].paths)[-1] == [1, 1]
    for tree in trees:
        check_config(EvalConfig(tree=tree))
    dynamic: Any = {"chain": ChainProfile(np.array([1])), "dynamic2": None}
    search = TuneConfig(depth=3, k=[2], total_tokens=[4, 8, 60])
    names = [tree_name(tree) for tree in compared_trees(dynamic, search)]
    assert names[3:] == [
        "dynamic k2 d1 n2",
        *("dynamic k2 d2 n3", "dynamic k2 d2 n6"),
        *("dynamic k2 d3 n3", "dynamic k2 d3 n7", "dynamic k2 d3 n10"),
    ]


@pytest.mark.parametrize(
    ("verify_ms", "best"), [({1: 10, 60: 10}, 59), ({1: 10, 8: 10, 16: 10.5, 60: 30}, 15), ({1: 10, 60: 900}, 3)]
)
def test_the_budget_of_a_tree_over_marginals_follows_the_cost_of_verification(
    verify_ms: dict[int, float], best: int
) -> None:
    """Flat costs take every node; where verification grows steeply, fewer nodes gain more. All have all levels."""
    search = TuneConfig(depth=4, total_tokens=[4, 8, 16, 32, 60])
    # ranks of the accepted nodes of four cycles among all nodes, best score first
    path_ranks = [[0, 2, 12], [0, NEVER, NEVER], [1, 5, 40], [0, 6, NEVER]]
    rank_CKK = np.full((4, 4, 4), NEVER)
    for cycle, ranks in enumerate(path_ranks):
        for level, rank in enumerate(ranks):
            rank_CKK[cycle, level, level:] = rank
    profiles: dict[str, Any] = {"chain": ChainProfile(np.zeros(4, dtype=np.int64)), "ddtree": DynamicProfile(rank_CKK)}
    trees = compared_trees(profiles, search)
    assert [tree_name(tree) for tree in trees[4:]] == [f"ddtree d4 n{n}" for n in (3, 7, 15, 31, 59)]
    for tree in trees:
        check_config(EvalConfig(tree=tree))
    taus = [profiles["ddtree"].tau(tree) for tree in trees[4:]]
    assert taus == [1 + n / 4 for n in (5, 7, 8, 8, 9)]
    measured = costs()
    measured.verify_s["tree"] = {tokens: ms / 1e3 for tokens, ms in verify_ms.items()}
    measured.draft_s["ddtree"], measured.rest_s["ddtree"] = {3: 0.001, 59: 0.001}, {3: 0.001, 59: 0.001}
    # what the sizes gain, by hand
    for tree, tau in zip(trees[4:], taus, strict=True):
        tokens = tree.total_tokens
        seconds = np.interp(tokens, list(verify_ms), list(verify_ms.values())) / 1e3 + 0.002
        assert expected_speedup(tau, measured, tree) == pytest.approx(tau * 0.010 / seconds)
    chosen = predictions(profiles, measured, trees[4:])[0].tree
    assert node_count(chosen) == best and chosen.depth == 4
    assert draft_points(trees[4:]) == [trees[4], trees[6], trees[8]]
    assert forwards(trees[4:]) == [("tree", n) for n in (4, 8, 16, 32, 60)]
    assert overrides(chosen).startswith("eval.tree.kind=ddtree eval.tree.depth=4")


def test_the_best_chain_is_among_the_finalists() -> None:
    trees = [Prediction(TreeConfig("dynamic", depth, 4, 60), 2.0, 3.0 - depth / 10) for depth in range(1, 6)]
    chains = [Prediction(TreeConfig("chain", depth), 2.0, 1.5 - depth / 10) for depth in (1, 2)]
    assert finalists(trees + chains) == [*trees[:3], chains[0]]
    assert finalists([*trees[:2], *chains]) == [*trees[:2], chains[0]]
    assert finalists(trees) == trees[:3] and finalists(chains) == chains


def test_costs_are_of_a_typical_batch() -> None:
    contexts = [[7] * length for length in (4000, *(100,) * 6, 4000)]
    assert [len(context) for context in typical_batch(contexts, 1)] == [1075]
    # of four batches of two, two hold a long context; of three of three, two do
    assert [sorted(map(len, typical_batch(contexts, batch))) for batch in (2, 3)] == [[100, 4000], [100, 100, 4000]]
    contexts[-1] = [7] * 100
    assert [len(context) for context in typical_batch(contexts, 2)] == [100, 100]
    assert [len(context) for context in typical_batch(contexts[:2], 3)] == [4000, 100, 4000]


def test_costs_are_measured_where_answers_stop_at_once(target: Target, monkeypatch: Any) -> None:
    """Contexts are not real answers, so the target may stop anywhere in them."""
    decoder = Decoder(target, EvalConfig())
    monkeypatch.setattr(target, "stop_token_ids", tuple(range(target.dims.vocab_size)))
    assert decoder.run([[5, 7, 11]], None, 8, seed=0).cycle_s == []
    tree = TreeConfig("chain", 2)

    def build(tree: TreeConfig) -> Any:
        return build_drafter(None, EvalConfig(drafter="ngram", tree=tree))

    found = measure_costs(decoder, build, [tree], [[5, 7, 11]], repeats=1)
    assert found.plain_s > 0 and found.cycle_s(tree) > 0


def test_a_choice_says_whether_to_speculate_and_whether_it_was_right() -> None:
    def choice(predicted: float, measured: float) -> Choice:
        best = Prediction(TreeConfig("chain", 2), 2.0, predicted)
        return Choice(costs(), best, best, {"row_speedup": measured, "tau": 2.0})

    assert choice(1.5, 1.45).speculate and choice(1.5, 1.45).agrees
    assert not choice(1.5, 1.3).agrees
    assert not choice(0.9, 0.95).speculate
    # what is measured decides
    assert choice(0.95, 1.05).speculate
    assert not choice(1.05, 0.97).speculate
    tuning = Tuning("eagle3", {}, {"path": "x"}, "card", "bfloat16", 0.0, 64, 4, {}, {}, [choice(1.5, 1.45)])
    entry = tuning.entry()
    assert entry["device"] == "card" and entry["batches"]["1"]["tree"]["depth"] == 2
    assert entry["batches"]["1"]["label"] == "chain2"
    assert entry["batches"]["1"]["best_chain"]["tree"]["depth"] == 2
    json.dumps(tuning.to_json())


def test_the_largest_tree_of_a_kind() -> None:
    trees = [TreeConfig("chain", depth) for depth in (1, 2, 3)]
    trees += [TreeConfig("dynamic", depth, k, total) for k in (2, 4) for depth in (2, 3, 4) for total in (4, 8)]
    assert largest_like(trees[0], trees) == trees[2]
    # k belongs to the kind; of trees with as many nodes, the deepest
    assert largest_like(TreeConfig("dynamic", 2, 2, 4), trees) == TreeConfig("dynamic", 4, 2, 8)
    static = [TreeConfig("static", 2, total_tokens=n, paths=[[0], [1], [0, 0]][: n - 1]) for n in (2, 4, 3)]
    assert largest_like(static[0], trees + static) == static[1]


def test_what_the_scheduler_gains_is_told(tmp_path: Path) -> None:
    best = Prediction(TreeConfig("chain", 2), 2.0, 1.25)
    chosen = Choice(costs(), best, best, {"row_speedup": 1.25, "tau": 2.0})
    tuning = Tuning("eagle3", {"name": "T"}, {"path": "x"}, "card", "bfloat16", 0.0, 64, 4, {}, {}, [chosen])
    assert tuning.entry()["batches"]["1"]["scheduled"] is None and chosen.to_json()["scheduled"] is None
    assert "| 2.00 | – | speculate |" in tuning_markdown(tuning) and "scheduled =" not in tuning_text(tuning)
    chosen.scheduled = Scheduled(TreeConfig("chain", 7), {"row_speedup": 1.5, "tau": 2.25}, 1.25, 3.5)
    shown, kept = chosen.to_json()["scheduled"], tuning.entry()["batches"]["1"]["scheduled"]
    assert (shown["measured_speedup"], shown["against_fixed"], shown["measured_tau"]) == (1.5, 1.2, 2.25)
    assert shown["overrides"] == "eval.scheduler=true eval.tree.depth=7" and shown["measured"]["tau"] == 2.25
    assert kept == {name: shown[name] for name in kept} and kept["tree"] == vars(TreeConfig("chain", 7))
    assert (kept["label"], kept["verified_per_cycle"]) == ("chain7", 3.5)
    # readers of the sidecar find what they look for
    (read,) = tuned_batches({"tuned": {"card": json.loads(json.dumps(tuning.entry()))}})
    assert (read.label, read.measured, read.chain) == ("chain2", 1.25, 2)
    assert "| 2.00 | 1.50× (1.20) | speculate |" in tuning_markdown(tuning)
    said = tuning_text(tuning)
    assert "scheduled = measured with the scheduler" in said
    assert said.endswith("batch 1: eval.tree.depth=2\nbatch 1, faster: eval.scheduler=true eval.tree.depth=7")
    printed = io.StringIO()
    Console(file=printed, width=200).print(tuning_table(tuning))
    assert "1.50× (1.20)" in printed.getvalue()
    write_tuning(tuning, tmp_path)
    assert json.loads((tmp_path / "tune.json").read_text())["choices"][0]["scheduled"] == shown
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


CALIBRATED = TreeConfig("static", 2, total_tokens=4, paths=[[0], [1], [0, 0]])
PUBLISHED = TreeConfig("static", 2, total_tokens=64)


@pytest.mark.parametrize(
    ("speedups", "kept"),
    [
        ({"chain": 1.5, "static": 1.4, "published": 1.3}, "chain2"),
        # as predicted
        ({"static": 1.4, "published": 1.3}, "static n3"),
        # the measurement tells otherwise
        ({"static": 1.3, "published": 1.4}, "published n38"),
        ({"chain": 1.2, "static": 1.4, "published": 1.3}, "static n3"),
    ],
)
def test_the_faster_tree_by_measurement_is_kept(speedups: dict[str, float], kept: str) -> None:
    trees = {"chain": TreeConfig("chain", 2), "static": CALIBRATED, "published": PUBLISHED}
    trials = [
        Trial(Prediction(trees[name], 2.0 - n / 10, 1.6 - n / 10), {"row_speedup": speedup, "tau": 1.9})
        for n, (name, speedup) in enumerate(speedups.items())
    ]
    refined = [trial.prediction for trial in trials]
    timed = costs()
    timed.draft_s["static"], timed.rest_s["static"] = {3: 0.001, 38: 0.002}, {3: 0.001, 38: 0.001}
    choice = Choice.of(timed, refined, trials)
    assert tree_name(choice.best.tree) == kept and choice.measured_speedup == max(speedups.values())
    assert choice.calibrated is not None and choice.calibrated.measured_speedup == speedups["static"]
    assert choice.published is not None and choice.published.measured_speedup == speedups["published"]
    shown = choice.to_json()
    assert shown["tree"] == {**vars(choice.best.tree)} and shown["published"]["nodes"] == 38
    tuning = Tuning(
        "drafts", {"name": "target"}, {"path": "x"}, "card", "bfloat16", 0.0, 64, 4, {}, {}, [choice],
        rank_accuracy=[{"head": 1, "positions": 7, "top": [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]}],
        static_trees=[{"name": "static n3", "nodes": 3, "levels": 2, "tau": 1.5, "by_path": 1.4, "by_head": 1.3}],
        notes=["the published tree is cut"],
    )  # fmt: skip
    said = tuning_text(tuning)
    passed = f"batch 1: {kept} is kept, measured 1.40×; {tree_name(refined[0].tree)}, the best by prediction, measured"
    assert (passed in said) == (choice.best is not refined[0]) == (choice.passed_over is not None)
    text = tuning_markdown(tuning)
    # side by side: nodes, levels, τ predicted and measured, speed-up predicted and measured
    last = len(trials) - 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert [row for row in rows if row[1:2] == ["published n38"]] == [
        ["1", "published n38", "38", "2", f"{2.0 - last / 10:.2f}", "1.90", f"{1.6 - last / 10:.2f}×",
         f"{speedups['published']:.2f}×" + ("" if trials[-1].agrees else " !"), "kept" if kept[0] == "p" else ""]
    ]  # fmt: skip
    assert ["1", "7", "0.500", "0.600", "0.700", "0.800", "0.900"] in rows
    assert ["static n3", "3", "2", "1.50", "1.40", "1.30"] in rows
    assert "the published tree is cut" in said and "the published tree is cut" in text
    printed = io.StringIO()
    Console(file=printed, width=200).print(tuning_table(tuning))
    assert "published n38" in printed.getvalue() and "static n3" in printed.getvalue()


def settings(prompts: str, **changes: Any) -> EvalConfig:
    return EvalConfig(data=prompts, max_new_tokens=12, warmup_tokens=0, **changes)


SMALL = {"batch_sizes": [2], "depth": 2, "k": [2], "total_tokens": [4, 6], "prompts": 2, "repeats": 1}


def test_costs_are_of_contexts_as_long_as_the_prompts_are(target: Target, tmp_path: Path, monkeypatch: Any) -> None:
    """A batch waits for its longest row, so a batch of equal ones would not cost the same."""
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [7] * length}) + "\n" for length in (5, 40)))
    lengths: dict[int, list[int]] = {}

    def watched(decoder: Any, build: Any, trees: Any, contexts: list[list[int]], *rest: Any) -> Costs:
        lengths[len(contexts)] = [len(context) for context in contexts]
        return measure_costs(decoder, build, trees, contexts, *rest)

    monkeypatch.setattr("headstart.eval.tuning.tune.measure_costs", watched)
    search = TuneConfig(batch_sizes=[1, 3], depth=1, prompts=2, repeats=1)
    found = tune(target, None, settings(str(path), drafter="ngram"), search)
    # answers of 12 tokens: halfway through them 11 and 46 tokens stand in front
    assert lengths == {1: [28], 3: [11, 46, 11]} and found.context == 28
    assert [choice.costs.context for choice in found.choices] == [28, 23]


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_a_whole_tuning(target: Target, family: str, prompts: str, request: pytest.FixtureRequest) -> None:
    trained: Trained = request.getfixturevalue(family)
    steps: list[tuple[int, int, str]] = []
    found = tune(target, trained.head, settings(prompts), TuneConfig(**SMALL), lambda *step: steps.append(step))
    (choice,) = found.choices
    assert (choice.costs.batch, choice.costs.context) == (2, found.context)
    assert found.prompts == 2 and found.data["path"] == prompts
    # the prediction is what the parts give, and τ what the loop gives
    best = choice.best
    assert best.speedup == pytest.approx(best.tau * choice.costs.plain_s / choice.costs.cycle_s(best.tree))
    # four times as many rows as there are places: one that ends gives its place to the next
    assert choice.measured["rows"] == 8 and choice.measured_speedup > 0
    # the same prompts, so the same τ as in the run that is timed
    assert best.tau == pytest.approx(choice.measured["tau"])
    by_profile = sorted(
        found.taus[tree_name(t)] * choice.costs.plain_s / choice.costs.cycle_s(t) for t in trees_of(found, trained)
    )
    assert found.taus[tree_name(best.tree)] * choice.costs.plain_s / choice.costs.cycle_s(best.tree) in by_profile[-3:]
    assert steps[-1][0] == steps[-1][1] and steps[-1][2] == "done"
    # every step was counted: the total never grew
    (total,) = {total for _, total, what in steps if what.startswith(("costs", "decoding"))}
    # the scheduler's run is one of them; static trees may be measured fewer times than there are kinds
    assert total == steps[-1][1] or family == "medusa"
    check_static(found, family)
    # the same prompts with the scheduler
    scheduled = choice.scheduled
    assert scheduled is not None and scheduled.measured["rows"] == 8
    assert not any("sched" in note for note in found.notes)
    assert scheduled.tree == largest_like(best.tree, trees_of(found, trained)) or best.tree.kind == "static"
    assert scheduled.measured_speedup > 0 and 1 <= scheduled.measured["tau"] <= SMALL["depth"] + 1
    assert scheduled.against_fixed == scheduled.measured_speedup / choice.measured_speedup
    spent = scheduled.verified_per_cycle
    assert spent is not None and 1 <= spent <= node_count(scheduled.tree) + 1
    # engines draft as many as the head has, so the calibration is of all, whatever depth was searched
    assert found.calibration is not None, found.notes
    assert found.calibration.positions == (trained.head.longest_chain or SMALL["depth"])
    assert set(found.cycles) == {"chain", *(["dynamic2"] if family == "eagle3" else ["static", "ddtree"])}
    json.dumps(found.to_json())


def check_static(found: Tuning, family: str) -> None:
    """Calibrated trees of all sizes and the published one, which was decoded with as well."""
    (choice,) = found.choices
    fitted = found.calibration
    assert fitted is not None and fitted.kind == "logistic" and fitted.source == "draft_probability"
    assert found.to_json()["calibration"]["biases"] == fitted.biases
    if family == "eagle3":
        assert not found.static_trees and choice.published is choice.calibrated is None
        return
    names = [tree["name"] for tree in found.static_trees]
    assert names == ["static n3", "static n5", "static n38", "published n38"]
    assert choice.calibrated is not None and choice.published is not None
    for trial in (choice.calibrated, choice.published):
        # decoded on the same prompts, so with the τ of its own run
        assert trial.prediction.tau == pytest.approx(trial.measured["tau"]) and trial.measured["rows"] == 8
        assert choice.measured_speedup >= trial.measured_speedup
    assert [head["head"] for head in found.rank_accuracy] == [1, 2]
    # at the end of an answer the second head has no token to be compared with
    first, second = (head["positions"] for head in found.rank_accuracy)
    assert 0 < second <= first == found.cycles["static"]
    for tree in found.static_trees:
        assert tree["nodes"] == len(tree["paths"]) and found.taus[tree["name"]] == tree["tau"] >= 1
    assert found.static_trees[2]["by_path"] >= found.static_trees[3]["by_path"] - 1e-9
    assert "2 are drafted: its 38 nodes" in found.notes[0] and found.notes[0] in tuning_text(found)


def trees_of(found: Tuning, trained: Trained) -> list[TreeConfig]:
    """Candidates whose kind and sizes their names tell (static trees are found in another test)."""
    trees = []
    for name in found.taus:
        parts = name.split(" ")
        if name.startswith("chain"):
            trees.append(TreeConfig("chain", int(name.removeprefix("chain"))))
        elif parts[0] == "dynamic":
            k, depth, nodes = (int(part[1:]) for part in parts[1:])
            trees.append(TreeConfig("dynamic", depth, k, nodes + 1))
        elif parts[0] == "ddtree":
            depth, nodes = (int(part[1:]) for part in parts[1:])
            trees.append(TreeConfig("ddtree", depth, total_tokens=nodes + 1))
        elif found.choices[0].best.tree.kind == "static" and name == tree_name(found.choices[0].best.tree):
            trees.append(found.choices[0].best.tree)
    return trees


def test_batches_beyond_the_memory_are_left_out(target: Target, prompts: str, monkeypatch: Any) -> None:
    memory_for_two_rows(monkeypatch)
    search = TuneConfig(batch_sizes=[4, 1], depth=1, prompts=2, repeats=1)
    said: list[str] = []
    found = tune(target, None, settings(prompts, drafter="ngram"), search, lambda *step: said.append(step[2]))
    assert [choice.costs.batch for choice in found.choices] == [1]
    assert any("batch 4 does not fit into memory" in line for line in said)


def test_a_scheduler_that_does_not_fit_leaves_the_rest(
    target: Target, eagle3: Trained, prompts: str, monkeypatch: Any
) -> None:
    original = Decoder.run

    def run(self: Decoder, *given: Any, **options: Any) -> Any:
        if isinstance(options.get("scheduler"), ThroughputScheduler):
            raise torch.OutOfMemoryError("no more")
        return original(self, *given, **options)

    monkeypatch.setattr(Decoder, "run", run)
    search = TuneConfig(batch_sizes=[1], depth=1, k=[2], total_tokens=[3], prompts=2, repeats=1)
    found = tune(target, eagle3.head, settings(prompts), search)
    (choice,) = found.choices
    assert choice.measured_speedup > 0 and choice.scheduled is None
    assert "batch 1: the scheduler's cycles do not fit into memory" in found.notes


def test_prompts_that_the_template_refuses_are_told(target: Target, tmp_path: Path, monkeypatch: Any) -> None:
    tokenizer = word_tokenizer()
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    monkeypatch.setattr(target, "tokenizer", tokenizer)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w5 w6 w5 w6"}\n{"id": "odd", "prompt": "w5", "system": "w7"}\n')
    search = TuneConfig(batch_sizes=[1], depth=1, prompts=2, repeats=1)
    said: list[str] = []
    found = tune(target, None, settings(str(path), drafter="ngram"), search, lambda *step: said.append(step[2]))
    assert found.prompts == 1 and "dropped 1 prompt: the chat template refuses it: no system (odd)" in said


def test_prompt_lookup_is_tuned_without_a_head(target: Target, prompts: str) -> None:
    search = TuneConfig(batch_sizes=[1], depth=2, prompts=2, repeats=1, context=20)
    found = tune(target, None, settings(prompts, drafter="ngram"), search)
    assert found.drafter == "ngram" and found.context == 20 and set(found.taus) == {"chain1", "chain2"}
    assert found.choices[0].best_chain is not None and found.choices[0].scheduled is None
    assert found.notes == ["nothing was scheduled: the host drafts, whose cycles cannot be captured"]
    assert 1 <= found.taus["chain1"] <= found.taus["chain2"] <= 3


@pytest.mark.parametrize(
    ("search", "changes", "message"),
    [
        ({"batch_sizes": []}, {}, "tune.batch_sizes: found an empty list"),
        ({"k": [0]}, {}, "tune.k: found 0, expected at least 1"),
        ({"total_tokens": [1]}, {}, "tune.total_tokens: found 1, expected at least 2"),
        ({"context": 300}, {}, r"tune.context: found 300 with eval.max_new_tokens=\d+, the target has 256 positions"),
        ({"context": 0}, {}, "tune.context: found 0, expected at least 2"),
        ({"depth": 2.5}, {}, "tune.depth: found 2.5, expected a whole number"),
        ({}, {"synthetic_acceptance": 0.5}, "tune measures the head's own acceptance"),
        ({}, {"acceptance": "typical"}, "tune knows lossless verification only"),
        ({}, {"data": None}, "eval.data is not set"),
        ({}, {}, "give a head, or eval.drafter=ngram"),
    ],
)
def test_what_tuning_refuses(
    target: Target, prompts: str, search: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(target, None, settings(**{"prompts": prompts, **changes}) if "data" not in changes
             else EvalConfig(drafter="ngram"),
             TuneConfig(**search))  # fmt: skip


@pytest.mark.parametrize("paths", [[], [[]], [[-1]], [["a"]], "x"])
def test_bad_paths(paths: Any) -> None:
    with pytest.raises(ConfigError, match="eval.tree.paths: found"):
        check_config(EvalConfig(tree=TreeConfig("static", paths=paths)))
