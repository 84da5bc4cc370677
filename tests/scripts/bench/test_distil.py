"""The benchmark of distillation counts the tokens that are written, and warms up on the same buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.bench.distil import measure, repeated
from headstart.bench.kill_points import small_prompts, small_target
from headstart.data.config import DistillConfig
from headstart.data.distilling.distill import distill
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.eval.decoding.session import Decoder


def test_a_measurement_counts_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []
    engine_for = Decoder.engine_for

    def noted(self: Decoder, *given: int) -> object:
        engines.append(engine_for(self, *given))
        return engines[-1]

    monkeypatch.setattr(Decoder, "engine_for", noted)
    prompts = small_prompts(9)[::3]  # of one question
    config = DistillConfig(max_new_tokens=12, batch_size=4)
    found = measure(EngineAnswerer(small_target(), config), prompts, config, 10, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "batch-4.jsonl").read_text().splitlines()]
    assert len(records) == 10
    turns = [turn for record in records for turn in [*record.get("earlier_turns", []), record]]
    tokens = [len(turn["response_token_ids"]) for turn in turns]
    assert found.answers == len(turns) and found.mean_tokens == sum(tokens) / len(tokens)
    assert found.value == pytest.approx(sum(tokens) / found.seconds)
    assert (found.prompts, found.path, found.dtype, found.batch) == (3, "generic", "float32", 4)
    assert 0 < found.written_s < found.seconds
    assert len(set(map(id, engines))) == 1  # nothing is made anew after the warm-up


def test_an_answer_may_hold_any_separator_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON writes U+2028 and its like as they are: only a line feed ends a record."""

    def with_separators(*given: Any, **named: Any) -> Path:
        out: Path = distill(*given, **named)
        records = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n") if line]
        texts = [json.dumps({**record, "note": "a\u2028b\x85c"}, ensure_ascii=False) for record in records]
        out.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return out

    monkeypatch.setattr("headstart.bench.distil.distill", with_separators)
    config = DistillConfig(max_new_tokens=4, batch_size=2)
    assert measure(EngineAnswerer(small_target(), config), small_prompts(3)[:1], config, 3, tmp_path).answers >= 3


def test_prompts_are_asked_again_under_other_names() -> None:
    prompts = small_prompts(3)
    asked = repeated(prompts, 8)
    assert [prompt.id for prompt in asked[:3]] == ["p0", "p1", "p2"] and len({prompt.id for prompt in asked}) == 8
    assert [prompt.first for prompt in asked] == [prompts[n % 3].first for n in range(8)]
