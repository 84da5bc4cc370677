"""Every record layout, and errors that name the file and the line."""

from __future__ import annotations

import errno
import gzip
import json
import os

import pytest

from headstart.data.choosing.asked import read_prompts
from headstart.data.config import SourceConfig
from headstart.data.records.conversation import TokenTurn
from headstart.data.sources import sources
from headstart.data.sources.sources import load_conversations, workload_path
from headstart.eval.prompts import load_prompts
from headstart.heads import files
from headstart.heads.errors import ConfigError, DataError
from headstart.identity import of_sources

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}


def load(path, **kwargs):
    return list(load_conversations([SourceConfig(path=str(path), **kwargs)]))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [HI, HELLO]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [HI, HELLO]},
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": "Hi", "completion": "Hello"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                HELLO,
            ]
        },
    ],
)
def test_layouts_give_the_same_messages(write_jsonl, record):
    (conversation,) = load(write_jsonl([record]))
    assert list(conversation.messages) == [HI, HELLO]
    assert (conversation.id, conversation.finish_reason, conversation.turns) == ("data:1", "stop", ())


def test_prompt_only_and_spec_bench_turns(write_jsonl):
    path = write_jsonl([
        {"prompt": "Hi", "system": "Be kind"},
        {"question_id": 81, "category": "writing", "turns": ["Hi", "Bye"], "reference": [1]},
    ])  # fmt: skip
    first, second = load(path)
    assert list(first.messages) == [{"role": "system", "content": "Be kind"}, HI]
    assert [m["content"] for m in second.messages] == ["Hi", "Bye"]
    assert (second.id, second.task, second.meta["category"], second.meta["question_id"]) == (
        "81",
        "writing",
        "writing",
        81,
    )
    assert second.meta["reference"] == [1]


def test_kept_fields(write_jsonl):
    record = {
        "id": 7, "task": "t", "category": "c", "messages": [HI, {**HELLO, "reasoning_content": "Hm"}],
        "finish_reason": "length",
        "prompt_token_ids": [1, 2], "response_token_ids": [3], "set": "x",
        "earlier_turns": [{"prompt_token_ids": [1], "response_token_ids": [2], "finish_reason": "stop"}],
    }  # fmt: skip
    (conversation,) = load(write_jsonl([record]))
    assert (conversation.id, conversation.task, conversation.finish_reason) == ("7", "t", "length")
    assert conversation.turns == (TokenTurn((1,), (2,), "stop"), TokenTurn((1, 2), (3,), "length"))
    assert conversation.messages[1]["reasoning_content"] == "Hm"
    assert conversation.meta["set"] == "x" and "prompt_token_ids" not in conversation.meta


def test_prompts_take_all_user_turns_and_no_answers(write_jsonl):
    path = write_jsonl([
        {"id": "a", "messages": [{"role": "system", "content": "S"}, HI, HELLO, {"role": "user", "content": "Bye"}]},
        {"id": "b", "turns": ["1", "2"], "category": "c", "prompt_token_ids": [5, 6]},
        {"id": "c", "prompt": "x"},
        {"id": "d", "turns": ["only"], "prompt_token_ids": [7]},
    ])  # fmt: skip
    a, b, _, d = read_prompts([SourceConfig(path=str(path))])
    assert len(read_prompts([SourceConfig(path=str(path))], limit=2)) == 2
    assert (a.id, a.first, a.later) == ("a", ({"role": "system", "content": "S"}, HI), (({**HI, "content": "Bye"},),))
    assert (b.answers, b.task, b.prompt_token_ids) == (2, "c", None)
    assert d.prompt_token_ids == (7,)
    assert a.messages([{"role": "assistant", "content": "ok"}]) == [
        {"role": "system", "content": "S"}, HI, {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "Bye"},
    ]  # fmt: skip


def test_files_gz_json_bom_blank_lines_and_limit(tmp_path):
    lines = "".join(json.dumps({"prompt": str(i), "response": "r"}) + "\n" for i in range(3))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "b.jsonl").write_text("\ufeff" + lines.replace("\n", "\n\n"), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps([json.loads(line) for line in lines.splitlines()]))
    assert [c.id for c in load(tmp_path / "a.jsonl.gz")] == ["a:1", "a:2", "a:3"]
    assert [c.id for c in load(tmp_path / "b.jsonl")] == ["b:1", "b:3", "b:5"]
    assert [c.id for c in load(tmp_path / "c.json", limit=2)] == ["c:1", "c:2"]


