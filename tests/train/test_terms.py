"""Loss terms with normalisers of their own, and rows chosen per step, with the block drafter of tests/throwaway.

Its loss is compared with a naive loop in the contract suites (tests/throwaway/test_new_families.py).
"""

from __future__ import annotations

import torch
from reference.families import DIMS, documents
from reference.tiny import assert_near, ends_of, feature_batch, gradients, random_ends, randomise
from throwaway.miniblock.head import MiniBlockConfig, MiniBlockHead

from headstart.train.step import LossModule, SumNames, accumulate_window, window_counts
from headstart.train.stream import Pack, Window, choose_rows

ENDS = random_ends(97, 32, 50)


def block_head() -> MiniBlockHead:
    head = MiniBlockHead(MiniBlockConfig(block_fraction=0.5, confidence_weight=3.0), DIMS)
    head.initialise(ends_of(ENDS))
    randomise(head, 1)
    return head


def test_each_term_is_divided_by_its_own_count_over_the_window():
    head, teacher = block_head(), ends_of(ENDS).teacher
    patterns = [["..AAAAAA.B..CCC", "AAAA", "."], ["...AABBBBB"], ["....AA", ".AAAA"]]
    packs = [Pack(0, n, (n,)) for n in range(3)]
    whole = [feature_batch(documents(pattern, n, torch.float32), ENDS, 3) for n, pattern in enumerate(patterns)]
    batches = [choose_rows(head, batch, 7, pack) for batch, pack in zip(whole, packs, strict=True)]
    chosen, blocks = (sum(batch.anchors.count_K[0] for batch in each) for each in (batches, whole))
    assert 0 < chosen < blocks
    counts_T = window_counts(head, batches, torch.device("cpu"))
    losses = [head.loss(batch, teacher) for batch in batches]
    tokens, confidence = sum(loss.sum_T for loss in losses) / sum(loss.count_T for loss in losses)
    assert counts_T[0] > counts_T[1] == blocks, "the sums are divided by what all rows would count"
    expected = gradients(head, tokens + 3.0 * confidence)
    head.zero_grad()
    sums = accumulate_window(
        LossModule(head, teacher, None), Window(packs, [0, 1, 2], batches), counts_T, head.term_weights(), 1,
        len(packs), 0, lambda loss: loss.backward(),
    )  # fmt: skip
    torch.testing.assert_close(sums.loss, (tokens + 3.0 * confidence).detach())
    for name, parameter in head.named_parameters():
        assert_near(parameter.grad, expected[name], name)
    assert sums.supervised == chosen
    assert SumNames.of(head).counts(sums.sums_S).tolist() == counts_T.tolist()


def test_a_rank_without_packs_has_the_same_layout():
    head = block_head()
    sum_T, sums_S = LossModule(head, ends_of(ENDS).teacher, None)(None, touch=True)
    assert sum_T.shape == (2,) and len(sums_S) == len(SumNames.of(head)) == 2 + 2 * len(head.metrics(3)) + 2
    sum_T.sum().backward()
    assert all(not parameter.grad.any() for parameter in head.parameters())
