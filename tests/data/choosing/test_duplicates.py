"""Exact duplicates, near duplicates, and near copies of held-out conversations, beside comparing every pair by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.duplicates import jaccard, runs
from reference.duplicates import near_duplicates as by_hand

from headstart.data.choosing import duplicates
from headstart.data.choosing.duplicates import (
    FUNCTIONS,
    MISSED,
    Originals,
    bands,
    content_key,
    near_duplicates,
    require_minhash,
)
from headstart.data.choosing.shingles import ShingleStore, likeness, of_messages, shingles, words
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prepare import PreparedData, prepare
from headstart.data.records.conversation import parse_record
from headstart.data.samples import Sample
from headstart.heads.errors import DataError

STOP = 2
VOCABULARY = [f"w{n}" for n in range(4000)]


def record(name: str, prompt: str, answer: str, **fields: Any) -> dict[str, Any]:
    """A logged answer with its token ids: one per character."""
    ids = {"prompt_token_ids": [ord(c) for c in prompt], "response_token_ids": [*map(ord, answer), STOP]}
    return {"id": name, "prompt": prompt, "response": answer, **ids, **fields}


def write(path: Path, records: list[dict[str, Any]], **settings: Any) -> SourceConfig:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return SourceConfig(path=str(path), **settings)


def prepared(path: Path, *files: list[dict[str, Any]], **settings: Any) -> PreparedData:
    sources = [write(path / f"file{number}.jsonl", records) for number, records in enumerate(files)]
    return prepare(DataConfig(sources=sources, **settings), None, [STOP])


def chat(*said: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def text(draw: random.Random, length: int) -> str:
    return " ".join(draw.choices(VOCABULARY, k=length))


def changed(draw: random.Random, said: str, share: float) -> str:
    """The text with about this share of its words replaced, added or left out."""
    made: list[str] = []
    for word in said.split():
        if draw.random() >= share:
            made.append(word)
        elif draw.random() < 0.6:
            made += draw.choices(VOCABULARY, k=draw.choice((1, 1, 2)))
    return " ".join(made)


def near_log(draw: random.Random, families: int, share: float = 0.04) -> list[dict[str, Any]]:
    """Conversations in families of near copies, some of them copies of copies, in random order."""
    log = []
    for family in range(families):
        said = text(draw, draw.randint(8, 60)), text(draw, draw.randint(8, 120))
        for copy in range(draw.choice((1, 1, 2, 3, 5))):
            log.append(record(f"f{family}c{copy}", *said))
            prompt = f"{changed(draw, said[0], share * draw.random())} {draw.choice(VOCABULARY)}"
            said = prompt, changed(draw, said[1], share * draw.random())
    draw.shuffle(log)
    return log


def sets_of(records: list[dict[str, Any]]) -> list[np.ndarray]:
    return [shingles(parse_record(each, "f:1", "f:1")) for each in records]


def runs_of(each: dict[str, Any]) -> set[Any]:
    return runs(chat(each["prompt"], each["response"]))


MIXED = ["Hello, World! don't", "Ça va très BIEN", "今天天气很好, isn't it?", "ひらがな and x_1", "", "one", "one two"]


@pytest.mark.parametrize("said", MIXED)
def test_runs_of_words(said: str):
    system = {"role": "system", "content": "Be brief."}
    conversation = parse_record({"messages": [system, *chat(said, "yes")]}, "f", "f")
    assert len(shingles(conversation)) == len(runs(conversation.messages))
    assert words("Hello, World! don't x_1") == [b"hello", b"world", b"don", b"t", b"x_1"]
    assert words("天气 OK") == ["天".encode(), "气".encode(), b"ok"]


def test_likeness_is_that_of_every_pair_by_hand():
    draw = random.Random(1)
    log = near_log(draw, 25, share=0.3)
    made, hand = sets_of(log), [runs_of(each) for each in log]
    found = []
    for i in range(len(log)):
        for j in range(len(log)):
            found.append(jaccard(hand[i], hand[j]))
            assert likeness(made[i], made[j]) == found[-1]
    assert sum(0.2 < value < 0.95 for value in found) > 20
    empty = np.empty(0, np.uint32)
    assert likeness(empty, empty) == likeness(empty, made[0]) == likeness(made[0], empty) == 0.0


def test_what_does_not_count():
    def of(**fields: Any) -> np.ndarray:
        messages = chat("What is the time now?", "It is noon here.")
        return shingles(parse_record({"messages": messages, **fields}, "f", "f"))

    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    assert likeness(of(), of(system="A long system prompt about everything", tools=tools)) == 1.0
    ids = parse_record({"prompt_token_ids": [5, 6, 7, 8], "response_token_ids": [9, 2]}, "f", "f")
    other = parse_record({"prompt_token_ids": [5, 6, 7, 8], "response_token_ids": [9, 9, 2]}, "f", "f")
    assert likeness(shingles(ids), shingles(other)) == 3 / 6


@pytest.mark.parametrize("many", [1, 1 << 12])
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.95, 1.0])
def test_copies_of_originals_are_those_found_by_hand(threshold: float, many: int, monkeypatch: pytest.MonkeyPatch):
    """It is exact: no copy is missed and none invented. Few holders are compared one by one, many at once."""
    monkeypatch.setattr(duplicates, "MANY", many)
    draw = random.Random(2)
    log = near_log(draw, 90, share=0.5 * (1 - threshold))
    made, hand = sets_of(log), [runs_of(each) for each in log]
    originals = Originals(made[:60], threshold)
    copies = 0
    for one in range(60, len(log)):
        like = [i for i in range(60) if jaccard(hand[one], hand[i]) >= threshold]
        assert originals.copied_by(made[one]) == (like[0] if like else None)
        copies += bool(like)
    assert copies >= 5 or threshold == 1
    assert Originals([], threshold).copied_by(made[0]) is None
    assert Originals([np.empty(0, np.uint32)], threshold).copied_by(np.empty(0, np.uint32)) is None


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 0.99])
def test_bands_hardly_miss(threshold: float):
    number, rows = bands(threshold)
    assert number * rows <= FUNCTIONS and (1 - threshold**rows) ** number <= MISSED


@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_near_duplicates_are_those_found_by_hand(threshold: float):
    """The likeness of what MinHash proposes is computed, so it invents none; it may miss few."""
    pytest.importorskip("datasketch")
    draw = random.Random(3)
    log = near_log(draw, 150)
    made = sets_of(log)
    found = near_duplicates(made.__getitem__, len(made), threshold)
    expected = by_hand([runs_of(each) for each in log], threshold)
    assert len(expected) > 60 and found == expected


def test_of_very_many_proposals_the_likeliest_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Each label of one long question with other words in it: all are proposed for all, few are copies."""
    pytest.importorskip("datasketch")
    draw = random.Random(8)
    base = " ".join(VOCABULARY[:80])
    log = [record(f"r{n}", base, text(draw, 24)) for n in range(120)]
    log += [record(f"c{n}", base, changed(draw, log[n]["response"], 0.05)) for n in range(0, 120, 3)]
    made, hand = sets_of(log), [runs_of(each) for each in log]
    assert 0.55 < jaccard(hand[0], hand[1]) < 0.7
    for name, value in (("PROPOSED", 40), ("COMPARED", 3), ("MANY", 20)):
        monkeypatch.setattr(duplicates, name, value)
    found, expected = near_duplicates(made.__getitem__, len(made), 0.8), by_hand(hand, 0.8)
    assert len(expected) > 30 and found == expected


