"""`python -m headstart.bench.scheduler` at sizes of a toy."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from headstart.bench import scheduler, side_by_side
from headstart.bench.side_by_side import Row, Way, parse_tree
from headstart.eval.config import TreeConfig
from headstart.eval.decoding.scheduler import KeepAll
from headstart.eval.measuring.metrics import expected_tau
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.heads.formats import save_head
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.saved_heads import untrained_head

#: ways of the runs below: (scheduler, tree)
WAYS = [("plain", "plain"), ("off", "chain1"), ("off", "dynamic:k2:d2:n4"), ("on", "chain3")]
DRAFTS = "--fixed chain1 dynamic:k2:d2:n4 --scheduled chain3 --repeats 2".split()


def measured(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["scheduler", *DRAFTS, *words])
    scheduler.main()


@pytest.fixture(scope="module")
def head(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with random weights, in a directory."""
    directory = tmp_path_factory.mktemp("heads") / "head"
    target = load_target(TargetConfig(name=str(tiny_target), device="cpu"))
    save_head(untrained_head(FAMILIES["eagle3"].config(depth=3, draft_vocab_size=128), target), directory, {})  # type: ignore[call-arg]
    return directory


def test_a_saved_head_is_measured_on_questions(
    tiny_target: Path, head: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "scheduler.json"
    words = f"--target {tiny_target} --head {head} --data {conversations} --name mine --batch 1 2 --out {out}"
    small = "--max-new-tokens 12 --least 3 --prompts 6 --calibrate-prompts 8".split()
    measured(monkeypatch, *words.split(), *small)
    rows = json.loads(out.read_text())
    assert [(row["scheduler"], row["tree"]) for row in rows] == WAYS * 2
    assert [(row["batch"], row["prompts"]) for row in rows] == [(1, 4)] * 4 + [(2, 6)] * 4
    verified = {"plain": 1, "chain1": 2, "dynamic:k2:d2:n4": 4, "chain3": 4}
    for row in rows:
        assert list(row) == [field.name for field in fields(Row)]
        assert (row["head"], row["target"], row["data"]) == ("mine", str(tiny_target), "talk")
        assert (row["acceptance"], row["rates"], row["dtype"]) == ("measured", None, "float32")
        assert row["same_answers"] == 1.0 and 0 < row["active_rows"] <= row["batch"]
        spent = row["verified_tokens_per_cycle"]
        assert 1 <= spent <= 4 if row["scheduler"] == "on" else spent == verified[row["tree"]]
        assert 0 <= row["ece_after"] <= 1 and row["ece_before"] != row["ece_after"]
        assert min(row["runs"]) <= row["tokens_per_s"] <= max(row["runs"]) and len(row["runs"]) == 2
        assert row["context"] > 20 and row["max_new_tokens"] == 12
    for plain in (rows[0], rows[4]):
        assert plain["tau"] == 1.0 and plain["speedup"] == 1.0
    lines = capsys.readouterr().out.splitlines()
    printed = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(row["batch"], row["tree"]) for row in printed] == [(row["batch"], row["tree"]) for row in rows]
    for part in "\n".join(lines).split(": plain ")[1:]:  # a summary for each batch size
        shares = [float(share) for share in re.findall(r"scheduled: ([\d.]+)% of cycles draft", part)]
        assert shares == sorted(shares, reverse=True) and 99 < sum(shares) < 101 and len(shares) <= 4


def test_synthetic_acceptance_gives_the_tau_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of 16 answers: about 850 cycles of the chain, whose τ lies within four standard errors."""
    out = tmp_path / "scheduler.json"
    small = "--preset tiny --context 16 --max-new-tokens 64 --least 16 --batch 4 --tau 2.4 --levels 3".split()
    measured(monkeypatch, *small, "--out", str(out))
    rows = {row["tree"]: row for row in json.loads(out.read_text())}
    assert {(row["scheduler"], row["tree"]) for row in rows.values()} == set(WAYS)
    rates = rows["chain3"]["rates"]
    assert len(rates) == 3 and expected_tau(rates) == pytest.approx(2.4)
    row = rows["chain1"]
    error = 0.5 / row["cycles"] ** 0.5  # one or two tokens: their deviation is at most 0.5
    short = 1 / row["cycles"] * 32 * 0.5  # each answer's last cycle may be cut, by half a token on average
    assert expected_tau(rates[:1]) - short - 4 * error < row["tau"] < expected_tau(rates[:1]) + 4 * error
    assert row["cycles"] > 700 and row["expected_tau"] == pytest.approx(expected_tau(rates[:1]))
    row = rows["chain3"]
    assert (row["acceptance"], row["same_answers"], row["ece_after"]) == ("synthetic", None, None)
    assert (row["head"], row["target"], row["context"], row["prompts"]) == ("eagle3", "tiny", 16, 16)


@pytest.mark.parametrize("family", ["dspark", "medusa"])
def test_other_families_draft_for_presets(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "scheduler.json"
    words = f"--preset tiny --family {family} --context 8 --max-new-tokens 8 --least 1 --batch 2 --fixed chain2"
    measured(monkeypatch, *words.split(), "--rates", "0.9", "0.5", "--repeats", "1", "--out", str(out))
    rows = json.loads(out.read_text())
    assert [(row["head"], row["tree"]) for row in rows] == [(family, tree) for tree in ("plain", "chain2", "chain3")]
    assert rows[0]["rates"] == [0.9, 0.5, 0.5]


def test_rows_that_a_scheduler_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of a run count, not those of its warm-up and of earlier runs."""

    class Counting(KeepAll):
        verified = 0

    counting = Counting()
    monkeypatch.setattr(side_by_side, "scheduler_for", lambda drafter, tree: counting)
    original = side_by_side.Bench._run

    def run(self: side_by_side.Bench, way: Way, *rest: Any) -> Any:
        decoded = original(self, way, *rest)
        if way.scheduler == "on":
            assert way.chooser is counting
            counting.verified += 2 * sum(len(answer.cycles) for answer in decoded.answers)
        return decoded

    monkeypatch.setattr(side_by_side.Bench, "_run", run)
    words = "--preset tiny --context 8 --max-new-tokens 16 --least 1 --batch 2 --repeats 2".split()
    rows = scheduler.bench_all(scheduler.parser().parse_args([*DRAFTS, *words]))
    assert [row.verified_tokens_per_cycle for row in rows] == [1, 2, 4, 2]


