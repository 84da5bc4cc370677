"""Dropout and noise of EAGLE-3's features: in training alone, of the right size, and refused out of range."""

from __future__ import annotations

import pytest
import torch
from reference.families import REFERENCES, documents, eagle3, example_head
from reference.tiny import feature_batch, teacher_of

from headstart.heads.errors import ConfigError


def head_of(**fields):
    example = REFERENCES["eagle3"].examples["draft vocabulary"]
    head, ends = example_head(type(example)(eagle3(**fields)), torch.float64)
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, :32] = torch.eye(32, dtype=torch.float64)  # g is the lowest stream
    return head, feature_batch(documents(), ends, 4), teacher_of(ends)


@pytest.mark.parametrize("fields", [{"feature_dropout": 0.5}, {"feature_noise": 0.2}])
def test_features_are_changed_in_training_alone(fields):
    head, batch, teacher = head_of(**fields)
    clean = batch.streams_RkD[:, 0]
    head.eval()
    assert torch.equal(head.training_features(batch), clean)
    before = head.loss(batch, teacher).sum_T
    torch.testing.assert_close(before, head_of()[0].eval().loss(batch, teacher).sum_T)
    head.train()
    torch.manual_seed(0)
    drawn = torch.stack([head.training_features(batch) for _ in range(400)])
    assert not torch.allclose(head.loss(batch, teacher).sum_T, before)
    if "feature_dropout" in fields:
        assert ((drawn == 0) | torch.isclose(drawn, 2 * clean)).all()
        assert (drawn == 0).float().mean() == pytest.approx(0.5, abs=0.01)
    else:
        size = clean.square().mean(-1).sqrt()
        spread = (drawn - clean).square().mean((0, 2)).sqrt()
        torch.testing.assert_close(spread, 0.2 * size, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feature_dropout": 1.0}, "head.feature_dropout: found 1.0, expected a share"),
        ({"feature_noise": -0.1}, "head.feature_noise: found -0.1, expected a finite number, 0 or more"),
        ({"teacher_temperature": 0.0}, "head.teacher_temperature: found 0.0, expected a finite number above 0"),
        ({"lk_weight": float("inf")}, "head.lk_weight: found inf"),
        ({"loss": "lk", "l1_weight": 0.5}, "head.loss: found lk with head.lk_weight or head.l1_weight"),
    ],
)
def test_settings_out_of_range_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        eagle3(**fields).check()
