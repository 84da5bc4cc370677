"""How fast a target decodes, verifies and is drafted for, and where the time goes.

    python -m headstart.bench_decode --preset llama-3.1-8b --out results.json

Weights are random (shapes decide the speed). One record per case: `plain_ms` (one token), `verify64_ms` (a tree of 64
tokens). Times are device events around replays of captured graphs; on a CPU, wall time of the eager twins.
`--profile` prints device time by kernel, `--products` every way of every matrix product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.bench_train import PRESETS, print_kernels, random_target
from headstart.eval.attention import Visibility
from headstart.eval.engine import attention_windows
from headstart.eval.fused import FusedModel
from headstart.eval.linear import graph_time, measure
from headstart.heads.files import write_json
from headstart.heads.provenance import provenance
from headstart.heads.target import Target

CASES = ("plain_ms", "verify64_ms")


@dataclass
class Record:
    """One row of docs/results/decode_speed.json."""

    case: str
    value: float
    unit: str
    card: str
    command: str
    git_revision: str
    versions: dict[str, str]
    preset: str
    context: int
    batch: int


def repeat_time(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of `run`: captured and replayed on CUDA, called on a CPU."""
    if device.type == "cuda":
        return graph_time(run, repeats)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def random_tree_mask(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ancestor mask bool [1, M, M] and depths [M] of a random tree whose node 0 is the root."""
    noise = torch.Generator().manual_seed(0)
    mask, depth = torch.eye(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.int64)
    for node in range(1, tokens):
        parent = int(torch.randint(max(0, node - 10), node, (1,), generator=noise))
        mask[node] |= mask[parent]
        depth[node] = depth[parent] + 1
    return mask[None].to(device), depth.to(device)


class ForwardBench:
    """Forwards of a fused target over a context of given length."""

    def __init__(self, target: Target, context: int, batch: int, capacity: int):
        self.model = FusedModel(target.model, attention_windows(target.model.config))
        self.buffers = self.model.buffers(batch, capacity)
        for part in (*self.buffers.keys, *self.buffers.values):
            part.normal_()
        self.length_B = torch.full((batch,), context, dtype=torch.int64, device=target.device)
        self.vocabulary = target.dims.vocab_size

    def step(self, tokens: int) -> Callable[[], object]:
        """One forward of `tokens` per row: a tree, or the next token."""
        device = self.length_B.device
        mask, depth_M = random_tree_mask(tokens, device)
        slot_BM = self.length_B[:, None] + torch.arange(tokens, device=device)
        position_BM = self.length_B[:, None] + depth_M
        tree = mask.expand(len(self.length_B), -1, -1).contiguous() if tokens > 1 else None
        visibility = Visibility(position_BM, slot_BM, self.length_B, tree)
        tokens_BM = torch.randint(0, self.vocabulary, slot_BM.shape, device=device)
        return lambda: self.model.forward(tokens_BM, visibility, self.buffers)


def bench(arguments: argparse.Namespace) -> list[Record]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config, _ = PRESETS[arguments.preset]
    torch.manual_seed(0)
    clock = Clock()
    target = random_target(config, device, dtype)
    clock.mark("target")
    forward = ForwardBench(target, arguments.context, arguments.batch, arguments.context + 128)
    clock.mark("fused")
    origin = provenance(device)
    records = []

    def record(case: str, value: float, unit: str = "ms") -> None:
        records.append(
            Record(
                case, value, unit, origin["device"], "python -m headstart.bench_decode " + " ".join(sys.argv[1:]),
                origin["git_revision"], origin["versions"], arguments.preset, arguments.context, arguments.batch,
            )
        )  # fmt: skip
        print(f"{arguments.preset:13s} {case:22s} {value:9.4f} {unit}", flush=True)

    for case, tokens in (("plain_ms", 1), ("verify64_ms", 64)):
        if arguments.products and device.type == "cuda":
            print_products(forward.model, arguments.batch * tokens)
            clock.mark(f"products {tokens}")
        for name, microseconds in forward.model.tune(arguments.batch * tokens).items():
            print(f"  {name}: {microseconds:.1f} µs", flush=True)
        clock.mark(f"tuning {tokens}")
        step = forward.step(tokens)
        record(case, repeat_time(step, device, arguments.repeats))
        clock.mark(case)
        if arguments.profile and device.type == "cuda":
            print_kernels(replayed(step), 20)
            clock.mark("profile")
    print(f"seconds: {clock}")
    return records


class Clock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self._last, self._spent = time.perf_counter(), {}  # type: ignore[var-annotated]

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self._spent[name] = self._spent.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return "  ".join(f"{name} {seconds:.1f}" for name, seconds in self._spent.items())


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a captured graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def print_products(model: FusedModel, rows: int) -> None:
    """Every way of every product: microseconds and GB/s of weights."""
    groups: dict[Any, list[Any]] = {}
    for linear in model.linears():
        groups.setdefault((tuple(linear.weight_NK.shape), linear.activation), []).append(linear)
    for (shape, activation), members in groups.items():
        gigabytes = members[0].weight_NK.nbytes / 1e9
        for tiles, microseconds in sorted(measure(members[:8], rows).items(), key=lambda item: item[1]):
            label = "cuBLAS" if tiles is None else str(tiles)
            print(
                f"  rows {rows:3d}  {shape[0]:6d}×{shape[1]:5d} {activation or '':5s} {label:20s} "
                f"{microseconds:8.1f} µs {gigabytes / microseconds * 1e6:7.0f} GB/s", flush=True,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=512, help="tokens in the KV buffers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20, help="replays per case")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    parser.add_argument("--products", action="store_true", help="print every way of every matrix product")
    parser.add_argument("--out", type=Path, help="append the records to this JSON list")
    arguments = parser.parse_args()
    records = bench(arguments)
    if arguments.out is not None:
        earlier = json.loads(arguments.out.read_text()) if arguments.out.is_file() else []
        write_json(arguments.out, earlier + [asdict(record) for record in records])


if __name__ == "__main__":
    main()
