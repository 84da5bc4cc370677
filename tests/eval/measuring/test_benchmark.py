"""evaluate: prompts in, report out."""

from __future__ import annotations

import copy
import io
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, NEW_TOKENS, VOCAB, Trained, gaps_of, word_tokenizer
from omegaconf import OmegaConf
from rich.console import Console

from headstart.eval.config import EvalConfig, TreeConfig, check_config, tree_label
from headstart.eval.decoding.decode import Answer, Decoded
from headstart.eval.decoding.scheduler import PLAIN, CycleShape
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters.ngram import NgramDrafter
from headstart.eval.measuring.benchmark import evaluate, first_difference
from headstart.eval.measuring.metrics import expected_tau
from headstart.eval.measuring.rendering import render_markdown, render_table, render_tables, write_report
from headstart.eval.measuring.report import Report
from headstart.eval.measuring.teacher_forced import teacher_forced_tau
from headstart.eval.prompts import load_prompts
from headstart.eval.scheduling.throughput import ThroughputScheduler
from headstart.heads.errors import ConfigError, DataError, TemplateError
from headstart.heads.targets.target import Target

REQUIRED = {
    *("schema", "target", "head", "data", "dtype", "device", "temperature", "tree", "tau", "tau_ci95", "tasks"),
    *("per_position_acceptance", "baseline_tokens_per_s", "tokens_per_s", "speedup", "greedy_identity", "recipe"),
    *("versions", "git_revision", "command"),
}


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


@pytest.fixture
def ids_file(tmp_path: Path) -> str:
    records = [{"id": f"p{n}", "category": "ab"[n % 2], "prompt_token_ids": c} for n, c in enumerate(CONTEXTS)]
    return write(tmp_path / "ids.jsonl", records)


def config_of(data: str, **changes: Any) -> EvalConfig:
    base = {"data": data, "max_new_tokens": NEW_TOKENS, "warmup_tokens": 2}
    return EvalConfig(**{**base, "tree": TreeConfig(depth=3), **changes})


