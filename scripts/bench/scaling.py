"""How training scales over the GPUs of a machine, and whether it stays the same training.

    python -m headstart.bench.scaling --gpus 1 4 --cases ddp fsdp2 fsdp2_target --out docs/results/scaling.json

Every case runs the training loop itself on live features of a target with random weights (shapes decide the speed).
Weights and data are the same in every case. A step trains one pack per GPU. `efficiency` is tokens/s per GPU over that
of one GPU. `loss_delta` is the largest relative difference from the losses of one GPU at the same global batch. Cases:

    ddp            whole target and head on every GPU, captured steps
    ddp_saving     the same, with a checkpoint and a best head written behind the loop every few steps
    fsdp2          the head, its gradients and its optimiser state in shards
    zero2, zero3   the same by DeepSpeed (left out where it is not installed)
    fsdp2_target   the target in shards, the head whole
    fsdp2_both     target and head in shards
    70b_target     Llama-3.1-70B's sizes with 16 of its 80 layers, target and head in shards, packs half as long
    70b_whole      the same with the whole target on every GPU

The largest number of --gpus runs every case, one GPU the baseline, any other number ddp only. For each number this
process starts a `torchrun`, whose ranks run scaling_rank.py. A case that fails or takes longer than --case-seconds is
left out, and the launch starts again with the cases after it. --out is written after every case. On CPUs (preset tiny)
the ranks use gloo.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from headstart.bench.presets import PRESETS, refuse_ranks
from headstart.bench.scaling_rank import CASES, RECORD, run_rank, say
from headstart.heads.errors import ConfigError
from headstart.heads.files import write_json
from headstart.heads.provenance import provenance


@dataclass
class Row:
    """One row of docs/results/scaling.json.

    Attributes:
        efficiency: tokens/s per GPU over that of one GPU; None where one GPU did not do the same work.
        target_gib_per_gpu: what the target holds on each GPU between two forwards.
        loss_delta: see the module's text; None for one GPU and where one GPU has no losses to compare with.
        save_blocked_ms: longest time for which a periodic checkpoint held the next step up.
    """

    case: str
    gpus: int
    tokens_per_s: float
    efficiency: float | None
    peak_gib_per_gpu: float
    target_gib_per_gpu: float
    loss_delta: float | None
    save_blocked_ms: float
    step_ms: float
    tokens_per_step: int
    losses: list[float]
    preset: str
    card: str = ""
    command: str = ""
    git_revision: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file that may still be growing, or not be there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def launch(gpus: int, jobs: list[str], arguments: list[str], report: Callable[[list[dict[str, Any]]], None]) -> bool:
    """Run the jobs on `gpus` ranks. If one fails, those after it are launched again. Returns whether all were done."""
    everything: list[dict[str, Any]] = []
    all_done = True
    while jobs:
        with tempfile.TemporaryDirectory() as place:
            result = Path(place, "result.jsonl")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "-m"]
            command += ["headstart.bench.scaling", *arguments, "--jobs", *jobs, "--result", str(result)]
            process = subprocess.Popen(command)
            seen = 0
            running = True
            while running:
                running = process.poll() is None
                done = read_lines(result)
                if len(done) > seen:
                    seen = len(done)
                    report(everything + done)
                if running:
                    time.sleep(0.3)
            everything += done
        if process.returncode == 0 or len(done) == len(jobs):
            break
        say(f"{gpus} × {jobs[len(done)]} failed (exit code {process.returncode}), see what it printed above")
        all_done, jobs = False, jobs[len(done) + 1 :]
    return all_done


def make_jobs(gpus: int, options: argparse.Namespace) -> list[str]:
    """`case:accumulation` of a launch. One GPU also makes the losses at the global batches of the other launches."""
    if gpus == 1:
        return ["ddp:1", *(f"ddp:{n}" for n in sorted({*options.gpus}) if n > 1)]
    cases = options.cases if gpus == max(options.gpus) else ["ddp"]
    return [f"{case}:{gpus}" for case in cases]


def rows(launches: dict[int, list[dict[str, Any]]], options: argparse.Namespace) -> list[Row]:
    """Rows of every launch, compared with the launch on one GPU."""
    single = {done["job"]: done for done in launches.get(1, [])}
    origin = provenance("cpu")
    made = []
    for gpus, jobs in launches.items():
        for done in jobs:
            name = done["job"].split(":")[0]
            if gpus == 1 and done["job"] != "ddp:1":
                continue  # only there for its losses
            case = CASES[name]
            rate, delta, efficiency = _rate(done), None, None
            if not case.cut and gpus > 1 and (reference := single.get(f"ddp:{gpus}")) is not None:
                pairs = zip(done["losses"], reference["losses"], strict=False)  # as many as the reference made
                delta = max(abs(a - b) / abs(b) for a, b in pairs)
            if not case.cut and (base := single.get("ddp:1")) is not None:
                efficiency = rate / gpus / _rate(base)
            made.append(
                Row(
                    name, gpus, rate, efficiency, done["peak_gib"], done["target_gib"], delta,
                    done["save_blocked_ms"], done["step_ms"], done["tokens_per_step"], done["losses"],
                    options.preset, done["card"], options.command,
                    origin["git_revision"], origin["versions"],
                )
            )  # fmt: skip
    return made


def _rate(done: dict[str, Any]) -> float:
    """Tokens per second."""
    return done["tokens_per_step"] / done["step_ms"] * 1e3


def describe(row: Row) -> str:
    efficiency = "" if row.efficiency is None else f"  efficiency {row.efficiency:.3f}"
    delta = "" if row.loss_delta is None else f"  loss delta {row.loss_delta:.1e}"
    blocked = f"  saving blocked {row.save_blocked_ms:.0f} ms" if row.save_blocked_ms else ""
    memory = f"{row.peak_gib_per_gpu:5.1f} GiB peak  {row.target_gib_per_gpu:5.1f} GiB target"
    return (
        f"{row.gpus} × {row.case:13s} {row.tokens_per_s:10.0f} tokens/s{efficiency}  {memory}  {row.step_ms:7.1f} ms"
        f"{delta}{blocked}"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options. A wrong one ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 4], help="numbers of GPUs; 1 gives the baseline")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["ddp", "fsdp2", "fsdp2_target"])
    parser.add_argument("--tokens", type=int, default=8192, help="rows of a pack")
    parser.add_argument("--length", type=int, default=2048, help="rows per document")
    parser.add_argument("--depth", type=int, default=7, help="TTT steps")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--scratch", help="directory for checkpoints of ddp_saving, deleted again (e.g. /dev/shm)")
    parser.add_argument("--case-seconds", type=float, default=300.0, help="longest time for one case")
    parser.add_argument("--out", type=Path, help="append the rows to this JSON list")
    parser.add_argument("--jobs", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.command = "python -m headstart.bench.scaling " + " ".join(arguments)
    if options.steps < 2 * RECORD:
        parser.error(f"--steps: found {options.steps}, expected {2 * RECORD} or more: the first {RECORD} are not timed")
    if options.result is not None:
        return options
    try:
        refuse_ranks()
    except ConfigError as error:
        parser.error(str(error))
    there = torch.cuda.device_count() if torch.cuda.is_available() else max(options.gpus)
    if not 1 <= min(options.gpus) <= max(options.gpus) <= there:
        parser.error(f"--gpus: found {options.gpus}, expected numbers from 1 to the {there} GPUs of this machine")
    absent = [case for case in options.cases if case.startswith("zero") and find_spec("deepspeed") is None]
    if absent:
        print(f"left out, deepspeed is not installed: {', '.join(absent)}", file=sys.stderr)
        options.cases = [case for case in options.cases if case not in absent]
    options.earlier = json.loads(options.out.read_text()) if options.out is not None and options.out.is_file() else []
    if not all("efficiency" in row for row in options.earlier):
        parser.error(f"--out: {options.out} holds rows of another benchmark; give a new file or one of its own")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 when every case was measured, 1 otherwise."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.result is not None:
        run_rank(options)
        return 0
    passed_on = ["--preset", options.preset, "--gpus", *map(str, options.gpus), "--cases", *options.cases]
    for name in ("tokens", "length", "depth", "steps", "scratch", "case_seconds"):
        value = getattr(options, name)
        passed_on += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    launches: dict[int, list[dict[str, Any]]] = {}
    shown: set[tuple[str, int]] = set()

    def report(gpus: int, done: list[dict[str, Any]]) -> None:
        launches[gpus] = done
        made = rows(launches, options)
        if options.out is not None:
            write_json(options.out, options.earlier + [asdict(row) for row in made])
        for row in made:
            if (row.case, row.gpus) not in shown:
                shown.add((row.case, row.gpus))
                print(describe(row), flush=True)

    complete = [launch(n, make_jobs(n, options), passed_on, partial(report, n)) for n in options.gpus]
    return int(not all(complete))


if __name__ == "__main__":
    sys.exit(main())
