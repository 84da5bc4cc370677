"""The fused target in the decode loop: eager twins on a CPU and captured cycles on a GPU give the same answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from eval_help import CONTEXTS, DRAFTING_HEADS, HEAD_TREES, Trained, run, tokens_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from headstart.data.config import DistillConfig
from headstart.data.distilling.answering import Request, Requests, generate
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding import prefill
from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.decode import Answer, decode, round_up_slots, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import build_drafter
from headstart.eval.drafters.draft import DraftStep
from headstart.eval.kernels.attention import Visibility
from headstart.eval.measuring.benchmark import tau_probe
from headstart.heads.batch import FeatureSpec
from headstart.heads.targets.target import Target

CHAIN, DYNAMIC, STATIC = TreeConfig("chain", 4), TreeConfig("dynamic", 3, 3, 12), TreeConfig("static", 3, 3, 20)
Heads = Callable[[str], Trained]
#: more ranks than the kernels search for
DDTREE = TreeConfig("ddtree", 3, total_tokens=24)
TREES = {"chain": CHAIN, "dynamic": DYNAMIC, "static": STATIC, "ddtree": DDTREE}
#: (family, tree) of every head family
WAYS = [(family, TREES[kind]) for family, kind in HEAD_TREES]


def fused(target: Target) -> FusedModel:
    return FusedModel(target.model, attention_windows(target.model.config))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """First guesses instead of measured choices: which kernels run is not what these tests are about."""
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)


def test_device_and_host_agree_on_who_goes_on(target: Target, plain: list[Answer]) -> None:
    """Stops inside accepted paths, at the first token, limits of one and of two tokens: the same rows stay active."""
    limits, stops = [30, 1, 2], [{plain[0].tokens[7]}, set(), {plain[2].tokens[0]}]
    contexts = [CONTEXTS[0], CONTEXTS[1], CONTEXTS[2]]
    engine = Engine(target.model, 3, 80, bucket=8)
    loop = Loop(engine, None, Sampling(), None)
    loop.start(contexts, limits, stops)
    assert loop.active_B.tolist() == [True, False, False]
    answers = run(target, None, max_new_tokens=limits, stops=stops)
    while loop.active_B.any():
        loop.read(loop.cycle())
    ends = [len(context) + max(len(answer.tokens) - 1, 0) for context, answer in zip(contexts, answers, strict=True)]
    assert engine.length_B.tolist() == ends


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "eagle", *(name for name in DRAFTING_HEADS if "layers" in name)])
def test_draft_step_equals_the_heads_own(kind: str, trained: Heads) -> None:
    """A chain row by row on buffers against AutoregressiveHead.step with plain attention."""
    head = trained(kind).head
    noise = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (2, 6), generator=noise)
    features = torch.randn((2, 6, 32), generator=noise)
    position = torch.arange(6).expand(2, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, causal, enable_gqa=True)

    expected = head.step(tokens, features, position, attend)
    step = DraftStep(head, 16)
    shapes = [(head.dims.num_kv_heads, head.dims.head_dim)] * len(head.draft_layers)
    kv = Buffers(shapes, 2, 16, torch.float32, torch.device("cpu"))
    visibility = Visibility(position, position, torch.zeros(2, dtype=torch.int64))
    found = step(tokens, features, visibility, kv.keys, kv.values)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    only = torch.tensor([[4], [1]])
    some = step(tokens, features, visibility, kv.keys, kv.values, only)
    for a, b in zip(some, expected, strict=True):
        torch.testing.assert_close(a, b[torch.arange(2), only[:, 0]][:, None], rtol=1e-5, atol=1e-5)


class Reads(TorchDispatchMode):
    """Storages that operations read and that none of them made."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.made = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        for tensor in tree_flatten((args, kwargs))[0]:
            # a tensor without axes is a number of the program's
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage().data_ptr() not in self.made:
                self.found[tensor.untyped_storage().data_ptr()] = tensor
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.found:
                self.made.add(tensor.untyped_storage().data_ptr())
        return result


