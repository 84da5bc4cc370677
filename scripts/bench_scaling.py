"""How training scales over the GPUs of a machine, and whether it stays the same training.

    python -m headstart.bench_scaling --gpus 1 4 --cases ddp fsdp2 fsdp2_target --out docs/results/scaling.json

Every case runs the training loop itself on live features of a random target (shapes decide the speed; equal weights and
data in every case). One pack per GPU and step; efficiency is tokens/s per GPU over that of one GPU. `loss_delta` is the
largest relative difference from the losses of one GPU at the same global batch. Cases:

    ddp            whole target and head on every GPU, captured steps
    ddp_saving     the same, with a checkpoint written behind the loop every few steps
    fsdp2          the head, its gradients and its optimiser state in shards
    zero2, zero3   the same by DeepSpeed (left out where it is not installed)
    fsdp2_target   the target in shards, the head whole

The parent process starts one `torchrun` per number of GPUs; on CPUs (preset tiny) the ranks use gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headstart.bench_train import PRESETS
from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample
from headstart.heads import HEADS
from headstart.heads.base import HeadDims, build_head
from headstart.heads.files import write_json
from headstart.heads.provenance import provenance
from headstart.heads.sharded import ShardedTarget, fill, shard_group
from headstart.heads.target import Target, TargetConfig
from headstart.train.config import TrainConfig
from headstart.train.loop import train
from headstart.train.setup import make_accelerator

#: case → (train.parallel, whether the target is sharded, steps between checkpoints)
CASES = {
    "ddp": ("replicated", False, 0),
    "ddp_saving": ("replicated", False, 8),
    "fsdp2": ("fsdp2", False, 0),
    "zero2": ("zero2", False, 0),
    "zero3": ("zero3", False, 0),
    "fsdp2_target": ("replicated", True, 0),
}
#: steps per record of the loop; the first record holds captures and compilation and is left out of the rates
RECORD = 4


@dataclass
class Row:
    """One row of docs/results/scaling.json.

    Attributes:
        efficiency: tokens/s per GPU over that of one GPU (1 for one GPU itself).
        target_gib_per_gpu: what the target holds on each GPU between two forwards.
        loss_delta: see the module's text; None for one GPU.
        save_blocked_ms: longest time that a periodic checkpoint kept the next step from starting.
    """

    case: str
    gpus: int
    tokens_per_s: float
    efficiency: float
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


def make_target(preset: str, device: torch.device, sharded: bool) -> Target:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = PRESETS[preset][0]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    files, name = RandomWeights(model, device, dtype), TargetConfig(name="random")
    if sharded:
        group = shard_group(None)
        return ShardedTarget(model, None, name, None, group, fill(model, files, device, group))
    fill(model, files, device, None)
    return Target(model, None, name)


def make_samples(preset: str, packs: int, tokens: int, length: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    vocab = PRESETS[preset][0].vocab_size
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


def run_case(
    case: str, options: argparse.Namespace, accelerator: Any, accumulation: int, target: Target, samples: list[Sample]
) -> dict[str, Any]:
    """Train for a few steps; what rank 0 read from the loop's own records."""
    parallel, _, save_every = CASES[case]
    cuda, device = accelerator.device.type == "cuda", accelerator.device
    draft_ids_U = torch.arange(PRESETS[options.preset][1], device=device)
    head_config: Any = HEADS["eagle3"].config(  # type: ignore[call-arg]
        depth=options.depth, draft_vocab_size=len(draft_ids_U)
    )
    torch.manual_seed(0)
    head = build_head(head_config, HeadDims.from_hf_config(PRESETS[options.preset][0])).to(device)
    head.init_from_target(target.embed_VD, target.teacher, draft_ids_U)  # type: ignore[attr-defined]
    target.keep_rows(draft_ids_U)
    head.bind(target.embed_VD, target.teacher)  # type: ignore[attr-defined]
    source = OnlineFeatures(target, samples, head.spec, head.depth)
    config = TrainConfig(
        steps=options.steps, accumulation=accumulation, lr=1e-4, warmup_steps=4, schedule="constant", log_every=RECORD,
        parallel=parallel, save_every=save_every, keep=1,
    )  # fmt: skip
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(dir=options.scratch) as place:
        run_dir = Path(place) if accelerator.is_main_process else Path(place, "unused")
        result = train(
            head, source, target.teacher, source.lengths, config, run_dir, provenance={}, pack_tokens=options.tokens,
            accelerator=accelerator, progress=False,
        )  # fmt: skip
        found: dict[str, Any] = {"save_blocked_ms": result.save_blocked_ms}
        if accelerator.is_main_process:
            records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            records = [record for record in records if "train/loss" in record]
            tokens = result.tokens * (len(records) - 1) / len(records)
            found["losses"] = [record["train/loss"] for record in records]
            found["tokens_per_s"] = tokens / (records[-1]["seconds"] - records[0]["seconds"])
            found["tokens_per_step"] = result.tokens // result.step
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return found


