"""The boundary: what documents of ours say of this machine stays here, what others need goes out, twice as once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headstart.heads.errors import DataError
from headstart.heads.published import published
from headstart.heads.published_names import name_of_data, name_of_head, name_of_target
from headstart.heads.published_text import published_text, variables, without_defaults


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("/data/alice/models/support-llama", "support-llama"),
        ("~/models/support-llama/", "support-llama"),
        ("../support-llama", "support-llama"),
        ("/c/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "Qwen/Qwen3-8B"),
        ("", ""),
    ],
)
def test_targets(name: str, shown: str) -> None:
    assert name_of_target(name) == shown == name_of_target(shown)


def test_a_directory_that_looks_like_a_hub_name_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "alice" / "llama").mkdir(parents=True)
    (tmp_path / "alice" / "chats").write_text("")
    assert name_of_target("alice/llama") == "llama" and name_of_head("alice/llama") == "a local head"
    assert name_of_data("alice/chats") == "own data" and name_of_data("alice/others") == "alice/others"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("workload:thank_you_train", "workload:thank_you_train"),
        ("/x/site-packages/headstart/data/workloads/thank_you_train.jsonl", "workload:thank_you_train"),
        ("HuggingFaceH4/ultrachat_200k", "HuggingFaceH4/ultrachat_200k"),
        ("org/chats-v1.5", "org/chats-v1.5"),
        ("/home/alice/spec_bench.jsonl", "spec_bench"),
        ("runs/mine/data/held_out.jsonl", "held-out conversations"),
        ("runs/mine/data/distilled.jsonl", "the target's own answers"),
        ("client-acme.jsonl", "own data"),
        ("data/acme.jsonl.gz", "own data"),
        ("/home/alice/acme", "own data"),
    ],
)
def test_data(name: str, shown: str) -> None:
    assert name_of_data(name) == shown == name_of_data(shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see /home/alice/x y.txt", "see LOCAL_PATH y.txt"),
        ("at '/srv/run 1/a'", "at 'LOCAL_PATH'"),
        ("'/a' \"~/my models/b\" `../x y/z`'s", "'/a' \"LOCAL_PATH\" `LOCAL_PATH`'s"),
        ("~/a, ../b/c and ./d/e; ~bob/f", "LOCAL_PATH, LOCAL_PATH and LOCAL_PATH; LOCAL_PATH"),
        ("30 tokens/s, plain / spec., 3/4, and/or", "30 tokens/s, plain / spec., 3/4, and/or"),
        ("http://u:p@gpu7.corp:8000/v1?key=k#f: slow", "http://SERVER:8000/v1 slow"),
        ("https://user:p@ss@localhost:8000", "https://localhost:8000"),
        ("https://huggingface.co/org/name", "https://huggingface.co/org/name"),
        ("file:///home/alice/x", "LOCAL_PATH"),
        ("[/b] </a> /nothing-there /usr", "[/b] </a> /nothing-there LOCAL_PATH"),
        ("refused: key sk-0123456789", "refused: key $OPENAI_API_KEY"),
        ("${oc.env:X,/home/alice} ${oc.env: Y}", "${oc.env:X} ${oc.env:Y}"),
    ],
)
def test_sentences(text: str, shown: str) -> None:
    assert published_text(text) == shown == published_text(shown)


def test_what_came_from_the_environment_is_not_found_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASS", "hunter2-long")
    monkeypatch.setenv("FLAG", "on")
    monkeypatch.setenv("OTHER", "hunter2-longer")
    monkeypatch.setenv("EMPTY", "")
    names = ["PASS", "FLAG", "OTHER", "EMPTY", "NOT_SET"]
    said = "with hunter2-longer and hunter2-long on"
    assert published_text(said, names) == "with ${oc.env:OTHER} and ${oc.env:PASS} on"
    assert published_text(said) == said  # no recipe reads them
    # a document says by itself which variables its recipe reads
    document = {
        "target": {"name": "on", "dtype": "on"},
        "notes": [said],
        "head": {"path": "hunter2-longer"},
        "command": "headstart eval --target on --data hunter2-long.jsonl a=hunter2-long --model hunter2-long",
        "recipe": {"train": {"project": "${oc.env:FLAG}"}, "a": ["${oc.env:PASS,no}", "x-${oc.env:OTHER}"]},
    }
    shown = published(document)
    assert (
        shown
        == published(shown)
        == {
            "target": {"name": "${oc.env:FLAG}", "dtype": "on"},
            "notes": ["with ${oc.env:OTHER} and ${oc.env:PASS} on"],
            "head": {"path": "${oc.env:OTHER}"},
            "command": "headstart eval --target on --data FILE.jsonl 'a=${oc.env:PASS}' --model '${oc.env:PASS}'",
            "recipe": {"train": {}, "a": ["${oc.env:PASS}", "x-${oc.env:OTHER}"]},
        }
    )


def test_a_variable_that_says_one_of_our_own_words_changes_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers go by keys and by words like a head's type: a name of a run may be the same."""
    for name, value in {"A": "data", "B": "portable", "C": "eagle3", "D": "bfloat16", "E": "provenance"}.items():
        monkeypatch.setenv(name, value)
    document = {
        "type": "eagle3",
        "layout": "portable",
        "drafter": "eagle3",
        "data": {"path": "workload:thank_you_train"},
        "provenance": {"recipe": {"run_dir": "x", "head": {"type": "eagle3"}, "target": {"dtype": "bfloat16"}}},
        "tree": {"kind": "chain"},
    }
    kept = {**document, "provenance": {"recipe": {"head": {"type": "eagle3"}, "target": {"dtype": "bfloat16"}}}}
    assert published(document, ["A", "B", "C", "D", "E"]) == kept


