"""DeepSpeed ZeRO stages 2 and 3 for the head; deepspeed is an optional package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.heads.errors import ConfigError, StorageError
from headstart.train.config import TrainConfig
from headstart.train.optim import build_optimizer
from headstart.train.parallel import Parallel, broadcast_weights, check_optimizer_names, make_plain


class Zero(Parallel):
    """DeepSpeed ZeRO stage 2 or 3 in float32 (autocast inside the loss, as everywhere).

    Its engine reduces at every backward, so all ranks make the same number of passes.
    Raises: ConfigError when deepspeed is not installed.
    """

    def __init__(self, head: nn.Module, module: nn.Module, config: TrainConfig, accelerator: Accelerator, stage: int):
        super().__init__(head, config)
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigError(
                f"train.parallel: zero{stage} needs deepspeed, which is not installed: `pip install deepspeed`, or set "
                "train.parallel=fsdp2, which shards the same state"
            ) from error
        if config.clip_value is not None:
            raise ConfigError(
                f"train.clip_value: found {config.clip_value} with train.parallel=zero{stage}; DeepSpeed clips by norm "
                "only: set train.clip_value=null and train.clip_norm, or train.parallel=fsdp2"
            )
        self.stage, self._deepspeed = stage, deepspeed
        broadcast_weights(head)
        optimizer = build_optimizer(head, config)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # the engine may make a first empty step to create its moments
        plugin = getattr(accelerator.state, "deepspeed_plugin", None)
        given = {} if plugin is None else plugin.deepspeed_config.get("zero_optimization", {})
        settings = zero_config(config, stage, given)
        self.engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        self.module = self.engine
        self.optimizer = self.engine.optimizer
        if stage == 3:
            # parameters are read outside the forward of the submodule that owns them
            for parameter in head.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
        self._set_steps(0.0)

    def rounds(self, packs: int, size: int) -> int:
        return -(-packs // size)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

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
        return self._deepspeed.zero.GatheredParameters(list(self.head.parameters()))

    def head_tensors(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        parameters = dict(self.head.named_parameters())
        for name, tensor in self.head.state_dict().items():
            found = safe_get_full_fp32_param(parameters[name]) if name in parameters else tensor
            yield name, (tensor if found is None else found).detach()

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = [s["step"] for s in self._inner().state.values() if "step" in s]
        for name, parameter in self.head.named_parameters():
            if parameter.requires_grad:
                for key in ("exp_avg", "exp_avg_sq"):
                    yield f"{key}/{name}", safe_get_full_optimizer_state(parameter, key).detach()
                yield f"step/{name}", torch.as_tensor(float(steps[0]) if steps else 0.0)

    def load_head(self, tensors: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        parameters = dict(self.head.named_parameters())
        own = self.head.state_dict()
        if set(own) != set(tensors):
            differing = ", ".join(sorted(set(own) ^ set(tensors))[:4])
            raise StorageError(f"checkpoint: holds another head (tensors that differ: {differing})")
        for name, tensor in tensors.items():
            if name in parameters:
                safe_set_full_fp32_param(parameters[name], tensor.to(self.engine.device))
            else:
                own[name].copy_(tensor)

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        parameters = {name: p for name, p in self.head.named_parameters() if p.requires_grad}
        check_optimizer_names({path.split("/", 1)[1] for path in tensors}, set(parameters))
        for path, tensor in tensors.items():
            key, name = path.split("/", 1)
            if key == "step":
                self._set_steps(float(tensor))
            else:
                safe_set_full_optimizer_state(parameters[name], tensor.to(self.engine.device), key)

    def _inner(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _set_steps(self, value: float) -> None:
        for state in self._inner().state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"], dtype=torch.float32), value)

    def finish(self) -> None:
        make_plain(self.head, dict(self.head_tensors()))


def zero_config(config: TrainConfig, stage: int, given: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration; `given` is the launch's `zero_optimization` node (offload and bucket sizes count).

    The accumulation boundary is set by hand, because the last window of an epoch may be shorter.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**{k: v for k, v in given.items() if v != "auto"}, "stage": stage},
    }
