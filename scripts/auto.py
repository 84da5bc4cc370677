"""Settings that are `auto` because they depend on the memory of the device: chosen here, once, before a run starts.

With `data.pack_tokens=auto` a step has the tokens of `train.accumulation` packs of PACKS[0]. Packs are as large as the
memory allows, and a step has as many more of them as they are smaller, so that it learns from as many tokens on every
device. Where no pack fits otherwise, activations are computed again (`train.activation_checkpointing`).

A run keeps its choice in a file. It goes on with the same packs, whatever is free then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headstart import identity
from headstart.fit import in_dtype, run_layout
from headstart.heads.base import Head
from headstart.heads.errors import DataError
from headstart.heads.files import read_json, write_json
from headstart.heads.targets.load import resolve_device, weightless_target
from headstart.heads.targets.target import Target
from headstart.recipes.schema import Recipe
from headstart.refusals import planned_training
from headstart.train.plan import GIB, Layout, local_device_bytes, memory_of
from headstart.train.sharing.distributed import gather_objects, on_main

#: sizes of packs that are tried, the largest first; those below LEAST_GPU_PACK only on a CPU
PACKS, LEAST_GPU_PACK = (16384, 8192, 4096, 2048, 1024, 512, 256), 1024
#: share of the device's memory that may be planned. A GPU's is the run's alone, and a peak may be a tenth above its
#: plan; other programs need a machine's too
GPU_SHARE, HOST_SHARE = 0.88, 0.75
#: file of a run that holds what was chosen
CHOSEN = "data/auto.json"


@dataclass(frozen=True)
class Chosen:
    """What was chosen for `auto`.

    Attributes:
        peak: bytes of the plan with these settings.
        memory: bytes of the device, or free on the machine; None = not known.
        kept: whether an earlier command of the run chose it.
    """

    pack_tokens: int
    accumulation: int
    activation_checkpointing: bool
    peak: int
    memory: int | None
    kept: bool = False

    def into(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings."""
        train = replace(
            recipe.train, accumulation=self.accumulation, activation_checkpointing=self.activation_checkpointing
        )
        return replace(recipe, data=replace(recipe.data, pack_tokens=self.pack_tokens), train=train)

    def settings(self) -> str:
        recomputed = " train.activation_checkpointing=true" if self.activation_checkpointing else ""
        return f"data.pack_tokens={self.pack_tokens} train.accumulation={self.accumulation}{recomputed}"

    def describe(self) -> str:
        if self.kept:
            return f"auto: {self.settings()}, as when this run began"
        return f"auto: {self.settings()}" + ("" if self.memory is None else f", for {self.memory / GIB:.1f} GiB")

    def explain(self, refusal: str, recipe: Recipe) -> str:
        """The message of a run that does not fit with these settings. Args: refusal: what the plan says."""
        if not self.kept or self.memory is None:
            return f"{refusal} (data.pack_tokens=auto chose {self.settings()})"
        return (
            f"{refusal} The run in {recipe.run_dir} began with {self.settings()}, where {self.memory / GIB:.1f} GiB "
            "were there, and keeps these packs when it goes on: continue there, or free memory; train.resume=false "
            "trains anew with packs that fit here"
        )


def is_auto(recipe: Recipe) -> bool:
    """Whether the recipe leaves settings open."""
    return recipe.data.pack_tokens == "auto"


def choose(
    recipe: Recipe, target: Target, device: torch.device, memory: int | None, ranks: int = 1, node_ranks: int = 1,
    cards: int = 1,
) -> Chosen:  # fmt: skip
    """The largest packs whose plan fits `memory` bytes of each rank's device; the smallest where none does, and the
    largest of all where the memory is not known.

    The tokens of the data are not counted: they are not known before it is read.

    Args: target: without weights. ranks, node_ranks, cards: see train.plan.Layout.
    """
    in_dtype(target, recipe, device)
    share = HOST_SHARE if device.type == "cpu" else GPU_SHARE
    heads = {recipe.train.activation_checkpointing: planned_training(_sized(recipe, PACKS[0]), target)}
    tried = None
    for sized in _candidates(recipe, device, ranks, next(iter(heads.values())).recomputable):
        recompute = sized.train.activation_checkpointing
        if recompute not in heads:
            heads[recompute] = planned_training(sized, target)
        layout = run_layout(sized, device, ranks, node_ranks, cards, 1.0, 0)
        peak = memory_of(target, heads[recompute], layout)[1]
        tried = Chosen(sized.data.pack_size, sized.train.accumulation, recompute, peak, memory)
        if memory is None or peak <= share * memory:
            break
    assert tried is not None
    return tried


