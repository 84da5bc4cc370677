"""Which slots learn what: turns and documents that end, tokens that cannot be drafted, and what is measured."""

from __future__ import annotations

import pytest
import torch
from reference.tiny import turns_of

from headstart.heads.batch import FeatureBatch
from headstart.heads.families.block.labels import find_labels, measured

K = 4


def pack(patterns: list[str], pad_to: int = 0) -> FeatureBatch:
    """Documents whose tokens are their rows in the pack: 0, 1, 2, …"""
    documents, start = [], 0
    for pattern in patterns:
        documents.append((torch.arange(start, start + len(pattern)), torch.tensor(turns_of(pattern))))
        start += len(pattern)
    return FeatureBatch.pack(documents, K, pad_to)


def naive(patterns: list[str], draftable: set[int] | None) -> dict[int, list[tuple[int, int]]]:
    """Anchor's row → (label, teacher's row) of its active slots, by the rules alone.

    The anchor's token x_a = x_{t+1} and all labels up to the slot's are supervised, of one turn and one document; the
    first label that is not ends the block, whatever follows.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for pattern in patterns:
        turns = turns_of(pattern)
        for a in range(1, len(pattern) - 1):
            if turns[a] < 0 or turns[a + 1] != turns[a]:
                continue
            slots = []
            for k in range(1, K + 1):
                inside = a + k < len(pattern) and turns[a + k] == turns[a]
                if not inside or (draftable is not None and start + a + k not in draftable):
                    break
                slots.append((start + a + k, start + a + k - 1))
            found[start + a - 1] = slots
        start += len(pattern)
    return found


PACKS = {
    "documents end": ["..AAA", "AAAA", ".AAAAAAA"],
    "turns end, and gaps between them": ["..AAAABB.B..CCC", "AA.AAAAA"],
    "nothing": ["....", "A"],
}


@pytest.mark.parametrize("pad_to", [0, 40])
@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("patterns", PACKS.values(), ids=PACKS)
def test_labels_are_the_rules(patterns: list[str], reduced: bool, pad_to: int) -> None:
    ids_U = torch.tensor([token for token in range(40) if token % 5 != 3]) if reduced else None
    batch = pack(patterns, pad_to)
    labels = find_labels(batch, K, 0.5, ids_U)
    wanted = naive(patterns, None if ids_U is None else set(ids_U.tolist()))
    assert sorted(batch.anchors.row_A.tolist()) == sorted(wanted)
    for a, row in enumerate(batch.anchors.row_A.tolist()):
        slots = wanted[row]
        assert labels.active_AK[a].tolist() == [k < len(slots) for k in range(K)]
        assert labels.supervised_AK[a].sum() >= len(slots)
        assert labels.weight_AK[a].tolist() == [0.5**k if k < len(slots) else 0.0 for k in range(K)]
        label_K = labels.label_AK[a]
        target_K = label_K if ids_U is None else ids_U[label_K]
        assert target_K[: len(slots)].tolist() == [label for label, _ in slots]
        assert labels.teacher_row_AK[a, : len(slots)].tolist() == [teacher for _, teacher in slots]
    if reduced and wanted:
        assert (labels.active_AK != labels.supervised_AK).any(), "no label outside the vocabulary proves nothing"


def test_padding_anchors_are_nothing() -> None:
    batch = pack(["..AAAA"]).padded(rows=9, anchors=6, documents=3)
    labels = find_labels(batch, K, 0.5, None)
    real = int((batch.anchors.depths_A > 0).sum())
    assert real == 3 and not labels.active_AK[real:].any() and not labels.supervised_AK[real:].any()
    assert not labels.weight_AK[real:].any() and int(labels.teacher_row_AK.max()) < 9


def test_what_is_measured() -> None:
    """Two anchors of one answer: t = 1 reaches 3 depths, t = 2 reaches 2. The second label of t = 1 is outside."""
    batch = pack(["..AAAA"])
    batch.teacher_argmax_A = batch.tokens_R[batch.anchors.row_A + 2]  # the target says the data's tokens
    labels = find_labels(batch, K, 0.5, torch.tensor([0, 1, 2, 3, 5]))  # not token 4
    assert batch.anchors.row_A.tolist() == [1, 2, 3]
    assert labels.active_AK.sum(1).tolist() == [1, 0, 1]
    drafts = torch.tensor([[3, 2, 5, 0], [2, 5, 0, 0], [5, 5, 5, 5]])
    loss = measured(batch, labels, drafts, torch.zeros(1), torch.zeros(1))
    assert loss.numerator_M.tolist() == [2, 1, 1, 0, 2]  # hits by depth; anchors with a loss
    assert loss.denominator_M.tolist() == [3, 2, 1, 0, 3]
    assert loss.run_A.tolist() == [1, 0, 1]


def test_drawn_anchors_weigh_the_measures() -> None:
    batch = pack(["..AAAA"])
    batch.teacher_argmax_A = batch.tokens_R[batch.anchors.row_A + 2]
    drawn = batch.drawn(torch.tensor([1, 2]))
    labels = find_labels(drawn, K, 1.0, None)
    drafts = drawn.tokens_R[(drawn.anchors.row_A[:, None] + torch.arange(2, 2 + K)).clamp(max=5)]
    loss = measured(drawn, labels, drafts, torch.zeros(1), torch.zeros(1))
    assert loss.numerator_M.tolist() == loss.denominator_M.tolist() == [2, 1, 0, 0, 2]
    assert loss.run_A.tolist() == [2, 1]
