"""What a run remembers between two calls, and how it is captured and restored."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

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
from headstart.train.checkpoints.saver import Saver
from headstart.train.config import TrainConfig
from headstart.train.sharing.distributed import SHARED, from_main, gather_objects, on_main
from headstart.train.sharing.parallel import Parallel
from headstart.train.stream import PackStream
from headstart.train.tracking.track import Reporter, last_step

#: settings that may change between two parts of a run without a word
SILENT = {"log_every", "save_every", "keep", "resume", "tracker", "project", "prefetch", "tau_every", "tau_prompts"}
SILENT |= {"parallel", "capture", "tau_tokens", "tau_depth", "eval_every", "select", "nonfinite", "disk_wait"}


#: what training leaves in a run directory on its way
TRAINED = ("checkpoints", "metrics.jsonl", "tensorboard", "wandb")


@dataclass
class RunState:
    """Progress of a run (JSON values).

    Attributes:
        step: optimiser steps made. packs: packs consumed, the data position.
        elapsed: wall-clock seconds of the loop. tokens, supervised: rows and depth-1 positions trained on.
        trained: positions of any depth that carried a loss; None = an older version did not count them.
        metrics: last validation. best: {"name", "value", "step"}.
        finished: [step, reason] once final validation and checkpoint are done.
        unvalidated: whether the validation due at this step is not in metrics and best yet.
        skipped: steps skipped in a row until here (`train.nonfinite=skip`).
    """

    step: int = 0
    packs: int = 0
    elapsed: float = 0.0
    tokens: int = 0
    supervised: int = 0
    trained: int | None = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    finished: list[Any] | None = None
    unvalidated: bool = False
    skipped: int = 0


class Trainer(Protocol):
    """What a checkpoint is made from and restored into: the loop's state.

    Attributes:
        rank, size: this process among those of the launch. state: replaced by `restore`.
    """

    config: TrainConfig
    run_dir: Path
    rank: int
    size: int
    stream: PackStream
    parallel: Parallel
    store: CheckpointStore
    saver: Saver
    reporter: Reporter
    provenance: dict[str, Any]
    state: RunState


def capture(trainer: Trainer) -> Checkpoint | None:
    """The checkpoint of this moment on rank 0 (None elsewhere); all ranks take part.

    Its tensors are complete when `trainer.saver.copies` are ready.
    """
    states = gather_objects(rng_state())
    parallel, copies = trainer.parallel, trainer.saver.copies
    if trainer.rank != 0:
        for _ in (*parallel.head_tensors(), *parallel.optimizer_tensors()):
            pass
        return None
    head = copies.take("head", parallel.head_tensors())
    optimizer = copies.take("optimizer", parallel.optimizer_tensors())
    tensors, values = pack_rng(states)
    return Checkpoint(head, optimizer, tensors, state_values(trainer, values))


def state_values(trainer: Trainer, rng: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON part of a checkpoint; `rng`: see checkpoint.pack_rng."""
    return asdict(trainer.state) | {
        "data": {"fingerprint": trainer.stream.fingerprint(), "seed": trainer.config.seed},
        "config": asdict(trainer.config),
        "world_size": trainer.size,
        "rng": rng,
        "provenance": trainer.provenance,
    }


