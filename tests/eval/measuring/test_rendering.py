"""What is shown of a report, and what is said while it is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_compare import report

from headstart.eval.measuring.rendering import render_saved


def test_the_first_plot_on_a_machine_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib lists the fonts at its first import, for about ten seconds."""
    cache, said = tmp_path / "cache", list[str]()
    monkeypatch.setattr("matplotlib.get_cachedir", lambda: str(cache))
    path = report().save(tmp_path)
    assert render_saved(path, said.append) and len(said) == 1 and "lists this machine's fonts" in said[0]
    cache.mkdir()
    (cache / "fontlist-v390.json").touch()
    assert render_saved(path, said.append) and len(said) == 1
