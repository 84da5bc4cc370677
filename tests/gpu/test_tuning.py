"""Costs from captured graphs, and predictions that whole decoding confirms (`pytest -m gpu`, on a machine with one)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.config import EvalConfig, TreeConfig, TuneConfig
from headstart.eval.measuring.benchmark import evaluate
from headstart.eval.tuning.tune import tree_name, tune
from headstart.heads.base import Head
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=2048, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return Target.from_model(model.eval())


@pytest.fixture(scope="module")
def head(target: Target) -> Head:
    made = build_head(FAMILIES["eagle3"].config(draft_vocab_size=8000), target.dims).to(target.device, target.dtype)
    made.initialise(target.ends, torch.arange(8000, device=target.device))
    return made.eval()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EvalConfig:
    noise = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("prompts") / "ids.jsonl"
    prompts = [torch.randint(0, 32000, (200,), generator=noise).tolist() for _ in range(8)]
    path.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    return EvalConfig(data=str(path), max_new_tokens=96)


def test_predictions_hold(target: Target, head: Head, config: EvalConfig) -> None:
    search = TuneConfig(batch_sizes=[1, 8], depth=4, k=[8], total_tokens=[8, 32], prompts=8)
    found = tune(target, head, config, search)
    for choice in found.choices:
        costs = choice.costs
        assert 0 < costs.plain_s < 0.05
        for table in (costs.verify_s, costs.draft_s):
            assert all(seconds > 0 for points in table.values() for seconds in points.values())
        # every level of a chain is one more pass
        levels = costs.draft_s["chain"]
        assert levels[max(levels)] > levels[min(levels)]
        # the forward is most of a plain cycle and what is left of a cycle is small beside it
        assert all(seconds < costs.plain_s for points in costs.rest_s.values() for seconds in points.values())
        assert choice.agrees, (tree_name(choice.best.tree), choice.best.speedup, choice.measured_speedup)
        # the head is not trained: until the scheduler gives drafting up, it loses a little more than the shortest chain
        assert choice.scheduled is not None and choice.scheduled.against_fixed > 0.8


def test_the_scheduler_in_an_evaluation(target: Target, head: Head, config: EvalConfig) -> None:
    """Untrained drafts are given up. Every shape was captured and timed, and a cycle's parts are the whole chain's."""
    asked = replace(config, tree=TreeConfig("chain", 4), batch_size=4, batch_sizes=[8], sweep_prompts=8)
    fixed, report = (evaluate(target, head, replace(asked, scheduler=on)) for on in (False, True))
    assert report.scheduler is not None and set(report.scheduler["batches"]) == {"4", "8"}
    assert 1 <= report.scheduler["verified_per_cycle"] < 3 and report.speedup is not None
    for book in report.scheduler["batches"].values():
        plain, *others = book["shapes"]
        assert plain["levels"] == 0 and others and all(shape["ms"] > plain["ms"] for shape in others)
        assert plain["cycles"] > 0
    assert fixed.cycle is not None and report.cycle is not None and fixed.speedup is not None
    assert report.cycle["draft_ms"] == pytest.approx(fixed.cycle["draft_ms"], rel=0.15)
    # the fixed chain goes on losing
    assert report.speedup > fixed.speedup


def test_static_predictions_hold(target: Target, config: EvalConfig) -> None:
    """Both static trees are decoded in full at every batch size, and the faster one is kept."""
    made = build_head(FAMILIES["medusa"].config(depth=4, lm_head="lowrank"), target.dims)
    made = made.to(target.device, target.dtype)
    made.initialise(target.ends)
    search = TuneConfig(batch_sizes=[1, 8], depth=4, total_tokens=[8, 32], prompts=8)
    found = tune(target, made.eval(), config, search)
    assert found.static_trees[-1]["name"] == "published n63" and len(found.rank_accuracy) == 4
    for choice in found.choices:
        assert all(seconds > 0 for seconds in choice.costs.draft_s["static"].values())
        assert choice.published is not None
        for trial in filter(None, (choice.calibrated, choice.published)):
            name = tree_name(trial.prediction.tree)
            assert trial.agrees, (name, trial.prediction.speedup, trial.measured_speedup)
            assert choice.measured_speedup >= trial.measured_speedup


def test_sweeps_leave_captures_out(target: Target, head: Head, config: EvalConfig) -> None:
    """Every point captures anew; none of that is in its seconds."""
    swept = replace(config, tree=TreeConfig("chain", 3), batch_sizes=[1, 4], sweep_prompts=4, warmup_tokens=0)
    report = evaluate(target, head, swept)
    for point in report.sweeps["batch"]["points"]:
        for way in ("baseline", "speculative"):
            latency = point[f"{way}_latency"]
            assert latency["token_p95_ms"] < 10 * latency["token_p50_ms"]
            assert point[f"{way}_tokens_per_s"] > 0.5 * point["batch"] / (latency["token_p50_ms"] / 1e3)
