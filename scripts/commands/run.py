"""headstart run RECIPE: every step, from conversations to an exported head."""

from __future__ import annotations

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body, open_run, say_verdict


def command(recipe: RecipeArgument, overrides: Overrides = None, json: Json = False) -> None:
    """Do every step: distil, train, evaluate, export.

    Finished steps are skipped. A killed run continues.
    """
    with command_body(json, "run") as console:
        from headstart.eval.measuring.rendering import render_tables
        from headstart.eval.measuring.report import Report
        from headstart.pipeline.distill import distill
        from headstart.pipeline.evaluate import evaluate
        from headstart.pipeline.export import export
        from headstart.pipeline.quality import quality
        from headstart.pipeline.train import train

        run = open_run(recipe, overrides, console, ("train", "eval", "export"))
        run.require_eval_data()
        with run.lock():
            distill(run)
            trained = train(run)
            cost = quality(run)
            measured = evaluate(run)
            exported = export(run)
            run.save_recipe()
        value = {"run_dir": str(run.dir), "train": trained, "eval": measured, "export": exported}
        value |= {} if cost is None else {"quality": cost}
        report = Report.read(run.dir)
        console.result(value, lambda: render_tables(report))
        if not json:
            console.result(None, f"report: {run.dir / 'report.html'} (and report.md, report.json)")
            for engine, path in exported["exports"].items():
                console.result(None, f"exported head ({engine}): {path}")
            say_verdict(report.verdict, console)
