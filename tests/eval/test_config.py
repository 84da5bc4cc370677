"""What identifies an evaluation."""

from __future__ import annotations

from headstart.eval.config import EvalConfig, identity_of


def test_settings_that_earlier_versions_lacked_do_not_repeat_their_evaluations() -> None:
    greedy = identity_of(EvalConfig())
    assert not {"refill", "verification"} & greedy.keys() and greedy["prefill_chunk"] == 512
    assert identity_of(EvalConfig(refill=False)) == greedy
    # the rule of verification decides what a sampled chain accepts; token by token was the only one
    assert identity_of(EvalConfig(temperature=1.0))["verification"] == "block"
    assert "verification" not in identity_of(EvalConfig(temperature=1.0, verification="token"))
