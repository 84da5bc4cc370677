"""Hydra's captured cycles and measured kernels in bfloat16 (`pytest -m gpu`, on a machine with a GPU)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, close, run, tokens_of, train_briefly
from reference.tiny import randomise
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer, Decoded, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import build_drafter
from headstart.eval.drafters.hydra import HydraDrafter
from headstart.eval.kernels.choices import compile_ways, decide_ways
from headstart.eval.kernels.launch import compiling
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import HydraConfig, build_head
from headstart.heads.targets.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TREES = {
    "chain": TreeConfig("chain", 4),
    "static": TreeConfig("static", 4),
    "dynamic": TreeConfig("dynamic", 4, 10, 40),
}
CONFIGS = {
    "plain": HydraConfig(depth=4),
    "prefix": HydraConfig(depth=4, num_layers=2, prefix_layer=True),
    "prefix, low rank": HydraConfig(depth=4, num_layers=2, prefix_layer=True, lm_head="lowrank", rank=16),
}
#: more than one width of the prefix layer's first passes
LONG = [
    [*context, *(7 + (5 * n) % 50 for n in range(more))] for context, more in zip(CONTEXTS, (300, 30, 0), strict=True)
]
NEW = 40


@pytest.fixture(scope="module")
def small() -> tuple[Target, list[Answer]]:
    """A target in float32 on the CPU, and its greedy answers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None,
        initializer_range=0.12,
    )  # fmt: skip
    target = Target.from_model(LlamaForCausalLM(config))
    return target, run(target, None)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(small: tuple[Target, list[Answer]], request: pytest.FixtureRequest) -> tuple[Target, Any]:
    """The target and a briefly trained head, in bfloat16 on the card."""
    target, answers = small
    head = train_briefly(target, answers, "hydra", CONFIGS[request.param]).head
    there = Target.from_model(copy.deepcopy(target.model).to("cuda", torch.bfloat16))
    head = copy.deepcopy(head).to("cuda", torch.bfloat16)
    head.bind(there.ends)
    return there, head


class Runs:
    """Decodes with one drafter and one engine, captured or operation by operation."""

    def __init__(self, target: Target, head: Any, tree: TreeConfig, sampling: Sampling):
        config = EvalConfig(tree=tree, temperature=sampling.temperature, repetition_penalty=sampling.repetition_penalty)
        self.drafter, self.sampling = build_drafter(head, config), sampling
        fused = FusedModel(target.model, attention_windows(target.model.config))
        self.engine = Engine(
            target.model, len(LONG), slots_needed(max(map(len, LONG)), NEW, self.drafter), prefill_chunk=64, fused=fused
        )
        self.graphs, self.generator = CycleGraphs(), torch.Generator("cuda")

    def __call__(self, contexts: list[list[int]], captured: bool, seed: int = 0, **options: Any) -> Decoded:
        self.generator.manual_seed(seed)
        graphs = self.graphs if captured else None
        given = {"max_new_tokens": NEW, "stop_ids": set(), **options}
        return decode(
            self.engine, contexts, self.drafter, self.sampling, generator=self.generator, graphs=graphs, **given
        )


def said(decoded: Decoded) -> list[Any]:
    return [(answer.tokens, answer.cycles) for answer in decoded.answers]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", TREES)
def test_captured_cycles_do_what_operations_one_by_one_do(
    pair: tuple[Target, Any], kind: str, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches through one graph; rows of different lengths, of which some end early."""
    # the same kernels in both: what is fastest is not what this test is about
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    runs = Runs(*pair, TREES[kind], Sampling(repetition_penalty=penalty))
    accepted = 0
    for contexts, limits in ((LONG, NEW), (LONG[::-1], [NEW, 3, 17]), (LONG, NEW)):
        expected = runs(contexts, captured=False, max_new_tokens=limits)
        found = runs(contexts, captured=True, max_new_tokens=limits)
        assert said(found) == said(expected)
        accepted += sum(cycle.accepted for answer in found.answers for cycle in answer.cycles)
    assert len(runs.graphs.captured) == 1
    assert accepted > 10


def test_captured_sampling_follows_its_seed(pair: tuple[Target, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    runs = Runs(*pair, TREES["chain"], Sampling(temperature=1.0))
    one, two, three = (tokens_of(runs(LONG, True, seed).answers) for seed in (1, 1, 2))
    assert one == two != three


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("config", [replace(config, depth=3) for config in CONFIGS.values()], ids=list(CONFIGS))
def test_measured_kernels_compute_what_the_head_computes(config: HydraConfig, batch: int) -> None:
    """At SmolLM2's sizes, every product by the way that was measured as the fastest one."""
    rope = {"rope_type": "default", "rope_theta": 1e5}
    dims = HeadDims(576, 49152, 1536, 9, 3, 64, 8192, rms_norm_eps=1e-5, rope_parameters=rope)
    torch.manual_seed(0)
    embed_VD = torch.randn(dims.vocab_size, dims.hidden_size, device="cuda").bfloat16()
    ends = TargetEnds(embed_VD, Teacher((embed_VD.float() / dims.hidden_size**0.5).bfloat16()))
    head: Any = build_head(config, dims)
    randomise(head, 1)
    head.embed_scale.fill_(0.5)
    head = head.to("cuda", torch.bfloat16).eval()
    head.bind(ends)
    drafter = HydraDrafter(head, TreeConfig("dynamic", 3, 10, 40), Sampling())
    hidden_BJD = torch.randn(batch, 70, dims.hidden_size, device="cuda").bfloat16()
    tokens_BJ = torch.randint(0, dims.vocab_size, (batch, 70), device="cuda")
    with torch.inference_mode():
        drafter.start(Rows(tokens_BJ, torch.full((batch,), 70, device="cuda"), hidden_BJD), 256)
        with compiling():
            for linears, rows in drafter.products(batch):
                compile_ways(linears, rows, None)
            for linears, rows in drafter.products(batch):
                decide_ways(linears, rows, None)
        for d, step in enumerate(drafter.passes, start=1):
            parents = 1 if d == 1 else 10
            f_BPD = torch.randn(batch, parents, dims.hidden_size, device="cuda").bfloat16()
            tokens_BPd = torch.randint(0, dims.vocab_size, (batch, parents, d), device="cuda")
            x_BPC = f_BPD
            for level in range(d):
                x_BPC = drafter._extend(x_BPC, tokens_BPd[:, :, level])
            expected = head.draft_logits(d, f_BPD.flatten(0, 1), tokens_BPd.flatten(0, 1))
            close(step(x_BPC).flatten(0, 1), expected)
