"""A LoRA adapter of the target: everything that touches peft (arXiv 2106.09685; families §5).

An adapter adds (alpha / rank) · B A x to the output of some linear layers; A is [rank, in], B is [out, rank]. While it
is injected, the model's own weights do not change. With B = 0, or switched off, the model computes what it did before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headstart.heads.errors import ConfigError, DataError, TargetError
from headstart.heads.files import read_json, write_json, write_safetensors
from headstart.heads.targets.locate import decoder_layers
from headstart.heads.targets.quantised import quantisation_of

#: value of `modules`: every linear layer of the decoder layers
ALL_LINEAR = "all-linear"
#: name of the one adapter inside peft's layers, which its files leave out
NAME = "default"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
#: what peft puts before a module's name in its files
PREFIX = "base_model.model."
#: tensors that an adapter of linear layers has; the last is DoRA's
PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@dataclass(frozen=True)
class LoraSettings:
    """The shape of an adapter.

    Attributes:
        rank, alpha: the update is (alpha / rank) · B A.
        dropout: share of the inputs of A that training drops.
        modules: names of linear layers, such as q_proj or self_attn.q_proj, or ["all-linear"].
    """

    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05
    modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])


# --- finding modules ------------------------------------------------------------------------------------------------


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of the decoder layers by their names in `model`. An adapter that is there is looked through.

    The output matrix is none of them: heads are bound to it as it is.
    """
    from transformers.pytorch_utils import Conv1D

    names = {module: name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for layer in decoder_layers(model):
        for inner, module in layer.named_modules():
            # a router may be a linear layer with a forward of its own, which returns more than a product
            plain = isinstance(module, Conv1D) or getattr(type(module), "forward", None) is nn.Linear.forward
            if plain and not _of_adapter(inner):
                found[plain_name(names[module])] = module
    return found


def chosen_modules(model: nn.Module, modules: list[str]) -> list[str]:
    """Full names of the modules that `modules` (LoraSettings) names, in the model's order.

    Raises: ConfigError for a name that no linear layer of the decoder layers has.
    """
    linear = list(linear_modules(model))
    if list(modules) == [ALL_LINEAR]:
        return linear
    known = sorted({name.rsplit(".", 1)[-1] for name in linear})
    for wanted in modules:
        if not any(_named(name, wanted) for name in linear):
            raise ConfigError(
                f"joint.modules: found {wanted!r}, expected names of linear layers of the target's decoder layers, "
                f"which has {', '.join(known)}: use some of these, or [{ALL_LINEAR}]"
            )
    if not modules:
        raise ConfigError(f"joint.modules: found no name, expected some of {', '.join(known)}, or [{ALL_LINEAR}]")
    return [name for name in linear if any(_named(name, wanted) for wanted in modules)]


def _named(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _of_adapter(name: str) -> bool:
    """Whether a module or tensor belongs to peft's layers and not to the model."""
    return any(part.startswith("lora_") for part in name.split("."))


def plain_name(name: str) -> str:
    """The name that a module or tensor has in the model without an adapter."""
    return name.replace(".base_layer", "")


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model has without its adapter."""
    weights = model.state_dict()
    if not has_adapter(model):
        return weights
    return {plain_name(name): weight for name, weight in weights.items() if not _of_adapter(name)}


# --- injecting ------------------------------------------------------------------------------------------------------


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's LoRA layers by the names of the modules that they stand for."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is injected. One that was merged into the weights is none."""
    return getattr(model, "peft_config", None) is not None


def add_adapter(model: nn.Module, settings: LoraSettings, seed: int) -> dict[str, nn.Parameter]:
    """Inject an adapter with B = 0, which changes nothing yet. A model that has one keeps it.

    A is drawn uniformly from ± 1 / √in, as peft does it, but from the seed: the same on every rank and device.

    Returns: `adapter_parameters` of the model.
    Raises: ConfigError for names in `settings.modules` that the model does not have.
    """
    if has_adapter(model):
        return adapter_parameters(model)
    from peft import inject_adapter_in_model

    names = chosen_modules(model, settings.modules)
    inject_adapter_in_model(_peft_config(settings, names), model, adapter_name=NAME)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            # peft gives them the dtype of the layer; they are trained in float32
            down, up = layer.lora_A[NAME].float(), layer.lora_B[NAME].float()
            noise = torch.rand(down.weight.shape, generator=draw, dtype=torch.float32)
            down.weight.copy_((noise * 2 - 1) * down.weight.shape[1] ** -0.5)
            up.weight.zero_()
    use_dropout(model, False)
    return adapter_parameters(model)


def check_injectable(model: nn.Module, settings: LoraSettings) -> None:
    """Try `add_adapter` on a twin of the model without weights. An adapter that is there was injectable.

    Raises: ConfigError where peft refuses the modules, or the model does not have them.
    """
    if has_adapter(model):
        return
    from peft import inject_adapter_in_model

    names = chosen_modules(model, settings.modules)
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    try:
        inject_adapter_in_model(_peft_config(settings, names), twin, adapter_name=NAME, low_cpu_mem_usage=True)
    except (ValueError, NotImplementedError, TypeError) as reason:
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
        raise ConfigError(
            f"joint.modules: found {list(settings.modules)}, which peft cannot adapt here ({reason}): set "
            f"joint.modules to some of {known} that it can"
        ) from reason


def continue_adapter(model: nn.Module, settings: LoraSettings, directory: Path) -> None:
    """Inject an adapter that goes on from the saved one in `directory`.

    Raises: as `add_adapter` and `check_continued`.
    """
    check_continued(planned_parameters(model, settings), settings, directory)
    parameters, tensors = add_adapter(model, settings, 0), _read_tensors(directory)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[PREFIX + name])


def check_continued(wanted: dict[str, nn.Parameter], settings: LoraSettings, directory: Path) -> None:
    """Raises: ConfigError unless a saved adapter has the tensors and the scale that the settings describe.

    Args: wanted: `planned_parameters`, or those of the injected adapter.
    """
    tensors, config = _read_tensors(directory), read_json(directory / CONFIG_FILE)
    found = {name.removeprefix(PREFIX): tuple(x.shape) for name, x in tensors.items()}
    shapes = {name: tuple(x.shape) for name, x in wanted.items()}
    scale = float(config.get("lora_alpha", 8)) / float(config.get("r", 8))
    odd = next((key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if config.get(key)), None)
    if found == shapes and odd is None and scale == settings.alpha / settings.rank:
        return
    what = f"its {odd} is {config[odd]!r}" if odd else f"its tensors are those of {config.get('target_modules')}"
    raise ConfigError(
        f"start_from: {directory} is another adapter than the recipe's: r {config.get('r')}, alpha "
        f"{config.get('lora_alpha')}, and {what}, expected r {settings.rank}, alpha {settings.alpha:g} on "
        f"{list(settings.modules)}: set joint.rank, joint.alpha and joint.modules to its own"
    )


def planned_parameters(model: nn.Module, settings: LoraSettings) -> dict[str, nn.Parameter]:
    """What `add_adapter` would return, without weights (on the meta device). The model does not change."""
    found: dict[str, nn.Parameter] = {}
    modules = linear_modules(model)
    for name in chosen_modules(model, settings.modules):
        weight = modules[name].weight
        rows, columns = weight.shape if isinstance(modules[name], nn.Linear) else weight.shape[::-1]
        found[f"{name}.lora_A.weight"] = nn.Parameter(torch.empty(settings.rank, columns, device="meta"))
        found[f"{name}.lora_B.weight"] = nn.Parameter(torch.empty(rows, settings.rank, device="meta"))
    return found


def require_peft() -> None:
    """Raises: ConfigError where peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"joint.enabled: found true, and peft cannot be imported ({error}): `pip install peft`, or set "
            "joint.enabled=false"
        ) from error


def _peft_config(settings: LoraSettings, names: list[str], **others: Any) -> Any:
    from peft import LoraConfig

    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    return LoraConfig(
        r=settings.rank, lora_alpha=alpha, lora_dropout=settings.dropout, target_modules=names, bias="none",
        task_type="CAUSAL_LM", **others,
    )  # fmt: skip


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by their names in peft's files without `PREFIX`: `<module>.lora_A.weight`, …"""
    found: dict[str, nn.Parameter] = {}
    for name, layer in adapted_layers(model).items():
        found[f"{name}.lora_A.weight"] = layer.lora_A[NAME].weight
        found[f"{name}.lora_B.weight"] = layer.lora_B[NAME].weight
    return found


def use_dropout(model: nn.Module, on: bool) -> None:
    """Whether the adapter drops some of its inputs, as in training. A new adapter drops none."""
    for layer in adapted_layers(model).values():
        layer.lora_dropout.train(on)


def keep_input_dtype(model: nn.Module, keep: bool) -> None:
    """Whether the adapter's layers take their inputs as they are. Under autocast a copy in float32 would be waste."""
    for layer in adapted_layers(model).values():
        layer.cast_input_dtype_enabled = not keep


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """While open, the model computes what it computes without its adapter, bit for bit."""
    layers = adapted_layers(model).values()
    # peft's own switch (enable_adapters) also changes which parameters need gradients
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def remove_adapter(model: nn.Module) -> None:
    """Take the adapter out. The model then has its own modules and weights again, bit for bit."""
    for name, layer in adapted_layers(model).items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.base_layer)
    for left in ("peft_config", "_hf_peft_config_loaded"):
        if left in vars(model):
            delattr(model, left)
    model.requires_grad_(False)