@pytest.mark.parametrize(
    ("written", "shown", "names"),
    [
        ("a${oc.env:X,b}c", "a${oc.env:X}c", ["X"]),
        ("${oc.env:X}${ oc.env: Y ,/home/alice}", "${oc.env:X}${oc.env:Y}", ["X", "Y"]),
        ("${oc.env:X,${oc.env:Y,/home/alice}}/z", "${oc.env:X,${oc.env:Y}}/z", ["X", "Y"]),
        ("${oc.env:X,'a}b'}c", "${oc.env:X}c", ["X"]),
        ('${oc.env:X,"a\\"}b"}c', "${oc.env:X}c", ["X"]),
        ("${oc.env:X,a", "${oc.env:X}", ["X"]),
        ("${oc.decode:${oc.env:X,b}}", "${oc.decode:${oc.env:X}}", ["X"]),
        ("${seed}", "${seed}", []),
    ],
)
def test_defaults_are_left_out(written: str, shown: str, names: list[str]) -> None:
    assert without_defaults(written) == shown == without_defaults(shown)
    assert variables(written) == names == variables(shown)


def test_tasks_that_become_the_same_stay_apart() -> None:
    tasks = {"/r/red": {"tau": 1.0}, "/r/blue": {"tau": 2.0}, "LOCAL_PATH 2": {"tau": 3.0}, "a": {"tau": 4.0}}
    shown = {"LOCAL_PATH": {"tau": 1.0}, "LOCAL_PATH 3": {"tau": 2.0}, "LOCAL_PATH 2": {"tau": 3.0}, "a": {"tau": 4.0}}
    assert published({"tasks": tasks}) == {"tasks": shown} == published({"tasks": shown})


def test_adapters() -> None:
    document = {
        "command": "headstart run x.yaml target.adapter=/home/me/lora",
        "recipe": {"target": {"name": "me/base", "adapter": "/home/me/lora"}},
        "target": {"adapter": "me/lora@v1"},
        "notes": ["tuned with /home/me/lora"],
    }
    assert published(document) == {
        "command": "headstart run RECIPE.yaml target.adapter=DIR",
        "recipe": {"target": {"name": "me/base", "adapter": "a local adapter"}},
        "target": {"adapter": "me/lora@v1"},
        "notes": ["tuned with a local adapter"],
    }


