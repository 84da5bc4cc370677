"""Draft heads: one family per file, listed in `HEADS`."""

from __future__ import annotations

from typing import NamedTuple

from headstart.heads.base import Head, HeadConfig, HeadDims
from headstart.heads.eagle import EagleConfig, EagleHead
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.errors import ConfigError
from headstart.heads.medusa import MedusaConfig, MedusaHead


class HeadFamily(NamedTuple):
    """What a registry name stands for."""

    config: type[HeadConfig]
    head: type[Head]


HEADS: dict[str, HeadFamily] = {
    "medusa": HeadFamily(MedusaConfig, MedusaHead),
    "eagle": HeadFamily(EagleConfig, EagleHead),
    "eagle3": HeadFamily(Eagle3Config, Eagle3Head),
}


def build_head(config: HeadConfig, dims: HeadDims) -> Head:
    """Construct the family named by `config.type`; weights are random until `init_from_target`.

    Raises: ConfigError for an unknown family or a configuration the target cannot carry.
    """
    if config.type not in HEADS:
        raise ConfigError(f"head.type: found {config.type!r}, expected one of {sorted(HEADS)}")
    return HEADS[config.type].head(config, dims)
