"""Prompts are read before the target's weights are: what is wrong with them costs nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headstart.data.config import DataConfig, DistillConfig, ServerConfig, SourceConfig
from headstart.heads.errors import DataError
from headstart.pipeline.distill import distill


def run_of(path: Path, said: list[str], **settings: Any) -> Any:
    """A run that has no target: whoever asks for it fails."""
    config = DistillConfig(prompts=[SourceConfig(path=str(path))], **settings)
    recipe = SimpleNamespace(data=DataConfig(distill=config), seed=0)

    def do(name: str, inputs: Any, outputs: Any, work: Any, **more: Any) -> Any:
        return work(lambda: None)

    markers, inputs = SimpleNamespace(do=do), SimpleNamespace(distill={})
    out, console = path.parent / "distilled.jsonl", SimpleNamespace(say=said.append)
    places = {"distilled_path": out, "written_path": path.parent / "written.jsonl"}
    return cast(Any, SimpleNamespace(recipe=recipe, markers=markers, inputs=inputs, console=console, **places))


@pytest.mark.parametrize("settings", [{}, {"servers": [ServerConfig("http://127.0.0.1:1")]}])
def test_bad_prompts_are_told_before_the_target_loads(tmp_path: Path, settings: dict[str, Any]):
    path, said = tmp_path / "a.jsonl", list[str]()
    path.write_text('{"prompt": "Hi"}\n{"promt": "Hi"}\n')
    with pytest.raises(DataError, match="a.jsonl:2: found fields 'promt'.*on_bad: skip"):
        distill(run_of(path, said, **settings))
    path.write_text("\n")
    with pytest.raises(DataError, match="data.distill.prompts: found no prompts, expected at least one: check"):
        distill(run_of(path, said, **settings))
    assert said == [f"distill: {path}: found no records, expected at least one: is this the right source?"]
    path.write_text('{"prompt": "Hi"}\n')
    with pytest.raises(AttributeError):  # the target comes next
        distill(run_of(path, said, **settings))
