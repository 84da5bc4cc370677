"""Drafters: what proposes trees for the target to verify."""

from __future__ import annotations

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters.autoregressive import AutoregressiveDrafter
from headstart.eval.drafters.medusa import MedusaDrafter
from headstart.eval.drafters.ngram import NgramDrafter
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.heads.families.autoregressive import AutoregressiveHead
from headstart.heads.families.medusa.head import MedusaHead

__all__ = ["AutoregressiveDrafter", "Drafter", "MedusaDrafter", "NgramDrafter", "build_drafter"]


def build_drafter(head: Head | None, config: EvalConfig) -> Drafter | None:
    """The drafter that `eval.drafter` and the head ask for; None = plain decoding.

    Raises: ConfigError when the head cannot draft the tree asked for.
    """
    sampling = Sampling.from_config(config)
    if config.drafter == "none" or (config.drafter == "auto" and head is None):
        return None
    if config.drafter == "ngram":
        return NgramDrafter(config.tree.depth, config.ngram_min, config.ngram_max)
    if isinstance(head, AutoregressiveHead):
        return AutoregressiveDrafter(head, config.tree, sampling)
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, config.tree, sampling)
    raise ConfigError(f"eval: no drafter for a head of type {type(head).__name__}; set eval.drafter to ngram or none")
