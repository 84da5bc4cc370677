"""Plans against measured peaks, and the refusal of what cannot fit."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError, StorageError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.target import Target
from headstart.train.config import TrainConfig
from headstart.train.flops import step_flops
from headstart.train.joint.config import JointConfig
from headstart.train.joint.head import JointHead
from headstart.train.plan import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    GIB,
    Layout,
    Plan,
    expected_rate,
    make_plan,
    memory_of,
    require_fit,
)

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "train_speed.json"
SCALING = RESULTS.with_name("scaling.json")
#: Llama-3.1-8B and -70B
SHAPES = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "70b": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
}


def free_disk(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """Plans of 8B and 70B targets write tens of GiB: what this machine has free must not decide a test."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": gib * GIB}))


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Target, Head]]:
    found = {}
    for name, shape in SHAPES.items():
        config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, head_dim=128, **shape)
        with torch.device("meta"):
            target = Target.from_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
            found[name] = target, build_head(FAMILIES["eagle3"].config(draft_vocab_size=32000), target.dims)
    return found


def plan_of(models, name: str, layout: Layout, device_gib: float | None = 80.0, **config) -> Plan:
    target, head = models[name]
    settings = TrainConfig(**({"epochs": 2.0, "accumulation": layout.accumulation} | config))
    device = None if device_gib is None else int(device_gib * GIB)
    return make_plan(target, head, settings, layout, 1000, 8_000_000, 20_000.0, device)


@pytest.mark.parametrize("case", ["fixed_all", "fixed_40", "long_32k", "online_all"])
def test_peaks_are_those_that_were_measured(models, case):
    """The benchmark holds the target itself only where it is online; elsewhere just its embedding and output head."""
    rows = [r for r in json.loads(RESULTS.read_text()) if r["case"] == case and r["preset"] == "llama-3.1-8b"]
    assert rows
    target, head = models["8b"]
    for row in rows:
        layout = Layout(pack_tokens=row["tokens"], supervised=row["supervised_tokens"] / row["tokens"])
        memory, peak = memory_of(target, head, layout)
        planned = (peak - CONTEXT_BYTES) / (1 + FRAGMENTATION) / GIB
        if case != "online_all":
            planned -= (memory["target weights"] - 2 * 2 * 128256 * 4096) / GIB
        assert planned == pytest.approx(row["peak_gib"], rel=0.1)


#: settings of heads with one output matrix per depth, by the benchmark's cases
MATRICES = {
    "medusa_all": {"lm_head": "own"}, "medusa_labels": {"lm_head": "own", "loss": "ce"},
    "medusa_shared": {"lm_head": "shared"}, "medusa_lowrank": {"lm_head": "lowrank"},
}  # fmt: skip


def matrices_head(models, case: str) -> Head:
    with torch.device("meta"):
        return build_head(FAMILIES["medusa"].config(depth=5, **MATRICES[case]), models["8b"][0].dims)


def test_a_step_holds_one_matrix_in_half_precision_and_one_chunk_of_logits(models):
    """Five own matrices of Llama-3.1-8B, by hand: 2.71 B parameters of 16 bytes, and 5 GiB for everything else."""
    target, labels = models["8b"][0], matrices_head(models, "medusa_labels")
    layout, matrix, block = Layout(pack_tokens=8192), 128256 * 4096, 4096 * 4096 + 4096
    memory, _ = memory_of(target, labels, layout)
    trained = memory["head weights"] + memory["gradients"] + memory["optimiser moments"]
    assert trained == 16 * 5 * (matrix + block)
    assert memory["half-precision weights"] == 2 * (matrix + 5 * block)
    # 8,192 rows are two chunks of 4,096; per row the two features, and of each head the SiLU's input and a gradient
    kept = 2 * (4096 * 128256 + 8192 * 4096 * (2 + 5 * 2))
    assert memory["head activations"] == kept
    with_teacher = memory_of(target, matrices_head(models, "medusa_all"), layout)[0]
    assert with_teacher["head activations"] == kept + 2 * 8192 * 128256
    assert with_teacher["half-precision weights"] + with_teacher["head activations"] < 5 * GIB
    for case, update in (("medusa_shared", 0), ("medusa_lowrank", 64 * (4096 + 128256))):
        found = memory_of(target, matrices_head(models, case), layout)[0]
        assert found["head weights"] == 4 * 5 * (block + update)
        assert found["half-precision weights"] == 2 * 5 * (block + update)
        inputs = 2 * 5 * 8192 * 4096 * (update > 0)  # of the low-rank products
        assert found["head activations"] == with_teacher["head activations"] + inputs


