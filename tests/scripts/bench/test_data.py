"""The benchmark of preparing data, at small sizes; and the rows that were recorded with it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from headstart.bench import data
from headstart.bench.kill_points import Kills, small_target
from headstart.heads.errors import DataError

RECORDED = Path(__file__).resolve().parents[3] / "docs/results/data_speed.json"
KEYS = {"case", "value", "unit", "card", "command", "git_revision"}


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """90 answered conversations of the small tokenizer's words, and one that nobody answered."""
    rows = [
        [{"role": "user", "content": f"w{n % 60} w1 w2"}, {"role": "assistant", "content": "w5 w6 " * (1 + n % 7)}]
        for n in range(90)
    ]
    rows.append([{"role": "user", "content": "w1"}])
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["headstart.bench.data", *words])
    data.main()


def test_the_ratio_counts_the_same_tokens_on_both_sides(answers: Path, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "tokenizer"
    small_target().tokenizer.save_pretrained(folder)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # put back afterwards
    out = tmp_path / "rows.json"
    words = ["--cases", "tokenise_ratio", "--data", str(answers), "--tokenizer", str(folder), "--rounds", "1"]
    for _ in range(2):  # the second run replaces the rows of the first
        run(monkeypatch, *words, "--out", str(out))
    rows = json.loads(out.read_text())
    assert [row["details"]["way"] for row in rows] == ["one thread", "all threads"]
    for row in rows:
        assert KEYS < row.keys() and row["case"] == "tokenise_ratio" and 0 < row["value"] < 2
        shapes = row["details"]["records_joined"]
        assert [shapes[size]["conversations"] for size in ("1", "4", "40")] == [90, 22, 2]
        # by hand: per record, 3 words of the question, 2 per repeat of the answer, and 4 special tokens
        assert shapes["1"]["tokens"] == sum(3 + 2 * (1 + n % 7) + 4 for n in range(90))
        assert shapes["40"]["tokens"] == sum(3 + 2 * (1 + n % 7) + 4 for n in range(80))


def test_other_tokens_than_encode_batch_gives_are_noticed(answers: Path) -> None:
    tokenizer = small_target().tokenizer
    conversations = data.joined(data.messages_of(answers, None), 1)
    encodings = tokenizer.backend_tokenizer.encode_batch(["<u> w1 <e>"] * 90, add_special_tokens=False)
    with pytest.raises(DataError, match="conversation 0: found other tokens"):
        data.require_same(encodings, conversations, data.Encoder(tokenizer, (1,), data.DataConfig()))


def test_the_peak_is_that_of_a_process_of_its_own(answers: Path, tmp_path: Path) -> None:
    small_target().tokenizer.save_pretrained(tmp_path / "tokenizer")
    row = data.stream_peak(data.messages_of(answers, None), 200, str(tmp_path / "tokenizer"), tmp_path)
    assert row.case == "stream_peak_gib" and row.details["samples"] == row.details["conversations"] == 200
    assert 0.05 < row.details["before_gib"] <= row.value < 2
    assert len({line for line in (tmp_path / "stream.jsonl").read_text().splitlines()}) == 200


def test_kills_and_families_become_rows(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data, "kill_points", lambda points, seed, folder: Kills(points, points - 1, faults=["lost"]))
    monkeypatch.setattr(data, "run_test", lambda name: (True, "1 passed"))
    monkeypatch.setattr(data, "families_ok", lambda: data.record("template_families_ok", 3.0, "families"))
    out = tmp_path / "rows.json"
    run(monkeypatch, "--cases", "kill_points_ok", "template_families_ok", "--out", str(out))
    rows = json.loads(out.read_text())
    assert [(row["case"], row["value"]) for row in rows] == [
        ("kill_points_ok", 19), ("kill_points_ok", 20), ("template_families_ok", 3.0)]  # fmt: skip
    assert rows[0]["details"]["faults"] == ["lost"]


def test_a_file_without_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi"}\n')
    with pytest.raises(DataError, match="found no conversation with an answer"):
        data.messages_of(path, None)


@pytest.mark.slow
def test_the_families_of_the_checkout_are_right() -> None:
    row = data.families_ok()
    assert row.value == row.details["of"] >= 15 and row.details["wrong"] == []


def test_recorded_rows_say_what_was_measured_where() -> None:
    rows = json.loads(RECORDED.read_text())
    for row in rows:
        assert KEYS <= row.keys(), row
        assert isinstance(row["value"], int | float) and row["unit"] and row["card"]
        assert row["command"].startswith("python") and re.fullmatch(r"[0-9a-f]{12}", row["git_revision"])
    found = {row["case"]: row["value"] for row in rows}
    assert {*data.HERE, "distil_tokens_per_s"} <= found.keys()
    assert len({data.key(row) for row in rows}) == len(rows)
