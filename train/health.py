"""Whether a run still learns: losses and gradients that are not finite, steps that are skipped, rows that do not train.

Every window leaves flags on the device: 1 for each pack whose loss is not finite, and 1 for the gradient. Looking at
them at once would stop the device at every step. So the flags of window n travel with the exchange of step n + 1, and
the host reads them before step n + 2: a bad loss is found two steps late at most. `train.nonfinite=skip` cannot wait,
because it decides before the optimiser's step; it reads the flags at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.counting import counted
from headstart.heads.errors import TrainingError
from headstart.train.checkpoints.writer import CheckpointWriter
from headstart.train.coverage import untrained
from headstart.train.nonfinite import WindowSamples, bad_weights, dump
from headstart.train.sharing.distributed import gather_objects, on_main, sum_over_ranks
from headstart.train.standing import Standing
from headstart.train.stream import Pack

#: steps in a row that `train.nonfinite=skip` leaves out before the run ends
MOST_SKIPPED = 10
#: supervised rows after which a run in which none of them trained ends: it would learn nothing
UNTRAINED_ROWS = 4096


class Health:
    """Finds what makes training pointless, and ends the run with an error that says how to go on.

    Args:
        writer: knows the checkpoint that an error can name.
        fetch_again: reads a pack's features once more; returns None where ranks can only fetch together.
    Attributes:
        flags: float32 [accumulation + 1], of the last window: one per pack, the last one of the gradient.
    """

    def __init__(
        self, standing: Standing, head: Head, writer: CheckpointWriter,
        fetch_again: Callable[[Pack], FeatureBatch | None], device: torch.device,
    ):  # fmt: skip
        self.standing, self.head = standing, head
        self._writer, self._fetch_again = writer, fetch_again
        self.flags = torch.zeros(standing.config.accumulation + 1, device=device)
        #: the last two windows, whose flags may still be under way
        self._recent: deque[WindowSamples] = deque(maxlen=2)

    def note_window(self, bad_P: Tensor, norm: Tensor, samples: WindowSamples) -> None:
        """Keep the flags of a window whose gradient is complete, and the samples to name if they are bad."""
        self.flags = torch.cat([bad_P, self._bad_norm(norm)[None]])
        self._recent.append(samples)

    def note_norm(self, norm: Tensor) -> None:
        """Replace the gradient's flag: some optimisers know the norm only after their step."""
        self.flags[-1:] = self._bad_norm(norm)

    def _bad_norm(self, norm: Tensor) -> Tensor:
        return (~torch.isfinite(norm)).float() / self.standing.size  # every rank adds its part of one flag

    def examine_previous(self, flags: list[float]) -> None:
        """Look at the flags that an exchange carried: in step n, those of window n - 1."""
        if len(self._recent) >= 2:
            self._examine(flags, self._recent[-2])

    def examine_all(self) -> None:
        """Look at every flag that is still under way (the host waits): before anything is saved or called final."""
        flags = self.standing.exchanged_flags()
        if flags is None:
            return
        self.examine_previous(flags)  # first, so that the error names the window where it began
        self._examine(sum_over_ranks(self.flags.clone()).tolist(), self._recent[-1])

    def _examine(self, flags: list[float], samples: WindowSamples) -> None:
        if any(flags) and self.standing.config.nonfinite == "stop":
            raise TrainingError(f"{self._describe(flags, samples)} {self.way_back()}, or set train.nonfinite=skip.")

    def _describe(self, flags: list[float], samples: WindowSamples) -> str:
        standing = self.standing
        return dump(flags, samples, standing.meters.rate, self.head, standing.rank, standing.run_dir, self._fetch_again)

    def must_skip(self) -> bool:
        """`train.nonfinite=skip`: wait for this window's flags, and say whether its step must not be made."""
        standing = self.standing
        if standing.config.nonfinite != "skip":
            return False
        shared = sum_over_ranks(self.flags.clone()).tolist()
        self.flags = torch.zeros_like(self.flags)
        if not any(shared):
            standing.state.skipped = 0
            return False
        standing.state.skipped += 1
        message = self._describe(shared, self._recent[-1])
        if standing.state.skipped >= MOST_SKIPPED:
            raise TrainingError(
                f"{message} {MOST_SKIPPED} steps in a row were skipped: training has diverged. "
                f"{self.way_back(diverged=True)}."
            )
        standing.reporter.say(f"WARNING: {message} Step skipped (train.nonfinite=skip).")
        return True

    def weights_finite(self) -> bool:
        """Whether the weights can be saved. Skipped steps leave them as they were, which may be what is wrong."""
        return not (self.standing.state.skipped and any(gather_objects(bool(bad_weights(self.head)))))

    def require_finite_weights(self) -> None:
        """A run that ends between skipped steps must not save weights that are not finite as its result."""
        state = self.standing.state
        if not self.weights_finite():
            raise TrainingError(
                f"the run ended at step {state.step} between skipped steps, and the head's weights are not "
                f"finite. {self.way_back(diverged=True)}."
            )
        state.skipped = 0

    def way_back(self, diverged: bool = False) -> str:
        """What the run can continue from, and what to change; all ranks wait for what is being written.

        Args: diverged: whether checkpoints of skipped steps must be passed over.
        """
        saved = on_main(lambda: self._writer.last_checkpoint(diverged))
        kept = f"The same command continues from {saved}" if saved else "There is no checkpoint to continue from"
        return f"{kept}. Look at these samples, lower train.lr, clip gradients (train.clip_norm)"

    def check_trained(self) -> None:
        """`require_trained`, once enough rows have been seen to tell: an epoch, or UNTRAINED_ROWS."""
        state = self.standing.state
        if state.packs >= self.standing.stream.count(1) or state.supervised >= UNTRAINED_ROWS:
            self.require_trained()

    def require_trained(self) -> None:
        """Raise TrainingError where no row has carried a loss so far."""
        state = self.standing.state
        if state.skipped or state.trained or state.trained is None or not state.packs:
            return
        if state.supervised == 0:
            raise TrainingError(
                f"no position is supervised in the first {counted(state.packs, 'packs')}; `headstart inspect` "
                "shows the masks"
            )
        raise untrained(self.head, state.supervised)
