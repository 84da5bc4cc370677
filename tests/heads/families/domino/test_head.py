"""Domino's correction. Its loss is compared with a naive loop in the contract suite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.families import Example, documents, domino, example_head
from reference.tiny import ends_of, feature_batch, gradients, teacher_of
from torch import nn

from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.families.domino.head import PrefixGRU

PATTERNS = ["..AAAAAA.B..CCC", "AAAA", "...AABBBBB"]


def head_of(**fields: object):
    head, ends = example_head(Example(domino(**fields)), torch.float64)
    return head, ends, feature_batch(documents(PATTERNS), ends, head.depth, 40)


def test_the_recurrent_network_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = PrefixGRU(7, 5).double(), nn.GRU(7, 5, bias=False, batch_first=True).double()
    theirs.load_state_dict(ours.state_dict())
    x, state, states = torch.randn(3, 4, 7, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64), []
    for known in ours.known(x).unbind(1):
        state = ours.step(known, state)
        states.append(state)
    torch.testing.assert_close(torch.stack(states, 1), theirs(x)[0])


@pytest.mark.parametrize("uncorrected", [0, 1, 3])
def test_all_drafts_at_once_are_those_of_the_walk(uncorrected: int) -> None:
    head, _, _ = head_of(uncorrected=uncorrected)
    torch.manual_seed(0)
    hidden, previous = torch.randn(5, 4, 32, dtype=torch.float64), torch.randint(0, 97, (5, 4))
    low, state = head.corrections(hidden, previous), None
    for k in range(4):
        step, state = head.walk_step(hidden[:, k], previous[:, k], state)
        torch.testing.assert_close(low[:, k], step, rtol=1e-12, atol=1e-12)
        assert bool(step.any()) == (k >= uncorrected)


def test_every_token_so_far_reaches_a_draft_and_none_behind_it() -> None:
    """The uncorrected first draft still feeds the state."""
    head, _, _ = head_of()
    hidden, one = torch.randn(1, 4, 32, dtype=torch.float64), torch.tensor([[3, 7, 8, 9]])
    for k in range(4):
        other = one.clone()
        other[0, k] = 50
        changed = (head.corrections(hidden, one) != head.corrections(hidden, other)).any(-1)[0].tolist()
        assert changed == [j >= max(k, 1) for j in range(4)]


def test_the_share_of_the_uncorrected_logits_falls_to_0() -> None:
    head, _, _ = head_of(kl_weight=0.5, base_weight=0.8)
    assert [term.name for term in head.terms] == ["ce", "kl", "base_ce", "base_kl"] and head.weights_vary
    assert head.term_weights(0.0).tolist() == pytest.approx([0.2, 0.1, 0.8, 0.4])
    assert head.term_weights(0.5).tolist() == pytest.approx([0.6, 0.3, 0.4, 0.2])
    # validation weighs as the end of training does
    assert head.term_weights().tolist() == [1.0, 0.5, 0.0, 0.0]
    alone, _, _ = head_of(base_weight=0.0)
    assert [term.name for term in alone.terms] == ["ce"] and not alone.weights_vary
    assert alone.term_weights(0.3).tolist() == [1.0]


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_gradients_made_with_the_weights_are_those_of_the_sums(part: float) -> None:
    """At the ends one of the two halves weighs nothing."""
    head, ends, batch = head_of(kl_weight=0.5)
    scale_T = head.term_weights(part) / head.loss_counts(batch)
    found = gradients(head, (head.loss(batch, teacher_of(ends), scale_T).sum_T * scale_T).sum())
    expected = gradients(head, (head.loss(batch, teacher_of(ends)).sum_T * scale_T).sum())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    assert bool(found["embed_proj.2.weight"].any()) == (part > 0) and found["fc.weight"].any()


def test_a_new_head_starts_from_the_base_logits() -> None:
    head, ends, batch = head_of()
    new = build_head(head.config, head.dims)
    new.initialise(ends_of(ends), head.draft_ids_U)
    new.double()
    loss = new.loss(batch, teacher_of(ends))
    assert loss.sum_T[0] == loss.sum_T[1] > 0
    # but it learns the correction from the first step on
    assert gradients(new, loss.sum_T[0])["embed_proj.2.weight"].any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"uncorrected": 4}, "head.uncorrected: found 4, expected 0 or more, below head.depth 4"),
        ({"base_weight": 1.5}, "head.base_weight: found 1.5, expected a share from 0 to 1"),
    ],
)
def test_what_is_refused(fields: dict[str, float], message: str) -> None:
    head, _, _ = head_of()
    with pytest.raises(ConfigError, match=message):
        build_head(replace(head.config, **fields), head.dims)
