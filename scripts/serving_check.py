"""Compares, token by token, the features that serving sees with those that training saw.

Where they differ, the head drafts worse than it was trained to. Training reads features from one causal pass over whole
documents. The decode loop reads them from chunked prefill, tree verification and KV compaction. `compare_features` runs
both over the same tokens. The decode loop gets the first part of a sequence as its prompt. It verifies the rest as the
accepted path of trees, whose other nodes are rejected.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.rows import Rows
from headstart.eval.tree import Tree, chain
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import TargetError
from headstart.heads.numerics import row_errors
from headstart.heads.targets.target import Target

#: largest error of a row, relative to the row's norm, that rounding explains
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.03}
#: the same for the median row: rounding spoils a few rows, a fault (another layer, another position) shifts them all
MEDIAN_TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True)
class FeatureParity:
    """Result of a comparison.

    Attributes:
        rows: tokens compared.
        worst: largest relative error of a row over all features (hidden and streams).
        median: median over the rows of each row's largest error.
        tolerance: largest `worst` that passes.
        median_tolerance: largest `median` that passes.
        where: "sequence s, token t, feature" of the worst row.
    """

    rows: int
    worst: float
    median: float
    tolerance: float
    median_tolerance: float
    where: str

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance and self.median <= self.median_tolerance

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def compare_features(
    target: Target,
    spec: FeatureSpec,
    sequences: list[list[int]],
    levels: int = 3,
    fused: FusedModel | None = None,
) -> FeatureParity:
    """Compute the features of `sequences` both ways and compare them.

    Args:
        spec: the head's (`head.spec`).
        sequences: token ids, each of at least 4.
        levels: depth of the verified trees.
        fused: the target's fused form, which then decodes; None = transformers' own forward does.
    """
    errors: list[tuple[float, str]] = []
    per_row: list[float] = []
    for number, tokens in enumerate(sequences):
        trained = _training_features(target, spec, tokens)
        served = _serving_features(target, spec, tokens, levels, fused)
        errors_T = {name: row_errors(served[name], trained[name][: len(served[name])]) for name in trained}
        for name, error_T in errors_T.items():
            place = int(error_T.argmax())
            errors.append((float(error_T[place]), f"sequence {number}, token {place}, {name}"))
        per_row += torch.stack(list(errors_T.values())).amax(0).tolist()
    worst, where = max(errors)
    median = float(torch.tensor(per_row).median())
    allowed = TOLERANCES.get(target.dtype, 2e-3), MEDIAN_TOLERANCES.get(target.dtype, 2e-4)
    return FeatureParity(len(per_row), worst, median, *allowed, where)


def probe_sequences(target: Target, count: int = 2, length: int = 96) -> list[list[int]]:
    """Token ids to compare features on where there is no text: drawn uniformly, the same at every call."""
    length = min(length, target.positions - 8)
    draws = torch.randint(target.dims.vocab_size, (count, length), generator=torch.Generator().manual_seed(0))
    return draws.tolist()


def require_parity(parity: FeatureParity, force: bool = False) -> None:
    """Raises: TargetError when the features differ, unless `force`."""
    if not parity.passed and not force:
        raise TargetError(
            f"the decode loop's features differ from those the head was trained on: relative {parity.worst:.3g} at "
            f"{parity.where}, rounding explains {parity.tolerance:g}; {parity.median:.3g} in the median row, rounding "
            f"explains {parity.median_tolerance:g}. The head would be accepted less often than in training: check the "
            "target's attention implementation and dtype, or set export.force=true to export all the same"
        )


def _names(spec: FeatureSpec) -> list[str]:
    return ["hidden", *(f"hidden_states[{k}]" for k in spec.layer_ids)]


def _named(spec: FeatureSpec, hidden_TD: Tensor, streams_TkD: Tensor | None) -> dict[str, Tensor]:
    parts = [hidden_TD, *(streams_TkD.unbind(1) if streams_TkD is not None else ())]
    return dict(zip(_names(spec), parts, strict=True))


def _training_features(target: Target, spec: FeatureSpec, tokens: list[int]) -> dict[str, Tensor]:
    ids = torch.tensor(tokens)
    batch = target.extract(FeatureBatch.pack([(ids, torch.zeros_like(ids))], 1), spec)
    if batch.hidden_RD is None:
        raise TargetError("the target gave no hidden states")
    return _named(spec, batch.hidden_RD, batch.streams_RkD)


@torch.inference_mode()
def _serving_features(
    target: Target, spec: FeatureSpec, tokens: list[int], levels: int, fused: FusedModel | None
) -> dict[str, Tensor]:
    """The features of the decode loop: of all tokens but the last few, which do not fill a tree."""
    slots, chunk = len(tokens) + 4 * (levels + 1), max(len(tokens) // 3, 1)
    engine = Engine(target.model, 1, slots, prefill_chunk=chunk, fused=fused)
    start = max(len(tokens) // 2, 1)
    _, rows = engine.prefill([tokens[:start]], spec)
    parts = [_valid(spec, rows)]
    active_B = torch.ones(1, dtype=torch.bool, device=target.device)
    step_K = torch.arange(levels, device=target.device)
    path_BK = (step_K if engine.chains_only else 2 * step_K + 1)[None]
    while start + levels < len(tokens):
        root_B = torch.tensor([tokens[start]], device=target.device)
        path = tokens[start + 1 : start + 1 + levels]
        tree = chain(torch.tensor([path], device=target.device)) if engine.chains_only else _accepted_path(path, target)
        step = engine.verify(root_B, tree, spec, start)
        parts.append(_valid(spec, engine.commit(root_B, tree, step, path_BK, active_B)))
        start += levels + 1
    return {name: torch.cat([part[name] for part in parts]) for name in _names(spec)}


def _valid(spec: FeatureSpec, rows: Rows) -> dict[str, Tensor]:
    count = int(rows.count_B[0])
    if rows.hidden_BJD is None:
        raise TargetError("the engine gave no hidden states")
    return _named(spec, rows.hidden_BJD[0, :count], None if rows.streams_BJkD is None else rows.streams_BJkD[0, :count])


def _accepted_path(path: list[int], target: Target) -> Tree:
    """A tree whose odd nodes are the accepted path and whose even nodes are siblings that get rejected."""
    levels = len(path)
    wrong = [(token + 1) % target.dims.vocab_size for token in path]
    nodes = [token for pair in zip(wrong, path, strict=True) for token in pair]
    parents = [-1 if n < 2 else 2 * (n // 2) - 1 for n in range(2 * levels)]
    depths = [n // 2 + 1 for n in range(2 * levels)]
    tokens_BN, parent_BN, depth_BN = (torch.tensor([v], device=target.device) for v in (nodes, parents, depths))
    return Tree(tokens_BN, parent_BN, depth_BN, torch.ones_like(tokens_BN, dtype=torch.bool), levels)


