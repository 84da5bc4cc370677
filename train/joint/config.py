"""How a LoRA adapter of the target is trained together with the head: the recipe's `joint` node."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from headstart.heads.errors import ConfigError, check_settings
from headstart.heads.targets.adapter import ALL_LINEAR, LoraSettings
from headstart.heads.targets.target import TargetConfig
from headstart.heads.targets.tuned import MERGE_YOURSELF
from headstart.train.config import TrainConfig

LOSSES = ("kl", "ce")
SCHEDULES = ("constant", "linear", "sine", "sine_r")


@dataclass
class JointConfig:
    """Joint training (Medusa-2, arXiv 2401.10774 §2.2.2). It changes the target: a LoRA adapter of it is saved beside
    the head, in `head/adapter`.

    A run has two stages. In the first the head alone trains, on the features of the original target, as without joint
    training. In the second head and adapter train together on

        L = L_target + weight · s(t) · L_head

    where t is the part of the second stage that is done. Both stages have a warm-up and a schedule of their own, and
    the optimiser's moments start anew.
    """

    #: Train a LoRA adapter of the target together with the head. Drafts are then verified by the tuned target.
    enabled: bool = False

    #: Rank of the adapter's updates.
    rank: int = 32
    #: The updates are multiplied by alpha / rank.
    alpha: float = 16.0
    #: Share of the adapter's inputs that training drops.
    dropout: float = 0.05
    #: Linear layers of the target that get an update, such as q_proj; [all-linear] takes all in its decoder layers. The
    #: output matrix never gets one.
    modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])

    #: Share of the run's budget in which the head alone trains (the first stage); 0 leaves that stage out.
    heads_only: float = 0.5
    #: Learning rate of the head, in both stages, as a multiple of train.lr, which is the adapter's.
    head_rate: float = 4.0
    #: Largest weight of the head's loss in the second stage (λ0).
    weight: float = 0.2
    #: How that weight grows over the second stage: s(t) = 1 (constant), t (linear), sin(πt/2) (sine), or sine until the
    #: part joint.sine_share of the stage and then 1 (sine_r).
    schedule: str = "sine"
    #: Part of the second stage after which the weight is full, with joint.schedule=sine_r.
    sine_share: float = 0.5
    #: The target's own loss: kl (keep the original's distribution, for data that the target answered itself) or ce
    #: (learn the tokens of the data).
    loss: str = "kl"

    #: Largest rise of the perplexity over the original target's, as a fraction: on held-out answers, and on the prompts
    #: of the same conversations. The larger rise decides; a tuned target beyond it is not exported.
    max_perplexity_rise: float = 0.01
    #: Held-out prompts that both targets answer greedily, to report how many answers stayed the same.
    guard_prompts: int = 32
    #: New tokens per such answer.
    guard_tokens: int = 128

    @property
    def lora(self) -> LoraSettings:
        return LoraSettings(self.rank, self.alpha, self.dropout, list(self.modules))

    def check(self) -> None:
        """Raise ConfigError naming the first field that cannot work."""
        check = partial(check_settings, self, "joint")
        check(("rank",), "1 to 1024", lambda rank: 1 <= rank <= 1024)
        check(("alpha", "head_rate"), "a number above 0, at most 1000", lambda value: 0 < value <= 1000)
        check(("weight",), "0 to 1000", lambda value: 0 <= value <= 1000)
        check(("dropout", "heads_only"), "a fraction in [0, 1)", lambda value: 0 <= value < 1)
        check(("sine_share",), "a fraction in (0, 1]", lambda value: 0 < value <= 1)
        check(("max_perplexity_rise",), "0 or more", lambda value: value >= 0)
        check(("guard_prompts",), "0 or more", lambda value: value >= 0)
        check(("guard_tokens",), "1 or more", lambda value: value >= 1)
        for name, allowed in (("schedule", SCHEDULES), ("loss", LOSSES)):
            check((name,), "one of " + ", ".join(allowed), allowed.__contains__)
        if not self.modules:
            raise ConfigError(f"joint.modules: found no name, expected names of linear layers, or [{ALL_LINEAR}]")


def check_together(target: TargetConfig, train: TrainConfig, features: str) -> None:
    """Raises: ConfigError for settings that joint training does not work with.

    Args: features: `data.features`.
    """
    why = "with joint.enabled=true"
    if target.adapter is not None:
        raise ConfigError(
            f"target.adapter: found {target.adapter!r} {why}, which trains an adapter of its own: leave it out, or "
            f"{MERGE_YOURSELF}"
        )
    if features not in ("online", "auto"):
        raise ConfigError(
            f"data.features: found {features} {why}; the target changes, so its features cannot be kept: set "
            "data.features=online"
        )
    if target.parallel != "none":
        raise ConfigError(
            f"target.parallel: found {target.parallel} {why}; every rank needs the whole target to train its adapter: "
            "set target.parallel=none, and joint.enabled=false for a target that does not fit a card"
        )
    if target.compile:
        raise ConfigError(f"target.compile: found true {why}; compiled layers have no adapter: set it to false")
    if train.parallel not in ("auto", "replicated"):
        raise ConfigError(
            f"train.parallel: found {train.parallel} {why}; ranks share neither the target nor its adapter: set "
            "train.parallel=replicated"
        )
