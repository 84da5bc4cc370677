"""Draft heads: one family per file, listed in `HEADS`."""

from __future__ import annotations

from typing import NamedTuple

from headstart.heads.base import Head, HeadConfig
from headstart.heads.eagle import EagleConfig, EagleHead
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
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
