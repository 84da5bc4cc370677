"""What `eval.data` may name: published benchmarks' layouts, lists of files, compressed files, Hub datasets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from headstart.data.prompts import Prompt
from headstart.eval import prompts as prompts_module
from headstart.eval.config import EvalConfig, check_config
from headstart.eval.prompts import data_label, describe_data, eval_sources, load_prompts
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.files import sha256_file


def write(path: Path, records: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def asked(prompt: Prompt) -> list[str]:
    """The questions of a prompt without history."""
    return [message["content"] for group in (prompt.first, *prompt.later) for message in group]


def test_layouts_of_published_benchmarks(tmp_path: Path) -> None:
    records = [
        {"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n", "entry_point": "f", "test": "assert f(1)"},
        {"question": "How many?", "answer": "#### 4"},
        {"problem": "Solve.", "solution": "…", "unique_id": "test/algebra/1.json"},
        {"instruction": "Translate.", "input": "Hallo", "output": "Hello"},
        {"instruction": "Say hi.", "input": "", "output": "Hi"},
        {"prompt_id": 81, "category": "writing", "prompt": ["First.", "Then."], "reference": []},
    ]
    read = load_prompts(write(tmp_path / "all.jsonl", records))
    function = "Complete the following Python function. Return the whole function.\n\n```python\ndef f(x):\n```"
    assert [asked(prompt) for prompt in read] == [
        [function], ["How many?"], ["Solve."], ["Translate.\n\nHallo"], ["Say hi."], ["First.", "Then."],
    ]  # fmt: skip
    assert [prompt.id for prompt in read] == ["HumanEval/0", "2", "test/algebra/1.json", "4", "5", "81"]
    # MT-bench alone keeps its categories
    assert read[-1].task == "writing"


SPEC = ("writing", "math", "translation", "qa", "summarization", "math_reasoning", "rag", "coding")


def test_spec_bench_has_six_tasks(tmp_path: Path) -> None:
    records = [{"question_id": n, "category": name, "turns": [str(n)]} for n, name in enumerate(SPEC)]
    path = write(tmp_path / "spec.jsonl", records)
    tasks = [prompt.task for prompt in load_prompts(path)]
    assert tasks == ["mt_bench", "mt_bench", "translation", "qa", "summarization", "math_reasoning", "rag", "mt_bench"]
    assert [prompt.id for prompt in load_prompts(path, limit_per_task=1)] == ["0", "2", "3", "4", "5", "6"]
    assert [prompt.task for prompt in load_prompts(path, task_field="category")] == list(SPEC)
    assert [prompt.id for prompt in load_prompts(path, limit=2)] == ["0", "1"]


def test_halves_of_every_task(tmp_path: Path) -> None:
    """Together all prompts, none in both; a limit counts within the half."""
    records = [{"id": f"{task}{n}", "task": task, "prompt": "x"} for n in range(5) for task in "ab"]
    path = write(tmp_path / "p.jsonl", records + [{"id": "c0", "task": "c", "prompt": "x"}])

    def ids(**options: Any) -> list[str]:
        return [prompt.id for prompt in load_prompts(path, **options)]

    assert ids(half="odd") == ["a0", "b0", "a2", "b2", "a4", "b4", "c0"]
    assert ids(half="even") == ["a1", "b1", "a3", "b3"]
    assert sorted(ids(half="odd") + ids(half="even")) == sorted(ids())
    assert ids(half="odd", limit_per_task=2) == ["a0", "b0", "a2", "b2", "c0"]
    assert ids(half="even", limit_per_task=1) == ["a1", "b1"]
    # a limit of the whole source comes first
    assert ids(half="even", limit=4) == ["a1", "b1"]
    single = write(tmp_path / "one.jsonl", [{"prompt": "x"}])
    with pytest.raises(DataError, match="eval.half: found 'even', but every task has one prompt only"):
        load_prompts(single, half="even")
    with pytest.raises(ConfigError, match=r"eval.half: found 'third', expected one of \['null', 'odd', 'even'\]"):
        check_config(EvalConfig(half="third"))


def test_several_files(tmp_path: Path) -> None:
    one = write(tmp_path / "gsm.jsonl", [{"question": "a"}, {"question": "b"}])
    two = write(tmp_path / "code.jsonl.gz", [{"prompt": "c"}, {"prompt": "d", "task": "hard"}, {"prompt": "e"}])
    read = load_prompts([one, two], limit=2)
    assert [(prompt.task, prompt.id, asked(prompt)) for prompt in read] == [
        ("gsm", "gsm/1", ["a"]), ("gsm", "gsm/2", ["b"]), ("code", "code/1", ["c"]), ("hard", "code/2", ["d"]),
    ]  # fmt: skip
    assert [prompt.id for prompt in load_prompts([one, two], limit_per_task=1)] == ["gsm/1", "code/1", "code/2"]
    # alone, a file's prompts keep their names
    assert [(prompt.task, prompt.id) for prompt in load_prompts(one)] == [("all", "1"), ("all", "2")]
    assert data_label([one, two]) == "gsm+code"
    assert describe_data(one) == {"path": one, "sha256": sha256_file(Path(one))}
    both = describe_data([one, two])
    assert both["path"] == f"{one}, {two}" and [part["path"] for part in both["parts"]] == [one, two]
    before = both["sha256"]
    write(Path(two), [{"prompt": "changed"}])
    assert describe_data([one, two])["sha256"] != before


def test_datasets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(source: Any) -> Any:
        asked.append((source.dataset, source.subset, source.split, source.limit))
        for n in range(5):
            yield {"question": f"q{n}"}

    monkeypatch.setattr(prompts_module, "load_rows", rows)
    gsm = {"dataset": "openai/gsm8k", "subset": "main", "limit": 2}
    read = load_prompts(["owner/questions", gsm], limit=3)
    assert asked == [("owner/questions", None, "test", 3), ("openai/gsm8k", "main", "test", 2)]
    assert [prompt.id for prompt in read] == [
        "questions/1", "questions/2", "questions/3", "gsm8k/main/1", "gsm8k/main/2",
    ]  # fmt: skip
    assert {prompt.task for prompt in read} == {"questions", "gsm8k/main"}
    # how many rows to read is not known beforehand when tasks are cut one by one
    load_prompts("owner/questions", limit_per_task=1)
    assert asked[-1][3] is None
    assert data_label(["owner/questions", gsm]) == "questions+gsm8k-main"
    assert describe_data(gsm)["parts"] == [{"dataset": "openai/gsm8k", "subset": "main", "split": "test", "limit": 2}]


def test_a_dataset_out_of_reach_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(DataError, match=r"dataset 'owner/name' \(split 'test'\).*no route to host.*local file"):
        load_prompts("owner/name")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ConfigError, "found an empty list"),
        ("none.jsonl", DataError, "none.jsonl: no such file"),
        ("folder/none.jsonl", DataError, "folder/none.jsonl: no such file"),
        ("a/b/c", DataError, "a/b/c: no such file"),
        (3, ConfigError, "eval.data: found 3, expected a JSONL file"),
        ({"datasets": "x"}, ConfigError, "unknown key 'datasets', expected some of dataset, limit, path"),
        ({"split": "test"}, ConfigError, "found neither of path and dataset"),
        (["x/y", {"dataset": "z/y"}], DataError, "y is given more than once"),
    ],
)
def test_what_cannot_be_data(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eval_sources(data)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "bom.jsonl").write_text('{"prompt": "ü\u2028日本", "task": "täsk"}\n', encoding="utf-8-sig")
    (prompt,) = load_prompts(tmp_path / "bom.jsonl")
    assert (asked(prompt), prompt.task) == (["ü\u2028日本"], "täsk")


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 100)[:-8])
    with pytest.raises(DataError, match="cut.jsonl.gz:.*: broken gzip data"):
        load_prompts(tmp_path / "cut.jsonl.gz")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match="latin.jsonl:1: not UTF-8 text"):
        load_prompts(tmp_path / "latin.jsonl")
