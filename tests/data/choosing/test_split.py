"""Held-out conversations: chosen by the content of the first prompt, and without copies in training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.data.choosing.split import SHORTEST_COPY, given_held_out, prompt_key, split_held_out, without_copies
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prepare import PreparedData, prepare
from headstart.data.records.conversation import parse_record
from headstart.data.samples import COPIED, Sample
from headstart.heads.errors import ConfigError, DataError

STOP = 2


def record(name: str, prompt: str, answer: str, **fields: Any) -> dict[str, Any]:
    """A logged answer with its token ids: one per character."""
    ids = {"prompt_token_ids": [ord(c) for c in prompt], "response_token_ids": [*map(ord, answer), STOP]}
    return {"id": name, "prompt": prompt, "response": answer, **ids, **fields}


def write(path: Path, records: list[dict[str, Any]]) -> SourceConfig:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return SourceConfig(path=str(path))


def prepared(path: Path, records: list[dict[str, Any]], **settings: Any) -> PreparedData:
    source = write(path / "train.jsonl", records)
    return prepare(DataConfig(sources=[source], **settings), None, [STOP])


def texts(samples: list[Sample]) -> set[bytes]:
    return {sample.token_ids.tobytes() for sample in samples}


def test_conversations_logged_three_times_have_no_held_out_copy_in_training(tmp_path: Path):
    """The case of 60 conversations that an id-based split put on both sides, 21 of 21."""
    said = [(f"Question {n}?", f"The answer to question number {n} is {n * n}.") for n in range(60)]
    logged = [record(f"log{turn}-{n}", *said[n]) for turn in range(3) for n in range(60)]
    random.Random(0).shuffle(logged)
    data = prepared(tmp_path, logged, held_out_fraction=0.35, duplicates="keep")
    assert len(data.held_out) == 3 * data.split.held_out_prompts and data.split.held_out_prompts >= 15
    assert len(data.train) + len(data.held_out) == 180
    assert texts(data.train).isdisjoint(texts(data.held_out))
    assert data.split.copies == [] and data.split.prompts == 60


def test_what_repeats_a_prompt_goes_with_it(tmp_path: Path):
    """Several answers to one prompt, a log of the conversation as it grew, white space, a system prompt beside it."""
    key = {
        name: prompt_key(parse_record(each, "f:1", "f:1"))
        for name, each in {
            "one": {"prompt": "Hi there", "response": "Hello"},
            "sample": {"prompt": "Hi there", "response": "Good day", "id": "x/sample1"},
            "grown": {
                "messages": [
                    {"role": "user", "content": "Hi  there\n"},
                    {"role": "assistant", "content": "Hello"},
                    {"role": "user", "content": "And?"},
                    {"role": "assistant", "content": "Well"},
                ]
            },
            "sharegpt": {"conversations": [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hey"}]},
            "system": {"system": "Be rude.", "prompt": "Hi there", "response": "Hello"},
            "other": {"prompt": "Hi, there", "response": "Hello"},
        }.items()
    }
    assert len({key[name] for name in ("one", "sample", "grown", "sharegpt")}) == 1
    assert len(set(key.values())) == 3


def test_a_greeting_is_no_first_answer():
    """Else all conversations of such a log would be one prompt."""
    keys = {
        prompt_key(
            parse_record(
                {
                    "messages": [
                        {"role": "assistant", "content": "How can I help?"},
                        {"role": "user", "content": f"Question {n}"},
                        {"role": "assistant", "content": "Yes."},
                    ]
                },
                "f:1",
                "f:1",
            )
        )
        for n in range(3)
    }
    assert len(keys) == 3


def samples_of(count: int, turns: int = 2) -> list[Sample]:
    one = np.zeros(1, np.int32)
    return [
        Sample(f"{i}/turn{j}", one, np.full(1, -1, np.int32), meta={"prompt_key": str(i)})
        for i in range(count)
        for j in range(turns)
    ]


def ids(samples: list[Sample]) -> list[str]:
    return [sample.id for sample in samples]


def test_more_data_moves_no_conversation():
    samples = samples_of(200)
    split = split_held_out(samples, 0.1, seed=3)
    assert 20 < len(split.held_out) < 70 and len(split.train) + len(split.held_out) == 400
    assert {s.meta["prompt_key"] for s in split.train}.isdisjoint({s.meta["prompt_key"] for s in split.held_out})
    more = split_held_out([*samples_of(300)[400:], *samples], 0.1, seed=3)
    assert set(ids(split.held_out)) == set(ids(more.held_out)) & set(ids(samples))
    assert ids(split_held_out(samples, 0.1, seed=4).held_out) != ids(split.held_out)


def test_few_prompts():
    samples = samples_of(4)
    few = split_held_out(samples, 1e-6, seed=3)  # of four prompts, one
    assert [len(few.train), len(few.held_out), few.held_out_prompts] == [6, 2, 1]
    nothing = split_held_out(samples, 0.0)
    assert nothing.train == samples and nothing.held_out == [] and nothing.lines() == []
    with pytest.raises(ConfigError, match=r"held_out_fraction: 0.9999999 of 4 prompts leaves none"):
        split_held_out(samples, 0.9999999)
    one = split_held_out(samples[:2], 0.5)
    assert one.train == samples[:2] and one.held_out == []
    assert one.lines()[0].startswith("WARNING: all conversations begin with the same prompt, so none is held out")


def test_few_held_out_prompts_are_told():
    found = split_held_out(samples_of(1000), 0.005)
    assert 0 < found.held_out_prompts < 20
    assert found.lines() == [
        f"WARNING: fewer than 20 different held-out prompts ({found.held_out_prompts}): numbers on so few vary by "
        "chance; set data.held_out_fraction=0.03 or data.held_out"
    ]
    assert split_held_out(samples_of(1000), 0.03).lines() == []
    few = split_held_out(samples_of(30), 0.01)  # of thirty prompts, nine may be held out
    assert few.held_out_prompts < 9 and few.lines()[0].endswith(
        "; data.held_out_fraction=0.3 holds out about 9; for more, give more conversations, or data.held_out"
    )
    more = split_held_out(samples_of(30), 0.5)
    assert 9 <= more.held_out_prompts < 20
    assert more.lines()[0].endswith("; of 30 prompts more cannot be spared: give more conversations, or data.held_out")


@pytest.mark.parametrize("others", [1, 30])
def test_a_prompt_that_begins_most_conversations_is_not_held_out(others: int):
    """Else one prompt chosen by chance takes all data with it."""
    large = [sample for sample in samples_of(1, turns=900)]
    samples = [*large, *samples_of(others + 1, turns=1)[1:]]
    for seed in range(30):
        split = split_held_out(samples, 0.1, seed)
        assert 1 <= len(split.held_out) == split.held_out_prompts <= max(others // 2, 1)
        assert split.train[:900] == large and split.large_prompts == 1
        assert split.lines()[0] == "1 first prompt not held out: too many conversations begin so"


def test_a_long_conversation_counts_once():
    """A template that rewrites earlier turns makes a sample of each turn."""
    long, short = samples_of(1, turns=30), samples_of(2, turns=1)[1:]
    for sample in long:
        sample.meta["conversation"] = "long"
    found = [split_held_out([*long, *short], 0.01, seed) for seed in range(20)]
    assert {len(split.held_out) for split in found} == {30, 1} and all(split.large_prompts == 0 for split in found)


LONG = "This very answer has been given before."


def test_copies_leave_training_and_are_told(tmp_path: Path):
    held = write(tmp_path / "held.jsonl", [record("h1", "First?", LONG), record("h2", "Second?", "Yes.")])
    data = prepared(
        tmp_path,
        [
            record("another prompt", "Third?", LONG),
            record("the same", "Second?", "Yes."),
            record("short, another prompt", "Fourth?", "Yes."),
            record("short, another answer", "Second?", "Yes!"),
            record("almost", "First?", LONG[:-1] + "!"),
        ],
        held_out=[held],
    )
    assert ids(data.train) == ["short, another prompt"] and data.split.shared_prompts == 0
    assert data.split.copies == ["another prompt", "the same"]
    assert data.split.near_copies == {"short, another answer": "h2", "almost": "h1"}
    assert data.split.copied_answers == 2
    lines = data.split.lines()
    assert lines[0] == "2 answers left training for repeating held-out text"
    assert lines[1] == "2 samples left training because of it, having no other answer (another prompt, the same)"
    assert lines[2] == "2 conversations left training as near copies of held-out ones"
    assert "add conversations to data.held_out" in lines[3]


def test_a_last_word_that_all_conversations_share_costs_no_conversation(tmp_path: Path):
    """Each answers a question of its own, then says the same long farewell."""

    def talk(n: int) -> dict[str, Any]:
        first = record("", f"Question {n}?", f"The answer is {n}.")
        ids = {key: first[key] for key in ("prompt_token_ids", "response_token_ids")}
        last = record(f"talk{n}", f"Question {n}?The answer is {n}.{chr(STOP)}Thanks", LONG)
        said = [first["prompt"], first["response"], "Thanks", LONG]
        messages = [{"role": "user assistant".split()[i % 2], "content": text} for i, text in enumerate(said)]
        return {key: last[key] for key in ("id", "prompt_token_ids", "response_token_ids")} | {
            "messages": messages, "earlier_turns": [ids],
        }  # fmt: skip

    data = prepared(tmp_path, [talk(n) for n in range(200)], held_out_fraction=0.15)
    held = len(data.held_out)
    assert 20 <= held < 50 and len(data.train) == 200 - held
    assert (data.split.copied_answers, data.split.copies) == (200 - held, [])
    assert data.split.lines() == [f"{200 - held} answers left training for repeating held-out text"]
    for sample in [each.with_all_supervised() for each in data.train]:
        said = "".join(map(chr, sample.token_ids[sample.turn_ids >= 0]))
        assert said.startswith("Question") and said.endswith("Thanks")
    for sample in data.train:
        said = "".join(map(chr, sample.token_ids[sample.turn_ids >= 0]))
        assert said == f"The answer is {sample.id.removeprefix('talk')}.{chr(STOP)}"


def test_a_split_off_answer_that_another_prompt_got_leaves_training(tmp_path: Path):
    """Two prompts, one answer: whichever is held out, the other is no training sample."""
    records = [record(f"r{n}", f"Question {n}?", LONG if n < 2 else f"{LONG} {n}") for n in range(40)]
    found = {}
    for fraction in np.linspace(0.02, 0.9, 23):
        data = prepared(tmp_path, records, held_out_fraction=float(fraction))
        held = set(ids(data.held_out)) & {"r0", "r1"}
        found[len(held)] = data.split.copies
        assert len(held) != 1 or data.split.copies == list({"r0", "r1"} - held)
    assert found[0] == [] and found[2] == [] and len(found[1]) == 1


def test_copies_by_hand():
    def sample(name: str, pattern: str, fill: int) -> Sample:
        turns = np.array([-1 if c == "." else "AB".index(c) for c in pattern], np.int32)
        tokens = np.where(turns < 0, 1, fill + np.arange(len(pattern))).astype(np.int32)
        return Sample(name, tokens, turns)

    pattern = "..AAA.BBB"
    grown, first, later = sample("grown", pattern, 5), sample("first", pattern[:5], 5), sample("later", pattern, 6)
    # the held-out conversation goes on in training: its answer after the same context
    (left, other), answers, copies = without_copies([grown, later], [first])
    assert (answers, copies) == (1, []) and other is later and left.id == "grown"
    assert left.turn_ids.tolist() == [-1, -1, COPIED, COPIED, COPIED, -1, 1, 1, 1]
    assert left.with_all_supervised().turn_ids.tolist() == [0, 0, COPIED, COPIED, COPIED, 0, 0, 0, 0]
    assert grown.turn_ids.tolist() == [-1, -1, 0, 0, 0, -1, 1, 1, 1]
    assert without_copies([first], [grown]) == ([], 1, ["first"])
    assert without_copies([grown], [grown]) == ([], 2, ["grown"])
    assert without_copies([grown], []) == ([grown], 0, [])
    # a long answer counts anywhere, a token less does not
    for length, copies in ((SHORTEST_COPY, ["b"]), (SHORTEST_COPY - 1, [])):
        answer = np.arange(length, dtype=np.int32)
        a, b = (
            Sample(name, np.array([*prompt, *answer], np.int32), np.array([-1] * len(prompt) + [0] * length, np.int32))
            for name, prompt in (("a", [7]), ("b", [8, 9]))
        )
        assert without_copies([b], [a])[2] == copies


def test_nothing_left_to_train_on_is_refused(tmp_path: Path):
    held = write(tmp_path / "held.jsonl", [record("h1", "First?", LONG)])
    with pytest.raises(DataError, match=r"all samples to train on \(1\) repeat held-out text \(r0\)"):
        prepared(tmp_path, [record("r0", "Other?", LONG)], held_out=[held])


def test_held_out_files_that_give_nothing_are_told():
    split = given_held_out([], [])
    assert split.lines() == [
        "WARNING: nothing is held out, because data.held_out gives no conversation that can be used: correct it, or "
        "leave it empty to split off data.held_out_fraction"
    ]
