"""What `headstart init` finds out: what the data is, which heads engines serve for the target, and which settings fit.

What fits is train/plan.py's to say: settings are tried in order, and the first that its estimate holds are taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from headstart.console import Console
from headstart.data.choosing.asked import read_prompts
from headstart.data.config import SourceConfig
from headstart.data.prepare import PreparedData
from headstart.data.prompts import Chats
from headstart.data.records.conversation import layout_of
from headstart.data.sources.sources import load_conversations, read_records, source_files
from headstart.fit import in_dtype, run_layout
from headstart.hardware import GIB, Hardware
from headstart.heads.base import Head
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, DataError, HeadstartError, StorageError
from headstart.heads.families import FAMILIES
from headstart.heads.files import require_disk
from headstart.heads.formats.export import engines_that_load
from headstart.heads.formats.llama_cpp import ONE_NORM
from headstart.heads.repository import is_repository
from headstart.heads.targets.fetch import TARGETS
from headstart.heads.targets.target import Target
from headstart.pipeline.data import prepare
from headstart.pipeline.run import Run
from headstart.plan import DataShape, Launch, data_of, plan_recipe
from headstart.recipes.load import load_recipe, shipped_recipes
from headstart.recipes.read import read_layer
from headstart.recipes.schema import Recipe
from headstart.recipes.writing import in_yaml
from headstart.refusals import planned_head, planned_training, refuse_ahead
from headstart.train.plan import Layout, Plan, disk_of, memory_of, remedies

#: rows of a Hub dataset that are looked at, and that a recipe made for one reads
LOOKED, HUB_LIMIT = 100, 20000
#: sizes of a pack; a run should have so many packs an epoch, so that it has enough steps
PACKS, PACKS_OF_EPOCH = (16384, 8192, 4096, 2048, 1024), 20
#: longest sample that is planned for, and the step between lengths
LONGEST, LENGTH_STEP = 4096, 256
#: conversations that are wanted for validation, and the largest share that they may take
HELD_OUT, MOST_HELD_OUT = 24, 0.2
#: on a CPU: tokens whose features take two cores ten minutes; of more, they are computed within the training's time
STORED_ON_CPU = 400_000
#: on a CPU: seconds in which the target answers prompts
ANSWERING_ON_CPU_S = 300.0
#: on a CPU: settings with which a run takes minutes (those of the recipe quickstart, and clocks)
CPU: dict[str, Any] = {
    "target.device": "cpu", "target.dtype": "float32", "head.depth": 4, "head.draft_vocab_size": 4096,
    "data.pack_tokens": 1024, "train.max_seconds": 420.0, "train.tau_prompts": 2, "train.tau_tokens": 32,
    "eval.limit": 12, "eval.max_new_tokens": 128, "eval.tree.kind": "chain", "eval.tree.depth": 3,
    "tune.batch_sizes": [1, 4, 16],
}  # fmt: skip
QUIET = Console(silent=True)


@dataclass
class Found:
    """What a data source holds.

    Attributes:
        source: as it stands in the recipe.
        count: conversations that are text; of a Hub dataset, those that the recipe reads at most.
        answered: whether they have answers; else the target answers them before training.
        layouts: names of the layouts of their records.
        notes: what a person should know.
        prepared: its samples, once they were made to see how long they are.
    """

    source: dict[str, Any]
    count: int
    answered: bool
    layouts: list[str]
    notes: list[str] = field(default_factory=list)
    prepared: PreparedData | None = None

    @property
    def config(self) -> SourceConfig:
        return SourceConfig(**self.source)

    def describe(self) -> str:
        said = counted(self.count, "conversations" if self.answered else "prompts", ",")
        said += "" if self.answered else ", which the target answers before training"
        at_most = "at most " if self.config.dataset else ""
        return f"{self.config.path or self.config.dataset}: {at_most}{said} ({', '.join(self.layouts)})"


def look_at(data: str) -> Found:
    """Read a file, folder, pattern, `workload:NAME` or the first rows of a Hub dataset, and say what it is.

    Raises: DataError naming file and line, or why there is nothing to train on; ConfigError for what is no source.
    """
    there = os.path.exists(os.path.expanduser(data))
    source: dict[str, Any] = {"path": data}
    if not there and is_repository(data) and Path(data).suffix not in (".jsonl", ".json", ".parquet", ".csv", ".txt"):
        source = {"dataset": data, "limit": LOOKED}
    else:
        source_files(data)  # says what there is not
    config = SourceConfig(**source)
    config.check("--data")
    layouts: dict[str, None] = {}
    for where, _, record in islice(read_records(config), LOOKED):
        if isinstance(record, dict):
            layouts[layout_of(record, where)] = None
    answered = prompts = held = 0
    for conversation in load_conversations([config]):
        if conversation.media is not None:
            held += 1
        elif conversation.turns or any(message["role"] == "assistant" for message in conversation.messages[1:]):
            answered += 1
        else:
            prompts += 1
    count = answered + prompts
    if not count:
        what = f"it holds only images, video or audio ({counted(held, 'records')})" if held else "it holds no record"
        raise DataError(f"--data: {data}: {what}, expected conversations or prompts of text")
    notes = [f"{counted(held, 'records')} with images, video or audio left out"] if held else []
    if answered and prompts:
        some = counted(answered, "records")
        notes.append(f"{some} with answers and {prompts} without: the target answers all of them anew")
    if "dataset" in source:
        source, count = {**source, "limit": HUB_LIMIT}, HUB_LIMIT
    elif count < 200:
        few = f"few records ({count})"
        notes.append(f"{few}: a head needs hundreds of conversations of one kind, or thousands of all kinds")
    return Found(source, count, answered > 0 and not prompts, list(layouts), notes)


@dataclass(frozen=True)
class Candidate:
    """A head that could be trained for the target.

    Attributes:
        base: the shipped recipe that the new one builds on.
        settings: by dotted key, where target or hardware need other ones than the shipped recipe has.
        engines: keys of the engines that load it for this target.
    """

    family: str
    base: str
    settings: dict[str, Any]
    engines: list[str]


def base_recipe(family: str, target: str) -> str:
    """The shipped recipe for this head and target; without one, the head's settings for any target."""
    names = {target.lower()} | {hub.hub_id.lower() for name, hub in TARGETS.items() if name == target}
    for name, path in shipped_recipes().items():
        if name.startswith("_") or not name.endswith(f"-{family}"):
            continue
        model = name.removesuffix(f"-{family}")
        said = read_layer(shipped_recipes()[f"_{model}"]).values.get("target", {}).get("name", "")
        if said.lower() in names or (said in TARGETS and TARGETS[said].hub_id.lower() in names):
            return path.stem
    return f"_{family}"


