"""Draft heads: one folder per family (`head.py`: what it computes; `files.py`: its files), all listed in `FAMILIES`."""

from __future__ import annotations

from typing import NamedTuple

from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.head_files import HeadFiles
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError
from headstart.heads.families.dflash.files import PAPER as DFLASH
from headstart.heads.families.dflash.files import DFlashFiles
from headstart.heads.families.dflash.head import DFlashConfig, DFlashHead
from headstart.heads.families.dflash2.files import PAPER as DFLASH2
from headstart.heads.families.dflash2.files import DFlash2Files
from headstart.heads.families.dflash2.head import DFlash2Config, DFlash2Head
from headstart.heads.families.domino.files import PAPER as DOMINO
from headstart.heads.families.domino.files import DominoFiles
from headstart.heads.families.domino.head import DominoConfig, DominoHead
from headstart.heads.families.dspark.files import PAPER as DSPARK
from headstart.heads.families.dspark.files import DSparkFiles
from headstart.heads.families.dspark.head import DSparkConfig, DSparkHead
from headstart.heads.families.eagle.files import PAPER as EAGLE
from headstart.heads.families.eagle.files import EagleFiles
from headstart.heads.families.eagle.head import EagleConfig, EagleHead
from headstart.heads.families.eagle3.files import PAPER as EAGLE3
from headstart.heads.families.eagle3.files import Eagle3Files
from headstart.heads.families.eagle3.head import Eagle3Config, Eagle3Head
from headstart.heads.families.hydra.files import PAPER as HYDRA
from headstart.heads.families.hydra.files import HydraFiles
from headstart.heads.families.hydra.head import HydraConfig, HydraHead
from headstart.heads.families.jetspec.files import PAPER as JETSPEC
from headstart.heads.families.jetspec.files import JetSpecFiles
from headstart.heads.families.jetspec.head import JetSpecConfig, JetSpecHead
from headstart.heads.families.medusa.files import PAPER as MEDUSA
from headstart.heads.families.medusa.files import MedusaFiles
from headstart.heads.families.medusa.head import MedusaConfig, MedusaHead
from headstart.heads.families.paper import Paper
from headstart.heads.families.peagle.files import PAPER as PEAGLE
from headstart.heads.families.peagle.files import PEagleFiles
from headstart.heads.families.peagle.head import PEagleConfig, PEagleHead


class Family(NamedTuple):
    """One drafting method.

    Attributes:
        name: `head.type` of a recipe.
        paper: where the method is published.
        config: class of the recipe's node `head`.
        head: class of the module.
        files: reads and writes its heads on disk.
    """

    name: str
    paper: Paper
    config: type[HeadConfig]
    head: type[Head]
    files: HeadFiles


#: Of heads that equally many engines load, `headstart init` prefers the earlier one. The order is that of the τ
#: measured on SmolLM2 (docs/choosing.md), the highest first; the last three were trained too briefly to rank.
FAMILIES: dict[str, Family] = {
    "eagle3": Family("eagle3", EAGLE3, Eagle3Config, Eagle3Head, Eagle3Files()),
    "dspark": Family("dspark", DSPARK, DSparkConfig, DSparkHead, DSparkFiles()),
    "eagle": Family("eagle", EAGLE, EagleConfig, EagleHead, EagleFiles()),
    "dflash": Family("dflash", DFLASH, DFlashConfig, DFlashHead, DFlashFiles()),
    "peagle": Family("peagle", PEAGLE, PEagleConfig, PEagleHead, PEagleFiles()),
    "hydra": Family("hydra", HYDRA, HydraConfig, HydraHead, HydraFiles()),
    "medusa": Family("medusa", MEDUSA, MedusaConfig, MedusaHead, MedusaFiles()),
    "domino": Family("domino", DOMINO, DominoConfig, DominoHead, DominoFiles()),
    "dflash2": Family("dflash2", DFLASH2, DFlash2Config, DFlash2Head, DFlash2Files()),
    "jetspec": Family("jetspec", JETSPEC, JetSpecConfig, JetSpecHead, JetSpecFiles()),
}


def build_head(config: HeadConfig, dims: HeadDims) -> Head:
    """Construct a head of the family `config.type`, with random weights until `initialise`.

    Raises: ConfigError for an unknown family, or a configuration that does not fit the target.
    """
    if config.type not in FAMILIES:
        raise ConfigError(f"head.type: found {config.type!r}, expected one of {sorted(FAMILIES)}")
    return FAMILIES[config.type].head(config, dims)
