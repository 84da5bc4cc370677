"""Keeps on disk which kernels run fastest on a card: measuring takes longer than many an evaluation.

There is a file for each card, versions, kernels' source, sizes of the products and number of rows:
`~/.cache/headstart/kernels/CARD/….json` ($HEADSTART_CACHE moves it). A damaged file is ignored and written anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headstart.eval.kernels.linear import Linear, Tiles
from headstart.eval.kernels.ways import Measured, candidates, choose_ways, compile_candidates, undecided
from headstart.heads.errors import HeadstartError
from headstart.heads.files import is_file, read_json, write_json
from headstart.heads.targets.fetch import cache_folder

#: files below eval/ whose code decides what is fastest
SOURCES = (
    "decoding/fused/model.py", "decoding/fused/layers.py", "decoding/fused/mlp.py", "kernels/attention.py",
    "kernels/launch.py", "kernels/linear.py", "kernels/linear_kernels.py", "kernels/norm.py", "kernels/rope_store.py",
    "kernels/ways.py",
)  # fmt: skip
UNKEPT = "which kernels run fastest is not kept, and the next run measures again: {}"


@dataclass(frozen=True)
class Kept:
    """A choice: microseconds by product, and the bytes of weights that attention fetches ahead (0 in drafts)."""

    microseconds: dict[str, float]
    hidden_bytes: int


@dataclass(frozen=True)
class Choices:
    """The choices of one card.

    Attributes:
        folder: of their files.
        card: what they depend on besides the products: the card's name, versions, the kernels' source.
        fresh: ignore what is kept: measure everything again, and write it.
    """

    folder: Path
    card: dict[str, str]
    fresh: bool = False

    @classmethod
    def of(cls, device: torch.device, folder: Path | None = None, fresh: bool = False) -> Choices | None:
        """The choices of `device`, a GPU; None, with a warning, where there is no place to keep them.

        Args: folder: None = `kernels` in Headstart's cache.
        """
        import triton

        try:
            folder = folder or cache_folder("kernels")
        except HeadstartError as error:
            warnings.warn(UNKEPT.format(error), stacklevel=2)
            return None
        name = torch.cuda.get_device_name(device)
        source = hashlib.sha256(b"".join((Path(__file__).parents[1] / file).read_bytes() for file in SOURCES))
        versions = {"torch": torch.__version__, "triton": triton.__version__, "kernels": source.hexdigest()[:16]}
        return cls(folder / re.sub(r"\W+", "-", name), {"card": name, **versions}, fresh)

    def read(self, groups: list[list[Linear]], rows: int, about: str = "") -> Kept | None:
        """Let the products run as an earlier run chose, and return its choice; None, with nothing set, without one.

        Args:
            groups: products, those of one shape together.
            about: what else the choice depends on.
        """
        path = self._path(groups, rows, about)
        if self.fresh or not is_file(path):
            return None
        try:
            value = read_json(path)
            ways = [None if (way := product["way"]) is None else Tiles(**way) for product in value["products"]]
            times = {str(product["product"]): float(product["microseconds"]) for product in value["products"]}
            kept = Kept(times, int(value["hidden_bytes"]))
        except (HeadstartError, OSError, KeyError, TypeError, ValueError, OverflowError):
            return None
        if len(ways) != len(groups) or any(
            way not in candidates(members[0], rows) for way, members in zip(ways, groups, strict=True)
        ):
            return None
        for way, members in zip(ways, groups, strict=True):
            Measured(members, {}).choose(rows, way)
        return kept

    def keep(self, chosen: list[Measured], rows: int, hidden_bytes: int = 0, about: str = "") -> None:
        """Write down what was chosen. Warns where the folder cannot be written: the next run measures again."""
        products = [
            {
                "product": measured.name(),
                "way": None if (way := measured.chosen(rows)) is None else asdict(way),
                "microseconds": round(measured.times[way], 3),
            }
            for measured in chosen
        ]
        value = {**self.card, "rows": rows, "about": about, "hidden_bytes": hidden_bytes, "products": products}
        try:
            write_json(self._path([measured.linears for measured in chosen], rows, about), value)
        except (HeadstartError, OSError) as error:
            warnings.warn(UNKEPT.format(error), stacklevel=2)

    def _path(self, groups: list[list[Linear]], rows: int, about: str) -> Path:
        sizes = [[*map(str, members[0].product), str(members[0].weight_NK.dtype), len(members)] for members in groups]
        key = json.dumps([self.card, rows, about, sizes], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def compile_ways(linears: list[Linear], rows: int, choices: Choices | None, about: str = "") -> Kept | None:
    """Compile what `decide_ways` will measure. If an earlier run chose, set and return its choice instead."""
    groups = undecided(linears, rows)
    if not groups:
        return None
    kept = None if choices is None else choices.read(groups, rows, about)
    if kept is None:
        compile_candidates(groups, rows)
    return kept


def decide_ways(
    linears: list[Linear],
    rows: int,
    choices: Choices | None,
    about: str = "",
    settle: Callable[[list[Measured], int], int] | None = None,
) -> Kept | None:
    """Choose how products of `rows` rows run: as an earlier run chose, or else by measuring (CUDA only).

    Args:
        choices: where a measured choice is kept; None keeps nothing.
        about: what else the choice depends on.
        settle: called with what was measured, and `rows`. It times the fastest ways once more inside the model,
            chooses among them, and returns the bytes that attention fetches ahead.
    Returns: what was chosen; None where all products had a way already.
    """
    groups = undecided(linears, rows)
    if not groups:
        return None
    kept = None if choices is None else choices.read(groups, rows, about)
    if kept is not None:
        return kept
    measured = choose_ways(linears, rows)
    hidden_bytes = 0 if settle is None else settle(measured, rows)
    if choices is not None:
        choices.keep(measured, rows, hidden_bytes, about)
    return Kept({each.name(): each.times[each.chosen(rows)] for each in measured}, hidden_bytes)
