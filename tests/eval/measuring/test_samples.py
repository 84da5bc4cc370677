"""Samples say of every token who wrote it: the same tokens as the decode loop's, told from the trees by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_help import CONTEXTS, HEAD_TREES, Trained, run, tree_of, word_tokenizer

from headstart.eval.config import EvalConfig, TreeConfig, identity_of
from headstart.eval.decoding.decode import Answer, Cycle
from headstart.eval.drafters import build_drafter
from headstart.eval.measuring import benchmark
from headstart.eval.measuring.benchmark import evaluate
from headstart.eval.measuring.samples import TOKENS, Node, record_samples, rejected_path, sample_of
from headstart.heads.targets.target import Target

PATHS = [(name, kind) for name, kind in HEAD_TREES if ", " not in name]


def words(texts: list[str]) -> list[int]:
    return [int(text) for text in texts]


def answer_of(sample: dict[str, Any]) -> list[int]:
    """The answer's tokens, put together from who wrote them."""
    tokens = words([sample["first"]])
    for cycle in sample["cycles"]:
        tokens += words(cycle["accepted"]) + (words([cycle["own"]]) if cycle["own"] is not None else [])
    return tokens


@pytest.mark.parametrize(("name", "kind"), PATHS)
def test_samples_are_the_loop_s_answers(
    target: Target, plain: list[Answer], trained: Callable[[str], Trained], name: str, kind: str
) -> None:
    """Every drafter and tree: greedy answers are the plain ones, and cycles those of the decode loop."""
    config = EvalConfig(tree=tree_of(kind), max_new_tokens=30)
    drafter = build_drafter(trained(name).head, config)
    samples = record_samples(target, drafter, config, [("t", context) for context in CONTEXTS])
    decoded = run(target, drafter)
    for sample, answer, context, whole in zip(samples, decoded, CONTEXTS, plain, strict=True):
        assert words(sample["prompt"].split()) == context
        assert answer_of(sample) == answer.tokens == whole.tokens
        assert [len(cycle["accepted"]) for cycle in sample["cycles"]] == [cycle.accepted for cycle in answer.cycles]
        assert sample["tau"] == sum(cycle.committed for cycle in answer.cycles) / len(answer.cycles)
        for cycle, told in zip(answer.cycles, sample["cycles"], strict=True):
            assert (cycle.drafted > 0) == (told["drafted"] > 0) and len(told["rejected"]) <= told["drafted"]
            if told["rejected"]:  # greedy: the target wrote something else
                assert told["rejected"][0] != told["own"]
            if kind == "chain" and told["own"] is not None:
                assert len(told["accepted"]) + len(told["rejected"]) == told["drafted"] == cycle.drafted


def test_the_rejected_path_is_the_likeliest_one() -> None:
    tree = [Node(5, -1, -0.1), Node(6, -1, -2.0), Node(7, 0, -1.5), Node(8, 0, -0.9), Node(9, 3, -3.0)]
    tree.append(Node(-1, -2, None))  # one that is not valid
    assert rejected_path(tree, []) == [5, 8, 9]
    assert rejected_path(tree, [5]) == [8, 9]
    assert rejected_path(tree, [5, 7]) == rejected_path(tree, [6]) == []
    assert rejected_path([], []) == []


def test_an_answer_that_ends_among_accepted_drafts_names_no_rejected_one() -> None:
    answer = Answer([20, 21, 22], [Cycle(3, 2, 2)], "stop")
    tree = [Node(21, -1, None), Node(22, 0, None), Node(23, 1, None)]
    sample = sample_of(answer, [tree], [7, 8], "t", None)
    (cycle,) = sample.cycles
    assert (cycle.accepted, cycle.rejected, cycle.own, cycle.drafted) == ([" 21", " 22"], [], None, 3)


def test_texts_join_to_what_the_tokenizer_says() -> None:
    tokenizer = word_tokenizer()
    answer = Answer([20, 21, 22, 23], [Cycle(2, 1, 2), Cycle(1, 0, 1)])
    trees = [[Node(21, -1, None), Node(30, 0, None)], [Node(31, -1, None)]]
    sample = sample_of(answer, trees, [7, 8], "t", tokenizer)
    parts = [sample.first]
    for cycle in sample.cycles:
        parts += [*cycle.accepted, cycle.own or ""]
    assert sample.prompt + "".join(parts) == tokenizer.decode([7, 8, 20, 21, 22, 23])
    assert [[text.strip() for text in cycle.rejected] for cycle in sample.cycles] == [["w30"], ["w31"]]


def test_a_report_holds_as_many_as_were_asked_for(
    target: Target, eagle3: Trained, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EvalConfig(data=prompts, max_new_tokens=12, warmup_tokens=0, tree=TreeConfig(depth=2), cycle_parts=False)
    report = evaluate(target, eagle3.head, replace(config, samples=2))
    assert report.samples is not None and len(report.samples) == 2
    assert [words(sample["prompt"].split()) for sample in report.samples] == [CONTEXTS[0], CONTEXTS[2]]
    assert json.loads(json.dumps(report.samples)) == report.samples
    for changes in ({"samples": 0}, {"synthetic_acceptance": 0.5}, {"drafter": "none"}):
        head = None if "drafter" in changes else eagle3.head
        assert evaluate(target, head, replace(config, **changes)).samples is None

    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(benchmark, "record_samples", broken)
    failed = evaluate(target, eagle3.head, config)
    assert failed.samples is None and "no samples were recorded: RuntimeError: no room" in failed.notes
    assert failed.tau == report.tau


def test_ngram_samples_say_where_nothing_was_drafted(target: Target, tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    data.write_text(json.dumps({"prompt_token_ids": CONTEXTS[0]}) + "\n")
    config = EvalConfig(data=str(data), drafter="ngram", max_new_tokens=TOKENS + 20, warmup_tokens=0)
    report = evaluate(target, None, config)
    (sample,) = report.samples or []
    assert len(answer_of(sample)) == TOKENS  # bounded, whatever the evaluation decoded
    assert any(cycle["drafted"] == 0 and not cycle["rejected"] for cycle in sample["cycles"])


def test_a_finished_evaluation_of_an_earlier_version_is_not_done_again() -> None:
    assert "samples" not in identity_of(EvalConfig())
    assert identity_of(EvalConfig(samples=0))["samples"] == 0
