"""RMSNorm's kernel against its eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels.norm import NormWeights, norm_eager, norm_kernel

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, norm = random(5, 72, dtype=dtype), NormWeights(random(72, seed=1), 1e-5)
    close(norm_kernel(x, norm), norm_eager(x, norm))
