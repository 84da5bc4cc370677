"""The output matrices of heads with one per depth: values, gradients, refusals, and how much is alive at once."""

from __future__ import annotations

import pytest
import torch
from reference.families import Example, documents, example_head, medusa
from reference.tiny import assert_near, ends_of, feature_batch, gradients, random_ends, teacher_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.families.outputs import LM_HEADS, OutputMatrices, TeacherRows
from headstart.heads.gradients import adding_gradients
from headstart.heads.losses import eager, fused
from headstart.heads.numerics import add_weight_grad
from headstart.train.step import LossModule

DEPTH, VOCAB, WIDTH = 4, 97, 32
EACH_KIND = pytest.mark.parametrize("kind", LM_HEADS)
EACH_LOSS = pytest.mark.parametrize("loss", ["kl", "ce"])


def example(kind: str, dtype: torch.dtype = torch.float64, loss: str = "kl", scale: float = 1.0) -> OutputMatrices:
    head, _ = example_head(Example(medusa(lm_head=kind, loss=loss), ends={"scale": scale}), dtype)
    assert isinstance(head, OutputMatrices)
    return head


def packed(head: Head, loss: str = "kl", padding: int = 0) -> tuple[FeatureBatch, Teacher, Tensor]:
    """A pack, the teacher and scale_T. Args: padding: rows and anchors without supervision at the pack's end."""
    dtype = next(head.parameters()).dtype
    ends = random_ends(VOCAB, WIDTH, 50, dtype)
    batch = feature_batch(documents(dtype=dtype), ends, DEPTH)
    scale_T = head.term_weights().to(dtype) / head.loss_counts(batch).clamp(min=1)
    if padding:
        batch = batch.padded(batch.tokens_R.shape[0] + padding, len(batch.anchors) + padding, 16)
    return batch, head.teacher, scale_T


@EACH_KIND
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_merged_matrix_drafts_what_the_parts_draft(kind: str, scale: float):
    head = example(kind, scale=scale)
    inputs = [torch.randn(5, WIDTH, dtype=torch.float64) for _ in range(DEPTH)]
    all_BKV = head.logits(inputs)
    assert all_BKV.shape == (5, DEPTH, VOCAB)
    for d, x_BD in enumerate(inputs):
        assert_near(head.depth_logits(d, x_BD), x_BD @ head.output_weight(d).T, f"depth {d}", 1e-12)
        assert_near(all_BKV[:, d], head.depth_logits(d, x_BD), f"depth {d} of all", 1e-12)
    others = [head.output_weight(d) for d in range(1, DEPTH)]
    assert all(torch.equal(head.output_weight(0), other) for other in others) == (kind == "shared")


@EACH_KIND
@EACH_LOSS
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)], ids=str)
def test_losses_and_gradients_are_those_of_the_merged_matrix(
    kind: str, loss: str, scale: float, chunk: int, dtype: torch.dtype, tolerance: float, monkeypatch
):
    """Against the readable losses on the whole matrix by plain autograd, with input that needs a gradient too."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk * VOCAB)
    head = example(kind, dtype, loss, scale)
    noise = torch.Generator().manual_seed(1)
    x_AD = torch.randn(11, WIDTH, generator=noise, dtype=dtype).requires_grad_()
    row_A = torch.randint(0, 6, (11,), generator=noise)
    weight_A = (torch.arange(11) % 4 > 0).float() * 1.5  # a quarter of the rows is padding
    label_A = torch.randint(0, VOCAB, (11,), generator=noise)
    teacher = TeacherRows.of(head.teacher, torch.randn(6, WIDTH, generator=noise, dtype=dtype), dtype)
    wanted = [p for name, p in head.named_parameters() if name.split(".")[:2] in (["lm_heads", "2"], ["down", "2"])]
    wanted += [p for name, p in head.named_parameters() if name.startswith("up.2.")]
    assert len(wanted) == {"own": 1, "shared": 0, "lowrank": 2}[kind]
    results = []
    for matrix in (None, head.output_weight(2)):
        if loss == "kl" and matrix is None:
            total, argmax_A = head.soft_loss(2, x_AD, teacher, row_A, weight_A)
        elif loss == "kl":
            total, argmax_A = eager.soft_loss(x_AD, matrix, teacher.logits_SV, row_A, weight_A, "kl")
        elif matrix is None:
            total, argmax_A = head.hard_loss(2, x_AD, label_A, weight_A)
        else:
            total, argmax_A = eager.hard_ce(x_AD, matrix, label_A, weight_A)
        results.append((total, argmax_A, *torch.autograd.grad(total * 1.7, [x_AD, *wanted])))
    assert torch.equal(results[0][1], results[1][1])
    assert not results[0][2][weight_A == 0].any()
    for found, expected in zip(results[0], results[1], strict=True):
        assert_near(found, expected, f"{kind} {loss}", tolerance)


@EACH_KIND
@EACH_LOSS
def test_bfloat16_is_float32_within_its_rounding(kind: str, loss: str):
    """Under autocast the products run in bfloat16. The gradients come in the parameters' float32."""
    head = example(kind, torch.float32, loss)
    batch, teacher, scale_T = packed(head)
    exact = gradients(head, (head.loss(batch, teacher).sum_T * scale_T).sum())
    with torch.autocast("cpu", torch.bfloat16):
        total = (head.loss(batch, teacher).sum_T * scale_T).sum()
    for name, rounded in gradients(head, total).items():
        assert rounded.dtype == torch.float32
        assert (rounded - exact[name]).norm() <= 3e-2 * exact[name].norm(), name


