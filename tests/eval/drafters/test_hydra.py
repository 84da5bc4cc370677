"""What Hydra drafts, against a drafter that works node by node and caches nothing (reference/hydra_drafts.py)."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, DEVICE, VOCAB, check_cycles, needs_kernels, run, tokens_of, train_briefly
from reference.documents import Ends
from reference.families import shape_of
from reference.hydra_drafts import NaiveDrafter
from reference.tiny import randomise
from test_teacher_forced import items_of
from test_verify import Joint, Language, V, check, continue_from, point_mass_outcomes, rejection_outcomes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling, probabilities
from headstart.eval.drafters import build_drafter, hydra, layer, one_by_one
from headstart.eval.drafters.hydra import HydraDrafter
from headstart.eval.kernels import (
    add_silu,
    argmax,
    attention,
    candidates,
    extend_input,
    line_up,
    linear,
    norm,
    rope_store,
)
from headstart.eval.kernels import (
    rows as row_kernels,
)
from headstart.eval.measuring.metrics import acceptance
from headstart.eval.measuring.teacher_forced import teacher_forced_cycles
from headstart.eval.tree import Tree, static_paths
from headstart.heads.errors import ConfigError
from headstart.heads.families import HydraConfig, build_head
from headstart.heads.targets.target import Target

PATHS = [(0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 2, 0), (0, 2, 1), (3, 1, 0)]
TREES = {
    "chain": TreeConfig("chain", 3),
    "static": TreeConfig("static", 3, paths=[list(path) for path in PATHS]),
    "dynamic": TreeConfig("dynamic", 3, 3, 18),
}
CONFIGS = {
    "no prefix": HydraConfig(depth=3, num_layers=2),
    "prefix": HydraConfig(depth=3, prefix_layer=True),
    "prefix, low rank": HydraConfig(depth=3, num_layers=3, prefix_layer=True, lm_head="lowrank", rank=5),
    "shared": HydraConfig(depth=3, lm_head="shared"),
}
#: modules whose kernels a cycle of the drafter runs
KERNELS = [add_silu, argmax, attention, candidates, extend_input, line_up, linear, norm, rope_store, row_kernels]
Heads = Callable[[str], Any]
each_tree = pytest.mark.parametrize("kind", TREES)
each_prefix = pytest.mark.parametrize("name", ["no prefix", "prefix"])


@pytest.fixture(scope="module")
def heads(target: Target, plain: list[Answer]) -> Heads:
    """A head of each of CONFIGS, trained briefly on the plain answers."""
    return cache(lambda name: train_briefly(target, plain, "hydra", CONFIGS[name]).head)


@pytest.fixture
def narrow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a few tokens are read in several passes."""
    monkeypatch.setattr(layer, "START_CHUNK", 4)
    monkeypatch.setattr(layer, "NARROWEST_START", 2)


def naive_drafter(target: Target, head: Any, penalty: float = 1.0) -> NaiveDrafter:
    @torch.no_grad()
    def hidden(tokens: list[int]) -> Tensor:
        return target.forward_documents(torch.tensor([tokens]), ())[0][0].double()

    weights = {name: parameter.detach().double() for name, parameter in head.named_parameters()}
    ends = Ends(target.ends.embed_VD.double(), target.ends.teacher.weight_VD.double())
    scale, config = float(head.embed_scale), head.config
    return NaiveDrafter(weights, ends, scale, shape_of(head), config.num_layers, config.lm_head, hidden, penalty)


def check_tree(tree: Tree, row: int, naive: NaiveDrafter, config: TreeConfig, tokens: list[int]) -> None:
    """Tokens, parents, depths and order."""
    if config.kind == "chain":
        nodes = naive.chain(tokens, config.depth)
    elif config.kind == "static":
        nodes = naive.static(tokens, static_paths(config, config.depth))
    else:
        nodes = naive.dynamic(tokens, config.k, config.depth, config.total_tokens - 1)
    assert tree.tokens_BN[row].tolist() == [node.token for node in nodes]
    assert tree.parent_BN[row].tolist() == [node.parent for node in nodes]
    assert tree.depth_BN[row].tolist() == [len(node.path) for node in nodes]
    assert tree.valid_BN[row].all() and tree.levels == config.depth


def path_to(tree: Tree, row: int, depth: int) -> list[int]:
    """The last node of a depth, or of the deepest there is, with its ancestors, from depth 1 on."""
    if depth == 0:
        return []
    depth = min(depth, int(tree.depth_BN[row].max()))
    path = [int(torch.nonzero(tree.depth_BN[row] == depth)[-1, 0])]
    while (up := int(tree.parent_BN[row, path[0]])) >= 0:
        path.insert(0, up)
    return path


