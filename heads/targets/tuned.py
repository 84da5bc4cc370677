"""A tuned target: a base model with a LoRA adapter merged into its weights.

Where the two are compared, the base is called the original target. This file finds an adapter's files, checks them
without loading anything, and says which base and which adapter a target is made of. adapter.py merges them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headstart.heads.errors import ConfigError, TargetError, in_one_line
from headstart.heads.files import (
    delete,
    explain_read,
    read_json,
    require_regular,
    sha256_file,
    sha256_text,
    write_json,
)
from headstart.heads.repository import check_repository
from headstart.heads.targets.adapter import CONFIG_FILE, PREFIX, WEIGHTS_FILE, merge_adapter, refuse_quantised

#: folder of a saved head that holds the adapter of its tuned target
ADAPTER = "adapter"
#: folder of an export that holds the merged target
TUNED_TARGET = "target"
#: key of a merged target's config.json: which base and which adapter it was made of
TUNED_KEY = "headstart_tuned"
#: settings of an adapter that change nothing after training, or that the tensors themselves show
HARMLESS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core",
    "eva_config", "qalora_group_size", "use_dora", "ensure_weight_tying", "loftq_config", "runtime_config",
    "lora_ga_config", "bias",
}  # fmt: skip
#: settings that the merged weights depend on, besides the tensors
DECISIVE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "fan_in_fan_out")
#: ways of starting an adapter that leave the base's weights as they are
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
MERGE_YOURSELF = "merge it with peft (merge_and_unload), save the result, and give that directory as target.name"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on this machine whose files were checked.

    Attributes:
        name: as the user gave it.
        digest: sha256 over the file of its tensors and the settings that decide how they are merged.
        base: the model that it was made for, by its own settings; None where they do not say.
        shapes: tensor → shape, by the names in its file.
    """

    name: str
    directory: Path
    digest: str
    base: str | None
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class MergedAdapter:
    """The adapter that a tuned target has in its weights.

    Attributes:
        adapter: its name.
        digest: as `Adapter.digest`. directory: where its files are, if they are on this machine.
        base_hash: weight hash of the base, before merging; None where nobody knows it.
    """

    adapter: str
    digest: str
    base_hash: str | None
    directory: Path | None = None

    def fingerprint(self) -> dict[str, Any]:
        """What a target's fingerprint says besides the merged weights."""
        return {"adapter": self.adapter, "adapter_digest": self.digest, "base_weight_hash": self.base_hash}

    def mark(self, base: str | None) -> dict[str, Any]:
        """The value of TUNED_KEY. Args: base: Hub id of the base; None for one without."""
        return {"base": base, "adapter_digest": self.digest, "base_weight_hash": self.base_hash}