@pytest.mark.parametrize("case", MATRICES)
def test_peaks_of_output_matrices_are_those_that_were_measured(models, case):
    """`reserved_gib` counts a captured step's temporaries beside the optimiser's moments, as the plan does.

    The benchmark holds the output head alone.
    """
    rows = [r for r in json.loads(RESULTS.read_text()) if r["case"] == case and r["preset"] == "llama-3.1-8b"]
    if not rows:
        pytest.skip(f"{case} is not in docs/results/train_speed.json yet")
    for row in rows:
        layout = Layout(pack_tokens=row["tokens"], supervised=row["supervised_tokens"] / row["tokens"])
        memory, peak = memory_of(models["8b"][0], matrices_head(models, case), layout)
        planned = (peak - CONTEXT_BYTES - memory["target weights"] + 2 * 128256 * 4096) / GIB
        assert planned == pytest.approx(row["reserved_gib"], rel=0.1)


#: (train.parallel, target.parallel) of the benchmark's cases
LAYOUTS = {
    "ddp": ("replicated", "none"), "ddp_saving": ("replicated", "none"), "fsdp2": ("fsdp2", "none"),
    "zero2": ("zero2", "none"), "zero3": ("zero3", "none"), "fsdp2_target": ("replicated", "fsdp2"),
    "70b_target": ("fsdp2", "fsdp2"), "70b_whole": ("fsdp2", "none"),
}  # fmt: skip


def test_peaks_of_several_cards_are_near_the_plan(models):
    """A plan that is too low lets a run start that cannot fit."""
    shape = SHAPES["70b"] | {"num_hidden_layers": 16}
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, head_dim=128, **shape)
    with torch.device("meta"):
        cut = Target.from_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    wide = cut, models["70b"][1]
    rows = [row for row in json.loads(SCALING.read_text()) if row["preset"] == "llama-3.1-8b"]
    assert {row["case"] for row in rows} == set(LAYOUTS)
    for row in rows:
        parallel, sharded = LAYOUTS[row["case"]]
        big, gpus = row["case"].startswith("70b"), row["gpus"]
        layout = Layout(
            gpus, gpus, gpus, parallel, sharded, pack_tokens=4096 if big else 8192, accumulation=gpus
        )  # fmt: skip
        peak = (memory_of(*(wide if big else models["8b"]), layout)[1] - CONTEXT_BYTES) / GIB
        assert 0.96 <= peak / row["peak_gib_per_gpu"] <= 1.15, (row["case"], gpus)


@pytest.mark.parametrize("case", ["fixed_all", "fixed_40", "long_32k", "online_all"])
def test_rates_are_near_those_that_were_measured(models, case):
    target, head = models["8b"]
    for row in json.loads(RESULTS.read_text()):
        if row["case"] == case and row["preset"] == "llama-3.1-8b":
            features = "online" if case == "online_all" else "stored"
            supervised = row["supervised_tokens"] / row["tokens"]
            layout = Layout(pack_tokens=row["tokens"], supervised=supervised, features=features)
            rate = expected_rate(target, head, layout, row["matmul_tflops"] * 1e12)
            assert rate == pytest.approx(row["tokens_per_s"], rel=0.25)
            one = expected_rate(target, head, layout, 1e14)
            for ranks, accumulation, busy in ((4, 4, 4), (4, 1, 1), (8, 2, 2), (2, 3, 1.5), (4, 6, 3), (4, 8, 4)):
                spread = replace(layout, ranks=ranks, accumulation=accumulation)
                assert expected_rate(target, head, spread, 1e14) == pytest.approx(busy * one)


def test_a_pack_of_any_size_is_planned_without_memory(models):
    """Closed form: the counts of one document, compared with a real one where that is small."""
    target, head = models["8b"]
    small = Layout(pack_tokens=64, supervised=0.5, features="stored")
    turns = torch.tensor([-1] * 32 + [0] * 32)
    counts = FeatureBatch.pack([(torch.zeros(64, dtype=torch.int64), turns)], head.depth).anchors.count_K
    assert expected_rate(target, head, small, 1e14) == pytest.approx(64 * 0.6e14 / step_flops(head, 64, counts))
    began = time.process_time()
    huge = replace(small, pack_tokens=10**12)
    assert expected_rate(target, head, huge, 1e14) > 0 and memory_of(target, head, huge)[1] > 1e15
    assert time.process_time() - began < 5


