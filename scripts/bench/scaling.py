"""How training scales over the GPUs of a machine, and whether it stays the same training.

    python -m headstart.bench.scaling --gpus 1 4 --cases ddp fsdp2 fsdp2_target --out docs/results/scaling.json

Every case runs the training loop itself on live features of a random target (shapes decide the speed; equal weights and
data in every case). One pack per GPU and step; efficiency is tokens/s per GPU over that of one GPU. `loss_delta` is the
largest relative difference from the losses of one GPU at the same global batch. Cases:

    ddp            whole target and head on every GPU, captured steps
    ddp_saving     the same, with a checkpoint and a best head written behind the loop every few steps
    fsdp2          the head, its gradients and its optimiser state in shards
    zero2, zero3   the same by DeepSpeed (left out where it is not installed)
    fsdp2_target   the target in shards, the head whole
    fsdp2_both     target and head in shards
    70b_target     Llama-3.1-70B's sizes with 16 of its 80 layers, target and head in shards, packs half as long
    70b_whole      the same with the whole target on every GPU

The largest number of GPUs runs every case, one GPU the baseline, any other ddp. The parent process starts one
`torchrun` per number of GPUs; a case that fails or takes longer than --case-seconds is left out, and the launch is
started again for those after it. --out is written after every case. On CPUs (preset tiny) the ranks use gloo.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from headstart.bench.presets import PRESETS, head_config, refuse_ranks
from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.files import write_json
from headstart.heads.provenance import provenance
from headstart.heads.targets.sharded import ShardedTarget, fill, shard_group
from headstart.heads.targets.target import Target, TargetConfig
from headstart.process_exit import ProcessExit
from headstart.train.config import TrainConfig
from headstart.train.launching.setup import make_accelerator
from headstart.train.launching.watch import Watch
from headstart.train.loop import Observers, train
from headstart.train.stream import TrainData


@dataclass(frozen=True)
class Case:
    """What a case shares over the GPUs, and how.

    Attributes:
        parallel: train.parallel. sharded: whether the target is in shards. save_every: steps between checkpoints.
        cut: whether the target is the cut Llama-3.1-70B.
    """

    parallel: str
    sharded: bool = False
    save_every: int = 0
    cut: bool = False


CASES = {
    "ddp": Case("replicated"),
    "ddp_saving": Case("replicated", save_every=8),
    "fsdp2": Case("fsdp2"),
    "zero2": Case("zero2"),
    "zero3": Case("zero3"),
    "fsdp2_target": Case("replicated", sharded=True),
    "fsdp2_both": Case("fsdp2", sharded=True),
    "70b_target": Case("fsdp2", sharded=True, cut=True),
    "70b_whole": Case("fsdp2", cut=True),
}
CUT_70B = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=16, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
    rope_parameters=PRESETS["llama-3.1-8b"][0].rope_parameters,
)  # fmt: skip
#: steps per record of the loop; the first record holds captures and compilation and is left out of the rates
RECORD = 4
#: steps whose losses one GPU makes at the global batch of several
REFERENCE_STEPS = 2 * RECORD


def target_config(preset: str, case: Case) -> PretrainedConfig:
    return CUT_70B if case.cut and preset != "tiny" else PRESETS[preset][0]


@dataclass
class Row:
    """One row of docs/results/scaling.json.

    Attributes:
        efficiency: tokens/s per GPU over that of one GPU (1 for one GPU itself); None without the same work on one.
        target_gib_per_gpu: what the target holds on each GPU between two forwards.
        loss_delta: see the module's text; None for one GPU and where one GPU has no losses to compare with.
        save_blocked_ms: longest time that a periodic checkpoint kept the next step from starting.
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


