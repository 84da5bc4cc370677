"""What the steps of a run depend on. A marker holds the values of its step, which is done again when they change."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from headstart import identity
from headstart.data.choosing.split import KEEPING_RULE, rule_of
from headstart.data.config import DataConfig, DistillConfig
from headstart.pipeline.markers import Markers
from headstart.recipes.load import to_dict
from headstart.recipes.schema import Recipe
from headstart.saved_heads import find_head
from headstart.train.config import ADDED, TrainConfig

#: settings of `train` that do not change the head: how ranks share the work, what is logged, what is saved and when
WATCHING = (
    "parallel",
    "capture",
    "tracker",
    "project",
    "log_every",
    "prefetch",
    "resume",
    "save_every",
    "keep",
    "disk_wait",
    "check_memory",
)
#: settings of `joint` that say what is measured after training
GUARDING = ("max_perplexity_rise", "guard_prompts", "guard_tokens")
#: settings of `data` that change how features are stored, not what they are
STORING = ("shard_tokens",)
#: settings of `data.distill` that say how servers are asked
ASKING = ("server_timeout", "server_tries", "server_patience")
#: settings of `data.distill` that say how the target writes prompts
WRITING = ("written", "written_temperature", "written_top_p", "written_max_tokens")
#: settings of `data` that runs of an earlier version do not have: equal to their defaults, they are left out
LATER = ("near_threshold", "most_repeats", "resampled_copies", "resampled_share")
#: file of a run that holds the answers to the recipe's prompts
DISTILLED = "data/distilled.jsonl"


class Inputs:
    """The inputs of the steps that make a head, as JSON values. Each is computed when it is first asked for."""

    def __init__(self, recipe: Recipe, markers: Markers):
        self._recipe, self._markers = recipe, markers

    @cached_property
    def distill(self) -> dict[str, Any]:
        config = self._recipe.data.distill
        return {
            "target": identity.of_target(self._recipe.target),
            "prompts": identity.of_sources(config.prompts),
            "settings": _distilling(config),
            "template_kwargs": dict(self._recipe.data.template_kwargs),
            "seed": self._recipe.seed,
        }

    @cached_property
    def data(self) -> dict[str, Any]:
        data, default = self._recipe.data, DataConfig()
        usual = [name for name in LATER if getattr(data, name) == getattr(default, name)]
        if not data.resampled_copies:
            usual.append("resampled_share")  # of no copies
        return {
            "target": identity.of_target(self._recipe.target),
            "sources": identity.of_sources(data.sources),
            "held_out": identity.of_sources(data.held_out),
            "exclude": identity.of_sources(data.exclude) or None,  # as in runs made before this setting
            "distilled": self._distilled() if data.distill.asks else None,
            "distilled_weight": data.distill.weight,
            "cut_answers": None if data.distill.cut_answers == "keep" else data.distill.cut_answers,
            "split": rule_of(self.duplicates),
            "settings": identity.without(
                dataclasses.asdict(data), "distill", "sources", "held_out", "exclude", "duplicates", *STORING, *usual
            ),
            "seed": self._recipe.seed,
        }

    @cached_property
    def duplicates(self) -> str:
        """`data.duplicates`. Where it is null, a run of an earlier version goes on to keep them."""
        if self._recipe.data.duplicates is not None:
            return self._recipe.data.duplicates
        begun = [self._markers.read(step).get("inputs", {}).get("data", {}) for step in ("train", "features")]
        kept = any(isinstance(data, dict) and data.get("split") == KEEPING_RULE for data in begun)
        return "keep" if kept else "exact"

    def _distilled(self) -> dict[str, Any]:
        """What the answers depend on; if the time limit left prompts unanswered, also the answers themselves."""
        result = self._markers.read("distill").get("result") or {}
        path = self._markers.run_dir / DISTILLED
        partial = bool(result.get("left")) and path.is_file()
        return {**answered(self.distill), "answers": identity.of_file(path) if partial else None}

    @cached_property
    def train(self) -> dict[str, Any]:
        recipe = self._recipe
        default = TrainConfig()
        usual = [name for name in ADDED if getattr(recipe.train, name) == getattr(default, name)]
        settings = identity.without(dataclasses.asdict(recipe.train), *WATCHING, *usual)
        inputs = {"data": self.data, "head": recipe.head.identity(), "train": settings}
        if recipe.start_from is not None:
            inputs["start_from"] = identity.of_head(find_head(recipe.start_from, "start_from"))
        if recipe.joint.enabled:
            inputs["joint"] = identity.without(dataclasses.asdict(recipe.joint), *GUARDING)
        return inputs

    def recipe_facts(self) -> dict[str, Any]:
        """The recipe as saved heads and exports hold it. Each file has its digest, because its name will be removed."""
        values = to_dict(self._recipe)
        data, distill = values["data"], values["data"]["distill"]
        lists = [(data, "sources", self.data), (data, "held_out", self.data), (distill, "prompts", self.distill)]
        if data.get("exclude"):
            lists.append((data, "exclude", self.data))
        for node, name, inputs in lists:
            digests = [{key: value for key, value in source.items() if key == "sha256"} for source in inputs[name]]
            node[name] = [{**source, **digest} for source, digest in zip(node[name], digests, strict=True)]
        return values


def distilling(config: DistillConfig) -> dict[str, Any]:
    """The settings of distillation. Those of writing prompts count only where some are written, as in older runs."""
    settings = dataclasses.asdict(config)
    return settings if config.written else identity.without(settings, *WRITING)


def _distilling(config: DistillConfig) -> dict[str, Any]:
    """The settings of distillation. Those of servers count only through servers: older runs have no value of them."""
    settings = identity.without(distilling(config), "prompts", "weight", "cut_answers")
    return settings if config.servers else identity.without(settings, "servers", "top_logprobs", *ASKING)


def answered(inputs: dict[str, Any]) -> dict[str, Any]:
    """The part of distillation's inputs that existing answers depend on. Another time limit keeps the answers; so does
    another list of servers, and another patience with them."""
    settings = identity.without(inputs["settings"], "max_seconds", "servers", *ASKING)
    return {**inputs, "settings": {**settings, **({"servers": True} if inputs["settings"].get("servers") else {})}}


def kept(inputs: dict[str, Any]) -> dict[str, Any]:
    """The part of distillation's inputs that may not change while it goes on. Through servers, answers are found by
    what was asked, so other prompts and other numbers of samples keep those that are still asked for."""
    same = answered(inputs)
    if not inputs["settings"].get("servers"):
        return same
    return {**identity.without(same, "prompts"), "settings": identity.without(same["settings"], "samples_per_prompt")}


def lasting(inputs: dict[str, Any]) -> dict[str, Any]:
    """The part of training's inputs that may not change under way: data, head, seed. A run goes on if others change."""
    return {**inputs, "train": {"seed": inputs["train"]["seed"]}}
