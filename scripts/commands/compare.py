"""headstart compare FILE: cells (recipe × settings × seed) trained at equal budget, decoded alike, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headstart.commands.common import Json, command_body
from headstart.console import Console
from headstart.heads.counting import counted

if TYPE_CHECKING:
    from headstart.comparing.cells import Work


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file, or the name of a shipped comparison.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. budget.seconds=75")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--plan", help="Print the cells, their time and memory, and leave.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs to share the cells over, e.g. 0,1 (default: one process on the first).")
    ] = None,
    side_by_side: Annotated[int, typer.Option(help="Cells that train on one GPU at the same time.")] = 1,
    json: Json = False,
) -> None:
    """Train recipes at equal budget and put them side by side.

    τ with its interval, speed-up, cost, and the front of τ against draft time. Finished cells are skipped, a stopped
    one continues.
    """
    with command_body(json, "compare") as console:
        from headstart.comparing.checks import Checks
        from headstart.comparing.team import cards_of
        from headstart.directory_lock import locked

        cards = cards_of(gpus, side_by_side)
        work = _work(file, overrides or [], side_by_side)
        processes = max(1, len(cards) * side_by_side)
        checks = Checks(work, console)
        checks.ask()
        if dry_run:
            console.result(checks.to_json(processes), checks.render(processes))
            return
        console.say(f"{counted(len(work.cells), 'cells')}, {processes} at a time; everything lands in {work.folder}")
        with locked(work.folder, "folder=…"):
            failed = _compare(work, cards, console)
        if failed:
            raise typer.Exit(1)


def _work(file: str, overrides: list[str], side_by_side: int) -> Work:
    from dataclasses import asdict

    from headstart.comparing.cells import Work, make_cells
    from headstart.comparing.config import load_comparison
    from headstart.heads.provenance import command_line

    config, settings, path = load_comparison(file, overrides)
    budget = {"kind": config.budget.kind, "value": getattr(config.budget, config.budget.kind)}
    measured = {**asdict(config.measure), "sets": config.sets}
    # a draft is timed with the speed-up, or else beside τ, where no other process shares the card
    measured["cycle_parts"] = not config.measure.speed.enabled and side_by_side == 1
    work = Work(
        config.name, config.place, make_cells(config, settings, path), measured, command_line(), budget, side_by_side
    )
    if side_by_side > 1:
        work.notes.append(f"up to {side_by_side} cells trained on one device at the same time")
        if budget["kind"] == "seconds":
            work.notes.append("the seconds of a cell are those of a shared device: it made fewer steps than alone")
    date = work.folder / "template_date"
    if date.is_file():
        work.template_date = date.read_text(encoding="utf-8").strip()
    return work


def _compare(work: Work, cards: list[str | None], console: Console) -> bool:
    """Do the work, write compare.json and compare.html, show the table. Returns whether a cell failed."""
    from headstart.comparing.checks import with_unknown_steps
    from headstart.comparing.data import share_answers
    from headstart.comparing.page import render, write_page
    from headstart.comparing.rows import collect, save
    from headstart.comparing.team import Team
    from headstart.comparing.work import CardLost, Failures, Worker, forget_changed
    from headstart.heads.files import write_text

    if work.template_date is not None:
        write_text(work.folder / "template_date", f"{work.template_date}\n")
    Failures(work.folder).forget()
    share_answers(work, console)
    with_unknown_steps(work, console)
    forget_changed(work)
    work.save()
    ended: CardLost | KeyboardInterrupt | None = None
    try:
        if cards:
            Team(work, console, cards, work.side_by_side).run()
        else:
            worker = Worker(work, console)
            worker.train_all()
            worker.drop_target()
            worker.measure_all()
            worker.time_all()
    except (CardLost, KeyboardInterrupt) as error:
        ended = error
    finally:
        values = collect(work)
        save(work, values)
        page = write_page(values, work.folder)
    if not (console.as_json and isinstance(ended, KeyboardInterrupt)):  # JSON is the result of a command that ended
        console.result(values, lambda: render(values))
    console.say(f"page: {page} (and compare.json)")
    if ended is not None:
        raise ended
    return bool(values["failed"] or values["unfinished"])
