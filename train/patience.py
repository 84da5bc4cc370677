"""When to stop: the accepted length along held-out text stopped growing, though the loss may still fall.

The loss goes on falling while a head learns its training text by heart. What counts is how many tokens are accepted on
text that it has not seen: `valid/walked_tau`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headstart.heads.errors import ConfigError
from headstart.train.config import TrainConfig

#: the measured length that decides
LENGTH = "valid/walked_tau"
#: the same in a run's state
BEST, LOSS, STEP, WORSE, SAID, LAST = "length", "loss", "step", "worse", "said", "last"


def check_patience(config: TrainConfig, validates: bool) -> None:
    """Raise ConfigError where patience has nothing to go by. Args: validates: whether there is held-out text."""
    if config.patience and not config.eval_every:
        raise ConfigError(
            f"train.eval_every: found 0 with train.patience={config.patience}, which counts validations: set "
            "train.eval_every to a number of steps, such as a twentieth of the run"
        )
    if config.patience and not validates:
        raise ConfigError(
            f"train.patience: found {config.patience}, but no text is held out to measure accepted lengths on: set "
            "data.held_out_fraction above 0, or train.patience=0"
        )


@dataclass
class Patience:
    """Follows the accepted length from validation to validation.

    Args:
        patience: `train.patience`. say: tells the user.
    """

    patience: int
    say: Callable[[str], None]
    _losses: list[float] = field(default_factory=list)

    def note_loss(self, loss: float) -> None:
        """Take a record's training loss into the mean since the last validation."""
        self._losses.append(loss)

    def note(self, known: dict[str, Any], step: int, values: dict[str, float]) -> dict[str, Any]:
        """What is known after the validation `values` at `step`: {"length", "loss", "step"} of the longest accepted
        length so far, "worse", how many validations came after it, "said", whether that was told, and "last", the step
        of the last validation.

        Says once for every longest length that it fell while the training loss still fell. Args: known: before.
        """
        losses, self._losses = self._losses, []
        loss = sum(losses) / len(losses) if losses else known.get(LOSS)
        if LENGTH not in values or known.get(LAST) == step:  # a validation again at the end, or after a resume
            return known
        length = values[LENGTH]
        if BEST not in known or length > known[BEST]:
            return {BEST: length, LOSS: loss, STEP: step, WORSE: 0, SAID: False, LAST: step}
        after = {**known, WORSE: known[WORSE] + 1, LAST: step}
        before = known[LOSS]
        if not known[SAID] and length < known[BEST] and loss is not None and before is not None and loss < before:
            after[SAID] = True
            self.say(
                f"NOTE: the accepted length along held-out text fell from {known[BEST]:.3f} (step {known[STEP]}) to "
                f"{length:.3f}, while the training loss still fell ({before:.4g} to {loss:.4g}): the head learns its "
                "training text by heart. More text helps most. train.select=best keeps the best head, and "
                "train.patience=3 ends such a run"
            )
        return after

    def ending(self, known: dict[str, Any]) -> str:
        """Why training stops, in words."""
        return (
            f"train.patience: {known[WORSE]} validations in a row found no longer accepted length along held-out text "
            f"than {known[BEST]:.3f} of step {known[STEP]}: training stops at step {known[LAST]}"
        )

    def spent(self, known: dict[str, Any]) -> bool:
        """Whether training stops now."""
        return bool(self.patience) and known.get(WORSE, 0) >= self.patience
