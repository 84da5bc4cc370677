"""What a target puts on its logits is measured, whatever its config calls it; what a teacher cannot copy is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from reference.tiny import SIZES
from torch import Tensor, nn

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import TargetError
from headstart.heads.targets.locate import decoder_layers, text_decoder
from headstart.heads.targets.probe import OutputRule, fit_rule, ramp_like, rule_without_weights
from headstart.heads.targets.target import Target

MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
#: sizes of tables that are large where nothing is said
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
#: target → (settings, factor, soft-cap)
TARGETS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "Llama": ({}, 1.0, None),
    "HyperCLOVAX": ({"logits_scaling": 0.125}, 0.125, None),
    "Granite": ({"logits_scaling": 8.0}, 0.125, None),
    "GraniteMoe": ({"logits_scaling": 3.0, **EXPERTS}, 1 / 3, None),
    "Cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "FalconH1": ({"lm_head_multiplier": 0.039, "mamba_n_groups": 1, **MAMBA}, 0.039, None),
    "MiniCPM3": ({"dim_model_base": 8, "num_key_value_heads": 4, **MLA}, 0.25, None),
    "Gemma2": ({"head_dim": 8, "final_logit_softcapping": 30.0}, 1.0, 30.0),
    "NanoChat": ({}, 1.0, 15.0),
    "GptOss": ({"head_dim": 8, **EXPERTS}, 1.0, None),
    "Mixtral": (EXPERTS, 1.0, None),
    "Jamba": ({}, 1.0, None),
    "Llama4Text": ({"head_dim": 8, "num_local_experts": 2}, 1.0, None),
    "Gemma4Text": ({"head_dim": 8, "final_logit_softcapping": 20.0, **PER_LAYER}, 1.0, 20.0),
}


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **TARGETS.get(name, ({},))[0], **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TARGETS)
def test_the_teacher_gives_the_models_own_logits(name: str, dtype: torch.dtype) -> None:
    _, scale, softcap = TARGETS[name]
    model = model_of(name, dtype)
    target = Target.from_model(model)
    assert target.teacher.scale == pytest.approx(scale, rel=1e-6) and target.teacher.softcap == softcap
    tokens_T = torch.randint(97, (11,), generator=torch.Generator().manual_seed(3))
    packed = target.extract(FeatureBatch.pack([(tokens_T, torch.zeros_like(tokens_T))], 1), FeatureSpec((1, 3, 5)))
    with torch.no_grad():
        own = model(input_ids=tokens_T[None], use_cache=False, output_hidden_states=True)
    # the factor comes last: bfloat16 rounds the product (2^-8) and the model's own logits once more
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    size = own.logits.abs().max().item()
    torch.testing.assert_close(
        target.teacher.logits(packed.hidden_RD), own.logits[0].float(), rtol=tolerance, atol=tolerance * size
    )
    assert any(("as measured" in note) for note in target.notes) == (scale != 1.0 or softcap is not None)


@pytest.mark.parametrize("name", TARGETS)
def test_the_same_is_known_without_weights(name: str) -> None:
    model = model_of(name)
    with torch.device("meta"):
        empty = type(model)(model.config)
    _, scale, softcap = TARGETS[name]
    found = rule_without_weights(empty)
    assert found is not None and found.scale == pytest.approx(scale, rel=1e-6) and found.softcap == softcap
    assert Target.from_model(empty).teacher.scale == found.scale
    # nothing of the stand-ins is left
    assert "forward" not in vars(text_decoder(empty)) and "forward" not in vars(empty.get_output_embeddings())


class Changed(transformers.LlamaForCausalLM):
    """A Llama that does something to its logits that no config field names."""

    def change(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


class Capped(Changed):
    def change(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits * 0.5 / 7.25) * 7.25


class Clamped(Changed):
    def change(self, logits: Tensor) -> Tensor:
        return logits.clamp(-3, 3)


class Forbidding(Changed):
    def change(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([5, 6]), torch.finfo(logits.dtype).min)


class Slid(Changed):
    """Adds what no product of the output matrix shows: the embeddings' share."""

    def change(self, logits: Tensor) -> Tensor:
        return logits + 0.5


