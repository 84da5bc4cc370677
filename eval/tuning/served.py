"""What serving engines read of a tuning: seconds of a step by verified tokens, and drafted tokens by batch size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from headstart.eval.tuning.costs import Costs


def step_rates(costs: Sequence[Costs]) -> dict[str, Any] | None:
    """SGLang's table of steps per second by the tokens that a step verifies; None where no chain was timed.

    A step is what SGLang's own profiler times: drafting, the target's forward over all rows, and the rest. A row
    verifies t tokens, so a batch of B verifies B · t. The step drafts the longest chain whatever is verified of it, as
    heads with a confidence head do.

    Where several batch sizes verify equally many tokens, the step takes the median of their times, as in SGLang's
    profiler. More tokens never take less time: where the measured times fall, neighbours share their mean (isotonic
    regression).
    """
    measured: dict[int, list[float]] = {}
    for cost in costs:
        for count in cost.verify_s.get("chain", {}):
            measured.setdefault(cost.batch * count, []).append(cost.cut_s(count))
    if not measured:
        return None
    tokens = sorted(measured)
    seconds = rising([statistics.median(measured[n]) for n in tokens])
    return {
        "sample_batch_tokens": tokens,
        "sample_steps_per_sec": [1 / s for s in seconds],
        "max_batch_tokens": tokens[-1],
    }


def rising(values: Sequence[float]) -> list[float]:
    """The nearest numbers (least squares) that never fall: pools of neighbours share their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
