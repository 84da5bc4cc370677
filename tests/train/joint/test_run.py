"""Joint training through the whole loop: stages, moments, rates, resuming, two ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_fakes import config_of, fill, joint_head, tiny_target
from reference.tiny import turns_of
from train_fakes import on_two_ranks, quiet

from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample
from headstart.heads.errors import ConfigError
from headstart.heads.families import MedusaConfig
from headstart.train.config import TrainConfig
from headstart.train.joint.head import JointHead
from headstart.train.launching.setup import make_accelerator
from headstart.train.loop import train
from headstart.train.step import LossModule
from headstart.train.stream import TrainData
from headstart.train.validate import Validator

STEPS = 8


def samples(count: int = 12) -> list[Sample]:
    noise = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        turns = turns_of("." * (1 + number % 3) + "A" * (4 + number % 5) + ".B" * (number % 2) + "B")
        tokens = torch.randint(3, 31, (len(turns),), generator=noise).numpy().astype("int32")
        turn_ids = torch.tensor(turns, dtype=torch.int32).numpy()
        found.append(Sample(id=f"s{number}", token_ids=tokens, turn_ids=turn_ids, finish_reason="stop", meta={}))
    return found


class Signalled(OnlineFeatures):
    """Sends SIGTERM to its own process when it is asked for one more than `after` packs."""

    after = 10**9
    asked = 0

    def get(self, pack):
        if self.asked == self.after:
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked += 1
        return super().get(pack)


def run(
    run_dir: Path, after: int = 10**9, joint: dict[str, Any] | None = None, validated: bool = False, **changes: Any
) -> tuple[JointHead, Any]:
    head = joint_head(config_of(**(joint or {})), MedusaConfig(depth=2), filled=False)
    target = head._target[0]
    source = Signalled(target, samples(), head.spec, head.depth)
    source.after = after
    settings = dict(steps=STEPS, accumulation=2, lr=0.02, warmup_steps=1, weight_decay=0.01, save_every=0, log_every=1)
    validate = None
    if validated:
        held_out = OnlineFeatures(target, samples(4), head.spec, head.depth)
        validate = Validator(held_out, [[0, 1], [2, 3]], target.teacher)
    config = TrainConfig(**(settings | changes))
    data = TrainData(source, pack_tokens=20)
    return head, train(head, data, target.teacher, config, run_dir, quiet(validate))


def records(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [values for line in lines if "train/loss" in (values := json.loads(line))]


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_a_resumed_run_makes_the_same_steps_in_either_stage_and_across_the_boundary(tmp_path, loss):
    joint = {"loss": loss, "dropout": 0.2, "schedule": "linear", "heads_only": 0.5}
    whole, _ = run(tmp_path / "whole", joint=joint)
    # two packs a step: signalled during step 3 (head alone), 4 (the boundary is next) and 7 (together)
    for number, after in enumerate((5, 7, 13)):
        place = tmp_path / str(number)
        _, first = run(place, after, joint)
        assert first.stopped == "signal" and first.step == (3, 4, 7)[number]
        resumed, result = run(place, joint=joint)
        assert result.resumed_from == first.step and result.step == STEPS
        assert [r["train/loss"] for r in records(place)] == [r["train/loss"] for r in records(tmp_path / "whole")]
        assert [r["lr"] for r in records(place)] == [r["lr"] for r in records(tmp_path / "whole")]
        for name, value in whole.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_head_trains_alone_and_then_with_the_target(tmp_path):
    start = joint_head(config_of(), MedusaConfig(depth=2), filled=False).state_dict()
    half, result = run(tmp_path, after=7)  # at the end of the first stage
    assert result.step == STEPS // 2
    for name, value in half.state_dict().items():
        moved = not torch.equal(value, start[name])
        assert moved == name.startswith("inner."), name
    head, _ = run(tmp_path)
    for name, value in head.state_dict().items():
        assert not torch.equal(value, half.state_dict()[name]), name
    written = records(tmp_path)
    assert ["train/target_acc" in record for record in written] == [False] * 4 + [True] * 4
    one_stage = [r["lr"] for r in written[:4]]
    assert [r["lr"] for r in written] == one_stage * 2


def test_moments_start_anew_and_rates_are_the_parameters_own(tmp_path, monkeypatch):
    seen: list[tuple[int, dict[str, float], set[float]]] = []
    step = torch.optim.AdamW.step

    def noting(optimizer, *args, **kwargs):
        result = step(optimizer, *args, **kwargs)
        rates = {group["params"][0].shape[0]: group["lr"] for group in optimizer.param_groups}
        seen.append((len(seen), rates, {float(state["step"]) for state in optimizer.state.values()}))
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    head, _ = run(tmp_path, joint={"head_rate": 4.0}, schedule="constant", warmup_steps=0)
    assert [steps for _, _, steps in seen] == [{1.0}, {2.0}, {3.0}, {4.0}] * 2
    adapter = {p.shape[0] for p in head.adapter.parameters()}
    for number, rates, _ in seen:
        assert set(rates.values()) == ({0.08, 0.0} if number < 4 else {0.08, 0.02})
    assert adapter


def test_what_was_captured_in_one_stage_is_not_replayed_in_the_next(tmp_path, monkeypatch):
    """A graph computes what the head computed when it was captured; packs here take the stage of their capture."""
    captures: list[bool] = []

    class OfOneStage:
        captures, seconds = 0, 0.0

        def __init__(self, module, terms):
            self.module, self.together = module, None

        def drop(self):
            self.together = None

        def backward(self, batch, scale_T):
            now = self.module.head.together
            if self.together is None:
                self.together = now
                captures.append(now)
            self.module.head.together = self.together
            sum_T, sums_S = self.module(batch, scale_T)
            (sum_T * scale_T).sum().backward()
            self.module.head.together = now
            return sum_T.detach(), sums_S

    eager, _ = run(tmp_path / "eager")
    monkeypatch.setattr("headstart.train.loop.captures", lambda *args: True)
    monkeypatch.setattr("headstart.train.loop.CapturedPacks", OfOneStage)
    replayed, _ = run(tmp_path / "replayed")
    assert captures == [False, True]
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(replayed.state_dict()[name], value, msg=name)


def test_both_stages_lower_their_losses(tmp_path):
    joint = {"loss": "ce", "weight": 0.2, "schedule": "constant"}
    head, result = run(tmp_path, joint=joint, validated=True, steps=60, eval_every=10, log_every=10)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    valid = [line for line in lines if "valid/loss" in line]
    targets, heads = ([line[f"valid/loss_{name}"] for line in valid] for name in ("target", "1"))
    assert targets[0] == targets[1] == targets[2]  # while the head alone trains
    assert targets[-1] < 0.95 * targets[2] and heads[2] < heads[0]


def test_checkpoints_hold_the_adapter_and_a_best_head_brings_it_back(tmp_path):
    head, result = run(tmp_path, validated=True, eval_every=2, select="best")
    from safetensors.torch import load_file

    saved = load_file(Path(result.checkpoint) / "head.safetensors")
    adapter = [name for name in saved if name.startswith("adapter.")]
    assert len(adapter) == len(list(head.adapter.parameters())) == 2 * 7 * 2
    best = load_file(tmp_path / "checkpoints" / "best" / "head.safetensors")
    for name, value in head.state_dict().items():
        assert torch.equal(value, best[name])
    layer = head._target[0].model.model.layers[0].mlp.up_proj
    assert torch.equal(layer.lora_B["default"].weight, best["adapter.model.layers.0.mlp.up_proj.lora_B.weight"])


def test_sharded_heads_are_refused(tmp_path):
    from headstart.train.launching.setup import make_parallel

    head = joint_head(config_of())
    module = LossModule(head, head._target[0].teacher, None)
    with pytest.raises(ConfigError, match="train.parallel: found fsdp2, expected replicated"):
        make_parallel("fsdp2", head, module, TrainConfig(steps=1), make_accelerator("cpu"), False)


# --- two ranks ------------------------------------------------------------------------------------------------------


def on_ranks(out: Path) -> dict:
    make_accelerator("cpu")
    found = {}
    for loss in ("kl", "ce"):
        head, result = run(out / loss, joint={"loss": loss, "dropout": 0.1}, accumulation=3)
        found[loss] = {"state": head.state_dict(), "step": result.step}
    return found


def test_two_ranks_make_the_steps_of_one(tmp_path):
    """Three packs a step: one rank has two of them, the other one."""
    ranks = on_two_ranks(lambda rank: on_ranks(tmp_path / "two"), tmp_path)
    for loss in ("kl", "ce"):
        head, _ = run(tmp_path / "one" / loss, joint={"loss": loss, "dropout": 0.1}, accumulation=3)
        one, two = ([r["train/loss"] for r in records(tmp_path / kind / loss)] for kind in ("one", "two"))
        assert len(one) == STEPS and two == pytest.approx(one, rel=1e-4, abs=1e-6)
        for name, value in head.state_dict().items():
            other = ranks[0][loss]["state"][name]
            assert torch.equal(other, ranks[1][loss]["state"][name])
            torch.testing.assert_close(other, value, rtol=2e-3, atol=2e-4)


def test_a_target_that_is_already_tuned_starts_from_its_adapter():
    """The pipeline takes an adapter out before it joins; a second head on the same target would share it."""
    target = tiny_target()
    first = joint_head(config_of(), target=target)
    fill(first.adapter, 9)
    second = joint_head(config_of(), target=target, filled=False)
    for (name, p), q in zip(first.adapter.named_parameters(), second.adapter.parameters(), strict=True):
        assert p is q, name