def test_new_rows_take_the_place_of_those_with_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "scheduler.json"
    words = "--preset tiny --context 8 --max-new-tokens 4 --least 1 --batch 1 --repeats 1".split()
    arguments = scheduler.parser().parse_args([*words, "--fixed", "chain1", "--scheduled", "chain1"])
    rows = [replace(row, head=head) for head in ("eagle3", "other") for row in scheduler.bench_all(arguments)]
    scheduler.add_rows(out, rows, scheduler.row_key)
    arguments.out = out
    new = scheduler.bench_all(arguments)
    kept = json.loads(out.read_text())
    assert [row["head"] for row in kept] == ["other"] * 3 + ["eagle3"] * 3
    assert [row["runs"] for row in kept[3:]] == [row.runs for row in new]
    assert [row["scheduler"] for row in kept] == ["plain", "off", "on"] * 2


def test_labels_of_drafts() -> None:
    assert parse_tree("chain7", 3) == TreeConfig("chain", 7)
    assert parse_tree("dynamic:k4:d5:n16", 3) == TreeConfig("dynamic", 5, 4, 16)
    assert parse_tree("dynamic:n16", 3) == TreeConfig("dynamic", 3, total_tokens=16)
    assert parse_tree("ddtree:n32", 4) == TreeConfig("ddtree", 4, total_tokens=32)
    assert parse_tree("static:n24", 4) == TreeConfig("static", 4, total_tokens=24)
    for wrong in ("chain", "chain0", "dynamic", "ddtree:k3:n8", "ddtree:n1", "ddtree:n8:x2", "tree60", "chain:n4", ""):
        with pytest.raises(ConfigError, match="expected chain5, dynamic"):
            parse_tree(wrong, 3)


def test_rates_that_give_a_tau() -> None:
    for tau, levels in ((2.95, 5), (1.0, 3), (4.0, 3), (3.7, 7)):
        rate = scheduler.constant_rate(tau, levels)
        assert expected_tau([rate] * levels) == pytest.approx(tau, abs=1e-9)
    with pytest.raises(ConfigError, match="a chain of 3 gives from 1 to 4"):
        scheduler.constant_rate(4.5, 3)


def test_summaries_name_what_is_gained(tmp_path: Path) -> None:
    words = "--preset tiny --context 8 --max-new-tokens 4 --least 1 --batch 1 --repeats 1".split()
    arguments = scheduler.parser().parse_args([*words, "--fixed", "chain1", "chain2", "--scheduled", "chain2"])
    rows = scheduler.bench_all(arguments)
    speeds = (100.0, 80.0, 125.0, 150.0)
    rows = [
        replace(row, tokens_per_s=x, speedup=x / 100, expected_tau=row.tau) for row, x in zip(rows, speeds, strict=True)
    ]
    text = "\n".join(side_by_side.summary(rows))
    assert "best fixed draft chain2: 1.250 × plain" in text
    assert "chain2, scheduled: 1.500 × plain, 1.200 × the best fixed draft, 1.200 × the better of both" in text
    slow = [replace(row, tokens_per_s=90.0, speedup=0.9) if row.scheduler == "off" else row for row in rows]
    assert "1.667 × the best fixed draft, 1.500 × the better of both" in "\n".join(side_by_side.summary(slow))
    lucky = [replace(row, expected_tau=row.tau * 0.9) if row.scheduler == "on" else row for row in rows]
    assert "chain2, scheduled: 1.350 × plain, 1.080 × the best fixed draft" in "\n".join(side_by_side.summary(lucky))
    fast = [replace(row, same_answers=0.5) for row in rows]
    assert "token by token: chain1 50.0%, chain2 50.0%, chain2 50.0%" in "\n".join(side_by_side.summary(fast))


def test_questions_of_all_tasks_take_turns(tmp_path: Path) -> None:
    from headstart.eval.prompts import load_prompts

    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}", "task": task}) + "\n" for n, task in enumerate("aaabbc")))
    assert [prompt.task for prompt in scheduler.by_turns(load_prompts(str(data)))] == list("abcaba")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for words in (["--target", "T"], ["--preset", "tiny", "--fixed", "--scheduled"]):
        monkeypatch.setattr("sys.argv", ["scheduler", *words])
        with pytest.raises(SystemExit):
            scheduler.main()
    said = capsys.readouterr().err
    assert "give --preset, or --target, --head and --data" in said and "at least one draft" in said
