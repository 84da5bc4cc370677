"""`python -m headstart.bench.blocks` at sizes of a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.bench import blocks
from headstart.bench.presets import BLOCK_FAMILY, CORRECTED_FAMILY


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, object]]:
    out = tmp_path / "blocks.json"
    small = "--preset tiny --context 32 --layers 2 --repeats 1 --new-tokens 12 --out".split()
    monkeypatch.setattr("sys.argv", ["blocks", *small, str(out), *more])
    blocks.main()
    rows: list[dict[str, object]] = json.loads(out.read_text())
    return rows


def test_both_heads_draft_from_both_vocabularies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(tmp_path, monkeypatch)
    names = [f"{family}_block7_ms" for family in (BLOCK_FAMILY, CORRECTED_FAMILY)]
    assert [(row["case"], row["draft_vocab"]) for row in rows] == [(name, u) for u in (128, 512) for name in names]
    for alone, corrected in zip(rows[::2], rows[1::2], strict=True):
        assert alone["walk_ms"] is None
        assert corrected["walk_ms"] == pytest.approx(corrected["value"] - alone["value"])  # type: ignore[operator]
    assert all(row["layers"] == 2 and row["block"] == 7 and row["batch"] == 1 for row in rows)


def test_the_loop_with_the_whole_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(tmp_path, monkeypatch, "--cycle", "--batch", "2")
    assert [row["case"] for row in rows] == [f"{f}_block7_cycle_ms" for f in (BLOCK_FAMILY, CORRECTED_FAMILY)]
    assert all(row["value"] > 0 and row["batch"] == 2 for row in rows)  # type: ignore[operator]
