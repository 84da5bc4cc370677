"""A run that continues finds answers by what was asked, whatever the ids and the order of the prompts."""

from __future__ import annotations

import json

from openai_server import answer_to, serving
from serving_help import digits, prompts_of, read

from headstart.data.prompts import Prompt


def test_prompts_with_other_ids_in_another_order_are_not_asked_again(state, ask, tmp_path):
    one, said = state(), []
    with serving(one) as servers:
        ask(servers, prompts_of(6))
        renamed = [Prompt.ask(f"new{number}", digits(number)) for number in (7, 5, 4, 3, 2, 1, 0)]
        records = ask(servers, renamed, said=said)
    assert one.counts() == {digits(number): 1 for number in (*range(6), 7)}
    assert sorted(records) == sorted(prompt.id for prompt in renamed)
    for number in (*range(6), 7):
        assert records[f"new{number}"]["messages"][1]["content"] == answer_to(digits(number))
    assert any(line.startswith("6 answers in") for line in said)
    assert not (tmp_path / "out.jsonl.unasked.jsonl").exists()


def test_answers_that_are_not_asked_for_any_more_move_aside(state, ask, tmp_path):
    one = state()
    with serving(one) as servers:
        whole = ask(servers, prompts_of(6))
        assert sorted(ask(servers, prompts_of(4))) == ["p0", "p1", "p2", "p3"]
    assert len(one.asked) == 6
    aside = {record["id"]: record for record in read(tmp_path / "out.jsonl.unasked.jsonl")}
    assert aside == {name: whole[name] for name in ("p4", "p5")}


def test_another_later_question_is_another_conversation(state, ask, tmp_path):
    one = state()
    with serving(one) as servers:
        ask(servers, [Prompt.ask("two", digits(1), digits(2))])
        record = ask(servers, [Prompt.ask("two", digits(1), digits(3))])["two"]
    assert [m["content"] for m in record["messages"]][2] == digits(3)
    assert one.counts() == {digits(1): 2, digits(2): 1, digits(3): 1}
    assert len(read(tmp_path / "out.jsonl.unasked.jsonl")) == 1


def test_two_prompts_that_ask_the_same_have_an_answer_each(state, ask, tmp_path):
    twice = [Prompt.ask("a", digits(1)), Prompt.ask("b", digits(1))]
    one = state()
    with serving(one) as servers:
        assert sorted(ask(servers, twice)) == ["a", "b"]
        (tmp_path / "out.jsonl").write_text(json.dumps(read(tmp_path / "out.jsonl")[1]) + "\n")
        assert sorted(ask(servers, twice)) == ["a", "b"]
        assert sorted(ask(servers, [Prompt.ask("c", digits(1)), twice[1]])) == ["b", "c"]
    assert one.counts() == {digits(1): 3}


def test_more_samples_ask_only_those(state, ask):
    one, drawn = state(), {"temperature": 0.7}
    with serving(one) as servers:
        ask(servers, prompts_of(3), **drawn)
        records = ask(servers, prompts_of(3), samples_per_prompt=3, **drawn)
    assert sorted(records) == [f"p{number}/sample{sample}" for number in range(3) for sample in range(3)]
    assert len(one.asked) == len({body["seed"] for _, body in one.asked}) == 9


def test_other_settings_move_all_answers_aside(state, ask, tmp_path):
    """A greedy answer does not depend on the seed; a longer one is another."""
    one = state()
    with serving(one) as servers:
        ask(servers, prompts_of(2))
        ask(servers, prompts_of(2), max_new_tokens=16)
    assert len(one.asked) == 4 and len(read(tmp_path / "out.jsonl.unasked.jsonl")) == 2
