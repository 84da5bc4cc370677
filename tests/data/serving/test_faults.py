"""Servers that misbehave: every prompt is answered exactly once, with the right answer, or skipped with its reason."""

from __future__ import annotations

import json
import threading

import pytest
from openai_server import answer_to, serving
from serving_help import FAST, digits, prompts_of

from headstart.data.config import DistillConfig, ServerConfig
from headstart.data.distilling.answer_file import AnswerFile
from headstart.data.distilling.answering import Request, Requests
from headstart.data.prompts import Chats
from headstart.data.serving.answerer import ServerAnswerer
from headstart.data.serving.connect import connect
from headstart.data.serving.http import retry_after
from headstart.data.serving.pool import Patience, Pool
from headstart.heads.errors import ServerError

#: name → what a request's first try meets
FAULTS = {
    "429": ("status", 429),
    "429, with a wait": ("status", 429, {"Retry-After": "0"}),
    "500": ("status", 500),
    "503": ("status", 503),
    "a stall": ("stall", 5.0),
    "a cut body": ("cut",),
    "a cut stream": ("cut stream",),
    "garbage": ("body", b"\x00\xff<html>"),
    "no JSON object": ("body", [1, 2]),
    "half a JSON": ("body", b'{"choices": [{"mess'),
    "no choice": ("body", {"choices": [], "usage": {"prompt_tokens": 3}}),
    "an error with status 200": ("body", {"error": {"message": "no memory"}}),
    "no finish reason": ("change", lambda body: _change(body, finish_reason=None)),
    "given up": ("change", lambda body: _change(body, finish_reason="abort")),
    "no text": ("change", lambda body: _change(body, message={"content": 5})),
    "no usage": ("change", lambda body: {**body, "usage": None}),
    "more tokens than asked for": (
        "change", lambda body: {**body, "usage": {**body["usage"], "completion_tokens": 99}},
    ),
    "token ids of another number": ("change", lambda body: _change(body, token_ids=[1])),
    "token ids that are none": ("change", lambda body: _change(body, token_ids=["a"])),
}  # fmt: skip


def _change(body, **changes):
    body["choices"][0] |= changes
    return body


def check(records, count):
    """Exactly the prompts 0 … count − 1, each with the answer that is its own."""
    assert sorted(records) == sorted(f"p{n}" for n in range(count))
    for number in range(count):
        user, answer = records[f"p{number}"]["messages"]
        assert user == {"role": "user", "content": digits(number)}
        assert answer == {"role": "assistant", "content": answer_to(digits(number))}
        assert records[f"p{number}"]["finish_reason"] == "stop"


def test_all_prompts_are_answered_once_and_no_server_gets_more_at_once_than_it_may(state, ask):
    one, two = state(latency=0.02), state(latency=0.02)
    with serving(one, two) as servers:
        records = ask(servers, prompts_of(40), concurrency=3)
    check(records, 40)
    assert records["p12"]["messages"][1]["content"] == "Hello there-2-1."  # by hand
    both = one.counts() + two.counts()
    assert len(both) == 40 and set(both.values()) == {1}
    assert one.most_in_flight == two.most_in_flight == 3
    assert one.tests == two.tests == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_tried_again(name, state, ask, tmp_path):
    one = state(faults={digits(n): [FAULTS[name]] * n for n in (1, 2)})
    with serving(one) as servers:
        check(ask(servers, prompts_of(5)), 5)
    assert one.counts() == {digits(n): 1 + (n if n in (1, 2) else 0) for n in range(5)}
    assert not (tmp_path / "out.jsonl.skipped.json").exists()