def test_chains_of_copies():
    """A is like B and B like C, but A is not like C. B leaves as a copy of A. C stays: what it copies has left."""
    pytest.importorskip("datasketch")
    base = [f"x{n}" for n in range(60)]
    chain = [" ".join([f"y{n}" for n in range(4 * k)] + base[4 * k :]) for k in range(5)]
    hand = [runs(chat(each)) for each in chain]
    assert [jaccard(hand[0], each) >= 0.8 for each in hand] == [True, True, False, False, False]
    assert all(jaccard(hand[k], hand[k + 1]) >= 0.8 for k in range(4))
    made = [shingles(parse_record({"prompt": each}, "f", "f")) for each in chain]
    assert near_duplicates(made.__getitem__, 5, 0.8) == by_hand(hand, 0.8) == {1: 0, 3: 2}


def test_the_store_gives_what_it_was_given():
    store, draw = ShingleStore(), np.random.default_rng(0)
    sets = [np.unique(draw.integers(0, 1 << 32, size, dtype=np.uint32)) for size in (3, 0, 1000, 1)]
    assert [store.add(each) for each in sets[:3]] == [0, 1, 2]
    assert (store[2] == sets[2]).all()
    store.add(sets[3])
    assert len(store) == 4 and all((store[row] == each).all() for row, each in enumerate(sets))


def test_what_makes_conversations_equal():
    def key(**fields: Any) -> bytes:
        return content_key(parse_record({"messages": chat("Hi  there\n", "Hello"), **fields}, "f:1", "f:1"))

    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    assert key() == key(id="other", task="x", messages=chat("Hi there", " Hello "))
    assert key() == content_key(parse_record({"prompt": "Hi there", "response": "Hello"}, "g:9", "g:9"))
    different = [key(), key(tools=tools), key(system="x"), key(chat_template_kwargs={"enable_thinking": True})]
    different += [key(messages=chat("Hi there", "hello")), key(messages=chat("Hi there, Hello"))]
    ids = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 2]}
    different += [content_key(parse_record({**ids, "prompt_token_ids": [n]}, "f", "f")) for n in (5, 6)]
    assert len(set(different)) == len(different)