@pytest.mark.parametrize(("kind", "tree"), [("plain", CHAIN), *WAYS])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(synthetic=(0.8, 0.5)), Sampling(repetition_penalty=1.3)])
def test_a_cycle_reads_only_what_outlives_its_batch(
    target: Target, kind: str, tree: TreeConfig, sampling: Sampling, trained: Heads
) -> None:
    """A captured cycle reads memory where it stood when it was captured: its state, and what later batches share."""
    drafter = None
    if kind != "plain":
        drafter = build_drafter(trained(kind).head, EvalConfig(tree=tree, repetition_penalty=1.3))
        drafter.sampling = sampling
    engine = Engine(target.model, 3, slots_needed(12, 30, drafter), fused=fused(target))
    read: list[dict[int, Tensor]] = []  # kept, so that no address is taken twice
    for contexts in (CONTEXTS, [context[::-1] for context in CONTEXTS]):
        loop = Loop(engine, drafter, sampling, torch.Generator())
        with torch.inference_mode():
            loop.start(contexts, [30] * 3, [{1}, set(), {2}])
            loop.cycle()
            with Reads(loop.tensors()) as reads:
                loop.cycle()
        read.append(reads.found)
    assert set(read[0]) == set(read[1])
    assert len(read[0]) > 20


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "tree"), [("plain", CHAIN), *WAYS])
def test_captured_cycles_give_the_plain_answers(
    target: Target, plain: list[Answer], kind: str, tree: TreeConfig, trained: Heads
) -> None:
    """Three batches through one graph, the second with stops and limits of its own."""
    card = torch.device("cuda")
    there = Target.from_model(copy.deepcopy(target.model).to(card))
    drafter = None
    if kind != "plain":
        head = copy.deepcopy(trained(kind).head).to(card)
        head.bind(there.ends)
        drafter = build_drafter(head, EvalConfig(tree=tree))
    engine = Engine(there.model, 3, slots_needed(12, 30, drafter), prefill_chunk=4, fused=fused(there))
    graphs, generator = CycleGraphs(), torch.Generator(card)
    stops: list[set[int]] = [{plain[0].tokens[7]}, set(), {plain[2].tokens[0]}]
    for limits, stop in ((30, set()), ([30, 2, 30], stops), (30, set())):
        expected = run(target, None, max_new_tokens=limits, stops=stop)
        decoded = decode(engine, CONTEXTS, drafter, Sampling(), limits, stop, generator, graphs=graphs)
        assert tokens_of(decoded.answers) == tokens_of(expected)
        assert len(decoded.cycle_s) >= max(len(answer.cycles) for answer in decoded.answers)
    # the second batch has as many stop columns as the others, so that one graph serves all
    assert len(graphs.captured) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_prefill(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, features and keys as chunks that run operation by operation, prompt after prompt."""
    there = Target.from_model(copy.deepcopy(target.model).to("cuda"))
    spec = FeatureSpec((1, 2, 3))
    captured, plain = (Engine(there.model, 3, 80, prefill_chunk=8, fused=fused(there)) for _ in range(2))
    monkeypatch.setattr(prefill, "NARROWEST", 2)
    for contexts in (CONTEXTS, [context[::-1] for context in CONTEXTS], [[7] * 3, [8] * 16, [9]]):
        logits, rows = captured.prefill(contexts, spec)
        with monkeypatch.context() as patch:
            patch.setattr(prefill, "CAPTURED_TOKENS", 0)
            expected, expected_rows = plain.prefill(contexts, spec)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        for row, context in enumerate(contexts):
            for name in ("hidden_BJD", "streams_BJkD"):
                found, wanted = (getattr(r, name)[row, : len(context)] for r in (rows, expected_rows))
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
            for keys, wanted in zip(captured.kv.keys, plain.kv.keys, strict=True):
                torch.testing.assert_close(
                    keys[row, :, : len(context)], wanted[row, :, : len(context)], rtol=1e-3, atol=1e-3
                )
    assert captured.prompts.graphs and not plain.prompts.graphs and captured.prompts.capture_s > 0


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_sampling_follows_its_seed(target: Target, trained: Heads) -> None:
    card = torch.device("cuda")
    there = Target.from_model(copy.deepcopy(target.model).to(card))
    head = copy.deepcopy(trained("eagle3").head).to(card)
    head.bind(there.ends)
    sampling = Sampling(temperature=1.0)
    drafter = build_drafter(head, EvalConfig(tree=CHAIN, temperature=1.0))
    assert drafter is not None
    engine = Engine(there.model, 3, slots_needed(12, 30, drafter), fused=fused(there))
    graphs, generator = CycleGraphs(), torch.Generator(card)
    said = []
    for seed in (1, 1, 2):
        generator.manual_seed(seed)
        decoded = decode(engine, CONTEXTS, drafter, sampling, 30, set(), generator, graphs=graphs)
        said.append(tokens_of(decoded.answers))
    assert said[0] == said[1] != said[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", sorted(DRAFTING_HEADS))
def test_the_probe_of_training_says_what_a_cpu_says(target: Target, kind: str, trained: Heads) -> None:
    """The target's own forward with the draft's kernels; weights stay where an optimiser or a capture holds them."""
    card = torch.device("cuda")
    there = Target.from_model(copy.deepcopy(target.model).to(card))
    before = [parameter.data_ptr() for parameter in there.model.parameters()]
    head = copy.deepcopy(trained(kind).head).to(card)
    head.bind(there.ends)
    found = tau_probe(there, head, CONTEXTS, 20, depth=3)
    assert [parameter.data_ptr() for parameter in there.model.parameters()] == before
    assert found == pytest.approx(tau_probe(target, trained(kind).head, CONTEXTS, 20, depth=3))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_distillation_by_captured_cycles(target: Target, temperature: float) -> None:
    """Rows draw by seed and position: the same answers as the model's own forward, whatever they are batched with."""
    there = Target.from_model(copy.deepcopy(target.model).to("cuda"))
    config = DistillConfig(max_new_tokens=12, batch_size=4, temperature=temperature)
    answerer, seeds = EngineAnswerer(there, config), [11, 12, 13]

    def answered(numbers: Sequence[int]) -> list[list[int]]:
        wanted = [Request(str(n), 0, tuple(CONTEXTS[n]), seeds[n]) for n in numbers]
        found = {answer.request: list(answer.token_ids) for answer in answerer.answers(Requests(wanted))}
        return [found[request] for request in wanted]

    found = answered(range(3))
    assert found == generate(there, CONTEXTS, config, seeds) == generate(target, CONTEXTS, config, seeds)
    assert answered([1]) == found[1:2]
    assert len(answerer.decoder.graphs.captured) == 1


def test_buffers_are_rounded_up_by_a_fourth_at_most() -> None:
    assert [round_up_slots(n) for n in (1, 600, 1024, 1025, 5000)] == [512, 1024, 1024, 1536, 5120]
    assert all(n <= round_up_slots(n) <= max(1.25 * n, n + 511) for n in range(1, 40000, 37))
