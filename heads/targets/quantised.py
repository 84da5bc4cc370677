"""Targets whose files hold quantised weights: what loads them, in which precision, and how much memory they take.

Heads are trained on the features of the model as it is loaded. transformers reads these files with one package per
method. Where a machine cannot compute with quantised weights, transformers dequantises some methods, and says so in a
log only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.errors import TargetError
from headstart.heads.numerics import DTYPES
from headstart.heads.targets.sizes import expert_stacks

#: method of config.json → what transformers reads it with: name of the package → module to look for
PACKAGES = {
    "awq": {"gptqmodel": "gptqmodel"},
    "gptq": {"gptqmodel": "gptqmodel", "optimum": "optimum.version"},
    "compressed-tensors": {"compressed-tensors": "compressed_tensors"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "torchao": {"torchao": "torchao"},
    "quanto": {"optimum-quanto": "optimum.quanto"},
    "hqq": {"hqq": "hqq"},
    "aqlm": {"aqlm": "aqlm"},
    "vptq": {"vptq": "vptq"},
    "auto-round": {"auto-round": "auto_round"},
    "quark": {"amd-quark": "quark"},
}
#: dtypes of weights that hold their own numbers
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PLAIN = "Or name a target whose weights are not quantised"


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a target's files are quantised.

    Attributes:
        method: `quant_method` of config.json.
        settings: its `quantization_config`.
        dequantised: whether transformers turns them into plain weights as it loads them.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    dequantised: bool = False

    @property
    def note(self) -> str:
        """A sentence for the user."""
        if self.dequantised:
            return (
                f"its files are quantised ({self.method}), and this machine dequantises them as it loads them: heads "
                "are trained on the features of the dequantised model, which rounds otherwise than quantised products"
            )
        return f"its weights are quantised ({self.method}): heads are trained on the features of the quantised model"


def quantisation_of(config: Any) -> Quantisation | None:
    """The quantisation that a model's config states, or its text part's config; None for plain weights.

    Raises: TargetError for one without a method.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    if found is None:
        return None
    settings = dict(found if isinstance(found, dict) else found.to_dict())
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method is None:
        raise TargetError("its config.json has a quantization_config without quant_method: copy the model again")
    return Quantisation(str(getattr(method, "value", method)), settings)


def check_quantisation(config: Any, name: str) -> Quantisation | None:
    """The quantisation of a target that is to be loaded here, as this machine will load it.

    Raises: TargetError in one line for a method that transformers does not read, or whose package is missing.
    """
    found = quantisation_of(config)
    if found is None:
        return None
    failed = f"target {name!r} cannot be loaded: its weights are quantised by {found.method},"
    missing = {pip: module for pip, module in PACKAGES.get(found.method, {}).items() if not _installed(module)}
    if missing:
        raise TargetError(
            f"{failed} which needs {' and '.join(missing)}: pip install {' '.join(missing)} (looked for the "
            f"{'modules' if len(missing) > 1 else 'module'} {', '.join(missing.values())}). {PLAIN}"
        )
    from transformers.quantizers import AutoHfQuantizer

    if not AutoHfQuantizer.supports_quant_method(dict(found.settings)):
        # transformers would log a warning and fill a plain model with the packed numbers
        raise TargetError(f"{failed} which this version of transformers does not read. {PLAIN}")
    try:
        quantiser = AutoHfQuantizer.from_config(dict(found.settings), pre_quantized=True)
        quantiser.validate_environment()
    except ImportError as error:
        if "GPU" in str(error) and not torch.cuda.is_available():
            return found
        raise TargetError(f"{failed} and a package is missing: {_one_line(error)}. {PLAIN}") from error
    except Exception:  # no GPU, or not this one: another machine will load it; here `refused_here` says so
        return found
    return Quantisation(found.method, found.settings, bool(getattr(quantiser.quantization_config, "dequantize", False)))


def refused_here(found: Quantisation, name: str) -> str | None:
    """Why this machine cannot load a target of this quantisation, although its packages are there; None if it can."""
    from transformers.quantizers import AutoHfQuantizer

    try:
        AutoHfQuantizer.from_config(dict(found.settings), pre_quantized=True).validate_environment()
    except Exception as error:
        need = "" if torch.cuda.is_available() else "; there is no GPU here"
        return (
            f"target {name!r} cannot be loaded here: its weights are quantised by {found.method}: "
            f"{_one_line(error)}{need}. Load it on another machine. {PLAIN}"
        )
    return None


