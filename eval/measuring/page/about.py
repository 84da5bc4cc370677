"""How the numbers of a page were made: hardware, versions, command, recipe."""

from __future__ import annotations

from typing import Any

import yaml

from headstart.eval.measuring.page.panel import Cell, Panel, Runs, Table, several, text
from headstart.eval.measuring.wording import listed
from headstart.heads.escape import plain
from headstart.heads.formats.flags import flag_of

#: value of `engine_path` → in words
ENGINES = {"fused": "Headstart's own kernels", "generic": "transformers' forward on Headstart's buffers"}


def measured_how(runs: Runs) -> Panel:
    """A column per run, a row per fact."""
    facts = [_facts(report) for report in runs.values()]
    rows = [[Cell(name), *(text(fact[name]) for fact in facts)] for name in facts[0]]
    columns = ["fact", *(map(plain, runs) if several(runs) else ["value"])]
    return Panel("measured", "How it was measured", [], [Table("Hardware, settings and versions", columns, rows)])


def _facts(report: dict[str, Any]) -> dict[str, str]:
    head, engine, sampling = report["head"] or {}, report.get("engine") or {}, report["sampling"]
    size = head.get("parameters")
    settings = [f"{name} {value}" for name, value in sampling.items() if name not in ("temperature", "acceptance")]
    ran = engine.get("name") or ENGINES.get(str(report.get("engine_path")), "–")
    made = head.get("type", "–") if head.get("path") is not None or size else "none"
    return {
        "target": str(report["target"]["name"]),
        "head": f"{made}, {size:,} parameters" if isinstance(size, int) else str(made),
        "drafter": f"{report['drafter']}, {report['tree']['label']}",
        "batch": str(report["batch_size"]),
        "temperature": f"{float(report['temperature']):g}",
        "acceptance": flag_of(report) or "lossless",
        "verification": str(report.get("verification") or "–"),
        "other sampling": ", ".join(settings) or "–",
        "device": str(report["device"]),
        "dtype": str(report["dtype"]),
        "engine": str(ran),
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()) or "–",
        "revision of Headstart": str(report["git_revision"]),
        "command": str(report.get("command") or "–"),
    }


def divergences(report: dict[str, Any]) -> list[str]:
    """Where greedy answers differ from plain decoding, in sentences."""
    identity = report.get("greedy_identity") or {}
    return [
        plain(f"{case['id']}: first differs at turn {case['turn'] + 1}, token {case['position']}, where the target's "
              f"two likeliest logits are {float(case['gap']):.4g} apart")
        for case in identity.get("divergences") or []
    ]  # fmt: skip


def recipes(runs: Runs) -> list[tuple[str, str]]:
    """(title, YAML) of each run's resolved recipe; runs without one are left out."""
    shown = []
    for label, report in runs.items():
        if report["recipe"]:
            title = f"Recipe of {label}" if several(runs) else "The resolved recipe"
            body = yaml.safe_dump(report["recipe"], sort_keys=False, allow_unicode=True, width=100)
            shown.append((plain(title), plain(body)))
    return shown


def title_of(runs: Runs) -> str:
    """What the page is about, in a line."""
    names = [f"{report['drafter']} on {report['target']['name']}" for report in runs.values()]
    return plain(listed(list(dict.fromkeys(names))))
