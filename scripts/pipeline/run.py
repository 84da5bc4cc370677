"""The steps of a run, from conversations to an exported head. Every command calls some of them; `run` calls all.

    distill → (features) → train → eval → export         runs/NAME/{data, features, checkpoints, head, report.*, export}

Imports are at the top of functions where they cost seconds and not every command needs them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headstart import identity
from headstart.console import Console
from headstart.data.config import DistillConfig, SourceConfig
from headstart.data.distill import distill
from headstart.data.features import OnlineFeatures, StoredFeatures, build_store
from headstart.data.memory import MemoryFeatures
from headstart.data.packing import plan_packs
from headstart.data.prepare import ALONE, PreparedData, Ranks, prepare
from headstart.data.samples import Sample, supervise_everything, token_counts
from headstart.data.sources import load_conversations, read_prompts
from headstart.data.split import SPLIT_RULE
from headstart.eval.config import RETIRED
from headstart.eval.measuring.report import render_saved
from headstart.heads import vocab
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, DataError, FormatError, Terminated
from headstart.heads.families import build_head
from headstart.heads.files import read_json, write_json, write_text
from headstart.heads.formats import check_export, save_head
from headstart.heads.formats.shards import shard_bytes
from headstart.heads.formats.sidecar import notes
from headstart.heads.provenance import provenance
from headstart.heads.published import published
from headstart.heads.targets.target import Target, TargetConfig
from headstart.heads.targets.template_date import shown_date
from headstart.pipeline.markers import Begin, Steps, no_begin
from headstart.recipes.environment import names_of
from headstart.recipes.load import to_dict, to_yaml
from headstart.recipes.schema import Recipe
from headstart.saved_heads import bound_head, continued_head, exported, find_head, untrained_head
from headstart.targets import loaded_target
from headstart.train.checkpoints.resume import TRAINED

#: settings that change how training is watched, not what it makes
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
)
#: parts of a recipe that say how a head was made; the others say what is done with it
MAKING = ("seed", "start_from", "head", "data", "train")
#: tokens of each of two samples whose features are compared between training and serving before an export
PARITY_TOKENS = 96
#: file of a run that holds the day on which it began
TEMPLATE_DATE = "data/template_date"
#: settings of the export node that say where it is uploaded
PUBLISHING = ("push_to_hub", "private", "commit_message")
#: settings of the data node that change how features are stored, not what they are
STORING = ("shard_tokens",)
EVAL_DATA = "Set eval.data=FILE.jsonl, data.held_out or data.held_out_fraction"


def dated_target(recipe: Recipe) -> TargetConfig:
    """The recipe's target with the day that a chat template shows: the one asked for, else that of the run's begin.

    A run that goes on, or is evaluated, on another day renders as it did; before it begins, the day is today.
    """
    place = Path(recipe.run_dir) / TEMPLATE_DATE
    if recipe.target.template_date is not None or not place.is_file():
        return recipe.target
    return replace(recipe.target, template_date=place.read_text(encoding="utf-8").strip())


class Run:
    """One recipe at work in its run directory.

    Args:
        target: a loaded target; None loads recipe.target when a step first needs it.
        device: overrides recipe.target.device (each rank of a distributed launch has its own).
        ahead: the steps that the command is for; `check` asks what they would refuse.
    """

    def __init__(
        self,
        recipe: Recipe,
        console: Console,
        target: Target | None = None,
        device: str | None = None,
        ahead: Sequence[str] = (),
    ):
        self.recipe, self.console, self.ahead = recipe, console, ahead
        self.dir = Path(recipe.run_dir)
        self.steps = Steps(self.dir, console.say, self.check)
        self._target, self._device = target, device
        self._prepared: PreparedData | None = None

    @property
    def target(self) -> Target:
        if self._target is None:
            config = dated_target(self.recipe)
            self._target = loaded_target(replace(config, device=self._device) if self._device else config, self.console)
            shown, place = shown_date(self._target.tokenizer), self.dir / TEMPLATE_DATE
            if shown is not None and not self.console.silent and not place.is_file():
                write_text(place, f"{shown}\n")  # the day on which this run began, for every command after this one
        return self._target

    @property
    def distilled_path(self) -> Path:
        return self.dir / "data" / "distilled.jsonl"

    @property
    def held_out_path(self) -> Path:
        return self.dir / "data" / "held_out.jsonl"

    @property
    def head_dir(self) -> Path:
        return self.dir / "head"

    def save_recipe(self) -> None:
        """Write the resolved recipe into the run directory."""
        write_text(self.dir / "recipe.yaml", to_yaml(self.recipe))

    def recipe_facts(self) -> dict[str, Any]:
        """The recipe as artefacts carry it: own data is told by what it is, since its name stays here."""
        values = to_dict(self.recipe)
        data, read, asked = values["data"], self.data_inputs, self.distill_inputs
        lists = [(data, "sources", read), (data, "held_out", read), (data["distill"], "prompts", asked)]
        for node, name, inputs in lists:
            digests = [{key: found[key] for key in found if key == "sha256"} for found in inputs[name]]
            node[name] = [{**source, **digest} for source, digest in zip(node[name], digests, strict=True)]
        return values

    def as_trained(self, values: dict[str, Any]) -> dict[str, Any]:
        """A recipe's values, with those that the trained head was made by: it is measured, whatever this command says
        of other heads."""
        made = notes(self.head_dir).get("recipe") or {}
        return values | {name: made[name] for name in MAKING if name in made}

    # -- what each step depends on ---------------------------------------------------------------------------------

    @cached_property
    def distill_inputs(self) -> dict[str, Any]:
        config = self.recipe.data.distill
        return {
            "target": identity.of_target(self.recipe.target),
            "prompts": identity.of_sources(config.prompts),
            "settings": identity.without(dataclasses.asdict(config), "prompts"),
            "template_kwargs": dict(self.recipe.data.template_kwargs),
            "seed": self.recipe.seed,
        }

    @cached_property
    def data_inputs(self) -> dict[str, Any]:
        data = self.recipe.data
        values = identity.without(dataclasses.asdict(data), "distill", "sources", "held_out", *STORING)
        return {
            "target": identity.of_target(self.recipe.target),
            "sources": identity.of_sources(data.sources),
            "held_out": identity.of_sources(data.held_out),
            "distilled": self._distilled() if data.distill.prompts else None,
            "split": SPLIT_RULE,
            "settings": values,
            "seed": self.recipe.seed,
        }

    def _distilled(self) -> dict[str, Any]:
        """What the answers depend on; where time was over before all were given, that is which ones there are."""
        result = self.steps.marker("distill").get("result") or {}
        partial = bool(result.get("left")) and self.distilled_path.is_file()
        return {
            **answered(self.distill_inputs),
            "answers": identity.of_file(self.distilled_path) if partial else None,
        }

    @cached_property
    def train_inputs(self) -> dict[str, Any]:
        settings = identity.without(dataclasses.asdict(self.recipe.train), *WATCHING)
        inputs = {"data": self.data_inputs, "head": dataclasses.asdict(self.recipe.head), "train": settings}
        if self.recipe.start_from is not None:
            inputs["start_from"] = identity.of_head(find_head(self.recipe.start_from, "start_from"))
        return inputs

    # -- what would be refused -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Ask everything that the steps ahead would refuse, before the first that is not done. Loads no weights.

        Raises: HeadstartError of the kind, and with the words, that the step itself would raise.
        """
        recipe, data = self.recipe, self.recipe.data
        if "eval" in self.ahead:
            self.check_eval_data()
        if "train" not in self.ahead:
            return
        from headstart.refusals import refuse_ahead

        refuse_ahead(recipe, self.light)
        # read again when it is their turn: a bad line must not come to light after hours of answering, nor after the
        # minutes that a large target takes to load (rows of the Hub come but once)
        hours = bool(data.distill.prompts) and not self.distilled_path.is_file()
        for _ in load_conversations([s for s in (*data.sources, *data.held_out) if hours or s.path is not None]):
            pass

    def check_eval_data(self) -> None:
        """Raise DataError or ConfigError where `eval.data` is given and cannot be read."""
        from headstart.eval.prompts import load_prompts

        config = self.recipe.eval
        if config.data is not None:
            load_prompts(config.data, config.limit, config.limit_per_task, config.max_turns, config.task_field)

    # -- steps -----------------------------------------------------------------------------------------------------

    def distill(self) -> dict[str, Any] | None:
        """Answer the recipe's prompts with the target; None when it has none."""
        if not self.recipe.data.distill.prompts:
            return None
        path = self.distilled_path
        skipped = path.with_name(path.name + ".skipped.json")
        return self.steps.run(
            "distill", self.distill_inputs, [path], self._distill, leftovers=[skipped], lasting=answered, extends=True
        )

    def require_eval_data(self) -> None:
        """Raise ConfigError where there will be nothing to evaluate on: before hours of training, not after."""
        data = self.recipe.data
        if self.recipe.eval.data is None and not data.held_out and data.held_out_fraction == 0:
            raise ConfigError(
                f"eval.data: not set, and data.held_out_fraction=0 holds no conversation out. {EVAL_DATA}"
            )

    def _alone(self, what: str, remedy: str) -> None:
        """Raises: ConfigError where a step that one process does would need a target that is sharded over ranks."""
        if self.recipe.target.parallel == "fsdp2":
            raise ConfigError(f"target.parallel: found fsdp2, but {what}, which one process does: {remedy}")

    def _distill(self, begin: Begin) -> dict[str, Any]:
        from headstart.eval.decoding.generation import EngineGenerator

        self._alone(
            "the prompts are not answered yet",
            "run `headstart distill RECIPE target.parallel=device_map` first (the layers over all GPUs of a machine)",
        )
        if "train" in self.ahead:
            from headstart.refusals import require_decoding

            require_decoding(self.target, self._skeleton().spec, self.recipe.export.force)
        data, generator = self.recipe.data, None
        prompts = read_prompts(data.distill.prompts)
        # captured cycles need a GPU, and one that holds the whole target
        if self.target.device.type == "cuda" and self.recipe.target.parallel != "device_map":
            generator = EngineGenerator(self.target, data.distill)
        target, counted = self.target, (0, 0)
        self._begin(begin)
        with self.console.progress("distill", "answers") as advance:

            def progress(done: int, total: int, message: str) -> None:
                nonlocal counted
                counted = done, total
                advance(done, total, message)

            path = distill(
                target,
                prompts,
                data.distill,
                self.distilled_path,
                self.recipe.seed,
                progress,
                dict(data.template_kwargs),
                generator,
            )
        with open(path, encoding="utf-8") as lines:
            answers = sum(1 for _ in lines)
        done, planned = counted
        return {"path": str(path), "prompts": len(prompts), "answers": answers, "left": planned - done}

    def prepare(self, ranks: Ranks = ALONE) -> PreparedData:
        """Tokenised training and held-out samples; the report goes to data/report.json and the prompts beside it.

        Args: ranks: processes that call this together, the first time, and share the tokenising.
        """
        if self._prepared is None:
            distilled = [SourceConfig(path=str(self.distilled_path))] if self.recipe.data.distill.prompts else []
            if distilled and not self.distilled_path.is_file():
                raise DataError(
                    f"{self.distilled_path}: no such file: the recipe's prompts (data.distill.prompts) were not "
                    "answered in this run. If it was made with other overrides, give them again, or "
                    f"{self.dir / 'recipe.yaml'} as the recipe, which has them; otherwise run `headstart distill` with "
                    "the same arguments first"
                )
            tokenizer, stops = self.target.tokenizer, self.target.stop_token_ids
            self._prepared = data = prepare(self.recipe.data, tokenizer, stops, distilled, self.recipe.seed, ranks)
            for line in data.report.lines():
                self.console.say(f"data: {line}")
            if self.recipe.data.supervise == "all":
                self.console.say("data: data.supervise=all trains on every token of these, prompts too")
            self.console.say(f"data: {len(data.train)} samples to train on, {len(data.held_out)} held out")
            for line in data.split.lines():
                self.console.say(f"data: {line}")
            if "eval" in self.ahead and self.recipe.eval.data is None and not data.held_out:
                raise DataError(f"eval.data: not set, and no conversation is held out. {EVAL_DATA}")
        return self._prepared

    def of_sources_alone(self) -> Run:
        """This run without its prompts: what there is to see before they are answered."""
        data = replace(self.recipe.data, distill=DistillConfig())
        return Run(replace(self.recipe, data=data), self.console, self._target, self._device)

    def trained_samples(self, data: PreparedData) -> list[Sample]:
        """What the loop trains on: the training samples under `data.supervise`."""
        if self.recipe.data.supervise == "answers":
            return data.train
        return [supervise_everything(sample) for sample in data.train]

    def save_data_report(self, data: PreparedData) -> None:
        held = data.held_out_report
        report = {"train": data.report.as_dict(), "held_out": held.as_dict() if held else None}
        report["split"] = data.split.as_dict()
        write_json(self.dir / "data" / "report.json", report)
        records = [
            {"id": sample.id, "task": sample.meta.get("task") or "held_out", "prompt_token_ids": first_prompt(sample)}
            for sample in held_out_prompts(data)
        ]
        write_text(self.held_out_path, "".join(json.dumps(record) + "\n" for record in records))

    def features(self) -> None:
        """Store the hidden states of all samples, where the recipe asks for it."""
        if self.recipe.data.features != "stored":
            return
        store = self.dir / "features"
        if self.recipe.target.parallel == "fsdp2" and (store / "train" / "manifest.json").is_file():
            return  # what it holds is checked when it is read
        self._alone("the features are not stored yet", "set data.features=online")
        layers = list(self._skeleton().spec.layer_ids)
        inputs = {"data": self.data_inputs, "feature_layers": layers}
        self.steps.run("features", inputs, [store / "train"], self._features, caches=[store])

    def _features(self, begin: Begin) -> dict[str, Any]:
        data, config = self.prepare(), self.recipe.data
        spec, store = self._skeleton().spec, self.dir / "features"
        self._begin(begin)
        for name, samples in (("train", self.trained_samples(data)), ("held_out", data.held_out)):
            if not samples:
                continue
            with self.console.progress(f"features ({name})", "tokens") as advance:
                build_store(
                    self.target, samples, spec, store / name, config.features_dtype, config.shard_tokens,
                    config.pack_tokens, advance,
                )  # fmt: skip
        size = sum(path.stat().st_size for path in store.rglob("*.safetensors"))
        return {"path": str(store), "layer_ids": list(spec.layer_ids), "bytes": size}

    def _begin(self, begin: Begin) -> None:
        """From here on the run directory is this recipe's."""
        begin()
        self.save_recipe()

    def _skeleton(self) -> Head:
        """The head without memory or the target's weights: for what it reads and what it is made of."""
        dims = self.light.dims
        with torch.device("meta"):
            return build_head(self.recipe.head, dims)

    @cached_property
    def light(self) -> Target:
        """The target without its weights."""
        from headstart.targets import weightless_target

        return self._target or weightless_target(self.recipe.target)

    def train(self) -> dict[str, Any]:
        """Train the head and save it in the portable format. Ends early, resumably, at the first Ctrl-C."""
        self.check_layout(1, 1)
        if not self.is_trained():
            self.features()
        return self.train_once(None)

    def check_layout(self, ranks: int, node_ranks: int, kind: str | None = None) -> None:
        """Raise ConfigError where so many ranks cannot train this recipe; see train.setup.check_layout."""
        from headstart.train.launching.setup import check_layout

        check_layout(kind or self.recipe.train.parallel, self.recipe.train, self.recipe.target, ranks, node_ranks)

    def is_trained(self) -> bool:
        """Whether a head trained like this is there, and may stay (`train.resume`)."""
        outputs = [self.head_dir, self.held_out_path]
        return self.recipe.train.resume and self.steps.is_done("train", self.train_inputs, outputs)

    def train_once(self, accelerator: Any, watch: Any = None) -> dict[str, Any]:
        """`train_head` as a step: skipped when it is done, its leftovers moved away when they belong to another run."""
        outputs = [self.head_dir, self.held_out_path]
        return self.steps.run(
            "train",
            self.train_inputs,
            outputs,
            lambda begin: self.train_head(accelerator, watch, lambda: self._begin(begin)),
            leftovers=[self.dir / name for name in TRAINED],
            lasting=lasting,
            again="" if self.recipe.train.resume else "as asked (train.resume=false)",
            worth=lambda: self.head_dir.is_dir() or any((self.dir / "checkpoints").glob("step-*")),
        )

    def train_head(self, accelerator: Any, watch: Any = None, begin: Begin = no_begin) -> dict[str, Any]:
        """Train on the ranks of `accelerator` (None: this process alone) under their `watch`; rank 0 writes.

        Args: begin: called when everything is ready to train on.
        """
        from headstart.refusals import require_decoding
        from headstart.train.loop import train

        recipe, target, data = self.recipe, self.target, self.prepare()
        main = accelerator is None or accelerator.is_main_process
        head = self.fresh_head(data)
        samples = self.trained_samples(data)
        source = self._source(samples, "train", head, head.depth)
        self._say_coverage(head, source)
        origin = {**provenance(target.device), "recipe": self.recipe_facts(), "target": target.fingerprint()}
        validator = self._validator(data, head, accelerator)
        require_decoding(target, head.spec, recipe.export.force)
        begin()
        if main:
            self.save_data_report(data)
        result = train(
            head,
            source,
            target.teacher,
            source.lengths,
            recipe.train,
            self.dir,
            validator,
            provenance=origin,
            pack_tokens=recipe.data.pack_tokens,
            supervised=[sample.supervised for sample in samples],
            accelerator=accelerator,
            watch=watch,
            progress=not self.console.silent,
            chain=self.chain(head),
        )
        if result.stopped == "signal":
            raise KeyboardInterrupt if result.interrupted else Terminated
        values = dataclasses.asdict(result)
        if main:
            origin["training"] = values
            # counts alone: names of conversations are the user's
            origin["data"] = {name: n for name, n in data.report.as_dict().items() if isinstance(n, int | float)}
            save_head(head, self.head_dir, origin, max_shard_bytes=shard_bytes(recipe.export.max_shard_size))
        return {**values, "head": str(self.head_dir)}

    def fresh_head(self, data: PreparedData) -> Head:
        """The head as training starts: seeded, its draft vocabulary taken from the supervised tokens."""
        target, config = self.target, self.recipe.head
        torch.manual_seed(self.recipe.seed)
        if self.recipe.start_from is not None:
            self.console.say(f"training goes on from {self.recipe.start_from}")
            head = continued_head(self.recipe.start_from, config, target)
            target.keep_rows(head.draft_ids_U)
            return head
        head = build_head(config, target.dims)
        size, draft_ids_U = head.draft_vocab_size, None
        if size is not None:
            count_V = token_counts(data.train, target.dims.vocab_size)
            draft_ids_U = vocab.choose_draft_vocab(count_V, size, target.stop_token_ids)
            covered = vocab.coverage(count_V, draft_ids_U)
            share = f"{size} of {target.dims.vocab_size} tokens, {covered:.1%} of those that the data's answers hold"
            self.console.say(f"draft vocabulary: {share}")
        head = head.to(target.device)
        head.initialise(target.ends, draft_ids_U)
        target.keep_rows(head.draft_ids_U)
        head.bind(target.ends)
        return head

    def _say_coverage(self, head: Head, source: OnlineFeatures | StoredFeatures | MemoryFeatures) -> None:
        """Say how many of a few rows the draft vocabulary lets train; ranks that fetch together learn it later."""
        from headstart.train.coverage import measure_coverage

        if head.draft_ids_U is None or self.target.lockstep:
            return
        inside, rows = measure_coverage(head, source, self.recipe.seed)
        if rows:
            share = f"{inside / rows:.1%} of {rows} supervised rows of some training samples"
            more = "" if inside / rows >= 0.9 else "; a larger head.draft_vocab_size lets more of them train"
            said = f"draft vocabulary: the target's choice is in it on {share}; the others carry no loss{more}"
            self.console.say(said)

    def chain(self, head: Head) -> int:
        """Drafts of the chain that training measures: the evaluation's depth, unless `train.tau_depth` says another."""
        depth = self.recipe.train.tau_depth or self.recipe.eval.tree.depth
        return depth if head.longest_chain is None else min(depth, head.longest_chain)

    def _source(
        self, samples: list[Sample], name: str, head: Head, depth: int
    ) -> OnlineFeatures | StoredFeatures | MemoryFeatures:
        """Args: depth: of the anchors."""
        if self.recipe.data.features == "memory":
            with self.console.progress(f"features ({name})", "tokens") as advance:
                return MemoryFeatures(self.target, samples, head.spec, depth, progress=advance)
        if self.recipe.data.features != "stored":
            return OnlineFeatures(self.target, samples, head.spec, depth)
        device, fingerprint = self.target.device, self.target.fingerprint()
        return StoredFeatures(self.dir / "features" / name, depth, device, head.spec, fingerprint, samples)

    def _validator(self, data: PreparedData, head: Head, accelerator: Any) -> Any:
        from headstart.eval.measuring.benchmark import tau_probe
        from headstart.train.step import autocast_dtype
        from headstart.train.validate import Validator

        if not data.held_out:
            return None
        config, target = self.recipe.train, self.target
        chain = self.chain(head)
        source = self._source(data.held_out, "held_out", head, max(head.depth, chain))
        packs = plan_packs(source.lengths, self.recipe.data.pack_tokens, 0, 0)
        prompts = [first_prompt(sample) for sample in held_out_prompts(data)[: config.tau_prompts]]

        def probe(trained: Head) -> float:
            return tau_probe(target, trained, prompts, config.tau_tokens, chain)

        rank, size = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
        autocast = autocast_dtype(config.mixed_precision, target.device)
        measure = probe if prompts and not target.lockstep else None  # one rank alone cannot run a sharded target
        return Validator(source, packs, target.teacher, measure, config.tau_every, autocast, rank, size, chain)

    def eval(self) -> dict[str, Any]:
        """Measure the trained head; writes report.json and report.md."""
        from headstart.eval.prompts import describe_data
        from headstart.evaluation import say_own_data

        config = self.recipe.eval
        data = config.data or str(self.held_out_path)
        trained = self.head_dir.is_dir()
        if not trained and config.synthetic_acceptance is None:
            raise FormatError(
                f"{self.head_dir}: no trained head there; run `headstart train` first, give --head DIR, or ask what a "
                "head would gain with eval.synthetic_acceptance=0.8 eval.data=FILE.jsonl"
            )
        held_out = self.held_out_path
        if not config.data and not (held_out.is_file() and held_out.stat().st_size):
            raise ConfigError(f"eval.data: not set, and {held_out} has no conversation. {EVAL_DATA}")
        inputs = {
            "head": identity.of_saved_head(self.head_dir) if trained else dataclasses.asdict(self.recipe.head),
            "target": identity.of_target(self.recipe.target),
            "eval": {**RETIRED, **dataclasses.asdict(config)},
            "data": describe_data(data),
            "shorter_chains": self.recipe.shorter_chains,
        }
        # what is drawn and written from report.json can be made again and does not count
        report, rendered = self.dir / "report.json", self.dir / "report.md"
        result = self.steps.run("eval", inputs, [report], lambda begin: self._eval(data, begin), leftovers=[rendered])
        if not rendered.is_file():
            render_saved(report, self.console.say)
        say_own_data(config.data, self.console)
        return result

    def _eval(self, data: Any, begin: Begin) -> dict[str, Any]:
        from headstart.evaluation import UNTRAINED, measure

        self.check_eval_data()

        place = self.head_dir if self.head_dir.is_dir() else None
        if place is not None:
            head, info = bound_head(place, self.target), {"path": str(place)}
        else:
            head, info = untrained_head(self.recipe.head, self.target), UNTRAINED
        config, shorter = replace(self.recipe.eval, data=data), self.recipe.shorter_chains
        values = self.as_trained(to_dict(self.recipe))
        report = measure(self.target, head, config, self.console, values, info, shorter, place)
        begin()
        path = report.save(self.dir)
        return {"report": str(path), **summary(report.to_json())}

    def export(self) -> dict[str, Any]:
        """Write the head for serving engines and check what was written."""
        if not self.head_dir.is_dir():
            raise FormatError(f"{self.head_dir}: no trained head there; run `headstart train` first")
        config = self.recipe.export
        settings = identity.without(dataclasses.asdict(config), *PUBLISHING)
        inputs = {"head": identity.of_saved_head(self.head_dir), "export": settings}
        if tuned := notes(self.head_dir).get("tuned"):
            inputs["tuned"] = tuned
        # an export that a check refuses is made again in a minute: the one before it is worth more
        result = self.steps.run("export", inputs, [self.dir / "export"], self._export, worth=lambda: False)
        return result if config.push_to_hub is None else {**result, **self.publish()}

    def publish(self) -> dict[str, Any]:
        """Upload the export with a model card written from report.json."""
        from headstart.heads.formats import push_export

        place, report = self.dir / "export", self.dir / "report.json"
        inputs = {
            "export": identity.of_file(place / "headstart.json"),
            "report": identity.of_file(report) if report.is_file() else None,
            "hub": {name: getattr(self.recipe.export, name) for name in PUBLISHING},
        }

        def push(begin: Begin) -> dict[str, Any]:
            begin()
            measured = read_json(report) if report.is_file() else None
            names = names_of(self.recipe.environment)
            return {"url": push_export(place, self.recipe.export, measured, environment=names)}

        return self.steps.run("publish", inputs, [], push)

    def _export(self, begin: Begin) -> dict[str, Any]:
        from headstart.heads.formats import export_head
        from headstart.serving_check import compare_features, probe_sequences, require_parity

        check_export(self.recipe.export, read_json(self.head_dir / "headstart.json").get("type"))
        head = bound_head(self.head_dir, self.target, torch.float32)
        origin = {**read_json(self.head_dir / "headstart.json").get("provenance", {}), **provenance(self.target.device)}
        origin |= {"recipe": self.as_trained(self.recipe_facts()), "target": self.target.fingerprint()}
        data = self.prepare()
        samples = [sample for sample in [*data.held_out, *data.train] if len(sample) >= 4][:2]
        texts = [sample.token_ids[:PARITY_TOKENS].tolist() for sample in samples]
        parity = compare_features(self.target, head.spec, texts or probe_sequences(self.target))
        require_parity(parity, self.recipe.export.force)
        self.console.say(f"serving sees the features that training saw: {parity.rows} tokens, worst {parity.worst:.2g}")
        origin |= {"serving_parity": parity.to_json(), "tuned": notes(self.head_dir).get("tuned")}
        place, names = self.dir / "export", names_of(self.recipe.environment)
        begin()
        return exported(export_head(head, place, self.recipe.export, published(origin, names)), self.console)


