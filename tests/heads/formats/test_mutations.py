"""Thousands of damaged heads: each is refused, told by `--check`, or still the same function. None crashes or hangs.

    HEADSTART_MUTATIONS=3000 pytest tests/heads/formats/test_mutations.py -s      the whole bar, with its numbers

Without it, a few hundred are tried. What cannot be seen in a head without our side file is listed in UNSEEN.
"""

from __future__ import annotations

import os
import random as pyrandom
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from format_layouts import DIMS, D, V, random, same_state
from mutations import Base, make_bases, mutate

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import HeadstartError
from headstart.heads.families.eagle_files import LLAMA_DEFAULTS
from headstart.heads.formats import CheckReport, check_directory, load_head
from headstart.heads.formats.sidecar import SIDECAR

CASES = int(os.environ.get("HEADSTART_MUTATIONS", "400"))
SECONDS = 10.0  # a case takes 0.03


class TooLong(BaseException):
    """A case that hangs; no `except Exception` catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def meaning(head: Head) -> tuple[Any, ...]:
    """Beside its weights, everything that a head's output depends on."""
    dims = head.dims
    geometry = (dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.rms_norm_eps, dims.hidden_act)
    rope = sorted((key, str(value)) for key, value in dims.rope_parameters.items())
    behaviour = tuple(getattr(head.config, name) for name in head.config.behaviour)
    return head.family, head.spec.layer_ids, behaviour, (*geometry, rope) if head.family != "medusa" else None


def fixed_batch(depth: int) -> FeatureBatch:
    documents = [(torch.arange(n) * 7 % V, torch.where(torch.arange(n) > 3, 0, -1)) for n in (14, 11)]
    batch = FeatureBatch.pack(documents, depth)
    batch.hidden_RD, batch.streams_RkD = random(25, D, seed=1), random(25, 3 * D, seed=2).view(25, 3, D)
    batch.teacher_argmax_A = TEACHER.logits(batch.teacher_hidden()).argmax(-1)
    return batch


TEACHER, EMBEDDING = Teacher(random(V, D, seed=3)), random(V, D, seed=4)


def outputs(head: Head) -> list[float]:
    """What a head does with fixed inputs."""
    head.bind(TargetEnds(EMBEDDING, TEACHER))
    with torch.no_grad():
        return head.loss(fixed_batch(head.depth), TEACHER).sum_T.tolist()


def findings(report: CheckReport) -> set[str]:
    """What a report says, without the numbers and places in it."""
    said = list(report.doubts)
    for handling in report.engines.values():
        said += [f"{handling.engine} {text}" for text in (*handling.reasons, *handling.notes)]
    return {re.sub(r"[-\d.e]*\d", "#", text.replace(report.directory, "")) for text in said}


@dataclass
class Whole:
    """A base before it is damaged, as read with or without its target."""

    head: Head | None
    outputs: list[float]
    findings: set[str]


def read_whole(base: Base, dims: HeadDims | None) -> Whole | None:
    """None where the layout needs its target to be read."""
    found = findings(check_directory(base.directory, dims))
    if not base.readable:
        return Whole(None, [], found)
    try:
        head = load_head(base.directory, dims)
    except HeadstartError:
        return None
    return Whole(head, outputs(head), found)


#: what a change of (fields of config.json, or words about a file) is, where nothing in the directory can tell it.
#: Our own directories carry checksums: there everything is seen.
UNSEEN = {
    "values": (
        r"\.safetensors at \d+: bytes (flip|hole)|tensor (poked|exchanged|float16|float64|transposed)",
        "safetensors files have no checksum, and a matrix of other finite numbers (or a square one turned) is a matrix",
    ),
    "zeros": (
        r"bias: tensor (zero|same rows)|norm.weight: tensor same rows",
        "biases may be zero, and a vector of one value is what norms start from",
    ),
}
#: a field that decides what a head computes without a tensor of its own, whether config.json names it or not
NORMED = ("norm_output", "a head whose normed output goes back in has the same tensors as one with the plain output")
#: the same for fields of config.json. `own`: only where no target is named to compare with
LAYERS = (
    r"(eagle_config\.)?eagle_aux_hidden_state_layer_ids|aux_hidden_state_layer_ids|(dflash_config\.)?target_layer_ids"
)
TOKENS = r"ptd_token_id|(dflash_config\.)?mask_token_id"
OWN = (
    r"(\w+\.)?(rope_\w+(\.\w+)?|rms_norm_eps|head_dim|num_attention_heads|num_key_value_heads|vocab_size"
    r"|max_position_embeddings)"
)
FIELDS = {
    "layers": (rf"{LAYERS}|{TOKENS}", False, "one spelling, nothing beside it: any layers and any token will do"),
    "block": (
        r"(dflash_config\.)?(block_size|sample_from_anchor|shift_label)",
        False,
        "a block of masked places may have any length, and its first one may draft or not",
    ),
    "geometry": (OWN, True, "a head may turn, split and norm otherwise than its target; only the target could tell"),
    "unread": (
        r".*(num_target_layers|layer_types)\b.*|max_position_embeddings|speculators_\w+.*"
        r"|transformer_layer_architecture",
        False,
        "no engine that Headstart knows reads it there; more positions than the target's change nothing",
    ),
}


