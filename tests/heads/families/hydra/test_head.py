"""Hydra: where it starts, what it reads, what its dropout and its prefix layer do, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.cache import ListCache
from reference.documents import Document, Ends
from reference.families import DIMS, Example, documents, example_head, hydra, hydrapp, shape_of
from reference.hydra import head_logits, hydra_loss, prefix_outputs
from reference.tiny import assert_near, check_against, double_weights, ends_of, feature_batch, random_ends, teacher_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headstart.heads.base import Head
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families import HydraConfig, build_head
from headstart.heads.families.hydra.head import HydraHead, embedding_scale

DEPTH, SIZE, VOCAB = 4, 32, 97
each_matrix = pytest.mark.parametrize("lm_head", ["own", "shared", "lowrank"])


def made(config: HydraConfig, dtype: torch.dtype = torch.float64, embed_scale: float = 1.0) -> tuple[Any, Ends]:
    """An example's head, in eval mode."""
    head, ends = example_head(Example(config), dtype)
    head.embed_scale.fill_(embed_scale)  # type: ignore[operator, union-attr]
    return head.eval(), ends


def started(config: HydraConfig, **ends: Any) -> tuple[HydraHead, TargetEnds]:
    """A head as training starts it."""
    given = ends_of(random_ends(VOCAB, SIZE, 50, **ends))
    head = build_head(config, DIMS)
    head.initialise(given)
    assert isinstance(head, HydraHead)
    return head.eval(), given


# one head's logits


@pytest.mark.parametrize("config", [hydra(num_layers=2), hydra(lm_head="shared"), hydrapp(lm_head="lowrank")])
def test_logits_are_the_naive_ones(config: HydraConfig) -> None:
    """The methods that drafting uses; embeddings count four times."""
    head, ends = made(config, embed_scale=4.0)
    weights, hidden_TD = double_weights(head), documents()[0].hidden_TD
    fed = [5, 71, 2, 40]
    rows = len(hidden_TD)
    f_TD = head.prefix_states(hidden_TD[None], torch.arange(rows)[None], ListCache().attend)[0]
    expected_f = prefix_outputs(weights, shape_of(head), hidden_TD) if config.prefix_layer else list(hidden_TD)
    assert_near(f_TD, torch.stack(expected_f), "what the heads read")
    for d in range(1, DEPTH + 1):
        tokens_Nd = torch.tensor([fed[:d]] * rows)
        assert head.block_input(d, f_TD, tokens_Nd).shape == (rows, (d + 1) * SIZE)
        assert head.state(d, f_TD, tokens_Nd).shape == (rows, SIZE)
        logits_TV = head.draft_logits(d, f_TD, tokens_Nd)
        for row, f_D in enumerate(expected_f):
            naive_V = head_logits(weights, ends, 4.0, f_D, fed[:d], config.num_layers, config.lm_head)
            assert_near(logits_TV[row], naive_V, f"head {d}, row {row}")


def test_training_scales_embeddings_as_drafting_does() -> None:
    head, ends = made(hydra(num_layers=2), embed_scale=4.0)
    weights, inputs = double_weights(head), documents()
    expected = hydra_loss(weights, ends, inputs, shape_of(head), 4.0, DEPTH, 2)
    check_against(head, feature_batch(inputs, ends, DEPTH), teacher_of(ends), expected, weights, 1e-10)


# where it starts


@each_matrix
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_heads_start_as_copies_of_the_targets(scale: float, num_layers: int, lm_head: str) -> None:
    """Whatever tokens they read."""
    head, ends = started(hydra(lm_head=lm_head, num_layers=num_layers), scale=scale)
    hidden_ND = documents(dtype=torch.float32)[0].hidden_TD
    target_NV = ends.teacher.logits(hidden_ND)
    for d in range(1, DEPTH + 1):
        tokens_Nd = torch.arange(len(hidden_ND) * d).view(-1, d) % VOCAB
        assert_near(head.draft_logits(d, hidden_ND, tokens_Nd), target_NV, f"head {d}", 1e-6)


