"""Targets with quantised weights: what loads, what it gives, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.quantised import CONFIGS, quantise, quantise_by_package
from reference.words import save_word_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import TargetError
from headstart.heads.targets import quantised
from headstart.heads.targets.adapter import refuse_quantised
from headstart.heads.targets.load import check_shardable, load_target, model_on_meta, weightless_target
from headstart.heads.targets.quantised import (
    PACKAGES,
    Quantisation,
    check_quantisation,
    held_bytes_of,
    matrix_of,
    parts_of,
    quantisation_of,
    refused_here,
    run_once,
    weight_bits,
)
from headstart.heads.targets.sharded import check_plain
from headstart.heads.targets.sizes import active_parameters
from headstart.heads.targets.target import Target, TargetConfig, weight_hash_of

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
SIZES = dict(
    vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.1,
)  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}


def made(directory: Path, kind: str, **sizes: Any) -> Path:
    """A small random bfloat16 model with a tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    save_word_tokenizer(directory, SIZES["vocab_size"])
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("plain") / "llama", "llama")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("plain") / "gpt_oss", "gpt_oss", **EXPERTS)


def loaded(place: Path, dtype: str = "auto") -> Target:
    return load_target(TargetConfig(name=str(place), device="cpu", dtype=dtype))


def features(target: Target) -> FeatureBatch:
    batch = FeatureBatch.pack([(torch.arange(3, 27), torch.zeros(24, dtype=torch.int64))], 2)
    return target.extract(batch, FeatureSpec((1, 2, 3)))


def with_quantisation(plain: Path, directory: Path, settings: dict[str, Any]) -> Path:
    """The directory of a target whose config.json says that its weights are quantised; they are not."""
    import shutil

    shutil.copytree(plain, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directory


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "compressed-tensors"])
def test_features_are_those_of_the_weights_in_the_files(
    method: str, llama: Path, gpt_oss: Path, tmp_path: Path
) -> None:
    """Written by hand, read by transformers, compared with a plain model that holds the numbers that they stand for."""
    if method == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    source = gpt_oss if method == "mxfp4" else llama
    weights = quantise(source, tmp_path / method, method)
    target, original = loaded(tmp_path / method, "float32"), loaded(source, "float32")
    assert target.quantised is not None and target.quantised.method == method
    assert target.quantised.dequantised == (method != "compressed-tensors")
    assert any("features of the" in note and method in note for note in target.notes)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    missing = plain.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
    assert not missing.unexpected_keys
    expected, found, before = (features(t) for t in (Target.from_model(plain), target, original))
    torch.testing.assert_close(found.hidden_RD, expected.hidden_RD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.streams_RkD, expected.streams_RkD, rtol=1e-5, atol=1e-5)
    assert (found.hidden_RD - before.hidden_RD).abs().max() > 1e-3, "the original's features are others"
    assert target.fingerprint()["weight_hash"] != original.fingerprint()["weight_hash"]
    assert target.fingerprint()["quantised"] == method and "quantised" not in original.fingerprint()
    assert loaded(tmp_path / method).dtype == torch.bfloat16, "auto takes the dtype of the files"


def settings_of(case: str) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if case == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if case == "bitsandbytes-8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def unpacked(model: nn.Module) -> nn.Module:
    """A float32 copy of the model with a plain matrix in place of every packed one."""
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES), dtype=torch.float32)
    plain.load_state_dict({k: v for k, v in model.named_parameters() if "_proj" not in k}, strict=False)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            packed = matrix_of(module, module.in_features)
            plain.get_submodule(name).weight.data = packed.to(torch.float32)
    return plain


@pytest.mark.parametrize("case", ["torchao", "bitsandbytes-4", "bitsandbytes-8"])
def test_packed_weights_of_a_package_give_features_and_another_hash(case: str, llama: Path, tmp_path: Path) -> None:
    package = case.split("-")[0]
    pytest.importorskip(package, reason=f"pip install {package}")
    quantise_by_package(llama, tmp_path / case, settings_of(case))
    target, original = loaded(tmp_path / case), loaded(llama, "bfloat16")
    assert target.quantised == Quantisation(package, target.quantised.settings, False)
    assert target.dtype == torch.bfloat16
    found, before = features(target).hidden_RD.float(), features(original).hidden_RD.float()
    assert (found - before).norm() / before.norm() > 1e-2, "the original's features are others"
    expected = features(Target.from_model(unpacked(target.model))).hidden_RD.float()
    assert (found - expected).norm() / expected.norm() < 0.1, "rounding of bfloat16 and of quantised products"
    assert target.weight_hash() != original.weight_hash() == loaded(llama, "bfloat16").weight_hash()
    assert target.weight_hash() == loaded(tmp_path / case).weight_hash()
    torch.testing.assert_close(features(target).hidden_RD.float(), found, rtol=0, atol=0)  # the hash changed nothing
    assert target.held_bytes() < 0.8 * original.held_bytes()
    rows = [active_parameters(t.model.model.layers[0], None) for t in (target, original)]
    assert rows[0] == pytest.approx(rows[1], rel=0.02), "a packed matrix counts as what it stands for"
    meta = weightless_target(TargetConfig(name=str(tmp_path / case)))
    planned = held_bytes_of(meta.model, 2, meta.quantised)(meta.model.parameters())
    assert planned == pytest.approx(target.held_bytes(), rel=0.15)
    for refuse in (refuse_quantised, lambda config: check_plain(config, "x")):
        with pytest.raises(TargetError, match="quantised weights"):
            refuse(target.model.config)