def test_exact_duplicates_leave_whichever_file_they_are_in(tmp_path: Path):
    draw = random.Random(4)
    said = [(text(draw, 20), text(draw, 30)) for _ in range(40)]
    one = [record(f"a{n}", *said[n]) for n in range(30)]
    two = [record(f"b{n}", said[n][0] + " ", said[n][1]) for n in range(20, 40)] + [record("b-again", *said[35])]
    data = prepared(tmp_path, one, two, held_out_fraction=0.0)
    assert [s.id for s in data.train] == [f"a{n}" for n in range(30)] + [f"b{n}" for n in range(30, 40)]
    assert data.gathered is not None
    assert data.gathered.exact == {f"b{n}": f"a{n}" for n in range(20, 30)} | {"b-again": "b35"}
    assert data.gathered.lines()[0].startswith("left out 11 exact duplicates (b20 of a20, b21 of a21, b22 of a22, …)")
    kept = prepared(tmp_path, one, two, held_out_fraction=0.0, duplicates="keep")
    assert len(kept.train) == 51 and kept.gathered is not None and kept.gathered.exact == {}


def across(data: PreparedData, records: list[dict[str, Any]], threshold: float) -> list[tuple[str, str]]:
    """Pairs of a training and a held-out conversation that are near copies, by hand."""
    hand = {each["id"]: runs_of(each) for each in records}
    return [
        (one.id, other.id)
        for one in data.train
        for other in data.held_out
        if jaccard(hand[one.id], hand[other.id]) >= threshold
    ]


@pytest.mark.parametrize("mode", ["exact", "near"])
@pytest.mark.parametrize("seed", range(8))
def test_no_near_copy_is_on_both_sides(tmp_path: Path, seed: int, mode: str):
    """Property: over random logs in two files, whichever share is held out and whatever the threshold."""
    if mode == "near":
        pytest.importorskip("datasketch")
    draw = random.Random(seed)
    threshold, fraction = draw.choice((0.6, 0.8, 0.9)), draw.choice((0.15, 0.3))
    log = near_log(draw, 80, share=0.2 * (1 - threshold))
    settings = {"near_threshold": threshold, "held_out_fraction": fraction, "duplicates": mode}
    data = prepared(tmp_path, log[::2], log[1::2], **settings)
    assert data.train and data.held_out and across(data, log, threshold) == []
    leaky = prepared(tmp_path, log[::2], log[1::2], **{**settings, "duplicates": "keep"})
    pairs = across(leaky, log, threshold)
    assert len(pairs) > 2  # so the property is not empty
    if mode == "exact":  # nothing else left
        assert data.gathered is not None
        left = {s.id for s in (*leaky.train, *leaky.held_out)} - {s.id for s in (*data.train, *data.held_out)}
        assert left == {*data.split.near_copies, *data.gathered.exact, *data.split.copies, *leaky.split.copies} & left
        assert set(data.split.near_copies) <= {one for one, _ in pairs}


