"""The frozen target model: its features, its output head, and its dimensions. load.py loads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.files import sha256_text
from headstart.heads.losses.fused import chunk_rows
from headstart.heads.rope import dynamic_note
from headstart.heads.targets.adapter import plain_weights
from headstart.heads.targets.locate import (
    decoder_layers,
    final_norm,
    keep_first_frequencies,
    record_layer_inputs,
    text_decoder,
)
from headstart.heads.targets.probe import measured_teacher, require_single_pass, rule_without_weights
from headstart.heads.targets.quantised import Quantisation, matrix_of, parts_of, quantisation_of
from headstart.heads.targets.template_date import shown_date
from headstart.heads.targets.tuned import MergedAdapter, merged_adapter_in
from headstart.heads.transfer import to_device

#: dtypes of packed weights
PACKED = (torch.int32, torch.int64)
#: values of target.parallel
TARGET_KINDS = ("none", "fsdp2", "device_map")
#: tokens of a feature forward on a CPU; those on a GPU, for a target of GPU_WIDTH or wider
CPU_TOKENS, GPU_TOKENS, GPU_WIDTH = 2048, 32768, 2048


@dataclass
class TargetConfig:
    """Recipe node `target`."""

    #: The frozen model: a name that `headstart target fetch` knows, a local directory, or a Hub id.
    name: str = "???"
    #: Revision on the Hub: a branch, a tag or a commit.
    revision: str | None = None
    #: A peft LoRA adapter that is merged into the model as it is loaded: a directory, or user/name[@revision] on the
    #: Hub. null takes the model as it is.
    adapter: str | None = None
    #: Precision of the weights: auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16 or float16. For a target
    #: with quantised weights, auto takes the dtype of its config.json.
    dtype: str = "auto"
    #: Where it runs: auto, cpu, cuda or cuda:N.
    device: str = "auto"
    #: Attention implementation of transformers, used for features and distillation.
    attn_implementation: str = "sdpa"
    #: Compile the decoder layers for feature extraction with torch.compile: one graph for all layers and lengths.
    compile: bool = False
    #: Jinja file that replaces the tokenizer's chat template.
    chat_template: str | None = None
    #: Day that a chat template shows where it writes the date, e.g. 2026-01-31; null takes the day on which the run
    #: began.
    template_date: str | None = None
    #: Run code that comes with the model. Set it only if you trust the repository, and on the command line: where a
    #: recipe's file sets it, a terminal is asked, and without one the recipe is refused.
    trust_remote_code: bool = False
    #: How the target is spread: none (whole on every rank), fsdp2 (in shards over the ranks of a node, never whole
    #: anywhere) or device_map (one process, layers over all its GPUs: for distilling and storing features of a target
    #: that is larger than one card).
    parallel: str = "none"
    #: Ranks that share one copy under fsdp2; null takes those of a node.
    shard_ranks: int | None = None


def sample_weight(name: str, weight: Tensor) -> bytes:
    """Name, shape and 4,096 values (as bfloat16) of a weight. All ranks that share a sharded one call it."""
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    flat = whole.detach().flatten()
    index = torch.linspace(0, max(flat.numel() - 1, 0), min(flat.numel(), 4096), dtype=torch.float64).long()
    sampled = flat[index.to(flat.device)].to("cpu")
    if sampled.dtype in PACKED:  # every bit counts where several numbers share one
        values = sampled.to(torch.int64).numpy().tobytes()
    else:
        values = sampled.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return f"{name}{tuple(weight.shape)}".encode() + values


def weight_hash_of(model: nn.Module) -> str:
    """sha256 over names, shapes and 4,096 sampled values of every weight. An injected adapter is left out.

    The values are rounded to bfloat16, so all dtypes that hold the weights exactly give the same hash. Of quantised
    weights the packed numbers and the scales are taken, so another quantisation gives another hash. All ranks that
    share a sharded target call it.
    """
    weights = plain_weights(model).items()
    state = sorted(
        ((name + part, tensor) for name, weight in weights for part, tensor in parts_of(weight).items()),
        key=lambda item: item[0],
    )
    return hashlib.sha256(b"".join(sample_weight(name, weight) for name, weight in state)).hexdigest()


def forward_tokens(cpu: bool, width: int) -> int:
    """Most tokens of one feature forward. A CPU is as fast with few, which take less memory and show sooner that work
    goes on. A GPU works on a narrow target faster than the host starts its kernels, which takes as long for any number
    of tokens. So a pass has as many as take the memory of GPU_TOKENS at GPU_WIDTH, but at most four times GPU_TOKENS.

    Args: width: the target's hidden size.
    """
    return CPU_TOKENS if cpu else min(max(GPU_TOKENS, GPU_TOKENS * GPU_WIDTH // width), 4 * GPU_TOKENS)


def length_groups(lengths: tuple[int, ...], max_tokens: int, waste: float = 1.25) -> list[list[int]]:
    """Group documents of similar length: with padding a group has at most `waste` times its real tokens.

    Args: max_tokens: of a group of several documents, padding included.
    Returns: groups of indices of documents, the longest document first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    total = 0
    for index in order:
        if groups:
            group = groups[-1]
            longest = lengths[group[0]]
            padded = longest * (len(group) + 1)
            if padded <= max_tokens and padded <= waste * (total + lengths[index]):
                group.append(index)
                total += lengths[index]
                continue
        groups.append([index])
        total = lengths[index]
    return groups


