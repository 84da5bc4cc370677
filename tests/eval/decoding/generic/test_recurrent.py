"""Targets with recurrent states: chains give what plain forwards give, and a state is the one of its row's tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from eval_help import tokens_of
from reference.greedy import greedy
from reference.guesses import Guesses
from torch import Tensor
from transformers import AutoModelForCausalLM, JambaConfig, Lfm2Config, MiniMaxConfig

from headstart.bench.architectures import ARCHITECTURES, random_model
from headstart.eval.decoding.decode import decode, slots_needed
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.tree import Tree, chain, empty
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import TargetError

HYBRIDS = [name for name, entry in ARCHITECTURES.items() if not entry.trees and entry.vision is None]
SPEC = FeatureSpec((1, 2))
LENGTHS = (11, 4, 9, 1)
NEW = 14


@cache
def model_of(name: str) -> Any:
    return random_model(name)


def small(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


def jamba() -> Any:
    more = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2}
    return small(JambaConfig(**SIZES, **more))


def biased_convolutions() -> Any:
    """What stands for padding is no zero here: the projections before the convolution add a bias."""
    kinds = ["conv", "conv", "full_attention", "conv"]
    return small(Lfm2Config(**SIZES, layer_types=kinds, block_auto_adjust_ff_dim=False, conv_bias=True))


def contexts_of(seed: int = 1) -> list[list[int]]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=noise).tolist() for length in LENGTHS]


@torch.no_grad()
def full_forward(model: Any, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """(logits_TV, hidden_TD) of an ordinary forward without any cache."""
    output = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return output.logits[0], output.hidden_states[-1][0]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Relative to the size of the whole (L2): large logits round by more than a small one beside them allows."""
    assert actual.shape == expected.shape
    assert float((actual - expected).norm()) <= tolerance * float(expected.norm())


def states_of(engine: Engine) -> dict[tuple[int, Any], Tensor]:
    """(layer, state) → its value [B, …]."""
    assert engine.generic is not None and engine.generic.recurrent is not None
    return {
        (index, key): state.clone()
        for index, layer in engine.generic.recurrent.layers.items()
        for key, state in layer.now.items()
    }


@pytest.mark.parametrize("name", [*HYBRIDS, "jamba", "biased convolutions"])
def test_chains_equal_plain_forwards(name: str) -> None:
    """Ragged rows, a prefill in chunks, partial acceptance, an idle row: logits, features and states are those of
    forwards over each row alone."""
    models = {"jamba": jamba, "biased convolutions": biased_convolutions}
    model = models[name]() if name in models else model_of(name)
    contexts, noise = contexts_of(), torch.Generator().manual_seed(2)
    engine = Engine(model, len(contexts), 48, bucket=8, prefill_chunk=4)
    assert engine.chains_only
    for _ in range(2):  # a second prefill starts from nothing
        logits_BV, rows = engine.prefill(contexts, SPEC)
        for b, context in enumerate(contexts):
            logits_TV, hidden_TD = full_forward(model, context)
            close(logits_BV[b], logits_TV[-1])
            close(rows.hidden_BJD[b, : len(context)], hidden_TD)
    for levels, accepted, active in (
        (1, (1, 0, 1, 0), (True, True, True, True)),
        (3, (3, 0, 1, 2), (True, True, True, True)),
        (0, (0, 0, 0, 0), (True, True, False, True)),
        (5, (2, 5, 4, 1), (True, False, True, True)),
    ):
        roots = torch.randint(3, 97, (len(contexts),), generator=noise)
        tokens = torch.randint(3, 97, (len(contexts), levels), generator=noise)
        tree = chain(tokens) if levels else empty(len(contexts))
        engine.verify(roots.flip(0), tree, SPEC)  # what is not committed leaves no trace
        step = engine.verify(roots, tree, SPEC, longest=int(engine.length_B.max()))
        for b, context in enumerate(contexts):
            logits_TV, hidden_TD = full_forward(model, [*context, int(roots[b]), *tokens[b].tolist()])
            close(step.logits_BMV[b], logits_TV[len(context) :])
            close(step.hidden_BMD[b], hidden_TD[len(context) :])
        level_K, count_B = torch.arange(levels), torch.tensor(accepted)
        path_BK = torch.where(level_K < count_B[:, None], level_K, -1)
        engine.commit(roots, tree, step, path_BK, torch.tensor(active))
        for b, goes_on in enumerate(active):
            if goes_on:
                contexts[b] = [*contexts[b], int(roots[b]), *tokens[b, : accepted[b]].tolist()]
    states = states_of(engine)
    assert states
    for b, context in enumerate(contexts):
        alone = Engine(model, 1, 48)
        alone.prefill([context])
        for key, expected in states_of(alone).items():
            close(states[key][b], expected[0], 1e-3)


@pytest.mark.parametrize("name", HYBRIDS)
def test_answers_are_the_same_with_drafts(name: str) -> None:
    """Plain decoding, chains and whole forwards agree token by token; rows end at different times."""
    model, contexts = model_of(name), contexts_of(4)
    limits = [NEW, 3, NEW, NEW - 4]
    expected = [greedy(model, context, limit)[0] for context, limit in zip(contexts, limits, strict=True)]
    longer = [[*answer, *[7] * 4] for answer in expected]
    for drafter in (None, Guesses(longer, list(LENGTHS))):
        engine = Engine(model, len(contexts), slots_needed(max(LENGTHS), NEW, drafter), bucket=8, prefill_chunk=4)
        answers = decode(engine, contexts, drafter, Sampling(), limits, set()).answers
        assert tokens_of(answers) == expected
        if drafter is not None:
            accepted = [cycle.accepted for answer in answers for cycle in answer.cycles]
            assert max(accepted) >= 3 and 0 in accepted


def test_trees_are_refused() -> None:
    engine = Engine(model_of("LFM2"), 1, 32)
    engine.prefill([[5, 6, 7]])
    two = torch.tensor([[8, 9]])
    tree = Tree(two, torch.tensor([[-1, -1]]), torch.ones_like(two), torch.ones_like(two, dtype=torch.bool), 1)
    with pytest.raises(TargetError, match=r"one order of tokens.*set eval\.tree\.kind=chain"):
        engine.verify(torch.tensor([7]), tree)


def test_a_mixer_that_cannot_go_on_reads_prompts_whole() -> None:
    """Mamba-1 over several tokens starts from nothing in transformers: the prompt is one chunk."""
    assert Engine(jamba(), 1, 40, prefill_chunk=4).prompts.chunk == 40
    assert Engine(model_of("LFM2"), 1, 40, prefill_chunk=4).prompts.chunk == 4


def test_a_model_is_left_as_it_was() -> None:
    model = model_of("Falcon-H1")
    engine = Engine(model, 1, 32)
    engine.prefill([[5, 6, 7]])
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())


def test_states_of_a_private_cache_are_refused() -> None:
    model = small(MiniMaxConfig(**SIZES, num_local_experts=2, layer_types=["linear_attention", "full_attention"] * 2))
    with pytest.raises(TargetError, match="MiniMaxForCausalLM keeps its past in a cache of its own"):
        Engine(model, 1, 16)
