"""How a head is trained: the recipe's `train` node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from headstart.heads.errors import ConfigError, check_settings

#: largest learning rate accepted; AdamW in float32 breaks far above it
MOST_LR = 1000.0
#: settings that earlier versions did not have; their defaults compute what those versions did
ADDED = (
    "optimizer", "muon_momentum", "muon_rate", "token_rate", "token_weight_decay", "average_decay", "patience",
    "choose_by", "rounds", "failed_weight", "decay_ratio",
)  # fmt: skip


@dataclass
class TrainConfig:
    """Budgets, optimiser, schedule, checkpoints and tracking of one training run.

    Terms: a *pack* is one micro-batch of whole documents (`data.pack_tokens` rows at most). A *window* is
    `accumulation` packs, counted over all ranks; its gradient makes one optimiser *step*. *τ* is the number of tokens
    that decoding commits per forward pass of the target. *Real τ* is measured by decoding prompts, *walked τ* on
    held-out answers that are there already (acceptance.walk).
    At least one of `steps`, `epochs`, `max_seconds` is needed; the run ends at whichever comes first.
    """

    #: Optimiser steps.
    steps: int | None = None
    #: Passes over the training samples. Fractions are allowed: 0.5 trains on the first half of the packs.
    epochs: float | None = None
    #: Seconds of training, validation and checkpoints included. A resumed run continues the clock.
    max_seconds: float | None = None

    #: What makes the update: adamw, or muon. Muon turns the momentum of each matrix inside the head into a nearly
    #: orthogonal one (Newton-Schulz) and makes it as large as an update of AdamW, so that one rate serves both. AdamW
    #: trains the rest: norms, biases, and matrices with a row for each token, such as embeddings and outputs.
    optimizer: str = "adamw"
    #: Decay rate of Muon's momentum.
    muon_momentum: float = 0.95
    #: Learning rate of Muon's matrices, as a multiple of train.lr.
    muon_rate: float = 1.0
    #: Learning rate of matrices with a row for each token, such as outputs, as a multiple of train.lr. An output that
    #: starts from the target's rows holds what the target knows of rare tokens: a small rate keeps that, 0 keeps all
    #: and computes no gradient for it.
    token_rate: float = 1.0
    #: Average the weights over the steps (EMA) with this decay rate; null does not. Validation, the best head and the
    #: finished head have the averages. Training itself goes on from the last weights. At step n the rate is at most
    #: n / (n + 10), so that the first weights fade soon.
    average_decay: float | None = None
    #: Peak learning rate.
    lr: float = 1e-4
    #: Decay rates of AdamW's two moments.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    #: What AdamW adds to its denominator.
    eps: float = 1e-8
    #: Decoupled weight decay of matrices. Norms and biases do not decay.
    weight_decay: float = 0.0
    #: The same for matrices with a row for each token, such as outputs; null takes train.weight_decay.
    token_weight_decay: float | None = None
    #: Part of the budget (of the steps, or of the seconds of a timed run) over which the rate climbs, unless
    #: train.warmup_steps is set.
    warmup_ratio: float = 0.015
    #: Steps over which the rate climbs linearly to its peak. A run of fewer steps is refused.
    warmup_steps: int | None = None
    #: The rate after warm-up: cosine or linear (fall to train.min_lr_ratio at the end of the budget), wsd (constant,
    #: then linear over the last train.decay_ratio of the budget) or constant.
    schedule: str = "cosine"
    #: Part of the budget after warm-up over which train.schedule=wsd falls.
    decay_ratio: float = 0.2
    #: Last rate, as a fraction of train.lr.
    min_lr_ratio: float = 0.0
    #: Largest norm of the whole gradient; null does not clip by norm.
    clip_norm: float | None = 0.5
    #: Largest absolute value of a gradient's entries (EAGLE-1: 0.5); null does not clip by value.
    clip_value: float | None = None

    #: On-policy rounds: parts of the budget. Before each but the first, the head drafts along all training answers, as
    #: decoding does, and in that part the first wrong draft of each cycle counts train.failed_weight times. 1 is off.
    #: Each walk costs a forward pass over the training data, which counts in train.max_seconds.
    rounds: int = 1
    #: How many times a draft that failed counts in the loss (train.rounds).
    failed_weight: float = 3.0
    #: Packs per optimiser step over all ranks together. The order of the data does not depend on the number of ranks.
    accumulation: int = 1
    #: Precision of training: auto (bf16 on a GPU that has it, else no), bf16 (autocast with float32 master weights) or
    #: no (float32).
    mixed_precision: str = "auto"
    #: How ranks share the head, its gradients and its optimiser state: auto (as `accelerate launch` was configured,
    #: else replicated), replicated (DDP), fsdp2, zero2 or zero3 (both need deepspeed).
    parallel: str = "auto"
    #: Capture each pack's loss and backward pass as a CUDA graph: auto (in bf16 on GPUs that each hold the whole head),
    #: on or off.
    capture: str = "auto"
    #: Compute the activations of the draft layer's MLP again in the backward pass. It saves about two thirds of the
    #: activations' memory and costs a tenth more arithmetic. In joint training the target's layers are computed again.
    activation_checkpointing: bool = False
    #: Refuse, before any work, a run that by its plan needs more memory than the device has. false tries it.
    check_memory: bool = True
    #: Seed of the order of the data and of what a head draws at random. A recipe takes its `seed` unless this is set.
    seed: int = 0
    #: Windows that a background thread fetches ahead. It helps stored features; live ones share the GPU with the head.
    prefetch: int = 0
    #: What happens at a loss or gradient that is not finite. stop names the samples and keeps the last checkpoint; it
    #: notices up to two steps late, so that no step waits for the device. skip leaves the step out and goes on; it
    #: waits for the device at every step.
    nonfinite: str = "stop"

    #: Steps between validations; 0 validates only at the end.
    eval_every: int = 0
    #: Steps between checkpoints; 0 saves only at the end.
    save_every: int = 500
    #: Checkpoints kept, the newest ones; 0 keeps all. The best head is kept besides.
    keep: int = 2
    #: Seconds for which a run waits for room when a checkpoint finds the disk full, before it ends; 0 ends at once.
    disk_wait: float = 1800.0
    #: Continue from the newest intact checkpoint of the run's folder. false starts anew.
    resume: bool = True
    #: Weights that the run ends with: last, or best (by train.choose_by).
    select: str = "last"
    #: What the best head is chosen by: tau (real τ where it is measured, else walked τ) or walked_tau (walked τ alone,
    #: which looks at all held-out text and so varies less).
    choose_by: str = "tau"
    #: Stop after so many validations in a row without a longer accepted length along held-out text (walked τ); 0 never
    #: stops. It needs train.eval_every. Set train.select=best with it.
    patience: int = 0

    #: Where metrics go besides metrics.jsonl: none, tensorboard or wandb.
    tracker: str = "none"
    #: Name of the wandb project.
    project: str = "headstart"
    #: Steps between two lines of metrics. Only at these does the host wait for the device.
    log_every: int = 10

    #: Steps between two measurements of real τ; 0 measures at every validation.
    tau_every: int = 0
    #: Prompts decoded to measure real τ; 0 never measures it.
    tau_prompts: int = 8
    #: New tokens per such prompt.
    tau_tokens: int = 64
    #: Length of the drafted chain for real and walked τ; null takes eval.tree.depth.
    tau_depth: int | None = None

    def check(self) -> None:
        """Raise ConfigError naming the first field that cannot work."""
        check = partial(check_settings, self, "train")
        budgets = ("steps", "epochs", "max_seconds")
        if all(getattr(self, name) is None for name in budgets):
            raise ConfigError("train: no budget is set; set train.steps, train.epochs or train.max_seconds")
        floats = [name for name, value in vars(self).items() if isinstance(value, float)]
        check(floats, "a finite number", math.isfinite)
        positive = (*budgets, "lr", "eps", "clip_norm", "clip_value", "accumulation", "log_every")
        check(positive, "a number above 0", lambda value: value is None or value > 0)
        check(("lr",), f"{MOST_LR:g} at most (1e-4 is usual)", lambda lr: lr <= MOST_LR)
        counts = ("eval_every", "save_every", "keep", "tau_every", "tau_prompts", "tau_tokens", "prefetch", "patience")
        check((*counts, "weight_decay", "token_rate", "seed", "disk_wait"), "0 or more", lambda value: value >= 0)
        check(("token_weight_decay",), "0 or more, or null", lambda decay: decay is None or decay >= 0)
        check(("rounds",), "1 or more", lambda rounds: rounds >= 1)
        check(("muon_rate", "failed_weight"), "a number above 0", lambda rate: rate > 0)
        check(("muon_momentum",), "a number in [0, 1)", _is_rate)
        check(("average_decay",), "a number in [0, 1), or null", lambda rate: rate is None or _is_rate(rate))
        choices = {
            "optimizer": ("adamw", "muon"),
            "schedule": ("cosine", "linear", "wsd", "constant"),
            "mixed_precision": ("auto", "bf16", "no"),
            "parallel": ("auto", "replicated", "fsdp2", "zero2", "zero3"),
            "capture": ("auto", "on", "off"),
            "nonfinite": ("stop", "skip"),
            "select": ("last", "best"),
            "choose_by": ("tau", "walked_tau"),
            "tracker": ("none", "tensorboard", "wandb"),
        }
        for name, allowed in choices.items():
            check((name,), "one of " + ", ".join(allowed), allowed.__contains__)
        # whatever the entries of a recipe's list should be, they may be mappings
        check(("betas",), "two numbers in [0, 1)", lambda betas: len(betas) == 2 and all(map(_is_rate, betas)))
        check(("warmup_ratio",), "a fraction in [0, 1)", lambda ratio: 0 <= ratio < 1)
        check(("warmup_steps",), "0 or more", lambda steps: steps is None or steps >= 0)
        check(("decay_ratio",), "a fraction above 0, at most 1", lambda ratio: 0 < ratio <= 1)
        check(("min_lr_ratio",), "a fraction in [0, 1]", lambda ratio: 0 <= ratio <= 1)
        check(("tau_depth",), "1 or more", lambda depth: depth is None or depth > 0)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1
