"""The kinds of layers of configs that name none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headstart.eval.decoding.memory import layer_kinds


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"sliding_window": 7}, "sliding_attention"),
        ({"sliding_window": 7, "use_sliding_window": True}, "sliding_attention"),
        ({"sliding_window": 7, "use_sliding_window": False}, "full_attention"),
        ({"sliding_window": None}, "full_attention"),
        ({"layer_types": None}, "full_attention"),
    ],
)
def test_a_window_that_all_layers_share(given: dict[str, Any], kind: str) -> None:
    assert layer_kinds(SimpleNamespace(num_hidden_layers=3, **given)) == [kind] * 3
