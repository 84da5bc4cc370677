"""headstart report RUN RUN …: reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.commands.common import Json, command_body


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that hold a report.json.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for comparison.html and comparison.md (and a plot).")
    ] = None,
    json: Json = False,
) -> None:
    """Put evaluations side by side.

    Shows τ, acceptance by position, tokens/s and speed-up, and names what differs between the runs.
    """
    with command_body(json, libraries=True) as console:
        from headstart.eval.measuring.compare import PAGE, comparison_table, differences, read_reports, write_comparison
        from headstart.eval.measuring.rendering import render_saved
        from headstart.eval.measuring.report import RENDERED

        reports = read_reports(runs)
        # an evaluation could not write report.md or report.html, an earlier version had no page, or somebody removed it
        missing = [place for place in runs if not all((place / name).is_file() for name in RENDERED)]
        failed = [place for place in missing if not render_saved(place / "report.json", console.say)]
        value = {
            "runs": {label: report.to_json() for label, report in reports.items()},
            "differences": differences(reports),
        }
        console.result(value, lambda: comparison_table(reports))
        if out is not None:
            text = write_comparison(reports, out)
            console.say(f"comparison: {out / PAGE} (and {text.name})")
        if failed:
            raise typer.Exit(1)
