"""What Headstart does with every architecture: the quick part of `headstart.bench.targets`, and how rows are kept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.bench import target_checks, targets
from headstart.bench.architectures import ARCHITECTURES
from headstart.bench.target_checks import Effort, Findings, Reference, examine
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.engine import Engine

#: those without a fused form today: recurrent states, chunks, latent attention, per-layer inputs, scaled rope
GENERIC = {
    "DeepSeek-V3", "Qwen3-Next", "Qwen3.5", "Qwen3.5 (images)", "LFM2", "Falcon-H1", "Granite-4", "Llama 4", "Gemma 4",
    "Gemma 4 E2B", "Gemma 4 26B-A4B", "Ministral-3",
}  # fmt: skip
#: as little as shows whether each part works
QUICK = Effort(steps=8, answer=16, engines=("vllm",))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_trains_decodes_exactly_and_is_exported(name: str, tmp_path: Path) -> None:
    found = examine(name, torch.device("cpu"), tmp_path, QUICK)
    trees = ARCHITECTURES[name].trees
    assert found.refused is None and found.problems == []
    assert found.engine_path == "fused" or name in GENERIC
    assert found.features and found.train and found.identity_fp32
    assert found.export_engines == ["vllm"]
    # drafts that are accepted are kept in the KV buffers; so comparing what follows them means something
    assert found.accepted["chain"] > 0
    assert found.trees is trees
    if trees:
        assert found.trees_refused is None and found.accepted["tree"] > 0
    else:
        assert found.trees_refused is not None and "eval.tree.kind=chain" in found.trees_refused


def test_a_wrong_token_and_what_follows_it_are_told() -> None:
    reference = Reference("Llama", torch.device("cpu"))
    contexts, right = [[5, 6, 7], [8, 9]], []
    for context in contexts:
        tokens: list[int] = []
        for _ in range(6):
            tokens.append(int(reference.run([*context, *tokens]).logits[0, -1].argmax()))
        right.append(tokens)
    assert reference.agreement(contexts, [Answer(tokens) for tokens in right]) == [True] * 12
    right[1][2] = (right[1][2] + 1) % 97
    same = reference.agreement(contexts, [Answer(tokens) for tokens in right])
    assert same[:8] == [True] * 8 and not same[8]


def test_faults_of_features_and_engine_become_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose streams are off by a layer, and whose engine repeats a token, is not called exact."""
    extract, decode = target_checks.Target.extract, target_checks.decode

    def shifted(self: Any, batch: Any, spec: Any) -> Any:
        found = extract(self, batch, spec)
        found.streams_RkD = found.streams_RkD.roll(1, 1)
        return found

    def repeating(*args: Any) -> list[Answer]:
        answers = decode(*args)
        answers[0].tokens[4] = (answers[0].tokens[4] + 1) % 97
        return answers

    monkeypatch.setattr(target_checks.Target, "extract", shifted)
    monkeypatch.setattr(target_checks, "decode", repeating)
    found = examine("Qwen2", torch.device("cpu"), tmp_path, QUICK)
    assert not found.features and not found.train and not found.identity_fp32 and not found.trees
    assert any("features: AssertionError: the input of layer 2 of packed document 1" in text for text in found.problems)
    assert any("tokens are not the model's own, the first at 4" in text for text in found.problems)
    assert found.export_engines == ["vllm"]


