"""The families that the contract suites run over: those of the house, and one that exists for the suites alone."""

from __future__ import annotations

import pytest

from headstart.eval.drafters import DRAFTERS
from headstart.heads.families import FAMILIES
from reference import block
from reference.families import REFERENCES, Reference

#: family → its reference; a family of the house without one is a KeyError here
CONTRACT: dict[str, Reference] = {family: REFERENCES[family] for family in FAMILIES} | {"block": block.REFERENCE}


@pytest.fixture(autouse=True)
def families_of_the_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the other family while a test of a contract suite runs (such a module imports this fixture)."""
    monkeypatch.setitem(FAMILIES, "block", block.FAMILY)
    monkeypatch.setitem(DRAFTERS, "block", block.DRAFTING)
