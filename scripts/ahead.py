"""What measuring, tuning or exporting a saved head would refuse, asked before the target's weights are loaded.

The target and the head are built on the meta device from their configs and the head's file header. The questions are
the checks of the steps themselves, as in refusals.py, which asks them of a head that is yet to be trained.
"""

from __future__ import annotations

from pathlib import Path

import torch

from headstart.eval.config import EvalConfig, TuneConfig
from headstart.eval.measuring.benchmark import check_dtype, check_evaluation
from headstart.eval.tuning.tune import check_tuning
from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.families import build_head
from headstart.heads.formats.config import ExportConfig
from headstart.heads.formats.export import check_ahead
from headstart.heads.formats.loading import check_shapes, map_head, skeleton
from headstart.heads.targets.load import present_device, resolve_device, resolve_dtype, weightless_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.saved_heads import untrained_config


def shapes_of_head(directory: Path, target: Target) -> Head:
    """A saved head on the meta device, bound to the target's ends.

    Raises: FormatError for a directory that `load_head` would refuse by its names, shapes or settings.
    """
    raw = open_checkpoint(directory)
    mapped, config = map_head(raw, target.dims)
    check_shapes(raw, mapped, config)
    head = skeleton(config, mapped.dims, str(raw.directory))
    head.bind(target.ends)
    return head


def ask_evaluation(
    target: TargetConfig,
    directory: Path | None,
    config: EvalConfig,
    untrained: bool = False,
    head_config: HeadConfig | None = None,
) -> None:
    """Whether the head in `directory` (None: no head) can be measured on the target as `config` says.

    Args:
        untrained: a head with random weights drafts, and acceptance is synthetic.
        head_config: of that head; None = as `untrained_head` chooses.
    Raises: HeadstartError as the evaluation would.
    """
    present_device(target.device)
    planned = weightless_target(target)
    head = shapes_of_head(directory, planned) if directory is not None else None
    if head is None and untrained:
        with torch.device("meta"):
            head = build_head(untrained_config(head_config, planned), planned.dims)
    check_dtype(config, resolve_dtype(target.dtype, resolve_device(target.device)))
    check_evaluation(planned, head, config)


def ask_tuning(target: TargetConfig, directory: Path | None, config: EvalConfig, search: TuneConfig) -> None:
    """Whether the head in `directory` (None: no head) can be tuned. Raises: HeadstartError as tuning would."""
    present_device(target.device)
    planned = weightless_target(target)
    check_tuning(planned, shapes_of_head(directory, planned) if directory is not None else None, config, search)


def ask_exporting(target: TargetConfig, directory: Path, config: ExportConfig) -> None:
    """Whether the engines of `config` can be exported to. Raises: HeadstartError as the export would."""
    present_device(target.device)
    planned = weightless_target(target)
    origin = {"target": {"name": target.name, "revision": target.revision}}
    check_ahead(shapes_of_head(directory, planned), config, origin)
