"""Gradients of a head that neither DDP nor FSDP2 wraps: one buffer, summed over the ranks in a few large pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: bytes summed by one collective: large enough for full bandwidth, small enough for the ring to pipeline
BUCKET_BYTES = 256 << 20


class FlatGradients:
    """Makes every `.grad` a view of one zeroed buffer per dtype, so that gradients are summed without copies.

    The views must stay, so gradients must be zeroed in place (`zero_grad(set_to_none=False)`).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.buffers: list[Tensor] = []
        for (dtype, device), members in groups.items():
            # 16-byte alignment of every view, which vectorised kernels want
            sizes = [-(-p.numel() * dtype.itemsize // 16) * 16 // dtype.itemsize for p in members]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            start = 0
            for parameter, size in zip(members, sizes, strict=True):
                parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
                start += size
            self.buffers.append(buffer)

    def sum_over_ranks(self) -> Callable[[], None]:
        """Begin to replace every gradient by its sum over the ranks. Returns what waits until that is done.

        On GPUs the sums travel while the device does what is queued in between.
        """
        waiting = [
            dist.all_reduce(part, async_op=True)
            for buffer in self.buffers
            for part in buffer.split(max(BUCKET_BYTES // buffer.element_size(), 1))
        ]

        def finish() -> None:
            for work in waiting:
                work.wait()

        return finish


def fill_gradients(head: nn.Module) -> None:
    """Give a zero gradient to parameters that the window left without one.

    AdamW leaves out a parameter without a gradient. Which ones have none would depend on the number of ranks.
    """
    for parameter in head.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
