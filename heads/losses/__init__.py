"""Losses on draft logits: training uses `fused`; `eager` is its readable twin, of the same signatures and values.

`block` and `block_eager` are the same for heads that draft blocks.
"""

from headstart.heads.errors import ConfigError
from headstart.heads.losses.eager import SOFT_LOSSES


def check_loss(found: str) -> None:
    """Raise ConfigError unless `head.loss` names a soft loss."""
    if found not in SOFT_LOSSES:
        raise ConfigError(f"head.loss: found {found!r}, expected one of {', '.join(SOFT_LOSSES)}")