def test_a_tuning_names_its_head_as_a_report_does() -> None:
    assert published({"head": "runs/acme/head", "prompts": 2}) == {"head": "a local head", "prompts": 2}
    assert published({"head": "me/head@v1"}) == {"head": "me/head@v1"} and published({"head": None}) == {"head": None}


def published_command(command: str) -> str:
    return published({"command": command})["command"]


def test_paths_with_spaces_end_where_they_end(tmp_path: Path) -> None:
    there = tmp_path / "Acme (2), Inc" / "höme dir"
    there.mkdir(parents=True)
    (there / "a b.txt").write_text("")
    assert published_text(f"{there}: full") == "LOCAL_PATH: full"
    assert published_text(f"see {there}/a b.txt and {there}/gone") == "see LOCAL_PATH and LOCAL_PATH"
    # a setting is no sentence: what begins as a path is one, there or not
    settings = {"a": "/srv/Acme Inc/x y", "b": ["~/My Docs"], "/srv/Acme Inc/key": 1, "c": "see /srv/x y"}
    shown = {"a": "LOCAL_PATH", "b": ["LOCAL_PATH"], "LOCAL_PATH": 1, "c": "see LOCAL_PATH y"}
    assert published({"recipe": settings}) == {"recipe": shown}
    command = "headstart run r \"data.template_kwargs={x: '/srv/Acme Inc/y'}\""
    assert published_command(command) == "headstart run r 'data.template_kwargs={x: LOCAL_PATH}'"
    slow = "/tmp " * 100_000
    assert "tmp" not in published_text(slow)


REPORT: dict[str, Any] = {
    "target": {"name": "/m/alice/llama-ft", "weight_hash": "ab"},
    "head": {"path": "runs/acme/head", "type": "eagle3"},
    "data": {
        "path": "acme.jsonl, gsm8k.jsonl, b/globex.jsonl",
        "sha256": "00ff",
        "parts": [
            {"path": "acme.jsonl", "sha256": "1"},
            {"path": "gsm8k.jsonl"},
            {"path": "b/globex.jsonl"},
            {"dataset": "squad", "split": "test"},
        ],
    },
    "device": "http://alice:pw@gpu7:8000",
    "tasks": {"acme": {"tau": 2.0}, "gsm8k": {"tau": 3.0}, "globex": {"tau": 4.0}},
    "greedy_identity": {
        "divergences": [{"id": "acme/7"}, {"id": "talk:12"}, {"id": "globex/talk:3/turn1"}, {"id": "q9"}]
    },
    "engine": {"name": "vllm", "url": "http://alice:pw@gpu7:8000", "model": "/srv/alice/llama-ft"},
    "recipe": {
        "name": "acme",
        "run_dir": "/home/alice/runs/acme",
        "start_from": "../old/head",
        "target": {"name": "/m/alice/llama-ft", "chat_template": "acme.jinja", "dtype": "bfloat16"},
        "data": {"sources": [{"path": "acme.jsonl", "sha256": "1"}, {"dataset": "org/chats"}, {"dataset": "squad"}]},
        "train": {"project": "acme", "lr": 0.1},
        "eval": {"data": ["acme.jsonl", "openai/gsm8k", {"path": "workload:thank_you_heldout"}]},
    },
    "training": {"checkpoint": "/home/alice/runs/acme/checkpoints/step-4"},
    "notes": ["runs/acme/head read acme.jsonl in /home/alice"],
    "command": "headstart eval --head runs/acme/head --data acme.jsonl",
    "prompts": 3,
}


