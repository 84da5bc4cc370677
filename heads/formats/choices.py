"""What `headstart tune` kept in headstart.json: the choice at every batch size, and tables that engines read.

| in `tuned.DEVICE` | for | holds |
|---|---|---|
| `batches` | Headstart, launch commands, cards | the best tree and the best chain of every measured batch size |
| `tokens_per_batch` | vLLM | [first batch size, last one, drafted tokens], 0 tokens where drafting does not pay |
| `step_rates` | SGLang | steps per second by the tokens that a step verifies (`sample_batch_tokens`, …) |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.heads.errors import FormatError
from headstart.heads.families import FAMILIES
from headstart.heads.formats.sidecar import SIDECAR

TOKENS_PER_BATCH, STEP_RATES = "tokens_per_batch", "step_rates"
#: last batch size of a table of drafted tokens: no engine runs as many requests at once
LAST_BATCH = 1 << 16
#: most drafted tokens that a table may name, and most rows of a table
MOST_TOKENS, MOST_ROWS = 1024, 4096


@dataclass(frozen=True)
class TunedBatch:
    """The choice of `headstart tune` for one GPU and batch size.

    Attributes:
        label: of the best tree. tau: its τ. predicted, measured: its speed-ups. speculate: whether drafting pays.
        chain: length of the best chain, which is what engines draft; None if none was measured.
        chain_speedup: its predicted speed-up.
        kind: of the best tree (`eval.tree.kind`).
    """

    device: str
    batch: int
    label: str
    tau: float
    predicted: float
    measured: float
    speculate: bool
    chain: int | None
    chain_speedup: float | None
    kind: str


def tuned_batches(side: dict[str, Any]) -> list[TunedBatch]:
    """The choices in headstart.json, sorted by GPU and batch size. Malformed entries are left out."""
    tuned = side.get("tuned")
    choices = []
    for device, entry in tuned.items() if isinstance(tuned, dict) else []:
        batches = entry.get("batches") if isinstance(entry, dict) else None
        for batch, choice in batches.items() if isinstance(batches, dict) else []:
            try:
                best = choice if choice["tree"]["kind"] == "chain" else choice.get("best_chain")
                choices.append(
                    TunedBatch(
                        str(device), int(batch), str(choice["label"]), float(choice["tau"]),
                        float(choice["predicted_speedup"]), float(choice["measured_speedup"]),
                        bool(choice["speculate"]), int(best["tree"]["depth"]) if best else None,
                        float(best["predicted_speedup"]) if best else None, str(choice["tree"]["kind"]),
                    )
                )  # fmt: skip
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
    return sorted(choices, key=lambda choice: (choice.device, choice.batch))


def tuned_chain(side: dict[str, Any]) -> TunedBatch | None:
    """The choice that launch commands follow: of the smallest batch at which drafting pays, on the fastest GPU."""
    paying = [choice for choice in tuned_batches(side) if choice.speculate and choice.chain]
    return min(paying, key=lambda choice: (choice.batch, -choice.measured), default=None)


@dataclass(frozen=True)
class Measured:
    """What `headstart eval` measured before the export.

    Attributes:
        pays: whether drafting pays at `batch`; None: it cannot be told.
        tokens: length of the fastest chain on `device`; None where none was measured that gains.
        speedup: of what was evaluated, with its 95 % interval; None where there is none.
        on_cpu: measured on a CPU, which says nothing about a card that serves.
    """

    device: str
    pays: bool | None
    tokens: int | None
    speedup: float | None
    interval: tuple[float, float] | None
    batch: int | None
    on_cpu: bool


def measured_of(side: dict[str, Any]) -> Measured | None:
    """The evaluation that headstart.json tells of; None where it tells of none, or of a malformed one."""
    found = side.get("measured")
    if not isinstance(found, dict):
        return None
    try:
        pays, tokens, speedup, interval, batch = (
            found[name] for name in ("pays", "tokens", "speedup", "speedup_ci95", "batch_size")
        )
        if pays not in (True, False, None) or not (tokens is None or 1 <= int(tokens) <= MOST_TOKENS):
            return None
        ends = None if interval is None else (float(interval[0]), float(interval[1]))
        return Measured(
            str(found["device"]), pays, None if tokens is None else int(tokens),
            None if speedup is None else float(speedup), ends, None if batch is None else int(batch),
            bool(found["on_cpu"]),
        )  # fmt: skip
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None


def drafted_tokens(side: dict[str, Any]) -> int:
    """Tokens that a launch command asks for: the tuned number, the measured one, or the usual one; at most what the
    family drafts."""
    choice, measured = tuned_chain(side), measured_of(side)
    depth = int(side["config"].get("depth") or 3)
    tokens = choice.chain if choice is not None else measured.tokens if measured is not None else None
    return FAMILIES[side["type"]].files.drafted_tokens(depth, tokens)


@dataclass(frozen=True)
class Tables:
    """Tables for engines that choose at run time how many tokens are drafted or verified.

    Attributes:
        device: GPU that was measured.
        tokens: [first batch size, last one, drafted tokens], from batch size 1 on without a gap; [] = not measured.
        rates: sample_batch_tokens (tokens that a step verifies, ascending), sample_steps_per_sec (never rising) and
            max_batch_tokens; None = not measured.
    """

    device: str
    tokens: list[list[int]]
    rates: dict[str, Any] | None


def tokens_by_batch(chosen: Mapping[int, int]) -> list[list[int]]:
    """[first batch size, last one, drafted tokens] of every range, for a `tokens_per_batch`.

    A batch size takes the tokens of the measured one whose ratio to it is smallest; of two, the smaller.

    Args: chosen: measured batch size → drafted tokens, 0 where drafting does not pay.
    """
    ranges: list[list[int]] = []
    sizes, first = sorted(chosen), 1
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        last = LAST_BATCH if following is None else math.isqrt(size * following)
        if ranges and ranges[-1][2] == chosen[size]:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, chosen[size]])
        first = last + 1
    return ranges


def tables_of(side: dict[str, Any], where: str = SIDECAR) -> Tables | None:
    """The tables of the GPU that launch commands follow, else of the first GPU that has any.

    Args: side: headstart.json. where: its name in messages.
    Raises: FormatError that names the field, for a table of any GPU that no tuning makes.
    """
    found = _tables(side, where)
    followed = tuned_chain(side)
    if followed is not None and followed.device in found:
        return found[followed.device]
    return next(iter(found.values()), None)


def _tables(side: dict[str, Any], where: str) -> dict[str, Tables]:
    """Device → its tables, where it has any."""
    tuned, found = side.get("tuned"), {}
    for device, entry in sorted(tuned.items()) if isinstance(tuned, dict) else []:
        if isinstance(entry, dict) and entry.keys() & {TOKENS_PER_BATCH, STEP_RATES}:
            tokens, rates = entry.get(TOKENS_PER_BATCH), entry.get(STEP_RATES)
            name = f"{where}: tuned[{device!r}]"
            if tokens is not None:
                _check_tokens(tokens, f"{name}.{TOKENS_PER_BATCH}")
            if rates is not None:
                _check_rates(rates, f"{name}.{STEP_RATES}")
            found[str(device)] = Tables(str(device), tokens or [], rates)
    return found


def _refuse(name: str, value: Any, expected: str) -> FormatError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:80] + "…"
    return FormatError(f"{name} is {shown}, expected {expected}. Run `headstart tune` again")


def _check_tokens(value: Any, name: str) -> None:
    """Raises: FormatError where it is no table of drafted tokens."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_ROWS:
        raise _refuse(name, value, "a list of [first batch size, last one, drafted tokens]")
    before = 0
    for n, row in enumerate(value):
        if not isinstance(row, list) or len(row) != 3 or any(type(number) is not int for number in row):
            raise _refuse(f"{name}[{n}]", row, "three whole numbers: first batch size, last one, drafted tokens")
        first, last, tokens = row
        if first != before + 1 or last < first:
            raise _refuse(f"{name}[{n}]", row, f"a range that begins at batch size {before + 1}: there are no gaps")
        if not 0 <= tokens <= MOST_TOKENS:
            raise _refuse(f"{name}[{n}]", row, f"0 to {MOST_TOKENS} drafted tokens")
        before = last


