"""Checks of one target: loading, features, training a head, exact decoding, and exports of the head.

`examine` asks all of that of one small random model of `architectures.py`. What decides is always the same model as
transformers runs it: one forward over whole texts, without a cache, with eager attention.
Shape legend: T tokens of a text, R rows of a pack, D target hidden, k streams, A anchors, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstart.bench.architectures import SIZES, random_model, whole_model
from headstart.bench.presets import FAMILY
from headstart.data.config import DataConfig
from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample, token_counts
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import build_drafter
from headstart.heads.base import Head, HeadConfig
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.errors import HeadstartError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.formats import check_directory, load_head
from headstart.heads.formats.config import ExportConfig
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.export import export_head
from headstart.heads.numerics import row_errors
from headstart.heads.provenance import provenance
from headstart.heads.targets.load import load_target, target_dims, weightless_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.heads.vocab import choose_draft_vocab
from headstart.recipes.schema import Recipe
from headstart.refusals import refuse_ahead
from headstart.serving_check import compare_features
from headstart.train.config import TrainConfig
from headstart.train.loop import Observers, train
from headstart.train.stream import TrainData

#: tokens of the contexts that are decoded together
CONTEXTS = (30, 24, 37)
#: the trees that are verified
TREES = {"chain": TreeConfig("chain", 3), "tree": TreeConfig("dynamic", 4, 3, 16)}
#: largest relative error of a row of features or logits in float32 that rounding explains
TOLERANCE = 1e-3
#: settings of the head that is trained
HEAD: dict[str, Any] = {"depth": 3, "draft_vocab_size": 48}


@dataclass(frozen=True)
class Effort:
    """How much is asked of an architecture.

    Attributes:
        steps: optimiser steps.
        answer: tokens of every answer.
        half: also decode in bfloat16.
        engines: to export for; None = all that draft with EAGLE-3 for the target.
    """

    steps: int = 16
    answer: int = 24
    half: bool = False
    engines: tuple[str, ...] | None = None

    def exports(self, target: HeadDims) -> list[str]:
        able = {key: engine for key, engine in FORMATS.items() if FAMILY in engine.serves}
        served = [key for key, engine in able.items() if engine.serves_target(target)]
        return served if self.engines is None else [key for key in served if key in self.engines]


@dataclass
class Findings:
    """What a target did.

    Attributes:
        refused: why it was refused before the first step; None = it was not.
        engine_path: fused, generic (transformers' own forward) or none.
        generic_because: why it is not fused, or runs without captured graphs.
        features: features, teacher logits and masks of packed documents are the model's own, and drafts read the same.
        train: `features`, and training lowered the loss.
        identity_fp32: every token of plain decoding and of a chain is the model's own choice, in float32.
        trees: the same with a tree.
        trees_refused: why trees are refused before the first step; None = they are not.
        identity_bf16: share of tokens that are the model's own choice in bfloat16; None = not measured.
        accepted: drafts accepted per cycle, by kind of tree.
        export_engines: engines whose export was read back and passed their check.
        problems: what went wrong.
    """

    refused: str | None = None
    engine_path: str = "none"
    generic_because: str | None = None
    features: bool = False
    train: bool = False
    identity_fp32: bool = False
    trees: bool = False
    trees_refused: str | None = None
    identity_bf16: float | None = None
    accepted: dict[str, float] = field(default_factory=dict)
    export_engines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside becomes a problem; the time is noted."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.problems.append(f"{what}: {said(error)}")
        finally:
            self.seconds[what] = round(self.seconds.get(what, 0.0) + time.perf_counter() - began, 2)


def said(error: BaseException, most: int = 300) -> str:
    """An error in one line, with its kind if it is not one of ours."""
    text = " ".join(str(error).split()) or "no message"
    kind = "" if isinstance(error, HeadstartError) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= most else text[:most] + " …")


def described_head() -> HeadConfig:
    family: Any = FAMILIES[FAMILY]
    config: HeadConfig = family.config(**HEAD)
    return config


class Reference:
    """The architecture as transformers runs it over whole texts."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32):
        self.model = random_model(name, "tiny", device, dtype, attention="eager")

    @torch.no_grad()
    def run(self, tokens: list[int], states: bool = False) -> Any:
        tokens_BT = torch.tensor([tokens], device=self.model.device)
        return self.model(input_ids=tokens_BT, use_cache=False, output_hidden_states=states)

    def agreement(self, contexts: list[list[int]], answers: list[Answer]) -> list[bool]:
        """For every token of every answer, whether it is the model's most likely one after all before it.

        All true = the answers are those of greedy decoding by one whole forward per token: the first token is right, so
        the second is compared after the right text, and so on.
        """
        agrees: list[bool] = []
        for context, answer in zip(contexts, answers, strict=True):
            logits_TV = self.run([*context, *answer.tokens]).logits[0]
            chosen = logits_TV[len(context) - 1 : -1].argmax(-1).tolist()
            agrees += [mine == theirs for mine, theirs in zip(answer.tokens, chosen, strict=True)]
        return agrees


def write_target(name: str, directory: Path) -> Path:
    """The small model and a tokenizer of as many words as it has tokens, as a directory that loads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = SIZES["tiny"]["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(vocabulary)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(directory)
    whole_model(name).save_pretrained(directory)
    return directory


def recipe_of(place: Path, kind: str, device: torch.device, effort: Effort) -> Recipe:
    """What a user would ask for: an EAGLE-3 head for this target, measured with this kind of tree, exported."""
    return Recipe(
        name="bench",
        target=TargetConfig(name=str(place), device=str(device)),
        head=described_head(),
        data=DataConfig(max_length=128),
        train=TrainConfig(steps=effort.steps),
        eval=EvalConfig(tree=TREES[kind], max_new_tokens=effort.answer),
        export=ExportConfig(engines=effort.exports(target_dims(str(place))), dtype="float32"),
    )


def examine(name: str, device: torch.device, directory: Path, effort: Effort) -> Findings:
    """Ask everything of one architecture; nothing that fails ends it.

    Args: directory: an empty one for the model, the run and the exports.
    """
    found, target, head = Findings(), None, None
    with found.attempt("build"):
        place = write_target(name, directory / "target")
        reference = Reference(name, device)
    with found.attempt("load"):
        target = ask(found, place, device, effort)
    if target is None:
        return found
    noise = torch.Generator().manual_seed(1)
    contexts = [torch.randint(3, target.dims.vocab_size, (n,), generator=noise).tolist() for n in CONTEXTS]
    with found.attempt("features"):
        found.features = features_are_the_models(target, reference, contexts)
    decoding = Decoding(target, contexts, reference, found, effort.answer)
    found.features &= decoding.features_are_those_of_training(target)
    samples = decoding.plainly()
    with found.attempt("training"):
        head, fell = trained(target, samples, directory / "run", effort.steps)
        found.train = found.features and fell
    if head is None:
        return found
    with found.attempt("export"):
        head = exported(head, target, directory / "export", found, effort.exports(target.dims))
    decoding.with_drafts(head)
    if effort.half:
        with found.attempt("bfloat16"):
            found.identity_bf16 = share_in_half(name, head, contexts, place, device, effort.answer)
    return found


def ask(found: Findings, place: Path, device: torch.device, effort: Effort) -> Target | None:
    """The target, loaded; None where it is refused, before anything is done with it."""
    try:
        planned = weightless_target(TargetConfig(name=str(place)))
        refuse_ahead(recipe_of(place, "chain", device, effort), planned)
        target = load_target(TargetConfig(name=str(place), dtype="float32", device=str(device)))
    except HeadstartError as error:
        found.refused = said(error)
        return None
    try:
        refuse_ahead(recipe_of(place, "tree", device, effort), planned)
    except HeadstartError as error:
        found.trees_refused = said(error)
    return target


def features_are_the_models(target: Target, reference: Reference, documents: list[list[int]]) -> bool:
    """Whether streams, last hidden states, teacher logits and choices of packed documents are the model's own of each
    document alone. Raises: AssertionError that says which are not."""
    spec = build_head(described_head(), target.dims).spec
    turns = [torch.tensor([-1] * 5 + [0] * (len(tokens) - 5)) for tokens in documents]
    packed = FeatureBatch.pack([(torch.tensor(d), t) for d, t in zip(documents, turns, strict=True)], 3, pad_to=128)
    batch = target.extract(packed, spec)
    assert batch.hidden_RD is not None and batch.streams_RkD is not None and batch.teacher_argmax_A is not None
    choice_R = torch.full((len(batch.tokens_R),), -1, device=target.device)
    start = 0
    for number, tokens in enumerate(documents):
        rows = slice(start, start + len(tokens))
        start += len(tokens)
        alone = reference.run(tokens, states=True)
        choice_R[rows] = alone.logits[0].argmax(-1)
        pairs = {"the last hidden state": (batch.hidden_RD[rows], alone.hidden_states[-1][0])}
        for slot, layer in enumerate(spec.layer_ids):
            pairs[f"the input of layer {layer}"] = batch.streams_RkD[rows, slot], alone.hidden_states[layer][0]
        pairs["the teacher's logits"] = target.teacher.logits(batch.hidden_RD[rows]), alone.logits[0]
        for what, (mine, theirs) in pairs.items():
            worst = float(row_errors(mine, theirs).max())
            assert worst <= TOLERANCE, f"{what} of packed document {number + 1} is off by {worst:.2g}"
    assert torch.equal(batch.teacher_argmax_A, choice_R[batch.anchors.row_A + 1]), "the teacher's choices differ"
    return True


class Decoding:
    """Decodes the contexts on every path of the engine, and compares each token with the model's own choice.

    On a GPU the path is the one that an evaluation takes; on a CPU there are both that the target allows.
    """

    def __init__(self, target: Target, contexts: list[list[int]], reference: Reference, found: Findings, answer: int):
        self.contexts, self.reference, self.found, self.answer = contexts, reference, found, answer
        self.paths: dict[str, Decoder] = {}
        if target.device.type == "cuda":
            with found.attempt("engine"):
                self.paths["auto"] = Decoder(target, EvalConfig(engine="auto"))
            return
        try:
            self.paths["fused"] = Decoder(target, EvalConfig(engine="fused"))
        except HeadstartError as error:
            found.generic_because = said(error).removeprefix("eval.engine: found 'fused', but ")
        with found.attempt("engine"):
            self.paths["generic"] = Decoder(target, EvalConfig(engine="transformers"))

    def features_are_those_of_training(self, target: Target) -> bool:
        """Whether drafts read, on every path, the features that heads are trained on: a fault there costs acceptance
        alone, so that no token shows it."""
        spec, same = build_head(described_head(), target.dims).spec, bool(self.paths)
        for path, decoder in self.paths.items():
            with self.found.attempt(f"drafts' features, {path}"):
                found = compare_features(target, spec, self.contexts[:2], fused=decoder.fused)
                same &= found.passed
                assert found.passed, f"off by {found.worst:.2g} at {found.where}"
        return same

    def run(self, what: str, drafter: Callable[[], Drafter | None]) -> tuple[bool, list[Answer]]:
        """(whether every token on every path is the model's own choice, the answers of the last path)."""
        exact, answers = bool(self.paths), [Answer([3] * self.answer) for _ in self.contexts]
        for path, decoder in self.paths.items():
            right = False
            with self.found.attempt(f"{what}, {path}"):
                answers = decode(decoder, self.contexts, drafter(), self.answer)
                same = self.reference.agreement(self.contexts, answers)
                wrong, first = len(same) - sum(same), [*same, False].index(False)
                assert not wrong, f"{wrong} of {len(same)} tokens are not the model's own, the first at {first}"
                right = True
            exact &= right
        # what could not be captured has fallen back by now
        for decoder in self.paths.values():
            if self.found.engine_path != "fused":
                self.found.engine_path = decoder.path
            self.found.generic_because = self.found.generic_because or decoder.slow
        return exact, answers

    def plainly(self) -> list[Sample]:
        """Decode without drafts. Returns: conversations to train on, the contexts with these answers."""
        self.found.identity_fp32, answers = self.run("plain", lambda: None)
        return [
            Sample(
                f"sample-{n}", np.array([*context, *answer.tokens], np.int32),
                np.array([-1] * len(context) + [0] * len(answer.tokens), np.int32),
            )
            for n, (context, answer) in enumerate(zip(self.contexts, answers, strict=True))
        ]  # fmt: skip

    def with_drafts(self, head: Head) -> None:
        """Decode with a chain and, unless trees are refused, with a tree."""
        exact = {}
        for kind, tree in TREES.items():
            if kind == "tree" and self.found.trees_refused is not None:
                continue
            exact[kind], answers = self.run(kind, partial(build_drafter, head, EvalConfig(tree=tree)))
            cycles = [cycle for answer in answers for cycle in answer.cycles]
            if cycles:
                self.found.accepted[kind] = round(sum(cycle.accepted for cycle in cycles) / len(cycles), 3)
        self.found.identity_fp32 &= exact["chain"]
        self.found.trees = exact.get("tree", False)


def decode(decoder: Decoder, contexts: list[list[int]], drafter: Drafter | None, answer: int) -> list[Answer]:
    return decoder.run(contexts, drafter, answer, seed=0, stop=False).answers


def trained(target: Target, samples: list[Sample], run_dir: Path, steps: int) -> tuple[Head, bool]:
    """A head after so many steps on the samples, packed together, and whether its loss fell."""
    torch.manual_seed(0)
    head = build_head(described_head(), target.dims)
    count_V = token_counts(samples, target.dims.vocab_size)
    draft_ids_U = choose_draft_vocab(count_V, HEAD["draft_vocab_size"], target.stop_token_ids)
    head = head.to(target.device)
    head.initialise(target.ends, draft_ids_U)
    head.bind(target.ends)
    source = OnlineFeatures(target, samples, head.spec, head.depth)
    config = TrainConfig(
        steps=steps, lr=3e-3, mixed_precision="no", capture="off", log_every=steps // 2, save_every=0
    )  # fmt: skip
    quiet = Observers(progress=False)
    train(head, TrainData(source, 1024), target.teacher, config, run_dir, quiet, final_checkpoint=False)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return head.eval(), bool(np.isfinite(losses).all()) and losses[-1] < losses[0]


def exported(head: Head, target: Target, directory: Path, found: Findings, engines: list[str]) -> Head:
    """Export the head for these engines and read it back. Returns: what was read back, which drafts from then on."""
    origin = {**provenance(target.device), "target": target.fingerprint()}
    for key in engines:
        with found.attempt(f"export for {key}"):
            place = directory / key
            export_head(head, place, ExportConfig(engines=[key], dtype="float32"), origin)
            report, again = check_directory(place, target.dims), load_head(place, target.dims)
            assert report.loads(key), f"its check says: {report.engines[key].reasons}"
            kept, read = head.state_dict(), again.state_dict()
            different = [name for name in kept if not torch.equal(kept[name].cpu(), read[name].cpu())]
            assert not different and kept.keys() == read.keys(), f"{different or 'names'} differ after reading"
            found.export_engines.append(key)
            again = again.to(target.device).eval()
            again.bind(target.ends)
            head = again
    return head


def share_in_half(
    name: str, head: Head, contexts: list[list[int]], place: Path, device: torch.device, answer: int
) -> float:
    """Share of the tokens of plain decoding and of a chain that are the model's own choice, all in bfloat16."""
    target = load_target(TargetConfig(name=str(place), dtype="bfloat16", device=str(device)))
    reference, decoder = Reference(name, device, torch.bfloat16), Decoder(target, EvalConfig())
    head = head.to(torch.bfloat16)
    head.bind(target.ends)
    same: list[bool] = []
    for drafter in (None, build_drafter(head, EvalConfig(tree=TREES["chain"]))):
        same += reference.agreement(contexts, decode(decoder, contexts, drafter, answer))
    return round(sum(same) / len(same), 4)