def rank_main(options: argparse.Namespace) -> None:
    """One rank of a launch: every case that this number of ranks can run; rank 0 writes what it found."""
    accelerator = make_accelerator("cuda" if torch.cuda.is_available() else "cpu")
    size, cuda = accelerator.num_processes, accelerator.device.type == "cuda"
    largest = max(options.gpus)
    samples = make_samples(options.preset, largest * 4, options.tokens, options.length)
    found: list[dict[str, Any]] = []
    for sharded in (False, True):
        cases = [case for case in options.cases if CASES[case][1] == sharded and (size > 1 or case == "ddp")]
        if not cases:
            continue
        if cuda:
            torch.cuda.empty_cache()
        started = time.perf_counter()
        target = make_target(options.preset, accelerator.device, sharded)
        if accelerator.is_main_process:
            print(f"target made in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        for case in cases:
            windows = [size] if size > 1 else sorted({1, largest})
            for accumulation in windows:
                values = run_case(case, options, accelerator, accumulation, target, samples)
                held = target.held_bytes() / 2**30
                found.append({"case": case, "accumulation": accumulation, "target_gib": held, **values})
                if accelerator.is_main_process:
                    print(f"{size} × {case}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
        del target
    if accelerator.is_main_process:
        card = provenance(accelerator.device)["device"]
        write_json(options.result, {"gpus": size, "card": card, "cases": found})
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(gpus: int, arguments: list[str]) -> dict[str, Any] | None:
    """Run this file on `gpus` ranks; None when it failed, which has then said why."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus), "-m"]
        code = subprocess.run([*command, "headstart.bench_scaling", *arguments, "--result", str(result)]).returncode
        return json.loads(result.read_text()) if code == 0 else None


def rows(launches: list[dict[str, Any]], options: argparse.Namespace) -> list[Row]:
    """Rows of every launch, measured against the one on one GPU."""
    single = {c["accumulation"]: c for run in launches if run["gpus"] == 1 for c in run["cases"]}
    origin = provenance("cpu")
    made = []
    for run in launches:
        for c in run["cases"]:
            gpus = run["gpus"]
            if gpus == 1 and c["accumulation"] > 1:
                continue  # only there for its losses
            reference = single.get(gpus) if gpus > 1 else None
            delta = None
            if reference is not None:
                pairs = zip(c["losses"], reference["losses"], strict=True)
                delta = max(abs(a - b) / abs(b) for a, b in pairs)
            base = single[1]["tokens_per_s"] if 1 in single else float("nan")
            made.append(
                Row(
                    c["case"], gpus, c["tokens_per_s"], c["tokens_per_s"] / gpus / base, c["peak_gib"],
                    c["target_gib"], delta, c["save_blocked_ms"], c["tokens_per_step"] / c["tokens_per_s"] * 1e3,
                    c["tokens_per_step"], c["losses"], options.preset, run["card"],
                    "python -m headstart.bench_scaling " + " ".join(sys.argv[1:]), origin["git_revision"],
                    origin["versions"],
                )
            )  # fmt: skip
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 4], help="numbers of GPUs; 1 gives the baseline")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["ddp", "fsdp2", "fsdp2_target"])
    parser.add_argument("--tokens", type=int, default=8192, help="rows of a pack")
    parser.add_argument("--length", type=int, default=2048, help="rows per document")
    parser.add_argument("--depth", type=int, default=7, help="TTT steps")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--scratch", help="directory for the runs' checkpoints, deleted again (e.g. /dev/shm)")
    parser.add_argument("--out", type=Path, help="append the rows to this JSON list")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 2 * RECORD:
        parser.error(f"--steps: found {options.steps}, expected {2 * RECORD} or more: the first {RECORD} are not timed")
    if options.result is not None:
        rank_main(options)
        return 0
    absent = [case for case in options.cases if case.startswith("zero") and find_spec("deepspeed") is None]
    if absent:
        print(f"left out, deepspeed is not installed: {', '.join(absent)}", file=sys.stderr)
        options.cases = [case for case in options.cases if case not in absent]
    arguments = ["--preset", options.preset, "--gpus", *map(str, options.gpus), "--cases", *options.cases]
    for name in ("tokens", "length", "depth", "steps", "scratch"):
        value = getattr(options, name)
        arguments += [f"--{name}", str(value)] if value is not None else []
    launches = [launch(gpus, arguments) for gpus in options.gpus]
    made = rows([run for run in launches if run is not None], options)
    for row in made:
        delta = "" if row.loss_delta is None else f"  loss delta {row.loss_delta:.1e}"
        memory = f"{row.peak_gib_per_gpu:5.1f} GiB peak  {row.target_gib_per_gpu:5.1f} GiB target"
        print(
            f"{row.gpus} × {row.case:13s} {row.tokens_per_s:10.0f} tokens/s  efficiency {row.efficiency:.3f}  "
            f"{memory}  {row.step_ms:7.1f} ms{delta}"
        )
    if options.out is not None:
        earlier = json.loads(options.out.read_text()) if options.out.is_file() else []
        write_json(options.out, earlier + [asdict(row) for row in made])
    return int(any(run is None for run in launches))


if __name__ == "__main__":
    sys.exit(main())
