"""What a recipe holds: one node per room, each typed by the dataclass that the room owns."""

from __future__ import annotations

import dataclasses
import functools
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from headstart.data.config import DataConfig
from headstart.eval.config import EvalConfig, TuneConfig, check_tune
from headstart.eval.config import check_config as check_eval
from headstart.heads.base import HeadConfig
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.heads.formats.config import ExportConfig
from headstart.heads.formats.export import check_export as check_engines
from headstart.heads.formats.hub import check_published_name
from headstart.heads.numerics import DTYPES
from headstart.heads.repository import check_head_name
from headstart.heads.targets.target import TARGET_KINDS, TargetConfig
from headstart.heads.targets.tuned import check_adapter_settings
from headstart.recipes.read import shown
from headstart.train.config import TrainConfig
from headstart.train.joint.config import JointConfig, check_together

#: most bytes of a folder's name, and most characters of a path
MAX_NAME, MAX_PATH = 255, 1024
#: variables of a chat template that Headstart sets itself
TAKEN = {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}


def _environment() -> Any:
    """A field that is no key of recipes: dotted key → text (`environment.Written`) of values from the environment."""
    return field(default_factory=dict, compare=False, repr=False, metadata={"setting": False})


@dataclass
class Recipe:
    """One run, from conversations to an exported head. Subclassed per family so that `head` has the family's fields."""

    #: Name of the run.
    name: str = "???"
    #: Folder for everything that the run makes.
    run_dir: str = "runs/${name}"
    #: Also time every shorter chain in the evaluation, and name the fastest (chains only).
    shorter_chains: bool = False
    #: Where eval.max_new_tokens cuts answers, also measure τ on answers of up to so many tokens, all prompts at a time,
    #: and say it beside the headline. null does not.
    longer_answers: int | None = None
    #: Seed of the data split, of distillation and of the initial weights. train.seed and eval.seed follow it unless
    #: set.
    seed: int = 0
    #: Head that training goes on from, ours or a published one: a directory, or user/name[@revision] on the Hub. `head`
    #: must describe it (type, draft_vocab_size, feature_layers, …). null starts a fresh one.
    start_from: str | None = None
    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    joint: JointConfig = field(default_factory=JointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    environment: dict[str, Any] = _environment()


@dataclass
class Evaluation:
    """What measuring a ready-made head needs: `headstart eval|tune --head DIR --target T --data FILE`."""

    seed: int = 0
    target: TargetConfig = field(default_factory=TargetConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    environment: dict[str, Any] = _environment()


@dataclass
class Exporting:
    """What exporting a ready-made head needs: `headstart export --head DIR --target T`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    environment: dict[str, Any] = _environment()


#: the first layer: values that follow other keys
DEFAULTS: dict[str, Any] = {
    "train": {"seed": "${seed}"},
    # evaluate with the template variables of training: with other ones the head would see another kind of text
    "eval": {"seed": "${seed}", "template_kwargs": "${data.template_kwargs}"},
}


@functools.cache
def recipe_class(head_type: str) -> type[Recipe]:
    """The Recipe subclass whose `head` node is the config of the family `head_type`, a key of FAMILIES.

    A base-typed node would reject the keys that only one family has.
    """
    config = FAMILIES[head_type].config
    return dataclasses.make_dataclass(
        "Recipe", [("head", config, field(default_factory=config))], bases=(Recipe,), namespace={"__module__": __name__}
    )


def check_export(config: ExportConfig, family: str | None = None) -> None:
    """Raises: ConfigError if no engine could be exported to, or the Hub would not take the repository's name.

    Args: family: the head's family, or None if it is not known.
    """
    check_engines(config, family)
    if config.push_to_hub is not None:
        check_published_name(config.push_to_hub)


def check_name(name: str) -> None:
    """Raises: ConfigError if `runs/NAME` would not be a folder below `runs/`."""
    for part in name.split("/"):
        if part in ("", ".", "..") or not part.isprintable() or len(part.encode()) > MAX_NAME or len(name) > MAX_PATH:
            raise ConfigError(
                f"name: found {shown(name)}, expected the name of a folder below runs/: no '..', no '/' at its ends, "
                f"no control characters, at most {MAX_NAME} bytes (run_dir=… names any other place)"
            )


def check_place(key: str, place: str | None) -> None:
    """Raises: ConfigError for a path or name that is empty (it would mean the working directory) or unprintable."""
    if place is not None and (not place.strip() or any(unicodedata.category(letter) == "Cc" for letter in place)):
        raise ConfigError(f"{key}: found {shown(place)}, expected a name or a path, without control characters")


def check_target(config: TargetConfig) -> None:
    """Raises: ConfigError for settings that no target can be loaded with, wherever it is."""
    check_place("target.name", config.name)
    check_place("target.adapter", config.adapter)
    check_place("target.chat_template", config.chat_template)
    if config.dtype not in ("auto", *DTYPES):
        raise ConfigError(f"target.dtype: found {shown(config.dtype)}, expected one of auto, {', '.join(DTYPES)}")
    if config.parallel not in TARGET_KINDS:
        kinds = ", ".join(TARGET_KINDS)
        raise ConfigError(f"target.parallel: found {shown(config.parallel)}, expected one of {kinds}")
    check_adapter_settings(config.adapter, config.parallel)


def check_variables(key: str, variables: dict[str, Any]) -> None:
    """Raises: ConfigError for variables of the chat template that a record or the program sets itself."""
    if taken := sorted(TAKEN & variables.keys()):
        raise ConfigError(f"{key}: found {taken[0]!r}, which records and Headstart set themselves: remove it")


def check_joint(recipe: Recipe) -> None:
    """Raises: ConfigError for settings of joint training that cannot work, alone or together with others."""
    recipe.joint.check()
    if recipe.joint.enabled:
        check_together(recipe.target, recipe.train, recipe.data.features)


def check_recipe(recipe: Recipe) -> None:
    """What types cannot say. Raises ConfigError naming the first field that cannot work."""
    check_name(recipe.name)
    check_place("run_dir", recipe.run_dir)
    if recipe.longer_answers is not None and recipe.longer_answers <= recipe.eval.max_new_tokens:
        raise ConfigError(
            f"longer_answers: found {recipe.longer_answers}, expected more than eval.max_new_tokens="
            f"{recipe.eval.max_new_tokens}, or null"
        )
    check_place("start_from", recipe.start_from)
    check_target(recipe.target)
    recipe.data.check()
    recipe.train.check()
    check_joint(recipe)
    check_eval(recipe.eval)
    check_tune(recipe.tune)
    check_export(recipe.export, recipe.head.type)
    if recipe.start_from is not None:
        check_head_name(recipe.start_from, "start_from")
    recipe.head.check()
    check_variables("data.template_kwargs", recipe.data.template_kwargs)
    check_variables("eval.template_kwargs", recipe.eval.template_kwargs)
