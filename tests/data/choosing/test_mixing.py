"""Caps, weights and the counts of sources: measured on what trains."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from headstart.data.choosing.asked import read_prompts
from headstart.data.choosing.mixing import capped, times, wanted
from headstart.data.config import DataConfig, DistillConfig, SourceConfig
from headstart.data.prepare import PreparedData, prepare
from headstart.heads.errors import ConfigError, DataError

STOP = 2


def records(name: str, count: int, length: int = 12) -> list[dict[str, Any]]:
    """Conversations that share no run of words, each with `length` answer tokens."""
    made = []
    for n in range(count):
        ids = {"prompt_token_ids": [5, n + 5], "response_token_ids": [ord(name[0]) + 10] * (length - 1) + [STOP]}
        made.append({"id": f"{name}{n}", "prompt": f"{name} question {n}?", "response": f"{name} says {n}.", **ids})
    return made


def source(path: Path, name: str, count: int, length: int = 12, **settings: Any) -> SourceConfig:
    place = path / f"{name}.jsonl"
    place.write_text("".join(json.dumps(each) + "\n" for each in records(name, count, length)), encoding="utf-8")
    return SourceConfig(path=str(place), **settings)


def prepared(*sources: SourceConfig, seed: int = 0, **settings: Any) -> PreparedData:
    return prepare(DataConfig(sources=list(sources), **{"held_out_fraction": 0.0, **settings}), None, [STOP], seed=seed)


def used(data: PreparedData, name: str) -> list[str]:
    return [s.id for s in data.train if s.id.startswith(name)]


def facts(data: PreparedData) -> list[dict[str, Any]]:
    assert data.gathered is not None
    return data.gathered.as_dict()["sources"]


def test_a_cap_chooses_by_seed_and_content(tmp_path: Path):
    a, b = source(tmp_path, "a", 200, cap=40), source(tmp_path, "b", 30, cap=40)
    data = prepared(a, b)
    chosen = used(data, "a")
    assert len(chosen) == 40 and len(used(data, "b")) == 30
    numbers = [int(name[1:]) for name in chosen]
    assert numbers == sorted(numbers) and max(numbers) > 150 and numbers != list(range(40))  # not the first ones
    assert facts(data)[0]["dropped"] == {"over the cap of 40": 160}
    # the same whatever the order of the file; another seed chooses others; a larger cap adds to the choice
    lines = Path(a.path or "").read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    Path(a.path or "").write_text("".join(lines))
    assert set(used(prepared(a), "a")) == set(chosen)
    assert set(used(prepared(a, seed=1), "a")) != set(chosen)
    a.cap = 70
    assert set(used(prepared(a), "a")) > set(chosen)


def test_a_cap_holds_few_in_memory():
    alive = 0

    class Row:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    most = 0

    def rows() -> Any:
        nonlocal most
        for n in range(2000):
            yield Row(), str(n).encode()
            most = max(most, alive)

    kept, left = capped(rows(), 50, 0)
    assert (len(list(kept)), left) == (50, 1950) and most <= 55
    lazy, none = capped(iter([("x", b"x")]), None, 0)
    assert (list(lazy), none) == ([("x", b"x")], 0)


def test_what_a_limit_leaves_is_capped(tmp_path: Path):
    assert {int(name[1:]) for name in used(prepared(source(tmp_path, "a", 90, limit=20, cap=10)), "a")} < set(range(20))


def test_a_duplicate_of_what_a_cap_left_out_is_no_duplicate(tmp_path: Path):
    a, b = source(tmp_path, "a", 20, cap=5), source(tmp_path, "b", 0)
    Path(b.path or "").write_text(Path(a.path or "").read_text().replace('"id": "a', '"id": "b'))
    data = prepared(a, b)
    assert len(used(data, "a")) == 5 and len(used(data, "b")) == 15


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.2, 0.5), (1, 10)])
def test_weights_are_shares_of_conversations(tmp_path: Path, weights: tuple[float, float]):
    """Without repeats: the largest mix in which the shares hold."""
    data = prepared(
        source(tmp_path, "a", 300, 12, weight=weights[0]), source(tmp_path, "b", 200, 30, weight=weights[1])
    )
    counts = [len(used(data, name)) for name in "ab"]
    share = weights[0] / sum(weights)
    assert counts[0] / sum(counts) == pytest.approx(share, abs=0.006)
    assert counts[0] == 300 or counts[1] == 200
    assert len({s.id for s in data.train}) == sum(counts)
    told = facts(data)
    assert told[0]["conversation_share"] == round(counts[0] / sum(counts), 4)
    tokens = [14 * counts[0], 32 * counts[1]]
    assert [each["tokens"] for each in told] == tokens
    assert told[1]["token_share"] == round(tokens[1] / sum(tokens), 4)
    assert all(each["read"] == each["trained"] + sum(each["dropped"].values()) for each in told)


def test_repeats_are_bounded_and_counted(tmp_path: Path):
    a, b = source(tmp_path, "a", 30, weight=1), source(tmp_path, "b", 300, weight=1)
    none, three, many = (prepared(a, b, most_repeats=most) for most in (1, 3, 100))
    assert [(len(used(d, "a")), len(used(d, "b"))) for d in (none, three, many)] == [(30, 30), (90, 90), (300, 300)]
    assert len({s.id for s in many.train}) == 600  # ids stay unique
    (tenfold,) = {len([s for s in many.train if s.meta["conversation"] == f"a{n}"]) for n in range(30)}
    assert tenfold == 10
    assert [f["trained"] for f in facts(many)] == [30, 300] and [f["repeated"] for f in facts(many)] == [270, 0]
    assert facts(three)[1]["dropped"] == {"not chosen by weight": 210}
    line = next(line for line in many.gathered.lines() if "a.jsonl" in line)  # type: ignore[union-attr]
    assert "30 in training and 270 repeats" in line and "50.0% of conversations" in line
    # a fraction of the conversations repeats once more, by the seed
    b.weight = 1.5
    some = prepared(a, b, most_repeats=100)
    assert (len(used(some, "a")), len(used(some, "b"))) == (200, 300)
    assert ids_of(some) == ids_of(prepared(a, b, most_repeats=100)) != ids_of(prepared(a, b, most_repeats=100, seed=5))


def ids_of(data: PreparedData) -> set[str]:
    return {s.id for s in data.train}


def test_the_mix_is_the_same_whatever_the_order_of_rows(tmp_path: Path):
    a, b = source(tmp_path, "a", 100, weight=1), source(tmp_path, "b", 100, weight=3)
    before = ids_of(prepared(a, b))
    lines = Path(a.path or "").read_text().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    Path(a.path or "").write_text("".join(lines))
    assert ids_of(prepared(a, b)) == before


def test_held_out_conversations_follow_the_weights(tmp_path: Path):
    a, b = source(tmp_path, "a", 400, weight=1), source(tmp_path, "b", 400, weight=4)
    data = prepared(a, b, held_out_fraction=0.3, most_repeats=3)
    held = [sum(s.id.startswith(name) for s in data.held_out) for name in "ab"]
    assert held[0] / sum(held) == pytest.approx(0.2, abs=0.01) and data.split.held_out_prompts == sum(held)
    assert len({s.id for s in data.held_out}) == len(data.held_out)  # nothing held out repeats
    for each in facts(data):
        assert each["read"] == each["trained"] + each["held_out"] + sum(each["dropped"].values())


def test_a_source_that_gives_nothing_leaves_its_share(tmp_path: Path):
    empty = source(tmp_path, "c", 0, weight=5)
    data = prepared(source(tmp_path, "a", 10, weight=1), source(tmp_path, "b", 30, weight=3), empty)
    assert len(data.train) == 40 and facts(data)[2]["conversation_share"] == 0.0
    told = [line for line in data.gathered.lines() if "c.jsonl" in line] if data.gathered else []
    assert told == [f"{empty.path}: found no records, expected at least one: is this the right source?"]
    with pytest.raises(DataError, match=r"no conversation can be trained on\n(.|\n)*c.jsonl: found no records"):
        prepared(empty)


def test_without_weights_everything_trains_once(tmp_path: Path):
    data = prepared(source(tmp_path, "a", 10), source(tmp_path, "b", 30), most_repeats=9)
    assert len(data.train) == 40


@pytest.mark.parametrize("seed", range(20))
def test_what_is_wanted(seed: int):
    """Shares hold, nothing beyond the bound, and no larger mix of that kind exists."""
    draw = random.Random(seed)
    counts = [draw.randint(50, 2000) for _ in range(draw.randint(1, 5))]
    weights, most = [draw.uniform(0.1, 4) for _ in counts], draw.choice((1, 2, 5))
    numbers = wanted(counts, weights, most)
    assert all(1 <= n <= most * c for n, c in zip(numbers, counts, strict=True))
    for n, w in zip(numbers, weights, strict=True):
        assert abs(n - sum(numbers) * w / sum(weights)) <= len(counts)
    full = any(n == most * c for n, c in zip(numbers, counts, strict=True))
    whole = all(n >= c for n, c in zip(numbers, counts, strict=True))
    assert full or whole
    used_times = times([str(n).encode() for n in range(counts[0])], numbers[0], seed)
    assert sum(used_times) == numbers[0] and max(used_times) - min(used_times) <= 1


def test_prompts_are_mixed_too(tmp_path: Path):
    a, b = source(tmp_path, "a", 100, weight=1), source(tmp_path, "b", 100, weight=4, cap=80)
    prompts = [prompt.id for prompt in read_prompts([a, b], seed=3)]
    assert (sum(p[0] == "a" for p in prompts), sum(p[0] == "b" for p in prompts)) == (20, 80)
    assert prompts == [p.id for p in read_prompts([a, b], seed=3)] != [p.id for p in read_prompts([a, b], seed=4)]
    assert len(read_prompts([a, b], 7)) == 7
    told: list[str] = []
    read_prompts([a, b], say=told.append)
    assert told == [
        f"{a.path}: 100 prompts read, 80 not chosen by weight; 20 asked",
        f"{b.path}: 100 prompts read, 20 over the cap of 80; 80 asked",
    ]


def test_prompts_that_are_left_out_are_told(tmp_path: Path):
    a, b, c = source(tmp_path, "a", 9, cap=4, on_bad="skip"), source(tmp_path, "b", 0), source(tmp_path, "c", 3, cap=3)
    with open(str(a.path), "a", encoding="utf-8") as file:
        file.write('{"promt": "x"}\n{\n')
    told: list[str] = []
    assert len(read_prompts([a, b, c], say=told.append)) == 7
    assert told == [
        f"{a.path}: 11 prompts read, 5 over the cap of 4, 2 bad rows; 4 asked",
        f"{b.path}: found no records, expected at least one: is this the right source?",
    ]


def test_answers_of_the_target_have_a_weight_of_their_own(tmp_path: Path):
    answers = source(tmp_path, "d", 50, weight=1)
    config = DataConfig(
        sources=[source(tmp_path, "a", 300, weight=3)],
        distill=DistillConfig(prompts=[source(tmp_path, "p", 50)], weight=1),
        held_out_fraction=0.0,
    )
    config.check()
    data = prepare(config, None, [STOP], [answers])
    assert [len(used(data, name)) for name in "ad"] == [150, 50]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cap": 0}, r"data.sources\[0\].cap: found 0, expected a number ≥ 1, or null for all"),
        ({"cap": True}, r"data.sources\[0\].cap: found True"),
        ({"weight": 0}, r"data.sources\[0\].weight: found 0, expected a number above 0, or null"),
        ({"weight": float("nan")}, r"data.sources\[0\].weight: found nan"),
        ({"weight": "2"}, r"data.sources\[0\].weight: found 2"),
        ({"weight": 2.0}, r"data.sources\[1\].weight: not set, but data.sources\[0\].weight is: give every source"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    config = DataConfig(sources=[source(tmp_path, "a", 3, **change), source(tmp_path, "b", 3)])
    with pytest.raises(ConfigError, match=message):
        config.check()


def test_all_excluded_prompts_count(tmp_path: Path):
    """A cap or a weight chooses what trains. What must not train has neither."""
    for change in ({"cap": 3}, {"weight": 2.0}):
        config = DataConfig(sources=[source(tmp_path, "a", 3)], exclude=[source(tmp_path, "b", 3, **change)])
        ((name, found),) = change.items()
        with pytest.raises(ConfigError, match=rf"data.exclude\[0\].{name}: found {found}, expected null: .*`limit`"):
            config.check()


def test_settings_of_duplicates_are_checked(tmp_path: Path):
    sources = [source(tmp_path, "a", 3)]
    for change, message in (
        ({"duplicates": "no"}, "data.duplicates: found 'no', expected one of keep, exact, near, or null"),
        ({"near_threshold": 0.2}, "data.near_threshold: found 0.2, expected a number from 0.5 to 1"),
        ({"most_repeats": 0}, "data.most_repeats: found 0, expected a number ≥ 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataConfig(sources=sources, **change).check()
    weighted = DataConfig(sources=[source(tmp_path, "b", 3, weight=1)], distill=DistillConfig(prompts=sources))
    with pytest.raises(ConfigError, match="data.distill.weight: not set, but data.sources"):
        weighted.check()
