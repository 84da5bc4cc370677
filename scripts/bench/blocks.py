"""How fast block heads draft.

    python -m headstart.bench.blocks --preset llama-3.1-8b --out results.json

Weights and features are random (shapes decide the speed). A case is one draft as a decoding cycle makes it: the rows
that the target accepted last (all of them here) join the context, then a block is drafted behind `--context` rows.

    dflash_block7_ms     7 drafts from 7 slots, every slot on its own
    dspark_block7_ms     the same backbone, whose logits depend on the draft before; `walk_ms` of it is what that adds
                         to the case before
    …_cycle_ms           with --cycle: the decode loop with a chain of 7 and τ = 3.7, the target's forward included

The first two run without a target: device time of a captured graph on CUDA, wall time of the eager twins on a CPU.
`--profile` prints device time by kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.bench.decode import CycleBench, Record, repeat_time, replayed
from headstart.bench.presets import (
    BLOCK_DEPTH,
    BLOCK_FAMILY,
    BLOCK_LAYERS,
    CORRECTED_FAMILY,
    PRESETS,
    drafting_block,
    random_ends,
    random_target,
    refuse_ranks,
)
from headstart.bench.timing import Clock, add_rows, print_kernels
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.engine import attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.kernels.choices import Choices, compile_ways, decide_ways
from headstart.eval.kernels.launch import compiling
from headstart.heads.base import Head
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds
from headstart.heads.families import build_head
from headstart.heads.provenance import command_line, provenance

#: acceptance by draft: τ = 1 + Σ Π = 3.7 in a chain of 7
RATES = (0.766,) * 7


@dataclass
class BlockRecord(Record):
    """A row of docs/results/decode_speed.json.

    Attributes: walk_ms: what drafting token after token adds to the backbone alone; None for the backbone.
    """

    draft_vocab: int
    layers: int
    block: int
    walk_ms: float | None = None


def random_block_head(family: str, draft_vocab: int, layers: int, dims: HeadDims, ends: TargetEnds) -> Head:
    """A block head with random weights, bound to random ends."""
    size = 0 if draft_vocab >= dims.vocab_size else draft_vocab
    config = drafting_block(family, dims.vocab_size, draft_vocab_size=size, layers=layers)
    device, dtype = ends.embed_VD.device, ends.embed_VD.dtype
    torch.manual_seed(0)
    with torch.device(device):
        head = build_head(config, dims).to(device, dtype)
    head.initialise(ends, torch.arange(size, device=device) if size else None)
    for parameter in head.parameters():
        if parameter.dim() == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)  # zeros would take less power, hence less time
    return head.eval()


def drafter_of(head: Head, sampling: dict[str, Any] | None = None) -> Drafter:
    drafter = build_drafter(head, EvalConfig(tree=TreeConfig(depth=head.depth), **(sampling or {})))
    assert drafter is not None
    return drafter


def draft_step(head: Head, context: int, batch: int) -> Callable[[], object]:
    """One commit and one draft behind a context of random features, its kernels chosen."""
    drafter, dims = drafter_of(head), head.dims
    device, dtype = head.bound_ends().embed_VD.device, head.bound_ends().embed_VD.dtype

    def rows(columns: int) -> Rows:
        tokens = torch.randint(dims.vocab_size, (batch, columns), device=device)
        streams = torch.randn(batch, columns, len(head.spec.layer_ids), dims.hidden_size, device=device, dtype=dtype)
        return Rows(tokens, torch.full((batch,), columns, device=device), streams[:, :, 0], streams)

    drafter.start(rows(context), context + 2 * head.depth)
    accepted, roots = rows(head.depth + 1), torch.arange(batch, device=device)
    held = [(owner, name, getattr(owner, name)) for owner, name in drafter.state]
    products = drafter.products(batch)
    choices = Choices.of(device) if device.type == "cuda" else None
    with compiling():
        for choose in (compile_ways, decide_ways):
            for linears, count in products:
                choose(linears, count, choices)

    @torch.inference_mode()
    def step() -> object:
        # every run begins where the first one did
        for owner, name, tensor in held:
            setattr(owner, name, tensor)
        drafter.commit(accepted)
        return drafter.propose(roots).tokens_BN

    return step


def bench(arguments: argparse.Namespace) -> list[BlockRecord]:
    refuse_ranks()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config, reduced = PRESETS[arguments.preset]
    dims, clock = HeadDims.from_hf_config(config), Clock()
    torch.manual_seed(0)
    origin, records = provenance(device), []

    def record(case: str, value: float, draft_vocab: int, walk_ms: float | None = None) -> None:
        records.append(
            BlockRecord(
                case, value, "ms", origin["device"], command_line(), origin["git_revision"], origin["versions"],
                arguments.preset, arguments.context, arguments.batch, draft_vocab, arguments.layers, BLOCK_DEPTH,
                walk_ms,
            )
        )  # fmt: skip
        walk = "" if walk_ms is None else f"  walk {walk_ms:.4f} ms"
        print(f"{arguments.preset:13s} {case:22s} U {draft_vocab:6d} {value:9.4f} ms{walk}", flush=True)

    if arguments.cycle:
        bench_cycles(arguments, device, dtype, reduced, record, clock)
        print(f"seconds: {clock}")
        return records
    ends = random_ends(dims, device, dtype, embeddings=True)
    clock.mark("ends")
    sizes = (reduced, dims.vocab_size) if arguments.draft_vocab is None else (arguments.draft_vocab,)
    for draft_vocab in sizes:
        alone = 0.0
        for family in (BLOCK_FAMILY, CORRECTED_FAMILY):
            head = random_block_head(family, draft_vocab, arguments.layers, dims, ends)
            clock.mark("heads")
            step = draft_step(head, arguments.context, arguments.batch)
            clock.mark("choosing")
            value = repeat_time(step, device, arguments.repeats)
            corrected = family == CORRECTED_FAMILY
            record(f"{family}_block{BLOCK_DEPTH}_ms", value, draft_vocab, value - alone if corrected else None)
            alone = value
            clock.mark("timing")
            if arguments.profile and device.type == "cuda":
                print_kernels(replayed(step), 30)
                clock.mark("profile")
            del step, head
    print(f"seconds: {clock}")
    return records


def bench_cycles(
    arguments: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    reduced: int,
    record: Callable[..., None],
    clock: Clock,
) -> None:
    """The decode loop with the preset's whole target."""
    target = random_target(PRESETS[arguments.preset][0], device, dtype)
    clock.mark("target")
    choices = Choices.of(device) if device.type == "cuda" else None
    model = FusedModel(target.model, attention_windows(target.model.config), choices)
    cycles = CycleBench(target, model, arguments.context, arguments.batch, arguments.new_tokens)
    clock.mark("fused")
    for family in (BLOCK_FAMILY, CORRECTED_FAMILY):
        head = random_block_head(family, reduced, arguments.layers, target.dims, target.ends)
        drafter = drafter_of(head, {"synthetic_acceptance": list(RATES)})
        cycle_ms, _, tau = cycles.measure(drafter, Sampling(synthetic=RATES))
        record(f"{family}_block{BLOCK_DEPTH}_cycle_ms", cycle_ms, reduced)
        print(f"  τ {tau:.2f}", flush=True)
        if (device_ms := cycles.device_ms(arguments.repeats)) is not None:
            record(f"{family}_block{BLOCK_DEPTH}_device_ms", device_ms, reduced)
        clock.mark(family)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.blocks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=512, help="rows of the context")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=BLOCK_LAYERS, help="layers of the head")
    parser.add_argument("--draft-vocab", type=int, help="tokens that are drafted; default: the preset's, and all")
    parser.add_argument("--repeats", type=int, default=50, help="replays per case")
    parser.add_argument("--cycle", action="store_true", help="the decode loop with the whole target instead")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per row that the loop decodes")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    parser.add_argument("--out", type=Path, help="append the records to this JSON list")
    arguments = parser.parse_args()
    add_rows(arguments.out, bench(arguments))


if __name__ == "__main__":
    main()
