"""Sums of a training run between two records of its log, kept on the device."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from headstart.heads.host_memory import peak_bytes
from headstart.train.sharing.distributed import sum_over_ranks
from headstart.train.step import SumNames, WindowSums


class Meters:
    """Sums since the last record. Only `read` makes the host wait for the device.

    Args:
        names: what WindowSums.sums_S holds.
        peak_flops: FLOP/s of this device; None = MFU is not measured.
    Attributes:
        rate: learning rate of the last step.
        steps: optimiser steps since the last record.
    """

    def __init__(self, names: SumNames, device: torch.device, peak_flops: float | None = None):
        self._names, self._device, self._peak = names, device, peak_flops
        self.rate = 0.0
        self._since = time.perf_counter()
        self._queued: torch.cuda.Event | None = None
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(2 + len(self._names), device=self._device)
        self._norm: Tensor | None = None
        self.steps = self._rows = self._supervised = 0
        self._waited = self._flops = 0.0

    def restart_clock(self) -> None:
        """Do not count the time until now (loading, resuming) in the rates."""
        self._since = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Do not count a pause of the run in the rates."""
        self._since += seconds

    def add(self, sums: WindowSums, norm: Tensor) -> None:
        self._sums[:2] += torch.stack([sums.loss, sums.trained])
        self._sums[2:] += sums.sums_S
        self._supervised += sums.supervised
        self._norm = norm
        self.steps += 1

    def add_host(self, rows: int, waited: float, flops: float = 0.0) -> None:
        """End a step. Args: rows: of all ranks; waited: seconds that the device was idle; flops: of this rank."""
        self._rows += rows
        self._flops += flops
        self._waited += waited
        self.mark()

    def mark(self) -> None:
        """Mark the work that is queued on the device now, for `device_idle`."""
        if self._device.type == "cuda":
            self._queued = torch.cuda.Event()
            self._queued.record()

    def device_idle(self) -> bool:
        """Whether the device has finished the work queued before the last mark (always true on a CPU)."""
        return self._queued is None or self._queued.query()

    def read(self) -> tuple[dict[str, float], int, int]:
        """(values of the record, rows supervised at depth 1, positions that carry a loss of any term), over all ranks.

        Starts the sums anew. The loss is the mean over the steps in which some row carried one. Memory is this rank's
        peak so far, of the process and of its GPU.
        """
        # seconds that the FLOPs would take at full speed
        share = 0.0 if self._peak is None else self._flops / self._peak
        extra = torch.tensor([self._supervised, share, 1.0], device=self._device)
        sums = sum_over_ranks(torch.cat([self._sums, extra])).cpu()
        # ranks hold parts of the loss, but each counts every step: its sum is divided by the number of ranks
        loss, trained = float(sums[0]), float(sums[1] / sums[-1])
        sums_S = sums[2:-3]
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        values: dict[str, float] = {}
        if self._norm is not None:  # not all steps were skipped
            if trained:
                values["train/loss"] = loss / trained
            values |= self._names.ratios(sums_S, "train")
            values["grad_norm"] = float(self._norm)
        values |= {
            "lr": self.rate,
            "tokens_per_s": self._rows / seconds,
            "data_wait": self._waited / seconds,
        }
        if self._peak is not None:
            values["mfu"] = float(sums[-2] / sums[-1]) / seconds
        values["host_memory_gib"] = peak_bytes() / 2**30
        if self._device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        self._since = now
        self._reset()
        return values, int(sums[-3]), int(self._names.counts(sums_S).sum())
