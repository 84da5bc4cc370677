"""headstart report RUN RUN …: reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.commands.common import Json, command_body


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that hold a report.json.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for comparison.md (and a plot of speed-up by batch).")
    ] = None,
    json: Json = False,
) -> None:
    """Put evaluations side by side.

    Shows τ, acceptance by position, tokens/s and speed-up, and names what differs between the runs.
    """
    with command_body(json, libraries=True) as console:
        from headstart.eval.measuring.compare import comparison_table, differences, read_reports, write_comparison
        from headstart.eval.measuring.rendering import render_saved

        reports = read_reports(runs)
        # an evaluation could not write report.md, or somebody removed it
        missing = [place for place in runs if not (place / "report.md").is_file()]
        failed = [place for place in missing if not render_saved(place / "report.json", console.say)]
        value = {
            "runs": {label: report.to_json() for label, report in reports.items()},
            "differences": differences(reports),
        }
        console.result(value, lambda: comparison_table(reports))
        if out is not None:
            console.say(f"comparison: {write_comparison(reports, out)}")
        if failed:
            raise typer.Exit(1)
