"""The step `distill`: the target answers the recipe's prompts, in one process or in several that share them."""

from __future__ import annotations

from typing import Any

from headstart.data.choosing.asked import read_prompts
from headstart.data.config import DistillConfig, SourceConfig
from headstart.data.distilling import distill as distillation
from headstart.data.distilling.answer_file import parts_of, skipped_of
from headstart.data.distilling.answering import Answerer, OwnForward
from headstart.data.distilling.writing_prompts import ID, Written, tries_of, write_prompts
from headstart.data.prompts import Prompt
from headstart.data.ranks import ALONE, Ranks, portable
from headstart.data.serving.answerer import ServerAnswerer
from headstart.data.serving.connect import connect
from headstart.data.serving.found import unasked_of
from headstart.data.sources.rejects import Rejects
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.heads.errors import DataError, TargetError
from headstart.heads.targets.target import Target
from headstart.pipeline.inputs import kept
from headstart.pipeline.markers import Begin, no_begin
from headstart.pipeline.run import Run
from headstart.refusals import require_decoding

NO_PROMPTS = (
    "data.distill.prompts is empty: set data.distill.prompts=[{path: prompts.jsonl}], or data.distill.written=20000, "
    "so that the target writes prompts itself"
)


def distill(run: Run, ranks: Ranks = ALONE) -> dict[str, Any] | None:
    """Answer the recipe's prompts with the target; None when it has none.

    Args: ranks: the processes of a launch. Each answers a share of the prompts, with a target of its own, unless
        servers answer. All must call this function. Only the first one gets the result.
    """
    if not run.recipe.data.distill.asks:
        return None
    if ranks.rank > 0:
        told = ranks.gather(None)[0]
        if isinstance(told, Exception):
            raise told
        if told:
            _answer(run, no_begin, ranks, _asked(run))
        return None
    path, tries, begun = run.distilled_path, tries_of(run.written_path), False

    def work(begin: Begin) -> dict[str, Any]:
        nonlocal begun
        asked = _asked(run)  # a bad row is told before weights are loaded
        if run.recipe.data.distill.servers:  # they answer as many at once as they can: one process asks them
            return _answer(run, begin, ALONE, asked)
        _check(run)
        begun = True
        ranks.gather(True)  # the others begin too
        return _answer(run, begin, ranks, asked)

    try:
        result = run.markers.do(
            "distill",
            run.inputs.distill,
            [path],
            work,
            leftovers=[skipped_of(path), parts_of(path), unasked_of(path), run.written_path, tries, parts_of(tries)],
            lasting=kept,
            extends=True,
        )
    except Exception as error:
        if not begun:
            ranks.gather(portable(error, 0))
        raise
    if not begun:
        ranks.gather(False)
    return result


def _check(run: Run) -> None:
    """Raise where the target cannot answer in this process, or nothing can be trained on its answers."""
    run.require_one_process(
        "the prompts are not answered yet",
        "run `headstart distill RECIPE target.parallel=device_map` first (the layers over all GPUs of a machine)",
    )
    if "train" in run.ahead:
        require_decoding(run.target, run.feature_spec(), run.recipe.export.force)


def _in_process(run: Run, target: Target, config: DistillConfig, what: str = "distill") -> Answerer:
    """The decode engine, or the target's own forward where the engine does not cover it."""
    if run.recipe.target.parallel == "device_map":  # the engine's buffers lie on one device
        return OwnForward(target, config)
    try:
        return EngineAnswerer(target, config)
    except TargetError as reason:
        run.console.say(f"{what}: batch by batch, by the target's own forward: {reason}")
        return OwnForward(target, config)


def _through_servers(run: Run) -> tuple[Target, Answerer]:
    """The target without weights, and the servers that answer for it, each of which was asked a test question."""
    config, target = run.recipe.data.distill, run.rendering_target()
    servers = connect(target, config, run.recipe.data.template_kwargs)
    for server in servers:
        run.console.say(f"distill: {server.describe()}")
    return target, ServerAnswerer(target, config, servers, lambda line: run.console.say(f"distill: {line}"))


def _asked(run: Run) -> tuple[list[Prompt], Rejects]:
    """The prompts, and rows that are none. Says what is left out."""
    rejects, told = Rejects(), list[str]()
    prompts = read_prompts(run.recipe.data.distill.prompts, rejects=rejects, seed=run.recipe.seed, say=told.append)
    for line in (*rejects.lines(), *told):
        run.console.say(f"distill: {line}")
    config = run.recipe.data.distill
    if config.prompts and not prompts:
        raise DataError("data.distill.prompts: found no prompts, expected at least one: check the path of each source")
    taken = next((prompt for prompt in prompts if config.written and prompt.id.startswith(ID)), None)
    if taken is not None:
        raise DataError(
            f"{taken.where}: id: found {taken.id!r}, expected one that does not begin with {ID!r}: "
            "ids of prompts that the target writes do (data.distill.written). Give it another id"
        )
    return prompts, rejects


def _written(run: Run, ranks: Ranks) -> Written:
    """The prompts that the target writes itself."""
    data, what = run.recipe.data, "writing prompts"
    with run.console.progress(what, "tries", first="the first ones take longer:") as advance:
        written = write_prompts(
            run.target,
            data.distill,
            run.written_path,
            run.recipe.seed,
            advance,
            dict(data.template_kwargs),
            lambda target, config: _in_process(run, target, config, what),
            ranks,
        )
    run.console.say(f"distill: {written.line()}")
    return written


def _answer(run: Run, begin: Begin, ranks: Ranks, asked: tuple[list[Prompt], Rejects]) -> dict[str, Any]:
    data, (prompts, rejects) = run.recipe.data, asked
    if data.distill.servers:
        target, answerer = _through_servers(run)
    else:
        target, answerer = run.target, _in_process(run, run.target, data.distill)
    done = total = 0
    if ranks.rank == 0:
        run.claim(begin, trains=False)
        rejects.write(run.distilled_path.with_name(run.distilled_path.name + ".rejects.jsonl"))
    written = _written(run, ranks) if data.distill.written else None
    if written is not None:
        prompts = [*prompts, *read_prompts([SourceConfig(path=str(written.path))])]
    with run.console.progress("distill", "answers", first="the first ones take longer:") as advance:

        def progress(count: int, out_of: int, message: str) -> None:
            nonlocal done, total
            done, total = count, out_of
            advance(count, out_of, message)

        path = distillation.distill(
            target,
            prompts,
            data.distill,
            run.distilled_path,
            run.recipe.seed,
            progress,
            dict(data.template_kwargs),
            answerer,
            ranks,
        )
    if isinstance(answerer, EngineAnswerer) and answerer.decoder.slow is not None:
        run.console.say(f"distill: {answerer.decoder.slow}")
    with open(path, encoding="utf-8") as lines:
        answers = sum(1 for _ in lines)
    result = {"path": str(path), "prompts": len(prompts), "answers": answers, "left": total - done}
    return result if written is None else {**result, "written": written.as_dict()}
