"""What a run will take, from shapes alone: memory per rank, steps, hours, disk; and what to change where it cannot fit.

Bytes are counted on models without memory (meta device). Activations of a draft layer follow

    anchors · depths · (4 · intermediate + 6 · hidden + queries, keys, values) numbers + anchors · draft vocabulary,

fitted to the peaks in docs/results/train_speed.json, which it meets within a tenth. What sharding adds is fitted
to those in scaling.json: at most 4 % below them, 15 % above.

Shape legend: A anchors, R rows of a pack, K depths, D target hidden, H head hidden, I intermediate, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.data.features import store_bytes
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.files import require_disk
from headstart.heads.targets.locate import decoder_layers, text_decoder
from headstart.heads.targets.target import Target
from headstart.train.config import TrainConfig
from headstart.train.flops import step_flops
from headstart.train.optim import Budget
from headstart.train.stream import busy_share

GIB = 2**30
#: the device's own context and libraries
CONTEXT_BYTES = 1 * GIB
#: allocator: blocks that are free but too small
FRAGMENTATION = 0.04
#: part of a card's matrix-product speed that training reaches (0.50 … 0.75 in docs/results/train_speed.json)
UTILISATION = 0.6
#: FLOP/s of an H100 or H200 in bfloat16 (780 … 805e12 measured)
CARD_FLOPS = 780e12
#: rows of one chunk of the target's logits, and bytes per logit of it (compute dtype and float32)
LOGIT_ROWS, LOGIT_BYTES = 4096, 6


@dataclass(frozen=True)
class Layout:
    """How a run is spread, and the settings that change what it needs.

    Attributes:
        ranks, ranks_per_node: processes in all and on one machine.
        cards: cards that one process spreads the target's layers over, under device_map.
        parallel: the head's (train.parallel, resolved). target_parallel: none | fsdp2 | device_map.
        shard_ranks: ranks that share one target under fsdp2.
        pack_tokens: rows of a pack. accumulation: packs of a step over all ranks.
        supervised: part of the rows that is an anchor.
        half: bfloat16 compute (2 bytes a number) instead of float32.
    """

    ranks: int = 1
    ranks_per_node: int = 1
    cards: int = 1
    parallel: str = "replicated"
    target_parallel: str = "none"
    shard_ranks: int | None = None
    pack_tokens: int = 4096
    accumulation: int = 1
    supervised: float = 1.0
    half: bool = True
    activation_checkpointing: bool = False
    features: str = "online"

    @property
    def parts(self) -> int:
        """Cards that share one target."""
        if self.target_parallel == "fsdp2":
            return self.shard_ranks or self.ranks_per_node
        return self.cards if self.target_parallel == "device_map" else 1

    @property
    def head_parts(self) -> int:
        return 1 if self.parallel == "replicated" else self.ranks


@dataclass
class Plan:
    """What `headstart plan` prints (bytes unless the name says otherwise).

    Attributes:
        memory: component → bytes on one rank; phases that follow one another count once (`peak`).
        host: pinned host memory of rank 0 for checkpoints (weights, two moments) and two best heads.
        steps: optimiser steps, None when only a clock ends the run.
        hours: at the tokens/s given, None without.
        notes: what was assumed.
    """

    layout: Layout
    memory: dict[str, int]
    peak: int
    host: int
    disk: dict[str, int]
    tokens_per_step: float
    steps: int | None
    hours: float | None
    device_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.device_bytes is None or self.peak <= self.device_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def parameter_bytes(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter], bytes_each: int | None = None) -> int:
    unique = {id(p): p for p in parameters}.values()
    return sum(p.numel() * (bytes_each or p.element_size()) for p in unique)


def target_memory(target: Target, head: Head, layout: Layout) -> dict[str, int]:
    """Bytes of one rank's part of the target."""
    size = target.dtype.itemsize
    model, dims = target.model, target.dims
    everything = parameter_bytes(model.parameters(), size)
    if layout.target_parallel == "none":
        return {"target weights": everything}
    layers = list(decoder_layers(model))
    inside = sum(parameter_bytes(layer.parameters(), size) for layer in layers)
    largest = max(parameter_bytes(layer.parameters(), size) for layer in layers)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    matrix = dims.vocab_size * dims.hidden_size * size
    outside = everything - inside - (0 if tied else matrix)
    if layout.target_parallel == "device_map":
        return {"target weights": ceil(inside / layout.parts) + outside + (0 if tied else matrix)}
    rows = head.draft_vocab_size or dims.vocab_size
    output = 0 if tied else ceil(matrix / layout.parts) + rows * dims.hidden_size * size
    return {"target weights": ceil(inside / layout.parts) + outside + output, "target layers gathered": 2 * largest}


