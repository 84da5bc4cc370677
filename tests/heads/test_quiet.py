"""Bars of other libraries are off where Headstart shows its own, and on again afterwards."""

from __future__ import annotations

import importlib

import pytest

from headstart.heads.quiet import SWITCHES, without_bars

BARS = {
    "huggingface_hub": "huggingface_hub.utils",
    "transformers": "transformers.utils.logging",
    "datasets": "datasets.utils.tqdm",
}


def drawn(library: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether a bar of this library shows itself."""
    capsys.readouterr()
    for _ in importlib.import_module(BARS[library]).tqdm(range(3), desc="THEIRS"):
        pass
    return "THEIRS" in capsys.readouterr().err


def test_bars_are_off_inside_and_on_again_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    names = list(SWITCHES)
    assert [drawn(name, capsys) for name in names] == [True, True, True]
    with without_bars(names):
        assert [drawn(name, capsys) for name in names] == [False, False, False]
    assert [drawn(name, capsys) for name in names] == [True, True, True]
    with without_bars(["datasets", "nothing of this name"]):
        assert [drawn(name, capsys) for name in names] == [True, True, False]


def test_bars_that_a_user_turned_off_stay_off(capsys: pytest.CaptureFixture[str]) -> None:
    hub = importlib.import_module(SWITCHES["huggingface_hub"])
    hub.disable_progress_bars()
    try:
        with without_bars(["transformers"]):
            assert not drawn("transformers", capsys)
        assert not drawn("huggingface_hub", capsys) and drawn("transformers", capsys)
    finally:
        hub.enable_progress_bars()
