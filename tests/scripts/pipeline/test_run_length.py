"""A run of epochs that has too few steps for its settings is refused once its data are known: before features."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


@pytest.mark.parametrize("features", ["stored", "memory"])
def test_epochs_with_too_few_steps_make_no_features(
    features: str, recipe: Path, headstart: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [recipe, "data.distill.prompts=[]", f"data.features={features}"]

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("features were made")

    with monkeypatch.context() as patched:
        patched.setattr("headstart.pipeline.features.build_store", never)
        patched.setattr("headstart.pipeline.train.head_and_features", never)
        refused = headstart("train", *words, "train.warmup_steps=1000")
    found = re.search(r"train.warmup_steps: found 1000, expected (\d+) at most: .*\(train.epochs\)", refused.err)
    assert refused.code == 2 and found is not None, refused.err
    assert not (tmp_path / "run" / "features").exists() and not (tmp_path / "run" / "steps").exists()
    # the number is that of the run's steps
    trained = headstart("train", *words, f"train.warmup_steps={found[1]}")
    assert trained.code == 0, trained.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == int(found[1])
    planned = headstart("plan", *words, "train.warmup_steps=1000")
    assert planned.code == 2 and f"expected {found[1]} at most" in planned.err
