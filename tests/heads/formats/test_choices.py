"""What tune measured, from headstart.json to the engines: files beside an export, launch commands, the card."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from fake_hub import local_hub
from format_layouts import U, our_head
from huggingface_hub import HfApi

from headstart.heads.errors import FormatError
from headstart.heads.families.dspark.head import DSparkConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.files import read_json, write_json
from headstart.heads.formats import ExportConfig, check_directory, export_head, load_head, push_export
from headstart.heads.formats.calibration import Calibration
from headstart.heads.formats.card import render_card
from headstart.heads.formats.choices import LAST_BATCH, measured_of, tables_of, tokens_by_batch
from headstart.heads.formats.handling import Handling
from headstart.heads.formats.launch import commented, launch_commands, why_doubt, why_tokens
from headstart.heads.formats.sidecar import annotate, notes

SCALED = Calibration(
    "temperature", "confidence", temperatures=[1.5, 0.5, 2.0], dataset="wikitext", num_samples=7,
    ece_before=[0.1, 0.2, 0.3], ece_after=[0.01, 0.02, 0.03],
).to_json()  # fmt: skip
RATES = {"sample_batch_tokens": [2, 4, 64], "sample_steps_per_sec": [70.5, 60.0, 60.0], "max_batch_tokens": 64}
PER_BATCH = [[1, 16, 3], [17, LAST_BATCH, 0]]
STS, SPS = "sglang_sts.json", "sglang_sps.json"
STS_OPTION, SPS_OPTION = "--speculative-dspark-confidence-sts-path", "--speculative-dspark-sps-table-path"


def chain(depth: int, speedup: float) -> dict[str, Any]:
    return {"label": f"chain{depth}", "tree": {"kind": "chain", "depth": depth}, "tau": 2.0, "speculate": speedup > 1,
            "predicted_speedup": speedup, "measured_speedup": speedup}  # fmt: skip


def tuned(**changes: Any) -> dict[str, Any]:
    entry = {"batches": {"8": chain(3, 1.4), "32": chain(3, 0.9)}, "tokens_per_batch": PER_BATCH, "step_rates": RATES}
    return {"card": {**entry, **changes}}


TUNED: dict[str, Any] = {"target": {"name": "a/b"}, "tuned": tuned(), "calibration": SCALED}


def block_head() -> Any:
    return our_head(DSparkConfig(layers=1, depth=3, mask_token_id=90))


def exported(place: Path, provenance: dict[str, Any], engine: str = "portable", head: Any = None) -> Path:
    export_head(head or block_head(), place, ExportConfig([engine], "float32"), provenance)
    return place


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({1: 7}, [[1, LAST_BATCH, 7]]),
        ({8: 3, 1: 7, 32: 0}, [[1, 2, 7], [3, 16, 3], [17, LAST_BATCH, 0]]),
        ({1: 5, 8: 5, 32: 2, 64: 2}, [[1, 16, 5], [17, LAST_BATCH, 2]]),
        ({1: 0, 2: 3}, [[1, 1, 0], [2, LAST_BATCH, 3]]),
        # the ratio decides: 2 lies between 1 and 4, and takes the smaller
        ({1: 4, 4: 2}, [[1, 2, 4], [3, LAST_BATCH, 2]]),
    ],
)
def test_tokens_by_batch(chosen: dict[int, int], expected: list[list[int]]) -> None:
    assert tokens_by_batch(chosen) == expected
    for batch in range(1, 200):
        (tokens,) = [tokens for first, last, tokens in expected if first <= batch <= last]
        near = min(chosen, key=lambda size: (max(size, batch) / min(size, batch), size))
        assert tokens == chosen[near], batch


@pytest.mark.parametrize("engine", ["portable", "sglang", "vllm"])
def test_an_export_carries_sglangs_files(tmp_path: Path, engine: str) -> None:
    place = exported(tmp_path / "my head", TUNED, engine)
    assert read_json(place / STS) == {
        "temperatures": [1.5, 0.5, 2.0], "dataset": "wikitext", "num_samples": 7, "ece_before": [0.1, 0.2, 0.3],
        "ece_after": [0.01, 0.02, 0.03],
    }  # fmt: skip
    assert read_json(place / SPS) == RATES
    comment, command = launch_commands(str(place), notes(place), ["sglang"])["sglang"].splitlines()
    assert comment.startswith("# SGLANG_RAGGED_VERIFY_MODE=compact")
    words = shlex.split(command)
    assert words[words.index(STS_OPTION) + 1] == str(place / STS)
    assert words[words.index(SPS_OPTION) + 1] == str(place / SPS)
    report = check_directory(place)
    assert report.loads("sglang") and not any(STS in note for note in report.engines["sglang"].notes)
    assert load_head(place).depth == 3
    # exported again without a tuning, what the earlier export left goes
    exported(place, {"target": {"name": "a/b"}}, engine)
    assert not (place / STS).exists() and not (place / SPS).exists()


def test_a_head_that_was_not_tuned_is_exported_as_before(tmp_path: Path) -> None:
    place = exported(tmp_path / "out", {"target": {"name": "a/b"}})
    assert {path.name for path in place.iterdir()} == {"config.json", "model.safetensors", "headstart.json"}
    said = launch_commands(str(place), notes(place), ["vllm", "sglang"])
    spec = json.loads(shlex.split(said["vllm"])[-1])
    assert spec == {"method": "dspark", "model": str(place), "num_speculative_tokens": 3}
    assert said["sglang"].endswith("--speculative-dspark-block-size 3") and "#" not in said["sglang"]
    assert why_tokens(notes(place)) == ""


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        # of another length than SGLang serves, it would refuse the file
        ({"calibration": {**SCALED, "temperatures": [1.0, 1.0], "ece_before": [], "ece_after": []}}, {SPS}),
        # temperatures beside a logistic, with their own error
        ({"calibration": {**SCALED, "kind": "logistic", "slope": 1.0, "biases": [0.0] * 3}}, {STS, SPS}),
        ({"tuned": tuned(step_rates=None)}, {STS}),
        ({"tuned": None}, {STS}),
        # one number of tokens is no table to it
        ({"tuned": tuned(step_rates={name: v[:1] if isinstance(v, list) else v for name, v in RATES.items()})}, {STS}),
        # its scheduler goes by the confidence head alone
        ({"calibration": {**SCALED, "source": "draft_probability"}}, set()),
        ({"calibration": None}, set()),
    ],
)
def test_files_are_left_out_that_it_would_not_take(tmp_path: Path, changes: dict[str, Any], held: set[str]) -> None:
    place = exported(tmp_path / "out", {**TUNED, **changes})
    assert {path.name for path in place.glob("sglang_*")} == held
    said = launch_commands(str(place), notes(place), ["sglang"])["sglang"]
    assert (STS_OPTION in said, SPS_OPTION in said) == (STS in held, SPS in held)


def spec_of(side: dict[str, Any]) -> tuple[dict[str, Any], str]:
    command = launch_commands("d", side, ["vllm"])["vllm"]
    comments, _, line = command.rpartition("\n")
    return json.loads(shlex.split(line)[-1]), comments


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("eagle3", PER_BATCH), ("eagle", PER_BATCH), ("dflash", PER_BATCH), ("dspark", PER_BATCH),
        # it expects as many logits as at its start
        ("peagle", None), ("medusa", None),
    ],
)  # fmt: skip
def test_vllm_drafts_by_batch_size(family: str, expected: list[list[int]] | None) -> None:
    side = {"type": family, "config": {"depth": 3}, "target": {"name": "a/b"}, "tuned": tuned()}
    spec, comments = spec_of(side)
    assert spec.get("num_speculative_tokens_per_batch_size") == expected and spec["num_speculative_tokens"] == 3
    assert ("from batch 17 on drafting does not pay" in comments) is (expected is not None)
    assert "enable_adaptive_verification" not in spec
    said = why_tokens(side)
    assert "Drafted tokens that pay by batch size: 1–16: 3, from 17 on: 0. With 0, decode plainly." in said


def test_vllm_drafts_the_most_that_pays_anywhere() -> None:
    """It takes no more at a batch size than the number at its start."""
    side = {"type": "eagle3", "config": {"depth": 3}, "target": {"name": "a/b"}}
    spec, comments = spec_of({**side, "tuned": tuned(tokens_per_batch=[[1, 4, 3], [5, 64, 5], [65, 128, 2]])})
    assert spec["num_speculative_tokens"] == 5 and "does not pay" not in comments
    # the same number everywhere needs no table, and one that pays nowhere is not launched
    for rows in ([[1, 128, 3]], None):
        spec, comments = spec_of({**side, "tuned": tuned(tokens_per_batch=rows)})
        assert "num_speculative_tokens_per_batch_size" not in spec and comments == ""


def test_vllm_drafts_whole_blocks_or_none() -> None:
    rows = [[1, 4, 3], [5, 64, 2]]
    for family, able in (("dflash", False), ("dspark", True)):
        side = {"type": family, "config": {"depth": 3}, "target": {"name": "a/b"}}
        spec, _ = spec_of({**side, "tuned": tuned(tokens_per_batch=rows)})
        assert ("num_speculative_tokens_per_batch_size" in spec) is able and spec["num_speculative_tokens"] == 3


def test_vllms_adaptive_verification_is_for_confidence_heads() -> None:
    side = {"type": "dspark", "config": {"depth": 3}, **TUNED}
    spec, comments = spec_of(side)
    assert spec["enable_adaptive_verification"] is True and "num_speculative_tokens_per_batch_size" not in spec
    assert "needs full CUDA graphs" in comments
    target = {"name": "a/b", "adapter_rank": 8}
    for other in (
        {**side, "type": "dflash"}, {**side, "target": target},
        {**side, "calibration": {**SCALED, "source": "draft_probability"}},
    ):  # fmt: skip
        assert "enable_adaptive_verification" not in spec_of(other)[0]


def test_the_tables_of_the_gpu_that_commands_follow() -> None:
    slow = {**tuned()["card"], "batches": {"8": chain(3, 1.1)}, "tokens_per_batch": [[1, 9, 2]]}
    side = {"type": "eagle3", "config": {"depth": 3}, "tuned": {"a slow card": slow, **tuned()}}
    found = tables_of(side)
    assert found is not None and found.device == "card" and found.tokens == PER_BATCH
    side["tuned"]["card"]["batches"] = {}
    found = tables_of(side)
    assert found is not None and found.device == "a slow card"
    assert tables_of({"type": "eagle3", "config": {}, "tuned": {"card": {"batches": {}}, "odd": 1}}) is None


def rates(**changes: Any) -> dict[str, Any]:
    return {"step_rates": {**RATES, **changes}}


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"tokens_per_batch": 3}, r"tokens_per_batch is 3, expected a list of \[first"),
    ({"tokens_per_batch": []}, r"tokens_per_batch is \[\]"),
    ({"tokens_per_batch": [[1, 4]]}, r"tokens_per_batch\[0\] is \[1, 4\], expected three whole numbers"),
    ({"tokens_per_batch": [[1, 4, 2.0]]}, r"tokens_per_batch\[0\]"),
    ({"tokens_per_batch": [[2, 4, 3]]}, "a range that begins at batch size 1"),
    ({"tokens_per_batch": [[1, 4, 3], [6, 9, 2]]}, r"tokens_per_batch\[1\] is .* begins at batch size 5"),
    ({"tokens_per_batch": [[1, 0, 3]]}, "a range that begins"),
    ({"tokens_per_batch": [[1, 4, -1]]}, "0 to 1024 drafted tokens"),
    ({"step_rates": [1]}, r"step_rates is \[1\], expected an object with sample_batch_tokens"),
    ({"step_rates": {**RATES, "bias": 1}}, "step_rates is"),
    (rates(sample_batch_tokens=[2, 2, 64]), "step_rates.sample_batch_tokens is .* expected ascending"),
    (rates(sample_batch_tokens=[0, 2, 64]), "ascending numbers of tokens, 1 or more"),
    (rates(sample_batch_tokens=[2, True, 64]), "whole numbers"),
    (rates(sample_steps_per_sec=[3.0, 2.0]), "step_rates.sample_steps_per_sec is .* expected 3 finite numbers"),
    (rates(sample_steps_per_sec=[3.0, 2.0, 0.0]), "above 0"),
    (rates(sample_steps_per_sec=[3.0, 2.0, 2.5]), "numbers that never rise"),
    (rates(max_batch_tokens=63), "step_rates.max_batch_tokens is 63, expected a whole number, 64 or more"),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGED)
def test_damaged_tables_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    side = {"type": "dspark", "config": {"depth": 3}, **TUNED, "tuned": tuned(**changes)}
    for refuse in (tables_of, lambda side: launch_commands("d", side, ["vllm"])):
        with pytest.raises(FormatError, match=message) as caught:
            refuse(side)
        assert "headstart.json: tuned['card']." in str(caught.value) and "tune` again" in str(caught.value)
    with pytest.raises(FormatError, match=message):
        exported(tmp_path / "out", {**TUNED, "tuned": tuned(**changes)})
    assert not (tmp_path / "out").exists()


def test_a_damaged_calibration_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="calibration.temperatures is"):
        exported(tmp_path / "out", {**TUNED, "calibration": {**SCALED, "temperatures": [0.0]}})
    assert not (tmp_path / "out").exists()


def test_check_compares_the_files_with_headstart_json(tmp_path: Path) -> None:
    place = exported(tmp_path / "out", TUNED)
    write_json(place / STS, {**read_json(place / STS), "temperatures": [9.0, 9.0, 9.0]})
    (place / SPS).write_text("{")
    found = check_directory(place).engines["sglang"]
    assert found.handling is Handling.WRONG
    assert any(reason.startswith(f"{STS} is not what `headstart tune` measured") for reason in found.reasons)
    assert any(SPS in reason and "not valid JSON" in reason for reason in found.reasons)
    # other engines do not read them
    assert check_directory(place).loads("vllm")
    for name in (STS, SPS):
        (place / name).unlink()
    found = check_directory(place).engines["sglang"]
    assert found.handling is Handling.LOADS and sum("is not here" in note for note in found.notes) == 2
    # a table that nobody can read says nothing of the head
    annotate(place, {"tuned": tuned(step_rates=1)})
    found = check_directory(place).engines["sglang"]
    assert found.handling is Handling.LOADS and any("step_rates is 1" in note for note in found.notes)


def test_the_card_says_how_to_fetch_and_name_them(tmp_path: Path) -> None:
    place = exported(tmp_path / "out", TUNED)
    card = render_card("me/head", notes(place), None, ["vllm", "sglang"])
    assert f"hf download me/head {STS} {SPS} --local-dir head" in card
    assert f"{STS_OPTION} head/{STS} {SPS_OPTION} head/{SPS}" in card
    assert "Drafted tokens that pay by batch size: 1–16: 3, from 17 on: 0." in card
    assert "hf download" not in render_card("me/head", notes(place), None, ["vllm"])


def test_they_are_uploaded_as_headstart_json_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = exported(tmp_path / "out", TUNED)
    write_json(place / SPS, {"old": 1})
    with local_hub(monkeypatch) as hub:
        push_export(place, ExportConfig(push_to_hub="me/head"), None, HfApi(endpoint=hub.address, token="secret"))
        assert json.loads(hub.files[SPS]) == RATES and json.loads(hub.files[STS])["num_samples"] == 7


def test_other_heads_have_no_such_files(tmp_path: Path) -> None:
    place = exported(tmp_path / "out", TUNED, head=our_head(Eagle3Config(draft_vocab_size=U)))
    assert not list(place.glob("sglang_*")) and STS_OPTION not in str(launch_commands("d", notes(place), ["sglang"]))


def measured(**changes: Any) -> dict[str, Any]:
    return {
        "pays": True, "tokens": 2, "speedup": 1.5, "speedup_ci95": [1.25, 1.75], "batch_size": 1, "device": "H200",
        "on_cpu": False, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "tokens", "why", "doubt"),
    [
        ({}, 2, "2 drafted tokens: the fastest chain that was measured at batch 1 on H200 (`headstart eval`).", None),
        ({"pays": False, "tokens": None, "speedup": 0.8, "speedup_ci95": [0.75, 0.85], "batch_size": 8}, 3, "",
         "drafting does not pay on H200 at batch 8: 0.80× (95 %: 0.75–0.85)"),
        ({"pays": None, "speedup": 1.1, "speedup_ci95": [0.9, 1.3]}, 2,
         "2 drafted tokens: the fastest chain that was measured at batch 1 on H200 (`headstart eval`).",
         "it cannot be told whether it pays on H200 at batch 1: 1.10× (95 %: 0.90–1.30)"),
        ({"pays": None, "tokens": None, "speedup": None, "speedup_ci95": None, "on_cpu": True}, 3, "",
         "measured on a CPU only: measure it on the card that serves"),
        ({"pays": False, "tokens": None, "speedup": None, "speedup_ci95": None, "on_cpu": True}, 3, "",
         "no draft was accepted: drafting cannot pay"),
        ({"tokens": "many"}, 3, "", None),
        ({"speedup_ci95": [1.0]}, 3, "", None),
    ],
)  # fmt: skip
def test_a_launch_command_follows_the_evaluation(
    changes: dict[str, Any], tokens: int, why: str, doubt: str | None
) -> None:
    side = {"type": "eagle3", "config": {"depth": 3}, "target": {"name": "a/b"}, "measured": measured(**changes)}
    assert spec_of(side)[0]["num_speculative_tokens"] == tokens
    assert why_tokens(side) == why and why_doubt(side) == doubt
    said = commented("vllm", "eagle3", "serve", doubt)
    assert said.startswith(f"# {doubt}\n") if doubt else "pay" not in said
    card = render_card("a/head", side, None, ["vllm"])
    assert (f"# {doubt}" in card) is (doubt is not None) and ("on H200 (`headstart eval`)" in card) is (why != "")


def test_a_tuning_goes_before_the_evaluation() -> None:
    side = {"type": "eagle3", "config": {"depth": 3}, "target": {"name": "a/b"}}
    both = {**side, "tuned": tuned(), "measured": measured(pays=False)}
    assert spec_of(both)[0]["num_speculative_tokens"] == 3 and why_doubt(both) is None
    lost = json.loads(json.dumps(tuned()))
    for entry in lost.values():
        for choice in entry["batches"].values():
            choice["speculate"] = False
    assert why_doubt({**both, "tuned": lost}) == "headstart tune found no batch size at which drafting pays"


def test_a_malformed_evaluation_is_passed_over() -> None:
    side = {"type": "eagle3", "config": {"depth": 3}, "target": {"name": "a/b"}}
    for found in (None, [], "x", {}, measured(pays="yes"), measured(tokens=0), measured(tokens=10**9)):
        assert measured_of({**side, "measured": found}) is None
    hostile = {**side, "measured": measured(pays=False, device="card\nrm -rf /")}
    assert "\n" not in (why_doubt(hostile) or "")
