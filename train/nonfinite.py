"""What a run writes when a loss or a gradient is not finite: which samples, and which tensors are not finite.

nonfinite-step-N.json           samples, packs, learning rate, number of non-finite entries of every tensor
nonfinite-step-N.safetensors    the first bad pack as the head saw it: tokens, turns and features
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.heads.batch import FeatureBatch
from headstart.heads.files import write_json, write_safetensors
from headstart.train.sharing.distributed import gather_objects
from headstart.train.stream import Pack

#: most packs that are written; a run that skips steps may meet many bad ones
MOST_PACKS = 5


@dataclass(frozen=True)
class WindowSamples:
    """Which samples a window was made of, for the error that must name them.

    Attributes:
        step: of the window, 0-based. packs: of all ranks.
        own_ids: sample ids of this rank's packs, by the pack's place in the window.
    """

    step: int
    packs: list[Pack]
    own_ids: dict[int, tuple[str, ...]]


def bad_entries(named: dict[str, torch.Tensor]) -> dict[str, int]:
    """Number of non-finite entries of every tensor that has some."""
    counts = {n: int((~torch.isfinite(t)).sum()) for n, t in named.items() if t.is_floating_point() and t.numel()}
    return {name: count for name, count in counts.items() if count}


def bad_weights(head: nn.Module) -> dict[str, int]:
    """`bad_entries` of the parameters; where they are sharded, of this rank's part."""
    held = {name: getattr(p, "to_local", lambda p=p: p)() for name, p in head.named_parameters()}
    return bad_entries({name: weight.detach() for name, weight in held.items()})


def dump(
    flags: list[float],
    window: WindowSamples,
    rate: float,
    head: nn.Module,
    rank: int,
    run_dir: Path,
    fetch: Callable[[Pack], FeatureBatch | None],
) -> str:
    """Write the files for a window that is not finite. All ranks must call it.

    Args:
        flags: one per pack of the window, 1 where its loss is not finite; the last one is the gradient's.
        rate: learning rate.
        fetch: see Health.
    Returns: one sentence that names the step and the samples.
    """
    step, packs, mine = window.step, window.packs, window.own_ids
    bad = [place for place, flag in enumerate(flags[:-1]) if flag]
    what = "loss" if bad else "gradient"
    places = bad or list(range(len(packs)))
    features: dict[str, Any] = {}
    if places[0] in mine and (batch := fetch(packs[places[0]])) is not None:
        named = {n: t for n in ("hidden_RD", "streams_RkD") if (t := getattr(batch, n)) is not None}
        features = bad_entries(named)
        kept = {n: getattr(batch, n) for n in ("tokens_R", "turn_R", "position_R")} | named
        if len(list(run_dir.glob("nonfinite-*.safetensors"))) < MOST_PACKS:
            write_safetensors(run_dir / f"nonfinite-step-{step}.safetensors", kept)
    known: dict[int, tuple[str, ...]] = {}
    entries: dict[str, int] = {}
    for ids, counts in gather_objects((mine, features)):
        known |= ids
        entries |= counts
    names = [str(name) for p in places for name in (known.get(p) or packs[p].samples)]
    if rank == 0:
        record = {
            "step": step,
            "what": what,
            "sample_ids": names,
            "packs": [asdict(packs[p]) for p in places],
            "lr": rate,
            "nonfinite_features": entries,
            "nonfinite_weights": bad_weights(head),
        }
        write_json(run_dir / f"nonfinite-step-{step}.json", record)
    return f"non-finite {what} at step {step}, samples {', '.join(names)}."
