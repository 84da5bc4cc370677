"""Training of drafted blocks on CUDA: the attention's kernels against their eager twin, and how fast they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.kernels.block_attention import BlockAttention, BlockRows, block_attention, block_attention_eager
from headstart.train.captured import CapturedPacks
from headstart.train.config import TrainConfig
from headstart.train.optim import build_optimizer
from headstart.train.plan import Layout, head_activations, head_memory
from headstart.train.step import LossModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_blocks(lengths: list[int], per_document: int, size: int, padding: int = 0) -> BlockRows:
    """Blocks at random rows of documents that lie end to end, then `padding` blocks that see no context."""
    noise, first, start, stop = torch.Generator().manual_seed(0), 0, [], []
    for length in lengths:
        rows = torch.randperm(length, generator=noise)[:per_document].sort().values
        start.append(torch.full((len(rows),), first))
        stop.append(first + rows + 1)
        first += length
    empty = torch.full((padding,), first)
    return BlockRows(torch.cat((*start, empty)).cuda(), torch.cat((*stop, empty)).cuda(), size)


def random_inputs(blocks: BlockRows, rows: int, heads: int, groups: int, width: int, dtype: torch.dtype):
    torch.manual_seed(0)
    slots = len(blocks.start_A) * blocks.size
    shapes = [(slots, heads), (rows, groups), (rows, groups), (slots, groups), (slots, groups)]
    return [torch.randn(*shape, width, device="cuda").to(dtype) for shape in shapes]


def gradients(attend, tensors: list[Tensor], blocks: BlockRows, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    context = attend(*leaves, blocks)
    return [context.detach(), *torch.autograd.grad(context, leaves, grad)]


@pytest.mark.parametrize(
    ("heads", "groups", "width", "size"),
    [(8, 2, 128, 7), (8, 2, 128, 16), (9, 3, 64, 8), (4, 2, 96, 8), (4, 2, 256, 8), (2, 2, 16, 1)],
)
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)], ids=str
)
def test_the_kernels_are_the_twin(heads, groups, width, size, dtype, most):
    lengths = [700, 3, 1000, 41]
    blocks = make_blocks(lengths, 150, size, padding=20)
    tensors = random_inputs(blocks, sum(lengths) + 9, heads, groups, width, dtype)
    grad = torch.randn_like(tensors[0])
    expected = gradients(block_attention_eager, [x.double() for x in tensors], blocks, grad.double())
    found = gradients(block_attention, tensors, blocks, grad)
    for name, a, b in zip(("context", "q", "k", "v", "own_k", "own_v"), expected, found, strict=True):
        error = float((b.double() - a).norm() / a.norm())
        assert error <= most, f"{name}: {error}"


@pytest.mark.parametrize(
    ("lengths", "per_document", "heads", "groups", "width", "size"),
    [([2048] * 4, 512, 32, 8, 128, 7), ([2048] * 4, 512, 32, 8, 128, 16), ([512] * 32, 64, 9, 3, 64, 8)],
    ids=["8b_block_7", "8b_block_16", "smollm2_block_8"],
)
def test_how_fast_the_attention_is(lengths, per_document, heads, groups, width, size):
    """Prints milliseconds and TFLOP/s, of the scores that are not masked; run with -s."""
    blocks = make_blocks(lengths, per_document, size)
    inputs = tuple(random_inputs(blocks, sum(lengths), heads, groups, width, torch.bfloat16))
    attention, into = BlockAttention(blocks, sum(lengths)), tuple(torch.empty_like(x) for x in inputs)
    context, saved = attention.forward(*inputs)
    grad = torch.randn_like(context)
    scores = int((blocks.stop_A - blocks.start_A + size).sum()) * size * heads
    for name, step, products in (
        ("forward", lambda: attention.forward(*inputs), 2),
        ("backward", lambda: attention.backward(grad, inputs, context, saved, into), 5),
    ):
        milliseconds = clock(step)
        rate = 2 * products * scores * width / milliseconds / 1e9
        print(f"{name}: {milliseconds:.3f} ms, {rate:.0f} TFLOP/s")
        assert rate > 20


def clock(step, runs: int = 10) -> float:
    """Milliseconds of one call."""
    for _ in range(3):
        step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(runs):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / runs


def head_and_pack(
    lengths: list[int], dims: HeadDims, dtype: torch.dtype, family: str = "dspark", **fields
) -> tuple[Head, FeatureBatch]:
    """A head with random weights, and a pack with random features."""
    torch.manual_seed(0)
    config = FAMILIES[family].config(mask_token_id=1, **fields)
    weight = torch.randn(dims.vocab_size, dims.hidden_size, device="cuda", dtype=dtype) * 0.1
    head = build_head(config, dims).cuda()
    head.initialise(TargetEnds(weight, Teacher(weight)))
    documents = [(torch.randint(0, dims.vocab_size, (n,)), torch.zeros(n, dtype=torch.int64)) for n in lengths]
    batch = FeatureBatch.pack(documents, head.depth).to("cuda")
    shape = len(batch.tokens_R), len(head.spec.layer_ids), dims.hidden_size
    batch = replace(
        batch, streams_RkD=torch.randn(shape, device="cuda", dtype=dtype),
        hidden_RD=torch.randn(shape[0], shape[2], device="cuda", dtype=dtype),
        teacher_argmax_A=torch.zeros(len(batch.anchors), dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    return head, batch


@pytest.mark.parametrize(
    "fields",
    [{"sample_from_anchor": False, "depth": 6}, {"depth": 8}, {"family": "jetspec", "depth": 7},
     {"family": "dflash2", "depth": 7}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("autocast", "most"), [(torch.bfloat16, 4e-2), (None, 1e-4)], ids=str)
def test_all_layers_with_kernels_are_those_in_float64(fields, autocast, most):
    """Slots and the gradient of every parameter of the backbone; tensor operations run in float64."""
    dims = HeadDims(256, 512, 8, 8, 2, 64, 640)
    head, batch = head_and_pack([300, 37, 500], dims, torch.float32, layers=2, **fields)
    upstream = torch.randn(len(batch.anchors), head.depth, dims.hidden_size, device="cuda")
    backbone = ("fc.", "hidden_norm.", "layers.", "norm.")
    names = [name for name, _ in head.named_parameters() if name.startswith(backbone)]

    def run(head: Head, batch: FeatureBatch, dtype: torch.dtype | None) -> list[Tensor]:
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            slots = head.slots(batch)
        loss = (slots * upstream.to(slots.dtype)).sum()
        return [slots.detach(), *torch.autograd.grad(loss, [head.get_parameter(name) for name in names])]

    found = run(head, batch, autocast)
    head.double()
    ends = head.bound_ends()
    head.bind(TargetEnds(ends.embed_VD.double(), ends.teacher))
    expected = run(head, replace(batch, streams_RkD=batch.streams_RkD.double()), None)
    for name, a, b in zip(["slots", *names], expected, found, strict=True):
        error = float((b.double() - a).norm() / a.norm())
        assert error <= most, f"{name}: {error}"


@pytest.mark.parametrize("family", ["jetspec", "domino", "dflash2"])
def test_a_captured_step_has_the_gradients_of_one_that_is_not(family):
    """The recurrent network, the base's loss, the convolutions and the selector wait for nothing."""
    dims = HeadDims(256, 512, 8, 8, 2, 64, 640)
    head, batch = head_and_pack([300, 37, 500], dims, torch.bfloat16, family, depth=8, layers=2)
    module = LossModule(head, head.bound_ends().teacher, torch.bfloat16)
    scale_T = head.term_weights(0.5).cuda() / head.loss_counts(batch)
    trained = [p for p in head.parameters() if p.requires_grad]
    found = []
    for captured in (False, True):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        if captured:
            CapturedPacks(module, len(head.terms)).backward(batch, scale_T)
        else:
            (module(batch, scale_T)[0] * scale_T).sum().backward()
        found.append([p.grad.clone() for p in trained])
    for a, b in zip(*found, strict=True):
        assert float((a - b).norm()) <= 2e-2 * float(a.norm()) + 1e-9


@pytest.mark.parametrize("recompute", [False, True])
def test_the_planned_memory_is_what_a_captured_step_takes(recompute):
    """With the optimiser's moments there, as from the second step on."""
    dims = HeadDims(2048, 32768, 32, 16, 4, 128, 8192)
    head, batch = head_and_pack([2048, 2048], dims, torch.bfloat16, depth=8, layers=4)
    if recompute:
        head.recompute_activations()
    batch = head.choose_rows(batch, 0)
    optimizer = build_optimizer(head, TrainConfig(steps=1))
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    layout = Layout(pack_tokens=4096, supervised=len(batch.anchors) / 4096, activation_checkpointing=recompute)
    planned = sum(head_memory(head, layout).values()) + head_activations(head, layout)
    others = torch.cuda.memory_allocated() - sum(head_memory(head, Layout(half=False)).values())
    torch.cuda.reset_peak_memory_stats()
    captured = CapturedPacks(LossModule(head, head.bound_ends().teacher, torch.bfloat16), len(head.terms))
    captured.backward(batch, head.term_weights().cuda() / head.loss_counts(batch))
    assert (torch.cuda.max_memory_allocated() - others) / planned == pytest.approx(1, abs=0.15)