def candidates(settings: Mapping[str, Any], target: Target) -> tuple[list[Candidate], dict[str, str]]:
    """(heads that can be trained and decoded for the target; family → why not).

    Those that most engines serve come first, and where equally many do, those that stand first in FAMILIES.

    Args: settings: of target and data, by dotted key.
    Raises: ConfigError where there is none.
    """
    able, refused = [], {}
    for family in FAMILIES:
        base = base_recipe(family, target.config.name)
        try:
            recipe = recipe_of(base, settings)
            own = _small_vocabulary(recipe, target)
            if recipe.target.device == "cpu" and vars(recipe.head).get("fc_norm") == "stream":
                own |= ONE_NORM  # llama.cpp serves on a CPU
            recipe = recipe_of(base, {**settings, **own})
            refuse_ahead(recipe, target)
            head = planned_head(recipe, target)
            origin = {"target": {"name": recipe.target.name, "revision": recipe.target.revision}}
            able.append(Candidate(family, base, own, engines_that_load(head, origin)))
        except HeadstartError as error:
            refused[family] = str(error)
    if not able:
        why = next(iter(refused.values()))
        raise ConfigError(f"--target: {target.config.name}: no head can be trained for it: {why}")
    return sorted(able, key=lambda each: -len(each.engines)), refused