def test_a_prefix_layer_starts_by_bringing_features_to_the_length_that_the_target_gives_them() -> None:
    """So the order of the tokens is the target's, and only how sure the head is differs."""
    ends = ends_of(random_ends(VOCAB, SIZE, 50))
    norm_D = 1 + torch.rand(SIZE, generator=torch.Generator().manual_seed(1))
    head = build_head(hydrapp(), DIMS)
    head.initialise(TargetEnds(ends.embed_VD, Teacher(ends.teacher.weight_VD, norm_D=norm_D)))
    hidden_TD = documents(dtype=torch.float32)[0].hidden_TD
    f_TD = head.prefix_states(hidden_TD[None], torch.arange(len(hidden_TD))[None], ListCache().attend)[0]
    size_T1 = hidden_TD.square().mean(-1, keepdim=True).sqrt()
    assert_near(f_TD, hidden_TD / size_T1 * norm_D.square().mean().sqrt(), "f")
    tokens_T1 = torch.ones(len(hidden_TD), 1, dtype=torch.int64)
    order = head.draft_logits(1, f_TD, tokens_T1).argsort(-1)[:, -5:]
    assert torch.equal(order, ends.teacher.logits(hidden_TD).argsort(-1)[:, -5:])


def test_a_new_prefix_layer_and_new_blocks_can_learn() -> None:
    """Zeros at the start must not stand in each other's way: the second step reaches every parameter."""
    head, ends = started(hydrapp(lm_head="lowrank"))
    docs = documents(dtype=torch.float32)
    batch = feature_batch(docs, random_ends(VOCAB, SIZE, 50), DEPTH)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        head.loss(batch, ends.teacher).sum_T.sum().backward()
        optimizer.step()
    still = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


@pytest.mark.parametrize(("embed", "norm", "factor"), [(0.11, 1.83, 16.0), (1.0, None, 1.0), (0.0106, 2.4, 256.0)])
def test_embeddings_are_brought_to_the_size_of_features(embed: float, norm: float | None, factor: float) -> None:
    norm_D = None if norm is None else torch.full((SIZE,), norm)
    ends = TargetEnds(torch.full((VOCAB, SIZE), embed), Teacher(torch.ones(VOCAB, SIZE), norm_D=norm_D))
    assert embedding_scale(ends) == factor
    half = TargetEnds(ends.embed_VD.bfloat16(), ends.teacher)
    assert embedding_scale(half) == factor
    head = build_head(hydra(), DIMS)
    head.initialise(ends)
    assert head.state_dict()["embed_scale"] == factor
    head.embed_scale.fill_(3.0)  # as read from a file
    head.bind(ends)
    assert head.embed_scale == 3.0
    assert torch.equal(head.embed(torch.tensor([1])), 3.0 * ends.embed_VD[:1])


# what it reads


def one_answer() -> tuple[Document, Any]:
    """.AAAAA: row 0 is supervised at depths 1 … 4, row 1 at 1 … 3, row 2 at 1 … 2, row 3 at 1."""
    (document,) = documents([".AAAAA"], seed=3)
    return document, lambda head, ends, doc: head.loss(feature_batch([doc], ends, DEPTH), teacher_of(ends)).sum_T


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_labels_and_teachers_by_hand(kind: str) -> None:
    head, ends = made(hydra(loss=kind))
    document, sums = one_answer()
    x, f = document.tokens, document.hidden_TD
    expected = []
    for d in range(1, DEPTH + 1):
        total = torch.zeros((), dtype=torch.float64)
        for t in range(5 - d):
            logq_V = head.draft_logits(d, f[t : t + 1], torch.tensor([x[t + 1 : t + 1 + d]]))[0].log_softmax(-1)
            p_V = (ends.lm_head_VD @ f[t + d]).softmax(-1)
            total += -logq_V[x[t + 1 + d]] if kind == "ce" else (p_V * (p_V.log() - logq_V)).sum()
        expected.append(total)
    assert_near(sums(head, ends, document), torch.stack(expected), "sums", 1e-10)


