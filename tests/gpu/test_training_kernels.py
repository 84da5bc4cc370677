"""The CUDA paths of training against their eager twins (`pytest -m gpu`, on a machine with one)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data.features import FeatureSource
from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.families.peagle import rollout as peagle_rollout
from headstart.heads.kernels import elementwise, losses, rows
from headstart.heads.kernels.attention import TrainAttention
from headstart.heads.losses import eager, fused
from headstart.heads.numerics import add_weight_grad
from headstart.heads.targets.target import Target
from headstart.train import loop
from headstart.train.captured import CapturedPacks
from headstart.train.config import TrainConfig
from headstart.train.optim import build_optimizer
from headstart.train.plan import Layout, head_activations, head_memory
from headstart.train.step import LossModule, SumNames

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))


def documents(lengths: list[int], vocab: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for length in lengths:
        turns = torch.full((length,), -1)
        turns[length // 3 : length // 2] = 0
        turns[length // 2 + 2 :] = 1
        made.append((torch.randint(0, vocab, (length,)), turns))
    return made


def batch_of(lengths: list[int], depth: int, vocab: int = 512) -> FeatureBatch:
    torch.manual_seed(len(lengths))
    return FeatureBatch.pack(documents(lengths, vocab), depth, pad_to=sum(lengths) + 5)


def parts_of(sums_S: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, tokens walked over, and the metrics' denominators without the walked cycles."""
    names = SumNames.of(head)
    numerator_M, denominator_M = names.fractions(sums_S)
    return names.counts(sums_S), numerator_M[-1], denominator_M[:-1]


@pytest.mark.parametrize("own", [0, 1, 4])
@pytest.mark.parametrize(("heads", "groups", "width"), [(9, 3, 64), (8, 8, 128), (4, 1, 32)])
@pytest.mark.parametrize("lengths", [[130, 7, 257, 64], [333], [1024, 1024]])
def test_flash_attention_matches_float32_eager(own, heads, groups, width, lengths):
    """bf16 operands: each output and gradient within 1e-2 of float32 (the eager bf16 twin has 2e-3 itself)."""
    batch = batch_of(lengths, 7).to("cuda")
    rows, anchors = batch.tokens_R.shape[0], len(batch.anchors)
    shapes = [(anchors, heads, width), (rows, groups, width), (rows, groups, width)] + [(anchors, groups, width)] * (
        2 * own
    )
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    upstream = torch.randn(anchors, heads, width, device="cuda", dtype=torch.bfloat16)
    results = []
    for backend, dtype in (("eager", torch.float32), ("flash", torch.bfloat16)):
        copies = [x.to(dtype).clone().requires_grad_() for x in inputs]
        out = TrainAttention(batch, backend).attend(*copies[:3], copies[3 : 3 + own], copies[3 + own :])
        results.append((out, *torch.autograd.grad(out, copies, upstream.to(dtype))))
    for expected, found in zip(*results, strict=True):
        assert relative(found, expected) < 1e-2


@pytest.mark.parametrize(("rows", "width", "tokens"), [(300, 576, 16000), (77, 64, 1003), (1, 32, 97), (0, 32, 97)])
@pytest.mark.parametrize(
    ("kind", "mix"), [*((kind, eager.PURE) for kind in eager.SOFT_LOSSES), ("kl", (0.3, 0.7)), ("soft_ce", (0.5, 0.0))]
)
def test_fused_loss_matches_eager(kind, mix, rows, width, tokens):
    hidden, weight = torch.randn(rows, width, device="cuda"), torch.randn(tokens, width, device="cuda") * 0.1
    teacher = torch.randn(50, tokens, device="cuda") * 3
    teacher_row = torch.randint(0, 50, (rows,), device="cuda")
    row_weight = (torch.rand(rows, device="cuda") > 0.3).float()
    results = []
    for loss in (eager.soft_loss, fused.soft_loss):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        total, argmax = loss(h, w, teacher, teacher_row, row_weight, kind, mix=mix)
        total.backward()
        results.append((total.detach(), argmax, h.grad, w.grad))
    assert torch.equal(results[0][1], results[1][1])
    for index in (0, 2, 3):
        torch.testing.assert_close(results[1][index], results[0][index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "width", "tokens"), [(300, 576, 16000), (77, 64, 1003), (1, 32, 97), (0, 32, 97)])