@EACH_KIND
@EACH_LOSS
@pytest.mark.parametrize("chunk", [5, 1000])
def test_gradients_that_the_forward_pass_adds_are_those_of_the_backward_pass(
    kind: str, loss: str, chunk: int, monkeypatch
):
    """What captured steps do: fixed shapes with padding, gradients on top of those that are there, twice."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk * VOCAB)
    head = example(kind, torch.float64, loss)
    batch, teacher, scale_T = packed(head, padding=9)
    batch.hidden_RD.requires_grad_()
    total = (head.loss(batch, teacher, scale_T).sum_T * scale_T).sum()
    parameters = dict(head.named_parameters())
    *expected, live = torch.autograd.grad(total, [*parameters.values(), batch.hidden_RD])
    start = {name: torch.randn_like(p) for name, p in parameters.items()}
    for name, p in parameters.items():
        p.grad = start[name].clone()
    places = {name: p.grad.data_ptr() for name, p in parameters.items()}
    module = LossModule(head, teacher, None)
    for _ in range(2):
        with adding_gradients(module):
            sum_T, _ = module(batch, scale_T)
        (sum_T * scale_T).sum().backward()
    for (name, p), gradient in zip(parameters.items(), expected, strict=True):
        assert_near(p.grad, start[name] + 2 * gradient, name, 1e-11)
        assert p.grad.data_ptr() == places[name]
    assert_near(batch.hidden_RD.grad, 2 * live, "features", 1e-11)


def test_nothing_is_added_without_the_promise():
    """Not after the context ends, not where no gradient is formed (validation), and not without a scale."""
    head = example("own")
    batch, teacher, scale_T = packed(head)
    for p in head.parameters():
        p.grad = torch.zeros_like(p)
    with adding_gradients(LossModule(head, teacher, None)):
        with torch.no_grad():
            head.loss(batch, teacher, scale_T)
        head.loss(batch, teacher)
    head.loss(batch, teacher, scale_T)
    assert not any(p.grad.any() for p in head.parameters())


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"), [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)]
)
def test_a_gradient_is_added_in_place(dtype: torch.dtype, sum_dtype: torch.dtype):
    grad, x, total = torch.randn(7, 5, dtype=dtype), torch.randn(7, 3, dtype=dtype), torch.randn(5, 3, dtype=sum_dtype)
    expected = total.double() + grad.double().T @ x.double()
    place = total.data_ptr()
    add_weight_grad(total, grad, x)
    assert total.data_ptr() == place
    assert_near(total.double(), expected, "sum", 1e-2 if dtype == torch.bfloat16 else 1e-6)


class AliveLogits(TorchDispatchMode):
    """Watches storages that operations make: products with V columns, and matrices of [V, D].

    Attributes:
        rows: most rows of a tensor with V columns.
        beside: most other tensors with V columns that are alive when logits are made (`F.linear`).
        matrices: tensors of [V, D] that were made; most that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.rows = self.beside = self.matrices = self.matrices_alive = 0
        self.known: list[StorageWeakRef] = []
        self.known_matrices: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if not isinstance(x, Tensor) or x.ndim != 2 or x.untyped_storage()._cdata in given:
                continue
            if x.shape == (VOCAB, WIDTH):
                self.matrices += 1
                self.known_matrices = [ref for ref in self.known_matrices if not ref.expired()]
                self.known_matrices.append(StorageWeakRef(x.untyped_storage()))
                self.matrices_alive = max(self.matrices_alive, len(self.known_matrices))
            elif x.shape[1] == VOCAB and x.shape[0] not in (WIDTH, 5):  # not a transposed matrix, nor one of an update
                self.known = [ref for ref in self.known if not ref.expired()]
                if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.linear):
                    self.beside = max(self.beside, len(self.known))
                self.rows = max(self.rows, x.shape[0])
                self.known.append(StorageWeakRef(x.untyped_storage()))
        return out


