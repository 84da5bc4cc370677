"""The command line: `headstart VERB RECIPE [key=value …]`.

Results go to stdout (`--json`: one JSON value), progress and messages to stderr. Exit codes: 0 done, 1 failure (also a
missing file, or a Hub out of reach), 2 wrong usage or configuration, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import signal
import sys

import typer

from headstart.commands import (
    compare,
    distill,
    doctor,
    evaluate,
    export,
    init,
    inspect,
    launch,
    plan,
    recipe,
    report,
    run,
    scripts,
    target,
    train,
    tune,
)
from headstart.threads import sleep_soon

app = typer.Typer(
    name="headstart",
    help="Train draft heads for a frozen language model and prove what they gain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(target.app, name="target")
app.command("init")(init.command)
app.command("distill")(distill.command)
app.command("inspect")(inspect.command)
app.command("plan")(plan.command)
app.command("train")(train.command)
app.command("eval")(evaluate.command)
app.command("tune")(tune.command)
app.command("export")(export.command)
app.command("report")(report.command)
app.command("compare")(compare.command)
app.command("run")(run.command)
app.command("doctor")(doctor.command)
app.command("recipe")(recipe.command)
app.command("launch")(launch.command)
app.command("scripts")(scripts.command)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from importlib.metadata import version as installed

        print(installed("headstart"))
        raise typer.Exit()


def main(arguments: list[str] | None = None) -> int:
    """Run a command line, by default that of this process; returns the exit code."""
    sleep_soon()
    try:
        app(args=arguments, prog_name="headstart")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        if arguments is None:
            # a signal during Python's shutdown must not change the exit code
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0