def test_a_target_over_the_cards_of_one_process_works_at_the_pace_of_one(models):
    target, head = models["70b"]
    spread = Layout(ranks=1, cards=8, target_parallel="device_map")
    assert expected_rate(target, head, spread, 1e14) == expected_rate(target, head, Layout(), 1e14)
    whole = memory_of(target, head, Layout())[0]["target weights"]
    assert memory_of(target, head, spread)[0]["target weights"] < whole / 6


def test_a_window_of_many_packs_that_does_not_fit_is_told_to_be_smaller(models, tmp_path, monkeypatch):
    """The features of a rank's packs of one step are held together: smaller packs do not make them fewer."""
    free_disk(monkeypatch, 1000)
    layout = Layout(pack_tokens=8192, accumulation=512)
    with pytest.raises(ConfigError) as caught:
        require_fit(plan_of(models, "8b", layout), *models["8b"], tmp_path)
    found = re.search(
        r"With (.*) it needs ([\d.]+) GiB; a step then has at most (\d+) tokens instead of 4194304", str(caught.value)
    )
    changes = dict(part.split("=") for part in found[1].split())
    changed = replace(
        layout, activation_checkpointing=True, pack_tokens=int(changes["data.pack_tokens"]),
        accumulation=int(changes["train.accumulation"]),
    )  # fmt: skip
    assert int(found[3]) == changed.pack_tokens * changed.accumulation
    require_fit(plan_of(models, "8b", changed), *models["8b"], tmp_path)
    with pytest.raises(ConfigError):
        twice = replace(changed, accumulation=2 * changed.accumulation)
        require_fit(plan_of(models, "8b", twice), *models["8b"], tmp_path)


def test_parameters_are_counted_exactly(models):
    target, head = models["8b"]
    memory, _ = memory_of(target, head, Layout())
    assert memory["target weights"] == 2 * 8_030_261_248  # Llama-3.1-8B
    trained = 3 * 4096 * 4096 + 2 * 8192 * 4096 // 2 + 2 * 8192 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
    trained += 32000 * 4096 + 4 * 4096
    assert memory["head weights"] == memory["gradients"] == 4 * trained
    assert memory["optimiser moments"] == 8 * trained


def test_a_sharded_70b_target_takes_less_than_a_third_of_the_whole_one(models):
    target, head = models["70b"]
    whole = memory_of(target, head, Layout(ranks=4, ranks_per_node=4))[0]
    parts = memory_of(target, head, Layout(ranks=4, ranks_per_node=4, target_parallel="fsdp2"))[0]
    assert whole["target weights"] == 2 * 70_553_706_496
    layers = 2 * (70_553_706_496 - 2 * 128256 * 8192 - 8192)
    ends = 2 * (128256 * 8192 + 8192 + 128256 * 8192 // 4 + 32000 * 8192)
    assert parts["target weights"] == pytest.approx(layers / 4 + ends, rel=1e-6)
    assert parts["target weights"] + parts["target layers gathered"] < whole["target weights"] / 3


def test_what_cannot_fit_is_refused_with_what_would(models, tmp_path, monkeypatch):
    free_disk(monkeypatch, 1000)
    layout = Layout(ranks=4, ranks_per_node=4, pack_tokens=8192, accumulation=4)
    fits = plan_of(models, "8b", layout)
    assert fits.fits
    require_fit(fits, *models["8b"], tmp_path)
    refused = plan_of(models, "70b", layout)
    with pytest.raises(ConfigError) as caught:
        require_fit(refused, *models["70b"], tmp_path)
    message = str(caught.value)
    assert f"needs {refused.peak / GIB:.1f} GiB per rank, and a card has 80.0 GiB" in message
    assert "target.parallel=fsdp2" in message
    changed = replace(layout, target_parallel="fsdp2", activation_checkpointing=True)
    require_fit(plan_of(models, "70b", changed), *models["70b"], tmp_path)
    alone = Layout(pack_tokens=8192)
    with pytest.raises(ConfigError, match=r"With 4 ranks, target.parallel=fsdp2 target.shard_ranks=4"):
        require_fit(plan_of(models, "70b", alone), *models["70b"], tmp_path)


def test_activation_checkpointing_is_no_remedy_for_a_head_without_layers(models, tmp_path, monkeypatch):
    free_disk(monkeypatch, 1000)
    target = models["70b"][0]
    with torch.device("meta"):
        head = build_head(FAMILIES["medusa"].config(), target.dims)
    plan = make_plan(target, head, TrainConfig(steps=9), Layout(), 9, 9_000, device_bytes=80 * GIB)
    with pytest.raises(ConfigError, match=r"With \d+ ranks, .* it needs") as caught:
        require_fit(plan, target, head, tmp_path)
    assert "activation_checkpointing" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "gib", "advice"),
    [
        ("8b", 60, "With train.activation_checkpointing=true it needs"),
        ("8b", 36, "With train.activation_checkpointing=true data.pack_tokens="),
        ("70b", 80, "No number of ranks makes it fit"),
    ],
)
def test_what_trains_its_target_is_not_told_to_shard_it(models, tmp_path, monkeypatch, size, gib, advice):
    free_disk(monkeypatch, 1000)
    target = models[size][0]
    with torch.device("meta"):
        inner = build_head(FAMILIES["medusa"].config(lm_head="shared"), target.dims)
    inner.bind(target.ends)
    head = JointHead(inner, target, JointConfig(enabled=True), planned=True)
    layout = Layout(pack_tokens=8192, ranks=2, ranks_per_node=2, features="online")
    plan = make_plan(target, head, TrainConfig(steps=9), layout, 9, 9_000, device_bytes=gib * GIB)
    with pytest.raises(ConfigError, match=f"plan: the run needs .*{advice}") as caught:
        require_fit(plan, target, head, tmp_path)
    assert "fsdp2" not in str(caught.value)


