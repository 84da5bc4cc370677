"""A draft language model as a head: a whole small Llama, which also holds the target's input embedding.

Shape legend: R rows of a pack, A anchors, D target hidden, H the model's own hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.base import MAX_LAYERS, MAX_SIZE, Head, HeadConfig, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher


@dataclass
class MiniModelConfig(HeadConfig):
    """Recipe node `head` of the draft model."""

    structure: ClassVar[tuple[str, ...]] = ("hidden_size", "num_layers")
    #: it learns the next token alone
    limits: ClassVar[dict[str, int]] = {"depth": 1, "hidden_size": MAX_SIZE, "num_layers": MAX_LAYERS}

    type: str = "minimodel"
    #: Width of the model.
    hidden_size: int = 24
    #: Decoder layers of the model.
    num_layers: int = 2


class Embedding(nn.Module):
    """own(x) + up(the target's embedding of x); the target's module is held in a tuple, so it is no part of this."""

    def __init__(self, vocab_size: int, size: int, target_size: int):
        super().__init__()
        self.own = nn.Embedding(vocab_size, size)
        self.up = nn.Linear(target_size, size, bias=False)
        self.held: tuple[nn.Module, ...] = ()

    def forward(self, tokens: Tensor) -> Tensor:
        (target,) = self.held
        return self.own(tokens) + self.up(target(tokens).detach().to(self.up.weight.dtype))


class MiniModelHead(Head):
    """It reads tokens alone. Row t + 1 has read x_{t+1} and drafts x_{t+2}: depth 1 of the anchor t."""

    family = "minimodel"
    joint_obstacle = "it reads no features of the target"
    config: MiniModelConfig

    def __init__(self, config: MiniModelConfig, dims: HeadDims):
        super().__init__(config, dims)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=dims.vocab_size, hidden_size=config.hidden_size, intermediate_size=2 * config.hidden_size,
                num_hidden_layers=config.num_layers, num_attention_heads=dims.num_heads,
                num_key_value_heads=dims.num_kv_heads, head_dim=dims.head_dim, rms_norm_eps=dims.rms_norm_eps,
                rope_parameters=dict(dims.rope_parameters), max_position_embeddings=dims.max_position_embeddings,
                initializer_range=0.2, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
            )
        )  # fmt: skip
        self.model.set_input_embeddings(Embedding(dims.vocab_size, config.hidden_size, dims.hidden_size))

    @property
    def longest_chain(self) -> int | None:
        return None

    def bind(self, ends: TargetEnds) -> None:
        super().bind(ends)
        alone = nn.Embedding.from_pretrained(self.embed_VD)
        held = alone if ends.model is None else ends.model.get_input_embeddings()
        self.model.get_input_embeddings().held = (held,)

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        output = self.model.lm_head.weight.numel()
        return (sum(p.numel() for p in self.parameters()) - output) * rows + output * counts[0]

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        layer = sum(p.numel() for p in self.model.model.layers[0].parameters()) / self.config.hidden_size
        return rows * self.config.num_layers * 2 * layer + anchors * self.dims.vocab_size

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        return batch.anchors.active_counts()[:1]

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors, weights = batch.anchors, batch.anchors.weights()
        last = batch.tokens_R.shape[0] - 1
        mask_RR = (batch.doc_R[:, None] == batch.doc_R).tril()
        states = self.model.model(
            input_ids=batch.tokens_R[None],
            position_ids=batch.position_R[None],
            attention_mask=mask_RR[None, None],
            use_cache=False,
        )
        hidden_RH = states.last_hidden_state[0]
        logits_AV = self.model.lm_head(hidden_RH[(anchors.row_A + 1).clamp(max=last)])
        loss_A = F.cross_entropy(logits_AV, batch.tokens_R[(anchors.row_A + 2).clamp(max=last)], reduction="none")
        hit_A = logits_AV.argmax(-1) == batch.teacher_argmax_A
        hits = [hit_A[anchors.teacher_AK[: len(w), d]] & (w > 0) for d, w in enumerate(weights)]
        count = anchors.count_K[0]
        loss_1 = (loss_A[:count] * weights[0]).sum()[None]
        return Loss.per_depth(loss_1, weights[:1], hits, weights, 1)
