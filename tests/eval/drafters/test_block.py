"""Block heads as drafters, against a naive forward of one block and against the slots that training computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, DRAFTING_HEADS, NEW_TOKENS, Trained, run
from reference.block import block_drafts, block_logits, context_rows, slot_outputs
from reference.families import block_of
from reference.greedy import greedy
from reference.llama import Weights
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import DRAFTERS, layer
from headstart.eval.drafters.block import BlockDrafter, block_everywhere
from headstart.eval.drafters.layer import all_start_widths
from headstart.eval.kernels.capture import capture
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.kernels.device import eager_twins
from headstart.heads.targets.target import Target

Heads = Callable[[str], Trained]
NAMES = [name for name, family in DRAFTING_HEADS.items() if DRAFTERS[family].draft_everywhere is block_everywhere]
each_head = pytest.mark.parametrize("name", NAMES)


class Naive:
    """A briefly trained head with float64 weights, its target's ends and features."""

    def __init__(self, target: Target, head: Any):
        from reference.documents import Ends

        self.target, self.head, self.block = target, head, block_of(head)
        self.weights: Weights = {name: value.detach().double() for name, value in head.state_dict().items()}
        self.ends = Ends(target.ends.embed_VD.detach().double(), target.teacher.weight_VD.detach().double())

    def streams(self, tokens: list[int]) -> Tensor:
        """Features of the tokens, float32 [T, m, D]."""
        ids = self.head.spec.layer_ids
        streams = self.target.forward_documents(torch.tensor([tokens]), ids)[1]
        return torch.stack([streams[k][0] for k in ids], 1).detach()

    def drafts(self, tokens: list[int], depth: int) -> tuple[list[int], list[Tensor]]:
        """Greedy drafts behind the root, the last of the tokens, and their logits."""
        streams_TkD = self.streams(tokens[:-1]).double()
        return block_drafts(self.weights, self.ends, self.block, streams_TkD, tokens[-1], depth)


def rows_of(naive: Naive, texts: list[list[int]], columns: int) -> Rows:
    """The first tokens of each text with their features, padded to `columns`."""
    padded = torch.tensor([text + [0] * (columns - len(text)) for text in texts])
    parts = [naive.streams(text) if text else None for text in texts]
    like = next(part for part in parts if part is not None)
    streams = like.new_full((len(texts), columns, *like.shape[1:]), 9.0)
    for b, part in enumerate(parts):
        if part is not None:
            streams[b, : len(part)] = part
    return Rows(padded, torch.tensor([len(text) for text in texts]), streams.mean(2), streams)


def tail_rows(naive: Naive, before: list[list[int]], new: list[list[int]], columns: int) -> Rows:
    """Rows of new tokens behind texts; none of a sequence is an idle one."""
    whole = rows_of(naive, [a + b for a, b in zip(before, new, strict=True)], max(len(a) for a in before) + columns)
    column_BJ = torch.stack([torch.arange(columns) + len(a) for a in before])
    at = torch.arange(len(before))[:, None]
    assert whole.hidden_BJD is not None and whole.streams_BJkD is not None
    counts = torch.tensor([len(b) for b in new])
    features = (whole.hidden_BJD[at, column_BJ], whole.streams_BJkD[at, column_BJ])
    return Rows(whole.tokens_BJ[at, column_BJ], counts, *features)