def test_a_request_that_fails_everywhere_is_skipped_with_its_reason_and_asked_in_the_next_run(state, ask, tmp_path):
    scripts = [{digits(3): [("status", 500)] * 9} for _ in range(2)]
    one, two = (state(faults=script) for script in scripts)
    said = []
    with serving(one, two) as servers:
        records = ask(servers, prompts_of(8), said=said)
        assert sorted(records) == sorted(f"p{n}" for n in range(8) if n != 3)
        assert (one.counts() + two.counts())[digits(3)] == FAST.tries
        skipped = json.loads((tmp_path / "out.jsonl.skipped.json").read_text())
        assert list(skipped) == ["p3"] and "failed 4 times" in skipped["p3"] and "HTTP 500" in skipped["p3"]
        assert any(line.startswith("p3: no answer: failed 4 times") for line in said)
        for script in scripts:
            script.clear()
        check(ask(servers, prompts_of(8)), 8)
    assert not (tmp_path / "out.jsonl.skipped.json").exists()
    both = one.counts() + two.counts()
    assert both[digits(3)] == FAST.tries + 1 and all(both[digits(n)] == 1 for n in range(8) if n != 3)


def test_a_request_that_every_server_refuses_is_skipped_and_costs_each_one_try(state, ask, tmp_path):
    one, two = (state(faults={digits(3): [("status", 400)] * 9}) for _ in range(2))
    with serving(one, two) as servers:
        assert len(ask(servers, prompts_of(8))) == 7
    skipped = json.loads((tmp_path / "out.jsonl.skipped.json").read_text())
    assert "HTTP 400" in skipped["p3"] and all(server.url[:-3] in skipped["p3"] for server in servers)
    assert one.counts()[digits(3)] == two.counts()[digits(3)] == 1


def test_one_of_two_servers_dies_midway(state, ask):
    said = []
    one, two = state(latency=0.01), state(latency=0.01, always=lambda n: ("die",) if n >= 6 else None)
    with serving(one, two) as servers:
        records = ask(servers, prompts_of(60), said=said)
    check(records, 60)
    both = one.counts() + two.counts()
    again = [question for question, count in both.items() if count > 1]
    assert len(both) == 60 and max(both.values()) == 2 and 1 <= len(again) <= 4  # those that it had when it died
    assert any("set aside" in line and servers[1].url[:-3] in line for line in said)
    assert one.most_in_flight == 4  # it got no more than it may when it was alone


def test_a_server_that_is_set_aside_is_tried_again_and_works_on(state, ask):
    said, patience = [], FAST
    one = state(latency=0.01)
    two = state(latency=0.01, always=lambda n: ("status", 502) if n <= 6 else None)
    with serving(one, two) as servers:
        check(ask(servers, prompts_of(150), said=said, patience=patience, concurrency=2), 150)
    assert any("set aside" in line for line in said) and any("answers again" in line for line in said)
    assert len(two.asked) > 10


def test_a_server_that_asks_for_time_gets_it(state, ask):
    one = state(faults={digits(0): [("status", 429, {"Retry-After": "1"})]})
    with serving(one) as servers:
        check(ask(servers, prompts_of(4), concurrency=1), 4)
    (busy,) = [n for n, (question, _) in enumerate(one.asked[:-1]) if question == digits(0)][:1]
    assert one.times[busy + 1] - one.times[busy] >= 0.99


def test_a_server_that_asks_for_time_gets_it_from_all_requests(state, ask):
    """Two are in flight: one is told to wait, the other is answered later, which does not end the wait."""
    one = state(faults={digits(0): [("status", 429, {"Retry-After": "1"})], digits(1): [("stall", 0.3)]})
    with serving(one) as servers:
        check(ask(servers, prompts_of(4), concurrency=2), 4)
    assert {question for question, _ in one.asked[:2]} == {digits(0), digits(1)}
    assert one.times[2] - one.times[0] >= 0.99