def test_a_report() -> None:
    shown = published(REPORT)
    assert shown == published(shown)
    assert "acme" not in str(shown) and "alice" not in str(shown) and "pw" not in str(shown)
    assert shown["target"] == {"name": "llama-ft", "weight_hash": "ab"}
    assert shown["head"] == {"path": "a local head", "type": "eagle3"}
    assert shown["data"]["path"] == "own data 1, gsm8k, own data 2, squad" and shown["data"]["sha256"] == "00ff"
    assert shown["tasks"] == {"own data 1": {"tau": 2.0}, "gsm8k": {"tau": 3.0}, "own data 2": {"tau": 4.0}}
    ids = [case["id"] for case in shown["greedy_identity"]["divergences"]]
    assert ids == ["own data 1/7", "own data:12", "own data 2/own data:3/turn1", "q9"]
    assert shown["device"] == "http://SERVER:8000" == shown["engine"]["url"]
    assert shown["engine"] == {"name": "vllm", "url": "http://SERVER:8000", "model": "llama-ft"}
    assert shown["recipe"] == {
        "start_from": "a local head",
        "target": {"name": "llama-ft", "chat_template": "own file", "dtype": "bfloat16"},
        "data": {"sources": [{"path": "own data", "sha256": "1"}, {"dataset": "org/chats"}, {"dataset": "squad"}]},
        "train": {"lr": 0.1},
        "eval": {"data": ["own data", "openai/gsm8k", {"path": "workload:thank_you_heldout"}]},
    }
    assert shown["training"] == {"checkpoint": "step-4"} and shown["prompts"] == 3
    assert shown["notes"] == ["a local head read own data in ~"]
    assert shown["command"] == "headstart eval --head DIR --data FILE.jsonl"


@pytest.mark.parametrize(
    "document",
    [
        {"data": {"path": "x", "parts": [1, None, {"path": 5}, {"dataset": ["x"]}]}},
        {"data": "x", "tasks": [1], "target": None, "recipe": 3, "head": {"path": {"deep": 1}}},
        {"greedy_identity": {"divergences": [{"id": 5}, "x"]}, "path": "\0", "notes": "\ud800/x \0"},
        {
            "target": {"name": "~nobody-here/x" + "y" * 5000},
            "path": "/" + "z" * 5000,
            "command": "headstart a=" + "9" * 5000,
        },
    ],
)
def test_documents_that_are_not_ours_pass_as_well(document: dict[str, Any]) -> None:
    shown = published(document)
    assert set(shown) == set(document) and published(shown) == shown


def test_a_document_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"x": deep}
    with pytest.raises(DataError, match="nested too deeply"):
        published(deep)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("headstart run smollm2-eagle3 train.lr=1e-4 seed=3", "headstart run smollm2-eagle3 train.lr=1e-4 seed=3"),
        ("headstart run /home/alice/acme.yaml name=acme", "headstart run RECIPE.yaml 'name=…'"),
        (
            "headstart eval --head me/head@v1 --target /m/acme --data=acme.jsonl --data openai/gsm8k --out acme --json",
            "headstart eval --head me/head@v1 --target acme --data=FILE.jsonl --data openai/gsm8k --out DIR --json",
        ),
        (
            "headstart eval --engine vllm --url http://a:pw@gpu7:1 --data acme.jsonl eval.max_new_tokens=8",
            "headstart eval --engine vllm --url http://SERVER:1 --data FILE.jsonl eval.max_new_tokens=8",
        ),
        (
            "headstart run r 'data.distill.prompts=[{path: acme.jsonl, limit: 3}]' 'eval.batch_sizes=[1,2]'",
            "headstart run r 'data.distill.prompts=[{path: own data, limit: 3}]' 'eval.batch_sizes=[1,2]'",
        ),
        ("headstart run r 'train.project=${oc.env:X,acme}'", "headstart run r 'train.project=…'"),
        ("python -m headstart.bench.decode --out acme.json 0.5", "python -m headstart.bench.decode --out DIR 0.5"),
        ("python acme.py --tokens 5 /srv/acme", "python SCRIPT.py --tokens 5 FILE"),
        ("python -m acme.tool x", "python SCRIPT.py x"),
        ("python -m headstart run /a/acme.yaml", "python -m headstart run RECIPE.yaml"),
        ("python -m", "python SCRIPT.py"),
        ("headstart eval 'unbalanced", "headstart '…'"),
    ],
)
def test_commands(command: str, shown: str) -> None:
    assert published_command(command) == shown == published_command(shown)
