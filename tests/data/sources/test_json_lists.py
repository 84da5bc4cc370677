"""A JSON list read a record at a time: the same records as json.loads, whatever the chunks, in little memory."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc

import pytest

from headstart.data.config import SourceConfig
from headstart.data.sources import json_lists, sources
from headstart.data.sources.json_lists import stream_list
from headstart.data.sources.sources import load_conversations
from headstart.heads.errors import DataError
from tests.reference.hostile import mutated, within_seconds

RECORDS = [
    {"a": "x]},[{\\\"é😀\n"}, [], "t,ext", 12345678, -1.5e10, None, True, {"deep": [[{"b": {}}]] * 3}, "", "z" * 300,
]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_same_records_whatever_the_chunks(monkeypatch, chunk, indent, ascii_only):
    monkeypatch.setattr(json_lists, "CHUNK", chunk)
    text = "\ufeff " + json.dumps(RECORDS, indent=indent, ensure_ascii=ascii_only) + " \n"
    made = list(stream_list(io.BytesIO(text.encode()), "f", 1000))
    assert [value for value, _ in made] == RECORDS
    assert [json.loads(written) for _, written in made] == RECORDS
    assert list(stream_list(io.BytesIO(b"[ ]"), "f", 10)) == []


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"", "f: expected a JSON list"), (b'{"a": 1}', "f: expected a JSON list"),
        (b"[1,\n2", r"f:2: not valid JSON \(the list does not end\)"), (b"[1 2]", "expected a comma between records"),
        (b"[1,]", "Expecting value at character 0 of the record"), (b"[1]\n]", "f:2: not valid JSON .text after"),
        (b'[1,\n\n{"a"}]', r"f:3: not valid JSON \(Expecting ':' delimiter at character 4 of the record"),
        (b'["\xff"]', "f: not UTF-8 text"), (b"[" * 100_000, "f:1: JSON nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", "Exceeds the limit"), (b'["' + b"x" * 3000 + b'"]', "a record of more than 2000"),
        (b"[1,\n,2]", "f:2: not valid JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [5, 1000])
def test_refusals(monkeypatch, chunk, raw, found):
    monkeypatch.setattr(json_lists, "CHUNK", chunk)
    most = 2000 if b"xxx" in raw else 1_000_000
    with within_seconds(10), pytest.raises(DataError, match=found):
        list(stream_list(io.BytesIO(raw), "f", most))


def test_changed_files_are_read_as_json_reads_them(monkeypatch):
    monkeypatch.setattr(json_lists, "CHUNK", 11)
    text, same = json.dumps(RECORDS, ensure_ascii=False), 0
    for number in range(400):
        changed = mutated(text, random.Random(number)).encode("utf-8", "replace")
        try:
            expected = json.loads(changed.decode())
        except ValueError:
            expected = None
        try:
            with within_seconds(5):
                made = [value for value, _ in stream_list(io.BytesIO(changed), "f", 10_000)]
        except DataError:
            made = None
        # NaN is not equal to itself
        assert repr(made) == repr(expected if isinstance(expected, list) else None), number
        same += made is not None
    assert 50 < same < 380


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_large_file_is_read_in_parts(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(sources, "WHOLE_JSON", 1 << 20)
    count = 10_000
    text = json.dumps([{"prompt": "word " * 300 + str(n)} for n in range(count)], indent=1)  # 15 MB
    path = tmp_path / f"a{suffix}"
    path.write_bytes(text.encode() if suffix == ".json" else gzip.compress(text.encode(), 1))
    del text
    tracemalloc.start()
    ids = [c.id for c in load_conversations([SourceConfig(path=str(path))])]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ids == [f"a:{n}" for n in range(1, count + 1)] and peak < 10e6


def test_bad_records_of_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "WHOLE_JSON", 10)
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a"},\n {"prompt": "\\ud800"},\n 5, {"prompt": "b"}]')
    with pytest.raises(DataError, match="a.json: record 2: prompt: found half of a surrogate pair"):
        list(load_conversations([SourceConfig(path=str(path))]))
    read = load_conversations([SourceConfig(path=str(path), on_bad="skip")])
    assert [conversation.id for conversation in read] == ["a:1", "a:4"]
