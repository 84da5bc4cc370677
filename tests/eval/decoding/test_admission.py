"""Continuous batching: a row that ended takes the next context, and every answer is what it is alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eval_help import FAMILY_TREES, VOCAB, Trained, check_cycles, run, tokens_of, train_briefly, tree_of

from headstart.bench.architectures import random_model
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Decoded, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.drafters.ngram import NgramDrafter
from headstart.eval.measuring.metrics import Timed
from headstart.eval.tuning.profile import Recorder
from headstart.heads.targets.target import Target

#: lengths on both sides of what the first contexts have, and limits that end rows at different cycles
QUEUE = [[5, 6, 7, 8, 9, 10, 11], [11, 12], [13] * 9 + [20, 21, 22], [3], [40, 2, 17, 9, 33] * 5, [8, 9], [50] * 6]
LIMITS = [12, 3, 1, 20, 9, 1, 14]
CHAINS = [family for family, kind in FAMILY_TREES if kind == "chain"]


def queued(
    target: Target,
    drafter: Drafter | None,
    rows: int = 2,
    limits: list[int] = LIMITS,
    stops: Any = frozenset(),
    sampling: Sampling | None = None,
    seeds: torch.Tensor | None = None,
    **options: Any,
) -> Decoded:
    capacity = slots_needed(max(map(len, QUEUE)), max(limits), drafter)
    engine = Engine(target.model, rows, capacity, **{"bucket": 8, "prefill_chunk": 4, **options})
    stop_ids = stops if isinstance(stops, list) else set(stops)
    generator = torch.Generator().manual_seed(0)
    return decode(engine, QUEUE, drafter, sampling or Sampling(), limits, stop_ids, generator, row_seeds=seeds)


def alone(target: Target, limits: list[int] = LIMITS, stops: Any = frozenset(), **options: Any) -> list[list[int]]:
    """Plain answers, each context in a batch of its own."""
    each = stops if isinstance(stops, list) else [set(stops)] * len(QUEUE)
    pairs = zip(QUEUE, limits, each, strict=True)
    return [run(target, None, [context], limit, stop, **options)[0].tokens for context, limit, stop in pairs]


@pytest.mark.parametrize("rows", [1, 2, 3, len(QUEUE)])
def test_plain_answers_are_those_of_each_context_alone(target: Target, rows: int) -> None:
    found = queued(target, None, rows)
    assert tokens_of(found.answers) == alone(target)
    check_cycles(found.answers)
    # two rows share the forwards: no place waits for the slowest row
    if rows == 1:
        assert len(found.cycle_s) == sum(LIMITS) - len(LIMITS)
    if rows == 2:
        # 11 | 2, then 19 | 8, then 13: row 1 ends its first after 2 cycles and takes the context of 19
        assert [answer.before for answer in found.answers] == [0, 0, 2, 2, 11, 19, 19]
        assert len(found.cycle_s) == 19 + 13


def test_stop_tokens_of_each_context(target: Target) -> None:
    plain = alone(target)
    # contexts end at a token of their own answer, some at their first one, one never; the last set is the widest
    stops = [{plain[0][4]}, set(), {plain[2][0]}, {plain[3][0]}, {plain[4][3]}, set(), {plain[6][5], VOCAB - 1, 0}]
    found = queued(target, None, 2, stops=stops)
    assert tokens_of(found.answers) == alone(target, stops=stops)
    assert found.answers[3].finish_reason == "stop" and found.answers[3].cycles == []


@pytest.mark.parametrize(("family", "kind"), FAMILY_TREES)
def test_every_drafter_takes_over_rows(
    target: Target, trained: Callable[[str], Trained], family: str, kind: str
) -> None:
    """The same drafts are accepted as in a batch of one: the drafter's state of the row is the context's own."""
    drafter = build_drafter(trained(family).head, EvalConfig(tree=tree_of(kind)))
    found = queued(target, drafter)
    assert tokens_of(found.answers) == alone(target)
    check_cycles(found.answers)
    separate = [run(target, drafter, [c], limit)[0] for c, limit in zip(QUEUE, LIMITS, strict=True)]
    assert [answer.cycles for answer in found.answers] == [answer.cycles for answer in separate]
    # a second queue on the same drafter, with other buffers
    again = queued(target, drafter, rows=3)
    assert [answer.cycles for answer in again.answers] == [answer.cycles for answer in separate]


def test_what_is_recorded_belongs_to_its_context(target: Target, trained: Callable[[str], Trained]) -> None:
    head = trained("eagle3").head
    recorder = Recorder(build_drafter(head, EvalConfig(tree=tree_of("chain"))))
    queued(target, recorder)
    proposals, accepted = recorder.proposals, sorted(recorder.accepted)
    assert len(proposals) == len(QUEUE) and proposals[2] == []
    separate = []
    for number, (context, limit) in enumerate(zip(QUEUE, LIMITS, strict=True)):
        alone_recorder = Recorder(recorder.drafter)
        run(target, alone_recorder, [context], limit)
        separate += alone_recorder.accepted
        pairs = zip(proposals[number], alone_recorder.proposals[0], strict=True)
        assert all(one[0] == other[0] and (one[1] == other[1]).all() for one, other in pairs)
    assert accepted == sorted(separate)


def test_prompt_lookup_takes_over_rows(target: Target) -> None:
    drafter = NgramDrafter(3)
    limits = [24] * len(QUEUE)
    found = queued(target, drafter, limits=limits)
    assert tokens_of(found.answers) == alone(target, limits)
    separate = [run(target, drafter, [c], 24)[0].cycles for c in QUEUE]
    assert [answer.cycles for answer in found.answers] == separate
    assert sum(cycle.accepted for cycles in separate for cycle in cycles) > 0


def test_a_repetition_penalty_counts_the_new_context_only(target: Target, trained: Callable[[str], Trained]) -> None:
    sampling = Sampling(repetition_penalty=1.3)
    expected = alone(target, sampling=sampling)
    assert expected != alone(target)
    for family in CHAINS:
        drafter = build_drafter(trained(family).head, EvalConfig(repetition_penalty=1.3, tree=TreeConfig(kind="chain")))
        assert tokens_of(queued(target, drafter, sampling=sampling).answers) == expected
    assert tokens_of(queued(target, None, sampling=sampling).answers) == expected


def test_seeds_belong_to_contexts(target: Target) -> None:
    sampling, seeds = Sampling(temperature=1.0), torch.arange(len(QUEUE)) * 977 + 5
    by_rows = [tokens_of(queued(target, None, rows, sampling=sampling, seeds=seeds).answers) for rows in (1, 2, 5)]
    assert by_rows[0] == by_rows[1] == by_rows[2]
    other = tokens_of(queued(target, None, 2, sampling=sampling, seeds=seeds.flip(0)).answers)
    assert other != by_rows[0]


def test_the_fused_target_takes_over_rows(target: Target, trained: Callable[[str], Trained]) -> None:
    fused = FusedModel(target.model, attention_windows(target.model.config))
    for drafter in (None, *(build_drafter(trained(f).head, EvalConfig(tree=tree_of("chain"))) for f in CHAINS)):
        assert tokens_of(queued(target, drafter, fused=fused).answers) == alone(target)


def test_recurrent_states_move_with_their_row() -> None:
    hybrid = Target.from_model(random_model("LFM2"))
    expected = alone(hybrid)
    assert tokens_of(queued(hybrid, None).answers) == expected
    head = train_briefly(hybrid, run(hybrid, None), "eagle3").head
    drafter = build_drafter(head, EvalConfig(tree=tree_of("chain")))
    assert tokens_of(queued(hybrid, drafter).answers) == expected


def test_times_of_admitted_rows(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only prefills (1000 s a context) and cycles (1 s) move: nothing is counted twice or left out."""
    clock = [0.0]
    monkeypatch.setattr("headstart.eval.decoding.decode.time.perf_counter", lambda: clock[0])
    prefill, verify = Engine.prefill, Engine.verify

    def slow_prefill(self: Engine, contexts: list[list[int]], *rest: Any) -> Any:
        clock[0] += 1000 * len(contexts)
        return prefill(self, contexts, *rest)

    def slow_verify(self: Engine, *rest: Any) -> Any:
        clock[0] += 1
        return verify(self, *rest)

    monkeypatch.setattr(Engine, "prefill", slow_prefill)
    monkeypatch.setattr(Engine, "verify", slow_verify)
    found = queued(target, None)
    assert found.prefill_s == 1000 * len(QUEUE)
    assert found.cycle_s == [1.0] * 32 and found.decode_s == 32
    assert [answer.first_s for answer in found.answers] == [2000, 2000, 1000, 1000, 1000, 1000, 1000]
    timed = Timed()
    timed.add(found)
    assert timed.tokens == sum(LIMITS) - len(LIMITS) and timed.tokens_per_s == timed.tokens / 32
    assert timed.token_s == [1.0] * timed.tokens
    assert timed.cycles == 32 and timed.active_rows == timed.tokens / 32


