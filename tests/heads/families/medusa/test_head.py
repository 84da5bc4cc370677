"""Medusa's serving logits against the per-position loop, and where its heads start."""

from __future__ import annotations

import pytest
import torch
from reference.documents import Document
from reference.families import DIMS, Example, documents, example_head, medusa
from reference.medusa import head_logits
from reference.tiny import assert_near, double_weights, ends_of, feature_batch, random_ends, teacher_of

from headstart.heads.errors import ConfigError
from headstart.heads.families import MedusaConfig, build_head

DEPTH = 4


@pytest.mark.parametrize("lm_head", ["own", "shared", "lowrank"])
def test_serving_logits_are_the_trained_ones(lm_head: str):
    head, ends = example_head(Example(medusa(lm_head=lm_head, num_layers=2)), torch.float64)
    hidden_BD, weights = documents()[0].hidden_TD, double_weights(head)
    logits_BKV = head.draft_logits(hidden_BD)
    assert logits_BKV.shape == (len(hidden_BD), DEPTH, 97)
    for row, f_D in enumerate(hidden_BD):
        for d in range(1, DEPTH + 1):
            expected = head_logits(weights, ends, f_D, d, 2, lm_head)
            assert_near(logits_BKV[row, d - 1], expected, f"row {row} head {d}", 1e-10)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("lm_head", ["own", "shared", "lowrank"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_heads_start_as_copies_of_the_targets(scale: float, lm_head: str, num_layers: int):
    """Granite and Cohere scale their logits; the starting head must say the same distribution, not a sharper one."""
    ends = random_ends(97, 32, 50, scale=scale)
    head = build_head(medusa(lm_head=lm_head, num_layers=num_layers), DIMS)
    head.initialise(ends_of(ends))
    hidden_BD = documents(dtype=torch.float32)[0].hidden_TD
    target = teacher_of(ends).logits(hidden_BD)
    for d in range(DEPTH):
        found = head.draft_logits(hidden_BD)[:, d]
        if lm_head == "own" and scale == 1:
            assert torch.equal(found, target)
        else:  # one product for all heads sums in another order
            assert_near(found, target, f"head {d + 1}", tolerance=1e-6 if scale == 1 else 1e-5)


def test_blocks_are_independent():
    head, _ = example_head(Example(medusa(num_layers=3)))
    parameters = [p for p in head.parameters()]
    assert len({p.data_ptr() for p in parameters}) == len(parameters) == DEPTH * (3 * 2 + 1)


def test_a_shared_output_head_is_not_saved():
    head, _ = example_head(Example(medusa(lm_head="shared")))
    assert all(name.startswith("blocks.") for name in head.state_dict())


def test_term_weights_are_powers_of_lambda_from_the_first_head():
    """Σ_d λ^d with d from 1 (methods §1): 0.8, 0.64, 0.512, …"""
    head, _ = example_head(Example(medusa()))
    assert head.term_weights().tolist() == pytest.approx([0.8, 0.64, 0.512, 0.4096], rel=1e-6)


@pytest.mark.parametrize("fields", [{"lm_head": "borrowed"}, {"loss": "mse"}])
def test_unknown_choices_name_the_field(fields: dict[str, str]):
    with pytest.raises(ConfigError, match="head." + next(iter(fields))):
        build_head(MedusaConfig(**fields), DIMS)


def test_teacher_is_the_distribution_at_t_plus_d():
    """Move only f_{t+2}: depth 2 of anchor t changes, depth 1 of it does not."""
    head, ends = example_head(Example(medusa(loss="kl")), torch.float64)
    (base,) = documents(["..AAAA"])
    moved = Document(base.tokens, base.turns, base.hidden_TD.clone(), base.streams_TkD)
    moved.hidden_TD[4] += 1.0
    first, second = (head.loss(feature_batch([d], ends, DEPTH), teacher_of(ends)).sum_T for d in (base, moved))
    # row 4 is x_4's feature: teacher of (t=1, d=3), (2, 2), (3, 1); as an anchor it has no depth left
    changed = [(a != b).item() for a, b in zip(first, second, strict=True)]
    assert changed == [True, True, True, False]
