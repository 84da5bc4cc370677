"""How fast a head trains, and where the time goes.

    python -m headstart.bench.train --preset llama-3.1-8b --cases fixed_all fixed_40 long_32k --out results.json
    python -m headstart.bench.train --preset llama-3.1-8b --cases medusa_all medusa_shared medusa_lowrank
    python -m headstart.bench.train --preset llama-3.1-8b --cases real_lengths --data answers.jsonl --target NAME
    python -m headstart.bench.train --cases dspark_all dflash_all --block 7 16 --draft-vocab 32000 0
    python -m headstart.bench.train --preset smollm2 --tokens 16384 --cases smollm2_dspark
    headstart train smollm2-eagle3 && python -m headstart.bench.train --cases smollm2_real --run runs/smollm2-eagle3
    python -m headstart.bench.train --supervised-fraction 0.3 --lengths real --online --data answers.jsonl --target NAME

Weights are random (shapes decide the speed), except in `smollm2_real`, which reads what a real training run recorded.
One record per case: tokens/s, supervised tokens/s, MFU against a matrix product measured in the same run, peak memory,
how many graphs were compiled or captured and in what time, and the parts of a step. The cases `medusa_*` train a head
with one output matrix per depth: own, shared or low-rank ones, or own ones on labels instead of a teacher. Documents of
the `real` cases are as long as the conversations in --data are under the tokenizer of --target. Heads that draft blocks
(`dspark_all`, `dflash_all`, `smollm2_dspark`) draw their anchors anew at every step, as training does.

Several GPUs: `python -m headstart.bench.scaling`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from headstart.bench.presets import (
    BLOCK_CASES,
    DEPTH,
    MATRICES_DEPTH,
    PRESETS,
    block_config,
    head_config,
    matrices_config,
    mixed_lengths,
    random_ends,
    random_target,
    refuse_ranks,
)
from headstart.bench.timing import Timer, add_rows, print_kernels
from headstart.console import Console
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.packing import make_packs
from headstart.data.prepare import prepare
from headstart.data.samples import Sample
from headstart.heads.base import Head, HeadConfig
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.errors import ConfigError, HeadstartError
from headstart.heads.families import build_head
from headstart.heads.provenance import command_line, provenance
from headstart.heads.targets.fetch import locate_target
from headstart.heads.targets.target import Target
from headstart.pipeline.data import trained_samples
from headstart.pipeline.run import Run
from headstart.pipeline.train import fresh_head
from headstart.recipes.load import load_recipe
from headstart.train.captured import CapturedBackward, PackShape
from headstart.train.config import TrainConfig
from headstart.train.flops import matmul_flops
from headstart.train.optim import build_optimizer
from headstart.train.step import LossModule

#: case → settings of a head with one output matrix per depth
MATRICES: dict[str, dict[str, Any]] = {
    "medusa_all": {"lm_head": "own"},
    "medusa_shared": {"lm_head": "shared"},
    "medusa_lowrank": {"lm_head": "lowrank"},
    "medusa_labels": {"lm_head": "own", "loss": "ce"},
}
CASES = (
    "fixed_all",
    "fixed_40",
    "online_all",
    "real_lengths",
    "long_32k",
    "smollm2_real",
    "custom",
    *MATRICES,
    *BLOCK_CASES,
)


@dataclass(frozen=True)
class Case:
    """What one step trains on.

    Attributes:
        lengths: tokens of each document of the pack. supervised: share of the tokens that are trained on.
        online: the target's forward is timed too.
        matrices: settings of a head with one output matrix per depth; None = a head with a draft vocabulary.
        block, draft_vocab: sizes of a block and of the draft vocabulary (0 = all) of a head that drafts blocks.
    """

    name: str
    lengths: tuple[int, ...]
    supervised: float = 1.0
    online: bool = False
    matrices: dict[str, Any] | None = None
    block: int | None = None
    draft_vocab: int | None = None


@dataclass
class Record:
    """One row of docs/results/train_speed.json.

    Attributes:
        peak_gib: most memory of tensors. A captured step's temporaries count while it is captured, before the optimiser
            has its moments. reserved_gib: memory that the allocator took from the card, the graphs' pool and what is
            lost between tensors included: what the card must have.
        block, draft_vocab: of a head that drafts blocks: slots of a block, tokens that it can draft.
        anchors_per_s: blocks that are trained per second, for such a head.
    """

    case: str
    preset: str
    tokens_per_s: float
    supervised_tokens_per_s: float
    mfu: float
    peak_gib: float
    compile_s: float
    compiles: int
    step_ms: float
    split_ms: dict[str, float]
    tokens: int
    supervised_tokens: int
    documents: int
    steps: int
    matmul_tflops: float
    card: str = ""
    command: str = ""
    git_revision: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    row_fraction: float = 1.0
    reserved_gib: float = 0.0
    block: int | None = None
    draft_vocab: int | None = None
    anchors_per_s: float | None = None


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart: a new row replaces the one with its key. Earlier rows lack some of the fields."""
    return row["case"], row["preset"], row.get("row_fraction", 1.0), row.get("block"), row.get("draft_vocab")


