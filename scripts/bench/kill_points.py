"""kill -9 at random moments of a distillation: afterwards no answer is lost, none is there twice, all are the same.

python -m headstart.bench.kill_points [--points 20] [--seed 0] [--json]

A small random target answers conversations on the CPU, in a process of its own. It is killed a random time after it has
reported a random number of answers, so that the moments spread over the whole run however busy the machine is. The run
that continues must end with the file that a run without a kill writes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.data.config import DistillConfig
from headstart.data.distilling.distill import distill
from headstart.data.prompts import Prompt
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.heads.targets.target import Target, TargetConfig

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a> {{ m.content }} <e> {% else %}<u> {{ m.content }} <e> "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
CONFIG = DistillConfig(max_new_tokens=24, batch_size=4)
#: seconds after which a run that should end counts as stuck
STUCK_S = 120.0


@dataclass
class Kills:
    """What came of the kills.

    Attributes:
        points, ok: how many there were, and after how many the run that continued ended right.
        found: answers that were in the file after each kill.
        faults: what was wrong, a line each.
    """

    points: int = 0
    ok: int = 0
    found: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def small_target(seed: int = 0) -> Target:
    """A random target with a readable tokenizer. Some of its answers end by themselves."""
    words = ["<unk>", "<e>", "<u>", "<a>", *(f"w{n}" for n in range(60))]
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="<e>", chat_template=TEMPLATE
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(words), max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=None,
        initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    return Target.from_model(model, tokenizer, TargetConfig(name="small", device="cpu", dtype="float32"))


def small_prompts(count: int = 30) -> list[Prompt]:
    """Conversations of one to three questions."""
    return [
        Prompt.ask(f"p{n}", *(" ".join(f"w{(n * 7 + turn + word) % 60}" for word in range(1 + n % 5))
                              for turn in range(1 + n % 3)))
        for n in range(count)
    ]  # fmt: skip


def kill_points(points: int, seed: int, folder: Path) -> Kills:
    """Kill a distillation at `points` random moments, each time in a directory of its own."""
    torch.set_num_threads(1)  # a forked process has no other threads
    target, prompts, moments, kills = small_target(), small_prompts(), random.Random(seed), Kills()
    began = time.monotonic()
    expected = _finished(target, prompts, folder / "whole.jsonl")
    longest = time.monotonic() - began
    while kills.points < points:
        out = folder / f"killed-{kills.points}.jsonl"
        written = multiprocessing.Value("i", 0)
        child = _start(lambda out=out, w=written: _answer(target, prompts, out, w))  # type: ignore[misc]
        after, pause = moments.randrange(len(prompts)), moments.uniform(0, 2 * longest / len(prompts))
        while written.value < after and child.is_alive():
            time.sleep(1e-3)
        time.sleep(pause)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        if child.exitcode != -signal.SIGKILL:  # it ended before: another moment is drawn
            out.unlink(missing_ok=True)
            continue
        faults = _check_killed(out, written.value, kills)
        kills.points += 1
        found = _finished(target, prompts, out)
        if found != expected:
            faults.append(f"after {kills.found[-1]} answers: {_difference(found, expected)}")
        kills.ok += not faults
        kills.faults += faults
    return kills


def _answer(target: Target, prompts: list[Prompt], out: Path, written: Synchronized[int] | None = None) -> None:
    def progress(done: int, total: int, message: str) -> None:
        if written is not None:
            written.value = done

    distill(target, prompts, CONFIG, out, progress=progress, answerer=EngineAnswerer(target, CONFIG))


def _finished(target: Target, prompts: list[Prompt], out: Path) -> bytes:
    """The file of a run that ends by itself, begun or continued in a process of its own."""
    child = _start(lambda: _answer(target, prompts, out))
    child.join(STUCK_S)
    if child.exitcode is None:
        os.kill(child.pid or 0, signal.SIGKILL)
    if child.exitcode != 0:
        raise RuntimeError(f"{out}: the run ended with {child.exitcode}, expected 0")
    return out.read_bytes()


def _start(work: Callable[[], None]) -> ForkProcess:
    """A process that shares what is imported."""

    def run() -> None:
        torch.set_num_threads(1)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def _check_killed(out: Path, written: int, kills: Kills) -> list[str]:
    """What is wrong with a file right after a kill. Args: written: answers that the process had reported."""
    lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    names = [record["id"] for record in whole]
    kills.found.append(len(names))
    faults = []
    if len(set(names)) != len(names):
        faults.append(f"{out.name}: found an answer twice right after the kill")
    if len(names) < written:
        faults.append(f"{out.name}: found {len(names)} answers after the kill, {written} had been reported")
    return faults


def _difference(found: bytes, expected: bytes) -> str:
    ours, theirs = ([json.loads(line) for line in content.splitlines()] for content in (found, expected))
    names, wanted = ([record["id"] for record in records] for records in (ours, theirs))
    lost, twice = len(set(wanted) - set(names)), len(names) - len(set(names))
    other = sum(record not in theirs for record in ours)
    return f"{lost} answers are lost, {twice} are there twice, {other} are others than without a kill"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m headstart.bench.kill_points", description=__doc__)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = kill_points(options.points, options.seed, Path(folder))
    if options.json:
        print(json.dumps(asdict(kills)))
    else:
        print(f"{kills.ok} of {kills.points} kills left no trace; answers there at each: {kills.found}")
    for fault in kills.faults:
        print(fault, file=sys.stderr)
    return 0 if kills.ok == kills.points else 1


if __name__ == "__main__":
    sys.exit(main())