def answered(inputs: dict[str, Any]) -> dict[str, Any]:
    """What distilled answers depend on: with another time limit they stay, and more come to them."""
    return {**inputs, "settings": identity.without(inputs["settings"], "max_seconds")}


def lasting(inputs: dict[str, Any]) -> dict[str, Any]:
    """What a run under way cannot change: data, head and seed. Its other settings count from its checkpoint on."""
    return {**inputs, "train": {"seed": inputs["train"]["seed"]}}


def first_prompt(sample: Sample) -> list[int]:
    """Token ids up to the first supervised token: what the target was asked."""
    first = int((sample.turn_ids >= 0).argmax())
    return sample.token_ids[:first].tolist()


def held_out_prompts(data: PreparedData) -> list[Sample]:
    """Held-out samples of different prompts, the first of each: more answers to one prompt are decoded once."""
    found: dict[tuple[int, ...], Sample] = {}
    for sample in data.held_out:
        found.setdefault(tuple(first_prompt(sample)), sample)
    return list(found.values())


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a report that a person asks for first."""
    names = (
        "tau",
        "tau_ci95",
        "per_position_acceptance",
        "baseline_tokens_per_s",
        "tokens_per_s",
        "speedup",
        "greedy_identity",
    )
    return {name: report[name] for name in names} | {"tree": report["tree"]["label"], "notes": report["notes"]}