def changed_terms(change: Callable[[Document], Document], config: HydraConfig) -> list[bool]:
    head, ends = made(config)
    document, sums = one_answer()
    first, second = sums(head, ends, document), sums(head, ends, change(document))
    return [not torch.equal(a, b) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize(("row", "terms"), [(2, [True, True, False, False]), (4, [True] * 4), (5, [False] * 4)])
def test_a_teacher_sits_at_t_plus_d(row: int, terms: list[bool]) -> None:
    """Row 2 is read by heads 1 and 2, and teaches them. Row 4 predicts the last token: it teaches at every depth. What
    follows the answer, which row 5 predicts, teaches nobody."""

    def change(document: Document) -> Document:
        hidden_TD = document.hidden_TD.clone()
        hidden_TD[row] += 1.0
        return Document(document.tokens, document.turns, hidden_TD, document.streams_TkD)

    assert changed_terms(change, hydra()) == terms


@pytest.mark.parametrize(("place", "terms"), [(0, [False] * 4), (4, [True] * 4), (5, [False] * 4)])
def test_tokens_up_to_t_plus_d_are_read(place: int, terms: list[bool]) -> None:
    """With soft labels: x_0 is in no input, x_4 is the last one read at every depth, x_5 is drafted and not read."""

    def change(document: Document) -> Document:
        tokens = list(document.tokens)
        tokens[place] = (tokens[place] + 1) % VOCAB
        return Document(tokens, document.turns, document.hidden_TD, document.streams_TkD)

    assert changed_terms(change, hydra()) == terms


def test_the_prefix_layer_sees_earlier_rows_of_its_own_document() -> None:
    head, ends = made(hydrapp())
    docs = documents(["..AAAA", "...AAA"], seed=8)
    base = head.anchor_features(feature_batch(docs, ends, DEPTH, pad_to=16))
    rows = feature_batch(docs, ends, DEPTH, pad_to=16).anchors.row_A.tolist()
    for moved in range(6, 12):  # rows of the second document
        hidden_TD = docs[1].hidden_TD.clone()
        hidden_TD[moved - 6] += 1.0
        other = Document(docs[1].tokens, docs[1].turns, hidden_TD, docs[1].streams_TkD)
        found = head.anchor_features(feature_batch([docs[0], other], ends, DEPTH, pad_to=16))
        for row, before, after in zip(rows, base, found, strict=True):
            assert (not torch.equal(before, after)) == (row >= moved), f"row {row} when row {moved} moved"


# dropout


def test_dropout_acts_in_training_alone_and_follows_the_seed() -> None:
    head, ends = made(hydrapp(dropout=0.2), torch.float32)
    plain, _ = made(hydrapp(), torch.float32)
    plain.load_state_dict(head.state_dict())
    batch, teacher = feature_batch(documents(dtype=torch.float32), ends, DEPTH), teacher_of(ends)

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = head.loss(batch, teacher).sum_T.detach()
        return found

    assert torch.equal(loss(1), loss(2)) and torch.equal(loss(1), plain.loss(batch, teacher).sum_T)
    head.train()
    assert torch.equal(loss(1), loss(1)) and not torch.equal(loss(1), loss(2))


def test_dropout_is_before_every_block_and_before_the_output() -> None:
    """A new head of two blocks passes 1 + the last block's … unless a place is dropped: 0.8³ of the feature stays."""
    head, _ = started(hydra(num_layers=2, dropout=0.2))
    head.train()
    torch.manual_seed(0)
    x_ND = head.state(1, torch.ones(4000, SIZE), torch.zeros(4000, 1, dtype=torch.int64))
    kept = x_ND != 0
    assert kept.float().mean().item() == pytest.approx(0.8**3, abs=0.005)  # 128,000 places: deviation 0.0014
    assert_near(x_ND[kept], torch.full_like(x_ND[kept], 0.8**-3), "what is kept is scaled", 1e-6)


# gradients


@pytest.mark.parametrize("config", [hydra(num_layers=2), hydrapp(lm_head="lowrank")])
def test_every_parameter_learns_and_the_embeddings_do_not(config: HydraConfig) -> None:
    head, ends = made(config)
    ends.embed_VD.requires_grad_(True)
    head.bind(TargetEnds(ends.embed_VD, teacher_of(ends)))
    head.loss(feature_batch(documents(), ends, DEPTH), teacher_of(ends)).sum_T.sum().backward()
    assert ends.embed_VD.grad is None
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


def test_all_depths_weigh_the_same() -> None:
    """As in the authors' code, which adds the heads' losses up."""
    assert started(hydra())[0].term_weights().tolist() == [1.0] * DEPTH


# costs


@pytest.mark.parametrize("config", [hydra(), hydra(lm_head="lowrank", num_layers=3), hydrapp(lm_head="shared")])
def test_multiply_adds_are_those_of_the_products(config: HydraConfig) -> None:
    head, ends = made(config, torch.float32)
    batch = feature_batch(documents(dtype=torch.float32), ends, DEPTH, pad_to=50)
    anchors = batch.anchors
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        f_AD = head.anchor_features(batch)
        for d, count in enumerate(anchors.count_K, start=1):
            head.draft_logits(d, f_AD[:count], torch.ones(count, d, dtype=torch.int64))
    # scores of attention are bmm
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)) / 2
    assert head.multiply_adds(50, anchors.count_K) == counted