@pytest.mark.parametrize("rank", [0, 24])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
def test_hard_loss_and_low_rank_updates_match_eager(rows, width, tokens, rank, dtype, tolerance, monkeypatch):
    """Labels and a teacher, with and without a second product, in chunks of 128 rows."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 128 * tokens)
    noise = {"device": "cuda", "dtype": dtype}
    hidden, weight = torch.randn(rows, width, **noise), torch.randn(tokens, width, **noise) * 0.1
    low, up = torch.randn(rows, rank, **noise), torch.randn(tokens, rank, **noise) * 0.1
    teacher = torch.randn(50, tokens, **noise) * 3
    teacher_row, label = (torch.randint(0, top, (rows,), device="cuda") for top in (50, tokens))
    row_weight = (torch.rand(rows, device="cuda") > 0.3).float()
    for soft in (False, True):
        results = []
        for module in (eager, fused):
            inputs = [x.clone().requires_grad_() for x in (hidden, weight, *([low, up] if rank else []))]
            update = tuple(inputs[2:]) if rank else None
            if soft:
                total, _ = module.soft_loss(*inputs[:2], teacher, teacher_row, row_weight, "kl", update=update)
            else:
                total, _ = module.hard_ce(*inputs[:2], label, row_weight, update=update)
            total.backward()
            results.append((total, *(x.grad for x in inputs)))
        for expected, found in zip(*results, strict=True):
            assert relative(found, expected) < tolerance or not expected.any()


def test_a_float32_gradient_is_added_in_place_from_bfloat16():
    """The matrix unit adds to what is there, also to a view into a larger buffer, and makes no tensor of its size."""
    buffer = torch.randn(4 + 5003 * 128, device="cuda")
    total = buffer[4:].view(5003, 128)
    grad = torch.randn(700, 5003, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(700, 128, device="cuda", dtype=torch.bfloat16)
    add_weight_grad(total.clone(), grad, x)  # the library takes its workspace
    expected = total.double() + grad.double().t() @ x.double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_weight_grad(total, grad, x)
    assert torch.cuda.max_memory_allocated() - before < total.numel()
    assert relative(total, expected) < 1e-5  # nothing is rounded to bfloat16


def matrices_step(fields: dict, vocab: int, width: int, lengths: list[int]) -> tuple[Head, LossModule, FeatureBatch]:
    """A head with four output matrices, its loss, and a pack with random features."""
    head_config = FAMILIES["medusa"].config(depth=4, **fields)
    head = build_head(head_config, HeadDims(width, vocab, 2, 4, 2, width // 4, 256)).cuda()
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16) * 0.1
    teacher = Teacher(weight)
    head.initialise(TargetEnds(weight, teacher))
    batch = batch_of(lengths, head.depth, vocab).to("cuda")
    batch = replace(
        batch, hidden_RD=torch.randn(len(batch.tokens_R), width, device="cuda", dtype=torch.bfloat16),
        teacher_argmax_A=torch.zeros(len(batch.anchors), dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return head, LossModule(head, teacher, torch.bfloat16), batch


@pytest.mark.parametrize("fields", [{}, {"loss": "ce"}, {"lm_head": "shared"}, {"lm_head": "lowrank"}], ids=str)
def test_the_planned_memory_is_what_a_captured_step_takes(fields):
    """With the optimiser's moments there, as from the second step on."""
    head, module, batch = matrices_step(fields, 131072, 2048, [1500, 1500, 1400])
    optimizer = build_optimizer(head, TrainConfig(steps=1))
    optimizer.step()
    anchors = -(-len(batch.anchors) // 384) * 384  # as CapturedPacks rounds them up
    layout = Layout(pack_tokens=4480, supervised=anchors / 4480)
    planned = sum(head_memory(head, layout).values()) + head_activations(head, layout)
    others = torch.cuda.memory_allocated() - sum(head_memory(head, Layout(half=False)).values())
    torch.cuda.reset_peak_memory_stats()
    captured = CapturedPacks(module, len(head.terms))
    captured.backward(batch, head.term_weights().cuda() / head.loss_counts(batch).clamp(min=1))
    assert (torch.cuda.max_memory_allocated() - others) / planned == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_a_captured_step_keeps_no_gradient_of_its_own(kind):
    """Memory that capturing K = 4 own matrices takes: one float32 gradient would be 128 MiB, all of them 512 MiB."""
    vocab, width = 65536, 512
    head, module, batch = matrices_step({"loss": kind}, vocab, width, [64, 64])
    captured = CapturedPacks(module, len(head.terms))
    scale_T = head.term_weights().cuda() / head.loss_counts(batch).clamp(min=1)
    module(batch)  # libraries take their workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    captured.backward(batch, scale_T)
    found = torch.cuda.max_memory_allocated() - before
    # one matrix in bfloat16, 128 rows of logits and of the teacher's, a workspace of cuBLAS per stream
    assert found < 2 * vocab * width + 2 * 2 * 128 * vocab + (160 << 20)
    assert all(parameter.grad.any() for parameter in head.lm_heads.parameters())


@pytest.mark.parametrize("kind", eager.SOFT_LOSSES)
def test_fused_loss_in_bfloat16_is_eager(kind, monkeypatch):
    """Odd widths, several chunks, K depths: within bf16 rounding."""
    tokens, width, counts = 5003, 128, (1500, 1100, 3)
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 512 * tokens)
    weight = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) * 0.1
    hidden = [torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in counts]
    teacher = torch.randn(90, tokens, device="cuda", dtype=torch.bfloat16) * 3
    rows = [torch.randint(0, 90, (n,), device="cuda") for n in counts]
    weights = [(torch.rand(n, device="cuda") > 0.3).float() for n in counts]
    scale_K = torch.tensor([1.0, 0.8, 0.64], device="cuda")

    def run(dtype: torch.dtype, module) -> list[torch.Tensor]:
        w, *hs = (x.to(dtype).clone().requires_grad_() for x in (weight, *hidden))
        if module is fused:
            loss_K, _ = fused.soft_loss_depths(torch.cat(hs), w, teacher, rows, weights, scale_K, kind)
        else:
            pairs = [eager.soft_loss(h, w, teacher, r, x, kind) for h, r, x in zip(hs, rows, weights, strict=True)]
            loss_K = torch.stack([loss for loss, _ in pairs])
        return [loss_K, *torch.autograd.grad((loss_K * scale_K).sum(), [w, *hs])]

    # LK's gradient jumps where q = p: rounding the logits to bf16 takes one entry in 10,000 across, which is 3 % to 6 %
    # of the gradient's norm. The twin that rounds them too has the same jumps.
    for expected in [run(torch.bfloat16, eager)] + ([run(torch.float32, eager)] if kind != "lk" else []):
        for wanted, found in zip(expected, run(torch.bfloat16, fused), strict=True):
            assert relative(found, wanted) < 1e-2
    assert relative(run(torch.bfloat16, fused)[0], run(torch.float32, eager)[0]) < 1e-3