def test_the_disk_is_checked_too(models, tmp_path, monkeypatch):
    plan = plan_of(models, "8b", Layout(features="stored"), device_gib=None)
    assert plan.fits  # nothing is known of the card
    assert plan.disk["features"] == 8_000_000 * (4 * 4096 * 2 + 12)
    weights = memory_of(*models["8b"], Layout())[0]["head weights"]
    assert plan.disk["checkpoints"] == (2 + 1) * 3 * weights
    free_disk(monkeypatch, 10)
    with pytest.raises(StorageError, match="the run .* needs about"):
        require_fit(plan, *models["8b"], tmp_path)


def test_steps_and_hours(models):
    plan = plan_of(models, "8b", Layout(accumulation=4), epochs=2.0)
    assert plan.steps == 500 and plan.tokens_per_step == 32_000
    assert plan.hours == pytest.approx(500 * 32_000 / 20_000 / 3600)
    timed = plan_of(models, "8b", Layout(), epochs=None, max_seconds=1800.0)
    assert timed.steps is None and timed.hours == 0.5


def test_epochs_are_what_the_first_limit_leaves(models):
    epochs = lambda **limits: plan_of(models, "8b", Layout(accumulation=4), **limits).epochs  # noqa: E731
    assert epochs(epochs=2.0) == 2.0
    assert epochs(epochs=None, steps=100) == 100 * 32_000 / 8_000_000
    assert epochs(epochs=None, max_seconds=1800.0) == 1800 * 20_000 / 8_000_000
    assert epochs(epochs=2.0, steps=100, max_seconds=60.0) == 60 * 20_000 / 8_000_000
    # the one step is a part of a whole one
    assert plan_of(models, "8b", Layout(accumulation=3000), epochs=1.0).epochs == 1.0


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_shards_of_the_head(models, kind):
    one = memory_of(*models["8b"], Layout(ranks=4, ranks_per_node=4))[0]
    parts = memory_of(*models["8b"], Layout(ranks=4, ranks_per_node=4, parallel=kind))[0]
    assert parts["optimiser moments"] == one["optimiser moments"] / 4
    assert parts["head weights"] == one["head weights"] / (1 if kind == "zero2" else 4)


def test_a_plan_counts_the_anchors_that_a_step_draws(models: dict[str, tuple[Target, Head]]) -> None:
    """512 blocks of 2,048 rows need about a quarter of the memory, and of the time, of a block at every row."""
    target, _ = models["8b"]
    found = {}
    for share in (0.25, 1.0):
        with torch.device("meta"):
            head = build_head(FAMILIES["dspark"].config(anchor_share=share, mask_token_id=0), target.dims)
        head.bind(target.ends)
        layout = Layout(pack_tokens=8192)
        memory, _ = memory_of(target, head, layout)
        found[share] = memory["head activations"], expected_rate(target, head, layout, 780e12)
    (drawn, fast), (whole, slow) = found[0.25], found[1.0]
    assert 0.2 < drawn / whole < 0.5 and 2.0 < fast / slow < 4.0
    assert head.chosen_anchors(8192, 100) == 100  # a pack with few supervised rows
