"""Fused targets of many architectures on a GPU: kernels against their eager twins, captured chains against plain
forwards (`pytest -m gpu`).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, tokens_of
from model_drafter import ModelDrafter

from headstart.bench.architectures import random_model
from headstart.eval.decoding.decode import Answer, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.kernels.attention import Visibility
from headstart.heads.kernels.device import eager_twins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: one of each structure, and those that the fused layers must not lose
NAMES = [
    "Llama", "Qwen2", "Qwen3", "Mistral", "Granite", "Cohere2", "GLM-4", "SmolLM3", "ERNIE-4.5", "HunYuan dense",
    "StableLM", "gpt-oss", "Gemma 2", "OLMo-2", "OLMo-3", "EXAONE-4", "Qwen3-MoE", "Gemma 1", "Gemma 3", "Phi-2",
    "Phi-3", "StarCoder2", "GPT-NeoX", "Nemotron",
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]
NEW_TOKENS = 16


def fused(model: Any) -> FusedModel:
    return FusedModel(model, attention_windows(model.config))


def near(model: Any) -> Any:
    """A copy whose matrices are a little off: a draft model that is often right."""
    twin = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.ndim > 1:
                off = torch.randn(parameter.shape, generator=noise).to(parameter)
                parameter += 0.1 * parameter.std() * off
    return twin


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_chain(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what the same cycles give one by one, and what the model's own forward gives over the whole answer."""
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    check_chain(name, dtype, "cuda")


def check_chain(name: str, dtype: torch.dtype, device: str) -> None:
    model = random_model(name, device=device, dtype=dtype)
    twin = fused(model)
    check_tree(twin, dtype)
    draft = near(model)
    drafter = ModelDrafter(draft, 3, Sampling(), fused=fused(draft))
    engine = Engine(model, 3, slots_needed(12, NEW_TOKENS, drafter), fused=twin)
    generator = torch.Generator(device)
    made: list[list[Answer]] = []
    for graphs in (None, CycleGraphs()) if device == "cuda" else (None, None):
        decoded = decode(engine, CONTEXTS, drafter, Sampling(), NEW_TOKENS, set(), generator, graphs=graphs)
        made.append(decoded.answers)
    answers = made[1]
    assert tokens_of(answers) == tokens_of(made[0])
    assert any(cycle.accepted for answer in answers for cycle in answer.cycles)
    shares = [share_of_own(model, context, answer) for context, answer in zip(CONTEXTS, answers, strict=True)]
    # in bfloat16 two logits may be equal but for rounding, and a mixture may choose another expert
    assert min(shares) == 1 if dtype == torch.float32 else sum(shares) / len(shares) > 0.75


@torch.no_grad()
def share_of_own(model: Any, context: list[int], answer: Answer) -> float:
    """Share of an answer's tokens that are the model's own most likely ones after the tokens before them."""
    ids = torch.tensor([[*context, *answer.tokens]], device=model.device)
    own = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1].argmax(-1)
    return float((own == ids[0, len(context) :]).float().mean())


def check_tree(twin: FusedModel, dtype: torch.dtype) -> None:
    """A tree behind a prompt: logits and features of the kernels are those of their eager twins."""
    device = twin.device
    noise = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 90, (2, 22), generator=noise).to(device)
    position = torch.arange(15, device=device).expand(2, 15)
    base = torch.full((2,), 15, device=device)
    # the root, two children, and one child of each
    mask = torch.eye(5, dtype=torch.bool, device=device)
    mask[1:, 0] = mask[3, 1] = mask[4, 2] = True
    depth = torch.tensor([0, 1, 1, 2, 2], device=device)
    slots = base[:, None] + torch.arange(5, device=device)

    def run() -> tuple[torch.Tensor, ...]:
        buffers = twin.buffers(2, 24)
        twin.forward(tokens[:, :15], Visibility(position, position, position[:, 0]), buffers)
        visibility = Visibility(base[:, None] + depth, slots, base, mask.expand(2, 5, 5))
        logits, hidden, streams = twin.forward(tokens[:, 15:20], visibility, buffers, (1, 2))
        assert streams is not None
        return logits.clone(), hidden.clone(), streams

    found = run()
    with eager_twins():
        expected = run()
    # rounding may make a mixture choose another expert
    allowed = 1e-3 if dtype == torch.float32 else 0.6 if twin.mixes else 0.1
    for mine, theirs in zip(found, expected, strict=True):
        distance = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        assert distance < allowed, distance
