"""A queue of requests on one batch: every answer is what it is alone, whenever its row begins."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from eval_help import VOCAB, run

from headstart.bench.architectures import random_model
from headstart.data.config import DistillConfig
from headstart.data.distilling.answering import Answer, Request, Requests
from headstart.eval.decoding import stream as module
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.eval.decoding.graphs import CycleGraphs, uncaptured_cycles
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.stream import Stream
from headstart.heads.errors import TargetError
from headstart.heads.targets.target import Target

LIMIT = 9
#: lengths on both sides of a chunk of prefill
PROMPTS = [[3 + (7 * n + 5 * t) % (VOCAB - 4) for t in range(1 + (5 * n) % 13)] for n in range(14)]


def requests_of(prompts: list[list[int]]) -> list[Request]:
    return [Request(f"p{n}", 0, tuple(prompt), 977 * n + 5) for n, prompt in enumerate(prompts)]


def engine_of(target: Target, rows: int, capacity: int = 32, **options: Any) -> Engine:
    return Engine(target.model, rows, capacity, **{"bucket": 8, "prefill_chunk": 4, **options})


def found(answers: Iterator[Answer]) -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {}
    for answer in answers:
        assert answer.request.id not in made
        made[answer.request.id] = answer.token_ids
    return made


def alone(target: Target, stops: set[int], **options: Any) -> dict[str, tuple[int, ...]]:
    each = [run(target, None, [prompt], LIMIT, stops, **options)[0].tokens for prompt in PROMPTS]
    return {f"p{n}": tuple(tokens) for n, tokens in enumerate(each)}


@pytest.fixture
def stops(target: Target) -> set[int]:
    """Tokens that some answers begin with, some hold and some do not."""
    plain = alone(target, set())
    return {plain["p2"][0], plain["p5"][3], plain["p8"][6]}


@pytest.mark.parametrize("at_once", [0, 10**6], ids=["in parts", "at once"])
@pytest.mark.parametrize(("rows", "places"), [(1, 1), (3, 1), (6, 3), (8, 8), (20, 5)])
def test_answers_are_those_of_each_request_alone(
    target: Target, stops: set[int], monkeypatch: pytest.MonkeyPatch, rows: int, places: int, at_once: int
) -> None:
    monkeypatch.setattr(module, "PART", rows // places)
    monkeypatch.setattr(module, "START_TOKENS", at_once)
    stream = Stream(engine_of(target, rows), Requests(requests_of(PROMPTS)), Sampling(), LIMIT, stops)
    assert stream.places == places
    expected = alone(target, stops)
    assert {len(tokens) for tokens in expected.values()} >= {1, LIMIT} and len(set(map(len, expected.values()))) > 2
    for answer in stream.answers():
        tokens = expected.pop(answer.request.id)
        assert answer.token_ids == tokens
        assert answer.finish_reason == ("stop" if tokens[-1] in stops else "length")
        assert answer.request not in stream.in_flight
    assert not expected and not stream.in_flight


def test_rows_are_filled_together_or_after_a_while(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 9 tokens on 4 rows that began 2 by 2: places free up two at a time."""
    monkeypatch.setattr(module, "PART", 2)
    monkeypatch.setattr(module, "START_TOKENS", 0)
    sizes: list[int] = []
    admit = module.admit_rows

    def counted(loop: Any, rows: list[int], *rest: Any) -> list[int]:
        sizes.append(len(rows))
        return admit(loop, rows, *rest)

    monkeypatch.setattr(module, "admit_rows", counted)
    stream = Stream(engine_of(target, 4), Requests(requests_of(PROMPTS[:9])), Sampling(), LIMIT, set())
    assert len(found(stream.answers())) == 9
    assert sizes == [2, 2, 2, 2, 1]  # the last one finds no company
    # 8 cycles for four, 8 for the next four; the last waits until no row is left to wait for
    assert stream.cycles == 3 * (LIMIT - 1)


