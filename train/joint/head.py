"""A draft head and a LoRA adapter of its target, trained together (Medusa-2, arXiv 2401.10774 §2.2.2; families §5).

    L = L_target + λ0 · s(t) · Σ_d λ^d L_d

The features are the tuned target's, made anew from the tokens in every step. The family of the inner head does not
matter: it reads them as it reads stored ones, and gradients flow through them into the adapter.

Shape legend: R rows of a pack, A anchors, D target hidden, k feature streams, T loss terms, M metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headstart.heads.base import Head, Loss, LossTerm, Stage
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.layers import DraftLayer
from headstart.heads.positions import predicting_rows
from headstart.heads.targets.adapter import (
    adapter_off,
    add_adapter,
    check_injectable,
    keep_input_dtype,
    planned_parameters,
    refuse_quantised,
    require_peft,
    use_dropout,
)
from headstart.heads.targets.kept_dropout import keep_dropout
from headstart.heads.targets.live import LivePass
from headstart.heads.targets.target import Target
from headstart.train.joint.config import JointConfig
from headstart.train.joint.cost import plain_parameters, target_numbers
from headstart.train.joint.loss import target_loss

HEAD_ALONE, TOGETHER = "the head alone", "head and target together"
#: names of the target's term and of the metric beside it
TARGET_TERM, TARGET_METRIC = "target", "target_acc"


def stages_of(config: JointConfig) -> tuple[Stage, ...]:
    """The stages of a run; one that gets nothing of the budget is left out."""
    stages = (Stage(HEAD_ALONE, config.heads_only), Stage(TOGETHER, 1.0 - config.heads_only))
    return tuple(stage for stage in stages if stage.share > 0)


def grown(config: JointConfig, part: float) -> float:
    """s(t), the part of `joint.weight` that the head's loss has after `part` of the second stage."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "linear":
        return part
    if config.schedule == "sine_r":
        part = min(part / config.sine_share, 1.0)
    return math.sin(0.5 * math.pi * part)


def check_joint(inner: Head, target: Target) -> None:
    """Raises: ConfigError or TargetError for a head or a target that cannot be trained together."""
    require_peft()
    refuse_quantised(target.model.config)
    if target.merged_adapter is not None:
        raise ConfigError(
            f"joint.enabled: found true with the target {target.config.name}, into which an adapter is merged; "
            "expected the original: give that as target.name. To train its adapter further, also give start_from=DIR, "
            "the head beside the adapter, and joint.heads_only=0"
        )
    if len(inner.stages) > 1:
        raise ConfigError(
            f"joint.enabled: found true with a {inner.family} head, whose own training has {len(inner.stages)} stages; "
            "joint training has stages of its own: set joint.enabled=false"
        )
    if (obstacle := inner.joint_obstacle) is not None:
        raise ConfigError(
            f"joint.enabled: found true with a {inner.family} head, {obstacle}: set joint.enabled=false"
        )
    if inner.draft_vocab_size is not None:
        raise ConfigError(
            f"joint.enabled: found true with a draft vocabulary of {inner.draft_vocab_size} tokens; which rows carry a "
            "loss would depend on a target that changes: set head.draft_vocab_size=0 where the family allows it, or "
            "joint.enabled=false"
        )
    if (more := target.teacher.more_than_matrix) is not None:
        raise ConfigError(
            f"joint.enabled: found true with a target whose logits have {more}; expected a plain output matrix: set "
            "joint.enabled=false"
        )