@pytest.mark.parametrize(
    "config",
    [hydra(num_layers=3, lm_head="lowrank"), hydrapp(num_layers=4, lm_head="lowrank"), hydra(lm_head="shared")],
)
def test_kept_numbers_are_those_that_autograd_keeps(config: HydraConfig) -> None:
    """All but logits, which only the forward pass holds. The estimate is within a sixth."""
    head, ends = made(config, torch.float32)
    docs = documents(["." + "A" * 60] * 4, dtype=torch.float32)
    batch = feature_batch(docs, ends, DEPTH)
    given = {p.data_ptr() for p in head.parameters()} | {ends.lm_head_VD.data_ptr(), batch.hidden_RD.data_ptr()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.data_ptr() not in given:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        head.loss(batch, teacher_of(ends))
    sizes = {storage: x.untyped_storage().nbytes() / 4 for storage, x in kept.items()}
    gradients = sum(p.numel() for p in head.parameters() if p.shape[0] == VOCAB)  # of output matrices
    anchors, rows = batch.anchors.count_K[0], len(batch.tokens_R)
    expected = head.kept_numbers(rows, anchors, False) - head.output_numbers(anchors)
    assert sum(sizes.values()) - gradients == pytest.approx(expected, rel=0.17)


def test_dropout_keeps_a_mask_of_a_byte_per_number_that_it_sees() -> None:
    """With a prefix layer. Without one, what goes into the first blocks needs no gradient and no mask."""
    head, ends = made(hydrapp(num_layers=3, dropout=0.2), torch.float32)
    batch = feature_batch(documents(["." + "A" * 60], dtype=torch.float32), ends, DEPTH)
    masks: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.ndim == 2 and set(x.unique().tolist()) == {0.0, 1.25}:
            masks[x.data_ptr()] = x.numel()
        return x

    head.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        head.loss(batch, teacher_of(ends))
    anchors, plain = batch.anchors.count_K[0], build_head(hydrapp(num_layers=3), DIMS)
    added = head.kept_numbers(61, anchors, False) - plain.kept_numbers(61, anchors, False)
    # the plan counts all anchors at every depth; one less is supervised per depth
    assert sum(masks.values()) / 2 == pytest.approx(added, rel=0.05) and len(masks) == DEPTH * 4


def test_layers_that_can_be_recomputed() -> None:
    assert list(started(hydra())[0].draft_layers) == [] and started(hydra())[0].hidden_act is None
    head, _ = started(hydrapp())
    assert list(head.draft_layers) == [head.prefix.layer] and head.hidden_act == "silu"
    assert 0 < head.kept_numbers(300, 100, True) < head.kept_numbers(300, 100, False)


# refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lm_head": "borrowed"}, "head.lm_head: found 'borrowed'"),
        ({"loss": "mse"}, "head.loss: found 'mse', expected one of"),
        ({"dropout": 1.0}, "head.dropout: found 1.0, expected a share"),
        ({"dropout": -0.1}, "head.dropout: found -0.1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_head(HydraConfig(**fields), DIMS)


def test_a_target_with_another_output_head_is_refused() -> None:
    head: Head = build_head(hydra(), DIMS)
    with pytest.raises(ConfigError, match="head.type: hydra needs a target whose lm_head is a plain matrix"):
        head.bind(ends_of(random_ends(VOCAB, SIZE, 50, softcap=3.0)))


def test_a_head_without_its_target_says_so() -> None:
    head = build_head(hydra(), DIMS)
    with pytest.raises(RuntimeError, match="is not bound to its target"):
        head.embed(torch.tensor([1]))
