"""`python -m headstart.bench.train` at sizes of a toy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.bench import presets, train
from headstart.heads.dims import HeadDims

SMALL = "--preset tiny --tokens 128 --length 64 --depth 3 --steps 2 --matmul-tflops 0.01".split()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Rows of --out after the benchmark ran with these arguments."""
    out = tmp_path / "speed.json"

    def call(*arguments: str | Path) -> list[dict[str, Any]]:
        given = [*map(str, arguments), "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["bench.train", *given])
        monkeypatch.setattr("sys.orig_argv", ["python", "-m", "headstart.bench.train", *given])
        train.main()
        return json.loads(out.read_text())

    return call


def flops(row: dict[str, Any]) -> float:
    return row["mfu"] * row["matmul_tflops"] * 1e12 * row["step_ms"] / 1e3


def test_rows_carry_rates_and_their_split(bench: Callable):
    all_rows, some_rows = bench(*SMALL, "--cases", "fixed_all", "fixed_40")
    assert (all_rows["case"], some_rows["case"]) == ("fixed_all", "fixed_40")
    for row in (all_rows, some_rows):
        assert row["tokens_per_s"] == pytest.approx(128 / row["step_ms"] * 1e3)
        assert set(row["split_ms"]) == {"draft_forward", "draft_backward", "optimiser"}
        assert row["compiles"] == 0 and row["row_fraction"] == 1.0 and "bench.train --preset tiny" in row["command"]
    assert (all_rows["supervised_tokens"], some_rows["supervised_tokens"]) == (128, 52)
    assert flops(some_rows) < flops(all_rows)


@pytest.mark.parametrize("compiled", [True, False])
def test_online_times_the_target_too(compiled: bool, bench: Callable, monkeypatch: pytest.MonkeyPatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, dynamic: real(work, dynamic=dynamic, backend="eager"))
    choice = "--compile-target" if compiled else "--no-compile-target"
    (row,) = bench(*SMALL, "--online", choice, "--supervised-fraction", "0.5")
    assert row["case"] == "custom" and row["split_ms"]["target"] > 0 and row["supervised_tokens"] == 64
    assert row["compiles"] == int(compiled)  # one graph serves all layers


def test_row_fraction_runs_fewer_rows_and_keeps_a_row_of_its_own(bench: Callable):
    bench(*SMALL, "--cases", "fixed_all")
    whole, half = bench(*SMALL, "--cases", "fixed_all", "--row-fraction", "0.5")
    assert (whole["row_fraction"], half["row_fraction"]) == (1.0, 0.5)
    # per row of a step (see train/flops.py): half of the rows at depth 2, a quarter at depth 3
    hidden, inner, vocab, queries, keys = 64, 128, 128, 64, 64
    later = hidden * (queries + keys) + queries * hidden + 3 * hidden * inner + hidden * vocab
    # of each of two documents 62, 61 and 60 rows: groups of 120, 2 and 2 rows that reach depth 3, 2 and 1
    dropped = (122 - 60 - 1) + (120 - 30)
    assert flops(whole) - flops(half) == pytest.approx(6 * later * dropped, rel=1e-6)


def test_a_head_with_a_matrix_per_depth_is_timed_in_all_its_kinds(bench: Callable):
    """Multiply-adds of Medusa's K blocks and matrices, on the rows that are supervised at depth 1."""
    names = ("medusa_all", "medusa_shared", "medusa_lowrank", "medusa_labels")
    rows = {row["case"]: row for row in bench(*SMALL, "--cases", *names)}
    assert tuple(rows) == names
    hidden, vocab, depth, rank = 64, 512, 3, 64
    blocks, matrix, update = hidden * hidden + hidden, vocab * hidden, rank * (vocab + hidden)
    per_row = {"medusa_shared": blocks + matrix, "medusa_lowrank": blocks + matrix + update}
    for name, row in rows.items():
        assert row["supervised_tokens"] == 128 and row["compiles"] == 0 and row["row_fraction"] == 1.0
        assert set(row["split_ms"]) == {"draft_forward", "draft_backward", "optimiser"}
        # of each of two documents of 64 tokens, 62 rows
        expected = 6 * 124 * depth * per_row.get(name, blocks + matrix)
        assert flops(row) == pytest.approx(expected, rel=1e-6)


def test_heads_that_draft_blocks_have_a_row_for_every_block_and_vocabulary(bench: Callable):
    """Two layouts: with 4 slots, one head drafts 4 tokens of a block, the other 3."""
    sizes = ("--block", "4", "5", "--draft-vocab", "128", "0")
    bench(*SMALL, "--cases", "dspark_all", *sizes)
    rows = bench(*SMALL, "--cases", "dflash_all", "dspark_all", *sizes)
    keys = [(row["case"], row["block"], row["draft_vocab"]) for row in rows]
    expected = [(case, b, u) for case in ("dflash_all", "dspark_all") for b in (4, 5) for u in (128, 512)]
    assert keys == expected  # new rows take the place of earlier ones
    for row in rows:
        assert row["anchors_per_s"] == pytest.approx(32 / row["step_ms"] * 1e3)  # a quarter of 128 rows
        assert row["mfu"] > 0 and row["compiles"] == 0 and set(row["split_ms"]) >= {"draft_forward", "optimiser"}
    # per step (heads/families/block/costs.py): 128 rows, 32 anchors of 4 slots; fc reads 5 layers
    hidden, inner, queries, keys, layers = 64, 128, 64, 32, 5
    layer = hidden * (2 * queries + 2 * keys + 3 * inner)
    context = 128 * (5 * hidden * hidden + layers * 2 * hidden * keys)
    assert flops(rows[0]) == pytest.approx(
        6 * (context + 32 * 4 * layers * layer + 32 * 3 * 128 * hidden * 2 / 3), rel=1e-6
    )


def test_smollm2s_blocks_stand_in_documents_of_mixed_lengths(bench: Callable):
    (row,) = bench(*SMALL, "--cases", "smollm2_dspark", "--tokens", "700")
    assert (row["tokens"], row["documents"], row["block"], row["draft_vocab"]) == (700, 3, 8, 512)
    assert row["anchors_per_s"] == pytest.approx(88 / row["step_ms"] * 1e3)  # an eighth of the rows


def test_the_published_depths_are_the_default():
    parsed = argparse.Namespace(preset="llama-3.1-8b", depth=None, row_fraction=1.0)
    heads = {name: train.described_head(train.Case(name, (8,), matrices=fields), parsed) for name, fields in
             (("fixed_all", None), *train.MATRICES.items())}  # fmt: skip
    assert {name: head.depth for name, head in heads.items()} == {"fixed_all": 7, **dict.fromkeys(train.MATRICES, 5)}
    assert (heads["medusa_all"].lm_head, heads["medusa_all"].loss) == ("own", "kl")
    assert (heads["medusa_labels"].lm_head, heads["medusa_labels"].loss) == ("own", "ce")


def test_a_head_that_reads_no_tokens_gets_no_embeddings():
    dims = HeadDims(8, 97, 2, 2, 2, 4, 8)
    for embeddings, place in ((True, "cpu"), (False, "meta")):
        ends = presets.random_ends(dims, torch.device("cpu"), torch.float32, embeddings)
        assert (ends.embed_VD.device.type, ends.teacher.weight_VD.device.type) == (place, "cpu")


def test_a_finished_run_is_a_row(
    bench: Callable, headstart: Callable, recipe: Path, tmp_path: Path, tiny_target: Path, conversations: Path
):
    assert headstart("train", recipe).code == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    arguments = ("--cases", "smollm2_real", "--run", tmp_path / "run", "--target", tiny_target, "--matmul-tflops", "1")
    (row,) = bench(*arguments)
    trained = [record for record in records if "tokens_per_s" in record]
    assert row["steps"] == trained[-1]["step"] and row["compiles"] == 0
    assert min(r["tokens_per_s"] for r in trained) <= row["tokens_per_s"] <= max(r["tokens_per_s"] for r in trained)
    captured = [{**record, "captures": 3, "capture_s": 1.25} for record in records]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in captured))
    (row,) = bench(*arguments)
    assert (row["compiles"], row["compile_s"]) == (3, 1.25)


def test_what_is_missing_is_named(bench: Callable, capsys: pytest.CaptureFixture[str]):
    for arguments, words in ((("--cases", "smollm2_real"), "--run: not given"), (("--lengths", "real"), "--data: not")):
        with pytest.raises(SystemExit):
            bench(*SMALL, *arguments)
        assert words in capsys.readouterr().err