@each_tree
@pytest.mark.parametrize("penalty", [1.0, 1.6])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("narrow_starts")
def test_trees_are_the_naive_ones(target: Target, heads: Heads, name: str, kind: str, penalty: float) -> None:
    """Two batches of four cycles. Rows differ in length and in what is accepted of them; one row stops early."""
    head, config = heads(name), TREES[kind]
    naive = naive_drafter(target, head, penalty)
    drafter = HydraDrafter(head, config, Sampling(repetition_penalty=penalty))
    engine = Engine(target.model, 3, 48, bucket=8, prefill_chunk=4)
    kept: list[int] = []
    for given in (CONTEXTS, [context[::-1] for context in CONTEXTS]):
        contexts = [list(context) for context in given]
        logits_BV, rows = engine.prefill(contexts, drafter.spec)
        drafter.start(rows, engine.capacity)
        roots = logits_BV.argmax(-1).tolist()
        for cycle in range(4):
            roots_B, active = torch.tensor(roots), [True, True, cycle < 1]
            tree = drafter.propose(roots_B)
            for row, context in enumerate(contexts):
                check_tree(tree, row, naive, config, [*context, roots[row]])
            step = engine.verify(roots_B, tree, drafter.spec)
            # whatever the target says: from nothing to a whole path
            path_BK = torch.full((3, config.depth), -1)
            for row in range(3):
                path = path_to(tree, row, (3 * row + cycle) % (config.depth + 1))
                path_BK[row, : len(path)] = torch.tensor(path)
            accepted = engine.commit(roots_B, tree, step, path_BK, torch.tensor(active))
            kept += [int(count) for count in accepted.count_B]
            for row, context in enumerate(contexts):
                context += accepted.tokens_BJ[row, : accepted.count_B[row]].tolist()
                roots[row] = 8 + row + cycle if active[row] else roots[row]
            drafter.commit(accepted)
    assert set(kept) == {0, 1, 2, 3, 4}


@each_prefix
def test_of_equal_scores_the_shallower_node_is_kept(target: Target, heads: Heads, name: str) -> None:
    """Heads so sure of one token that its log-probability is 0 at every depth: all scores of that path are tied."""
    head: Any = copy.deepcopy(heads(name))
    with torch.no_grad():
        for lm_head in head.lm_heads:
            lm_head.weight *= 1e4
    naive, config = naive_drafter(target, head), TreeConfig("dynamic", 3, 3, 3)
    drafter, engine = HydraDrafter(head, config, Sampling()), Engine(target.model, 1, 32)
    logits_BV, rows = engine.prefill(CONTEXTS[:1], drafter.spec)
    drafter.start(rows, 32)
    root_B = logits_BV.argmax(-1)
    tree = drafter.propose(root_B)
    assert tree.score_BN.tolist() == [[0.0, 0.0]] and tree.parent_BN.tolist() == [[-1, 0]]
    check_tree(tree, 0, naive, config, [*CONTEXTS[0], int(root_B)])


@each_prefix
def test_a_drawn_chain_carries_what_it_was_drawn_from(target: Target, heads: Heads, name: str) -> None:
    """Each level's q is of the root and the tokens drawn before, all of them penalised."""
    head, sampling = heads(name), Sampling(0.9, top_k=20, top_p=0.95, repetition_penalty=1.7)
    naive = naive_drafter(target, head, penalty=1.7)
    drafter, engine = HydraDrafter(head, TREES["chain"], sampling), Engine(target.model, 3, 48)
    logits_BV, rows = engine.prefill(CONTEXTS, drafter.spec)
    drafter.start(rows, 48)
    roots_B = logits_BV.argmax(-1)
    tree = drafter.propose(roots_B, torch.Generator().manual_seed(0))
    assert tree.q_BNV is not None and tree.linear
    unpenalised = replace(sampling, repetition_penalty=1.0)
    for row, context in enumerate(CONTEXTS):
        for depth in range(3):
            path = tuple(tree.tokens_BN[row, :depth].tolist())
            logits_V = torch.tensor(naive.logits([*context, int(roots_B[row])], path))
            torch.testing.assert_close(
                tree.q_BNV[row, depth], probabilities(logits_V, unpenalised), rtol=1e-3, atol=1e-5
            )
    greedy = HydraDrafter(head, replace(TREES["chain"], sample=False), sampling)
    greedy.start(rows, 48)
    tree = greedy.propose(roots_B)
    assert tree.q_BNV is None
    check_tree(tree, 0, naive, TREES["chain"], [*CONTEXTS[0], int(roots_B[0])])