class RandomWeights:
    """Stands in for the files of a model: every rank sees the same random tensors, made when they are asked for."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype):
        self.directory = Path("random weights")
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self.file_of = dict.fromkeys(self._shapes, "")
        self._device, self._dtype = device, dtype

    def rows(self, name: str, first: int, last: int) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(last - first, device=self._device, dtype=self._dtype)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        generator = torch.Generator(self._device).manual_seed(seed)
        whole = torch.empty(shape, device=self._device, dtype=self._dtype)
        return whole.normal_(0, 0.02, generator=generator)[first:last]


def make_target(config: PretrainedConfig, device: torch.device, sharded: bool) -> Target:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    files, name = RandomWeights(model, device, dtype), TargetConfig(name="random")
    if sharded:
        group = shard_group(None)
        return ShardedTarget(model, None, name, None, group, fill(model, files, device, group))
    fill(model, files, device, None)
    return Target(model, None, name)


def make_samples(vocab: int, packs: int, tokens: int, length: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    turns = np.where(np.arange(length) < 2, -1, 0).astype(np.int32)
    return [
        Sample(
            id=str(i),
            token_ids=generator.integers(0, vocab, length).astype(np.int32),
            turn_ids=turns,
            finish_reason="stop",
            meta={},
        )
        for i in range(packs * (tokens // length))
    ]


def better_every_time(head: nn.Module, step: int, final: bool) -> dict[str, float]:
    """A validation that takes no time and whose head is always the best so far, so that it is written every time."""
    return {"valid/walked_tau": float(step)}


def run_case(
    case: Case, options: argparse.Namespace, accelerator: Any, accumulation: int, target: Target
) -> dict[str, Any]:
    """Train for a few steps; what rank 0 read from the loop's own records."""
    config = target_config(options.preset, case)
    cuda, device = accelerator.device.type == "cuda", accelerator.device
    tokens = options.tokens // 2 if case.cut else options.tokens
    samples = make_samples(config.vocab_size, max(options.gpus) * 4, tokens, options.length)
    draft_ids_U = torch.arange(PRESETS[options.preset][1], device=device)
    described = head_config(options.preset, options.depth)
    torch.manual_seed(0)
    with device:
        head = build_head(described, HeadDims.from_hf_config(config)).to(device)
    head.initialise(target.ends, draft_ids_U)
    target.keep_rows(draft_ids_U)
    head.bind(target.ends)
    source = OnlineFeatures(target, samples, head.spec, head.depth)
    steps = options.steps
    if case.save_every:  # the last save is followed by timed steps
        steps = -(-steps // case.save_every) * case.save_every + RECORD
    if case.cut or accumulation > accelerator.num_processes:
        steps = REFERENCE_STEPS
    steps += RECORD  # not timed: the last step makes no features for one behind it
    train_config = TrainConfig(
        steps=steps, accumulation=accumulation, lr=1e-4, warmup_steps=4, schedule="constant", log_every=RECORD,
        parallel=case.parallel, save_every=case.save_every, eval_every=case.save_every, keep=1,
    )  # fmt: skip
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(dir=options.scratch) as place:
        run_dir = Path(place) if accelerator.is_main_process else Path(place, "unused")
        observers = Observers(better_every_time if case.save_every else None, progress=False)
        result = train(
            head, TrainData(source, source.lengths, tokens), target.teacher, train_config, run_dir, observers,
            provenance={}, accelerator=accelerator, final_checkpoint=False,
        )  # fmt: skip
        if result.stopped != "steps":
            raise SystemExit(f"stopped by a {result.stopped} at step {result.step}")
        found: dict[str, Any] = {"save_blocked_ms": result.save_blocked_ms}
        if accelerator.is_main_process:
            records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            records = [record for record in records if "train/loss" in record]
            records.pop()  # of the steps that are not timed
            found["losses"] = [record["train/loss"] for record in records]
            first, last = records[0], records[-1]
            found["tokens_per_step"] = result.tokens // result.step
            found["step_ms"] = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]) * 1e3
            found["record_step_ms"] = [
                round((b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) * 1e3, 1)
                for a, b in zip(records, records[1:], strict=False)
            ]
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return found


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def overdue(name: str, seconds: float) -> None:
    say(f"{name}: not done after {seconds:.0f} s")
    faulthandler.dump_traceback()
    os._exit(3)


def run_rank(options: argparse.Namespace) -> None:
    accelerator = make_accelerator("cuda" if torch.cuda.is_available() else "cpu")
    ending = ProcessExit()
    try:
        with Watch():
            run_jobs(options, accelerator)
    except BaseException:
        traceback.print_exc()
        ending.leave(1, at_once=True)  # a collective under way would hold an ordinary exit up
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    ending.leave(0)