def real_samples(data: Path, target: str) -> list[Sample]:
    """The conversations of a file as training samples of the target (tokenizer only)."""
    tokenizer = AutoTokenizer.from_pretrained(locate_target(target)[0], local_files_only=True)
    config = DataConfig(sources=[SourceConfig(path=str(data))])
    return prepare(config, tokenizer, (tokenizer.eos_token_id,), [], 0).train


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The named cases; `custom` is what --lengths, --supervised-fraction and --online ask for."""
    tokens, fixed = arguments.tokens, (arguments.length,) * (arguments.tokens // arguments.length)
    names = arguments.cases
    real: tuple[int, ...] = ()
    if "real_lengths" in names or ("custom" in names and arguments.lengths == "real"):
        if arguments.data is None:
            raise ConfigError("--data: not given; real lengths are those of a file of conversations")
        lengths = [len(sample) for sample in real_samples(arguments.data, arguments.target)]
        packs = make_packs(lengths, tokens, 0, 0)
        real = tuple(lengths[i] for i in packs[0])
    known = {
        "fixed_all": Case("fixed_all", fixed),
        "fixed_40": Case("fixed_40", fixed, 0.4),
        "online_all": Case("online_all", fixed, 1.0, True),
        "real_lengths": Case("real_lengths", real),
        "long_32k": Case("long_32k", (32768,)),
        "custom": Case(
            "custom", real if arguments.lengths == "real" else fixed, arguments.supervised_fraction, arguments.online
        ),
    }
    known |= {name: Case(name, fixed, matrices=fields) for name, fields in MATRICES.items()}
    found = []
    for name in names:
        if name in BLOCK_CASES:
            found += block_cases(name, arguments, fixed)
        elif name != "smollm2_real":
            found.append(known[name])
    return found


def block_cases(name: str, arguments: argparse.Namespace, fixed: tuple[int, ...]) -> list[Case]:
    """One case for every size of a block and of the draft vocabulary."""
    kind = BLOCK_CASES[name]
    lengths = mixed_lengths(arguments.tokens) if kind.mixed else fixed
    return [
        Case(name, lengths, block=block, draft_vocab=size)
        for block in kind.blocks or arguments.block
        for size in kind.vocabularies or arguments.draft_vocab
    ]


def turns(length: int, supervised: float) -> Tensor:
    """Chat-like mask: turns of at most 512 tokens, the last `supervised` part of each is the assistant's."""
    turn_T = torch.full((length,), -1)
    for number, start in enumerate(range(0, length, 512)):
        stop = min(start + 512, length)
        turn_T[stop - round((stop - start) * supervised) : stop] = 0 if supervised == 1 else number
    return turn_T


def make_batch(case: Case, head: Head, vocab: int, device: torch.device, dtype: torch.dtype) -> FeatureBatch:
    documents = [(torch.randint(0, vocab, (n,)), turns(n, case.supervised)) for n in case.lengths]
    batch = FeatureBatch.pack(documents, head.depth, sample_ids=tuple(map(str, range(len(documents))))).to(device)
    rows, width, layers = batch.tokens_R.shape[0], head.dims.hidden_size, len(head.spec.layer_ids)
    allowed = head.draft_ids_U
    argmax_A = torch.randint(0, vocab, (len(batch.anchors),), device=device)
    if allowed is not None:
        argmax_A = allowed[argmax_A % allowed.shape[0]]
    return replace(
        batch,
        hidden_RD=torch.randn(rows, width, device=device, dtype=dtype),
        streams_RkD=torch.randn(rows, layers, width, device=device, dtype=dtype) if layers else None,
        teacher_argmax_A=argmax_A,
    )