@each_head
@torch.no_grad()
def test_cycles_draft_what_a_naive_block_does(
    target: Target, trained: Heads, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of several passes, then commits of no, one and all tokens: old slots of blocks never show."""
    monkeypatch.setattr(layer, "START_CHUNK", 4)
    monkeypatch.setattr(layer, "NARROWEST_START", 2)
    assert all_start_widths() == [2, 4]
    naive = Naive(target, trained(name).head)
    drafter = BlockDrafter(naive.head, TreeConfig(depth=4), Sampling())
    texts = [list(context) for context in CONTEXTS]
    drafter.start(rows_of(naive, texts, max(map(len, texts))), 40)
    roots, idle = [30, 7, 12], [False] * 3
    for taken in ((4, 0, 2), (0, 1, 4), (1, 0, 0)):
        tree = drafter.propose(torch.tensor(roots))
        before, new = [list(text) for text in texts], []
        for b, count in enumerate(taken):
            expected = naive.drafts([*texts[b], roots[b]], 4)[0]
            assert tree.tokens_BN[b].tolist() == expected, (b, taken)
            # an idle row commits nothing and keeps its root
            idle[b] = b == 1 and count == 0
            new.append([] if idle[b] else [roots[b], *expected[:count]])
            texts[b] += new[b]
            roots[b] = roots[b] if idle[b] else (roots[b] * 7 + 3) % 61
        drafter.commit(tail_rows(naive, before, new, 5))
        assert drafter.length_B.tolist() == [len(text) for text in texts]
    assert tree.linear and tree.levels == 4 and tree.q_BNV is None


@each_head
@pytest.mark.parametrize("depth", [2, 4])
def test_answers_are_those_of_the_targets_own_forward(target: Target, trained: Heads, name: str, depth: int) -> None:
    """In float32, against a forward over the whole text per token, without any cache."""
    drafter = BlockDrafter(trained(name).head, TreeConfig(depth=depth), Sampling())
    answers = run(target, drafter)
    assert [answer.tokens for answer in answers] == [greedy(target.model, text, NEW_TOKENS)[0] for text in CONTEXTS]
    assert sum(cycle.accepted for answer in answers for cycle in answer.cycles) > 5


@pytest.mark.parametrize("causal", [False, True])
@each_head
@torch.no_grad()
def test_the_slots_are_those_of_training(target: Target, trained: Heads, name: str, causal: bool) -> None:
    """Token by token in float32: a document's blocks at once, and a block behind each prefix of it."""
    head: Any = copy.deepcopy(trained(name).head)
    head.causal = causal
    batch = trained(name).batch
    naive, document = Naive(target, head), CONTEXTS[0] + [int(token) for token in batch.tokens_R[7:15]]
    turns = torch.tensor([-1] * 7 + [0] * 8)
    packed = target.extract(FeatureBatch.pack([(torch.tensor(document), turns)], head.depth), head.spec)
    hidden_AKD, rows = head.slots(packed), packed.anchors.row_A.tolist()
    assert len(rows) == 7
    drafter = BlockDrafter(head, TreeConfig(depth=head.depth), Sampling())
    for a, row in enumerate(rows):
        drafter.start(rows_of(naive, [document[: row + 1]], row + 1), 40)
        with torch.inference_mode():
            root_1 = torch.tensor([document[row + 1]])
            found_KD = drafter.step.hidden(root_1, drafter.length_B, drafter.kv, drafter.depth)[:, 0]
        torch.testing.assert_close(found_KD, hidden_AKD[a], rtol=2e-5, atol=2e-5)
        context = context_rows(naive.weights, naive.block, naive.streams(document[: row + 1]).double())
        expected = slot_outputs(naive.weights, naive.ends, naive.block, context, document[row + 1], row + 1)
        torch.testing.assert_close(found_KD.double(), torch.stack(expected), rtol=5e-5, atol=5e-5)


@each_head
@torch.no_grad()
def test_q_is_what_each_draft_was_drawn_from(target: Target, trained: Heads, name: str) -> None:
    """Given the drafts before it, in the target's vocabulary; the draws follow it."""
    naive = Naive(target, trained(name).head)
    sampling, text, count = Sampling(temperature=0.7), CONTEXTS[0], 400
    drafter = BlockDrafter(naive.head, TreeConfig(depth=3), sampling)
    drafter.start(rows_of(naive, [text] * count, len(text)), 40)
    tree = drafter.propose(torch.full((count,), 30), torch.Generator().manual_seed(1))
    assert tree.q_BNV is not None and tree.q_BNV.shape == (count, 3, 61)
    hidden = slot_outputs(
        naive.weights, naive.ends, naive.block,
        context_rows(naive.weights, naive.block, naive.streams(text).double()), 30, len(text),
    )  # fmt: skip
    ids = naive.block.draft_ids or list(range(61))
    for b in range(12):
        said = tree.tokens_BN[b].tolist()
        logits = block_logits(naive.weights, naive.ends, naive.block, hidden, [30, *said[:2]])
        q = torch.zeros(3, 61, dtype=torch.float64)
        q[:, ids] = torch.stack([(x / 0.7).softmax(0) for x in logits])
        torch.testing.assert_close(tree.q_BNV[b].double(), q, rtol=1e-4, atol=1e-6)
    q_V = tree.q_BNV[0, 0].double()
    seen_V = torch.bincount(tree.tokens_BN[:, 0], minlength=61).double() / count
    # of 400 draws the shares are within 5 standard deviations
    assert ((seen_V - q_V).abs() <= 5 * (q_V * (1 - q_V) / count).sqrt() + 1e-9).all()


PENALTY = 30.0


def penalised_q(naive: Naive, text: list[int], root: int, said: list[int], sampling: Sampling) -> Tensor:
    """What each draft is drawn from behind a text and a root, given those before it, float64 [K, V]; greedy: one-hot.

    Tokens of the text, the root and the earlier drafts are penalised, as the target's are.
    """
    context = context_rows(naive.weights, naive.block, naive.streams(text).double())
    hidden = slot_outputs(naive.weights, naive.ends, naive.block, context, root, len(text))
    logits = block_logits(naive.weights, naive.ends, naive.block, hidden, [root, *said[:-1]])
    ids = naive.block.draft_ids or list(range(61))
    q_KV = torch.zeros(len(said), 61, dtype=torch.float64)
    for k, z_U in enumerate(logits):
        seen_U = torch.tensor([token in {*text, root, *said[:k]} for token in ids])
        z_U = torch.where(seen_U, torch.where(z_U > 0, z_U / PENALTY, z_U * PENALTY), z_U)
        if sampling.greedy:
            q_KV[k, ids[int(z_U.argmax())]] = 1
            continue
        p_U = (z_U / sampling.temperature).softmax(0)
        order_U = p_U.argsort(descending=True)
        kept_U = order_U[p_U[order_U].cumsum(0) - p_U[order_U] < sampling.top_p]
        q_KV[k, torch.tensor(ids)[kept_U]] = p_U[kept_U] / p_U[kept_U].sum()
    return q_KV


@each_head
@pytest.mark.parametrize("sample", [False, True])
@torch.no_grad()
def test_a_repetition_penalty_counts_what_stands_before_each_draft(
    target: Target, trained: Heads, name: str, sample: bool
) -> None:
    """Two cycles: the context, the root, the drafts that were accepted, and those before it in the block."""
    naive, texts, roots = Naive(target, trained(name).head), [list(text) for text in CONTEXTS], [30, 7, 12]
    chosen: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9} if sample else {}
    tree, sampling = TreeConfig(depth=4, sample=sample), Sampling(**chosen, repetition_penalty=PENALTY)
    drafter, plain = BlockDrafter(naive.head, tree, sampling), BlockDrafter(naive.head, tree, Sampling(**chosen))
    noise, differs = torch.Generator().manual_seed(1), False
    for each in (drafter, plain):
        each.start(rows_of(naive, texts, max(map(len, texts))), 40)
    for _ in range(2):
        drafted = drafter.propose(torch.tensor(roots), noise)
        differs |= not torch.equal(drafted.tokens_BN, plain.propose(torch.tensor(roots), noise).tokens_BN)
        before, new = [list(text) for text in texts], []
        for b, root in enumerate(roots):
            said = drafted.tokens_BN[b].tolist()
            q_KV = penalised_q(naive, texts[b], root, said, sampling)
            if sample:
                assert drafted.q_BNV is not None
                torch.testing.assert_close(drafted.q_BNV[b].double(), q_KV, rtol=1e-3, atol=1e-6)
            assert all(q_KV[k, token] > 0 for k, token in enumerate(said))
            new.append([root, *said[:2]])
            texts[b] += new[b]
            roots[b] = (root * 7 + 3) % 61
        for each in (drafter, plain):
            each.commit(tail_rows(naive, before, new, 5))
    assert differs, "nothing that is penalised would have been drafted"


