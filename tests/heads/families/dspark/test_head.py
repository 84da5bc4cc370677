"""DSpark's Markov and confidence heads. Their loss is compared with a naive loop in the contract suite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.families import Example, documents, dspark, example_head
from reference.tiny import ends_of, feature_batch, gradients, teacher_of

from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.families.dspark.head import MARKOV_HEADS

PATTERNS = ["..AAAAAA.B..CCC", "AAAA", "...AABBBBB"]
each_kind = pytest.mark.parametrize("kind", MARKOV_HEADS)


def head_of(**fields: object):
    head, ends = example_head(Example(dspark(**fields)), torch.float64)
    return head, ends, feature_batch(documents(PATTERNS), ends, head.depth, 40)


@each_kind
def test_all_drafts_at_once_are_those_of_the_walk(kind: str) -> None:
    head, _, _ = head_of(markov_head=kind)
    torch.manual_seed(0)
    hidden, previous = torch.randn(5, 4, 32, dtype=torch.float64), torch.randint(0, 97, (5, 4))
    low, state = head.corrections(hidden, previous), None
    for k in range(4):
        step, state = head.walk_step(hidden[:, k], previous[:, k], state)
        torch.testing.assert_close(low[:, k], step, rtol=1e-12, atol=1e-12)
    assert (low[0] != low[1]).any() and low.shape == (5, 4, 6)


def test_the_recurrent_head_remembers_and_the_others_do_not() -> None:
    """The first token of a block reaches the later drafts' corrections through the state alone."""
    hidden = torch.randn(1, 4, 32, dtype=torch.float64)
    one, other = torch.tensor([[3, 7, 8, 9]]), torch.tensor([[4, 7, 8, 9]])
    for kind in MARKOV_HEADS:
        head, _, _ = head_of(markov_head=kind)
        same = (head.corrections(hidden, one) == head.corrections(hidden, other)).all(-1)[0].tolist()
        assert same == [False, *([kind != "rnn"] * 3)], kind


@each_kind
def test_a_new_head_starts_from_the_base_logits(kind: str) -> None:
    """`up` is 0: a fresh head's sums are those of the same backbone without a correction, confidence one half."""
    head, ends, batch = head_of(markov_head=kind)
    new = build_head(head.config, head.dims)
    assert not new.correction_Ur.any() and new.markov_head.markov_w1.weight.any()
    new.initialise(ends_of(ends), head.draft_ids_U)
    new.double()
    loss = new.loss(batch, teacher_of(ends))
    new.markov_head.markov_w1.weight.data.mul_(3)
    torch.testing.assert_close(new.loss(batch, teacher_of(ends)).sum_T, loss.sum_T)
    values = dict(zip(new.metrics(4), (loss.numerator_M / loss.denominator_M).tolist(), strict=True))
    assert values["confidence"] == pytest.approx(0.5) and 0 < values["overlap"] < 1
    # but it learns the correction from the first step on
    assert gradients(new, loss.sum_T[0])["markov_head.markov_w2.weight"].any()


def test_the_confidence_term_teaches_the_backbone_and_w1_but_not_the_logits() -> None:
    head, ends, batch = head_of()
    assert [term.name for term in head.terms] == ["ce", "l1", "confidence"]
    found = gradients(head, head.loss(batch, teacher_of(ends)).sum_T[2])
    for name in ("fc.weight", "norm.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight"):
        assert found[name].any(), name
    assert not found["markov_head.markov_w2.weight"].any(), "the overlap is a constant"


def test_without_a_confidence_head() -> None:
    head, ends, batch = head_of(confidence_weight=0.0)
    assert head.confidence_head is None and [term.name for term in head.terms] == ["ce", "l1"]
    loss = head.loss(batch, teacher_of(ends))
    assert len(loss.sum_T) == 2 and len(loss.numerator_M) == len(head.metrics(4)) == 5


def test_an_unknown_markov_head_is_refused() -> None:
    head, _, _ = head_of()
    with pytest.raises(ConfigError, match="head.markov_head: found 'plain', expected one of vanilla, gated, rnn"):
        build_head(replace(head.config, markov_head="plain"), head.dims)
