"""The walk's kernel against a naive loop: on a GPU, or in Triton's interpreter, where programs take turns."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, needs_kernels, random
from torch import Tensor

from headstart.eval.kernels.walk import Walk, walk, walk_eager, walk_kernel

VOCAB = 900


def naive_walk(base_KBU: Tensor, roots_B: Tensor, table_Vr: Tensor, up_Ur: Tensor, ids: list[int]) -> list[list[int]]:
    """One sequence, one step and one token at a time."""
    said = []
    for b, token in enumerate(roots_B.tolist()):
        row = []
        for base_BU in base_KBU:
            logits = [float(base_BU[b, u]) + float(table_Vr[token] @ up_Ur[u]) for u in range(len(ids))]
            token = ids[max(range(len(ids)), key=lambda u: (logits[u], -u))]
            row.append(token)
        said.append(row)
    return said


def example(steps: int, batch: int, size: int, rank: int, reduced: bool) -> tuple[Tensor, Tensor, Walk]:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:size].sort().values.to(DEVICE)
    vocab = VOCAB if reduced else size
    made = Walk(random(vocab, rank, seed=2), random(size, rank, seed=3), ids if reduced else None, steps)
    roots_B = torch.randint(vocab, (batch,), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    return random(steps, batch, size, seed=5), roots_B, made


@pytest.mark.parametrize("reduced", [True, False])
def test_the_eager_walk_is_the_naive_one(reduced: bool) -> None:
    base, roots, made = example(4, 3, 70, 5, reduced)
    ids = list(range(70)) if made.ids_U is None else made.ids_U.tolist()
    expected = naive_walk(base, roots, made.table_Vr, made.up_Ur, ids)
    assert walk(base, roots, made).tolist() == walk_eager(base, roots, made).tolist() == expected
    # without the correction other tokens are said
    assert base.argmax(-1).t().tolist() != expected


@needs_kernels
@pytest.mark.skipif(DEVICE == "cuda", reason="float32 goes to the eager twin on a GPU")
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize(("batch", "size", "rank"), [(1, 300, 20), (1, 128, 16), (3, 200, 5), (17, 130, 16)])
@pytest.mark.parametrize(("programs", "together"), [(1, True), (1, False), (2, False), (132, False)])
def test_the_kernel_is_the_eager_walk(
    programs: int, together: bool, batch: int, size: int, rank: int, reduced: bool
) -> None:
    """Stretches of one tile, of several, the last one cut; counters are zero again after each launch."""
    base, roots, made = example(4, batch, size, rank, reduced)
    for steps in (4, 4, 2):
        found = walk_kernel(base[:steps], roots, made, programs, together)
        assert torch.equal(found, walk_eager(base[:steps], roots, made))
        assert not made.counters.any()


@needs_kernels
def test_of_equal_logits_the_lower_id_wins_and_nan_counts_as_largest() -> None:
    size, dtype = 500, torch.float32 if DEVICE == "cpu" else torch.bfloat16
    zeros = torch.zeros(size, 16, device=DEVICE, dtype=dtype)
    base = torch.zeros(3, 5, size, device=DEVICE, dtype=dtype)
    base[:, 1] = -torch.inf
    base[:, 2, [70, 300]] = 1.0
    base[:, 3, size - 1] = torch.nan
    base[:, 3, 3] = 1.0
    base[:, 4, [255, 256]] = torch.inf
    expected = [[0] * 3, [0] * 3, [70] * 3, [size - 1] * 3, [255] * 3]
    made, roots = Walk(zeros, zeros, None, 3), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    for batch in (slice(0, 5), *(slice(n, n + 1) for n in range(5))):
        for programs in (1, 3):
            found = walk_kernel(base[:, batch], roots[batch], made, programs, together=programs == 1)
            assert found.tolist() == walk_eager(base[:, batch], roots[batch], made).tolist() == expected[batch]


def near_best(base_KBU: Tensor, roots_B: Tensor, made: Walk, said_BK: Tensor, slack: float) -> bool:
    """Whether each token's logit is the best one's but for rounding, given the tokens said before it."""
    previous_B, ids_U = roots_B, made.ids_U
    for base_BU, said_B in zip(base_KBU, said_BK.unbind(1), strict=True):
        logits_BU = base_BU.float() + made.table_Vr[previous_B].float() @ made.up_Ur.float().t()
        column_B = said_B if ids_U is None else torch.searchsorted(ids_U, said_B)
        if ids_U is not None and not torch.equal(ids_U[column_B], said_B):
            return False
        if (logits_BU.gather(1, column_B[:, None])[:, 0] < logits_BU.amax(1) - slack).any():
            return False
        previous_B = said_B
    return True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("size", "reduced"), [(32000, True), (128256, False)])
@pytest.mark.parametrize("batch", [1, 2, 16, 17, 64, 70])
def test_one_launch_at_real_sizes(size: int, reduced: bool, batch: int) -> None:
    """All steps in one launch, one launch per step, and the sum in float32 say the same."""
    vocab, steps, rank = 128256, 7, 256
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:size].sort().values.to(DEVICE)
    table, up = (random(n, rank, dtype=torch.bfloat16, seed=seed) for n, seed in ((vocab, 1), (size, 2)))
    made = Walk(table, up, ids if reduced else None, steps)
    base = 4 * random(steps, batch, size, dtype=torch.bfloat16, seed=7)
    roots = torch.arange(batch, device=DEVICE) * 1001
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    found = walk(base, roots, made)
    assert torch.equal(found, walk_kernel(base, roots, made, programs, together=False))
    # sums of 256 products of size 1 in another order
    assert near_best(base, roots, made, found, 2e-3)
    assert len(set(found.flatten().tolist())) > batch
    assert not made.counters.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch", [1, 8])
def test_replays_of_a_captured_walk(batch: int) -> None:
    """A thousand replays with other roots: the counters of one launch never reach into the next."""
    vocab, steps, rank = 32000, 7, 256
    table, up = (random(vocab, rank, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    made, base = Walk(table, up, None, steps), 4 * random(steps, batch, vocab, dtype=torch.bfloat16, seed=7)
    roots = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    walk(base, roots, made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = walk(base, roots, made)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(1000):
        roots.copy_((torch.arange(batch, device=DEVICE) + 31 * turn) % vocab)
        graph.replay()
        if turn % 50 == 0:
            wrong += (said != walk_kernel(base, roots, made, programs, together=False)).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0 and not made.counters.any()
