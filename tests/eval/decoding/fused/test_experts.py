"""Experts of real architectures: our products equal the module's own; what is made otherwise keeps its own forward."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headstart.bench.architectures import random_model
from headstart.eval.decoding.fused import experts as experts_module
from headstart.eval.decoding.fused.experts import FusedExperts, experts_of, fuse_experts
from headstart.eval.decoding.fused.model import shallow_copy
from headstart.eval.kernels.experts import GELU_TANH, SILU, GatedActivation

#: name, experts modules
MIXTURES = [
    ("Qwen3-MoE", 8), ("Mixtral", 8), ("gpt-oss", 8), ("DeepSeek-V3", 7), ("GLM-4.5", 7), ("Qwen3-Next", 8),
    ("Granite-4", 8), ("Llama 4", 0),
]  # fmt: skip


def fused_in(module: nn.Module) -> list[FusedExperts]:
    return [child for child in module.modules() if isinstance(child, FusedExperts)]


@torch.inference_mode()
@pytest.mark.parametrize(("name", "count"), MIXTURES)
def test_the_view_gives_the_same_logits(name: str, count: int) -> None:
    model = random_model(name)
    view = fuse_experts(shallow_copy(model))
    assert len(fused_in(view)) == count and not fused_in(model)
    tokens = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).logits
    assert float((view(tokens).logits - expected).norm() / expected.norm()) < 1e-5
    for fused in fused_in(view):
        assert fused.experts.first_ECD.untyped_storage().data_ptr() == _first(fused.own).untyped_storage().data_ptr()


def _first(own: Any) -> torch.Tensor:
    return own.gate_up_proj if own.has_gate else own.up_proj


def small_experts() -> Any:
    own = next(module for module in random_model("Qwen3-MoE").modules() if hasattr(module, "has_gate"))
    assert experts_of(own) is not None
    return own


def test_another_activation_runs_as_the_module_has_it() -> None:
    own = small_experts()
    own.act_fn = nn.ReLU()
    experts = experts_of(own)
    assert experts is not None and experts.activation == own._apply_gate


def test_experts_that_compute_something_else_keep_their_forward() -> None:
    own = small_experts()
    own.is_concatenated, own._apply_gate = True, lambda both: torch.tanh(both.chunk(2, -1)[0])
    assert experts_of(own) is None  # its own loop over experts does not use _apply_gate
    own = small_experts()
    own.gate_up_proj = nn.Parameter(own.gate_up_proj.to(torch.float64))
    assert experts_of(own) is None
    own = small_experts()
    del own.down_proj
    assert experts_of(own) is None
    assert experts_of(nn.Linear(2, 2)) is None


def test_no_memory_is_no_other_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    own = small_experts()

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(experts_module, "_first_experts", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        experts_of(own)


@pytest.mark.parametrize("gate", [SILU, GELU_TANH])
@pytest.mark.parametrize("limit", [0.5, 7.0, 50.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_limits_of_a_gate_are_seen(gate: GatedActivation, limit: float, interleaved: bool) -> None:
    """They count for large numbers only: a module that has a limit is asked for such numbers."""
    for own in (replace(gate, limit=limit, interleaved=interleaved), replace(gate, interleaved=interleaved)):
        module = SimpleNamespace(limit=limit, _apply_gate=own)
        assert experts_module._gated_activation(module, torch.device("cpu")) == own
