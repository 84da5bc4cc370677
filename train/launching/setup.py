"""How a run starts: its process group, whether its steps are captured, whether activations are computed again."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.targets.sharded import shard_size
from headstart.heads.targets.target import TargetConfig
from headstart.train.config import TrainConfig
from headstart.train.launching.rendezvous import StartupSignals, check_launch, meet
from headstart.train.sharing.parallel import Parallel, Replicated, Sharded, check_kind
from headstart.train.step import autocast_dtype


def make_accelerator(device: torch.device | str, startup: StartupSignals | None = None) -> Accelerator:
    """Join the process group of this launch, on CPUs or GPUs.

    accelerate's own mixed precision is off: master weights are float32, and autocast happens inside the loss.

    Args:
        startup: see rendezvous.meet.
    Raises: ConfigError when ranks do not come, or come and are not in the group.
    """
    store = meet(startup=startup)
    # ranks may wait for hours while rank 0 distils or measures τ; watch.py notices a lost rank
    group = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    cpu = torch.device(device).type == "cpu"
    try:
        accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[group])
    except ImportError as error:
        raise ConfigError(
            f"launch: the accelerate configuration needs a package that is not installed ({error}); install it "
            "(DeepSpeed: `pip install deepspeed`), or launch with recipes/accelerate/fsdp2.yaml"
        ) from error
    del store
    check_launch(accelerator.num_processes)
    return accelerator


def check_layout(kind: str, config: TrainConfig, target: TargetConfig, ranks: int, node_ranks: int) -> None:
    """Raise ConfigError where this number of ranks cannot share head and target as asked. Nothing is loaded for it.

    Args:
        kind: how ranks share the head; see resolve_kind. auto = the launch decides; no kind's rules are checked then.
        node_ranks: ranks of one machine.
    """
    check_kind(kind, config, ranks)
    if target.parallel == "fsdp2":
        shard_size(target.shard_ranks, ranks, node_ranks)
    if target.parallel == "device_map" and ranks > 1:
        raise ConfigError(
            f"target.parallel: found device_map with {ranks} ranks, expected one process, which spreads the layers "
            "over all GPUs of its machine: train with `headstart train`, or set target.parallel=fsdp2"
        )


def recompute_activations(head: Head) -> None:
    """Switch `train.activation_checkpointing` on. Raises ConfigError for a head without anything to recompute."""
    if not head.recomputable:
        raise ConfigError(
            f"train.activation_checkpointing: found true, {head.family} heads have no layer whose activations "
            "could be recomputed: set it to false"
        )
    head.recompute_activations()


def captures(kind: str, config: TrainConfig, device: torch.device, obstacle: str | None = None) -> bool:
    """Whether steps run as CUDA graphs, with a head shared as `kind` says.

    Args: obstacle: see Head.capture_obstacle.
    Raises: ConfigError where `train.capture=on` asks for what is impossible.
    """
    # in float32, attention loops over documents on the host, which a graph cannot do
    half = autocast_dtype(config.mixed_precision, device) is not None
    possible = device.type == "cuda" and kind == "replicated" and half
    if config.capture == "on" and not possible:
        raise ConfigError(
            f"train.capture: found on, with a {kind} head on {device.type} and "
            f"train.mixed_precision={config.mixed_precision}; graphs need bf16 on GPUs that each hold the whole head: "
            "set train.capture=auto"
        )
    if config.capture == "on" and obstacle is not None:
        raise ConfigError(f"train.capture: found on, but {obstacle}: set train.capture=auto")
    return possible and obstacle is None and config.capture != "off"


def make_parallel(
    kind: str, head: Head, module: nn.Module, config: TrainConfig, accelerator: Accelerator, captured: bool
) -> Parallel:
    """Wrap `module` (the loss of `head`) as `kind` says. Afterwards every rank has rank 0's weights.

    Raises: ConfigError for a head that cannot be shared so.
    """
    if kind != "replicated" and not head.shardable:
        raise ConfigError(
            f"train.parallel: found {kind}, expected replicated: parameters of this head are used outside it. Launch "
            "with a DDP configuration (recipes/accelerate/ddp-8.yaml), or set train.parallel=replicated"
        )
    if kind == "fsdp2":
        return Sharded(head, module, config, accelerator)
    if kind in ("zero2", "zero3"):
        from headstart.train.sharing.zero import Zero

        return Zero(head, module, config, accelerator, int(kind[-1]))
    return Replicated(head, module, config, accelerator, captured)
