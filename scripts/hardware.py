"""The hardware that a recipe is made for, as a person names it: `H100`, `24GB`, `2xL40S`, `none`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from headstart.heads.errors import ConfigError

GIB = 2**30
#: name of a card → GiB of its memory, as drivers report it (rounded down)
CARDS: dict[str, float] = {
    "T4": 14.5, "V100-16GB": 15.7, "V100": 31.7, "A10": 22.0, "A10G": 22.0, "L4": 22.0, "A40": 44.4, "A6000": 47.4,
    "L40": 44.3, "L40S": 44.3, "RTX3090": 23.5, "RTX4090": 23.5, "RTX5090": 31.3, "A100-40GB": 39.3, "A100": 79.1,
    "H100": 79.1, "H100-NVL": 93.0, "H200": 139.8, "GH200": 94.5, "B200": 178.3,
}  # fmt: skip
EXPECTED = "expected a card (H100, RTX4090, …), its memory (24GB), several (2xH100), or none"


@dataclass(frozen=True)
class Hardware:
    """What a run has.

    Attributes:
        gpus: number of cards of one machine; 0 = it runs on the CPU.
        gib: memory of one card, or of the machine.
        title: in words.
    """

    gpus: int
    gib: float
    title: str


def hardware_of(text: str | None) -> Hardware:
    """The hardware that is named; None takes this machine's.

    `24GB` are 24 · 10⁹ bytes, which is about what a card of that name has left. Without a GPU the memory is that of
    this machine.
    Raises: ConfigError for what is no card, with the nearest name.
    """
    if text is None:
        return _here()
    if text.strip().lower() in ("none", "cpu"):
        return _cpu()
    found = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.+?)", text.strip(), re.IGNORECASE)
    count, card = (int(found[1] or 1), found[2]) if found else (0, text)
    if not 1 <= count <= 1024:
        raise ConfigError(f"--gpu: found {text!r}, {EXPECTED}")
    gib, name = _card(card, text)
    return Hardware(count, gib, f"{count} × {name}" if count > 1 else name)


def _card(card: str, text: str) -> tuple[float, str]:
    """(GiB, name) of one card. Args: text: what was given."""
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)", card, re.IGNORECASE):
        number, binary = float(size[1]), size[2].lower() == "gib"
        if not 1 <= number <= 4096:
            raise ConfigError(f"--gpu: found {text!r}, expected 1 to 4096 GB")
        return (number if binary else number * 1e9 / GIB), f"a card of {number:g} {'GiB' if binary else 'GB'}"

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]|nvidia|geforce|80gb$", "", name.lower())

    names = {plain(name): name for name in CARDS}
    short = plain(card)
    if short not in names and f"rtx{short}" in names:
        short = f"rtx{short}"
    if short not in names:
        near = difflib.get_close_matches(short, names, n=1)
        hint = f"; did you mean {names[near[0]]}?" if near else ""
        raise ConfigError(f"--gpu: found {text!r}, {EXPECTED}; known by name: {', '.join(CARDS)}{hint}")
    return CARDS[names[short]], names[short]


def _here() -> Hardware:
    import torch

    from headstart.heads.provenance import device_name
    from headstart.train.plan import local_device_bytes

    if not torch.cuda.is_available():
        return _cpu()
    count, name = torch.cuda.device_count(), device_name("cuda:0")
    size = local_device_bytes(torch.device("cuda"))
    return Hardware(count, size / GIB, f"{count} × {name}" if count > 1 else name)


def _cpu() -> Hardware:
    import psutil

    return Hardware(0, psutil.virtual_memory().total / GIB, "the CPU of this machine")
