"""How fast a target decodes and verifies, how fast a draft is, and where the time goes.

    python -m headstart.bench.decode --preset llama-3.1-8b --out results.json

Weights are random (shapes decide the speed), acceptance is synthetic (a probability per level). Cases:

    plain_ms, verify64_ms     one forward of the target: one token, a tree of 64
    frontier_ms               one level of an EAGLE-3 tree: 10 nodes through the draft, the 10 best of their children
    plain_cycle_ms            plain decoding through the decode loop, per token
    chain3_…                  the loop with a chain of 3 and τ = 2.8: cycle_ms, ms_per_token, speedup over plain
    tree60_…                  the loop with EAGLE-2 trees of 60 tokens and 8 levels, τ = 6.1
    host_share                part of the chain's cycle that the device spends waiting for the host

The first three are device events around replays of captured graphs; the loop's are wall time per cycle, host included.
On a CPU everything is wall time of the eager twins. `--profile` prints device time by kernel, `--products` every way of
every matrix product, `--attention` ways of splitting attention.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.bench.presets import PRESETS, random_target
from headstart.bench.timing import Clock, add_rows, print_kernels
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Decoded, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.drafters.autoregressive import AutoregressiveDrafter
from headstart.eval.kernels import attention
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.candidates import Growth
from headstart.eval.kernels.launch import graph_time, host_time
from headstart.eval.kernels.ways import measure
from headstart.heads.provenance import command_line, provenance
from headstart.heads.targets.target import Target
from headstart.saved_heads import untrained_head

#: acceptance by level: τ = 1 + Σ Π = 2.8 in a chain of 3, 6.1 in a tree of 8 levels
CHAIN_RATES, TREE_RATES = (0.766,) * 3, (0.899,) * 8


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
    return graph_time(run, repeats) if device.type == "cuda" else host_time(run, device, repeats)


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
    """Forwards of a fused target behind a context of `context` tokens."""

    def __init__(self, target: Target, model: FusedModel, context: int, batch: int, capacity: int):
        self.model = model
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


class CycleBench:
    """The decode loop over random prompts with synthetic acceptance."""

    def __init__(self, target: Target, model: FusedModel, context: int, batch: int, new_tokens: int):
        self.target, self.model, self.batch, self.new_tokens = target, model, batch, new_tokens
        # the context grows through the run: it is `context` halfway
        start = max(1, context - new_tokens // 2)
        noise = torch.Generator().manual_seed(0)
        self.contexts = torch.randint(0, target.dims.vocab_size, (batch, start), generator=noise).tolist()
        self.engine = Engine(target.model, batch, slots_needed(start, new_tokens, None) + 256, fused=model)
        self.graphs, self.generator = CycleGraphs(), torch.Generator(target.device)

    def run(self, drafter: Drafter | None, sampling: Sampling, new_tokens: int | None = None) -> Decoded:
        self.generator.manual_seed(0)
        limit = new_tokens or self.new_tokens
        return decode(self.engine, self.contexts, drafter, sampling, limit, set(), self.generator, graphs=self.graphs)

    def measure(self, drafter: Drafter | None, sampling: Sampling) -> tuple[float, float, float]:
        """(milliseconds per cycle, milliseconds per token of a row, τ), after a run that captures."""
        self.run(drafter, sampling, 8)
        decoded = self.run(drafter, sampling)
        seconds, cycles = sum(decoded.cycle_s), sum(len(answer.cycles) for answer in decoded.answers)
        per_row = decoded.decode_tokens / self.batch
        return seconds / len(decoded.cycle_s) * 1e3, seconds / per_row * 1e3, decoded.decode_tokens / cycles

    def device_ms(self, repeats: int) -> float | None:
        """Milliseconds of the latest cycle on the device; None where cycles are not captured."""
        if self.engine.captures:
            return self.graphs.device_ms(repeats)
        if self.model.uncaptured is not None:
            print(f"cycles ran operation by operation, without times of the device: {self.model.uncaptured}")
        return None


def random_drafter(target: Target, tree: TreeConfig, rates: tuple[float, ...]) -> AutoregressiveDrafter:
    """EAGLE-3 with random weights and synthetic acceptance."""
    head = untrained_head(None, target)
    drafter = build_drafter(head, EvalConfig(tree=tree, synthetic_acceptance=list(rates)))
    assert isinstance(drafter, AutoregressiveDrafter)
    return drafter


def frontier(drafter: AutoregressiveDrafter, batch: int) -> Callable[[], object]:
    """One level of a dynamic tree, on the state that the drafter's last run left."""
    k, depth, ids_U = drafter.tree.k, drafter.tree.depth, drafter.head.draft_ids_U
    pending_g_BJH = drafter.pending_g_BJH
    size = drafter.head.dims.vocab_size if ids_U is None else ids_U.shape[0]
    logits_B1U = pending_g_BJH.new_zeros((batch, 1, size))
    growth = Growth.start(drafter.length_B, k, depth, logits_B1U, ids_U).grow(logits_B1U)
    g_B1H = pending_g_BJH.new_zeros((batch, 1, pending_g_BJH.shape[-1]))

    def run() -> object:
        _, logits_BkU = drafter._frontier_pass(growth, g_B1H)
        return growth.grow(logits_BkU)

    return run


