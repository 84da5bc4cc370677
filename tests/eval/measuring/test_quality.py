"""The comparison of a tuned target with the original gives the numbers of a naive loop."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, VOCAB
from reference.decode import plain_greedy

from headstart.eval.measuring import quality
from headstart.eval.measuring.quality import Perplexity, common_prefix, greedy_answers, measure_quality, perplexity
from headstart.heads.errors import TargetError
from headstart.heads.targets.target import Target
from headstart.quality_guard import judged, require_quality


def documents(seed: int = 0) -> list[quality.Scored]:
    """Lengths, and scored places, of every kind: none, the first token, the last, all."""
    noise = torch.Generator().manual_seed(seed)
    found: list[quality.Scored] = []
    for length in (1, 2, 7, 19, 33, 34):
        ids = torch.randint(0, VOCAB, (length,), generator=noise).tolist()
        found.append((ids, (torch.rand(length, generator=noise) < 0.5).tolist()))
    return [*found, (found[3][0], [True] * 19), (found[2][0], [False] * 7)]


@torch.no_grad()
def naive(model: Any, given: list[quality.Scored]) -> tuple[float, int]:
    """(Mean negative log-likelihood, tokens), one document and one token after the other, from the whole model."""
    nats = []
    for ids, scored in given:
        for place in range(1, len(ids)):
            if scored[place]:
                logits_V = model(input_ids=torch.tensor([ids[:place]])).logits[0, -1].double()
                nats.append(float(torch.logsumexp(logits_V, 0) - logits_V[ids[place]]))
    return sum(nats) / len(nats), len(nats)


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0]


def worse(target: Target, scale: float) -> Target:
    """A copy with noise in its attention."""
    model, noise = copy.deepcopy(target.model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name:
                weight.add_(scale * torch.randn(weight.shape, generator=noise))
    return Target.from_model(model)


@contextmanager
def opened(target: Target) -> Iterator[Target]:
    yield target


@pytest.mark.parametrize(("tokens", "logit_bytes"), [(4096, 256 << 20), (40, 256 << 20), (4096, 5 * 4 * VOCAB), (1, 1)])
def test_perplexity_is_that_of_a_naive_loop(
    target: Target, monkeypatch: pytest.MonkeyPatch, tokens: int, logit_bytes: int
) -> None:
    monkeypatch.setattr(quality, "LOGIT_BYTES", logit_bytes)
    mean, count = naive(target.model, documents())
    found = perplexity(target, documents(), tokens)
    assert found.tokens == count and found.value == pytest.approx(math.exp(mean), rel=1e-5)


def test_perplexity_applies_the_output_rule_of_the_target() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, final_logit_softcapping=2.0, sliding_window=8, initializer_range=0.25,
    )  # fmt: skip
    capped = Target.from_model(Gemma2ForCausalLM(config))
    mean, _ = naive(capped.model, documents())
    assert perplexity(capped, documents()).value == pytest.approx(math.exp(mean), rel=1e-5)


def test_logits_of_many_rows_never_exist_at_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    usual = type(target.teacher).logits

    def logits(self: Any, hidden_AD: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(hidden_AD))
        return usual(self, hidden_AD, *rest)

    monkeypatch.setattr(type(target.teacher), "logits", logits)
    monkeypatch.setattr(quality, "LOGIT_BYTES", 3 * 4 * VOCAB)
    count = perplexity(target, documents()).tokens
    assert max(rows) == 3 and sum(rows) == count


def test_greedy_answers_are_those_of_each_prompt_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "BATCH", 2)
    prompts = [list(context) for context in CONTEXTS]
    assert len(prompts) == 3  # the second batch is filled up
    stops = set(target.stop_token_ids)
    expected = [plain_greedy(lambda ids: next_logits(target.model, ids), prompt, 12, stops) for prompt in prompts]
    assert greedy_answers(target, prompts, 12) == expected


def test_what_tuning_cost_is_told_in_numbers(target: Target) -> None:
    prompts, tuned = [list(context) for context in CONTEXTS], worse(target, 0.05)
    found = measure_quality(target, lambda: opened(tuned), documents(), prompts, 12)
    own, theirs = greedy_answers(target, prompts, 12), greedy_answers(tuned, prompts, 12)
    assert found.perplexity_original == pytest.approx(math.exp(naive(target.model, documents())[0]), rel=1e-5)
    assert found.perplexity_tuned == pytest.approx(math.exp(naive(tuned.model, documents())[0]), rel=1e-5)
    assert found.rise == pytest.approx(found.perplexity_tuned / found.perplexity_original - 1)
    assert found.rise != 0 and found.dtype == "float32" and found.conversations == len(documents())
    answers = found.answers
    assert answers is not None and answers.prompts == len(prompts)
    assert answers.identical == sum(a == b for a, b in zip(own, theirs, strict=True)) < len(prompts)
    shared = []
    for x, y in zip(own, theirs, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b]
        shared.append(differs[0] if differs else min(len(x), len(y)))
    assert answers.common_prefix == pytest.approx(sum(shared) / len(shared))
    for value, given in ((answers.perplexity_own, own), (answers.perplexity_tuned, theirs)):
        said = [([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, given, strict=True)]
        assert value == pytest.approx(math.exp(naive(target.model, said)[0]), rel=1e-5)
    # the greedy answers of another model are less likely for the original than its own
    assert answers.perplexity_tuned > answers.perplexity_own


def test_prompts_are_measured_beside_the_answers(target: Target) -> None:
    tuned, answers = worse(target, 0.05), documents()
    prompts = [(ids, [not scored for scored in mask]) for ids, mask in answers]
    found = measure_quality(target, lambda: opened(tuned), answers, [], 1, prompt_documents=prompts).to_json()
    for given, text in ((answers, found), (prompts, found["on_prompts"])):
        (before, count), (after, _) = naive(target.model, given), naive(tuned.model, given)
        assert text["tokens"] == count
        assert text["perplexity_original"] == pytest.approx(math.exp(before), rel=1e-5)
        assert text["perplexity_tuned"] == pytest.approx(math.exp(after), rel=1e-5)
        assert text["rise"] == pytest.approx(math.exp(after - before) - 1, abs=2e-5) and text["rise"] != 0
    # together they score every token but the first of each document
    assert found["tokens"] + found["on_prompts"]["tokens"] == sum(len(ids) - 1 for ids, _ in answers)
    nothing = [(ids, [False] * len(ids)) for ids, _ in answers]
    for given in ([], nothing):
        found = measure_quality(target, lambda: opened(tuned), answers, [], 1, prompt_documents=given).to_json()
        assert found["on_prompts"] is None and found["rise"] != 0


def test_a_target_that_grew_surer_of_answers_is_refused_for_its_prompts(target: Target) -> None:
    """Answers consist of tokens of their own. Training on them raises these tokens' logits everywhere."""
    noise = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 40, (12, 20), generator=noise)
    answers = torch.randint(40, VOCAB, (12, 20), generator=noise)
    tokens_BT = torch.cat([prompts, answers], 1)
    model = copy.deepcopy(target.model).requires_grad_(True)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(20):
        logits_BTV = model(input_ids=tokens_BT).logits
        torch.nn.functional.cross_entropy(logits_BTV[:, 19:-1].flatten(0, 1), answers.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    tuned = Target.from_model(model)
    on_answers = [(ids, [place >= 20 for place in range(40)]) for ids in tokens_BT.tolist()]
    on_prompts = [(ids, [place < 20 for place in range(40)]) for ids in tokens_BT.tolist()]
    measured = measure_quality(target, lambda: opened(tuned), on_answers, [], 1, prompt_documents=on_prompts).to_json()
    assert measured["rise"] < -0.3 and measured["on_prompts"]["rise"] > 0.3
    assert measured["on_prompts"]["tokens"] == 12 * 19
    quality = judged(measured, 0.01)
    assert not quality["passed"]
    text = measured["on_prompts"]
    said = f"found a perplexity of {text['perplexity_tuned']:.6g} for the tuned target on 228 tokens of the prompts of"
    with pytest.raises(TargetError, match=re.escape(said)) as refused:
        require_quality(quality, force=True)
    assert f"{100 * text['rise']:.2f} % above the original's {text['perplexity_original']:.6g}" in str(refused.value)
    # by the answers alone it would pass
    alone = {name: value for name, value in measured.items() if name != "on_prompts"}
    require_quality(judged(alone, 0.01), force=False)


def test_the_same_target_agrees_with_itself(target: Target) -> None:
    prompts = [list(context) for context in CONTEXTS[:2]]
    found = measure_quality(target, lambda: opened(target), documents(), prompts, 6)
    assert found.rise == 0 and found.answers is not None
    assert found.answers.identical == 2 and found.answers.common_prefix == found.answers.length_original
    assert measure_quality(target, lambda: opened(target), documents(), [], 6).answers is None


def test_nothing_scored_and_far_too_wrong(target: Target) -> None:
    assert math.isnan(perplexity(target, [([1, 2], [False, False])]).value)
    assert Perplexity(1e6, 10).value == math.inf
    assert common_prefix([1, 2, 3], [1, 2]) == 2 and common_prefix([], [1]) == 0