@pytest.mark.parametrize("name", ["shared", "prefix, low rank"])
def test_the_scale_of_the_targets_logits_counts(target: Target, heads: Heads, name: str) -> None:
    """Of Granite's or Cohere's: it changes how sure a head is, which dynamic trees and drawn chains read."""
    head: Any = copy.deepcopy(heads(name))
    head.bind(replace(target.ends, teacher=replace(target.ends.teacher, scale=0.25)))
    drafter, engine = HydraDrafter(head, TREES["chain"], Sampling(1.0)), Engine(target.model, 3, 48)
    logits_BV, rows = engine.prefill(CONTEXTS, drafter.spec)
    drafter.start(rows, 48)
    roots_B1 = logits_BV.argmax(-1)[:, None]
    tree = drafter.propose(roots_B1[:, 0], torch.Generator().manual_seed(0))
    assert tree.q_BNV is not None
    tokens_BN = torch.cat((roots_B1, tree.tokens_BN), 1)
    for d in range(1, 4):
        with torch.no_grad():
            expected_BV = head.draft_logits(d, drafter.feature_BD, tokens_BN[:, :d]).softmax(-1)
        torch.testing.assert_close(tree.q_BNV[:, d - 1], expected_BV, rtol=1e-4, atol=1e-6)


# losslessness

WORDS = V


class Spoken(Language):
    """The next token of a target after `context` and a path."""

    def __init__(self, target: Target, context: list[int]):
        super().__init__(0)
        self.target, self.context = target, context

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.table:
            tokens = torch.tensor([[*self.context, *path]])
            with torch.no_grad():
                logits_V = self.target.model(input_ids=tokens, use_cache=False).logits[0, -1]
            self.table[path] = logits_V.softmax(-1)
        return self.table[path]


@pytest.mark.parametrize("prefix", [False, True])
@each_tree
def test_outputs_are_exact(kind: str, prefix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over four words: every chain that may be drawn, or the tree; every outcome of its verification."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        initializer_range=0.5,
    )  # fmt: skip
    target = Target.from_model(LlamaForCausalLM(config).double())
    head: Any = build_head(HydraConfig(depth=2, prefix_layer=prefix), target.dims).double()
    head.initialise(target.ends)
    randomise(head, 1)
    context, root = [3, 1, 2, 1, 0], 2
    trees = {
        "chain": TreeConfig("chain", 2),
        "static": TreeConfig("static", 2, paths=[[0], [2], [0, 0], [0, 1], [2, 3]]),
        "dynamic": TreeConfig("dynamic", 2, 2, 5),
    }
    sampling, engine = Sampling(temperature=1.0), Engine(target.model, WORDS**2, 32)
    drafter = HydraDrafter(head, trees[kind], sampling)
    _, rows = engine.prefill([context] * WORDS**2, drafter.spec)
    drafter.start(rows, 32)
    # row n of the batch draws the n-th of all chains, each token with the probability that `draw` is given
    chains = torch.tensor(list(itertools.product(range(WORDS), repeat=2)))
    drawn: list[Tensor] = []

    def draw(q_BV: Tensor, generator: torch.Generator | None) -> Tensor:
        tokens_B = chains[:, len(drawn)]
        drawn.append(q_BV.gather(1, tokens_B[:, None])[:, 0])
        return tokens_B

    monkeypatch.setattr(one_by_one, "draw", draw)
    tree = drafter.propose(torch.full((WORDS**2,), root))
    language = Spoken(target, [*context, root])
    total: Joint = defaultdict(float)
    outcomes = rejection_outcomes if kind == "chain" else point_mass_outcomes
    chance_B = torch.stack(drawn).prod(0).tolist() if kind == "chain" else [1.0]
    for row, chance in enumerate(chance_B):
        one = slice(row, row + 1)
        q_1NV = None if tree.q_BNV is None else tree.q_BNV[one]
        parts = (tree.tokens_BN[one], tree.parent_BN[one], tree.depth_BN[one], tree.valid_BN[one])
        for weight, committed in outcomes(Tree(*parts, tree.levels, q_1NV, tree.linear), language):
            continue_from(total, chance * weight, committed, language, 3)
    assert len(set(map(round, chance_B, itertools.repeat(4)))) > 3 or kind != "chain"
    check(total, language, 3)


# the loop


