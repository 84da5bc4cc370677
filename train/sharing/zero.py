"""DeepSpeed ZeRO stages 2 and 3 for the head; deepspeed is an optional package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.heads.base import Head
from headstart.heads.errors import ConfigError
from headstart.train.averages import KEY as AVERAGE
from headstart.train.config import TrainConfig
from headstart.train.optim import build_optimizer, token_matrices
from headstart.train.sharing.parallel import (
    Parallel,
    broadcast_weights,
    check_head_names,
    check_optimizer_names,
    make_plain,
)


class GivenGradients(torch.autograd.Function):
    """A scalar whose backward pass gives every parameter a gradient that was made before, always in the same order."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return (None, *ctx.gradients)


class Holder(nn.Module):
    """The parameters of a head in a module of their own, without copies. DeepSpeed knows of this module only."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"p{number}", parameter)

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        return GivenGradients.apply(gradients, *self.parameters())  # type: ignore[no-any-return]


class Zero(Parallel):
    """DeepSpeed ZeRO stage 2 or 3 in float32 (autocast inside the loss, as everywhere).

    DeepSpeed shares gradients in the order in which backward passes produce them, and gathers weights as modules run.
    Packs differ in the depths that they reach, so ranks would disagree on both orders. Therefore the bare module makes
    a window's gradient, and DeepSpeed gets it once, when it is complete. Under stage 3 the whole head is gathered
    before the window and released after it.

    Raises: ConfigError when deepspeed is not installed.
    """

    def __init__(self, head: Head, module: nn.Module, config: TrainConfig, accelerator: Accelerator, stage: int):
        super().__init__(head, config)
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigError(
                f"train.parallel: zero{stage} needs deepspeed, which is not installed: `pip install deepspeed`, or set "
                "train.parallel=fsdp2, which shards the same state"
            ) from error
        self.stage, self._deepspeed = stage, deepspeed
        broadcast_weights(head)
        optimizer = build_optimizer(head, config, tokens=token_matrices(head))
        plugin = getattr(accelerator.state, "deepspeed_plugin", None)
        given = {} if plugin is None else plugin.deepspeed_config.get("zero_optimization", {})
        settings = zero_config(config, stage, given)
        self._parameters = self.trainable()
        self.engine, _, _, _ = deepspeed.initialize(
            model=Holder(self._parameters), optimizer=optimizer, config=settings
        )
        self.module = module
        self.optimizer = self.engine.optimizer
        self._gradients: list[Tensor | None] = [None] * len(self._parameters)
        self._gathered = ExitStack()
        self._is_gathered = False
        if stage == 3:
            module.register_forward_pre_hook(lambda *_: self._gather())
        self._make_moments()

    def _make_moments(self) -> None:
        """Make AdamW's state before its first step, so that a checkpoint can be read into it."""
        optimizer: Any = self.optimizer
        flats = optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        for flat in flats:
            state = self._inner().state[flat]
            if not state:
                state["step"] = torch.zeros((), device=flat.device if flat.is_cuda else None)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
        link = getattr(optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:  # called after a step, it finds the state of the first parameter group only
            link()

    def _gather(self) -> None:
        if not self._is_gathered:
            self._gathered.enter_context(self.whole_head())
            self._is_gathered = True

    def backward(self, loss: Tensor) -> None:
        """Add to this rank's gradient, which DeepSpeed has not seen yet."""
        made = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        self._gradients = [
            more if one is None else one if more is None else one + more
            for one, more in zip(self._gradients, made, strict=True)
        ]

    def sum_gradients(self) -> None:
        self._gathered.close()
        self._is_gathered = False
        gradients, self._gradients = self._gradients, [None] * len(self._parameters)
        self.engine.backward(self.engine(gradients))

    def clip(self) -> Tensor:
        return torch.zeros((), device=self.engine.device)  # the engine clips as it steps

    def step(self, norm: Tensor) -> Tensor:
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=norm.device)

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def whole_head(self) -> AbstractContextManager[Any]:
        if self.stage < 3:
            return nullcontext()
        return self._deepspeed.zero.GatheredParameters(self._parameters)

    def head_tensors(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        parameters = dict(self.head.named_parameters())
        for name, tensor in self.head.state_dict().items():
            whole = safe_get_full_fp32_param(parameters[name]) if name in parameters else tensor
            yield name, (tensor if whole is None else whole).detach()

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = [s["step"] for s in self._inner().state.values() if "step" in s]
        for name, parameter in self.head.named_parameters():
            if parameter.requires_grad:
                for key in ("exp_avg", "exp_avg_sq"):
                    yield f"{key}/{name}", safe_get_full_optimizer_state(parameter, key).detach()
                yield f"step/{name}", torch.as_tensor(float(steps[0]) if steps else 0.0)

    def load_head(self, tensors: dict[str, Tensor]) -> None:
        parameters = dict(self.head.named_parameters())
        own = self.head.state_dict()
        check_head_names(set(tensors), set(own))
        for name, tensor in tensors.items():
            if name not in parameters or not parameters[name].requires_grad:
                own[name].copy_(tensor)
                continue
            parameter, value = parameters[name], tensor.to(self.engine.device)
            self._set(parameter, value)
            # passes compute with a copy of the weights that were just set
            whole = nullcontext()
            if self.stage == 3:
                whole = self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
            with whole:
                parameter.data.copy_(value)

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        parameters = self.named_trainable()
        tensors = {path: tensor for path, tensor in tensors.items() if not path.startswith(f"{AVERAGE}/")}
        check_optimizer_names({path.split("/", 1)[1] for path in tensors}, set(parameters))
        for path, tensor in tensors.items():
            key, name = path.split("/", 1)
            if key == "step":
                self._set_steps(float(tensor))
            else:
                self._set(parameters[name], tensor.to(self.engine.device), key)

    def _set(self, parameter: nn.Parameter, whole: Tensor, key: str | None = None) -> None:
        """Write this rank's part of a float32 weight, or of its moment `key`."""
        from deepspeed import utils

        where = () if key is None else (key,)
        if self.stage == 2:
            write = utils.safe_set_full_fp32_param if key is None else utils.safe_set_full_optimizer_state
        else:  # the whole tensor is refused where it does not divide by the ranks
            size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            rank, flat = dist.get_rank(), whole.flatten()
            padded = nn.functional.pad(flat, (0, size * dist.get_world_size() - flat.numel()))
            whole = padded[size * rank : size * (rank + 1)]
            write = utils.safe_set_local_fp32_param if key is None else utils.safe_set_local_optimizer_state
        write(parameter, whole, *where)

    def _inner(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _set_steps(self, value: float) -> None:
        for state in self._inner().state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"], dtype=torch.float32), value)

    def finish(self) -> None:
        make_plain(self.head, dict(self.head_tensors()))


def zero_config(config: TrainConfig, stage: int, given: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration. A window is one micro-batch to DeepSpeed, however many packs it has.

    Args: given: the `zero_optimization` node of the launch's own configuration, whose offload and bucket sizes hold.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**{k: v for k, v in given.items() if v != "auto"}, "stage": stage},
    }
