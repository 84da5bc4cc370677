"""τ and acceptance from cycles, by the definition of methods §0; speed and latency from what was timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headstart.eval.decoding.decode import Cycle, Decoded

#: samples of the prompts that are drawn for a 95 % interval
RESAMPLES = 1000


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of cycles.

    Attributes:
        tau: tokens committed per target forward after prefill. Forwards without a draft count as well. Tokens beyond a
            stop token or the length limit do not count, so forwards × tau is exactly what was decoded.
        per_position: share of the cycles with a draft in which depth d was accepted.
        per_position_conditional: share of those that accepted depth d - 1 in which d was accepted too; None for none.
        forwards, tokens, drafts: target forwards, committed tokens, cycles with a draft.
    """

    tau: float
    per_position: list[float]
    per_position_conditional: list[float | None]
    forwards: int
    tokens: int
    drafts: int


def acceptance(cycles: Iterable[Cycle]) -> Acceptance:
    """Acceptance over the cycles of any rows. Without a forward (all answers have one token) τ is 1 by convention."""
    cycles = list(cycles)
    tokens = sum(cycle.committed for cycle in cycles)
    drafts = sum(cycle.drafted > 0 for cycle in cycles)
    deepest = max((cycle.drafted for cycle in cycles), default=0)
    reached = [sum(cycle.accepted >= depth for cycle in cycles if cycle.drafted) for depth in range(deepest + 1)]
    return Acceptance(
        tau=tokens / len(cycles) if cycles else 1.0,
        per_position=[count / drafts for count in reached[1:]],
        per_position_conditional=[
            count / before if before else None for before, count in zip(reached, reached[1:], strict=False)
        ],
        forwards=len(cycles),
        tokens=tokens,
        drafts=drafts,
    )


def bootstrap_tau(per_prompt: Sequence[Sequence[Cycle]], seed: int) -> list[float] | None:
    """95 % interval of τ over prompts drawn with replacement; None with fewer than two prompts.

    A sample without any forward has τ 1, as in `acceptance`.
    """
    if len(per_prompt) < 2:
        return None
    tokens, forwards = _resampled([(sum(c.committed for c in cycles), len(cycles)) for cycles in per_prompt], seed).T
    return _interval(np.where(forwards > 0, tokens / np.maximum(forwards, 1), 1.0))


def _resampled(rows: Sequence[Sequence[float]], seed: int) -> np.ndarray:
    """Column sums of RESAMPLES samples of the rows, drawn with replacement: [RESAMPLES, columns]."""
    table = np.array(rows, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(table), (RESAMPLES, len(table)))
    return table[chosen].sum(1)


def _interval(values: np.ndarray) -> list[float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return [float(low), float(high)]


@dataclass
class Pace:
    """One prompt decoded alone, plainly and speculatively: tokens of the decode phase, and the seconds they took."""

    plain_tokens: int = 0
    plain_s: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


def bootstrap_speedup(paces: Sequence[Pace], seed: int) -> list[float] | None:
    """95 % interval of the speed-up over prompts drawn with replacement.

    None with fewer than two prompts, where a prompt was decoded in one way only, and where one way made no token after
    the first of each prompt. Samples without a plain token have no speed-up and are left out.
    """
    if len(paces) < 2 or not all(pace.plain_s and pace.seconds for pace in paces):
        return None
    if not any(pace.plain_tokens for pace in paces) or not any(pace.tokens for pace in paces):
        return None
    sums = _resampled([(pace.plain_tokens, pace.plain_s, pace.tokens, pace.seconds) for pace in paces], seed)
    plain_tokens, plain_s, tokens, seconds = sums[sums[:, 0] > 0].T
    return _interval(tokens / seconds / (plain_tokens / plain_s)) if len(tokens) else None


def speedup(speculative: float | None, plain: float | None) -> float | None:
    """Ratio of two rates in tokens/s; None where one was not measured."""
    return speculative / plain if speculative and plain else None


def expected_tau(rates: Sequence[float]) -> float:
    """τ = 1 + Σ_d Π_{i ≤ d} rate_i. Args: rates: probability that a level is accepted if all levels before it are.

    The last cycle of an answer is cut by a stop token or the length limit, so the measured τ lies a little below.
    """
    return 1.0 + float(np.cumprod(np.asarray(rates, dtype=np.float64)).sum())


@dataclass
class Timed:
    """Seconds and tokens of one way of decoding, gathered over batches.

    Attributes:
        prefill_s, decode_s: seconds of the two phases.
        tokens: of the decode phase.
        first_s: seconds to the first token, one entry per prompt, from the start of its prefill. Prompts that begin
            together wait for each other.
        token_s: seconds per token of the decode phase, one entry per token: a cycle's seconds divided by the tokens
            that it committed for the row.
        rows: rows that were still decoding, summed over all cycles.
        cycles: of all batches.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    rows: int = 0
    cycles: int = 0

    def add(self, decoded: Decoded) -> None:
        self.prefill_s += decoded.prefill_s
        self.decode_s += decoded.decode_s
        self.tokens += decoded.decode_tokens
        self.first_s += [answer.first_s for answer in decoded.answers]
        self.token_s += token_seconds(decoded)
        self.rows += sum(len(answer.cycles) for answer in decoded.answers)
        self.cycles += max(answer.before + len(answer.cycles) for answer in decoded.answers)

    @classmethod
    def sum(cls, parts: Iterable[Timed]) -> Timed:
        total = cls()
        for part in parts:
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.decode_s if self.tokens and self.decode_s else None

    @property
    def row_tokens_per_s(self) -> float | None:
        """Tokens per second of a row while it decodes: places of a batch whose rows have ended do not count."""
        return len(self.token_s) / sum(self.token_s) if self.token_s and sum(self.token_s) else None

    @property
    def active_rows(self) -> float | None:
        """Mean number of rows that a cycle decoded: it falls as rows of a batch end."""
        return self.rows / self.cycles if self.cycles else None

    def latency(self) -> dict[str, float | None] | None:
        """Milliseconds to the first token and per later token, median and 95th percentile; None where nothing ran."""
        if not self.first_s:
            return None
        return {
            f"{name}_p{percent}_ms": float(np.percentile(values, percent)) * 1e3 if values else None
            for name, values in (("first_token", self.first_s), ("token", self.token_s))
            for percent in (50, 95)
        }


def token_seconds(decoded: Decoded) -> list[float]:
    """Seconds of every token of the decode phase: a cycle's seconds ÷ the tokens it committed for the row."""
    return [
        seconds / cycle.committed
        for answer in decoded.answers
        for cycle, seconds in zip(answer.cycles, decoded.cycle_s[answer.before :], strict=False)
        for _ in range(cycle.committed)
    ]