@each_head
@torch.no_grad()
def test_fewer_drafts_are_the_first_ones_and_more_are_not_made(target: Target, trained: Heads, name: str) -> None:
    """The block keeps the size that it was trained with."""
    naive = Naive(target, trained(name).head)
    said = {}
    for depth in (1, 2, 4, 9):
        drafter = BlockDrafter(naive.head, TreeConfig(depth=depth), Sampling())
        assert drafter.max_nodes == min(depth, 4)
        drafter.start(rows_of(naive, CONTEXTS, 12), 40)
        said[depth] = drafter.propose(torch.tensor([30, 7, 12])).tokens_BN
        assert said[depth].shape == (3, min(depth, 4))
    assert torch.equal(said[4], said[9])
    assert all(torch.equal(said[depth], said[4][:, :depth]) for depth in (1, 2))


@each_head
@torch.no_grad()
def test_many_rows_at_once_in_parts(
    target: Target, trained: Heads, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the naive blocks, whatever part of the rows runs at a time."""
    head: Any = copy.deepcopy(trained(name).head)
    head.causal = name == "dflash"
    naive = Naive(target, head)
    tokens_BT = torch.tensor([CONTEXTS[0] + [30, 31, 32], CONTEXTS[2][:9] + [44]])
    rows = torch.tensor([[6, 2, 8], [0, 8, 8]])
    ids = naive.head.spec.layer_ids
    hidden, streams = target.forward_documents(tokens_BT, ids)
    stacked = torch.stack([streams[k] for k in ids], 2)
    found = block_everywhere(naive.head, tokens_BT, hidden, stacked, rows, 4)
    for b in range(2):
        for a in range(3):
            text = tokens_BT[b, : rows[b, a] + 2].tolist()
            assert found[b, a].tolist() == naive.drafts(text, 4)[0]
    monkeypatch.setattr("headstart.eval.drafters.block.MOST_NUMBERS", 1)
    assert torch.equal(block_everywhere(naive.head, tokens_BT, hidden, stacked, rows, 2), found[..., :2])


def test_matrices_of_the_target_are_not_copied(target: Target, trained: Heads) -> None:
    """An output matrix of 128,256 tokens is 1 GB."""
    for name in NAMES:
        naive = Naive(target, trained(name).head)
        drafter = BlockDrafter(naive.head, TreeConfig(depth=4), Sampling())
        drafter.start(rows_of(naive, CONTEXTS, 12), 40)
        lm_head = naive.head.lm_head
        wanted = target.teacher.weight_VD if lm_head is None else lm_head.weight
        assert drafter.step.output.weight_NK.data_ptr() == wanted.data_ptr()
        assert drafter.step.input.embed_VD.data_ptr() == target.ends.embed_VD.data_ptr()
        # what training changes is copied
        assert drafter.step.fc.weight_NK.data_ptr() != naive.head.fc.weight.data_ptr()


def large_head(name: str, vocab: int) -> Any:
    """A bfloat16 head of an 8B target's widths with few layers, on the GPU."""
    dims = HeadDims(4096, vocab, 32, 32, 8, 128, 14336, rms_norm_eps=1e-5)
    family, _, variant = name.partition(", ")
    fields = {"markov_head": variant} if variant else {}
    config: Any = FAMILIES[family].config(layers=2, mask_token_id=5, draft_vocab_size=32000, **fields)
    torch.manual_seed(0)
    with torch.device("cuda"):
        head = build_head(config, dims).to("cuda").eval()
        embed, weight = (torch.randn(vocab, 4096, dtype=torch.bfloat16) * 0.02 for _ in range(2))
        head.initialise(TargetEnds(embed, Teacher(weight)), torch.arange(0, 64000, 2))
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.02)
            parameter.data = parameter.data.bfloat16()  # rotary frequencies stay as they are
    return head


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("name", ["dflash", "dspark", "jetspec", "dflash2"])
@torch.inference_mode()
def test_kernels_at_an_8b_targets_sizes_compute_what_their_twins_do(name: str, batch: int) -> None:
    head = large_head(name, 64000)
    streams = torch.randn(batch, 700, len(head.spec.layer_ids), 4096, device="cuda", dtype=torch.bfloat16)
    counts = torch.tensor([700 - 31 * b for b in range(batch)], device="cuda")
    tokens = torch.randint(64000, (batch, 700), device="cuda")
    roots, found = torch.arange(batch, device="cuda") + 11, []
    exact = large_head(name, 64000).float()
    for one, eager in ((head, False), (head, True), (exact, True)):
        drafter = BlockDrafter(copy.copy(one), TreeConfig(depth=head.depth), Sampling())

        def run(drafter: BlockDrafter = drafter, like: Tensor = one.fc.weight) -> Tensor:
            features = streams.to(like.dtype)
            drafter.start(Rows(tokens, counts, features.mean(2), features), 800)
            accepted = Rows(tokens[:, :8], counts % 5, features[:, :8, 0], features[:, :8])
            drafter.commit(accepted)
            return drafter.step.hidden(roots, drafter.length_B, drafter.kv, drafter.depth)

        if eager:
            with eager_twins():
                found.append(run())
        else:
            found.append(run())
        assert torch.equal(drafter.length_B, counts + counts % 5)
    kernels, twins = (float((x.float() - found[2]).norm() / found[2].norm()) for x in found[:2])
    # both round to bfloat16, at other places: DFlash 2's convolutions around every sublayer round more often
    assert torch.isfinite(found[0]).all() and kernels < 1.5 * twins and twins < 4e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["dflash", "dspark", "dspark, gated", "dspark, rnn", "domino", "dflash2"])
