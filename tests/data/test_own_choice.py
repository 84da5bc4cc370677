"""Which answer tokens are the target's own choice: counted against a loop over positions, and by whole answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.data.features import extract
from headstart.data.own_choice import ENOUGH_TOKENS, FOREIGN, OwnChoice, own_choice, own_choice_of
from headstart.data.samples import Sample
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.targets.target import Target


def answered(target: Target, prompt: list[int], tokens: int, foreign: tuple[int, ...] = ()) -> Sample:
    """A greedy answer of the target. At the positions `foreign` of the answer it is made to say something else."""
    ids = list(prompt)
    for position in range(tokens):
        with torch.no_grad():
            choice = int(target.model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append((choice + 1) % target.dims.vocab_size if position in foreign else choice)
    turns = [-1] * len(prompt) + [0] * tokens
    return Sample("a", np.array(ids, np.int32), np.array(turns, np.int32))


def naive(target: Target, sample: Sample) -> tuple[int, int]:
    """Every answer token but the first of its turn, against the target's choice after the tokens before it."""
    turns = sample.turn_ids if sample.answer_ids is None else sample.answer_ids
    own = seen = 0
    for p in range(1, len(sample)):
        if turns[p] >= 0 and turns[p] == turns[p - 1]:
            with torch.no_grad():
                logits_V = target.model(torch.tensor([sample.token_ids[:p].tolist()])).logits[0, -1]
            own += int(logits_V.argmax()) == int(sample.token_ids[p])
            seen += 1
    return own, seen


def test_the_target_s_greedy_answer_is_all_its_own(target: Target):
    found = own_choice(extract(target, [answered(target, [5, 6, 7], 20)], FeatureSpec()))
    assert found == OwnChoice(19, 19) and found.share == 1.0 and not found.foreign


def test_every_foreign_token_counts_once(target: Target):
    sample = answered(target, [5, 6, 7], 20, foreign=(0, 4, 11))  # the first token of an answer is not counted
    assert own_choice(extract(target, [sample], FeatureSpec())) == OwnChoice(17, 19)


@pytest.mark.parametrize("everything", [False, True], ids=["answers", "supervise=all"])
def test_counts_are_those_of_a_loop(target: Target, random_samples, everything: bool):
    samples = [*random_samples([24, 9, 17], target.dims.vocab_size), answered(target, [9, 8], 12, foreign=(3,))]
    if everything:
        samples = [sample.with_all_supervised() for sample in samples]
    expected = [naive(target, sample) for sample in samples]
    found = own_choice(extract(target, samples, FeatureSpec(), max_depth=3))  # one pack
    assert (found.own, found.tokens) == tuple(map(sum, zip(*expected, strict=True))) and found.own >= 10
    assert own_choice_of(target, samples, seed=0) == found  # one pack each


def test_a_sample_is_enough_and_the_seed_chooses_it(target: Target, random_samples):
    samples = random_samples([20] * 30, target.dims.vocab_size)
    found = own_choice_of(target, samples, seed=3, sample_tokens=60)
    chosen = np.random.default_rng(3).permutation(30).tolist()[-3:]
    assert found.tokens == sum(naive(target, samples[i])[1] for i in chosen)
    assert own_choice_of(target, samples, seed=3, sample_tokens=60) == found


def test_nothing_is_said_without_the_target():
    """Heads that run the target themselves get no features."""
    document = (torch.arange(6), torch.tensor([-1, 0, 0, 0, 0, 0]))
    assert own_choice(FeatureBatch.pack([document], 2)) == OwnChoice()
    nothing = replace(FeatureBatch.pack([(torch.arange(2), torch.tensor([-1, 0]))], 2), teacher_argmax_A=torch.ones(0))
    assert own_choice(nothing) == OwnChoice() and OwnChoice().share == 0.0


def test_advice_is_given_below_the_threshold_and_not_on_a_few_tokens():
    many = 10 * ENOUGH_TOKENS
    below, above = OwnChoice(int(many * FOREIGN) - 1, many), OwnChoice(int(many * FOREIGN) + 1, many)
    assert below.foreign and below.line().startswith("WARNING: ") and "data.distill.prompts" in below.line()
    assert not above.foreign and "WARNING" not in above.line() and "data.distill.prompts" in above.line()
    assert OwnChoice(many - 1, many).line().endswith("greedy choice")
    assert not OwnChoice(0, ENOUGH_TOKENS - 1).foreign
    assert OwnChoice(3, 4).line() == "75.0% of 4 answer tokens are the target's own greedy choice"
    assert OwnChoice(3, 4).as_dict() == {"own": 3, "tokens": 4, "share": 0.75, "foreign": False}