def target_activations(target: Target, head: Head, layout: Layout) -> int:
    """Peak of one feature forward: one layer's activations, the streams kept, a chunk of logits."""
    dims, size = target.dims, target.dtype.itemsize
    tokens = min(layout.pack_tokens, target.max_forward_tokens)
    heads = (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim
    layer = tokens * (4 * dims.hidden_size + heads + 3 * dims.intermediate_size) * size
    kept = tokens * (len(head.spec.layer_ids) + 1) * dims.hidden_size * size
    logits = min(tokens, LOGIT_ROWS) * dims.vocab_size * LOGIT_BYTES
    return max(layer, logits) + kept


def head_memory(head: Head, layout: Layout) -> dict[str, int]:
    """Bytes of the head's weights, gradients and moments on one rank."""
    parts, sharded = layout.head_parts, layout.parallel
    trained = head.trained_parameters()
    whole = parameter_bytes(head.parameters(), 4)
    found = {
        "head weights": ceil(whole / parts) if sharded in ("fsdp2", "zero3") else whole,
        "gradients": ceil(4 * trained / parts),
        "optimiser moments": ceil(8 * trained / parts),
    }
    if sharded in ("fsdp2", "zero3"):
        found["head gathered"] = whole
    if sharded != "replicated":  # where weights are gathered too, the collectives' flat copies of them as well
        found["gradients before they are shared"] = (4 if sharded == "zero2" else 8) * trained
    if sharded == "zero3":  # master weights, flat gradients and the step's temporaries: 16 bytes a parameter
        found["DeepSpeed's own copies"] = ceil(16 * trained / parts)
    if layout.half:
        found["half-precision weights"] = 2 * trained
    return found


def head_activations(head: Head, layout: Layout) -> int:
    """Activations of one pack's loss and backward (see the formula at the top)."""
    rows, anchors = layout.pack_tokens, layout.pack_tokens * layout.supervised
    return int((2 if layout.half else 4) * head.kept_numbers(rows, anchors, layout.activation_checkpointing))


def memory_of(target: Target, head: Head, layout: Layout) -> tuple[dict[str, int], int]:
    """(component → bytes, peak) of one rank; the target's forward and the head's pass do not overlap."""
    size = target.dtype.itemsize
    packs = max(1, ceil(layout.accumulation / layout.ranks))
    features = layout.pack_tokens * (len(head.spec.layer_ids) + 1) * target.dims.hidden_size * size
    steady = {
        **target_memory(target, head, layout),
        **head_memory(head, layout),
        "features": features * (packs + 1),  # a captured step copies its pack into fixed memory
    }
    phases = {
        "target activations": target_activations(target, head, layout),
        "head activations": head_activations(head, layout),
    }
    peak = int((sum(steady.values()) + max(phases.values())) * (1 + FRAGMENTATION)) + CONTEXT_BYTES
    return {**steady, **phases, "context": CONTEXT_BYTES}, peak


def expected_rate(target: Target, head: Head, layout: Layout, card_flops: float) -> float:
    """Tokens/s of the whole launch that arithmetic leads to expect, at UTILISATION of `card_flops` on every busy card.

    Ranks without a pack wait for the others (busy_share); a process with the layers over many cards uses one at a time.

    Args:
        card_flops: FLOP/s of one card in large matrix products.
    """
    rows, anchors = layout.pack_tokens, round(layout.pack_tokens * layout.supervised)
    counts = [max(min(anchors, rows - 1) - depth, 0) for depth in range(1, head.depth + 1)]  # of one document
    live = 0
    if layout.features == "online":
        live = sum(p.numel() for p in text_decoder(target.model).parameters()) - target.embed_VD.numel()
    busy = layout.ranks * busy_share(layout.accumulation, layout.ranks)
    return busy * rows * UTILISATION * card_flops / step_flops(head, rows, counts, live)


def disk_of(target: Target, head: Head, config: TrainConfig, layout: Layout, steps: int | None, tokens: int) -> dict:
    """Bytes on disk: checkpoints kept and the one being written, the best head, the exported one, stored features."""
    weights = parameter_bytes(head.parameters(), 4)
    periodic = ceil((steps or 0) / config.save_every) if config.save_every else 0
    kept = min(config.keep, periodic + 1) if config.keep else periodic + 1
    found = {"checkpoints": (kept + 1) * 3 * weights, "best and final head": 2 * weights}
    if layout.features == "stored":
        found["features"] = store_bytes(tokens, target.dims.hidden_size, len(head.spec.layer_ids), target.dtype)
    return found


def make_plan(
    target: Target,
    head: Head,
    config: TrainConfig,
    layout: Layout,
    packs_per_epoch: float,
    tokens_per_epoch: int,
    tokens_per_s: float | None = None,
    device_bytes: int | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Count. Nothing is loaded: `target` and `head` may be on the meta device.

    Args:
        packs_per_epoch, tokens_per_epoch: of the training data.
        tokens_per_s: of the whole launch, measured, stated or expected (expected_rate).
        device_bytes: memory of one card.
    """
    memory, peak = memory_of(target, head, layout)
    packs = None if config.epochs is None else max(1, round(config.epochs * packs_per_epoch))
    steps = Budget.of(config, packs).steps
    tokens_per_step = tokens_per_epoch / max(packs_per_epoch, 1) * config.accumulation
    hours = None if steps is None or not tokens_per_s else steps * tokens_per_step / tokens_per_s / 3600
    if config.max_seconds is not None:
        hours = min(hours or float("inf"), config.max_seconds / 3600)
    disk = disk_of(target, head, config, layout, steps, tokens_per_epoch)
    host = 5 * parameter_bytes(head.parameters(), 4)
    return Plan(layout, memory, peak, host, disk, tokens_per_step, steps, hours, device_bytes, list(notes))


def remedies(layout: Layout, head: Head) -> Iterator[tuple[str, Layout]]:
    """Changes that lower the peak, cheapest first, each on top of the ones before it."""
    if head.draft_layers and not layout.activation_checkpointing:
        layout = replace(layout, activation_checkpointing=True)
        yield "train.activation_checkpointing=true", layout
    if layout.ranks_per_node > 1 and layout.target_parallel == "none":
        layout = replace(layout, target_parallel="fsdp2")
        yield "target.parallel=fsdp2", layout
    if layout.ranks > 1 and layout.parallel == "replicated":
        layout = replace(layout, parallel="fsdp2")
        yield "train.parallel=fsdp2", layout
    while layout.pack_tokens > 1024:
        factor = 2
        layout = replace(layout, pack_tokens=layout.pack_tokens // factor, accumulation=layout.accumulation * factor)
        yield f"data.pack_tokens={layout.pack_tokens} train.accumulation={layout.accumulation}", layout
    # the features of a rank's packs of a window are held together
    while (packs := ceil(layout.accumulation / layout.ranks)) > 1:
        layout = replace(layout, accumulation=ceil(packs / 2) * layout.ranks)
        yield f"train.accumulation={layout.accumulation}", layout


def require_fit(plan: Plan, target: Target, head: Head, run_dir: Path) -> None:
    """Raises: ConfigError when a card cannot hold the run, naming what to change; StorageError when the disk cannot."""
    if not plan.fits and plan.device_bytes is not None:
        found = f"{plan.peak / GIB:.1f} GiB per rank, and a card has {plan.device_bytes / GIB:.1f} GiB"
        changes: dict[str, str] = {}
        for change, layout in remedies(plan.layout, head):
            changes |= dict(part.split("=", 1) for part in change.split())
            peak = memory_of(target, head, layout)[1]
            if peak <= plan.device_bytes:
                wanted = " ".join(f"{name}={value}" for name, value in changes.items())
                before, after = (at.pack_tokens * at.accumulation for at in (plan.layout, layout))
                smaller = "" if after >= before else f"; a step then has at most {after} tokens instead of {before}"
                raise ConfigError(f"plan: the run needs {found}. With {wanted} it needs {peak / GIB:.1f} GiB{smaller}.")
        parts = plan.layout.ranks_per_node
        while parts < 1024:
            parts *= 2
            layout = replace(
                plan.layout, ranks=parts, ranks_per_node=parts, shard_ranks=parts, target_parallel="fsdp2",
                parallel="fsdp2", activation_checkpointing=True, accumulation=max(plan.layout.accumulation, parts),
            )  # fmt: skip
            peak = memory_of(target, head, layout)[1]
            if peak <= plan.device_bytes:
                raise ConfigError(
                    f"plan: the run needs {found}. With {parts} ranks, target.parallel=fsdp2 "
                    f"target.shard_ranks={parts} train.parallel=fsdp2 train.activation_checkpointing=true "
                    f"train.accumulation={layout.accumulation} it needs {peak / GIB:.1f} GiB."
                )
        raise ConfigError(
            f"plan: the run needs {found}. No number of ranks makes it fit: lower data.pack_tokens "
            "and train.accumulation."
        )
    require_disk(run_dir, sum(plan.disk.values()), "the run (checkpoints, heads, features)")


def local_device_bytes() -> int | None:
    """Memory of the smallest GPU here, None without one."""
    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
