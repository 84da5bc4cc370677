"""Files that hold each expert of a mixture by itself, read as the stacks that the model computes with.

transformers' table of conversions says which tensors of the files make which parameter. Two kinds of its lines are
followed: experts stacked along the first dimension, and gate and up rows of each expert after one another. What the
files hold in another way keeps its names, and is refused where names are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.targets.sharded import Weights

#: the operations of conversions that are followed, with their dimensions
FOLLOWED = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


class StackedExperts:
    """Files under the names of the model.

    Args:
        files: as they are.
        model: on any device; its names, shapes and type count.
    """

    def __init__(self, files: Weights, model: nn.Module):
        self.files = files
        self.directory: Path = files.directory
        self.file_of: dict[str, str] = dict(files.file_of)
        #: parameter → for each expert, the tensors whose rows follow one another; and the rows of each of these
        self.parts: dict[str, tuple[list[list[str]], int]] = {}
        lines = _stacking(model)
        for name, parameter in model.named_parameters() if lines else ():
            if name in files.file_of:
                continue
            for ending, sources in lines:
                stem = name.removesuffix(ending)
                parts = [[stem + source.replace("*", str(n)) for source in sources] for n in range(parameter.shape[0])]
                if stem != name and all(part in files.file_of for expert in parts for part in expert):
                    self.parts[name] = parts, parameter.shape[1] // len(sources)
                    self.file_of[name] = files.file_of[parts[0][0]]
                    for part in sum(parts, []):
                        self.file_of.pop(part, None)
                    break

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first … last - 1 of a parameter: of a stack, these experts."""
        if name not in self.parts:
            return self.files.rows(name, first, last)
        experts, count = self.parts[name]
        return torch.stack(
            [torch.cat([self.files.rows(part, 0, count) for part in expert]) for expert in experts[first:last]]
        )


def _stacking(model: Any) -> list[tuple[str, list[str]]]:
    """How the parameters of this type of model that are stacks end → names of one expert's parts, * = its number."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    lines = []
    for line in get_checkpoint_conversion_mapping(model.config.get_text_config().model_type) or []:
        done = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(line, "operations", None) or []]
        if done in FOLLOWED and len(line.target_patterns) == 1:
            lines.append((line.target_patterns[0], list(line.source_patterns)))
    return lines
