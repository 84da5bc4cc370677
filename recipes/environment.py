"""Values of a recipe that come from environment variables: used, but neither written to recipe.yaml nor published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from headstart.heads.published_text import variables, without_defaults


class Written(NamedTuple):
    """The recipe's own text for a value that came from the environment, and the variables that were read for it."""

    text: str
    names: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The text without default values. `heads/published.py` must find the names of all variables in it."""
        if "oc.env" in self.text and not set(self.names) <= set(variables(self.text)):
            return "".join(f"${{oc.env:{name}}}" for name in self.names)
        return without_defaults(self.text)


#: dotted key of a recipe → its text, for values that came from the environment
Environment = dict[str, Written]


def from_environment(config: Container) -> Environment:
    """Every value that is made of an environment variable, also through another key.

    Raises: OmegaConfBaseException if a value cannot be resolved.
    """
    if "oc.env" not in str(OmegaConf.to_container(config, resolve=False)):
        return {}
    with _watched() as names:
        return {place: Written(text, tuple(dict.fromkeys(read))) for place, text, read in _read(config, "", names)}


def names_of(environment: Environment) -> list[str]:
    """Names of all variables that were read."""
    return sorted({name for written in environment.values() for name in written.names})


def put_back(values: Any, environment: Mapping[str, str], place: str = "") -> Any:
    """The values of a recipe, those of `environment` replaced by their text."""
    if place in environment:
        return environment[place]
    if isinstance(values, dict):
        return {key: put_back(item, environment, _inside(place, key)) for key, item in values.items()}
    if isinstance(values, list):
        return [put_back(item, environment, _inside(place, n)) for n, item in enumerate(values)]
    return values


def _inside(place: str, key: Any) -> str:
    return f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}" if place else str(key)


def _read(config: Container, place: str, names: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    keys: Any = config.keys() if isinstance(config, DictConfig) else range(len(config))  # type: ignore[arg-type]
    for key in keys:
        node: Any = config._get_node(key)
        here, value = _inside(place, key), node
        if node is not None and node._is_interpolation():
            names.clear()
            value = config[key]
            if names:
                yield here, str(node._value()), list(names)
                continue
        if isinstance(value, DictConfig | ListConfig) and not value._is_none() and not value._is_missing():
            yield from _read(value, here, names)


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Collects the names of the environment variables that OmegaConf reads inside the block."""
    names: list[str] = []

    def env(key: str, *default: Any) -> Any:
        value = oc.env(key, *default)
        names.append(key)
        return value

    # the newer name, where OmegaConf has it
    register: Any = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("oc.env", env, replace=True)
    try:
        yield names
    finally:
        register("oc.env", oc.env, replace=True)
