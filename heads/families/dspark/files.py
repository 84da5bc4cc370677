"""DSpark on disk: the backbone, a Markov head and a confidence head; all settings stand at top level (families §3)."""

from __future__ import annotations

from typing import Any, cast

from headstart.heads.base import MAX_SIZE, HeadConfig
from headstart.heads.checkpoints.geometry import flag, integer
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import TensorMap
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.block.files import BlockFiles
from headstart.heads.families.block.head import BlockHead
from headstart.heads.families.block.published import CONFIDENCE, MARKOV, is_corrected, stated
from headstart.heads.families.dspark.head import MARKOV_HEADS, DSparkConfig
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="DSpark",
    title="DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation",
    authors="Cheng, Xin and others",
    arxiv="2607.05147",
)
#: kind of Markov head → its tensors
MARKOV_TENSORS = {
    kind: tuple(f"{MARKOV}{name}" for name in ("markov_w1.weight", "markov_w2.weight", *more))
    for kind, more in {
        "vanilla": (),
        "gated": ("gate_proj.weight", "gate_proj.bias"),
        "rnn": ("joint_proj.weight", "joint_proj.bias"),
    }.items()
}
CONFIDENCE_TENSORS = tuple(f"{CONFIDENCE}proj.{name}" for name in ("weight", "bias"))
CONFIDENCE_FLAGS = ("enable_confidence_head", "confidence_head_with_markov")
#: what the Markov head's kinds do, for facts
MARKOV_FACTS = {
    "vanilla": "logits + W2 W1[token before]",
    "gated": "logits + W2 (gate of [output ; e] · e), e = W1[token before]",
    "rnn": "logits + W2 tanh(o), o of a recurrent step over [state ; W1[token before] ; output]",
}


class DSparkFiles(BlockFiles):
    """Read are files of DeepSpec and SpecForge, and of the speculators library."""

    facts = {**BlockFiles.facts, "method": f"{PAPER.method}, arXiv {PAPER.arxiv}"}
    layouts = ("DSpark",)
    speculators = "dspark"
    title = "DSpark"
    architecture = "Qwen3DSparkModel"
    family = "dspark"
    zero_at_start = {
        f"{MARKOV}markov_w2": "every value is zero, as before training: a draft does not depend on the one before it",
        CONFIDENCE: "every value is zero, as before training: the confidence is the same for every draft",
    }

    def recognise(self, raw: RawCheckpoint) -> bool:
        return is_corrected(raw)

    def added(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], where: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        given = {"markov_rank": stated(config, "markov_rank", where)}
        rank = integer(given, "markov_rank", where, bounds=(1, MAX_SIZE))
        kind = stated(config, "markov_head_type", where) or "vanilla"
        if kind not in MARKOV_HEADS:
            raise FormatError(f"{where}: markov_head_type is {kind!r}, expected one of {', '.join(MARKOV_HEADS)}")
        tensors = list(MARKOV_TENSORS[kind])
        flags = {name: stated(config, name, where) for name in CONFIDENCE_FLAGS}
        confident = any(name.startswith(CONFIDENCE) for name in names)
        if flag(flags, "enable_confidence_head", where, confident) != confident:
            raise FormatError(
                f"{where}: enable_confidence_head is {flags['enable_confidence_head']} and the file holds "
                f"{'a' if confident else 'no'} confidence head ({CONFIDENCE}proj): copy the head again, or write "
                f"{str(confident).lower()}"
            )
        if confident and not flag(flags, "confidence_head_with_markov", where, True):
            raise FormatError(
                f"{where}: confidence_head_with_markov is false: that confidence head does not read the token before a "
                "draft, as Headstart's does. Train a new head, or serve this one with an engine"
            )
        tensors += CONFIDENCE_TENSORS if confident else ()
        fields = {"markov_head": kind, "markov_rank": rank, "confidence_weight": 1.0 if confident else 0.0}
        return fields, {name: name for name in tensors}

    def settings(self, config: HeadConfig, dims: HeadDims) -> dict[str, Any]:
        return {**super().settings(config, dims), "confident": cast(DSparkConfig, config).confidence_weight > 0}

    def stated(self, mapped: TensorMap) -> dict[str, Any]:
        found = super().stated(mapped)
        confident = found.pop("confidence_weight") > 0
        return {**found, "confident": confident}

    def block_json(self, head: BlockHead) -> dict[str, Any]:
        config = cast(DSparkConfig, head.config)
        return {
            **self.inputs_json(head),
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence_weight > 0,
            "confidence_head_with_markov": config.confidence_weight > 0,
        }

    def added_facts(self, config: HeadConfig) -> dict[str, str]:
        given = cast(DSparkConfig, config)
        facts = {"markov_head": f"{given.markov_head}, rank {given.markov_rank}: {MARKOV_FACTS[given.markov_head]}"}
        if given.confidence_weight > 0:
            facts["confidence"] = "sigmoid(proj [output ; W1[token before]]), trained to the acceptance rate"
        return facts
