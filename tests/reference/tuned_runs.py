"""A run of joint training made by hand: a trained head, and beside it a random adapter of its target."""

from __future__ import annotations

from pathlib import Path

import torch

from headstart.heads.files import read_json, write_json
from headstart.heads.formats.sidecar import SIDECAR, seal
from headstart.heads.targets.adapter import LoraSettings, adapter_parameters, add_adapter, remove_adapter, save_adapter
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.heads.targets.tuned import ADAPTER, read_adapter, tuned_fingerprint


def save_random_adapter(target: Path, directory: Path, scale: float, rank: int = 4) -> None:
    """An adapter of the target in `directory` whose updates have about this size."""
    model = load_target(TargetConfig(str(target), device="cpu")).model
    add_adapter(model, LoraSettings(rank, 2.0 * rank, 0.0, ["q_proj", "down_proj"]), 0)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=noise))
    directory.mkdir(parents=True, exist_ok=True)
    save_adapter(model, directory, str(target))
    remove_adapter(model)


def tune_by_hand(head: Path, target: Path, scale: float) -> None:
    """Put an adapter beside a saved head, whose sidecar then says what joint training's says."""
    save_random_adapter(target, head / ADAPTER, scale)
    side = read_json(head / SIDECAR)
    side["target"] = tuned_fingerprint(side["target"], read_adapter(head / ADAPTER))
    write_json(head / SIDECAR, seal(side))