def restore(trainer: Trainer) -> int:
    """Continue from the newest intact checkpoint. Returns its step, 0 when there is none.

    Raises: ConfigError when the checkpoint belongs to other data or another head, StorageError when all are damaged or
    ranks see different ones.
    """
    store, say = trainer.store, trainer.reporter.say
    if not trainer.config.resume:
        place = on_main(lambda: _set_aside(trainer))
        if place is not None:
            say(f"starting anew (train.resume=false); what an earlier run had made is kept in {place}")
        return 0
    found = on_main(lambda: store.find(say))
    if found is None:
        on_main(lambda: _keep_orphans(trainer))
        return 0
    path = store.directory / found.name
    _require_same_checkpoint(path)
    checkpoint = CheckpointStore.load(path)
    state = checkpoint.state
    _check_same_run(trainer, state, str(path))
    trainer.parallel.load_head(checkpoint.head)
    trainer.parallel.load_optimizer(checkpoint.optimizer)
    kept = {f.name: state[f.name] for f in fields(RunState) if f.name in state}
    trainer.state = RunState(**{"trained": None, **kept})
    if trainer.config.nonfinite != "skip":
        trainer.state.skipped = 0  # nobody counts any more
    rng = unpack_rng(checkpoint, trainer.rank)
    if rng is not None:
        set_rng_state(rng)
    say(f"continuing from {path} (step {trainer.state.step})")
    if state["world_size"] != trainer.size:
        say(f"ranks: {state['world_size']} before, {trainer.size} now; data order and global batch stay the same")
    trainer.state.best = on_main(lambda: _best_on_disk(trainer))
    from_main(None)  # no rank may write before every rank has read
    return trainer.state.step


def _set_aside(trainer: Trainer) -> Path | None:
    return set_aside(trainer.run_dir, "train", [trainer.run_dir / name for name in TRAINED])


def _keep_orphans(trainer: Trainer) -> None:
    """Before a start at step 0: what a run has made that must have had a checkpoint moves to previous/."""
    last, every = last_step(trainer.run_dir / "metrics.jsonl"), trainer.config.save_every
    if not every or last < every:
        return  # it ended before its first checkpoint
    place = _set_aside(trainer)
    trainer.reporter.say(
        f"WARNING: no checkpoint is there, though metrics.jsonl goes to step {last}: training starts at step 0. What "
        f"was there is kept in {place}"
    )


def _best_on_disk(trainer: Trainer) -> dict[str, Any] | None:
    """What the best head is that a run ends with: best/ may be newer than the checkpoint, or be gone."""
    best, store, say = trainer.state.best, trainer.store, trainer.reporter.say
    fault = store.best_damage()
    if fault is None:
        found = store.best_state()
        if best is not None and best != found:
            say(f"NOTE: the best head so far is that of step {found['step']} ({found['name']} {found['value']:.4g})")
        return found
    if best is not None:
        say(
            f"WARNING: the best head (step {best['step']}, {best['name']} {best['value']:.4g}) is damaged: {fault}. "
            "The next validation counts as the best so far"
        )
    return None


def _require_same_checkpoint(path: Path) -> None:
    """Raises: StorageError on all ranks when one does not read the checkpoint that rank 0 found."""
    manifest = path / MANIFEST
    seen = gather_objects(sha256_file(manifest) if manifest.is_file() else "no such file")
    wrong = [rank for rank, found in enumerate(seen) if found != seen[0]]
    if wrong:
        raise StorageError(
            f"{path}: ranks {', '.join(map(str, wrong))} read another checkpoint there than rank 0, or none "
            f"({manifest.name}: {seen[wrong[0]]}, rank 0's: {seen[0]}). {SHARED}"
        )


def _check_same_run(trainer: Trainer, state: dict[str, Any], path: str) -> None:
    remedy = "use another run_dir, or train.resume=false to start anew"
    fingerprint = trainer.stream.fingerprint()
    if state["data"]["fingerprint"] != fingerprint:
        raise ConfigError(
            f"{path}: was trained on other data or another data.pack_tokens (order {state['data']['fingerprint']}, now "
            f"{fingerprint}): {remedy}"
        )
    if state["data"]["seed"] != trainer.config.seed:
        raise ConfigError(f"{path}: train.seed was {state['data']['seed']}, is {trainer.config.seed}: {remedy}")
    saved = state["config"]
    for name, value in asdict(trainer.config).items():
        if name not in SILENT and saved.get(name) != value:
            trainer.reporter.say(f"NOTE: train.{name} was {saved.get(name)!r} until here, is {value!r} from now on")
    found = set(CheckpointStore.head_shapes(path).items())
    wanted = {(name, shape) for name, shape, _ in trainer.parallel.head_sizes()}
    if found != wanted:
        differing = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(found ^ wanted)[:4])
        raise ConfigError(f"{path}: holds another head (tensors that differ: {differing}): {remedy}")
