"""An estimate of what a run will take: memory per rank, steps, hours, disk; and what to change where it cannot fit.

It is made from the shapes of the models alone; nothing is loaded, and they may be on the meta device. What a training
pass keeps per row is the head's to say (Head.kept_numbers). The estimate of the peak is within a tenth of those
measured in docs/results/train_speed.json. With sharding it is at most 4 % below and 15 % above those in scaling.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.data.features import parameters_per_row, store_bytes
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.files import require_disk
from headstart.heads.host_memory import free_bytes, own_bytes
from headstart.heads.losses.fused import chunk_elements, chunk_rows
from headstart.heads.targets.load import require_present
from headstart.heads.targets.locate import decoder_layers
from headstart.heads.targets.quantised import held_bytes_of
from headstart.heads.targets.sizes import TargetSizes, widest_layer
from headstart.heads.targets.target import Target, forward_tokens
from headstart.heads.targets.tuned import tuned_bytes
from headstart.train.config import TrainConfig
from headstart.train.flops import step_flops
from headstart.train.optim import Budget, muon_matrices
from headstart.train.short_runs import check_steps
from headstart.train.stages import Stages
from headstart.train.stream import busy_share

GIB = 2**30
#: memory that the driver and its libraries take before anything is computed
CONTEXT_BYTES = 1 * GIB
#: part of the memory that the allocator cannot use, because free blocks are too small
FRAGMENTATION = 0.04
#: training's share of the speed of a card's large matrix products (0.50 … 0.75 in docs/results/train_speed.json)
UTILISATION = 0.6
#: FLOP/s of an H100 or H200 in bfloat16 (780 … 805e12 measured)
CARD_FLOPS = 780e12
#: the target's logits are made in chunks of so many rows; bytes per logit (compute dtype and float32)
LOGIT_ROWS, LOGIT_BYTES = 4096, 6
#: memory of Python with torch and transformers, before a model is loaded
PROCESS_BYTES = 430 << 20
#: tensors of the size of a chunk of logits that a loss holds at a time on a CPU (losses/fused.py)
HOST_LOSS_TENSORS = 8
#: bytes of a token of the tokenised data: ids, turns and what points to them
TOKEN_BYTES = 24


@dataclass(frozen=True)
class Layout:
    """How a run is spread, and the settings that change what it needs.

    Attributes:
        ranks, ranks_per_node: processes in all, and on one machine.
        cards: over which one process spreads the target's layers (target_parallel=device_map).
        parallel: how ranks share the head: replicated | fsdp2 | zero2 | zero3.
        target_parallel: how they share the target: none | fsdp2 | device_map.
        shard_ranks: ranks that share one target (target_parallel=fsdp2); None = those of a machine.
        pack_tokens: rows of a pack. accumulation: packs of a step, over all ranks.
        supervised: part of the rows that is supervised.
        half: computes in bfloat16 (2 bytes a number) instead of float32.
        exports_target: the run writes a tuned target as a whole model.
        host: computes on the CPU, in the memory that Python and the data take too.
        muon: Muon trains the head's inner matrices (train.optimizer).
        averages: the weights are averaged (train.average_decay).
        tokens: of the data, which is held in memory; under features=memory so are its features.
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
    exports_target: bool = False
    host: bool = False
    muon: bool = False
    averages: bool = False
    tokens: int = 0

    @property
    def device(self) -> torch.device:
        """What computes."""
        return torch.device("cpu" if self.host else "cuda")

    @property
    def cards_per_target(self) -> int:
        """Cards that share one copy of the target."""
        if self.target_parallel == "fsdp2":
            return self.shard_ranks or self.ranks_per_node
        return self.cards if self.target_parallel == "device_map" else 1

    @property
    def ranks_per_head(self) -> int:
        """Ranks that share one copy of the head."""
        return 1 if self.parallel == "replicated" else self.ranks


