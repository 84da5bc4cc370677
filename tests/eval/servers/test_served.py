"""A running server is measured from its own counters, by the definition that Headstart's loop follows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import serving

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Cycle
from headstart.eval.measuring.metrics import acceptance
from headstart.eval.measuring.rendering import render_markdown, write_report
from headstart.eval.measuring.report import Report
from headstart.eval.servers import served
from headstart.eval.servers.counters import Metrics, cycles_from_counts, parse_metrics, reached_of_histogram
from headstart.eval.servers.served import evaluate_server
from headstart.heads.errors import ConfigError, ServerError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = [{"id": "a", "task": "ids", "prompt_token_ids": [1, 2, 3]}, {"id": "b", "task": "chat", "prompt": "hi"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings(data: Path, **more: Any) -> EvalConfig:
    return EvalConfig(data=str(data), **{"max_new_tokens": 64, "warmup_tokens": 0, **more})


#: the scripts of the fake: accepted 1, 3, 0 and 2, 2, 3 drafts
EXPECTED = acceptance([Cycle(3, a, a + 1) for a in (1, 3, 0, 2, 2, 3)])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tau_and_positions_from_the_servers_counters(engine: str, data: Path) -> None:
    with serving(engine=engine) as (url, state):
        report = evaluate_server(engine, url, settings(data))
    assert report.tau == EXPECTED.tau == 17 / 6
    assert report.per_position_acceptance == EXPECTED.per_position == [5 / 6, 4 / 6, 2 / 6]
    assert report.per_position_conditional == EXPECTED.per_position_conditional
    assert (report.forwards, report.tokens, report.prompts) == (6, 17, 2)
    assert report.tasks["ids"].tau == 7 / 3 and report.tasks["chat"].tau == 10 / 3
    assert report.tau_ci95 is not None and report.tokens_per_s is not None
    assert report.tree["label"] == "chain3"
    version = {"vllm": "0.32.0", "sglang": "0.5.23"}[engine]
    named = {"name": engine, "version": version, "url": url, "model": "tiny"}
    assert report.engine is not None and report.engine.items() >= named.items()
    paths = [path for path, _ in state.requests]
    assert paths == ["/v1/completions", "/v1/chat/completions"]
    assert all(body["temperature"] == 0 and body["model"] == "tiny" for _, body in state.requests)
    assert state.requests[0][1]["prompt"] == [1, 2, 3]
    everything = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": {"vllm": 0, "sglang": -1}[engine]}
    everything |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    everything |= {"min_tokens": 0, "ignore_eos": False}
    assert all(body.items() >= (everything | {"max_tokens": 64}).items() for _, body in state.requests)
    assert report.engine["request"].items() >= everything.items()
    assert state.requests[1][1]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("limit", [3, 5, 6, 7, 9])
def test_what_lies_beyond_the_limit_does_not_count(engine: str, limit: int, data: Path) -> None:
    """The engine counts the last forward whole; Headstart's loop counts what was kept."""
    ours = []
    for script in ([1, 3, 0], [2, 2, 3]):
        left = limit - 1
        for accepted in script:
            if left > 0:
                kept = min(accepted + 1, left)
                ours.append(Cycle(3, min(accepted, kept), kept))
                left -= kept
    expected = acceptance(ours)
    with serving(engine=engine) as (url, _):
        report = evaluate_server(engine, url, settings(data, max_new_tokens=limit))
    assert (report.tau, report.per_position_acceptance) == (expected.tau, expected.per_position)


def test_the_loops_own_settings_are_sent(data: Path) -> None:
    with serving() as (url, state):
        evaluate_server("vllm", url, settings(data, repetition_penalty=1.2, top_k=5, top_p=0.9, min_p=0.1))
    wanted = {"repetition_penalty": 1.2, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.0}
    assert all(body.items() >= wanted.items() for _, body in state.requests)


def test_a_server_that_books_late_is_waited_for(data: Path) -> None:
    with serving(delay=0.2) as (url, _):
        assert evaluate_server("vllm", url, settings(data, warmup_tokens=4)).tau > 1


def test_several_requests_at_once_and_merged_messages(data: Path) -> None:
    data.write_text("".join(json.dumps({"prompt_token_ids": [n]}) + "\n" for n in range(4)))
    with serving(merge=True) as (url, _):
        report = evaluate_server("vllm", url, settings(data, batch_size=2))
    assert report.tau == EXPECTED.tau and report.per_position_acceptance == EXPECTED.per_position
    assert report.batch_size == 2 and report.prompts == 4
    found = report.latency["speculative"]
    assert 0 < found["first_token_p50_ms"] <= found["first_token_p95_ms"] and found["token_p50_ms"] >= 0


