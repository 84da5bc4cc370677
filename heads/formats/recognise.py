"""Checkpoints from elsewhere become our heads. Every tensor of a file is accounted for, or it is refused.

Layouts read (by their public key names):
- portable / vLLM: `midlayer.*` or `layers.0.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`; `blocks.*`, `lm_heads.*`
- EAGLE-1/2/3 as published by their authors (`yuhuili/*`), SpecForge exports
- speculators (`speculators_model_type`, `transformer_layer_config`)
- FasterDecoding Medusa v1 = TGI v1 (`{i}.{j}.linear.*`, `{i}.{N}.weight`), TGI v2 (one layer, target's lm_head)
"""

from __future__ import annotations

from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import Plan, some
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle_files import is_eagle3, plan_eagle, plan_eagle3, plan_speculators, unnest
from headstart.heads.families.medusa.files import is_medusa, plan_medusa


def is_dflash(raw: RawCheckpoint) -> bool:
    architectures = raw.config.get("architectures")
    return "dflash_config" in raw.config or (isinstance(architectures, list) and "DFlashDraftModel" in architectures)


def plan_foreign(raw: RawCheckpoint, dims: HeadDims | None) -> Plan:
    """Recognise the layout of a checkpoint without our sidecar.

    Args:
        dims: the target's dimensions; needed where the file does not say which target layers it reads.
    Raises: FormatError naming the file, the keys, and what to do.
    """
    config, where = raw.config, str(raw.directory / "config.json")
    if "speculators_model_type" in config:
        return plan_speculators(raw, dims, where)
    if is_dflash(raw):
        raise FormatError(f"{where}: a DFlash head; Headstart reads Medusa, EAGLE-1/2 and EAGLE-3 heads")
    if is_medusa(raw):
        return plan_medusa(raw, dims, where)
    config = unnest(config)
    names = {name.removeprefix("model."): name for name in raw.tensors}
    if len(names) != len(raw.tensors):
        raise FormatError(
            f"{raw.directory}: tensors appear both with and without the prefix 'model.'; keep one of each"
        )
    if "fc.weight" not in names:
        raise FormatError(
            f"{raw.directory}: no head that Headstart knows: neither Medusa blocks nor fc.weight among "
            f"{some(raw.tensors)}. Readable: Medusa v1/v2, EAGLE-1/2, EAGLE-3, SpecForge, speculators."
        )
    if is_eagle3(names):
        return plan_eagle3(raw, config, names, dims, where, "EAGLE-3")
    return plan_eagle(raw, config, names, dims, where, "EAGLE-1")
