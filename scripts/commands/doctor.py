"""headstart doctor [RECIPE]: is this machine, and this recipe, ready?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.commands.common import Json, command_body
from headstart.heads.counting import counted

if TYPE_CHECKING:
    from headstart.data.config import DataConfig, SourceConfig
    from headstart.heads.targets.target import Target

#: most records of a file that are read
LOOKED = 100
#: (name, status, what was found). The status is ok, warn or fail
Check = tuple[str, str, str]


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="Also check this recipe and its target."),
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine, and a recipe if one is given.

    Of the machine: versions, devices, disk, memory. Of the recipe: target, chat template, data and head.
    """
    with command_body(json, libraries=True) as console:
        from rich.table import Table

        checks = _machine()
        if arguments:
            checks += _recipe(arguments[0], arguments[1:])
        table = Table(show_header=False)
        for name, status, found in checks:
            table.add_row({"ok": "ok", "warn": "WARN", "fail": "FAIL"}[status], name, found)
        failed = [name for name, status, _ in checks if status == "fail"]
        value = {"ok": not failed, "checks": [{"name": n, "status": s, "found": f} for n, s, f in checks]}
        console.result(value, table)
        if failed:
            console.say(f"not ready: {', '.join(failed)}")
            raise typer.Exit(1)


def _machine() -> list[Check]:
    import torch

    from headstart.heads.host_memory import free_bytes
    from headstart.heads.provenance import device_name, git_revision, versions
    from headstart.heads.targets.fetch import TARGETS, default_cache, find_damage

    checks: list[Check] = [("versions", "ok", ", ".join(f"{k} {v}" for k, v in versions().items()))]
    checks.append(("git revision", "ok", git_revision()))
    checks.append(("processor", "ok", device_name("cpu")))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            checks.append(
                (f"cuda:{index}", "ok", f"{device_name(f'cuda:{index}')}, {_gib(free)} free of {_gib(total)}")
            )
    else:
        checks.append(("GPU", "warn", "none found: training and decoding run on the CPU"))
    for name, path in (("disk (here)", Path.cwd()), ("disk (target cache)", default_cache())):
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free
        checks.append((name, "ok" if free > 2 << 30 else "warn", f"{_gib(free)} free at {path}"))
    memory = free_bytes()
    checks.append(("memory", "ok" if memory > 3 << 30 else "warn", f"{_gib(memory)} available"))
    for package in ("wandb", "deepspeed", "tensorboard"):
        from importlib.util import find_spec

        checks.append((package, "ok", "installed" if find_spec(package) else "not installed (optional)"))
    for name in TARGETS:
        damage = find_damage(default_cache() / name)
        found = "in the cache" if damage is None else f"not in the cache: headstart target fetch {name}"
        checks.append((f"target {name}", "ok", found))
    return checks


def _recipe(recipe: str, overrides: list[str]) -> list[Check]:
    from headstart import identity
    from headstart.data.chat.chat import ChatFormat
    from headstart.heads.targets.load import present_device, weightless_target
    from headstart.recipes.load import load_recipe
    from headstart.refusals import QUESTIONS, Question

    settings = load_recipe(recipe, overrides)
    checks: list[Check] = [("recipe", "ok", f"{recipe} → {settings.run_dir}")]
    box: dict[str, Any] = {}

    def target() -> str:
        box["target"] = loaded = weightless_target(settings.target)
        dims = loaded.dims
        return f"{dims.model_type}, {dims.num_layers} layers, hidden {dims.hidden_size}, vocabulary {dims.vocab_size}"

    def template() -> str:
        loaded = box["target"]
        chat = ChatFormat(loaded.tokenizer, loaded.stop_token_ids, dict(settings.data.template_kwargs))
        encoded = chat.probe()
        supervised = sum(turn >= 0 for turn in encoded.turn_ids)
        share = f"{supervised} of the {len(encoded.turn_ids)} tokens of a test conversation are supervised"
        return "; ".join([share, f"stop ids {loaded.stop_token_ids}", *chat.notes])

    def sources() -> str:
        data = settings.data
        count = len(identity.of_sources([*data.sources, *data.held_out, *data.exclude, *data.distill.prompts]))
        files = f"{count} {'source' if count == 1 else 'sources'}"
        return f"{files}; {looked}" if (looked := _look(settings.data, box.get("target"))) else files

    def servers() -> str:
        from headstart.data.serving.connect import connect

        connected = connect(box["target"], settings.data.distill, settings.data.template_kwargs)
        return "; ".join(server.describe() for server in connected)

    def asked(question: Question) -> Callable[[], str]:
        return lambda: question(settings, box["target"])

    checks.append(_try("device", lambda: str(present_device(settings.target.device))))
    checks.append(_try("target", target))
    if "target" in box:
        checks += [("target", "ok", note) for note in box["target"].notes]
        checks.append(_try("chat template", template))
        checks += [_try(name, asked(question)) for name, question in QUESTIONS.items()]
        if settings.data.distill.prompts and settings.data.distill.servers:
            checks.append(_try("servers", servers))
    checks.append(_try("data", sources))
    return checks


def _look(data: DataConfig, target: Target | None) -> str:
    """What becomes of the first LOOKED records of every file, in words. Sources on the Hub are not fetched.

    Raises: DataError where a record cannot be read, or none of them can be trained on.
    """
    from headstart.data.choosing.asked import read_prompts
    from headstart.data.prepare import tokenize
    from headstart.data.records.media import dropped_lines
    from headstart.data.sources.sources import load_conversations
    from headstart.heads.errors import DataError

    def first(sources: list[SourceConfig]) -> list[SourceConfig]:
        return [replace(s, limit=min(s.limit or LOOKED, LOOKED)) for s in sources if s.path is not None]

    prompts = read_prompts(first(data.distill.prompts))
    held = dropped_lines((prompt.media, prompt.where) for prompt in prompts if prompt.media is not None)
    if prompts and all(prompt.media is not None for prompt in prompts):
        raise DataError(f"data.distill.prompts: none of the first prompts can be answered: {'; '.join(held)}")
    files = first([*data.sources, *data.held_out])
    if target is None or not files:
        return "; ".join(held)
    samples, report = tokenize(load_conversations(files), target.tokenizer, data, target.stop_token_ids)
    if not samples and not data.distill.asks:
        raise DataError("none of the first records can be trained on\n" + "\n".join(report.lines()))
    reasons = "; ".join(sorted(report.dropped, key=lambda reason: -len(report.dropped[reason]))[:3])
    left = f", {report.dropped_count} of them dropped ({reasons}; headstart inspect says where)" if reasons else ""
    return "; ".join([f"{counted(report.conversations, 'records')} read{left}", *held])


def _try(name: str, check: Callable[[], str]) -> Check:
    from headstart.heads.errors import HeadstartError

    try:
        return name, "ok", check()
    except HeadstartError as error:
        return name, "fail", str(error)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