@pytest.mark.parametrize("mode", ["exact", "near"])
def test_near_copies_of_given_held_out_files_leave_training(tmp_path: Path, mode: str):
    if mode == "near":
        pytest.importorskip("datasketch")
    draw = random.Random(9)
    log = near_log(draw, 60)
    held = write(tmp_path / "held.jsonl", [{**each, "id": f"h{each['id']}"} for each in log[: len(log) // 3]])
    data = prepared(tmp_path, log[len(log) // 3 :], held_out=[held], duplicates=mode)
    hand = log + [{**each, "id": f"h{each['id']}"} for each in log]
    assert across(data, hand, 0.8) == [] and data.split.near_copies
    for one, other in data.split.near_copies.items():
        assert jaccard(*(runs_of(next(e for e in hand if e["id"] == name)) for name in (one, other))) >= 0.8


def test_a_log_that_is_alike_throughout_still_trains(tmp_path: Path):
    """One long question with another number in it: nearly everything is a near copy of what is held out."""
    long = " ".join(f"q{n}" for n in range(150))
    log = [record(f"r{n}", f"{long} number {n}?", f"Label {n}.") for n in range(60)]
    data = prepared(tmp_path, log, held_out_fraction=0.1)
    assert len(data.train) + len(data.held_out) == 60 and data.split.near_copies == {}
    assert data.split.alike == len(data.train)
    assert any("WARNING: " in line and "near copies of held-out ones" in line for line in data.split.lines())
    pytest.importorskip("datasketch")
    assert len(prepared(tmp_path, log, held_out_fraction=0.1, duplicates="near").train) == 1


def test_all_near_copies_of_a_given_file_is_an_error(tmp_path: Path):
    draw = random.Random(5)
    said = [(text(draw, 40), text(draw, 60)) for _ in range(5)]
    held = write(tmp_path / "held.jsonl", [record(f"h{n}", *each) for n, each in enumerate(said)])
    log = [record(f"r{n}", f"{one} indeed", f"{other} indeed") for n, (one, other) in enumerate(said)]
    with pytest.raises(DataError, match=r"all samples to train on \(5\) repeat held-out text \(r0, r1, r2\)"):
        prepared(tmp_path, log, held_out=[held])


def test_without_the_library_near_is_refused_and_the_rest_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(DataError, match=r"data.duplicates=near needs the package datasketch .*pip install"):
        require_minhash()
    log = near_log(random.Random(6), 30)
    with pytest.raises(DataError, match="datasketch"):
        prepared(tmp_path, log, duplicates="near")
    assert prepared(tmp_path, log, held_out_fraction=0.2).train


def test_the_report_accounts_for_every_conversation(tmp_path: Path):
    draw = random.Random(7)
    said = [(text(draw, 20), text(draw, 30)) for _ in range(120)]
    log = [record(f"r{n}", *each) for n, each in enumerate(said)]
    log += [{**each, "id": f"again-{each['id']}"} for each in log[:10]]
    log += [{"id": "no answer", "prompt": "Who?"}, {"id": "image", "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]},
        {"role": "assistant", "content": "A cat."}]}]  # fmt: skip
    lines = [json.dumps(each) for each in log] + ["{broken"]
    (tmp_path / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sources = [
        SourceConfig(path=str(tmp_path / "log.jsonl"), on_bad="skip", cap=100),
        write(tmp_path / "more.jsonl", near_log(draw, 20), weight=None),
    ]
    data = prepare(DataConfig(sources=sources, held_out_fraction=0.2), None, [STOP])
    assert data.gathered is not None
    facts = data.gathered.as_dict()["sources"]
    assert facts[0]["read"] == len(lines) and facts[0]["dropped"]["bad rows"] == 1
    assert facts[0]["dropped"]["exact duplicates"] == 10 and facts[0]["cap"] == 100
    for each in facts:
        assert each["read"] == each["trained"] + each["held_out"] + sum(each["dropped"].values()), each

    def of(samples: list[Sample]) -> int:
        return len({sample.meta["conversation"] for sample in samples})

    assert sum(each["trained"] for each in facts) == of(data.train)
    assert sum(each["held_out"] for each in facts) == of(data.held_out)
    assert sum(each["tokens"] for each in facts) == sum(map(len, data.train))
    assert sum(each["token_share"] for each in facts) == pytest.approx(1, abs=2e-4)


def test_excluded_prompts_do_not_train(tmp_path: Path):
    """Near copies of a prompt too, whatever was answered; the same words in another place are no reason."""
    draw = random.Random(11)
    said = [(text(draw, 40), text(draw, 40)) for _ in range(30)]
    log = [record(f"r{n}", *each) for n, each in enumerate(said)]
    bench = [{"turns": [said[0][0], "And then?"]}, {"prompt": changed(draw, said[1][0], 0.02)}, {"prompt": said[2][1]}]
    bench += [{"messages": [{"role": "system", "content": "Be brief."}, *chat(said[3][0], "Another answer.", "Why?")]}]
    excluded = write(tmp_path / "bench.jsonl", bench)
    for mode in ("keep", "exact"):
        data = prepared(tmp_path, log, exclude=[excluded], held_out_fraction=0.0, duplicates=mode)
        assert {s.id for s in data.train} == {each["id"] for each in log} - {"r0", "r1", "r3"}
        assert data.gathered is not None
        assert data.gathered.counts[0].dropped == {"begin with a prompt of data.exclude": 3}
        assert any("3 begin with a prompt of data.exclude" in line for line in data.gathered.lines())


def test_prompts_of_an_evaluation_are_counted_and_stay(tmp_path: Path):
    draw = random.Random(12)
    said = [(text(draw, 40), text(draw, 40)) for _ in range(20)]
    config = DataConfig(sources=[write(tmp_path / "log.jsonl", [record(f"r{n}", *s) for n, s in enumerate(said)])])
    watched = [of_messages(chat(each)) for each in (said[3][0], said[4][0] + " please", text(draw, 40))]
    data = prepare(config, None, [STOP], watched=watched)
    assert data.gathered is not None and data.gathered.begin_watched == 2
    assert len(data.train) + len(data.held_out) == 20
