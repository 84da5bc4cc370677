"""Rows of a Hub dataset. If the Hub is out of reach, an error says so within seconds and names the alternative."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.data.config import SourceConfig
from headstart.heads.errors import DataError, in_one_line
from headstart.heads.quiet import without_bars

#: seconds to wait for the Hub before saying that it cannot be reached
TIMEOUT = 10.0


def load_rows(source: SourceConfig) -> Iterator[Any]:
    """Rows of `source.dataset`, streamed where `source.streaming` says so; by default with a limit, so that not
    everything is downloaded. A folder is read as `datasets` reads folders, or as its `save_to_disk` wrote it.

    Raises: DataError naming the dataset, the cause and the remedy.
    """
    from huggingface_hub import HfApi, constants

    name = str(source.dataset)
    remedy = "check the name and the network, or give a local file with path=FILE.jsonl instead of dataset"
    try:
        folder = Path(os.path.expanduser(name))
        if not folder.is_dir() and not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(name, timeout=TIMEOUT)
        import datasets

        # a stream uses the network while it is read: reading must stay inside the try
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            yield from saved[source.split] if isinstance(saved, datasets.DatasetDict) else saved
            return
        streaming = source.limit is not None if source.streaming is None else source.streaming
        with without_bars(("huggingface_hub", "datasets")):
            yield from datasets.load_dataset(name, source.subset, split=source.split, streaming=streaming)
    except Exception as error:  # the libraries raise network exceptions of many kinds
        cause = in_one_line(error)
        raise DataError(f"dataset {name!r} (split {source.split!r}): cannot be loaded ({cause}): {remedy}") from error
