"""Cycles of a trained head on real text: what every draft said of itself, and how probable its acceptance was.

The probability is calibrated: of one half of the contexts by the cycles of the other half. replay.py replays such
cycles.
Shape legend: C contexts, S cycles of all contexts, one context after the other, K drafts of a cycle, J = K + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.session import Decoder
from headstart.eval.kernels.reach import LARGEST_LOGIT
from headstart.eval.tuning.calibration import Outcomes, calibrate
from headstart.eval.tuning.recording import asked_for_confidence, record_each
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.files import read_json, write_json
from headstart.heads.formats.calibration import SOURCES, Calibration, mean_error

#: what the first field of a recording's file says
FORMAT = "headstart.replay/1"
#: decimals of the numbers in a file
DIGITS = 5


@dataclass(frozen=True)
class Recording:
    """Recorded cycles of chains.

    Attributes:
        head, target, data: names of what was recorded.
        temperature: at which it was.
        source: where the logits come from, see Calibration.source.
        ece_before, ece_after: see side_by_side.Row.
        counts: cycles of each context, 1 or more.
        logit_SK: what each draft said of itself, float32.
        rate_SK: probability that a draft is accepted if those before it are, float32.
        accepted_S, judged_S: what came of them in the recording, see Outcomes.
    """

    head: str
    target: str
    data: str
    temperature: float
    source: str
    ece_before: float
    ece_after: float
    counts: list[int]
    logit_SK: Tensor
    rate_SK: Tensor
    accepted_S: Tensor
    judged_S: Tensor

    def require(self, name: str, levels: int | None, temperature: float) -> None:
        """Whether a draft can be replayed. Args: levels: None = it is no chain.

        Raises: ConfigError for one of which the recording says nothing.
        """
        if levels is None:
            raise ConfigError(f"--replay: found the draft {name}, expected chains only: chains were recorded")
        if levels > self.positions:
            raise ConfigError(
                f"--replay: found the draft {name}, but {self.positions} drafts of a cycle were recorded: ask for "
                f"chain{self.positions} at most, or record a longer chain (--record with --scheduled {name})"
            )
        if temperature != self.temperature:
            raise ConfigError(
                f"--temperature: found {temperature:g}, the recording was made at {self.temperature:g}: use the same"
            )

    @property
    def positions(self) -> int:
        """Drafts of a cycle."""
        return self.rate_SK.shape[1]

    @property
    def cycles(self) -> int:
        return self.rate_SK.shape[0]

    @property
    def mean_rates(self) -> list[float]:
        """By level, the mean probability of acceptance where all levels before it are accepted.

        A chain of k levels whose rates are the first k of these has the recording's mean τ.
        """
        reach_K = self.rate_SK.double().cumprod(1).mean(0)
        before_K = torch.cat([torch.ones(1, dtype=torch.float64), reach_K[:-1]])
        rates: list[float] = torch.where(before_K > 0, reach_K / before_K, 0.0).clamp(0, 1).tolist()
        return rates

    @cached_property
    def firsts(self) -> list[int]:
        """The cycle that the n-th new context begins with, for n < C.

        Neighbours of this order lie far apart in the recording: rows that go on with the next context do not follow
        each other.
        """
        first_C = [0, *np.cumsum(self.counts).tolist()]
        contexts = len(self.counts)
        step = next(n for n in range(round(0.618 * contexts) or 1, 2 * contexts + 1) if math.gcd(n, contexts) == 1)
        return [first_C[n * step % contexts] for n in range(contexts)]

    def first(self, number: int) -> int:
        """The cycle that a new context begins with. Args: number: of the context, in the order in which they begin."""
        return self.firsts[number % len(self.firsts)]

    @cached_property
    def _taus_SJ(self) -> NDArray[np.float64]:
        """τ of every cycle if it drafts 0 … K levels."""
        reach_SK = self.rate_SK.double().cumprod(1).cumsum(1).numpy()
        return 1.0 + np.pad(reach_SK, ((0, 0), (1, 0)))

    def expected_taus(self, answers: Sequence[Answer]) -> list[float]:
        """τ that the probabilities give for every cycle of a run with the levels that were verified there.

        Args: answers: in the order in which their contexts began.
        """
        return [
            float(self._taus_SJ[(self.first(number) + turn) % self.cycles, min(cycle.drafted, self.positions)])
            for number, answer in enumerate(answers)
            for turn, cycle in enumerate(answer.cycles)
        ]

    def __str__(self) -> str:
        known_S = self.judged_S == self.positions
        was = 1 + float(self.accepted_S[known_S].double().mean()) if bool(known_S.any()) else math.nan
        return (
            f"{self.cycles:,} cycles of {len(self.counts)} contexts, {self.head} of {self.target} on {self.data}: "
            f"τ of a chain of {self.positions} is {was:.3f} as recorded, {self._taus_SJ[:, -1].mean():.3f} as replayed"
        )


def record_cycles(
    decoder: Decoder, drafter: Drafter, contexts: list[list[int]], names: dict[str, Any], rows: int, seed: int = 0
) -> tuple[Recording, Calibration]:
    """Decode contexts with a chain, and record its cycles.

    Args:
        contexts: held out: none was trained on. Those of a task follow each other (`task_after_task`).
        names: fields of Row: head, target, data.
        rows: contexts decoded at a time.
    Returns: the recording; the calibration that was fitted on every other context, with its errors on the others.
    Raises: ConfigError for a drafter that says nothing of its drafts. DataError for too few contexts or cycles.
    """
    if len(contexts) < 2:
        raise DataError(f"--record: found {len(contexts)} other questions, expected 2 or more: --calibrate-prompts")
    with asked_for_confidence(drafter) as source:
        (one, ones), (two, twos) = (
            record_each(decoder, drafter, part, rows, seed) for part in (contexts[::2], contexts[1::2])
        )
    data = names["data"]
    of_two = calibrate(one, two, "logistic", source, data)
    of_one = calibrate(two, one, "logistic", source, data)
    both = [_probabilities(of_one, one), _probabilities(of_two, two)]
    made = Recording(
        names["head"], names["target"], data, decoder.sampling.temperature, source,
        mean_error(of_two.reliability_before), mean_error(of_two.reliability_after),
        [count for count in (*ones, *twos) if count], torch.cat([logit_SK for logit_SK, _ in both]),
        torch.cat([rate_SK for _, rate_SK in both]), torch.cat([one.accepted_S, two.accepted_S]),
        torch.cat([one.judged_S, two.judged_S]),
    )  # fmt: skip
    return made, of_two


def _probabilities(calibration: Calibration, outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    """Logits and calibrated probabilities, float32 [S, K]. A draft that nobody judged may have said NaN."""
    logit_SK = outcomes.logit_SK.float().nan_to_num(nan=-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    return logit_SK, calibration.probability(logit_SK)


#: fields of a file that stand there as in Recording
PLAIN_FIELDS = ("head", "target", "data", "temperature", "source", "ece_before", "ece_after")


def write_recording(path: Path, recording: Recording) -> None:
    contexts, begin = [], 0
    for count in recording.counts:
        part = slice(begin, begin + count)
        contexts.append(
            {
                "logits": _short(recording.logit_SK[part]), "rates": _short(recording.rate_SK[part]),
                "accepted": recording.accepted_S[part].tolist(), "judged": recording.judged_S[part].tolist(),
            }
        )  # fmt: skip
        begin += count
    plain = {name: getattr(recording, name) for name in PLAIN_FIELDS}
    write_json(path, {"format": FORMAT, **plain, "contexts": contexts})


def _short(values_SK: Tensor) -> list[list[float]]:
    return [[round(value, DIGITS) for value in line] for line in values_SK.tolist()]


def read_recording(path: Path) -> Recording:
    """Raises: DataError that names the file and the field, for a file that `write_recording` did not write."""
    given = read_json(path)
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise DataError(f"{path}: found no recording, expected a file that --record wrote ({FORMAT})")

    def refuse(name: str, expected: str) -> DataError:
        return DataError(f"{path}: {name}: expected {expected}. Record it again with --record")

    for name in PLAIN_FIELDS:
        number = name in ("temperature", "ece_before", "ece_after")
        if not isinstance(given.get(name), int | float if number else str):
            raise refuse(name, "a number" if number else "a text")
    if given["source"] not in SOURCES:
        raise refuse("source", " or ".join(SOURCES))
    contexts = given.get("contexts")
    if not isinstance(contexts, list) or not contexts:
        raise refuse("contexts", "a list of one or more")
    parts: dict[str, list[Tensor]] = {}
    for name, dtype, dims in (("logits", torch.float32, 2), ("rates", torch.float32, 2),
                              ("accepted", torch.int64, 1), ("judged", torch.int64, 1)):  # fmt: skip
        try:
            parts[name] = [torch.tensor(context[name], dtype=dtype) for context in contexts]
            whole = torch.cat(parts[name])
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError, OverflowError) as error:
            raise refuse(name, "numbers of every cycle, as many in each") from error
        if whole.dim() != dims or not bool(torch.isfinite(whole).all()) or not whole.numel():
            raise refuse(name, "finite numbers of every cycle, as many in each")
    counts = [list(map(len, part)) for part in parts.values()]
    if any(other != counts[0] for other in counts) or not min(counts[0]):
        raise refuse("contexts", "one or more cycles in each, and as many logits, rates, accepted and judged drafts")
    logit_SK, rate_SK, accepted_S, judged_S = map(torch.cat, parts.values())
    if logit_SK.shape != rate_SK.shape or not bool(((rate_SK >= 0) & (rate_SK <= 1)).all()):
        raise refuse("rates", "a probability for each logit")
    Outcomes(logit_SK, accepted_S, judged_S)  # raises for counts that no cycle has
    plain = {name: given[name] for name in PLAIN_FIELDS}
    return Recording(**plain, counts=counts[0], logit_SK=logit_SK, rate_SK=rate_SK,
                     accepted_S=accepted_S, judged_S=judged_S)  # fmt: skip
