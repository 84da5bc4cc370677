"""`data.supervise=all`: which rows train, to the row."""

from __future__ import annotations

import numpy as np
import torch

from headstart.data.samples import Sample, answer_turns
from headstart.heads.batch import FeatureBatch


def sample(turns: list[int]) -> Sample:
    count = len(turns)
    return Sample(
        id="a", token_ids=np.arange(count, dtype=np.int32), turn_ids=np.array(turns, np.int32), finish_reason="stop"
    )


def test_every_row_trains_up_to_the_document_s_end_and_padding_never_does():
    """A row t is supervised at depth d where x_{t+1+d} exists in its document: 5 and 3 rows, 2 of padding, K = 2."""
    documents = [
        sample([-1, -1, 0, -1, 1]).with_all_supervised().tensors(),
        sample([-1, 0, 0]).with_all_supervised().tensors(),
    ]
    batch = FeatureBatch.pack(documents, 2, pad_to=10)
    depths_R = torch.zeros(10, dtype=torch.int64)
    depths_R[batch.anchors.row_A] = batch.anchors.depths_A
    assert depths_R.tolist() == [2, 2, 1, 0, 0, 1, 0, 0, 0, 0]
    assert batch.anchors.count_K == (4, 2)


def test_the_answers_alone_train_less_of_the_same_tokens():
    answers = sample([-1, -1, 0, -1, 1])
    everything = answers.with_all_supervised()
    assert everything.supervised == 5 and answers.supervised == 2
    assert everything.token_ids is answers.token_ids and answers.turn_ids.tolist() == [-1, -1, 0, -1, 1]


def test_the_answers_are_still_known():
    answers = [sample([-1, -1, 0, -1, 1]), sample([-1, 0, 0])]
    assert answer_turns(answers) is None
    documents = [each.with_all_supervised() for each in answers]
    batch = FeatureBatch.pack([each.tensors() for each in documents], 2, pad_to=10, answers=answer_turns(documents))
    assert batch.answer_R.tolist() == [-1, -1, 0, -1, 1, -1, 0, 0, -1, -1]
    assert batch.turn_R.tolist() == [0] * 8 + [-1, -1]