def _check_rates(value: Any, name: str) -> None:
    """Raises: FormatError where it is no table of steps per second."""
    names = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
    if not isinstance(value, dict) or set(value) != set(names):
        raise _refuse(name, value, f"an object with {', '.join(names)}")
    tokens, rates, most = (value[part] for part in names)
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= MOST_ROWS or any(type(n) is not int for n in tokens):
        raise _refuse(f"{name}.{names[0]}", tokens, f"1 to {MOST_ROWS} whole numbers")
    if tokens[0] < 1 or any(b <= a for a, b in zip(tokens, tokens[1:], strict=False)):
        raise _refuse(f"{name}.{names[0]}", tokens, "ascending numbers of tokens, 1 or more")
    numbers = isinstance(rates, list) and all(type(r) in (int, float) and math.isfinite(r) and r > 0 for r in rates)
    if not numbers or len(rates) != len(tokens):
        raise _refuse(f"{name}.{names[1]}", rates, f"{len(tokens)} finite numbers above 0, one per number of tokens")
    if any(b > a for a, b in zip(rates, rates[1:], strict=False)):
        raise _refuse(f"{name}.{names[1]}", rates, "numbers that never rise: more tokens take no less time")
    if type(most) is not int or most < tokens[-1]:
        raise _refuse(f"{name}.{names[2]}", most, f"a whole number, {tokens[-1]} or more")
