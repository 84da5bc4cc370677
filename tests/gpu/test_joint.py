"""Joint training on a CUDA device: captured steps against eager ones, and a run in bfloat16 (`pytest -m gpu`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_fakes import config_of, fill, joint_head, tiny_target
from torch.nn import functional as F
from train_fakes import quiet

from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample
from headstart.heads.batch import FeatureBatch
from headstart.heads.families import MedusaConfig
from headstart.heads.kernels.packed import PackRows, packed_attention
from headstart.heads.targets.adapter import keep_input_dtype
from headstart.heads.targets.kept_dropout import KeptDropout
from headstart.heads.targets.target import Target
from headstart.train import loop
from headstart.train.captured import CapturedPacks
from headstart.train.config import TrainConfig
from headstart.train.joint.cost import target_numbers
from headstart.train.joint.head import JointHead
from headstart.train.step import LossModule
from headstart.train.stream import TrainData
from headstart.train.validate import Validator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.05,
}  # fmt: skip
PACKS = ([200, 31, 77], [150, 90], [310], [64, 64, 64, 64])


def target(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Target:
    return tiny_target(dtype, "cuda", **{**SHAPE, **changes})


def pack(lengths: list[int], seed: int = 0) -> FeatureBatch:
    noise = torch.Generator().manual_seed(seed + sum(lengths))
    documents = []
    for length in lengths:
        turns = torch.full((length,), -1)
        turns[length // 4 : length // 2] = 0
        turns[length // 2 + 3 :] = 1
        documents.append((torch.randint(3, VOCAB, (length,), generator=noise), turns))
    return FeatureBatch.pack(documents, 3).to("cuda")


def head_of(stage: int, target: Target | None = None, head: MedusaConfig | None = None, **changes: Any) -> JointHead:
    made = joint_head(
        config_of(rank=8, alpha=8.0, **changes),
        head or MedusaConfig(depth=3, lm_head="lowrank", rank=16),
        target or globals()["target"](),
        filled=False,
    )
    fill(made.adapter, 6, 0.05)
    for block in made.inner.blocks:
        fill(block, 5, 0.05)
    made.enter_stage(stage)
    return made.train()


def eager(module: LossModule, batch: FeatureBatch, scale_T: torch.Tensor, seed: int = 0):
    """(sums, numbers, gradients) of one pack."""
    torch.manual_seed(seed)
    module.zero_grad(set_to_none=True)
    sum_T, sums_S = module(batch, scale_T)
    (sum_T * scale_T).sum().backward()
    return sum_T.detach(), sums_S, grads_of(module)


def grads_of(module: LossModule) -> dict[str, torch.Tensor]:
    named = module.head.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def scale_of(head: JointHead, batch: FeatureBatch) -> torch.Tensor:
    return head.term_weights(0.7).cuda() / head.loss_counts(batch).clamp(min=1)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))


def test_packed_attention_is_attention_inside_documents():
    lengths = [130, 1, 64, 301]
    batch = pack(lengths)
    rows, scale = sum(lengths), 64**-0.5
    q, k, v = (torch.randn(rows, h, 64, device="cuda") for h in (8, 2, 2))
    halves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    found = packed_attention(*halves, PackRows.of(batch), scale)
    wides = [x.detach().float().requires_grad_() for x in halves]
    pieces, start = [], 0
    for length in lengths:
        parts = (x[start : start + length].transpose(0, 1)[None] for x in wides)
        context = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
        pieces.append(context[0].transpose(0, 1))
        start += length
    expected = torch.cat(pieces)
    assert relative(found, expected) < 0.01
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    found.backward(upstream.bfloat16())
    for half, wide in zip(halves, wides, strict=True):
        assert relative(half.grad, wide.grad) < 0.02


def test_the_target_runs_packed():
    for dtype in (torch.bfloat16, torch.float32):
        live = head_of(1, target(dtype)).live
        assert live.packed and live.capturable, live.note


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("stage", "loss", "head_loss"), [(0, "kl", "kl"), (0, "ce", "ce"), (1, "kl", "kl"), (1, "ce", "ce")]
)
def test_captured_steps_make_the_gradients_of_eager_ones(stage, loss, head_loss, recompute):
    """Packs of other sizes and documents through the same graphs, and a smaller pack after a larger one."""
    head = head_of(stage, head=MedusaConfig(depth=3, lm_head="own", loss=head_loss), loss=loss)
    if recompute:
        head.recompute_activations()
    module = LossModule(head, head._target[0].teacher, torch.bfloat16)
    batches = [pack(lengths) for lengths in (*PACKS, PACKS[1])]
    expected = [eager(module, batch, scale_of(head, batch)) for batch in batches]
    captured = CapturedPacks(module, len(head.terms))
    for batch, (sum_T, sums_S, grads) in zip(batches, expected, strict=True):
        for parameter in head.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        found_T, found_S = captured.backward(batch, scale_of(head, batch))
        assert relative(found_T, sum_T) < 0.01
        torch.testing.assert_close(found_S, sums_S, rtol=0.05, atol=2.0)
        for name, gradient in grads.items():
            if stage == 0 and name.startswith("adapter."):
                assert not gradient.any() and not dict(head.named_parameters())[name].grad.any()
                continue
            found = dict(head.named_parameters())[name].grad
            assert relative(found, gradient) < 0.03, name


def test_gradients_in_bfloat16_are_those_of_float32():
    half, wide = (head_of(1, target(dtype)) for dtype in (torch.bfloat16, torch.float32))
    with torch.no_grad():  # the same values in both, those of bfloat16
        for p, q in zip(half._target[0].model.parameters(), wide._target[0].model.parameters(), strict=True):
            q.copy_(p)
        wide.load_state_dict(half.state_dict())
    batch = pack(PACKS[0])
    found = eager(LossModule(half, half._target[0].teacher, torch.bfloat16), batch, scale_of(half, batch))[2]
    expected = eager(LossModule(wide, wide._target[0].teacher, None), batch, scale_of(wide, batch))[2]
    for name, gradient in expected.items():
        assert relative(found[name], gradient) < 0.15, name


def test_dropout_is_drawn_anew_at_every_replay_and_from_the_seed():
    head = head_of(1, dropout=0.3)
    module, batch = LossModule(head, head._target[0].teacher, torch.bfloat16), pack(PACKS[0])
    captured = CapturedPacks(module, len(head.terms))

    def at(seed: int) -> dict[str, torch.Tensor]:
        for parameter in head.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        torch.manual_seed(seed)
        captured.backward(batch, scale_of(head, batch))
        return grads_of(module)

    first, again, other = at(1), at(1), at(2)  # the first call captures
    name = "adapter.model.layers.0.mlp.up_proj.lora_B.weight"
    assert relative(again[name], first[name]) < 0.01 and relative(other[name], first[name]) > 0.05
    head.recompute_activations()
    head.live.recompute = False
    captured = CapturedPacks(module, len(head.terms))
    kept = at(1)
    head.live.recompute = True
    captured = CapturedPacks(module, len(head.terms))
    recomputed = at(1)
    assert all(relative(recomputed[each], gradient) < 0.01 for each, gradient in kept.items())
    uncaptured = eager(module, batch, scale_of(head, batch), seed=1)[2]
    assert relative(uncaptured[name], first[name]) < 1.5  # the same size, whatever was drawn


def test_the_planned_memory_is_near_the_measured_one():
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    made = target(**shape, num_key_value_heads=4, max_position_embeddings=8192)
    batch = pack([2048, 2048, 2048, 2048])
    for dropout, recompute in ((0.0, False), (0.1, False), (0.0, True), (0.1, True)):
        head = head_of(1, made, loss="kl", dropout=dropout)
        if recompute:
            head.recompute_activations()
        keep_input_dtype(made.model, True)
        for module in made.model.modules():  # the target keeps its first adapter
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = KeptDropout(dropout) if dropout else torch.nn.Identity()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden_RD, _ = head.live(batch)
            hidden_RD.sum().backward()
        head.zero_grad(set_to_none=True)
        del hidden_RD
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden_RD, _ = head.live(batch)
        kept = torch.cuda.memory_allocated() - before
        hidden_RD.sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        planned = 2 * target_numbers(made, head.joint, 8192, recompute)
        mib = f"kept {kept >> 20}, peak {peak >> 20}, planned {int(planned) >> 20} MiB"
        print(f"dropout {dropout}, recompute {recompute}: {mib}")
        assert 0.75 * peak < planned < 1.4 * peak


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_a_captured_run_in_bfloat16_learns_in_both_stages(tmp_path: Path, loss: str):
    made = target()
    head = joint_head(
        config_of(rank=8, alpha=16.0, dropout=0.05, loss=loss, schedule="constant", weight=0.5),
        MedusaConfig(depth=2, lm_head="lowrank", rank=16, loss="ce"), made, filled=False,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(1)
    samples = []
    for number in range(64):  # ramps, which the random target does not know
        start = int(torch.randint(3, 200, (1,), generator=noise))
        tokens = (start + torch.arange(60)).numpy().astype("int32")
        turns = torch.cat((torch.full((6,), -1), torch.zeros(54))).int().numpy()
        samples.append(Sample(id=f"s{number}", token_ids=tokens, turn_ids=turns, finish_reason="stop", meta={}))
    source = OnlineFeatures(made, samples[:56], head.spec, head.depth)
    held_out = OnlineFeatures(made, samples[56:], head.spec, head.depth)
    validator = Validator(held_out, [list(range(8))], made.teacher, autocast=torch.bfloat16)
    config = TrainConfig(
        steps=160, lr=2e-3, warmup_steps=10, save_every=0, log_every=20, eval_every=20, capture="on", clip_norm=1.0
    )
    loop.train(head, TrainData(source, pack_tokens=600), made.teacher, config, tmp_path, quiet(validator))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    valid = [line for line in lines if "valid/loss_1" in line]
    heads, targets = ([line[f"valid/loss_{name}"] for line in valid] for name in ("1", "target"))
    assert heads[3] < heads[0] and heads[-1] < 0.9 * heads[3]
    assert max(line.get("captures", 0) for line in lines) >= 2
    if loss == "ce":
        assert targets[3] == pytest.approx(targets[0], rel=1e-3) and targets[-1] < 0.8 * targets[3]
    else:
        assert targets[3] == pytest.approx(0.0, abs=1e-4) and 0 <= targets[-1] < 5.0