def test_conversations_go_on_with_the_servers_answers(data: Path) -> None:
    data.write_text(json.dumps({"turns": ["one", "two"]}) + "\n")
    with serving(scripts=[[1]]) as (url, state):
        report = evaluate_server("vllm", url, settings(data))
    assert report.prompts == 1 and report.forwards == 2
    roles = [message["role"] for message in state.requests[1][1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert state.requests[1][1]["messages"][1]["content"] == "w w w "


def test_an_answer_without_text_is_no_history(data: Path) -> None:
    records = [{"turns": ["one", "two", "three"]}, {"prompt": "hi", "messages": None, "system": "S"},
               {"messages": [{"role": "user", "content": "x", "weight": 1}]}]  # fmt: skip
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    with serving(scripts=[[1]], silent=True) as (url, state):
        report = evaluate_server("vllm", url, settings(data, batch_size=2))
    assert [len(body["messages"]) for _, body in sorted(state.requests, key=lambda r: len(r[1]["messages"]))] == [
        1,
        1,
        2,
    ]
    assert "2 later turns left out: the answer before them had no text" in report.notes
    assert "fields that are not read and reach no prompt, by conversations: 'weight' (1)" in report.notes


SGLANG_SOURCES = {
    "verifications of each answer, positions from the stream": ({"histogram": False}, True),
    "counter": ({"histogram": False, "verify_count": False}, True),
    "verifications without positions": ({"histogram": False, "merge": True}, False),
    "counter without positions": ({"histogram": False, "verify_count": False, "merge": True}, False),
}


@pytest.mark.parametrize(("given", "positions"), SGLANG_SOURCES.values(), ids=SGLANG_SOURCES.keys())
def test_older_sglang_versions_say_less(given: dict[str, Any], positions: bool, data: Path) -> None:
    with serving(engine="sglang", **given) as (url, _):
        report = evaluate_server("sglang", url, settings(data))
    assert report.tau == EXPECTED.tau
    assert report.per_position_acceptance == (EXPECTED.per_position if positions else [])
    assert any(note.startswith("τ comes from") for note in report.notes)
    assert any("not reported" in note for note in report.notes) is not positions


@pytest.mark.parametrize(("mean", "metrics", "source"), [(2.0, False, "avg_spec"), (None, True, "gauge")])
def test_sglang_with_a_mean_only(mean: float | None, metrics: bool, source: str, data: Path) -> None:
    given = {"histogram": False, "verify_count": False, "counter": False, "mean_length": mean, "metrics": metrics}
    with serving(engine="sglang", scripts=[[1, 3, 0, 2, 0]], **given) as (url, _):
        report = evaluate_server("sglang", url, settings(data))
    assert report.tau == pytest.approx(mean or 2.5, abs=0.3)
    assert any(source in note for note in report.notes)


def fails(engine: str, data: Path, given: dict[str, Any], match: str, **call: Any) -> None:
    with serving(engine=engine, **given) as (url, _), pytest.raises(ServerError, match=match):
        evaluate_server(engine, url, settings(data), **call)


def test_no_speculation(data: Path) -> None:
    fails("vllm", data, {"speculative": False}, "without speculation.*--speculative-config")
    fails("sglang", data, {"speculative": False}, "without speculation.*--speculative-algorithm")


def test_no_metrics(data: Path) -> None:
    fails("vllm", data, {"metrics": False}, "/metrics: cannot be read.*--disable-log-stats")
    nothing = {"metrics": False, "histogram": False, "verify_count": False, "counter": False}
    fails("sglang", data, nothing, "--enable-metrics and speculation on, or name another --engine")


def test_another_engine_behind_the_address(data: Path) -> None:
    with serving(engine="sglang") as (url, _), pytest.raises(ServerError, match="holds no vllm: metrics"):
        evaluate_server("vllm", url, settings(data))


def test_wrong_and_ambiguous_models(data: Path) -> None:
    fails("vllm", data, {}, "does not serve 'other'; it serves tiny", model="other")
    fails("vllm", data, {"models": ("one", "two")}, "serves one, two; name one with --model")
    with serving() as (url, _):
        assert evaluate_server("vllm", url, settings(data), model="/models/tiny").target["name"] == "tiny"


def test_somebody_else_on_the_server(data: Path) -> None:
    fails("vllm", data, {"strangers": 1}, "finished 2 requests while 1 were sent")


def test_counters_that_never_move(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "SETTLE", 0.1)
    fails("vllm", data, {"delay": 60}, "counted 0 finished requests")


def test_the_key_is_sent(data: Path) -> None:
    fails("vllm", data, {"key": "secret"}, "OPENAI_API_KEY")
    with serving(key="secret") as (url, _):
        assert evaluate_server("vllm", url + "/v1/", settings(data), key="secret").tau == EXPECTED.tau


def test_nobody_there(data: Path) -> None:
    with pytest.raises(ServerError, match=r"http://127.0.0.1:9: no server answers.*Check --url"):
        evaluate_server("vllm", "http://127.0.0.1:9", settings(data))


@pytest.mark.parametrize(
    ("engine", "url", "more", "match"),
    [
        ("tgi", "http://x", {}, r"--engine: found 'tgi'.*sglang.*vllm"),
        ("vllm", "localhost:8000", {}, "--url: found 'localhost:8000'"),
        ("vllm", "http://x", {"temperature": 0.7}, "temperature 0"),
        ("vllm", "http://x", {"scheduler": True}, "eval.scheduler: found true, expected false with --engine"),
        ("vllm", "http://x", {"batch_sizes": [1, 2]}, r"eval.batch_sizes: found \[1, 2\]; a server is measured at one"),
        ("vllm", "http://x", {"generate_baseline": True}, "eval.generate_baseline: found True"),
        ("sglang", "http://x", {"repetition_penalty": 1.1}, "eval.repetition_penalty: found 1.1; SGLang penalises"),
    ],
)
def test_settings_that_cannot_work(engine: str, url: str, more: dict[str, Any], match: str, data: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        evaluate_server(engine, url, settings(data, **more))


def test_the_report_is_the_usual_one(data: Path, tmp_path: Path) -> None:
    with serving() as (url, _):
        write_report(evaluate_server("vllm", url, settings(data)), tmp_path)
    report = Report.read(tmp_path)
    assert report.engine is not None and report.engine["name"] == "vllm"
    assert "speculation in vLLM 0.32.0 on tiny" in render_markdown(report)
    old = {name: value for name, value in report.to_json().items() if name != "engine"}
    assert Report.from_json(old).engine is None


def command(*arguments: str) -> int:
    from headstart.cli import main

    return main(["eval", *arguments])


def test_the_command_line(data: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out"
    with serving() as (url, state):
        asked = ["--engine", "vllm", "--url", url, "--data", str(data), "--head", "me/head", "--out", str(out)]
        assert command(*asked, "--json", "eval.max_new_tokens=64") == 0
    printed = json.loads(capfd.readouterr().out)
    # one request warms the server up and is not counted; the fake then goes on with its second script
    assert printed["tokens"] == 17 and len(state.requests) == 3 and state.requests[0][1]["max_tokens"] == 8
    assert printed["report"] == str(out / "report.json") and printed["head"] == {"path": "me/head"}
    assert (out / "report.md").is_file()


def test_files_that_the_report_numbers_are_named_on_the_terminal(data: Path, tmp_path: Path, capfd: Any) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(data.read_bytes())
    with serving() as (url, _):
        asked = ["--engine", "vllm", "--url", url, "--data", str(data), "--data", str(other), "--out", str(tmp_path)]
        assert command(*asked) == 0
    assert f"in the report own data 1 is {data}, own data 2 is {other}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--engine", "vllm"], 2, "both --engine (vllm or sglang) and --url"),
        (["--url", "http://127.0.0.1:9"], 2, "both --engine"),
        (["--model", "tiny", "--target", "x", "--data", "y"], 2, "give --engine and --url as well"),
        (["--engine", "vllm", "--url", "http://127.0.0.1:9"], 2, "give --data FILE.jsonl"),
    ],
)
def test_the_command_line_names_what_is_missing(arguments: list[str], code: int, words: str, capfd: Any) -> None:
    assert command(*arguments) == code
    assert words in capfd.readouterr().err