def changed(kind: type[Changed], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SIZES)).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_soft_cap_without_a_name_is_measured(dtype: torch.dtype) -> None:
    target = Target.from_model(changed(Capped, dtype))
    assert target.teacher.scale == pytest.approx(0.5, rel=3e-3)
    assert target.teacher.softcap == pytest.approx(7.25, rel=3e-3)
    if dtype == torch.float32:
        assert target.teacher.softcap == pytest.approx(7.25, rel=1e-5)
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype) * 50
    own = Capped.change(target.model, target.model.lm_head(hidden)).float()
    torch.testing.assert_close(target.teacher.logits(hidden), own, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("kind", [Clamped, Forbidding, Slid])
def test_what_is_neither_a_factor_nor_a_soft_cap_is_refused(kind: type[Changed]) -> None:
    with pytest.raises(TargetError, match="neither a factor nor a soft-cap"):
        Target.from_model(changed(kind))
    with torch.device("meta"):
        empty = kind(transformers.LlamaConfig(**SIZES))
    with pytest.raises(TargetError, match="neither a factor nor a soft-cap"):
        rule_without_weights(empty)


class Rounding(Changed):
    """Multiplies in float32 and gives bfloat16."""

    def change(self, logits: Tensor) -> Tensor:
        return (logits * 0.3).to(torch.bfloat16)


def test_logits_that_are_rounded_behind_the_product_are_no_other_rule() -> None:
    assert Target.from_model(changed(Rounding)).teacher.scale == pytest.approx(0.3, rel=3e-3)


def test_a_target_that_runs_layers_twice_is_refused_with_and_without_weights() -> None:
    model = model_of("Llama")
    with torch.device("meta"):
        empty = type(model)(model.config)
    for found in (model, empty):
        found.model.layers[4] = found.model.layers[3]
        with pytest.raises(TargetError, match="its decoder layer 3 runs 2 times in a forward, expected once"):
            Target.from_model(found)
        assert not any("forward" in vars(layer) or layer._forward_pre_hooks for layer in found.model.layers)


def test_a_list_of_layers_that_is_not_there_is_missed_without_weights() -> None:
    model = model_of("Llama")
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.config.num_hidden_layers = 9
    with pytest.raises(TargetError, match="no list of 9 decoder layers found"):
        Target.from_model(empty)


def test_an_output_matrix_called_decoder_is_none() -> None:
    if not hasattr(transformers, "ModernBertDecoderConfig"):
        pytest.skip("this transformers has no such model")
    model = model_of("ModernBertDecoder")
    assert text_decoder(model) is model.model and len(decoder_layers(model)) == 6
    # a layer with weights stands between its last hidden state and the matrix
    with pytest.raises(TargetError, match="its output matrix does not read the last hidden state"):
        Target.from_model(model)


def test_a_matrix_that_reads_something_else_is_refused() -> None:
    model = model_of("Llama")

    class Between(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.roll(1, dims=-1))

    model.lm_head.__class__ = Between
    with pytest.raises(TargetError, match=r"the logits of its output matrix differ from the model's own by 1\.\d"):
        Target.from_model(model)


def test_a_scaled_input_with_a_bias_behind_it_is_refused() -> None:
    model = model_of("MiniCPM3")
    model.lm_head.bias = nn.Parameter(torch.randn(97))
    with pytest.raises(TargetError, match="does not read the last hidden state but 0.25 times it, and adds a bias"):
        Target.from_model(model)


def test_hidden_states_that_are_not_what_is_captured_are_refused() -> None:
    model = model_of("Llama")
    layer = decoder_layers(model)[3]
    plain = layer.forward
    # adds to its input before anyone reads it: hooks see another stream than `hidden_states` holds
    layer.register_forward_pre_hook(lambda _m, args: (args[0] * 2, *args[1:]), prepend=True)
    layer.forward = lambda x, *args, **kwargs: plain(x / 2, *args, **kwargs)
    try:
        found = Target.from_model(model)
    except TargetError as error:
        assert "the captured hidden_states[3] differ from the model's own" in str(error)
    else:
        # a transformers that records with hooks of its own sees the doubled stream too: then they agree
        assert found.teacher.scale == 1.0


def test_values_that_are_no_numbers_are_named() -> None:
    model = model_of("Llama")
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(TargetError, match="its logits hold NaN or infinite values in float32: copy its weights again"):
        Target.from_model(model)
    model = model_of("Llama", torch.float16)
    mlp = model.model.layers[2].mlp  # overflows, as it would not in bfloat16
    for matrix in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        matrix.weight.data *= 3e4
    with pytest.raises(TargetError, match="its last hidden states hold NaN .*float16: set target.dtype=bfloat16"):
        Target.from_model(model)


def test_a_model_whose_forward_fails_is_a_clear_error() -> None:
    model = model_of("Llama")
    model.model.norm = None
    with pytest.raises(TargetError, match="LlamaForCausalLM: a forward fails with TypeError"):
        Target.from_model(model)


@pytest.mark.parametrize("cap", [None, 2.0, 30.0, 1000.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 25.0])
def test_rules_are_found_over_the_whole_range(scale: float, cap: float | None) -> None:
    z = ramp_like(torch.zeros(8, 97))
    config = transformers.LlamaConfig(**SIZES)
    found = fit_rule(z, OutputRule(scale, cap).apply(z), config, torch.float32)
    assert found is not None and found.scale == pytest.approx(scale, rel=1e-3)
    assert found.softcap == (None if cap is None else pytest.approx(cap, rel=1e-3))


def test_measuring_leaves_no_hook_behind() -> None:
    """transformers' own hooks, which it installs when asked for hidden states, break the graphs of torch.compile."""
    model = model_of("Llama")
    Target.from_model(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    # asked again, it still gives them
    with torch.no_grad():
        own = model(input_ids=torch.arange(5)[None], output_hidden_states=True, use_cache=False)
    assert len(own.hidden_states) == 7


def test_a_language_model_inside_wrappers_is_found() -> None:
    """Multimodal models: vision towers of as many layers, decoders two modules deep, a soft-cap not all apply."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2}
    text = {**SIZES, "head_dim": 8, "final_logit_softcapping": 20.0}
    gemma3 = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    models = [transformers.Gemma3ForConditionalGeneration(gemma3).eval()]
    if hasattr(transformers, "Gemma4Config"):
        inner = {**text, **PER_LAYER}
        gemma4 = transformers.Gemma4Config(text_config=inner, vision_config=None, audio_config=None)
        models.append(transformers.Gemma4ForConditionalGeneration(gemma4).eval())
    tokens_T = torch.randint(97, (9,), generator=torch.Generator().manual_seed(3))
    for model in models:
        target = Target.from_model(model)
        packed = target.extract(FeatureBatch.pack([(tokens_T, torch.zeros_like(tokens_T))], 1), FeatureSpec((1, 4)))
        with torch.no_grad():
            own = model(input_ids=tokens_T[None], use_cache=False, output_hidden_states=True)
        torch.testing.assert_close(packed.streams_RkD[:, 1], own.hidden_states[4][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target.teacher.logits(packed.hidden_RD), own.logits[0], rtol=1e-4, atol=1e-4)