def test_report_of_a_head(target: Target, plain: list[Answer], eagle3: Trained, ids_file: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    config, began = config_of(ids_file, batch_size=2), time.perf_counter()
    report = evaluate(
        target, eagle3.head, config, recipe={"seed": 7}, head_info={"path": "x"}, progress=lambda *p: seen.append(p)
    )
    expected = teacher_forced_tau(target, eagle3.head, [(c, a.tokens) for c, a in zip(CONTEXTS, plain, strict=True)], 3)
    # warming up comes before, and decoding after, the moment that measuring begins
    ready_s, decode_s = report.timing["ready_s"], report.timing["decode_s"]
    assert ready_s is not None and decode_s is not None and 0 < ready_s < time.perf_counter() - began - decode_s
    assert report.tau == expected.tau
    assert report.per_position_acceptance == expected.per_position
    assert report.per_position_conditional == expected.per_position_conditional
    assert report.greedy_identity == {"dtype": "float32", "sequences": 3, "identical": 3, "divergences": []}
    assert report.speedup == pytest.approx(report.tokens_per_s / report.baseline_tokens_per_s)
    assert {name: section.prompts for name, section in report.tasks.items()} == {"a": 2, "b": 1}
    assert sum(section.forwards for section in report.tasks.values()) == report.forwards == expected.forwards
    assert report.tree["label"] == "chain3"
    # on a CPU nothing is fused by default, which is no cause for a note
    assert (report.engine_path, report.engine_note, report.engine_cost) == ("generic", None, None)
    assert report.head["type"] == "eagle3" and report.head["path"] == "x"
    assert report.head["config"] == asdict(eagle3.head.config)  # fields alone: what a class says of them stays out
    assert report.recipe == {"seed": 7}
    assert seen[0][:2] == (0, 3) and seen[-1][:2] == (3, 3)

    written = json.loads(write_report(report, tmp_path / "run").read_text())
    assert written["schema"] == 1 and set(written) >= REQUIRED
    assert Report.read(tmp_path / "run") == report
    markdown = (tmp_path / "run" / "report.md").read_text()
    assert f"| all | 3 | {report.tau:.2f} |" in markdown
    assert "3 of 3 sequences" in markdown
    out = io.StringIO()
    Console(file=out, width=200).print(render_tables(report))
    assert f"{report.tau:.2f}" in out.getvalue() and "3/3" in out.getvalue()
    assert "s after the target was loaded" in out.getvalue()
    # a narrow terminal gets more tables, not shorter numbers
    for width in (60, 80):
        out = io.StringIO()
        Console(file=out, width=width).print(render_tables(report))
        text = out.getvalue()
        assert "…" not in text and max(map(len, text.splitlines())) <= width
        assert all(number in text for number in (f"{report.tau:.2f}", "3/3", f"{report.tokens_per_s:.1f}", "identical"))
        assert text.count("┃ task") > 1 and text.count("┓") == text.count("┘") == text.count("┃ task")


def test_refilled_places_change_no_answer(
    target: Target, eagle3: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks in batches of 2: the same answers and the same τ, in fewer forwards of the batch."""
    records = [{"prompt_token_ids": [*range(5, 8 + n)], "task": "ab"[n > 5], "id": f"p{n}"} for n in range(9)]
    data, original, forwards = write(tmp_path / "ids.jsonl", records), Decoder.run, [0]

    def run(self: Decoder, *given: Any, **options: Any) -> Decoded:
        decoded = original(self, *given, **options)
        forwards[0] += len(decoded.cycle_s)
        return decoded

    def report_with(refill: bool) -> tuple[Report, int]:
        forwards[0] = 0
        return evaluate(target, eagle3.head, config_of(data, batch_size=2, refill=refill)), forwards[0]

    monkeypatch.setattr(Decoder, "run", run)
    # long and short answers by turns
    monkeypatch.setattr(Decoder, "limits", lambda self, contexts: [4 + 22 * (len(c) % 2) for c in contexts])
    (refilled, fewer), (waiting, more) = report_with(True), report_with(False)
    assert refilled.greedy_identity == waiting.greedy_identity and refilled.greedy_identity["identical"] == 9
    assert {name: section.tau for name, section in refilled.tasks.items()} == {
        name: section.tau for name, section in waiting.tasks.items()
    }
    assert refilled.forwards == waiting.forwards and fewer < more


def test_plain_ngram_and_lossy_reports(target: Target, medusa: Trained, ids_file: str) -> None:
    report = evaluate(target, None, config_of(ids_file, max_new_tokens=6))
    assert (report.tau, report.drafter, report.tree["label"], report.speedup) == (1.0, "plain", "plain", None)
    assert report.baseline_tokens_per_s > 0 and report.greedy_identity is None
    report = evaluate(target, None, config_of(ids_file, drafter="ngram", baseline=False))
    assert report.drafter == "ngram" and report.tau > 1 and report.baseline_tokens_per_s is None
    # to fuse moves weights
    fused = evaluate(copy.deepcopy(target), None, config_of(ids_file, engine="fused", drafter="none"))
    assert (fused.engine_path, fused.engine_note) == ("fused", None)
    changes = {"temperature": 1.0, "acceptance": "typical", "max_new_tokens": 4, "tree": TreeConfig("static", 3, 4, 10)}
    report = evaluate(target, medusa.head, config_of(ids_file, **changes))
    assert not report.lossless and report.greedy_identity is None
    assert "LOSSY" in render_markdown(report)
    assert report.tree["label"] == "static9"


@pytest.mark.parametrize(("shape", "rows"), [(None, None), (CycleShape(2), 3.0), (PLAIN, 1.0)])
def test_a_scheduled_evaluation(
    target: Target, eagle3: Trained, ids_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    shape: CycleShape | None, rows: float | None,
) -> None:  # fmt: skip
    """Answers stay the target's. One scheduler serves all runs, and the report tells what ran at every batch size."""
    if shape is not None:
        chosen = ThroughputScheduler.next_shape
        monkeypatch.setattr(ThroughputScheduler, "next_shape", lambda self: chosen(self) and shape)
    config = config_of(ids_file, batch_size=3, scheduler=True, batch_sizes=[1], sweep_prompts=3, cycle_parts=True)
    report = evaluate(target, eagle3.head, config)
    identity = report.greedy_identity
    assert identity is not None and identity["identical"] == identity["sequences"] == 3
    assert report.tree["label"] == "chain3, scheduled" and report.tree["depth"] == 3
    found = report.scheduler
    # tasks of two prompts and of one; the sweep has batches of one
    assert found is not None and set(found["batches"]) == {"1", "2"}
    assert 1 <= found["verified_per_cycle"] <= 4 if rows is None else found["verified_per_cycle"] == rows
    for book in found["batches"].values():
        shapes = [(s["levels"], s["nodes"], s["rows"]) for s in book["shapes"]]
        assert shapes == [(0, None, None), (1, None, None), (2, None, None), (3, None, None)]
        assert all(s["ms"] > 0 for s in book["shapes"])
        ran = {s["levels"] for s in book["shapes"] if s["cycles"]}
        assert ran if shape is None else ran == {shape.levels}
    assert report.sweeps is not None and report.sweeps["batch"]["points"][0]["speculative_tokens_per_s"] > 0
    if shape == PLAIN:
        assert report.tau == report.sweeps["batch"]["points"][0]["tau"] == 1
    write_report(report, tmp_path)
    assert Report.read(tmp_path) == report and "Scheduler: a cycle verified" in render_markdown(report)


def test_parts_of_a_cycle_are_of_the_whole_tree(
    target: Target, eagle3: Trained, ids_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.eval.measuring import breakdown

    chosen, nodes, original = ThroughputScheduler.next_shape, list[int](), breakdown.loop_seconds

    def watched(loop: Any, run: Any, repeats: int) -> float:
        run()
        nodes.append(loop.places - 1)
        return original(loop, run, repeats)

    monkeypatch.setattr(ThroughputScheduler, "next_shape", lambda self: chosen(self) and CycleShape(1))
    monkeypatch.setattr(breakdown, "loop_seconds", watched)
    evaluate(target, eagle3.head, config_of(ids_file, scheduler=True, max_new_tokens=6))
    # drafting alone verifies nothing; then the forward and the whole cycle
    assert nodes == [-1, 3, 3]


def test_what_cannot_be_scheduled(target: Target, ids_file: str) -> None:
    config = config_of(ids_file, scheduler=True)
    with pytest.raises(ConfigError, match=r"eval\.scheduler: found true, but nothing drafts .*expected a head"):
        evaluate(target, None, config)
    config.drafter = "ngram"
    with pytest.raises(ConfigError, match=r"but the host drafts.*eval.drafter=ngram.*or set eval\.scheduler=false"):
        evaluate(target, None, config)
    with pytest.raises(ConfigError, match="but the host drafts"):
        evaluate(target, None, config, drafter=NgramDrafter(3))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"temperature": 1.0}, "block"),
        ({"temperature": 1.0, "verification": "token"}, "token"),
        ({"temperature": 1.0, "tree": TreeConfig(depth=3, sample=False)}, "draw"),
        ({"temperature": 1.0, "tree": TreeConfig("dynamic", 3, 2, 6)}, "draw"),
        ({"temperature": 1.0, "acceptance": "typical"}, "typical"),
        ({"temperature": 1.0, "synthetic_acceptance": 0.5}, "synthetic"),
        ({}, "greedy"),
        ({"temperature": 1.0, "drafter": "none"}, None),
    ],
)  # fmt: skip
def test_a_report_says_which_rule_accepted_drafts(
    target: Target, eagle3: Trained, ids_file: str, tmp_path: Path, changes: dict[str, Any], rule: str | None
) -> None:
    head = None if "drafter" in changes else eagle3.head
    report = evaluate(target, head, config_of(ids_file, max_new_tokens=6, cycle_parts=False, baseline=False, **changes))
    assert report.verification == rule
    assert ("verification)" in render_markdown(report)) == (rule in ("block", "token"))
    write_report(report, tmp_path / "run")
    assert Report.read(tmp_path / "run").verification == rule


