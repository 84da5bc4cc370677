"""The weights of one of the target's decoder layers, for draft layers that start from them (`head.start_layers`).

Only layers of Llama's and Qwen3's type are copied: two RMSNorms, four projections without bias, a gated MLP, and norms
of queries and keys or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.ends import TargetEnds
from headstart.heads.errors import ConfigError
from headstart.heads.layers import DraftLayer, LaterLayer, RMSNorm
from headstart.heads.numerics import wide
from headstart.heads.targets.locate import decoder_layers, record_layer_inputs, text_decoder

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
NEEDED = {
    *(f"self_attn.{name}.weight" for name in ATTENTION), *(f"mlp.{name}.weight" for name in MLP),
    *(f"{name}.weight" for name in NORMS),
}  # fmt: skip
OPTIONAL = {f"self_attn.{name}.weight" for name in HEAD_NORMS}


#: random tokens whose streams show how large they are
PROBE = 64


def check_start(ends: TargetEnds, numbers: Sequence[int], layers: Sequence[DraftLayer], act: str) -> None:
    """Raise ConfigError unless each draft layer can start from the target's layer of that number.

    The target's weights may be on the meta device.

    Args:
        numbers: `head.start_layers`, one for each of `layers`. act: activation of the draft layers' MLP.
    """
    if ends.model is None:
        raise ConfigError(f"head.start_layers: found {list(numbers)}, but only the ends of the target are loaded")
    if len(numbers) != len(layers):
        raise ConfigError(
            f"head.start_layers: found {list(numbers)}, expected one layer of the target for each of the "
            f"{len(layers)} draft layers (head.layers)"
        )
    config: Any = ends.model.config
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"head.start_layers: found {list(numbers)} with quantised weights, which cannot be copied: set it to null"
        )
    own_act = getattr(config.get_text_config(), "hidden_act", act)
    if own_act != act:
        raise ConfigError(
            f"head.start_layers: found a target whose MLP computes {own_act}, and draft layers that compute {act}; "
            f"a copy would compute something else: set head.start_layers=null, or head.hidden_act={own_act} where the "
            "family has that field"
        )
    for number, layer in zip(numbers, layers, strict=True):
        source = _layer(ends.model, number)
        _check_layer(_parameters(source, number), number, layer)
        _check_factors(source, number, layer)


def start(
    head: Any, numbers: Sequence[int], ends: TargetEnds, hidden_norm: RMSNorm, fc_norm: str = "none"
) -> None:
    """Copy the target's layers `numbers` into the head's draft layers; `fc` passes on the stream nearest to the first.

    A draft layer with more key and value heads gets each of the target's several times, which computes the same. One
    with a wider MLP gets the target's units first; its further units start at random and with zeros in down_proj, so
    that they add nothing until they are trained. One whose attention reads embeddings and features gets the target's
    projections for the features; those of the embeddings keep their random start. Norms of queries and keys that the
    target does not have stay at 1.

    Args:
        head: a Head with `fc` [H, k · H] over the streams of `feature_layers`.
        hidden_norm: of the features before the layers; it becomes the norm that the first of the layers begins with.
        fc_norm: what `fc` reads: the streams as they are (none), each divided by its RMS (stream), or all divided by
            the RMS of all (concat). `fc` makes the stream as large again as it is in the target.
    Raises: ConfigError, see check_start; also where weights are not loaded whole.
    """
    check_start(ends, numbers, head.draft_layers, head.hidden_act)
    for number, layer in zip(numbers, head.draft_layers, strict=True):
        copy_layer(_layer(ends.model, number), number, layer)
    with torch.no_grad():
        hidden_norm.weight.copy_(norm_factor(_layer(ends.model, numbers[0]).input_layernorm))
    first = _index(ends.model, numbers[0])
    nearest = min(head.feature_layers, key=lambda k: abs(k - first))
    divided = {"none": [], "stream": [nearest], "concat": head.feature_layers}[fc_norm]
    size = usual_rms(ends.model, divided) if divided else 1.0
    pass_stream(head.fc, head.feature_layers.index(nearest), size)


@torch.no_grad()
def copy_layer(source: nn.Module, number: int, layer: DraftLayer) -> None:
    """Copy one layer. `input_layernorm` goes into a LaterLayer's; other layers have none."""
    found = _parameters(source, number)
    if any(p.is_meta or hasattr(p, "device_mesh") for p in found.values()):
        raise ConfigError(
            f"head.start_layers: layer {number} of the target is not whole on this device (target.parallel=fsdp2): set "
            "head.start_layers=null, or target.parallel=none"
        )
    attention, hidden = layer.self_attn, layer.hidden_size
    for name in ATTENTION:
        weight: Tensor = found[f"self_attn.{name}.weight"]
        into: Tensor = getattr(attention, name).weight
        if name in ("k_proj", "v_proj"):
            heads = weight.unflatten(0, (-1, attention.head_dim))
            weight = heads.repeat_interleave(attention.kv_heads // heads.shape[0], 0).flatten(0, 1)
        if name != "o_proj":
            into = into[:, into.shape[1] - hidden :]  # the half of the features, or all
        into.copy_(weight)
    units = len(found["mlp.gate_proj.weight"])
    layer.mlp.gate_proj.weight[:units].copy_(found["mlp.gate_proj.weight"])
    layer.mlp.up_proj.weight[:units].copy_(found["mlp.up_proj.weight"])
    layer.mlp.down_proj.weight.zero_()[:, :units].copy_(found["mlp.down_proj.weight"])
    layer.post_attention_layernorm.weight.copy_(norm_factor(source.post_attention_layernorm))
    if isinstance(layer, LaterLayer):
        layer.input_layernorm.weight.copy_(norm_factor(source.input_layernorm))
    for name in HEAD_NORMS:
        if f"self_attn.{name}.weight" in found:
            getattr(attention, name).weight.copy_(norm_factor(getattr(source.self_attn, name)))


@torch.no_grad()
def pass_stream(fc: nn.Linear, number: int, factor: float = 1.0) -> None:
    """Let `fc` [H, k · H] return `factor` times the stream of this number."""
    hidden = fc.out_features
    fc.weight.zero_()
    fc.weight[:, number * hidden : (number + 1) * hidden].fill_diagonal_(factor)


@torch.no_grad()
def usual_rms(model: Any, layer_ids: Sequence[int]) -> float:
    """Root mean square of a row of the inputs of `layer_ids`, side by side: the median over PROBE random tokens.

    A few rows of some targets are a hundred times larger than the others, so a mean would say nothing.
    """
    table = model.get_input_embeddings().weight
    tokens_1T = torch.randint(0, len(table), (1, PROBE), generator=torch.Generator().manual_seed(0)).to(table.device)
    with record_layer_inputs(model, tuple(layer_ids)) as streams:
        text_decoder(model)(input_ids=tokens_1T, use_cache=False)
    squares_kT = torch.stack([wide(streams[k][0].to(table.device)).square().mean(-1) for k in layer_ids])
    return float(squares_kT.mean(0).sqrt().median())


@torch.no_grad()
def norm_factor(norm: Any) -> Tensor:
    """What an RMSNorm multiplies a normed vector with (1 + weight in Gemma's)."""
    factor: Tensor = norm(torch.ones_like(norm.weight))
    return factor


def _index(model: Any, number: int) -> int:
    count = len(decoder_layers(model))
    if not -count <= number < count:
        raise ConfigError(f"head.start_layers: found layer {number}, expected {-count} to {count - 1}")
    return number % count


def _layer(model: Any, number: int) -> Any:
    return decoder_layers(model)[_index(model, number)]


def _parameters(layer: nn.Module, number: int) -> dict[str, nn.Parameter]:
    """A layer's parameters by name. Raises: ConfigError for a layer of another type."""
    found = dict(layer.named_parameters())
    odd = sorted((found.keys() ^ NEEDED) - OPTIONAL)
    if odd:
        raise ConfigError(
            f"head.start_layers: layer {number} of the target is not of Llama's or Qwen3's type (differs in "
            f"{', '.join(odd[:4])}), so draft layers cannot start from it: set head.start_layers=null"
        )
    return found


def _check_layer(found: dict[str, nn.Parameter], number: int, layer: DraftLayer) -> None:
    attention = layer.self_attn
    keys = found["self_attn.k_proj.weight"].shape[0] // attention.head_dim
    if attention.kv_heads % max(keys, 1):
        raise ConfigError(
            f"head.num_key_value_heads: found {attention.kv_heads} with head.start_layers, expected a multiple of the "
            f"target's {keys}"
        )
    own, theirs = layer.hidden_size, found["self_attn.o_proj.weight"].shape[0]
    if own != theirs:
        raise ConfigError(
            f"head.hidden_size: found {own} with head.start_layers, expected the {theirs} of layer {number} of the "
            "target: set head.hidden_size=null, or head.start_layers=null"
        )
    own, theirs = layer.mlp.gate_proj.out_features, found["mlp.gate_proj.weight"].shape[0]
    if own < theirs:
        raise ConfigError(
            f"head.intermediate_size: found {own} with head.start_layers, expected at least the {theirs} of layer "
            f"{number} of the target: set head.intermediate_size=null, or head.start_layers=null"
        )
    if OPTIONAL & found.keys() and attention.q_norm is None:
        raise ConfigError(
            f"head.qk_norm: found false with head.start_layers, but layer {number} of the target norms queries and "
            "keys: set head.qk_norm=true, or head.start_layers=null"
        )


def _check_factors(source: Any, number: int, layer: DraftLayer) -> None:
    """Raises: ConfigError for a layer that scales scores or outputs otherwise than draft layers do (Granite)."""
    usual = layer.self_attn.head_dim**-0.5
    factors = {
        "scores of attention": (getattr(source.self_attn, "scaling", usual), usual),
        "outputs": (getattr(source, "residual_multiplier", 1.0), 1.0),
    }
    for what, (theirs, own) in factors.items():
        if not math.isclose(theirs, own, rel_tol=1e-6):
            raise ConfigError(
                f"head.start_layers: layer {number} of the target multiplies its {what} by {theirs:g}, and draft "
                f"layers by {own:g}: a copy would compute something else: set head.start_layers=null"
            )
