"""headstart inspect RECIPE: what will be trained on, token by token."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body

#: what counts are called for a person, where their key does not say it
LABELS = {
    "supervised_tokens": "supervised tokens",
    "open_ended": "samples cut by length",
    "length": "tokens per sample",
    "answer": "tokens per answer",
}


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Samples to show.", min=0)] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show one token a line with its assistant turn.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also run the target on a few samples: which of the text is its own.")
    ] = False,
    json: Json = False,
) -> None:
    """Show training samples with their supervised tokens marked.

    Also counts samples and tokens, and says what was dropped or truncated. Needs no model weights but for --stats.
    """
    with command_body(json) as console:
        from rich.text import Text

        from headstart.data.inspection import render_sample, render_tokens, summarise
        from headstart.data.own_choice import own_choice_of
        from headstart.heads.targets.load import weightless_target
        from headstart.pipeline.data import prepare, trained_samples
        from headstart.pipeline.placeholder import settled_config
        from headstart.pipeline.run import Run, dated_target
        from headstart.recipes.load import load_recipe

        settings = load_recipe(recipe, overrides or [])
        run = Run(settings, console)
        if stats:
            run.require_one_process("--stats runs the target", "leave --stats out")
        else:
            run = Run(settings, console, weightless_target(dated_target(settings)))
        if settings.data.distill.prompts and not run.distilled_path.is_file():
            from headstart.heads.errors import DataError

            if not settings.data.sources:
                same = shlex.join(["headstart", "distill", recipe, *(overrides or [])])
                raise DataError(f"{run.distilled_path}: the prompts are not answered yet: run `{same}` first")
            console.say(
                f"the prompts are not answered yet ({run.distilled_path} is missing): this shows data.sources alone"
            )
            run = run.without_prompts()
        data = prepare(run)
        settled_config(run, settings.head)  # says which token stands for those to come
        trained = trained_samples(run)
        # under data.supervise=all every token trains; turns and answers are counted as they are
        counts = {**summarise(data.train), "supervised_tokens": sum(sample.supervised for sample in trained)}
        chosen = trained[:samples]
        tokenizer = run.target.tokenizer
        shown: list[dict[str, Any]] = [
            {"id": s.id, "pieces": [{"text": text, "supervised": mark} for text, mark in render_sample(s, tokenizer)]}
            for s in chosen
        ]
        report = {
            "train": data.report.as_dict(),
            "held_out": data.held_out_report.as_dict() if data.held_out_report else None,
            "split": data.split.as_dict(),
        }
        value = {"counts": counts, "held_out_samples": len(data.held_out), "report": report, "samples": shown}
        own = own_choice_of(run.target, trained, settings.seed) if stats else None
        if own is not None:
            value["own_choice"] = own.as_dict()
        text = Text()
        for sample in chosen:
            counted = f"{len(sample)} tokens, {sample.supervised} supervised"
            text.append(f"── {sample.id} ({counted}, ends by {sample.finish_reason})\n")
            if tokens:
                for piece, turn in render_tokens(sample, tokenizer):
                    text.append(
                        f"{turn if turn >= 0 else '.':>4} {piece!r}\n", style="bold green" if turn >= 0 else "dim"
                    )
                continue
            for piece, mark in render_sample(sample, tokenizer):
                # brackets mark supervised tokens where there are no colours
                text.append(f"⟦{piece}⟧" if mark else piece, style="bold green" if mark else "dim")
            text.append("\n")
        text.append("⟦…⟧ = supervised\n" if chosen and not tokens else "")
        for name, count in counts.items():
            parts = ", ".join(f"{part} {n}" for part, n in count.items()) if isinstance(count, dict) else count
            text.append(f"{LABELS.get(name, name)}: {parts}\n")
        text.append(f"{own.line()}\n" if own is not None else "")
        console.result(value, text)
