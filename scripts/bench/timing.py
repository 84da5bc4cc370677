"""Clocks of the benchmarks, and where the device spends its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Timer:
    """Marks on the device's clock (events) or the host's; reading them waits for the device, marking does not."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._runs: list[list[tuple[str, Any]]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._runs.append([("", self._now())])

    def mark(self, name: str) -> None:
        self._runs[-1].append((name, self._now()))

    def read(self) -> list[dict[str, float]]:
        """Per run, milliseconds between successive marks; the last part of a run reaches to the next run's start."""
        if self._cuda:
            torch.cuda.synchronize()
        times: list[dict[str, float]] = []
        for number, run in enumerate(self._runs):
            ends = run[1:]
            if number + 1 < len(self._runs):
                ends[-1] = (ends[-1][0], self._runs[number + 1][0][1])
            times.append(
                {
                    name: before.elapsed_time(after) if self._cuda else (after - before) * 1e3
                    for (_, before), (name, after) in zip(run, ends, strict=False)
                }
            )
        return times


def measure_matmul(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """FLOP/s of a large matrix product on random data."""
    size = size if device.type == "cuda" else 512
    a, b = torch.randn(size, size, device=device, dtype=dtype), torch.randn(size, size, device=device, dtype=dtype)
    timer = Timer(device)
    for _ in range(3):
        a @ b
    for _ in range(10):
        timer.start()
        a @ b
        timer.mark("matmul")
    return 2 * size**3 / (statistics.median(run["matmul"] for run in timer.read()) / 1e3)


class Clock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self._last, self._spent = time.perf_counter(), {}  # type: ignore[var-annotated]

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self._spent[name] = self._spent.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return "  ".join(f"{name} {seconds:.1f}" for name, seconds in self._spent.items())


def print_kernels(step: Callable[[], object], most: int = 30) -> None:
    """Device time by kernel over one step: what a slow case spends its time on."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"kernels: {total / 1e3:.1f} ms in {sum(row.count for row in rows)} launches")
    for row in rows[:most]:
        print(f"  {row.self_device_time_total / 1e3:8.2f} ms  {row.count:5d} ×  {row.key[:110]}")