def tuned_fingerprint(base: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    """The fingerprint of a base with an adapter that is not merged yet: a head that is trained with it keeps this.

    Base and adapter say together what the tuned target is, so the hash of the merged weights is left out.

    Args: base: `Target.fingerprint()` of the base.
    """
    rest = {name: value for name, value in base.items() if name != "weight_hash"}
    return {**rest, **MergedAdapter(ADAPTER, adapter.digest, base["weight_hash"]).fingerprint()}


def merged_adapter_in(config: Any) -> MergedAdapter | None:
    """What config.json of a target says about the adapter in its weights; None where it says nothing."""
    mark = getattr(config, TUNED_KEY, None)
    if not isinstance(mark, dict) or not isinstance(mark.get("adapter_digest"), str):
        return None
    base_hash = mark.get("base_weight_hash")
    return MergedAdapter("merged", mark["adapter_digest"], base_hash if isinstance(base_hash, str) else None)


def is_tuned(fingerprint: Any) -> bool:
    """Whether a target's fingerprint, or what headstart.json keeps of it, is that of a tuned target."""
    return isinstance(fingerprint, dict) and bool(fingerprint.get("adapter_digest"))


def adapter_of_head(directory: Path) -> Path | None:
    """The adapter that lies beside a saved head, whose target it tunes; None for a head of a base target."""
    place = Path(directory) / ADAPTER
    return place if (place / CONFIG_FILE).is_file() else None


# --- finding and checking -------------------------------------------------------------------------------------------


def check_adapter_settings(name: str | None, parallel: str) -> None:
    """Raises: ConfigError for an adapter that cannot be merged as the target is loaded; nothing is looked up."""
    if name is None:
        return
    if not name.strip() or "\0" in name:
        raise ConfigError(f"target.adapter: found {name!r}, expected a peft directory or user/name[@revision]")
    if parallel == "fsdp2":
        raise ConfigError(
            "target.adapter: found one with target.parallel=fsdp2, which reads weights from files into shards: "
            f"set target.parallel=none or device_map, or {MERGE_YOURSELF}"
        )


def find_adapter(name: str) -> Adapter:
    """The adapter in a peft directory, or of `user/name[@revision]` on the Hub. Its files are checked, not loaded.

    Raises: TargetError naming what is wrong: no such place, no LoRA adapter, settings that cannot be merged.
    """
    place = Path(os.path.expanduser(name))
    if not place.is_dir():
        place = _fetched(name)
    return read_adapter(place, name)


def _fetched(name: str) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise TargetError(
            f"target.adapter: {name}: no such directory; expected one with {CONFIG_FILE}, or user/name[@revision]"
        )
    repo, _, revision = name.partition("@")
    check_repository(repo, "target.adapter", "a peft directory or user/name[@revision]")
    from headstart.heads.targets.fetch import hub_refusal

    refusal = hub_refusal()
    if refusal is not None and "HF_HUB_OFFLINE" not in refusal:
        raise TargetError(f"target.adapter: {name}: no such directory, and {refusal}; give a local directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(repo, revision=revision or None, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TargetError(
            f"target.adapter: {name}: neither a directory here nor a repository on the Hub that can be read "
            f"({in_one_line(error)})"
        ) from error
    return Path(found)


def read_adapter(directory: Path, name: str | None = None) -> Adapter:
    """Check the files in a directory. Raises: TargetError as `find_adapter`."""
    from headstart.heads.checkpoints.raw import read_json_object
    from headstart.heads.errors import FormatError

    said, place = f"target.adapter: {name or directory}", Path(directory)
    if not (place / CONFIG_FILE).is_file():
        inside = next((p for p in (place / ADAPTER, place / "head" / ADAPTER) if (p / CONFIG_FILE).is_file()), None)
        hint = f"; its adapter is {inside}" if inside else ""
        if (place / "config.json").is_file() and not hint:
            hint = "; a whole model is given as target.name"
        raise TargetError(f"{said}: found no {CONFIG_FILE}, expected a directory that peft saved{hint}")
    try:
        config = read_json_object(place / CONFIG_FILE)
    except FormatError as error:
        raise TargetError(f"target.adapter: {error}") from error
    check_mergeable(config, said)
    shapes = _shapes(place / WEIGHTS_FILE, said)
    settings = {key: config.get(key) for key in DECISIVE}
    content = json.dumps([settings, sha256_file(place / WEIGHTS_FILE)], sort_keys=True)
    base = config.get("base_model_name_or_path")
    named = base if isinstance(base, str) and base else None
    return Adapter(name or str(place), place, sha256_text(content), named, shapes)


def check_mergeable(config: dict[str, Any], said: str) -> None:
    """Raises: TargetError unless an adapter of these settings is a LoRA of linear layers that can be merged."""
    if config.get("peft_type") != "LORA":
        raise TargetError(f"{said}: peft_type: found {config.get('peft_type')!r}, expected 'LORA': {MERGE_YOURSELF}")
    odd = [key for key, value in sorted(config.items()) if value and key not in HARMLESS]
    if config.get("bias") not in (None, "none"):
        odd.append("bias")
    if odd:
        raise TargetError(f"{said}: {odd[0]}: found {config[odd[0]]!r}, which is not merged here: {MERGE_YOURSELF}")
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        raise TargetError(
            f"{said}: init_lora_weights: found {config['init_lora_weights']!r}, which changes the base as well: "
            "save it with peft's path_initial_model_for_weight_conversion first"
        )


def _shapes(path: Path, said: str) -> dict[str, tuple[int, ...]]:
    """Tensor → shape of the adapter's file, from its header."""
    if not path.is_file():
        raise TargetError(f"{said}: found no {WEIGHTS_FILE}, expected safetensors: save the adapter again with peft")
    try:
        with explain_read(path, TargetError):
            require_regular(path)
            with safe_open(path, framework="pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise TargetError(f"{said}: {path}: cannot be read: {error}") from error


def check_fits(adapter: Adapter, model: nn.Module) -> None:
    """Whether the adapter's tensors fit the model's linear layers, by names and shapes; the model may be on meta.

    Raises: TargetError naming the first that does not: the adapter belongs to another base model. TargetError for a
        model into which an adapter is merged already.
    """
    from transformers.pytorch_utils import Conv1D

    refuse_quantised(model.config)
    if (made_of := merged_adapter_in(model.config)) is not None:
        same = "this adapter is merged into it already" if made_of.digest == adapter.digest else "it is tuned already"
        raise TargetError(f"target.adapter: {adapter.name}: the target's config.json says that {same}: leave it out")
    said, modules = f"target.adapter: {adapter.name}", dict(model.named_modules())
    other = "it belongs to another base model" + (f" ({adapter.base})" if adapter.base else "")
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = output is not None and output.weight is embeddings.weight
    ranks: dict[str, dict[str, int]] = {}
    for tensor, shape in adapter.shapes.items():
        name, _, part = tensor.removeprefix(PREFIX).rpartition(".lora_")
        module = modules.get(name)
        if not tensor.startswith(PREFIX) or not part:
            raise TargetError(f"{said}: found the tensor {tensor}, expected those of a LoRA of linear layers")
        if module is None:
            raise TargetError(f"{said}: the target has no {name}: {other}")
        if not isinstance(module, nn.Linear | Conv1D):
            raise TargetError(f"{said}: {name} is a {type(module).__name__}, expected linear layers: {MERGE_YOURSELF}")
        if module is output and tied:
            raise TargetError(
                f"{said}: adapts {name}, which the target shares with its embeddings: merging would change both"
            )
        rows, columns = (module.weight if isinstance(module, nn.Linear) else module.weight.T).shape
        first, last = (shape[0], shape[-1]) if shape else (0, 0)
        expected = {"A.weight": (first, columns), "B.weight": (rows, last)}.get(part)
        if expected is None:
            continue  # DoRA's magnitudes have no rank
        if shape != expected:
            raise TargetError(
                f"{said}: {tensor} is {list(shape)}, the target's {name} makes it {list(expected)}: {other}"
            )
        ranks.setdefault(name, {})[part[0]] = first if part == "A.weight" else last
    odd = sorted(name for name, of in ranks.items() if len(of) != 2 or of["A"] != of["B"])
    if odd or not ranks:
        raise TargetError(f"{said}: {odd[0] if odd else 'it'} has no pair of lora_A and lora_B of one rank")


# --- merging --------------------------------------------------------------------------------------------------------


def merge_into(model: nn.Module, adapter: Adapter, base_hash: str | None) -> MergedAdapter:
    """Merge an adapter into a loaded model, in place. Raises: TargetError as `check_fits` and `merge_adapter` do."""
    check_fits(adapter, model)
    meta = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if meta is not None:
        raise TargetError(
            f"target.adapter: {meta} is not in memory (target.parallel=device_map put it on disk): take a machine that "
            f"holds the whole target, or {MERGE_YOURSELF}"
        )
    merge_adapter(model, adapter.directory)
    model.requires_grad_(False)
    return MergedAdapter(adapter.name, adapter.digest, base_hash, adapter.directory)


def adapted_weights(model: nn.Module, adapter: Adapter) -> dict[str, Tensor]:
    """The weights of the model that merging the adapter changes, by module."""
    names = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in adapter.shapes}
    return {name: model.get_submodule(name).weight for name in sorted(names)}


@contextmanager
def merged_for_now(model: nn.Module, adapter: Adapter) -> Iterator[None]:
    """While open, the model has the adapter merged; afterwards it has its own weights again, bit for bit.

    The adapted weights wait in host memory meanwhile.
    """
    check_fits(adapter, model)
    kept = {name: weight.detach().to("cpu", copy=True) for name, weight in adapted_weights(model, adapter).items()}
    try:
        merge_adapter(model, adapter.directory)
        model.requires_grad_(False)
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                model.get_submodule(name).weight.copy_(weight)


# --- writing --------------------------------------------------------------------------------------------------------


def rank_of(adapter: Adapter) -> int:
    """The largest rank of the adapter's updates, which engines allocate for."""
    return max(min(shape) for name, shape in adapter.shapes.items() if ".lora_A." in name)


def copy_adapter(adapter: Adapter, directory: Path, base: str | None) -> None:
    """Write the adapter's two files, which then name `base` as their model instead of a place on this machine."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{WEIGHTS_FILE}.partial"
    shutil.copyfile(adapter.directory / WEIGHTS_FILE, partial)
    partial.replace(directory / WEIGHTS_FILE)
    config = read_json(adapter.directory / CONFIG_FILE)
    write_json(directory / CONFIG_FILE, {**config, "base_model_name_or_path": base})


def save_tuned(model: Any, tokenizer: Any, directory: Path, dtype: torch.dtype, mark: dict[str, Any]) -> None:
    """Write a tuned target as an ordinary model directory. An earlier one is replaced once the new one is complete.

    Args:
        dtype: of the floating-point weights in the files.
        mark: `MergedAdapter.mark`, which config.json gets, so that nobody merges the adapter twice.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    delete(partial)
    # a matrix that the model ties stays one tensor, which is written once
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    weights = {}
    for name, x in model.state_dict().items():
        kind = dtype if x.is_floating_point() else x.dtype
        weights[name] = cast.setdefault((x.data_ptr(), x.shape), x.to(kind))
    model.save_pretrained(partial, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    for path in partial.glob("*.json"):  # transformers may note where the base was on this machine
        content = read_json(path)
        if isinstance(content, dict) and (here := {"_name_or_path", "name_or_path"} & content.keys()):
            write_json(path, {key: value for key, value in content.items() if key not in here})
    config = read_json(partial / "config.json")
    config.pop("torch_dtype", None)
    write_json(partial / "config.json", {**config, "dtype": str(dtype).removeprefix("torch."), TUNED_KEY: mark})
    delete(directory)
    partial.rename(directory)


def tuned_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Size of the files that `save_tuned` writes."""
    weights = {id(x): x for x in model.parameters()}.values()
    return sum(x.numel() * (dtype.itemsize if x.is_floating_point() else x.element_size()) for x in weights)
