"""Recorded cycles, replayed: `python -m headstart.bench.scheduler --record` and `--replay` at sizes of a toy."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstart.bench import scheduler, side_by_side
from headstart.bench.presets import PRESETS, random_target
from headstart.bench.recordings import Recording, read_recording, write_recording
from headstart.bench.replay import ReplayedDrafter
from headstart.bench.side_by_side import Bench
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Decoded
from headstart.eval.decoding.drafter import ConfidentDrafter, Drafter, SizedDrafter
from headstart.eval.decoding.loop import COUNT, Loop
from headstart.eval.decoding.scheduler import KEEP_ALL, PLAIN, CycleShape, Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.scheduling.throughput import ThroughputScheduler
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.families import FAMILIES
from headstart.heads.formats import save_head
from headstart.heads.sampling import logit_of
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.saved_heads import untrained_head

LEVELS, TOKENS = 3, 40
CONTEXTS = [[5 + n, 9, 11, 60 + n] * (2 + n % 3) for n in range(9)]


def recording(rates: torch.Tensor, counts: list[int], logits: torch.Tensor | None = None) -> Recording:
    """As if a draft said what is true of it, unless `logits` are given."""
    none = torch.zeros(len(rates), dtype=torch.int64)
    said = logit_of(rates).float() if logits is None else logits
    return Recording(
        "eagle3", "T", "talk", 0.0, "draft_probability", 0.1, 0.01, counts, said, rates, none,
        torch.full_like(none, rates.shape[1]),
    )  # fmt: skip


def codes(seed: int = 0) -> tuple[Recording, list[int]]:
    """A recording of 6 contexts in which every cycle accepts a number of drafts for certain, and these numbers."""
    counts = [4, 1, 7, 3, 5, 6]
    numbers = torch.randint(0, LEVELS + 1, (sum(counts),), generator=torch.Generator().manual_seed(seed))
    return recording((torch.arange(LEVELS) < numbers[:, None]).float(), counts), numbers.tolist()


def bench_of(made: Recording | None, family: str = "eagle3", device: str = "cpu") -> Bench:
    torch.manual_seed(0)
    target = random_target(PRESETS["tiny"][0], torch.device(device), torch.float32)
    config = EvalConfig(max_new_tokens=TOKENS, synthetic_acceptance=[0.5] if made is None else made.mean_rates)
    return Bench(Decoder(target, config), scheduler.random_head(family, target), {}, 1, stop=False, replay=made)


def decoded(bench: Bench, drafter: Drafter, rows: int = 2, chooser: Scheduler = KEEP_ALL, seed: int = 0) -> Decoded:
    return bench.decoder.run(CONTEXTS, drafter, TOKENS, seed, stop=False, rows=rows, scheduler=chooser)


def same_walk(found: Decoded, made: Recording, numbers: list[int]) -> int:
    """Every cycle accepts as many of its drafts as the recorded one. Returns the cycles that were compared."""
    compared = 0
    for number, answer in enumerate(found.answers):
        for turn, cycle in enumerate(answer.cycles[:-1]):  # the last one may be cut
            expected = numbers[(made.first(number) + turn) % made.cycles]
            assert cycle.accepted == min(expected, cycle.drafted)
            compared += cycle.drafted > 0
    return compared


@pytest.mark.parametrize("family", ["eagle3", "medusa", "dspark", "peagle", "hydra"])
def test_rows_walk_through_recorded_contexts(family: str) -> None:
    """Three rows, nine contexts: rows that end take the next one, and go on with others where theirs end."""
    made, numbers = codes()
    bench = bench_of(made, family)
    drafter = bench.drafter(TreeConfig("chain", LEVELS))
    assert isinstance(drafter, SizedDrafter) and isinstance(drafter, ConfidentDrafter)
    assert same_walk(decoded(bench, drafter, 3), made, numbers) > 100
    assert same_walk(decoded(bench, drafter, 2), made, numbers) > 100
    short = bench.drafter(TreeConfig("chain", 1))
    assert same_walk(decoded(bench, short), made, numbers) > 150


class EveryShape(ThroughputScheduler):
    """Takes turns with all shapes that draft."""

    turn = 0

    def next_shape(self) -> CycleShape:
        super().next_shape()
        shapes = [shape for shape in self.shapes() if shape.levels != 0]
        self.turn += 1
        return shapes[self.turn % len(shapes)]


def test_a_scheduler_sees_the_same_walk() -> None:
    """Shapes of fewer levels and fewer rows; timing the shapes and trying them does not move the rows on."""
    made, numbers = codes(1)
    bench = bench_of(made)
    drafter = bench.drafter(TreeConfig("chain", LEVELS))
    chooser = EveryShape(drafter, LEVELS, linear=True)
    found = decoded(bench, drafter, 4, chooser)
    assert same_walk(found, made, numbers) > 60
    assert {cycle.drafted for answer in found.answers for cycle in answer.cycles} == {0, 1, 2, 3}
    assert set(chooser.book.times.profiled) == set(chooser.shapes())


def test_drafts_are_accepted_as_often_as_recorded() -> None:
    noise = torch.Generator().manual_seed(0)
    made = recording(torch.rand((64, LEVELS), generator=noise), [8] * 8)
    bench = bench_of(made)
    drafter = bench.drafter(TreeConfig("chain", LEVELS))
    hits, expected, cycles = np.zeros(LEVELS), np.zeros(LEVELS), 0
    for seed in range(6):
        found = bench.decoder.run(CONTEXTS, drafter, TOKENS, seed, stop=False, rows=9)
        for number, answer in enumerate(found.answers):
            for turn, cycle in enumerate(answer.cycles[:-1]):
                place = (made.first(number) + turn) % made.cycles
                hits += np.arange(LEVELS) < cycle.accepted
                expected += made.rate_SK[place].double().cumprod(0).numpy()
                cycles += 1
    assert cycles > 800
    assert np.all(np.abs(hits - expected) < 4 * 0.5 * cycles**0.5)
    taus = made.expected_taus(found.answers)
    drafted = [cycle for answer in found.answers for cycle in answer.cycles]
    assert len(taus) == len(drafted) and all(1 <= tau <= 1 + LEVELS for tau in taus)
    first = made.rate_SK[made.first(0)].tolist()
    assert taus[0] == pytest.approx(1 + first[0] + first[0] * first[1] + first[0] * first[1] * first[2], rel=1e-5)


def test_what_the_drafts_say_is_the_recording() -> None:
    """Where it is asked for. What is drafted stays the same."""
    made, _ = codes()
    bench, plain = bench_of(made), bench_of(None)
    drafter, own = (b.drafter(TreeConfig("chain", LEVELS)) for b in (bench, plain))
    assert isinstance(drafter, ReplayedDrafter)
    for b, d in ((bench, drafter), (plain, own)):
        b.decoder.run(CONTEXTS[:2], d, 1, 0, stop=False)
    roots_B = torch.tensor([7, 8])
    assert torch.equal(drafter.propose(roots_B).tokens_BN, own.propose(roots_B).tokens_BN)
    drafter.place_B = torch.tensor([2, made.cycles - 1])
    assert drafter.propose(roots_B).confidence_BN is None
    drafter.says_confidence = True
    drafter.place_B = torch.tensor([2, made.cycles - 1])
    tree = drafter.propose(roots_B)
    assert torch.equal(tree.confidence_BN, made.logit_SK[[2, -1]])  # type: ignore[arg-type]
    assert torch.equal(tree.rate_BN, made.rate_SK[[2, -1]])  # type: ignore[arg-type]
    assert drafter.place_B.tolist() == [3, 0]
    drafter.levels = 1
    assert drafter.propose(roots_B).rate_BN.shape == (2, 1)  # type: ignore[union-attr]


def test_contexts_begin_far_from_each_other() -> None:
    for contexts in (1, 2, 3, 10, 64, 97):
        made = recording(torch.zeros(3 * contexts, 2), [3] * contexts)
        begun = [made.first(n) // 3 for n in range(contexts)]
        assert sorted(begun) == list(range(contexts)) and made.first(contexts) == made.first(0)
        if contexts >= 10:
            apart = [abs(b - a) for a, b in zip(begun, begun[1:], strict=False)]
            assert min(min(apart), contexts - max(apart)) > contexts // 4


def cost_of(shape: CycleShape, whole: int, batch: int) -> float:
    """Seconds of a stubbed clock: rows are dear."""
    rows = batch if shape.levels == 0 else shape.rows or batch * whole
    return 1e-3 * (1 + rows / batch)


def test_a_scheduler_gains_where_rows_differ_and_places_are_dear() -> None:
    """Half of the contexts have sure drafts, half have hopeless ones: a fixed chain must serve both."""

    class Stubbed(ThroughputScheduler):
        spent, tokens = 0.0, 0

        def timed(self, shape: CycleShape, seconds: float) -> None:
            super().timed(shape, cost_of(shape, 1 + LEVELS, 4))

        def learn(self, shape: CycleShape, table: Any, said: Any, seconds: float | None = None) -> None:
            super().learn(shape, table, said, seconds)
            if (table[:, COUNT] > 0).all():  # a full batch
                self.spent += cost_of(shape, 1 + LEVELS, 4)
                self.tokens += int(table[:, COUNT].sum())

    sure = torch.tensor([[0.95] * LEVELS, [0.08] * LEVELS]).repeat_interleave(40, 0)
    speeds = {}
    for rates in (sure, sure.mean(0).expand_as(sure)):
        bench = bench_of(recording(rates, [40, 40]))
        fixed = []
        for levels in range(1, LEVELS + 1):
            found = decoded(bench, bench.drafter(TreeConfig("chain", levels)), 4)
            assert bench.replay is not None
            tau = statistics.fmean(bench.replay.expected_taus(found.answers))
            fixed.append(4 * tau / cost_of(CycleShape(), 1 + levels, 4))
        drafter = bench.drafter(TreeConfig("chain", LEVELS))
        chooser = Stubbed(drafter, LEVELS, linear=True)
        for seed in range(6):
            decoded(bench, drafter, 4, chooser, seed)
            if seed == 2:
                chooser.spent, chooser.tokens = 0.0, 0  # what came before, it learned from
        best = max(*fixed, 4 / cost_of(PLAIN, 1, 4))
        speeds[rates is sure] = chooser.tokens / chooser.spent / best
    assert speeds[True] > 1.1
    # where all rows are alike there is nothing to gain, beside the luck of the draw
    assert speeds[False] < 1.07


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    made, _ = codes()
    made = replace(made, rate_SK=made.rate_SK * 0.123456789, accepted_S=torch.arange(made.cycles) % 3)
    write_recording(tmp_path / "cycles.json", made)
    read = read_recording(tmp_path / "cycles.json")
    for name in ("head", "target", "data", "temperature", "source", "ece_before", "ece_after", "counts", "firsts"):
        assert getattr(read, name) == getattr(made, name)
    assert torch.equal(read.accepted_S, made.accepted_S) and torch.equal(read.judged_S, made.judged_S)
    assert torch.allclose(read.rate_SK, made.rate_SK, atol=1e-5)
    assert torch.allclose(read.logit_SK, made.logit_SK, atol=1e-5)
    assert "26 cycles of 6 contexts, eagle3 of T on talk: τ of a chain of 3 is" in str(read)


def test_mean_rates_give_the_mean_tau() -> None:
    made = recording(torch.tensor([[0.9, 0.9], [0.1, 0.5], [0.0, 1.0]]), [3])
    mean = 1 + (0.9 + 0.1 + 0.0) / 3 + (0.81 + 0.05 + 0.0) / 3
    first, second = made.mean_rates
    assert 1 + first + first * second == pytest.approx(mean, rel=1e-6)
    assert recording(torch.zeros(2, 2), [2]).mean_rates == [0.0, 0.0]


WRONG: list[tuple[str, Any, str]] = [
    ("format", "other", "found no recording, expected a file that --record wrote"),
    ("head", 3, "head: expected a text"),
    ("temperature", None, "temperature: expected a number"),
    ("source", "guess", "source: expected confidence or draft_probability"),
    ("contexts", [], "contexts: expected a list of one or more"),
    ("rates", [[0.5, 0.5, 1.5]], "rates: expected a probability for each logit"),
    ("rates", [[0.5, 0.5]], "rates: expected"),
    ("rates", "all", "rates: expected"),
    ("logits", [[0.5, float("nan"), 1.5]], "logits: expected finite numbers"),
    ("judged", [3, 3], "contexts: expected one or more cycles in each, and as many logits"),
    ("accepted", [7], "expected 0 ≤ accepted ≤ judged ≤ 3"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_other_files_are_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    path = tmp_path / "cycles.json"
    write_recording(path, recording(torch.full((1, 3), 0.5), [1]))
    content = json.loads(path.read_text())
    (content if name in content else content["contexts"][0])[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_recording(path)


def test_drafts_of_which_the_recording_says_nothing(tmp_path: Path) -> None:
    made, _ = codes()
    path = tmp_path / "cycles.json"
    write_recording(path, made)
    for words, message in (
        ("--fixed chain4 --scheduled", "found the draft chain4, but 3 drafts of a cycle were recorded: ask for chain3"),
        ("--fixed dynamic:n4 --scheduled", "found the draft dynamic:n4, expected chains only"),
        ("--fixed chain1 --scheduled --temperature 1", "found 1, the recording was made at 0: use the same"),
    ):
        arguments = scheduler.parser().parse_args(["--preset", "tiny", "--replay", str(path), *words.split()])
        with pytest.raises(ConfigError, match=message):
            scheduler.bench_all(arguments)
    bench = bench_of(made)
    with pytest.raises(ConfigError, match="found the draft chain5, but 3 drafts"):
        bench.drafter(TreeConfig("chain", 5))


def test_options_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for words, message in (
        ("--target T --head H --data D --replay F", "it says which drafts of a --preset"),
        ("--preset tiny --replay F --rates 0.5", "give no --rates"),
        ("--preset tiny --record F", "a preset has random weights"),
    ):
        monkeypatch.setattr("sys.argv", ["scheduler", *words.split()])
        with pytest.raises(SystemExit):
            scheduler.main()
        assert message in capsys.readouterr().err


def test_a_head_is_recorded_and_replayed(
    tiny_target: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    target = load_target(TargetConfig(name=str(tiny_target), device="cpu"))
    torch.manual_seed(0)
    save_head(untrained_head(FAMILIES["eagle3"].config(depth=3, draft_vocab_size=128), target), tmp_path / "head", {})  # type: ignore[call-arg]
    cycles, out = tmp_path / "cycles.json", tmp_path / "scheduler.json"
    words = f"--target {tiny_target} --head {tmp_path / 'head'} --data {conversations} --record {cycles} --out {out}"
    small = "--max-new-tokens 12 --calibrate-prompts 8 --batch".split()
    monkeypatch.setattr("sys.argv", ["scheduler", *words.split(), *small, "--fixed", "chain1", "--scheduled", "chain3"])
    scheduler.main()
    assert not out.exists()
    made = read_recording(cycles)
    assert (made.head, made.data, made.positions, made.source) == ("eagle3", "talk", 3, "draft_probability")
    assert 2 <= len(made.counts) <= 8 and made.cycles > 50
    assert str(made) in capsys.readouterr().out
    assert 0 < float(made.rate_SK.min()) and float(made.rate_SK.max()) < 1
    words = f"--preset tiny --replay {cycles} --context 8 --max-new-tokens 24 --least 4 --batch 2 --out {out}"
    monkeypatch.setattr(
        "sys.argv", ["scheduler", *words.split(), *"--fixed chain1 chain3 --scheduled chain3 --repeats 2".split()]
    )
    scheduler.main()
    rows = json.loads(out.read_text())
    assert [row["tree"] for row in rows] == ["plain", "chain1", "chain3", "chain3"]
    for row in rows:
        assert (row["acceptance"], row["target"], row["same_answers"]) == ("replayed", "tiny", None)
        assert row["data"] == "random tokens, accepted as eagle3's drafts on talk"
        assert row["rates"] == pytest.approx(made.mean_rates) and row["ece_after"] == pytest.approx(made.ece_after)
    assert rows[0]["expected_tau"] == 1.0 and 1 < rows[1]["expected_tau"] <= rows[2]["expected_tau"]
    assert all("replayed" in side_by_side.Row(**row).acceptance for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["eagle3", "dspark", "medusa"])
def test_captured_cycles_walk_as_others_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all batches: rows begin again with each, and move on with every cycle that is replayed."""
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)  # first guesses: no kernel is measured
    made, numbers = codes()
    bench = bench_of(made, family, "cuda")
    drafter = bench.drafter(TreeConfig("chain", LEVELS))
    for rows in (3, 3, 2):
        assert same_walk(decoded(bench, drafter, rows), made, numbers) > 100
    assert bench.decoder.slow is None and len(bench.decoder.graphs.captured) == 1
    chooser = EveryShape(drafter, LEVELS, linear=True)
    for _ in range(2):
        assert same_walk(decoded(bench, drafter, 4, chooser), made, numbers) > 60
    assert set(chooser.book.times.profiled) == set(chooser.shapes())
