"""The norms' kernel against its eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels.norm import NormWeights, norm_eager, norm_kernel

pytest.importorskip("triton")


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_norm(centred: bool, bias: bool, dtype: torch.dtype) -> None:
    x = random(5, 72, dtype=dtype) + 0.5
    norm = NormWeights(random(72, seed=1), 1e-5, random(72, seed=2) if bias else None, centred)
    close(norm_kernel(x, norm), norm_eager(x, norm))


@pytest.mark.parametrize("centred", [False, True])
def test_the_eager_twin_is_torchs_own(centred: bool) -> None:
    x, factor, bias = random(5, 72), random(72, seed=1), random(72, seed=2)
    found = norm_eager(x, NormWeights(factor, 0.1, bias, centred))
    own = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    extra = (bias,) if centred else ()
    expected = own(x, (72,), factor, *extra, eps=0.1)
    torch.testing.assert_close(found, expected if centred else expected + bias)
    assert found.device.type == DEVICE