@dataclass
class Plan:
    """What `headstart plan` prints (bytes unless the name says otherwise).

    Attributes:
        memory: bytes on one rank by what they are for. Some are never needed at the same time.
        peak: bytes that one rank needs at most at the same time.
        host: pinned host memory of rank 0, for a checkpoint (weights, moments, averages) and two best heads.
        disk: bytes by what they are for.
        steps: optimiser steps; None when only a clock ends the run.
        hours: at the tokens/s that were given; None without.
        epochs: how often the run sees the data; None where only a clock ends it and no tokens/s were given.
        tokens_per_s: of the whole launch, as given.
        device_bytes: memory of one card; None = unknown, and everything fits.
        notes: what was assumed.
        target: how large the target is; None for a plan that was made without one.
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
    target: TargetSizes | None = None
    epochs: float | None = None
    tokens_per_s: float | None = None

    @property
    def fits(self) -> bool:
        return self.device_bytes is None or self.peak <= self.device_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def parameter_bytes(parameters: Iterable[nn.Parameter], bytes_each: int | None = None) -> int:
    """Bytes of parameters, each counted once. Args: bytes_each: bytes of one number; None = those of its dtype."""
    unique = {id(p): p for p in parameters}.values()
    return sum(p.numel() * (bytes_each or p.element_size()) for p in unique)


def target_memory(target: Target, head: Head, layout: Layout) -> dict[str, int]:
    """Bytes of one rank's part of the target, by what they are for."""
    number = target.dtype.itemsize
    model, dims = target.model, target.dims
    held = held_bytes_of(model, number, target.quantised)
    everything = held(model.parameters())
    if layout.target_parallel == "none":
        return {"target weights": everything}
    layer_bytes = [held(layer.parameters()) for layer in decoder_layers(model)]
    layers = sum(layer_bytes)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    output = 0 if tied else dims.vocab_size * dims.hidden_size * number  # the output matrix, where it is one of its own
    rest = everything - layers - output  # embeddings, norms
    own_layers = ceil(layers / layout.cards_per_target)
    if layout.target_parallel == "device_map":
        return {"target weights": own_layers + rest + output}
    if not tied:  # a shard of it, and the draft vocabulary's rows whole
        rows = head.draft_vocab_size or dims.vocab_size
        output = ceil(output / layout.cards_per_target) + rows * dims.hidden_size * number
    return {"target weights": own_layers + rest + output, "target layers gathered": 2 * max(layer_bytes)}


