"""The token of a run's head that no text holds (data/placeholder.py): chosen once, kept when the run goes on."""

from __future__ import annotations

from pathlib import Path

from headstart.data.placeholder import settle
from headstart.data.samples import used_tokens
from headstart.heads.base import HeadConfig
from headstart.heads.files import read_json, write_json
from headstart.pipeline.data import prepare
from headstart.pipeline.run import Run


def settled_config(run: Run, config: HeadConfig) -> HeadConfig:
    """The config with its placeholder filled in, or checked where it is given. Says what was chosen.

    Every rank finds the same token. A run that goes on takes the one that it began with.

    Raises: ConfigError for a given token that ends or fills texts or occurs in the data, and where none can be found.
    """
    if config.placeholder is None:
        return config
    target, data = run.either_target, prepare(run)
    if config.placeholder_token is None and (token := _kept(run)) is not None:
        config = config.with_placeholder(token)
    size = target.dims.vocab_size
    used_V = used_tokens((*data.train, *data.held_out), size)
    config, chosen = settle(config, target.tokenizer, size, target.stop_token_ids, used_V)
    if chosen is not None:
        run.console.say(chosen)
    return config


def keep_placeholder(run: Run, config: HeadConfig) -> None:
    """Write which token was chosen, for commands that continue the run."""
    if run.recipe.head.placeholder is not None and run.recipe.head.placeholder_token is None:
        write_json(_place(run), {"token": config.placeholder_token, "data": run.inputs.data})


def _kept(run: Run) -> int | None:
    """The token that the run chose for the same data."""
    place = _place(run)
    if not place.is_file():
        return None
    kept = read_json(place)
    same = isinstance(kept, dict) and kept.get("data") == run.inputs.data and isinstance(kept.get("token"), int)
    return kept["token"] if same else None


def _place(run: Run) -> Path:
    return run.dir / "data" / "placeholder.json"
