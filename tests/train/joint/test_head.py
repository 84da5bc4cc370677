"""Joint training against a plain loop: terms, counts, metrics, and every gradient, in both stages."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from joint_fakes import PATTERNS, batch_of, config_of, documents_of, fill, joint_head, tiny_target
from reference.documents import Document, Ends
from reference.joint import Tiny, joint_loss, medusa_sums, target_sums, tuned_documents, weight_at
from reference.llama import Shape
from reference.tiny import assert_near, gradients

from headstart.heads.base import Stage
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.families import DFlashConfig, Eagle3Config, EagleConfig, HydraConfig, MedusaConfig, build_head
from headstart.heads.targets.adapter import adapter_off
from headstart.heads.targets.tuned import MergedAdapter
from headstart.train.captured import PackShape
from headstart.train.joint.head import JointHead
from headstart.train.optim import muon_matrices
from headstart.train.step import LossModule


def twin(head: JointHead, tuned: bool = True):
    """(naive target, ends, documents with its features, weights of head and adapter as float64 leaves)."""
    target = head._target[0]
    leaves = {name: p.detach().double().requires_grad_() for name, p in head.named_parameters() if p.requires_grad}
    adapter = {name.removeprefix("adapter."): leaf for name, leaf in leaves.items() if name.startswith("adapter.")}
    inner = {name.removeprefix("inner."): leaf for name, leaf in leaves.items() if name.startswith("inner.")}
    with adapter_off(target.model):
        plain = {
            name.replace(".base_layer", ""): weight.double()
            for name, weight in target.model.state_dict().items()
            if "lora_" not in name
        }
    dims, rope = target.dims, {"rope_type": "default", "rope_theta": 10000.0}
    shape = Shape(dims.num_heads, dims.num_kv_heads, dims.head_dim, target.model.config.rms_norm_eps, rope=rope)
    naive = Tiny(plain, shape, dims.num_layers, head.joint.alpha / head.joint.rank, adapter if tuned else None)
    ends = Ends(plain["model.embed_tokens.weight"], plain["lm_head.weight"])
    none = torch.zeros(0)
    documents = [Document(tokens.tolist(), turns.tolist(), none, none) for tokens, turns in documents_of()]
    return naive, ends, tuned_documents(naive, documents), leaves, inner


def naive_gradients(total: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), found, strict=True)}


def test_muon_trains_the_inner_head_s_matrices_and_not_the_adapter():
    head = joint_head(config_of(), MedusaConfig(depth=2, lm_head="lowrank", rank=5))
    found = muon_matrices(head)
    assert found and found == {f"inner.{name}" for name in muon_matrices(head.inner)}
    assert any(name.startswith("adapter.") for name, _ in head.named_parameters())


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("head_loss", ["kl", "ce"])
@pytest.mark.parametrize("modules", [["all-linear"], ["q_proj", "down_proj"]])
def test_together_it_is_the_plain_loop(loss, head_loss, modules):
    config = config_of(loss=loss, schedule="sine", weight=0.4, modules=modules)
    head = joint_head(config, MedusaConfig(depth=2, loss=head_loss))
    head.enter_stage(1)
    naive, ends, documents, leaves, inner = twin(head)
    total, count, right = target_sums(documents, naive, ends, loss)
    sums = medusa_sums(inner, ends, documents, 2, "own", head_loss)
    weights = [0.8, 0.64]
    naive_loss = joint_loss((total, count), sums, weights, weight_at("sine", 0.4, 0.3, 1.0))
    expected = naive_gradients(naive_loss, leaves)
    assert any(g.abs().max() > 1e-4 for name, g in expected.items() if "lora_A" in name)

    for pad_to in (0, 40):
        batch = batch_of(pad_to=pad_to)
        teacher = head._target[0].teacher
        count_T = head.loss_counts(batch)
        assert count_T.tolist() == [count, *sums.count]
        scale_T = head.term_weights(0.3) / count_T
        for given in (None, scale_T):
            found = head.loss(batch, teacher, given)
            assert found.count_T.tolist() == count_T.tolist()
            assert_near(found.sum_T, torch.stack([total, *sums.loss]), "sum_T")
            numbers = dict(zip(head.metrics(2), found.numerator_M.tolist(), strict=True))
            wholes = dict(zip(head.metrics(2), found.denominator_M.tolist(), strict=True))
            assert (numbers["target_acc"], wholes["target_acc"]) == (right, count)
            assert [numbers[f"acc_{d}"] for d in (1, 2)] == sums.correct
            assert [wholes[f"acc_{d}"] for d in (1, 2)] == sums.total
            value = (found.sum_T * scale_T).sum()
            assert_near(value, naive_loss, "loss")
            actual = gradients(head, value)
            assert actual.keys() == expected.keys()
            for name, gradient in expected.items():
                assert_near(actual[name], gradient, f"gradient of {name}", 5e-5)


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_head_alone_reads_the_untouched_target(loss):
    head = joint_head(config_of(loss=loss))  # the adapter is not 0, and must not matter
    head.enter_stage(0)
    _, ends, documents, leaves, inner = twin(head, tuned=False)
    sums = medusa_sums(inner, ends, documents, 2, "own", "kl")
    expected = naive_gradients(joint_loss((torch.zeros(()), 1), sums, [0.8, 0.64], 1.0), leaves)
    batch = batch_of(pad_to=40)
    count_T = head.loss_counts(batch)
    assert count_T.tolist() == [0, *sums.count]
    assert head.term_weights(0.1).tolist() == pytest.approx([0.0, 0.8, 0.64])
    scale_T = head.term_weights() / count_T.clamp(min=1)
    found = head.loss(batch, head._target[0].teacher, scale_T)
    assert found.denominator_M[-1] == 0
    actual = gradients(head, (found.sum_T * scale_T).sum())
    for name, gradient in expected.items():
        assert_near(actual[name], gradient, f"gradient of {name}", 5e-5)
        if name.startswith("adapter."):
            assert not actual[name].any()


def test_at_the_start_the_tuned_target_is_the_original():
    head = joint_head(config_of(loss="kl"), filled=False)
    head.enter_stage(1)
    fill(head.inner, 4)
    found = head.loss(batch_of(), head._target[0].teacher)
    assert abs(found.sum_T[0]) < 1e-5 and found.sum_T[1] > 0.1
    assert found.numerator_M[-1] == found.denominator_M[-1] > 0


def test_validation_measures_the_target_in_both_stages():
    head = joint_head(config_of(loss="ce")).eval()
    teacher, batch = head._target[0].teacher, batch_of()
    with torch.no_grad():
        head.enter_stage(0)
        alone = head.loss(batch, teacher)
        head.enter_stage(1)
        together = head.loss(batch, teacher)
        naive, ends, documents, _, _ = twin(head, tuned=False)
    total, count, _ = target_sums(documents, naive, ends, "ce")
    assert alone.count_T[0] == together.count_T[0] == count
    assert_near(alone.sum_T[0], total, "the original target's loss")
    assert abs(float(together.sum_T[0] - total)) > 0.1


def test_a_half_precision_target_decodes_without_autocast_after_a_step_with_it():
    """In a step the adapter, which is float32, takes half-precision inputs as they are; a validation decodes next."""
    head, batch = joint_head(config_of(), target=tiny_target(torch.bfloat16)), batch_of()
    head.enter_stage(1)
    model = head._target[0].model
    with torch.autocast("cpu", torch.bfloat16):
        head.loss(batch, head._target[0].teacher)
    assert head.drafting_head() is head.inner
    with torch.no_grad():
        assert model(input_ids=batch.tokens_R[None]).logits.isfinite().all()


def test_fixed_shapes_change_nothing():
    """What a captured graph runs: padded rows, anchors and edges."""
    head = joint_head(config_of())
    head.enter_stage(1)
    batch, module = batch_of(), LossModule(head, head._target[0].teacher, None)
    padded = PackShape.covering(batch).pad(batch)
    scale_T = head.term_weights() / head.loss_counts(batch)
    values = []
    for each in (batch, padded):
        sum_T, sums_S = module(each, scale_T)
        values.append((sum_T.detach(), sums_S, gradients(head, (sum_T * scale_T).sum())))
    assert_near(values[1][0], values[0][0], "sums")
    assert_near(values[1][1], values[0][1], "numbers")
    for name, gradient in values[0][2].items():
        assert_near(values[1][2][name], gradient, name)


def test_other_documents_of_a_pack_do_not_matter():
    head = joint_head(config_of())
    head.enter_stage(1)
    teacher = head._target[0].teacher
    together = head.loss(batch_of(), teacher)
    alone = []
    for number, (tokens, turns) in enumerate(documents_of()):
        batch = batch_of((PATTERNS[number],))
        alone.append(head.loss(replace(batch, tokens_R=tokens, turn_R=turns), teacher).sum_T)
    assert_near(together.sum_T, torch.stack(alone).sum(0), "sums")


@pytest.mark.parametrize("packed", [True, False])
def test_recomputed_activations_give_the_same_gradients(packed):
    head = joint_head(config_of())
    head.enter_stage(1)
    head.live.packed = packed
    batch, teacher = batch_of(), head._target[0].teacher
    scale_T = head.term_weights() / head.loss_counts(batch)
    calls = []
    mlp = head._target[0].model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    kept = gradients(head, (head.loss(batch, teacher, scale_T).sum_T * scale_T).sum())
    once = calls.count(True)
    head.recompute_activations()
    calls.clear()
    again = gradients(head, (head.loss(batch, teacher, scale_T).sum_T * scale_T).sum())
    assert calls.count(True) == 2 * once
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name
    assert "forward" not in vars(head._target[0].model.model.layers[0])


@pytest.mark.parametrize(("packed", "calls"), [(True, 1), (False, 2)])
def test_dropout_is_drawn_again_where_activations_are_recomputed(packed, calls):
    """Over padded documents a pass calls every layer once per group of similar lengths."""
    head = joint_head(config_of(dropout=0.5))
    head.enter_stage(1)
    head.live.packed = packed
    batch, teacher = batch_of(), head._target[0].teacher
    scale_T = head.term_weights() / head.loss_counts(batch)

    def at(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return gradients(head, (head.loss(batch, teacher, scale_T).sum_T * scale_T).sum())

    head.recompute_activations()
    head.live.recompute = False
    kept, other = at(1), at(2)
    head.live.recompute = True
    dropout, masks = head._target[0].model.model.layers[0].mlp.up_proj.lora_dropout["default"], []
    dropout.register_forward_hook(lambda module, *_: masks.append(weakref.ref(module.masks[module])))
    again = at(1)
    assert len(masks) == 2 * calls and not any(mask() is not None for mask in masks)  # none outlives its step
    name = "adapter.model.layers.0.mlp.up_proj.lora_B.weight"
    assert not torch.allclose(kept[name], other[name])
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)
    assert head.capture_obstacle is None
    assert dropout.p == 0.5 and dropout.masks is None


def test_dropout_is_of_training_with_the_target_alone():
    head = joint_head(config_of(dropout=0.5))
    batch, teacher = batch_of(), head._target[0].teacher

    def differs() -> bool:
        return not torch.equal(*(head.loss(batch, teacher).sum_T for _ in range(2)))

    head.train()
    head.enter_stage(0)
    assert not differs()
    head.enter_stage(1)
    assert differs()
    head.eval()
    assert not differs()
    head.train()
    assert differs()


@pytest.mark.parametrize("schedule", ["constant", "linear", "sine", "sine_r"])
def test_the_heads_weight_grows_as_the_schedule_says(schedule):
    head = joint_head(config_of(schedule=schedule, weight=0.3, sine_share=0.4))
    head.enter_stage(1)
    assert head.weights_vary == (schedule != "constant")
    for part in (0.0, 0.1, 0.4, 0.7, 1.0):
        factor = weight_at(schedule, 0.3, part, 0.4)
        assert head.term_weights(part).tolist() == pytest.approx([1.0, 0.8 * factor, 0.64 * factor], abs=1e-6)


def test_rates_and_stages():
    head = joint_head(config_of(head_rate=4.0, heads_only=0.25))
    assert [stage.share for stage in head.stages] == [0.25, 0.75]
    down = "adapter.model.layers.0.mlp.up_proj.lora_A.weight"
    assert down in dict(head.named_parameters())
    assert [head.rate_factor(down, stage) for stage in (0, 1)] == [0.0, 1.0]
    assert [head.rate_factor("inner.blocks.0.layers.0.weight", stage) for stage in (0, 1)] == [4.0, 4.0]
    only = joint_head(config_of(heads_only=0.0))
    assert len(only.stages) == 1 and only.together and only.rate_factor(down, 0) == 1.0


def test_what_the_inner_head_says_of_its_training_holds_in_joint_training():
    head = joint_head(config_of(head_rate=4.0, schedule="linear", weight=0.5))

    class Particular(type(head.inner)):
        capture_obstacle, weights_vary = "it waits for the host", True

        def term_weights(self, part=1.0):
            return torch.tensor([1.0, part])

        def rate_factor(self, name, stage):
            return 0.5 if name == "lm_heads.0.weight" else 1.0

    head.inner.__class__ = Particular
    assert head.capture_obstacle == "it waits for the host"
    head.enter_stage(0)
    assert head.weights_vary and head.term_weights(0.25).tolist() == [0.0, 1.0, 0.25]
    head.enter_stage(1)
    assert head.weights_vary and head.term_weights(0.5).tolist() == [1.0, 0.25, 0.125]
    names = ("inner.lm_heads.0.weight", "inner.lm_heads.1.weight")
    assert [head.rate_factor(name, 1) for name in names] == [2.0, 4.0]
    Particular.stages = (Stage("one", 0.5), Stage("two", 0.5))
    with pytest.raises(ConfigError, match=r"joint.enabled: .* medusa head, whose own training has 2 stages"):
        JointHead(head.inner, head._target[0], config_of())


@pytest.mark.parametrize(
    "config",
    [EagleConfig(depth=2, feature_noise=0.0), HydraConfig(depth=2, prefix_layer=True), HydraConfig(depth=2, loss="ce")],
    ids=["eagle", "hydra with a prefix layer", "hydra"],
)
def test_an_inner_head_of_another_family_sends_gradients_into_the_adapter(config):
    target = tiny_target(num_hidden_layers=6)
    config = replace(config, **({"dropout": 0.0} if hasattr(config, "dropout") else {}))
    inner = build_head(config, target.dims)
    inner.initialise(target.ends)
    head = JointHead(inner, target, config_of(), seed=0)
    fill(head.adapter, 6)
    fill(head.inner, 5, 0.1)
    head.enter_stage(1)
    assert head.spec.tokens_alone
    batch = batch_of()
    scale_T = head.term_weights() / head.loss_counts(batch).clamp(min=1)
    whole = [
        gradients(head, (head.loss(batch, target.teacher, given).sum_T[1:] * scale_T[1:]).sum())
        for given in (None, scale_T)
    ]
    assert all(g.abs().max() > 0 for name, g in whole[0].items() if name.endswith("lora_B.weight"))
    for name, gradient in whole[0].items():
        assert_near(whole[1][name], gradient, name, 5e-5)


@pytest.mark.parametrize(
    "config",
    [
        EagleConfig(feature_noise=0.0),
        Eagle3Config(depth=3, draft_vocab_size=0, feature_layers=[1, 3, 4]),
        HydraConfig(depth=3, prefix_layer=True, num_layers=2, lm_head="lowrank", rank=4),
        MedusaConfig(depth=3, lm_head="shared", loss="ce"),
    ],
    ids=["eagle", "eagle3 of the whole vocabulary", "hydra with a prefix layer", "medusa"],
)
def test_gradients_of_the_adapter_are_slopes_of_the_loss(config, monkeypatch):
    def norm(self, x):  # transformers' own computes in float32, which is too coarse for slopes
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", norm)
    target = tiny_target(torch.float64, num_hidden_layers=6)
    inner = build_head(config, target.dims)
    inner.initialise(target.ends)
    head = JointHead(inner, target, config_of(), seed=0).double()
    fill(head.adapter, 6, 0.2)
    fill(head.inner, 5, 0.2)
    head.enter_stage(1)
    batch = batch_of(depth=config.depth, pad_to=40)
    scale_T = (head.term_weights(0.5) / head.loss_counts(batch)).double()

    def value() -> torch.Tensor:
        return (head.loss(batch, target.teacher, scale_T).sum_T * scale_T).sum()

    found = gradients(head, value())
    with torch.no_grad():
        learnt_AD = replace(batch, hidden_RD=head.live(batch)[0]).teacher_hidden()
    monkeypatch.setattr(FeatureBatch, "teacher_hidden", lambda self: learnt_AD)  # no gradient goes through it
    noise, size = torch.Generator().manual_seed(1), 1e-6
    for part in ("lora_A", "lora_B", "inner."):
        moved = {name: p for name, p in head.named_parameters() if part in name and p.requires_grad}
        towards = {n: torch.randn(p.shape, generator=noise, dtype=torch.float64) for n, p in moved.items()}
        values = []
        with torch.no_grad():
            for steps in (1, -2):
                for name, parameter in moved.items():
                    parameter.add_(towards[name], alpha=steps * size)
                values.append(float(value()))
            for name, parameter in moved.items():
                parameter.add_(towards[name], alpha=size)
        slope = (values[0] - values[1]) / (2 * size)
        expected = sum(float((found[name] * towards[name]).sum()) for name in moved)
        assert abs(expected) > 1e-3 and slope == pytest.approx(expected, rel=1e-5), part


def test_the_features_that_it_makes_are_those_of_a_merged_target():
    target = tiny_target(num_hidden_layers=6)
    head = joint_head(config_of(), target=target)
    head.enter_stage(1)
    batch = batch_of()
    with torch.no_grad():
        hidden_RD, streams_RkD = head.live(batch, (1, 3))
    merged = tiny_target(num_hidden_layers=6)
    for name, layer in head._target[0].model.named_modules():
        if hasattr(layer, "lora_A"):
            merged.model.get_submodule(name).weight.data += layer.get_delta_weight("default")
    expected = merged.extract(batch, FeatureSpec((1, 3)))
    assert_near(hidden_RD, expected.hidden_RD, "hidden")
    assert_near(streams_RkD, expected.streams_RkD, "streams")


def test_what_cannot_be_trained_together_is_refused():
    target = tiny_target(num_hidden_layers=8)
    eagle3 = build_head(Eagle3Config(draft_vocab_size=8), target.dims)
    with pytest.raises(ConfigError, match=r"draft vocabulary of 8 tokens.*set head.draft_vocab_size=0"):
        JointHead(eagle3, target, config_of())
    dflash = build_head(DFlashConfig(mask_token_id=3), target.dims)
    with pytest.raises(ConfigError, match=r"a dflash head, whose layers give .* no gradient: set joint.enabled=false"):
        JointHead(dflash, target, config_of())
    target.teacher.softcap = 30.0
    with pytest.raises(ConfigError, match=r"joint.enabled: .*soft-cap"):
        JointHead(build_head(EagleConfig(), target.dims), target, config_of())
    target.teacher.softcap = None
    target.merged_adapter = MergedAdapter("merged", "0" * 64, None)
    with pytest.raises(ConfigError, match=r"joint.enabled: .*an adapter is merged; expected the original.*start_from"):
        JointHead(build_head(EagleConfig(), target.dims), target, config_of())
    target.merged_adapter = None
    target.model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(TargetError, match="quantised"):
        JointHead(build_head(EagleConfig(), target.dims), target, config_of())
