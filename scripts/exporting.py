"""What every export does: check its directory, compare serving with training, write, say what the engines will do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from headstart.console import Console
from headstart.heads.errors import ConfigError
from headstart.heads.formats import ExportConfig, export_head
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.launch import commented, launch_commands, why_doubt, why_tokens
from headstart.heads.formats.sidecar import ADDED, SIDECAR, notes
from headstart.heads.provenance import provenance
from headstart.heads.published import published
from headstart.heads.targets.target import Target
from headstart.heads.targets.tuned import adapter_of_head
from headstart.quality_guard import require_quality
from headstart.saved_heads import bound_head
from headstart.serving_check import compare_features, probe_sequences, require_parity
from headstart.tuned_export import TunedExport


def check_out(head: Path, out: Path) -> None:
    """Raises: ConfigError where an export to `out` would overwrite the head itself, or a model of somebody else."""
    if out.resolve() == head.resolve():
        raise ConfigError(f"--out {out}: that is the head itself; choose another directory")
    theirs = [path.name for name in ("config.json", "*.safetensors", "*.bin", "*.pt") for path in out.glob(name)]
    if theirs and not (out / SIDECAR).is_file():
        raise ConfigError(
            f"--out {out}: holds {theirs[0]} and no {SIDECAR}, so it is a model that Headstart did not export and "
            "would overwrite; choose another directory"
        )


def write_exports(
    directory: Path,
    target: Target,
    config: ExportConfig,
    out: Path,
    console: Console,
    recipe: dict[str, Any] | None,
    environment: Iterable[str],
    texts: list[list[int]] | None = None,
    begin: Callable[[], None] = lambda: None,
    exported_from: str | None = None,
    measured: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Export the head in `directory` for the engines of `config`, once serving sees what training saw.

    Args:
        recipe: the one that made the head, for the export's provenance; None where nobody knows it.
        environment: names of the variables that the settings read.
        texts: token ids to compare serving and training on; where there are none, random ones are taken.
        begin: called when nothing can be refused any more, before anything is written.
        exported_from: what the user calls a head that no run here has made.
        measured: whether drafting with this head pays (`measured_by`); None: what the head's headstart.json says.
    Returns: `exports` (engine → directory) and `checks` (engine → report).
    Raises: TargetError where serving would see other features, unless `config.force`; and where the adapter cost the
        target more than the recipe allows, or that was not measured (see require_quality).
    """
    head, side = bound_head(directory, target, torch.float32), notes(directory)
    if adapter_of_head(directory) is not None:
        require_quality(side.get("quality"), config.force)
    tuned = TunedExport.of(target, directory, config, out)
    with console.phase("comparing the features of serving and training", said=False):
        parity = compare_features(target, head.spec, texts or probe_sequences(target))
    require_parity(parity, config.force)
    console.say(f"serving sees the features that training saw: {parity.rows} tokens, worst {parity.worst:.2g}")
    origin: dict[str, Any] = {"exported_from": exported_from} if exported_from is not None else {}
    origin |= {**(side.get("provenance") or {}), **provenance(target.device), "recipe": recipe}
    origin |= {"target": {**target.fingerprint(), **tuned.facts()}, "serving_parity": parity.to_json()}
    origin |= {name: side.get(name) for name in ADDED} | ({} if measured is None else {"measured": measured})
    begin()
    with console.phase("saving the export", said=False):
        tuned.write(console.say)
        reports = export_head(head, out, config, published(origin, environment))
    return report_exports(reports, console, out)


def measured_by(report: dict[str, Any]) -> dict[str, Any] | None:
    """What headstart.json says about a head's evaluation. None where the report has no verdict on this head.

    Args: report: report.json.
    """
    verdict, on_cpu = report.get("verdict"), report.get("device_type") == "cpu"
    if verdict is None or report.get("synthetic") is not None or (verdict["speedup"] is None and not on_cpu):
        return None
    kept = {name: verdict[name] for name in ("pays", "tokens", "speedup", "speedup_ci95", "batch_size")}
    return {**kept, "device": report["device"], "on_cpu": on_cpu}


def report_exports(reports: dict[str, Any], console: Console, root: Path) -> dict[str, Any]:
    """Say what the checks of the exports say and how each engine is started; returns the command's result.

    Args: root: directory of the first export, in which a tuned target lies.
    """
    for report in reports.values():
        console.say(report.render())
        side = notes(Path(report.directory))
        commands = launch_commands(str(report.directory), side, report.served, str(root)) if side else {}
        doubt = why_doubt(side) if commands else None
        for engine, command in commands.items():
            said = f"{FORMATS[engine].title}:\n{commented(engine, side['type'], command, doubt)}"
            console.say(said, whole=True)
        if commands and (why := why_tokens(side)):
            console.say(why)
    return {
        "exports": {name: report.directory for name, report in reports.items()},
        "checks": {name: report.to_json() for name, report in reports.items()},
    }
