"""Turns off the progress bars of libraries, through their own interfaces: one process shows one bar, its own."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

#: a library, and its module that turns bars on and off. transformers also turns those of huggingface_hub on and off,
#: so huggingface_hub comes first and is restored last
SWITCHES = {
    "huggingface_hub": "huggingface_hub.utils",
    "transformers": "transformers.utils.logging",
    "datasets": "datasets.utils",
}


@contextmanager
def without_bars(libraries: Iterable[str]) -> Iterator[None]:
    """Inside, these libraries draw no bars; afterwards those that drew some do so again.

    Args: libraries: of SWITCHES, which are imported. One that is not installed is left out.
    """
    wanted = set(libraries)
    wanted |= {"huggingface_hub"} if "transformers" in wanted else set()
    with ExitStack() as restored:
        for name, module in SWITCHES.items():
            if name in wanted and importlib.util.find_spec(name) is not None:
                restored.callback(_turn_off(module))
        yield


def _turn_off(name: str) -> Callable[[], None]:
    """Turn the bars of a library off. Returns what puts back how it was. Args: name: of its module."""
    module = importlib.import_module(name)
    many = hasattr(module, "are_progress_bars_disabled")
    drew = not module.are_progress_bars_disabled() if many else module.is_progress_bar_enabled()
    on, off = [getattr(module, f"{word}_progress_bar{'s' if many else ''}") for word in ("enable", "disable")]

    def turn(how: Callable[[], object]) -> None:
        with warnings.catch_warnings():  # HF_HUB_DISABLE_PROGRESS_BARS decides, and the library says so at every call
            warnings.simplefilter("ignore")
            how()

    turn(off)
    return lambda: turn(on if drew else off)
