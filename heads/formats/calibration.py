"""A calibration: how what a draft says of itself becomes the probability that the target accepts it.

A draft says a logit l. That is the output of the head's confidence head, or logit(q) of the draft's own probability
q. Where drafts are drawn, q is the probability of the most likely token: what was drawn does not show in l. p = σ(l) is
what the draft says without calibration. The probability that the first k drafts of a cycle are all accepted is
p_1 · … · p_k.
Shape legend: … any, K positions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.files import read_json
from headstart.heads.formats.sidecar import SIDECAR, annotate, verify_sidecar

#: name of the calibration in headstart.json
FIELD = "calibration"
KINDS = ("temperature", "logistic")
SOURCES = ("confidence", "draft_probability")
#: most positions of a calibration; no drafter drafts a longer chain
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Calibration:
    """p of a draft at position k: σ(l / temperatures[k]), or σ(slope · l + biases[k]).

    Attributes:
        kind: temperature (sequential temperature scaling) or logistic.
        source: what l is: confidence (of the confidence head) or draft_probability (logit(q)).
        temperatures: of every position. Beside a logistic of a confidence head they stand for engines, which read
            nothing else (`sglang_sts`); p is not computed from them then.
        slope, biases: of all positions and of every position; None and empty unless the kind is logistic.
        dataset: what was decoded to measure the errors.
        num_samples: cycles that the errors were measured on.
        ece_before, ece_after: at k, the expected calibration error of p_1 · … · p_k against "the first k drafts are all
            accepted", with bins of equal width.
        ece_of_temperatures: the same error of the temperatures that stand beside a logistic; else empty.
        reliability_before, reliability_after: (mean of p_1 · … · p_k, share that was accepted, count) of every bin that
            is not empty, over all k together.
    """

    kind: str
    source: str
    temperatures: list[float] = field(default_factory=list)
    slope: float | None = None
    biases: list[float] = field(default_factory=list)
    dataset: str = ""
    num_samples: int = 0
    ece_before: list[float] = field(default_factory=list)
    ece_after: list[float] = field(default_factory=list)
    reliability_before: list[list[float]] = field(default_factory=list)
    reliability_after: list[list[float]] = field(default_factory=list)
    ece_of_temperatures: list[float] = field(default_factory=list)

    @property
    def positions(self) -> int:
        return len(self.biases or self.temperatures)

    def probability(self, logit: Tensor) -> Tensor:
        """p of every draft, float32 [..., k] for the first k ≤ K positions. Args: logit: [..., k]."""
        count = logit.shape[-1]
        if count > self.positions:
            raise ConfigError(
                f"calibration: found {count} drafts, it was fitted for {self.positions}: draft fewer, or fit it again"
            )
        scale_K, bias_K = self.scale_and_bias(logit.device)
        return torch.sigmoid(scale_K[:count] * logit.float() + bias_K[:count])

    def scale_and_bias(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """float32 [K] each: p = σ(scale · l + bias). For captured cycles, which cannot copy them to the device."""
        if self.kind == "temperature":
            scales, biases = [1 / temperature for temperature in self.temperatures], [0.0] * self.positions
        else:
            assert self.slope is not None
            scales, biases = [self.slope] * self.positions, self.biases
        return torch.tensor(scales, device=device), torch.tensor(biases, device=device)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def mean_error(points: list[list[float]]) -> float:
    """The expected calibration error over all positions, from a calibration's `reliability_*`; NaN without points."""
    total = sum(count for *_, count in points)
    return sum(abs(said - was) * count for said, was, count in points) / total if total else math.nan