def _small_vocabulary(recipe: Recipe, target: Target) -> dict[str, Any]:
    """The setting that a target with fewer tokens than the usual draft vocabulary needs."""
    most = target.dims.vocab_size
    fixed = recipe.head.vocabulary_share is None
    return {"head.draft_vocab_size": most} if fixed and recipe.head.draft_tokens(most) > most else {}


def recipe_of(base: str, settings: Mapping[str, Any]) -> Recipe:
    """The recipe that inherits `base` and sets these dotted keys."""
    return load_recipe(base, [f"{key}={in_yaml(value)}" for key, value in settings.items()])


@dataclass
class Fitted:
    """Settings that fit, and the plan that says so.

    Attributes:
        settings: all keys of the recipe, by dotted key.
    """

    settings: dict[str, Any]
    plan: Plan
    shape: DataShape


def basic_settings(target: str, found: Found, hardware: Hardware, name: str) -> dict[str, Any]:
    """The settings that target, data and hardware decide without a plan."""
    answered = found.answered
    settings: dict[str, Any] = {
        "name": name,
        "target.name": target,
        "data.sources": [found.source] if answered else [],
        "data.distill.prompts": [] if answered else [found.source],
        "data.held_out_fraction": round(min(max(HELD_OUT / found.count, 0.02), MOST_HELD_OUT), 3),
    }
    return settings | ({} if hardware.gpus else {key: CPU[key] for key in ("target.device", "target.dtype")})


def fitted(chosen: Candidate, basics: Mapping[str, Any], found: Found, target: Target, hardware: Hardware) -> Fitted:
    """All settings of the recipe: the largest pack that leaves enough steps, what lowers the memory as far as it must
    be lowered, in the order of train/plan.py, and features kept where they fit.

    Raises: ConfigError or StorageError, as `headstart plan` does, where nothing fits.
    """
    ranks = hardware.gpus or 1
    launch = Launch(gpus=ranks, gpu_memory=hardware.gib, samples=found.count if found.config.dataset else None)
    basic = recipe_of(chosen.base, {**basics, **chosen.settings})
    settings = {**basics, "head.type": chosen.family, **chosen.settings, **_of_head(basic, hardware)}
    if basic.train.warmup_steps is not None:  # as many as the paper's data need: a share suits any amount
        settings["train.warmup_steps"] = None
    if not found.answered:
        own = basic.data.distill.max_new_tokens
        settings["data.distill.max_new_tokens"] = own if hardware.gpus else min(own, 128)
        if not hardware.gpus:  # the prompts that are left then do not train
            settings["data.distill.max_seconds"] = ANSWERING_ON_CPU_S
    settings["data.max_length"] = min(LONGEST, target.positions)
    settings["data.pack_tokens"] = PACKS[0]  # shipped recipes say auto, which is no number to count packs with
    run = Run(recipe_of(chosen.base, settings), QUIET, target)
    settings["data.max_length"] = _max_length(found, run, target)
    run.recipe = recipe_of(chosen.base, settings)
    shape = data_of(run, launch)
    pack = next((size for size in PACKS if shape.tokens >= size * ranks * PACKS_OF_EPOCH), PACKS[-1])
    settings |= {"data.pack_tokens": pack if hardware.gpus else CPU["data.pack_tokens"], "train.accumulation": ranks}
    settings |= _fitting(settings, chosen.base, launch, shape, target)
    if not hardware.gpus:
        settings |= _started(settings, chosen.base, target)
    run.recipe = recipe_of(chosen.base, settings)
    return Fitted(settings, plan_recipe(run.recipe, launch, QUIET, run), shape)


