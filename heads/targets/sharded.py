"""A frozen target in shards: no rank ever holds the whole model.

Every rank keeps 1/n of each decoder layer (FSDP2) and, where the target does not tie it, of the output head; a layer is
gathered for its own forward only. Weights go from the files straight to the shards: the model is built without memory
and each rank reads its rows. The input embedding and the final norm stay whole, because draft heads read them.

Ranks exchange weights at every layer of a forward. So all ranks must make the same number of forwards: `in_step` and
`idle` add empty ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.ends import Teacher
from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.files import read_json
from headstart.heads.targets.locate import decoder_layers, text_decoder
from headstart.heads.targets.quantised import quantisation_of
from headstart.heads.targets.target import Target, TargetConfig, length_groups

#: tensors in older checkpoints that a model computes itself
COMPUTED = re.compile(r"(.*\.)?rotary_emb\.inv_freq$")
REMEDY = "set target.parallel=none (whole on every rank) or device_map (one process, layers over its GPUs)"


@dataclass
class RowsTeacher(Teacher):
    """The output head's rows of one draft vocabulary; `weight_VD` is [U, D]."""

    def logits(self, hidden_AD: Tensor, ids_U: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Logits of the draft vocabulary, [A, U]. Raises: TargetError where others are asked for."""
        if ids_U is None or ids_U.shape[0] != self.weight_VD.shape[0]:
            raise TargetError(
                f"sharded target: found a request for {'all' if ids_U is None else ids_U.shape[0]} logits, expected "
                f"the {self.weight_VD.shape[0]} of the draft vocabulary: {REMEDY}"
            )
        return super().logits(hidden_AD, None, dtype)


def rows_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Rows first … last - 1 that a rank holds, as torch.chunk divides them: (first, last)."""
    chunk = -(-total // size)
    return min(rank * chunk, total), min((rank + 1) * chunk, total)


class Weights(Protocol):
    """Where a model's tensors come from."""

    directory: Path
    file_of: dict[str, str]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first … last - 1 of a tensor."""
        ...


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise TargetError(f"{index}: found no weight_map from tensors to files, expected one: copy the model again")
    return names


class WeightFiles:
    """The safetensors files of a model directory; tensors are read from them by name."""

    def __init__(self, directory: Path):
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self.file_of: dict[str, str] = _weight_map(index)
        elif (directory / "model.safetensors").is_file():
            with safe_open(directory / "model.safetensors", framework="pt") as file:
                self.file_of = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise TargetError(
                f"{directory}: found neither model.safetensors nor its index, expected safetensors weights: {REMEDY}"
            )

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first … last - 1 of a tensor, read from the file alone."""
        with safe_open(self.directory / self.file_of[name], framework="pt") as file:
            return file.get_slice(name)[first:last]


class ShardedTarget(Target):
    """A target whose decoder layers (and untied output head) are sharded over the ranks of `group`.

    Attributes:
        parts: ranks that share one copy.
    """

    lockstep = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: TargetConfig,
        revision: str | None,
        group: dist.ProcessGroup,
        output_shard_VD: Tensor | None,
    ):
        super().__init__(model, tokenizer, config, revision)
        self.group, self.parts = group, dist.get_world_size(group)
        #: this rank's rows of the output head; None if it is tied to the embedding, which every rank has whole
        self._output_shard_VD = output_shard_VD
        #: forwards of one extraction that all ranks make, and those that this rank has made
        self._planned = self._made = 0

    def keep_rows(self, ids_U: Tensor | None) -> None:
        """Keep these rows of the output head, which are all that training needs, and free the whole matrix."""
        if ids_U is None or self._output_shard_VD is None:
            return
        self.weight_hash()  # while there is a whole matrix to sample
        whole = self.teacher
        bias = None if whole.bias_V is None else whole.bias_V[ids_U]
        self._bias_V = whole.bias_V
        self.teacher = RowsTeacher(whole.weight_VD[ids_U].clone(), bias, whole.softcap, whole.scale, whole.norm_D)
        self.model.get_output_embeddings().weight = nn.Parameter(
            torch.empty(0, device=self.device, dtype=self.dtype), requires_grad=False
        )

    def held_besides(self) -> list[Tensor]:
        return [] if self._output_shard_VD is None else [self._output_shard_VD]

    # -- keeping in step -------------------------------------------------------------------------------------------

    def passes(self, lengths: tuple[int, ...]) -> int:
        """Forwards that a pack of documents of these lengths takes."""
        return len(length_groups(lengths, self.max_forward_tokens))

    @contextmanager
    def in_step(self, passes: int) -> Iterator[None]:
        """While open, `extract` makes exactly this many forwards, empty ones at the end."""
        self._planned, before = passes, self._planned
        try:
            yield
        finally:
            self._planned = before

    def idle(self, passes: int) -> None:
        """Make the forwards of an extraction for which the other ranks have a pack and this one has none."""
        self._made = 0
        self._fill_passes(passes)
        self.teacher_argmax(self.embed_VD.new_zeros(1, self.dims.hidden_size), torch.zeros(0, dtype=torch.int64))

    def extract(self, batch: FeatureBatch, spec: FeatureSpec) -> FeatureBatch:
        self._made = 0
        return super().extract(batch, spec)

    def forward_documents(self, tokens_BT: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
        self._made += 1
        return super().forward_documents(tokens_BT, layer_ids)

    def _fill_passes(self, passes: int) -> None:
        while self._made < passes:
            self.forward_documents(torch.zeros(1, 1, dtype=torch.int64, device=self.device), ())

    @torch.no_grad()
    def teacher_argmax(self, hidden_RD: Tensor, row_A: Tensor, chunk: int = 4096) -> Tensor:
        """As Target.teacher_argmax. Every rank gets the rows of the output head in turn, one rank's part at a time."""
        self._fill_passes(self._planned)
        if self._output_shard_VD is None:
            return super().teacher_argmax(hidden_RD, row_A, chunk)
        bias_V = self._bias_V if isinstance(self.teacher, RowsTeacher) else self.teacher.bias_V
        hidden_AD = hidden_RD[row_A.to(hidden_RD.device)]
        best_A = torch.full((hidden_AD.shape[0],), -torch.inf, device=self.device)
        argmax_A = torch.zeros(hidden_AD.shape[0], dtype=torch.int64, device=self.device)
        for owner in range(self.parts):
            first, last = rows_of(self.dims.vocab_size, owner, self.parts)
            part_VD = self._output_shard_VD
            if owner != dist.get_rank(self.group):
                part_VD = part_VD.new_empty(last - first, part_VD.shape[1])
            if last == first:
                continue
            dist.broadcast(part_VD, group=self.group, group_src=owner)
            part = Teacher(
                part_VD, None if bias_V is None else bias_V[first:last], self.teacher.softcap, self.teacher.scale
            )
            for rows in torch.arange(hidden_AD.shape[0], device=self.device).split(chunk):
                logits = part.logits(hidden_AD[rows])
                index_A = logits.argmax(-1)
                value_A = logits.gather(-1, index_A[:, None])[:, 0]
                better_A = value_A > best_A[rows]  # a tie keeps the lower id, as argmax does
                best_A[rows] = torch.where(better_A, value_A, best_A[rows])
                argmax_A[rows] = torch.where(better_A, index_A + first, argmax_A[rows])
        return argmax_A


def shard_size(size: int | None, ranks: int, node_ranks: int) -> int:
    """How many ranks share one copy: `size`, by default the ranks of a node.

    Raises: ConfigError when there are no ranks to shard over or the size does not divide them.
    """
    if ranks < 2:
        raise ConfigError(
            "target.parallel: found fsdp2 in a process that is alone, expected two or more ranks: launch with "
            f"`accelerate launch` or `torchrun`, or {REMEDY}"
        )
    size = node_ranks if size is None else size
    if size < 1 or ranks % size:
        raise ConfigError(f"target.shard_ranks: found {size}, expected a divisor of the {ranks} ranks")
    return size


def shard_group(size: int | None) -> dist.ProcessGroup:
    """The group of the ranks that share this rank's copy: consecutive ones. Raises: see shard_size."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = shard_size(size, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    group, _ = dist.new_subgroups(group_size=size) if size < world else (dist.group.WORLD, None)
    return group


def fill(model: nn.Module, files: Weights, device: torch.device, group: dist.ProcessGroup | None) -> Tensor | None:
    """Shard a model on the meta device, then read this rank's rows of every weight.

    Args:
        group: ranks to shard over; None: this rank takes the whole model.
    Returns: this rank's rows of the output head; None without a group, or when it is tied to the input embedding.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, size = 0, 1
    if group is not None:
        decoder, layers = text_decoder(model), decoder_layers(model)
        mesh = DeviceMesh.from_group(group, device.type)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        whole = {p for p in decoder.parameters() if id(p) not in inside}
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(decoder, mesh=mesh, ignored_params=whole)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    model.to_empty(device=device)
    model.tie_weights()
    restore_buffers(model, device)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = check_names(model, files, tied)
    with torch.no_grad():
        for name, parameter in names.items():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            sharded = local is not parameter
            first, last = rows_of(parameter.shape[0], rank, size) if sharded else (0, parameter.shape[0])
            if last > first:
                rows = files.rows(name, first, last)
                if rows.shape != local.shape:
                    raise TargetError(
                        f"{name}: found shape {tuple(rows.shape)} in the files, expected {tuple(local.shape)}: {REMEDY}"
                    )
                local.copy_(rows)
    model.eval().requires_grad_(False)
    if tied or group is None:
        return None
    first, last = rows_of(model.config.get_text_config().vocab_size, rank, size)
    return model.get_output_embeddings().weight.detach()[first:last].clone()


def check_names(model: nn.Module, files: Weights, tied: bool) -> dict[str, nn.Parameter]:
    """The model's parameters by name, tied ones once. Raises: TargetError unless the files hold exactly these."""
    names = dict(model.named_parameters())
    spare = {name for name in files.file_of if COMPUTED.match(name)}
    if tied:
        spare |= {n for n, m in model.named_parameters(remove_duplicate=False) if n not in names}
    missing, extra = set(names) - set(files.file_of), set(files.file_of) - set(names) - spare
    if missing or extra:
        raise TargetError(
            f"{files.directory}: the files do not hold the model's tensors as it names them: missing "
            f"{sorted(missing)[:3]}, unknown {sorted(extra)[:3]}: {REMEDY}"
        )
    return names


def restore_buffers(model: nn.Module, device: torch.device) -> None:
    """Fill the buffers of a model that was built on the meta device: build the modules that compute them anew."""
    for name, module in with_buffers(model):
        owner, _, leaf = name.rpartition(".")
        fresh = type(module)(config=module.config).to(device)
        setattr(model.get_submodule(owner), leaf, fresh)


def with_buffers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that hold buffers. Raises: TargetError for one that cannot be built anew from its config alone."""
    modules = []
    for name, module in model.named_modules():
        if all(buffer is None for buffer in module._buffers.values()):
            continue
        if getattr(module, "config", None) is None or any(True for _ in module.parameters(recurse=False)):
            raise TargetError(f"{type(model).__name__}: cannot compute the buffers of {name}: {REMEDY}")
        modules.append((name, module))
    return modules


def check_plain(settings: Any, name: str) -> None:
    """Raises: TargetError for quantised weights."""
    if quantisation_of(settings) is not None:
        raise TargetError(f"{name}: found quantised weights, expected plain ones to shard: {REMEDY}")