@each_prefix
@each_tree
def test_greedy_answers_are_the_plain_ones(
    target: Target, plain: list[Answer], heads: Heads, name: str, kind: str
) -> None:
    stops = [{plain[0].tokens[17]}, set(), {plain[2].tokens[11]}]
    answers = run(target, build_drafter(heads(name), EvalConfig(tree=TREES[kind])), stops=stops)
    assert tokens_of(answers) == tokens_of(run(target, None, stops=stops))
    check_cycles(answers)
    cycles = [cycle for answer in answers for cycle in answer.cycles]
    assert sum(cycle.accepted for cycle in cycles) > 5
    assert sum(cycle.drafted - cycle.accepted for cycle in cycles) > 5


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_pass_over_known_answers_says_what_the_loop_does(
    target: Target, plain: list[Answer], heads: Heads, name: str, depth: int
) -> None:
    """The prefix layer over whole documents against its cache; more depths than the head has are cut."""
    head = heads(name)
    loop = run(target, build_drafter(head, EvalConfig(tree=TreeConfig(depth=depth if depth < 3 else 5))))
    known = items_of(run(target, None))
    assert teacher_forced_cycles(target, head, known, depth, max_forward_tokens=64) == [a.cycles for a in loop]
    assert acceptance(cycle for answer in loop for cycle in answer.cycles).tau > 1


def test_a_cycle_has_fixed_shapes_and_runs_a_head_once_per_level(
    target: Target, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parents without children do not run: of nine nodes in PATHS the second level runs two, the third two."""
    seen: list[tuple[int, ...]] = []
    original = hydra.DepthPass.__call__

    def counted(step: hydra.DepthPass, x_BPC: Tensor) -> Tensor:
        seen.append(tuple(x_BPC.shape))
        return original(step, x_BPC)

    monkeypatch.setattr(hydra.DepthPass, "__call__", counted)
    width = target.dims.hidden_size
    for kind, parents in (("chain", [1, 1, 1]), ("static", [1, 2, 2]), ("dynamic", [1, 3, 3])):
        drafter = HydraDrafter(heads("prefix"), TREES[kind], Sampling())
        engine = Engine(target.model, 2, 40)
        drafter.start(engine.prefill(CONTEXTS[:2], drafter.spec)[1], 40)
        seen.clear()
        drafter.propose(torch.tensor([3, 4]))
        assert seen == [(2, count, (d + 2) * width) for d, count in enumerate(parents)]
        products = {rows: len(linears) for linears, rows in drafter.products(2)}
        # a first block, an output matrix per head; q, k and v of a commit's rows, the layer's rest on its last row
        expected: dict[int, int] = defaultdict(int, {2: 3})
        for count in parents:
            expected[2 * count] += 2
        expected[2 * 4] += 1
        assert products == expected


@needs_kernels
@each_tree
def test_drafts_with_and_without_kernels(
    target: Target, heads: Heads, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, head = Target.from_model(copy.deepcopy(target.model).to(DEVICE)), copy.deepcopy(heads("prefix")).to(DEVICE)
    head.bind(there.ends)
    sampling = Sampling(repetition_penalty=1.3)
    said: list[list[Answer]] = []
    for kernels in (False, True):
        for module in KERNELS:
            monkeypatch.setattr(module, "wants_kernel", lambda x, kernels=kernels: kernels)
        said.append(run(there, HydraDrafter(head, TREES[kind], sampling), CONTEXTS, 9, sampling=sampling))
    eager, kernel = said
    assert [(answer.tokens, answer.cycles) for answer in kernel] == [(a.tokens, a.cycles) for a in eager]


def test_what_cannot_be_drafted_is_refused(target: Target, heads: Heads) -> None:
    head: Any = heads("no prefix")
    with pytest.raises(ConfigError, match=f"eval.tree.paths: found rank {VOCAB}, the vocabulary has {VOCAB} tokens"):
        HydraDrafter(head, TreeConfig("static", paths=[[VOCAB]]), Sampling())
    deeper = TreeConfig("static", paths=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    assert HydraDrafter(head, deeper, Sampling()).max_nodes == 3  # the head has three depths
    drafter = HydraDrafter(head, TREES["chain"], Sampling())
    with pytest.raises(ValueError, match="the rows carry no features"):
        drafter.start(Rows(torch.tensor([[1]]), torch.tensor([1])), 8)
    with pytest.raises(RuntimeError, match="is not bound to its target"):
        unbound: Any = build_head(HydraConfig(depth=2), target.dims)
        rows = Rows(torch.tensor([[1]]), torch.tensor([1]), torch.zeros(1, 1, target.dims.hidden_size))
        HydraDrafter(unbound, TREES["chain"], Sampling()).start(rows, 8)
