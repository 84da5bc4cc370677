"""How a head is trained: the recipe's `train` node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headstart.heads.errors import ConfigError

#: a rate that AdamW cannot apply in float32 is far above this one
MOST_LR = 1000.0


@dataclass
class TrainConfig:
    """Budgets, optimiser, schedule, checkpoints and tracking of one training run.

    Terms: a *pack* is one micro-batch of whole documents (`data.pack_tokens` rows at most); a *window* is the
    `accumulation` packs, counted over all ranks, whose gradient makes one optimiser *step*.
    At least one of `steps`, `epochs`, `max_seconds` is needed; the run ends at whichever comes first.
    """

    #: optimiser steps
    steps: int | None = None
    #: passes over the training samples; fractions are allowed (0.5 = the first half of the packs)
    epochs: float | None = None
    #: wall-clock seconds of the loop, validation and checkpoints included; a resumed run continues the clock
    max_seconds: float | None = None

    #: peak learning rate
    lr: float = 1e-4
    #: AdamW moment decay rates
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    #: AdamW denominator offset
    eps: float = 1e-8
    #: decoupled weight decay of matrices (norms and biases never decay)
    weight_decay: float = 0.0
    #: part of the budget (steps, or seconds of a timed run) over which the rate climbs; warmup_steps overrules it
    warmup_ratio: float = 0.015
    #: steps over which the rate climbs linearly to its peak
    warmup_steps: int | None = None
    #: after warm-up: cosine (to min_lr_ratio at the end of the budget) or constant
    schedule: str = "cosine"
    #: final rate of the cosine, as a fraction of lr
    min_lr_ratio: float = 0.0
    #: largest global gradient norm, None = no clipping by norm
    clip_norm: float | None = 0.5
    #: largest absolute value of a gradient entry (EAGLE-1: 0.5), None = no clipping by value
    clip_value: float | None = None

    #: packs per optimiser step over *all* ranks, so that the order of data does not depend on the number of ranks
    accumulation: int = 1
    #: auto (bf16 on a GPU that has it, else no) | bf16 (autocast, float32 master weights) | no (float32)
    mixed_precision: str = "auto"
    #: auto (what `accelerate launch` was configured for, else replicated) | replicated (DDP) | fsdp2 | zero2 | zero3:
    #: how ranks share the head, its gradients and its optimiser state (zero2 and zero3 need deepspeed)
    parallel: str = "auto"
    #: auto | on | off: capture each pack's loss and backward as a CUDA graph (auto: in bf16 on GPUs
    #: that each hold the whole head)
    capture: str = "auto"
    #: make the draft layer's MLP activations again in the backward pass: saves about two thirds of the activations'
    #: memory for a tenth more arithmetic
    activation_checkpointing: bool = False
    #: seeds the order of data and, per pack, whatever the head draws at random
    seed: int = 0
    #: windows fetched ahead by a background thread (helps stored features; online ones share the GPU with the head)
    prefetch: int = 0
    #: non-finite loss or gradient: stop (names the samples, keeps the last checkpoint; found at most two steps late
    #: so that no step waits for the device) | skip (drops the step and goes on; waits for the device at every step)
    nonfinite: str = "stop"

    #: steps between validations, 0 = only at the end
    eval_every: int = 0
    #: steps between checkpoints, 0 = only at the end
    save_every: int = 500
    #: checkpoints kept, newest first (the best head is kept besides); 0 = all
    keep: int = 2
    #: seconds for which a run whose checkpoint finds the disk full waits for room before it ends; 0 = ends at once
    disk_wait: float = 1800.0
    #: continue from the newest intact checkpoint of the run directory
    resume: bool = True
    #: weights the run ends with: last | best (by real τ where it is measured, else by walked τ, validate.shares)
    select: str = "last"

    #: none | tensorboard | wandb; metrics.jsonl is always written
    tracker: str = "none"
    #: project name for wandb
    project: str = "headstart"
    #: steps between two records; the only steps at which the host waits for the device
    log_every: int = 10

    #: steps between two measurements of real draft-verify τ, 0 = at every validation
    tau_every: int = 0
    #: prompts decoded for it (0 = never)
    tau_prompts: int = 8
    #: new tokens per prompt
    tau_tokens: int = 64
    #: drafts of the chain of real and of walked τ, None = eval.tree.depth
    tau_depth: int | None = None

    def check(self, where: str = "train") -> None:
        """Raise ConfigError naming the first field that cannot work; `where` is the recipe key."""
        budgets = {"steps": self.steps, "epochs": self.epochs, "max_seconds": self.max_seconds}
        if all(value is None for value in budgets.values()):
            raise ConfigError(f"{where}: no budget is set; set {where}.steps, {where}.epochs or {where}.max_seconds")
        for name, value in vars(self).items():
            if isinstance(value, float):
                _require(math.isfinite(value), f"{where}.{name}", value, "a finite number")
        positive = {
            **budgets,
            "lr": self.lr,
            "eps": self.eps,
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
        }
        positive |= {"accumulation": self.accumulation, "log_every": self.log_every}
        for name, value in positive.items():
            _require(value is None or value > 0, f"{where}.{name}", value, "a number above 0")
        _require(self.lr <= MOST_LR, f"{where}.lr", self.lr, f"{MOST_LR:g} at most (1e-4 is usual)")
        for name in ("eval_every", "save_every", "keep", "tau_every", "tau_prompts", "tau_tokens", "prefetch"):
            _require(getattr(self, name) >= 0, f"{where}.{name}", getattr(self, name), "0 or more")
        for name in ("weight_decay", "seed", "disk_wait"):
            _require(getattr(self, name) >= 0, f"{where}.{name}", getattr(self, name), "0 or more")
        choices = {
            "schedule": ("cosine", "constant"),
            "mixed_precision": ("auto", "bf16", "no"),
            "parallel": ("auto", "replicated", "fsdp2", "zero2", "zero3"),
            "capture": ("auto", "on", "off"),
            "nonfinite": ("stop", "skip"),
            "select": ("last", "best"),
            "tracker": ("none", "tensorboard", "wandb"),
        }
        for name, allowed in choices.items():
            _require(
                getattr(self, name) in allowed, f"{where}.{name}", getattr(self, name), "one of " + ", ".join(allowed)
            )
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"{where}.betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        _require(0 <= self.warmup_ratio < 1, f"{where}.warmup_ratio", self.warmup_ratio, "a fraction in [0, 1)")
        _require(
            self.warmup_steps is None or self.warmup_steps >= 0, f"{where}.warmup_steps", self.warmup_steps, "0 or more"
        )
        _require(0 <= self.min_lr_ratio <= 1, f"{where}.min_lr_ratio", self.min_lr_ratio, "a fraction in [0, 1]")
        _require(self.tau_depth is None or self.tau_depth > 0, f"{where}.tau_depth", self.tau_depth, "1 or more")


def _require(ok: bool, field_name: str, found: Any, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{field_name}: found {found!r}, expected {expected}")
