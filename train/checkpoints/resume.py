"""How a checkpoint is made of a run, and how a run continues from one."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from headstart.heads.errors import ConfigError, StorageError
from headstart.heads.files import set_aside, sha256_file
from headstart.train.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointStore,
    pack_rng,
    rng_state,
    set_rng_state,
    unpack_rng,
)
from headstart.train.checkpoints.writer import HostCopies
from headstart.train.config import ADDED, TrainConfig
from headstart.train.sharing.distributed import SHARED, from_main, gather_objects, on_main
from headstart.train.sharing.parallel import Parallel
from headstart.train.standing import RunState, Standing
from headstart.train.tracking.track import last_step

#: settings that may differ when a run continues, without a note about it
SILENT = {"log_every", "save_every", "keep", "resume", "tracker", "project", "prefetch", "tau_every", "tau_prompts"}
SILENT |= {"parallel", "capture", "tau_tokens", "tau_depth", "eval_every", "select", "nonfinite", "disk_wait"}
SILENT |= {"choose_by", "patience"}
#: what training leaves in a run directory
TRAINED = ("checkpoints", "rounds", "metrics.jsonl", "tensorboard", "wandb")


def make_checkpoint(
    standing: Standing, parallel: Parallel, copies: HostCopies, provenance: dict[str, Any]
) -> Checkpoint | None:
    """The run as it is now, on rank 0; None on the others, which must call it too.

    Its tensors are complete when `copies` are ready.
    """
    states = gather_objects(rng_state())
    if standing.rank != 0:
        for _ in (*parallel.head_tensors(), *parallel.optimizer_tensors()):
            pass
        return None
    head = copies.take("head", parallel.head_tensors())
    optimizer = copies.take("optimizer", parallel.optimizer_tensors())
    tensors, values = pack_rng(states)
    return Checkpoint(head, optimizer, tensors, state_values(standing, values, provenance))


def state_values(standing: Standing, rng: list[dict[str, Any]], provenance: dict[str, Any]) -> dict[str, Any]:
    """The JSON part of a checkpoint; `rng`: see checkpoint.pack_rng."""
    return asdict(standing.state) | {
        "data": {"fingerprint": standing.stream.fingerprint(), "seed": standing.config.seed},
        "config": asdict(standing.config),
        "world_size": standing.size,
        "rng": rng,
        "provenance": provenance,
    }


def restore(standing: Standing, parallel: Parallel, store: CheckpointStore) -> int:
    """Continue from the newest intact checkpoint. Returns its step; 0 when there is none and the run starts anew.

    Raises: ConfigError when the checkpoint belongs to other data or another head. StorageError when all checkpoints
    are damaged, or when ranks see different ones.
    """
    say = standing.reporter.say
    if not standing.config.resume:
        place = on_main(lambda: _set_aside(standing))
        if place is not None:
            say(f"starting anew (train.resume=false); what an earlier run had made is kept in {place}")
        return 0
    newest = on_main(lambda: store.find(say))
    if newest is None:
        on_main(lambda: _keep_orphans(standing))
        return 0
    path = store.directory / newest.name
    _require_same_checkpoint(path)
    checkpoint = CheckpointStore.load(path)
    state = checkpoint.state
    _check_same_run(standing, parallel, state, str(path))
    parallel.load_head(checkpoint.head)
    parallel.load_optimizer(checkpoint.optimizer)
    kept = {f.name: state[f.name] for f in fields(RunState) if f.name in state}
    standing.state = RunState(**{"trained": None, **kept})
    if standing.config.nonfinite != "skip":
        standing.state.skipped = 0  # only train.nonfinite=skip counts them
    rng = unpack_rng(checkpoint, standing.rank)
    if rng is not None:
        set_rng_state(rng)
    say(f"continuing from {path} (step {standing.state.step})")
    if state["world_size"] != standing.size:
        say(f"ranks: {state['world_size']} before, {standing.size} now; data order and global batch stay the same")
    standing.state.best = on_main(lambda: _best_on_disk(standing, store))
    from_main(None)  # no rank may write before every rank has read
    return standing.state.step


def _set_aside(standing: Standing) -> Path | None:
    return set_aside(standing.run_dir, "train", [standing.run_dir / name for name in TRAINED])


def _keep_orphans(standing: Standing) -> None:
    """Before a start at step 0: move what an earlier run made to previous/, if that run must have had a checkpoint."""
    last, every = last_step(standing.run_dir / "metrics.jsonl"), standing.config.save_every
    if not every or last < every:
        return  # it ended before its first checkpoint: nothing is lost
    place = _set_aside(standing)
    standing.reporter.say(
        f"WARNING: there is no checkpoint, though metrics.jsonl goes to step {last}: training starts at step 0. What "
        f"the earlier run left is kept in {place}"
    )


def _best_on_disk(standing: Standing, store: CheckpointStore) -> dict[str, Any] | None:
    """The best validation whose head is on the disk; best/ may be newer than the checkpoint, or damaged."""
    best, say = standing.state.best, standing.reporter.say
    fault = store.best_damage()
    if fault is None:
        saved = store.best_state()
        if best is not None and best != saved:
            say(f"NOTE: the best head so far is that of step {saved['step']} ({saved['name']} {saved['value']:.4g})")
        return saved
    if best is not None:
        say(
            f"WARNING: the best head (step {best['step']}, {best['name']} {best['value']:.4g}) is damaged: {fault}. "
            "The next validation counts as the best so far"
        )
    return None


def _require_same_checkpoint(path: Path) -> None:
    """Raise StorageError on all ranks when one of them does not read the checkpoint that rank 0 found."""
    manifest = path / MANIFEST
    seen = gather_objects(sha256_file(manifest) if manifest.is_file() else "no such file")
    wrong = [rank for rank, found in enumerate(seen) if found != seen[0]]
    if wrong:
        raise StorageError(
            f"{path}: ranks {', '.join(map(str, wrong))} read another checkpoint there than rank 0, or none "
            f"({manifest.name}: {seen[wrong[0]]}, rank 0's: {seen[0]}). {SHARED}"
        )


def _check_same_run(standing: Standing, parallel: Parallel, state: dict[str, Any], path: str) -> None:
    remedy = "use another run_dir, or train.resume=false to start anew"
    fingerprint = standing.stream.fingerprint()
    if state["data"]["fingerprint"] != fingerprint:
        raise ConfigError(
            f"{path}: was trained on other data or another data.pack_tokens (order {state['data']['fingerprint']}, now "
            f"{fingerprint}): {remedy}"
        )
    if state["data"]["seed"] != standing.config.seed:
        raise ConfigError(f"{path}: train.seed was {state['data']['seed']}, is {standing.config.seed}: {remedy}")
    saved = {name: value for name, value in asdict(TrainConfig()).items() if name in ADDED} | state["config"]
    if saved["optimizer"] != standing.config.optimizer:
        raise ConfigError(
            f"{path}: train.optimizer was {saved['optimizer']}, is {standing.config.optimizer}; the moments of one do "
            f"not serve the other: {remedy}"
        )
    for name, value in asdict(standing.config).items():
        if name not in SILENT and saved.get(name) != value:
            standing.reporter.say(f"NOTE: train.{name} was {saved.get(name)!r} until here, is {value!r} from now on")
    saved_sizes = set(CheckpointStore.head_shapes(path).items())
    own_sizes = {(name, shape) for name, shape, _ in parallel.head_sizes()}
    if saved_sizes != own_sizes:
        differing = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(saved_sizes ^ own_sizes)[:4])
        raise ConfigError(f"{path}: holds another head (tensors that differ: {differing}): {remedy}")