def bench(arguments: argparse.Namespace) -> list[Record]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config, _ = PRESETS[arguments.preset]
    torch.manual_seed(0)
    clock = Clock()
    target = random_target(config, device, dtype)
    clock.mark("target")
    model = FusedModel(target.model, attention_windows(target.model.config))
    forward = ForwardBench(target, model, arguments.context, arguments.batch, arguments.context + 128)
    clock.mark("fused")
    origin = provenance(device)
    records = []

    def record(case: str, value: float, unit: str = "ms") -> None:
        records.append(
            Record(
                case, value, unit, origin["device"], command_line(), origin["git_revision"], origin["versions"],
                arguments.preset, arguments.context, arguments.batch,
            )
        )  # fmt: skip
        print(f"{arguments.preset:13s} {case:22s} {value:9.4f} {unit}", flush=True)

    bench_forwards(forward, arguments, record, clock)
    del forward
    cycles = CycleBench(target, model, arguments.context, arguments.batch, arguments.new_tokens)
    bench_cycles(cycles, arguments, record, clock)
    record("prepare_s", cycles.graphs.seconds, "s")
    print(f"seconds: {clock}")
    return records


#: takes (case, value, unit)
RecordCase = Callable[..., None]


def bench_forwards(forward: ForwardBench, arguments: argparse.Namespace, record: RecordCase, clock: Clock) -> None:
    """One forward of the target: `plain_ms` and `verify64_ms`."""
    device = forward.length_B.device
    for case, tokens in (("plain_ms", 1), ("verify64_ms", 64)):
        if arguments.products and device.type == "cuda":
            print_products(forward.model, arguments.batch * tokens)
            clock.mark(f"products {tokens}")
        for name, microseconds in forward.model.choose_ways(arguments.batch * tokens).items():
            print(f"  {name}: {microseconds:.1f} µs", flush=True)
        clock.mark(f"choosing {tokens}")
        step = forward.step(tokens)
        record(case, repeat_time(step, device, arguments.repeats))
        clock.mark(case)
        if arguments.profile and device.type == "cuda":
            print_kernels(replayed(step), 20)
            clock.mark("profile")
    if arguments.attention and device.type == "cuda":
        print_attention(forward)
        clock.mark("attention")


