"""The target's part of an export: a tuned target is written beside the heads, as a whole model or as its adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.heads.files import delete, require_disk
from headstart.heads.formats import ExportConfig
from headstart.heads.formats.hub import published_target
from headstart.heads.formats.sidecar import hub_name
from headstart.heads.numerics import DTYPES
from headstart.heads.published_names import name_of_target
from headstart.heads.targets.target import Target
from headstart.heads.targets.tuned import (
    ADAPTER,
    TUNED_TARGET,
    Adapter,
    adapter_of_head,
    copy_adapter,
    rank_of,
    read_adapter,
    save_tuned,
    tuned_bytes,
)


@dataclass(frozen=True)
class TunedExport:
    """What an export writes besides the heads.

    Attributes:
        adapter: of the tuned target; None where the target is none, or its adapter's files are not here.
        merged: whether the target is written as a whole model as well.
        hub: repository of the published tuned target; None where it is not published.
    """

    target: Target
    adapter: Adapter | None
    merged: bool
    dtype: torch.dtype
    out: Path
    hub: str | None

    @classmethod
    def of(cls, target: Target, head: Path, config: ExportConfig, out: Path) -> TunedExport:
        """Args: head: the saved head's directory, beside which an adapter may lie."""
        merged = target.merged_adapter
        place = None if merged is None else merged.directory or adapter_of_head(head)
        # float32 is what a processor calculates in: the files need no more than the recipe asks for
        dtype = DTYPES[config.dtype] if target.dtype == torch.float32 else target.dtype
        hub = None if config.push_to_hub is None else published_target(config.push_to_hub)
        adapter = None if place is None else read_adapter(place)
        return cls(target, adapter, config.adapter == "merged", dtype, out, hub)

    def facts(self) -> dict[str, Any]:
        """What headstart.json says about the target besides its fingerprint: see formats/launch.py."""
        if self.adapter is None:
            return {}
        served = {"served_as": self.hub or TUNED_TARGET} if self.merged else {}
        return {**served, "adapter_rank": rank_of(self.adapter)}

    def write(self, say: Callable[[str], None]) -> None:
        """Write `target` and `adapter` into the export; what an earlier export has left there goes."""
        for name in (TUNED_TARGET, ADAPTER):
            delete(self.out / name)
        merged_adapter = self.target.merged_adapter
        if self.adapter is None or merged_adapter is None:
            return
        name = self.target.config.name
        base = hub_name({"name": name})
        copy_adapter(self.adapter, self.out / ADAPTER, base or name_of_target(name))
        say(f"the adapter of the tuned target is in {self.out / ADAPTER}")
        if self.merged:
            require_disk(self.out, tuned_bytes(self.target.model, self.dtype) + (64 << 20), "the tuned target")
            place = self.out / TUNED_TARGET
            save_tuned(self.target.model, self.target.tokenizer, place, self.dtype, merged_adapter.mark(base))
            say(f"the tuned target is in {place} ({str(self.dtype).removeprefix('torch.')})")
