"""On-policy rounds: which drafts failed, what they count, and that a resumed run goes on with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.families import REFERENCES, documents, example_head
from reference.tiny import feature_batch, teacher_of
from safetensors.torch import load_file
from test_golden import curve, make_samples, run_random
from torch import Tensor

from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError, StorageError
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.config import TrainConfig
from headstart.train.optim import Budget
from headstart.train.rounds import check_rounds, emphasise, failed_drafts, round_of
from headstart.train.sharing.parallel import check_kind


def naive_failures(hits: list[int], turns: list[int], chain: int) -> list[int]:
    """The decode loop over one document, cycle by cycle. Args: hits: right drafts of the chain at each row."""
    failed, rows = [0] * len(turns), len(turns)
    for start in range(rows - 1):
        opens = turns[start + 1] >= 0 and (turns[start] != turns[start + 1] or start == 0)
        if not opens:
            continue
        end = start + 1  # last row of the answer that begins here
        while end + 1 < rows and turns[end + 1] == turns[start + 1]:
            end += 1
        row = start
        while row + 1 < end:  # tokens are left after the root x_{row + 1}
            right = min(hits[row], chain)
            left = end - (row + 1)
            if right < chain and right < left:
                failed[row] = right + 1
            row += min(right + 1, left)
    return failed


def test_failed_drafts_are_those_of_a_naive_walk():
    generator = torch.Generator().manual_seed(3)
    turns = [[-1, -1, *[0] * 9, -1, *[1] * 5], [0] * 7, [-1, 0], [-1] * 4, [-1, *[0] * 12]]
    pairs = [(torch.arange(len(t)), torch.tensor(t)) for t in turns]
    for chain in (1, 2, 4, 9):
        batch = FeatureBatch.pack(pairs, 4, pad_to=60)
        hits_R = torch.randint(0, 5, (60,), generator=generator)
        run_A = torch.minimum(hits_R[batch.anchors.row_A], batch.anchors.depths_A)
        supervised_R = torch.zeros(60, dtype=torch.int64).index_copy_(0, batch.anchors.row_A, run_A)
        failed_R, (tokens, cycles) = failed_drafts(run_A, batch, chain)
        start, expected = 0, []
        for t in turns:
            expected += naive_failures(supervised_R[start : start + len(t)].tolist(), t, min(chain, 4))
            start += len(t)
        assert failed_R[:start].tolist() == expected and not failed_R[start:].any()
        assert 0 < int((failed_R > 0).sum()) <= int(cycles) <= int(tokens)


def losses_of_rows(head: Any, batch: FeatureBatch, teacher: Any, depth: int) -> Tensor:
    """The loss of every row at one depth, [R], by leaving all others out."""
    found = torch.zeros(batch.tokens_R.shape[0], dtype=torch.float64)
    for row in batch.anchors.row_A.tolist():
        failed_R = torch.zeros_like(batch.tokens_R, dtype=torch.uint8)
        failed_R[row] = depth
        plain = head.loss(batch, teacher).sum_T[depth - 1]
        found[row] = (head.loss(emphasise(batch, failed_R, 2.0), teacher).sum_T[depth - 1] - plain).item()
    return found


def test_a_failed_draft_counts_so_many_times_in_the_loss_and_nowhere_else():
    head, ends = example_head(REFERENCES["eagle3"].examples["draft vocabulary"], torch.float64)
    batch, teacher = feature_batch(documents(), ends, 4), teacher_of(ends)
    plain = head.loss(batch, teacher)
    row_losses = losses_of_rows(head, batch, teacher, 2)
    assert row_losses.sum().item() == pytest.approx(plain.sum_T[1].item())
    failed_R = torch.zeros_like(batch.tokens_R, dtype=torch.uint8)
    chosen = row_losses.topk(2).indices
    failed_R[chosen] = 2
    heavy = emphasise(batch, failed_R, 5.0)
    found = head.loss(heavy, teacher)
    assert found.sum_T[1].item() == pytest.approx(plain.sum_T[1].item() + 4 * row_losses[chosen].sum().item())
    others = [0, 2, 3]
    torch.testing.assert_close(found.sum_T[others], plain.sum_T[others])
    assert torch.equal(found.count_T, plain.count_T) and torch.equal(head.loss_counts(heavy), plain.count_T)
    assert torch.equal(found.numerator_M, plain.numerator_M) and torch.equal(found.run_A, plain.run_A)
    # the step's own path, and rows that are drawn
    scale_T = torch.ones(4)
    torch.testing.assert_close(head.loss(heavy, teacher, scale_T).sum_T, found.sum_T)
    drawn = heavy.subsampled((1.0, 1.0, 1.0, 1.0), 7)
    torch.testing.assert_close(head.loss(drawn, teacher).sum_T, found.sum_T)
    padded = heavy.padded(len(batch.tokens_R) + 5, len(batch.anchors) + 3, len(batch.doc_lengths) + 1)
    torch.testing.assert_close(head.loss(padded, teacher).sum_T, found.sum_T)


def test_rounds_are_equal_parts_of_the_budget():
    steps = Budget(12, None, None)
    assert [round_of(steps, 3, step, 0.0) for step in range(13)] == [0] * 4 + [1] * 4 + [2] * 5
    assert [round_of(Budget(None, None, 9.0), 3, 5, t) for t in (0.0, 2.9, 3.0, 6.1, 20.0)] == [0, 0, 1, 2, 2]
    assert [round_of(steps, 1, step, 0.0) for step in (0, 11, 12)] == [0, 0, 0]


SETTINGS: dict[str, Any] = dict(steps=9, rounds=3, failed_weight=4.0, save_every=4, keep=0)


def test_a_run_of_rounds_resumes_with_the_same_next_loss(tmp_path):
    """The checkpoint of step 4 stands in the second round, which began at step 3."""
    whole, _ = run_random("eagle3", tmp_path, **SETTINGS)
    losses = curve(tmp_path)
    kept = [load_file(tmp_path / f"rounds/failed-{n}.safetensors")["failed"] for n in (1, 2)]
    rows = sum(len(sample.token_ids) for sample in make_samples())
    assert all(len(failed) == rows and failed.any() and failed.max() <= 4 for failed in kept)
    single, _ = run_random("eagle3", tmp_path / "single", **{**SETTINGS, "rounds": 1})
    assert curve(tmp_path / "single")[:3] == losses[:3] and curve(tmp_path / "single")[3] != losses[3]
    for step in (8, 9):
        CheckpointStore._remove(tmp_path / f"checkpoints/step-{step:08d}")
    again, result = run_random("eagle3", tmp_path, **SETTINGS)
    assert result.resumed_from == 4 and curve(tmp_path) == losses
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for step in (8, 9):
        CheckpointStore._remove(tmp_path / f"checkpoints/step-{step:08d}")
    (tmp_path / "rounds/failed-1.safetensors").unlink()
    with pytest.raises(StorageError, match=r"failed-1.safetensors: it is gone, and the checkpoint belongs to round 2"):
        run_random("eagle3", tmp_path, **SETTINGS)


def test_what_cannot_be_walked_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="train.rounds: found 3 with a medusa head, whose loss does not weigh"):
        run_random("medusa", tmp_path, **SETTINGS)
    with pytest.raises(ConfigError, match="train.rounds: found 3 with 2 ranks, expected one process"):
        check_kind("replicated", TrainConfig(steps=1, rounds=3), 2)
    head, _ = example_head(REFERENCES["eagle3"].examples["draft vocabulary"])
    check_rounds(TrainConfig(steps=1, rounds=3), head)
