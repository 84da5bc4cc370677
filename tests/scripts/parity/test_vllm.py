"""Parity gate: how an engine's answers become cycles, and what the gate asks for before it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.eval.decoding.decode import Cycle
from headstart.eval.measuring.metrics import acceptance
from headstart.heads.errors import ConfigError
from headstart.heads.formats.vllm import max_lora_rank
from headstart.parity import engine as parity_engine
from headstart.parity import vllm as parity_vllm
from headstart.parity.heads import require_chain


def answer(committed: list[int], accepted: int, per_position: list[int] | None = None) -> dict[str, Any]:
    counters = {
        "num_drafts": len(committed),
        "num_draft_tokens": 3 * len(committed),
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": per_position or [],
    }
    return {"tokens": [0] * (1 + sum(committed)), "committed": committed, "counters": counters}


def test_every_forward_commits_its_accepted_drafts_and_one_more() -> None:
    found = parity_vllm.engine_cycles(answer([1, 4, 2], 0 + 3 + 1), 3)
    assert found == [Cycle(3, 0, 1), Cycle(3, 3, 4), Cycle(3, 1, 2)]


def test_a_last_forward_that_was_cut_keeps_what_was_kept() -> None:
    # the last forward accepted 3 drafts, of which the limit let 2 through
    assert parity_vllm.engine_cycles(answer([2, 2], 1 + 3), 3)[-1] == Cycle(3, 2, 2)
    # the same length without a cut: one draft and the target's own token
    assert parity_vllm.engine_cycles(answer([2, 2], 1 + 1), 3)[-1] == Cycle(3, 1, 2)


def test_an_answer_of_one_token_has_no_cycles() -> None:
    assert parity_vllm.engine_cycles(answer([], 0), 3) == []


def test_acceptance_of_cycles_and_of_counters() -> None:
    answers = [answer([1, 4], 3, [1, 1, 1]), answer([2, 2], 1 + 3, [2, 1, 1])]
    ours = acceptance(cycle for a in answers for cycle in parity_vllm.engine_cycles(a, 3))
    assert ours.tau == 9 / 4 and ours.per_position == [3 / 4, 2 / 4, 1 / 4]
    raw = parity_vllm.counter_rates(answers)
    assert raw == {"drafts": 4, "tau": 1 + 7 / 4, "per_position": [3 / 4, 2 / 4, 2 / 4]}


def test_counter_deltas_start_from_nothing() -> None:
    assert parity_engine.subtract([3, 1], 0) == [3, 1] and parity_engine.subtract([3, 1], [1, 1]) == [2, 0]
    assert parity_engine.subtract(5, 2) == 3


def test_the_engine_side_needs_nothing_but_the_standard_library_to_be_imported() -> None:
    import ast

    tree = ast.parse(Path(parity_engine.__file__).read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """vLLM's kernel for GPUs: weights [D], or a row of them for each first index of x."""
    weight = weight if weight.dim() == 1 else weight.view(weight.shape[0], *[1] * (x.dim() - 2), -1)
    out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight)


def first_row(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Its kernel for CPUs."""
    rms_norm(out, x, weight.view(-1, weight.shape[-1])[0], eps)


@pytest.mark.parametrize("kernel", [rms_norm, first_row])
def test_context_keys_are_normed_with_the_weights_of_their_layer(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Draft:
        _k_norm_weights = torch.rand(3, 32) + 0.5
        _rms_norm_eps = 1e-6

        def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(all_k)
            kernel(out, all_k, self._k_norm_weights, self._rms_norm_eps)
            return out

    places = {
        "vllm": {"_custom_ops": SimpleNamespace(rms_norm=kernel)},
        "vllm.model_executor": {}, "vllm.model_executor.models": {},
        "vllm.model_executor.models.qwen3_dflash": {"DFlashQwen3Model": Draft},
        "vllm.platforms": {"current_platform": SimpleNamespace(import_kernels=lambda: None)},
    }  # fmt: skip
    for name, held in places.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    said = parity_engine.REPAIRS["dflash"]()
    assert (said is None) is (kernel is rms_norm)
    keys = torch.randn(3, 5, 2, 32)
    expected = torch.empty_like(keys)
    rms_norm(expected, keys, Draft._k_norm_weights, 1e-6)
    torch.testing.assert_close(Draft()._normalize_context_k(keys), expected)


def test_a_chain_that_engines_do_not_draft_is_refused() -> None:
    head: Any = SimpleNamespace(family="medusa", depth=2)
    require_chain(head, 2)
    with pytest.raises(ConfigError, match="--depth: found 3, and engines draft 2 tokens"):
        require_chain(head, 3)


def test_a_row_replaces_the_one_of_the_same_head_and_prompts(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for head, data, tau in (("eagle3", "a", 1), ("medusa", "b", 2), ("medusa", "a", 3), ("eagle3", "a", 4)):
        parity_vllm.update_rows(path, {"head": head, "data": data, "tau_ours": tau})
    rows = json.loads(path.read_text())
    assert [(row["head"], row["data"], row["tau_ours"]) for row in rows] == [
        ("medusa", "a", 3),
        ("eagle3", "a", 4),
        ("medusa", "b", 2),
    ]


def test_a_row_of_a_tuned_target_stands_beside_that_of_the_base(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for target, tau in ((None, 1), ("tuned, merged", 2), ("tuned, merged", 3)):
        row = {"head": "medusa", "data": "a", "tau_ours": tau, **({"target": target} if target else {})}
        parity_vllm.update_rows(path, row)
    assert [(row.get("target"), row["tau_ours"]) for row in json.loads(path.read_text())] == [
        (None, 1),
        ("tuned, merged", 3),
    ]


def test_the_engine_allocates_for_the_rank_of_the_adapter() -> None:
    assert [max_lora_rank(rank) for rank in (1, 4, 8, 9, 32, 200, 512)] == [1, 8, 8, 16, 32, 256, 512]


def test_without_an_engine_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["parity", "--vllm-python", "/nowhere/python"])
    assert parity_vllm.main() == 2
    assert "bash scripts/parity/vllm.sh makes one" in capsys.readouterr().err