def target_activations(target: Target, head: Head, layout: Layout) -> int:
    """Bytes that one forward pass for features needs at most.

    One layer's activations or a chunk of logits, whichever is larger, and the hidden states that are kept for the head.
    """
    dims, number = target.dims, target.dtype.itemsize
    # features that are held are computed for as many tokens at a time as the target takes
    whole = layout.features == "memory" and layout.tokens
    tokens = min(layout.tokens if whole else layout.pack_tokens, forward_tokens(layout.host, dims.hidden_size))
    attention = (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim  # queries, keys, values
    plain = 4 * dims.hidden_size + attention + 3 * dims.intermediate_size
    layer = tokens * max(plain, widest_layer(target.model)) * number
    kept = tokens * (len(head.spec.layer_ids) + 1) * dims.hidden_size * number
    rows = chunk_rows(min(tokens, LOGIT_ROWS), dims.vocab_size, layout.device)
    logits = rows * dims.vocab_size * (2 * 4 if layout.host else LOGIT_BYTES)
    return max(layer, logits) + kept


def moments_of(head: Head, layout: Layout) -> int:
    """Numbers that the optimiser keeps: two for each trained parameter, one for those of Muon."""
    moments, by_muon = 2 * head.trained_parameters(), muon_matrices(head) if layout.muon else set()
    return moments - sum(p.numel() for name, p in head.named_parameters() if name in by_muon)


def head_memory(head: Head, layout: Layout) -> dict[str, int]:
    """Bytes of the head's weights, gradients and moments on one rank, by what they are for."""
    ranks, kind = layout.ranks_per_head, layout.parallel
    gathers = kind in ("fsdp2", "zero3")  # weights are in shards too, and whole during a pass
    trained = head.trained_parameters()
    whole = parameter_bytes(head.parameters(), 4)
    memory = {
        "head weights": ceil(whole / ranks) if gathers else whole,
        "gradients": ceil(4 * trained / ranks),
        "optimiser moments": ceil(4 * moments_of(head, layout) / ranks),
    }
    if layout.averages:
        memory["averaged weights"] = ceil(4 * trained / ranks)
    if gathers:
        memory["head gathered"] = whole
    if kind != "replicated":  # where weights are gathered, the collectives need flat copies of them as well
        memory["gradients before they are shared"] = (4 if kind == "zero2" else 8) * trained
    if kind == "zero3":  # master weights, flat gradients and the step's temporaries: 16 bytes a parameter
        memory["DeepSpeed's own copies"] = ceil(16 * trained / ranks)
    if layout.half:
        memory["half-precision weights"] = 2 * head.copied_numbers()
    return memory


def head_activations(head: Head, layout: Layout) -> int:
    """Bytes that one pack's forward pass keeps for its backward pass."""
    rows = layout.pack_tokens
    anchors = head.chosen_anchors(rows, rows * layout.supervised)
    kept = head.kept_numbers(rows, anchors, layout.activation_checkpointing)
    if not layout.host:
        return int((2 if layout.half else 4) * kept)
    size = head.draft_vocab_size or head.dims.vocab_size
    logits = min(anchors * head.depth * size, chunk_elements(layout.device))
    return int((2 if layout.half else 4) * (kept - head.chunk_numbers(anchors)) + HOST_LOSS_TENSORS * 4 * logits)


def memory_of(target: Target, head: Head, layout: Layout) -> tuple[dict[str, int], int]:
    """(bytes by what they are for, peak) of one rank.

    The activations of the target and of the head are never there at the same time: the peak has the larger of the two.
    """
    packs = max(1, ceil(layout.accumulation / layout.ranks))
    streams = 0 if head.spec.tokens_alone else len(head.spec.layer_ids) + 1
    features = layout.pack_tokens * streams * target.dims.hidden_size * target.dtype.itemsize
    steady = {
        **target_memory(target, head, layout),
        **head_memory(head, layout),
        "features": features * (packs + 1),  # a captured step copies its pack into fixed memory
    }
    if layout.features == "memory" and not head.spec.tokens_alone:
        width = target.dims.hidden_size
        steady["features of all data"] = store_bytes(layout.tokens, width, len(head.spec.layer_ids), target.dtype)
    if layout.host:
        steady["tokens of all data"] = TOKEN_BYTES * layout.tokens
    phases = {
        "target activations": target_activations(target, head, layout),
        "head activations": head_activations(head, layout),
    }
    context = PROCESS_BYTES if layout.host else CONTEXT_BYTES
    peak = int((sum(steady.values()) + max(phases.values())) * (1 + FRAGMENTATION)) + context
    return {**steady, **phases, "context": context}, peak


def expected_rate(target: Target, head: Head, layout: Layout, card_flops: float) -> float:
    """Tokens/s to expect of the whole launch, from arithmetic alone: every busy card reaches UTILISATION of its speed.

    A rank without a pack waits for the others (busy_share). A process that spreads the target's layers over several
    cards (device_map) uses one of them at a time.

    Args:
        card_flops: FLOP/s of one card in large matrix products.
    """
    rows = layout.pack_tokens
    anchors = round(head.chosen_anchors(rows, rows * layout.supervised))
    # those of a pack that is one document: each depth has a row fewer
    counts = [max(min(anchors, rows - 1) - depth, 0) for depth in range(1, head.depth + 1)]
    live = layout.features == "online" and not head.spec.tokens_alone
    target_parameters = parameters_per_row(target) if live else 0
    busy = layout.ranks * busy_share(layout.accumulation, layout.ranks)
    return busy * rows * UTILISATION * card_flops / step_flops(head, rows, counts, target_parameters)


def disk_of(
    target: Target, head: Head, config: TrainConfig, layout: Layout, steps: int | None, tokens: int
) -> dict[str, int]:
    """Bytes on disk by what they are for.

    They are the checkpoints that are kept and the one being written (each holds weights, moments and averages), the
    best head and the final one, the features where they are stored, and the tuned target where it is exported.
    """
    weights = parameter_bytes(head.parameters(), 4)
    state = 4 * (moments_of(head, layout) + (head.trained_parameters() if layout.averages else 0))
    periodic = ceil((steps or 0) / config.save_every) if config.save_every else 0
    kept = min(config.keep, periodic + 1) if config.keep else periodic + 1
    disk = {"checkpoints": (kept + 1) * (weights + state), "best and final head": 2 * weights}
    if layout.features == "stored":
        disk["features"] = store_bytes(tokens, target.dims.hidden_size, len(head.spec.layer_ids), target.dtype)
    if layout.exports_target:
        disk["tuned target"] = tuned_bytes(target.model, target.dtype)
    return disk


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
    """The estimate for one run.

    Args:
        packs_per_epoch, tokens_per_epoch: of the training data.
        tokens_per_s: of the whole launch: measured, stated or expected (expected_rate).
        device_bytes: memory of one card.
        notes: what was assumed.
    Raises: ConfigError where the run has too few steps for its stages or settings.
    """
    memory, peak = memory_of(target, head, layout)
    packs = None if config.epochs is None else max(1, round(config.epochs * packs_per_epoch))
    budget = Budget.of(config, packs)
    check_steps(config, Stages(head.stages, budget))
    steps = budget.steps
    tokens_per_step = tokens_per_epoch / max(packs_per_epoch, 1) * config.accumulation
    hours = None if steps is None or not tokens_per_s else steps * tokens_per_step / tokens_per_s / 3600
    if config.max_seconds is not None:
        hours = min(hours or float("inf"), config.max_seconds / 3600)
    seen = [] if steps is None else [steps * tokens_per_step]
    if config.epochs is not None:  # the last step may be a part of one
        seen.append(config.epochs * tokens_per_epoch)
    if hours is not None and tokens_per_s:
        seen.append(hours * 3600 * tokens_per_s)
    epochs = min(seen) / tokens_per_epoch if seen and tokens_per_epoch else None
    disk = disk_of(target, head, config, layout, steps, tokens_per_epoch)
    state = moments_of(head, layout) + (head.trained_parameters() if layout.averages else 0)
    host = 3 * parameter_bytes(head.parameters(), 4) + 4 * state
    sizes = TargetSizes.of(target.model)
    return Plan(
        layout, memory, peak, host, disk, tokens_per_step, steps, hours, device_bytes, list(notes), sizes, epochs,
        tokens_per_s,
    )  # fmt: skip


def remedies(layout: Layout, head: Head) -> Iterator[tuple[str, Layout]]:
    """Settings that lower the peak, the cheapest first. Each layout has all changes up to its own."""
    if head.recomputable and not layout.activation_checkpointing:
        layout = replace(layout, activation_checkpointing=True)
        yield "train.activation_checkpointing=true", layout
    # a head that runs the target itself needs all of it
    if layout.ranks_per_node > 1 and layout.target_parallel == "none" and not head.spec.tokens_alone:
        layout = replace(layout, target_parallel="fsdp2")
        yield "target.parallel=fsdp2", layout
    if layout.ranks > 1 and layout.parallel == "replicated" and head.shardable:
        layout = replace(layout, parallel="fsdp2")
        yield "train.parallel=fsdp2", layout
    if layout.features == "memory":
        layout = replace(layout, features="online")
        yield "data.features=online", layout
    while layout.pack_tokens > (256 if layout.host else 1024):
        layout = replace(layout, pack_tokens=layout.pack_tokens // 2, accumulation=layout.accumulation * 2)
        yield f"data.pack_tokens={layout.pack_tokens} train.accumulation={layout.accumulation}", layout
    # a rank holds the features of all its packs of a step at the same time
    while (packs := ceil(layout.accumulation / layout.ranks)) > 1:
        layout = replace(layout, accumulation=ceil(packs / 2) * layout.ranks)
        yield f"train.accumulation={layout.accumulation}", layout


def require_fit(plan: Plan, target: Target, head: Head, run_dir: Path) -> None:
    """Raises: ConfigError when a card cannot hold the run, naming what to change; StorageError when the disk cannot."""
    if not plan.fits and plan.device_bytes is not None:
        require_memory(plan.layout, plan.peak, plan.device_bytes, target, head)
    require_disk(run_dir, sum(plan.disk.values()), "the run (checkpoints, heads, features)")


def require_memory(layout: Layout, peak: int, device_bytes: int, target: Target, head: Head) -> None:
    """Raises: ConfigError where a rank's peak is more than the device has, naming what to change.

    Args:
        device_bytes: memory of one card; on a CPU what is free, and what this process holds.
    """
    if peak <= device_bytes:
        return
    fewer = _smaller_settings(layout, device_bytes, target, head)
    if layout.host:
        needs = f"{peak / GIB:.1f} GiB of memory, and {device_bytes / GIB:.1f} GiB are free on this machine"
        change = fewer or "No setting makes it fit: take a smaller target or head, or a machine with more memory."
    else:
        needs = f"{peak / GIB:.1f} GiB per rank, and a card has {device_bytes / GIB:.1f} GiB"
        more = _more_ranks(layout, device_bytes, target, head)
        change = fewer or more or "No number of ranks makes it fit: lower data.pack_tokens and train.accumulation."
    raise ConfigError(f"plan: the run needs {needs}. {change}")


def _smaller_settings(planned: Layout, device_bytes: int, target: Target, head: Head) -> str | None:
    """A sentence that names the settings with which the run fits on as many ranks, None where none are known."""
    changes: dict[str, str] = {}
    for change, layout in remedies(planned, head):
        changes |= dict(setting.split("=", 1) for setting in change.split())
        peak = memory_of(target, head, layout)[1]
        if peak <= device_bytes:
            wanted = " ".join(f"{name}={value}" for name, value in changes.items())
            before, after = (at.pack_tokens * at.accumulation for at in (planned, layout))
            smaller = "" if after >= before else f"; a step then has at most {after} tokens instead of {before}"
            return f"With {wanted} it needs {peak / GIB:.1f} GiB{smaller}."
    return None


def _more_ranks(planned: Layout, device_bytes: int, target: Target, head: Head) -> str | None:
    """A sentence that names the number of ranks on which the run fits with everything sharded, None where none is, or
    where head or target cannot be sharded."""
    if head.spec.tokens_alone or not head.shardable:
        return None
    ranks = planned.ranks_per_node
    while ranks < 1024:
        ranks *= 2
        layout = replace(
            planned, ranks=ranks, ranks_per_node=ranks, shard_ranks=ranks, target_parallel="fsdp2",
            parallel="fsdp2", activation_checkpointing=head.recomputable,
            accumulation=max(planned.accumulation, ranks),
        )  # fmt: skip
        peak = memory_of(target, head, layout)[1]
        if peak <= device_bytes:
            recompute = "train.activation_checkpointing=true " * layout.activation_checkpointing
            return (
                f"With {ranks} ranks, target.parallel=fsdp2 target.shard_ranks={ranks} train.parallel=fsdp2 "
                f"{recompute}train.accumulation={layout.accumulation} it needs {peak / GIB:.1f} GiB."
            )
    return None


def local_device_bytes(device: torch.device) -> int:
    """Memory that a run here may take: that of the smallest GPU; on a CPU what is free, and what this process holds.

    Raises: ConfigError where the device is a GPU and none is there.
    """
    require_present(device)
    if device.type != "cuda":
        return free_bytes() + own_bytes()
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