@pytest.mark.parametrize("kind", eager.SOFT_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_loss_holds_no_more_than_a_chunk(dtype, kind, monkeypatch):
    """Peak memory of K depths: never K × rows × U logits, nor two chunks. `dtype` is the matrix's, bf16 the rows'."""
    tokens, width, count, depth, chunk = 5003, 128, 1300, 3, 512
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk * tokens)
    weight = (torch.randn(tokens, width, device="cuda") * 0.1).to(dtype).requires_grad_()
    hidden = torch.randn(depth * count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.randn(90, tokens, device="cuda", dtype=torch.bfloat16)
    rows = [torch.randint(0, 90, (count,), device="cuda") for _ in range(depth)]
    weights = [torch.ones(count, device="cuda") for _ in range(depth)]
    scale_K = torch.ones(depth, device="cuda")

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss_K, _ = fused.soft_loss_depths(hidden, weight, teacher, rows, weights, scale_K, kind)
        (loss_K * scale_K).sum().backward()
        weight.grad = hidden.grad = None
        return torch.cuda.max_memory_allocated() - before

    peak()  # libraries take their workspaces
    logits = 2 * chunk * tokens
    # the matrix in bf16; its gradient, summed in float32, beside one chunk's part; the rows' gradient; five columns of
    # float32 and five of int64 per row
    needed = logits + 2 * tokens * width + 2 * 4 * tokens * width + 2 * depth * count * width + 60 * depth * count
    found = peak()
    assert needed - logits < found < needed + logits // 2 < 2 * depth * count * tokens


def test_scaling_by_one_writes_nothing_and_any_other_factor_everything():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3 * losses.SCALE_BLOCK + 5, device="cuda", dtype=dtype)
        for factor in (1.0, -0.3, 0.0):
            scaled = x.clone()
            fused._scale_(scaled, torch.tensor(factor, device="cuda"))
            assert torch.equal(scaled, (x.float() * factor).to(dtype))


