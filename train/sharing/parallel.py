"""How the ranks of a run share the head: whole on each (DDP, captured graphs), FSDP2 shards, or DeepSpeed ZeRO.

All kinds make the same update of a window: the gradient of the loss L summed over all ranks, clipped by its global
norm, then one AdamW step. A checkpoint holds whole float32 tensors by name, so a run may change its kind when it
resumes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, StorageError
from headstart.train.averages import KEY as AVERAGE
from headstart.train.averages import Averages
from headstart.train.config import TrainConfig
from headstart.train.optim import build_optimizer, muon_matrices, rate_factors, token_matrices
from headstart.train.sharing.distributed import is_distributed
from headstart.train.sharing.gradients import FlatGradients, fill_gradients

#: this torch's name for the argument of DDP that sends rank 0's buffers to all ranks at every forward pass
SEND_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(nn.parallel.DistributedDataParallel).parameters
)
KINDS = ("replicated", "fsdp2", "zero2", "zero3")


def resolve_kind(config: TrainConfig, accelerator: Accelerator) -> str:
    """`train.parallel`, where auto follows the launch (`accelerate launch --config_file …`).

    Raises: ConfigError when the recipe contradicts the launch or DeepSpeed.
    """
    launched = accelerator.distributed_type
    kind = config.parallel
    if kind == "auto":
        kind = "replicated"
        if launched == DistributedType.FSDP:
            kind = "fsdp2"
        elif launched == DistributedType.DEEPSPEED:
            stage = int(accelerator.state.deepspeed_plugin.zero_stage)
            if stage not in (2, 3):
                raise ConfigError(f"launch: found DeepSpeed zero_stage {stage}, expected 2 or 3 (recipes/accelerate/)")
            kind = f"zero{stage}"
    check_kind(kind, config, accelerator.num_processes)
    return kind


def check_kind(kind: str, config: TrainConfig, ranks: int) -> None:
    """Raise ConfigError where `kind` does not work with this number of ranks or with these settings."""
    if kind == "fsdp2" and ranks < 2:
        raise ConfigError(
            "train.parallel: found fsdp2 with one rank, expected two or more: launch more ranks, or set "
            "train.parallel=replicated"
        )
    if kind.startswith("zero") and config.nonfinite == "skip":
        raise ConfigError(
            f"train.nonfinite: found skip with train.parallel={kind}; DeepSpeed cannot drop a gradient that it has "
            "reduced: set train.nonfinite=stop, or train.parallel=fsdp2"
        )
    if config.rounds > 1 and ranks > 1:
        raise ConfigError(
            f"train.rounds: found {config.rounds} with {ranks} ranks, expected one process, which walks all training "
            "answers: launch one, or set train.rounds=1"
        )
    if kind not in ("auto", "replicated") and config.optimizer == "muon":
        raise ConfigError(
            f"train.optimizer: found muon with train.parallel={kind}; its update needs whole matrices, and each rank "
            "has shards of them: set train.parallel=replicated (ddp-*.yaml), or train.optimizer=adamw"
        )
    if kind.startswith("zero") and config.average_decay is not None:
        raise ConfigError(
            f"train.average_decay: found {config.average_decay} with train.parallel={kind}; DeepSpeed keeps the "
            "weights to itself: set train.average_decay=null, or train.parallel=fsdp2 or replicated"
        )
    if kind.startswith("zero") and config.clip_value is not None:
        raise ConfigError(
            f"train.clip_value: found {config.clip_value} with train.parallel={kind}; DeepSpeed clips by norm only: "
            "set train.clip_value=null and train.clip_norm, or train.parallel=fsdp2"
        )


def broadcast_weights(head: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, bit for bit."""
    if is_distributed():
        for tensor in (*head.parameters(), *head.buffers()):
            dist.broadcast(tensor.data, 0)


