"""Several processes answer prompts together: one file, the same as one process writes, whoever was killed before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import make_place
from train_fakes import forked, free_port

from headstart.data.distilling import answering
from headstart.data.distilling.answer_file import AnswerFile
from headstart.eval.decoding.stream import Stream
from headstart.train_on_ranks import main

PROMPTS = 11
SETTINGS = ["data.distill.max_new_tokens=12", "data.distill.batch_size=2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_place(tmp_path_factory.mktemp("ranks"))
    lines = [{"id": f"q{n}", "turns": [f"w{n} " * (1 + n % 4), *(["w9"] * (n % 3))]} for n in range(PROMPTS)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def answer(
    place: Path, name: str, ranks: int, *overrides: str, first: Callable[[int], None] = lambda rank: None, code: int = 0
) -> list[str]:
    """Answer the prompts in forked processes. Returns what each said on stderr. Args: first: done in each before."""
    port = free_port()
    prompts = f"data.distill.prompts=[{{path: {place / 'prompts.jsonl'}}}]"
    arguments = [str(place / "recipe.yaml"), f"run_dir={place / name}", prompts, *SETTINGS, *overrides]

    def work(rank: int) -> None:
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        first(rank)
        assert main([*arguments, "--only-distill"]) == code

    errors = [place / f"{name}.{rank}.err" for rank in range(ranks)]
    processes = [forked(lambda r=r: work(r), errors[r]) for r in range(ranks)]  # type: ignore[misc]
    for process, error in zip(processes, errors, strict=True):
        process.join(timeout=100)
        assert code or process.exitcode == 0, error.read_text()
    return [error.read_text() for error in errors]


def distilled(place: Path, name: str) -> Path:
    return place / name / "data/distilled.jsonl"


@pytest.fixture(scope="module")
def whole(place: Path) -> bytes:
    """What one process writes."""
    answer(place, "one", 1)
    content = distilled(place, "one").read_bytes()
    records = [json.loads(line) for line in content.splitlines()]
    assert {len(record.get("earlier_turns", [])) for record in records} == {0, 1, 2}
    return content


def test_two_ranks_write_what_one_process_writes(place: Path, whole: bytes) -> None:
    said = answer(place, "two", 2)
    assert distilled(place, "two").read_bytes() == whole and not (place / "two/data/distilled.jsonl.parts").exists()
    result = json.loads((place / "two/steps/distill.json").read_text())["result"]
    assert (result["answers"], result["left"]) == (PROMPTS, 0)
    assert f"{PROMPTS} of {PROMPTS} answers" in said[0] and "answers" not in said[1]
    # each did its share
    assert "6 of 6 answers" in said[0]
    again = answer(place, "two", 2)
    assert "distill: finished before" in again[0] and distilled(place, "two").read_bytes() == whole


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_finds_what_parts_hold(place: Path, whole: bytes, ranks: int) -> None:
    """A run on five ranks was killed: one part ends in the middle of a line, one record was moved already."""
    name, lines = f"after-{ranks}", whole.splitlines(keepends=True)
    out = distilled(place, name)
    parts = out.with_name(out.name + ".parts")
    parts.mkdir(parents=True)
    out.write_bytes(lines[3])
    (parts / "rank-00000.jsonl").write_bytes(lines[5] + lines[3] + lines[0])
    (parts / "rank-00004.jsonl").write_bytes(lines[9] + lines[2][:40])
    said = answer(place, name, ranks)
    assert "4 answers found" in said[0] and "dropped a last line of 40 bytes" in said[0]
    assert out.read_bytes() == whole and not parts.exists()


def test_a_killed_rank_costs_only_what_was_in_flight(
    place: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.train.launching.watch.GRACE_S", 1.0)

    def dies_after_two(rank: int) -> None:
        add = AnswerFile.add

        def adding(self: AnswerFile, record: dict[str, object]) -> None:
            add(self, record)
            if rank == 1 and self.added == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        AnswerFile.add = adding  # type: ignore[method-assign]

    answer(place, "killed", 2, first=dies_after_two, code=1)
    parts = place / "killed/data/distilled.jsonl.parts"
    assert (parts / "rank-00001.jsonl").read_bytes().count(b"\n") == 2
    said = answer(place, "killed", 2)
    assert distilled(place, "killed").read_bytes() == whole
    assert any(f"{n} answers found" in said[0] for n in range(2, PROMPTS))


def test_what_one_rank_refuses_all_refuse(place: Path) -> None:
    said = answer(place, "refused", 2, "data.distill.prompts=[{path: gone.jsonl}]", code=1)
    assert all("gone.jsonl" in text for text in said)
    said = answer(place, "none", 2, "data.distill.prompts=[]", code=2)
    assert all("--only-distill: data.distill.prompts is empty" in text for text in said)


def test_the_engine_answers_on_a_cpu_too(place: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine does not cover is answered by the model's own forward, with the same answers."""
    monkeypatch.setattr(answering, "generate", lambda *_: pytest.fail("the engine covers this target"))
    answer(place, "engine", 1)
    assert distilled(place, "engine").read_bytes() == whole
    monkeypatch.undo()
    monkeypatch.setattr(Stream, "answers", lambda _: pytest.fail("its layers lie on several devices"))
    answer(place, "mapped", 1, "target.parallel=device_map")
    assert distilled(place, "mapped").read_bytes() == whole


def test_two_ranks_write_the_prompts_that_one_process_writes(place: Path) -> None:
    # a random model says what it says: at this temperature all tokens, its stop tokens too
    often = ("written_temperature=5.0", "written_top_p=1.0", "written_max_tokens=200")
    words = ("data.distill.prompts=[]", *(f"data.distill.{word}" for word in ("written=4", *often)))
    answer(place, "written-one", 1, *words)
    said = answer(place, "written-two", 2, *words)
    one, two = (place / name / "data" for name in ("written-one", "written-two"))
    for name in ("written.jsonl", "written.tries.jsonl", "distilled.jsonl"):
        assert (two / name).read_bytes() == (one / name).read_bytes(), name
    assert (one / "written.jsonl").read_bytes().count(b"\n") == 4
    assert not (two / "written.tries.jsonl.parts").exists()
    assert "the target wrote 4 prompts in" in said[0] and "the target wrote" not in said[1]