def test_an_interrupted_run_lets_go_of_its_servers_and_goes_on(state, ask, tmp_path, monkeypatch):
    one, calls = state(latency=0.01), []
    add = AnswerFile.add

    def interrupted(file, record):
        add(file, record)
        calls.append(record["id"])
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerFile, "add", interrupted)
    with serving(one) as servers:
        with pytest.raises(KeyboardInterrupt):
            ask(servers, prompts_of(20))
        assert not [thread for thread in threading.enumerate() if thread.name == "headstart-servers"]
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
        check(ask(servers, prompts_of(20)), 20)
    again = [question for question, count in one.counts().items() if count > 1]
    assert len(again) <= 4 and not {digits(int(name[1:])) for name in calls[:5]} & set(again)


def test_time_that_is_over_keeps_what_was_answered_and_more_of_it_answers_the_rest(state, ask):
    one, said = state(latency=0.05), []
    with serving(one) as servers:
        first = ask(servers, prompts_of(40), max_seconds=0.3, said=said)
        assert 4 <= len(first) < 40
        assert f"data.distill.max_seconds=0.3 are over: {len(first)} of 40 answers" in said
        check(ask(servers, prompts_of(40), max_seconds=60.0), 40)
    assert set(one.counts().values()) == {1}


def test_waits_double_with_chance_and_have_a_bound():
    pool = Pool([], Patience(first_s=1.0, longest_s=8.0), print)
    waits = [[pool._wait(count) for _ in range(200)] for count in (1, 2, 3, 4, 9)]
    for found, middle in zip(waits, (1, 2, 4, 8, 8), strict=True):
        assert 0.5 * middle <= min(found) < 0.6 * middle and 1.4 * middle < max(found) <= 1.5 * middle


def test_no_more_requests_are_taken_than_the_servers_may_get(state, target):
    """What is taken and not answered is lost in a kill."""
    taken, most = [0], 0

    class Counted(Requests):
        def take(self, count, longest=None):
            found = super().take(count, longest)
            taken[0] += len(found)
            return found

    one = state(latency=0.01)
    with serving(one) as (server,):
        config = DistillConfig(servers=[ServerConfig(server.url, concurrency=3)], max_new_tokens=32)
        answerer = ServerAnswerer(target, config, connect(target, config), patience=FAST)
        ids = [tuple(Chats(target.tokenizer, target.stop_token_ids).prompt_ids(prompt)) for prompt in prompts_of(12)]
        requests = Counted([Request(p.id, 0, i, 0, p.messages()) for p, i in zip(prompts_of(12), ids, strict=True)])
        for number, answer in enumerate(answerer.answers(requests)):
            assert answer.failed is None
            most = max(most, taken[0] - number)
    assert taken[0] == 12 and most == 3


def test_a_wait_is_read_as_seconds_or_a_date():
    assert retry_after("7") == 7.0 and retry_after(None) is None and retry_after("soon") is None
    assert retry_after("Thu, 01 Jan 1970 00:00:30 GMT", now=10.0) == 20.0
    assert retry_after("Thu, 01 Jan 1970 00:00:30 GMT", now=40.0) == 0.0


def test_all_servers_dead_ends_the_run_and_the_next_one_asks_for_the_rest_only(state, ask, tmp_path):
    one = state(always=lambda n: ("die",) if n >= 5 else None)
    with serving(one) as servers, pytest.raises(ServerError) as caught:
        ask(servers, prompts_of(20), concurrency=2)
    message = str(caught.value)
    assert "none of 1 has answered" in message and servers[0].url[:-3] in message
    assert "run the same command: it asks only for what is missing" in message and "server_patience" in message
    kept = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(kept) in (3, 4)  # two were in flight when it died
    two = state()
    with serving(two) as servers:
        check(ask(servers, prompts_of(20)), 20)
    done = {json.loads(line)["id"] for line in kept}
    assert two.counts() == {digits(n): 1 for n in range(20) if f"p{n}" not in done}


def test_no_server_at_the_start_is_an_error_before_anything_is_asked(state, ask):
    with serving(state()) as servers:
        pass
    with pytest.raises(ServerError, match=r"no server answers there.*data\.distill\.servers\[0\]\.url"):
        ask(servers, prompts_of(2))
