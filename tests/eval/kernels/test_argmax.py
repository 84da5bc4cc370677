"""The most likely token's kernel against its eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eval_help import DEVICE, needs_kernels
from torch import Tensor

import headstart.eval.kernels.argmax
from headstart.eval.kernels.argmax import (
    argmax,
    argmax_eager,
    argmax_kernel,
    argmax_with_logit,
    argmax_with_logit_eager,
    argmax_with_logit_kernel,
)
from headstart.heads.sampling import FARTHEST

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("size", [1, 61, 4096, 4097, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_first_of_equals(size: int, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(size)
    logits = torch.randint(4, (6, size), generator=noise).to(DEVICE, dtype)
    logits[1] = -torch.inf
    logits[2, size // 2] = 9.0
    logits[3, size - 1] = torch.nan
    ids = torch.arange(size, device=DEVICE) * 3 + 1
    for rows in (logits, torch.cat([logits, logits], 1)[:, :size]):
        assert torch.equal(argmax_kernel(rows), argmax_eager(rows))
        assert torch.equal(argmax_kernel(rows, ids), argmax_eager(rows, ids))


@pytest.mark.parametrize("size", [1, 2, 61, 4096, 4097, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_with_its_logit(size: int, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(size)
    logits = (torch.randn((9, size), generator=noise) * 3).to(DEVICE, dtype)
    logits[1] = 2.0  # all alike
    logits[2, size // 2] = 12.0  # nearly certain
    logits[3, size - 1] = 60.0  # certain
    logits[4, size // 2 :] = -torch.inf  # whole parts of nothing
    logits[5] = -torch.inf
    logits[6, 0] = torch.nan
    logits[7, size - 1] = torch.inf
    logits[8] -= 1000.0
    ids = torch.arange(size, device=DEVICE) * 3 + 1
    for rows in (logits, torch.cat([logits, logits], 1)[:, :size]):
        for names in (None, ids):
            best, logit = argmax_with_logit_kernel(rows, names)
            wanted, expected = argmax_with_logit_eager(rows, names)
            assert torch.equal(best, wanted) and logit.dtype == torch.float32
            assert torch.equal(best, argmax_kernel(rows, names))
            torch.testing.assert_close(logit, expected, rtol=1e-5, atol=1e-5)
    assert logit[5:8].tolist() == pytest.approx([-FARTHEST] * 3)
    # without the others, of which rounding would leave nothing: log(1 - q) of the row in float64
    row, naive = logits[2].double(), logits[2].double().softmax(-1)
    if 2 < size < 4096:
        others = naive[torch.arange(size, device=DEVICE) != int(row.argmax())].sum()
        assert float(logit[2]) == pytest.approx(float(naive.max().log() - others.log()), abs=1e-4)


@pytest.mark.parametrize("run", [argmax_kernel, argmax_with_logit_kernel])
def test_the_logit_takes_no_launch_more(run: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    original = headstart.eval.kernels.argmax.launch

    def counted(kernel: object, *rest: object, **options: object) -> None:
        launched.append(kernel)
        original(kernel, *rest, **options)

    monkeypatch.setattr("headstart.eval.kernels.argmax.launch", counted)
    run(torch.zeros((2, 9000), device=DEVICE))
    assert len(launched) == 2


def test_any_shape_is_taken() -> None:
    logits = torch.randn((2, 3, 70), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    best, logit = argmax_with_logit(logits)
    assert torch.equal(best, argmax(logits)) and best.shape == logit.shape == (2, 3)
    torch.testing.assert_close(logit, torch.logit(logits.double().softmax(-1).amax(-1)).float(), rtol=1e-5, atol=1e-5)
    best, logit = argmax_with_logit_kernel(logits[0, :0])
    assert best.shape == logit.shape == (0,)
