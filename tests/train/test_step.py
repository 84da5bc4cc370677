"""The gradient of a window does not depend on padding, packing or micro-batches (methods §0); ranks: test_ranks.py."""

from __future__ import annotations

import pytest
import torch
from train_fakes import FakeHead, FakeSource, make_documents, teacher
from train_fakes import window_gradient as gradient

from headstart.train.step import LossModule, accumulate_window, window_counts
from headstart.train.stream import Pack, Window

ALL = list(range(12))
TOLERANCE = dict(rtol=1e-5, atol=1e-6)  # float32 sums in another order


def naive_gradient():
    """Position by position over all documents: L = Σ_d λ_d (Σ CE) / N_d."""
    head, source = FakeHead(), FakeSource(make_documents())
    sums, counts = [0.0] * 3, [0] * 3
    for index, (tokens, turn) in enumerate(source.documents):
        hidden = source.get([index]).hidden_RD
        for t in range(len(tokens)):
            for d in (1, 2, 3):
                if t + 1 + d < len(tokens) and all(turn[t + 1 + j] == turn[t + 1 + d] >= 0 for j in range(d + 1)):
                    logits = head.heads[d - 1](hidden[t])
                    sums[d - 1] = sums[d - 1] - torch.log_softmax(logits, -1)[tokens[t + 1 + d]]
                    counts[d - 1] += 1
    loss = sum(0.8 ** (d - 1) * sums[d - 1] / counts[d - 1] for d in (1, 2, 3))
    loss.backward()
    return {name: p.grad for name, p in head.named_parameters()}, loss.detach()


def assert_same(found, expected):
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")


def test_window_equals_the_naive_loop():
    expected, loss = naive_gradient()
    found, sums = gradient([ALL])
    assert_same(found, expected)
    torch.testing.assert_close(sums.loss, loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("packs", "pad"),
    [
        ([ALL], 37),
        ([ALL[::-1]], 0),
        ([[i] for i in ALL], 0),
        ([[i] for i in ALL], 5),
        ([ALL[:1], ALL[1:9], ALL[9:]], 3),
    ],
    ids=["padded", "reordered", "one document per micro-batch", "padded micro-batches", "uneven micro-batches"],
)
def test_same_samples_same_gradient(packs, pad):
    expected, _ = gradient([ALL])
    assert_same(gradient(packs, pad)[0], expected)


def test_a_depth_without_positions_contributes_nothing():
    source = FakeSource([(torch.tensor([1, 2, 3, 4]), torch.tensor([-1, -1, 0, 0]))])
    head = FakeHead()
    batch = source.get([0])
    assert batch.anchors.count_K == (1, 0, 0)
    counts_T = window_counts(head, [batch], torch.device("cpu"))
    window = Window([Pack(0, 0, (0,))], [0], [batch])
    sums = accumulate_window(
        LossModule(head, teacher(), None), window, counts_T, head.term_weights(), 1, 1, 0, lambda loss: loss.backward()
    )
    logits = head.heads[0](batch.hidden_RD[1])
    torch.testing.assert_close(sums.loss, -torch.log_softmax(logits, -1)[4].detach())
    assert head.heads[1].weight.grad is None or not head.heads[1].weight.grad.any()