@pytest.mark.parametrize("patience", [2, 100])
def test_a_free_row_waits_for_others_for_a_while(
    target: Target, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    monkeypatch.setattr(module, "PART", 1)
    monkeypatch.setattr(module, "PATIENCE", patience)
    plain = alone(target, set())
    stop = plain["p1"][3]
    ends = [plain[name].index(stop) + 1 if stop in plain[name] else LIMIT for name in ("p0", "p1", "p2")]
    assert ends == [LIMIT, 4, LIMIT]
    stream = Stream(engine_of(target, 2), Requests(requests_of(PROMPTS[:3])), Sampling(), LIMIT, {stop})
    assert len(found(stream.answers())) == 3
    # the row is free after 3 cycles; the third request begins after the 4th, or when the first one has ended after 8
    assert stream.cycles == (4 if patience == 2 else 8) + LIMIT - 1


def test_a_later_question_is_asked_while_others_are_answered(target: Target) -> None:
    requests = Requests(requests_of(PROMPTS[:3]))
    stream = Stream(engine_of(target, 2), requests, Sampling(), LIMIT, set())
    order: list[str] = []
    for answer in stream.answers():
        order.append(f"{answer.request.id}.{answer.request.turn}")
        if order == ["p0.0"]:
            requests.put(Request("p0", 1, (*answer.request.prompt_ids, *answer.token_ids, 3), 1))
    assert order == ["p0.0", "p1.0", "p0.1", "p2.0"]  # it comes before conversations that have not begun
    assert stream.cycles == 2 * (LIMIT - 1)


def test_answers_that_end_together_do_not_hold_up_captured_cycles(
    target: Target, stops: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time to spare, one answer a cycle is given, and the others come with later cycles or at the end."""

    class Graphs(CycleGraphs):
        def run(self, loop: Any, refill: Any = None) -> Any:
            return uncaptured_cycles(loop, refill)

    monkeypatch.setattr(module.Loop, "captures", True)
    monkeypatch.setattr(module.Stream, "_spare_s", lambda _: 0.0)
    stream = Stream(engine_of(target, 5), Requests(requests_of(PROMPTS)), Sampling(), LIMIT, stops, graphs=Graphs())
    made, held_back = {}, 0
    for answer in stream.answers():
        made[answer.request.id] = answer.token_ids
        held_back += stream.cycles > 0 and len(stream._done) > 0 and bool(stream.in_flight)
    assert made == alone(target, stops) and held_back > 0
    monkeypatch.undo()
    plain = Stream(engine_of(target, 5), Requests(requests_of(PROMPTS)), Sampling(), LIMIT, stops)
    assert found(plain.answers()) == made and plain.cycles == stream.cycles  # rows were filled as soon


def test_the_time_to_spare_is_half_a_cycle(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 4.0, 10.0, 10.1, 12.1])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    stream = Stream(engine_of(target, 1), Requests([]), Sampling(), LIMIT, set())
    # a cycle that waited for prompts, and one whose table was there already, count little
    assert [stream._spare_s() for _ in range(6)] == pytest.approx([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_answers_of_one_token(target: Target) -> None:
    stream = Stream(engine_of(target, 4), Requests(requests_of(PROMPTS)), Sampling(), 1, set())
    assert found(stream.answers()) == {name: tokens[:1] for name, tokens in alone(target, set()).items()}
    assert stream.cycles == 0


def test_draws_belong_to_requests(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 2)
    sampling = Sampling(temperature=1.0)

    def drawn(rows: int) -> dict[str, tuple[int, ...]]:
        return found(Stream(engine_of(target, rows), Requests(requests_of(PROMPTS)), sampling, LIMIT, set()).answers())

    assert drawn(1) == drawn(4) == drawn(20)
    assert drawn(1) != alone(target, set())


def test_the_fused_target_and_recurrent_states(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 2)
    fused = FusedModel(target.model, attention_windows(target.model.config))
    hybrid = Target.from_model(random_model("LFM2"))
    for one, options in ((target, {"fused": fused}), (hybrid, {})):
        for at_once in (0, 10**6):
            monkeypatch.setattr(module, "START_TOKENS", at_once)
            stream = Stream(engine_of(one, 6, **options), Requests(requests_of(PROMPTS)), Sampling(), LIMIT, set())
            assert found(stream.answers()) == alone(one, set())


def test_what_does_not_fit_waits_for_larger_buffers(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests_of([PROMPTS[0], [5] * 30, PROMPTS[1]])
    requests = Requests(wanted)
    requests.put(wanted[1])
    stream = Stream(engine_of(target, 2, capacity=30), requests, Sampling(), LIMIT, set())
    assert sorted(found(stream.answers())) == ["p0"]  # first questions keep their order
    assert requests.take(9) == [wanted[1], *wanted[1:]]

    monkeypatch.setattr("headstart.eval.decoding.generation.CPU_BYTES", 0)
    long = [PROMPTS[n] if n < 12 else [5] * 140 for n in range(14)]
    answerer = EngineAnswerer(target, DistillConfig(max_new_tokens=LIMIT, batch_size=2))
    capacities = []
    made = {}
    for answer in answerer.answers(Requests(requests_of(long))):
        made[answer.request.id] = answer.token_ids
        assert answerer.decoder.engine is not None
        capacities.append(answerer.decoder.engine.capacity)
    assert made == {
        f"p{n}": tuple(run(target, None, [prompt], LIMIT, set(target.stop_token_ids))[0].tokens)
        for n, prompt in enumerate(long)
    }
    assert capacities == [24] * 12 + [152] * 2


def test_where_the_fused_target_fails_its_own_forward_goes_on(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    forward = FusedModel.forward

    def failing(self: FusedModel, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise RuntimeError("no kernel image")
        return forward(self, *arguments)

    answerer = EngineAnswerer(target, DistillConfig(max_new_tokens=LIMIT, batch_size=3), "fused")
    answerer.decoder.config.engine = "auto"
    monkeypatch.setattr(FusedModel, "forward", failing)
    expected = alone(target, set(target.stop_token_ids))
    assert found(answerer.answers(Requests(requests_of(PROMPTS)))) == expected
    assert answerer.decoder.fused is None and "no kernel image" in str(answerer.decoder.unfused)
    answerer = EngineAnswerer(target, DistillConfig(max_new_tokens=LIMIT, batch_size=3))
    monkeypatch.setattr(Engine, "forward", lambda *_, **__: (_ for _ in ()).throw(TargetError("broken")))
    with pytest.raises(TargetError, match="broken"):
        found(answerer.answers(Requests(requests_of(PROMPTS))))


def test_requests_come_in_order_and_stay_within_the_time() -> None:
    asked = [0]

    def may_begin() -> bool:
        asked[0] += 1
        return asked[0] < 3

    wanted = requests_of([[1], [1, 2], [1, 2, 3], [1], [1]])
    later = requests_of([[9] * 4, [9]])
    requests = Requests(wanted, may_begin)
    assert requests.peek(2) == wanted[:2] and requests.waiting(9, 2) == 2
    assert requests.take(1) == wanted[:1]
    for request in later:
        requests.put(request)
    assert requests.take(2, 2) == [later[1], wanted[1]]
    assert asked == [2] and not requests.over and requests.waiting(9) == 4
    assert requests.take(9) == [later[0]] and requests.over
    assert requests.waiting(9) == 0 and requests.peek(9) == []
    requests.put_back(later)
    assert requests.waiting(1) == 1 and requests.take(9) == later and requests.take(9) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_cycles(target: Target, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr(module, "PART", 2)
    there, sampling = Target.from_model(copy.deepcopy(target.model).cuda()), Sampling(temperature=temperature)
    fused = FusedModel(there.model, attention_windows(there.model.config))
    expected = found(Stream(engine_of(target, 3), Requests(requests_of(PROMPTS)), sampling, LIMIT, set()).answers())
    for at_once in (0, 10**6):
        monkeypatch.setattr(module, "START_TOKENS", at_once)
        engine, graphs = Engine(there.model, 6, 64, prefill_chunk=8, fused=fused), CycleGraphs()
        for kept in (None, graphs, graphs):
            given = engine, Requests(requests_of(PROMPTS)), sampling, LIMIT, set[int]()
            assert found(Stream(*given, graphs=kept).answers()) == expected
        assert len(graphs.captured) == 1