def test_forwards_without_a_draft_commit_one_token_each() -> None:
    assert cycles_from_counts(1, [1, 0], 5) == [Cycle(2, 1, 2), *[Cycle(0, 0, 1)] * 3]


def test_contradicting_counters_are_refused() -> None:
    with pytest.raises(ValueError, match="contradict"):
        cycles_from_counts(1, [2], 3)
    with pytest.raises(ValueError, match="contradict"):
        cycles_from_counts(3, [0], 1)


def test_metrics_text() -> None:
    text = '# HELP x\nx_total{a="b\\"c",model_name="m"} 3.0\nx_total{model_name="n"} 4 1700000000\ny NaN\nnonsense\n'
    samples = parse_metrics(text)
    assert [s.name for s in samples] == ["x_total", "x_total", "y"] and samples[0].labels["a"] == 'b\\"c'
    assert Metrics(samples, "m").total("x") == 3.0 and Metrics(samples, "n").total("x") == 4.0
    assert Metrics(samples, "m").mean("y") is None and not Metrics(samples, "m").has("z")


@pytest.mark.parametrize(
    "line",
    [
        'x_total{model_name="m"} 5.0 # {trace_id="t"} 1.0 1712345678.9',  # an exemplar, as OpenMetrics has them
        'x_total{model_name="m"} 5.0 1712345678.9 # {} 2',
        'x_total{a="}",model_name="m"}5',
        'x_total{model_name="m",}   5e0   # nothing',
    ],
)
def test_the_value_of_a_sample_is_its_own(line: str) -> None:
    samples = parse_metrics(line + "\n")
    assert len(samples) == 1 and samples[0].labels["model_name"] == "m"
    assert Metrics(samples, "m").total("x") == 5


def test_hostile_metrics_take_no_time() -> None:
    for line in (
        "a" * 10**6,
        "x{" + "a" * 10**6 + "} 1",
        "x{" + 'a="' * 10**5 + "} 1",
        "x{" + "} " * 10**5,
        "x" + " " * 10**6 + "y z",
    ):
        began = time.process_time()
        parse_metrics(line)
        reached_of_histogram([1] * 10**5, 3)
        assert time.process_time() - began < 1
