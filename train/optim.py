"""AdamW and Muon, the budget of a run, and the learning rate as a function of how much of it is spent."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, TrainingError
from headstart.train.config import TrainConfig

#: key of a parameter group: its rate factor in every stage (Head.rate_factor)
FACTORS = "rate_factors"


@dataclass(frozen=True)
class Budget:
    """What ends a run: the first of these limits that is reached. None = no limit.

    Attributes:
        steps: optimiser steps: the smaller of `train.steps` and of those that `train.epochs` takes.
        packs: packs of `train.epochs`; the last window is cut off after them.
        seconds: wall-clock seconds.
        by: which setting gave `steps`: steps | epochs.
    """

    steps: int | None
    packs: int | None
    seconds: float | None
    by: str = "steps"

    @classmethod
    def of(cls, config: TrainConfig, packs: int | None) -> Budget:
        """The budget that `config` sets. Args: packs: in `config.epochs` epochs; None without epochs."""
        limits: list[tuple[int, str]] = []
        if config.steps is not None:
            limits.append((config.steps, "steps"))
        if packs is not None:
            limits.append((math.ceil(packs / config.accumulation), "epochs"))
        steps, by = min(limits, default=(None, "steps"))
        return cls(steps, packs, config.max_seconds, by)

    def fraction(self, step: int, elapsed: float) -> float:
        """Part of the budget that is spent, 0 … 1; where several limits are set, the largest part."""
        by_step = step / self.steps if self.steps else 0.0
        by_time = elapsed / self.seconds if self.seconds else 0.0
        return min(max(by_step, by_time), 1.0)

    def finished(self, step: int, elapsed: float) -> str | None:
        """The limit that is reached (steps | epochs | seconds), or None."""
        if self.steps is not None and step >= self.steps:
            return self.by
        if self.seconds is not None and elapsed >= self.seconds:
            return "seconds"
        return None


def lr_factor(config: TrainConfig, budget: Budget, step: int, elapsed: float) -> float:
    """The learning rate of the next step, as a fraction of the peak rate.

    It climbs linearly, then falls from 1 to `min_lr_ratio` as `schedule` says (or stays constant). Under a limit of
    steps or epochs it depends on `step` alone, so a resumed run has the same rates. Under a limit of time it follows
    the part of the time that is gone. Under both it follows the larger part. It is above 0 from the first step on,
    because a step at rate 0 would be wasted.

    Example: 10 steps, 2 of warm-up: 0.5, 1, then a cosine over the other eight: 1, 0.96, 0.85, …

    Args:
        step: that is about to be made, from 0. elapsed: seconds so far.
    """
    spent = budget.fraction(step, elapsed)
    start = config.warmup_ratio  # fraction of the budget at which the decay starts
    warm_steps = config.warmup_steps
    if warm_steps is None and budget.steps is not None and budget.seconds is None:
        warm_steps = math.ceil(config.warmup_ratio * budget.steps)
    if warm_steps is not None:
        start = min(warm_steps / budget.steps, 1.0) if budget.steps else 0.0
        warm = min(1.0, (step + 1) / warm_steps) if warm_steps else 1.0
    else:
        warm = min(1.0, max(spent / start, 0.01)) if start else 1.0
    if config.schedule == "constant":
        return warm
    part = (spent - start) / (1.0 - start) if start < 1.0 else 0.0
    part = min(max(part, 0.0), 1.0)
    high = 0.5 * (1.0 + math.cos(math.pi * part))
    if config.schedule == "linear":
        high = 1.0 - part
    elif config.schedule == "wsd":
        high = min(1.0, (1.0 - part) / config.decay_ratio)
    return warm * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * high)


class Together(torch.optim.Optimizer):
    """Several optimisers, each of some of the parameters, as one: one list of groups, one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give the parts this optimiser's groups and state, which loading replaces."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            first = last

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each. Args: closure: not used."""
        for part in self._parts:
            part.step()


def build_optimizer(
    head: nn.Module,
    config: TrainConfig,
    factors: dict[str, tuple[float, ...]] | None = None,
    tokens: Set[str] = frozenset(),
    by_muon: Set[str] = frozenset(),
) -> torch.optim.Optimizer:
    """AdamW, or Muon with AdamW for the rest. Matrices decay; norms and biases (fewer than two axes) do not.

    Muon: https://kellerjordan.github.io/posts/muon; its updates are made as large as AdamW's (arXiv 2502.16982, §2.2).

    Args:
        factors: see rate_factors; None = every parameter has the run's rate.
        tokens, by_muon: token_matrices and muon_matrices of the head; the latter count with train.optimizer=muon alone.
    Raises: TrainingError when nothing is trainable, or a trainable parameter is not float32. ConfigError: check_muon.
    """
    trainable = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    if not trainable:
        raise TrainingError("the head has no trainable parameters: nothing to train")
    wrong = [f"{name} ({p.dtype})" for name, p in trainable if p.dtype != torch.float32]
    if wrong:
        raise TrainingError(
            f"master weights must be float32 (train.mixed_precision sets the rest), found {', '.join(wrong[:4])}"
        )
    check_muon(config, by_muon)
    by_muon = by_muon if config.optimizer == "muon" else frozenset()
    token_decay = config.weight_decay if config.token_weight_decay is None else config.token_weight_decay

    def decay(name: str, parameter: nn.Parameter) -> float:
        return 0.0 if parameter.ndim < 2 else token_decay if name in tokens else config.weight_decay

    def group_of(name: str, parameter: nn.Parameter) -> tuple[bool, tuple[float, ...], float]:
        """What the parameters of a group have in common: whether Muon trains them, rate factors, decay."""
        factor, chosen = (factors or {}).get(name, (1.0,)), name in by_muon
        rate = config.muon_rate if chosen else config.token_rate if name in tokens else 1.0
        return chosen, tuple(rate * each for each in factor), decay(name, parameter)

    keyed = [(group_of(name, p), p) for name, p in sorted(trainable, key=lambda pair: pair[1].ndim < 2)]

    def groups(chosen: bool) -> list[dict[str, Any]]:
        keys = dict.fromkeys(key for key, _ in keyed if key[0] is chosen)
        return [
            {"params": [p for k, p in keyed if k == key], FACTORS: key[1], "weight_decay": key[2]} for key in keys
        ]

    parts: list[torch.optim.Optimizer] = []
    if by_muon:
        parts.append(
            torch.optim.Muon(groups(True), config.lr, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw")
        )
    if rest := groups(False):
        fused = all(p.device.type == "cuda" for _, p in trainable)
        betas = (config.betas[0], config.betas[1])
        parts.append(torch.optim.AdamW(rest, lr=config.lr, betas=betas, eps=config.eps, fused=fused))
    return Together(parts) if by_muon else parts[0]


def check_muon(config: TrainConfig, by_muon: Set[str]) -> None:
    """Raise ConfigError where Muon has nothing to train. Args: by_muon: muon_matrices of the head."""
    if config.optimizer == "muon" and not by_muon:
        raise ConfigError(
            "train.optimizer: found muon, but this head has no matrix for it (all have a row for each token, or are "
            "no matrices): set train.optimizer=adamw"
        )


def token_matrices(head: Head) -> set[str]:
    """Names of the trained matrices with a row or a column for each token: embeddings, outputs, their updates."""
    tokens = {head.dims.vocab_size, head.draft_vocab_size}
    inner = {p for layer in head.draft_layers for p in layer.parameters()}  # an MLP may be as wide as U by chance
    found = {n: p for n, p in head.named_parameters() if p.requires_grad and p not in inner}
    return {n for n, p in found.items() if p.ndim > 1 and tokens & set(p.shape)}


def freeze_still_matrices(head: Head, config: TrainConfig) -> None:
    """Compute no gradient for the token matrices under train.token_rate=0, because they would not move by it."""
    if config.token_rate == 0:
        for name in token_matrices(head):
            head.get_parameter(name).requires_grad_(False)


def muon_matrices(head: Head) -> set[str]:
    """Names of the parameters that Muon trains: matrices (of two axes), token_matrices and Head.without_muon apart."""
    without = head.without_muon
    found = {n for n, p in head.named_parameters() if p.requires_grad and p.ndim == 2 and not n.startswith(without)}
    return found - token_matrices(head)


def rate_factors(head: Head) -> dict[str, tuple[float, ...]]:
    """The rate factor of every parameter, in every stage of the run."""
    stages = range(len(head.stages))
    return {name: tuple(head.rate_factor(name, stage) for stage in stages) for name, _ in head.named_parameters()}


def set_rate(optimizer: torch.optim.Optimizer, rate: float, stage: int = 0) -> None:
    """Give every group the rate of the run times its own factor in this stage."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[FACTORS][stage]
