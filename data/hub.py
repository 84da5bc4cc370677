"""Rows of a Hub dataset. If the Hub is out of reach, an error says so within seconds and names the alternative."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headstart.data.config import SourceConfig
from headstart.heads.errors import DataError, in_one_line

#: seconds to wait for the Hub before saying that it cannot be reached
TIMEOUT = 10.0


def load_rows(source: SourceConfig) -> Iterator[Any]:
    """Rows of `source.dataset`. With a limit they are streamed, so that not everything is downloaded.

    Raises: DataError naming the dataset, the cause and the remedy.
    """
    from huggingface_hub import HfApi, constants

    name = str(source.dataset)
    remedy = "check the name and the network, or give a local file with path=FILE.jsonl instead of dataset"
    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(name, timeout=TIMEOUT)
        import datasets

        # a stream uses the network while it is read: reading must stay inside the try
        yield from datasets.load_dataset(name, source.subset, split=source.split, streaming=source.limit is not None)
    except Exception as error:  # the libraries raise network exceptions of many kinds
        cause = in_one_line(error)
        raise DataError(f"dataset {name!r} (split {source.split!r}): cannot be loaded ({cause}): {remedy}") from error
