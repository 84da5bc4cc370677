"""A tuned target on a GPU is the one of a processor; measuring it leaves the original as it was (`pytest -m gpu`)."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.tuned_runs import save_random_adapter
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.eval.measuring.quality import measure_quality, perplexity
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.heads.targets.tuned import merged_for_now, read_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """(A random Llama of a size that the fused kernels take, an adapter of it)."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    vocab = {f"t{index}": index for index in range(512)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, []))).save_pretrained(tmp_path / "base")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    save_random_adapter(tmp_path / "base", tmp_path / "lora", 0.02)
    return tmp_path / "base", tmp_path / "lora"


def loaded(place: Path, adapter: Path | None, device: str, dtype: str) -> Target:
    named = None if adapter is None else str(adapter)
    return load_target(TargetConfig(str(place), adapter=named, device=device, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_devices_merge_alike(places: tuple[Path, Path], dtype: str) -> None:
    here, there = (loaded(*places, device, dtype) for device in ("cpu", "cuda"))
    assert here.weight_hash() == there.weight_hash()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cost_of_tuning_is_measured_on_a_gpu(places: tuple[Path, Path], dtype: str) -> None:
    original, adapter = loaded(places[0], None, "cuda", dtype), read_adapter(places[1])
    before = {name: weight.clone() for name, weight in original.model.state_dict().items()}
    noise = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 512, (length,), generator=noise).tolist() for length in (40, 90, 33, 120)]
    documents: Any = [(tokens, [place > 5 for place in range(len(tokens))]) for tokens in ids]

    @contextmanager
    def tuned() -> Any:
        with merged_for_now(original.model, adapter):
            yield Target(original.model, original.tokenizer, original.config)

    prompts: Any = [(tokens, [not scored for scored in mask]) for tokens, mask in documents]
    found = measure_quality(original, tuned, documents, [tokens[:20] for tokens in ids], 24, prompt_documents=prompts)
    assert all(torch.equal(weight, before[name]) for name, weight in original.model.state_dict().items())
    merged = loaded(*places, "cuda", dtype)
    assert found.perplexity_tuned == pytest.approx(perplexity(merged, documents).value, rel=1e-6)
    assert found.perplexity_original == pytest.approx(perplexity(original, documents).value, rel=1e-6)
    on_prompts = found.on_prompts
    assert on_prompts is not None and on_prompts.tokens == 4 * 5 and on_prompts.rise != 0
    assert on_prompts.perplexity_tuned == pytest.approx(perplexity(merged, prompts).value, rel=1e-6)
    assert on_prompts.perplexity_original == pytest.approx(perplexity(original, prompts).value, rel=1e-6)
    assert found.rise != 0 and found.answers is not None and found.answers.prompts == 4
    on_cpu = perplexity(loaded(*places, "cpu", dtype), documents).value
    assert found.perplexity_tuned == pytest.approx(on_cpu, rel=2e-3 if dtype == "float32" else 3e-2)