def named_as(parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A module that holds the parameters under these names, whose parts are split by dots."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, parameter)
    return root


class JointHead(Head):
    """An inner head, with the adapter of its target among its parameters.

    Its state dict has `inner.…` and `adapter.…`. The target itself is no part of it.

    Args:
        inner: bound to the target's ends.
        target: whole on this device; it gets the adapter. seed: of the adapter's first weights.
        planned: whether nothing will be trained: the target stays as it is and needs no weights.
    Attributes:
        live: runs the target over packs; None where training is only planned.
        together: whether head and target train together now, or the head alone.
    Raises: ConfigError, see check_joint and adapter.add_adapter.
    """

    without_muon = ("adapter.",)  # made for whole matrices, not for factors of low rank

    def __init__(self, inner: Head, target: Target, config: JointConfig, seed: int = 0, planned: bool = False):
        nn.Module.__init__(self)  # Head.__init__ would make attributes that this head takes from the inner one
        check_joint(inner, target)
        self.config, self.dims, self.joint = inner.config, inner.dims, config
        self.inner, self._target = inner, (target,)  # in a tuple, as the target is not part of the head
        self.terms = (LossTerm(TARGET_TERM, 1.0), *inner.terms)
        if planned:
            check_injectable(target.model, config.lora)
            self.adapter = named_as(planned_parameters(target.model, config.lora))
        else:
            self.adapter = named_as(add_adapter(target.model, config.lora, seed))
        self.live = None if planned else LivePass(target)
        self._recompute = False
        self.together = stages_of(config)[0].name == TOGETHER

    # --- what the inner head says -------------------------------------------------------------------------------

    @property
    def family(self) -> str:  # type: ignore[override]
        return self.inner.family

    @property
    def draft_ids_U(self) -> Tensor | None:  # type: ignore[override]
        return self.inner.draft_ids_U

    @property
    def embed_VD(self) -> Tensor | None:  # type: ignore[override]
        return self.inner.embed_VD

    @property
    def teacher(self) -> Teacher | None:  # type: ignore[override]
        return self.inner.teacher

    @property
    def depth(self) -> int:
        return self.inner.depth

    @property
    def longest_chain(self) -> int | None:
        return self.inner.longest_chain

    @property
    def spec(self) -> FeatureSpec:
        return replace(self.inner.spec, tokens_alone=True)

    @property
    def own_embeddings(self) -> bool:
        return self.inner.own_embeddings

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return self.inner.draft_layers

    @property
    def hidden_act(self) -> str | None:
        return self.inner.hidden_act

    def bind(self, ends: TargetEnds) -> None:
        self.inner.bind(ends)

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        self.inner.initialise(ends, draft_ids_U)

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        return self.inner.choose_rows(batch, seed)

    def chosen_anchors(self, rows: float, anchors: float) -> float:
        return self.inner.chosen_anchors(rows, anchors)

    def describe(self) -> str:
        adapter = sum(p.numel() for p in self.adapter.parameters())
        return f"{self.inner.describe()}; with an adapter of the target: {adapter / 1e6:.1f} M parameters"

    def drafting_head(self) -> Head:
        keep_input_dtype(self._target[0].model, False)  # decoding runs without autocast
        return self.inner

    # --- stages -------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.joint)

    def enter_stage(self, number: int) -> None:
        self.together = self.stages[number].name == TOGETHER
        self.train(self.training)

    @property
    def weights_vary(self) -> bool:
        return self.inner.weights_vary or (self.together and self.joint.schedule != "constant")

    def term_weights(self, part: float = 1.0) -> Tensor:
        """1 and λ0 · s(part) · the inner weights. While the head trains alone: 0 and the inner weights."""
        inner_T = self.inner.term_weights(part)
        if not self.together:
            return torch.cat((torch.zeros(1), inner_T))
        return torch.cat((torch.ones(1), inner_T * (self.joint.weight * grown(self.joint, part))))

    def rate_factor(self, name: str, stage: int) -> float:
        """For the head its own times `joint.head_rate`, in both stages; for the adapter 0 while the head trains alone,
        then 1."""
        if name.startswith("inner."):
            return self.joint.head_rate * self.inner.rate_factor(name.removeprefix("inner."), 0)
        return 1.0 if self.stages[stage].name == TOGETHER else 0.0

    def train(self, mode: bool = True) -> JointHead:
        super().train(mode)
        if self.live is not None:
            use_dropout(self._target[0].model, mode and self.together)
        return self

    # --- how a run may be made ----------------------------------------------------------------------------------

    @property
    def shardable(self) -> bool:
        return False

    @property
    def capture_obstacle(self) -> str | None:
        live = self.live
        if live is None or live.capturable:
            return self.inner.capture_obstacle
        if not live.packed:
            return "the target runs over padded documents"
        return "the target's rope changes with the length of a text, which a graph cannot read"

    @property
    def recomputable(self) -> bool:
        return True

    def recompute_activations(self) -> None:
        self.inner.recompute_activations()
        self._recompute = True
        if self.live is not None:
            self.live.recompute = True
            keep_dropout(self._target[0].model)

    # --- the loss -----------------------------------------------------------------------------------------------

    def metrics(self, depths: int) -> tuple[str, ...]:
        """As the inner head's, and target_acc: share of the rows before a supervised token on which the tuned target
        chooses what it should: the original target's choice (joint.loss=kl) or the token of the data (ce)."""
        return (*self.inner.metrics(depths), TARGET_METRIC)

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        count = self._weights(batch).sum() * float(self._measures_target)
        return torch.cat((count[None], self.inner.loss_counts(batch)))

    @property
    def _measures_target(self) -> bool:
        """Whether the target's term is computed. The head alone needs it in validation only."""
        return self.together or not self.training

    @staticmethod
    def _weights(batch: FeatureBatch) -> Tensor:
        """float32 [R]: 1 for the rows that predict a supervised token."""
        return predicting_rows(batch.turn_R, batch.doc_R).float()

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        hidden_RD, streams_RkD, original_RD = self._features(batch)
        row_A = (batch.anchors.row_A + 1).clamp(max=len(batch.tokens_R) - 1)
        if self._measures_target:
            label_R, weight_R = batch.tokens_R.roll(-1), self._weights(batch)
            if self.joint.loss == "ce":
                original_RD = None
            total, choice_R, wanted_R = target_loss(teacher, hidden_RD, label_R, weight_R, original_RD)
            count, right = weight_R.sum(), ((choice_R == wanted_R) * weight_R).sum()
            argmax_A = choice_R[row_A]
        else:
            total = count = right = hidden_RD.new_zeros((), dtype=torch.float32)
            argmax_A = self._target[0].teacher_argmax(hidden_RD, row_A)
        live = replace(batch, hidden_RD=hidden_RD, streams_RkD=streams_RkD, teacher_argmax_A=argmax_A)
        inner = self.inner.loss(live, teacher, None if scale_T is None else scale_T[1:])
        sum_T = torch.cat((total.to(inner.sum_T.dtype)[None], inner.sum_T))
        count_T = torch.cat((count.to(inner.count_T.dtype)[None], inner.count_T))
        return replace(inner, sum_T=sum_T, count_T=count_T).with_metrics([right], [count])

    def _features(self, batch: FeatureBatch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(hidden [R, D], streams [R, k, D], the original target's hidden [R, D] or None), as the stage trains them."""
        live = self.live
        assert live is not None, "a planned head computes no loss"
        model, layers = self._target[0].model, self.inner.spec.layer_ids
        if not self.together:
            with torch.no_grad(), adapter_off(model):
                hidden_RD, streams_RkD = live(batch, layers)
            return hidden_RD, streams_RkD, hidden_RD
        original_RD = None
        if self.joint.loss == "kl":
            with torch.no_grad(), adapter_off(model):
                original_RD, _ = live(batch)
        keep_input_dtype(model, torch.is_autocast_enabled(batch.tokens_R.device.type))
        hidden_RD, streams_RkD = live(batch, layers)
        return hidden_RD, streams_RkD, original_RD

    # --- what it costs ------------------------------------------------------------------------------------------

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        """As the base class says. A plan gets the mean over the run's stages."""
        if self.live is not None:
            return self._multiply_adds(rows, counts, self.together)
        stages = self.stages
        return sum(stage.share * self._multiply_adds(rows, counts, stage.name == TOGETHER) for stage in stages)

    def _multiply_adds(self, rows: float, counts: Sequence[float], together: bool) -> float:
        """A pass of the target without gradients counts a third of its multiply-adds, one with them two thirds."""
        target, adapter = self._target[0], sum(p.numel() for p in self.adapter.parameters())
        body = rows * plain_parameters(target)
        inner = self.inner.multiply_adds(rows, counts)
        if not together:
            return inner + body / 3
        output = rows * target.teacher.weight_VD.numel()
        original = (body + output) / 3 if self.joint.loss == "kl" else 0.0
        again = body / 3 if self._recompute else 0.0
        return inner + rows * adapter + (body + output) * 2 / 3 + original + again

    def copied_numbers(self) -> int:
        return self.inner.copied_numbers() + sum(p.numel() for p in self.adapter.parameters())

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """As the inner head's, and what the second stage keeps of the target: see target_numbers."""
        target = target_numbers(self._target[0], self.joint, rows, recompute)
        return self.inner.kept_numbers(rows, anchors, recompute) + target

    def chunk_numbers(self, anchors: float) -> float:
        return self.inner.chunk_numbers(anchors)
