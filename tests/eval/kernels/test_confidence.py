"""The confidence head's kernel against a naive loop: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, needs_kernels, random
from torch import Tensor

from headstart.eval.kernels.confidence import confidence, confidence_eager, confidence_kernel

VOCAB = 50


def example(drafts: int, batch: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(1)
    roots_B = torch.randint(VOCAB, (batch,), generator=noise).to(DEVICE)
    tokens_BK = torch.randint(VOCAB, (batch, drafts), generator=noise).to(DEVICE)
    return random(drafts, batch, size, seed=2), roots_B, tokens_BK, random(size, seed=3), random(VOCAB, seed=4)


def test_the_eager_twin_is_the_naive_one() -> None:
    hidden_KBD, roots_B, tokens_BK, weight_D, table_V = example(3, 2, 5)
    found_BK = confidence(*example(3, 2, 5))
    for b in range(2):
        before = [int(roots_B[b]), *tokens_BK[b].tolist()]
        for k in range(3):
            expected = sum(float(hidden_KBD[k, b, d]) * float(weight_D[d]) for d in range(5))
            expected += float(table_V[before[k]])
            assert float(found_BK[b, k]) == pytest.approx(expected, abs=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("drafts", "batch", "size"), [(1, 1, 16), (7, 3, 100), (4, 2, 2048), (2, 5, 4100), (3, 0, 8)])
def test_the_kernel_is_its_eager_twin(drafts: int, batch: int, size: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    hidden_KBD, *rest = example(drafts, batch, size)
    hidden_KBD = hidden_KBD.to(dtype)
    expected = confidence_eager(hidden_KBD, *rest)
    torch.testing.assert_close(confidence_kernel(hidden_KBD, *rest), expected, rtol=1e-4, atol=2e-3)
    # not contiguous
    other = hidden_KBD.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(confidence_kernel(other, *rest), expected, rtol=1e-4, atol=2e-3)
