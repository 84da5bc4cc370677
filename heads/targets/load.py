"""Loads the frozen target: from a registered name, a directory or the Hub, whole or in shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.heads.counting import counted
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, DataError, TargetError
from headstart.heads.files import explain_read, read_bounded
from headstart.heads.numerics import DTYPES
from headstart.heads.targets.adapter import refuse_quantised
from headstart.heads.targets.classes import auto_class, parts_note
from headstart.heads.targets.explained import explained_loading
from headstart.heads.targets.processor_template import MAX_BYTES, processor_template
from headstart.heads.targets.quantised import check_quantisation, own_dtype, quantisation_of, refused_here, run_once
from headstart.heads.targets.sharded import (
    ShardedTarget,
    WeightFiles,
    check_names,
    check_plain,
    fill,
    shard_group,
    with_buffers,
)
from headstart.heads.targets.stacked_experts import StackedExperts
from headstart.heads.targets.target import TARGET_KINDS, Target, TargetConfig, weight_hash_of
from headstart.heads.targets.template_date import fix_dates
from headstart.heads.targets.tuned import (
    Adapter,
    check_adapter_settings,
    check_fits,
    find_adapter,
    merge_into,
    merged_adapter_in,
)


def load_target(config: TargetConfig) -> Target:
    """Load model and tokenizer from a registered name, a directory or the Hub.

    Raises: TargetError naming the target and the remedy.
    """
    from transformers import AutoConfig

    device = present_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.parallel not in TARGET_KINDS:
        raise ConfigError(f"target.parallel: found {config.parallel!r}, expected one of {', '.join(TARGET_KINDS)}")
    place, shared, hub_refusal = locate(config)
    adapter = adapter_of(config)
    with explained_loading(config.name, hub_refusal):
        settings = AutoConfig.from_pretrained(place, **shared)
        loads = auto_class(settings, config.name, config.trust_remote_code)
        if (quantised := check_quantisation(settings, config.name)) is not None:
            if refusal := refused_here(quantised, config.name):
                raise TargetError(refusal)
            dtype = own_dtype(settings) if config.dtype == "auto" else dtype
        tokenizer = load_tokenizer(config, place, shared)
        if config.parallel == "fsdp2":
            return _ready(*_load_sharded(config, place, shared, tokenizer, device, dtype))
        spread: dict[str, Any] = {"device_map": "auto"} if config.parallel == "device_map" else {}
        if quantised is not None and adapter is not None:
            refuse_quantised(settings)
        if quantised is not None and not spread:  # packed weights cannot be moved with `to`
            spread = {"device_map": {"": device}}

        model, notes = _load_model(config, loads, place, {"dtype": dtype, **spread, **shared})
        revision = getattr(model.config, "_commit_hash", None) or config.revision
        model, merged = model if spread else model.to(device), None
        if adapter is not None:
            merged = merge_into(model, adapter, weight_hash_of(model))
            notes.append(merged_note(adapter, config.name))
        known_hash = None
        if quantised is not None:
            quantised = replace(quantised, dequantised=quantisation_of(model.config) is None)
            if quantised.dequantised and dtype == torch.float32:
                model.float()  # transformers 5.17 dequantises MXFP4 to bfloat16 whatever dtype it is asked for
            notes += [quantised.note, *dtype_note(model, config.dtype)]
            # before the first forward: after it, asking bitsandbytes for its weights breaks them on a CPU
            known_hash = weight_hash_of(model)
            run_once(model, config.name, config.dtype)
        target = Target(model, tokenizer, config, revision, merged, quantised, known_hash)
    return _ready(target, notes)


def _load_model(config: TargetConfig, loads: Any, place: str, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """The model with its weights, and notes for the user.

    Args: loads: the auto class. options: for `from_pretrained`.
    Raises: TargetError where a weight is missing or has another shape.
    """
    unread: set[str] = set()

    def make(attention: str) -> Any:
        with without_load_report():
            model, info = loads.from_pretrained(
                place, attn_implementation=attention, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        require_whole(config.name, model, info)
        unread.update(info["unexpected_keys"])
        return model

    model, notes = with_attention(make, config.attn_implementation)
    return model, notes + parts_note(model, unread)


@contextmanager
def without_load_report() -> Iterator[None]:
    """While open, transformers does not log a table of all tensors that are missing or left over.

    `require_whole` and `parts_note` say what of it matters, in a line each.
    """
    logger, kept = logging.getLogger("transformers.modeling_utils"), lambda record: "LOAD REPORT" not in record.msg
    logger.addFilter(kept)
    try:
        yield
    finally:
        logger.removeFilter(kept)


def adapter_of(config: TargetConfig) -> Adapter | None:
    """The adapter that the settings name, its files checked; None where they name none.

    Raises: ConfigError where it cannot be merged as the target is to be loaded; TargetError, see find_adapter.
    """
    check_adapter_settings(config.adapter, config.parallel)
    return None if config.adapter is None else find_adapter(config.adapter)


def config_of(config: TargetConfig) -> Any:
    """The target's own config.json, as transformers reads it. Raises: TargetError naming the target and the remedy."""
    from transformers import AutoConfig

    place, shared, hub_refusal = locate(config)
    with explained_loading(config.name, hub_refusal):
        return AutoConfig.from_pretrained(place, **shared)


