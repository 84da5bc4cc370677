"""Parquet, CSV, text, packed files, folders and patterns; bad rows that are left out."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections import Counter
from datetime import datetime

import pyarrow as pa
import pytest
from pyarrow import parquet

from headstart.data.choosing.asked import read_prompts
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prepare import prepare
from headstart.data.sources import sources, tables
from headstart.data.sources.rejects import Rejects
from headstart.data.sources.sources import load_conversations, source_files
from headstart.heads.errors import ConfigError, DataError
from headstart.identity import of_source
from tests.reference.hostile import mutated, within_seconds

HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
PAIRS = b'{"prompt": "a"}\n{"prompt": "b"}\n'


def load(path, rejects=None, **settings):
    return list(load_conversations([SourceConfig(path=str(path), **settings)], rejects))


def texts(conversations):
    return [[message["content"] for message in conversation.messages] for conversation in conversations]


def asked(path, rejects, **settings):
    prompts = read_prompts([SourceConfig(path=str(path), **settings)], rejects=rejects)
    return [[message["content"] for message in prompt.first] for prompt in prompts]


def zstd(raw):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(raw)
    return sink.getvalue().to_pybytes()


def test_parquet(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}}
    other = {"type": "function", "function": {"name": "sub", "parameters": {"properties": {"b": {"type": "string"}}}}}
    rows = [
        {"messages": [HI, HELLO], "tools": [tool], "prompt": None, "at": datetime(2026, 1, 2), "raw": b"\xff"},
        {"messages": None, "tools": [other], "prompt": "Hi", "at": None, "raw": b"text"},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = load(tmp_path / "a.parquet")
    assert (list(first.messages), list(second.messages)) == ([HI, HELLO], [HI])
    # the table gives both tools both properties; the one without a value is no property
    assert (first.tools, second.tools) == ((tool,), (other,))
    assert first.meta == {"at": "2026-01-02 00:00:00", "raw": "(1 bytes)"} and second.meta == {"raw": "text"}
    assert first.where == f"{tmp_path}/a.parquet: record 1" and (first.id, second.id) == ("a:1", "a:2")


def test_parquet_with_bad_rows(tmp_path):
    starts = b"".join(n.to_bytes(4, "little") for n in (0, 1, 2, 3))
    # text that is not UTF-8 in the second row
    column = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(starts), pa.py_buffer(b"a\xffb")])
    parquet.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet: record 2: .*can't decode"):
        load(tmp_path / "a.parquet")
    rejects = Rejects()
    assert [c.id for c in load(tmp_path / "a.parquet", rejects, on_bad="skip")] == ["a:1", "a:3"]
    assert rejects.counts.total() == 1


@pytest.mark.parametrize("raw", [b"", b"PAR1", b"PAR1" + b"\0" * 40 + b"PAR1", b"x" * 1000])
def test_no_parquet_file(tmp_path, raw):
    (tmp_path / "a.parquet").write_bytes(raw)
    with pytest.raises(DataError, match="a.parquet: not readable as Parquet"):
        load(tmp_path / "a.parquet")


def test_changed_parquet_files_are_read_or_refused(tmp_path):
    path, dice = tmp_path / "a.parquet", random.Random(0)
    parquet.write_table(pa.table({"prompt": ["a" * 50, "b"] * 20, "n": list(range(40))}), path)
    whole, refused = path.read_bytes(), 0
    for _ in range(60):
        changed = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        path.write_bytes(changed[: dice.choice([len(changed), dice.randrange(len(changed))])])
        try:
            with within_seconds(10):
                load(path)
        except DataError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 20


def test_csv(tmp_path):
    text = 'id,prompt,response,empty\n7,"Hi, ""you""\nthere",42,\n007,x,,\n'
    (tmp_path / "a.csv").write_text("\ufeff" + text, encoding="utf-8")
    (tmp_path / "b.tsv").write_text("prompt\tresponse\nHi, you\tHello\n")
    first, second = load(tmp_path / "a.csv")
    assert texts([first, second]) == [['Hi, "you"\nthere', "42"], ["x"]]
    assert (first.id, second.id, first.meta) == ("7", "007", {})
    assert texts(load(tmp_path / "b.tsv")) == [["Hi, you", "Hello"]]
    (tmp_path / "c.csv").write_text("messages\n" + '"' + json.dumps([HI, HELLO]).replace('"', '""') + '"\n')
    assert texts(load(tmp_path / "c.csv")) == [["Hi", "Hello"]]
    (tmp_path / "d.csv").write_text("")
    assert load(tmp_path / "d.csv") == []


def test_bad_rows_of_a_csv_file(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,response\na,b\nc,d,e\n\xff,f\ng\nh,i\n")
    with pytest.raises(DataError, match="a.csv: record 2: found 3 cells, expected 2: quote cells that hold ','"):
        load(path)
    rejects = Rejects()
    good = load(path, rejects, on_bad="skip")
    assert texts(good) == [["a", "b"], ["h", "i"]] and [c.id for c in good] == ["a:1", "a:5"]
    rejects.write(tmp_path / "out" / "rejects.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert sorted((line["file"], line["row"]) for line in lines) == [(str(path), row) for row in (2, 3, 4)]
    assert sum(rejects.counts.values()) == 3 and any("not UTF-8 text" in reason for reason in rejects.counts)
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match="found two columns 'prompt'"):
        load(path)
    monkeypatch.setattr(tables, "CSV_BLOCK", 64)
    path.write_text("prompt\n" + "x" * 500 + "\n")
    with pytest.raises(DataError, match="a.csv: found a row of more than 64 bytes"):
        load(path)


def test_csv_rows_that_are_all_bad_are_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt\nHi, you\nHi, they\n")
    with pytest.raises(DataError, match="a.csv: record 1: found 2 cells, expected 1: .*on_bad: skip"):
        load(path)
    rejects, left = Rejects(), Counter()
    source = SourceConfig(path=str(path), on_bad="skip")
    assert list(load_conversations([source], rejects, left)) == [] and left == {0: 2}
    assert list(rejects.counts.values()) == [2]


def test_csv_with_semicolons(tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffprompt;response\n"Hi; you";Hello, there\n', encoding="utf-8")
    assert texts(load(tmp_path / "a.csv")) == [["Hi; you", "Hello, there"]]
    (tmp_path / "b.csv").write_text("prompt,a;b\nHi;1,x\n")  # a comma among the names: it separates
    (only,) = load(tmp_path / "b.csv")
    assert texts([only]) == [["Hi;1"]] and only.meta == {"a;b": "x"}
    (tmp_path / "c.tsv").write_text("prompt;x\tresponse;x\n1;2\t3\n")
    with pytest.raises(DataError, match="found fields 'prompt;x', 'response;x'"):
        load(tmp_path / "c.tsv")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_text_of_another_encoding_is_refused_with_the_remedy(tmp_path, name, encoding, capfd):
    rows = {"a.csv": "prompt,id\nschön,1\n", "a.tsv": "prompt\nschön\n", "a.txt": "schön\n"}
    (tmp_path / name).write_bytes(rows.get(name, '[{"prompt": "schön"}]').encode(encoding))
    with pytest.raises(DataError, match=f"{name}.*: save the file as UTF-8"):
        load(tmp_path / name)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.zst", "a.json.zst"])
def test_packed_files_that_end_too_soon(tmp_path, name):
    raw = random.Random(0).randbytes(3000).hex().encode()
    pack = gzip.compress if name.endswith(".gz") else zstd
    (tmp_path / name).write_bytes(pack(b'{"prompt": "' + raw + b'"}')[:1000])
    packing = "gzip" if name.endswith(".gz") else "zstd"
    with pytest.raises(DataError, match=f"{name}.*: broken {packing} data .*: copy the file again"):
        load(tmp_path / name, on_bad="skip")


def test_csv_rows_keep_their_numbers_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BLOCK", 256)
    rows = [f"p{n},r" + (",bad" if n % 7 == 3 else "") for n in range(1, 201)]
    (tmp_path / "a.csv").write_text("prompt,response\n" + "\n".join(rows) + "\n")
    rejects = Rejects()
    made = load(tmp_path / "a.csv", rejects, on_bad="skip")
    assert [(c.id, c.messages[0]["content"]) for c in made] == [
        (f"a:{n}", f"p{n}") for n in range(1, 201) if n % 7 != 3
    ]
    assert list(rejects.counts.values()) == [29]


def test_changed_csv_files_are_read_or_refused(tmp_path):
    path, text, read = tmp_path / "a.csv", 'prompt,response\na,"b\nc"\nd,e\n', 0
    for number in range(150):
        path.write_bytes(mutated(text, random.Random(number)).encode("utf-8", "surrogatepass"))
        try:
            with within_seconds(10):
                read += len(load(path)) > 0
        except DataError as error:
            assert str(path) in str(error) and len(str(error)) < 1000
    assert 20 < read < 150


def test_text_has_a_prompt_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("Hi\n\n  Bye \n")
    assert texts(load(tmp_path / "a.txt")) == [["Hi"], ["Bye"]]
    assert [prompt.id for prompt in read_prompts([SourceConfig(path=str(tmp_path / "a.txt"))])] == ["a:1", "a:3"]


@pytest.mark.parametrize("pack", [("gz", gzip.compress), ("zst", zstd)], ids=["gzip", "zstd"])
@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.jsonl", PAIRS), ("a.json", PAIRS), ("a.json", b' [{"prompt": "a"}, {"prompt": "b"}]'),
        ("a.csv", b"prompt\na\nb\n"), ("a.txt", b"a\nb\n"),
    ],
)  # fmt: skip
def test_packed(tmp_path, name, raw, pack):
    path = tmp_path / f"{name}.{pack[0]}"
    packed = pack[1](raw)
    path.write_bytes(packed)
    assert texts(load(path)) == [["a"], ["b"]]
    for broken in (packed[:-6], b"\0" * 20):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=f"{path}"):
            load(path)


def test_folders_and_patterns(tmp_path):
    (tmp_path / "in" / ".cache").mkdir(parents=True)
    (tmp_path / "b.jsonl").write_bytes(PAIRS)
    (tmp_path / "in" / "a.txt").write_text("c\n")
    (tmp_path / "in" / ".cache" / "d.txt").write_text("hidden\n")
    (tmp_path / "in" / "README.md").write_text("no data\n")
    assert texts(load(tmp_path)) == [["a"], ["b"], ["c"]]
    assert texts(load(tmp_path, limit=1)) == [["a"]]
    assert [path.name for path in source_files(f"{tmp_path}/**/*")] == ["b.jsonl", "a.txt"]
    assert texts(load(f"{tmp_path}/*/*.t?t")) == [["c"]]
    with pytest.raises(DataError, match=r"\*.csv: no such file, expected files of these kinds: .jsonl"):
        load(tmp_path / "*.csv")
    (tmp_path / "odd[1].txt").write_text("named\n")
    assert texts(load(tmp_path / "odd[1].txt")) == [["named"]]


def test_the_identity_of_a_folder_changes_with_its_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(PAIRS)
    source = SourceConfig(path=str(tmp_path))
    alone = of_source(source)
    assert of_source(SourceConfig(path=str(tmp_path / "a.jsonl")))["sha256"] == alone["sha256"]
    assert "on_bad" not in alone and of_source(SourceConfig(path=str(tmp_path), on_bad="skip"))["on_bad"] == "skip"
    (tmp_path / "b.txt").write_text("x\n")
    both = of_source(source)
    assert both != alone
    (tmp_path / "b.txt").write_text("y\n")
    assert of_source(source) != both


def test_skipped_rows_are_counted_by_reason(write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE", 500)
    path = write_jsonl([
        {"prompt": "a"}, "{", "[", {"messages": [HI, {"role": "bot"}]}, {"messages": [{"role": "cat"}]},
        '{"prompt": "\\ud800"}', "x" * 2000, "5", {"messages": [HELLO]}, {"prompt": "b"},
    ])  # fmt: skip
    rejects = Rejects()
    assert asked(path, rejects, on_bad="skip") == [["a"], ["b"]]
    assert rejects.counts.total() == 8
    assert rejects.counts["messages….role: found '…', expected one of system, developer, user, assistant, tool"] == 2
    assert rejects.lines()[0].startswith("left out 2 bad rows: ")
    rejects.write(tmp_path / "rejects.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(2, 10)) and {row["file"] for row in rows} == {str(path)}
    assert rows[2]["reason"].startswith("messages[1].role: found 'bot'")
    Rejects().write(tmp_path / "rejects.jsonl")
    assert not (tmp_path / "rejects.jsonl").exists()
    with pytest.raises(DataError, match="data.jsonl:2: not valid JSON"):
        load(path)


def test_reasons_do_not_hold_what_was_found(write_jsonl):
    told = ["a", "it's", "x" * 200, "it's " * 50]
    rows = [{"messages": [{"role": role, "content": "x"}]} for role in told] + [{"prompt": n} for n in (1, -20, 1.5e30)]
    rejects = Rejects()
    assert load(write_jsonl(rows), rejects, on_bad="skip") == []
    assert sorted(rejects.counts.values()) == [1, 2, 4] and rejects.counts["prompt: found int …, expected text"] == 2
    assert rejects.counts["messages….role: found '…', expected one of system, developer, user, assistant, tool"] == 4


def test_settings_of_a_source():
    with pytest.raises(ConfigError, match=r"data.sources\[0\].on_bad: found 'ignore', expected stop or skip"):
        load("a", on_bad="ignore")
    with pytest.raises(ConfigError, match=r"streaming: found 1, expected true, false or null"):
        load("a", streaming=1)


@pytest.mark.parametrize("kind", [".parquet", ".csv", ".jsonl.zst"])
def test_large_files_are_read_in_parts(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tables, "CSV_BLOCK", 1 << 16)
    count, text = 10_000, "word " * 600  # 30 MB
    path = tmp_path / f"a{kind}"
    if kind == ".parquet":
        parquet.write_table(pa.table({"prompt": [text + str(n) for n in range(count)]}), path, row_group_size=1000)
    else:
        csv = "prompt\n" + "".join(f"{text}{n}\n" for n in range(count))
        lines = "".join(json.dumps({"prompt": f"{text}{n}"}) + "\n" for n in range(count))
        path.write_bytes(csv.encode() if kind == ".csv" else zstd(lines.encode()))
    held = pa.total_allocated_bytes()
    tracemalloc.start()
    largest = seen = 0
    for conversation in load_conversations([SourceConfig(path=str(path))]):
        seen += len(conversation.messages)
        if seen % 1000 == 0:
            largest = max(largest, pa.total_allocated_bytes() - held)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == count and python < 12e6 and largest < 15e6


def test_datasets_in_a_folder(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"messages": [HI, HELLO]}, {"messages": [HI]}])
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    rows.to_parquet(tmp_path / "plain" / "train.parquet")

    def read(name, **settings):
        return texts(load_conversations([SourceConfig(dataset=str(tmp_path / name), **settings)]))

    assert read("saved") == read("splits") == read("plain", streaming=True) == [["Hi", "Hello"], ["Hi"]]
    assert read("splits", split="test") == [["Hi"]]


def test_preparing_counts_what_was_left_out(tmp_path, write_jsonl, tokenizer):
    path = write_jsonl([{"prompt": f"a {n}", "response": "b c d"} for n in range(4)] + [{"prompt": 5}, "{"])
    source = SourceConfig(path=str(path), on_bad="skip")
    data = prepare(DataConfig(sources=[source], held_out_fraction=0), tokenizer, [tokenizer.eos_token_id])
    assert data.report.conversations == 4 and data.rejects.counts["prompt: found int …, expected text"] == 1
    assert data.rejects.counts.total() == 2
    path = write_jsonl(["{"])
    with pytest.raises(DataError, match="can be trained on\n(.*\n)*left out 1 bad row: not valid JSON"):
        prepare(DataConfig(sources=[source]), tokenizer, [tokenizer.eos_token_id])