def test_elementwise_kernels_match_their_twins():
    for width, rotary in ((64, 64), (96, 32), (8, 8)):
        x = torch.randn(37, 5, width, device="cuda", requires_grad=True)
        angle = torch.randn(37, rotary // 2, device="cuda").repeat(1, 2)
        expected, found = (f(x, angle.cos(), angle.sin()) for f in (elementwise.rotate_eager, elementwise.rotate))
        upstream = torch.randn_like(expected)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out, x, upstream)[0] for out in (expected, found)]
        torch.testing.assert_close(grads[1], grads[0])
    gate, up = (torch.randn(33, 77, device="cuda", requires_grad=True) for _ in range(2))
    expected, found = elementwise.gated_eager(gate, up), elementwise.swiglu(gate, up)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(out, (gate, up), upstream) for out in (expected, found)), strict=True):
        torch.testing.assert_close(b, a)


def test_row_kernels_match_their_twins():
    """Float32 on the device (kernels) against float64 on the device (plain tensor operations)."""

    def both(work, *tensors: torch.Tensor) -> None:
        wide = [x.double() if x.is_floating_point() else x.clone() for x in tensors]
        narrow = [x.clone() for x in tensors]
        results = [work(*x) for x in (wide, narrow)]
        for expected, found in zip((*wide, *results[0]), (*narrow, *results[1]), strict=True):
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    for n, size in ((1500, 576), (3, 4096), (0, 24)):
        x, grad, weight, before, extra = (
            random(n, size),
            random(n, size),
            random(size),
            random(n, size),
            random(n, size),
        )
        both(lambda *t: [rows.rms_norm_backward(t[0], t[1], t[2], 1e-5, t[3])], grad, x, weight, before)
        both(
            lambda *t: [rows.rms_norm_backward(t[0], t[1], t[2], 1e-5, t[3], t[4], accumulate=True)],
            grad, x, weight, before, extra,
        )  # fmt: skip
        both(lambda *t: [rows.rms_norm(t[0], t[1], 1e-5, t[2])], x, weight, before)
        both(lambda *t: [rows.gated(t[0], t[1], None)] * 0, random(n, 2 * size), before)
        both(lambda *t: [rows.gated_backward(t[0], t[1], None)] * 0, random(n, 2 * size), grad)
    angle = random(37, 12).repeat(1, 2)
    both(lambda *t: [rows.rotate_heads(*t, 3, 32)], random(37, 160), angle.cos(), angle.sin())
    row = torch.randperm(500, device="cuda")[:300]
    both(lambda *t: [rows.collect_steps(t[0], row, (300, 120, 7), 507, first=1)], random(427, 96))
    both(lambda *t: [rows.add_rows(t[0], row, t[1])] * 0, random(500, 96), random(300, 96))
    both(lambda *t: [rows.put_rows(t[0], row, t[1])] * 0, random(500, 96), random(300, 96))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in sorted(FAMILIES)),
        ("medusa", {"loss": "ce"}),
        ("medusa", {"lm_head": "shared"}),
        ("medusa", {"lm_head": "lowrank"}),
        ("hydra", {"loss": "ce", "lm_head": "lowrank"}),
        ("hydra", {"prefix_layer": True, "num_layers": 4, "lm_head": "lowrank"}),
        ("eagle", {"depth": 3}),
        ("eagle", {"depth": 2, "top_tokens_loss_weight": 1.0}),
        ("eagle3", {"loss": "lk", "row_fraction": 0.7}),
        ("eagle3", {"loss": "kl", "lk_weight": 0.5, "l1_weight": 0.5, "teacher_temperature": 0.7}),
        ("eagle3", {"start_layers": [-1], "num_key_value_heads": 4}),
        ("eagle3", {"fc_norm": "stream", "norm_output": True, "row_fraction": 0.8}),
        ("eagle3", {"layers": 2}),
        ("eagle3", {"layers": 2, "qk_norm": True, "row_fraction": 0.7}),
        ("eagle3", {"layers": 3, "fc_norm": "stream", "norm_output": True}),
        ("eagle3", {"qk_norm": True, "fc_norm": "concat"}),
        ("eagle3", {"row_fraction_first": 0.3, "row_fraction": 0.7}),
        ("peagle", {"layers": 2}),
        ("peagle", {"layers": 2, "row_fraction_first": 0.2, "num_key_value_heads": 4}),
        ("peagle", {"layers": 3, "qk_norm": True, "row_fraction": 1.0, "loss": "lk"}),
    ],
)
def test_captured_step_equals_eager_step(family, fields):
    """A replayed graph on a padded pack gives the eager gradient, pack after pack, and accumulates."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    target = Target.from_model(LlamaForCausalLM(config).cuda().bfloat16())
    head_config = FAMILIES[family].config(**fields)
    if getattr(head_config, "draft_vocab_size", 0):
        head_config.draft_vocab_size = 200
    if head_config.placeholder is not None:
        head_config = head_config.with_placeholder(511)
    if family == "eagle":
        head_config.feature_noise = 0.0
    head = build_head(head_config, target.dims).cuda()
    head.initialise(target.ends, torch.arange(200, device="cuda") * 2)
    module = LossModule(head, target.teacher, torch.bfloat16)
    # the first and the last fill their shapes: no padding row, padding anchors at the end of a document
    packs = ([64, 64], [90, 40], [33, 21, 60], [100], [77], [1024, 1024])
    batches = [target.extract(batch_of(lengths, head.depth), head.spec) for lengths in packs]
    batches = [head.choose_rows(batch, seed) for seed, batch in enumerate(batches)]
    captured = CapturedPacks(module, len(head.terms))
    for batch in batches:
        scale_T = head.term_weights().cuda() / head.loss_counts(batch).clamp(min=1)
        sums = module(batch)
        gradients = torch.autograd.grad((sums[0] * scale_T).sum(), list(head.parameters()), allow_unused=True)
        # an eager graph that is still alive ties the parameters to the default stream, which no capture may touch
        expected = tuple(part.detach() for part in sums)
        del sums
        for parameter in head.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        for _ in range(2):
            sums = captured.backward(batch, scale_T)
        assert relative(sums[0], expected[0]) < 1e-2
        (counts, tokens, totals), wanted = parts_of(sums[1], head), parts_of(expected[1], head)
        torch.testing.assert_close(counts, wanted[0])
        torch.testing.assert_close(totals, wanted[2])
        assert tokens == wanted[1]  # tokens walked over; cycles are as many as bfloat16's near-ties make them
        for parameter, gradient in zip(head.parameters(), gradients, strict=True):
            if gradient is not None:
                # rows nearly cancel in a bias's sum: bfloat16's roundings are up to 4 % of it
                assert relative(parameter.grad, 2 * gradient) < (2e-2 if gradient.ndim > 1 else 1e-1)


@pytest.mark.parametrize(
    ("family", "fields", "name"),
    [
        ("hydra", {"prefix_layer": True, "dropout": 0.2}, "blocks.1.residual.weight"),
        ("eagle3", {"draft_vocab_size": 0, "feature_dropout": 0.2}, "fc.weight"),
        ("eagle3", {"draft_vocab_size": 0, "feature_noise": 0.3}, "fc.weight"),
        ("eagle3", {"draft_vocab_size": 0, "depth": 3, "feature_dropout": 0.5, "feature_noise": 0.2}, "fc.weight"),
    ],
)
def test_what_a_captured_step_draws_follows_the_seed(family, fields, name):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    target = Target.from_model(LlamaForCausalLM(config).cuda().bfloat16())
    head = build_head(FAMILIES[family].config(**fields), target.dims).cuda()
    head.initialise(target.ends)
    captured = CapturedPacks(LossModule(head.train(), target.teacher, torch.bfloat16), len(head.terms))
    batch = target.extract(batch_of([64, 64], head.depth), head.spec)
    scale_T = head.term_weights().cuda() / head.loss_counts(batch)

    def step(seed: int) -> torch.Tensor:
        for parameter in head.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        torch.manual_seed(seed)
        captured.backward(batch, scale_T)
        return head.get_parameter(name).grad.clone()

    step(1)  # captures
    first, again, other = step(1), step(1), step(2)
    assert relative(again, first) < 1e-3 and relative(other, first) > 0.1
    assert captured.captures == 1  # what is drawn anew is drawn in replays


@pytest.mark.parametrize("lengths", [[130, 7, 257, 64], [333], [1024, 1024]])
def test_every_row_attends_as_in_float32(lengths):
    """The lower layers of a head with several: not the anchors alone, padding between documents and graphs included."""
    batch = batch_of(lengths, 3)
    batch = batch.padded(sum(lengths) + 70, len(batch.anchors) + 9, len(lengths) + 2).to("cuda")
    rows = batch.tokens_R.shape[0]
    every_row = torch.arange(rows, device="cuda")
    inputs = [torch.randn(rows, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2)]
    upstream = torch.randn(rows, 4, 64, device="cuda", dtype=torch.bfloat16)
    upstream[sum(lengths) :] = 0  # nothing reads what padding rows give
    results = []
    for backend, dtype in (("eager", torch.float32), ("flash", torch.bfloat16)):
        copies = [x.to(dtype).clone().requires_grad_() for x in inputs]
        out = TrainAttention(batch, backend, every_row).attend(*copies)
        assert bool(out.isfinite().all())
        found = torch.autograd.grad(out, copies, upstream.to(dtype))
        results.append([x[: sum(lengths)] for x in (out, *found)])
    for expected, found in zip(*results, strict=True):
        assert relative(found, expected) < 1e-2


class StoredFeatures(FeatureSource):
    """Features of equally long documents, kept in the host's memory."""

    def __init__(self, head, count: int = 16, length: int = 64):
        self.documents, self.head = documents([length] * count, 512), head
        self.lengths = [length] * count

    def get(self, pack: list[int]) -> FeatureBatch:
        batch = FeatureBatch.pack([self.documents[i] for i in pack], self.head.depth)
        rows, width = len(batch.tokens_R), self.head.dims.hidden_size
        return replace(
            batch,
            hidden_RD=torch.randn(rows, width, dtype=torch.bfloat16),
            streams_RkD=torch.randn(rows, 3, width, dtype=torch.bfloat16),
            teacher_argmax_A=torch.randint(0, 200, (len(batch.anchors),)),
        )


