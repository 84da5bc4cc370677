"""A run: one recipe and its directory, and what its steps share. The steps are the other modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from headstart import auto
from headstart.auto import Chosen
from headstart.console import Console
from headstart.data.choosing.duplicates import require_minhash
from headstart.data.config import DistillConfig
from headstart.data.memory import SharedFeatures
from headstart.data.prepare import PreparedData
from headstart.data.samples import Sample
from headstart.data.sources.sources import load_conversations
from headstart.directory_lock import locked
from headstart.eval.prompts import eval_prompts
from headstart.fit import require_room
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.files import explain_disk, remove_leftovers, write_text
from headstart.heads.targets.load import weightless_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.heads.targets.template_date import shown_date
from headstart.pipeline.inputs import DISTILLED, Inputs
from headstart.pipeline.markers import Begin, Markers
from headstart.recipes.load import to_yaml
from headstart.recipes.schema import Recipe
from headstart.refusals import refuse_ahead
from headstart.saved_heads import target_of_head
from headstart.targets import loaded_target
from headstart.training_record import WRITTEN_PROMPTS

#: file of a run that holds the day on which it began
TEMPLATE_DATE = "data/template_date"
#: directories of a run in which a killed command may leave temporary files (checkpoints/ cleans up after itself)
WRITTEN = ("steps", "data", "features/*", "head", "head/*", "export", "export/*")
#: for messages: the settings that give an evaluation its prompts
EVAL_DATA = "Set eval.data=FILE.jsonl, data.held_out or data.held_out_fraction"


def dated_target(recipe: Recipe) -> TargetConfig:
    """The recipe's target, with the day that its chat template shows: the recipe's, or else the day the run began.

    A run that continues on another day so renders the same texts. Before a run begins, the day is today.
    """
    place = Path(recipe.run_dir) / TEMPLATE_DATE
    if recipe.target.template_date is not None or not place.is_file():
        return recipe.target
    return replace(recipe.target, template_date=place.read_text(encoding="utf-8").strip())


class Run:
    """What the steps of a run share: recipe, directory, target, console, and which steps are done.

    Args:
        target: a loaded target; None loads recipe.target when a step first needs it.
        device: overrides recipe.target.device (each rank of a distributed launch has its own).
        ahead: the steps that the command will do; `check` asks what they would refuse.
        settled: where the recipe given was `auto`: that recipe, and what was chosen; `recipe` has the choice.
        held: where features in memory stay for other runs of this process; None: they go when training is over.

    Attributes:
        prepared: the samples, once pipeline.data.prepare has made them.
        resampled: the samples that train with their copies, once pipeline.resampling has made them.
        features: what `data.features=auto` means for them, once pipeline.features.features_kind has chosen it.
        target: the recipe's target, which answers prompts and gives the features of training.
        drafted_target: the target that the trained head drafts for: the same, or with the adapter of joint training in
            its weights.
    """

    def __init__(
        self,
        recipe: Recipe,
        console: Console,
        target: Target | None = None,
        device: str | None = None,
        ahead: Sequence[str] = (),
        settled: tuple[Recipe, Chosen] | None = None,
        held: SharedFeatures | None = None,
    ):
        self.recipe, self.console, self.ahead, self.settled = recipe, console, ahead, settled
        self.dir = Path(recipe.run_dir)
        self.markers = Markers(self.dir, console.say, self.check, lambda step: console.phase(step, False, False))
        self.inputs = Inputs(recipe, self.markers)
        self.prepared: PreparedData | None = None
        self.resampled: list[Sample] | None = None
        self.features: str | None = None
        self.held = held
        self._target, self._device = target, device
        self._drafted: Target | None = None

    @property
    def target(self) -> Target:
        if self._target is None:
            config = dated_target(self.recipe)
            self._drafted = None  # one of them is in memory at a time
            self._target = self._loaded(config)
            self._keep_date(self._target)
        return self._target

    def rendering_target(self) -> Target:
        """The target for rendering and tokenising, without its weights unless it is loaded: what distillation through
        servers needs."""
        target = self._target or weightless_target(dated_target(self.recipe))
        self._keep_date(target)
        return target

    def _keep_date(self, target: Target) -> None:
        """Make later commands of this run show the same day."""
        shown, place = shown_date(target.tokenizer), self.dir / TEMPLATE_DATE
        if shown is not None and not self.console.silent and not place.is_file():
            write_text(place, f"{shown}\n")

    @property
    def drafted_target(self) -> Target:
        config = dated_target(self.recipe)
        tuned = target_of_head(self.head_dir if self.head_dir.is_dir() else None, config)
        if tuned == config:
            return self.target
        if self._drafted is None:
            self._target = None
            self._drafted = self._loaded(tuned)
        return self._drafted

    def _loaded(self, config: TargetConfig) -> Target:
        return loaded_target(replace(config, device=self._device) if self._device else config, self.console)

    @property
    def either_target(self) -> Target:
        """`target` or `drafted_target`, whichever is loaded, for the tokenizer and the stop tokens that both have."""
        return self._target or self._drafted or self.target

    @cached_property
    def weightless(self) -> Target:
        """The target; without its weights, unless it is loaded already."""
        return self._target or self._drafted or weightless_target(self.recipe.target)

    @cached_property
    def planned(self) -> Target:
        """The target without its weights."""
        return weightless_target(self.recipe.target)

    def feature_spec(self) -> FeatureSpec:
        """What the recipe's head reads of the target. It needs neither weights nor `start_from`."""
        with torch.device("meta"):
            return build_head(self.recipe.head, self.weightless.dims).spec

    @property
    def on_rank(self) -> bool:
        """Whether this process is a rank of a launch."""
        return self._device is not None

    @property
    def distilled_path(self) -> Path:
        return self.dir / DISTILLED

    @property
    def written_path(self) -> Path:
        return self.dir / WRITTEN_PROMPTS

    @property
    def held_out_path(self) -> Path:
        return self.dir / "data" / "held_out.jsonl"

    @property
    def head_dir(self) -> Path:
        return self.dir / "head"

    @property
    def quality_path(self) -> Path:
        return self.dir / "quality.json"

    def without_prompts(self) -> Run:
        """The same run without prompts to answer: its data is what there is before distillation."""
        data = replace(self.recipe.data, distill=DistillConfig())
        return Run(replace(self.recipe, data=data), self.console, self._target, self._device)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other commands out of the run directory, and remove the temporary files that a killed one left there.

        Raises: StorageError when another command works there.
        """
        with locked(self.dir, "name=… or run_dir=…"):
            self.tidy()
            yield

    def tidy(self) -> None:
        """Remove the temporary files that a killed command left. No other command may work in the run directory."""
        with explain_disk(self.dir):
            for place in (self.dir, *(path for name in WRITTEN for path in self.dir.glob(name))):
                remove_leftovers(place)

    def save_recipe(self) -> None:
        """Write the resolved recipe into the run directory."""
        write_text(self.dir / "recipe.yaml", to_yaml(self.recipe))

    def claim(self, begin: Begin, trains: bool = True) -> None:
        """Begin a step, and save the recipe, because from here on the run directory holds what this recipe makes.

        Args: trains: whether the step is a part of training, which keeps the packs that it begins with.
        """
        begin()
        self.save_recipe()
        if trains and self.settled is not None:
            auto.keep(*self.settled)

    def check(self) -> None:
        """Refuse what the steps ahead would refuse; called before the first that is not done. Loads no weights.

        Raises: HeadstartError as the step itself would raise it.
        """
        recipe, data = self.recipe, self.recipe.data
        if "eval" in self.ahead:
            self.check_eval_data()
        if "train" not in self.ahead:
            return
        refuse_ahead(recipe, self.weightless)
        if self.settled is not None:
            self.console.say(self.settled[1].describe())
        self.check_memory()
        if self.inputs.duplicates == "near":
            require_minhash()
        # A bad line must be found now, not after a large target has loaded for minutes or has answered for hours. The
        # step reads the files again. Rows of the Hub take long to read, so they are read here only before answering.
        unanswered = data.distill.asks and not self.distilled_path.is_file()
        sources = (*data.sources, *data.held_out, *data.exclude)
        for _ in load_conversations([s for s in sources if unanswered or s.path is not None]):
            pass

    def check_memory(self, tokens: int = 0) -> None:
        """Refuse a training that does not fit the device, where one process trains. Args: tokens: of the data, where
        they are known, which is when the target may be loaded already."""
        loaded = self._target is not None or self._drafted is not None
        if self.on_rank or self.recipe.target.parallel == "fsdp2" or (loaded and not tokens):
            return
        try:
            room = require_room(self.recipe, self.planned, tokens=tokens)
        except ConfigError as error:
            if self.settled is None:
                raise
            raise ConfigError(self.settled[1].explain(str(error), self.recipe)) from None
        if not tokens:
            self.console.say(f"memory: by the plan, {room}")

    def check_eval_data(self) -> None:
        """Raise DataError or ConfigError where `eval.data` is set and cannot be read."""
        if self.recipe.eval.data is not None:
            eval_prompts(self.recipe.eval)

    def require_eval_data(self) -> None:
        """Raise ConfigError where there will be nothing to evaluate on; called before hours of training."""
        data = self.recipe.data
        if self.recipe.eval.data is None and not data.held_out and data.held_out_fraction == 0:
            raise ConfigError(
                f"eval.data: not set, and data.held_out_fraction=0 holds no conversation out. {EVAL_DATA}"
            )

    def require_one_process(self, what: str, remedy: str) -> None:
        """Raise ConfigError where the target is sharded over ranks. `what`: what only one process can do."""
        if self.recipe.target.parallel == "fsdp2":
            raise ConfigError(f"target.parallel: found fsdp2, but {what}, which one process does: {remedy}")
