"""kill −9 at 20 moments of a distillation through a server: nothing twice, nothing lost, little asked twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time

import pytest
from light_run import distil_in_child
from openai_server import answer_to, serving
from serving_help import digits, read

KILLS, PROMPTS, CONCURRENCY = 20, 90, 4


def question(number: int, turn: int) -> str:
    return digits(number if turn == 0 else 1000 + number)


@pytest.mark.slow
def test_twenty_kills(state, tmp_path, monkeypatch):
    """Every third prompt has two questions. A conversation that was in flight begins again, the others do not."""
    rng, context = random.Random(5), multiprocessing.get_context("forkserver")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context.set_forkserver_preload(["light_run"])  # torch and transformers are imported once
    out, one, kills = tmp_path / "out.jsonl", state(latency=0.02), 0
    with serving(one) as (server,):

        def run() -> multiprocessing.Process:
            process = context.Process(target=distil_in_child, args=(server.url, str(out), PROMPTS, CONCURRENCY))
            process.start()
            return process

        runs = []  # where the requests of each run begin
        while kills < KILLS:
            before = len(one.asked)
            runs.append(before)
            wanted = before + rng.randrange(6)
            process = run()
            while len(one.asked) <= wanted and process.is_alive():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.04))
            assert process.is_alive(), "the run was over before the kill"
            process.kill()
            process.join()
            kills += 1
        assert out.exists() and len(read_whole(out)) < PROMPTS
        runs.append(len(one.asked))
        process = run()
        process.join()
        assert process.exitcode == 0

    records = read(out)
    assert sorted(record["id"] for record in records) == sorted(f"p{number}" for number in range(PROMPTS))
    for record in records:
        number = int(record["id"][1:])
        turns = 2 if number % 3 == 0 else 1
        said = [message["content"] for message in record["messages"]]
        asked = [question(number, turn) for turn in range(turns)]
        assert said == [text for each in asked for text in (each, answer_to(each))]
    counts = one.counts()
    assert len(counts) == PROMPTS + PROMPTS // 3
    # a run asks again no more than what was in flight at the kill before: its questions so far
    for begin, end in zip(runs, [*runs[1:], len(one.asked)], strict=True):
        earlier, now = ({each for each, _ in one.asked[part]} for part in (slice(begin), slice(begin, end)))
        for turn in (0, 1):
            assert len(earlier & now & {question(number, turn) for number in range(PROMPTS)}) <= CONCURRENCY
    assert sum(counts.values()) > len(counts)  # some were in flight


def read_whole(path):
    """The records but a last line that a kill has cut."""
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line]
