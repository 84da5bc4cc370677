"""Draft heads: one family per folder, listed in `FAMILIES`."""

from __future__ import annotations

from typing import NamedTuple

from headstart.heads.base import Head, HeadConfig
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families.eagle.head import EagleConfig, EagleHead
from headstart.heads.families.eagle3.head import Eagle3Config, Eagle3Head
from headstart.heads.families.medusa.head import MedusaConfig, MedusaHead


class Family(NamedTuple):
    """One drafting method.

    Attributes:
        name: `head.type` of a recipe. paper: where the method is published.
        config: the recipe's node `head`. head: the module.
    """

    name: str
    paper: str
    config: type[HeadConfig]
    head: type[Head]


FAMILIES: dict[str, Family] = {
    "medusa": Family("medusa", "arXiv 2401.10774", MedusaConfig, MedusaHead),
    "eagle": Family("eagle", "arXiv 2401.15077", EagleConfig, EagleHead),
    "eagle3": Family("eagle3", "arXiv 2503.01840", Eagle3Config, Eagle3Head),
}


def build_head(config: HeadConfig, dims: HeadDims) -> Head:
    """Construct the family named by `config.type`; weights are random until `initialise`.

    Raises: ConfigError for an unknown family or a configuration the target cannot carry.
    """
    if config.type not in FAMILIES:
        raise ConfigError(f"head.type: found {config.type!r}, expected one of {sorted(FAMILIES)}")
    return FAMILIES[config.type].head(config, dims)