# --- files ----------------------------------------------------------------------------------------------------------


def save_adapter(model: nn.Module, directory: Path, base_name: str) -> None:
    """Write the model's adapter as peft does, for `PeftModel.from_pretrained` and for vLLM's `--enable-lora`.

    Args: base_name: `base_model_name_or_path`, the target that the adapter belongs to.
    """
    layers = adapted_layers(model)
    first = next(iter(layers.values()))
    dropout = float(getattr(first.lora_dropout[NAME], "p", 0.0))  # peft puts nn.Identity where it is 0
    settings = LoraSettings(first.r[NAME], first.lora_alpha[NAME], dropout)
    names = _short_names(model, list(layers))
    config = _peft_config(settings, names, inference_mode=True, base_model_name_or_path=base_name).to_dict()
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    tensors = {f"{PREFIX}{name}": parameter for name, parameter in adapter_parameters(model).items()}
    write_safetensors(directory / WEIGHTS_FILE, tensors)
    write_json(directory / CONFIG_FILE, values)


def _short_names(model: nn.Module, names: list[str]) -> list[str]:
    """Last parts of the names, where they name no other module; else the whole names."""
    short = {name.rsplit(".", 1)[-1] for name in names}
    named = {plain_name(n) for n, _ in model.named_modules() if any(_named(plain_name(n), leaf) for leaf in short)}
    return sorted(short) if named == set(names) else sorted(names)