def has_merged_adapter(config: TargetConfig) -> bool:
    """Whether the target's own config.json says that an adapter is merged into it. Raises: TargetError."""
    return merged_adapter_in(config_of(config)) is not None


def merged_note(adapter: Adapter, target: str) -> str:
    """A line that says what the loaded target is."""
    made_for = f" (made for {adapter.base})" if adapter.base not in (None, target) else ""
    return f"tuned: the adapter {adapter.name}{made_for} is merged into it"


def _ready(target: Target, notes: list[str]) -> Target:
    """The target with these notes, compiled if its config asks for it."""
    target.notes = [*notes, *target.notes]
    if target.config.compile:
        target.compile()
    return target


def _load_sharded(
    config: TargetConfig, place: str, shared: dict[str, Any], tokenizer: Any, device: torch.device, dtype: torch.dtype
) -> tuple[ShardedTarget, list[str]]:
    """A target whose weights go from the files straight into shards, and its notes; all ranks call it.

    Args: place, shared: as `locate` gives them.
    Raises: TargetError when the files do not hold exactly the model's tensors; ConfigError, see shard_group.
    """
    from transformers import AutoConfig

    group = shard_group(config.shard_ranks)
    directory, revision = model_directory(place, config.revision, bool(shared["local_files_only"]))
    settings = AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
    check_plain(settings, config.name)

    model, notes = model_on_meta(settings, config, dtype=dtype)
    load_generation_config(model, directory)
    output_shard_VD = fill(model, StackedExperts(WeightFiles(directory), model), device, group)
    return ShardedTarget(model, tokenizer, config, revision, group, output_shard_VD), notes


def model_directory(place: str, revision: str | None, local: bool) -> tuple[Path, str | None]:
    """The local directory of the model's files, and their revision. A model of the Hub is fetched once per machine."""
    if Path(place).is_dir():
        return Path(place), revision
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(
            place, revision=revision, local_files_only=local, allow_patterns=["*.safetensors", "*.json", "*.jinja"]
        )
    except OSError as error:
        raise TargetError(f"target {place!r} cannot be fetched: {error}") from error
    return Path(directory), Path(directory).name


def weightless_target(config: TargetConfig) -> Target:
    """The target without weights: its tokenizer, dimensions and stop tokens. It takes seconds at any size.

    Raises: TargetError naming the target and the remedy.
    """
    from transformers import AutoConfig

    place, shared, hub_refusal = locate(config)
    with explained_loading(config.name, hub_refusal):
        settings = AutoConfig.from_pretrained(place, **shared)
        auto_class(settings, config.name, config.trust_remote_code)  # before the tokenizer, whose error says less
        tokenizer = load_tokenizer(config, place, shared)
        quantised = check_quantisation(settings, config.name)
        model, notes = model_on_meta(settings, config)
        if quantised is not None:
            refusal = refused_here(quantised, config.name)
            if refusal and config.device == "cpu":
                raise TargetError(refusal)
            notes.append(refusal or quantised.note)
        load_generation_config(model, place, config.revision, shared["local_files_only"])
        notes += parts_note(model)
        if (adapter := adapter_of(config)) is not None:
            check_fits(adapter, model)
            notes.append(merged_note(adapter, config.name))
        target = Target(model, tokenizer, config, quantised=quantised)
    target.notes = [*notes, *target.notes]
    return target


def model_on_meta(settings: Any, config: TargetConfig, **options: Any) -> tuple[Any, list[str]]:
    """A model of these settings on the meta device, and the notes of `with_attention`."""
    loads = auto_class(settings, config.name, config.trust_remote_code)

    def make(attention: str) -> Any:
        with torch.device("meta"):
            return loads.from_config(
                settings, attn_implementation=attention, trust_remote_code=config.trust_remote_code, **options
            )

    return with_attention(make, config.attn_implementation)


def load_generation_config(
    model: nn.Module, place: Path | str, revision: str | None = None, local: bool = False
) -> None:
    """Give the model its generation config. Without one it stops at the end tokens of its tokenizer and its config."""
    from transformers import GenerationConfig

    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(place, revision=revision, local_files_only=local)


def dtype_note(model: nn.Module, stated: str) -> list[str]:
    """A line where a quantised model computes in another dtype than the recipe states."""
    found = model.get_input_embeddings().weight.dtype
    if stated == "auto" or DTYPES[stated] == found:
        return []
    name = str(found).removeprefix("torch.")
    return [f"target.dtype={stated} is not followed: the quantised files hold their other weights in {name}"]


def check_shardable(target: Target) -> None:
    """Refuse a target without weights that cannot be loaded in shards: by its buffers and its files' tensor names.

    Names are compared if the files are on this machine.
    Raises: TargetError naming the first that cannot be sharded.
    """
    model, (place, _, _) = target.model, locate(target.config)
    check_plain(model.config, target.config.name)
    with_buffers(model)
    if Path(place).is_dir() and any(Path(place).glob("*.safetensors*")):
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        check_names(model, StackedExperts(WeightFiles(Path(place)), model), tied)


