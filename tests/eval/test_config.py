"""What identifies an evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.eval.config import EvalConfig, check_config, identity_of
from headstart.heads.errors import ConfigError


def test_settings_that_earlier_versions_lacked_do_not_repeat_their_evaluations() -> None:
    greedy = identity_of(EvalConfig())
    assert not {"refill", "scheduler", "verification"} & greedy.keys() and greedy["prefill_chunk"] == 512
    assert identity_of(EvalConfig(refill=False)) == greedy
    # the rule of verification decides what a sampled chain accepts; token by token was the only one
    assert identity_of(EvalConfig(temperature=1.0))["verification"] == "block"
    assert "verification" not in identity_of(EvalConfig(temperature=1.0, verification="token"))
    # a scheduler changes what is drafted
    assert identity_of(EvalConfig(scheduler=True)) == {**greedy, "scheduler": True}


@pytest.mark.parametrize("value", ["off", "on", 1])
def test_a_scheduler_is_on_or_off(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"eval\.scheduler: found {value!r}, expected true \(on\) or false \(off\)"):
        check_config(EvalConfig(scheduler=value))
