"""Which values of a recipe came from the environment: they are used, and neither written into files nor published."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from headstart.heads.published import keep_private, without_defaults


def from_environment(config: Container) -> dict[str, str]:
    """Dotted key → what is written there, for every value whose resolution reads `${oc.env:NAME}`, here or elsewhere.

    What was read is kept private from here on (`heads/published.py`).

    Raises: OmegaConfBaseException where a value cannot be resolved.
    """
    found: dict[str, str] = {}
    if "oc.env" not in str(OmegaConf.to_container(config, resolve=False)):
        return found
    with _watched() as names:
        for place, raw, value in _read(config, "", names):
            found[place] = raw
            if isinstance(value, str) and "oc.env" in raw:
                keep_private(value, without_defaults(raw))
    return found


def put_back(values: Any, environment: dict[str, str], place: str = "") -> Any:
    """Plain values of a recipe with what is written in place of what came from the environment."""
    if place in environment:
        return environment[place]
    if isinstance(values, dict):
        return {key: put_back(item, environment, _inside(place, key)) for key, item in values.items()}
    if isinstance(values, list):
        return [put_back(item, environment, _inside(place, n)) for n, item in enumerate(values)]
    return values


def _inside(place: str, key: Any) -> str:
    return f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}" if place else str(key)


def _read(config: Container, place: str, names: list[str]) -> Iterator[tuple[str, str, Any]]:
    keys: Any = config.keys() if isinstance(config, DictConfig) else range(len(config))  # type: ignore[arg-type]
    for key in keys:
        node: Any = config._get_node(key)
        here, value = _inside(place, key), node
        if node is not None and node._is_interpolation():
            names.clear()
            value = config[key]
            if names:
                yield here, str(node._value()), value
                continue
        if isinstance(value, DictConfig | ListConfig) and not value._is_none() and not value._is_missing():
            yield from _read(value, here, names)


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Names of the environment's variables that are read inside."""
    names: list[str] = []

    def env(key: str, *default: Any) -> Any:
        value = oc.env(key, *default)
        names.append(key)
        if key in os.environ:
            keep_private(os.environ[key], f"${{oc.env:{key}}}")
        return value

    # the newer name, where OmegaConf has it
    register: Any = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("oc.env", env, replace=True)
    try:
        yield names
    finally:
        register("oc.env", oc.env, replace=True)