@pytest.mark.parametrize("fields", [{"row_fraction": 1.0}, {"row_fraction_first": 0.3, "num_key_value_heads": 4}])
def test_peagles_places_in_blocks_are_places_one_depth_after_the_other(fields, monkeypatch):
    """One call of the block kernel for all depths of an anchor, against one call of the flash kernel per depth."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    target = Target.from_model(LlamaForCausalLM(config).cuda().bfloat16())
    given = {"draft_vocab_size": 200, "layers": 2, "mask_token_id": 511, **fields}
    head = build_head(FAMILIES["peagle"].config(**given), target.dims).cuda()
    head.initialise(target.ends, torch.arange(200, device="cuda") * 2)
    module = LossModule(head, target.teacher, torch.bfloat16)
    batch = head.choose_rows(target.extract(batch_of([90, 300, 41], head.depth), head.spec), 1)
    batch = batch.padded(512, 512, 8)
    found = []
    for in_blocks in (False, True):
        monkeypatch.setattr(peagle_rollout, "in_blocks", lambda x, head_dim, answer=in_blocks: answer)
        sum_T = module(batch)[0]
        total = (sum_T * head.term_weights().cuda()).sum()
        found.append((sum_T.detach(), torch.autograd.grad(total, list(head.parameters()))))
    (slow_T, slow), (fast_T, fast) = found
    assert relative(fast_T, slow_T) < 1e-2
    for one, other in zip(fast, slow, strict=True):
        assert relative(one, other) < 5e-2  # bfloat16, through two kernels that round differently


@pytest.mark.parametrize(("family", "layers"), [("eagle3", 1), ("eagle3", 2), ("peagle", 1), ("peagle", 2)])
@pytest.mark.parametrize("row_fraction", [1.0, 0.7])
def test_a_step_does_not_wait_for_the_device(row_fraction, family, layers, tmp_path, monkeypatch):
    """Operations that make the host wait raise in every step but the first two, which capture."""
    target = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    config = FAMILIES[family].config(depth=3, draft_vocab_size=200, row_fraction=row_fraction, layers=layers)
    if config.placeholder is not None:
        config = config.with_placeholder(511)
    head = build_head(config, HeadDims.from_hf_config(target)).cuda()
    ends = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16) * 0.1
    teacher = Teacher(ends)
    head.initialise(TargetEnds(ends, teacher), torch.arange(200, device="cuda"))
    step, seen = loop.TrainingLoop.step, []

    def strict(trainer) -> None:
        torch.cuda.set_sync_debug_mode("error" if len(seen) >= 2 else "default")
        try:
            step(trainer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(trainer.captured.captures)

    monkeypatch.setattr(loop.TrainingLoop, "step", strict)
    source = StoredFeatures(head)
    settings = TrainConfig(steps=6, accumulation=2, log_every=3, save_every=0, prefetch=1)
    data, observers = loop.TrainData(source, pack_tokens=256), loop.Observers(progress=False)
    loop.train(head, data, teacher, settings, tmp_path, observers, provenance={})
    assert seen == [1] * 6
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.ones(1, device="cuda").item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