def _fitting(
    settings: Mapping[str, Any], base: str, launch: Launch, shape: DataShape, target: Target
) -> dict[str, Any]:
    """The settings that make the run fit; none where nothing does, which the plan then explains."""
    device = int((launch.gpu_memory or 0) * GIB)
    layers = vars(recipe_of(base, settings).head).get("layers", 1)
    for count in range(layers, 0, -1):
        changes: dict[str, Any] = {"head.layers": count} if layers > 1 else {}
        recipe = recipe_of(base, {**settings, **changes})
        where = launch.device(recipe)
        in_dtype(target, recipe, where)
        head = planned_training(recipe, target)
        ranks = launch.gpus
        layout = replace(run_layout(recipe, where, ranks, ranks, ranks, shape.supervised, 0), features="online")
        for change, tried in (("", layout), *remedies(layout, head)):
            changes |= {key: yaml.safe_load(value) for key, value in (each.split("=", 1) for each in change.split())}
            peak = memory_of(target, head, tried)[1]
            if peak <= device:
                kept = _features(recipe, target, head, tried, shape, device)
                return {**changes, "data.features": kept}
    return {}


def _started(settings: Mapping[str, Any], base: str, target: Target) -> dict[str, Any]:
    """The setting with which draft layers start from the weights of the target's last layers, where they can. In a few
    minutes on a CPU they do not learn as much from random ones (docs/results, "Levers on two CPU cores").
    """
    head = vars(recipe_of(base, settings).head)
    if head.get("start_layers", ()) is not None:  # it has no such setting, or has chosen
        return {}
    if head.get("fc_norm", "none") != "none":  # with Muon they then learn faster from random weights
        return {}
    change = {"head.start_layers": list(range(-head.get("layers", 1), 0))}
    try:
        refuse_ahead(recipe_of(base, {**settings, **change}), target)
    except HeadstartError:
        return {}
    return change


def _features(recipe: Recipe, target: Target, head: Head, layout: Layout, shape: DataShape, device: int) -> str:
    """Where the features are kept: on a GPU that has room for all of them, else live; on a CPU on disk, if it has room.

    Args: device: bytes of its memory.
    """
    if head.spec.tokens_alone:
        return "online"
    if recipe.target.device != "cpu":
        held = replace(layout, features="memory", tokens=shape.tokens)
        return "memory" if layout.ranks == 1 and memory_of(target, head, held)[1] <= device else "online"
    if shape.tokens > STORED_ON_CPU:
        return "online"
    stored = disk_of(target, head, recipe.train, replace(layout, features="stored"), None, shape.tokens)
    try:
        require_disk(Path(recipe.run_dir), sum(stored.values()), "the run")
    except StorageError:
        return "online"
    return "stored"


def _of_head(recipe: Recipe, hardware: Hardware) -> dict[str, Any]:
    """The head's and the run's settings that a person changes first: as inherited, or smaller for a CPU."""
    keys = ["head.depth", "head.draft_vocab_size", "train.epochs", "train.lr", "eval.limit", "eval.max_new_tokens"]
    parts = {key: (vars(getattr(recipe, key.split(".")[0])), key.split(".")[1]) for key in keys}
    values = {key: node[name] for key, (node, name) in parts.items() if name in node}
    if hardware.gpus:
        return {key: value for key, value in values.items() if value is not None}
    # 0 drafts all tokens, which some heads must
    smaller = {key: value for key, value in CPU.items() if not key.startswith("head.") or values.get(key)}
    for key in ("head.depth", "head.draft_vocab_size"):
        smaller |= {key: min(values[key], CPU[key])} if key in smaller and type(values[key]) is int else {}
    return {key: value for key, value in {**values, **smaller}.items() if value is not None}


def _max_length(found: Found, run: Run, target: Target) -> int:
    """The length that holds the longest conversation, or the longest prompt with its answer, up to LONGEST."""
    most = min(LONGEST, target.positions)
    if found.config.dataset:
        return min(2048, most)
    if found.answered:
        run.prepared = found.prepared = found.prepared or prepare(run)
        longest = max(len(sample) for sample in (*run.prepared.train, *run.prepared.held_out))
    else:
        chats = Chats(target.tokenizer, target.stop_token_ids)
        asked = (prompt for prompt in read_prompts([found.config]) if prompt.media is None)
        answer = run.recipe.data.distill.max_new_tokens
        longest = max(len(chats.prompt_ids(prompt)) + answer * prompt.answers for prompt in asked)
    return min(ceil(longest / LENGTH_STEP) * LENGTH_STEP, most)