def test_drafts_that_read_other_features_than_heads_are_trained_on_become_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token shows such a fault of the engine: drafts are only accepted less often."""
    prefill = Engine.prefill

    def reordered(self: Any, *args: Any) -> Any:
        logits, rows = prefill(self, *args)
        if rows.streams_BJkD is not None:
            rows.streams_BJkD = rows.streams_BJkD.roll(1, 2)
        return logits, rows

    monkeypatch.setattr(Engine, "prefill", reordered)
    found = examine("Qwen2", torch.device("cpu"), tmp_path, QUICK)
    assert found.identity_fp32 and found.trees and not found.features and not found.train
    assert [text.split(": ")[0] for text in found.problems] == ["drafts' features, fused", "drafts' features, generic"]


def dies(name: str, *others: Any) -> None:
    """A process that ends before it wrote anything (Qwen2), never ends (Qwen3), or finds something."""
    import os
    import time

    directory = Path(others[-1])
    if name == "Qwen2":
        (directory / targets.LOG).write_text("loading\nSegmentation fault\n")
        os._exit(11)
    if name == "Qwen3":
        time.sleep(600)
    found = Findings(engine_path="generic", train=True, identity_fp32=True)
    (directory / targets.RESULT).write_text(json.dumps({"kind": "cpu", **vars(found), **ORIGIN}))


ORIGIN = {"card": "a processor", "git_revision": "abc", "versions": {}}


def test_processes_that_die_or_hang_cost_their_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "work", dies)
    asked = argparse.Namespace(equal=False, jobs=3, device="cpu", half=None, timeout=10.0)
    results = dict(targets.ask_all(["Llama", "Qwen2", "Qwen3"], asked))
    assert results["Llama"]["train"] and results["Llama"]["problems"] == []
    assert results["Qwen2"]["problems"] == ["the process ended with code 11: Segmentation fault"]
    assert results["Qwen3"]["problems"] == ["no end after 10 s: nothing was printed"]
    rows: list[dict[str, Any]] = []
    for name, result in results.items():
        rows = targets.merge(rows, name, result)
    assert [row["architecture"] for row in rows] == ["Llama", "Qwen2", "Qwen3"]
    assert [row["identity_fp32"] for row in rows] == [True, False, False]
    assert rows[1]["note"] == "failed: the process ended with code 11: Segmentation fault (cpu)"


def run_of(kind: str, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, **vars(Findings(**facts)), **ORIGIN, "command": f"on {kind}"}


def test_runs_of_all_machines_fill_one_row() -> None:
    whole = {"train": True, "identity_fp32": True, "trees": True, "export_engines": ["vllm", "sglang"]}
    rows = targets.merge([], "OLMo-2", run_of("cpu", **whole, engine_path="fused"))
    slow = {**whole, "export_engines": ["vllm"], "trees": False}
    rows = targets.merge(
        rows, "OLMo-2", run_of("gpu", **slow, engine_path="generic", generic_because="a reason", identity_bf16=0.97)
    )
    speed = {"kind": "equal", **vars(targets.Speed("generic", "a reason", 4.5, [])), **ORIGIN, "command": "equal"}
    rows = targets.merge(rows, "OLMo-2", speed)
    rows = targets.merge(rows, "Llama", {**speed, "cycle_ms": 3.0, "engine_path": "fused", "generic_because": None})
    assert [row["architecture"] for row in rows] == ["Llama", "OLMo-2"]
    row = rows[1]
    # the GPU's path; true where both machines say so
    assert (row["engine_path"], row["train"], row["identity_fp32"], row["trees"]) == ("generic", True, True, False)
    assert (row["identity_bf16"], row["cycle_ms"]) == (0.97, 4.5)
    assert (row["identity_fp32_cpu"], row["identity_fp32_gpu"]) == (True, True)
    assert row["export_engines"] == ["vllm"] and not row["refused_before_step_1"]
    assert row["note"] == "generic: a reason (gpu, equal)" and row["command"] == "on gpu"
    # a later run of a kind replaces the earlier one
    rows = targets.merge(rows, "OLMo-2", run_of("gpu", **whole, engine_path="fused"))
    assert (rows[1]["engine_path"], rows[1]["trees"], rows[1]["cycle_ms"]) == ("fused", True, 4.5)
    table = targets.markdown(rows).splitlines()
    assert table[3] == "| OLMo-2 | fused | yes | yes | yes | – | 4.50 ms | 1.50 | sglang, vllm |"
    assert json.loads(json.dumps(rows)) == rows


def test_refused_before_step_1_is_told_with_the_reason() -> None:
    rows = targets.merge([], "Qwen3", run_of("cpu", refused="no such thing"))
    assert rows[0]["refused_before_step_1"] and rows[0]["engine_path"] == "none" and not rows[0]["train"]
    assert rows[0]["note"] == "refused: no such thing (cpu)"
    assert "| Qwen3 | refused | **no** |" in targets.markdown(rows)


def test_a_cycle_is_timed() -> None:
    speed = targets.measure_speed("Qwen3", torch.device("cpu"), "tiny", 12)
    assert speed.problems == [] and speed.engine_path == "generic"
    assert speed.cycle_ms is not None and speed.cycle_ms > 0


def test_only_what_is_missing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "targets.json"
    out.write_text(json.dumps(targets.merge([], "Llama", run_of("cpu", train=True))))
    asked: list[str] = []

    def answer(names: list[str], arguments: argparse.Namespace) -> Any:
        asked.extend(names)
        yield from ((name, {**run_of("cpu", train=True), "took_s": 1.0}) for name in names)

    monkeypatch.setattr(targets, "ask_all", answer)
    words = f"--out {out} --missing --only Llama Qwen2 --markdown {tmp_path / 'table.md'}".split()
    assert targets.main(words) == 0
    assert asked == ["Qwen2"] and [row["architecture"] for row in json.loads(out.read_text())] == ["Llama", "Qwen2"]
    assert (tmp_path / "table.md").read_text().endswith(targets.markdown(json.loads(out.read_text())))
    # times at real widths are another part of the rows
    targets.main([*words, "--equal"])
    assert asked == ["Qwen2", "Llama", "Qwen2"]


def test_a_summary_says_how_many_and_how_fast_and_where() -> None:
    whole = {"train": True, "identity_fp32": True, "trees": True}
    rows = targets.merge([], "Llama", run_of("cpu", **whole, engine_path="fused"))
    rows = targets.merge(rows, "OLMo-2", run_of("cpu", **whole, engine_path="fused"))
    rows = targets.merge(rows, "LFM2", run_of("cpu", **{**whole, "trees": False}, engine_path="generic"))
    for name, path, cycle in (("Llama", "fused", 2.0), ("OLMo-2", "fused", 3.0), ("LFM2", "generic", 20.0)):
        rows = targets.merge(rows, name, {"kind": "equal", **vars(targets.Speed(path, None, cycle, [])), **ORIGIN})
    counts, origins = targets.summary(rows).split("\n\n")
    assert counts == (
        "3 architectures: 2 run fused, 1 by transformers' own forward, 0 not at all. 3 train, 3 decode exactly in "
        "float32, 2 with trees as well. A cycle at equal sizes takes 2.00 to 3.00 ms fused (1.00 to 1.50 × Llama's), "
        "20.00 to 20.00 ms with recurrent states (10.00 to 10.00 × Llama's)."
    )
    assert origins == (
        "Measured: small models on a CPU: a processor, revision abc; cycles at equal sizes: a processor, revision abc."
    )


def test_the_docs_show_the_rows_as_they_are_recorded() -> None:
    """If not: python -m headstart.bench.targets --out docs/results/targets.json --missing --markdown docs/targets.md"""
    docs = Path(__file__).parents[3] / "docs"
    rows, shown = json.loads((docs / "results" / "targets.json").read_text()), (docs / "targets.md").read_text()
    assert targets.BEGIN in shown and targets.page(rows, shown) == shown
    assert {row["architecture"] for row in rows} == set(targets.ARCHITECTURES)
