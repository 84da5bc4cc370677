"""Medusa-1 against the per-position loop: sums, counts and every gradient, for each output matrix and loss."""

from __future__ import annotations

import pytest
import torch
from reference.documents import Document, Ends
from reference.medusa import head_logits, medusa_loss
from reference.tiny import (
    FAVOURITES,
    assert_near,
    double_document,
    double_ends,
    double_weights,
    ends_of,
    favour,
    feature_batch,
    random_document,
    random_ends,
    randomise,
    teacher_of,
)

from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families import MedusaConfig, build_head
from headstart.heads.families.medusa.head import MedusaHead

DIMS = HeadDims(32, 97, 8, 4, 2, 8, 48)
PATTERNS = ["..AAAAAA.B..CCC", ".", "AAAA", "...AABBBBB", ".A", "....AA"]
DEPTH = 4


def documents(seed: int = 0) -> list[Document]:
    return [random_document(pattern, 97, 32, 3, seed + i) for i, pattern in enumerate(PATTERNS)]


def tiny_medusa(dtype: torch.dtype = torch.float32, **fields: object) -> tuple[MedusaHead, Ends]:
    ends = random_ends(97, 32, 50)
    ends = double_ends(ends) if dtype == torch.float64 else ends
    head = build_head(MedusaConfig(depth=DEPTH, rank=5, **fields), DIMS)
    head.initialise(ends_of(ends))
    randomise(head, 1)
    for lm_head in getattr(head, "lm_heads", []):
        favour(lm_head.weight, FAVOURITES)
    return head.to(dtype), ends


@pytest.mark.parametrize("lm_head", ["own", "shared", "lowrank"])
def test_serving_logits_are_the_trained_ones(lm_head: str):
    head, ends = tiny_medusa(lm_head=lm_head, num_layers=2)
    hidden_BD = documents()[0].hidden_TD
    weights, doubles = double_weights(head), double_ends(ends)
    logits_BKV = head.draft_logits(hidden_BD)
    assert logits_BKV.shape == (len(hidden_BD), DEPTH, 97)
    for row, f_D in enumerate(hidden_BD.double()):
        for d in range(1, DEPTH + 1):
            assert_near(
                logits_BKV[row, d - 1], head_logits(weights, doubles, f_D, d, 2, lm_head), f"row {row} head {d}"
            )


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("lm_head", ["own", "shared", "lowrank"])
def test_heads_start_as_exact_copies_of_the_targets(lm_head: str, num_layers: int):
    ends = random_ends(97, 32, 50)
    head = build_head(MedusaConfig(depth=3, lm_head=lm_head, num_layers=num_layers), DIMS)
    head.initialise(ends_of(ends))
    hidden_BD = documents()[0].hidden_TD
    target = teacher_of(ends).logits(hidden_BD)
    for d in range(3):
        found = head.draft_logits(hidden_BD)[:, d]
        if lm_head == "own":
            assert torch.equal(found, target)
        else:  # one product for all heads sums in another order
            assert_near(found, target, f"head {d + 1}", tolerance=1e-6)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_start_as_copies_where_the_target_scales_its_logits(lm_head: str):
    """Granite and Cohere multiply their logits; the starting head must say the same distribution, not a sharper one."""
    ends = random_ends(97, 32, 50, scale=0.25)
    head = build_head(MedusaConfig(depth=2, lm_head=lm_head), DIMS)
    head.initialise(ends_of(ends))
    hidden_BD = documents()[0].hidden_TD
    target = teacher_of(ends).logits(hidden_BD)
    for d in range(2):
        assert_near(head.draft_logits(hidden_BD)[:, d], target, f"head {d + 1}", tolerance=1e-5)


def test_blocks_are_independent():
    head, _ = tiny_medusa(num_layers=3)
    parameters = [p for p in head.parameters()]
    assert len({p.data_ptr() for p in parameters}) == len(parameters) == DEPTH * (3 * 2 + 1)


def test_shared_output_head_is_frozen_and_not_saved():
    head, ends = tiny_medusa(lm_head="shared")
    assert all(name.startswith("blocks.") for name in head.state_dict())
    before = ends.lm_head_VD.clone()
    head.loss(feature_batch(documents(), ends, DEPTH), teacher_of(ends)).sum_T.sum().backward()
    assert torch.equal(ends.lm_head_VD, before) and ends.lm_head_VD.grad is None


def test_own_output_heads_do_not_touch_the_targets():
    head, ends = tiny_medusa()
    assert all(m.weight.data_ptr() != ends.lm_head_VD.data_ptr() for m in head.lm_heads)


def test_term_weights_are_powers_of_lambda_from_the_first_head():
    """Σ_d λ^d with d from 1 (methods §1): 0.8, 0.64, 0.512, …"""
    head, _ = tiny_medusa()
    assert head.term_weights().tolist() == pytest.approx([0.8, 0.64, 0.512, 0.4096], rel=1e-6)


@pytest.mark.parametrize("fields", [{"lm_head": "borrowed"}, {"loss": "mse"}])
def test_unknown_choices_name_the_field(fields: dict[str, str]):
    with pytest.raises(ConfigError, match="head." + next(iter(fields))):
        build_head(MedusaConfig(**fields), DIMS)


def test_teacher_is_the_distribution_at_t_plus_d():
    """Move only f_{t+2}: depth 2 of anchor t changes, depth 1 of it does not."""
    head, ends = tiny_medusa(torch.float64, loss="kl")
    base = double_document(random_document("..AAAA", 97, 32, 3, 0))
    moved = Document(base.tokens, base.turns, base.hidden_TD.clone(), base.streams_TkD)
    moved.hidden_TD[4] += 1.0
    before = medusa_loss(double_weights(head), ends, [base], 3, kind="kl")
    teacher: Teacher = teacher_of(ends)
    first, second = (head.loss(feature_batch([d], ends, DEPTH), teacher).sum_T for d in (base, moved))
    assert_near(first[:3], torch.stack(before.loss), "before", 1e-10)
    # row 4 is x_4's feature: teacher of (t=1, d=3), (2, 2), (3, 1); as an anchor it has no depth left
    changed = [(a != b).item() for a, b in zip(first, second, strict=True)]
    assert changed == [True, True, True, False]
