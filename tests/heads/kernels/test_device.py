"""Which tensors go to Triton's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headstart.heads.kernels import device


@dataclass
class OnCard:
    """What is asked of a tensor."""

    dtype: torch.dtype
    is_cuda: bool = True


def test_eager_twins_run_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "triton", object())
    x: Any = OnCard(torch.bfloat16)
    assert device.wants_kernel(x) and not device.wants_kernel(torch.zeros(1))
    double: Any = OnCard(torch.float64)
    assert not device.wants_kernel(double)
    with pytest.raises(RuntimeError), device.eager_twins():
        assert not device.wants_kernel(x)
        with device.eager_twins():
            assert not device.wants_kernel(x)
        assert not device.wants_kernel(x)
        raise RuntimeError
    assert device.wants_kernel(x)
