"""Clocks of the benchmarks, the device time of each kernel, and the files of their rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headstart.heads.files import write_json


class Timer:
    """Times the parts of repeated runs: by the device's clock (events) on CUDA, else by the host's.

    To mark does not wait for the device, to read does.
    """

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


class Clock:
    """Seconds of the host between marks, added up by name."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spent: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self._spent[name] = self._spent.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return "  ".join(f"{name} {seconds:.1f}" for name, seconds in self._spent.items())


def print_kernels(step: Callable[[], object], most: int = 30) -> None:
    """Print the device time of each kernel over one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"kernels: {total / 1e3:.1f} ms in {sum(row.count for row in rows)} launches")
    for row in rows[:most]:
        print(f"  {row.self_device_time_total / 1e3:8.2f} ms  {row.count:5d} ×  {row.key[:110]}")


def add_rows(path: Path | None, records: Sequence[Any], key: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Add records (dataclasses) to the JSON list at `path`; None = do nothing.

    Args: key: of a row; a new row takes the place of earlier ones with the same key. None = all earlier ones stay.
    """
    if path is None:
        return
    new = [asdict(record) for record in records]
    earlier = json.loads(path.read_text()) if path.is_file() else []
    if key is not None:
        taken = {key(row) for row in new}
        earlier = [row for row in earlier if key(row) not in taken]
    write_json(path, earlier + new)
