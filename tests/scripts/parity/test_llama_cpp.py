"""Parity gate with llama.cpp: its counters, and how they become a row."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from headstart.eval.decoding.decode import Cycle
from headstart.parity import llama_cpp as parity_llama_cpp

METRICS = """# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_draft_tokens_total 11
llamacpp:spec_decode_num_accepted_tokens_total 4
llamacpp:spec_decode_num_drafts_total 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1
"""


def test_counters_are_read_from_the_metrics() -> None:
    assert parity_llama_cpp.read_counters(METRICS) == {
        "drafts": 4, "draft_tokens": 11, "accepted": 4, "per_position": [3, 1],
    }  # fmt: skip
    assert parity_llama_cpp.read_counters("")["drafts"] == 0


def test_a_plain_forward_at_the_limit_counts_as_a_cycle() -> None:
    # 10 tokens: the first from the prompt, 4 drafts with 4 accepted make 8, one more without a draft
    cycles = [Cycle(3, 1, 2), Cycle(3, 2, 3), Cycle(3, 1, 2), Cycle(3, 0, 1), Cycle(3, 0, 1)]
    counted = parity_llama_cpp.read_counters(METRICS)
    row = parity_llama_cpp.row([list(range(10))], cycles, [list(range(10))], counted)
    assert (row["tau_ours"], row["tau_engine"], row["plain_forwards"]) == (9 / 5, 9 / 5, 1)
    assert row["per_position_engine"] == [3 / 5, 1 / 5] and row["passed"]


def test_other_tokens_or_other_acceptance_do_not_pass() -> None:
    cycles = [Cycle(3, 1, 2), Cycle(3, 2, 3), Cycle(3, 1, 2), Cycle(3, 0, 1), Cycle(3, 0, 1)]
    counted = parity_llama_cpp.read_counters(METRICS)
    other = parity_llama_cpp.row([list(range(10))], cycles, [[*range(9), 77]], counted)
    assert not other["passed"] and other["identical_sequences"] == 0
    fewer = parity_llama_cpp.row([list(range(10))], cycles, [list(range(10))], {**counted, "accepted": 2})
    assert not fewer["passed"] and fewer["outputs_equal"]


def test_without_an_engine_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("PARITY_LLAMA_CPP", raising=False)
    monkeypatch.setattr(sys, "argv", ["parity"])
    assert parity_llama_cpp.main() == 2
    assert "bash scripts/parity/llama_cpp.sh makes one" in capsys.readouterr().err
