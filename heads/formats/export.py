"""`export`: write a head for the engines asked for, then prove with the validators that they will load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.formats import sglang, tensorrt_llm, tgi, vllm
from headstart.heads.formats.check import CheckReport, check_directory
from headstart.heads.formats.config import ENGINES, ExportConfig
from headstart.heads.formats.portable import DTYPES
from headstart.heads.formats.shards import shard_bytes

WRITERS = {"vllm": vllm.write, "sglang": sglang.write, "tgi": tgi.write, "tensorrt_llm": tensorrt_llm.write}
#: engine → its name, and the families that it serves
SERVES = {
    "portable": ("the portable directory", ("medusa", "eagle", "eagle3")),
    "vllm": ("vLLM", ("medusa", "eagle", "eagle3")),
    "sglang": ("SGLang", ("eagle", "eagle3")),
    "tgi": ("TGI", ("medusa",)),
    "tensorrt_llm": ("TensorRT-LLM", ("medusa", "eagle3")),
}
#: engines that must load the portable directory of a family
PORTABLE_ENGINES = {"medusa": ("vllm",), "eagle": ("vllm",), "eagle3": ("vllm", "sglang", "tensorrt_llm")}


def check_export(config: ExportConfig, family: str | None = None) -> None:
    """Refuse settings with which no export can be written, before anything is loaded.

    Args: family: of the head, where it is known.
    Raises: ConfigError for an unknown engine, one that does not serve the family, an unknown dtype or size.
    """
    unknown = [name for name in config.engines if name not in ENGINES]
    if unknown or not config.engines:
        raise ConfigError(f"export.engines: found {list(config.engines)}, expected some of {list(ENGINES)}")
    if config.dtype not in DTYPES:
        raise ConfigError(f"export.dtype: found {config.dtype!r}, expected one of {sorted(DTYPES)}")
    for name in config.engines if family is not None else []:
        if family not in SERVES[name][1]:
            able = [other for other, (_, families) in SERVES.items() if family in families]
            raise ConfigError(
                f"export.engines: {SERVES[name][0]} does not serve {family} heads; expected some of {able}"
            )
    shard_bytes(config.max_shard_size)


def export_head(
    head: Head, directory: Path, config: ExportConfig, provenance: dict[str, Any]
) -> dict[str, CheckReport]:
    """Write one directory per engine: `directory` itself for the first, `directory/<engine>` for each further one.

    Args:
        provenance: as for `save_head`.
    Returns: engine → report of the directory written for it.
    Raises: ConfigError for an unknown engine, one that does not serve the family, an unknown dtype or size;
        FormatError when a validator finds that an engine it was written for would not load it rightly and
        `config.force` is off.
    """
    check_export(config, head.family)
    limit = shard_bytes(config.max_shard_size)
    reports = {}
    for index, name in enumerate(config.engines):
        place = Path(directory) if index == 0 else Path(directory) / name
        WRITERS["vllm" if name == "portable" else name](head, place, provenance, DTYPES[config.dtype], limit)
        reports[name] = check_directory(place, head.dims)
        _require_right(reports[name], name, head.family, config.force)
    return reports


def _require_right(report: CheckReport, name: str, family: str, force: bool) -> None:
    engines = PORTABLE_ENGINES.get(family, ()) if name == "portable" else (name,)
    bad = [engine for engine in ("headstart", *engines) if not report.loads(engine)]
    if bad and not force:
        reasons = "; ".join(
            f"{report.engines[e].engine} {report.engines[e].verdict.value}: {report.engines[e].reasons[0]}" for e in bad
        )
        raise FormatError(f"{report.directory}: {reasons}. Set export.force=true to keep it all the same.")