def target_dims(name: str) -> HeadDims:
    """Dimensions of a target from its config alone: no weights are read.

    Args:
        name: as TargetConfig.name.
    Raises: TargetError naming the target and the remedy.
    """
    from transformers import AutoConfig

    from headstart.heads.targets.fetch import locate_target

    place, hub_refusal = locate_target(name)
    with explained_loading(name, hub_refusal):
        local = hub_refusal is not None
        config = AutoConfig.from_pretrained(place, local_files_only=local, trust_remote_code=False)
    return HeadDims.from_hf_config(config)


def resolve_device(device: str) -> torch.device:
    """The device that a recipe names.

    A GPU that is named by its number becomes the current one, because kernels are launched and graphs captured on the
    current one, wherever their tensors are. `cuda` is taken where no GPU is there, because a plan may ask about one.
    What computes calls `present_device`.
    Raises: ConfigError for other kinds of devices, and for the number of a GPU that is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"target.device: found {device!r}, expected auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and resolved.index is not None:
        if resolved.index >= (cards := torch.cuda.device_count()):
            there = f"{counted(cards, 'GPUs')}, numbered from 0" if cards else "no GPU that torch sees"
            raise ConfigError(
                f"target.device: found {device!r}, this machine has {there}; expected one that is there, auto or cpu"
            )
        torch.cuda.set_device(resolved)
    return resolved


def present_device(device: str) -> torch.device:
    """As `resolve_device`, for what computes. Raises: ConfigError also for a GPU where this machine has none."""
    resolved = resolve_device(device)
    require_present(resolved)
    return resolved


def require_present(device: torch.device) -> None:
    """Raises: ConfigError where the device is a GPU and this machine has none."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "target.device: found cuda, this machine has no GPU that torch sees; expected auto or cpu here "
            "(`headstart doctor` lists the GPUs)"
        )


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"target.dtype: found {dtype!r}, expected auto or one of {sorted(DTYPES)}")
    return DTYPES[dtype]


def locate(config: TargetConfig) -> tuple[str, dict[str, Any], str | None]:
    """Where a target is, for transformers.

    Returns: its directory or Hub id; arguments for every `from_pretrained`; why the Hub is not asked, or None.
    """
    from headstart.heads.targets.fetch import locate_target

    if config.name == "???":
        raise ConfigError(
            "target.name is not set: give a name, a directory or a Hub id, e.g. target.name=smollm2-135m-instruct"
        )
    place, hub_refusal = locate_target(config.name)
    local = hub_refusal is not None
    shared = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, "local_files_only": local}
    return place, shared, hub_refusal


def load_tokenizer(config: TargetConfig, place: str, shared: dict[str, Any]) -> Any:
    """The tokenizer, with the recipe's chat template if it names one; a date in the template is fixed to one day.

    Raises: TargetError for a template file that cannot be read.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place, **shared)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(Path(config.chat_template))
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = processor_template(place, shared["revision"], shared["local_files_only"])
    fix_dates(tokenizer, config.template_date)
    return tokenizer


def read_template(path: Path) -> str:
    """A Jinja file. Raises TargetError when it is missing, no regular file, or no text."""
    try:
        with explain_read(path):
            return read_bounded(path, MAX_BYTES).decode("utf-8")
    except (DataError, UnicodeDecodeError) as error:
        raise TargetError(f"target.chat_template: {error}; expected a Jinja file") from error


def with_attention(make: Callable[[str], Any], attention: str) -> tuple[Any, list[str]]:
    """`make(attention)`, or with eager attention if the model has no sdpa attention; and a note that says so.

    Some versions of transformers let sdpa attention run where attention logits are soft-capped, and leave the cap out.
    """
    try:
        model = make(attention)
    except ValueError as error:
        if attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
            raise
        model = make("eager")
        return model, [f"{type(model).__name__} has no sdpa attention: target.attn_implementation=eager is taken"]
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if attention != "sdpa" or cap is None:
        return model, []
    model.set_attn_implementation("eager")
    return model, [
        f"{type(model).__name__} has no sdpa attention with a soft-cap of {cap:g}: "
        "target.attn_implementation=eager is taken"
    ]


def require_whole(name: str, model: nn.Module, info: dict[str, Any]) -> None:
    """Refuse a model with parameters that were not in its files: transformers fills them with random values.

    Args: info: its loading info, `missing_keys` and `mismatched_keys` (name, shape in the file, shape in the model).
    Raises: TargetError naming the first such parameter.
    """
    wrong = [f"{key} is {list(has)}, expected {list(wants)}" for key, has, wants in sorted(info["mismatched_keys"])]
    learned = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    wrong += [f"{key} is missing" for key in sorted(learned & set(info["missing_keys"]))]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise TargetError(
            f"target {name!r}: its weights are not those of its config.json: {wrong[0]}{more}. Copy the model again, "
            "or mend its config.json"
        )
