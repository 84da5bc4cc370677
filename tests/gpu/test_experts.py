"""Experts on a card: captured cycles in float32 and bfloat16, and the kernels' time (`pytest -m gpu -s`)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_drafter import ModelDrafter
from reference.greedy import greedy
from torch import Tensor

from headstart.bench.architectures import random_model
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.experts import FusedExperts, experts_of
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.session import Decoder
from headstart.eval.kernels.experts import experts_eager, experts_kernel
from headstart.eval.kernels.launch import graph_time
from headstart.eval.measuring.breakdown import plain_cycle
from headstart.heads.targets.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: the last one is prefilled in a wide chunk, whose rows are sorted by expert, and a narrow one
CONTEXTS = [[5, 6, 7, 8, 9, 10, 11], [11, 12], [13 + n * n % 61 for n in range(150)]]
NEW = 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral", "gpt-oss"])
def test_captured_cycles(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and with a chain that the target itself drafts, so that all of it is accepted."""
    # the same kernels in both: what is fastest is not what this test is about
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    model = random_model(name, device="cuda", dtype=dtype)
    fused = FusedModel(model, attention_windows(model.config))
    for layer in fused.layers:
        assert any(isinstance(module, FusedExperts) for module in layer.mlp.mlp.modules())
    own = [greedy(model, context, NEW)[0] for context in CONTEXTS] if dtype == torch.float32 else None
    for drafter in (None, ModelDrafter(model, 3, Sampling(), fused=fused)):
        engine = Engine(model, len(CONTEXTS), slots_needed(150, NEW, drafter), prefill_chunk=128, fused=fused)
        graphs, generator = CycleGraphs(), torch.Generator("cuda")
        captured, plain = (
            decode(engine, CONTEXTS, drafter, Sampling(), NEW, set(), generator, graphs=kept) for kept in (graphs, None)
        )
        tokens = [answer.tokens for answer in captured.answers]
        assert tokens == [answer.tokens for answer in plain.answers]
        assert fused.uncaptured is None and engine.prompts.uncaptured is None
        assert len(graphs.captured) == 1 and {width for width, _ in engine.prompts.graphs} == {32, 128}
        assert own is None or tokens == own
        if drafter is not None:
            cycles = [cycle for answer in captured.answers for cycle in answer.cycles]
            assert sum(cycle.accepted for cycle in cycles) > 2 * len(cycles)


def test_experts_that_wait_for_the_host_are_not_captured_and_the_answers_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the model's own loop over experts neither prompts nor cycles can be captured; sampling goes on as well."""
    monkeypatch.setattr("headstart.eval.decoding.fused.mlp.fuse_experts", lambda module: module)
    model = random_model("Qwen3-MoE", device="cuda")
    model.set_experts_implementation("eager")
    target, tree = Target.from_model(model), TreeConfig("chain", 3)
    for temperature in (0.0, 1.0):
        answers = []
        for engine in ("auto", "transformers"):
            decoder = Decoder(target, EvalConfig(tree=tree, temperature=temperature, engine=engine))
            for _ in range(2):
                decoded = decoder.run(CONTEXTS, None, NEW, seed=3)
            answers.append([answer.tokens for answer in decoded.answers])
            if engine == "auto":
                assert decoder.path == "fused" and decoder.slow is not None
                assert "operation by operation" in decoder.slow and "synchronizing" in decoder.slow
                print(f"\n{decoder.slow}")
                cost = plain_cycle(decoder, CONTEXTS)
                assert 0 < cost["device_ms"] <= cost["wall_ms"]
                print(cost)
        assert answers[0] == answers[1]
        if temperature == 0:
            assert answers[0] == [greedy(model, context, NEW)[0] for context in CONTEXTS]


def off_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> FusedModel:
        raise Unfusable("this test wants transformers' own forward")

    monkeypatch.setattr("headstart.eval.decoding.session.FusedModel", refuse)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["Llama", "DeepSeek-V3", "Gemma 4", "Cohere2", "gpt-oss", "Gemma 2"])
