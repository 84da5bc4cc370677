"""A drafter with an engine of its own: lossless, and its engine's tensors are part of the state of a captured cycle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, run, tokens_of
from model_drafter import ModelDrafter
from test_distribution import CONTEXT, PROCESSORS, ROWS, TOKENS, WORDS, deviation, enumerated
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.decoding.decode import Answer, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs, graph_key
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.heads.targets.target import Target

DEPTH = 3


def near(model: Any) -> Any:
    """A copy whose weights are a little off: a draft model that is often right."""
    twin = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=noise)
    return twin


def fused(model: Any) -> FusedModel:
    return FusedModel(model, attention_windows(model.config))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.3)], ids=["greedy", "penalty"])
def test_a_fused_draft_model_is_greedy_as_the_target_is(target: Target, sampling: Sampling) -> None:
    """Without fusing, the contract of the throw-away families decodes with it."""
    draft = near(target.model)
    drafter = ModelDrafter(draft, DEPTH, sampling, fused=fused(draft))
    answers = run(target, drafter, sampling=sampling)
    assert tokens_of(answers) == tokens_of(run(target, None, sampling=sampling))
    cycles = [cycle for answer in answers for cycle in answer.cycles]
    assert sum(cycle.accepted for cycle in cycles) > 5 and sum(cycle.drafted - cycle.accepted for cycle in cycles) > 5


@pytest.mark.parametrize("sampled", [True, False])
def test_sampling_has_the_targets_distribution(sampled: bool) -> None:
    models = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
            initializer_range=0.4,
        )  # fmt: skip
        models.append(LlamaForCausalLM(config).eval())
    target, sampling = Target.from_model(models[0]), Sampling(**PROCESSORS["all"])
    drafter = ModelDrafter(models[1], DEPTH, sampling, sampled)
    answers = run(target, drafter, [CONTEXT] * ROWS, TOKENS, sampling=sampling, seed=17, bucket=16, prefill_chunk=16)
    assert deviation(answers, enumerated(target, sampling)) < 5
    accepted = [cycle.accepted for answer in answers for cycle in answer.cycles]
    assert min(accepted) == 0 and max(accepted) >= 2


def test_its_engine_is_part_of_the_cycles_state(target: Target) -> None:
    """A cycle that starts again from the state it had gives the same table, and later batches share its graph."""
    draft = near(target.model)
    drafter = ModelDrafter(draft, DEPTH, Sampling(repetition_penalty=1.3), fused=fused(draft))
    engine = Engine(target.model, 3, slots_needed(12, 30, drafter), fused=fused(target.model))
    generator, keys = torch.Generator(), []
    for contexts in (CONTEXTS, [context[::-1] for context in CONTEXTS]):
        loop = Loop(engine, drafter, drafter.sampling, generator)
        with torch.inference_mode():
            loop.start(contexts, [30] * 3, [set(), set(), set()])
            keys.append(graph_key(loop))
            loop.cycle()
            before = loop.tensors()
            table = loop.cycle()
            after = loop.tensors()
            assert (drafter.engine, "length_B") in loop.state
            assert any(x is not y for x, y in zip(before, after, strict=True))
            loop.attach(before)
            assert torch.equal(loop.cycle(), table)
            for again, tensor in zip(loop.tensors(), after, strict=True):
                assert torch.equal(again, tensor)
    assert keys[0] == keys[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_cycles_give_the_plain_answers(
    target: Target, plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches through one graph that holds the forwards of both models."""
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    there, draft = (copy.deepcopy(model).to("cuda") for model in (target.model, near(target.model)))
    drafter = ModelDrafter(draft, DEPTH, Sampling(), fused=fused(draft))
    engine = Engine(there, 3, slots_needed(12, 30, drafter), prefill_chunk=4, fused=fused(there))
    graphs, generator = CycleGraphs(), torch.Generator("cuda")
    for _ in range(2):
        decoded = decode(engine, CONTEXTS, drafter, Sampling(), 30, set(), generator, graphs=graphs)
        assert tokens_of(decoded.answers) == tokens_of(plain)
        assert any(cycle.accepted for answer in decoded.answers for cycle in answer.cycles)
    assert len(graphs.captured) == 1
