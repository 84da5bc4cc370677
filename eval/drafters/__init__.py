"""Drafters propose trees for the target to verify. `DRAFTERS` lists them by head family or training-free method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters.autoregressive import AutoregressiveDrafter
from headstart.eval.drafters.block import BlockDrafter, block_everywhere
from headstart.eval.drafters.everywhere import autoregressive_everywhere, medusa_everywhere, parallel_everywhere
from headstart.eval.drafters.hydra import HydraDrafter, hydra_everywhere
from headstart.eval.drafters.medusa import MedusaDrafter
from headstart.eval.drafters.ngram import NgramDrafter
from headstart.eval.drafters.parallel import ParallelDrafter
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError

__all__ = ["DRAFTERS", "Drafter", "Drafting", "build_drafter", "find_drafting"]


@dataclass(frozen=True)
class Drafting:
    """How a head family drafts, or a method that needs no head.

    Attributes:
        kinds: kinds of trees that it drafts (`eval.tree.kind`).
        build: (head bound to its target, eval config) → drafter. A method without a head gets None.
        draft_everywhere: (head, tokens_BT, hidden_BTD, streams_BTkD or None, row_BA, depth) → int64 [B, A, ≤ depth],
            the greedy drafts after many rows of known texts at once. None = it can only draft in the decode loop.
        shared_candidates: whether all nodes of one depth of a static tree choose from one list of candidates, whatever
            was drafted before them. `headstart tune` then learns every rank from one path.
        captures: as `Drafter.captures`.
    """

    kinds: tuple[str, ...]
    build: Callable[[Any, EvalConfig], Drafter]
    draft_everywhere: Callable[[Any, Tensor, Tensor, Tensor | None, Tensor, int], Tensor] | None = None
    shared_candidates: bool = False
    captures: bool = True


AUTOREGRESSIVE = Drafting(
    ("chain", "dynamic"),
    lambda head, config: AutoregressiveDrafter(head, config.tree, Sampling.from_config(config)),
    autoregressive_everywhere,
)

BLOCK = Drafting(
    ("chain",),
    lambda head, config: BlockDrafter(head, config.tree, Sampling.from_config(config)),
    block_everywhere,
)

#: block heads none of whose drafts depends on the ones before it
BLOCK_MARGINALS = replace(BLOCK, kinds=("chain", "ddtree"))

#: head family, or method without a head → how it drafts
DRAFTERS: dict[str, Drafting] = {
    "medusa": Drafting(
        ("chain", "static", "ddtree"),
        lambda head, config: MedusaDrafter(head, config.tree, Sampling.from_config(config)),
        medusa_everywhere,
        shared_candidates=True,
    ),
    "hydra": Drafting(
        ("chain", "static", "dynamic"),
        lambda head, config: HydraDrafter(head, config.tree, Sampling.from_config(config)),
        hydra_everywhere,
    ),
    "eagle": AUTOREGRESSIVE,
    "eagle3": AUTOREGRESSIVE,
    "dflash": BLOCK_MARGINALS,
    "dspark": BLOCK,
    "dflash2": BLOCK,
    "domino": BLOCK,
    "jetspec": BLOCK_MARGINALS,
    "peagle": Drafting(
        ("chain", "ddtree"),
        lambda head, config: ParallelDrafter(head, config.tree, Sampling.from_config(config)),
        parallel_everywhere,
    ),
    "ngram": Drafting(
        ("chain",),
        lambda head, config: NgramDrafter(config.tree.depth, config.ngram_min, config.ngram_max),
        captures=NgramDrafter.captures,
    ),
}


def find_drafting(head: Head | None, config: EvalConfig) -> Drafting | None:
    """The entry of DRAFTERS that `eval.drafter` and the head ask for; None = plain decoding.

    Raises: ConfigError for a head that no drafter is known for.
    """
    if config.drafter not in ("auto", "none"):
        return DRAFTERS[config.drafter]
    if config.drafter == "none" or head is None:
        return None
    if head.family not in DRAFTERS:
        raise ConfigError(
            f"eval: no drafter for a head of the family {head.family}, expected one of {sorted(DRAFTERS)}; set "
            "eval.drafter to ngram or none"
        )
    return DRAFTERS[head.family]


def build_drafter(head: Head | None, config: EvalConfig) -> Drafter | None:
    """The drafter that `eval.drafter` and the head ask for; None = plain decoding.

    Args: head: bound to its target.
    Raises: ConfigError when the head cannot draft the tree asked for.
    """
    drafting = require_drafting(head, config)
    return None if drafting is None else drafting.build(head, config)


def require_drafting(head: Head | None, config: EvalConfig) -> Drafting | None:
    """As `find_drafting`, for the tree that the config asks for. The head may be on the meta device.

    Raises: ConfigError when the head cannot draft it, and as `require_schedulable`.
    """
    drafting = find_drafting(head, config)
    require_schedulable(config, None if drafting is None else drafting.captures)
    if drafting is None or head is None or config.drafter != "auto":
        return drafting  # a method without a head drafts a chain, whatever eval.tree.kind says
    if config.tree.kind not in drafting.kinds:
        chain, *trees = (kind if kind in ("chain", "ddtree") else f"{kind} tree" for kind in drafting.kinds)
        raise ConfigError(
            f"eval.tree.kind: {head.family} drafts a {chain}{''.join(f' or a {tree}' for tree in trees)}, found "
            f"{config.tree.kind!r}: set eval.tree.kind={chain}"
        )
    return drafting


def require_schedulable(config: EvalConfig, captures: bool | None) -> None:
    """Whether there is something for `eval.scheduler` to choose from.

    Args: captures: `Drafter.captures`; None where nothing drafts.
    Raises: ConfigError where the scheduler is on, and nothing drafts or drafting cannot be captured.
    """
    if config.scheduler and not captures:
        found = "but nothing drafts" if captures is None else "but the host drafts, whose cycles cannot be captured"
        raise ConfigError(
            f"eval.scheduler: found true, {found} (eval.drafter={config.drafter}); expected a head that drafts: give "
            "one with eval.drafter=auto, or set eval.scheduler=false"
        )