def _candidates(recipe: Recipe, device: torch.device, ranks: int, recomputable: bool) -> Iterator[Recipe]:
    """The recipe with every size of a pack that is tried; where activations can be computed again, once more so."""
    given = recipe.train.activation_checkpointing
    for recompute in dict.fromkeys((given, given or recomputable)):
        for size in PACKS:
            packs = recipe.train.accumulation * (PACKS[0] // size)
            small = size < LEAST_GPU_PACK and device.type != "cpu"
            # every rank needs a pack of its own
            if small or (packs < ranks and size > LEAST_GPU_PACK):
                continue
            sized = _sized(recipe, size)
            yield replace(sized, train=replace(sized.train, accumulation=packs, activation_checkpointing=recompute))


def _sized(recipe: Recipe, size: int) -> Recipe:
    return replace(recipe, data=replace(recipe.data, pack_tokens=size))


def held_or_live(recipe: Recipe, target: Target, tokens: int) -> str:
    """What `data.features=auto` means for one process on this machine: memory or online.

    Args: target: without weights. tokens: of the data.
    """
    device = resolve_device(recipe.target.device)
    in_dtype(target, recipe, device)
    layout = run_layout(recipe, device, 1, 1, 1, 1.0, tokens)
    return features_within(recipe, target, planned_training(recipe, target), layout, local_device_bytes(device))


def features_within(recipe: Recipe, target: Target, head: Head, layout: Layout, memory: int | None) -> str:
    """The same for a plan. Args: layout: of the recipe, with the tokens of the data; 0 = not known."""
    lone = layout.ranks == 1 and layout.target_parallel == "none" and not recipe.joint.enabled
    if not lone or head.spec.tokens_alone or not layout.tokens or memory is None:
        return "online"
    peak = memory_of(target, head, replace(layout, features="memory"))[1]
    return "memory" if peak <= (HOST_SHARE if layout.host else GPU_SHARE) * memory else "online"


def settled_here(recipe: Recipe) -> tuple[Recipe, tuple[Recipe, Chosen] | None]:
    """(the recipe for one process on this machine; the recipe as given and what was chosen, None for no `auto`)."""
    if not is_auto(recipe):
        return recipe, None
    if (chosen := kept(recipe)) is None:
        device = resolve_device(recipe.target.device)
        cards = torch.cuda.device_count() if recipe.target.parallel == "device_map" else 1
        target = weightless_target(recipe.target)
        chosen = choose(recipe, target, device, local_device_bytes(device), cards=max(cards, 1))
    return chosen.into(recipe), (recipe, chosen)


def settled_on_ranks(
    recipe: Recipe, device: torch.device, ranks: int, node_ranks: int
) -> tuple[Recipe, tuple[Recipe, Chosen] | None]:
    """The same for the ranks of a launch, which call it together: packs that fit the smallest of their devices."""
    if not is_auto(recipe):
        return recipe, None
    memory = min(gather_objects(_rank_bytes(device, node_ranks)))

    def choice() -> Chosen:
        return kept(recipe) or choose(recipe, weightless_target(recipe.target), device, memory, ranks, node_ranks)

    chosen = on_main(choice)
    return chosen.into(recipe), (recipe, chosen)


def _rank_bytes(device: torch.device, node_ranks: int) -> int:
    """Memory that one rank may take. Ranks on a CPU share that of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return local_device_bytes(device) // node_ranks


def keep(asked: Recipe, chosen: Chosen) -> None:
    """Write what was chosen into the run's folder. Args: asked: the recipe as it was given, with `auto`."""
    write_json(
        Path(asked.run_dir) / CHOSEN,
        {
            "asked": _asked(asked),
            "pack_tokens": chosen.pack_tokens,
            "accumulation": chosen.accumulation,
            "activation_checkpointing": chosen.activation_checkpointing,
            "peak": chosen.peak,
            "memory": chosen.memory,
        },
    )


def kept(recipe: Recipe) -> Chosen | None:
    """What an earlier command of this run chose for the same head, target and settings; None where nothing is kept."""
    place = Path(recipe.run_dir) / CHOSEN
    if not recipe.train.resume or not place.is_file():
        return None
    try:
        found = read_json(place)
    except DataError:
        return None
    if not isinstance(found, dict) or found.get("asked") != _asked(recipe):
        return None
    names = ("pack_tokens", "accumulation", "peak", "memory")
    again = found.get("activation_checkpointing")
    if type(again) is not bool or not all(type(found.get(name)) is int and found[name] > 0 for name in names):
        return None
    return Chosen(
        found["pack_tokens"], found["accumulation"], again, found["peak"], found["memory"], kept=True
    )  # fmt: skip


def _asked(recipe: Recipe) -> dict[str, Any]:
    """What the choice depends on, besides the memory: JSON values."""
    return {
        "target": identity.of_target(recipe.target),
        "head": recipe.head.identity(),
        "accumulation": recipe.train.accumulation,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "joint": recipe.joint.enabled,
    }