@EACH_KIND
@EACH_LOSS
@pytest.mark.parametrize("adds", [False, True])
def test_the_logits_of_one_chunk_are_alive_and_no_more(kind: str, loss: str, adds: bool, monkeypatch):
    """No tensor of V columns has more rows than a chunk, and none is alive when the next logits are made.

    The teacher's logits are the exception. They are one tensor for all depths.
    """
    head = example(kind, torch.float32, loss)
    batch, teacher, scale_T = packed(head)
    for p in head.parameters():
        p.grad = torch.zeros_like(p)
    chunk, rows = 4, len(batch.anchors)
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk * VOCAB)
    monkeypatch.setattr(fused, "CHUNK_MULTIPLE", 1)
    soft = TeacherRows.of(teacher, batch.teacher_hidden(), torch.float32)
    monkeypatch.setattr(TeacherRows, "of", classmethod(lambda *_: soft))
    module = LossModule(head, teacher, None)
    with AliveLogits() as alive:
        if adds:
            with adding_gradients(module):
                sums = module(batch, scale_T)[0]
        else:
            sums = module(batch, scale_T)[0]
        (sums * scale_T).sum().backward()
    assert alive.beside == 0 and 0 < alive.rows <= chunk < rows / 3
    # a shared or low-rank matrix is never made; own gradients are, unless they are added at once
    assert (alive.matrices > 0) == (kind == "own" and not adds)


def test_half_precision_copies_are_alive_one_after_the_other():
    """Of the K own matrices one has a copy in bfloat16; on a CPU a gradient in bfloat16 is beside it for a moment."""
    head = example("own", torch.float32)
    batch, teacher, scale_T = packed(head)
    for p in head.parameters():
        p.grad = torch.zeros_like(p)
    module = LossModule(head, teacher, torch.bfloat16)
    with AliveLogits() as alive, adding_gradients(module):
        module(batch, scale_T)
    assert alive.matrices >= 2 * DEPTH and alive.matrices_alive == 2


def test_the_watch_sees_what_it_watches_for():
    with AliveLogits() as alive:
        logits = [torch.randn(20, WIDTH) @ torch.randn(WIDTH, VOCAB) for _ in range(3)]
        torch.zeros(VOCAB, WIDTH) + 1
    assert len(logits) == 3 and alive.rows == 20 and alive.beside == 2 and alive.matrices >= 1


@pytest.mark.parametrize(
    ("ends", "what"), [({"bias_V": torch.ones(VOCAB)}, "a bias"), ({"softcap": 3.0}, "a soft-cap of 3.0")]
)
def test_a_target_with_other_logits_is_refused(ends: dict, what: str):
    head = build_head(medusa(), example("own").dims)
    odd = ends_of(random_ends(VOCAB, WIDTH, 50, **ends))
    with pytest.raises(ConfigError, match=f"head.type: {head.family} needs a target .* this one has {what}; use"):
        head.initialise(odd)


def test_a_head_that_is_not_bound_says_so():
    head = build_head(medusa(lm_head="shared"), example("own").dims)
    with pytest.raises(RuntimeError, match="is not bound to its target"):
        head.output_weight(0)


@EACH_KIND
def test_costs_are_those_of_the_products(kind: str):
    head = example(kind)
    update = 5 * (WIDTH + VOCAB) if kind == "lowrank" else 0
    assert head.output_multiply_adds() == WIDTH * VOCAB + update
    blocks = DEPTH * (WIDTH * WIDTH + WIDTH)
    assert head.multiply_adds(100, [10, 9, 8, 7]) == 10 * (blocks + DEPTH * (WIDTH * VOCAB + update))


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_teacher_rows_are_the_teachers_logits(scale: float, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 4 * VOCAB)
    teacher = teacher_of(random_ends(VOCAB, WIDTH, 50, scale=scale))
    hidden = torch.randn(11, WIDTH)
    for dtype in (torch.float32, torch.bfloat16):
        found = TeacherRows.of(teacher, hidden, dtype).logits_SV
        assert found.dtype == dtype and not found.requires_grad
        assert_near(found.float(), teacher.logits(hidden), "logits", 1e-6 if dtype == torch.float32 else 1e-2)
