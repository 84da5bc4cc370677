"""Loss terms with normalisers of their own, rows chosen per step, a head's own metrics: the head alone knows them.

The head here drafts blocks: from a chosen part of the anchors it predicts the next two tokens at once (term `block`,
divided by the tokens predicted), and says of each block whether its first token repeats the root (term `repeat`,
divided by the blocks).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_fakes import DIMS, FakeSource, make_documents, pairs_of, quiet, teacher

from headstart.heads.base import Head, HeadConfig, Loss, LossTerm
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.train.config import TrainConfig
from headstart.train.loop import train
from headstart.train.step import LossModule, SumNames, accumulate_window, window_counts
from headstart.train.stream import Pack, Window, choose_rows
from headstart.train.validate import Validator

DEPTH = 2
#: part of the anchors that a step trains
PART = 0.5


class BlockHead(Head):
    family = "block"

    def __init__(self) -> None:
        super().__init__(HeadConfig("block", DEPTH), DIMS)
        self.terms = (LossTerm("block", 0.5), LossTerm("repeat", 3.0))
        self.predict = nn.Linear(DIMS.hidden_size, DEPTH * DIMS.vocab_size)
        self.confide = nn.Linear(DIMS.hidden_size, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        return batch.subsampled((PART,) * DEPTH, seed)

    def metrics(self, depths: int) -> tuple[str, ...]:
        return ("tokens_per_block",)

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        tokens = [active_A.sum() for active_A in self._active(batch)]
        return torch.stack((sum(tokens), tokens[0]))

    def _active(self, batch: FeatureBatch) -> list[Tensor]:
        anchors = batch.anchors
        return [(anchors.depths_A[:count] > d).float() for d, count in enumerate(anchors.count_K)]

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        row_A = batch.anchors.row_A[: batch.anchors.count_K[0]]
        hidden_AD = batch.hidden_RD[row_A]
        logits_AKV = self.predict(hidden_AD).unflatten(1, (DEPTH, DIMS.vocab_size))
        block = right = hidden_AD.new_zeros(())
        for d, active_A in enumerate(self._active(batch)):
            logits_AV, label_A = logits_AKV[: len(active_A), d], self.label(batch, row_A[: len(active_A)], d)
            block = block + (F.cross_entropy(logits_AV, label_A, reduction="none") * active_A).sum()
            right = right + ((logits_AV.argmax(-1) == label_A) * active_A).sum()
        repeats_A = (self.label(batch, row_A, 0) == batch.tokens_R[row_A + 1]).float()
        doubt_A = F.binary_cross_entropy_with_logits(self.confide(hidden_AD)[:, 0], repeats_A, reduction="none")
        count_T = self.loss_counts(batch)
        sum_T = torch.stack((block, (doubt_A * self._active(batch)[0]).sum()))
        return Loss(sum_T, count_T, right[None], count_T[1:])

    @staticmethod
    def label(batch: FeatureBatch, row_A: Tensor, d: int) -> Tensor:
        return batch.tokens_R[(row_A + d + 2).clamp(max=len(batch.tokens_R) - 1)]


def naive_loss(head: BlockHead, batches: list[FeatureBatch]) -> Tensor:
    """One position after another over the rows that were chosen."""
    sums, counts = [0.0, 0.0], [0, 0]
    for batch in batches:
        for row, depths in zip(batch.anchors.row_A.tolist(), batch.anchors.depths_A.tolist(), strict=True):
            hidden_D, tokens = batch.hidden_RD[row], batch.tokens_R.tolist()
            logits_KV = head.predict(hidden_D).view(DEPTH, -1)
            for d in range(depths):
                sums[0] = sums[0] - logits_KV[d].log_softmax(-1)[tokens[row + d + 2]]
                counts[0] += 1
            if depths:
                sign = 1 if tokens[row + 2] == tokens[row + 1] else -1
                sums[1] = sums[1] - F.logsigmoid(sign * head.confide(hidden_D)[0])
                counts[1] += 1
    assert counts[0] > counts[1] > 0
    return 0.5 * sums[0] / counts[0] + 3.0 * sums[1] / counts[1]


def test_each_term_is_divided_by_its_own_count_over_the_window():
    source, head, twin = FakeSource(make_documents(), DEPTH), BlockHead(), BlockHead()
    packs = [Pack(0, n, samples) for n, samples in enumerate([(0, 1, 2), (3,), (4, 5)])]
    whole = [source.get(list(pack.samples)) for pack in packs]
    batches = [choose_rows(head, batch, 7, pack) for batch, pack in zip(whole, packs, strict=True)]
    assert sum(b.anchors.count_K[0] for b in batches) < sum(len(b.anchors) for b in whole)
    counts_T = window_counts(head, batches, torch.device("cpu"))
    window = Window(packs, [0, 1, 2], batches)
    sums = accumulate_window(
        LossModule(head, teacher(), None), window, counts_T, head.term_weights(), 1, len(packs), 0,
        lambda loss: loss.backward(),
    )  # fmt: skip
    expected = naive_loss(twin, batches)
    expected.backward()
    torch.testing.assert_close(sums.loss, expected.detach())
    for parameter, other in zip(head.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    assert sums.supervised == counts_T[1]
    assert SumNames.of(head).counts(sums.sums_S).tolist() == counts_T.tolist()


def test_a_rank_without_packs_has_the_same_layout():
    head = BlockHead()
    sum_T, sums_S = LossModule(head, teacher(), None)(None, touch=True)
    assert sum_T.shape == (2,) and len(sums_S) == len(SumNames.of(head)) == 2 + 2 * 2
    sum_T.sum().backward()
    assert all(not parameter.grad.any() for parameter in head.parameters())


def test_terms_and_metrics_are_logged_by_name(tmp_path: Path):
    source, head = FakeSource(make_documents(), DEPTH), BlockHead()
    validate = Validator(source, [[0, 1], [2, 3]], teacher())
    config = TrainConfig(steps=4, accumulation=2, log_every=2, eval_every=4, mixed_precision="no")
    result = train(head, pairs_of(source), teacher(), config, tmp_path, quiet(validate))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [{name for name in record if name.startswith("train/")} for record in records if "lr" in record]
    assert trained == [{"train/loss", "train/tokens_per_block"}] * 2
    assert set(result.metrics) == {"valid/loss", "valid/loss_block", "valid/loss_repeat", "valid/tokens_per_block"}
    values = result.metrics
    assert values["valid/loss"] == pytest.approx(0.5 * values["valid/loss_block"] + 3 * values["valid/loss_repeat"])
    assert result.supervised_tokens == sum(r["supervised_tokens"] for r in records if "lr" in r and r["step"] == 4) > 0
