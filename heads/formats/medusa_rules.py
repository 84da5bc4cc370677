"""What the engines' rules about Medusa heads share: the counts in config.json and the tensors."""

from __future__ import annotations

from typing import Any

from headstart.heads.checkpoints.geometry import integer
from headstart.heads.families.medusa.files import COUNTS
from headstart.heads.formats.handling import Handling, TensorRule


def medusa_counts(
    config: dict[str, Any], names: tuple[str, str] = ("medusa_num_heads", "medusa_num_layers"), heads: int = 1
) -> tuple[int, int]:
    """How many heads there are, and how many blocks each has.

    Args: names: of the two fields. heads: what the engine takes where the first is missing.
    Raises: FormatError for a value that is no count.
    """
    first, second = names
    where = "config.json"
    return integer(config, first, where, heads, COUNTS), integer(config, second, where, 1, COUNTS)


def block_tensors(heads: int, layers: int, missing: Handling, why: str, biases: bool = True) -> list[TensorRule]:
    """Tensors of the residual blocks; D is the target's width."""
    shapes = {"weight": ("D", "D"), "bias": ("D",)} if biases else {"weight": ("D", "D")}
    return [
        TensorRule(f"blocks.{i}.layers.{j}.{name}", shape, missing, why)
        for name, shape in shapes.items()
        for i in range(heads)
        for j in range(layers)
    ]


def matrix_tensors(count: int, missing: Handling, why: str, rows: str = "V") -> list[TensorRule]:
    """The heads' output matrices. Args: rows: symbol of their number of rows."""
    return [TensorRule(f"lm_heads.{i}.weight", (rows, "D"), missing, why) for i in range(count)]