def run_jobs(options: argparse.Namespace, accelerator: Any) -> None:
    """Every job (case, accumulation) in turn; rank 0 adds a line to the result after each."""
    cuda, main = accelerator.device.type == "cuda", accelerator.is_main_process
    card = provenance(accelerator.device)["device"]
    if main:
        say(f"{accelerator.num_processes} ranks on {card}")
    target, made = None, None
    for job in options.jobs:
        name, accumulation = job.split(":")
        case = CASES[name]
        timer = threading.Timer(options.case_seconds, overdue, (job, options.case_seconds))
        timer.daemon = True
        timer.start()
        wanted = (case.sharded, case.cut)
        if made != wanted:
            target = None
        gc.collect()  # a head and its optimiser hold each other
        if cuda:
            torch.cuda.empty_cache()
        if target is None:
            target, made = make_target(target_config(options.preset, case), accelerator.device, case.sharded), wanted
            if main:
                say("target made")
        values = run_case(case, options, accelerator, int(accumulation), target)
        timer.cancel()
        if main:
            values |= {"target_gib": target.held_bytes() / 2**30, "job": job, "card": card}
            with open(options.result, "a") as file:
                file.write(json.dumps(values) + "\n")
            say(f"{accelerator.num_processes} × {job}: {json.dumps(values)}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file that may still be growing, or not be there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def launch(gpus: int, jobs: list[str], arguments: list[str], report: Callable[[list[dict[str, Any]]], None]) -> bool:
    """Run this file on `gpus` ranks, again after a job that failed with the jobs behind it; True when all were done."""
    everything: list[dict[str, Any]] = []
    whole = True
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
                found = read_lines(result)
                if len(found) > seen:
                    seen = len(found)
                    report(everything + found)
                if running:
                    time.sleep(0.3)
            everything += found
        if process.returncode == 0 or len(found) == len(jobs):
            break
        say(f"{gpus} × {jobs[len(found)]} failed (exit code {process.returncode}), its words are above")
        whole, jobs = False, jobs[len(found) + 1 :]
    return whole


def make_jobs(gpus: int, options: argparse.Namespace) -> list[str]:
    """`case:accumulation` of a launch; on one GPU also the losses at the global batches of the others."""
    if gpus == 1:
        return ["ddp:1", *(f"ddp:{n}" for n in sorted({*options.gpus}) if n > 1)]
    cases = options.cases if gpus == max(options.gpus) else ["ddp"]
    return [f"{case}:{gpus}" for case in cases]


def rows(launches: dict[int, list[dict[str, Any]]], options: argparse.Namespace) -> list[Row]:
    """Rows of every launch, measured against the one on one GPU."""
    single = {found["job"]: found for found in launches.get(1, [])}
    origin = provenance("cpu")
    made = []
    for gpus, jobs in launches.items():
        for found in jobs:
            name = found["job"].split(":")[0]
            if gpus == 1 and found["job"] != "ddp:1":
                continue  # only there for its losses
            case = CASES[name]
            reference = single.get(f"ddp:{gpus}") if gpus > 1 and not case.cut else None
            delta = None
            if reference is not None:
                pairs = zip(found["losses"], reference["losses"], strict=False)  # as many as the reference made
                delta = max(abs(a - b) / abs(b) for a, b in pairs)
            rate = found["tokens_per_step"] / found["step_ms"] * 1e3
            base = single.get("ddp:1") if not case.cut else None
            efficiency = None
            if base is not None:
                efficiency = rate / gpus / (base["tokens_per_step"] / base["step_ms"] * 1e3)
            made.append(
                Row(
                    name, gpus, rate, efficiency, found["peak_gib"], found["target_gib"], delta,
                    found["save_blocked_ms"], found["step_ms"], found["tokens_per_step"], found["losses"],
                    options.preset, found["card"], options.command,
                    origin["git_revision"], origin["versions"],
                )
            )  # fmt: skip
    return made


def describe(row: Row) -> str:
    efficiency = "" if row.efficiency is None else f"  efficiency {row.efficiency:.3f}"
    delta = "" if row.loss_delta is None else f"  loss delta {row.loss_delta:.1e}"
    blocked = f"  saving blocked {row.save_blocked_ms:.0f} ms" if row.save_blocked_ms else ""
    memory = f"{row.peak_gib_per_gpu:5.1f} GiB peak  {row.target_gib_per_gpu:5.1f} GiB target"
    return (
        f"{row.gpus} × {row.case:13s} {row.tokens_per_s:10.0f} tokens/s{efficiency}  {memory}  {row.step_ms:7.1f} ms"
        f"{delta}{blocked}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    options.command = "python -m headstart.bench.scaling " + " ".join(arguments)
    if options.steps < 2 * RECORD:
        parser.error(f"--steps: found {options.steps}, expected {2 * RECORD} or more: the first {RECORD} are not timed")
    if options.result is not None:
        run_rank(options)
        return 0
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
    passed_on = ["--preset", options.preset, "--gpus", *map(str, options.gpus), "--cases", *options.cases]
    for name in ("tokens", "length", "depth", "steps", "scratch", "case_seconds"):
        value = getattr(options, name)
        passed_on += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    earlier = json.loads(options.out.read_text()) if options.out is not None and options.out.is_file() else []
    if not all("efficiency" in row for row in earlier):
        parser.error(f"--out: {options.out} holds rows of another benchmark; give a new file or one of its own")
    launches: dict[int, list[dict[str, Any]]] = {}
    shown: set[tuple[str, int]] = set()

    def report(gpus: int, found: list[dict[str, Any]]) -> None:
        launches[gpus] = found
        made = rows(launches, options)
        if options.out is not None:
            write_json(options.out, earlier + [asdict(row) for row in made])
        for row in made:
            if (row.case, row.gpus) not in shown:
                shown.add((row.case, row.gpus))
                print(describe(row), flush=True)

    whole = [launch(n, make_jobs(n, options), passed_on, partial(report, n)) for n in options.gpus]
    return int(not all(whole))


if __name__ == "__main__":
    sys.exit(main())