@pytest.mark.parametrize("method", PACKAGES)
def test_a_missing_package_is_named_in_one_line(
    method: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "_installed", lambda module: False)
    place = with_quantisation(llama, tmp_path / "t", {"quant_method": method, "bits": 4, "group_size": 32})
    for load in (weightless_target, load_target):
        with pytest.raises(TargetError) as caught:
            load(TargetConfig(name=str(place), device="cpu"))
        said = str(caught.value)
        assert "\n" not in said and f"quantised by {method}" in said
        for package, module in PACKAGES[method].items():
            assert f" {package}" in said.split("pip install")[1] and module in said.split("looked for")[1]


def test_a_method_that_transformers_does_not_read_is_refused(llama: Path, tmp_path: Path) -> None:
    """transformers would only log a warning and take the packed numbers for weights."""
    place = with_quantisation(llama, tmp_path / "t", {"quant_method": "modelopt"})
    for load in (weightless_target, load_target):
        with pytest.raises(TargetError, match="quantised by modelopt, which this version of transformers does not"):
            load(TargetConfig(name=str(place), device="cpu"))
    place = with_quantisation(llama, tmp_path / "u", {"bits": 4})
    with pytest.raises(TargetError, match="without quant_method"):
        weightless_target(TargetConfig(name=str(place)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_method_that_needs_a_gpu_says_so(llama: Path, tmp_path: Path) -> None:
    """A plan for another machine is made, with a note."""
    place = with_quantisation(llama, tmp_path / "t", {"quant_method": "fbgemm_fp8"})
    with pytest.raises(TargetError, match="quantised by fbgemm_fp8: .*GPU.*there is no GPU here. Load it on another"):
        load_target(TargetConfig(name=str(place), device="cpu"))
    notes = weightless_target(TargetConfig(name=str(place))).notes
    assert any("there is no GPU here" in note for note in notes)
    with pytest.raises(TargetError, match="there is no GPU here"):
        weightless_target(TargetConfig(name=str(place), device="cpu"))


def test_nothing_trains_or_shards_a_quantised_target(llama: Path, tmp_path: Path) -> None:
    """FP8 is dequantised here: its config.json decides nevertheless, so that every machine says the same."""
    quantise(llama, tmp_path / "fp8", "fp8")
    meta = weightless_target(TargetConfig(name=str(tmp_path / "fp8")))
    with pytest.raises(TargetError, match="quantised weights, into which no adapter can be merged"):
        refuse_quantised(meta.model.config)
    with pytest.raises(TargetError, match="found quantised weights, expected plain ones to shard"):
        check_shardable(meta)


class Int8Linear(nn.Module):
    """A linear layer that packs its matrix; `dynamic` rounds its inputs as well."""

    def __init__(self, weight_VD: torch.Tensor, dynamic: bool = False):
        super().__init__()
        self.scale_V1 = weight_VD.abs().amax(1, keepdim=True) / 127
        self.qweight = nn.Parameter((weight_VD / self.scale_V1).round().to(torch.int8), requires_grad=False)
        self.out_features, self.in_features = weight_VD.shape
        self.dynamic, self.bias = dynamic, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dynamic:
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
            x = (x / scale).round() * scale
        return x.float() @ (self.qweight * self.scale_V1).T


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_quantised_output_matrix_is_found_by_its_products(dynamic: bool) -> None:
    torch.manual_seed(0)
    layer = Int8Linear(torch.randn(40, 24), dynamic)
    torch.testing.assert_close(matrix_of(layer, 24, chunk=7), layer.qweight * layer.scale_V1, rtol=1e-2, atol=1e-3)
    plain = nn.Linear(24, 40, bias=False)
    assert matrix_of(plain, 24) is plain.weight


def test_a_target_with_a_quantised_output_matrix_has_a_plain_teacher(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    packed = Int8Linear(model.lm_head.weight.detach().clone())
    model.lm_head = packed
    target = Target.from_model(model)
    torch.testing.assert_close(target.teacher.weight_VD, packed.qweight * packed.scale_V1, rtol=1e-2, atol=1e-3)
    expected = model(input_ids=torch.arange(8)[None]).logits[0]
    hidden = model.model(input_ids=torch.arange(8)[None]).last_hidden_state[0]
    assert (target.teacher.logits(hidden) - expected).norm() / expected.norm() < 5e-3


def test_every_bit_of_packed_numbers_changes_the_hash() -> None:
    """In bfloat16 two int32 that differ in their low bits are the same."""
    layer = nn.Module()
    layer.register_buffer("qweight", torch.full((4, 4), 0x12345678, dtype=torch.int32))
    before = weight_hash_of(layer)
    layer.qweight[2, 1] += 1
    assert weight_hash_of(layer) != before
    assert list(parts_of(torch.ones(2, 2))) == [""]


def test_bits_of_a_weight() -> None:
    def bits(method: str, **settings: Any) -> float | None:
        return weight_bits(Quantisation(method, settings))

    assert bits("fp8", weight_block_size=[128, 128]) == pytest.approx(8 + 32 / 16384)
    assert bits("gptq", bits=4, group_size=128) == bits("awq", bits=4, group_size=128) == 4 + 20 / 128
    assert bits("gptq", bits=4, group_size=-1) == 4
    assert bits("bitsandbytes", load_in_8bit=True) == 8 and bits("bitsandbytes", load_in_4bit=True) == 4.5
    assert bits("torchao", quant_type={"default": {"_type": "Int4WeightOnlyConfig"}}) == 4
    assert bits("torchao", quant_type={"default": {"_type": "Float8DynamicActivationFloat8WeightConfig"}}) == 8
    assert bits("compressed-tensors", config_groups={}) is None, "its first forward unpacks the weights"
    assert weight_bits(Quantisation("fp8", {}, dequantised=True)) is None


def test_the_published_gpt_oss_is_planned_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """12.8 GiB of files on the Hub; bfloat16 takes 39."""
    config = AutoConfig.for_model(**json.loads((FIXTURES / "gpt-oss-20b.json").read_text()))
    model, _ = model_on_meta(config, TargetConfig(name="gpt-oss-20b"))
    found = Quantisation("mxfp4", config.quantization_config)
    assert held_bytes_of(model, 2, found)(model.parameters()) == 2 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(quantised, "_installed", lambda module: True)
    assert held_bytes_of(model, 2, found)(model.parameters()) / 2**30 == pytest.approx(12.8, rel=0.02)


def test_a_plain_target_is_not_asked() -> None:
    config = AutoConfig.for_model(**json.loads((FIXTURES / "Qwen3-8B.json").read_text()))
    assert check_quantisation(config, "x") is None
    assert refused_here(Quantisation("fp8", CONFIGS["fp8"]), "x") is None, "dequantised where there is no GPU for it"


class Packed(nn.Module):
    """A linear layer that holds two 4-bit numbers in a byte, and a bias."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.in_features, self.out_features = columns, rows
        self.register_buffer("weight", torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8))
        self.bias = nn.Parameter(torch.randn(rows))

    def matrix(self) -> torch.Tensor:
        return torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1).float() - 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix().T + self.bias


def test_a_packed_matrix_is_known_from_its_products_and_its_sizes() -> None:
    packed = Packed(6, 8)
    torch.testing.assert_close(matrix_of(packed, 8), packed.matrix(), rtol=1e-5, atol=1e-5)
    assert active_parameters(nn.Sequential(packed), None) == 6 * 8


def test_bitsandbytes_without_a_method_is_known_by_its_switches() -> None:
    config = AutoConfig.for_model("llama")
    for switch in ("load_in_4bit", "load_in_8bit"):
        config.quantization_config = {switch: True}
        found = quantisation_of(config)
        assert found is not None and found.method == "bitsandbytes"


def test_quantised_embeddings_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    table = model.get_input_embeddings()
    table.weight = nn.Parameter(table.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(TargetError, match="target 'it': its embeddings are quantised, and heads read rows of them"):
        run_once(model, "it", "auto")


def test_what_a_method_leaves_out_is_counted_as_plain_numbers() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    plain = 2 * sum(p.numel() for p in model.parameters())

    def held(**settings: Any) -> float:
        return held_bytes_of(model, 2, Quantisation("fp8", settings))(model.parameters())

    downs = sum(layer.mlp.down_proj.weight.numel() for layer in model.model.layers)
    assert held() < held(modules_to_not_convert=["down_proj"]) < plain
    assert held(modules_to_not_convert=["down_proj"]) - held() == downs
    # unpacked by its first forward
    assert held_bytes_of(model, 2, Quantisation("compressed-tensors", {"bits": 4}))(model.parameters()) == plain