def test_a_decoder_keeps_its_buffers(target: Target) -> None:
    decoder = Decoder(target, EvalConfig())
    found = decoder.run(QUEUE, None, LIMITS, 0, rows=2)
    assert tokens_of(found.answers) == alone(target)
    engine = decoder.engine
    assert engine is not None and engine.batch == 2
    aside = engine.aside()
    assert tokens_of(decoder.run(QUEUE[:3], None, LIMITS[:3], 0, rows=2).answers) == alone(target)[:3]
    assert decoder.engine is engine and engine.aside() is aside
    # fewer contexts than rows
    assert tokens_of(decoder.run(QUEUE[:1], None, LIMITS[:1], 0, rows=8).answers) == alone(target)[:1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", [None, *CHAINS])
def test_captured_cycles_take_over_rows(
    target: Target, trained: Callable[[str], Trained], family: str | None
) -> None:
    """A cycle already runs when the host learns that a row ended: rows are admitted behind it, between replays."""
    there, drafter = Target.from_model(copy.deepcopy(target.model).cuda()), None
    if family is not None:
        head = copy.deepcopy(trained(family).head).cuda()
        head.bind(there.ends)
        drafter = build_drafter(head, EvalConfig(tree=tree_of("chain")))
    limits = [60, 9, 1, 50, 30, 1, 44]
    expected = alone(target, limits)
    capacity = slots_needed(max(map(len, QUEUE)), max(limits), drafter)
    fused = FusedModel(there.model, attention_windows(there.model.config))
    engine, graphs = Engine(there.model, 2, capacity, prefill_chunk=4, fused=fused), CycleGraphs()
    generator, cycles = torch.Generator("cuda"), []
    for kept in (None, graphs, graphs):  # the second time on graphs that are there already
        decoded = decode(engine, QUEUE, drafter, Sampling(), limits, set(), generator, graphs=kept)
        assert tokens_of(decoded.answers) == expected
        check_cycles(decoded.answers)
        cycles.append([answer.cycles for answer in decoded.answers])
        assert all(seconds > 0 for seconds in decoded.cycle_s)
    assert cycles[0] == cycles[1] == cycles[2] and len(graphs.captured) == 1
