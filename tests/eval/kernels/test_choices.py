"""What runs fastest is measured once per card, versions and sizes; nothing else is taken for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headstart.eval.kernels.choices import Choices
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.ways import CANDIDATES, MANY_CANDIDATES, Measured

CARD = {"card": "Some GPU", "torch": "2.11", "triton": "3.6", "kernels": "abc"}
FAST, SLOW = CANDIDATES[1], None
MANY = MANY_CANDIDATES[1]


def products(dtype: torch.dtype = torch.bfloat16) -> list[list[Linear]]:
    """Two layers' worth of two products."""
    up = [Linear(torch.zeros(128, 64, dtype=dtype), activation="silu") for _ in range(2)]
    return [up, [Linear(torch.zeros(64, 64, dtype=dtype), residual=True) for _ in range(2)]]


def chosen(choices: Choices, rows: int = 6) -> list[list[Linear]]:
    groups = products()
    found = [Measured(groups[0], {FAST: 2.0, SLOW: 3.0}), Measured(groups[1], {FAST: 4.0, SLOW: 1.0})]
    for measured in found:
        measured.choose(rows, measured.close[0])
    choices.keep(found, rows, 8 << 20, "heads")
    return groups


def test_a_second_run_takes_what_the_first_chose(tmp_path: Path) -> None:
    choices = Choices(tmp_path, CARD)
    chosen(choices)
    groups = products()
    kept = choices.read(groups, 6, "heads")
    assert kept is not None and kept.hidden_bytes == 8 << 20
    assert kept.microseconds == {"128×64 silu": 2.0, "64×64": 1.0}
    assert [linear.tiles for group in groups for linear in group] == [{16: FAST}, {16: FAST}, {16: SLOW}, {16: SLOW}]


def test_more_rows_than_a_tile_are_a_choice_of_their_own(tmp_path: Path) -> None:
    """A file of few rows says nothing of many: those are measured, and kept beside it."""
    choices = Choices(tmp_path, CARD)
    chosen(choices, 64)
    groups = products()
    assert choices.read(groups, 96, "heads") is None and not groups[0][0].tiles
    measured = [Measured(groups[0], {MANY: 2.0, None: 3.0}), Measured(groups[1], {MANY: 4.0, None: 1.0})]
    for each in measured:
        each.choose(96, each.close[0])
    choices.keep(measured, 96, 0, "heads")
    again = products()
    assert choices.read(again, 64, "heads") is not None and choices.read(again, 96, "heads") is not None
    assert again[0][0].tiles == {64: FAST, 128: MANY} and again[1][0].tiles == {64: SLOW, 128: None}


def test_another_card_size_row_count_or_model_is_measured(tmp_path: Path) -> None:
    chosen(Choices(tmp_path, CARD))
    wider = products()
    wider[0][0].weight_NK = torch.zeros(256, 64, dtype=torch.bfloat16)
    for found in (
        Choices(tmp_path, CARD | {"kernels": "other"}).read(products(), 6, "heads"),
        Choices(tmp_path, CARD | {"card": "Other GPU"}).read(products(), 6, "heads"),
        Choices(tmp_path, CARD, fresh=True).read(products(), 6, "heads"),
        Choices(tmp_path, CARD).read(products(), 4, "heads"),
        Choices(tmp_path, CARD).read(products(), 6, "more heads"),
        Choices(tmp_path, CARD).read(products(torch.float16), 6, "heads"),
        Choices(tmp_path, CARD).read(wider, 6, "heads"),
        Choices(tmp_path, CARD).read(products()[:1], 6, "heads"),
    ):
        assert found is None


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"products": 5, "hidden_bytes": 0}', "cut", "tiles", "number", "endless"]
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, damage: str) -> None:
    choices = Choices(tmp_path, CARD)
    chosen(choices)
    (path,) = tmp_path.iterdir()
    value = json.loads(path.read_text())
    if damage == "cut":
        value["products"].pop()
    if damage == "tiles":
        value["products"][0]["way"]["outputs"] = 7
    if damage == "number":
        value["products"][1]["microseconds"] = "fast"
    if damage == "endless":
        value["hidden_bytes"] = float("inf")
    path.write_text(damage if damage[0] in "{[" else json.dumps(value))
    groups = products()
    assert choices.read(groups, 6, "heads") is None
    assert all(not linear.tiles for group in groups for linear in group)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the next run measures again"):
        chosen(Choices(tmp_path / "file" / "kernels", CARD))


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's account that the system does not know."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.delenv("HEADSTART_CACHE", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match="HEADSTART_CACHE: .* set it, or HOME"):
        assert Choices.of(torch.device("cuda")) is None
    monkeypatch.setenv("HEADSTART_CACHE", "somewhere")
    found = Choices.of(torch.device("cuda"))
    assert found is not None and found.folder == Path("somewhere/kernels/Some-GPU")