def side_by_side(batch: FeatureBatch, max_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The documents of a pack, laid out as rows of a forward pass: right-padded, documents of similar length together.

    Args: max_tokens: of one pass over several documents, padding included.
    Yields, on the batch's device: row_BT, int64, the pack's row of every token; real, int64, the places in the flat
        row_BT that are no padding.
    """
    rows, device = batch.tokens_R.shape[0], batch.tokens_R.device
    starts = [0]
    for length in batch.doc_lengths:
        starts.append(starts[-1] + length)
    for group in length_groups(batch.doc_lengths, max_tokens):
        step_T = torch.arange(batch.doc_lengths[group[0]])
        row_BT = torch.tensor([starts[i] for i in group])[:, None] + step_T
        real_BT = step_T < torch.tensor([batch.doc_lengths[i] for i in group])[:, None]
        real = torch.nonzero(real_BT.flatten()).squeeze(1)
        row_BT = to_device(row_BT.clamp(max=rows - 1), device, non_blocking=True)
        yield row_BT, to_device(real, device, non_blocking=True)


class Target:
    """A frozen causal LM with its tokenizer.

    Attributes:
        model, tokenizer: transformers objects; the model is in eval mode with gradients off.
        dims: HeadDims of the text model.
        teacher: the output head (lm_head, soft-cap, scale) as the model applies it.
        embed_VD: input embedding weight, unscaled.
        merged_adapter: the adapter that is merged into the model; None for a model as its makers published it.
        quantised: how the weights of its files are quantised; None for plain ones.
        stop_token_ids: every id that ends generation (generation config and tokenizer).
    """

    #: whether all ranks must make the same number of forwards (sharded.py)
    lockstep = False

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: TargetConfig,
        revision: str | None = None,
        merged_adapter: MergedAdapter | None = None,
        quantised: Quantisation | None = None,
        weight_hash: str | None = None,
    ):
        self.model, self.tokenizer, self.config = model.eval().requires_grad_(False), tokenizer, config
        self.revision, self.merged_adapter = revision, merged_adapter or merged_adapter_in(model.config)
        self.quantised = quantised or quantisation_of(model.config)
        self.dims = HeadDims.from_hf_config(model.config)
        keep_first_frequencies(model)
        output = model.get_output_embeddings()
        if output is None:
            raise TargetError(f"{config.name}: the model has no output embedding; expected a causal language model")
        bias, vocab = getattr(output, "bias", None), self.dims.vocab_size
        matrix_VD = matrix_of(output, self.dims.hidden_size)
        if matrix_VD.shape[0] < vocab:
            raise TargetError(
                f"{config.name}: lm_head has {matrix_VD.shape[0]} rows, expected config.vocab_size = {vocab}"
            )
        self.embed_VD: Tensor = model.get_input_embeddings().weight
        #: most tokens of one feature forward, padding included
        self.max_forward_tokens = forward_tokens(self.embed_VD.device.type == "cpu", self.dims.hidden_size)
        norm_D, place = final_norm(model), self.embed_VD.device
        # rows beyond the vocabulary are padding; a device map may put the matrix on another GPU than the embeddings
        matrix = Teacher(
            matrix_VD[:vocab].to(place), None if bias is None else bias[:vocab].to(place),
            norm_D=None if norm_D is None else norm_D.to(place),
        )  # fmt: skip
        self.teacher = self._measured(matrix)
        #: sentences that a user should read
        self.notes: list[str] = self._facts()
        self.stop_token_ids = self._stop_token_ids()
        self._weight_hash = weight_hash

    def compile(self) -> None:
        """Compile the decoder layers for feature extraction. They share one graph, which the first forward makes.

        Hooks stay outside the graph, so features are read as without it.
        """
        for layer in decoder_layers(self.model):
            layer.forward = torch.compile(layer.forward, dynamic=True)

    @classmethod
    def from_model(cls, model: nn.Module, tokenizer: Any = None, config: TargetConfig | None = None) -> Target:
        """Wrap a model that is already in memory."""
        return cls(model, tokenizer, config or TargetConfig(name=type(model).__name__))

    @property
    def positions(self) -> int:
        """Tokens that a context may hold, its answer included: see HeadDims.positions."""
        return HeadDims.from_hf_config(self.model.config).positions

    @property
    def ends(self) -> TargetEnds:
        """What a head is bound to. Ask again after `keep_rows`, which changes the teacher."""
        return TargetEnds(self.embed_VD, self.teacher, self.model)

    @property
    def device(self) -> torch.device:
        return self.embed_VD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VD.dtype

    def _measured(self, matrix: Teacher) -> Teacher:
        """The teacher with the model's own factor and soft-cap. Raises: TargetError, see probe.measured_teacher."""
        if not matrix.weight_VD.is_meta:
            return measured_teacher(self.model, matrix, self.config.name, states=not self.lockstep)
        require_single_pass(self.model, self.config.name)
        rule = rule_without_weights(self.model)
        return matrix if rule is None else replace(matrix, softcap=rule.softcap, scale=rule.scale)

    def _facts(self) -> list[str]:
        scale, softcap, limit = self.teacher.scale, self.teacher.softcap, self.dims.positions
        rule = [] if scale == 1.0 else [f"times {scale:.6g}"]
        if softcap is not None:
            rule.append(f"soft-capped at {softcap:.6g}")
        facts = [f"logits, as measured: its output matrix's product, {', '.join(rule)}"] if rule else []
        if limit < self.dims.max_position_embeddings:
            facts.append(
                f"LongRoPE: heads are trained, measured and served within its first {limit} positions, of "
                f"{self.dims.max_position_embeddings}; launch engines with a context of at most {limit} tokens"
            )
        if note := dynamic_note(self.dims.rope_parameters):
            facts.append(note)
        return facts

    def _stop_token_ids(self) -> tuple[int, ...]:
        ids: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for value in (
            getattr(generation, "eos_token_id", None),
            self.dims.eos_token_id,
            getattr(self.tokenizer, "eos_token_id", None),
        ):
            ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
        return tuple(sorted(ids))

    @torch.no_grad()
    def forward_documents(self, tokens_BT: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the target over right-padded documents.

        No attention mask is needed: attention is causal, so the padding after a document cannot change it.
        Returns: last hidden states [B, T, D], post-norm; layer id → its input [B, T, D], pre-norm.
        """
        with record_layer_inputs(self.model, layer_ids) as streams:
            output = text_decoder(self.model)(input_ids=tokens_BT, use_cache=False)
        spread = {k: stream_BTD.to(tokens_BT.device) for k, stream_BTD in streams.items()}
        return output.last_hidden_state.to(tokens_BT.device), spread

    @torch.no_grad()
    def extract(self, batch: FeatureBatch, spec: FeatureSpec) -> FeatureBatch:
        """Run the target over the documents of a pack.

        Returns: the batch on the target's device with `hidden_RD` (post-norm), `streams_RkD` (pre-norm, None when the
            spec asks for none) and `teacher_argmax_A` filled; padding rows are zero.
        """
        self.check_layer_ids(spec.layer_ids)
        batch = batch.to(self.device, non_blocking=True)  # the host makes the next pass ready while this one runs
        rows, width = batch.tokens_R.shape[0], self.dims.hidden_size
        hidden_RD = torch.zeros(rows, width, dtype=self.dtype, device=self.device)
        streams_RkD = hidden_RD.new_zeros(rows, len(spec.layer_ids), width) if spec.layer_ids else None
        for row_BT, real in side_by_side(batch, self.max_forward_tokens):
            last_BTD, streams = self.forward_documents(batch.tokens_R[row_BT], spec.layer_ids)
            target_rows = row_BT.flatten()[real]
            hidden_RD[target_rows] = last_BTD.flatten(0, 1)[real]
            for slot, layer_id in enumerate(spec.layer_ids):
                streams_RkD[target_rows, slot] = streams[layer_id].flatten(0, 1)[real]
        argmax_A = self.teacher_argmax(hidden_RD, batch.anchors.row_A + 1)
        return replace(batch, hidden_RD=hidden_RD, streams_RkD=streams_RkD, teacher_argmax_A=argmax_A)

    def teacher_argmax(self, hidden_RD: Tensor, row_A: Tensor, chunk: int = 4096) -> Tensor:
        """int64 [A]: the target's greedy next token after each row. Args: chunk: most rows whose logits are held."""
        chunk = chunk_rows(chunk, self.dims.vocab_size, self.device)
        parts = [self.teacher.logits(hidden_RD[rows]).argmax(-1) for rows in row_A.split(chunk)]
        return torch.cat(parts) if parts else row_A.new_zeros(0)

    def check_layer_ids(self, layer_ids: tuple[int, ...]) -> None:
        """Raises: ConfigError unless ids are distinct, ascending and in 1 … L-1 (methods §4)."""
        top = self.dims.num_layers - 1
        if list(layer_ids) != sorted(set(layer_ids)) or any(not 0 < k <= top for k in layer_ids):
            raise ConfigError(
                f"head.feature_layers: found {list(layer_ids)}, expected distinct ascending ids in 1 … {top} "
                f"(the target has {self.dims.num_layers} layers); set head.feature_layers"
            )

    def weight_hash(self) -> str:
        """The hash of `weight_hash_of`, computed once."""
        if self._weight_hash is None:
            self._weight_hash = weight_hash_of(self.model)
        return self._weight_hash

    def held_bytes(self) -> int:
        """Memory that this rank's part of the target takes, each tensor counted once."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.teacher.weight_VD, *self.held_besides()]
        local = [
            part.to_local() if hasattr(part, "to_local") else part
            for tensor in tensors
            for part in parts_of(tensor).values()
        ]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())

    def held_besides(self) -> list[Tensor]:
        """Tensors that a sharded target keeps outside its model."""
        return []

    def keep_rows(self, ids_U: Tensor | None) -> None:
        """Tell the target which rows of its output head training needs (None: all). A sharded one frees the others."""

    def fingerprint(self, weights: bool = True) -> dict[str, Any]:
        """What identifies the target: an artefact that was made from it works with a target of equal values only.

        Args: weights: False where they are not loaded; their hash is then None.
        """
        tokenizer_hash = template_hash = None
        if self.tokenizer is not None:
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            vocabulary = (
                backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
            )
            tokenizer_hash = sha256_text(vocabulary)
            if self.tokenizer.chat_template is not None:
                template_hash = sha256_text(json.dumps(self.tokenizer.chat_template, sort_keys=True))
        return {
            "name": self.config.name,
            "revision": self.revision,
            "weight_hash": self.weight_hash() if weights else None,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokenizer_hash": tokenizer_hash,
            "template_hash": template_hash,
            "template_date": shown_date(self.tokenizer),
            "vocab_size": self.dims.vocab_size,
            "hidden_size": self.dims.hidden_size,
            "num_layers": self.dims.num_layers,
            **({} if self.quantised is None else {"quantised": self.quantised.method}),
            **({} if self.merged_adapter is None else self.merged_adapter.fingerprint()),
        }