@torch.inference_mode()
def test_a_captured_draft_is_the_same_as_one_that_is_not(name: str, temperature: float) -> None:
    """With other roots, counts and lengths at every replay, and the lengths that the graph itself leaves."""
    head, batch, card = large_head(name, 64000), 2, torch.device("cuda")
    sampling = Sampling(temperature=temperature)
    drafter, generator = BlockDrafter(head, TreeConfig(depth=head.depth), sampling), torch.Generator(card)
    streams = torch.randn(batch, 300, len(head.spec.layer_ids), 4096, device=card, dtype=torch.bfloat16)
    tokens, roots = torch.randint(64000, (batch, 300), device=card), torch.zeros(batch, dtype=torch.int64, device=card)
    counts = torch.tensor([300, 77], device=card)
    drafter.start(Rows(tokens, counts, streams[:, :, 0], streams), 400)
    accepted = Rows(tokens[:, :8], torch.zeros_like(counts), streams[:, :8, 0], streams[:, :8])
    length_B = drafter.length_B.clone()

    def cycle() -> tuple[Tensor, Tensor]:
        drafter.length_B = length_B
        drafter.commit(accepted)
        after_B = drafter.length_B
        tree = drafter.propose(roots, generator)
        return tree.tokens_BN, after_B

    graph, (said, after_B) = capture(cycle, card, [generator])
    for turn in range(6):
        roots.copy_(torch.tensor([31 * turn + 5, 977 * turn], device=card))
        accepted.count_B.copy_(torch.tensor([turn % 8, (3 * turn) % 8], device=card))
        noise = generator.get_state()
        graph.replay()
        captured, held = said.clone(), after_B.clone()
        generator.set_state(noise)
        expected, length = cycle()
        assert torch.equal(captured, expected), turn
        assert torch.equal(held, length) and torch.equal(held, length_B + accepted.count_B)
        length_B.copy_(held)
    assert len(set(captured.flatten().tolist())) > 2
