"""What every export does: check the place, compare serving with training, say what the engines will do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from headstart.console import Console
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.files import read_json
from headstart.heads.formats import ExportConfig, export_head
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.launch import launch_commands, why_tokens
from headstart.heads.formats.sidecar import SIDECAR, notes
from headstart.heads.provenance import provenance
from headstart.heads.published import published
from headstart.heads.targets.target import Target
from headstart.saved_heads import bound_head, trained_otherwise
from headstart.serving_check import compare_features, probe_sequences, require_parity


def check_out(head: Path, out: Path) -> None:
    """Raises: ConfigError where an export to `out` would write over the head itself, or a model of somebody else."""
    if out.resolve() == head.resolve():
        raise ConfigError(f"--out {out}: that is the head itself; choose another directory")
    theirs = [path.name for name in ("config.json", "*.safetensors", "*.bin", "*.pt") for path in out.glob(name)]
    if theirs and not (out / SIDECAR).is_file():
        raise ConfigError(
            f"--out {out}: holds {theirs[0]} and no {SIDECAR}: a model that Headstart did not export and would write "
            "over; choose another directory"
        )


def prove_parity(target: Target, head: Head, texts: list[list[int]], force: bool, console: Console) -> dict[str, Any]:
    """Compare what serving sees with what training saw; returns the comparison for the export's provenance.

    Args:
        texts: token ids to compare on; where there are none, random ones are taken.
        force: export also where they differ.
    Raises: TargetError where they differ.
    """
    parity = compare_features(target, head.spec, texts or probe_sequences(target))
    require_parity(parity, force)
    console.say(f"serving sees the features that training saw: {parity.rows} tokens, worst {parity.worst:.2g}")
    return parity.to_json()


def export_other(
    name: str,
    directory: Path,
    target: Target,
    config: ExportConfig,
    out: Path,
    console: Console,
    environment: Iterable[str] = (),
) -> dict[str, Any]:
    """Export a head that no run here has made, or a run's for another engine.

    Args:
        name: what the user calls the head: a directory, or `user/name[@revision]`.
        directory: where it lies.
        environment: names of the variables that the settings read.
    Returns: `exports` (engine → directory) and `checks` (engine → report).
    Raises: TargetError when serving would see other features.
    """
    head = bound_head(directory, target, torch.float32)
    if warning := trained_otherwise(directory, target):
        console.say(warning)
    parity = prove_parity(target, head, [], config.force, console)
    side = read_json(directory / SIDECAR) if (directory / SIDECAR).is_file() else {}
    origin = {"exported_from": name, **(side.get("provenance") or {}), **provenance(target.device)}
    origin |= {"recipe": side.get("recipe"), "target": target.fingerprint(), "serving_parity": parity}
    origin["tuned"] = side.get("tuned")
    return report_exports(export_head(head, out, config, published(origin, environment)), console)


def report_exports(reports: dict[str, Any], console: Console) -> dict[str, Any]:
    """Say what the checks of the exports say and how each engine is started; returns the command's result."""
    for report in reports.values():
        console.say(report.render())
        side = notes(Path(report.directory))
        commands = launch_commands(str(report.directory), side, report.served) if side else {}
        for engine, command in commands.items():
            console.say(f"{FORMATS[engine].title}:\n{command}")
        if commands and (why := why_tokens(side)):
            console.say(why)
    return {
        "exports": {name: report.directory for name, report in reports.items()},
        "checks": {name: report.to_json() for name, report in reports.items()},
    }