def calibration_from_json(value: Any, where: str) -> Calibration:
    """The calibration in a file. Raises: FormatError that names the field, for what no fit writes."""

    def refuse(name: str, expected: str) -> FormatError:
        shown = repr(value[name]) if name in value else "nothing"
        shown = shown if len(shown) <= 80 else shown[:80] + "…"
        return FormatError(
            f"{where}: calibration.{name} is {shown}, expected {expected}. Fit the calibration again, or delete it"
        )

    if not isinstance(value, dict):
        raise FormatError(f"{where}: calibration is {type(value).__name__}, expected an object (JSON)")
    names = [item.name for item in fields(Calibration)]
    if unknown := sorted(set(value) - set(names)):
        raise FormatError(f"{where}: calibration has an unknown field {unknown[0]!r}, expected {', '.join(names)}")
    for name, allowed in (("kind", KINDS), ("source", SOURCES)):
        if value.get(name) not in allowed:
            raise refuse(name, " or ".join(allowed))
    scaled = value["kind"] == "temperature"
    numbers = "temperatures" if scaled else "biases"
    positions = value.get(numbers)
    if not _numbers(positions) or not 1 <= len(positions) <= MAX_POSITIONS:
        raise refuse(numbers, f"1 to {MAX_POSITIONS} finite numbers")
    if not scaled and not _number(value.get("slope")):
        raise refuse("slope", "a finite number")
    beside = value.get("temperatures", [])
    if not _numbers(beside) or len(beside) not in (0, len(positions)):
        raise refuse("temperatures", f"{len(positions)} finite numbers, one per position, or none")
    if any(temperature <= 0 for temperature in beside):
        raise refuse("temperatures", "numbers above 0")
    unused: dict[str, Any] = {}
    if scaled:
        unused = {"slope": None, "biases": [], "ece_of_temperatures": []}
    elif value["source"] != "confidence":
        unused = {"temperatures": [], "ece_of_temperatures": []}
    for name, empty in unused.items():
        if value.get(name, empty) != empty:
            raise refuse(name, f"{empty} where the kind is {value['kind']} of {value['source']}")
    if not isinstance(value.get("dataset", ""), str):
        raise refuse("dataset", "a text")
    samples = value.get("num_samples", 0)
    if type(samples) is not int or samples < 0:
        raise refuse("num_samples", "a whole number, 0 or more")
    for name in ("ece_before", "ece_after", "ece_of_temperatures"):
        errors = value.get(name, [])
        if not _numbers(errors) or not all(0 <= x <= 1 for x in errors) or len(errors) not in (0, len(positions)):
            raise refuse(name, f"{len(positions)} numbers from 0 to 1, one per position, or none")
    for name in ("reliability_before", "reliability_after"):
        if not isinstance(points := value.get(name, []), list) or not all(map(_point, points)):
            raise refuse(name, "a list of [mean, share, count], mean and share from 0 to 1")
    return Calibration(**value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _point(value: Any) -> bool:
    return _numbers(value) and len(value) == 3 and 0 <= value[0] <= 1 and 0 <= value[1] <= 1 and value[2] > 0


def save_calibration(calibration: Calibration, directory: Path) -> None:
    """Put it into headstart.json of a head directory, and seal that again.

    Raises: FormatError when the directory has no headstart.json, or for a calibration that no fit makes.
    """
    value = calibration.to_json()
    calibration_from_json(value, str(directory / SIDECAR))
    annotate(directory, {FIELD: value})


def read_calibration(directory: Path) -> Calibration | None:
    """The calibration of a head directory, None where it has none. Raises: FormatError, DataError if damaged."""
    place = directory / SIDECAR
    if not place.is_file():
        return None
    side = read_json(place)
    verify_sidecar(str(place), side if isinstance(side, dict) else {})
    return calibration_of(side, str(place))


def calibration_of(side: dict[str, Any], where: str = SIDECAR) -> Calibration | None:
    """The calibration in headstart.json, None where there is none. Raises: FormatError if damaged."""
    value = side.get(FIELD)
    return None if value is None else calibration_from_json(value, where)


def sglang_sts(calibration: Calibration, drafts: int) -> dict[str, Any]:
    """What SGLang reads by `--speculative-dspark-confidence-sts-path`: temperatures of the confidence head.

    Args: drafts: drafts of a cycle as SGLang will serve the head (γ). It refuses a file of another length.
    Raises: ConfigError for a calibration that this file cannot hold.
    """
    if not calibration.temperatures or calibration.source != "confidence":
        raise ConfigError(
            f"calibration: found {calibration.kind} of {calibration.source}; SGLang's file holds temperatures of a "
            "confidence head: fit those, or serve without the file"
        )
    if calibration.positions != drafts:
        raise ConfigError(
            f"calibration: found {calibration.positions} temperatures and {drafts} drafts of a cycle; SGLang refuses a "
            f"file of another length: fit the calibration with {drafts} drafts"
        )
    return {
        "temperatures": calibration.temperatures,
        "dataset": calibration.dataset,
        "num_samples": calibration.num_samples,
        "ece_before": calibration.ece_before,
        # its own error: the logistic beside it, which the engine does not compute, may have a smaller one
        "ece_after": calibration.ece_after if calibration.kind == "temperature" else calibration.ece_of_temperatures,
    }