def row_fraction_of(head: Head) -> float:
    """`head.row_fraction`; 1 for a family without that setting."""
    fraction: float = asdict(head.config).get("row_fraction", 1.0)
    return fraction


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process, recompilations included."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def bench_case(
    case: Case,
    preset: str,
    head: Head,
    target: Target | None,
    teacher: Teacher,
    steps: int,
    matmul: float,
    profile: bool = False,
) -> Record:
    device = teacher.weight_VD.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole = make_batch(case, head, head.dims.vocab_size, device, dtype)

    def batch_of(step: int) -> FeatureBatch:
        return head.choose_rows(whole, step)

    batch = batch_of(0)
    module = LossModule(head, teacher, torch.bfloat16 if device.type == "cuda" else None)
    optimizer = build_optimizer(head, TrainConfig(steps=1))
    scale_T = head.term_weights().to(device) / head.loss_counts(batch).clamp(min=1)
    parameters = [p for p in head.parameters() if p.requires_grad]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    compiled = compiled_graphs() if case.online else 0
    if target is not None:
        whole = target.extract(whole, head.spec)  # compiles the target
        batch = batch_of(0)
    backward, captures = _backward_of(module, batch, len(head.terms))
    compile_s = time.perf_counter() - started
    timer = Timer(device)
    for step in range(steps + 4):
        timer.start()
        if target is not None:
            whole = target.extract(whole, head.spec)
            timer.mark("target")
        backward(batch_of(step), scale_T, lambda: timer.mark("draft_forward"))
        timer.mark("draft_backward")
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        timer.mark("optimiser")
    splits = timer.read()[3:-1]  # the first warm up, the last has no successor
    compiles = captures + (compiled_graphs() - compiled if case.online else 0)
    if profile and device.type == "cuda":
        print_kernels(lambda: backward(batch, scale_T, lambda: None))
    split = {name: statistics.median(s[name] for s in splits) for name in splits[0]}
    step_ms = statistics.median(sum(s.values()) for s in splits)
    tokens, supervised = sum(case.lengths), sum(int((turns(n, case.supervised) >= 0).sum()) for n in case.lengths)
    flops = 6 * head.multiply_adds(len(batch.tokens_R), batch.anchors.count_K)
    if target is not None:
        flops += 2 * sum(p.numel() for p in target.model.parameters()) * tokens
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    reserved = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    origin = provenance(device)
    return Record(
        case.name, preset, tokens / step_ms * 1e3, supervised / step_ms * 1e3, flops / (step_ms / 1e3) / matmul, peak,
        compile_s, compiles, step_ms, split, tokens, supervised, len(case.lengths), steps, matmul / 1e12,
        origin["device"], command_line(), origin["git_revision"], origin["versions"], row_fraction_of(head),
        reserved, case.block, None if case.block is None else head.draft_vocab_size or head.dims.vocab_size,
        None if case.block is None else len(batch.anchors) / step_ms * 1e3,
    )  # fmt: skip


def _backward_of(module: LossModule, batch: FeatureBatch, terms: int) -> tuple[Callable[..., object], int]:
    """(the step: captured on CUDA, eager elsewhere; number of graphs captured)."""
    if batch.tokens_R.is_cuda:
        captured = CapturedBackward(module, batch, PackShape.covering(batch), terms)
        return captured.backward, 1

    def eager(batch: FeatureBatch, scale_T: Tensor, between: Callable[[], None]) -> None:
        sums = module(batch, scale_T)
        between()
        (sums[0] * scale_T).sum().backward()

    return eager, 0