def test_repeated_ids_are_made_unique_in_order(write_jsonl):
    path = write_jsonl([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}, {"id": 1, "prompt": "c"}])
    assert [c.id for c in load(path)] == ["1", "1~2", "1~3"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", r"not valid JSON .* at column 2"),
        ('"text"', r"found text, expected a JSON object"),
        ({"text": "x"}, r"found fields 'text', expected one of messages, conversations"),
        ({"messages": []}, r"messages: found an empty list, expected a list with at least one"),
        ({"messages": [HI, {"role": "bot", "content": ""}]}, r"messages\[1\].role: found 'bot', expected one of"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content: found int 5, expected text"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: found nothing, expected text"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]},
         r"messages\[0\].content: found a part that is not text"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, r"conversations\[0\].from: found 'alien'"),
        ({"prompt": 5}, r"prompt: found int 5, expected text"),
        ({"turns": "Hi"}, r"turns: found text, expected a list"),
        ({"prompt": "x", "finish_reason": "tired"}, r"finish_reason: found 'tired', expected one of stop"),
        ({"prompt": "x", "response_token_ids": [1.5], "prompt_token_ids": [1]},
         r"response_token_ids: .*expected a list of token ids"),
        ({"prompt": "x", "response_token_ids": [1]}, r"prompt_token_ids: found nothing"),
        ('{"prompt": "\\ud800"}', r"prompt: found half of a surrogate pair"),
    ],
)  # fmt: skip
def test_bad_record_is_named_by_file_and_line(write_jsonl, bad, message):
    path = write_jsonl([{"prompt": "fine"}, "", bad])
    with pytest.raises(DataError, match="data.jsonl:3: " + message):
        load(path)


def test_bad_files(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "ok"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match="latin.jsonl:2: not UTF-8"):
        load(tmp_path / "latin.jsonl")
    with gzip.open(tmp_path / "cut.jsonl.gz", "wt") as file:
        file.write('{"prompt": "ok"}\n' * 1000)
    whole = (tmp_path / "cut.jsonl.gz").read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-10])
    with pytest.raises(DataError, match="cut.jsonl.gz.*broken gzip"):
        load(tmp_path / "cut.jsonl.gz")
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"prompt": "ok"}\n')
    with pytest.raises(DataError, match="plain.jsonl.gz:1: broken gzip"):
        load(tmp_path / "plain.jsonl.gz")
    (tmp_path / "lines.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match=r"lines.json:2: not valid JSON .*belongs in .jsonl"):
        load(tmp_path / "lines.json")
    (tmp_path / "list.jsonl").write_text('[{"prompt": "a"}, {"prompt": "b"}]')
    with pytest.raises(DataError, match=r"list.jsonl:1: found a list, .*: a file that holds one list is named .json"):
        load(tmp_path / "list.jsonl")
    for name in ("none.json", "none.jsonl", "none.csv", "none.txt"):
        (tmp_path / name).write_text("\n")
        assert load(tmp_path / name) == []
    with pytest.raises(DataError, match=r"missing.jsonl: no such file, expected a .jsonl"):
        load(tmp_path / "missing.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: it is a directory, expected a regular file, or a folder with files of"):
        load(tmp_path / "empty")


DEEP = "[" * 100_000
DIGITS = "9" * 5000


def readers(path):
    """Every way in which a file of records is read."""
    sources = [SourceConfig(path=str(path))]
    return (
        lambda: list(load_conversations(sources)), lambda: read_prompts(sources), lambda: load_prompts(str(path)),
        lambda: of_sources(sources),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "meta": ' + DEEP + "}", "JSON nested too deeply, expected one object per line"),
        ('{"prompt": "x", "question_id": ' + DIGITS + "}", r"not valid JSON \(Exceeds the limit \(4300 digits\)"),
        ('{"prompt": "x", "task": "\\ud83d"}', "task: found half of a surrogate pair"),
        ('{"prompt": "x", "id": "\\udc00"}', "id: found half of a surrogate pair"),
        ('{"prompt": "x", "meta": [{"\\uD800": 1}]}', "meta: a key: found half of a surrogate pair"),
    ],
)
def test_hostile_lines_are_named_alike(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text('{"prompt": "ok"}\n' + line + "\n")
    (tmp_path / "data.json").write_text('[{"prompt": "ok"},\n' + line + "]\n")
    for read in readers(tmp_path / "data.jsonl")[:3]:
        with pytest.raises(DataError, match=f"data.jsonl:2: {message}"):
            read()
    for read in readers(tmp_path / "data.json")[:3]:
        with pytest.raises(DataError, match=f"data.json: (record 2: )?{message.split(',')[0]}"):
            read()


def test_a_whole_surrogate_pair_is_text(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "\\ud83d\\ude00", "task": "\\u00fc"}\n')
    (conversation,) = load(tmp_path / "data.jsonl")
    assert (conversation.messages[0]["content"], conversation.task) == ("😀", "ü")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "it is a pipe, expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, expected a regular file"),
        (lambda path: path.mkdir(), "it is a directory, expected a regular file"),
        (lambda path: None, "no such file"),
    ],
    ids=["pipe", "device", "directory", "nothing"],
)
def test_only_regular_files_are_read(tmp_path, suffix, make, message):
    path = tmp_path / f"data{suffix}"
    make(path)
    for read in readers(path):
        with pytest.raises(DataError, match=f"data{suffix}: .*{message}|data{suffix}: {message}"):
            read()


