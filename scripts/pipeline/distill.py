"""The step `distill`: the target answers the recipe's prompts."""

from __future__ import annotations

from typing import Any

from headstart.data import distill as distillation
from headstart.data.answer_file import parts_of
from headstart.data.answering import Answerer
from headstart.data.rejects import Rejects
from headstart.data.serving.answerer import ServerAnswerer
from headstart.data.serving.connect import connect
from headstart.data.sources import read_prompts
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.heads.targets.target import Target
from headstart.pipeline.inputs import answered
from headstart.pipeline.markers import Begin
from headstart.pipeline.run import Run
from headstart.refusals import require_decoding


def distill(run: Run) -> dict[str, Any] | None:
    """Answer the recipe's prompts with the target; None when it has none."""
    if not run.recipe.data.distill.prompts:
        return None
    path = run.distilled_path
    return run.markers.do(
        "distill",
        run.inputs.distill,
        [path],
        lambda begin: _answer(run, begin),
        leftovers=[path.with_name(path.name + ".skipped.json"), parts_of(path)],
        lasting=answered,
        extends=True,
    )


def _in_process(run: Run) -> tuple[Target, Answerer | None]:
    """The target, and what it answers with; None = its own forward."""
    run.require_one_process(
        "the prompts are not answered yet",
        "run `headstart distill RECIPE target.parallel=device_map` first (the layers over all GPUs of a machine)",
    )
    recipe, target = run.recipe, run.target
    if "train" in run.ahead:
        require_decoding(target, run.feature_spec(), recipe.export.force)
    # captured cycles need a GPU, and one that holds the whole target
    if target.device.type == "cuda" and recipe.target.parallel != "device_map":
        return target, EngineAnswerer(target, recipe.data.distill)
    return target, None


def _through_servers(run: Run) -> tuple[Target, Answerer]:
    """The target without weights, and the servers that answer for it, each of which was asked a test question."""
    config, target = run.recipe.data.distill, run.rendering_target()
    servers = connect(target, config, run.recipe.data.template_kwargs)
    for server in servers:
        run.console.say(f"distill: {server.describe()}")
    return target, ServerAnswerer(target, config, servers, lambda line: run.console.say(f"distill: {line}"))


def _answer(run: Run, begin: Begin) -> dict[str, Any]:
    recipe, data = run.recipe, run.recipe.data
    target, answerer = _through_servers(run) if data.distill.servers else _in_process(run)
    rejects = Rejects()
    prompts = read_prompts(data.distill.prompts, rejects=rejects)
    for line in rejects.lines():
        run.console.say(f"distill: {line}")
    done = total = 0
    run.claim(begin)
    rejects.write(run.distilled_path.with_name(run.distilled_path.name + ".rejects.jsonl"))
    with run.console.progress("distill", "answers") as advance:

        def progress(count: int, out_of: int, message: str) -> None:
            nonlocal done, total
            done, total = count, out_of
            advance(count, out_of, message)

        path = distillation.distill(
            target,
            prompts,
            data.distill,
            run.distilled_path,
            recipe.seed,
            progress,
            dict(data.template_kwargs),
            answerer,
        )
    with open(path, encoding="utf-8") as lines:
        answers = sum(1 for _ in lines)
    return {"path": str(path), "prompts": len(prompts), "answers": answers, "left": total - done}
