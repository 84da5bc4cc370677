"""A draft's inputs against their eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels.draft_input import DraftInput, draft_input_eager, draft_input_kernel
from headstart.eval.kernels.norm import NormWeights

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("width", "normed"), [(72, True), (64, False), (600, True)])
def test_draft_input(width: int, normed: bool, dtype: torch.dtype) -> None:
    tokens = torch.tensor([[3, 0, 10], [3, 7, 1]], device=DEVICE)
    under = torch.tensor([[1, 0, 1], [1, 1, 0]], device=DEVICE)
    norms = (NormWeights(random(width, seed=1), 1e-5), NormWeights(random(width, seed=2), 1e-3)) if normed else None
    for table in (random(11, width, dtype=dtype, seed=3), random(11, width, seed=3)):
        for rows, of in ((3, None), (2, under)):
            source, g = DraftInput(table, norms), random(2, rows, width, dtype=dtype, seed=4)
            found, expected = draft_input_kernel(tokens, g, source, of), draft_input_eager(tokens, g, source, of)
            assert found[0].dtype == dtype and found[0].shape == (6, 2 * width)
            for half in (slice(None, width), slice(width, None)):
                close(found[0][:, half], expected[0][:, half])
            assert torch.equal(found[1], expected[1])
            assert torch.equal(found[1].view(2, 3, width)[1, 2], g[1, 2 if of is None else 0])
        # the first rows of each sequence of a larger tensor are read where they stand
        larger = random(2, 5, width, dtype=dtype, seed=5)
        for part, of in ((larger[:, :3], None), (larger[:, 1:3], under)):
            found = draft_input_kernel(tokens, part, source, of)
            expected = draft_input_kernel(tokens, part.contiguous(), source, of)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with pytest.raises(ValueError, match="3 tokens and 2 features per sequence"):
        draft_input_kernel(tokens, g, source)