@pytest.mark.parametrize("path", ["x" * 5000 + ".jsonl", "/".join(["x" * 200] * 60) + ".jsonl", "nu\0ll.jsonl"])
def test_names_that_no_file_can_have(path):
    for read in readers(path):
        with pytest.raises(DataError, match="File name too long|no name that a file can have") as caught:
            read()
        assert len(str(caught.value)) < 500


def test_a_file_that_may_not_be_read_is_no_unwritable_one(write_jsonl, monkeypatch):
    path = write_jsonl([{"prompt": "x"}])

    def refuse(*_arguments, **_options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files.os, "open", refuse)
    for read in readers(path):
        with pytest.raises(DataError, match=r"data.jsonl: cannot be read \(Permission denied\)"):
            read()


def test_lines_have_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE", 100)
    with gzip.open(tmp_path / "zeros.jsonl.gz", "wb") as file:
        file.write(b'{"prompt": "x"}\n' + b"0" * 1_000_000)
    with pytest.raises(DataError, match="zeros.jsonl.gz:2: found a line of more than 100 bytes"):
        load(tmp_path / "zeros.jsonl.gz")
    monkeypatch.setattr(sources, "WHOLE_JSON", 10)
    (tmp_path / "long.json").write_text('[{"prompt": "x"},\n{"prompt": "' + "x" * 3_000_000 + '"}]')
    with pytest.raises(DataError, match="long.json:2: found a record of more than 100 characters"):
        load(tmp_path / "long.json")


def test_the_home_directory(tmp_path, monkeypatch, write_jsonl):
    write_jsonl([{"prompt": "x"}])
    monkeypatch.setenv("HOME", str(tmp_path))
    for read in readers("~/data.jsonl"):
        assert len(read()) == 1


def test_repeats_get_an_id_that_is_free(write_jsonl):
    path = write_jsonl([{"id": name, "prompt": "a"} for name in ("1", "1~2", "1", "1", "1~2")])
    assert [c.id for c in load(path)] == ["1", "1~2", "1~3", "1~4", "1~2~2"]


def test_source_that_names_nothing_or_two_things():
    with pytest.raises(ConfigError, match=r"data.sources\[0\]: found neither of path and dataset"):
        list(load_conversations([SourceConfig()]))
    with pytest.raises(ConfigError, match="found both"):
        list(load_conversations([SourceConfig(path="a", dataset="b")]))
    with pytest.raises(ConfigError, match="format: found 'csv'"):
        load("a", format="csv")


def test_prompt_without_user_turn(write_jsonl):
    path = write_jsonl([{"messages": [HELLO]}])
    with pytest.raises(DataError, match="data.jsonl:1: found no user message"):
        read_prompts([SourceConfig(path=str(path))])


def test_unreachable_hub_is_explained(monkeypatch):
    import huggingface_hub

    def refuse(*_arguments, **_kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"dataset 'owner/name' .*ConnectionError: no route to host.*path=FILE.jsonl"):
        list(load_conversations([SourceConfig(dataset="owner/name")]))


def test_unknown_workload_lists_the_known():
    with pytest.raises(DataError, match="workload:nothing: no such workload, expected one of"):
        workload_path("nothing")


def test_dataset_rows_are_records_and_a_broken_stream_is_explained(monkeypatch):
    import datasets
    import huggingface_hub

    def rows(name, subset, split, streaming):
        assert (name, subset, split, streaming) == ("owner/name", None, "train", True)
        yield {"prompt": "Hi", "response": "Hello"}
        raise TimeoutError("the line went dead")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", rows)
    (conversation,) = load_conversations([SourceConfig(dataset="owner/name", limit=1)])
    assert (conversation.id, list(conversation.messages)) == ("owner/name:0", [HI, HELLO])
    with pytest.raises(DataError, match=r"TimeoutError: the line went dead"):
        list(load_conversations([SourceConfig(dataset="owner/name", limit=2)]))
