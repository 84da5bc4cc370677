"""One rank of `headstart.bench.scaling`: trains every case for a few steps and writes down how long they took."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from headstart.bench.presets import PRESETS, head_config
from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample
from headstart.heads.dims import HeadDims
from headstart.heads.families import build_head
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
    """How a case is spread over the GPUs.

    Attributes:
        parallel: train.parallel. sharded: whether the target is in shards. save_every: steps between checkpoints.
        cut: whether the target is Llama-3.1-70B with fewer layers.
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
#: steps per record of the loop; the first record, in which graphs are captured and compiled, is not timed
RECORD = 4
#: steps for which one GPU makes the losses that those of several GPUs are compared with
REFERENCE_STEPS = 2 * RECORD


def target_config(preset: str, case: Case) -> PretrainedConfig:
    return CUT_70B if case.cut and preset != "tiny" else PRESETS[preset][0]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class RandomWeights:
    """Stands for a model's files: random tensors, made when they are read, the same on every rank."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype):
        self.directory = Path("random weights")
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self.file_of = dict.fromkeys(self._shapes, "")
        self._device, self._dtype = device, dtype

    def rows(self, name: str, first: int, last: int | None) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)[first:last]
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
    """A validation that takes no time and finds every head better than the one before, so that each is written."""
    return {"valid/walked_tau": float(step)}


def run_case(
    case: Case, options: argparse.Namespace, accelerator: Any, accumulation: int, target: Target
) -> dict[str, Any]:
    """Train for a few steps. Returns what was measured; on rank 0 with rates and losses from the loop's records."""
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
    steps += RECORD  # not timed: the last step is faster, as it makes no features for a next one
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
            head, TrainData(source, tokens), target.teacher, train_config, run_dir, observers,
            provenance={}, accelerator=accelerator, final_checkpoint=False,
        )  # fmt: skip
        if result.stopped != "steps":
            raise SystemExit(f"stopped by a {result.stopped} at step {result.step}")
        measured: dict[str, Any] = {"save_blocked_ms": result.save_blocked_ms}
        if accelerator.is_main_process:
            records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            records = [record for record in records if "train/loss" in record]
            records.pop()  # the last steps are not timed
            measured["losses"] = [record["train/loss"] for record in records]
            first, last = records[0], records[-1]
            measured["tokens_per_step"] = result.tokens // result.step
            measured["step_ms"] = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]) * 1e3
            measured["record_step_ms"] = [
                round((b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) * 1e3, 1)
                for a, b in zip(records, records[1:], strict=False)
            ]
    measured["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return measured


def overdue(name: str, seconds: float) -> None:
    say(f"{name}: not done after {seconds:.0f} s")
    faulthandler.dump_traceback()
    os._exit(3)


def run_rank(options: argparse.Namespace) -> None:
    accelerator = make_accelerator("cuda" if torch.cuda.is_available() else "cpu")
    end = ProcessExit()
    try:
        with Watch():
            run_jobs(options, accelerator)
    except BaseException:
        traceback.print_exc()
        end.leave(1, at_once=True)  # a collective under way would hold an ordinary exit up
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    end.leave(0)


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