def _installed(module: str) -> bool:
    try:
        found = find_spec(module)
        return found is not None and found.origin is not None  # a folder of that name is no package
    except ModuleNotFoundError:  # the package around it is missing
        return False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def own_dtype(config: Any) -> torch.dtype:
    """The dtype that a quantised target computes in as it is served: that of its config.json, else bfloat16."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return dtype if dtype in DTYPES.values() else torch.bfloat16


@torch.no_grad()
def run_once(model: Any, name: str, stated: str) -> None:
    """Run a loaded quantised model once: some packages make their weights ready in the first forward.

    Args: stated: target.dtype of the recipe.
    Raises: TargetError where it cannot compute in its dtype.
    """
    table = model.get_input_embeddings().weight
    if not is_plain(table):
        raise TargetError(
            f"target {name!r}: its embeddings are quantised, and heads read rows of them: name a target whose "
            "embeddings are plain"
        )
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=table.device), use_cache=False)
    except RuntimeError as error:
        if stated == "auto" or "dtype" not in str(error).lower():
            raise
        raise TargetError(
            f"target.dtype: found {stated}, in which the quantised weights of {name!r} cannot compute "
            f"({_one_line(error)[:200]}): set target.dtype=auto, which takes the dtype of its config.json"
        ) from error


def is_plain(weight: Any) -> bool:
    """Whether a weight holds its own numbers: a floating-point matrix, in one piece or in shards."""
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in FLOATS:
        return False
    return hasattr(weight, "full_tensor") or not hasattr(weight, "__tensor_flatten__")


@torch.no_grad()
def matrix_of(module: Any, width: int, chunk: int = 1024) -> Tensor:
    """The matrix [V, D] of a model's output layer; that of a quantised layer is found by multiplying unit vectors.

    Args: width: D.
    Raises: TargetError where a quantised layer's products are no finite numbers.
    """
    weight = getattr(module, "weight", None)
    if is_plain(weight):
        return weight
    place = next(iter([*module.parameters(), *module.buffers()])).device
    dtype = next((t.dtype for t in (getattr(module, "bias", None), weight) if is_floating(t)), torch.bfloat16)
    zero_V = module(torch.zeros(1, width, dtype=dtype, device=place))
    rows = [
        module(torch.eye(width, dtype=dtype, device=place)[start : start + chunk]) - zero_V
        for start in range(0, width, chunk)
    ]
    matrix_VD = torch.cat(rows).T.contiguous()
    if not bool(torch.isfinite(matrix_VD).all()):
        raise TargetError("its output matrix is quantised, and its products with unit vectors are no finite numbers")
    return matrix_VD


def is_floating(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in FLOATS


def parts_of(weight: Tensor) -> dict[str, Tensor]:
    """The tensors that a weight is stored as: itself, or those that a quantised one packs its numbers into, by name."""
    if hasattr(weight, "full_tensor") or not hasattr(weight, "__tensor_flatten__"):
        return {"": weight}
    names, _ = weight.__tensor_flatten__()
    parts = {name: getattr(weight, name) for name in names}
    return {
        f".{name}{rest}": part for name, whole in parts.items() for rest, part in parts_of(whole).items()
    }  # fmt: skip


def weight_bits(found: Quantisation) -> float | None:
    """Bits that a quantised weight takes in memory, scales included; None for those that are held as plain numbers."""
    get = found.settings.get
    if found.dequantised or found.method == "compressed-tensors":  # its first forward unpacks them
        return None
    if found.method in ("fp8", "fbgemm_fp8", "mxfp8"):
        block = get("weight_block_size")
        return 8 + (32 / (block[0] * block[1]) if block else 0)
    if found.method == "mxfp4":
        return 4 + 8 / 32 if _installed("kernels") else None  # without its kernels it is dequantised
    if found.method == "bitsandbytes":
        if get("load_in_8bit"):
            return 8
        return 4 + (8 / 64 + 32 / (64 * 256) if get("bnb_4bit_use_double_quant") else 32 / 64)
    if found.method == "torchao":
        stated = re.search(r"(\d+)Weight|Intx", json.dumps(get("quant_type"), default=str))
        return None if stated is None else float(stated[1] or 8)
    bits, group = get("bits", get("nbits", get("w_bit"))), get("group_size", get("q_group_size", 0))
    if not isinstance(bits, int):
        return None
    return bits + ((16 + bits) / group if isinstance(group, int) and group > 0 else 0)


def held_bytes_of(model: Any, number: int, found: Quantisation | None) -> Callable[[Iterable[nn.Parameter]], int]:
    """A function from parameters of `model`, whose shapes are those of plain weights, to the bytes that they will take.

    Args: number: bytes of a plain number.
    """
    bits = None if found is None else weight_bits(found)
    packed = set() if found is None or bits is None else set(_quantised_weights(model, found))

    def held(parameters: Iterable[nn.Parameter]) -> int:
        unique = {id(p): p for p in parameters}
        return sum(int(p.numel() * (bits / 8 if bits and i in packed else number)) for i, p in unique.items())

    return held


def _quantised_weights(model: Any, found: Quantisation) -> Iterable[int]:
    """ids of the parameters that the method packs: of linear layers and of experts, without those it leaves out."""
    get, ends = found.settings.get, {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    left_out = get("modules_to_not_convert") or get("llm_int8_skip_modules") or []
    stacks = {id(stack) for stack, _ in expert_stacks(model)} if found.method not in ("bitsandbytes", "torchao") else ()
    linear = found.method != "mxfp4"
    for name, module in model.named_modules():
        if id(module) in ends or any(_matches(name, pattern) for pattern in left_out):
            continue
        if id(module) in stacks or (linear and isinstance(module, nn.Linear)):
            yield from (id(p) for p in module.parameters(recurse=False) if p.ndim > 1 and p.shape[-1] > 1)


def _matches(name: str, pattern: str) -> bool:
    """Whether a module is, or is in, what a pattern of `modules_to_not_convert` names; `*` stands for anything."""
    return re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '.*')}(\.|$)", name) is not None