def test_captured_cycles_of_the_generic_path(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    off_the_fast_path(monkeypatch)
    model = random_model(name, device="cuda")
    target, tree = Target.from_model(model), TreeConfig("chain", 3)
    answers, cycle_ms = [], []
    for engine in ("auto", "transformers"):
        decoder = Decoder(target, EvalConfig(tree=tree, temperature=temperature, engine=engine))
        for contexts in (CONTEXTS, CONTEXTS[::-1]):  # the second time, the graph serves other contexts
            decoded = decoder.run(contexts, None, NEW, seed=3)
        answers.append([answer.tokens for answer in decoded.answers])
        cycle_ms.append(plain_cycle(decoder, CONTEXTS))
        if engine == "auto":
            captured = len(decoder.graphs.captured)
            print(f"\n{name}: {captured} captured; {decoder.slow}", end="")
    print(f"; auto {cycle_ms[0]}, transformers {cycle_ms[1]}", end="")
    assert answers[0] == answers[1]
    if temperature == 0:
        assert answers[0] == [greedy(model, context, NEW)[0] for context in CONTEXTS[::-1]]
    # float32 experts of transformers wait for the host
    assert captured == (0 if name in ("DeepSeek-V3", "gpt-oss") else 1)


def test_the_cost_of_the_generic_path_is_measured() -> None:
    model = random_model("Llama", device="cuda", dtype=torch.bfloat16)
    decoder = Decoder(Target.from_model(model), EvalConfig(engine="transformers"))
    cost = plain_cycle(decoder, CONTEXTS)
    print(f"\n{cost}")
    assert 0 < cost["device_ms"] < cost["wall_ms"] / 2  # tiny layers: a card mostly waits


def routes(rows: int, per_row: int, experts: int, seed: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator("cuda").manual_seed(seed)
    score = torch.rand((rows, experts), generator=noise, device="cuda")
    weight, index = score.topk(per_row, -1)
    return index, weight / weight.sum(-1, keepdim=True)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_time_at_the_widths_of_qwen3_30b_a3b(dtype: torch.dtype) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=2048, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    with torch.device("cuda"):
        own = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    for weight in own.parameters():
        weight.normal_(std=0.03)
    experts = experts_of(own)
    assert experts is not None
    times: dict[tuple[int, str], float] = {}
    for rows in (1, 4, 8, 16, 64, 512, 2048):
        x = torch.randn((rows, 2048), device="cuda").to(dtype)
        # several routings in turn: the weights of one do not stay in the cache
        given = [routes(rows, 8, 128, seed) for seed in range(4)]
        ways: dict[str, Any] = {"tiles": lambda i, w, x=x: experts_kernel(x, i, w.to(dtype), experts, single=False)}
        if rows <= 64:
            ways["single"] = lambda i, w, x=x: experts_kernel(x, i, w.to(dtype), experts, single=True)
        if dtype == torch.bfloat16:
            implementation = copy.copy(own)
            implementation.config = copy.copy(config)
            implementation.config._experts_implementation_internal = "grouped_mm"
            ways["grouped_mm"] = lambda i, w, x=x: implementation(x, i, w.to(dtype))  # noqa: B023
        expected = experts_eager(x, given[0][0], given[0][1].to(dtype), experts).float()
        for name, way in ways.items():
            found = way(*given[0]).float()
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert float((found - expected).norm() / expected.norm()) < tolerance, (rows, name)
            times[rows, name] = graph_time(lambda: [way(*routed) for routed in given]) / len(given) * 1e3  # noqa: B023
        read = sum(int(index.unique().numel()) for index, _ in given) / len(given) * own.gate_up_proj[0].nbytes * 1.5
        line = ", ".join(
            f"{name} {times[rows, name]:.1f} µs ({read / times[rows, name] / 1e6:.2f} TB/s)" for name in ways
        )
        print(f"\n{dtype} {rows} rows: {line}", end="")
    for rows in {rows for rows, _ in times}:
        if dtype == torch.bfloat16:
            assert times[rows, "tiles"] < times[rows, "grouped_mm"]
        elif rows <= 64:
            assert times[rows, "single"] < times[rows, "tiles"]