class Parallel:
    """The head, its loss module and its optimiser, as the ranks share them.

    Each pack of a window goes through `module` and `backward`; then come `sum_gradients`, `clip`, `step`, `zero_grad`.

    Attributes:
        module: the loss as a forward pass (LossModule), wrapped as the kind needs it.
        optimizer: its param_groups carry the learning rate.
        averages: of the weights, where `train.average_decay` asks for them.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, head: Head, config: TrainConfig):
        self.head, self.config = head, config
        self.averages = Averages(config.average_decay, self.named_trainable)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_sync(self) -> AbstractContextManager[Any]:
        """While open, backward passes add to this rank's gradient and share nothing with other ranks."""
        return nullcontext()

    def trainable(self) -> list[nn.Parameter]:
        return list(self.named_trainable().values())

    def named_trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    def sum_gradients(self) -> Callable[[], None] | None:
        """Sum the gradients over the ranks, where the backward passes did not do so already.

        Returns: None when the sums are complete; otherwise what waits for them, so that other work can be queued first.
        """
        return None

    def clip(self) -> Tensor:
        """Clip the gradient as configured. Returns its global norm before that (device scalar)."""
        fill_gradients(self.head)
        gradients = [p.grad for p in self.trainable()]
        norm = nn.utils.get_total_norm(gradients)
        if self.config.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.trainable(), self.config.clip_norm, norm)
        if self.config.clip_value is not None:
            nn.utils.clip_grad_value_(self.trainable(), self.config.clip_value)
        return whole_tensor(norm)

    def step(self, norm: Tensor) -> Tensor:
        """Make the optimiser's step; returns the gradient norm."""
        self.optimizer.step()
        return norm

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def restart_optimizer(self) -> None:
        """Forget the moments, as at the start of a run. Weights and gradients stay."""
        self.optimizer.state.clear()

    def whole_head(self) -> AbstractContextManager[Any]:
        """While open, every rank has whole weights in an ordinary module (for validation). All ranks must enter it."""
        return nullcontext()

    def head_sizes(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of what `head_tensors` yields; nothing is gathered for it."""
        parameters = dict(self.head.named_parameters())
        for name, tensor in self.head.state_dict().items():
            # DeepSpeed leaves an empty tensor in the place of one in shards
            yield name, tuple(getattr(parameters.get(name), "ds_shape", tensor.shape)), tensor.dtype

    def head_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the head's state dict, one at a time. All ranks must iterate over them."""
        for name, tensor in self.head.state_dict().items():
            yield name, whole_tensor(tensor)

    def optimizer_sizes(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of what `optimizer_tensors` will yield, numbers apart, even before the first step."""
        by_muon = muon_matrices(self.head) if self.config.optimizer == "muon" else set()
        trained = self.named_trainable()
        for name, shape, dtype in self.head_sizes():
            if name in trained:
                moments = ("momentum_buffer",) if name in by_muon else ("exp_avg", "exp_avg_sq")
                for key in (*moments, *([AVERAGE] if self.config.average_decay is not None else [])):
                    yield f"{key}/{name}", shape, dtype

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(`<key>/<parameter name>`, whole state tensor), one at a time. All ranks must iterate over them."""
        for name, parameter in self.head.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{key}/{name}", whole_tensor(value)
        for name, average in self.averages.tensors():
            yield f"{AVERAGE}/{name}", whole_tensor(average)

    @torch.no_grad()
    def load_head(self, tensors: dict[str, Tensor]) -> None:
        """Give the head these whole tensors. Raises StorageError unless their names are the head's."""
        own = self.head.state_dict()
        check_head_names(set(tensors), set(own))
        for name, tensor in tensors.items():
            own[name].copy_(placed_like(own[name], tensor))

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Give every parameter its saved moments, and its average. Learning rate, decay and betas stay the recipe's.

        Raises: StorageError when the parameters are not those that were saved.
        """
        names = {parameter: name for name, parameter in self.head.named_parameters()}
        own = dict(self.head.named_parameters())
        saved: dict[str, dict[str, Tensor]] = {}
        averages: dict[str, Tensor] = {}
        for path, tensor in tensors.items():
            key, name = path.split("/", 1)
            whole = name in own and tensor.ndim > 0
            placed = placed_like(own[name], tensor) if whole else tensor
            if key == AVERAGE:
                averages[name] = placed.to(own[name].device, copy=True) if name in own else placed
            else:
                saved.setdefault(name, {})[key] = placed
        wanted = [names[p] for group in self.optimizer.param_groups for p in group["params"]]
        check_optimizer_names(set(saved), set(wanted))
        check_optimizer_names(set(averages), set(wanted))
        self.averages.load(averages)
        if saved:
            # load_state_dict puts each tensor where this optimiser variant (fused or not) needs it
            groups = self.optimizer.state_dict()["param_groups"]
            state = {i: saved[name] for i, name in enumerate(wanted)}
            self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def finish(self) -> None:
        """Leave the trained head as an ordinary module on every rank."""


def check_head_names(saved: set[str], own: set[str]) -> None:
    """Raise StorageError unless a checkpoint has exactly the head's tensors."""
    if own != saved:
        differing = ", ".join(sorted(own ^ saved)[:4])
        raise StorageError(f"checkpoint: holds another head (tensors that differ: {differing})")


def check_optimizer_names(saved: set[str], wanted: set[str]) -> None:
    """Raise StorageError unless the saved moments, where there are any, belong to the parameters that train."""
    if saved and saved != wanted:
        raise StorageError(
            f"optimizer state is for parameters {sorted(saved)[:6]}…, the head trains {sorted(wanted)[:6]}…; "
            "the recipe's head changed since the checkpoint: use another run directory, or train.resume=false"
        )


def whole_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered (all ranks must call it); any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach() if full is None else full().detach()


def placed_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """`whole`, sharded and placed as `tensor` is. Every rank has `whole`, so nothing is sent."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(tensor.device), mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


class Replicated(Parallel):
    """Every rank holds the whole head.

    Several ranks share gradients through DDP. DDP cannot be captured, so with captured steps the gradients are summed
    here.

    Args:
        captured: whether steps run as CUDA graphs; nothing wraps the module then.
    """

    def __init__(self, head: Head, module: nn.Module, config: TrainConfig, accelerator: Accelerator, captured: bool):
        super().__init__(head, config)
        self.captured = captured
        self.optimizer = build_optimizer(head, config, rate_factors(head), token_matrices(head), muon_matrices(head))
        broadcast_weights(head)
        self.flat = FlatGradients(self.trainable()) if captured and accelerator.num_processes > 1 else None
        self.module = module
        if accelerator.num_processes > 1 and not captured:
            cuda = accelerator.device.type == "cuda"
            self.module = nn.parallel.DistributedDataParallel(
                module,
                device_ids=[accelerator.device.index] if cuda else None,
                gradient_as_bucket_view=True,
                **{SEND_BUFFERS: False},
            )

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync() if isinstance(self.module, nn.parallel.DistributedDataParallel) else nullcontext()

    def sum_gradients(self) -> Callable[[], None] | None:
        return None if self.flat is None else self.flat.sum_over_ranks()

    def zero_grad(self) -> None:
        # a graph adds to the gradient tensors that were there when it was captured
        self.optimizer.zero_grad(set_to_none=not self.captured)


class Sharded(Parallel):
    """FSDP2: every rank holds a shard of the parameters, gradients and moments.

    The head is one unit, because heads read weights of their submodules directly. Its parameters are gathered once per
    window, before the first forward pass, and stay whole until the last backward pass. Gradients are reduced once per
    window too, however many packs a rank has.
    """

    def __init__(self, head: Head, module: nn.Module, config: TrainConfig, accelerator: Accelerator):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(head, config)
        broadcast_weights(head)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        self.module = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self.optimizer = build_optimizer(head, config, rate_factors(head), token_matrices(head), muon_matrices(head))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._sync(False)
        try:
            yield
        finally:
            self._sync(True)

    def _sync(self, on: bool) -> None:
        self.module.set_requires_gradient_sync(on)  # type: ignore[operator]
        self.module.set_reshard_after_backward(on)  # type: ignore[operator]

    @contextmanager
    def whole_head(self) -> Iterator[None]:
        self.module.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            self.module.reshard()  # type: ignore[operator]

    def finish(self) -> None:
        make_plain(self.head, dict(self.head_tensors()))


def make_plain(head: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace every parameter of the head by an ordinary one that holds the whole tensor."""
    for name, parameter in list(head.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        plain = nn.Parameter(tensors[name].clone(), requires_grad=parameter.requires_grad)
        head.get_submodule(owner).register_parameter(leaf, plain)