def bench_cycles(cycles: CycleBench, arguments: argparse.Namespace, record: RecordCase, clock: Clock) -> None:
    """The decode loop: plain, with a chain and with dynamic trees."""
    target, device = cycles.target, cycles.target.device
    plain_ms, plain_token_ms, _ = cycles.measure(None, Sampling())
    record("plain_cycle_ms", plain_ms)
    clock.mark("plain cycle")
    for name, tree, rates in (
        ("chain3", TreeConfig("chain", 3), CHAIN_RATES),
        ("tree60", TreeConfig("dynamic", 8, 10, 60), TREE_RATES),
    ):
        drafter = random_drafter(target, tree, rates)
        sampling = Sampling(synthetic=rates)
        cycle_ms, token_ms, tau = cycles.measure(drafter, sampling)
        record(f"{name}_cycle_ms", cycle_ms)
        record(f"{name}_ms_per_token", token_ms)
        record(f"{name}_tau", tau, "tokens")
        record(f"{name}_speedup", plain_token_ms / token_ms, "×")
        if (device_ms := cycles.device_ms(arguments.repeats)) is not None:
            record(f"{name}_device_ms", device_ms)
            if name == "chain3":
                record("host_share", max(0.0, 1 - device_ms / cycle_ms), "of a cycle")
        if name == "tree60":
            record("frontier_ms", repeat_time(torch.inference_mode()(frontier(drafter, arguments.batch)), device, 20))
        if arguments.profile and cycles.engine.captures:
            print_kernels(cycles.graphs.replay_latest, 30)
        clock.mark(name)


def print_attention(forward: ForwardBench) -> None:
    """Print the fastest ways of cutting a layer's attention, in microseconds."""
    layer, keys, values = forward.model.layers[0].attention, forward.buffers.keys, forward.buffers.values
    device, rope = keys[0].device, layer.rope
    for tokens in (1, 4, 64):
        mask, depth_M = random_tree_mask(tokens, device)
        slot_BM = forward.length_B[:, None] + torch.arange(tokens, device=device)
        tree = None if tokens == 1 else mask.expand(len(slot_BM), -1, -1)
        visibility = Visibility(forward.length_B[:, None] + depth_M, slot_BM, forward.length_B, tree)
        q_Rhd = torch.randn((slot_BM.numel(), rope.heads, rope.head_dim), device=device).to(keys[0].dtype)
        times = {}
        held = attention.BLOCK_ROWS, attention.BLOCK_SLOTS, attention.STAGES
        for rows, slots, stages, splits in itertools.product((16, 64), (64, 128), (2, 3), (1, 2, 3, 4, 6, 12)):
            attention.BLOCK_ROWS, attention.BLOCK_SLOTS, attention.STAGES = rows, slots, stages

            def run(q: Tensor = q_Rhd, seen: Visibility = visibility, splits: int = splits) -> None:
                for key, value in zip(keys, values, strict=True):
                    attention.attend_kernel(q, key, value, seen, layer.shape, splits)

            times[rows, slots, stages, splits] = graph_time(run) / len(keys) * 1e3
        attention.BLOCK_ROWS, attention.BLOCK_SLOTS, attention.STAGES = held
        best = sorted(times.items(), key=lambda item: item[1])[:8]
        print(f"attention of {tokens} (rows, slots, stages, splits):", flush=True)
        print("".join(f"  {way}: {microseconds:.1f} µs" for way, microseconds in best), flush=True)


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a captured graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def print_products(model: FusedModel, rows: int) -> None:
    """Print every way of every product: microseconds and GB/s of weights."""
    groups: dict[Any, list[Any]] = {}
    for linear in model.linears():
        groups.setdefault(linear.product, []).append(linear)
    for (shape, activation, *_), members in groups.items():
        gigabytes = members[0].weight_NK.nbytes / 1e9
        for tiles, microseconds in sorted(measure(members, rows).items(), key=lambda item: item[1]):
            label = "cuBLAS" if tiles is None else str(tiles)
            print(
                f"  rows {rows:3d}  {shape[0]:6d}×{shape[1]:5d} {activation or '':5s} {label:20s} "
                f"{microseconds:8.1f} µs {gigabytes / microseconds * 1e6:7.0f} GB/s", flush=True,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=512, help="tokens in the KV buffers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens per row that the loop decodes")
    parser.add_argument("--attention", action="store_true", help="print ways of splitting attention")
    parser.add_argument("--repeats", type=int, default=20, help="replays per case")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    parser.add_argument("--products", action="store_true", help="print every way of every matrix product")
    parser.add_argument("--out", type=Path, help="append the records to this JSON list")
    arguments = parser.parse_args()
    add_rows(arguments.out, bench(arguments))


if __name__ == "__main__":
    main()