def bench_run(arguments: argparse.Namespace, matmul: float) -> Record:
    """`smollm2_real`: a row from the records of a finished training run. Rates are those of the second half, when
    everything has been captured.

    The run's data is prepared again to count its multiply-adds. Card and versions are those that the run wrote down.
    """
    if arguments.run is None:
        raise ConfigError("--run: not given; smollm2_real is read from a finished run, e.g. --run runs/smollm2-eagle3")
    lines = (arguments.run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "tokens_per_s" in record]
    if len(records) < 4:
        raise ConfigError(f"--run: {arguments.run} holds {len(records)} records of training, expected 4 or more")
    overrides = [f"target.name={arguments.target}"]
    overrides += [f"data.sources=[{{path: {arguments.data}}}]"] if arguments.data is not None else []
    run = Run(load_recipe(arguments.run / "recipe.yaml", overrides), Console(silent=True))
    trained = trained_samples(run)
    head = fresh_head(run)
    packs = make_packs([len(sample) for sample in trained], run.recipe.data.pack_size, 0, 0)
    batches = (FeatureBatch.pack([trained[i].tensors() for i in pack], head.depth) for pack in packs)
    flops = sum(6 * head.multiply_adds(len(batch.tokens_R), batch.anchors.count_K) for batch in batches)
    tokens = sum(len(sample) for sample in trained)
    half = records[len(records) // 2 :]
    first, last = half[0], half[-1]
    seconds, steps = last["seconds"] - first["seconds"], last["step"] - first["step"]
    rate = statistics.median(record["tokens_per_s"] for record in half)
    # records without `capture_s`: the time that the first steps took beyond that of later ones
    captured = last.get("capture_s", records[0]["seconds"] - records[0]["step"] * seconds / steps)
    sidecar = json.loads((arguments.run / "head" / "headstart.json").read_text())
    origin = sidecar.get("provenance", sidecar)
    return Record(
        "smollm2_real", "smollm2", rate, (last["supervised_tokens"] - first["supervised_tokens"]) / seconds,
        flops / tokens * rate / matmul, last.get("memory_gib", 0.0), max(captured, 0.0), int(last.get("captures", 0)),
        seconds / steps * 1e3, {"data_wait": statistics.mean(r["data_wait"] for r in half) * seconds / steps * 1e3},
        tokens, last["supervised_tokens"], len(trained), last["step"], matmul / 1e12, origin["device"],
        command_line(), origin["git_revision"], origin["versions"], row_fraction_of(head),
    )  # fmt: skip


def described_head(case: Case, arguments: argparse.Namespace) -> HeadConfig:
    """The head that a case trains."""
    if case.block is not None and case.draft_vocab is not None:
        vocab = PRESETS[arguments.preset][0].vocab_size
        return block_config(BLOCK_CASES[case.name], case.block, case.draft_vocab, vocab)
    if case.matrices is not None:
        return matrices_config(depth=arguments.depth or MATRICES_DEPTH, **case.matrices)
    return head_config(arguments.preset, arguments.depth or DEPTH, row_fraction=arguments.row_fraction)


def bench(arguments: argparse.Namespace) -> list[Record]:
    """Run the named cases; a case that runs out of memory is reported and does not stop the others."""
    preset = arguments.preset
    config, vocab = PRESETS[preset]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dims = HeadDims.from_hf_config(config)
    size = 8192 if device.type == "cuda" else 512
    matmul = arguments.matmul_tflops * 1e12 if arguments.matmul_tflops else matmul_flops(device, dtype, size)
    torch.manual_seed(0)
    records = []
    for case in cases(arguments):
        target = None
        if case.online:
            target = random_target(config, device, dtype)
            if arguments.compile_target:
                target.compile()
            ends = target.ends
        else:
            ends = random_ends(dims, device, dtype, embeddings=case.matrices is None)
        with torch.device(device):
            head = build_head(described_head(case, arguments), dims).to(device).train()
        size = vocab if case.draft_vocab is None else case.draft_vocab
        head.initialise(ends, torch.arange(size, device=device))
        try:
            records.append(
                bench_case(case, preset, head, target, ends.teacher, arguments.steps, matmul, arguments.profile)
            )
        except torch.cuda.OutOfMemoryError as error:
            print(f"{preset} {case.name}: out of memory: {error}", file=sys.stderr)
        else:
            print_record(records[-1])
        del head, target, ends
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if "smollm2_real" in arguments.cases:
        records.append(bench_run(arguments, matmul))
        print_record(records[-1])
    return records


def print_record(record: Record) -> None:
    block = "" if record.block is None else f"block {record.block} of {record.draft_vocab}  "
    rate = "" if record.anchors_per_s is None else f"{record.anchors_per_s:.0f} anchors/s  "
    print(
        f"{record.preset:13s} {record.case:13s} {block}{rate}{record.tokens_per_s:9.0f} tokens/s  "
        f"{record.supervised_tokens_per_s:9.0f} supervised/s  MFU {record.mfu:.2f}  {record.peak_gib:5.1f} GiB "
        f"({record.reserved_gib:.1f} reserved)  "
        f"{record.step_ms:7.1f} ms  " + "  ".join(f"{name} {ms:.1f}" for name, ms in record.split_ms.items()),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["custom"])
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the pack")
    parser.add_argument("--length", type=int, default=2048, help="rows per document of the fixed cases")
    parser.add_argument("--supervised-fraction", type=float, default=1.0, help="for the case `custom`")
    parser.add_argument("--lengths", choices=("fixed", "real"), default="fixed", help="for the case `custom`")
    parser.add_argument("--online", action="store_true", help="for the case `custom`: time the target's forward too")
    parser.add_argument("--compile-target", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--data", type=Path, help="conversations, for the `real` cases")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="tokenizer of --data and of --run")
    parser.add_argument("--depth", type=int, help=f"TTT steps ({DEPTH}), or output matrices ({MATRICES_DEPTH})")
    parser.add_argument("--row-fraction", type=float, default=1.0, help="head.row_fraction of the head")
    parser.add_argument(
        "--block", type=int, nargs="+", default=[7, 16], help="slots of a block, where blocks are drafted"
    )
    parser.add_argument(
        "--draft-vocab", type=int, nargs="+", default=[32000, 0], help="tokens that such a head can draft; 0 = all"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps per case")
    parser.add_argument("--run", type=Path, help="run directory of smollm2_real")
    parser.add_argument("--matmul-tflops", type=float, help="what MFU is a share of; measured unless given")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON list to write; rows of the same case, preset and settings are replaced",
    )
    arguments = parser.parse_args()
    try:
        refuse_ranks()
        records = bench(arguments)
    except HeadstartError as error:
        parser.exit(2, f"error: {error}\n")
    add_rows(arguments.out, records, key_of)


if __name__ == "__main__":
    main()
