"""What the engines' rules about EAGLE heads share: sizes, tensors, feature layers and the draft vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headstart.heads.checkpoints.geometry import LLAMA_DEFAULTS, integer
from headstart.heads.checkpoints.tensor_map import draft_map_problem
from headstart.heads.dims import HeadDims
from headstart.heads.families.eagle3.files import QK_NORMS
from headstart.heads.families.eagle_files import LAYER
from headstart.heads.formats.handling import REFUSES, WRONG, Case, Handling, TensorRule


def llama_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Symbol → size as an engine computes them from a llama config, transformers' defaults included.

    H draft width, D target width, A query rows, G key/value rows, d width of a head, I MLP width, V target and U draft
    vocabulary.
    Raises: FormatError for a value that is no size.
    """
    full = {**LLAMA_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}

    def size(name: str, default: int | None = None) -> int:
        return integer(full, name, "config.json", default)

    hidden, heads, vocab_size = size("hidden_size"), size("num_attention_heads"), size("vocab_size")
    head_dim, width = size("head_dim", max(hidden // heads, 1)), size("target_hidden_size", hidden)
    return {
        "H": hidden,
        "2H": 2 * hidden,
        "D": width,
        "3D": 3 * width,
        "A": heads * head_dim,
        "G": size("num_key_value_heads", heads) * head_dim,
        "d": head_dim,
        "I": size("intermediate_size"),
        "V": vocab_size,
        "U": size("draft_vocab_size", vocab_size),
        "layers": size("num_hidden_layers"),
    }


def layer_tensors(prefix: str, width: str, missing: Handling) -> list[TensorRule]:
    """Tensors of one llama draft layer whose attention input is `width` wide."""
    shapes = {name: tuple(width if symbol == "X" else symbol for symbol in shape) for name, shape in LAYER.items()}
    return [TensorRule(prefix + name, shape, missing, _norm(name)) for name, shape in shapes.items()]


@dataclass(frozen=True)
class Eagle3Layout:
    """Which tensors an engine reads of an EAGLE-3 head.

    Attributes:
        layers: decoder layers that both config.json and the file have.
        later_norm: what the engine calls the norm of the input of layers above the first.
        qk_norm: whether it norms queries and keys.
        fc_norm: as Eagle3Config's.
    """

    layers: int
    later_norm: str
    qk_norm: bool
    fc_norm: str

    def tensors(self, missing: Handling) -> list[TensorRule]:
        """Rules for all but lm_head, d2t and t2d, which have their own. Args: missing: what the engine does without."""
        norms = [("midlayer.input_layernorm.weight", "H"), ("midlayer.hidden_norm.weight", "H"), ("norm.weight", "H")]
        layers = ["midlayer.", *(f"layers.{n}." for n in range(1, self.layers))]
        norms += [(f"{prefix}{self.later_norm}.weight", "H") for prefix in layers[1:]]
        if self.qk_norm:
            norms += [(f"{prefix}{name}", "d") for prefix in layers for name in QK_NORMS]
        if self.fc_norm == "stream":
            norms += [(f"fc_norm.{n}.weight", "D") for n in range(3)]
        if self.fc_norm == "concat":
            norms.append(("input_norm.weight", "3D"))
        rules = [TensorRule("fc.weight", ("H", "3D"), missing), *layer_tensors("midlayer.", "2H", missing)]
        for prefix in layers[1:]:
            rules += layer_tensors(prefix, "H", missing)
        return rules + [TensorRule(name, (symbol,), missing, _norm(name, missing)) for name, symbol in norms]

    def unread(self) -> set[str]:
        """The other name of the input norm of later layers, which an export writes for other engines."""
        other = "hidden_norm" if self.later_norm == "input_layernorm" else "input_layernorm"
        return {f"layers.{n}.{other}.weight" for n in range(1, self.layers)}


def file_layers(names: Iterable[str]) -> int:
    """How many decoder layers a file of an EAGLE-3 head has, by portable names."""
    later = {match.group(1) for name in names if (match := re.match(r"layers\.(\d+)\.", name))}
    return 1 + len(later - {"0"})


def check_later_norms(case: Case, layout: Eagle3Layout) -> None:
    """Find a later layer whose input norm has other values under the name that other engines read."""
    for n in range(1, layout.layers):
        ours, other = (f"layers.{n}.{name}.weight" for name in ("input_layernorm", "hidden_norm"))
        if not {ours, other} <= set(case.names):
            continue
        one, two = case.raw.read(case.names[ours]), case.raw.read(case.names[other])
        if one.shape != two.shape or not bool((one == two).all()):
            case.misread(
                f"{ours} and {other} differ: this engine reads layers.{n}.{layout.later_norm}, and another engine the "
                "other one. Write the one that was trained under both names"
            )


def fc_norm_of(config: dict[str, Any], legacy: bool = False) -> str:
    """Eagle3Config.fc_norm as vLLM and SGLang read it. Args: legacy: whether `use_aux_norm` is read, too."""
    if eagle_config_of(config).get("norm_before_fc", config.get("norm_before_fc")):
        return "concat"
    return "stream" if config.get("fc_norm") or (legacy and config.get("use_aux_norm")) else "none"


def _norm(name: str, missing: Handling = WRONG) -> str:
    return "the norm stays at ones" if "norm" in name and missing is WRONG else ""


def eagle_tensors(missing: Handling) -> list[TensorRule]:
    """Tensors of an EAGLE-1 head."""
    return [TensorRule("fc.weight", ("H", "2H"), missing), *layer_tensors("layers.0.", "H", missing)]


def eagle_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The nested `eagle_config`, empty where it is missing or no object."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def check_layer(
    case: Case, config: dict[str, Any], other_activation: Handling = REFUSES, layers: int = 1
) -> dict[str, int]:
    """Compare the draft layers' settings with the target's, and with what engines compute.

    Args:
        other_activation: what the engine does with another activation than silu.
        layers: how many the file has.
    Returns: as `llama_sizes`.
    """
    sizes = llama_sizes(config)
    if config.get("hidden_act", "silu") != "silu":
        case.handling.add(other_activation, f"hidden_act is {config['hidden_act']!r}: the draft layer computes silu")
    if sizes["layers"] != layers:
        given = "missing and defaults to " if config.get("num_hidden_layers") is None else ""
        held = "one layer" if layers == 1 else f"{layers} layers"
        what = "no other is filled" if sizes["layers"] > layers else "the others are left out"
        case.misread(f"num_hidden_layers is {given}{sizes['layers']}, the file holds {held}: {what}")
    case.compare_geometry(config)
    case.compare_target(sizes["D"], sizes["V"])
    return sizes


def usual_layers(target: HeadDims | None) -> list[int] | None:
    """The feature layers that engines take where config.json names none; None for an unknown target."""
    return None if target is None else [2, target.num_layers // 2, target.num_layers - 3]


def check_reach(case: Case, ids: list[int]) -> None:
    """Find feature layers that the target does not have, or whose norm differs. Counted as HF `hidden_states`."""
    last = None if case.target is None else case.target.num_layers
    if ids and (min(ids) < 0 or (last is not None and max(ids) > last)):
        case.refuse(f"feature layers {ids} lie outside the target's {'?' if last is None else last} layers")
    elif ids and max(ids) == last:
        case.misread(f"feature layer {last} is the last hidden state: pre-norm in vLLM, post-norm in training")


def check_lm_head(case: Case, sizes: dict[str, int], missing: Handling, why: str) -> None:
    """Compare the head's output matrix with config.json. Args: missing, why: what the engine does without one."""
    shape, expected = case.shape("lm_head.weight"), (sizes["U"], sizes["H"])
    if shape is None:
        case.handling.add(missing, f"lm_head.weight {list(expected)} is missing: {why}")
    elif shape != expected:
        case.refuse(f"lm_head.weight is {list(shape)}, config.json makes it {list(expected)}")


def check_draft_map(case: Case, sizes: dict[str, int], misshapen: Handling = WRONG) -> None:
    """Find faults in d2t, or its absence where U < V. Args: misshapen: what the engine does with a wrong shape."""
    size, vocab_size, shape = sizes["U"], sizes["V"], case.shape("d2t")
    if shape is None and size < vocab_size:
        case.misread(
            f"d2t is missing with draft_vocab_size {size} < vocab_size {vocab_size}: draft ids pass as target ids"
        )
    elif shape not in (None, (size,)):
        case.handling.add(misshapen, f"d2t has shape {list(shape)}, expected [{size}]")
    elif shape is not None and (problem := draft_map_problem(case.raw, case.names, vocab_size)):
        case.misread(problem)


def check_own_embeddings(case: Case, sizes: dict[str, int]) -> None:
    """A head of another width than the target's cannot share the target's embeddings."""
    if sizes["H"] != sizes["D"] and "embed_tokens.weight" not in case.names:
        case.misread(
            f"embed_tokens.weight is missing and hidden_size {sizes['H']} is not the target's: it stays random"
        )


def mask_token_problem(name: str, token: Any, vocab_size: int) -> str | None:
    """What is wrong with the id of the mask token, which stands for tokens still to be drafted; or None."""
    if type(token) is int and 0 <= token < vocab_size:
        return None
    return f"{name} is {token!r}, expected the id of the mask token, below {vocab_size}"