def merge_adapter(model: nn.Module, directory: Path) -> None:
    """Add the adapter in `directory` to the weights of a plain model, in place.

    The sum is computed in float64 and rounded once to the dtype of the weights, so that every machine gets the same.

    Raises: TargetError for files that are no LoRA adapter of linear layers, or one of another model.
    """
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict

    if has_adapter(model):
        raise TargetError(f"{directory}: the model has an adapter already: take it out first")
    refuse_quantised(model.config)
    tensors = _read_tensors(directory)
    try:
        config = PeftConfig.from_pretrained(str(directory))
        if config.peft_type != "LORA":
            raise TargetError(f"{directory}/{CONFIG_FILE}: peft_type: found {config.peft_type}, expected LORA")
        config.inference_mode = True
        inject_adapter_in_model(config, model, adapter_name=NAME)
    except TargetError:
        raise
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise TargetError(f"{directory}: not an adapter of this target: {error}") from error
    try:
        _check_tensors(model, tensors, directory)
        for layer in adapted_layers(model).values():
            layer.lora_A.float(), layer.lora_B.float()
        set_peft_model_state_dict(
            model, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, adapter_name=NAME
        )
        for layer in adapted_layers(model).values():
            dtype = layer.base_layer.weight.dtype
            layer.double().merge(safe_merge=True)
            layer.base_layer.float().to(dtype)
    except ValueError as error:
        raise TargetError(f"{directory}: the adapter cannot be merged: {error}") from error
    finally:
        remove_adapter(model)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    path = Path(directory) / WEIGHTS_FILE
    if not path.is_file():
        raise TargetError(f"{directory}: found no {WEIGHTS_FILE}, expected a directory that peft saved")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, DataError) as error:
        raise TargetError(f"{path}: cannot be read: {error}") from error
    for name in tensors:
        if not name.endswith(PARTS):
            raise TargetError(
                f"{path}: found the tensor {name}, expected those of a LoRA adapter of linear layers: "
                f"{', '.join(PARTS)}"
            )
    return tensors


def _check_tensors(model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
    """Raises: TargetError unless the files hold exactly the tensors that the injected adapter has, in their shapes."""
    wanted: dict[str, tuple[int, ...]] = {}
    table = model.get_input_embeddings().weight
    for name, layer in adapted_layers(model).items():
        for part, module in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            if NAME not in module or layer.base_layer.weight is table:
                raise TargetError(
                    f"{directory}: found an adapter of {name}, expected one of linear layers that share no weight with "
                    "the embeddings"
                )
            wanted[f"{PREFIX}{name}.{part}.weight"] = tuple(module[NAME].weight.shape)
    found = {name: tuple(x.shape) for name, x in tensors.items() if not name.endswith(PARTS[2])}
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise TargetError(
                f"{directory}: not an adapter of this target: {name}: found {found.get(name, 'nothing')}, expected "
                f"{wanted.get(name, 'nothing')}"
            )


def refuse_quantised(config: Any) -> None:
    """Raises: TargetError for a model with quantised weights: to merge an update would round them once more."""
    if quantisation_of(config) is not None:
        raise TargetError(
            "target.name: found a model with quantised weights, into which no adapter can be merged; take the same "
            "model in bfloat16 or float32"
        )