DEFAULTS = {**LLAMA_DEFAULTS, "tie_word_embeddings": False}


def flat_config(directory: Path) -> dict[str, Any]:
    """config.json with dotted names."""

    def flat(value: Any, name: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {name: value}
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}" if name else key).items()}

    return flat(open_checkpoint(directory).config)


def changed_fields(before: Path, after: Path) -> set[str]:
    """Names whose value differs; a field that is missing says what it says by default."""
    one, two = flat_config(before), flat_config(after)

    def said(values: dict[str, Any], name: str) -> str:
        return repr(values.get(name, DEFAULTS.get(name.split(".")[-1])))

    return {name for name in one.keys() | two.keys() if said(one, name) != said(two, name)}


def why_unseen(base: Base, directory: Path, dims: HeadDims | None, what: str) -> str | None:
    """The class of UNSEEN or FIELDS that a silent change belongs to; None = it could have been seen."""
    if base.sealed and (directory / SIDECAR).exists():
        return None
    for name, (pattern, _) in UNSEEN.items():
        if re.search(pattern, what):
            return name
    known = {word for field in flat_config(base.directory) for word in field.split(".")}
    # a draft model of its own, which reads nothing of the target, has its own geometry
    alone = dims is None or base.directory.name == "draft-model"

    def kind(field: str) -> str | None:
        if field == NORMED[0]:
            return field
        if set(field.split(".")) - known:
            return "unread"
        names = (name for name, (pattern, own, _) in FIELDS.items() if re.fullmatch(pattern, field) and alone >= own)
        return next(names, None)

    kinds = {kind(field) for field in changed_fields(base.directory, directory)}
    return None if None in kinds or not kinds else ", ".join(sorted(kinds))  # type: ignore[type-var]


def same_files(base: Base, directory: Path) -> bool:
    """Whether what is read of a directory that only `--check` reads is what it was."""
    one, two = open_checkpoint(base.directory), open_checkpoint(directory)
    names = {name.removeprefix("model.") for name in one.tensors}
    if changed_fields(base.directory, directory) or names != {name.removeprefix("model.") for name in two.tensors}:
        return False
    theirs = {name.removeprefix("model."): name for name in two.tensors}
    return all(torch.equal(one.read(name), two.read(theirs[name.removeprefix("model.")])) for name in one.tensors)


def judge(base: Base, whole: Whole, directory: Path, dims: HeadDims | None, what: str) -> str:
    """refused | told | same | the class of what cannot be seen | silent."""
    try:
        head = load_head(directory, dims)
    except HeadstartError as error:
        assert 20 < len(str(error)) < 5000, what
        head = None
    try:
        report = check_directory(directory, dims)
    except HeadstartError as error:
        assert 20 < len(str(error)) < 5000 and head is None, what
        return "refused"
    assert report.loads("headstart") == (head is not None), f"{what}: {report.render()}"
    assert len(report.render()) < 100_000, what
    new = findings(report) - whole.findings
    if head is None:
        if whole.head is not None or new:
            return "refused"
        return "same" if same_files(base, directory) else why_unseen(base, directory, dims, what) or "silent"
    assert whole.head is not None, what
    if same_state(head, whole.head) and meaning(head) == meaning(whole.head):
        assert head.config != whole.head.config or outputs(head) == whole.outputs, what
        return "same"
    return "told" if new else why_unseen(base, directory, dims, what) or "silent"


def test_mutations(tmp_path: Path) -> None:
    """The bar: no other exception than ours, no hang, nothing silently wrong that could be seen."""
    rng = pyrandom.Random(20261129)
    bases = make_bases(tmp_path / "bases")
    wholes = {(base.directory.name, dims is None): read_whole(base, dims) for base in bases for dims in (DIMS, None)}
    count: dict[str, Counter[str]] = {"with side file": Counter(), "without": Counter()}
    wrong = []
    for number in range(CASES):
        base, work = bases[number % len(bases)], tmp_path / "work"
        dims = None if rng.random() < 0.3 and wholes[base.directory.name, True] is not None else DIMS
        shutil.copytree(base.directory, work)
        what = mutate(work, rng)
        label = f"{base.directory.name} ({'with' if dims else 'without'} target): {what}"
        whole = wholes[base.directory.name, dims is None]
        assert whole is not None
        try:
            with limited(SECONDS):
                outcome = judge(base, whole, work, dims, label)
        except (Exception, TooLong) as error:
            outcome, label = "crashed", f"{label}: {type(error).__name__}: {str(error)[:500]}"
        count["with side file" if base.sealed else "without"][outcome] += 1
        if outcome in ("silent", "crashed"):
            wrong.append(f"{outcome}: {label}")
        shutil.rmtree(work)
    print(f"\n{CASES} mutations of {len(bases)} heads")
    for side, outcomes in count.items():
        print(f"  {side}: {sum(outcomes.values())}:", ", ".join(f"{n} {name}" for name, n in outcomes.most_common()))
    assert not wrong, "\n".join(wrong)
    assert set(count["with side file"]) <= {"refused", "same", "told"}
    for outcomes in count.values():  # the mutator neither spares the heads nor is everything refused
        assert outcomes["refused"] > 0.5 * outcomes.total() and outcomes["same"] > 0
