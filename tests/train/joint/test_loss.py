"""The target's own term against the formula on whole logits."""

from __future__ import annotations

import pytest
import torch
from reference.tiny import assert_near
from torch.nn import functional as F

from headstart.heads.ends import Teacher
from headstart.heads.losses import fused
from headstart.train.joint.loss import target_loss

ROWS, WIDTH, VOCAB = 13, 16, 31


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_it_is_the_formula_in_chunks_and_with_the_scale_of_the_targets_logits(kind, scale, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 4 * VOCAB)
    monkeypatch.setattr(fused, "CHUNK_MULTIPLE", 1)
    noise = torch.Generator().manual_seed(0)
    teacher = Teacher(torch.randn(VOCAB, WIDTH, generator=noise), scale=scale)
    hidden_RD, original_RD = (torch.randn(ROWS, WIDTH, generator=noise) for _ in range(2))
    label_R = torch.randint(VOCAB, (ROWS,), generator=noise)
    weight_R = (torch.arange(ROWS) % 3 > 0).float()

    found_RD, wide_RD = hidden_RD.clone().requires_grad_(), hidden_RD.double().requires_grad_()
    total, choice_R, wanted_R = target_loss(teacher, found_RD, label_R, weight_R, original_RD if kind == "kl" else None)
    weight_VD = teacher.weight_VD.double()
    logits_RV = wide_RD @ weight_VD.T * scale
    original_RV = original_RD.double() @ weight_VD.T * scale
    if kind == "kl":
        losses_R = (original_RV.softmax(-1) * (original_RV.log_softmax(-1) - logits_RV.log_softmax(-1))).sum(-1)
    else:
        losses_R = F.cross_entropy(logits_RV, label_R, reduction="none")
    expected = (losses_R * weight_R).sum()
    assert_near(total, expected, "loss")
    total.backward()
    expected.backward()
    assert_near(found_RD.grad, wide_RD.grad, "gradient", 5e-5)
    assert torch.equal(choice_R, logits_RV.argmax(-1))
    assert torch.equal(wanted_R, original_RV.argmax(-1) if kind == "kl" else label_R)