@pytest.mark.parametrize("asked", [0.7, [0.9, 0.6, 0.3]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance(
    target: Target, eagle3: Trained, ids_file: str, tmp_path: Path, asked: Any, temperature: float
) -> None:
    """Measured acceptance is the profile that was asked for, and every output says that it was asked for."""
    rates = asked if isinstance(asked, list) else [asked] * 3
    config = config_of(ids_file, synthetic_acceptance=asked, temperature=temperature, max_new_tokens=150, batch_size=3)
    report = evaluate(target, eagle3.head, config)
    expected = 1 + rates[0] + rates[0] * rates[1] + rates[0] * rates[1] * rates[2]
    assert expected_tau(rates) == pytest.approx(expected)
    # about 180 cycles with a standard deviation of 1.2
    assert report.tau == pytest.approx(expected, abs=0.35)
    assert report.per_position_conditional[0] == pytest.approx(rates[0], abs=0.13)
    assert report.synthetic == rates and not report.lossless and report.greedy_identity is None
    assert report.speedup is not None
    assert "SYNTHETIC" in render_table(report).title
    assert render_markdown(report).count("SYNTHETIC") == 2
    if (asked, temperature) == (0.7, 1.0):
        write_report(report, tmp_path)
        assert Report.read(tmp_path) == report
        config.baseline = False
        assert evaluate(target, eagle3.head, config).tau == report.tau


def test_turns_feed_the_next_turn(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "tokenizer", word_tokenizer())
    records = [
        {"question_id": 81, "category": "writing", "turns": ["w5 w6", "w7"]},
        {"question_id": 82, "category": "writing", "turns": ["w8"]},
    ]
    data = write(tmp_path / "turns.jsonl", records)
    contexts = []
    from headstart.eval.decoding import session

    original = session.decode

    def spy(engine: Any, batch: list[list[int]], *rest: Any, **options: Any) -> Any:
        decoded = original(engine, batch, *rest, **options)
        contexts.append((batch, [answer.tokens for answer in decoded.answers]))
        return decoded

    monkeypatch.setattr(session, "decode", spy)
    report = evaluate(target, None, config_of(data, max_new_tokens=3, batch_size=2, warmup_tokens=0))
    assert contexts[0][0] == [[1, 5, 6, 3, 2], [1, 8, 3, 2]]
    said = contexts[0][1][0]
    assert contexts[1][0] == [[1, 5, 6, 3, 2, *said, 3, 1, 7, 3, 2]]
    # three sequences of three tokens, the first of each from prefill
    assert (report.prompts, report.forwards) == (2, 6)
    report = evaluate(target, None, config_of(data, max_new_tokens=3, max_turns=1))
    assert report.forwards == 4


def test_first_difference() -> None:
    assert first_difference(Answer([1, 2, 3]), Answer([1, 2, 3])) is None
    assert first_difference(Answer([1, 2, 3]), Answer([1, 9, 3])) == 1
    assert first_difference(Answer([1, 2]), Answer([1, 2, 3])) == 2


def test_divergences_carry_the_logit_gap(
    target: Target, plain: list[Answer], ids_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong verifier must show: accept everything and the report says where and how close the call was."""
    from headstart.eval.decoding import loop
    from headstart.eval.decoding.verify import Verified
    from headstart.eval.drafters.ngram import NgramDrafter

    def gullible(tree: Any, logits: torch.Tensor, *rest: Any) -> Any:
        if tree.nodes == 0:
            return original(tree, logits, *rest)
        accepted = tree.valid_BN.sum(1)
        path = torch.where(tree.valid_BN, torch.arange(tree.nodes), -1)
        return Verified(path, accepted, logits.argmax(-1).gather(1, accepted[:, None])[:, 0])

    original = loop.verify
    monkeypatch.setattr(loop, "verify", gullible)
    report = evaluate(target, None, config_of(ids_file), drafter=NgramDrafter(3))
    assert report.greedy_identity["identical"] < 3
    for case in report.greedy_identity["divergences"]:
        row = int(case["id"][1:])
        gaps = gaps_of(target, CONTEXTS[row], plain[row])
        assert case["gap"] == pytest.approx(gaps[case["position"]], rel=1e-3)


# Prompts


def test_prompt_formats(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    records = [
        {"id": 1, "messages": chat},
        {"task": "t", "conversations": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}]},
        {"prompt": "p"},
        {"prompt_token_ids": [1, 2], "messages": chat},
        {"turns": ["x", "y", "z"]},
    ]
    prompts = load_prompts(write(tmp_path / "p.jsonl", records), max_turns=2)
    asked = [[m["content"] for group in (p.first, *p.later) for m in group] for p in prompts]
    assert asked == [["s", "q"], ["q1"], ["p"], ["s", "q"], ["x", "y"]] and [p.answers for p in prompts] == [1] * 4 + [
        2
    ]
    assert prompts[3].prompt_token_ids == (1, 2) and prompts[0].prompt_token_ids is None
    assert [prompt.task for prompt in prompts] == ["other", "t", "other", "other", "other"]  # "all" is the total
    assert [prompt.id for prompt in prompts] == ["1", "2", "3", "4", "5"]
    assert len(load_prompts(tmp_path / "p.jsonl", limit=2)) == 2
    assert [prompt.task for prompt in load_prompts(tmp_path / "p.jsonl", task_field="id")][:2] == ["1", "other"]
    assert [prompt.id for prompt in load_prompts(tmp_path / "p.jsonl", limit_per_task=1)] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl:2: not valid JSON"),
        ("[1]", r"bad.jsonl:2: found a list, expected a JSON object"),
        ('{"text": "x"}', r"bad.jsonl:2: found fields 'text', expected one of .*, prompt, question"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"bad.jsonl:2: .*role: found 'robot'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"bad.jsonl:2: found no user message"),
        ('{"turns": []}', r"bad.jsonl:2: turns"),
        ('{"turns": "x"}', r"bad.jsonl:2: turns: found text, expected a list with"),
        ('{"prompt": [1]}', r"bad.jsonl:2: prompt\[0\]: found int 1, expected text"),
        ('{"prompt_token_ids": ["a"]}', r"bad.jsonl:2: prompt_token_ids"),
        (
            '{"prompt_token_ids": [1, -1]}',
            r"bad.jsonl:2: prompt_token_ids: found int -1 in it, expected a list of token ids",
        ),
        ('{"prompt_token_ids": [true]}', r"bad.jsonl:2: prompt_token_ids"),
    ],
)
def test_bad_prompts_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "ok"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        load_prompts(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no prompts"):
        load_prompts(tmp_path / "empty.jsonl")


# Configuration


def test_config_is_a_recipe_node() -> None:
    node = OmegaConf.merge(OmegaConf.structured(EvalConfig), OmegaConf.from_dotlist(["tree.kind=dynamic", "limit=3"]))
    config = OmegaConf.to_object(node)
    assert isinstance(config, EvalConfig) and config.tree.kind == "dynamic" and config.limit == 3
    check_config(config)
    assert tree_label(config.tree, 59) == "tree60"
    assert tree_label(TreeConfig("ddtree", total_tokens=60), 59) == "ddtree60"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree": TreeConfig(kind="bush")}, r"eval.tree.kind: found 'bush', expected one of"),
        ({"top_p": 0.0}, "eval.top_p"),
        ({"min_p": 1.0}, "eval.min_p"),
        ({"verification": "tree"}, "eval.verification: found 'tree', expected one of"),
        ({"batch_size": 0}, "eval.batch_size: found 0, expected at least 1"),
        ({"ngram_min": 3, "ngram_max": 2}, "eval.ngram_max: found 2, expected at least 3"),
        ({"repetition_penalty": 0.0}, "eval.repetition_penalty"),
        ({"acceptance": "loose"}, "eval.acceptance"),
        ({"synthetic_acceptance": 1.2}, "eval.synthetic_acceptance: found 1.2, expected a probability"),
        ({"synthetic_acceptance": []}, "eval.synthetic_acceptance"),
        ({"synthetic_acceptance": [0.5, "x"]}, "eval.synthetic_acceptance"),
        ({"synthetic_acceptance": 0.5, "acceptance": "typical"}, "set one of them only"),
        ({"limit": 0}, "eval.limit: found 0, expected at least 1"),
        ({"limit_per_task": -1}, "eval.limit_per_task: found -1"),
        ({"max_turns": 0}, "eval.max_turns: found 0"),
        ({"warmup_tokens": -1}, "eval.warmup_tokens: found -1, expected at least 0"),
        ({"seed": -1}, "eval.seed: found -1"),
        ({"seed": 1 << 63}, "eval.seed: found 9223372036854775808, expected less than 2"),
        ({"top_k": 1.5}, "eval.top_k: found 1.5, expected a whole number"),
        ({"batch_size": True}, "eval.batch_size: found True, expected a whole number"),
        ({"temperature": math.nan}, "eval.temperature: found nan"),
        ({"temperature": math.inf}, "eval.temperature: found inf"),
        ({"temperature": -0.1}, "eval.temperature: found -0.1"),
        ({"top_p": math.nan}, "eval.top_p: found nan"),
        ({"repetition_penalty": math.nan}, "eval.repetition_penalty: found nan"),
        ({"typical_epsilon": -1.0}, "eval.typical_epsilon: found -1.0"),
        ({"typical_delta": math.nan}, "eval.typical_delta: found nan"),
    ],
)
def test_bad_config(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(EvalConfig(**changes))


def test_evaluate_refuses_what_cannot_work(
    target: Target, medusa: Trained, eagle3: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="eval.data is not set"):
        evaluate(target, None, EvalConfig())
    data = write(tmp_path / "x.jsonl", [{"prompt": "w1"}])
    with pytest.raises(TemplateError, match="no chat template"):
        evaluate(target, None, config_of(data))
    with pytest.raises(ConfigError, match="loaded in float32; set target.dtype=bfloat16"):
        evaluate(target, None, config_of(data, dtype="bfloat16"))
    monkeypatch.setattr(medusa.head, "dims", replace(medusa.head.dims, num_layers=9))
    with pytest.raises(ConfigError, match="num_layers 9, LlamaForCausalLM has 4"):
        evaluate(target, medusa.head, config_of(data))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="medusa drafts a chain or a static tree or a ddtree, found 'dynamic'"):
        evaluate(target, medusa.head, config_of(data, tree=TreeConfig("dynamic")))
    with pytest.raises(ConfigError, match="eagle3 drafts a chain or a dynamic tree, found 'static'"):
        evaluate(target, eagle3.head, config_of(data, tree=TreeConfig("static")))


def test_ids_of_another_vocabulary(target: Target, tmp_path: Path) -> None:
    data = write(tmp_path / "x.jsonl", [{"prompt_token_ids": [1]}, {"id": "odd", "prompt_token_ids": [VOCAB, 1]}])
    with pytest.raises(DataError, match=f"prompt odd: prompt_token_ids: found {VOCAB}, the target has {VOCAB} tokens"):
        evaluate(target, None, config_of(data))


def test_answers_end_where_the_positions_do(
    target: Target, eagle3: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.model.config, "max_position_embeddings", 12)
    data = write(tmp_path / "x.jsonl", [{"prompt_token_ids": context} for context in ([5, 6, 7, 8], [11] * 9, [12])])
    config = config_of(data, max_new_tokens=6, batch_size=2, tree=TreeConfig(depth=5))
    report = evaluate(target, eagle3.head, config)
    # 6, 3 and 6 tokens; prefill gives the first of each
    assert report.tokens == 5 + 2 + 5
    assert report.greedy_identity is not None and report.greedy_identity["identical"] == 3
    assert "1 answer ended before eval.max_new_tokens=6: the target has 12 positions" in report.notes
    long = write(tmp_path / "y.jsonl", [{"prompt_token_ids": [5]}, {"id": "long", "prompt_token_ids": [5] * 12}])
    with pytest.raises(DataError, match="prompt long: found 12 tokens, the target has 12 positions: shorten it"):
        evaluate(target, None, config_of(long))


def test_turns_without_room_are_left_out(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.model.config, "max_position_embeddings", 9)
    talks = [{"turns": ["w1 w2", "w3 w4", "w5"]}, {"turns": ["w1"]}]
    monkeypatch.setattr(target, "tokenizer", word_tokenizer())
    report = evaluate(target, None, config_of(write(tmp_path / "x.jsonl", talks), max_new_tokens=4))
    left_out = [note for note in report.notes if "later turn" in note]
    assert left_out == ["2 later turns left out: the target has 9 positions, which their conversations fill"]
    assert report.tokens == 3 + 3


def test_an_answer_with_special_tokens_ends_its_conversation(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "tokenizer", word_tokenizer([f"w{n}" for n in range(4, VOCAB)]))
    talks = [{"turns": ["w1 w2", "w3"]}, {"turns": ["w1"]}]
    report = evaluate(target, None, config_of(write(tmp_path / "x.jsonl", talks), max_new_tokens=4))
    (left_out,) = [note for note in report.notes if "later turn" in note]
    assert left_out.startswith("1 later turn left out: an answer holds special tokens")
    assert report.tokens == 3 + 3


def test_prompts_that_the_template_refuses_are_dropped_and_told(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = word_tokenizer()
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    monkeypatch.setattr(target, "tokenizer", tokenizer)
    refused = [{"id": f"odd{n}", "task": "t", "prompt": "w1", "system": "w2"} for n in range(5)]
    data = write(tmp_path / "x.jsonl", [{"prompt": "w1"}, *refused, {"prompt": "w5"}])
    report = evaluate(target, None, config_of(data, max_new_tokens=3))
    alone = evaluate(target, None, config_of(write(tmp_path / "y.jsonl", [{"prompt": "w1"}]), max_new_tokens=3))
    note = "dropped 5 prompts: the chat template refuses it: no system (odd0, odd1, odd2 and 2 more)"
    assert note in report.notes and not any("dropped" in text for text in alone.notes)
    assert (report.prompts, alone.prompts) == (2, 1) and list(report.tasks) == ["other"]
    out = io.StringIO()
    Console(file=out, width=200).print(render_tables(report))
    assert note in out.getvalue() and note in render_markdown(report)
    none = write(tmp_path / "none.jsonl", refused)
    with pytest.raises(DataError, match=r"odd4 \(.*none.jsonl:5\): the chat template refuses it: no system, and no ot"):
        evaluate(target, None, config_of(none))


@pytest.mark.parametrize("count", [1, 3])
def test_answers_of_one_token(target: Target, eagle3: Trained, tmp_path: Path, count: int) -> None:
    data = write(tmp_path / "x.jsonl", [{"prompt_token_ids": [5 + n]} for n in range(count)])
    report = evaluate(target, eagle3.head, config_of(data, max_new_tokens=1))
    assert (report.tau, report.forwards, report.speedup, report.speedup_ci95) == (1.0, 0, None, None)
    assert report.tau_ci95 == (None if count == 1 else [1.0, 1.0])
    json.dumps(report.to_json(), allow_nan=False)


def test_reports_that_lack_something(tmp_path: Path, target: Target, ids_file: str) -> None:
    whole = evaluate(target, None, config_of(ids_file, max_new_tokens=3)).to_json()
    path = tmp_path / "report.json"
    task = next(iter(whole["tasks"]))
    for broken, message in (
        ([], "found list, expected a JSON object"),
        ({k: v for k, v in whole.items() if k != "tau"}, r"fields missing: \['tau'\]"),
        ({**whole, "tasks": [1]}, "tasks: found list, expected a JSON object"),
        ({**whole, "tasks": {"x": None}}, "tasks.x: found NoneType, expected a JSON object"),
        ({**whole, "tasks": {"x": {"tau": 1.0}}}, r"tasks.x: fields missing: .*'prompts'"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(DataError, match=f"report.json: {message}"):
            Report.read(tmp_path)
    path.write_text(
        json.dumps({**whole, "more": 1, "tasks": {**whole["tasks"], task: {**whole["tasks"][task], "more": 1}}})
    )
    assert Report.read(tmp_path).to_json() == whole


def test_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"schema": 99}')
    with pytest.raises(DataError, match="report.json: schema: found 99, expected 1"):
        Report.read(tmp_path)
